//! Connections without a first message of their peers: bounded in number and time.

use std::collections::BTreeMap;

use core::net::SocketAddr;

use super::bounds::REPLY_TIMEOUT;
use super::event::Outbox;
use super::ids::ConnectionId;
use potluck_core::Nanos;
use potluck_core::format::seconds;

/// Maximum number of connections without a first message.
pub(crate) const PENDING_CONNECTIONS_MAX: usize = 64;

/// Peers that have connected and sent no message yet.
#[derive(Debug, Default)]
pub(crate) struct PendingConnections(BTreeMap<ConnectionId, (SocketAddr, Nanos)>);

impl PendingConnections {
    /// Takes a connection in until its first message, or closes it if there are too many.
    pub fn enter(
        &mut self,
        now: Nanos,
        connection: ConnectionId,
        address: SocketAddr,
        outbox: &mut Outbox,
    ) {
        if self.0.len() >= PENDING_CONNECTIONS_MAX {
            let why = format!(
                "{PENDING_CONNECTIONS_MAX} connections have said nothing yet: try again later"
            );
            return outbox.close(connection, &why);
        }
        self.0.insert(connection, (address, now.saturating_add(REPLY_TIMEOUT)));
    }

    pub fn has(&self, connection: ConnectionId) -> bool {
        self.0.contains_key(&connection)
    }

    /// Records a new address of a peer.
    pub fn moved(&mut self, connection: ConnectionId, to: SocketAddr) {
        if let Some((address, _)) = self.0.get_mut(&connection) {
            *address = to;
        }
    }

    /// Removes a connection and returns the address of its peer.
    pub fn leave(&mut self, connection: ConnectionId) -> Option<SocketAddr> {
        self.0.remove(&connection).map(|(address, _)| address)
    }

    /// Closes connections without a message for too long.
    pub fn handle_timeout(&mut self, now: Nanos, outbox: &mut Outbox) {
        self.0.retain(|&connection, &mut (_, until)| {
            let is_late = now >= until;
            if is_late {
                let why = format!("no message came within {}", seconds(REPLY_TIMEOUT));
                outbox.close(connection, &why);
            }
            !is_late
        });
    }

    /// Returns the next time at which a connection is closed.
    pub fn deadline(&self) -> Option<Nanos> {
        self.0.values().map(|&(_, until)| until).min()
    }

    pub(crate) fn close_all(&mut self, why: &str, outbox: &mut Outbox) {
        for connection in std::mem::take(&mut self.0).into_keys() {
            outbox.close(connection, why);
        }
    }
}
