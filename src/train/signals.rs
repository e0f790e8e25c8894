//! Signal handling: a signal that asks the run to end sets a flag, which is checked between steps
//! and between the jobs of an evaluation, so that the run is saved before it ends.

use std::fmt;
use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

#[cfg(unix)]
use signal_hook::consts::{SIGHUP, SIGUSR1};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{SigId, flag, low_level};

use crate::runtime::error::EXIT_RESTART;

/// Exit code after Ctrl-C, as shells report it.
pub const EXIT_INTERRUPTED: i32 = 130;

/// Signal that asked the run to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interruption {
    /// SIGINT, from Ctrl-C.
    Interrupt,
    /// SIGTERM: the machine is needed for something else; the run may be restarted elsewhere.
    Terminate,
    /// SIGHUP: the terminal or the connection is gone.
    Hangup,
    /// SIGUSR1: a job manager's warning that the time of the job is nearly up.
    TimeLimit,
}

/// Signals that are caught, except for those that are ignored when the process starts.
const CAUGHT: &[(Interruption, i32)] = &[
    (Interruption::Interrupt, SIGINT),
    (Interruption::Terminate, SIGTERM),
    #[cfg(unix)]
    (Interruption::Hangup, SIGHUP),
    #[cfg(unix)]
    (Interruption::TimeLimit, SIGUSR1),
];

impl Interruption {
    /// Returns the exit code of a run that the signal ended.
    pub fn exit_code(self) -> i32 {
        match self {
            Self::Interrupt => EXIT_INTERRUPTED,
            Self::Terminate | Self::Hangup | Self::TimeLimit => EXIT_RESTART,
        }
    }
}

/// Formats the event for the user: "terminated (SIGTERM)".
impl fmt::Display for Interruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Interrupt => "interrupted",
            Self::Terminate => "terminated (SIGTERM)",
            Self::Hangup => "hung up (SIGHUP)",
            Self::TimeLimit => "stopped by the job manager (SIGUSR1)",
        })
    }
}

/// Flags of caught signals, for other threads to look at; the default has none and is never set.
#[derive(Clone, Debug, Default)]
pub struct SignalFlags(Vec<(Interruption, Arc<AtomicBool>)>);

impl SignalFlags {
    /// Returns the signal that arrived, if any; of several, Ctrl-C first.
    pub fn pending(&self) -> Option<Interruption> {
        self.0.iter().find(|(_, flag)| flag.load(Ordering::Relaxed)).map(|(signal, _)| *signal)
    }
}

/// Catches signals from [`Signals::install`] until it is dropped.
#[derive(Debug)]
pub struct Signals {
    flags: SignalFlags,
    handlers: Vec<SigId>,
}

/// Number of live [`Signals`].
static INSTALLED: AtomicUsize = AtomicUsize::new(0);

impl Signals {
    /// Catches the signals of [`Interruption`] from now on, except for those that were ignored when
    /// the process started: `nohup` ignores SIGHUP so that the run outlives its terminal. That is
    /// known on Linux only; elsewhere all are caught. A second Ctrl-C ends the process at once.
    ///
    /// # Errors
    /// Returns an error if the system refuses a handler.
    pub fn install() -> io::Result<Self> {
        let idle = default_while_idle()?;
        INSTALLED.fetch_add(1, Ordering::SeqCst);
        idle.store(false, Ordering::SeqCst);
        let mut signals = Self { flags: SignalFlags::default(), handlers: Vec::new() };
        for (interruption, signal) in caught() {
            let set = Arc::new(AtomicBool::new(false));
            if interruption == Interruption::Interrupt {
                // Registered first: the first Ctrl-C finds the flag unset, and then sets it.
                let exit =
                    flag::register_conditional_shutdown(signal, EXIT_INTERRUPTED, set.clone())?;
                signals.handlers.push(exit);
            }
            signals.handlers.push(flag::register(signal, set.clone())?);
            signals.flags.0.push((interruption, set));
        }
        Ok(signals)
    }

