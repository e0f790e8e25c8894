//! Driver of one rank's exchange: performs the actions of [`crate::collective`] on values.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::add::add_assign;
use super::{BufferPool, Element, PooledBuffer, SharedBuffer};
use crate::base::{BucketId, ChunkId, Position};
use crate::collective::{Action, Chunk, CollectiveKind, Event, Exchange, ShardLayout};

/// Message from one rank of a group to another: the values of one chunk in one phase.
#[derive(Debug)]
pub struct Message<T: Element = f32> {
    pub kind: CollectiveKind,
    pub chunk: ChunkId,
    /// Position of the sender.
    pub from: Position,
    /// Number of restarts of the sender, which identifies the step of the message.
    round: u64,
    payload: MessageValues<T>,
}

/// Values of a message. A partial sum has one holder at a time; final values are shared.
#[derive(Debug)]
enum MessageValues<T: Element> {
    Partial(PooledBuffer<T>),
    Final(SharedBuffer<T>),
}

/// Input and output of one rank during an exchange: provides the rank's own values, stores
/// results and sends messages. Each chunk is passed with its index in [`ShardLayout::chunks`].
pub trait ExchangeIo<T: Element = f32> {
    type Error;

    /// Writes the rank's own values of a chunk to `into`.
    fn read_local(&mut self, id: ChunkId, chunk: &Chunk, into: &mut [T])
    -> Result<(), Self::Error>;

    /// Adds the rank's own values of a chunk to a partial sum: `partial += own`.
    fn add_local(
        &mut self,
        id: ChunkId,
        chunk: &Chunk,
        partial: &mut [T],
    ) -> Result<(), Self::Error>;

    /// Adds the values that another rank sent to a partial sum (only on the server of a star).
    fn add_message(&mut self, partial: &mut [T], values: &[T]) {
        add_assign(partial, values);
    }

    /// Receives the sum over all ranks of a chunk that this rank owns, in a pooled buffer that
    /// may be changed and kept. An exchange driver made by [`ExchangeDriver::into_all_reduce`]
    /// sends the returned values to the other ranks.
    fn on_reduced(
        &mut self,
        id: ChunkId,
        chunk: &Chunk,
        sum: PooledBuffer<T>,
    ) -> Result<SharedBuffer<T>, Self::Error>;

    /// Returns the final values that this rank, the owner of the chunk, sends to the other ranks.
    /// Not called in a group of one rank.
    fn read_final(&mut self, id: ChunkId, chunk: &Chunk) -> Result<SharedBuffer<T>, Self::Error>;

    /// Stores the final values of a chunk that another rank owns.
    fn on_gathered(
        &mut self,
        id: ChunkId,
        chunk: &Chunk,
        values: &SharedBuffer<T>,
    ) -> Result<(), Self::Error>;

    /// Sends a message to the rank at a position of the group.
    fn send(&mut self, to: Position, message: Message<T>) -> Result<(), Self::Error>;

    /// Callback for the end of a phase: this rank has nothing left to do for a bucket in it.
    fn on_done(&mut self, kind: CollectiveKind, bucket: BucketId) -> Result<(), Self::Error>;
}

/// Exchange driver of one rank: an [`Exchange`] with the values of its chunks. After an error, no
/// method may be called until every rank has called `restart`.
pub struct ExchangeDriver<T: Element = f32> {
    exchange: Exchange,
    pool: BufferPool<T>,
    is_chained: bool,
    /// Number of restarts.
    round: u64,
    /// Messages of ranks that restarted before this one, kept until it restarts as well.
    ahead: VecDeque<Message<T>>,
    /// Partial sums that were received and are not accumulated yet.
    early: HashMap<(ChunkId, Position), PooledBuffer<T>>,
    /// Partial sums that this rank holds, by chunk.
    held: Vec<Option<PooledBuffer<T>>>,
    /// Final values, kept until all actions caused by one event are performed.
    handed: Vec<(ChunkId, SharedBuffer<T>)>,
}

impl<T: Element> ExchangeDriver<T> {
    /// Creates an exchange driver at the start of both phases, with a buffer pool of its own;
    /// `window` is that of [`Exchange::new`].
    pub fn new(layout: Arc<ShardLayout>, position: Position, window: usize) -> Self {
        // Buffers of the sums that a rank begins, and as many again on their way back.
        let free_max = (2 * window + 2) * layout.buckets().max(1);
        Self::with_pool(layout, position, window, BufferPool::new(free_max))
    }

    /// Creates an exchange driver as [`Self::new`] does, with buffers of a pool that may have
    /// other users.
    pub fn with_pool(
        layout: Arc<ShardLayout>,
        position: Position,
        window: usize,
        pool: BufferPool<T>,
    ) -> Self {
        let held = layout.chunks.iter().map(|_| None).collect();
        Self {
            exchange: Exchange::new(layout, position, window),
            pool,
            is_chained: false,
            round: 0,
            ahead: VecDeque::new(),
            early: HashMap::new(),
            held,
            handed: Vec::new(),
        }
    }

    /// Turns the exchange driver into an all-reduce: it sends each reduced chunk to the other
    /// ranks at once, in the same buffer, so the caller never calls [`Self::on_local_ready`] for
    /// [`CollectiveKind::AllGather`].
    pub fn into_all_reduce(self) -> Self {
        Self { is_chained: true, ..self }
    }

    /// Returns the exchange driver's buffer pool; [`ExchangeIo::read_final`] may use it.
    pub fn pool(&self) -> &BufferPool<T> {
        &self.pool
    }

