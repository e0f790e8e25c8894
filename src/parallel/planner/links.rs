//! Time that the values of a step take between nodes.

use serde::{Deserialize, Serialize};

/// Rate of a link in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkRate {
    pub bytes_per_s: f64,
    pub round_trip_s: f64,
}

impl LinkRate {
    /// Returns the rate if its figures are possible; figures of another node are not trusted.
    pub fn checked(self) -> Option<Self> {
        let Self { bytes_per_s, round_trip_s } = self;
        let is_rate = bytes_per_s.is_normal() && bytes_per_s > 0.0;
        let is_time = round_trip_s.is_finite() && round_trip_s >= 0.0;
        if is_rate && is_time { Some(self) } else { None }
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
            }),
            (known, other) => known.or(other),
        }
    }

    /// Returns the seconds that `bytes` take from one node to another; 0 if the rate is unknown.
    pub fn transfer_s(&self, from: u32, to: u32, bytes: f64) -> f64 {
        match self.between(from as usize, to as usize) {
            Some(link) => bytes / link.bytes_per_s + link.round_trip_s / 2.0,
            None => 0.0,
        }
    }

    /// Returns the seconds of a reduce-scatter, or of an all-gather, of `bytes` over ranks on these
    /// nodes, which form a ring in their order; 0 if all ranks are on one node.
    ///
    /// Each link between neighbours carries `(w - 1) / w` of the bytes of `w` ranks (Patarasuk and
    /// Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). The
    /// slowest link decides; the last value passes all of them.
    pub fn collective_s(&self, node_of_rank: &[u32], bytes: f64) -> f64 {
        let world = node_of_rank.len();
        let mut slowest = f64::INFINITY;
        let mut latency_s = 0.0;
        for (rank, &from) in node_of_rank.iter().enumerate() {
            let to = node_of_rank[(rank + 1) % world];
            if from == to {
                continue;
            }
            if let Some(link) = self.between(from as usize, to as usize) {
                slowest = slowest.min(link.bytes_per_s);
                latency_s += link.round_trip_s / 2.0;
            }
        }
        bytes * (world.saturating_sub(1) as f64 / world.max(1) as f64) / slowest + latency_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(bytes_per_s: f64, round_trip_s: f64) -> Option<LinkRate> {
        Some(LinkRate { bytes_per_s, round_trip_s })
    }

    #[test]
    fn the_slowest_link_of_a_ring_decides_and_links_within_a_node_are_free() {
        let links = RingLinks(vec![link(1e6, 0.01), link(4e6, 0.02), link(8e6, 0.04)]);
        assert_eq!(links.collective_s(&[0, 0], 1e9), 0.0);
        assert_eq!(links.collective_s(&[1], 1e9), 0.0);
        // Over 0, 1 and 2: two thirds of the bytes.
        assert!((links.collective_s(&[0, 1, 2], 3e6) - (2.0 + 0.035)).abs() < 1e-9);
        // Without 1 the way from 0 to 2 is as slow as that out of 0.
        assert!((links.collective_s(&[0, 0, 2, 2], 4e6) - (3.0 + 0.01 + 0.02)).abs() < 1e-9);
        // From 1 to 2 and back, past 0.
        assert!((links.collective_s(&[1, 2], 8e6) - (4.0 + 0.01 + 0.02)).abs() < 1e-9);
        assert!((links.transfer_s(1, 2, 4e6) - (1.0 + 0.01)).abs() < 1e-9);
        assert!((links.transfer_s(2, 0, 4e6) - (0.5 + 0.02)).abs() < 1e-9);
        assert_eq!(RingLinks(vec![None, None]).collective_s(&[0, 1], 1e9), 0.0);
        assert_eq!(RingLinks(vec![None, None]).transfer_s(0, 1, 1e9), 0.0);
    }

    #[test]
    fn rates_that_cannot_be_are_not_believed() {
        let rate = |bytes_per_s, round_trip_s| LinkRate { bytes_per_s, round_trip_s }.checked();
        assert!(rate(1e6, 0.0).is_some() && rate(1e9, 1.0).is_some());
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
