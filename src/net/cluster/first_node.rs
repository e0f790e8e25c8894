//! State machine of the first node: it admits the others, numbers them, starts all at the same
//! time, and reports the first loss to all.

mod pairing;
mod seating;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use core::net::SocketAddr;

use super::bounds::{ABSENT_AFTER, ADDRESSES_MAX, MESSAGE_BYTES_MAX, NODES_MAX, VERSION_BYTES_MAX};
use super::error::ClusterError;
use super::event::{Action, ClusterEnd, ConnectionEnd, Event, MovedNode, Outbox};
use super::heartbeat_timer::HeartbeatTimer;
use super::hello::Hello;
use super::ids::ConnectionId;
use super::message::{ClusterMsg, Loss, Presence, PresentNode, Welcome, silent_for};
use super::pending_connections::PendingConnections;
use super::refusal::Refusal;
use super::roster::Roster;
use super::text::{WHY_BYTES_MAX, check_name, shown_text};
use potluck_core::{Generation, Nanos, NodeRank};

pub use seating::FormerNode;

/// Bytes of a message about all nodes without the nodes themselves.
const MESSAGE_HEAD_BYTES: usize = 64;

/// Number of addresses of a node that are not in its greeting.
const SEEN_ADDRESSES: usize = 2;

/// Run that a first node starts.
#[derive(Clone, Debug)]
pub struct FirstNodeOptions {
    /// Unique name of the run.
    pub run: String,
    /// Nodes of the run, the first one included.
    pub nodes: u32,
    /// Greeting of the first node itself, with which the other greetings are compared.
    pub hello: Hello,
    /// Longest silence of a node.
    pub node_timeout: Nanos,
    /// Last generation of the run, 0 at its begin.
    pub generation: Generation,
    /// Nodes that the run had before, the first one first; empty for a new run. Returning nodes get
    /// their former numbers.
    pub before: Vec<FormerNode>,
}

/// Node that has joined.
#[derive(Debug)]
struct Joiner {
    connection: ConnectionId,
    /// Present address, as this node sees it.
    seen: SocketAddr,
    hello: Hello,
    heartbeat_timer: HeartbeatTimer,
    /// Heartbeats that had arrived when the present roster was sent.
    beats_before_roster: u64,
    has_left: bool,
    /// True once its connection has ended: nothing can be sent.
    is_closed: bool,
}

impl Joiner {
    /// Address as this node sees it, with the port at which the node listens.
    fn listening(&self) -> SocketAddr {
        let mut address = self.seen;
        address.set_port(self.hello.port);
        address
    }

    /// Returns the addresses at which others may reach the node. A router in between may have
    /// changed its port, and an address of a shared network may be closer to others.
    fn addresses(&self) -> Vec<SocketAddr> {
        let is_near = self.seen.ip().is_loopback();
        let mut known = vec![self.seen];
        known.extend(self.hello.addresses.iter().filter(|of| is_near || !of.ip().is_loopback()));
        let mut addresses = vec![self.listening()];
        for address in known {
            if addresses.len() < ADDRESSES_MAX && !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        addresses
    }
}

#[derive(Debug)]
enum FirstPhase {
    Waiting,
    /// All nodes have joined, and these pairs are not connected yet, the lower number first.
    Pairing {
        missing: BTreeSet<(NodeRank, NodeRank)>,
        until: Nanos,
    },
    Running,
    Over,
}

/// Report that a pair failed. It is a loss once both nodes have shown that they are alive.
#[derive(Debug)]
struct Suspicion {
    from: NodeRank,
    to: NodeRank,
    tried: Vec<SocketAddr>,
    why: String,
    /// Heartbeats of both at the time of the report.
    received: (u64, u64),
}

/// Machine of the first node.
#[derive(Debug)]
pub struct FirstNode {
    options: FirstNodeOptions,
    /// Generation that is being formed, or that runs.
    generation: Generation,
    phase: FirstPhase,
    roster: Option<Roster>,
    pending_connections: PendingConnections,
    /// In the order of arrival; once there is a roster, node `n` is at `n - 1`.
    joiners: Vec<Joiner>,
    suspicions: Vec<Suspicion>,
    outbox: Outbox,
}

impl FirstNode {
    /// Creates a machine that waits for all other nodes. Its first action shows that only this
    /// node is present.
    ///
    /// # Errors
    /// Returns [`ClusterError`] for values beyond their bounds.
    pub fn new(options: FirstNodeOptions) -> Result<Self, ClusterError> {
        let nodes = options.nodes;
        let timeout = options.node_timeout;
        if !(2..=NODES_MAX).contains(&nodes) {
            return Err(ClusterError::Nodes { nodes, min: 2, max: NODES_MAX });
        }
        ClusterError::check_timeout(timeout)?;
        options.hello.check()?;
        check_name("name", &options.run, VERSION_BYTES_MAX).map_err(ClusterError::Run)?;
        let mut first = Self {
            generation: Generation(options.generation.0.saturating_add(1)),
            options,
            phase: FirstPhase::Waiting,
            roster: None,
            pending_connections: PendingConnections::default(),
            joiners: Vec::new(),
            suspicions: Vec::new(),
            outbox: Outbox::default(),
        };
        if !first.has_room_for(None) {
            return Err(ClusterError::OwnDevices);
        }
        first.outbox.push(Action::Show(first.presence()));
        Ok(first)
    }

