//! Bounds on handshakes in progress, and the record of refused peers: all that a node does for
//! peers that have not proven that they know the secret.

use potluck_core::Lock;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

/// Handshakes in progress, over all addresses.
pub(crate) const HANDSHAKES_MAX: usize = 64;
/// Handshakes in progress of one network.
const PER_NETWORK_MAX: usize = 16;
/// Handshakes in progress with unvalidated addresses: beyond this, a client must return a token
/// first (RFC 9000, section 8.1.2), which is impossible from a spoofed address.
const UNPROVEN_MAX: usize = 16;

/// Answer to a client that begins a handshake.
#[derive(Debug)]
pub(crate) enum Entrance {
    /// May continue until the ticket is dropped, or its place is given to a later client.
    Admit(HandshakePermit),
    /// Must prove its address first.
    Prove,
}

/// Place of one handshake.
#[derive(Debug)]
struct HandshakeSlot {
    number: u64,
    network: IpAddr,
    is_proven: bool,
    /// Dropped with the place, which ends the handshake.
    _ends: oneshot::Sender<()>,
}

#[derive(Debug, Default)]
struct HandshakeSlots {
    next: u64,
    /// The oldest one first.
    places: VecDeque<HandshakeSlot>,
}

/// Bound on handshakes in progress. A client beyond it takes the place of the oldest one. So an
/// attacker with an overheard knock that begins many handshakes and ends none keeps no client out:
/// an honest handshake ends within some round trips.
#[derive(Debug, Default)]
pub(crate) struct HandshakeLimiter(Lock<HandshakeSlots>);

/// Place of one handshake in progress; dropping it frees the place.
#[derive(Debug)]
pub(crate) struct HandshakePermit {
    handshake_limiter: Arc<HandshakeLimiter>,
    number: u64,
    evicted: oneshot::Receiver<()>,
}

impl HandshakeLimiter {
    /// Decides about a client; `is_proven` if its address is validated.
    pub fn enter(self: &Arc<Self>, address: IpAddr, is_proven: bool) -> Entrance {
        let mut crowd = self.0.lock();
        let unproven = crowd.places.iter().filter(|place| !place.is_proven).count();
        if !is_proven && unproven >= UNPROVEN_MAX {
            return Entrance::Prove;
        }
        let network = network(address);
        if crowd.count(network) >= PER_NETWORK_MAX {
            crowd.evict_oldest_of(network);
        } else if crowd.places.len() >= HANDSHAKES_MAX {
            let fullest = crowd.fullest_network();
            crowd.evict_oldest_of(fullest);
        }
        let number = crowd.next;
        crowd.next += 1;
        let (_ends, evicted) = oneshot::channel();
        crowd.places.push_back(HandshakeSlot { number, network, is_proven, _ends });
        Entrance::Admit(HandshakePermit { handshake_limiter: self.clone(), number, evicted })
    }

    /// Number of handshakes in progress.
    #[cfg(test)]
    pub(crate) fn crowd(&self) -> usize {
        self.0.lock().places.len()
    }
}

impl HandshakeSlots {
    fn count(&self, network: IpAddr) -> usize {
        self.places.iter().filter(|place| place.network == network).count()
    }

    fn evict_oldest_of(&mut self, network: IpAddr) {
        let oldest = self.places.iter().position(|place| place.network == network);
        if let Some(oldest) = oldest {
            self.places.remove(oldest);
        }
    }

    /// Returns the network with the most places; the one with the oldest place if there are
    /// several.
    fn fullest_network(&self) -> IpAddr {
        let mut fullest = (IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);
        for place in &self.places {
            let count = self.count(place.network);
            if count > fullest.1 {
                fullest = (place.network, count);
            }
        }
        fullest.0
    }
}

impl HandshakePermit {
    /// Awaits some work; returns `None` if the place is given to another client before it is done.
    pub async fn hold<F: Future>(&mut self, work: F) -> Option<F::Output> {
        let mut work = pin!(work);
        let mut evicted = pin!(&mut self.evicted);
        std::future::poll_fn(|cx| {
            if evicted.as_mut().poll(cx).is_ready() {
                return Poll::Ready(None);
            }
            work.as_mut().poll(cx).map(Some)
        })
        .await
    }
}

