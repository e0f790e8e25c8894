//! Signal handling: a signal that asks the run to end, or to be saved, sets a flag, which is
//! checked between steps and between the jobs of an evaluation, so that the run is saved before it
//! ends.

#[cfg(feature = "signals")]
mod handlers;
/// Stand-in without the feature `signals`: signals are up to the program that uses the library.
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

/// Exit code after Ctrl-C, as shells report it.
pub(crate) const EXIT_INTERRUPTED: i32 = 130;

/// Time between two looks for a signal.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);

/// Ends the process without running the exit handlers of GPU drivers: those of a hung device wait
/// for it, and some fail while a thread still runs. No cleanup of potluck is skipped: files are
/// synced when they are written.
pub fn leave(code: i32) -> ! {
    // Fails if the reader of the pipe is gone; there is no other place to report to.
    let _ = io::stdout().flush();
    #[cfg(all(unix, feature = "signals"))]
    signal_hook::low_level::exit(code);
    #[cfg(not(all(unix, feature = "signals")))]
    std::process::exit(code)
}

/// Signal that asked the run to end. On Windows, events of the console stand for signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Interruption {
    /// SIGINT, from Ctrl-C; on Windows also Ctrl-Break.
    Interrupt,
    /// SIGTERM: the machine is needed for something else; the run may be restarted elsewhere.
    /// On Windows, the user logs off or the system shuts down.
    Terminate,
    /// SIGHUP: the terminal or the connection is gone; on Windows, the console was closed.
    Hangup,
    /// SIGUSR1: a job manager's warning that the time of the job is nearly up.
    TimeLimit,
}

impl Interruption {
    /// All signals that are caught.
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

/// Flags of caught signals, for other threads to look at; the default has none and is never set.
#[derive(Clone, Debug, Default)]
pub struct SignalFlags {
    raised: Vec<(Interruption, Arc<AtomicBool>)>,
    /// True if SIGUSR1 asks for a checkpoint, and not for the end.
    usr1_saves: bool,
}

/// Function that raises a signal, by its number among [`Interruption::ALL`].
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

    /// Adds flags that are set elsewhere, such as on other nodes.
    pub fn with(mut self, flags: Self) -> Self {
        self.raised.extend(flags.raised);
        self
    }

    /// Takes SIGUSR1 for the wish for a checkpoint, behind which the run goes on.
    pub fn saving_on_usr1(self) -> Self {
        Self { usr1_saves: true, ..self }
    }

    /// Takes SIGUSR1 for the wish for the end, like all others.
    pub(crate) fn stopping_on_usr1(self) -> Self {
        Self { usr1_saves: false, ..self }
    }

    /// Returns the signal to end that arrived, if any; of several, Ctrl-C first.
    pub fn pending(&self) -> Option<Interruption> {
        for (signal, flag) in &self.raised {
            let ends = *signal != Interruption::TimeLimit || !self.usr1_saves;
            if ends && flag.load(Ordering::Relaxed) {
                return Some(*signal);
            }
        }
        None
    }

    /// Returns true if SIGUSR1 asked for a checkpoint since the last call.
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

/// Time that is left to a process after SIGTERM: who sent it ends the process by force soon.
#[derive(Debug)]
pub struct TermDeadline {
    timeout: Duration,
    began: Option<Instant>,
}

impl TermDeadline {
    pub fn new(timeout: Duration) -> Self {
        Self { timeout, began: None }
    }

    /// Returns true once SIGTERM was seen for so long. To be called again and again.
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
    /// Removed when they are dropped.
    _handlers: handlers::Handlers,
}

impl Signals {
    /// Catches the signals of [`Interruption`] from now on, except for those that were ignored when
    /// the process started: `nohup` ignores SIGHUP so that the run outlives its terminal. That is
    /// known on Linux only; elsewhere all are caught. A second Ctrl-C ends the process at once.
    /// Windows itself ends it some seconds after the console was closed, saved or not.
    ///
    /// Without the feature `cli` it catches none: signals are then up to the program that uses the
    /// library.
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

    /// Returns the flags, which stay valid (and unset) after `self` is dropped.
    pub fn flags(&self) -> SignalFlags {
        self.flags.clone()
    }

    /// Catches signals until the process ends, so that none that comes twice ends it in the middle
    /// of its last lines. Returns the flags.
    pub fn until_exit(self) -> SignalFlags {
        let flags = self.flags();
        mem::forget(self);
        flags
    }
}
