//! How the calls of a [`Group`] are performed: rings by exchanges, trees by lists of steps.

use std::ops::Range;
use std::sync::Arc;

use super::Done;
use super::connection::WINDOW;
use super::packet::{Body, Call, Kind, Load};
use super::reduce_op::Combine;
use super::slices::{Side, Slices};
use crate::base::{BucketId, ChunkId, Rank};
use crate::collective::{Layout, Phase, Step, Topology, rooted};
use crate::comm::{Group, GroupError, Member, Op, Shared, Transferable, Values};

/// Bytes that travel in one message at most: few enough to stay in a core's cache, enough to make
/// up for waking a thread.
const CHUNK_BYTES: usize = 256 << 10;
/// Why the type of what has come is known.
const OTHER: &str = "ranks that made the same call send the same kind of values";

/// The ranges of `length` elements that travel in one message each: at least one, so that ranks
/// hear of each other also when there is nothing to say.
pub(super) fn chunks<T>(length: usize) -> impl Iterator<Item = Range<usize>> {
    let chunk = CHUNK_BYTES / size_of::<T>();
    let starts = (0..length.max(1)).step_by(chunk);
    starts.map(move |start| start..(start + chunk).min(length))
}

impl Group {
    /// Makes a call; if it fails here, it fails everywhere.
    pub(super) fn call(&mut self, call: Call, perform: impl FnOnce(&mut Self) -> Done) -> Done {
        let done = self.link.enter(call).and_then(|()| perform(self));
        if let Err(error) = &done {
            // Whoever was told by another rank tells nobody.
            if !matches!(error, GroupError::Aborted(_)) {
                self.link.abort(&format!("{} failed in {error}", self.rank()));
            }
        }
        done
    }

    /// The sum of all weights of a mean; the same bits on all ranks.
    pub(super) fn weights<T: Transferable>(&mut self, op: &Op<T>) -> Result<f64, GroupError> {
        let Op::Mean { weight } = op else { return Ok(0.0) };
        let mut weights = [*weight];
        let call = Call { op: "weights of a mean", ..Call::new::<f64>(Kind::AllReduce, 1) };
        let combine = Combine { op: &Op::Sum, weights: 0.0 };
        self.call(call, |group| {
            if !T::IS_FLOAT {
                return Err(group.argument(format!("{} has no mean: take the sum", T::NAME)));
            }
            if !weight.is_finite() || *weight < 0.0 {
                return Err(group.argument(format!("a weight of {weight}")));
            }
            group.all_reduce_tree(&mut weights, &combine)?;
            match weights[0] > 0.0 {
                true => Ok(()),
                false => Err(group.argument("the weights sum to 0".into())),
            }
        })?;
        Ok(weights[0])
    }

    /// Performs the steps of a barrier.
    pub(super) fn meet(&mut self) -> Done {
        for step in rooted::barrier(self.link.world(), self.rank()) {
            match step {
                Step::Send { to, .. } => self.link.send(to, Body::Nothing)?,
                Step::Receive { from, .. } | Step::Fold { from, .. } => {
                    self.link.receive(from)?;
                }
            }
        }
        Ok(())
    }

    /// The phases (reduce, gather) of a ring.
    pub(super) fn exchange<T: Transferable>(
        &mut self,
        length: usize,
        slices: Slices<'_, T>,
        combine: Combine<'_, T>,
        [reduces, gathers]: [bool; 2],
    ) -> Done {
        if length == 0 {
            return self.meet();
        }
        let layout = self.layout::<T>(length);
        let rank = self.rank();
        let pool = T::pool(&self.link.pools).clone();
        let mut member = Member::with_pool(layout.clone(), rank, WINDOW, pool);
        if reduces && gathers {
            member = member.chained();
        }
        let mut side = Side { link: &mut self.link, slices, combine, done: 0, gathered: 0 };
        let all = (0..layout.chunks.len() as u32).map(ChunkId);
        if reduces {
            all.clone().try_for_each(|chunk| member.ready(Phase::Reduce, chunk, &mut side))?;
        }
        let mut own = all.filter(|chunk| !reduces && layout.chunk(*chunk).owner == rank);
        let (mut begun, others) = (0, layout.world as usize - 1);
        while side.done < u32::from(reduces) + u32::from(gathers) {
            // With what it only hands out, a rank keeps as close to the others as with sums.
            if side.gathered + WINDOW * others >= begun * others
                && let Some(chunk) = own.next()
            {
                begun += 1;
                member.ready(Phase::Gather, chunk, &mut side)?;
                continue;
            }
            let body = side.link.receive(layout.previous(rank))?;
            let Some(Load::Message(message)) = T::unwrap(body) else { unreachable!("{OTHER}") };
            member.receive(message, &mut side)?;
        }
        Ok(())
    }

    /// How this many values are cut for a ring.
    fn layout<T>(&mut self, length: usize) -> Arc<Layout> {
        let chunk = CHUNK_BYTES / size_of::<T>();
        let is_it = |layout: &&Arc<Layout>| {
            layout.length(BucketId(0)) == length && layout.chunk_max() == chunk
        };
        if let Some(layout) = self.layout.as_ref().filter(is_it) {
            return layout.clone();
        }
        let layout = Layout::new(Topology::Ring, self.link.world(), &[length], 1, chunk);
        self.layout.insert(Arc::new(layout)).clone()
    }