    // ---- Events ----

    /// Takes an event at the time `now`, which never decreases. Everything is ignored once the
    /// machine is over.
    ///
    /// # Errors
    /// Returns [`ClusterError`] for an event that is not due. A peer's violation of the protocol
    /// also closes its connection; a message of a generation that is over does not.
    pub fn handle(&mut self, now: Nanos, event: Event) -> Result<(), ClusterError> {
        if self.is_over() {
            return Ok(());
        }
        match event {
            Event::Accepted { connection, address } => {
                if self.pending_connections.has(connection) || self.index(connection).is_some() {
                    return Err(ClusterError::ConnectionTwice { connection });
                }
                self.pending_connections.enter(now, connection, address, &mut self.outbox);
                Ok(())
            }
            Event::Dialed { connection, .. } => {
                self.outbox.close(connection, "the first node dials nobody");
                Err(ClusterError::UnknownConnection { connection })
            }
            Event::DialFailed { .. } => Ok(()),
            Event::Received { connection, message } => {
                if self.pending_connections.has(connection) {
                    return self.greet(now, connection, message);
                }
                let Some(index) = self.index(connection) else {
                    return Err(ClusterError::UnknownConnection { connection });
                };
                self.joiners[index].heartbeat_timer.heard(now);
                let received = self.receive(index, message);
                if let Err(error) = &received {
                    self.blame(index, error);
                }
                received
            }
            Event::Moved { connection, address } => {
                self.pending_connections.moved(connection, address);
                if let Some(index) = self.index(connection) {
                    self.move_joiner(index, address);
                }
                Ok(())
            }
            Event::Closed { connection, end } => {
                self.pending_connections.leave(connection);
                if let Some(index) = self.index(connection) {
                    self.joiners[index].is_closed = true;
                    let why = match end {
                        // The silence of a node is measured by its heartbeats.
                        ConnectionEnd::Silent(_) => silent_for(self.options.node_timeout),
                        end => end.loss("its link"),
                    };
                    self.depart(index, &why);
                    self.end_if_all_left();
                }
                Ok(())
            }
        }
    }

    /// Returns the next action, if there is one.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.outbox.pop()
    }

    /// Ends the run for all in order, before or after its start.
    pub fn leave(&mut self, why: &str) {
        if self.is_over() {
            return;
        }
        let why = shown_text(why, WHY_BYTES_MAX);
        self.send_to_all(|_| ClusterMsg::Leave { why: why.clone() });
        self.end(ClusterEnd::Left { why });
    }

    /// Ends the generation because the layer above gives a node up, for example for its activity.
    ///
    /// # Errors
    /// Returns [`ClusterError`] for a node that is not one of the others in a running cluster.
    pub(crate) fn give_up_node(&mut self, node: NodeRank, why: &str) -> Result<(), ClusterError> {
        let others = (1..=self.joiners.len() as u32).contains(&node.0);
        if !others || !matches!(self.phase, FirstPhase::Running) {
            return Err(ClusterError::UnknownNode { who: "the first node".into(), node });
        }
        self.lose(Loss::Node { node, why: shown_text(why, WHY_BYTES_MAX) });
        Ok(())
    }

