//! Pairs of nodes that connect between the roster and the start, and pairs that fail, then and
//! later.

use core::net::SocketAddr;

use super::{FirstNode, FirstPhase, Joiner, Suspicion, whole_seconds};
use crate::cluster::bounds::{ABSENT_AFTER, PAIRING_TIMEOUT};
use crate::cluster::error::ClusterError;
use crate::cluster::event::{Action, ClusterEnd};
use crate::cluster::hello::Hello;
use crate::cluster::message::{ClusterMsg, Loss, silent_for};
use crate::cluster::roster::{Roster, RosterNode};
use crate::cluster::text::{WHY_BYTES_MAX, shown_text};
use potluck_core::format::seconds;
use potluck_core::{Nanos, NodeRank};

/// Heartbeats after a report that a pair failed, by which a node of the pair counts as alive.
const BEATS_OF_THE_LIVING: u64 = 2;

impl FirstNode {
    pub(super) fn announce_roster(&mut self, now: Nanos) {
        self.seat_joiners();
        let roster = self.new_roster();
        self.send_to_all(|you| ClusterMsg::Roster { you, roster: roster.clone() });
        for joiner in &mut self.joiners {
            joiner.beats_before_roster = joiner.heartbeat_timer.received();
        }
        let until = now.saturating_add(PAIRING_TIMEOUT);
        self.phase = FirstPhase::Pairing { missing: roster.pairs().collect(), until };
        self.roster = Some(roster);
    }

    pub(super) fn new_roster(&self) -> Roster {
        let own = &self.options.hello;
        let mut nodes = vec![roster_node(NodeRank(0), own, own.addresses.clone())];
        for (node, joiner) in (1..).map(NodeRank).zip(&self.joiners) {
            nodes.push(roster_node(node, &joiner.hello, joiner.addresses()));
        }
        Roster { generation: self.generation, nodes }
    }

    /// Takes the report that a pair is connected, and starts the run if it was the last one.
    pub(super) fn connect(&mut self, from: NodeRank, peer: NodeRank) -> Result<(), ClusterError> {
        let pair = if peer == NodeRank(0) { (peer, from) } else { (from, peer) };
        let FirstPhase::Pairing { missing, .. } = &mut self.phase else {
            return Err(self.unexpected(
                from,
                &ClusterMsg::PairConnected { generation: self.generation, peer },
            ));
        };
        if !missing.remove(&pair) {
            return Err(ClusterError::ForeignPair { who: self.name(from), peer });
        }
        if !missing.is_empty() {
            return Ok(());
        }
        let generation = self.generation;
        self.send_to_all(|_| ClusterMsg::Start { generation });
        self.phase = FirstPhase::Running;
        let mut links = Vec::with_capacity(self.joiners.len());
        for (node, joiner) in (1..).map(NodeRank).zip(&self.joiners) {
            links.push((node, joiner.connection));
        }
        if let Some(roster) = self.roster.clone() {
            self.outbox.push(Action::Started { roster, you: NodeRank(0), links });
        }
        Ok(())
    }

    /// Takes the report that a pair failed: a suspicion, because one of the two may be lost.
    pub(super) fn suspect(
        &mut self,
        from: NodeRank,
        to: NodeRank,
        tried: Vec<SocketAddr>,
        why: String,
    ) -> Result<(), ClusterError> {
        let (Some(own), Some(theirs)) = (self.joiner(from), self.joiner(to)) else {
            return Err(ClusterError::UnknownNode { who: self.name(from), node: to });
        };
        if from == to {
            return Err(ClusterError::ForeignPair { who: self.name(from), peer: to });
        }
        let is_known = self.suspicions.iter().any(|of| of.from == from && of.to == to);
        if !theirs.has_left && !is_known {
            let received = (own.heartbeat_timer.received(), theirs.heartbeat_timer.received());
            self.suspicions.push(Suspicion { from, to, tried, why, received });
        }
        Ok(())
    }

    fn joiner(&self, node: NodeRank) -> Option<&Joiner> {
        self.joiners.get(node.index().checked_sub(1)?)
    }