    /// The tree of a few values, in one message.
    pub(super) fn all_reduce_tree<T: Transferable>(
        &mut self,
        values: &mut [T],
        combine: &Combine<'_, T>,
    ) -> Done {
        let (world, rank) = (self.link.world(), self.rank());
        let up = rooted::reduce(world, Rank(0), rank);
        let result = self.climb(&up, values, combine)?.map(Values::share);
        self.descend(&rooted::broadcast(world, Rank(0), rank), values, result)
    }

    /// Performs the steps of a reduction; the result, where it ends.
    pub(super) fn climb<T: Transferable>(
        &mut self,
        steps: &[Step],
        own: &[T],
        combine: &Combine<'_, T>,
    ) -> Result<Option<Values<T>>, GroupError> {
        let mut held: Option<Values<T>> = None;
        for step in steps {
            match *step {
                Step::Fold { from, .. } | Step::Receive { from, .. } => {
                    let Load::Values(mut came) = self.take_part(from)? else {
                        unreachable!("{OTHER}")
                    };
                    match &mut held {
                        Some(held) => combine.add(held, &came),
                        nothing => {
                            combine.add_own(&mut came, own);
                            *nothing = Some(came);
                        }
                    }
                }
                Step::Send { to, .. } => {
                    let values = held.take().unwrap_or_else(|| self.copy(own, combine));
                    self.link.send_credited(to, T::wrap(Load::Values(values)))?;
                    return Ok(None);
                }
            }
        }
        let mut result = held.unwrap_or_else(|| self.copy(own, combine));
        combine.finish(&mut result);
        Ok(Some(result))
    }

    fn copy<T: Transferable>(&self, own: &[T], combine: &Combine<'_, T>) -> Values<T> {
        let mut values = T::pool(&self.link.pools).take(own.len());
        combine.copy(own, &mut values);
        values
    }

    /// Performs the steps of a broadcast, of the values or of what is held instead.
    pub(super) fn descend<T: Transferable>(
        &mut self,
        steps: &[Step],
        values: &mut [T],
        mut held: Option<Shared<T>>,
    ) -> Done {
        for step in steps {
            match *step {
                Step::Receive { from, .. } | Step::Fold { from, .. } => {
                    let Load::Shared(came) = self.take_part(from)? else { unreachable!("{OTHER}") };
                    held = Some(came);
                }
                Step::Send { to, .. } => {
                    let shared = held.get_or_insert_with(|| {
                        let mut copy = T::pool(&self.link.pools).take(values.len());
                        copy.copy_from_slice(values);
                        copy.share()
                    });
                    self.link.send_credited(to, T::wrap(Load::Shared(shared.clone())))?;
                }
            }
        }
        if let Some(held) = held {
            values.copy_from_slice(&held);
        }
        Ok(())
    }

    pub(super) fn give<T: Transferable>(&mut self, values: &[T], to: Rank) -> Done {
        chunks::<T>(values.len()).try_for_each(|range| self.give_part(&values[range], to))
    }

    fn give_part<T: Transferable>(&mut self, values: &[T], to: Rank) -> Done {
        let mut part = T::pool(&self.link.pools).take(values.len());
        part.copy_from_slice(values);
        self.link.send_credited(to, T::wrap(Load::Values(part)))
    }

    pub(super) fn take<T: Transferable>(&mut self, values: &mut [T], from: Rank) -> Done {
        for range in chunks::<T>(values.len()) {
            let Load::Values(came) = self.take_part(from)? else { unreachable!("{OTHER}") };
            values[range].copy_from_slice(&came);
        }
        Ok(())
    }

    fn take_part<T: Transferable>(&mut self, from: Rank) -> Result<Load<T>, GroupError> {
        let body = self.link.receive(from)?;
        Ok(T::unwrap(body).expect(OTHER))
    }

    // ---- What cannot be asked for ----

    fn argument(&self, why: String) -> GroupError {
        GroupError::Argument { call: self.link.call().to_string(), why }
    }

    pub(super) fn expect_length(&self, name: &str, length: usize, expected: usize) -> Done {
        match length == expected {
            true => Ok(()),
            false => Err(self.argument(format!("{name} has {length} elements, not {expected}"))),
        }
    }

    pub(super) fn expect_blocks(&self, name: &str, length: usize, block: usize) -> Done {
        self.expect_length(name, length, self.world_size() * block)
    }

    pub(super) fn expect_rank(&self, rank: Rank) -> Done {
        match rank.index() < self.world_size() {
            true => Ok(()),
            false => Err(self.argument(format!("there are {} ranks", self.world_size()))),
        }
    }

    pub(super) fn expect_other(&self, rank: Rank) -> Done {
        self.expect_rank(rank)?;
        match rank == self.rank() {
            false => Ok(()),
            true => Err(self.argument(format!("this is {rank} itself"))),
        }
    }
}
