//! One rank of an exchange with its values: performs the actions of [`crate::collective`].

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::add::add_assign;
use super::{BufferPool, Element, PooledBuffer, SharedBuffer};
use crate::base::{BucketId, ChunkId, Rank};
use crate::collective::{Action, Chunk, CollectiveKind, Event, Exchange, ShardLayout};

/// What travels between ranks.
#[derive(Debug)]
pub struct Message<T: Element = f32> {
    pub kind: CollectiveKind,
    pub chunk: ChunkId,
    pub from: Rank,
    /// How often the sender was restarted.
    round: u64,
    payload: MessageValues<T>,
}

/// A partial sum has one holder; final values are shared.
#[derive(Debug)]
enum MessageValues<T: Element> {
    Partial(PooledBuffer<T>),
    Final(SharedBuffer<T>),
}

/// A rank's own side: where its values are, and where results go. Chunks come with their place in
/// [`ShardLayout::chunks`].
pub trait ExchangeIo<T: Element = f32> {
    type Error;

    /// Writes the rank's own values of a chunk.
    fn read_local(&mut self, id: ChunkId, chunk: &Chunk, into: &mut [T])
    -> Result<(), Self::Error>;

    /// Adds the rank's own values of a chunk to a partial sum: `partial += io`.
    fn add_local(
        &mut self,
        id: ChunkId,
        chunk: &Chunk,
        partial: &mut [T],
    ) -> Result<(), Self::Error>;

    /// Adds what another rank sent to a partial sum (the server of a star does).
    fn add_message(&mut self, partial: &mut [T], values: &[T]) {
        add_assign(partial, values);
    }

    /// The sum over all ranks of a chunk that this rank owns, in its box, which may be changed and
    /// kept. What is returned is what a member made by [`ExchangeDriver::into_all_reduce`] hands out.
    fn on_reduced(
        &mut self,
        id: ChunkId,
        chunk: &Chunk,
        sum: PooledBuffer<T>,
    ) -> Result<SharedBuffer<T>, Self::Error>;

    /// The final values that this rank hands out, as owner. Not asked for where nobody else is.
    fn read_final(&mut self, id: ChunkId, chunk: &Chunk) -> Result<SharedBuffer<T>, Self::Error>;

    /// The final values of a chunk that another rank owns.
    fn on_gathered(
        &mut self,
        id: ChunkId,
        chunk: &Chunk,
        values: &SharedBuffer<T>,
    ) -> Result<(), Self::Error>;

    /// Hands a message to a rank.
    fn send(&mut self, to: Rank, message: Message<T>) -> Result<(), Self::Error>;

    /// Nothing is left to do for a bucket in a phase.
    fn on_done(&mut self, kind: CollectiveKind, bucket: BucketId) -> Result<(), Self::Error>;
}

/// A rank: an [`Exchange`] with the values that it names. After an error it is of no use until
/// all ranks restart.
pub struct ExchangeDriver<T: Element = f32> {
    exchange: Exchange,
    pool: BufferPool<T>,
    is_chained: bool,
    /// How often it was restarted.
    round: u64,
    /// Messages of ranks that were restarted before this one.
    ahead: VecDeque<Message<T>>,
    /// Partial sums that have come and are not folded yet.
    early: HashMap<(ChunkId, Rank), PooledBuffer<T>>,
    /// Partial sums, by chunk.
    held: Vec<Option<PooledBuffer<T>>>,
    /// Final values, until the actions that come of one event are performed.
    handed: Vec<(ChunkId, SharedBuffer<T>)>,
}

impl<T: Element> ExchangeDriver<T> {
    /// At the start of both phases, with a pool of its own; `window` is that of [`Exchange::new`].
    pub fn new(layout: Arc<ShardLayout>, rank: Rank, window: usize) -> Self {
        // What a rank begins, and as much again that is on its way back.
        let free_max = (2 * window + 2) * layout.buckets().max(1);
        Self::with_pool(layout, rank, window, BufferPool::new(free_max))
    }

    /// As [`Self::new`], with boxes of a pool that others use as well.
    pub fn with_pool(
        layout: Arc<ShardLayout>,
        rank: Rank,
        window: usize,
        pool: BufferPool<T>,
    ) -> Self {
        let held = layout.chunks.iter().map(|_| None).collect();
        Self {
            exchange: Exchange::new(layout, rank, window),
            pool,
            is_chained: false,
            round: 0,
            ahead: VecDeque::new(),
            early: HashMap::new(),
            held,
            handed: Vec::new(),
        }
    }

    /// An all-reduce: what is reduced is handed out at once, in the same box, so nobody calls
    /// [`Self::on_local_ready`] for [`CollectiveKind::AllGather`].
    pub fn into_all_reduce(self) -> Self {
        Self { is_chained: true, ..self }
    }

    /// The pool of its boxes; [`ExchangeIo::read_final`] may use it.
    pub fn pool(&self) -> &BufferPool<T> {
        &self.pool
    }

    /// For the next step, as [`Exchange::restart`]. All ranks restart equally often; messages of
    /// one that did before this one wait, and those of a step that was given up are dropped.
    pub fn restart(&mut self) {
        self.exchange.restart();
        self.round += 1;
        self.early.clear();
        self.held.fill_with(|| None);
        self.handed.clear();
    }

    /// Performs what is due from the start: buckets of length 0 are done, and what ranks sent that
    /// restarted before this one is taken in. Any other call does so too, so it is needed only
    /// where a bucket may be empty, or in an exchange without [`CollectiveKind::ReduceScatter`].
    pub fn start<O: ExchangeIo<T>>(&mut self, io: &mut O) -> Result<(), O::Error> {
        for message in std::mem::take(&mut self.ahead) {
            self.handle_message(message, io)?;
        }
        self.perform(io)
    }

    /// The rank's own values of a chunk are there.
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

    /// A message has come.
    pub fn recv<O: ExchangeIo<T>>(
        &mut self,
        message: Message<T>,
        io: &mut O,
    ) -> Result<(), O::Error> {
        self.start(io)?;
        self.handle_message(message, io)
    }

    /// Takes in a message of this round; a later one waits, and an earlier one is of no use.
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
                    let (from, round) = (self.exchange.rank(), self.round);
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
        // The sends of final values follow the event that brought them, so all are made.
        self.handed.clear();
        Ok(())
    }

    /// What is held of a chunk leaves: the partial sum, or else a copy of the own values.
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

    /// The final values of a chunk: those that came, or else the owner's.
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
        from: Rank,
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
