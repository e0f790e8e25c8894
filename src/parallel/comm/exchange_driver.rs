//! Driver of one rank's exchange: performs the actions of [`crate::collective`] on values.

use std::collections::HashMap;
use std::sync::Arc;

use super::add::add_assign;
use super::{BufferPool, Element, PooledBuffer, SharedBuffer};
use crate::collective::{
    Action, Chunk, CollectiveKind, Event, Exchange, ExchangeError, Positions, ShardLayout,
};
use potluck_core::{BucketId, ChunkId, Nanos, Position, Round};

/// Message from one rank of a group to another: the values of one chunk in one phase.
#[derive(Debug)]
pub struct Message<T: Element = f32> {
    pub kind: CollectiveKind,
    pub chunk: ChunkId,
    /// Position of the sender.
    pub from: Position,
    /// Round of the sender when it sent the message.
    pub round: Round,
    pub(super) payload: MessageValues<T>,
}

/// Values of a message. A partial sum has one holder at a time; final values are shared.
#[derive(Debug)]
pub(super) enum MessageValues<T: Element> {
    Partial(PooledBuffer<T>),
    Final(SharedBuffer<T>),
}

/// Result of [`ExchangeIo::add_local`].
#[derive(Debug)]
pub enum Addition<T: Element = f32> {
    /// The sum.
    Done(PooledBuffer<T>),
    /// The sum is being computed; [`ExchangeDriver::on_added`] reports it.
    Pending,
}

impl<T: Element> MessageValues<T> {
    fn length(&self) -> usize {
        match self {
            Self::Partial(values) => values.len(),
            Self::Final(values) => values.len(),
        }
    }
}

/// Input and output of one rank during an exchange: provides the rank's own values, stores
/// results and sends messages. Each chunk is passed with its index in [`ShardLayout::chunks`].
pub trait ExchangeIo<T: Element = f32> {
    type Error: From<ExchangeError>;

    /// Returns the time that counts for the exchange's deadline; without one, it does not matter.
    fn now(&self) -> Nanos {
        0
    }

    /// Returns the number of elements in the buffers of a chunk.
    fn buffer_length(&self, chunk: &Chunk) -> usize {
        chunk.range.len()
    }

    /// Writes the rank's own values of a chunk to `into`.
    fn read_local(&mut self, id: ChunkId, chunk: &Chunk, into: &mut [T])
    -> Result<(), Self::Error>;

    /// Adds the rank's own values of a chunk to a partial sum, `partial += own`, now or later.
    fn add_local(
        &mut self,
        id: ChunkId,
        chunk: &Chunk,
        partial: PooledBuffer<T>,
    ) -> Result<Addition<T>, Self::Error>;

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
    all_reduces: bool,
    round: Round,
    /// Messages of ranks that restarted before this one, kept until it restarts as well; at most
    /// `ahead_max`, the messages of one round.
    ahead: Vec<Message<T>>,
    ahead_max: usize,
    /// Number of messages of another round so far.
    strays: u64,
    /// Chunk of an addition that is pending; no action is performed until it is done.
    adding: Option<ChunkId>,
    /// Partial sums that were received and are not accumulated yet.
    early: HashMap<(ChunkId, Position), PooledBuffer<T>>,
    /// Partial sums that this rank holds, by chunk.
    held: Vec<Option<PooledBuffer<T>>>,
    /// Final values, kept until all actions caused by one event are performed.
    finals: Vec<(ChunkId, SharedBuffer<T>)>,
}

impl<T: Element> ExchangeDriver<T> {
    /// Creates an exchange driver at the start of both phases, with a new buffer pool; `window` as
    /// in [`Exchange::new`].
    pub fn new(layout: Arc<ShardLayout>, positions: impl Into<Positions>, window: usize) -> Self {
        // Buffers of the sums that a rank begins, and as many again in flight back to it.
        let free_max = (2 * window + 2) * layout.buckets().max(1);
        Self::with_pool(layout, positions, window, BufferPool::new(free_max))
    }

