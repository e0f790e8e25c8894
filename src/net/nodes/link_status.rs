//! Snapshots of the links to the other nodes of a run, for monitoring.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;

use super::connection::NodeLink;
use crate::cluster::{ConnectionId, Roster};
use crate::{LinkStats, SocketBuffers};
use potluck_core::NodeRank;

/// Time over which rates are measured.
const RATE_WINDOW: Duration = Duration::from_secs(5);

/// State of the link to another node of the run.
#[derive(Clone, Debug)]
pub struct LinkStatus {
    pub node: NodeRank,
    pub host: String,
    pub address: SocketAddr,
    pub stats: LinkStats,
    /// Bytes per second over the last seconds.
    pub bytes_sent_per_s: f64,
    pub bytes_received_per_s: f64,
    /// Time at which the node was last heard; `None` if no heartbeats watch the link.
    pub heard: Option<Instant>,
}

/// State of all links of a node, at one moment.
#[derive(Clone, Debug, Default)]
pub struct LinksStatus {
    /// Links to the nodes of the run, by their number; none before it has started.
    pub links: Vec<LinkStatus>,
    /// Peers that were refused.
    pub refused: u64,
    /// Buffers of the socket; `None` before the first report.
    pub socket_buffers: Option<SocketBuffers>,
    /// True after the end of the cluster, without which a first node may go on.
    pub is_over: bool,
}

/// Newest state of the links; readers do not delay its replacement.
pub type LinkBoard = Arc<ArcSwap<LinksStatus>>;

/// Node at the other end of a link.
struct LinkPeer {
    node: NodeRank,
    host: String,
    /// Figures at the beginning of the time over which rates are measured.
    since: Instant,
    before: [u64; 2],
    rates: [f64; 2],
}

/// Writer of the states of links to a [`LinkBoard`].
pub(super) struct LinkReporter {
    board: LinkBoard,
    interval: Duration,
    next: Instant,
    peers: HashMap<ConnectionId, LinkPeer>,
}

impl LinkReporter {
    /// Creates a reporter that reports once per interval.
    pub fn new(board: LinkBoard, interval: Duration) -> Self {
        Self { board, interval, next: Instant::now(), peers: HashMap::new() }
    }

    pub fn is_due(&self, now: Instant) -> bool {
        now >= self.next
    }

    /// Sets the nodes of the links once a run has started.
    pub fn start(&mut self, roster: &Roster, links: &[(NodeRank, ConnectionId)]) {
        let now = Instant::now();
        self.next = now;
        for (node, connection) in links {
            let host = roster.node(*node).map(|of| of.host.clone()).unwrap_or_default();
            let peer = LinkPeer { node: *node, host, since: now, before: [0; 2], rates: [0.0; 2] };
            self.peers.insert(*connection, peer);
        }
    }

    /// Reports the links that are open. `heard` has the time at which nodes with heartbeats were
    /// last heard.
    pub fn report(
        &mut self,
        now: Instant,
        links: &HashMap<ConnectionId, Arc<NodeLink>>,
        heard: &[(ConnectionId, Instant)],
        refused: u64,
        socket_buffers: SocketBuffers,
    ) {
        self.next = now + self.interval;
        let mut states = Vec::with_capacity(self.peers.len());
        for (connection, peer) in &mut self.peers {
            let Some(link) = links.get(connection) else { continue };
            let stats = link.stats();
            peer.measure(now, [stats.bytes_sent, stats.bytes_received]);
            let of_link = heard.iter().find(|(of, _)| of == connection);
            states.push(LinkStatus {
                node: peer.node,
                host: peer.host.clone(),
                address: link.address(),
                stats,
                bytes_sent_per_s: peer.rates[0],
                bytes_received_per_s: peer.rates[1],
                heard: of_link.map(|(_, at)| *at),
            });
        }
        states.sort_by_key(|link| link.node);
        let socket_buffers = Some(socket_buffers);
        let links = states;
        let state = LinksStatus { links, refused, socket_buffers, is_over: false };
        self.board.store(Arc::new(state));
    }

    /// Reports the end of the cluster, and so of all links.
    pub fn end(&self, refused: u64) {
        let state = LinksStatus { refused, is_over: true, ..LinksStatus::default() };
        self.board.store(Arc::new(state));
    }
}

impl LinkPeer {
    /// Measures the rates anew after [`RATE_WINDOW`].
    fn measure(&mut self, now: Instant, bytes: [u64; 2]) {
        let elapsed = now.duration_since(self.since);
        if elapsed < RATE_WINDOW {
            return;
        }
        for (rate, (now, before)) in self.rates.iter_mut().zip(bytes.iter().zip(self.before)) {
            *rate = now.saturating_sub(before) as f64 / elapsed.as_secs_f64();
        }
        self.since = now;
        self.before = bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_the_last_seconds() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let (node, host) = (NodeRank(1), String::new());
        let mut peer = LinkPeer { node, host, since: start, before: [0; 2], rates: [0.0; 2] };
        peer.measure(at(4), [400, 40]);
        assert_eq!(peer.rates, [0.0; 2]);
        peer.measure(at(5), [500, 50]);
        assert_eq!(peer.rates, [100.0, 10.0]);
        peer.measure(at(9), [10_000, 50]);
        assert_eq!(peer.rates, [100.0, 10.0]);
        peer.measure(at(15), [10_500, 50]);
        assert_eq!(peer.rates, [1000.0, 0.0]);
    }
}