    /// Times at which the joined nodes were last heard, by their connections.
    pub(crate) fn heard_at(&self) -> Vec<(ConnectionId, Nanos)> {
        self.joiners
            .iter()
            .map(|joiner| (joiner.connection, joiner.heartbeat_timer.heard_at()))
            .collect()
    }

    pub fn is_over(&self) -> bool {
        matches!(self.phase, FirstPhase::Over)
    }

    // ---- Waiting for nodes ----

    /// Takes the first message on a connection, which must be a hello.
    fn greet(
        &mut self,
        now: Nanos,
        connection: ConnectionId,
        message: ClusterMsg,
    ) -> Result<(), ClusterError> {
        let Some(address) = self.pending_connections.leave(connection) else { return Ok(()) };
        let name = message.name();
        let refusal = match message {
            ClusterMsg::Hello(hello) => match self.accept(now, address, &hello) {
                Ok(()) => {
                    self.take_in(now, connection, address, hello);
                    return Ok(());
                }
                Err(refusal) => refusal,
            },
            ClusterMsg::Leave { .. } => {
                self.outbox.close(connection, "it leaves");
                return Ok(());
            }
            other => match other.generation() {
                Some(found) if found < self.generation => {
                    let current = self.generation;
                    Refusal::OverGeneration { address, message: name, found, current }
                }
                _ => Refusal::NoHello { address, message: name },
            },
        };
        let why = refusal.to_string();
        self.outbox.refuse(connection, &why, refusal.remedy());
        self.outbox.push(Action::TurnedAway { address, why });
        Err(refusal.into())
    }

    fn accept(&mut self, now: Nanos, address: SocketAddr, hello: &Hello) -> Result<(), Refusal> {
        hello.check().map_err(|error| Refusal::Hello { address, error })?;
        self.options.hello.accept(&self.options.run, hello)?;
        self.free_place_of_predecessor(now, address, hello);
        let host = hello.host.clone();
        if matches!(self.phase, FirstPhase::Waiting) {
            self.check_place(hello)?;
        }
        match self.phase {
            FirstPhase::Waiting if self.has_room_for(Some(hello)) => Ok(()),
            FirstPhase::Waiting => {
                Err(Refusal::RosterTooLong { host, devices: hello.devices.len() })
            }
            FirstPhase::Pairing { .. } => Err(Refusal::Full { hosts: self.hosts() }),
            FirstPhase::Running | FirstPhase::Over => {
                Err(Refusal::TooLate { host, hosts: self.hosts() })
            }
        }
    }

    /// Checks that no other node asks for the number that a node asks for.
    fn check_place(&self, hello: &Hello) -> Result<(), Refusal> {
        let Some(place) = hello.place else { return Ok(()) };
        let host = hello.host.clone();
        let nodes = self.options.nodes;
        if place.0 >= nodes {
            return Err(Refusal::NoSuchPlace { host, place, nodes });
        }
        match self.joiners.iter().find(|joiner| joiner.hello.place == Some(place)) {
            Some(joiner) => {
                let holder = format!("{} at {}", joiner.hello.host, joiner.listening());
                Err(Refusal::PlaceTaken { host, place, holder })
            }
            None => Ok(()),
        }
    }

    fn take_in(
        &mut self,
        now: Nanos,
        connection: ConnectionId,
        mut seen: SocketAddr,
        hello: Hello,
    ) {
        seen.set_ip(seen.ip().to_canonical());
        let node_timeout = self.options.node_timeout;
        let welcome = Welcome {
            run: self.options.run.clone(),
            host: self.options.hello.host.clone(),
            nodes: self.options.nodes,
            generation: self.generation,
            node_timeout,
        };
        self.outbox.send(connection, ClusterMsg::Welcome(welcome));
        let heartbeat_timer = HeartbeatTimer::new(node_timeout, now);
        self.joiners.push(Joiner {
            connection,
            seen,
            hello,
            heartbeat_timer,
            beats_before_roster: 0,
            has_left: false,
            is_closed: false,
        });
        self.announce_presence();
        if self.presence().missing() == 0 {
            self.announce_roster(now);
        }
    }

