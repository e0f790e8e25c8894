//! Connections of one rank to all peers of a group: sends and receives packets with credit-based
//! flow control, and detects timeouts, mismatched calls and peers that left.

use std::any::Any;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::{GroupError, aborted, left_reason};
use super::limits::CREDITS;
use super::packet::{CallKind, CollectiveCall, Packet, PacketKind};
use super::payload::{Payload, Pools};
use super::registry::{GroupContext, GroupKey, GroupRegistry, MemberAddress, packets_max};
use super::remote_process::RemoteProcess;
use crate::collective::{Member, RankGroup};
use crate::comm::{Mailbox, RecvError, SendError};
use potluck_core::{Position, Rank};

/// Number of calls that a rank remembers, to compare them with the calls of slower ranks.
const CALLS_MAX: usize = 64;
/// Duration of a wait after which a rank notifies its peers of the collective in which it waits.
const WAIT_NOTICE_DELAY: Duration = Duration::from_millis(200);

/// State of a peer that this rank knows.
#[derive(Default)]
struct Peer {
    /// Packets that the peer sent and this rank has not taken: of the current and later
    /// collectives, and (`direct`) of `send`.
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
pub(crate) struct PeerChannels {
    /// Owner of the links to other processes, dropped with the last handle: before the registry,
    /// whose state it may query.
    keep: Option<Arc<dyn Any + Send + Sync>>,
    registry: Arc<GroupRegistry>,
    context: Arc<GroupContext>,
    /// This rank's mailbox in the group.
    mailbox: Mailbox<Packet>,
    position: Position,
    pub pools: Pools,
    /// By position.
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
    /// Creates the endpoints of a first group, by position.
    pub fn all(members: &RankGroup, timeout: Duration) -> Vec<Self> {
        let registry = Arc::new(GroupRegistry::default());
        Self::first(&registry, members, 0..members.size(), timeout, None).collect()
    }

    /// Creates the endpoints of a first group for the ranks `here`, of this process.
    pub fn first(
        registry: &Arc<GroupRegistry>,
        members: &RankGroup,
        here: Range<u32>,
        timeout: Duration,
        keep: Option<Arc<dyn Any + Send + Sync>>,
    ) -> impl Iterator<Item = Self> {
        let registry = registry.clone();
        let context = registry.create(members);
        here.filter_map(move |rank| {
            let position = context.members.position(Rank(rank))?;
            Self::new(&registry, context.clone(), position, timeout, keep.clone())
        })
    }

