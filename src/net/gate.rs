//! Bounds on handshakes in progress, and the record of who was refused: all that strangers can
//! make a node do.

use potluck_core::Lock;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Handshakes in progress, over all addresses.
pub(crate) const HANDSHAKES_MAX: usize = 64;
/// Handshakes in progress of one address.
const PER_ADDRESS_MAX: usize = 16;
/// Handshakes in progress with addresses that have not shown that they receive packets: beyond
/// that, a client must return a token first (RFC 9000, section 8.1.2), which spoofed ones cannot.
const UNPROVEN_MAX: usize = 16;

/// Answer to a client that begins a handshake.
#[derive(Debug)]
pub(crate) enum Entrance {
    /// Goes on while the ticket lives.
    Admit(Ticket),
    /// Must prove its address first.
    Prove,
    /// Gets no answer. An honest client repeats its packet, and is admitted later.
    Ignore,
}

#[derive(Debug, Default)]
struct Crowd {
    unproven: usize,
    all: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// Bound on handshakes in progress.
#[derive(Debug, Default)]
pub(crate) struct Gate(Lock<Crowd>);

/// Place of one handshake in progress; dropped, it is free.
#[derive(Debug)]
pub(crate) struct Ticket {
    gate: Arc<Gate>,
    address: IpAddr,
    is_proven: bool,
}

impl Gate {
    /// Decides about a client; `is_proven` if its address is known to be its own.
    pub fn enter(self: &Arc<Self>, address: IpAddr, is_proven: bool) -> Entrance {
        let mut crowd = self.0.lock();
        if !is_proven && crowd.unproven >= UNPROVEN_MAX {
            return Entrance::Prove;
        }
        let here = crowd.by_address.get(&address).copied().unwrap_or(0);
        if crowd.all >= HANDSHAKES_MAX || here >= PER_ADDRESS_MAX {
            return Entrance::Ignore;
        }
        crowd.all += 1;
        crowd.unproven += usize::from(!is_proven);
        crowd.by_address.insert(address, here + 1);
        Entrance::Admit(Ticket { gate: self.clone(), address, is_proven })
    }

    /// Returns the number of handshakes in progress.
    #[cfg(test)]
    pub(crate) fn crowd(&self) -> usize {
        self.0.lock().all
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut crowd = self.gate.0.lock();
        crowd.all -= 1;
        crowd.unproven -= usize::from(!self.is_proven);
        if let Some(here) = crowd.by_address.get_mut(&self.address) {
            *here -= 1;
            if *here == 0 {
                crowd.by_address.remove(&self.address);
            }
        }
    }
}

/// Line about somebody who tried to connect and was refused.
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

    #[test]
    fn crowds_are_bounded_and_places_become_free() {
        let gate = Arc::new(Gate::default());
        let mut tickets = Vec::new();
        for i in 0..UNPROVEN_MAX as u8 {
            let Entrance::Admit(ticket) = gate.enter(ip(i), false) else { panic!("{i}") };
            tickets.push(ticket);
        }
        assert!(matches!(gate.enter(ip(99), false), Entrance::Prove));
        for i in 0..PER_ADDRESS_MAX {
            let Entrance::Admit(ticket) = gate.enter(ip(99), true) else { panic!("{i}") };
            tickets.push(ticket);
        }
        assert!(matches!(gate.enter(ip(99), true), Entrance::Ignore));
        for i in 100..132 {
            let Entrance::Admit(ticket) = gate.enter(ip(i), true) else { panic!("{i}") };
            tickets.push(ticket);
        }
        assert!(matches!(gate.enter(ip(200), true), Entrance::Ignore));
        tickets.clear();
        assert_eq!(gate.crowd(), 0);
        assert!(gate.0.lock().by_address.is_empty());
        assert!(matches!(gate.enter(ip(0), false), Entrance::Admit(_)));
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
