//! Execution of the calls of a [`ProcessGroup`]: rings as exchanges, trees as lists of steps.

use std::ops::Range;
use std::sync::Arc;

use super::Done;
use super::limits::{CHUNK_BYTES, WINDOW};
use super::packet::{CallKind, CollectiveCall};
use super::payload::{Payload, TypedPayload};
use super::reduce_op::Reducer;
use super::slices::{LocalSlices, SliceIo};
use super::wire::WEIGHTS;
use crate::collective::{CollectiveKind, RootedStep, ShardLayout, Topology, rooted};
use crate::comm::{
    ExchangeDriver, GroupError, PooledBuffer, ProcessGroup, ReduceOp, SharedBuffer, Transferable,
};
use potluck_core::{BucketId, ChunkId, Position, Rank};

/// Returns the ranges of `length` elements that are sent in one message each: at least one, so
/// that ranks exchange a message even without values.
pub(super) fn chunks<T>(length: usize) -> impl Iterator<Item = Range<usize>> {
    let chunk = CHUNK_BYTES / size_of::<T>();
    let starts = (0..length.max(1)).step_by(chunk);
    starts.map(move |start| start..(start + chunk).min(length))
}

impl ProcessGroup {
    /// Runs a call; if it fails on this rank, it fails on every rank.
    pub(super) fn call(
        &mut self,
        call: CollectiveCall,
        perform: impl FnOnce(&mut Self) -> Done,
    ) -> Done {
        let done = match self.channels.begin_call(call) {
            Ok(()) => perform(self),
            Err(error) => Err(error),
        };
        if let Err(error) = &done
            // An abort by another rank has already closed every mailbox.
            && !matches!(error, GroupError::Aborted(_))
        {
            self.channels.abort(&format!("{} failed in {error}", self.channels.member()));
        }
        done
    }

    /// Returns the sum of all ranks' weights of a mean, with the same bits on every rank; 0 for
    /// other operations.
    pub(super) fn weights<T: Transferable>(&mut self, op: &ReduceOp<T>) -> Result<f64, GroupError> {
        let ReduceOp::Mean { weight } = op else { return Ok(0.0) };
        let mut weights = [*weight];
        let call =
            CollectiveCall { op: WEIGHTS, ..CollectiveCall::new::<f64>(CallKind::AllReduce, 1) };
        let reducer = Reducer { op: &ReduceOp::Sum, weights: 0.0 };
        self.call(call, |group| {
            if !T::IS_FLOAT {
                return Err(group.argument(format!("{} has no mean: take the sum", T::NAME)));
            }
            if !weight.is_finite() || *weight < 0.0 {
                return Err(group.argument(format!("a weight of {weight}")));
            }
            group.all_reduce_tree(&mut weights, &reducer)?;
            if weights[0] > 0.0 {
                Ok(())
            } else {
                Err(group.argument("the weights sum to 0".into()))
            }
        })?;
        Ok(weights[0])
    }

    /// Performs the steps of a barrier.
    pub(super) fn run_barrier(&mut self) -> Done {
        for step in rooted::barrier(self.channels.size(), self.position()) {
            match step {
                RootedStep::Send { to, .. } => self.channels.send(to, Payload::Nothing)?,
                RootedStep::Receive { from, .. } | RootedStep::Accumulate { from, .. } => {
                    let Payload::Nothing = self.channels.recv(from)? else {
                        return Err(self.channels.unexpected(from));
                    };
                }
            }
        }
        Ok(())
    }