    /// Takes a new address of a node, for a roster that is still to come, and shows it.
    fn move_joiner(&mut self, index: usize, to: SocketAddr) {
        let who = self.name(NodeRank(index as u32 + 1));
        let joiner = &mut self.joiners[index];
        let from = std::mem::replace(&mut joiner.seen, to);
        self.outbox.push(Action::Moved(MovedNode { who, from, to }));
    }

    /// Shows the present nodes, and sends them to all waiting ones.
    fn announce_presence(&mut self) {
        let generation = self.generation;
        let presence = self.presence();
        self.send_to_all(|_| ClusterMsg::Present { generation, presence: presence.clone() });
        self.outbox.push(Action::Show(presence));
    }

    fn presence(&self) -> Presence {
        let mut here = Vec::new();
        for hello in self.greetings() {
            here.push(PresentNode { host: hello.host.clone(), devices: hello.devices.clone() });
        }
        Presence { expected: self.options.nodes, here }
    }

    fn greetings(&self) -> impl Iterator<Item = &Hello> {
        std::iter::once(&self.options.hello).chain(self.joiners.iter().map(|joiner| &joiner.hello))
    }

    fn hosts(&self) -> Vec<String> {
        self.greetings().map(|hello| hello.host.clone()).collect()
    }

    /// Returns true if messages about all nodes and one more are short enough. Addresses and the
    /// lengths of texts and lists are counted with the most bytes that they may have.
    fn has_room_for(&self, newcomer: Option<&Hello>) -> bool {
        let mut bytes = MESSAGE_HEAD_BYTES;
        for hello in self.greetings().chain(newcomer) {
            for device in &hello.devices {
                bytes += device.name.len() + device.kind.len() + 4;
            }
            let addresses = (hello.addresses.len() + SEEN_ADDRESSES).min(ADDRESSES_MAX);
            bytes += hello.host.len() + 32 + 24 * addresses;
        }
        bytes <= MESSAGE_BYTES_MAX
    }

    // ---- Messages of joined nodes ----

    fn receive(&mut self, index: usize, message: ClusterMsg) -> Result<(), ClusterError> {
        let from = NodeRank(index as u32 + 1);
        if self.joiners[index].has_left {
            return Err(self.unexpected(from, &message));
        }
        if let ClusterMsg::Heartbeat { sequence, .. } = &message
            && let Err(expected) = self.joiners[index].heartbeat_timer.receive(*sequence)
        {
            let who = self.name(from);
            return Err(ClusterError::Sequence { who, found: *sequence, expected });
        }
        self.check_generation(from, &message)?;
        match message {
            ClusterMsg::Hello(hello) => {
                let before = self.joiners[index].hello.host.clone();
                Err(Refusal::SecondHello { host: hello.host, before }.into())
            }
            ClusterMsg::Leave { why } => {
                self.leave_of(index, why);
                Ok(())
            }
            ClusterMsg::Heartbeat { .. } => {
                self.settle_suspicions();
                Ok(())
            }
            ClusterMsg::PairConnected { peer, .. } => self.connect(from, peer),
            ClusterMsg::PairFailed { peer, tried, why, .. }
                if !matches!(self.phase, FirstPhase::Waiting) =>
            {
                self.suspect(from, peer, tried, why)
            }
            other => Err(self.unexpected(from, &other)),
        }
    }

    fn check_generation(&self, from: NodeRank, message: &ClusterMsg) -> Result<(), ClusterError> {
        let current = self.generation;
        let name = message.name();
        match message.generation() {
            Some(found) if found < current => {
                let who = self.name(from);
                Err(ClusterError::OverGeneration { who, message: name, found, current })
            }
            Some(found) if found > current => {
                let who = self.name(from);
                Err(ClusterError::LaterGeneration { who, message: name, found, current })
            }
            _ => Ok(()),
        }
    }

    fn unexpected(&self, from: NodeRank, message: &ClusterMsg) -> ClusterError {
        let phase = match self.phase {
            FirstPhase::Waiting => "while others are awaited",
            FirstPhase::Pairing { .. } => "while pairs connect",
            FirstPhase::Running | FirstPhase::Over => "to the first node of a running cluster",
        };
        ClusterError::Unexpected { who: self.name(from), message: message.name(), phase }
    }

