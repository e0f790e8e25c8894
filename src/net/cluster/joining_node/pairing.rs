//! Links of a joining node to the other joined nodes, once there is a roster.

use core::net::SocketAddr;

use super::{EarlyPair, FIRST, JoinPhase, JoiningNode};
use crate::cluster::bounds::{REPLY_TIMEOUT, START_TIMEOUT};
use crate::cluster::error::ClusterError;
use crate::cluster::event::Action;
use crate::cluster::ids::{ConnectionId, DialId};
use crate::cluster::message::ClusterMsg;
use crate::cluster::pairs::{PairLink, PairState, addresses_to_dial};
use crate::cluster::pending_connections::PENDING_CONNECTIONS_MAX;
use crate::cluster::refusal::Refusal;
use crate::cluster::roster::Roster;
use crate::cluster::text::{WHY_BYTES_MAX, shown_text};
use potluck_core::format::seconds;
use potluck_core::{Generation, Nanos, NodeRank};

impl JoiningNode {
    /// Takes the roster: dials the higher numbers and awaits the lower ones.
    pub(super) fn begin_pairing(
        &mut self,
        now: Nanos,
        you: NodeRank,
        roster: Roster,
    ) -> Result<(), ClusterError> {
        let Some(first) = &self.first else { return Ok(()) };
        let address = first.address;
        let announced = match &first.welcome {
            Some(welcome) => welcome.nodes,
            None => 0,
        };
        let hello = &self.options.hello;
        roster
            .check_for(you, announced, (&hello.host, &hello.devices))
            .map_err(|error| ClusterError::Roster { who: self.name(FIRST), error })?;
        for of in &roster.nodes {
            let node = of.node;
            if node == FIRST || node == you {
                continue;
            }
            let (state, tried) = if node > you {
                self.dials += 1;
                let dial = DialId(self.dials);
                let addresses = addresses_to_dial(address, &of.addresses);
                let endpoint = Some(of.endpoint);
                self.outbox.push(Action::Dial {
                    dial,
                    node,
                    endpoint,
                    addresses: addresses.clone(),
                });
                (PairState::Dialing(dial), addresses)
            } else {
                (PairState::Awaited, Vec::new())
            };
            self.pairs.push(PairLink { node, state, tried, seen: None });
        }
        self.roster = Some((you, roster));
        let dials_until = now.saturating_add(REPLY_TIMEOUT);
        self.phase = JoinPhase::Pairing { dials_until, until: now.saturating_add(START_TIMEOUT) };
        let generation = self.generation;
        self.send_to_first(ClusterMsg::PairConnected { generation, peer: FIRST });
        self.take_early_pairs();
        Ok(())
    }

    /// Takes the pairs that were opened for this roster before it arrived.
    pub(super) fn take_early_pairs(&mut self) {
        let generation = self.generation;
        self.close_early_pairs_before(generation);
        let due: Vec<EarlyPair> =
            self.early.extract_if(.., |early| early.generation == generation).collect();
        for EarlyPair { connection, address, message, .. } in due {
            // An error closes the connection; there is no event to which it belongs.
            let _ = self.answer_pair(connection, address, message);
        }
    }

    pub(super) fn close_early_pairs_before(&mut self, generation: Generation) {
        for early in self.early.extract_if(.., |early| early.generation < generation) {
            let why = format!("{} is over, and {generation} is next", early.generation);
            self.outbox.close(early.connection, &why);
        }
    }

    /// Takes the first message of a node that connected to this one.
    pub(super) fn receive_from_guest(
        &mut self,
        now: Nanos,
        connection: ConnectionId,
        address: SocketAddr,
        message: ClusterMsg,
    ) -> Result<(), ClusterError> {
        let ClusterMsg::Pair { generation, .. } = message else {
            return self.refuse_guest(connection, address, &message);
        };
        let found = generation;
        let current = self.generation;
        let who = address.to_string();
        let name = message.name();
        if found < current {
            let error = ClusterError::OverGeneration { who, message: name, found, current };
            self.outbox.close(connection, &error.to_string());
            return Err(error);
        }
        let is_running = matches!(self.phase, JoinPhase::Running);
        if found > current && is_running {
            let error = ClusterError::LaterGeneration { who, message: name, found, current };
            self.outbox.close(connection, &error.to_string());
            return Err(error);
        }
        if found == current && self.roster.is_some() {
            return self.answer_pair(connection, address, message);
        }
        if self.early.len() >= PENDING_CONNECTIONS_MAX {
            self.outbox.close(connection, "too many pairs are opened before their roster");
            return Ok(());
        }
        let until = now.saturating_add(REPLY_TIMEOUT);
        self.early.push(EarlyPair { connection, address, message, generation, until });
        Ok(())
    }

    /// Answers the opening of a pair of the present roster.
    pub(super) fn answer_pair(
        &mut self,
        connection: ConnectionId,
        address: SocketAddr,
        message: ClusterMsg,
    ) -> Result<(), ClusterError> {
        let ClusterMsg::Pair { run, from, to, .. } = message else { return Ok(()) };
        let is_own = self.welcome().is_some_and(|welcome| welcome.run == run) && to == self.you();
        let awaited = self
            .pairs
            .iter_mut()
            .find(|pair| is_own && pair.node == from && pair.state == PairState::Awaited);
        let Some(pair) = awaited else {
            let who = address.to_string();
            let error = ClusterError::WrongPair { who, from, to, run };
            self.outbox.close(connection, &error.to_string());
            return Err(error);
        };
        pair.state = PairState::Connected(connection);
        pair.seen = Some(address);
        self.outbox.send(connection, self.pair_message(from));
        Ok(())
    }