    /// Creates the endpoint of a member of this process.
    fn new(
        registry: &Arc<GroupRegistry>,
        context: Arc<GroupContext>,
        position: Position,
        timeout: Duration,
        keep: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Option<Self> {
        Some(Self {
            keep,
            registry: registry.clone(),
            mailbox: context.mailbox(position)?.clone(),
            position,
            pools: Pools::default(),
            peers: context.members.iter().map(|_| Peer::default()).collect(),
            number: 0,
            call: CollectiveCall::barrier(),
            calls: VecDeque::new(),
            timeout,
            began: Instant::now(),
            is_late: false,
            context,
        })
    }

    /// Creates this rank's endpoint in a group of members of this one. All members must call this
    /// after the same collective. `None` if this rank is not a member.
    pub(crate) fn subgroup(&self, members: &RankGroup) -> Option<Self> {
        let position = members.position(self.rank())?;
        let birth: GroupKey = (self.context.id, self.number, members.rank(Position(0)));
        let context = self.registry.join(birth, members);
        Self::new(&self.registry, context, position, self.timeout, self.keep.clone())
    }

    /// Returns true if there are ranks in other processes.
    pub(crate) fn spans_processes(&self) -> bool {
        self.registry.spans_processes()
    }

    /// Returns the ranks of the group.
    pub fn members(&self) -> &RankGroup {
        &self.context.members
    }

    pub fn position(&self) -> Position {
        self.position
    }

    pub fn rank(&self) -> Rank {
        self.members().rank(self.position)
    }

    /// Returns this rank with its position.
    pub fn member(&self) -> Member {
        self.members().member(self.position)
    }

    /// Returns the current call.
    pub fn call(&self) -> CollectiveCall {
        self.call
    }

    /// Returns the number of ranks in the group.
    pub fn size(&self) -> u32 {
        self.members().size()
    }

    /// Begins the next collective or send: processes the packets that have arrived, and compares
    /// the calls of the peers with the calls of this rank.
    pub(crate) fn begin_call(&mut self, call: CollectiveCall) -> Result<(), GroupError> {
        self.call = call;
        self.began = Instant::now();
        self.is_late = false;
        if !self.is_direct() {
            self.number += 1;
            self.calls.push_back(call);
            if self.calls.len() > CALLS_MAX {
                self.calls.pop_front();
            }
        }
        self.dispatch_arrived()?;
        for (from, peer) in (0..).map(Position).zip(&self.peers) {
            if let Some((number, call, ..)) = peer.collective.front() {
                self.compare(from, *number, *call)?;
            }
        }
        Ok(())
    }

    /// Processes the packets that have arrived; a close takes precedence.
    fn dispatch_arrived(&mut self) -> Result<(), GroupError> {
        while let Some(packet) = self.mailbox().try_recv().map_err(|closed| aborted(&closed.0))? {
            self.dispatch(packet)?;
        }
        Ok(())
    }

    fn is_direct(&self) -> bool {
        matches!(self.call.kind, CallKind::Send { .. } | CallKind::Recv { .. })
    }

    fn mailbox(&self) -> &Mailbox<Packet> {
        &self.mailbox
    }

    /// Aborts all groups of this rank: the calls of their members fail from now on, with this
    /// reason.
    pub fn abort(&self, why: &str) {
        self.registry.fail(self.rank(), why);
    }

    /// Leaves the group, when the handle is dropped; packets that were sent before still arrive.
    pub fn leave(&self, panicked: bool) {
        // A failure closes the mailboxes one after the other. Members that are still open must get
        // its reason, not the leave of this member because of it.
        if let Some(closed) = self.mailbox().closed() {
            return self.context.close(&closed.0);
        }
        for (to, _) in self.members().iter() {
            self.send_control(to, PacketKind::Left { panicked });
        }
        self.mailbox().close(&left_reason(self.member()));
    }

    // ---- Sending ----

    fn post(&mut self, to: Position, kind: PacketKind) -> Result<(), GroupError> {
        let mailbox = match &self.context.addresses[to.index()] {
            MemberAddress::Here(mailbox) => mailbox,
            MemberAddress::There(process) => {
                let process = process.clone();
                return self.post_over(&process, to, kind);
            }
        };
        let closed = match mailbox.send(Packet { from: self.position, kind }) {
            Ok(()) => return Ok(()),
            Err(SendError::Closed(closed)) => closed,
            Err(full @ SendError::Full { .. }) => {
                let call = self.call.to_string();
                return Err(GroupError::Defect { call, why: full.to_string() });
            }
        };
        if closed.0 != left_reason(self.members().member(to)) {
            return Err(aborted(&closed.0));
        }
        // The peer sent `Left` to every rank before it closed its mailbox.
        self.dispatch_arrived()?;
        let panicked = self.peers[to.index()].left.unwrap_or(false);
        Err(self.peer_left(to, panicked))
    }

    /// Sends a packet to a member of another process.
    fn post_over(
        &mut self,
        process: &RemoteProcess,
        to: Position,
        kind: PacketKind,
    ) -> Result<(), GroupError> {
        // A packet to a handle that is gone would be lost silently.
        if let Some(panicked) = self.peers[to.index()].left {
            return Err(self.peer_left(to, panicked));
        }
        let Err(closed) = process.send(self.context.id, [self.position, to], kind) else {
            return Ok(());
        };
        // A process that has ended in order has sent its leaves before.
        self.dispatch_arrived()?;
        match self.peers[to.index()].left {
            Some(panicked) => Err(self.peer_left(to, panicked)),
            None => {
                let why = format!("{process} cannot be reached: {closed}");
                self.abort(&why);
                Err(aborted(&why))
            }
        }
    }

    /// Sends a packet without a credit, for collectives in which no receiver can fall behind.
    pub fn send(&mut self, to: Position, payload: Payload) -> Result<(), GroupError> {
        let kind = PacketKind::Collective {
            number: self.number,
            call: self.call,
            payload,
            is_credited: false,
        };
        self.post(to, kind)
    }

    /// Sends a packet and takes a credit; waits while the receiver is [`CREDITS`] packets of this
    /// kind behind (backpressure).
    pub(crate) fn send_credited(
        &mut self,
        to: Position,
        payload: Payload,
    ) -> Result<(), GroupError> {
        let is_direct = self.is_direct();
        while *self.peers[to.index()].credits.of(is_direct) == 0 {
            self.wait_packet(to)?;
        }
        *self.peers[to.index()].credits.of(is_direct) -= 1;
        let call = self.call;
        let kind = if is_direct {
            PacketKind::Direct { call, payload }
        } else {
            PacketKind::Collective { number: self.number, call, payload, is_credited: true }
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
                let number = *number;
                let call = *call;
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
        // A closed mailbox needs no control packets: its rank has left, or the group was aborted;
        // nor does a closed link, because its process is gone.
        let mailbox = match &self.context.addresses[to.index()] {
            MemberAddress::Here(mailbox) => mailbox,
            MemberAddress::There(process) => {
                let _ = process.send(self.context.id, [self.position, to], kind);
                return;
            }
        };
        if let Err(full @ SendError::Full { .. }) =
            mailbox.send(Packet { from: self.position, kind })
        {
            self.abort(&format!("{} found that {full}", self.member()));
        }
    }

    /// Waits for a packet from any rank, because a packet from `whom` is needed: fails if `whom`
    /// has left or if the deadline of the call passes.
    fn wait_packet(&mut self, whom: Position) -> Result<(), GroupError> {
        if let Some(panicked) = self.peers[whom.index()].left {
            return Err(self.peer_left(whom, panicked));
        }
        // `None`: so far ahead that no clock reaches it.
        let deadline = self.began.checked_add(self.timeout);
        // A send or recv waits for one rank only, whatever its peers call: no waiting notices.
        let notice = if self.is_late || self.is_direct() {
            None
        } else {
            Some(self.began + WAIT_NOTICE_DELAY)
        };
        let until = match (deadline, notice) {
            (Some(deadline), Some(notice)) => Some(deadline.min(notice)),
            (deadline, notice) => deadline.or(notice),
        };
        let received = self.mailbox().recv(until);
        // A thread that wakes late may find both times passed: peers get their notice first.
        let is_notice_due = notice.is_some_and(|at| Instant::now() >= at);
        if is_notice_due && !matches!(received, Err(RecvError::Closed(_))) {
            self.notify_all();
        }
        match received {
            Ok(packet) => self.dispatch(packet),
            Err(RecvError::Closed(closed)) => Err(aborted(&closed.0)),
            Err(RecvError::TimedOut) if deadline.is_none_or(|at| Instant::now() < at) => Ok(()),
            Err(RecvError::TimedOut) => Err(self.timed_out(whom)),
        }
    }

    /// Notifies every peer of the collective in which this rank waits, so that the peer can
    /// detect a mismatch with its own call.
    fn notify_all(&mut self) {
        self.is_late = true;
        for to in (0..self.size()).map(Position) {
            if to != self.position {
                self.notify(to);
            }
        }
    }

    /// Sends a waiting notice to a peer, unless the peer has one for this collective or has not
    /// acknowledged the last one; its acknowledgement then triggers the next notice. So a rank
    /// that does not read its mailbox has at most one notice of each peer in it.
    fn notify(&mut self, to: Position) {
        let number = self.number;
        let peer = &mut self.peers[to.index()];
        if !peer.is_unread && peer.notified < number {
            peer.notified = number;
            peer.is_unread = true;
            self.send_control(to, PacketKind::Waiting { number, call: self.call });
        }
    }

    fn peer_left(&self, peer: Position, panicked: bool) -> GroupError {
        let member = self.members().member(peer);
        GroupError::PeerLeft { call: self.call.to_string(), member, panicked }
    }

    /// Returns the error of values of another form, type or length than the call's.
    pub fn unexpected(&self, from: Position) -> GroupError {
        let member = self.members().member(from);
        GroupError::Unexpected { call: self.call.to_string(), member }
    }

    fn timed_out(&self, whom: Position) -> GroupError {
        let mut members = Vec::new();
        if !self.is_direct() {
            for (position, peer) in (0..).map(Position).zip(&self.peers) {
                if position != self.position && peer.number < self.number {
                    members.push(self.members().member(position));
                }
            }
        }
        if members.is_empty() {
            members.push(self.members().member(whom));
        }
        let seconds = self.began.elapsed().as_secs_f64();
        GroupError::TimedOut { call: self.call.to_string(), seconds, members }
    }

    /// Processes one packet: updates the state of the peer that sent it.
    fn dispatch(&mut self, packet: Packet) -> Result<(), GroupError> {
        let Packet { from, kind } = packet;
        let [collective_max, direct_max] = packets_max(self.peers.len());
        let peer = &mut self.peers[from.index()];
        let is_full = match kind {
            PacketKind::Collective { .. } => peer.collective.len() >= collective_max,
            PacketKind::Direct { .. } => peer.direct.len() >= direct_max,
            _ => false,
        };
        if is_full {
            let why = format!("{} sent more packets than may wait", self.members().member(from));
            return Err(GroupError::Defect { call: self.call.to_string(), why });
        }
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
                let credits = peer.credits.of(is_direct);
                *credits += 1;
                if *credits > CREDITS {
                    let from = self.members().member(from);
                    let why = format!("{from} returned more credits than it was sent");
                    return Err(GroupError::Defect { call: self.call.to_string(), why });
                }
                Ok(())
            }
            PacketKind::Left { panicked } => {
                // The leave of its process may follow the leave of the rank.
                peer.left.get_or_insert(panicked);
                Ok(())
            }
        }
    }

