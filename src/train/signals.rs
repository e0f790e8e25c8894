//! Signal handling: a signal that requests the end of the run or a save sets a flag. Flags are
//! checked between steps and between the jobs of an evaluation, so that the run is saved before it
//! ends.

#[cfg(feature = "signals")]
mod handlers;
/// Without the feature `signals`, the program that uses the library handles signals.
#[cfg(not(feature = "signals"))]
mod handlers {
    pub(crate) type Handlers = ();

    pub fn install(_: &mut super::SignalFlags) -> std::io::Result<Handlers> {
        Ok(())
    }
}

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, mem};

use super::error::TrainError;
use crate::runtime::error::EXIT_RESTART;

/// Exit code after Ctrl-C, as in shells.
pub(crate) const EXIT_INTERRUPTED: i32 = 130;

const WATCH_INTERVAL: Duration = Duration::from_millis(50);

/// Ends the process without the exit handlers of GPU drivers: the handlers of a hung device wait
/// for it, and some fail while a thread still runs. No cleanup of potluck is needed: files are
/// synced when they are written.
pub fn leave(code: i32) -> ! {
    // Fails if the pipe is closed, and then the failure cannot be reported.
    let _ = io::stdout().flush();
    #[cfg(all(unix, feature = "signals"))]
    signal_hook::low_level::exit(code);
    #[cfg(not(all(unix, feature = "signals")))]
    std::process::exit(code)
}

/// Signal that requests the end of the run. On Windows, an event of the console.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Interruption {
    /// SIGINT, from Ctrl-C; on Windows also Ctrl-Break.
    Interrupt,
    /// SIGTERM, for example from a job manager, which may restart the run on another machine. On
    /// Windows, the user logs off or the system shuts down.
    Terminate,
    /// SIGHUP: the terminal or the connection was closed; on Windows, the console.
    Hangup,
    /// SIGUSR1: a job manager's warning before the time limit of the job.
    TimeLimit,
}

impl Interruption {
    /// All caught signals.
    pub const ALL: [Self; 4] = [Self::Interrupt, Self::Terminate, Self::Hangup, Self::TimeLimit];

    /// Returns the number of the signal among [`Interruption::ALL`].
    pub fn number(self) -> u8 {
        Self::ALL.iter().position(|one| *one == self).unwrap_or_default() as u8
    }

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
            Self::Terminate if cfg!(windows) => "terminated (logoff or shutdown)",
            Self::Terminate => "terminated (SIGTERM)",
            Self::Hangup if cfg!(windows) => "hung up (the console was closed)",
            Self::Hangup => "hung up (SIGHUP)",
            Self::TimeLimit => "stopped by the job manager (SIGUSR1)",
        })
    }
}

/// Flags of caught signals, for other threads. The default has no flags and is never set.
#[derive(Clone, Debug, Default)]
pub struct SignalFlags {
    raised: Vec<(Interruption, Arc<AtomicBool>)>,
    /// True if SIGUSR1 requests a checkpoint instead of the end.
    usr1_saves: bool,
}

/// Function that raises a signal, given its number in [`Interruption::ALL`].
pub(crate) type RaiseSignal = Arc<dyn Fn(u8) + Send + Sync>;

impl SignalFlags {
    /// Returns flags of all signals, and a function that sets one of them.
    pub(crate) fn raised() -> (Self, RaiseSignal) {
        let raised = Interruption::ALL.map(|signal| (signal, Arc::default())).into();
        let flags = Self { raised, usr1_saves: false };
        let set = flags.clone();
        let raise: RaiseSignal = Arc::new(move |number: u8| {
            if let Some((_, flag)) = set.raised.get(usize::from(number)) {
                flag.store(true, Ordering::Relaxed);
            }
        });
        (flags, raise)
    }

    /// Adds other flags, such as the flags of other nodes.
    pub fn with(mut self, flags: Self) -> Self {
        self.raised.extend(flags.raised);
        self
    }

    /// Returns flags for which SIGUSR1 requests a checkpoint, after which the run continues.
    pub fn saving_on_usr1(self) -> Self {
        Self { usr1_saves: true, ..self }
    }

    /// Returns flags for which SIGUSR1 requests the end, like all other signals.
    pub(crate) fn stopping_on_usr1(self) -> Self {
        Self { usr1_saves: false, ..self }
    }

