//! State machine of one rank's transfers between its device and its ring thread: the chunks to read
//! back, in their order, the reactions to messages, and the event that the device thread waits for.
//! It holds no values.

use std::collections::VecDeque;
use std::sync::Arc;

use super::edge_transfers::{Arrival, EdgeLayout, EdgeTransfers};
use super::verdict::{GradientSquares, Verdict, Vote};
use super::{Event, ReduceSite, StepError, Token};
use crate::collective::{Chunk, Collective, CollectiveKind, Positions, ShardLayout};
use potluck_core::{ChunkId, EdgeId, EdgePiece, Nanos, Position, Rank, ReductionId, Round};
use potluck_graph::{BucketTensor, Region};

/// Readback of a rank's own values of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    pub round: Round,
    pub kind: CollectiveKind,
    pub chunk: ChunkId,
}

/// First step of a rank's part in a collective, for one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalTransfer {
    /// Start a readback. Readbacks complete in the order in which they are started.
    Read(Read),
    /// Report the chunk to the ring thread without values: the device adds them on request.
    KeepOnDevice(Read),
}

/// Started readback of a chunk, or of a piece of a tensor to send, with its round.
#[derive(Clone, Debug, PartialEq, Eq)]
enum StartedRead {
    Chunk(Read),
    Piece(Round, EdgePiece),
}

/// Use of a completed readback.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CompletedRead {
    /// Send it to the ring thread.
    Forward(Read),
    /// Send it to the ring thread, which sends it to another rank.
    Send(EdgePiece),
    /// Drop it: its step was discarded.
    Discard,
}

/// Longest time that a device thread without a free readback slot waits for a message before it
/// looks for a free slot again.
pub const SLOT_POLL_INTERVAL: Nanos = 2_000_000;

/// Event for which a device thread without an action waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitFor {
    /// Completion of the next readback, which other ranks need. If every readback slot of the
    /// device holds values that the ring thread has not used yet: a message, for
    /// [`SLOT_POLL_INTERVAL`].
    Readback,
    /// Message of the ring thread or the coordinator.
    Message,
}

/// Message to a device thread during a step, from its ring thread or the coordinator. `S` are
/// shared values, `P` is a partial sum with one owner.
#[derive(Clone, Debug)]
pub enum DeviceMsg<S, P> {
    /// The sum over all ranks of a chunk that this rank owns, with its sum of squares and its
    /// number of non-finite elements.
    Reduced { round: Round, chunk: ChunkId, sum: S, squares: f64, not_finite: u64 },
    /// The final values of a chunk that another rank owns.
    Gathered { round: Round, chunk: ChunkId, values: S },
    /// A piece of a tensor that another rank has computed.
    Piece { round: Round, piece: EdgePiece, values: S },
    /// Request to add the device's own values of a chunk to a partial sum and to return it.
    Add { round: Round, chunk: ChunkId, partial: P },
    /// This rank's part in a collective is over.
    Done { round: Round, collective: Collective },
    /// The verdict on a round.
    Decided { round: Round, verdict: Verdict },
}

impl<S, P> DeviceMsg<S, P> {
    fn round(&self) -> Round {
        match self {
            Self::Reduced { round, .. }
            | Self::Gathered { round, .. }
            | Self::Piece { round, .. }
            | Self::Add { round, .. }
            | Self::Done { round, .. }
            | Self::Decided { round, .. } => *round,
        }
    }
}

/// Reaction of a device thread to a message.
#[derive(Clone, Debug, PartialEq)]
pub enum Response<S, P> {
    /// Write the values of a chunk to the device.
    Write { tensor: BucketTensor, chunk: ChunkId, values: S },
    /// Write a piece of a tensor to the device, and then report the event, if there is one.
    WritePiece { piece: EdgePiece, values: S, event: Option<Event> },
    /// Keep a piece until [`PeerTransfers::receive`] or [`PeerTransfers::parts`] returns it.
    Keep { piece: EdgePiece, values: S },
    /// Keep a piece, the last of an all-reduce that the program waits for, and then reduce
    /// [`PeerTransfers::parts`].
    Reduce { piece: EdgePiece, values: S, reduction: ReductionId },
    /// Add the device's gradients of a chunk to the partial sum, and send it to the ring thread.
    Add { chunk: ChunkId, partial: P },
    /// Report an event to the interpreter.
    Event(Event),
    /// Nothing: the message is of an earlier round.
    None,
}

