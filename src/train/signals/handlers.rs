//! Handlers of the signals that request the end of a run.

#[cfg(any(windows, test))]
mod console;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::{fs, io};

#[cfg(unix)]
use signal_hook::consts::{SIGHUP, SIGUSR1};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{SigId, flag, low_level};

use super::{EXIT_INTERRUPTED, Interruption, SignalFlags};

/// Signals that are caught, except for those ignored when the process starts.
const CAUGHT: &[(Interruption, i32)] = &[
    (Interruption::Interrupt, SIGINT),
    (Interruption::Terminate, SIGTERM),
    #[cfg(unix)]
    (Interruption::Hangup, SIGHUP),
    #[cfg(unix)]
    (Interruption::TimeLimit, SIGUSR1),
];

/// Installed handlers, which are removed when they are dropped.
#[derive(Debug)]
pub(crate) struct Handlers {
    signals: Vec<SigId>,
    #[cfg(windows)]
    _console: console::Listener,
}

static INSTALLED: AtomicUsize = AtomicUsize::new(0);

/// Installs a handler for each signal to catch, and adds the flag that it sets.
///
/// # Errors
/// Returns an error if the system refuses a handler.
pub fn install(flags: &mut SignalFlags) -> io::Result<Handlers> {
    let idle = default_while_idle()?;
    #[cfg(windows)]
    let console = console::listen(flags)?;
    INSTALLED.fetch_add(1, Ordering::SeqCst);
    idle.store(false, Ordering::SeqCst);
    let mut handlers = Handlers {
        signals: Vec::new(),
        #[cfg(windows)]
        _console: console,
    };
    for (interruption, signal) in caught() {
        let set = Arc::new(AtomicBool::new(false));
        if interruption == Interruption::Interrupt {
            // Registered first: the first Ctrl-C finds the flag unset, and then sets it.
            let exit = flag::register_conditional_shutdown(signal, EXIT_INTERRUPTED, set.clone())?;
            handlers.signals.push(exit);
        }
        handlers.signals.push(flag::register(signal, set.clone())?);
        flags.raised.push((interruption, set));
    }
    Ok(handlers)
}

impl Drop for Handlers {
    fn drop(&mut self) {
        for handler in self.signals.drain(..) {
            low_level::unregister(handler);
        }
        if INSTALLED.fetch_sub(1, Ordering::SeqCst) == 1
            && let Ok(idle) = default_while_idle()
        {
            idle.store(true, Ordering::SeqCst);
        }
    }
}

fn caught() -> impl Iterator<Item = (Interruption, i32)> {
    CAUGHT.iter().copied().filter(|(_, signal)| !is_in(ignored_at_start(), *signal))
}

/// Mask of the signals that were ignored before the first handler was installed; 0 where the system
/// does not report it.
fn ignored_at_start() -> u64 {
    static IGNORED: OnceLock<u64> = OnceLock::new();
    *IGNORED.get_or_init(|| {
        fs::read_to_string("/proc/self/status").map_or(0, |status| ignored_mask(&status))
    })
}

/// Parses the mask of ignored signals in the text of `/proc/PID/status`; 0 if it has none.
fn ignored_mask(status: &str) -> u64 {
    let Some(mask) = status.lines().find_map(|line| line.strip_prefix("SigIgn:")) else {
        return 0;
    };
    u64::from_str_radix(mask.trim(), 16).unwrap_or(0)
}

/// Returns true if a mask, whose lowest bit is signal 1, has the signal.
fn is_in(mask: u64, signal: i32) -> bool {
    let Ok(bit) = u32::try_from(signal - 1) else { return false };
    mask.checked_shr(bit).is_some_and(|rest| rest & 1 == 1)
}

/// Flag that is set while there are no [`Handlers`]. The first call registers, once per process,
/// the default action of the signals in that state. Otherwise a signal whose handlers are all
/// unregistered would be ignored.
fn default_while_idle() -> io::Result<Arc<AtomicBool>> {
    static IDLE: OnceLock<Result<Arc<AtomicBool>, String>> = OnceLock::new();
    let registered = IDLE.get_or_init(|| register_default().map_err(|why| why.to_string()));
    registered.clone().map_err(io::Error::other)
}

/// Registers the default action of the signals, taken while a new flag is set.
fn register_default() -> io::Result<Arc<AtomicBool>> {
    let idle = Arc::new(AtomicBool::new(false));
    for (_, signal) in caught() {
        flag::register_conditional_default(signal, idle.clone())?;
    }
    Ok(idle)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signals::Signals;
    use potluck_core::faults::{Fault, Faults, Point};

    /// A single test, because signals affect the whole process.
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
        let (faults, signals) = ("sigterm@update:1".parse::<Faults>(), Signals::install());
        assert_eq!(faults.unwrap().at(Point::Update, 1), Some(Fault::Sigterm));
        assert_eq!(signals.unwrap().pending(), Some(Interruption::Terminate));
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
