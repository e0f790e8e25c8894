//! Work of a ring thread: hands the rank's own values and the messages of other ranks to the
//! exchange driver, and passes on the results.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use super::add::add_assign;
use super::{
    Addition, BufferPool, Closed, ExchangeDriver, ExchangeIo, Mailbox, Message, PooledBuffer,
    SendError, SharedBuffer,
};
use crate::collective::{Chunk, Collective, CollectiveKind, ExchangeError, Positions, ShardLayout};
use potluck_core::{BucketId, ChunkId, DType, EdgePiece, Nanos, Position, Round};

impl From<ExchangeError> for Closed {
    /// Reason with which a ring thread ends after the error.
    fn from(error: ExchangeError) -> Self {
        Self(format!("{error}, which is a defect of potluck; please report it"))
    }
}

/// Message to a ring thread. `R` is a readback of the rank's own values of a chunk.
#[derive(Debug)]
pub enum RingMsg<R> {
    /// A round begins: sent by [`send_restart`] before the rank runs. In one process it is sent to
    /// all ring threads before any rank runs; messages of nodes that began earlier wait for it.
    Restart(Round),
    /// The rank's own values of a chunk are available: in `readback`, or without one on the
    /// device only, which then adds them itself.
    Ready { round: Round, kind: CollectiveKind, chunk: ChunkId, readback: Option<R> },
    /// The device has added its own values of a chunk to a partial sum.
    Added { round: Round, chunk: ChunkId, partial: PooledBuffer },
    /// A piece of a tensor for another rank is available.
    Send { round: Round, piece: EdgePiece, readback: R },
    /// A message of another rank.
    Message(Message),
}

impl<R> RingMsg<R> {
    fn round(&self) -> Round {
        match self {
            Self::Restart(round)
            | Self::Ready { round, .. }
            | Self::Added { round, .. }
            | Self::Send { round, .. } => *round,
            Self::Message(message) => message.round,
        }
    }
}

/// Begins a round in a ring thread, and removes the messages of earlier rounds, which all ranks
/// have ended, from its mailbox. In rounds without work for a ring thread, no rank waits for it:
/// without the removal, restarts could fill its mailbox before it runs.
///
/// # Errors
/// Returns the errors of [`Mailbox::send`].
pub fn send_restart<R>(ring: &Mailbox<RingMsg<R>>, round: Round) -> Result<(), SendError> {
    ring.send_in_place_of(RingMsg::Restart(round), |earlier| earlier.round() < round)
}

/// Returns the maximum number of messages in the mailbox of a ring thread: the messages of other
/// ranks in one round, because all ranks have ended a round before the next one begins; the rank's
/// own values, twice because there are two collectives; a sum that the device has added; and the
/// restart, which removes all messages of earlier rounds. Before it, the previous restart may be in
/// the mailbox with the messages of nodes that began earlier.
pub fn ring_inbox_max(layout: &ShardLayout, positions: impl Into<Positions>) -> usize {
    layout.messages_max(positions) + 2 * layout.chunks.len() + 2
}

/// Returns the maximum number of bytes that the buffer pool of a ring thread takes in a training
/// step: buffers for the partial sums that begin here, or, later in the step, for the final values
/// of the chunks that this rank owns. Every buffer may be of the longest chunk, because buffers are
/// reused. Partial sums that wait at the server of a star are in the pools of their senders. Over
/// several nodes (`is_over_nodes`), all-gathers may run in the next step, and final values may wait
/// for a link when partial sums begin.
pub fn ring_pool_bytes_max(
    layout: &ShardLayout,
    positions: impl Into<Positions>,
    is_over_nodes: bool,
) -> usize {
    let positions = positions.into();
    let mut begun: usize = 0;
    let mut owned: usize = 0;
    let mut longest = 0;
    for (index, chunk) in layout.chunks.iter().enumerate() {
        let Some(own) = positions.of(chunk.bucket) else { continue };
        // A bucket that only one rank holds is not exchanged.
        if layout.size_of(chunk.bucket) <= 1 {
            continue;
        }
        begun += usize::from(layout.is_initiator(ChunkId(index as u32), own));
        owned += usize::from(chunk.owner == own);
        longest = longest.max(chunk.range.len());
    }
    let buffers = if is_over_nodes { begun + owned } else { begun.max(owned) };
    buffers.saturating_mul(longest).saturating_mul(DType::F32.bytes())
}