/// Returns the capacity that the mailbox of a rank's device thread needs, in messages: per chunk
/// its sum or a request to add, and its final values; per bucket the ends of its two collectives;
/// the pieces of tensors that other ranks send; and the verdict.
pub fn device_inbox_max(layout: &ShardLayout, edges: &EdgeLayout, rank: Rank) -> usize {
    2 * (layout.chunks.len() + layout.buckets()) + edges.messages_to(rank) + 1
}

/// Transfers of one rank.
#[derive(Debug)]
pub struct PeerTransfers {
    layout: Arc<ShardLayout>,
    positions: Positions,
    reduce_site: ReduceSite,
    gathers: BucketTensor,
    round: Round,
    /// True once the current round was discarded.
    is_discarded: bool,
    /// Readbacks that were started and have not completed, in order; also of discarded rounds.
    reads: VecDeque<StartedRead>,
    /// Per chunk that the rank owns: (sum of squares, number of non-finite values) of its
    /// gradient sums, once they have arrived.
    sums: Vec<Option<(f64, u64)>>,
    edges: EdgeTransfers,
}

impl PeerTransfers {
    /// Creates the transfers of the rank at `positions` of the groups. Final values that other
    /// ranks own are written to `gathers`: parameters, or gradients where they are all-reduced.
    pub fn new(
        layout: Arc<ShardLayout>,
        positions: impl Into<Positions>,
        reduce_site: ReduceSite,
        gathers: BucketTensor,
    ) -> Self {
        Self {
            positions: positions.into(),
            reduce_site,
            gathers,
            round: Round::default(),
            is_discarded: false,
            reads: VecDeque::new(),
            sums: vec![None; layout.chunks.len()],
            // Without edges, the rank does not matter.
            edges: EdgeTransfers::new(Rank(0), EdgeLayout::default()),
            layout,
        }
    }

    /// Sets the edges of the run, and the rank whose transfers these are.
    pub fn with_edges(self, rank: Rank, edges: EdgeLayout) -> Self {
        Self { edges: EdgeTransfers::new(rank, edges), ..self }
    }

    /// Begins a round. Readbacks of an earlier round that are still in flight are discarded when
    /// they complete.
    pub fn restart(&mut self, round: Round) {
        self.round = round;
        self.is_discarded = false;
        self.sums = vec![None; self.layout.chunks.len()];
        self.edges.restart();
    }

    /// Discards the current round: no further readback of it is forwarded. The caller takes
    /// completed ones from the device.
    pub fn discard(&mut self) {
        self.is_discarded = true;
    }

    pub fn round(&self) -> Round {
        self.round
    }

    // ---- Readbacks ----

    /// Returns the transfers that begin this rank's part in a collective, in order: chunks are
    /// read back as the ring consumes them ([`ShardLayout::consumption_order`]).
    pub fn start(&mut self, collective: Collective) -> Vec<LocalTransfer> {
        let Some(own) = self.positions.of(collective.bucket) else { return Vec::new() };
        let order = self.layout.consumption_order(collective.bucket, own);
        self.start_in_order(collective.kind, order)
    }

    /// Transfers of these chunks, in this order.
    pub(crate) fn start_in_order(
        &mut self,
        kind: CollectiveKind,
        order: Vec<ChunkId>,
    ) -> Vec<LocalTransfer> {
        let mut transfers = Vec::new();
        for chunk in order {
            let Some(transfer) = self.begin(kind, chunk) else { continue };
            if let LocalTransfer::Read(read) = transfer {
                self.reads.push_back(StartedRead::Chunk(read));
            }
            transfers.push(transfer);
        }
        transfers
    }

    fn begin(&self, kind: CollectiveKind, chunk: ChunkId) -> Option<LocalTransfer> {
        let read = Read { round: self.round, kind, chunk };
        let is_read = match (kind, self.reduce_site) {
            (CollectiveKind::AllGather, _) if !self.owns(chunk) => return None,
            // Without other ranks, the final values stay on the device.
            (CollectiveKind::AllGather, _) => self.is_shared(chunk),
            (CollectiveKind::ReduceScatter, ReduceSite::Host) => true,
            (CollectiveKind::ReduceScatter, ReduceSite::Device) => !self.is_added_to(chunk),
        };
        Some(if is_read { LocalTransfer::Read(read) } else { LocalTransfer::KeepOnDevice(read) })
    }