impl Drop for HandshakePermit {
    fn drop(&mut self) {
        self.handshake_limiter.0.lock().places.retain(|place| place.number != self.number);
    }
}

/// Returns the part of an address that one host cannot choose: a whole IPv4 address, or the first
/// half of an IPv6 address, which a router assigns to a network (RFC 4291, section 2.5.4).
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(ip) => {
            let [a, b, c, d, ..] = ip.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
    }
}

/// Returns an IPv4 address as such if a socket for both kinds reports it as an IPv6 address.
pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => (ip, address.port()).into(),
        // As it is: it may have a scope.
        IpAddr::V6(_) => address,
    }
}

/// Line about a refused attempt to connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedPeer {
    pub address: SocketAddr,
    pub why: String,
}

/// Time in which one address gets at most one line.
const QUIET: Duration = Duration::from_secs(5);
const LINES_MAX: usize = 64;
const ADDRESSES_MAX: usize = 256;

#[derive(Debug, Default)]
struct Ledger {
    count: u64,
    lines: VecDeque<RefusedPeer>,
    recent: HashMap<IpAddr, Instant>,
    last_stranger: Option<Instant>,
}

/// Record of refusals: all are counted, and few become lines.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Lock<Ledger>);

impl Refusals {
    /// Counts a refusal, and keeps its line if the address had none lately.
    pub fn note(&self, now: Instant, address: SocketAddr, why: impl Into<String>) {
        let mut ledger = self.0.lock();
        ledger.count += 1;
        ledger.recent.retain(|_, at| now.saturating_duration_since(*at) < QUIET);
        let is_quiet = ledger.recent.contains_key(&address.ip());
        if is_quiet || ledger.recent.len() >= ADDRESSES_MAX || ledger.lines.len() >= LINES_MAX {
            return;
        }
        ledger.recent.insert(address.ip(), now);
        ledger.lines.push_back(RefusedPeer { address, why: why.into() });
    }

    /// Records a packet that begins a connection without the knock. Anyone can send such packets,
    /// with any address and in any number: at most one per [`QUIET`] counts, with its line.
    pub fn note_stranger(&self, now: Instant, address: SocketAddr, why: &str) {
        let mut ledger = self.0.lock();
        if ledger.last_stranger.is_some_and(|at| now.saturating_duration_since(at) < QUIET) {
            return;
        }
        ledger.last_stranger = Some(now);
        drop(ledger);
        self.note(now, address, why);
    }

    pub fn count(&self) -> u64 {
        self.0.lock().count
    }

