//! One rank of an exchange with its values: performs the actions of [`crate::collective`].

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::add::add_assign;
use super::{Element, Pool, Shared, Values};
use crate::base::{BucketId, ChunkId, Rank};
use crate::collective::{Action, Chunk, Event, Exchange, Layout, Phase};

/// What travels between ranks.
#[derive(Debug)]
pub struct Message<T: Element = f32> {
    pub phase: Phase,
    pub chunk: ChunkId,
    pub from: Rank,
    /// How often the sender was restarted.
    round: u64,
    payload: Payload<T>,
}

/// A partial sum has one holder; final values are shared.
#[derive(Debug)]
enum Payload<T: Element> {
    Partial(Values<T>),
    Final(Shared<T>),
}

/// A rank's own side: where its values are, and where results go. Chunks come with their place in
/// [`Layout::chunks`].
pub trait Own<T: Element = f32> {
    type Error;

    /// Writes the rank's own values of a chunk.
    fn copy_to(&mut self, id: ChunkId, chunk: &Chunk, into: &mut [T]) -> Result<(), Self::Error>;

    /// Adds the rank's own values of a chunk to a partial sum: `partial += own`.
    fn add_to(&mut self, id: ChunkId, chunk: &Chunk, partial: &mut [T]) -> Result<(), Self::Error>;

    /// Adds what another rank sent to a partial sum (the server of a star does).
    fn add_message(&mut self, partial: &mut [T], values: &[T]) {
        add_assign(partial, values);
    }

    /// The sum over all ranks of a chunk that this rank owns, in its box, which may be changed and
    /// kept. What is returned is what a member made by [`Member::chained`] hands out.
    fn reduced(
        &mut self,
        id: ChunkId,
        chunk: &Chunk,
        sum: Values<T>,
    ) -> Result<Shared<T>, Self::Error>;

    /// The final values that this rank hands out, as owner. Not asked for where nobody else is.
    fn hand_out(&mut self, id: ChunkId, chunk: &Chunk) -> Result<Shared<T>, Self::Error>;

    /// The final values of a chunk that another rank owns.
    fn gathered(
        &mut self,
        id: ChunkId,
        chunk: &Chunk,
        values: &Shared<T>,
    ) -> Result<(), Self::Error>;

    /// Hands a message to a rank.
    fn send(&mut self, to: Rank, message: Message<T>) -> Result<(), Self::Error>;

    /// Nothing is left to do for a bucket in a phase.
    fn done(&mut self, phase: Phase, bucket: BucketId) -> Result<(), Self::Error>;
}

/// A rank: an [`Exchange`] with the values that it names. After an error it is of no use until
/// all ranks restart.
pub struct Member<T: Element = f32> {
    exchange: Exchange,
    pool: Pool<T>,
    is_chained: bool,
    /// How often it was restarted.
    round: u64,
    /// Messages of ranks that were restarted before this one.
    ahead: VecDeque<Message<T>>,
    /// Partial sums that have come and are not folded yet.
    early: HashMap<(ChunkId, Rank), Values<T>>,
    /// Partial sums, by chunk.
    held: Vec<Option<Values<T>>>,
    /// Final values, until the actions that come of one event are performed.
    handed: Vec<(ChunkId, Shared<T>)>,
}

impl<T: Element> Member<T> {
    /// At the start of both phases, with a pool of its own; `window` is that of [`Exchange::new`].
    pub fn new(layout: Arc<Layout>, rank: Rank, window: usize) -> Self {
        // What a rank begins, and as much again that is on its way back.
        let free_max = (2 * window + 2) * layout.buckets().max(1);
        Self::with_pool(layout, rank, window, Pool::new(free_max))
    }