    // ---- Mismatched calls ----

    /// Checks that a peer's call equals this rank's call with the same number.
    fn compare(&self, from: Position, number: u64, call: CollectiveCall) -> Result<(), GroupError> {
        let Some(ago) = self.number.checked_sub(number) else { return Ok(()) };
        let Some(index) = self.calls.len().checked_sub(1 + ago as usize) else { return Ok(()) };
        if self.calls[index] != call {
            return Err(self.mismatch(from, number, call));
        }
        Ok(())
    }

    fn mismatch(&self, from: Position, number: u64, call: CollectiveCall) -> GroupError {
        let ago = self.number.saturating_sub(number) as usize;
        let own = self.calls[self.calls.len() - 1 - ago.min(self.calls.len() - 1)];
        let own_number = self.number.min(number);
        let this = self.member();
        let from = self.members().member(from);
        GroupError::Mismatch(format!(
            "{this} called {own} (collective {own_number}), and {from} {call} (collective {number})"
        ))
    }

    /// Checks that a peer's `send` has the length and the element type of this rank's call.
    fn compare_direct(&self, from: Position, call: CollectiveCall) -> Result<(), GroupError> {
        let own = self.call;
        if own.length == call.length && own.element == call.element {
            return Ok(());
        }
        let this = self.member();
        let from = self.members().member(from);
        Err(GroupError::Mismatch(format!("{this} called {own}, and {from} {call}")))
    }
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

    /// Collectives for which a rank has a waiting notice in its mailbox.
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
