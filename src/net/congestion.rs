//! Congestion control of a connection: the one that was chosen, which a hole in the network cannot
//! silence.
//!
//! While nothing is acknowledged, a full window leaves QUIC only the probes of its timeout, at
//! intervals that double (RFC 9002, section 6.2.1): after a hole of 30 s the next one may be as far
//! away again, and the peer counts as lost by then. Here the window opens for a datagram now and
//! then, so that a heartbeat passes soon after the network is back; its acknowledgement makes QUIC
//! send the rest again. A datagram that passes so has the size of the others, where QUIC's own
//! probes have the smallest: a network that comes back with a smaller limit of datagrams after more
//! than a second ends the link.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn::congestion::{BbrConfig, Controller, ControllerFactory, ControllerMetrics, CubicConfig};
use quinn_proto::RttEstimator;

use super::endpoint_options::Congestion;

/// First congestion window: nodes are in data centers or homes, not on phones.
const WINDOW_START: u64 = 256 << 10;
/// Time without an acknowledgement, and then between two datagrams, after which the window opens
/// for another one. Below the second between two heartbeats, so that each of them passes.
const WINDOW_INTERVAL: Duration = Duration::from_millis(500);

/// Returns the factory of a connection's controller.
pub(crate) fn controllers(congestion: Congestion) -> Arc<dyn ControllerFactory + Send + Sync> {
    let chosen: Arc<dyn ControllerFactory + Send + Sync> = match congestion {
        Congestion::Cubic => {
            let mut cubic = CubicConfig::default();
            cubic.initial_window(WINDOW_START);
            Arc::new(cubic)
        }
        Congestion::Bbr => {
            let mut bbr = BbrConfig::default();
            bbr.initial_window(WINDOW_START);
            Arc::new(bbr)
        }
    };
    Arc::new(ProbingConfig(chosen))
}

/// Makes controllers that a hole cannot silence.
struct ProbingConfig(Arc<dyn ControllerFactory + Send + Sync>);

impl ControllerFactory for ProbingConfig {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        Box::new(Probing {
            chosen: self.0.clone().build(now, current_mtu),
            datagram_bytes: current_mtu.into(),
            in_flight: 0,
            unanswered: None,
        })
    }
}

/// Controller whose window opens for a datagram while nothing is acknowledged.
struct Probing {
    chosen: Box<dyn Controller>,
    datagram_bytes: u64,
    /// Most bytes that may be in flight: those at the last acknowledgement and all since, packets
    /// that only acknowledge among them. So the first datagrams after a pause of a side that mostly
    /// receives may be more than one: as many as QUIC hands to the system at once.
    in_flight: u64,
    unanswered: Option<Unanswered>,
}

/// Sending since the last acknowledgement.
#[derive(Clone, Copy)]
struct Unanswered {
    first: Instant,
    last: Instant,
}

impl Probing {
    fn window_at(&self, now: Instant) -> u64 {
        let window = self.chosen.window();
        let is_due = self.unanswered.is_some_and(|Unanswered { first, last }| {
            now.duration_since(first) >= WINDOW_INTERVAL
                && now.duration_since(last) >= WINDOW_INTERVAL
        });
        if !is_due {
            return window;
        }
        // QUIC sends while a datagram more stays below the window.
        window.max(self.in_flight.saturating_add(2 * self.datagram_bytes))
    }
}

impl Controller for Probing {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        self.in_flight = self.in_flight.saturating_add(bytes);
        let first = self.unanswered.map_or(now, |unanswered| unanswered.first);
        self.unanswered = Some(Unanswered { first, last: now });
        self.chosen.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(
        &mut self,
        now: Instant,
        sent: Instant,
        bytes: u64,
        app_limited: bool,
        rtt: &RttEstimator,
    ) {
        self.chosen.on_ack(now, sent, bytes, app_limited, rtt);
    }

    fn on_end_acks(
        &mut self,
        now: Instant,
        in_flight: u64,
        app_limited: bool,
        largest_packet_num_acked: Option<u64>,
    ) {
        self.in_flight = in_flight;
        self.unanswered = None;
        self.chosen.on_end_acks(now, in_flight, app_limited, largest_packet_num_acked);
    }

    fn on_congestion_event(
        &mut self,
        now: Instant,
        sent: Instant,
        is_persistent_congestion: bool,
        lost_bytes: u64,
    ) {
        self.in_flight = self.in_flight.saturating_sub(lost_bytes);
        self.chosen.on_congestion_event(now, sent, is_persistent_congestion, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.datagram_bytes = new_mtu.into();
        self.chosen.on_mtu_update(new_mtu);
    }

    fn window(&self) -> u64 {
        self.window_at(Instant::now())
    }

    fn metrics(&self) -> ControllerMetrics {
        self.chosen.metrics()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self { chosen: self.chosen.clone_box(), ..*self })
    }

    fn initial_window(&self) -> u64 {
        self.chosen.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MTU: u16 = 1200;

    fn controller(now: Instant) -> Box<Probing> {
        let built = Arc::new(ProbingConfig(Arc::new(CubicConfig::default()))).build(now, MTU);
        built.into_any().downcast().unwrap()
    }

    #[test]
    fn window_opens_for_a_datagram_at_a_time_while_nothing_is_acknowledged() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut controller = controller(start);
        let window = controller.initial_window();
        assert_eq!(controller.window_at(at(60_000)), window, "nothing was sent");
        // Full, and what the probes of the timeout add.
        let mut in_flight = window + 4 * u64::from(MTU);
        controller.on_sent(at(0), in_flight, 1);
        for (silent_ms, number) in [(500, 2), (1000, 3), (1500, 4)] {
            assert_eq!(controller.window_at(at(silent_ms - 1)), window);
            // A datagram stays below it, and two do not.
            let opened = controller.window_at(at(silent_ms));
            assert!(
                (in_flight + u64::from(MTU)..=in_flight + 2 * u64::from(MTU)).contains(&opened)
            );
            controller.on_sent(at(silent_ms), MTU.into(), number);
            in_flight += u64::from(MTU);
        }
    }

    #[test]
    fn window_is_that_of_the_chosen_controller_while_packets_are_acknowledged() {
        let start = Instant::now();
        let mut controller = controller(start);
        for second in 0..10 {
            let now = start + Duration::from_secs(second);
            controller.on_sent(now, MTU.into(), second);
            controller.on_end_acks(now, 0, false, Some(second));
            assert_eq!(controller.window_at(now), controller.chosen.window());
            assert_eq!(controller.in_flight, 0);
        }
    }
}
