//! State machine of a node that joins: it greets the first node, waits with the others, connects to
//! them, and runs until the first node names an end or is lost.

mod pairing;
#[cfg(test)]
mod tests;

use core::net::SocketAddr;

use super::bounds::{REPLY_TIMEOUT, START_TIMEOUT};
use super::error::ClusterError;
use super::event::{Action, ClusterEnd, ConnectionEnd, Event, MovedNode, Outbox};
use super::heartbeat_timer::HeartbeatTimer;
use super::hello::Hello;
use super::ids::{ConnectionId, DialId};
use super::message::{ClusterMsg, Loss, Welcome, silent_for};
use super::pairs::{PairLink, PairState};
use super::pending_connections::PendingConnections;
use super::roster::{Roster, can_be_dialed};
use super::text::{WHY_BYTES_MAX, shown_text};
use potluck_core::{Generation, Nanos, NodeRank, Remedy};

const FIRST: NodeRank = NodeRank(0);

/// Node that joins a run.
#[derive(Clone, Debug)]
pub struct JoiningNodeOptions {
    pub hello: Hello,
    /// Addresses of the first node that the user typed.
    pub first: Vec<SocketAddr>,
}

#[derive(Clone, Copy, Debug)]
enum JoinPhase {
    /// The first node is dialed.
    Dialing {
        until: Nanos,
    },
    /// The hello was sent.
    Greeting {
        until: Nanos,
    },
    /// Others are awaited.
    Waiting,
    /// All nodes have joined, and pairs connect.
    Pairing {
        dials_until: Nanos,
        until: Nanos,
    },
    Running,
    Over,
}

/// Link to the first node.
#[derive(Debug)]
struct FirstLink {
    connection: ConnectionId,
    address: SocketAddr,
    welcome: Option<Welcome>,
    heartbeat_timer: HeartbeatTimer,
    /// True once the connection has ended: nothing can be sent.
    is_closed: bool,
}

/// Pair that another node opened for a roster that has not arrived yet.
#[derive(Debug)]
struct EarlyPair {
    connection: ConnectionId,
    address: SocketAddr,
    message: ClusterMsg,
    generation: Generation,
    until: Nanos,
}

/// Machine of a joining node.
#[derive(Debug)]
pub struct JoiningNode {
    options: JoiningNodeOptions,
    phase: JoinPhase,
    first: Option<FirstLink>,
    /// Generation that is being formed, or that runs; 0 before the welcome.
    generation: Generation,
    /// Once it has arrived: the roster with this node's number.
    roster: Option<(NodeRank, Roster)>,
    /// Set once the first node has left a run that had started, with its reason.
    first_left: Option<String>,
    pairs: Vec<PairLink>,
    pending_connections: PendingConnections,
    early: Vec<EarlyPair>,
    dials: u64,
    outbox: Outbox,
}

impl JoiningNode {
    /// Creates a machine at the time `now`. Its first action dials the first node.
    ///
    /// # Errors
    /// Returns [`ClusterError`] for a greeting beyond its bounds, and addresses that cannot be
    /// dialed.
    pub fn new(options: JoiningNodeOptions, now: Nanos) -> Result<Self, ClusterError> {
        options.hello.check()?;
        if options.first.is_empty() {
            return Err(ClusterError::NoAddress);
        }
        if let Some(&address) = options.first.iter().find(|address| !can_be_dialed(address)) {
            return Err(ClusterError::Address { address });
        }
        let mut outbox = Outbox::default();
        let addresses = options.first.clone();
        outbox.push(Action::Dial { dial: DialId(0), node: FIRST, endpoint: None, addresses });
        Ok(Self {
            options,
            phase: JoinPhase::Dialing { until: now.saturating_add(REPLY_TIMEOUT) },
            first: None,
            generation: Generation(0),
            roster: None,
            first_left: None,
            pairs: Vec::new(),
            pending_connections: PendingConnections::default(),
            early: Vec::new(),
            dials: 0,
            outbox,
        })
    }

    // ---- Events ----

