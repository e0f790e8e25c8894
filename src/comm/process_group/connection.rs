//! One rank's connection to all others: what it sends, what it waits for, and whom it blames.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::packet::{Body, Call, Content, Kind, Packet, Pools};
use crate::base::Rank;
use crate::comm::{Mailbox, Waited};

/// Packets that a rank may be ahead of each receiver: so many of rooted collectives, and so many of
/// sends. They are counted apart, because what takes the one does not wait for the other.
pub const CREDITS: u32 = 16;
/// Partial sums of an exchange that a rank begins beyond those that end with it.
pub const WINDOW: usize = 2;
/// Calls that are remembered, to compare with those of a rank that is behind.
const CALLS_MAX: usize = 64;
/// After so long a wait, a rank tells the others in which call it is.
const PATIENCE: Duration = Duration::from_millis(200);

/// Why a collective failed. The group is of no use then: every other rank's call fails too, and
/// names this one.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GroupError {
    #[error("{call}: {why}")]
    Argument { call: String, why: String },
    /// Two ranks made calls that do not belong together.
    #[error("{0}")]
    Mismatch(String),
    #[error("{call}: waited {seconds:.1} s for {}", list(ranks))]
    TimedOut { call: String, seconds: f64, ranks: Vec<Rank> },
    #[error("{call}: {}{}", left(*rank), if *panicked { " (its thread panicked)" } else { "" })]
    Left { call: String, rank: Rank, panicked: bool },
    /// Another rank failed, or somebody gave up the group.
    #[error("{0}")]
    Aborted(String),
}

/// The reason of a mailbox whose handle is gone.
fn left(rank: Rank) -> String {
    format!("{rank} left the group")
}

fn list(ranks: &[Rank]) -> String {
    ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ")
}

/// What is known of another rank.
#[derive(Default)]
struct Peer {
    /// What it sent for collectives from the present one on, and by `send`.
    collective: VecDeque<(u64, Call, Body, bool)>,
    direct: VecDeque<(Call, Body)>,
    /// Packets that it still has room for.
    credits: Credits,
    /// The last collective that it is known to have begun.
    number: u64,
    /// The last collective of which it was told that this rank waits in it.
    told: u64,
    /// It has not yet read that.
    is_unread: bool,
    /// Its handle is gone; whether its thread panicked.
    left: Option<bool>,
}

#[derive(Clone, Copy)]
struct Credits {
    collective: u32,
    direct: u32,
}

impl Default for Credits {
    fn default() -> Self {
        Self { collective: CREDITS, direct: CREDITS }
    }
}

impl Credits {
    fn of(&mut self, is_direct: bool) -> &mut u32 {
        if is_direct { &mut self.direct } else { &mut self.collective }
    }
}

/// A rank's end of the connections.
pub struct Link {
    rank: Rank,
    mailboxes: Arc<Vec<Mailbox<Packet>>>,
    pub pools: Pools,
    peers: Vec<Peer>,
    /// The number of the present collective, from 1.
    number: u64,
    call: Call,
    /// The last collectives, the present one last.
    calls: VecDeque<Call>,
    /// How long a call may take.
    pub patience: Duration,
    began: Instant,
    /// It has waited so long in the present collective that the others are to know.
    is_late: bool,
}

impl Link {
    /// One for each rank.
    pub fn all(world: u32, patience: Duration) -> Vec<Self> {
        let ranks = world as usize;
        // For each sender: what both kinds of credits allow and give back, two exchanges, and
        // signs: two barriers, one that it waits, one that it has read, and one that it left.
        let items_max = ranks * (4 * CREDITS as usize + 8 * WINDOW * ranks + 2 * 32 + 3);
        let mailboxes = Arc::new((0..world).map(|_| Mailbox::new(items_max)).collect::<Vec<_>>());
        let peers = || (0..world).map(|_| Peer::default()).collect();
        let link = |rank| Self {
            rank: Rank(rank),
            mailboxes: mailboxes.clone(),
            pools: Pools::default(),
            peers: peers(),
            number: 0,
            call: Call::barrier(),
            calls: VecDeque::new(),
            patience,
            began: Instant::now(),
            is_late: false,
        };
        (0..world).map(link).collect()
    }

    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The present call.
    pub fn call(&self) -> Call {
        self.call
    }

