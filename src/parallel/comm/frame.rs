//! Frames: values in flight to a rank of another node, with a header of fixed size that identifies
//! them. The receiver computes their number from its own layout.

use super::exchange_driver::MessageValues;
use super::{Closed, Message, PooledBuffer, SharedBuffer};
use crate::collective::CollectiveKind;
use potluck_core::{ChunkId, EdgeId, EdgePiece, Position, Rank, Round};

/// Kinds on the wire.
const PARTIAL: u8 = 1;
const FINAL: u8 = 2;
const PIECE: u8 = 3;

/// Header of a frame: the receiving rank, the round, and the identity of the values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    pub to: Rank,
    pub round: Round,
    pub content: FrameContent,
}

/// Content of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FrameContent {
    /// A partial sum of a chunk, from a position of its bucket's group, or its final values.
    Chunk { kind: CollectiveKind, chunk: ChunkId, from: Position },
    /// Elements from `start` on of the tensor of an edge.
    Piece { edge: EdgeId, micro_batch: u32, start: u64 },
}

impl FrameHeader {
    /// Bytes of an encoded header.
    pub const BYTES: usize = 40;

    /// Returns the header as bytes: kind, 1 in a settling round and 0 otherwise, two zeros, the
    /// rank (u32), generation and step (u64), chunk or edge (u32), position or micro-batch (u32),
    /// first element (u64); little-endian.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let (kind, id, from, start) = match self.content {
            FrameContent::Chunk { kind: CollectiveKind::ReduceScatter, chunk, from } => {
                (PARTIAL, chunk.0, from.0, 0)
            }
            FrameContent::Chunk { kind: CollectiveKind::AllGather, chunk, from } => {
                (FINAL, chunk.0, from.0, 0)
            }
            FrameContent::Piece { edge, micro_batch, start } => (PIECE, edge.0, micro_batch, start),
        };
        let mut bytes = [0; Self::BYTES];
        bytes[0] = kind;
        bytes[1] = u8::from(self.round.settles);
        bytes[4..8].copy_from_slice(&self.to.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.round.generation.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.round.step.to_le_bytes());
        bytes[24..28].copy_from_slice(&id.to_le_bytes());
        bytes[28..32].copy_from_slice(&from.to_le_bytes());
        bytes[32..40].copy_from_slice(&start.to_le_bytes());
        bytes
    }

    /// Returns the header that these bytes encode; `None` if they are no header.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let id = short(bytes, 24);
        let from = short(bytes, 28);
        let start = long(bytes, 32);
        let content = match bytes[0] {
            kind @ (PARTIAL | FINAL) if start == 0 => FrameContent::Chunk {
                kind: if kind == PARTIAL {
                    CollectiveKind::ReduceScatter
                } else {
                    CollectiveKind::AllGather
                },
                chunk: ChunkId(id),
                from: Position(from),
            },
            PIECE => FrameContent::Piece { edge: EdgeId(id), micro_batch: from, start },
            _ => return None,
        };
        if bytes[1] > 1 || bytes[2..4] != [0; 2] {
            return None;
        }
        let round =
            Round { generation: long(bytes, 8), step: long(bytes, 16), settles: bytes[1] == 1 };
        Some(Self { to: Rank(short(bytes, 4)), round, content })
    }
}

fn short(bytes: &[u8; FrameHeader::BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn long(bytes: &[u8; FrameHeader::BYTES], at: usize) -> u64 {
    u64::from(short(bytes, at)) | u64::from(short(bytes, at + 4)) << 32
}

/// Values of a frame, whose buffer returns to its pool once they are sent.
#[derive(Debug)]
pub enum FrameValues {
    Owned(PooledBuffer),
    Shared(SharedBuffer),
}

impl AsRef<[f32]> for FrameValues {
    fn as_ref(&self) -> &[f32] {
        match self {
            Self::Owned(values) => values,
            Self::Shared(values) => values,
        }
    }
}

/// Bytes of the values as they are sent: little-endian.
impl AsRef<[u8]> for FrameValues {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(AsRef::<[f32]>::as_ref(self))
    }
}

/// Connection to the ranks of another node.
pub trait Carrier: Send + Sync {
    /// Sends a frame; waits while the queue of the connection is full. The queue empties even while
    /// all ranks wait. Frames arrive in the order in which they are sent.
    ///
    /// # Errors
    /// Returns the reason with which the connection is closed.
    fn send(&self, header: FrameHeader, values: FrameValues) -> Result<(), Closed>;
}

impl Message {
    /// Returns the message as a frame for a rank.
    pub fn into_frame(self, to: Rank) -> (FrameHeader, FrameValues) {
        let Self { kind, chunk, from, round, payload } = self;
        let values = match payload {
            MessageValues::Partial(values) => FrameValues::Owned(values),
            MessageValues::Final(values) => FrameValues::Shared(values),
        };
        let content = FrameContent::Chunk { kind, chunk, from };
        (FrameHeader { to, round, content }, values)
    }

    /// Returns the message of a frame with values of a chunk.
    pub fn from_frame(
        round: Round,
        id: (CollectiveKind, ChunkId, Position),
        values: PooledBuffer,
    ) -> Self {
        let (kind, chunk, from) = id;
        let payload = match kind {
            CollectiveKind::ReduceScatter => MessageValues::Partial(values),
            CollectiveKind::AllGather => MessageValues::Final(values.share()),
        };
        Self { kind, chunk, from, round, payload }
    }
}

/// Returns the frame of a piece of a tensor for a rank.
pub fn piece_frame(to: Rank, round: Round, piece: &EdgePiece) -> FrameHeader {
    let content = FrameContent::Piece {
        edge: piece.edge,
        // Micro-batches of a step are counted in u32.
        micro_batch: piece.micro_batch as u32,
        start: piece.range.start as u64,
    };
    FrameHeader { to, round, content }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_core::rng::Key;

    fn headers() -> Vec<FrameHeader> {
        let round = Round { generation: u64::MAX - 1, step: 1 << 40, settles: true };
        let chunk = |kind| FrameContent::Chunk { kind, chunk: ChunkId(7), from: Position(3) };
        let piece = FrameContent::Piece { edge: EdgeId(9), micro_batch: 11, start: 1 << 33 };
        let contents =
            [chunk(CollectiveKind::ReduceScatter), chunk(CollectiveKind::AllGather), piece];
        contents.map(|content| FrameHeader { to: Rank(0x01020304), round, content }).into()
    }

    #[test]
    fn headers_come_back_and_changed_ones_are_others_or_none() {
        for header in headers() {
            let bytes = header.encode();
            assert_eq!(FrameHeader::decode(&bytes), Some(header.clone()));
            for bit in 0..8 * FrameHeader::BYTES {
                let mut changed = bytes;
                changed[bit / 8] ^= 1 << (bit % 8);
                let found = FrameHeader::decode(&changed);
                assert!(found.as_ref() != Some(&header), "bit {bit}");
                assert!(found.is_none_or(|found| found.encode() == changed), "bit {bit}");
            }
        }
    }

    #[test]
    fn any_bytes_are_a_header_or_none() {
        let key = Key::new(5);
        for seed in 0..100_000 {
            let mut bytes = [0; FrameHeader::BYTES];
            for (at, byte) in bytes.iter_mut().enumerate() {
                *byte = (key.uniform((seed * FrameHeader::BYTES + at) as u64) * 256.0) as u8;
            }
            bytes[0] %= 5;
            bytes[1..4].fill(0);
            assert!(FrameHeader::decode(&bytes).is_none_or(|header| header.encode() == bytes));
        }
    }
}
