//! Connections of one rank to all peers: sends and receives packets with credit-based flow
//! control, and detects timeouts, mismatched calls and peers that left.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::packet::{CallKind, CollectiveCall, Packet, PacketKind, Payload, Pools};
use crate::base::{Position, Rank};
use crate::collective::{ExchangeError, RankGroup};
use crate::comm::{Mailbox, RecvError, SendError};

/// Credits towards each receiver: the number of packets that a rank may be ahead of it, for
/// rooted collectives and for sends each. The two kinds are counted separately, because a
/// receiver that takes packets of one kind does not wait for the other.
pub const CREDITS: u32 = 16;
/// Partial sums of an exchange that a rank begins beyond those that have ended with it.
pub const WINDOW: usize = 2;
/// Number of calls that a rank remembers, to compare them with the calls of slower ranks.
const CALLS_MAX: usize = 64;
/// Duration of a wait after which a rank notifies its peers of the collective in which it waits.
const WAIT_NOTICE_DELAY: Duration = Duration::from_millis(200);

/// Error of a collective. After an error, no further call on the group succeeds: the calls of
/// every other rank fail as well and name this rank.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GroupError {
    #[error("{call}: {why}")]
    Argument { call: String, why: String },
    /// Two ranks made calls that do not match.
    #[error("{0}")]
    Mismatch(String),
    #[error("{call}: waited {seconds:.1} s for {}", list(ranks))]
    TimedOut { call: String, seconds: f64, ranks: Vec<Rank> },
    #[error(
        "{call}: {}{}",
        left_reason(*rank),
        if *panicked { " (its thread panicked)" } else { "" }
    )]
    PeerLeft { call: String, rank: Rank, panicked: bool },
    /// Another rank failed or aborted the group.
    #[error("{0}")]
    Aborted(String),
    /// A state that only a bug of the library explains.
    #[error("{call}: {why}")]
    Defect { call: String, why: String },
    /// A message that only a bug of the library explains.
    #[error("{0}, which is a defect of potluck; please report it")]
    Exchange(#[from] ExchangeError),
}

/// Close reason of the mailbox of a rank whose handle was dropped.
fn left_reason(rank: Rank) -> String {
    format!("{rank} left the group")
}

fn list(ranks: &[Rank]) -> String {
    ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ")
}

/// State of a peer, as far as this rank knows it.
#[derive(Default)]
struct Peer {
    /// Packets that the peer sent and this rank has not taken: of collectives from the current
    /// one on, and (`direct`) of `send`.
    collective: VecDeque<(u64, CollectiveCall, Payload, bool)>,
    direct: VecDeque<(CollectiveCall, Payload)>,
    /// Credits that this rank has left towards the peer.
    credits: Credits,
    /// Number of the last collective that the peer is known to have begun.
    number: u64,
    /// Number of the last collective for which this rank sent the peer a waiting notice.
    notified: u64,
    /// True if the peer has not acknowledged the last waiting notice.
    is_unread: bool,
    /// Set when the peer's handle was dropped; true if its thread panicked.
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

/// Endpoint of one rank: its mailbox and the channels to its peers.
pub struct PeerChannels {
    members: RankGroup,
    position: Position,
    /// By position, as the peers.
    mailboxes: Arc<Vec<Mailbox<Packet>>>,
    pub pools: Pools,
    peers: Vec<Peer>,
    /// Number of the current collective, from 1.
    number: u64,
    call: CollectiveCall,
    /// The most recent collectives, the current one last.
    calls: VecDeque<CollectiveCall>,
    /// Maximum duration of a call.
    pub timeout: Duration,
    began: Instant,
    /// True if this rank has waited so long in the current collective that it notifies its peers.
    is_late: bool,
}

impl PeerChannels {
    /// Creates the endpoints of a group, by position.
    pub fn all(members: &RankGroup, timeout: Duration) -> Vec<Self> {
        let ranks = members.size() as usize;
        // Per sender: the packets and returned credits of both kinds, two exchanges, and control
        // packets: two barriers, a waiting notice, an acknowledgement and a leave.
        let items_max = ranks * (4 * CREDITS as usize + 8 * WINDOW * ranks + 2 * 32 + 3);
        let mailboxes = Arc::new((0..ranks).map(|_| Mailbox::new(items_max)).collect::<Vec<_>>());
        let peers = || (0..ranks).map(|_| Peer::default()).collect();
        let channels = |position| Self {
            members: members.clone(),
            position,
            mailboxes: mailboxes.clone(),
            pools: Pools::default(),
            peers: peers(),
            number: 0,
            call: CollectiveCall::barrier(),
            calls: VecDeque::new(),
            timeout,
            began: Instant::now(),
            is_late: false,
        };
        members.iter().map(|(position, _)| channels(position)).collect()
    }

