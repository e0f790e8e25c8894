//! Closing of a connection.

use quinn::{Connection, VarInt};

use super::wire::{self, CloseCode};

/// Closes a connection with a sentence for the peer.
pub fn close(connection: &Connection, code: CloseCode, why: &str) {
    connection.close(VarInt::from_u32(code as u32), wire::reason_bytes(why));
}