    /// Returns the bucket tensor and the chunk that a readback is of.
    pub fn source(&self, read: Read) -> (BucketTensor, &Chunk) {
        let tensor = match read.kind {
            CollectiveKind::ReduceScatter => BucketTensor::Gradients,
            CollectiveKind::AllGather => BucketTensor::Parameters,
        };
        (tensor, self.layout.chunk(read.chunk))
    }

    /// Processes a completed readback, which states what it holds: it must be the oldest one that
    /// has not completed.
    ///
    /// # Errors
    /// Returns [`StepError::UnexpectedReadback`] if it is not.
    pub fn complete(&mut self, found: &Region) -> Result<CompletedRead, StepError> {
        let awaited = self.reads.front().map(|read| match read {
            StartedRead::Chunk(read) => {
                let (tensor, chunk) = self.source(*read);
                Region::bucket(tensor, chunk.bucket, chunk.range.clone())
            }
            StartedRead::Piece(_, piece) => self.edges.layout().place(piece),
        });
        if awaited.as_ref() != Some(found) {
            let awaited = awaited.map_or("nothing".to_owned(), |place| place.to_string());
            return Err(StepError::UnexpectedReadback { found: found.to_string(), awaited });
        }
        Ok(match self.reads.pop_front() {
            _ if self.is_discarded => CompletedRead::Discard,
            Some(StartedRead::Chunk(read)) if read.round == self.round => {
                CompletedRead::Forward(read)
            }
            Some(StartedRead::Piece(round, piece)) if round == self.round => {
                CompletedRead::Send(piece)
            }
            _ => CompletedRead::Discard,
        })
    }

    // ---- Edges ----

    /// Returns the edges of the run.
    pub fn edges(&self) -> &EdgeLayout {
        self.edges.layout()
    }

    /// Returns the pieces of a tensor that are sent, whose readbacks the caller starts in this
    /// order; `rows` are the samples of the micro-batch.
    pub fn send(&mut self, edge: EdgeId, micro_batch: usize, rows: usize) -> Vec<EdgePiece> {
        let pieces = self.edges.send(edge, micro_batch, rows);
        for piece in &pieces {
            self.reads.push_back(StartedRead::Piece(self.round, piece.clone()));
        }
        pieces
    }

    /// Returns true if a tensor that other ranks need is still being read back.
    pub fn has_sends(&self) -> bool {
        self.reads.iter().any(|read| matches!(read, StartedRead::Piece(..)))
    }

    /// Begins to receive a tensor: returns the pieces that were kept, which are to be written now,
    /// and the event to report then if that is all.
    ///
    /// # Errors
    /// Returns [`StepError::UnexpectedPiece`] if more has arrived than the tensor has.
    pub fn receive(
        &mut self,
        edge: EdgeId,
        micro_batch: usize,
        rows: usize,
    ) -> Result<(Vec<EdgePiece>, Option<Event>), StepError> {
        self.edges.receive(edge, micro_batch, rows)
    }

    /// Begins to wait for the parts of an all-reduce for a micro-batch of `rows`. Returns true if
    /// all have arrived, so that they are to be reduced now.
    ///
    /// # Errors
    /// Returns [`StepError::UnexpectedPiece`] if more has arrived than a part has.
    pub fn all_reduce(
        &mut self,
        reduction: ReductionId,
        micro_batch: usize,
        rows: usize,
    ) -> Result<bool, StepError> {
        self.edges.all_reduce(reduction, micro_batch, rows)
    }

    /// Returns the pieces of the parts of an all-reduce, which were kept: by rank of the group,
    /// then by tensor, each in order.
    pub fn parts(&self, reduction: ReductionId, micro_batch: usize) -> Vec<Vec<Vec<EdgePiece>>> {
        self.edges.parts(reduction, micro_batch)
    }

    /// Returns the place of this rank among those whose parts an all-reduce has.
    pub fn own_part(&self, reduction: ReductionId) -> usize {
        self.edges.own_part(reduction)
    }

    /// Returns the event for which a device thread without an action waits.
    pub fn wait_for(&self) -> WaitFor {
        if self.reads.is_empty() { WaitFor::Message } else { WaitFor::Readback }
    }

