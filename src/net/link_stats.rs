//! Figures of a link, as QUIC counts them.

use std::time::Duration;

use quinn::{Connection, ConnectionStats};

/// Figures of a link since it was opened; bytes include all headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkStats {
    /// Smoothed round trip time.
    pub round_trip: Duration,
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub packets_sent: u64,
    /// Packets that did not arrive in time; their content was sent again.
    pub packets_lost: u64,
    /// Times at which losses made the congestion window smaller.
    pub congestion_events: u64,
    /// Maximum number of bytes in flight.
    pub congestion_window: u64,
    /// Bytes of the largest packets at present.
    pub datagram_bytes: u16,
}

impl LinkStats {
    pub(crate) fn of(connection: &Connection) -> Self {
        let ConnectionStats { path, udp_tx, udp_rx, .. } = connection.stats();
        Self {
            round_trip: path.rtt,
            bytes_sent: udp_tx.bytes,
            bytes_received: udp_rx.bytes,
            packets_sent: path.sent_packets,
            packets_lost: path.lost_packets,
            congestion_events: path.congestion_events,
            congestion_window: path.cwnd,
            datagram_bytes: path.current_mtu,
        }
    }
}