    /// Returns the signal that arrived, if any.
    pub fn pending(&self) -> Option<Interruption> {
        self.flags.pending()
    }

    /// Returns the flags, which stay valid (and unset) after `self` is dropped.
    pub fn flags(&self) -> SignalFlags {
        self.flags.clone()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for handler in self.handlers.drain(..) {
            low_level::unregister(handler);
        }
        if INSTALLED.fetch_sub(1, Ordering::SeqCst) == 1
            && let Ok(idle) = default_while_idle()
        {
            idle.store(true, Ordering::SeqCst);
        }
    }
}

/// Returns the signals to catch.
fn caught() -> impl Iterator<Item = (Interruption, i32)> {
    CAUGHT.iter().copied().filter(|(_, signal)| !is_in(ignored_at_start(), *signal))
}

/// Returns the mask of the signals that were ignored before the first handler was installed; 0
/// where the system does not report it.
fn ignored_at_start() -> u64 {
    static IGNORED: OnceLock<u64> = OnceLock::new();
    *IGNORED.get_or_init(|| {
        fs::read_to_string("/proc/self/status").map_or(0, |status| ignored_mask(&status))
    })
}

/// Parses the mask of ignored signals in the text of `/proc/PID/status`; 0 if it has none.
fn ignored_mask(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Returns true if a mask, whose lowest bit is signal 1, has the signal.
fn is_in(mask: u64, signal: i32) -> bool {
    let bit = u32::try_from(signal - 1).ok().and_then(|bit| mask.checked_shr(bit));
    bit.is_some_and(|rest| rest & 1 == 1)
}

/// Returns the flag that is set while no [`Signals`] is installed. The first call registers, once
/// per process, what the signals do then: their default. Without that, a signal whose handlers
/// are all unregistered would be ignored.
fn default_while_idle() -> io::Result<Arc<AtomicBool>> {
    static IDLE: OnceLock<Result<Arc<AtomicBool>, String>> = OnceLock::new();
    let registered = IDLE.get_or_init(|| {
        let idle = Arc::new(AtomicBool::new(false));
        let register = |(_, signal): (Interruption, i32)| {
            flag::register_conditional_default(signal, idle.clone()).map(|_| ())
        };
        caught().try_for_each(register).map(|()| idle).map_err(|why| why.to_string())
    });
    registered.clone().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, because signals are of the whole process.
    #[test]
    #[cfg(unix)]
    fn signals_are_flags_while_they_are_caught() {
        assert_eq!(SignalFlags::default().pending(), None);
        let first = Signals::install().unwrap();
        let of_first = first.flags();
        drop(first);
        for (interruption, signal) in caught() {
            let signals = Signals::install().unwrap();
            let flags = signals.flags();
            assert_eq!((signals.pending(), flags.pending()), (None, None));
            low_level::raise(signal).unwrap();
            assert_eq!(signals.pending(), Some(interruption));
            assert_eq!(flags.pending(), Some(interruption));
        }
        assert_eq!(of_first.pending(), None, "a dropped handler still runs");
        let codes: Vec<i32> = CAUGHT.iter().map(|(signal, _)| signal.exit_code()).collect();
        assert_eq!(codes, [130, 75, 75, 75]);
    }

    #[test]
    #[cfg(unix)]
    fn ignored_signals_are_read_from_the_status_of_the_process() {
        let status = "Name:\tpotluck\nSigBlk:\t0000000000000002\nSigIgn:\t0000000000001001\n";
        let mask = ignored_mask(status);
        assert!(is_in(mask, SIGHUP) && !is_in(mask, SIGINT) && !is_in(mask, SIGTERM));
        for status in ["", "SigIgn:\tnone\n"] {
            assert_eq!(ignored_mask(status), 0);
        }
        assert!(!is_in(u64::MAX, 0) && is_in(u64::MAX, 64) && !is_in(u64::MAX, 65));
    }
}