    pub fn world(&self) -> u32 {
        self.peers.len() as u32
    }

    /// The next collective or send begins.
    pub fn enter(&mut self, call: Call) -> Result<(), GroupError> {
        (self.call, self.began, self.is_late) = (call, Instant::now(), false);
        if !self.is_direct() {
            self.number += 1;
            self.calls.push_back(call);
            if self.calls.len() > CALLS_MAX {
                self.calls.pop_front();
            }
        }
        // What came in the meantime, a close before all.
        while let Some(packet) =
            self.mailbox().try_receive().map_err(|closed| aborted(&closed.0))?
        {
            self.sort(packet)?;
        }
        for from in 0..self.peers.len() {
            if let Some((number, call, ..)) = self.peers[from].collective.front() {
                self.compare(Rank(from as u32), *number, *call)?;
            }
        }
        Ok(())
    }

    fn is_direct(&self) -> bool {
        matches!(self.call.kind, Kind::Send { .. } | Kind::Recv { .. })
    }

    fn mailbox(&self) -> &Mailbox<Packet> {
        &self.mailboxes[self.rank.index()]
    }

    /// Everybody's calls fail from now on, for this reason.
    pub fn abort(&self, why: &str) {
        self.mailboxes.iter().for_each(|mailbox| mailbox.close(why));
    }

    /// The handle goes: what was sent before still arrives.
    pub fn leave(&self, panicked: bool) {
        for mailbox in self.mailboxes.iter() {
            // Whoever is closed has left before, or everything is given up.
            let _ = mailbox.send(Packet { from: self.rank, content: Content::Left { panicked } });
        }
        self.mailbox().close(&left(self.rank));
    }

    // ---- Out ----

    fn post(&mut self, to: Rank, content: Content) -> Result<(), GroupError> {
        let packet = Packet { from: self.rank, content };
        let Err(closed) = self.mailboxes[to.index()].send(packet) else { return Ok(()) };
        if closed.0 != left(to) {
            return Err(aborted(&closed.0));
        }
        // It told everyone before it closed.
        while let Some(packet) =
            self.mailbox().try_receive().map_err(|closed| aborted(&closed.0))?
        {
            self.sort(packet)?;
        }
        let panicked = self.peers[to.index()].left.unwrap_or(false);
        Err(GroupError::Left { call: self.call.to_string(), rank: to, panicked })
    }

    /// Sends a part of the present collective that others cannot fall behind of.
    pub fn send(&mut self, to: Rank, body: Body) -> Result<(), GroupError> {
        let (number, call) = (self.number, self.call);
        self.post(to, Content::Collective { number, call, body, is_credited: false })
    }

    /// Sends, but waits while the receiver is [`CREDITS`] packets of this kind behind.
    pub fn send_credited(&mut self, to: Rank, body: Body) -> Result<(), GroupError> {
        let is_direct = self.is_direct();
        while *self.peers[to.index()].credits.of(is_direct) == 0 {
            self.pump(to)?;
        }
        *self.peers[to.index()].credits.of(is_direct) -= 1;
        let (number, call) = (self.number, self.call);
        let content = match is_direct {
            true => Content::Direct { call, body },
            false => Content::Collective { number, call, body, is_credited: true },
        };
        self.post(to, content)
    }

    // ---- In ----

