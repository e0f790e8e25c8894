//! Waits for the answers of another node: one that is connected, but neither answers nor shows any
//! progress, is given up.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Looks at the progress of a node per longest silence, and bounds of the time between two.
const LOOKS: u32 = 8;
const LOOK_MIN: Duration = Duration::from_millis(10);
const LOOK_MAX: Duration = Duration::from_millis(500);

/// Shortest [`NodeWatch::patience`] of a run: nodes say only some times per second that they work.
pub const PATIENCE_MIN: Duration = Duration::from_secs(1);

/// Hooks of the layer above for another node, and the patience with it.
pub struct NodeWatch {
    /// Longest time without an answer and without progress.
    pub patience: Duration,
    /// Is called with the signal by which the node was asked to end.
    pub on_signal: Box<dyn Fn(u8) + Send + Sync>,
    /// Is called with the reason for which the node is given up, which follows on its name.
    pub give_up: Box<dyn Fn(&str) + Send + Sync>,
}

/// Reason for which there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoAnswer {
    /// Nobody is there any more who would answer.
    Gone,
    /// There was no progress for the patience.
    Silent,
}

/// Waits for an answer as long as `progress` changes within `patience`.
///
/// # Errors
/// Returns [`NoAnswer`] if it will not come.
pub fn wait_for<T>(
    answer: &Receiver<T>,
    patience: Duration,
    progress: impl Fn() -> u64,
) -> Result<T, NoAnswer> {
    let look = (patience / LOOKS).clamp(LOOK_MIN, LOOK_MAX);
    let (mut seen, mut since) = (progress(), Instant::now());
    loop {
        match answer.recv_timeout(look) {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Disconnected) => return Err(NoAnswer::Gone),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let now = progress();
        if now != seen {
            (seen, since) = (now, Instant::now());
        } else if since.elapsed() >= patience {
            return Err(NoAnswer::Silent);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn an_answer_is_waited_for_as_long_as_there_is_progress() {
        let patience = Duration::from_millis(80);
        let (sender, answer) = channel();
        // Ten looks, each of which finds progress, take longer than the patience.
        let looks = Cell::new(0);
        let progress = || {
            looks.set(looks.get() + 1);
            looks.get().min(20)
        };
        let started = Instant::now();
        assert_eq!(wait_for(&answer, patience, progress), Err(NoAnswer::Silent));
        assert!(started.elapsed() >= 2 * patience, "{:?}", started.elapsed());
        assert!(looks.get() > 20);
        sender.send(3).unwrap();
        assert_eq!(wait_for(&answer, patience, || 0), Ok(3));
        drop(sender);
        assert_eq!(wait_for(&answer, patience, || 0), Err(NoAnswer::Gone));
    }
}