/// Returns the maximum number of bytes of final values that wait for the ranks of a process in a
/// run over several nodes: a node sends the chunks that its ranks own at any time, and a device may
/// upload them later. In a ring of nodes, a process that delayed receiving them could wait for
/// itself. `own` has the positions of the ranks of the process.
pub fn arriving_bytes_max(layout: &ShardLayout, own: &[Positions]) -> usize {
    let mut elements: usize = 0;
    for chunk in &layout.chunks {
        if layout.size_of(chunk.bucket) <= 1 {
            continue;
        }
        let mut is_held = false;
        let mut is_owned = false;
        for positions in own {
            let position = positions.of(chunk.bucket);
            is_held |= position.is_some();
            is_owned |= position == Some(chunk.owner);
        }
        if is_held && !is_owned {
            elements = elements.saturating_add(chunk.range.len());
        }
    }
    elements.saturating_mul(DType::F32.bytes())
}

/// Work on the values of a chunk that a ring thread does itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostWork {
    /// Copies the own values that a partial sum begins with.
    Begin,
    /// Adds the own values to a partial sum.
    Add,
    /// Copies the final values that the owner sends.
    SendFinal,
}

impl fmt::Display for HostWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Begin => "begin",
            Self::Add => "add",
            Self::SendFinal => "send final values",
        })
    }
}

/// Environment of a ring thread: the other ranks, and the rank's own device thread.
pub trait RingOutput {
    type Error: From<ExchangeError>;
    /// Period of host work, which ends when this is dropped.
    type Span;

    /// Returns the time that counts for [`RingWorker::handle_timeout`].
    fn now(&self) -> Nanos {
        0
    }

    /// Begins work on a chunk.
    fn work(&mut self, work: HostWork, chunk: &Chunk) -> Self::Span;

    /// Returns the elements of a chunk's buffers.
    fn buffer_length(&self, chunk: &Chunk) -> usize {
        chunk.range.len()
    }

    /// Sends a message to another rank.
    fn send(&mut self, to: Position, message: Message) -> Result<(), Self::Error>;

    /// Passes the sum over all ranks of a chunk that this rank owns to its device.
    fn reduced(
        &mut self,
        round: Round,
        chunk: ChunkId,
        sum: SharedBuffer,
    ) -> Result<(), Self::Error>;

    /// Passes the final values of a chunk that another rank owns to the device.
    fn gathered(
        &mut self,
        round: Round,
        chunk: ChunkId,
        values: SharedBuffer,
    ) -> Result<(), Self::Error>;

    /// Requests that the device adds its own values of a chunk; [`RingMsg::Added`] answers.
    fn add_on_device(
        &mut self,
        round: Round,
        chunk: ChunkId,
        partial: PooledBuffer,
    ) -> Result<(), Self::Error>;

    /// Begins the copy of a piece of a tensor for another rank.
    fn copy(&mut self, piece: &EdgePiece) -> Self::Span;

    /// Sends a piece of a tensor to the device thread of the rank that its edge leads to.
    fn send_piece(
        &mut self,
        round: Round,
        piece: EdgePiece,
        values: SharedBuffer,
    ) -> Result<(), Self::Error>;

    /// Reports the end of this rank's part in a collective.
    fn done(&mut self, round: Round, collective: Collective) -> Result<(), Self::Error>;
}

/// State of a ring thread: an exchange driver, and the rank's own values that it has not used.
pub struct RingWorker<R> {
    exchange: ExchangeDriver,
    readbacks: HashMap<ChunkId, R>,
    /// Buffers of the tensors that are sent to other ranks, most of another length than chunks.
    pieces: BufferPool<f32>,
}

/// Free buffers that a ring thread keeps for the tensors that it sends.
const PIECES_FREE_MAX: usize = 16;

impl<R: AsRef<[f32]>> RingWorker<R> {
    /// Creates the state before the first round; `window` as in
    /// [`crate::collective::Exchange::new`]. With `all_reduces`, sums are sent to all ranks as they
    /// are, without an update in between: an all-reduce.
    pub fn new(
        layout: Arc<ShardLayout>,
        positions: impl Into<Positions>,
        window: usize,
        all_reduces: bool,
    ) -> Self {
        let exchange = ExchangeDriver::new(layout, positions, window);
        let exchange = if all_reduces { exchange.into_all_reduce() } else { exchange };
        Self { exchange, readbacks: HashMap::new(), pieces: BufferPool::new(PIECES_FREE_MAX) }
    }