    /// Closes the connection of a node that broke the protocol. A message of a generation that is
    /// over is no violation: the node does not know yet.
    fn blame(&mut self, index: usize, error: &ClusterError) {
        let joiner = &self.joiners[index];
        if matches!(error, ClusterError::OverGeneration { .. }) || joiner.has_left {
            return;
        }
        let why = error.to_string();
        match self.phase {
            FirstPhase::Running => {}
            _ => self.outbox.refuse(joiner.connection, &why, error.remedy()),
        }
        if let ClusterError::Refused(_) = error {
            let address = joiner.listening();
            self.outbox.push(Action::TurnedAway { address, why: why.clone() });
        }
        self.depart(index, &format!("it broke the protocol: {why}"));
    }

    // ---- Departures ----

    /// Takes the orderly leave of a node: before the start its place is free again, after the start
    /// the others are notified.
    fn leave_of(&mut self, index: usize, why: String) {
        if !matches!(self.phase, FirstPhase::Running) {
            self.outbox.close(self.joiners[index].connection, "it leaves");
            return self.depart(index, &format!("it left: {why}"));
        }
        let generation = self.generation;
        let node = NodeRank(index as u32 + 1);
        self.joiners[index].has_left = true;
        self.suspicions.retain(|of| of.from != node && of.to != node);
        self.send_to_all(|_| ClusterMsg::Left { generation, node, why: why.clone() });
        self.outbox.push(Action::Left { node, why });
        self.end_if_all_left();
    }

    /// Ends the run once all others have left and have closed their links after all their messages.
    fn end_if_all_left(&mut self) {
        if matches!(self.phase, FirstPhase::Running)
            && self.joiners.iter().all(|joiner| joiner.has_left && joiner.is_closed)
        {
            self.end(ClusterEnd::Left { why: "all other nodes have left".into() });
        }
    }

    /// Takes the departure of a node whose connection is closed already: before the start its place
    /// is free again, after the start it is a loss.
    fn depart(&mut self, index: usize, why: &str) {
        let why = shown_text(why, WHY_BYTES_MAX);
        if matches!(self.phase, FirstPhase::Running) {
            if !self.joiners[index].has_left {
                self.lose(Loss::Node { node: NodeRank(index as u32 + 1), why });
            }
            return;
        }
        let joiner = self.joiners.remove(index);
        self.outbox.push(Action::Departed { host: joiner.hello.host, why });
        if matches!(self.phase, FirstPhase::Pairing { .. }) {
            self.generation = Generation(self.generation.0.saturating_add(1));
            self.phase = FirstPhase::Waiting;
            self.roster = None;
            self.suspicions.clear();
        }
        self.announce_presence();
    }

    /// Frees the place of a node that is silent before the start, if `hello` comes from its host
    /// and address or asks for its number: a supervisor has started it again.
    fn free_place_of_predecessor(&mut self, now: Nanos, address: SocketAddr, hello: &Hello) {
        if !matches!(self.phase, FirstPhase::Waiting | FirstPhase::Pairing { .. }) {
            return;
        }
        let ip = address.ip().to_canonical();
        let predecessor = self.joiners.iter().position(|joiner| {
            let is_absent = joiner.heartbeat_timer.silence(now) >= ABSENT_AFTER;
            let is_there = joiner.seen.ip() == ip && joiner.hello.host == hello.host;
            let has_place = hello.place.is_some() && joiner.hello.place == hello.place;
            is_absent && (is_there || has_place)
        });
        if let Some(index) = predecessor {
            let silence =
                silent_for(whole_seconds(self.joiners[index].heartbeat_timer.silence(now)));
            self.dismiss(index, &format!("{silence}, and its successor is here"));
        }
    }

    /// Closes the connection of a node before the start, and frees its place.
    fn dismiss(&mut self, index: usize, why: &str) {
        self.outbox.close(self.joiners[index].connection, why);
        self.depart(index, why);
    }

    /// Ends the generation by a loss, and reports it to all, the lost node included.
    fn lose(&mut self, loss: Loss) {
        let generation = self.generation;
        self.send_to_all(|_| ClusterMsg::Lost { generation, loss: loss.clone() });
        let why = match &self.roster {
            Some(roster) => loss.sentence(roster),
            None => String::new(),
        };
        self.outbox.push(Action::Lost { loss: loss.clone(), why: why.clone() });
        self.end(ClusterEnd::Lost { loss, why });
    }