    // ---- Messages ----

    /// Processes a message and returns the reaction to it.
    ///
    /// # Errors
    /// Returns [`StepError`] for a chunk that this rank does not expect, and for a message of a
    /// later round.
    pub fn handle<S, P>(&mut self, message: DeviceMsg<S, P>) -> Result<Response<S, P>, StepError> {
        let found = message.round();
        let current = self.round;
        if found > current {
            return Err(StepError::LaterRound { found, current });
        }
        if found < current {
            return Ok(Response::None);
        }
        Ok(match message {
            DeviceMsg::Reduced { chunk, sum, squares, not_finite, .. } => {
                let is_due = self.owns(chunk) && self.sums[chunk.index()].is_none();
                self.require(is_due, "a sum", chunk)?;
                self.sums[chunk.index()] = Some((squares, not_finite));
                Response::Write { tensor: BucketTensor::Gradients, chunk, values: sum }
            }
            DeviceMsg::Gathered { chunk, values, .. } => {
                let is_due = self.is_known(chunk) && !self.owns(chunk);
                self.require(is_due, "a final value", chunk)?;
                Response::Write { tensor: self.gathers, chunk, values }
            }
            DeviceMsg::Piece { piece, values, .. } => match self.edges.arrive(&piece)? {
                Arrival::Write(event) => Response::WritePiece { piece, values, event },
                Arrival::Keep => Response::Keep { piece, values },
                Arrival::Reduce(reduction) => Response::Reduce { piece, values, reduction },
            },
            DeviceMsg::Add { chunk, partial, .. } => {
                let is_due = self.is_known(chunk)
                    && self.reduce_site == ReduceSite::Device
                    && self.is_added_to(chunk);
                self.require(is_due, "a partial sum", chunk)?;
                Response::Add { chunk, partial }
            }
            DeviceMsg::Done { collective, .. } => {
                Response::Event(Event::Done(Token::of(collective)))
            }
            DeviceMsg::Decided { verdict, .. } => Response::Event(Event::Verdict(verdict)),
        })
    }

    fn is_known(&self, chunk: ChunkId) -> bool {
        chunk.index() < self.layout.chunks.len() && self.own(chunk).is_some()
    }

    fn owns(&self, chunk: ChunkId) -> bool {
        self.is_known(chunk) && self.own(chunk) == Some(self.layout.chunk(chunk).owner)
    }

    /// Returns this rank's position in the group of a chunk's bucket.
    fn own(&self, chunk: ChunkId) -> Option<Position> {
        self.positions.of(self.layout.chunk(chunk).bucket)
    }

    fn is_shared(&self, chunk: ChunkId) -> bool {
        self.layout.size_of(self.layout.chunk(chunk).bucket) > 1
    }

    /// Returns true if a partial sum of the chunk arrives at this rank.
    fn is_added_to(&self, chunk: ChunkId) -> bool {
        self.is_shared(chunk)
            && self.own(chunk).is_some_and(|own| !self.layout.is_initiator(chunk, own))
    }

    fn require(&self, is_due: bool, what: &'static str, chunk: ChunkId) -> Result<(), StepError> {
        if is_due { Ok(()) } else { Err(StepError::UnexpectedChunk { what, chunk }) }
    }