    /// Returns the lines since the last call.
    pub fn take(&self) -> Vec<RefusedPeer> {
        self.0.lock().lines.drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(i: u8) -> IpAddr {
        [10, 0, i / 16, i % 16].into()
    }

    fn admitted(
        handshake_limiter: &Arc<HandshakeLimiter>,
        address: IpAddr,
        is_proven: bool,
    ) -> HandshakePermit {
        match handshake_limiter.enter(address, is_proven) {
            Entrance::Admit(ticket) => ticket,
            Entrance::Prove => panic!("{address} must prove its address"),
        }
    }

    /// Returns true once another handshake has the place of a ticket.
    fn is_evicted(ticket: &mut HandshakePermit) -> bool {
        matches!(ticket.evicted.try_recv(), Err(oneshot::error::TryRecvError::Closed))
    }

    #[test]
    fn crowds_are_bounded_and_places_become_free() {
        let handshake_limiter = Arc::new(HandshakeLimiter::default());
        let mut tickets = Vec::new();
        for i in 0..UNPROVEN_MAX as u8 {
            tickets.push(admitted(&handshake_limiter, ip(i), false));
        }
        assert!(matches!(handshake_limiter.enter(ip(99), false), Entrance::Prove));
        for i in 100..148 {
            tickets.push(admitted(&handshake_limiter, ip(i), true));
        }
        assert!(!tickets.iter_mut().any(is_evicted));
        for i in 148..212 {
            tickets.push(admitted(&handshake_limiter, ip(i), true));
            assert_eq!(handshake_limiter.crowd(), HANDSHAKES_MAX);
        }
        let evicted: Vec<bool> = tickets.iter_mut().map(is_evicted).collect();
        let oldest: Vec<bool> = (0..128).map(|number| number < 64).collect();
        assert_eq!(evicted, oldest);
        tickets.clear();
        assert_eq!(handshake_limiter.crowd(), 0);
        admitted(&handshake_limiter, ip(0), false);
    }

    #[test]
    fn a_network_beyond_its_places_loses_its_own_oldest_one() {
        let handshake_limiter = Arc::new(HandshakeLimiter::default());
        let mut honest = admitted(&handshake_limiter, ip(99), true);
        let mut tickets: Vec<_> =
            (0..=PER_NETWORK_MAX).map(|_| admitted(&handshake_limiter, ip(1), true)).collect();
        assert!(is_evicted(&mut tickets[0]) && !tickets[1..].iter_mut().any(is_evicted));
        assert_eq!(handshake_limiter.crowd(), PER_NETWORK_MAX + 1);
        assert!(!is_evicted(&mut honest));
    }

    /// Four networks that fill all places lose places to each other, and no other network loses
    /// one.
    #[test]
    fn the_fullest_network_gives_way_to_others() {
        let handshake_limiter = Arc::new(HandshakeLimiter::default());
        let mut honest = admitted(&handshake_limiter, ip(99), true);
        let mut tickets = Vec::new();
        for i in 0..1000 {
            tickets.push(admitted(&handshake_limiter, ip(i as u8 % 4), true));
        }
        let mut second = admitted(&handshake_limiter, ip(98), true);
        for i in 0..1000 {
            tickets.push(admitted(&handshake_limiter, ip(i as u8 % 4), true));
        }
        assert_eq!(handshake_limiter.crowd(), HANDSHAKES_MAX);
        assert!(!is_evicted(&mut honest) && !is_evicted(&mut second));
    }

    #[test]
    fn addresses_of_one_network_of_ipv6_are_counted_together() {
        let handshake_limiter = Arc::new(HandshakeLimiter::default());
        let address = |net: u16, host: u16| Ipv6Addr::new(0x2001, 0xdb8, 0, net, 0, 0, 0, host);
        let mut tickets: Vec<_> = (0..40)
            .map(|host| admitted(&handshake_limiter, address(1, host).into(), true))
            .collect();
        assert_eq!(handshake_limiter.crowd(), PER_NETWORK_MAX);
        tickets.push(admitted(&handshake_limiter, address(2, 0).into(), true));
        assert_eq!(handshake_limiter.crowd(), PER_NETWORK_MAX + 1);
    }

    #[test]
    fn strangers_get_one_line_in_a_while_and_count_with_it() {
        let (refusals, now) = (Refusals::default(), Instant::now());
        for i in 0..100_000u32 {
            let address = SocketAddr::new(i.to_be_bytes().into(), 1);
            refusals.note_stranger(now + Duration::from_micros(u64::from(i)), address, "no");
        }
        refusals.note_stranger(now + QUIET, SocketAddr::new(ip(1), 1), "again");
        assert_eq!((refusals.count(), refusals.take().len()), (2, 2));
    }

    #[test]
    fn an_address_gets_a_line_in_a_while_and_all_are_counted() {
        let (refusals, now) = (Refusals::default(), Instant::now());
        let at = |host, port| SocketAddr::new(ip(host), port);
        for port in 0..10 {
            refusals.note(now, at(1, port), "no");
        }
        refusals.note(now, at(2, 7), "neither");
        refusals.note(now + QUIET, at(1, 99), "again");
        let lines: Vec<_> = refusals.take().into_iter().map(|r| (r.address, r.why)).collect();
        let expected = [(at(1, 0), "no"), (at(2, 7), "neither"), (at(1, 99), "again")];
        assert_eq!(lines, expected.map(|(address, why)| (address, why.to_owned())));
        assert_eq!((refusals.count(), refusals.take()), (12, vec![]));
    }

    #[test]
    fn the_record_is_bounded() {
        let (refusals, now) = (Refusals::default(), Instant::now());
        for i in 0..100_000u32 {
            let address = SocketAddr::new(i.to_be_bytes().into(), 1);
            refusals.note(now + Duration::from_micros(u64::from(i)), address, "no");
        }
        assert_eq!(refusals.count(), 100_000);
        assert!(refusals.take().len() <= LINES_MAX);
        assert!(refusals.0.lock().recent.len() <= ADDRESSES_MAX);
    }
}
