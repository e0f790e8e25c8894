//! Heartbeats of one connection: the time of the next one, and the silence of the peer.

use super::bounds::NODE_TIMEOUT_MAX;
use potluck_core::Nanos;

/// Heartbeats per longest silence; [`INTERVAL_MAX`] bounds the time between two.
const BEATS_PER_TIMEOUT: Nanos = 6;
const INTERVAL_MAX: Nanos = 1_000_000_000;

/// Returns the time between two heartbeats for a longest silence.
pub fn heartbeat_interval(node_timeout: Nanos) -> Nanos {
    (node_timeout / BEATS_PER_TIMEOUT).clamp(1, INTERVAL_MAX)
}

/// Heartbeats to and from one peer.
#[derive(Debug)]
pub(crate) struct HeartbeatTimer {
    timeout: Nanos,
    heard_at: Nanos,
    send_at: Nanos,
    sent: u64,
    received: u64,
}

impl HeartbeatTimer {
    /// Creates the pulse of a peer that was heard at the time `now`.
    pub fn new(timeout: Nanos, now: Nanos) -> Self {
        let timeout = timeout.min(NODE_TIMEOUT_MAX);
        let send_at = now.saturating_add(heartbeat_interval(timeout));
        Self { timeout, heard_at: now, send_at, sent: 0, received: 0 }
    }

    /// Records a sign of life.
    pub fn heard(&mut self, now: Nanos) {
        self.heard_at = self.heard_at.max(now);
    }

    /// Returns the time of the last sign of life.
    pub fn heard_at(&self) -> Nanos {
        self.heard_at
    }

    /// Records a heartbeat. Returns the expected number as the error if it is another one.
    pub fn receive(&mut self, sequence: u64) -> Result<(), u64> {
        let expected = self.received + 1;
        if sequence != expected {
            return Err(expected);
        }
        self.received = expected;
        Ok(())
    }

    /// Returns the number of heartbeats received.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Returns the number of the heartbeat to send, if one is due. After a late heartbeat, the next
    /// ones keep their interval.
    pub fn beat(&mut self, now: Nanos) -> Option<u64> {
        if now < self.send_at {
            return None;
        }
        self.send_at = now.saturating_add(heartbeat_interval(self.timeout));
        self.sent += 1;
        Some(self.sent)
    }

    /// Returns the duration of the peer's silence.
    pub fn silence(&self, now: Nanos) -> Nanos {
        now.saturating_sub(self.heard_at)
    }

    pub fn is_silent(&self, now: Nanos) -> bool {
        now >= self.silent_at()
    }

    /// Time from which on the peer counts as silent.
    pub(crate) fn silent_at(&self) -> Nanos {
        self.heard_at.saturating_add(self.timeout)
    }

    /// Returns the time of the next heartbeat or of the end of the peer's silence.
    pub fn deadline(&self) -> Nanos {
        self.send_at.min(self.silent_at())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Nanos = 1_000_000_000;

    #[test]
    fn six_heartbeats_fit_a_timeout_and_one_is_sent_every_second_at_least() {
        assert_eq!(heartbeat_interval(600), 100);
        assert_eq!(heartbeat_interval(60 * SECOND), SECOND);
        let mut heartbeat_timer = HeartbeatTimer::new(600, 1000);
        assert_eq!((heartbeat_timer.beat(1099), heartbeat_timer.deadline()), (None, 1100));
        assert_eq!(heartbeat_timer.beat(1100), Some(1));
        assert_eq!(
            (heartbeat_timer.beat(1150), heartbeat_timer.beat(1390), heartbeat_timer.beat(1400)),
            (None, Some(2), None)
        );
        assert_eq!(heartbeat_timer.deadline(), 1490);
    }

    #[test]
    fn a_peer_is_silent_at_the_timeout_after_it_was_last_heard() {
        let mut heartbeat_timer = HeartbeatTimer::new(600, 1000);
        assert!(!heartbeat_timer.is_silent(1599) && heartbeat_timer.is_silent(1600));
        heartbeat_timer.heard(1500);
        assert!(!heartbeat_timer.is_silent(2099) && heartbeat_timer.is_silent(2100));
        heartbeat_timer.beat(2050);
        assert_eq!(heartbeat_timer.deadline(), 2100);
        assert_eq!(
            (heartbeat_timer.receive(1), heartbeat_timer.receive(3), heartbeat_timer.receive(1)),
            (Ok(()), Err(2), Err(2))
        );
    }
}
