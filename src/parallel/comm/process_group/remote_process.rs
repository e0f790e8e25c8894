//! Other processes of a group: their links, and the packets that are sent over them.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::packet::PacketKind;
use super::payload::Payload;
use super::wire::{PACKET_HEADER_BYTES, PacketContent, PacketHeader, REASON_BYTES_MAX};
use crate::comm::Closed;
use potluck_core::{Position, Rank};

/// Link to another process. Packets arrive in the order in which they are sent.
pub trait PacketLink: Send + Sync {
    /// Sends a header, followed by the bytes of the values. May wait for room in a queue, but never
    /// for the receiving rank.
    ///
    /// # Errors
    ///
    /// Returns the reason with which the link is closed.
    fn send(&self, header: [u8; PACKET_HEADER_BYTES], values: PacketValues) -> Result<(), Closed>;
}

/// Bytes of values that are sent, at most 256 KiB; their buffer returns to its pool when they are
/// dropped.
pub struct PacketValues(SentValues);

enum SentValues {
    Payload(Payload),
    Reason(String),
}

impl AsRef<[u8]> for PacketValues {
    fn as_ref(&self) -> &[u8] {
        match &self.0 {
            SentValues::Payload(payload) => payload.as_ref(),
            SentValues::Reason(reason) => reason.as_bytes(),
        }
    }
}

/// Another process of a group.
pub struct RemoteProcess {
    /// Ranks of the process.
    pub ranks: Range<u32>,
    /// Name for messages: the process's host.
    pub host: String,
    pub link: Arc<dyn PacketLink>,
}

/// Display name, as returned by [`process_name`].
impl fmt::Display for RemoteProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&process_name(&self.ranks, &self.host))
    }
}

/// Returns the ranks of a process with its host, as in `rank 2 (beta)` and `ranks 2 to 4 (beta)`.
pub fn process_name(ranks: &Range<u32>, host: &str) -> String {
    match ranks.len() {
        1 => format!("{} ({host})", Rank(ranks.start)),
        _ => format!("ranks {} to {} ({host})", ranks.start, ranks.end.saturating_sub(1)),
    }
}

impl RemoteProcess {
    /// Sends a packet of a group between two positions.
    pub(super) fn send(
        &self,
        group: u64,
        [from, to]: [Position; 2],
        kind: PacketKind,
    ) -> Result<(), Closed> {
        let (content, payload) = PacketContent::divide(kind);
        let header = PacketHeader { group, from, to, content };
        self.link.send(header.encode(), PacketValues(SentValues::Payload(payload)))
    }

    /// Reports to the process that all groups of a rank are over.
    pub(super) fn send_abort(&self, rank: Rank, why: &str) {
        let mut end = why.len().min(REASON_BYTES_MAX);
        while !why.is_char_boundary(end) {
            end -= 1;
        }
        let header = PacketHeader {
            group: 0,
            from: Position(0),
            to: Position(0),
            content: PacketContent::Abort { rank },
        };
        let reason = PacketValues(SentValues::Reason(why[..end].into()));
        // A process whose link is closed learns of the end from the close.
        let _ = self.link.send(header.encode(), reason);
    }
}
