//! Addresses of ranks: mailboxes for ranks of this process, and connections to the nodes of the
//! others.

use std::sync::Arc;

use super::group_layout::GroupLayout;
use super::messages::{DriverMsg, RankRingMsg};
use potluck_core::{DType, EdgePiece, Rank, Round};
use potluck_net::nodes::ReceiveFrames;
use potluck_parallel::EdgeLayout;
use potluck_parallel::collective::{BucketGroups, ShardLayout};
use potluck_parallel::comm::frame::piece_frame;
use potluck_parallel::comm::{
    BufferPool, Carrier, Closed, FrameContent, FrameHeader, FrameValues, Mailbox, Message,
    PooledBuffer, RingMsg, SharedBuffer,
};

/// Maximum number of free buffers that a node keeps for arriving values.
const ARRIVING_FREE_MAX: usize = 64;

/// Address of one rank.
#[derive(Clone)]
pub enum RankAddress {
    /// Mailboxes of its ring thread and of its device thread.
    Local { ring: Mailbox<RankRingMsg>, driver: Mailbox<DriverMsg> },
    /// Connection to its node.
    Remote(Arc<dyn Carrier>),
}

/// Addresses of all ranks, by rank.
pub(crate) type RankAddresses = Arc<[RankAddress]>;

impl RankAddress {
    /// Sends a message to the ring thread of the rank `to` at this address.
    ///
    /// # Errors
    /// Returns the reason if the mailbox or the connection is closed.
    pub(crate) fn send_message(&self, to: Rank, message: Message) -> Result<(), Closed> {
        match self {
            Self::Local { ring, .. } => Ok(ring.send(RingMsg::Message(message))?),
            Self::Remote(carrier) => {
                let (header, values) = message.into_frame(to);
                carrier.send(header, values)
            }
        }
    }

    /// Sends a piece of a tensor to the device thread of the rank `to` at this address.
    ///
    /// # Errors
    /// Returns the same errors as [`RankAddress::send_message`].
    pub fn send_piece(
        &self,
        to: Rank,
        round: Round,
        piece: EdgePiece,
        values: SharedBuffer,
    ) -> Result<(), Closed> {
        match self {
            Self::Local { driver, .. } => {
                Ok(driver.send(DriverMsg::Piece { round, piece, values })?)
            }
            Self::Remote(carrier) => {
                carrier.send(piece_frame(to, round, &piece), FrameValues::Shared(values))
            }
        }
    }
}

/// Receiver of frames for the ranks of this process: checks them against the layout of the run, and
/// puts them into mailboxes.
pub(crate) struct ArrivingFrames {
    layout: Arc<ShardLayout>,
    groups: BucketGroups,
    edges: EdgeLayout,
    addresses: RankAddresses,
    generation: u64,
    pool: BufferPool<f32>,
}

impl ArrivingFrames {
    /// Creates the receiver for the ranks with local addresses.
    pub fn new(layout: &GroupLayout, addresses: RankAddresses) -> Self {
        let pool = BufferPool::new(ARRIVING_FREE_MAX);
        let GroupLayout { shards, groups, options, generation } = layout.clone();
        Self { layout: shards, groups, edges: options.edges, addresses, generation, pool }
    }
}

impl ReceiveFrames for ArrivingFrames {
    fn is_late(&self, header: &FrameHeader) -> bool {
        header.round.generation < self.generation
    }

    fn buffer(&self, header: &FrameHeader, bytes: usize) -> Result<PooledBuffer, String> {
        let elements = bytes / DType::F32.bytes();
        let is_whole = bytes.is_multiple_of(DType::F32.bytes());
        let wrong = |what: &str| Err(format!("{what}: {header:?} of {bytes} bytes"));
        let Some(RankAddress::Local { .. }) = self.addresses.get(header.to.index()) else {
            return wrong("a frame for a rank of another node");
        };
        let fits = match &header.content {
            FrameContent::Chunk { chunk, from, .. } => {
                let Some(found) = self.layout.chunks.get(chunk.index()) else {
                    return wrong("a frame of no chunk");
                };
                let size = self.groups.of(found.bucket).size();
                elements == found.range.len() && from.index() < size as usize
            }
            FrameContent::Piece { edge, start, .. } => {
                let edge =
                    self.edges.edges.get(edge.index()).filter(|edge| edge.leads_to(header.to));
                let Some(edge) = edge else { return wrong("a frame of no edge to this rank") };
                let most = edge.elements(self.edges.rows_max) as u64;
                let end = start.saturating_add(elements as u64);
                elements <= self.edges.piece_max && elements > 0 && end <= most
            }
        };
        if !fits || !is_whole {
            return wrong("a frame of another length than its place");
        }
        Ok(self.pool.take(elements))
    }

    fn deliver(&self, header: FrameHeader, values: PooledBuffer) {
        let FrameHeader { to, round, content } = header;
        let Some(RankAddress::Local { ring, driver }) = self.addresses.get(to.index()) else {
            return;
        };
        // The reader of a closed or full mailbox reports the reason.
        match content {
            FrameContent::Chunk { kind, chunk, from } => {
                let message = Message::from_frame(round, (kind, chunk, from), values);
                let _ = ring.send(RingMsg::Message(message));
            }
            FrameContent::Piece { edge, micro_batch, start } => {
                let start = start as usize;
                let range = start..start + values.len();
                let piece = EdgePiece { edge, micro_batch: micro_batch as usize, range };
                let _ = driver.send(DriverMsg::Piece { round, piece, values: values.share() });
            }
        }
    }
}
