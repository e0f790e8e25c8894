//! Rates of the links between nodes.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// Bytes per second that a link may have: beyond these, the times of a step overflow.
const RATES: RangeInclusive<f64> = 1e3..=1e13;
/// Seconds that a round trip may take.
const ROUND_TRIPS: RangeInclusive<f64> = 0.0..=1e4;
/// Seconds that a processor may take for a byte.
const PROCESSOR_TIMES: RangeInclusive<f64> = 0.0..=1e-3;

/// Rate of a link in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkRate {
    pub bytes_per_s: f64,
    pub round_trip_s: f64,
    /// Seconds of all of the sender's cores for each byte that it sends, while as many arrive
    /// there; 0 if unknown.
    pub processor_s_per_byte: f64,
}

impl LinkRate {
    /// Returns the rate if its figures are possible; figures of another node are not trusted.
    pub fn checked(self) -> Option<Self> {
        let Self { bytes_per_s, round_trip_s, processor_s_per_byte } = self;
        let is_possible = RATES.contains(&bytes_per_s)
            && ROUND_TRIPS.contains(&round_trip_s)
            && PROCESSOR_TIMES.contains(&processor_s_per_byte);
        is_possible.then_some(self)
    }

    /// Returns the link with the rate at which values have arrived, if that is known and possible.
    pub fn with_arrivals(self, bytes_per_s: Option<f64>) -> Self {
        let Some(bytes_per_s) = bytes_per_s else { return self };
        Self { bytes_per_s, ..self }.checked().unwrap_or(self)
    }
}

/// Links of a ring of nodes, by number: each to the next one, and the last one to the first. `None`
/// if the rate of a link is unknown.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RingLinks(pub Vec<Option<LinkRate>>);

impl RingLinks {
    /// Returns the rate from one node to another, if it is known. A connection that was not
    /// measured is as fast as the slower of the link out of the sender and the link into the
    /// receiver.
    pub fn between(&self, from: usize, to: usize) -> Option<LinkRate> {
        let nodes = self.0.len();
        let out = self.0.get(from).copied().flatten();
        if (from + 1) % nodes.max(1) == to {
            return out;
        }
        let into = self.0.get((to + nodes - 1) % nodes.max(1)).copied().flatten();
        match (out, into) {
            (Some(out), Some(into)) => Some(LinkRate {
                bytes_per_s: out.bytes_per_s.min(into.bytes_per_s),
                round_trip_s: out.round_trip_s.max(into.round_trip_s),
                processor_s_per_byte: out.processor_s_per_byte,
            }),
            (known, other) => known.or(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(bytes_per_s: f64, round_trip_s: f64) -> Option<LinkRate> {
        Some(LinkRate { bytes_per_s, round_trip_s, processor_s_per_byte: bytes_per_s * 1e-18 })
    }

    #[test]
    fn a_connection_that_was_not_measured_is_as_fast_as_the_slower_of_its_ends() {
        let links = RingLinks(vec![link(1e6, 0.01), link(4e6, 0.02), link(8e6, 0.04)]);
        assert_eq!(links.between(1, 2), link(4e6, 0.02));
        // Out of 0 at 1 MB/s, and into 2 at 4 MB/s.
        assert_eq!(links.between(0, 2), link(1e6, 0.02));
        // The processor is the sender's.
        let sender = links.0[2].unwrap().processor_s_per_byte;
        let slower = link(1e6, 0.04).map(|rate| LinkRate { processor_s_per_byte: sender, ..rate });
        assert_eq!(links.between(2, 1), slower);
        assert_eq!(RingLinks(vec![None, link(2e6, 0.0)]).between(0, 0), link(2e6, 0.0));
        assert_eq!(RingLinks(vec![None, None]).between(0, 1), None);
    }

    #[test]
    fn arrivals_count_if_they_are_known_and_possible() {
        let confirmed = link(1e6, 0.01).unwrap();
        assert_eq!(confirmed.with_arrivals(Some(2e6)).bytes_per_s, 2e6);
        for odd in [None, Some(f64::NAN), Some(1e-300), Some(-1.0), Some(f64::INFINITY)] {
            assert_eq!(confirmed.with_arrivals(odd), confirmed, "{odd:?}");
        }
    }

    #[test]
    fn rates_that_cannot_be_are_not_believed() {
        let rate = |bytes_per_s, round_trip_s| {
            LinkRate { bytes_per_s, round_trip_s, processor_s_per_byte: 0.0 }.checked()
        };
        assert!(rate(1e6, 0.0).is_some() && rate(1e9, 1.0).is_some());
        assert!(rate(1e3, 1e4).is_some() && rate(1e13, 0.0).is_some());
        assert!(rate(999.0, 0.0).is_none() && rate(1.1e13, 0.0).is_none());
        assert!(rate(1e6, 1.1e4).is_none());
        for processor_s_per_byte in [-1e-9, 2e-3, f64::NAN, f64::INFINITY] {
            let odd = LinkRate { bytes_per_s: 1e6, round_trip_s: 0.0, processor_s_per_byte };
            assert_eq!(odd.checked(), None);
        }
        for (bytes, seconds) in [
            (0.0, 0.1),
            (-1.0, 0.1),
            (f64::NAN, 0.1),
            (f64::INFINITY, 0.1),
            (1e6, -1.0),
            (1e6, f64::NAN),
            (1e6, f64::INFINITY),
        ] {
            assert_eq!(rate(bytes, seconds), None, "{bytes} {seconds}");
        }
    }
}