    /// Sets the longest time for which messages are awaited; see
    /// [`crate::collective::Exchange::with_deadline`].
    pub(crate) fn with_deadline(self, deadline: Nanos) -> Self {
        Self { exchange: self.exchange.with_deadline(deadline), ..self }
    }

    /// Checks the deadline at the time `now`.
    ///
    /// # Errors
    /// Returns [`ExchangeError::TimedOut`] with the positions whose messages are awaited if it has
    /// passed.
    pub fn handle_timeout(&self, now: Nanos) -> Result<(), ExchangeError> {
        self.exchange.handle_timeout(now)
    }

    /// Returns the buffer pool of the exchange.
    pub fn pool(&self) -> &BufferPool<f32> {
        self.exchange.pool()
    }

    /// Returns the number of messages of another round so far; see [`ExchangeDriver::strays`].
    pub fn strays(&self) -> u64 {
        self.exchange.strays()
    }

    /// Processes a message and everything that follows from it.
    ///
    /// # Errors
    /// Returns the error of `output`, or an [`ExchangeError`] for a message that is not expected.
    pub fn handle<O: RingOutput>(
        &mut self,
        message: RingMsg<R>,
        output: &mut O,
    ) -> Result<(), O::Error> {
        let Self { exchange, readbacks, pieces } = self;
        let pool = exchange.pool().clone();
        let mut io = RingIo { readbacks, output, round: exchange.round(), pool };
        let found = message.round();
        match message {
            RingMsg::Restart(round) => {
                io.readbacks.clear();
                io.round = round;
                exchange.restart(round);
                exchange.start(&mut io)
            }
            RingMsg::Message(message) => exchange.on_message(message, &mut io),
            // Own values of a discarded step.
            _ if found < exchange.round() => Ok(()),
            _ if found > exchange.round() => {
                Err(ExchangeError::LaterRound { found, current: exchange.round() }.into())
            }
            RingMsg::Ready { kind, chunk, readback, .. } => {
                if let Some(readback) = readback {
                    io.readbacks.insert(chunk, readback);
                }
                exchange.on_local_ready(kind, chunk, &mut io)
            }
            RingMsg::Send { round, piece, readback } => {
                let mut values = pieces.take(readback.as_ref().len());
                {
                    let _span = io.output.copy(&piece);
                    values.copy_from_slice(readback.as_ref());
                }
                // Its slot on the device is free from here on.
                drop(readback);
                io.output.send_piece(round, piece, values.share())
            }
            RingMsg::Added { chunk, partial, .. } => exchange.on_added(chunk, partial, &mut io),
        }
    }
}

/// Side of the exchange that belongs to this rank.
struct RingIo<'a, R, O> {
    readbacks: &'a mut HashMap<ChunkId, R>,
    output: &'a mut O,
    round: Round,
    pool: BufferPool<f32>,
}

impl<R: AsRef<[f32]>, O: RingOutput> RingIo<'_, R, O> {
    /// Copies the rank's own values of a chunk to `into`, and drops the readback.
    fn copy(
        &mut self,
        work: HostWork,
        id: ChunkId,
        chunk: &Chunk,
        into: &mut [f32],
    ) -> Result<(), O::Error> {
        let readback = self.readbacks.remove(&id).ok_or(ExchangeError::MissingValues { id })?;
        let _span = self.output.work(work, chunk);
        into.copy_from_slice(readback.as_ref());
        Ok(())
    }
}