    /// What a rank sends next in the present call.
    pub fn receive(&mut self, from: Rank) -> Result<Body, GroupError> {
        loop {
            if self.is_direct() {
                if let Some((call, body)) = self.peers[from.index()].direct.pop_front() {
                    self.give_sign(from, Content::Credit { is_direct: true });
                    self.compare_direct(from, call)?;
                    return Ok(body);
                }
            } else if let Some((number, call, ..)) = self.peers[from.index()].collective.front() {
                let (number, call) = (*number, *call);
                self.compare(from, number, call)?;
                // What it sends next is of another collective: it has nothing for this one.
                if number != self.number {
                    return Err(self.mismatch(from, number, call));
                }
                if let Some((.., body, is_credited)) =
                    self.peers[from.index()].collective.pop_front()
                {
                    if is_credited {
                        self.give_sign(from, Content::Credit { is_direct: false });
                    }
                    return Ok(body);
                }
            }
            self.pump(from)?;
        }
    }

    fn give_sign(&self, to: Rank, content: Content) {
        // One that has left needs none.
        let _ = self.mailboxes[to.index()].send(Packet { from: self.rank, content });
    }

    /// Waits for a packet of anybody, on account of `whom`.
    fn pump(&mut self, whom: Rank) -> Result<(), GroupError> {
        if let Some(panicked) = self.peers[whom.index()].left {
            return Err(GroupError::Left { call: self.call.to_string(), rank: whom, panicked });
        }
        let deadline = self.began + self.patience;
        // Nobody else has to be in the call when a send or recv waits, so nobody is told.
        let tells = !self.is_late && !self.is_direct();
        let until = if tells { deadline.min(self.began + PATIENCE) } else { deadline };
        match self.mailbox().receive(Some(until)) {
            Ok(packet) => {
                if tells && Instant::now() > until {
                    self.tell_all();
                }
                self.sort(packet)
            }
            Err(Waited::Closed(closed)) => Err(aborted(&closed.0)),
            Err(Waited::TimedOut) if Instant::now() < deadline => {
                self.tell_all();
                Ok(())
            }
            Err(Waited::TimedOut) => Err(self.timed_out(whom)),
        }
    }

    /// Tells the others in which collective this rank waits, so that they see whether it is theirs.
    fn tell_all(&mut self) {
        self.is_late = true;
        let own = self.rank;
        (0..self.world()).map(Rank).filter(|to| *to != own).for_each(|to| self.tell(to));
    }

    /// Tells a rank, unless it knows, or has not yet read what it was told before: then it is told
    /// when it has. So one that does not look has one sign of each other rank in its mailbox.
    fn tell(&mut self, to: Rank) {
        let (number, call) = (self.number, self.call);
        let peer = &mut self.peers[to.index()];
        if !peer.is_unread && peer.told < number {
            (peer.told, peer.is_unread) = (number, true);
            self.give_sign(to, Content::Waiting { number, call });
        }
    }

    fn timed_out(&self, whom: Rank) -> GroupError {
        let absent = |rank: &Rank| {
            *rank != self.rank && !self.is_direct() && self.peers[rank.index()].number < self.number
        };
        let mut ranks: Vec<Rank> = (0..self.world()).map(Rank).filter(absent).collect();
        if ranks.is_empty() {
            ranks.push(whom);
        }
        let seconds = self.began.elapsed().as_secs_f64();
        GroupError::TimedOut { call: self.call.to_string(), seconds, ranks }
    }

    /// Takes note of a packet.
    fn sort(&mut self, packet: Packet) -> Result<(), GroupError> {
        let Packet { from, content } = packet;
        let peer = &mut self.peers[from.index()];
        match content {
            Content::Collective { number, call, body, is_credited } => {
                peer.number = number;
                peer.collective.push_back((number, call, body, is_credited));
                self.compare(from, number, call)
            }
            Content::Waiting { number, call } => {
                peer.number = peer.number.max(number);
                self.give_sign(from, Content::Read);
                self.compare(from, number, call)
            }
            Content::Read => {
                peer.is_unread = false;
                if self.is_late {
                    self.tell(from);
                }
                Ok(())
            }
            Content::Direct { call, body } => {
                peer.direct.push_back((call, body));
                Ok(())
            }
            Content::Credit { is_direct } => {
                *peer.credits.of(is_direct) += 1;
                Ok(())
            }
            Content::Left { panicked } => {
                peer.left = Some(panicked);
                Ok(())
            }
        }
    }