    /// Takes an event at the time `now`, which never decreases. Everything is ignored once the
    /// machine is over.
    ///
    /// # Errors
    /// Returns [`ClusterError`] for an event that is not due. A peer's violation of the protocol
    /// also closes its connection, and ends this machine if the peer is the first node; a message
    /// of a generation that is over does neither.
    pub fn handle(&mut self, now: Nanos, event: Event) -> Result<(), ClusterError> {
        if self.is_over() {
            return Ok(());
        }
        match event {
            Event::Accepted { connection, address } => {
                if self.knows(connection) {
                    return Err(ClusterError::ConnectionTwice { connection });
                }
                self.pending_connections.enter(now, connection, address, &mut self.outbox);
                Ok(())
            }
            Event::Dialed { dial, connection, address } => {
                if self.knows(connection) {
                    return Err(ClusterError::ConnectionTwice { connection });
                }
                self.dialed(now, dial, connection, address);
                Ok(())
            }
            Event::DialFailed { dial, why, is_silent, remedy } => {
                if dial == DialId(0) && matches!(self.phase, JoinPhase::Dialing { .. }) {
                    if is_silent {
                        self.end_without_answer();
                    } else {
                        self.fail_to_reach_first(&why, remedy);
                    }
                } else {
                    self.dial_failed(dial, &why);
                }
                Ok(())
            }
            Event::Received { connection, message } => self.receive(now, connection, message),
            Event::Moved { connection, address } => {
                self.moved(connection, address);
                Ok(())
            }
            Event::Closed { connection, end } => {
                self.closed(connection, end);
                Ok(())
            }
        }
    }

