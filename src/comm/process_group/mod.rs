//! Collectives on host slices, under the names of torch.distributed: [`init`] makes a [`ProcessGroup`]
//! handle per rank, each thread takes one, and all call the same methods in the same order.
//!
//! **Results.** Values are combined in an order that depends on the number of ranks and elements
//! only, never on who is when, and every rank gets the same bits. Above [`TREE_BYTES`] an
//! all-reduce is a ring ([`crate::collective::exchange`]), up to them a tree
//! ([`crate::collective::rooted`]).
//!
//! **Failures.** A call that fails on one rank fails on all, at the latest in their next call,
//! with an error that names the rank: calls that do not belong together, a handle that is dropped,
//! a thread that panics, a deadline that passes. The group is of no use then, and what slices hold
//! is of no meaning.

pub(super) mod connection;
pub(super) mod packet;
mod perform;
pub(super) mod reduce_op;
mod slices;

use std::sync::Arc;
use std::time::Duration;

use crate::base::Rank;
use crate::collective::{RootedStep, ShardLayout, rooted};
use crate::comm::{GroupError, ReduceOp, Transferable};
use connection::PeerChannels;
use packet::{CallKind, CollectiveCall};
use perform::chunks;
use reduce_op::Reducer;
use slices::LocalSlices;

/// Up to so many bytes, an all-reduce goes along a tree: `2 ceil(log2(world))` steps instead of
/// `2 (world - 1)`.
pub const TREE_BYTES: usize = 4 << 10;
/// How long a call may take unless it is set.
const DEADLINE: Duration = Duration::from_secs(300);

/// Makes a group of `world` ranks: one handle for each, in order, to be moved to its thread.
///
/// ```
/// use potluck::comm::{Op, init};
///
/// std::thread::scope(|scope| {
///     for mut group in init(3) {
///         scope.spawn(move || {
///             let mut values = [f32::from(group.rank().0 as u8), 1.0];
///             group.all_reduce(&mut values, Op::Sum).unwrap();
///             assert_eq!(values, [0.0 + 1.0 + 2.0, 3.0]);
///         });
///     }
/// });
/// ```
///
/// # Panics
///
/// If `world` is 0.
pub fn init(world: u32) -> Vec<ProcessGroup> {
    assert!(world > 0, "a group needs a rank");
    PeerChannels::all(world, DEADLINE)
        .into_iter()
        .map(|channels| ProcessGroup { channels, layout: None })
        .collect()
}

/// One rank's handle on its group. When it is dropped, calls of others that need this rank fail.
pub struct ProcessGroup {
    pub(super) channels: PeerChannels,
    /// The last cut, which the next call of the same length takes again.
    pub(super) layout: Option<Arc<ShardLayout>>,
}

/// How a call ends.
pub(super) type Done = Result<(), GroupError>;

impl ProcessGroup {
    pub fn rank(&self) -> Rank {
        self.channels.rank()
    }

    pub fn world_size(&self) -> usize {
        self.channels.world() as usize
    }

