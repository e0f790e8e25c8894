//! Events of the opening of another node's device, on their way to the thread that waits for it.

use super::wire::{OpenFailure, Opened};
use potluck_core::Lock;
use potluck_kernels::autotune::TuneProgress;
use std::sync::{Arc, mpsc};

/// Event during the opening of a device.
pub(super) enum OpenEvent {
    /// There is later progress of autotuning.
    Progress,
    Ended(Result<Opened, OpenFailure>),
}

/// Sending end of an opening. However many reports of progress a node sends, one waits.
pub(super) struct OpenSender {
    sender: mpsc::Sender<OpenEvent>,
    latest: Arc<Lock<Option<TuneProgress>>>,
}

/// Receiving end of an opening.
pub(super) struct OpenReceiver {
    pub events: mpsc::Receiver<OpenEvent>,
    latest: Arc<Lock<Option<TuneProgress>>>,
}

/// Returns both ends of an opening.
pub(super) fn open_events() -> (OpenSender, OpenReceiver) {
    let (sender, events) = mpsc::channel();
    let latest = Arc::new(Lock::new(None));
    (OpenSender { sender, latest: Arc::clone(&latest) }, OpenReceiver { events, latest })
}

impl OpenSender {
    /// Replaces progress that has not been received yet.
    pub fn progress(&self, progress: TuneProgress) {
        let is_waiting = self.latest.lock().replace(progress).is_some();
        if !is_waiting {
            self.send(OpenEvent::Progress);
        }
    }

    pub fn ended(&self, ended: Result<Opened, OpenFailure>) {
        self.send(OpenEvent::Ended(ended));
    }

    fn send(&self, event: OpenEvent) {
        // Fails if the caller no longer waits.
        let _ = self.sender.send(event);
    }
}

impl OpenReceiver {
    /// Takes the latest progress, after [`OpenEvent::Progress`].
    pub fn progress(&self) -> Option<TuneProgress> {
        self.latest.lock().take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn progress(done: usize) -> TuneProgress {
        TuneProgress { done, total: 9, elapsed: Duration::ZERO, compiling: None }
    }

    #[test]
    fn flood_of_progress_leaves_one_event() {
        let (sender, receiver) = open_events();
        for done in 0..1000 {
            sender.progress(progress(done));
        }
        sender.ended(Err(OpenFailure::Other("none".into())));
        assert!(matches!(receiver.events.recv(), Ok(OpenEvent::Progress)));
        assert_eq!(receiver.progress().map(|latest| latest.done), Some(999));
        assert!(matches!(receiver.events.recv(), Ok(OpenEvent::Ended(_))));
    }

    #[test]
    fn progress_after_received_is_told_again() {
        let (sender, receiver) = open_events();
        for done in [1, 2] {
            sender.progress(progress(done));
            assert!(matches!(receiver.events.recv(), Ok(OpenEvent::Progress)));
            assert_eq!(receiver.progress().map(|latest| latest.done), Some(done));
        }
    }
}