    /// Refuses a node that mistakes this one for the first, or begins with another message.
    pub(super) fn refuse_guest(
        &mut self,
        connection: ConnectionId,
        address: SocketAddr,
        message: &ClusterMsg,
    ) -> Result<(), ClusterError> {
        let first = self.first.as_ref().map(|first| first.address);
        let (ClusterMsg::Hello(_), Some(first)) = (message, first) else {
            let phase = "where the opening of a pair is expected";
            return self.refuse_peer(connection, address, message, phase);
        };
        let host = self.options.hello.host.clone();
        let refusal = Refusal::NotFirst { host, first };
        self.outbox.refuse(connection, &refusal.to_string(), refusal.remedy());
        Err(refusal.into())
    }

    pub(super) fn refuse_peer(
        &mut self,
        connection: ConnectionId,
        address: SocketAddr,
        message: &ClusterMsg,
        phase: &'static str,
    ) -> Result<(), ClusterError> {
        let who = address.to_string();
        let error = ClusterError::Unexpected { who, message: message.name(), phase };
        self.outbox.close(connection, &error.to_string());
        Err(error)
    }

    /// Takes a message of a node of the roster: the answer to the opening of its pair.
    pub(super) fn receive_from_peer(
        &mut self,
        index: usize,
        message: ClusterMsg,
    ) -> Result<(), ClusterError> {
        let node = self.pairs[index].node;
        let state = self.pairs[index].state;
        let who = self.name(node);
        let (PairState::Opening(connection), ClusterMsg::Pair { run, generation, from, to }) =
            (state, &message)
        else {
            let phase = "on the link of a pair";
            return Err(ClusterError::Unexpected { who, message: message.name(), phase });
        };
        let is_run = self.welcome().is_some_and(|welcome| welcome.run == *run);
        let is_pair = *from == node && *to == self.you();
        if !is_run || *generation != self.generation || !is_pair {
            return Err(ClusterError::WrongPair { who, from: *from, to: *to, run: run.clone() });
        }
        self.pairs[index].state = PairState::Connected(connection);
        let generation = *generation;
        self.send_to_first(ClusterMsg::PairConnected { generation, peer: node });
        Ok(())
    }

    /// Reports to the first node that a pair failed, which decides whether a node or a link is
    /// lost.
    pub(super) fn fail_pair(&mut self, index: usize, why: &str) {
        let generation = self.generation;
        let pair = &mut self.pairs[index];
        if matches!(pair.state, PairState::Failed | PairState::Left) {
            return;
        }
        pair.state = PairState::Failed;
        let peer = pair.node;
        let tried = pair.tried.clone();
        let why = shown_text(why, WHY_BYTES_MAX);
        self.send_to_first(ClusterMsg::PairFailed { generation, peer, tried, why });
    }

    /// Takes the start. A pair that failed since it was connected has no link; the first node knows
    /// of it, and reports the loss or the leave of its other node.
    pub(super) fn start(&mut self, generation: Generation) -> Result<(), ClusterError> {
        for pair in &self.pairs {
            if !matches!(pair.state, PairState::Connected(_) | PairState::Failed) {
                return Err(ClusterError::Unexpected {
                    who: self.name(FIRST),
                    message: ClusterMsg::Start { generation }.name(),
                    phase: "before all pairs are connected",
                });
            }
        }
        self.phase = JoinPhase::Running;
        let mut links = Vec::with_capacity(self.pairs.len() + 1);
        if let Some(first) = &self.first {
            links.push((FIRST, first.connection));
        }
        for pair in &self.pairs {
            if let Some(connection) = pair.connection() {
                links.push((pair.node, connection));
            }
        }
        if let Some((you, roster)) = self.roster.clone() {
            self.outbox.push(Action::Started { roster, you, links });
        }
        Ok(())
    }

    pub(super) fn opening(&self, dial: DialId) -> Option<ClusterMsg> {
        let pair = self.pairs.iter().find(|pair| pair.state == PairState::Dialing(dial))?;
        Some(self.pair_message(pair.node))
    }

    pub(super) fn pair_message(&self, to: NodeRank) -> ClusterMsg {
        let run = self.welcome().map(|welcome| welcome.run.clone()).unwrap_or_default();
        ClusterMsg::Pair { run, generation: self.generation, from: self.you(), to }
    }

    pub(super) fn has_open_dials(&self) -> bool {
        self.pairs
            .iter()
            .any(|pair| matches!(pair.state, PairState::Dialing(_) | PairState::Opening(_)))
    }

    pub(super) fn expire_dials(&mut self) {
        let why = format!("no answer over UDP within {}", seconds(REPLY_TIMEOUT));
        for index in 0..self.pairs.len() {
            let state = self.pairs[index].state;
            if let PairState::Opening(connection) = state {
                self.outbox.close(connection, &why);
            }
            if matches!(state, PairState::Dialing(_) | PairState::Opening(_)) {
                self.fail_pair(index, &why);
            }
        }
    }

    pub(super) fn close_late_early_pairs(&mut self, now: Nanos) {
        for early in self.early.extract_if(.., |early| now >= early.until) {
            let timeout = seconds(REPLY_TIMEOUT);
            let why = format!("the roster of {} did not come within {timeout}", early.generation);
            self.outbox.close(early.connection, &why);
        }
    }
}