    /// Restarts the exchange driver for the next step, as [`Exchange::restart`] does. All ranks
    /// must restart equally often: messages of a rank that restarts first wait for this one, and
    /// messages of an aborted step are dropped.
    pub fn restart(&mut self) {
        self.exchange.restart();
        self.round += 1;
        self.early.clear();
        self.held.fill_with(|| None);
        self.handed.clear();
    }

    /// Performs the actions that are due from the start: reports buckets of length 0 as done, and
    /// processes the messages of ranks that restarted before this one. Every method that takes an
    /// event does the same first, so `start` is needed only if a bucket may be empty, or in an
    /// exchange without [`CollectiveKind::ReduceScatter`].
    pub fn start<O: ExchangeIo<T>>(&mut self, io: &mut O) -> Result<(), O::Error> {
        for message in std::mem::take(&mut self.ahead) {
            self.handle_message(message, io)?;
        }
        self.perform(io)
    }

    /// Reports that the rank's own values of a chunk are ready.
    pub fn on_local_ready<O: ExchangeIo<T>>(
        &mut self,
        kind: CollectiveKind,
        chunk: ChunkId,
        io: &mut O,
    ) -> Result<(), O::Error> {
        self.start(io)?;
        self.exchange.handle(Event::LocalReady { kind, chunk });
        self.perform(io)
    }

    /// Processes a message from another rank.
    pub fn on_message<O: ExchangeIo<T>>(
        &mut self,
        message: Message<T>,
        io: &mut O,
    ) -> Result<(), O::Error> {
        self.start(io)?;
        self.handle_message(message, io)
    }

    /// Processes a message of the current round; keeps one of a later round and drops one of an
    /// earlier round.
    fn handle_message<O: ExchangeIo<T>>(
        &mut self,
        message: Message<T>,
        io: &mut O,
    ) -> Result<(), O::Error> {
        if message.round != self.round {
            if message.round > self.round {
                self.ahead.push_back(message);
            }
            return Ok(());
        }
        let Message { kind, chunk, from, payload, .. } = message;
        match payload {
            MessageValues::Partial(values) => drop(self.early.insert((chunk, from), values)),
            MessageValues::Final(values) => self.handed.push((chunk, values)),
        }
        self.exchange.handle(Event::Received { kind, chunk, from });
        self.perform(io)
    }

    fn perform<O: ExchangeIo<T>>(&mut self, io: &mut O) -> Result<(), O::Error> {
        while let Some(action) = self.exchange.poll_action() {
            match action {
                Action::Send { kind, chunk, to } => {
                    let payload = match kind {
                        CollectiveKind::ReduceScatter => {
                            MessageValues::Partial(self.partial(chunk, io)?)
                        }
                        CollectiveKind::AllGather => {
                            MessageValues::Final(self.final_values(chunk, io)?)
                        }
                    };
                    let (from, round) = (self.exchange.position(), self.round);
                    io.send(to, Message { kind, chunk, from, round, payload })?;
                }
                Action::Accumulate { chunk, from } => self.accumulate(chunk, from, io)?,
                Action::Reduced { chunk } => self.on_reduced(chunk, io)?,
                Action::StoreFinal { chunk, .. } => {
                    let values = self.final_values(chunk, io)?;
                    io.on_gathered(chunk, self.exchange.layout().chunk(chunk), &values)?;
                }
                Action::Done { kind, bucket } => io.on_done(kind, bucket)?,
            }
        }
        // The event that brings final values causes all their sends, so all are performed by now.
        self.handed.clear();
        Ok(())
    }

    /// Takes the values of a chunk that are sent on: the partial sum, or else a copy of the own
    /// values.
    fn partial<O: ExchangeIo<T>>(
        &mut self,
        id: ChunkId,
        io: &mut O,
    ) -> Result<PooledBuffer<T>, O::Error> {
        if let Some(values) = self.held[id.index()].take() {
            return Ok(values);
        }
        let chunk = self.exchange.layout().chunk(id);
        let mut values = self.pool.take(chunk.range.len());
        io.read_local(id, chunk, &mut values)?;
        Ok(values)
    }

    /// Returns the final values of a chunk: those received, or else the owner's.
    fn final_values<O: ExchangeIo<T>>(
        &mut self,
        id: ChunkId,
        io: &mut O,
    ) -> Result<SharedBuffer<T>, O::Error> {
        if let Some((_, values)) = self.handed.iter().find(|(known, _)| *known == id) {
            return Ok(values.clone());
        }
        let values = io.read_final(id, self.exchange.layout().chunk(id))?;
        self.handed.push((id, values.clone()));
        Ok(values)
    }

    fn accumulate<O: ExchangeIo<T>>(
        &mut self,
        id: ChunkId,
        from: Position,
        io: &mut O,
    ) -> Result<(), O::Error> {
        let came = self.early.remove(&(id, from));
        let mut values = came.expect("the exchange folds only what has come");
        match &mut self.held[id.index()] {
            Some(held) => io.add_message(held, &values),
            nothing => {
                io.add_local(id, self.exchange.layout().chunk(id), &mut values)?;
                *nothing = Some(values);
            }
        }
        Ok(())
    }

    fn on_reduced<O: ExchangeIo<T>>(&mut self, id: ChunkId, io: &mut O) -> Result<(), O::Error> {
        let sum = self.partial(id, io)?;
        let result = io.on_reduced(id, self.exchange.layout().chunk(id), sum)?;
        if self.is_chained {
            self.handed.push((id, result));
            self.exchange.handle(Event::LocalReady { kind: CollectiveKind::AllGather, chunk: id });
        }
        Ok(())
    }
}