    /// Creates an exchange driver as [`Self::new`] does, with buffers of a pool that may have
    /// other users.
    pub(crate) fn with_pool(
        layout: Arc<ShardLayout>,
        positions: impl Into<Positions>,
        window: usize,
        pool: BufferPool<T>,
    ) -> Self {
        let positions = positions.into();
        let held = layout.chunks.iter().map(|_| None).collect();
        let ahead_max = layout.messages_max(positions.clone());
        Self {
            exchange: Exchange::new(layout, positions, window),
            pool,
            all_reduces: false,
            round: Round::default(),
            ahead: Vec::new(),
            ahead_max,
            strays: 0,
            adding: None,
            early: HashMap::new(),
            held,
            finals: Vec::new(),
        }
    }

    /// Turns the exchange driver into an all-reduce: it sends each reduced chunk to the other
    /// ranks at once, in the same buffer, so the caller never calls [`Self::on_local_ready`] for
    /// [`CollectiveKind::AllGather`].
    pub fn into_all_reduce(self) -> Self {
        Self { all_reduces: true, ..self }
    }

    /// Sets the longest time for which messages are awaited; see [`Exchange::with_deadline`].
    pub(crate) fn with_deadline(self, deadline: Nanos) -> Self {
        Self { exchange: self.exchange.with_deadline(deadline), ..self }
    }

    /// Checks that deadline, as [`Exchange::handle_timeout`] does.
    pub fn handle_timeout(&self, now: Nanos) -> Result<(), ExchangeError> {
        self.exchange.handle_timeout(now)
    }

    /// Returns the exchange driver's buffer pool; [`ExchangeIo::read_final`] may use it.
    pub fn pool(&self) -> &BufferPool<T> {
        &self.pool
    }

    /// Returns the current round.
    pub fn round(&self) -> Round {
        self.round
    }

    /// Returns the number of messages of another round so far, kept or dropped: 0 if all ranks
    /// restart before any of them sends.
    pub fn strays(&self) -> u64 {
        self.strays
    }

    /// Restarts the exchange driver for a later round, as [`Exchange::restart`] does. Messages of
    /// a rank that restarts before this one wait for it, and messages of an earlier round are
    /// dropped.
    pub fn restart(&mut self, round: Round) {
        self.exchange.restart();
        self.round = round;
        self.adding = None;
        self.early.clear();
        self.held.fill_with(|| None);
        self.finals.clear();
    }

    /// Performs the actions that are due from the start: reports buckets of length 0 as done, and
    /// processes the messages of ranks that restarted before this one. Every method that takes an
    /// event does the same first, so `start` is needed only if a bucket may be empty, or in an
    /// exchange without [`CollectiveKind::ReduceScatter`].
    pub fn start<O: ExchangeIo<T>>(&mut self, io: &mut O) -> Result<(), O::Error> {
        let (later, due) = std::mem::take(&mut self.ahead)
            .into_iter()
            .partition(|message: &Message<T>| message.round > self.round);
        self.ahead = later;
        for message in due {
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
        self.exchange.handle(io.now(), Event::LocalReady { kind, chunk })?;
        self.perform(io)
    }

    /// Reports the end of an addition that [`ExchangeIo::add_local`] has left pending.
    pub fn on_added<O: ExchangeIo<T>>(
        &mut self,
        id: ChunkId,
        sum: PooledBuffer<T>,
        io: &mut O,
    ) -> Result<(), O::Error> {
        if self.adding != Some(id) {
            return Err(ExchangeError::UnexpectedSum { id }.into());
        }
        self.adding = None;
        self.held[id.index()] = Some(sum);
        self.perform(io)
    }

    /// Processes a message from another rank.
    pub fn on_message<O: ExchangeIo<T>>(
        &mut self,
        message: Message<T>,
        io: &mut O,
    ) -> Result<(), O::Error> {
        self.start(io)?;
        self.strays += u64::from(message.round != self.round);
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
            return Ok(self.keep_if_ahead(message)?);
        }
        let Message { kind, chunk, from, payload, .. } = message;
        // The exchange refuses an unknown chunk.
        if let Some(found) = self.exchange.layout().chunks.get(chunk.index()) {
            let length = io.buffer_length(found);
            let values = payload.length();
            if values != length {
                return Err(ExchangeError::WrongLength { id: chunk, values, length }.into());
            }
        }
        // First, because a message that is not expected must not replace values.
        self.exchange.handle(io.now(), Event::Received { kind, chunk, from })?;
        match payload {
            MessageValues::Partial(values) => drop(self.early.insert((chunk, from), values)),
            MessageValues::Final(values) => self.finals.push((chunk, values)),
        }
        self.perform(io)
    }