    /// Performs the requested phases (reduce, gather) of a ring.
    pub(super) fn exchange<T: Transferable>(
        &mut self,
        length: usize,
        slices: LocalSlices<'_, T>,
        reducer: Reducer<'_, T>,
        [reduces, gathers]: [bool; 2],
    ) -> Done {
        if length == 0 {
            return self.run_barrier();
        }
        let layout = self.layout::<T>(length);
        let position = self.position();
        let pool = T::pool(&self.channels.pools).clone();
        let mut driver = ExchangeDriver::with_pool(layout.clone(), position, WINDOW, pool);
        if reduces && gathers {
            driver = driver.into_all_reduce();
        }
        let mut io =
            SliceIo { channels: &mut self.channels, slices, reducer, done: 0, gathered: 0 };
        let all = (0..layout.chunks.len() as u32).map(ChunkId);
        if reduces {
            for chunk in all.clone() {
                driver.on_local_ready(CollectiveKind::ReduceScatter, chunk, &mut io)?;
            }
        }
        let mut own = all.filter(|chunk| !reduces && layout.chunk(*chunk).owner == position);
        let mut begun = 0;
        let others = layout.size as usize - 1;
        while io.done < u32::from(reduces) + u32::from(gathers) {
            // The window also bounds the lead of a rank that only sends over its peers.
            if io.gathered + WINDOW * others >= begun * others
                && let Some(chunk) = own.next()
            {
                begun += 1;
                driver.on_local_ready(CollectiveKind::AllGather, chunk, &mut io)?;
                continue;
            }
            let from = layout.previous(BucketId(0), position);
            let payload = io.channels.recv(from)?;
            let Some(TypedPayload::Message(message)) = T::unwrap(payload) else {
                return Err(io.channels.unexpected(from));
            };
            driver.on_message(message, &mut io)?;
        }
        Ok(())
    }

    /// Gathers the values of all ranks, in order of positions, on every rank.
    pub(super) fn gather_blocks<T: Transferable>(&mut self, values: &[T], into: &mut [T]) -> Done {
        let own_at = self.position().index() * values.len();
        into[own_at..own_at + values.len()].copy_from_slice(values);
        let length = into.len();
        let slices = LocalSlices::Apart { own: values, own_at, result: into, result_at: 0 };
        let reducer = Reducer { op: &ReduceOp::Sum, weights: 0.0 };
        self.exchange(length, slices, reducer, [false, true])
    }

    /// Returns the shard layout of this many values on a ring; reuses the last one if it fits.
    fn layout<T>(&mut self, length: usize) -> Arc<ShardLayout> {
        let chunk = CHUNK_BYTES / size_of::<T>();
        if let Some(layout) = &self.layout
            && layout.length(BucketId(0)) == length
            && layout.chunk_max() == chunk
        {
            return layout.clone();
        }
        let layout = ShardLayout::new(Topology::Ring, self.channels.size(), &[length], 1, chunk);
        self.layout.insert(Arc::new(layout)).clone()
    }

    /// Performs an all-reduce of few values along a tree, in one message per step.
    pub(super) fn all_reduce_tree<T: Transferable>(
        &mut self,
        values: &mut [T],
        reducer: &Reducer<'_, T>,
    ) -> Done {
        let size = self.channels.size();
        let root = Position(0);
        let position = self.position();
        let up = rooted::reduce(size, root, position);
        let result = self.reduce_to_root(&up, values, reducer)?.map(PooledBuffer::share);
        self.broadcast_from_root(&rooted::broadcast(size, root, position), values, result)
    }

    /// Performs the steps of a reduction and returns the result on its root.
    pub(super) fn reduce_to_root<T: Transferable>(
        &mut self,
        steps: &[RootedStep],
        own: &[T],
        reducer: &Reducer<'_, T>,
    ) -> Result<Option<PooledBuffer<T>>, GroupError> {
        let mut held: Option<PooledBuffer<T>> = None;
        for step in steps {
            match *step {
                RootedStep::Accumulate { from, .. } | RootedStep::Receive { from, .. } => {
                    let mut came = self.recv_owned(from, own.len())?;
                    match &mut held {
                        Some(held) => reducer.add(held, &came),
                        nothing => {
                            reducer.add_own(&mut came, own);
                            *nothing = Some(came);
                        }
                    }
                }
                RootedStep::Send { to, .. } => {
                    let values = held.take().unwrap_or_else(|| self.copy(own, reducer));
                    self.channels.send_credited(to, T::wrap(TypedPayload::Owned(values)))?;
                    return Ok(None);
                }
            }
        }
        let mut result = held.unwrap_or_else(|| self.copy(own, reducer));
        reducer.finish(&mut result);
        Ok(Some(result))
    }