    fn end(&mut self, end: ClusterEnd) {
        let why = end.to_string();
        self.pending_connections.close_all(&why, &mut self.outbox);
        for joiner in std::mem::take(&mut self.joiners) {
            if !joiner.is_closed {
                self.outbox.close(joiner.connection, &why);
            }
        }
        self.suspicions.clear();
        self.phase = FirstPhase::Over;
        self.outbox.push(Action::Ended(end));
    }

    // ---- Deadlines ----

    /// Returns the time at which the caller calls [`FirstNode::handle_timeout`] next; `None` while
    /// only first connections are awaited, and once the machine is over.
    pub fn poll_timeout(&self) -> Option<Nanos> {
        if self.is_over() {
            return None;
        }
        let mut deadlines = Vec::with_capacity(self.joiners.len() + 2);
        deadlines.extend(self.pending_connections.deadline());
        if let FirstPhase::Pairing { until, .. } = self.phase {
            deadlines.push(until);
        }
        for joiner in &self.joiners {
            if joiner.is_closed {
                continue;
            }
            let heartbeat_timer = &joiner.heartbeat_timer;
            deadlines.push(if joiner.has_left {
                heartbeat_timer.silent_at()
            } else {
                heartbeat_timer.deadline()
            });
        }
        deadlines.into_iter().min()
    }

    /// Performs all actions that are due at the time `now`. The caller must have handed over all
    /// events until then.
    pub fn handle_timeout(&mut self, now: Nanos) {
        if self.is_over() {
            return;
        }
        self.pending_connections.handle_timeout(now, &mut self.outbox);
        self.close_after_leaves(now);
        if self.is_over() {
            return;
        }
        while let Some(index) = self
            .joiners
            .iter()
            .position(|joiner| !joiner.has_left && joiner.heartbeat_timer.is_silent(now))
        {
            let why = silent_for(self.options.node_timeout);
            if matches!(self.phase, FirstPhase::Running) {
                self.depart(index, &why);
            } else {
                self.dismiss(index, &why);
            }
        }
        if matches!(self.phase, FirstPhase::Pairing { until, .. } if now >= until) {
            self.expire_pairs(now);
            if self.is_over() {
                return;
            }
        }
        let generation = self.generation;
        for joiner in &mut self.joiners {
            if !joiner.has_left
                && let Some(sequence) = joiner.heartbeat_timer.beat(now)
            {
                let message = ClusterMsg::Heartbeat { generation, sequence };
                self.outbox.send(joiner.connection, message);
            }
        }
    }

    /// Closes the links to nodes that have left and have not closed them in time.
    fn close_after_leaves(&mut self, now: Nanos) {
        for joiner in &mut self.joiners {
            if joiner.has_left && !joiner.is_closed && joiner.heartbeat_timer.is_silent(now) {
                joiner.is_closed = true;
                self.outbox.close(joiner.connection, "it has left");
            }
        }
        self.end_if_all_left();
    }

    // ---- Helpers ----

    fn index(&self, connection: ConnectionId) -> Option<usize> {
        self.joiners.iter().position(|joiner| joiner.connection == connection)
    }

    /// Returns a node with its host; only the host while there is no roster with its number.
    fn name(&self, node: NodeRank) -> String {
        match (&self.roster, node.index().checked_sub(1)) {
            (Some(roster), _) => roster.name(node),
            (None, Some(index)) if index < self.joiners.len() => {
                self.joiners[index].hello.host.clone()
            }
            _ => node.to_string(),
        }
    }

    /// Sends a message to all nodes that have not left, made for each of them.
    fn send_to_all(&mut self, message: impl Fn(NodeRank) -> ClusterMsg) {
        for (node, joiner) in (1..).map(NodeRank).zip(&self.joiners) {
            if !joiner.has_left && !joiner.is_closed {
                self.outbox.send(joiner.connection, message(node));
            }
        }
    }
}

/// Returns a time without its fraction of a second, for messages to people.
fn whole_seconds(time: Nanos) -> Nanos {
    const SECOND: Nanos = 1_000_000_000;
    time / SECOND * SECOND
}
