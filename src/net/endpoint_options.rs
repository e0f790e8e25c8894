//! Settings of an endpoint.

use std::net::SocketAddr;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

/// Cores up to which an endpoint has one thread.
const FEW_CORES: usize = 2;

/// Congestion control of what a node sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Congestion {
    /// CUBIC (RFC 9438): a lost packet means a full queue, so that links get slower with losses
    /// that have other causes.
    #[default]
    Cubic,
    /// BBR, which goes by the measured rate and round trip, also on links that lose packets. quinn
    /// calls its implementation experimental.
    Bbr,
}

impl FromStr for Congestion {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "cubic" => Ok(Self::Cubic),
            "bbr" => Ok(Self::Bbr),
            _ => Err("cubic and bbr are possible".into()),
        }
    }
}

/// Settings of an [`Endpoint`](crate::Endpoint).
#[derive(Clone, Debug)]
pub struct EndpointOptions {
    /// Address of the socket; port 0 is any that is free.
    pub listen: SocketAddr,
    /// Maximum number of links, including peers that are not accepted yet.
    pub links_max: usize,
    /// Time without any packet of the peer after which a link ends; the shorter one of both sides
    /// counts. Packets that keep it alive are sent automatically.
    pub idle_timeout: Duration,
    /// Time for a handshake, and then for the greeting.
    pub handshake_timeout: Duration,
    /// Maximum time for which a closed link sends its queues.
    pub flush_timeout: Duration,
    /// Maximum number of received and unread bytes of a stream. A link has one stream of payloads
    /// and up to four blobs.
    pub window_bytes: u64,
    /// Maximum number of bytes of payloads in a link's queue, beyond which a sender waits; the same
    /// for blobs.
    pub queue_bytes: usize,
    /// Congestion control of what this endpoint sends.
    pub congestion: Congestion,
    /// Threads. Two let one connection decrypt while the socket is read; a single one gathers the
    /// packets of long messages, for up to 1.5 ms, to take less time from the kernels.
    pub threads: usize,
}

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the number of threads for this machine: one where the kernels need every core.
fn usual_threads() -> usize {
    if cores() <= FEW_CORES { 1 } else { 2 }
}

impl EndpointOptions {
    /// Returns the usual settings.
    pub fn new(listen: SocketAddr) -> Self {
        Self {
            listen,
            links_max: 64,
            idle_timeout: Duration::from_secs(10),
            handshake_timeout: Duration::from_secs(5),
            flush_timeout: Duration::from_secs(2),
            window_bytes: 8 << 20,
            queue_bytes: 64 << 20,
            congestion: Congestion::default(),
            threads: usual_threads(),
        }
    }
}