    /// Ends the generation if both nodes of a pair that failed have shown that they are alive.
    pub(super) fn settle_suspicions(&mut self) {
        let settled = self.suspicions.iter().position(|of| {
            let (before_from, before_to) = of.received;
            self.has_beaten_since(of.from, before_from) && self.has_beaten_since(of.to, before_to)
        });
        let Some(index) = settled else { return };
        let Suspicion { from, to, tried, why, .. } = self.suspicions.swap_remove(index);
        match self.phase {
            FirstPhase::Running => self.lose(Loss::Link { between: (from, to), why }),
            FirstPhase::Pairing { .. } => self.give_up(from, to, tried, why),
            FirstPhase::Waiting | FirstPhase::Over => {}
        }
    }

    /// Returns true if a node has sent enough heartbeats after the first `before` ones to count as
    /// alive.
    fn has_beaten_since(&self, node: NodeRank, before: u64) -> bool {
        let received = self.joiners[node.index() - 1].heartbeat_timer.received();
        received >= before.saturating_add(BEATS_OF_THE_LIVING)
    }

    /// Ends the attempt for all, because two nodes cannot work together.
    pub(super) fn give_up(
        &mut self,
        from: NodeRank,
        to: NodeRank,
        tried: Vec<SocketAddr>,
        why: String,
    ) {
        let error = ClusterError::PairNotConnected {
            from: self.name(from),
            from_addresses: self.roster_addresses(from),
            to: self.name(to),
            to_addresses: if tried.is_empty() { self.roster_addresses(to) } else { tried },
            why,
        };
        let why = shown_text(&error.to_string(), WHY_BYTES_MAX);
        let remedy = error.remedy();
        self.send_to_all(|_| ClusterMsg::Refused { why: why.clone(), remedy });
        self.end(ClusterEnd::Failed(error));
    }

    fn roster_addresses(&self, node: NodeRank) -> Vec<SocketAddr> {
        let Some(roster) = &self.roster else { return Vec::new() };
        match roster.node(node) {
            Some(of) => of.addresses.clone(),
            None => Vec::new(),
        }
    }

    /// Ends the attempt because a pair is not connected in time. A node that has fallen silent is
    /// the cause for its pairs: its place is free again, and all wait for another node. Only
    /// between nodes that are all alive the network is the cause.
    pub(super) fn expire_pairs(&mut self, now: Nanos) {
        let mut has_absent = false;
        while let Some(index) = self.joiners.iter().position(|joiner| is_absent(joiner, now)) {
            has_absent = true;
            let silence = self.joiners[index].heartbeat_timer.silence(now);
            self.dismiss(index, &silent_for(whole_seconds(silence)));
        }
        if has_absent {
            return;
        }
        if !self.suspicions.is_empty() {
            let Suspicion { from, to, tried, why, .. } = self.suspicions.swap_remove(0);
            return self.give_up(from, to, tried, why);
        }
        let FirstPhase::Pairing { missing, .. } = &self.phase else { return };
        let Some((from, to)) = missing.first().copied() else { return };
        let others = match missing.len() {
            1 => String::new(),
            several => format!(", and {} more pairs neither", several - 1),
        };
        let timeout = seconds(PAIRING_TIMEOUT);
        self.give_up(from, to, Vec::new(), format!("not connected within {timeout}{others}"));
    }
}

fn roster_node(node: NodeRank, hello: &Hello, addresses: Vec<SocketAddr>) -> RosterNode {
    RosterNode {
        node,
        host: hello.host.clone(),
        devices: hello.devices.clone(),
        addresses,
        endpoint: hello.endpoint,
    }
}

/// Returns true if a node has not been heard enough since the roster, or not recently.
fn is_absent(joiner: &Joiner, now: Nanos) -> bool {
    let beats = joiner.heartbeat_timer.received() - joiner.beats_before_roster;
    beats < BEATS_OF_THE_LIVING || joiner.heartbeat_timer.silence(now) >= ABSENT_AFTER
}