    /// Returns the ranks of the group.
    pub fn members(&self) -> &RankGroup {
        &self.members
    }

    pub fn position(&self) -> Position {
        self.position
    }

    pub fn rank(&self) -> Rank {
        self.members.rank(self.position)
    }

    /// Returns the current call.
    pub fn call(&self) -> CollectiveCall {
        self.call
    }

    /// Returns the number of ranks in the group.
    pub fn size(&self) -> u32 {
        self.members.size()
    }

    /// Begins the next collective or send: processes the packets that have arrived, and compares
    /// the calls of the peers with the calls of this rank.
    pub fn begin_call(&mut self, call: CollectiveCall) -> Result<(), GroupError> {
        (self.call, self.began, self.is_late) = (call, Instant::now(), false);
        if !self.is_direct() {
            self.number += 1;
            self.calls.push_back(call);
            if self.calls.len() > CALLS_MAX {
                self.calls.pop_front();
            }
        }
        // Packets that arrived in the meantime; a close takes precedence.
        while let Some(packet) = self.mailbox().try_recv().map_err(|closed| aborted(&closed.0))? {
            self.dispatch(packet)?;
        }
        for (from, peer) in (0..).map(Position).zip(&self.peers) {
            if let Some((number, call, ..)) = peer.collective.front() {
                self.compare(from, *number, *call)?;
            }
        }
        Ok(())
    }

    fn is_direct(&self) -> bool {
        matches!(self.call.kind, CallKind::Send { .. } | CallKind::Recv { .. })
    }

    fn mailbox(&self) -> &Mailbox<Packet> {
        &self.mailboxes[self.position.index()]
    }

    /// Aborts the group: the calls of every rank fail from now on, with this reason.
    pub fn abort(&self, why: &str) {
        self.mailboxes.iter().for_each(|mailbox| mailbox.close(why));
    }

    /// Leaves the group, when the handle is dropped; packets that were sent before still arrive.
    pub fn leave(&self, panicked: bool) {
        for (to, _) in self.members.iter() {
            self.send_control(to, PacketKind::Left { panicked });
        }
        self.mailbox().close(&left_reason(self.rank()));
    }

    // ---- Sending ----

    fn post(&mut self, to: Position, kind: PacketKind) -> Result<(), GroupError> {
        let packet = Packet { from: self.position, kind };
        let closed = match self.mailboxes[to.index()].send(packet) {
            Ok(()) => return Ok(()),
            Err(SendError::Closed(closed)) => closed,
            Err(full @ SendError::Full { .. }) => {
                let (call, why) = (self.call.to_string(), full.to_string());
                return Err(GroupError::Defect { call, why });
            }
        };
        if closed.0 != left_reason(self.members.rank(to)) {
            return Err(aborted(&closed.0));
        }
        // The peer sent `Left` to every rank before it closed its mailbox.
        while let Some(packet) = self.mailbox().try_recv().map_err(|closed| aborted(&closed.0))? {
            self.dispatch(packet)?;
        }
        let panicked = self.peers[to.index()].left.unwrap_or(false);
        Err(self.peer_left(to, panicked))
    }

    /// Sends a packet without a credit, for collectives in which no receiver can fall behind.
    pub fn send(&mut self, to: Position, payload: Payload) -> Result<(), GroupError> {
        let (number, call) = (self.number, self.call);
        self.post(to, PacketKind::Collective { number, call, payload, is_credited: false })
    }

    /// Sends a packet and takes a credit; waits while the receiver is [`CREDITS`] packets of this
    /// kind behind (backpressure).
    pub fn send_credited(&mut self, to: Position, payload: Payload) -> Result<(), GroupError> {
        let is_direct = self.is_direct();
        while *self.peers[to.index()].credits.of(is_direct) == 0 {
            self.wait_packet(to)?;
        }
        *self.peers[to.index()].credits.of(is_direct) -= 1;
        let (number, call) = (self.number, self.call);
        let kind = match is_direct {
            true => PacketKind::Direct { call, payload },
            false => PacketKind::Collective { number, call, payload, is_credited: true },
        };
        self.post(to, kind)
    }

    // ---- Receiving ----

    /// Receives the next payload of a peer in the current call.
    pub fn recv(&mut self, from: Position) -> Result<Payload, GroupError> {
        loop {
            if self.is_direct() {
                if let Some((call, payload)) = self.peers[from.index()].direct.pop_front() {
                    self.send_control(from, PacketKind::Credit { is_direct: true });
                    self.compare_direct(from, call)?;
                    return Ok(payload);
                }
            } else if let Some((number, call, ..)) = self.peers[from.index()].collective.front() {
                let (number, call) = (*number, *call);
                self.compare(from, number, call)?;
                // The next packet is of another collective: the peer sent nothing for this one.
                if number != self.number {
                    return Err(self.mismatch(from, number, call));
                }
                if let Some((.., payload, is_credited)) =
                    self.peers[from.index()].collective.pop_front()
                {
                    if is_credited {
                        self.send_control(from, PacketKind::Credit { is_direct: false });
                    }
                    return Ok(payload);
                }
            }
            self.wait_packet(from)?;
        }
    }

