//! Measurement of the rate at which a link carries values in one direction: by their confirmations
//! at the sender, and by their arrivals at the receiver. Confirmations wait behind values of the
//! other direction, for a time that grows or shrinks during the measurement.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::endpoint_options::cores;
use crate::{Link, Payload, ReceiveBuffer, TAG_BYTES};
use potluck_core::Lock;
use potluck_parallel::planner::links::LinkRate;

/// Tag of values that only measure a link; no frame has it.
const PROBE: [u8; TAG_BYTES] = [0xFF; TAG_BYTES];
/// Minimum and maximum number of bytes per measurement.
const BYTES_MIN: usize = 16 << 10;
pub(super) const BYTES_MAX: usize = 16 << 20;
/// Single bytes that are sent first: the fastest of them measures the time that does not depend on
/// the rate.
const SINGLE_BYTES: usize = 3;
/// Sends one behind the other whose rate is measured, each of a quarter of the bytes that took half
/// of the time before. All of them fit the queue of a link.
const SENDS: usize = 16;
/// Ends of sends that count. Nothing follows the last send, so that QUIC finds a loss there only
/// after a timeout.
const ENDS: usize = SENDS - 1;
const PARTS: usize = 4;
/// Longest wait until the other end has received the sent values.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Longest wait until confirmed values are read, and time between two looks.
const READ_MAX: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(2);

pub(super) fn is_probe(tag: &[u8; TAG_BYTES]) -> bool {
    *tag == PROBE
}

/// Sends values, twice as many each time, until they take half of `time`, and then four times as
/// many in [`SENDS`] parts without a pause, as QUIC has adapted to the link by then; `None` if the
/// link ends.
/// The processor time is that of the process while it sends: of a ring of nodes, which all measure
/// at the same time, each also receives about as much.
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
        let took = send(link, bytes)?.saturating_sub(fixed);
        if took >= ANSWER_MAX / 2 {
            return Some(rate(bytes, took, round_trip, 0.0));
        }
        if took >= time / 2 || bytes == BYTES_MAX {
            let part = bytes / PARTS;
            let before = processor_time();
            let ends = send_all(link, part)?;
            let used = processor_time().saturating_sub(before);
            let processor = processor_s_per_byte(used, SENDS * part, cores());
            return Some(rate(part, interval(&ends[..ENDS]), round_trip, processor));
        }
        bytes *= 2;
    }
}

fn rate(bytes: usize, took: Duration, round_trip: Duration, processor_s_per_byte: f64) -> LinkRate {
    LinkRate {
        bytes_per_s: bytes_per_s(bytes, took),
        round_trip_s: round_trip.as_secs_f64(),
        processor_s_per_byte,
    }
}

fn bytes_per_s(bytes: usize, took: Duration) -> f64 {
    // Without a delay, the time may be below the resolution of the clock.
    bytes as f64 / took.as_secs_f64().max(1e-6)
}

/// Arrivals of the other node's probes: the latest run of equal length.
#[derive(Debug, Default)]
pub(super) struct ProbeArrivals {
    bytes: usize,
    ends: Vec<Instant>,
}

impl ProbeArrivals {
    fn add(&mut self, bytes: usize, at: Instant) {
        if bytes != self.bytes {
            *self = Self { bytes, ends: Vec::with_capacity(SENDS) };
        }
        if self.ends.len() < SENDS {
            self.ends.push(at);
        }
    }

    /// Returns the bytes per second at which [`ENDS`] probes have arrived one behind the other, and
    /// forgets them; `None` if fewer have.
    fn take_rate(&mut self) -> Option<f64> {
        let ends = self.ends.get(..ENDS)?;
        let rate = bytes_per_s(self.bytes, interval(ends));
        *self = Self::default();
        Some(rate)
    }
}

/// Returns the bytes per second at which the probes of a measurement have arrived, which the sender
/// knows to be confirmed: they may still have to be read. `None` if too few of them come.
pub(super) fn take_arrival_rate(arrivals: &Lock<ProbeArrivals>) -> Option<f64> {
    let until = Instant::now() + READ_MAX;
    loop {
        let mut arrivals = arrivals.lock();
        let rate = arrivals.take_rate();
        let is_measured = !arrivals.ends.is_empty();
        drop(arrivals);
        if rate.is_some() || !is_measured || Instant::now() >= until {
            return rate;
        }
        thread::sleep(LOOK);
    }
}

