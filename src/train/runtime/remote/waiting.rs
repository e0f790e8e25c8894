//! Waits for the answers of another node: a connected node that neither answers nor makes progress
//! is abandoned.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Number of checks for progress per longest silence of a node, and bounds of the time between two.
const POLLS_PER_TIMEOUT: u32 = 8;
const POLL_MIN: Duration = Duration::from_millis(10);
const POLL_MAX: Duration = Duration::from_millis(500);

/// Shortest [`NodeLiveness::answer_timeout`] of a run: nodes report progress only a few times per
/// second.
pub(crate) const ANSWER_TIMEOUT_MIN: Duration = Duration::from_secs(1);

/// Callbacks of the layer above for another node, and the timeout of its answers.
pub struct NodeLiveness {
    /// Longest time without an answer and without progress.
    pub(crate) answer_timeout: Duration,
    /// Called with a signal that the node received.
    pub(crate) on_signal: Box<dyn Fn(u8) + Send + Sync>,
    /// Called with the reason if the node is abandoned, which follows its name in messages.
    pub give_up: Box<dyn Fn(&str) + Send + Sync>,
}

/// Reason for a missing answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RpcError {
    /// The sender of the answer was dropped.
    Gone,
    /// There was no progress during the timeout.
    Silent,
}

/// Waits for an answer while `progress` changes within `answer_timeout`.
///
/// # Errors
/// Returns [`RpcError`] without an answer.
pub fn wait_for<T>(
    answer: &Receiver<T>,
    answer_timeout: Duration,
    progress: impl Fn() -> u64,
) -> Result<T, RpcError> {
    let look = (answer_timeout / POLLS_PER_TIMEOUT).clamp(POLL_MIN, POLL_MAX);
    let mut seen = progress();
    let mut since = Instant::now();
    loop {
        match answer.recv_timeout(look) {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Disconnected) => return Err(RpcError::Gone),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let now = progress();
        if now != seen {
            seen = now;
            since = Instant::now();
        } else if since.elapsed() >= answer_timeout {
            return Err(RpcError::Silent);
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
        let answer_timeout = Duration::from_millis(80);
        let (sender, answer) = channel();
        // Ten polls, each with progress, take longer than the timeout.
        let looks = Cell::new(0);
        let progress = || {
            looks.set(looks.get() + 1);
            looks.get().min(20)
        };
        let started = Instant::now();
        assert_eq!(wait_for(&answer, answer_timeout, progress), Err(RpcError::Silent));
        assert!(started.elapsed() >= 2 * answer_timeout, "{:?}", started.elapsed());
        assert!(looks.get() > 20);
        sender.send(3).unwrap();
        assert_eq!(wait_for(&answer, answer_timeout, || 0), Ok(3));
        drop(sender);
        assert_eq!(wait_for(&answer, answer_timeout, || 0), Err(RpcError::Gone));
    }
}
