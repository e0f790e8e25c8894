//! Signal handling: Ctrl-C and SIGTERM are checked between steps, so that the run is saved before
//! it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Exit code after Ctrl-C, as shells report it.
pub const EXIT_INTERRUPTED: i32 = 130;

/// Signal that asked the run to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interruption {
    /// SIGINT, from Ctrl-C.
    Interrupt,
    /// SIGTERM: the machine is needed for something else; the run may be restarted elsewhere.
    Terminate,
}

/// Flags of the signals that arrived since [`Signals::install`].
#[derive(Clone, Debug, Default)]
pub struct Signals {
    interrupt: Arc<AtomicBool>,
    terminate: Arc<AtomicBool>,
}

impl Signals {
    /// Catches both signals from now on. A second Ctrl-C ends the process at once.
    pub fn install() -> std::io::Result<Self> {
        let signals = Self::default();
        // Registered in this order: the first Ctrl-C finds the flag unset, and then sets it.
        flag::register_conditional_shutdown(SIGINT, EXIT_INTERRUPTED, signals.interrupt.clone())?;
        flag::register(SIGINT, signals.interrupt.clone())?;
        flag::register(SIGTERM, signals.terminate.clone())?;
        Ok(signals)
    }

    /// Returns the signal that arrived, if any.
    pub fn pending(&self) -> Option<Interruption> {
        if self.interrupt.load(Ordering::Relaxed) {
            Some(Interruption::Interrupt)
        } else if self.terminate.load(Ordering::Relaxed) {
            Some(Interruption::Terminate)
        } else {
            None
        }
    }
}