/// Place of the values of a probe. Their arrival is counted.
pub(super) struct ProbeBuffer {
    pub(super) values: Vec<u8>,
    pub(super) arrivals: Arc<Lock<ProbeArrivals>>,
}

impl ReceiveBuffer for ProbeBuffer {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.values
    }

    fn arrived(self: Box<Self>) -> Result<(), String> {
        self.arrivals.lock().add(self.values.len(), Instant::now());
        Ok(())
    }
}

/// Returns the time between the ends of two sends that follow each other: the median of the slopes
/// over all pairs of ends (Theil 1950, Sen 1968). A loss holds up the ends behind it until the
/// bytes have come again, which then come together.
fn interval(ends: &[Instant]) -> Duration {
    let mut intervals = Vec::new();
    for (first, earlier) in ends.iter().enumerate() {
        for (last, later) in ends.iter().enumerate().skip(first + 1) {
            intervals.push(later.saturating_duration_since(*earlier) / (last - first) as u32);
        }
    }
    intervals.sort_unstable();
    intervals[intervals.len() / 2]
}

/// Seconds of all cores per byte, of a time of one of them.
fn processor_s_per_byte(used: Duration, bytes: usize, cores: usize) -> f64 {
    used.as_secs_f64() / (bytes * cores) as f64
}

/// Processor time of this process so far; 0 where the system does not tell it.
#[cfg(unix)]
fn processor_time() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(not(unix))]
fn processor_time() -> Duration {
    Duration::ZERO
}

/// Sends `bytes`, and returns the time until the other end has confirmed them, at most
/// [`ANSWER_MAX`]; `None` if the link ends.
fn send(link: &Link, bytes: usize) -> Option<Duration> {
    let began = Instant::now();
    let confirmation = begin(link, &Arc::new(vec![0; bytes]))?;
    Some(end_of(link, &confirmation)? - began)
}

/// Sends `bytes` [`SENDS`] times, one behind the other, and returns when the other end has
/// confirmed each, in the order in which they were sent; `None` if the link ends.
fn send_all(link: &Link, bytes: usize) -> Option<[Instant; SENDS]> {
    let bytes = Arc::new(vec![0; bytes]);
    let mut confirmations = Vec::with_capacity(SENDS);
    for _ in 0..SENDS {
        confirmations.push(begin(link, &bytes)?);
    }
    let mut ends = [Instant::now(); SENDS];
    for (end, confirmation) in ends.iter_mut().zip(&confirmations) {
        *end = end_of(link, confirmation)?;
    }
    Some(ends)
}

/// Begins to send bytes, and returns what receives the time at which the other end has them.
fn begin(link: &Link, bytes: &Arc<Vec<u8>>) -> Option<mpsc::Receiver<Instant>> {
    let (confirmed, confirmation) = mpsc::channel();
    let probe = ProbeValues { bytes: bytes.clone(), confirmed };
    link.send_data(PROBE, Payload::new(probe)).ok()?;
    Some(confirmation)
}

/// Waits until the other end has what was sent, at most [`ANSWER_MAX`], and returns when that was;
/// `None` if the link ends.
fn end_of(link: &Link, confirmation: &mpsc::Receiver<Instant>) -> Option<Instant> {
    let end = confirmation.recv_timeout(ANSWER_MAX).unwrap_or_else(|_| Instant::now());
    // Values in flight are dropped with a link.
    if link.has_ended() { None } else { Some(end) }
}

/// Bytes of a probe, dropped when the other end has them.
struct ProbeValues {
    bytes: Arc<Vec<u8>>,
    confirmed: mpsc::Sender<Instant>,
}

impl Drop for ProbeValues {
    fn drop(&mut self) {
        // Nobody waits for it any more after a timeout.
        let _ = self.confirmed.send(Instant::now());
    }
}