    /// Returns true if a signal is caught. One that was ignored at the start of the process, as
    /// Ctrl-C is in the background of a script, stays so, here and in processes that it starts.
    pub fn catches(&self, signal: Interruption) -> bool {
        self.raised.iter().any(|(caught, _)| *caught == signal)
    }

    /// Returns a signal that requested the end, if any; Ctrl-C if there are several.
    pub fn pending(&self) -> Option<Interruption> {
        for (signal, flag) in &self.raised {
            let ends = *signal != Interruption::TimeLimit || !self.usr1_saves;
            if ends && flag.load(Ordering::Relaxed) {
                return Some(*signal);
            }
        }
        None
    }

    /// Returns true if SIGUSR1 has requested a checkpoint since the last call.
    pub fn take_save_request(&self) -> bool {
        let mut is_asked = false;
        for (signal, flag) in &self.raised {
            if *signal == Interruption::TimeLimit && self.usr1_saves {
                is_asked |= flag.swap(false, Ordering::Relaxed);
            }
        }
        is_asked
    }

    /// Calls a function in a thread every 50 ms, with the flags, until it breaks.
    ///
    /// # Errors
    /// Returns an error if no thread can be started.
    pub fn watch(
        self,
        mut look: impl FnMut(&Self) -> ControlFlow<()> + Send + 'static,
    ) -> Result<JoinHandle<()>, TrainError> {
        let watching = move || {
            while look(&self).is_continue() {
                thread::sleep(WATCH_INTERVAL);
            }
        };
        let started = thread::Builder::new().name("signals".into()).spawn(watching);
        started.map_err(|why| TrainError::System { what: "a thread", why })
    }

    fn has(&self, wanted: Interruption) -> bool {
        self.raised.iter().any(|(signal, flag)| *signal == wanted && flag.load(Ordering::Relaxed))
    }
}

/// Deadline of a process after SIGTERM, before the sender kills it.
#[derive(Debug)]
pub struct TermDeadline {
    timeout: Duration,
    began: Option<Instant>,
}

impl TermDeadline {
    pub fn new(timeout: Duration) -> Self {
        Self { timeout, began: None }
    }

    /// Returns true if the deadline has passed. Must be called periodically, to observe SIGTERM.
    pub fn is_over(&mut self, flags: &SignalFlags) -> bool {
        if !flags.has(Interruption::Terminate) {
            return false;
        }
        self.began.get_or_insert_with(Instant::now).elapsed() >= self.timeout
    }

    /// Returns the sentence for the user.
    pub fn message(&self) -> String {
        format!(
            "{}, and the run was not saved within {} seconds (--term-timeout); the last \
             checkpoint is as it was",
            Interruption::Terminate,
            self.timeout.as_secs_f64()
        )
    }
}

/// Catches signals from [`Signals::install`] until it is dropped.
#[derive(Debug)]
pub struct Signals {
    flags: SignalFlags,
    /// Handlers, removed when they are dropped.
    _handlers: handlers::Handlers,
}

impl Signals {
    /// Catches the signals of [`Interruption`] from now on, except for those ignored at the start
    /// of the process: `nohup` ignores SIGHUP so that the run continues without its terminal. This
    /// is detected only on Linux; on other systems all are caught. A second Ctrl-C ends the process
    /// immediately. Windows ends it some seconds after the console was closed, even before a save.
    ///
    /// Without the feature `cli` it catches none: the program that uses the library handles them.
    ///
    /// # Errors
    /// Returns an error if the system refuses a handler.
    pub fn install() -> io::Result<Self> {
        let mut flags = SignalFlags::default();
        Ok(Self { _handlers: handlers::install(&mut flags)?, flags })
    }

    /// Catches signals like [`Signals::install`].
    ///
    /// # Errors
    /// Returns `TrainError::System` if the system refuses a handler.
    pub fn caught() -> Result<Self, TrainError> {
        Self::install().map_err(|why| TrainError::System { what: "the handling of signals", why })
    }

    /// Returns the signal to end that arrived, if any.
    pub fn pending(&self) -> Option<Interruption> {
        self.flags.pending()
    }

    /// Returns the flags, which remain valid (and unset) after `self` is dropped.
    pub fn flags(&self) -> SignalFlags {
        self.flags.clone()
    }

    /// Catches signals until the end of the process, so that a second one does not interrupt its
    /// last lines. Returns the flags.
    pub fn until_exit(self) -> SignalFlags {
        let flags = self.flags();
        mem::forget(self);
        flags
    }
}
