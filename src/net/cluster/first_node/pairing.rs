//! From the roster to the start: pairs that connect, and those that fail, then and later.

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

/// Heartbeats of both nodes of a pair after a report that it failed, by which both are alive.
const BEATS_OF_THE_LIVING: u64 = 2;

impl FirstNode {
    pub(super) fn announce_roster(&mut self, now: Nanos) {
        self.seat_joiners();
        let roster = self.new_roster();
        self.send_to_all(|you| ClusterMsg::Roster { you, roster: roster.clone() });
        for joiner in &mut self.joiners {
            joiner.beats_before_roster = joiner.pulse.received();
        }
        let until = now.saturating_add(PAIRING_TIMEOUT);
        self.phase = FirstPhase::Pairing { missing: roster.pairs().collect(), until };
        self.roster = Some(roster);
    }

    pub(super) fn new_roster(&self) -> Roster {
        let own = self.options.hello.addresses.clone();
        let others = self.joiners.iter().map(Joiner::addresses);
        let nodes = self.greetings().zip(std::iter::once(own).chain(others)).zip(0..);
        let node = |((hello, addresses), node): ((&Hello, Vec<SocketAddr>), u32)| RosterNode {
            node: NodeRank(node),
            host: hello.host.clone(),
            devices: hello.devices.clone(),
            addresses,
            endpoint: hello.endpoint,
        };
        Roster { generation: self.generation, nodes: nodes.map(node).collect() }
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
        let nodes = (1..).map(NodeRank).zip(&self.joiners);
        let links = nodes.map(|(node, joiner)| (node, joiner.connection)).collect();
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
        let received = |node: NodeRank| {
            let joiner = self.joiners.get(node.index().checked_sub(1)?)?;
            Some((joiner.pulse.received(), joiner.has_left))
        };
        let (Some((own, _)), Some((theirs, has_left))) = (received(from), received(to)) else {
            return Err(ClusterError::UnknownNode { who: self.name(from), node: to });
        };
        if from == to {
            return Err(ClusterError::ForeignPair { who: self.name(from), peer: to });
        }
        let is_known = |of: &Suspicion| (of.from, of.to) == (from, to);
        if !has_left && !self.suspicions.iter().any(is_known) {
            let received = (own, theirs);
            self.suspicions.push(Suspicion { from, to, tried, why, received });
        }
        Ok(())
    }

    /// Ends the generation if both nodes of a pair that failed have shown that they are alive.
    pub(super) fn settle_suspicions(&mut self) {
        let beats = |node: NodeRank, before: u64| {
            let received = self.joiners[node.index() - 1].pulse.received();
            received >= before.saturating_add(BEATS_OF_THE_LIVING)
        };
        let is_settled =
            |of: &Suspicion| beats(of.from, of.received.0) && beats(of.to, of.received.1);
        let Some(index) = self.suspicions.iter().position(is_settled) else { return };
        let Suspicion { from, to, tried, why, .. } = self.suspicions.swap_remove(index);
        match self.phase {
            FirstPhase::Running => self.lose(Loss::Link { between: (from, to), why }),
            FirstPhase::Pairing { .. } => self.give_up(from, to, tried, why),
            FirstPhase::Waiting | FirstPhase::Over => {}
        }
    }

    /// Ends the attempt for all, because two nodes cannot work together.
    pub(super) fn give_up(
        &mut self,
        from: NodeRank,
        to: NodeRank,
        tried: Vec<SocketAddr>,
        why: String,
    ) {
        let known = |node: NodeRank| {
            let roster = self.roster.as_ref().and_then(|roster| roster.node(node));
            roster.map(|of| of.addresses.clone()).unwrap_or_default()
        };
        let error = ClusterError::PairNotConnected {
            from: self.name(from),
            from_addresses: known(from),
            to: self.name(to),
            to_addresses: if tried.is_empty() { known(to) } else { tried },
            why,
        };
        let why = shown_text(&error.to_string(), WHY_BYTES_MAX);
        let remedy = error.remedy();
        self.send_to_all(|_| ClusterMsg::Refused { why: why.clone(), remedy });
        self.end(ClusterEnd::Failed(error));
    }

    /// Ends the attempt because a pair is not connected in time. A node that is not heard of any
    /// more is to blame for its pairs: its place is free again, and all wait for another one. Only
    /// between nodes that are all there it is the network.
    pub(super) fn expire_pairs(&mut self, now: Nanos) {
        let is_absent = |joiner: &Joiner| {
            let beats = joiner.pulse.received() - joiner.beats_before_roster;
            beats < BEATS_OF_THE_LIVING || joiner.pulse.silence(now) >= ABSENT_AFTER
        };
        let mut has_absent = false;
        while let Some(index) = self.joiners.iter().position(is_absent) {
            has_absent = true;
            let silence = self.joiners[index].pulse.silence(now);
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