    fn copy<T: Transferable>(&self, own: &[T], reducer: &Reducer<'_, T>) -> PooledBuffer<T> {
        let mut values = T::pool(&self.channels.pools).take(own.len());
        reducer.copy(own, &mut values);
        values
    }

    /// Performs the steps of a broadcast; the root sends `held`, or `values` if it is `None`.
    pub(super) fn broadcast_from_root<T: Transferable>(
        &mut self,
        steps: &[RootedStep],
        values: &mut [T],
        mut held: Option<SharedBuffer<T>>,
    ) -> Done {
        for step in steps {
            match *step {
                RootedStep::Receive { from, .. } | RootedStep::Accumulate { from, .. } => {
                    let payload = self.channels.recv(from)?;
                    match T::unwrap(payload) {
                        Some(TypedPayload::Shared(came)) if came.len() == values.len() => {
                            held = Some(came);
                        }
                        _ => return Err(self.channels.unexpected(from)),
                    }
                }
                RootedStep::Send { to, .. } => {
                    let shared = held.get_or_insert_with(|| {
                        let mut copy = T::pool(&self.channels.pools).take(values.len());
                        copy.copy_from_slice(values);
                        copy.share()
                    });
                    self.channels
                        .send_credited(to, T::wrap(TypedPayload::Shared(shared.clone())))?;
                }
            }
        }
        if let Some(held) = held {
            values.copy_from_slice(&held);
        }
        Ok(())
    }

    pub(super) fn send_chunked<T: Transferable>(&mut self, values: &[T], to: Position) -> Done {
        for range in chunks::<T>(values.len()) {
            self.send_chunk(&values[range], to)?;
        }
        Ok(())
    }

    fn send_chunk<T: Transferable>(&mut self, values: &[T], to: Position) -> Done {
        let mut part = T::pool(&self.channels.pools).take(values.len());
        part.copy_from_slice(values);
        self.channels.send_credited(to, T::wrap(TypedPayload::Owned(part)))
    }

    pub(super) fn recv_chunked<T: Transferable>(
        &mut self,
        values: &mut [T],
        from: Position,
    ) -> Done {
        for range in chunks::<T>(values.len()) {
            let came = self.recv_owned(from, range.len())?;
            values[range].copy_from_slice(&came);
        }
        Ok(())
    }

    /// Receives a buffer with `length` values.
    fn recv_owned<T: Transferable>(
        &mut self,
        from: Position,
        length: usize,
    ) -> Result<PooledBuffer<T>, GroupError> {
        match T::unwrap(self.channels.recv(from)?) {
            Some(TypedPayload::Owned(came)) if came.len() == length => Ok(came),
            _ => Err(self.channels.unexpected(from)),
        }
    }

    // ---- Argument checks ----

    pub(super) fn argument(&self, why: String) -> GroupError {
        GroupError::Argument { call: self.channels.call().to_string(), why }
    }

    pub(super) fn expect_length(&self, name: &str, length: usize, expected: usize) -> Done {
        if length == expected {
            Ok(())
        } else {
            Err(self.argument(format!("{name} has {length} elements, not {expected}")))
        }
    }

    pub(super) fn expect_blocks(&self, name: &str, length: usize, block: usize) -> Done {
        self.expect_length(name, length, self.world_size() * block)
    }

    /// Position of a rank, or an explanation if it is not in the group.
    pub(super) fn position_of(&self, rank: Rank) -> Result<Position, String> {
        let members = self.members();
        members.position(rank).ok_or_else(|| {
            if members.is_identity() {
                format!("there are {} ranks", members.size())
            } else {
                format!("{rank} is not in the group {members}")
            }
        })
    }

    pub(super) fn expect_rank(&self, rank: Rank) -> Result<Position, GroupError> {
        self.position_of(rank).map_err(|why| self.argument(why))
    }

    /// Position of a rank that is not this one.
    pub(super) fn expect_other(&self, rank: Rank) -> Result<Position, GroupError> {
        let position = self.expect_rank(rank)?;
        if rank == self.rank() {
            Err(self.argument(format!("this is {rank} itself")))
        } else {
            Ok(position)
        }
    }
}
