//! Measurement of the rate at which a link carries values in one direction.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::{Link, Payload, TAG_BYTES};
use potluck_parallel::planner::links::LinkRate;

/// Tag of values that only measure a link; no frame has it.
const PROBE: [u8; TAG_BYTES] = [0xFF; TAG_BYTES];
/// Minimum and maximum number of bytes per measurement.
const BYTES_MIN: usize = 16 << 10;
pub(super) const BYTES_MAX: usize = 16 << 20;
/// Single bytes that are sent first: the fastest of them measures the time that does not depend on
/// the rate.
const SINGLE_BYTES: usize = 3;
/// Longest wait until the other end has received the sent values.
const ANSWER_MAX: Duration = Duration::from_secs(10);

pub(super) fn is_probe(tag: &[u8; TAG_BYTES]) -> bool {
    *tag == PROBE
}

/// Sends values, twice as many each time, until they take half of `time`, and then as many again;
/// returns the faster of the last two, when QUIC has adapted to the link; `None` if the link ends.
/// For a link that takes longer than [`ANSWER_MAX`], the result is an upper bound.
pub(super) fn measure(link: &Link, time: Duration) -> Option<LinkRate> {
    let mut fixed = Duration::MAX;
    for _ in 0..SINGLE_BYTES {
        fixed = fixed.min(send(link, 1)?);
    }
    // A single byte may wait for a delayed confirmation, which QUIC takes off its own figure; that
    // one is smoothed, and includes earlier waits in queues.
    let round_trip = fixed.min(link.stats().round_trip);
    let mut bytes = BYTES_MIN;
    loop {
        let fixed = fixed.min(ANSWER_MAX / 2);
        let mut took = send(link, bytes)?.saturating_sub(fixed);
        if took >= time / 2 || bytes == BYTES_MAX {
            // A loss halves the rate for some time, so that the faster of two counts.
            if took < ANSWER_MAX / 2 {
                took = took.min(send(link, bytes)?.saturating_sub(fixed));
            }
            // Without a delay, the time may be below the resolution of the clock.
            let seconds = took.as_secs_f64().max(1e-6);
            return Some(LinkRate {
                bytes_per_s: bytes as f64 / seconds,
                round_trip_s: round_trip.as_secs_f64(),
            });
        }
        bytes *= 2;
    }
}

/// Sends `bytes`, and returns the time until the other end has confirmed them, at most
/// [`ANSWER_MAX`]; `None` if the link ends.
fn send(link: &Link, bytes: usize) -> Option<Duration> {
    let (confirmed, confirmation) = mpsc::channel();
    let began = Instant::now();
    let probe = ProbeValues { bytes: vec![0; bytes], _confirmed: confirmed };
    link.send_data(PROBE, Payload::new(probe)).ok()?;
    // Nothing is ever sent there.
    let _ = confirmation.recv_timeout(ANSWER_MAX);
    // Values in flight are dropped with a link.
    if link.has_ended() { None } else { Some(began.elapsed()) }
}

/// Bytes of a probe, dropped when the other end has them: the receiver then has no sender.
struct ProbeValues {
    bytes: Vec<u8>,
    _confirmed: mpsc::Sender<()>,
}

impl AsRef<[u8]> for ProbeValues {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}