    /// As [`Self::new`], with boxes of a pool that others use as well.
    pub fn with_pool(layout: Arc<Layout>, rank: Rank, window: usize, pool: Pool<T>) -> Self {
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
    /// [`Self::ready`] for [`Phase::Gather`].
    pub fn chained(self) -> Self {
        Self { is_chained: true, ..self }
    }

    /// The pool of its boxes; [`Own::hand_out`] may use it.
    pub fn pool(&self) -> &Pool<T> {
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
    /// where a bucket may be empty, or in an exchange without [`Phase::Reduce`].
    pub fn start<O: Own<T>>(&mut self, own: &mut O) -> Result<(), O::Error> {
        for message in std::mem::take(&mut self.ahead) {
            self.take_in(message, own)?;
        }
        self.perform(own)
    }

    /// The rank's own values of a chunk are there.
    pub fn ready<O: Own<T>>(
        &mut self,
        phase: Phase,
        chunk: ChunkId,
        own: &mut O,
    ) -> Result<(), O::Error> {
        self.start(own)?;
        self.exchange.handle(Event::Ready { phase, chunk });
        self.perform(own)
    }

    /// A message has come.
    pub fn receive<O: Own<T>>(&mut self, message: Message<T>, own: &mut O) -> Result<(), O::Error> {
        self.start(own)?;
        self.take_in(message, own)
    }

    /// Takes in a message of this round; a later one waits, and an earlier one is of no use.
    fn take_in<O: Own<T>>(&mut self, message: Message<T>, own: &mut O) -> Result<(), O::Error> {
        if message.round != self.round {
            if message.round > self.round {
                self.ahead.push_back(message);
            }
            return Ok(());
        }
        let Message { phase, chunk, from, payload, .. } = message;
        match payload {
            Payload::Partial(values) => drop(self.early.insert((chunk, from), values)),
            Payload::Final(values) => self.handed.push((chunk, values)),
        }
        self.exchange.handle(Event::Received { phase, chunk, from });
        self.perform(own)
    }

    fn perform<O: Own<T>>(&mut self, own: &mut O) -> Result<(), O::Error> {
        while let Some(action) = self.exchange.poll_action() {
            match action {
                Action::Send { phase, chunk, to } => {
                    let payload = match phase {
                        Phase::Reduce => Payload::Partial(self.partial(chunk, own)?),
                        Phase::Gather => Payload::Final(self.handed(chunk, own)?),
                    };
                    let (from, round) = (self.exchange.rank(), self.round);
                    own.send(to, Message { phase, chunk, from, round, payload })?;
                }
                Action::Fold { chunk, from } => self.fold(chunk, from, own)?,
                Action::Reduced { chunk } => self.reduced(chunk, own)?,
                Action::Keep { chunk, .. } => {
                    let values = self.handed(chunk, own)?;
                    own.gathered(chunk, self.exchange.layout().chunk(chunk), &values)?;
                }
                Action::Done { phase, bucket } => own.done(phase, bucket)?,
            }
        }
        // The sends of final values follow the event that brought them, so all are made.
        self.handed.clear();
        Ok(())
    }

    /// What is held of a chunk leaves: the partial sum, or else a copy of the own values.
    fn partial<O: Own<T>>(&mut self, id: ChunkId, own: &mut O) -> Result<Values<T>, O::Error> {
        if let Some(values) = self.held[id.index()].take() {
            return Ok(values);
        }
        let chunk = self.exchange.layout().chunk(id);
        let mut values = self.pool.take(chunk.range.len());
        own.copy_to(id, chunk, &mut values)?;
        Ok(values)
    }

    /// The final values of a chunk: those that came, or else the owner's.
    fn handed<O: Own<T>>(&mut self, id: ChunkId, own: &mut O) -> Result<Shared<T>, O::Error> {
        if let Some((_, values)) = self.handed.iter().find(|(known, _)| *known == id) {
            return Ok(values.clone());
        }
        let values = own.hand_out(id, self.exchange.layout().chunk(id))?;
        self.handed.push((id, values.clone()));
        Ok(values)
    }

    fn fold<O: Own<T>>(&mut self, id: ChunkId, from: Rank, own: &mut O) -> Result<(), O::Error> {
        let came = self.early.remove(&(id, from));
        let mut values = came.expect("the exchange folds only what has come");
        match &mut self.held[id.index()] {
            Some(held) => own.add_message(held, &values),
            nothing => {
                own.add_to(id, self.exchange.layout().chunk(id), &mut values)?;
                *nothing = Some(values);
            }
        }
        Ok(())
    }

    fn reduced<O: Own<T>>(&mut self, id: ChunkId, own: &mut O) -> Result<(), O::Error> {
        let sum = self.partial(id, own)?;
        let result = own.reduced(id, self.exchange.layout().chunk(id), sum)?;
        if self.is_chained {
            self.handed.push((id, result));
            self.exchange.handle(Event::Ready { phase: Phase::Gather, chunk: id });
        }
        Ok(())
    }
}