impl AsRef<[u8]> for ProbeValues {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::test_peer::{linked, node, secret};
    use crate::{CloseReason, ReceiveBuffer, Receiver};

    /// Takes probes of any length, and counts their arrivals.
    #[derive(Default)]
    struct Taker(Arc<Lock<ProbeArrivals>>);

    impl Receiver for Taker {
        fn control(&self, _: Vec<u8>) -> Result<(), String> {
            Err("no message is due".into())
        }

        fn blob_begins(&self, _: u64, _: usize) -> Result<(), String> {
            Err("no blob is due".into())
        }

        fn blob(&self, _: u64, _: Vec<u8>) -> Result<(), String> {
            Err("no blob is due".into())
        }

        fn data(&self, tag: &[u8; TAG_BYTES], n: usize) -> Result<Box<dyn ReceiveBuffer>, String> {
            assert!(is_probe(tag) && n <= BYTES_MAX);
            Ok(Box::new(ProbeBuffer { values: vec![0; n], arrivals: self.0.clone() }))
        }

        fn closed(&self, _: &CloseReason) {}
    }

    #[test]
    fn rate_of_loopback_has_what_the_processor_takes_for_it() {
        let secret = secret();
        let (dialing, accepting) = (node(&secret), node(&secret));
        let takers = [Arc::new(Taker::default()), Arc::new(Taker::default())];
        let arrivals = takers[1].0.clone();
        let links = linked([&dialing, &accepting], accepting.local_addr(), takers);
        let rate = measure(&links[0], Duration::from_millis(100)).unwrap();
        assert!(rate.checked().is_some(), "{rate:?}");
        // A program in debug mode on a busy machine, and one with hardware for AES.
        assert!((1e6..1e11).contains(&rate.bytes_per_s), "{rate:?}");
        // No other direction holds confirmations up.
        let arrived = take_arrival_rate(&arrivals).unwrap();
        assert!((0.1..10.0).contains(&(arrived / rate.bytes_per_s)), "{arrived} and {rate:?}");
        if cfg!(unix) {
            let of_a_core = rate.processor_s_per_byte * cores() as f64;
            // From a tenth of a cycle to a thousand in debug mode, for each byte.
            assert!((1e-11..1e-6).contains(&of_a_core), "{rate:?}");
        } else {
            assert_eq!(rate.processor_s_per_byte, 0.0);
        }
    }

    #[test]
    fn arrivals_have_a_rate_once_all_of_a_measurement_are_there() {
        let mut arrivals = ProbeArrivals::default();
        let began = Instant::now();
        let at = |nth: usize| began + Duration::from_millis(10 * nth as u64);
        assert_eq!(arrivals.take_rate(), None);
        for bytes in [1, 1, 4000] {
            arrivals.add(bytes, began);
        }
        for nth in 0..ENDS - 1 {
            arrivals.add(1000, at(nth));
        }
        assert_eq!(arrivals.take_rate(), None, "one is missing");
        for nth in ENDS - 1..SENDS + 3 {
            arrivals.add(1000, at(nth));
        }
        let rate = arrivals.take_rate().unwrap();
        assert!((rate - 1e5).abs() < 1.0, "{rate}");
        assert_eq!(arrivals.take_rate(), None, "it was taken");
    }

    /// A loss in the middle, at the beginning, and at the end, where it is found late.
    #[test]
    fn losses_do_not_change_the_interval_of_sends() {
        let began = Instant::now();
        let ends: [Instant; SENDS] =
            std::array::from_fn(|nth| began + Duration::from_millis(10 * nth as u64));
        assert_eq!(interval(&ends[..ENDS]), Duration::from_millis(10));
        for held_up in [0..4, 5..9, 12..15, 15..16] {
            let mut lossy = ends;
            let found = ends[held_up.end - 1] + Duration::from_millis(5);
            lossy[held_up].fill(found);
            assert_eq!(interval(&lossy[..ENDS]), Duration::from_millis(10));
        }
    }

    #[test]
    fn processor_time_is_that_of_all_cores() {
        assert_eq!(processor_s_per_byte(Duration::from_secs(8), 1000, 4), 2e-3);
    }
}
