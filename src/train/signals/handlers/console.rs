//! Events of a Windows console: Ctrl-C, Ctrl-Break, and the end of the console, the session or the
//! system. The C library reports only some of them as signals, and lets the process end as soon as
//! a handler returns.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use potluck_core::Lock;

use crate::signals::{Interruption, SignalFlags};

/// Event numbers that Windows passes to a handler (`CTRL_C_EVENT` and so on).
const CTRL_C: u32 = 0;
const CTRL_BREAK: u32 = 1;
const CLOSE: u32 = 2;
const LOGOFF: u32 = 5;
const SHUTDOWN: u32 = 6;

/// Signals that correspond to events.
const STOOD_FOR: [Interruption; 3] =
    [Interruption::Interrupt, Interruption::Hangup, Interruption::Terminate];

/// Flags of a [`Listener`], and its number.
type Listening = (u64, Vec<(Interruption, Arc<AtomicBool>)>);

static LISTENING: Lock<Vec<Listening>> = Lock::new(Vec::new());

/// Sets flags at events until it is dropped.
#[derive(Debug)]
pub struct Listener(u64);

impl Listener {
    /// Registers the flags that events set from now on.
    fn new(flags: &mut SignalFlags) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let own = STOOD_FOR.map(|signal| (signal, Arc::<AtomicBool>::default()));
        flags.raised.extend(own.iter().cloned());
        LISTENING.lock().push((number, own.into()));
        Self(number)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        LISTENING.lock().retain(|(number, _)| *number != self.0);
    }
}

/// Response of the process to an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// There is no listener: the process ends, as by default.
    Default,
    /// The flags are set, and the run ends by itself.
    Taken,
    /// Like `Taken`, but Windows ends the process once its handler returns, or after some seconds.
    TakenInHaste,
    /// Second Ctrl-C or Ctrl-Break: the process ends at once.
    Leave,
}

fn interruption(event: u32) -> Option<Interruption> {
    match event {
        CTRL_C | CTRL_BREAK => Some(Interruption::Interrupt),
        CLOSE => Some(Interruption::Hangup),
        LOGOFF | SHUTDOWN => Some(Interruption::Terminate),
        _ => None,
    }
}

/// Sets the flags of the signal that corresponds to an event.
fn take(event: u32) -> Answer {
    let Some(interruption) = interruption(event) else { return Answer::Default };
    let listening = LISTENING.lock();
    let mut was_set = false;
    for (_, flags) in listening.iter() {
        for (_, flag) in flags.iter().filter(|(signal, _)| *signal == interruption) {
            was_set |= flag.swap(true, Ordering::Relaxed);
        }
    }
    match interruption {
        _ if listening.is_empty() => Answer::Default,
        Interruption::Interrupt if was_set => Answer::Leave,
        Interruption::Interrupt => Answer::Taken,
        _ => Answer::TakenInHaste,
    }
}

#[cfg(windows)]
pub use windows::listen;

#[cfg(windows)]
mod windows {
    use std::sync::OnceLock;
    use std::{io, thread};

    use windows_sys::Win32::System::Console::SetConsoleCtrlHandler;
    use windows_sys::core::BOOL;

    use super::{Answer, Listener, SignalFlags, take};
    use crate::signals::EXIT_INTERRUPTED;

    /// Adds flags that events set until the listener is dropped.
    ///
    /// # Errors
    /// Returns an error if the system refuses a handler.
    pub fn listen(flags: &mut SignalFlags) -> io::Result<Listener> {
        static REGISTERED: OnceLock<Result<(), String>> = OnceLock::new();
        let registered = REGISTERED.get_or_init(|| register().map_err(|why| why.to_string()));
        registered.clone().map_err(io::Error::other)?;
        Ok(Listener::new(flags))
    }

    fn register() -> io::Result<()> {
        // SAFETY: the handler is a function, which lives as long as the process.
        match unsafe { SetConsoleCtrlHandler(Some(on_event), 1) } {
            0 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }

    /// Called by Windows in a separate thread.
    unsafe extern "system" fn on_event(event: u32) -> BOOL {
        match take(event) {
            Answer::Default => 0,
            Answer::Taken => 1,
            Answer::TakenInHaste => loop {
                thread::park();
            },
            Answer::Leave => signal_hook::low_level::exit(EXIT_INTERRUPTED),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_signals_while_somebody_listens() {
        assert_eq!(take(CTRL_BREAK), Answer::Default);
        let [mut closed, mut broken] = [SignalFlags::default(), SignalFlags::default()];
        let first = Listener::new(&mut closed);
        assert_eq!(take(CLOSE), Answer::TakenInHaste);
        assert_eq!(closed.pending(), Some(Interruption::Hangup));
        drop(first);

        let second = Listener::new(&mut broken);
        assert_eq!((take(3), broken.pending()), (Answer::Default, None));
        assert_eq!(take(CTRL_BREAK), Answer::Taken);
        assert_eq!(broken.pending(), Some(Interruption::Interrupt));
        assert_eq!(closed.pending(), Some(Interruption::Hangup), "a dropped listener is called");
        assert_eq!(take(CTRL_C), Answer::Leave);
        assert_eq!((take(LOGOFF), take(SHUTDOWN)), (Answer::TakenInHaste, Answer::TakenInHaste));
        drop(second);
        assert_eq!(take(SHUTDOWN), Answer::Default);
    }
}