    /// Returns the next action, if there is one.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.outbox.pop()
    }

    /// Leaves in order, before or after the start.
    pub fn leave(&mut self, why: &str) {
        if self.is_over() {
            return;
        }
        let why = shown_text(why, WHY_BYTES_MAX);
        self.send_to_first(ClusterMsg::Leave { why: why.clone() });
        self.end(ClusterEnd::Left { why });
    }

    /// Time at which the first node was last heard, by its connection.
    pub(crate) fn heard_at(&self) -> Vec<(ConnectionId, Nanos)> {
        self.first
            .iter()
            .map(|first| (first.connection, first.heartbeat_timer.heard_at()))
            .collect()
    }

    pub fn is_over(&self) -> bool {
        matches!(self.phase, JoinPhase::Over)
    }

    /// Returns the longest silence of a node; `None` before the welcome.
    pub fn node_timeout(&self) -> Option<Nanos> {
        self.welcome().map(|welcome| welcome.node_timeout)
    }

    fn dialed(&mut self, now: Nanos, dial: DialId, connection: ConnectionId, address: SocketAddr) {
        if dial == DialId(0) && matches!(self.phase, JoinPhase::Dialing { .. }) {
            let heartbeat_timer = HeartbeatTimer::new(REPLY_TIMEOUT, now);
            self.first = Some(FirstLink {
                connection,
                address,
                welcome: None,
                heartbeat_timer,
                is_closed: false,
            });
            self.phase = JoinPhase::Greeting { until: now.saturating_add(REPLY_TIMEOUT) };
            self.outbox.send(connection, ClusterMsg::Hello(self.options.hello.clone()));
            return;
        }
        let opening = self.opening(dial);
        let pair = self.pairs.iter_mut().find(|pair| pair.state == PairState::Dialing(dial));
        match (pair, opening) {
            (Some(pair), Some(opening)) => {
                pair.state = PairState::Opening(connection);
                pair.seen = Some(address);
                self.outbox.send(connection, opening);
            }
            _ => self.outbox.close(connection, "the dial is no longer needed"),
        }
    }

    fn dial_failed(&mut self, dial: DialId, why: &str) {
        let state = PairState::Dialing(dial);
        if let Some(index) = self.pairs.iter().position(|pair| pair.state == state) {
            self.fail_pair(index, why);
        }
    }

    fn end_without_answer(&mut self) {
        let tried = self.options.first.clone();
        self.end(ClusterEnd::Failed(ClusterError::RpcError { tried, timeout: REPLY_TIMEOUT }));
    }

    fn fail_to_reach_first(&mut self, why: &str, remedy: Remedy) {
        let tried = self.options.first.clone();
        let why = shown_text(why, WHY_BYTES_MAX);
        self.end(ClusterEnd::Failed(ClusterError::NoFirstNode { tried, why, remedy }));
    }

    fn moved(&mut self, connection: ConnectionId, to: SocketAddr) {
        self.pending_connections.moved(connection, to);
        for early in &mut self.early {
            if early.connection == connection {
                early.address = to;
            }
        }
        let Some(index) = self.pair_index(connection) else { return };
        let who = self.name(self.pairs[index].node);
        let pair = &mut self.pairs[index];
        if let Some(from) = pair.seen.replace(to) {
            self.outbox.push(Action::Moved(MovedNode { who, from, to }));
        }
    }

    fn closed(&mut self, connection: ConnectionId, end: ConnectionEnd) {
        self.pending_connections.leave(connection);
        self.early.retain(|early| early.connection != connection);
        if let Some(first) = &mut self.first
            && first.connection == connection
        {
            first.is_closed = true;
            let node_timeout = first.welcome.as_ref().map(|welcome| welcome.node_timeout);
            return match (end, node_timeout) {
                // A run that is full or over, and does not include this node.
                (ConnectionEnd::Peer(why), None) => {
                    self.end(ClusterEnd::Refused { why, remedy: Remedy::Time });
                }
                // The silence of a node is measured by its heartbeats.
                (ConnectionEnd::Silent(_), Some(timeout)) => self.lose_first(&silent_for(timeout)),
                (end, _) => self.lose_first(&end.loss("its link")),
            };
        }
        if let Some(index) = self.pair_index(connection) {
            self.fail_pair(index, &end.loss("the link"));
        }
    }

    fn receive(
        &mut self,
        now: Nanos,
        connection: ConnectionId,
        message: ClusterMsg,
    ) -> Result<(), ClusterError> {
        if self.first.as_ref().is_some_and(|first| first.connection == connection) {
            let received = self.receive_from_first(now, message);
            if let Err(error) = &received
                && !matches!(error, ClusterError::OverGeneration { .. })
            {
                self.end(ClusterEnd::Failed(error.clone()));
            }
            return received;
        }
        if let Some(index) = self.pair_index(connection) {
            let received = self.receive_from_peer(index, message);
            if let Err(error) = &received {
                let why = error.to_string();
                self.outbox.close(connection, &why);
                self.fail_pair(index, &why);
            }
            return received;
        }
        if let Some(address) = self.pending_connections.leave(connection) {
            return self.receive_from_guest(now, connection, address, message);
        }
        let Some(index) = self.early.iter().position(|early| early.connection == connection) else {
            return Err(ClusterError::UnknownConnection { connection });
        };
        let early = self.early.swap_remove(index);
        let phase = "before the answer to the pair that it opened";
        self.refuse_peer(connection, early.address, &message, phase)
    }

    // ---- The first node ----

    fn receive_from_first(&mut self, now: Nanos, message: ClusterMsg) -> Result<(), ClusterError> {
        if let Some(first) = &mut self.first {
            first.heartbeat_timer.heard(now);
            if let ClusterMsg::Heartbeat { sequence, .. } = &message
                && let Err(expected) = first.heartbeat_timer.receive(*sequence)
            {
                let who = self.name(FIRST);
                return Err(ClusterError::Sequence { who, found: *sequence, expected });
            }
        }
        if !matches!(self.phase, JoinPhase::Greeting { .. }) {
            self.check_generation(&message)?;
        }
        match (self.phase, message) {
            (JoinPhase::Greeting { .. }, ClusterMsg::Welcome(welcome)) => self.enter(now, welcome),
            (JoinPhase::Running, refused @ ClusterMsg::Refused { .. }) => {
                Err(self.unexpected(&refused))
            }
            (_, ClusterMsg::Refused { why, remedy }) => {
                self.end(ClusterEnd::Refused { why, remedy });
                Ok(())
            }
            (JoinPhase::Running, ClusterMsg::Leave { why }) => {
                // The run ends with the link to the first node, which closes it after all its
                // messages. If this side closed the link, it would lose messages in flight.
                self.first_left.get_or_insert(why);
                Ok(())
            }
            (_, ClusterMsg::Leave { why }) => {
                self.end(ClusterEnd::Left { why });
                Ok(())
            }
            (
                JoinPhase::Waiting | JoinPhase::Pairing { .. },
                ClusterMsg::Present { generation, presence },
            ) => {
                self.wait_for(generation);
                self.outbox.push(Action::Show(presence));
                Ok(())
            }
            (JoinPhase::Waiting, ClusterMsg::Roster { you, roster }) => {
                self.begin_pairing(now, you, roster)
            }
            (JoinPhase::Pairing { .. }, ClusterMsg::Start { generation }) => self.start(generation),
            (JoinPhase::Greeting { .. }, other) => Err(self.unexpected(&other)),
            (_, ClusterMsg::Heartbeat { .. }) => Ok(()),
            (JoinPhase::Running, ClusterMsg::Left { node, why, .. }) => self.note_left(node, why),
            (JoinPhase::Running, ClusterMsg::Lost { loss, .. }) => self.take_loss(loss),
            (_, other) => Err(self.unexpected(&other)),
        }
    }

    fn check_generation(&self, message: &ClusterMsg) -> Result<(), ClusterError> {
        let current = self.generation;
        let name = message.name();
        let Some(found) = message.generation() else { return Ok(()) };
        if found < current {
            let who = self.name(FIRST);
            return Err(ClusterError::OverGeneration { who, message: name, found, current });
        }
        let announces = matches!(message, ClusterMsg::Present { .. });
        if found > current && (!announces || matches!(self.phase, JoinPhase::Running)) {
            let who = self.name(FIRST);
            return Err(ClusterError::LaterGeneration { who, message: name, found, current });
        }
        Ok(())
    }

    /// Takes the welcome, and begins to send heartbeats.
    fn enter(&mut self, now: Nanos, welcome: Welcome) -> Result<(), ClusterError> {
        if let Some(own) = &self.options.hello.run
            && *own != welcome.run
        {
            let own = own.clone();
            return Err(ClusterError::OtherRun { who: self.name(FIRST), found: welcome.run, own });
        }
        self.generation = welcome.generation;
        self.phase = JoinPhase::Waiting;
        if let Some(first) = &mut self.first {
            first.heartbeat_timer = HeartbeatTimer::new(welcome.node_timeout, now);
            first.welcome = Some(welcome);
        }
        Ok(())
    }

    /// Waits for a generation. A later one than before ends the attempt at pairs.
    fn wait_for(&mut self, generation: Generation) {
        if generation == self.generation {
            return;
        }
        let why = format!("{} is over, and {generation} is next", self.generation);
        self.generation = generation;
        self.phase = JoinPhase::Waiting;
        self.roster = None;
        for pair in std::mem::take(&mut self.pairs) {
            if let Some(connection) = pair.connection() {
                self.outbox.close(connection, &why);
            }
        }
        self.close_early_pairs_before(generation);
    }

    /// Takes the orderly leave of another joined node, which closes the link to it after all its
    /// messages. If this side closed the link, it would lose messages in flight.
    fn note_left(&mut self, node: NodeRank, why: String) -> Result<(), ClusterError> {
        let Some(pair) = self.pairs.iter_mut().find(|pair| pair.node == node) else {
            return Err(ClusterError::UnknownNode { who: self.name(FIRST), node });
        };
        if pair.state != PairState::Left {
            pair.state = PairState::Left;
            self.outbox.push(Action::Left { node, why });
        }
        Ok(())
    }

    fn take_loss(&mut self, loss: Loss) -> Result<(), ClusterError> {
        let nodes = match &loss {
            Loss::Node { node, .. } => vec![*node],
            Loss::Link { between: (one, other), .. } => vec![*one, *other],
        };
        let Some((you, roster)) = &self.roster else { return Ok(()) };
        for node in nodes {
            if roster.node(node).is_none() {
                return Err(ClusterError::UnknownNode { who: self.name(FIRST), node });
            }
        }
        let why = loss.sentence_to(*you, roster);
        self.outbox.push(Action::Lost { loss: loss.clone(), why: why.clone() });
        self.end(ClusterEnd::Lost { loss, why });
        Ok(())
    }

    fn lose_first(&mut self, why: &str) {
        if let Some(why) = self.first_left.take() {
            return self.end(ClusterEnd::Left { why });
        }
        let why = shown_text(why, WHY_BYTES_MAX);
        match (self.phase, &self.roster) {
            (JoinPhase::Running, Some((_, roster))) => {
                let loss = Loss::Node { node: FIRST, why };
                let why = loss.sentence(roster);
                self.outbox.push(Action::Lost { loss: loss.clone(), why: why.clone() });
                self.end(ClusterEnd::Lost { loss, why });
            }
            _ => {
                let who = self.name(FIRST);
                self.end(ClusterEnd::Failed(ClusterError::FirstNodeLost { who, why }));
            }
        }
    }

    fn unexpected(&self, message: &ClusterMsg) -> ClusterError {
        let phase = match self.phase {
            JoinPhase::Dialing { .. } | JoinPhase::Greeting { .. } => {
                "where a welcome or a refusal is expected"
            }
            JoinPhase::Waiting => "while others are awaited",
            JoinPhase::Pairing { .. } => "while pairs connect",
            JoinPhase::Running | JoinPhase::Over => "after the start",
        };
        ClusterError::Unexpected { who: self.name(FIRST), message: message.name(), phase }
    }

    // ---- Deadlines ----

    /// Returns the time at which the caller calls [`JoiningNode::handle_timeout`] next; `None` once
    /// the machine is over.
    pub fn poll_timeout(&self) -> Option<Nanos> {
        let mut deadlines: Vec<Nanos> = self.early.iter().map(|early| early.until).collect();
        match self.phase {
            JoinPhase::Over => return None,
            JoinPhase::Dialing { until } | JoinPhase::Greeting { until } => deadlines.push(until),
            JoinPhase::Pairing { dials_until, until } => {
                deadlines.push(if self.has_open_dials() { dials_until } else { until });
            }
            JoinPhase::Waiting | JoinPhase::Running => {}
        }
        if let Some(first) = &self.first
            && first.welcome.is_some()
        {
            deadlines.push(first.heartbeat_timer.deadline());
        }
        deadlines.extend(self.pending_connections.deadline());
        deadlines.into_iter().min()
    }

    /// Performs all actions that are due at the time `now`. The caller must have handed over all
    /// events until then.
    pub fn handle_timeout(&mut self, now: Nanos) {
        if self.is_over() {
            return;
        }
        self.pending_connections.handle_timeout(now, &mut self.outbox);
        self.close_late_early_pairs(now);
        match self.phase {
            JoinPhase::Dialing { until } if now >= until => {
                return self.end_without_answer();
            }
            JoinPhase::Greeting { until } if now >= until => {
                let Some(first) = &self.first else { return };
                let error =
                    ClusterError::NoWelcome { address: first.address, timeout: REPLY_TIMEOUT };
                return self.end(ClusterEnd::Failed(error));
            }
            JoinPhase::Pairing { until, .. } if now >= until => {
                let who = self.name(FIRST);
                let error = ClusterError::NoStart { who, timeout: START_TIMEOUT };
                return self.end(ClusterEnd::Failed(error));
            }
            JoinPhase::Pairing { dials_until, .. } if now >= dials_until => self.expire_dials(),
            _ => {}
        }
        self.beat(now);
    }

    fn beat(&mut self, now: Nanos) {
        let Some(first) = self.first.as_mut() else { return };
        let Some(welcome) = &first.welcome else { return };
        if first.heartbeat_timer.is_silent(now) {
            let why = silent_for(welcome.node_timeout);
            return self.lose_first(&why);
        }
        if let Some(sequence) = first.heartbeat_timer.beat(now) {
            let generation = self.generation;
            self.send_to_first(ClusterMsg::Heartbeat { generation, sequence });
        }
    }

    // ---- Helpers ----

    fn end(&mut self, end: ClusterEnd) {
        let why = end.to_string();
        self.pending_connections.close_all(&why, &mut self.outbox);
        for early in std::mem::take(&mut self.early) {
            self.outbox.close(early.connection, &why);
        }
        for pair in std::mem::take(&mut self.pairs) {
            if let Some(connection) = pair.connection() {
                self.outbox.close(connection, &why);
            }
        }
        if let Some(first) = &self.first
            && !first.is_closed
        {
            self.outbox.close(first.connection, &why);
        }
        self.phase = JoinPhase::Over;
        self.outbox.push(Action::Ended(end));
    }

    fn send_to_first(&mut self, message: ClusterMsg) {
        if let Some(first) = &self.first {
            self.outbox.send(first.connection, message);
        }
    }

    fn welcome(&self) -> Option<&Welcome> {
        self.first.as_ref()?.welcome.as_ref()
    }

    fn you(&self) -> NodeRank {
        match &self.roster {
            Some((you, _)) => *you,
            None => FIRST,
        }
    }

    fn pair_index(&self, connection: ConnectionId) -> Option<usize> {
        self.pairs.iter().position(|pair| pair.connection() == Some(connection))
    }

    fn knows(&self, connection: ConnectionId) -> bool {
        self.pending_connections.has(connection)
            || self.first.as_ref().is_some_and(|first| first.connection == connection)
            || self.early.iter().any(|early| early.connection == connection)
            || self.pair_index(connection).is_some()
    }

    /// Returns a node with its host, if that is known.
    fn name(&self, node: NodeRank) -> String {
        match (&self.roster, &self.first) {
            (Some((_, roster)), _) => roster.name(node),
            (None, Some(first)) if node == FIRST => match &first.welcome {
                Some(welcome) => format!("{} ({})", welcome.host, first.address),
                None => first.address.to_string(),
            },
            _ => node.to_string(),
        }
    }
}