impl<R: AsRef<[f32]>, O: RingOutput> ExchangeIo for RingIo<'_, R, O> {
    type Error = O::Error;

    fn now(&self) -> Nanos {
        self.output.now()
    }

    fn buffer_length(&self, chunk: &Chunk) -> usize {
        self.output.buffer_length(chunk)
    }

    fn read_local(&mut self, id: ChunkId, chunk: &Chunk, into: &mut [f32]) -> Result<(), O::Error> {
        self.copy(HostWork::Begin, id, chunk, into)
    }

    fn add_local(
        &mut self,
        id: ChunkId,
        chunk: &Chunk,
        mut partial: PooledBuffer,
    ) -> Result<Addition<f32>, O::Error> {
        let Some(readback) = self.readbacks.remove(&id) else {
            self.output.add_on_device(self.round, id, partial)?;
            return Ok(Addition::Pending);
        };
        let _span = self.output.work(HostWork::Add, chunk);
        add_assign(&mut partial, readback.as_ref());
        Ok(Addition::Done(partial))
    }

    fn on_reduced(
        &mut self,
        id: ChunkId,
        _: &Chunk,
        sum: PooledBuffer,
    ) -> Result<SharedBuffer, O::Error> {
        let sum = sum.share();
        self.output.reduced(self.round, id, sum.clone())?;
        Ok(sum)
    }

    fn read_final(&mut self, id: ChunkId, chunk: &Chunk) -> Result<SharedBuffer, O::Error> {
        let mut values = self.pool.take(self.output.buffer_length(chunk));
        self.copy(HostWork::SendFinal, id, chunk, &mut values)?;
        Ok(values.share())
    }

    fn on_gathered(
        &mut self,
        id: ChunkId,
        _: &Chunk,
        values: &SharedBuffer,
    ) -> Result<(), O::Error> {
        self.output.gathered(self.round, id, values.clone())
    }

    fn send(&mut self, to: Position, message: Message) -> Result<(), O::Error> {
        self.output.send(to, message)
    }

    fn on_done(&mut self, kind: CollectiveKind, bucket: BucketId) -> Result<(), O::Error> {
        self.output.done(self.round, Collective { kind, bucket })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::Topology;

    const ROUND: Round = Round { generation: 0, step: 2, settles: false };
    const LATER: Round = Round { generation: 1, step: 1, settles: false };
    const KIND: CollectiveKind = CollectiveKind::ReduceScatter;

    /// Messages of a ring thread, and its requests to its device.
    #[derive(Default)]
    struct Recorder {
        sent: Vec<(Position, Message)>,
        requested: Vec<(Round, ChunkId, PooledBuffer)>,
        reduced: Vec<Vec<f32>>,
        pieces: Vec<(Round, EdgePiece, Vec<f32>)>,
    }

    impl RingOutput for Recorder {
        type Error = ExchangeError;
        type Span = ();

        fn work(&mut self, _: HostWork, _: &Chunk) {}

        fn send(&mut self, to: Position, message: Message) -> Result<(), ExchangeError> {
            self.sent.push((to, message));
            Ok(())
        }

        fn reduced(
            &mut self,
            _: Round,
            _: ChunkId,
            sum: SharedBuffer,
        ) -> Result<(), ExchangeError> {
            self.reduced.push(sum.to_vec());
            Ok(())
        }

        fn gathered(&mut self, _: Round, _: ChunkId, _: SharedBuffer) -> Result<(), ExchangeError> {
            Ok(())
        }

        fn add_on_device(
            &mut self,
            round: Round,
            chunk: ChunkId,
            partial: PooledBuffer,
        ) -> Result<(), ExchangeError> {
            self.requested.push((round, chunk, partial));
            Ok(())
        }

        fn copy(&mut self, _: &EdgePiece) {}

        fn send_piece(
            &mut self,
            round: Round,
            piece: EdgePiece,
            values: SharedBuffer,
        ) -> Result<(), ExchangeError> {
            self.pieces.push((round, piece, values.to_vec()));
            Ok(())
        }

        fn done(&mut self, _: Round, _: Collective) -> Result<(), ExchangeError> {
            Ok(())
        }
    }

    /// Two ranks; position 0 owns chunk 0, whose sum position 1 begins.
    fn worker(position: u32) -> (RingWorker<Vec<f32>>, Recorder) {
        let layout = Arc::new(ShardLayout::new(Topology::Ring, 2, &[4], 2, 2));
        (RingWorker::new(layout, Position(position), 1, false), Recorder::default())
    }

    #[test]
    fn what_arrives_at_a_process_are_the_chunks_that_its_ranks_do_not_own() {
        let layout = ShardLayout::new(Topology::Ring, 4, &[400], 1, 10);
        let arriving = |own: &[u32]| {
            let own: Vec<Positions> = own.iter().map(|own| Position(*own).into()).collect();
            arriving_bytes_max(&layout, &own)
        };
        assert_eq!(arriving(&[1]), 4 * 300);
        assert_eq!(arriving(&[0, 1]), 4 * 200);
        assert_eq!(arriving(&[0, 1, 2, 3]), 0);
        assert_eq!(arriving(&[]), 0);
        let alone = ShardLayout::new(Topology::Ring, 1, &[400], 1, 10);
        assert_eq!(arriving_bytes_max(&alone, &[Position(0).into()]), 0);
    }

    /// The partial sum with which position 1 begins chunk 0 in a round.
    fn partial(round: Round, value: f32) -> RingMsg<Vec<f32>> {
        let (mut worker, mut output) = worker(1);
        worker.handle(RingMsg::Restart(round), &mut output).unwrap();
        let readback = Some(vec![value; 2]);
        let ready = RingMsg::Ready { round, kind: KIND, chunk: ChunkId(0), readback };
        worker.handle(ready, &mut output).unwrap();
        RingMsg::Message(output.sent.remove(0).1)
    }

    fn kept_on_device(round: Round) -> RingMsg<Vec<f32>> {
        RingMsg::Ready { round, kind: KIND, chunk: ChunkId(0), readback: None }
    }

    #[test]
    fn a_sum_that_a_device_adds_in_a_discarded_round_is_dropped() {
        let (mut worker, mut output) = worker(0);
        worker.handle(RingMsg::Restart(ROUND), &mut output).unwrap();
        worker.handle(kept_on_device(ROUND), &mut output).unwrap();
        worker.handle(partial(ROUND, 1.0), &mut output).unwrap();
        let (round, chunk, old) = output.requested.remove(0);
        assert_eq!((round, chunk), (ROUND, ChunkId(0)));

        // The device answers after the next round has begun, in which it is asked again.
        worker.handle(RingMsg::Restart(LATER), &mut output).unwrap();
        worker.handle(kept_on_device(LATER), &mut output).unwrap();
        worker.handle(partial(LATER, 2.0), &mut output).unwrap();
        let late = RingMsg::Added { round: ROUND, chunk, partial: old };
        worker.handle(late, &mut output).unwrap();
        assert!(output.reduced.is_empty());
        let (round, chunk, mut sum) = output.requested.remove(0);
        assert_eq!(round, LATER);
        sum.iter_mut().for_each(|value| *value += 5.0);
        worker.handle(RingMsg::Added { round, chunk, partial: sum }, &mut output).unwrap();
        assert_eq!(output.reduced, [vec![7.0; 2]]);
    }

    #[test]
    fn restarts_that_a_ring_thread_has_not_seen_fill_no_mailbox() {
        let layout = ShardLayout::new(Topology::Ring, 2, &[4], 2, 2);
        let inbox: Mailbox<RingMsg<Vec<f32>>> = Mailbox::new(ring_inbox_max(&layout, Position(0)));
        let at = |step| Round { generation: 0, step, settles: false };
        for step in 1..100 {
            send_restart(&inbox, at(step)).unwrap();
        }
        // Values of a discarded round, and of a rank that has begun the next one.
        inbox.send(kept_on_device(at(99))).unwrap();
        inbox.send(partial(at(100), 1.0)).unwrap();
        send_restart(&inbox, at(100)).unwrap();
        inbox.send(kept_on_device(at(100))).unwrap();
        let (mut worker, mut output) = worker(0);
        let mut handled = Vec::new();
        while let Some(message) = inbox.try_recv().unwrap() {
            handled.push(message.round());
            worker.handle(message, &mut output).unwrap();
        }
        assert_eq!(handled, [at(100); 3]);
        assert_eq!(output.requested.len(), 1, "the partial sum that came early is lost");
    }

    #[test]
    fn own_values_of_an_earlier_round_are_dropped_and_of_a_later_one_an_error() {
        let (mut worker, mut output) = worker(1);
        worker.handle(RingMsg::Restart(ROUND), &mut output).unwrap();
        let ready = |round| {
            let readback = Some(vec![1.0; 2]);
            RingMsg::Ready { round, kind: KIND, chunk: ChunkId(0), readback }
        };
        worker
            .handle(ready(Round { generation: 0, step: 1, settles: false }), &mut output)
            .unwrap();
        assert!(output.sent.is_empty());
        let error = worker.handle(ready(LATER), &mut output).unwrap_err();
        assert_eq!(error, ExchangeError::LaterRound { found: LATER, current: ROUND });
        worker.handle(ready(ROUND), &mut output).unwrap();
        assert_eq!(output.sent.len(), 1);
    }
}