    /// Completes a vote with the round and with the squares of the gradient sums that this rank
    /// owns of the buckets that others hold too, if the step `updates` parameters.
    ///
    /// # Errors
    /// Returns [`StepError::MissingSum`] if a sum has not arrived.
    pub fn complete_vote(&self, vote: Vote, updates: bool) -> Result<Vote, StepError> {
        let mut vote = Vote { round: self.round, ..vote };
        if !updates {
            return Ok(vote);
        }
        let mut summed = Vec::new();
        for (index, (sum, chunk)) in self.sums.iter().zip(&self.layout.chunks).enumerate() {
            let id = ChunkId(index as u32);
            let bucket = chunk.bucket;
            if let Some((squares, not_finite)) = *sum {
                let position = chunk.owner;
                summed.push(GradientSquares { position, bucket, chunk: id, squares, not_finite });
                continue;
            }
            // The device has summed the squares of the buckets that no other rank holds.
            if self.owns(id) && !vote.gradients.iter().any(|of| of.bucket == bucket) {
                return Err(StepError::MissingSum { chunk: id });
            }
        }
        vote.gradients.extend(summed);
        Ok(vote)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::Topology;
    use potluck_core::{BucketId, Rank};

    const FIRST: Round = Round { generation: 0, step: 1, settles: false };
    const BUCKET: BucketId = BucketId(0);

    /// Three ranks, four chunks: position 0 owns chunks 0 and 1, 1 owns 2, and 2 owns 3.
    fn transfers(position: u32, site: ReduceSite) -> PeerTransfers {
        let layout = Arc::new(ShardLayout::new(Topology::Ring, 3, &[8], 2, 2));
        let position = Position(position);
        let mut transfers = PeerTransfers::new(layout, position, site, BucketTensor::Parameters);
        transfers.restart(FIRST);
        transfers
    }

    fn chunks(started: &[LocalTransfer]) -> Vec<(bool, u32)> {
        let chunk = |transfer: &LocalTransfer| match transfer {
            LocalTransfer::Read(read) => (true, read.chunk.0),
            LocalTransfer::KeepOnDevice(read) => (false, read.chunk.0),
        };
        started.iter().map(chunk).collect()
    }

    fn vote() -> Vote {
        let (loss, count, gradients) = (3.0, 2.0, Vec::new());
        Vote {
            round: FIRST,
            rank: Rank(0),
            loss,
            count,
            terms: Vec::new(),
            loss_scale: 1.0,
            gradients,
        }
    }

    #[test]
    fn hosts_read_what_they_add_and_devices_what_they_begin() {
        let reduce = Collective::reduce_scatter(BUCKET);
        let host = transfers(0, ReduceSite::Host).start(reduce);
        assert_eq!(chunks(&host), [(true, 3), (true, 2), (true, 0), (true, 1)]);
        let device = transfers(0, ReduceSite::Device).start(reduce);
        assert_eq!(chunks(&device), [(true, 3), (false, 2), (false, 0), (false, 1)]);
        let gather = transfers(0, ReduceSite::Device).start(Collective::all_gather(BUCKET));
        assert_eq!(chunks(&gather), [(true, 0), (true, 1)]);
    }

    #[test]
    fn a_readback_is_compared_with_the_one_that_is_awaited() {
        let mut transfers = transfers(1, ReduceSite::Device);
        assert_eq!(transfers.wait_for(), WaitFor::Message);
        let (gradients, parameters) = (BucketTensor::Gradients, BucketTensor::Parameters);
        let error = transfers.complete(&Region::bucket(gradients, BUCKET, 0..2)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the device returns gradients of bucket 0, 0..2 and nothing is awaited"
        );
        // Position 1 begins the sums of position 0.
        transfers.start(Collective::reduce_scatter(BUCKET));
        assert_eq!(transfers.wait_for(), WaitFor::Readback);
        for (tensor, range) in [(parameters, 0..2), (gradients, 2..4), (gradients, 0..1)] {
            let found = Region::bucket(tensor, BUCKET, range);
            let error = transfers.complete(&found).unwrap_err().to_string();
            assert!(error.ends_with("and gradients of bucket 0, 0..2 is awaited"), "{error}");
        }
        let read = Read { round: FIRST, kind: CollectiveKind::ReduceScatter, chunk: ChunkId(0) };
        let completed = transfers.complete(&Region::bucket(gradients, BUCKET, 0..2));
        assert_eq!(completed, Ok(CompletedRead::Forward(read)));
    }

    #[test]
    fn readbacks_of_a_discarded_step_are_drained_and_never_forwarded() {
        let mut transfers = transfers(1, ReduceSite::Device);
        transfers.start(Collective::reduce_scatter(BUCKET));
        transfers.discard();
        let gradients = BucketTensor::Gradients;
        let first = transfers.complete(&Region::bucket(gradients, BUCKET, 0..2));
        assert_eq!((first, transfers.wait_for()), (Ok(CompletedRead::Discard), WaitFor::Readback));
        // Also one that completes in a later round.
        let again = Round { generation: 1, step: 1, settles: false };
        transfers.restart(again);
        transfers.start(Collective::reduce_scatter(BUCKET));
        let second = transfers.complete(&Region::bucket(gradients, BUCKET, 2..4));
        assert_eq!(second, Ok(CompletedRead::Discard));
        let third = transfers.complete(&Region::bucket(gradients, BUCKET, 0..2)).unwrap();
        let CompletedRead::Forward(read) = third else { panic!("{third:?}") };
        assert_eq!(read.round, again);
    }

    #[test]
    fn messages_that_are_not_due_are_errors() {
        let mut transfers = transfers(0, ReduceSite::Host);
        let sum = |chunk| DeviceMsg::<(), ()>::Reduced {
            round: FIRST,
            chunk: ChunkId(chunk),
            sum: (),
            squares: 4.0,
            not_finite: 1,
        };
        let gathered = |chunk| DeviceMsg::<(), ()>::Gathered {
            round: FIRST,
            chunk: ChunkId(chunk),
            values: (),
        };
        let unexpected =
            |what, chunk| Err(StepError::UnexpectedChunk { what, chunk: ChunkId(chunk) });
        assert_eq!(transfers.handle(sum(2)), unexpected("a sum", 2));
        assert_eq!(transfers.handle(sum(9)), unexpected("a sum", 9));
        assert_eq!(transfers.handle(gathered(1)), unexpected("a final value", 1));
        assert_eq!(transfers.handle(gathered(9)), unexpected("a final value", 9));
        let add = DeviceMsg::<(), ()>::Add { round: FIRST, chunk: ChunkId(0), partial: () };
        assert_eq!(transfers.handle(add), unexpected("a partial sum", 0));

        let missing = Err(StepError::MissingSum { chunk: ChunkId(0) });
        assert_eq!(transfers.complete_vote(vote(), true), missing);
        for chunk in [1, 0] {
            assert!(matches!(transfers.handle(sum(chunk)), Ok(Response::Write { .. })));
        }
        assert_eq!(transfers.handle(sum(0)), unexpected("a sum", 0));
        let of = |chunk: u32| GradientSquares {
            position: Position(0),
            bucket: BUCKET,
            chunk: ChunkId(chunk),
            squares: 4.0,
            not_finite: 1,
        };
        let expected = Vote { gradients: vec![of(0), of(1)], ..vote() };
        assert_eq!(transfers.complete_vote(vote(), true), Ok(expected));
    }

    #[test]
    fn messages_of_an_earlier_round_change_nothing_and_of_a_later_one_are_errors() {
        let mut transfers = transfers(0, ReduceSite::Device);
        let second = Round { generation: 0, step: 2, settles: false };
        transfers.restart(second);
        let verdict = Verdict::from_votes(&[vote()]);
        let messages = |round| {
            let (chunk, collective) = (ChunkId(0), Collective::reduce_scatter(BUCKET));
            let (sum, verdict) = ((), verdict.clone());
            [
                DeviceMsg::<(), ()>::Reduced { round, chunk, sum, squares: 1.0, not_finite: 0 },
                DeviceMsg::Gathered { round, chunk: ChunkId(2), values: () },
                DeviceMsg::Add { round, chunk, partial: () },
                DeviceMsg::Done { round, collective },
                DeviceMsg::Decided { round, verdict },
            ]
        };
        for message in messages(FIRST) {
            assert_eq!(transfers.handle(message), Ok(Response::None));
        }
        let found = Round { generation: 1, step: 1, settles: false };
        for message in messages(found) {
            let later = Err(StepError::LaterRound { found, current: second });
            assert_eq!(transfers.handle(message), later);
        }
        for message in messages(second) {
            assert!(!matches!(transfers.handle(message), Ok(Response::None) | Err(_)));
        }
    }

    #[test]
    fn a_group_of_one_reads_its_gradients_and_sends_nothing() {
        for site in [ReduceSite::Host, ReduceSite::Device] {
            let layout = Arc::new(ShardLayout::new(Topology::Ring, 1, &[8], 2, 4));
            let tensor = BucketTensor::Parameters;
            let mut transfers = PeerTransfers::new(layout, Position(0), site, tensor);
            let reduce = transfers.start(Collective::reduce_scatter(BUCKET));
            assert_eq!(chunks(&reduce), [(true, 0), (true, 1)]);
            let gather = transfers.start(Collective::all_gather(BUCKET));
            assert_eq!(chunks(&gather), [(false, 0), (false, 1)]);
        }
    }
}