    // ---- Calls that do not belong together ----

    /// Whether what another rank called is what this rank called with the same number.
    fn compare(&self, from: Rank, number: u64, call: Call) -> Result<(), GroupError> {
        let ago = self.number.checked_sub(number);
        let index = ago.and_then(|ago| self.calls.len().checked_sub(1 + ago as usize));
        match index.map(|index| self.calls[index]) {
            Some(own) if own != call => Err(self.mismatch(from, number, call)),
            _ => Ok(()),
        }
    }

    fn mismatch(&self, from: Rank, number: u64, call: Call) -> GroupError {
        let ago = self.number.saturating_sub(number) as usize;
        let own = self.calls[self.calls.len() - 1 - ago.min(self.calls.len() - 1)];
        let own_number = self.number.min(number);
        let rank = self.rank;
        GroupError::Mismatch(format!(
            "{rank} called {own} (collective {own_number}), and {from} {call} (collective {number})"
        ))
    }

    /// What was sent must be as long as what is asked for, and of the same type.
    fn compare_direct(&self, from: Rank, call: Call) -> Result<(), GroupError> {
        let own = self.call;
        if (own.length, own.element) == (call.length, call.element) {
            return Ok(());
        }
        let rank = self.rank;
        Err(GroupError::Mismatch(format!("{rank} called {own}, and {from} {call}")))
    }
}

fn aborted(why: &str) -> GroupError {
    GroupError::Aborted(why.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks whose calls end after 300 ms.
    fn pair() -> [Link; 2] {
        let links = Link::all(2, PATIENCE + Duration::from_millis(100));
        links.try_into().unwrap_or_else(|_| unreachable!("there are two"))
    }

    fn times_out(link: &mut Link, call: Call, from: Rank) {
        link.enter(call).unwrap();
        let error = link.receive(from).unwrap_err();
        assert!(matches!(error, GroupError::TimedOut { .. }), "{error}");
    }

    /// The collectives in which a rank is told that another one waits.
    fn told(link: &Link) -> Vec<u64> {
        let mut told = Vec::new();
        while let Some(packet) = link.mailbox().try_receive().unwrap() {
            match packet.content {
                Content::Waiting { number, .. } => told.push(number),
                other => panic!("{other:?}"),
            }
        }
        told
    }

    #[test]
    fn a_rank_that_does_not_look_is_told_of_no_send_or_recv_and_of_one_collective() {
        let [mut waits, mut works] = pair();
        let (own, other) = (waits.rank(), works.rank());
        times_out(&mut waits, Call::new::<f32>(Kind::Recv { src: other }, 1), other);
        assert!(told(&works).is_empty());
        (0..3).for_each(|_| times_out(&mut waits, Call::barrier(), other));
        assert_eq!(told(&works), [1]);

        // One that has read it is told of the next collective, and of the same one only once.
        works.give_sign(own, Content::Read);
        times_out(&mut waits, Call::barrier(), other);
        assert_eq!(told(&works), [4]);

        // And one that reads it in time is told at once of what it has missed.
        times_out(&mut waits, Call::barrier(), other);
        let packet =
            Packet { from: own, content: Content::Waiting { number: 4, call: waits.call() } };
        works.sort(packet).unwrap();
        let read = waits.mailbox().try_receive().unwrap().unwrap();
        assert!(matches!(read.content, Content::Read));
        waits.sort(read).unwrap();
        assert_eq!(told(&works), [5]);
    }
}