    fn send_control(&self, to: Position, kind: PacketKind) {
        let packet = Packet { from: self.position, kind };
        // A closed mailbox needs no control packets: its rank has left, or the group was aborted.
        if let Err(full @ SendError::Full { .. }) = self.mailboxes[to.index()].send(packet) {
            self.abort(&format!("{} found that {full}", self.rank()));
        }
    }

    /// Waits for a packet from any rank, because a packet from `whom` is needed: fails if `whom`
    /// has left or if the deadline of the call passes.
    fn wait_packet(&mut self, whom: Position) -> Result<(), GroupError> {
        if let Some(panicked) = self.peers[whom.index()].left {
            return Err(self.peer_left(whom, panicked));
        }
        let deadline = self.began + self.timeout;
        // A send or recv waits for one rank only, whatever its peers call: no waiting notices.
        let tells = !self.is_late && !self.is_direct();
        let until = if tells { deadline.min(self.began + WAIT_NOTICE_DELAY) } else { deadline };
        match self.mailbox().recv(Some(until)) {
            Ok(packet) => {
                if tells && Instant::now() > until {
                    self.notify_all();
                }
                self.dispatch(packet)
            }
            Err(RecvError::Closed(closed)) => Err(aborted(&closed.0)),
            Err(RecvError::TimedOut) if Instant::now() < deadline => {
                self.notify_all();
                Ok(())
            }
            Err(RecvError::TimedOut) => Err(self.timed_out(whom)),
        }
    }

    /// Notifies every peer of the collective in which this rank waits, so that the peer can
    /// detect a mismatch with its own call.
    fn notify_all(&mut self) {
        self.is_late = true;
        let own = self.position;
        (0..self.size()).map(Position).filter(|to| *to != own).for_each(|to| self.notify(to));
    }

    /// Sends a waiting notice to a peer, unless the peer has one for this collective or has not
    /// acknowledged the last one; its acknowledgement then triggers the next notice. So a rank
    /// that does not read its mailbox has at most one notice of each peer in it.
    fn notify(&mut self, to: Position) {
        let (number, call) = (self.number, self.call);
        let peer = &mut self.peers[to.index()];
        if !peer.is_unread && peer.notified < number {
            (peer.notified, peer.is_unread) = (number, true);
            self.send_control(to, PacketKind::Waiting { number, call });
        }
    }

    fn peer_left(&self, peer: Position, panicked: bool) -> GroupError {
        let rank = self.members.rank(peer);
        GroupError::PeerLeft { call: self.call.to_string(), rank, panicked }
    }

    fn timed_out(&self, whom: Position) -> GroupError {
        let is_absent = |peer: Position| {
            peer != self.position
                && !self.is_direct()
                && self.peers[peer.index()].number < self.number
        };
        let absent = self.members.iter().filter(|(peer, _)| is_absent(*peer));
        let mut ranks: Vec<Rank> = absent.map(|(_, rank)| rank).collect();
        if ranks.is_empty() {
            ranks.push(self.members.rank(whom));
        }
        let seconds = self.began.elapsed().as_secs_f64();
        GroupError::TimedOut { call: self.call.to_string(), seconds, ranks }
    }

    /// Processes one packet: updates the state of the peer that sent it.
    fn dispatch(&mut self, packet: Packet) -> Result<(), GroupError> {
        let Packet { from, kind } = packet;
        let peer = &mut self.peers[from.index()];
        match kind {
            PacketKind::Collective { number, call, payload, is_credited } => {
                peer.number = number;
                peer.collective.push_back((number, call, payload, is_credited));
                self.compare(from, number, call)
            }
            PacketKind::Waiting { number, call } => {
                peer.number = peer.number.max(number);
                self.send_control(from, PacketKind::WaitingAck);
                self.compare(from, number, call)
            }
            PacketKind::WaitingAck => {
                peer.is_unread = false;
                if self.is_late {
                    self.notify(from);
                }
                Ok(())
            }
            PacketKind::Direct { call, payload } => {
                peer.direct.push_back((call, payload));
                Ok(())
            }
            PacketKind::Credit { is_direct } => {
                *peer.credits.of(is_direct) += 1;
                Ok(())
            }
            PacketKind::Left { panicked } => {
                peer.left = Some(panicked);
                Ok(())
            }
        }
    }