    /// Keeps a message of a later round and drops one of an earlier round.
    fn keep_if_ahead(&mut self, message: Message<T>) -> Result<(), ExchangeError> {
        if message.round > self.round {
            if self.ahead.len() == self.ahead_max {
                return Err(ExchangeError::TooFarAhead { max: self.ahead_max });
            }
            self.ahead.push(message);
        }
        Ok(())
    }

    fn perform<O: ExchangeIo<T>>(&mut self, io: &mut O) -> Result<(), O::Error> {
        while self.adding.is_none()
            && let Some(action) = self.exchange.poll_action()
        {
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
                    let bucket = self.exchange.layout().chunk(chunk).bucket;
                    let not_held = ExchangeError::NotHeld { id: chunk };
                    let from = self.exchange.position(bucket).ok_or(not_held)?;
                    let round = self.round;
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
        if self.adding.is_none() {
            // The event that brings final values causes all their sends: all are performed by now.
            self.finals.clear();
        }
        Ok(())
    }

    /// Takes the values of a chunk to send: the partial sum, or else a copy of the own values.
    fn partial<O: ExchangeIo<T>>(
        &mut self,
        id: ChunkId,
        io: &mut O,
    ) -> Result<PooledBuffer<T>, O::Error> {
        if let Some(values) = self.held[id.index()].take() {
            return Ok(values);
        }
        let chunk = self.exchange.layout().chunk(id);
        let mut values = self.pool.take(io.buffer_length(chunk));
        io.read_local(id, chunk, &mut values)?;
        Ok(values)
    }

    /// Final values of a chunk: the received ones, or the owner's.
    fn final_values<O: ExchangeIo<T>>(
        &mut self,
        id: ChunkId,
        io: &mut O,
    ) -> Result<SharedBuffer<T>, O::Error> {
        if let Some((_, values)) = self.finals.iter().find(|(known, _)| *known == id) {
            return Ok(values.clone());
        }
        let values = io.read_final(id, self.exchange.layout().chunk(id))?;
        self.finals.push((id, values.clone()));
        Ok(values)
    }

    fn accumulate<O: ExchangeIo<T>>(
        &mut self,
        id: ChunkId,
        from: Position,
        io: &mut O,
    ) -> Result<(), O::Error> {
        let came = self.early.remove(&(id, from));
        let values = came.ok_or(ExchangeError::MissingValues { id })?;
        if let Some(held) = &mut self.held[id.index()] {
            io.add_message(held, &values);
            return Ok(());
        }
        match io.add_local(id, self.exchange.layout().chunk(id), values)? {
            Addition::Done(sum) => self.held[id.index()] = Some(sum),
            Addition::Pending => self.adding = Some(id),
        }
        Ok(())
    }

    fn on_reduced<O: ExchangeIo<T>>(&mut self, id: ChunkId, io: &mut O) -> Result<(), O::Error> {
        let sum = self.partial(id, io)?;
        let result = io.on_reduced(id, self.exchange.layout().chunk(id), sum)?;
        if self.all_reduces {
            self.finals.push((id, result));
            let event = Event::LocalReady { kind: CollectiveKind::AllGather, chunk: id };
            self.exchange.handle(io.now(), event)?;
        }
        Ok(())
    }
}
