//! The ring thread of a virtual rank: performs the actions of an exchange on values.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use super::queue::Nanos;
use super::scenario::LinkModel;
use crate::base::{ChunkId, Position};
use crate::collective::{Action, Collective, CollectiveKind, Event, Exchange, ShardLayout};

/// The values of a chunk.
pub type Payload = Rc<Vec<f32>>;

/// Message between the ring threads of two ranks.
#[derive(Clone, Debug)]
pub struct Message {
    pub kind: CollectiveKind,
    pub chunk: ChunkId,
    /// Position of the sender.
    pub from: Position,
    /// Number of restarts of the sender, which identifies the step of the message.
    pub round: u64,
    pub values: Payload,
}

/// Input of a ring thread.
#[derive(Clone, Debug)]
pub enum Item {
    /// The rank's own values were read back.
    Ready {
        kind: CollectiveKind,
        chunk: ChunkId,
        values: Payload,
    },
    Message(Message),
    /// A step begins. All rings are restarted before any rank runs.
    Restart,
}

impl Item {
    /// Returns the display name for the timeline; never a lookup key.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ready { kind: CollectiveKind::ReduceScatter, .. } => "own gradients",
            Self::Ready { kind: CollectiveKind::AllGather, .. } => "own parameters",
            Self::Message(Message { kind: CollectiveKind::ReduceScatter, .. }) => "add",
            Self::Message(Message { kind: CollectiveKind::AllGather, .. }) => "forward",
            Self::Restart => "restart",
        }
    }
}

/// Effect of a ring thread outside of itself.
#[derive(Clone, Debug)]
pub enum Effect {
    Send {
        to: Position,
        message: Message,
    },
    /// Summed gradients for the rank's own device.
    Reduced {
        chunk: ChunkId,
        values: Payload,
    },
    /// Another owner's parameters for the rank's own device.
    Kept {
        chunk: ChunkId,
        values: Payload,
    },
    /// Own values were copied or added, so their readback slot is free.
    Used,
    /// A message of another step arrived and is dropped, which must not happen.
    Strayed(ChunkId),
    Done(Collective),
}

/// Values of one chunk that a ring thread holds.
#[derive(Clone, Debug, Default)]
struct Holding {
    /// The rank's own gradients.
    own: Option<Payload>,
    /// A partial sum, or final values.
    held: Option<Payload>,
    /// Messages that the exchange has not requested yet.
    arrived: Vec<(CollectiveKind, Position, Payload)>,
}

impl Holding {
    fn take(&mut self) -> Payload {
        self.held.take().or_else(|| self.own.take()).expect("the exchange asked for what is there")
    }

    fn take_message(&mut self, kind: CollectiveKind, from: Position) -> Payload {
        let is_it = |(other, sender, _): &(CollectiveKind, Position, Payload)| {
            (*other, *sender) == (kind, from)
        };
        let index = self.arrived.iter().position(is_it);
        let index = index.expect("the exchange asked for a message that has come");
        self.arrived.swap_remove(index).2
    }
}

/// State of the ring thread of a virtual rank.
#[derive(Debug)]
pub struct Ring {
    exchange: Exchange,
    /// Number of restarts.
    round: u64,
    holdings: Vec<Holding>,
    host: LinkModel,
    pub inbox: VecDeque<Item>,
    /// Time at which the ring thread can process the next item.
    pub free_at: Nanos,
    /// True if a wake-up at `free_at` is queued.
    pub wakes: bool,
}

/// Result of one item: its duration, and its effects with their delays after its begin.
#[derive(Debug, Default)]
pub struct Work {
    pub takes: Nanos,
    pub effects: Vec<(Nanos, Effect)>,
}

impl Ring {
    /// Creates a ring thread that adds as fast as `host`.
    pub fn new(
        layout: &Arc<ShardLayout>,
        position: Position,
        window: usize,
        host: LinkModel,
    ) -> Self {
        Self {
            exchange: Exchange::new(layout.clone(), position, window),
            round: 0,
            holdings: vec![Holding::default(); layout.chunks.len()],
            host,
            inbox: VecDeque::new(),
            free_at: 0,
            wakes: false,
        }
    }

    /// Processes one item and performs all resulting actions.
    pub fn handle(&mut self, item: Item) -> Work {
        let mut work = Work::default();
        match item {
            Item::Restart => {
                self.exchange.restart();
                self.round += 1;
                self.holdings.fill(Holding::default());
            }
            Item::Ready { kind, chunk, values } => {
                let holding = &mut self.holdings[chunk.index()];
                match kind {
                    CollectiveKind::ReduceScatter => holding.own = Some(values),
                    CollectiveKind::AllGather => {
                        holding.held = Some(values);
                        work.effects.push((0, Effect::Used));
                    }
                }
                self.exchange.handle(Event::LocalReady { kind, chunk });
            }
            Item::Message(Message { round, chunk, .. }) if round != self.round => {
                work.effects.push((0, Effect::Strayed(chunk)));
            }
            Item::Message(Message { kind, chunk, from, values, .. }) => {
                self.holdings[chunk.index()].arrived.push((kind, from, values));
                self.exchange.handle(Event::Received { kind, chunk, from });
            }
        }
        while let Some(action) = self.exchange.poll_action() {
            self.perform(action, &mut work);
        }
        work
    }

    fn perform(&mut self, action: Action, work: &mut Work) {
        let (from, round) = (self.exchange.position(), self.round);
        let pass = |chunk: ChunkId| self.host.busy(self.exchange.layout().chunk(chunk));
        let effect = match action {
            Action::Send { kind, chunk, to } => {
                let holding = &mut self.holdings[chunk.index()];
                let values = match kind {
                    CollectiveKind::AllGather => {
                        holding.held.clone().expect("final values are forwarded")
                    }
                    CollectiveKind::ReduceScatter => {
                        // Own values are copied out of their readback slot.
                        if holding.held.is_none() {
                            work.takes += pass(chunk);
                            work.effects.push((work.takes, Effect::Used));
                        }
                        holding.take()
                    }
                };
                Effect::Send { to, message: Message { kind, chunk, from, round, values } }
            }
            Action::Accumulate { chunk, from } => {
                work.takes += pass(chunk);
                let holding = &mut self.holdings[chunk.index()];
                if holding.held.is_none() {
                    work.effects.push((work.takes, Effect::Used));
                }
                let mut sum =
                    Rc::unwrap_or_clone(holding.take_message(CollectiveKind::ReduceScatter, from));
                for (sum, value) in sum.iter_mut().zip(holding.take().iter()) {
                    *sum += value;
                }
                holding.held = Some(Rc::new(sum));
                return;
            }
            Action::Reduced { chunk } => {
                let holding = &mut self.holdings[chunk.index()];
                if holding.held.is_none() {
                    work.effects.push((work.takes, Effect::Used));
                }
                Effect::Reduced { chunk, values: holding.take() }
            }
            Action::StoreFinal { chunk, from } => {
                let holding = &mut self.holdings[chunk.index()];
                let values = holding.take_message(CollectiveKind::AllGather, from);
                holding.held = Some(values.clone());
                Effect::Kept { chunk, values }
            }
            Action::Done { kind, bucket } => Effect::Done(Collective { kind, bucket }),
        };
        work.effects.push((work.takes, effect));
    }
}