    // ---- Mismatched calls ----

    /// Checks that a peer's call equals this rank's call with the same number.
    fn compare(&self, from: Position, number: u64, call: CollectiveCall) -> Result<(), GroupError> {
        let ago = self.number.checked_sub(number);
        let index = ago.and_then(|ago| self.calls.len().checked_sub(1 + ago as usize));
        match index.map(|index| self.calls[index]) {
            Some(own) if own != call => Err(self.mismatch(from, number, call)),
            _ => Ok(()),
        }
    }

    fn mismatch(&self, from: Position, number: u64, call: CollectiveCall) -> GroupError {
        let ago = self.number.saturating_sub(number) as usize;
        let own = self.calls[self.calls.len() - 1 - ago.min(self.calls.len() - 1)];
        let own_number = self.number.min(number);
        let (rank, from) = (self.rank(), self.members.rank(from));
        GroupError::Mismatch(format!(
            "{rank} called {own} (collective {own_number}), and {from} {call} (collective {number})"
        ))
    }

    /// Checks that a peer's `send` has the length and the element type of this rank's call.
    fn compare_direct(&self, from: Position, call: CollectiveCall) -> Result<(), GroupError> {
        let own = self.call;
        if (own.length, own.element) == (call.length, call.element) {
            return Ok(());
        }
        let (rank, from) = (self.rank(), self.members.rank(from));
        Err(GroupError::Mismatch(format!("{rank} called {own}, and {from} {call}")))
    }
}

fn aborted(why: &str) -> GroupError {
    GroupError::Aborted(why.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks whose calls time out after 300 ms.
    fn pair() -> [PeerChannels; 2] {
        let channels =
            PeerChannels::all(&RankGroup::all(2), WAIT_NOTICE_DELAY + Duration::from_millis(100));
        channels.try_into().unwrap_or_else(|_| unreachable!("there are two"))
    }

    fn times_out(channels: &mut PeerChannels, call: CollectiveCall, from: Position) {
        channels.begin_call(call).unwrap();
        let error = channels.recv(from).unwrap_err();
        assert!(matches!(error, GroupError::TimedOut { .. }), "{error}");
    }

    /// Returns the collectives for which a rank has a waiting notice in its mailbox.
    fn notified(channels: &PeerChannels) -> Vec<u64> {
        let mut notified = Vec::new();
        while let Some(packet) = channels.mailbox().try_recv().unwrap() {
            match packet.kind {
                PacketKind::Waiting { number, .. } => notified.push(number),
                other => panic!("{other:?}"),
            }
        }
        notified
    }

    #[test]
    fn more_packets_than_a_mailbox_holds_are_a_defect_that_ends_the_group() {
        let [mut sends, mut receives] = pair();
        let to = receives.position();
        sends.begin_call(CollectiveCall::barrier()).unwrap();
        let error = loop {
            if let Err(error) = sends.send(to, Payload::Nothing) {
                break error;
            }
        };
        let text = error.to_string();
        assert!(matches!(error, GroupError::Defect { .. }), "{text}");
        assert!(text.starts_with("barrier: a mailbox for ") && text.contains("is full"), "{text}");
        let error = receives.begin_call(CollectiveCall::barrier()).unwrap_err();
        assert!(error.to_string().contains("is full, which is a defect of potluck"), "{error}");
        assert!(matches!(error, GroupError::Aborted(_)));
    }

    #[test]
    fn a_rank_that_does_not_look_is_told_of_no_send_or_recv_and_of_one_collective() {
        let [mut waits, mut works] = pair();
        let (own, other) = (waits.position(), works.position());
        times_out(
            &mut waits,
            CollectiveCall::new::<f32>(CallKind::Recv { src: works.rank() }, 1),
            other,
        );
        assert!(notified(&works).is_empty());
        (0..3).for_each(|_| times_out(&mut waits, CollectiveCall::barrier(), other));
        assert_eq!(notified(&works), [1]);

        // A rank that acknowledged a notice gets one for the next collective, and one only.
        works.send_control(own, PacketKind::WaitingAck);
        times_out(&mut waits, CollectiveCall::barrier(), other);
        assert_eq!(notified(&works), [4]);

        // A rank that acknowledges in time gets a notice of the missed collective at once.
        times_out(&mut waits, CollectiveCall::barrier(), other);
        let packet =
            Packet { from: own, kind: PacketKind::Waiting { number: 4, call: waits.call() } };
        works.dispatch(packet).unwrap();
        let read = waits.mailbox().try_recv().unwrap().unwrap();
        assert!(matches!(read.kind, PacketKind::WaitingAck));
        waits.dispatch(read).unwrap();
        assert_eq!(notified(&works), [5]);
    }
}