    /// How long a call may take; 5 minutes at first. Each rank has its own.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.channels.timeout = deadline;
    }

    /// Gives up the group: calls of all ranks fail, with this reason.
    pub fn abort(&self, why: &str) {
        self.channels.abort(&format!("{} gave up: {why}", self.rank()));
    }

    /// Leaves the group, as dropping the handle does.
    pub fn destroy(self) {}

    // ---- Everyone has values and everyone gets results ----

    /// Combines everyone's values, in place. `2 (world - 1) / world` of the bytes go through each
    /// rank.
    pub fn all_reduce<T: Transferable>(&mut self, values: &mut [T], op: ReduceOp<T>) -> Done {
        let weights = self.weights(&op)?;
        let reducer = Reducer { op: &op, weights };
        let call = CollectiveCall {
            op: op.name(),
            ..CollectiveCall::new::<T>(CallKind::AllReduce, values.len())
        };
        if size_of_val(values) <= TREE_BYTES {
            return self.call(call, |group| group.all_reduce_tree(values, &reducer));
        }
        let length = values.len();
        self.call(call, |group| {
            group.exchange(length, LocalSlices::InPlace(values), reducer, [true, true])
        })
    }

    /// Combines everyone's `world * into.len()` values; rank `r` gets part `r` of the result.
    /// `(world - 1) / world` of the bytes go through each rank.
    pub fn reduce_scatter<T: Transferable>(
        &mut self,
        values: &[T],
        into: &mut [T],
        op: ReduceOp<T>,
    ) -> Done {
        let weights = self.weights(&op)?;
        let reducer = Reducer { op: &op, weights };
        let call = CollectiveCall {
            op: op.name(),
            ..CollectiveCall::new::<T>(CallKind::ReduceScatter, into.len())
        };
        self.call(call, |group| {
            group.expect_blocks("values", values.len(), into.len())?;
            let result_at = group.rank().index() * into.len();
            let slices = LocalSlices::Apart { own: values, own_at: 0, result: into, result_at };
            group.exchange(values.len(), slices, reducer, [true, false])
        })
    }

    /// Everyone's values, one after the other by rank, go to everyone; `into` is `world` times as
    /// long. `(world - 1) / world` of its bytes go through each rank.
    pub fn all_gather_into<T: Transferable>(&mut self, values: &[T], into: &mut [T]) -> Done {
        let call = CollectiveCall::new::<T>(CallKind::AllGather, values.len());
        self.call(call, |group| {
            group.expect_blocks("into", into.len(), values.len())?;
            let own_at = group.rank().index() * values.len();
            into[own_at..own_at + values.len()].copy_from_slice(values);
            let length = into.len();
            let slices = LocalSlices::Apart { own: values, own_at, result: into, result_at: 0 };
            let reducer = Reducer { op: &ReduceOp::Sum, weights: 0.0 };
            group.exchange(length, slices, reducer, [false, true])
        })
    }

    /// As [`Self::all_gather_into`], in vectors by rank.
    pub fn all_gather<T: Transferable>(&mut self, values: &[T]) -> Result<Vec<Vec<T>>, GroupError> {
        let mut all = vec![T::default(); self.world_size() * values.len()];
        self.all_gather_into(values, &mut all)?;
        let block = |rank: usize| all[rank * values.len()..(rank + 1) * values.len()].to_vec();
        Ok((0..self.world_size()).map(block).collect())
    }

    /// Returns when everyone has called it.
    pub fn barrier(&mut self) -> Done {
        self.call(CollectiveCall::barrier(), Self::run_barrier)
    }

    // ---- One rank has values, or gets results ----

    /// Combines everyone's values on `dst`, in place; elsewhere they stay as they are. Everything
    /// goes `ceil(log2(world))` times through `dst`.
    pub fn reduce<T: Transferable>(
        &mut self,
        values: &mut [T],
        dst: Rank,
        op: ReduceOp<T>,
    ) -> Done {
        let weights = self.weights(&op)?;
        let reducer = Reducer { op: &op, weights };
        let call = CollectiveCall {
            op: op.name(),
            ..CollectiveCall::new::<T>(CallKind::Reduce { dst }, values.len())
        };
        self.call(call, |group| {
            group.expect_rank(dst)?;
            let steps = rooted::reduce(group.channels.world(), dst, group.rank());
            for range in chunks::<T>(values.len()) {
                let own = &mut values[range];
                if let Some(result) = group.reduce_to_root(&steps, own, &reducer)? {
                    own.copy_from_slice(&result);
                }
            }
            Ok(())
        })
    }

    /// The values of `src` go to everyone. They go `ceil(log2(world))` times through `src`.
    pub fn broadcast<T: Transferable>(&mut self, values: &mut [T], src: Rank) -> Done {
        let call = CollectiveCall::new::<T>(CallKind::Broadcast { src }, values.len());
        self.call(call, |group| {
            group.expect_rank(src)?;
            let steps = rooted::broadcast(group.channels.world(), src, group.rank());
            chunks::<T>(values.len())
                .try_for_each(|range| group.broadcast_from_root(&steps, &mut values[range], None))
        })
    }

    /// Everyone's values, one after the other by rank, go to `dst`, where `into` is `world` times
    /// as long; elsewhere it is empty.
    pub fn gather<T: Transferable>(&mut self, values: &[T], into: &mut [T], dst: Rank) -> Done {
        let call = CollectiveCall::new::<T>(CallKind::Gather { dst }, values.len());
        self.call(call, |group| {
            group.expect_rank(dst)?;
            let length = values.len();
            let block = |rank: Rank| rank.index() * length..(rank.index() + 1) * length;
            if group.rank() == dst {
                group.expect_blocks("into", into.len(), length)?;
                into[block(dst)].copy_from_slice(values);
            } else {
                group.expect_length("into", into.len(), 0)?;
            }
            for step in rooted::gather(group.channels.world(), dst, group.rank()) {
                match step {
                    RootedStep::Send { to, .. } => group.send_chunked(values, to)?,
                    RootedStep::Receive { from, block: of }
                    | RootedStep::Fold { from, block: of } => {
                        group.recv_chunked(&mut into[block(of)], from)?;
                    }
                }
            }
            Ok(())
        })
    }

    /// Part `r` of the values of `src`, which are `world` times as long as `into`, goes to rank
    /// `r`; elsewhere `values` is empty.
    pub fn scatter<T: Transferable>(&mut self, values: &[T], into: &mut [T], src: Rank) -> Done {
        let call = CollectiveCall::new::<T>(CallKind::Scatter { src }, into.len());
        self.call(call, |group| {
            group.expect_rank(src)?;
            let length = into.len();
            let block = |rank: Rank| rank.index() * length..(rank.index() + 1) * length;
            if group.rank() == src {
                group.expect_blocks("values", values.len(), length)?;
                into.copy_from_slice(&values[block(src)]);
            } else {
                group.expect_length("values", values.len(), 0)?;
            }
            for step in rooted::scatter(group.channels.world(), src, group.rank()) {
                match step {
                    RootedStep::Send { to, block: of } => {
                        group.send_chunked(&values[block(of)], to)?
                    }
                    RootedStep::Receive { from, .. } | RootedStep::Fold { from, .. } => {
                        group.recv_chunked(into, from)?;
                    }
                }
            }
            Ok(())
        })
    }

    // ---- From rank to rank ----

    /// Sends values to a rank, which calls [`Self::recv`]. Returns when they are handed over: at
    /// once while at most 16 messages of 256 KiB, at least one for each send, wait for that rank,
    /// and else when it has taken enough of them. Collectives in between need no room of these.
    pub fn send<T: Transferable>(&mut self, values: &[T], dst: Rank) -> Done {
        let call = CollectiveCall::new::<T>(CallKind::Send { dst }, values.len());
        self.call(call, |group| {
            group.expect_other(dst)?;
            group.send_chunked(values, dst)
        })
    }

    /// What a rank sends, which must be as long.
    pub fn recv<T: Transferable>(&mut self, values: &mut [T], src: Rank) -> Done {
        let call = CollectiveCall::new::<T>(CallKind::Recv { src }, values.len());
        self.call(call, |group| {
            group.expect_other(src)?;
            group.recv_chunked(values, src)
        })
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.channels.leave(std::thread::panicking());
    }
}
