//! Process group: collectives on host slices, named as in torch.distributed. [`init`] creates one
//! [`ProcessGroup`] handle per rank, each thread takes one, and all call the same methods in the
//! same order.
//!
//! **Groups of some ranks.** [`ProcessGroup::split`] and [`ProcessGroup::new_group`] create them.
//! A rank keeps its number in every group, so calls and errors name the same [`Rank`] everywhere;
//! its [`Position`] counts within the group. Blocks of values are in order of positions, and a
//! group of some ranks gives the bits of a first group of its size.
//!
//! **Results.** The order in which values are combined depends on the number of ranks and
//! elements only, never on timing, and every rank gets the same bits. An all-reduce of more than
//! [`TREE_BYTES`] is a ring ([`crate::collective::exchange`]), a smaller one a tree
//! ([`crate::collective::rooted`]).
//!
//! **Failures.** A call that fails on one rank fails on all, at the latest in their next call,
//! with an error that names the rank. The causes are mismatched calls, a dropped handle, a thread
//! that panics, and a timeout. After a failure, no call succeeds, and the contents of the slices
//! are unspecified. A rank whose call fails ends all groups to which it belongs; a dropped handle
//! ends its own group, and with it the other groups of a rank that then calls it.

pub(super) mod connection;
pub(super) mod error;
mod limits;
mod packet;
pub(super) mod payload;
mod perform;
pub(super) mod reduce_op;
mod registry;
pub(super) mod remote;
pub(super) mod remote_process;
mod slices;
mod subgroup;
pub(super) mod wire;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::collective::{RankGroup, RootedStep, ShardLayout, rooted};
use crate::comm::{GroupError, ReduceOp, Transferable};
use connection::PeerChannels;
pub use limits::TREE_BYTES;
use packet::{CallKind, CollectiveCall};
use perform::chunks;
use potluck_core::{Position, Rank};
use reduce_op::Reducer;
use slices::LocalSlices;

/// Default maximum duration of a call.
const DEADLINE: Duration = Duration::from_secs(300);

/// Creates a group of `world` ranks and returns one handle per rank, in order of ranks; each is to
/// be moved to its thread.
///
/// # Panics
///
/// Panics if `world` is 0.
pub fn init(world: u32) -> Vec<ProcessGroup> {
    assert!(world > 0, "a group needs a rank");
    PeerChannels::all(&RankGroup::all(world), DEADLINE)
        .into_iter()
        .map(|channels| ProcessGroup { channels, layout: None })
        .collect()
}

/// Handle of one rank on its process group. After it is dropped, calls of other ranks that need
/// this rank fail.
pub struct ProcessGroup {
    pub(super) channels: PeerChannels,
    /// Shard layout of the last call, which the next call of the same length reuses.
    pub(super) layout: Option<Arc<ShardLayout>>,
}

/// Range of the block of a position in values with a block of `length` per position.
fn block_of(position: Position, length: usize) -> Range<usize> {
    position.index() * length..(position.index() + 1) * length
}

/// Result of a call that returns no value.
pub(super) type Done = Result<(), GroupError>;

impl ProcessGroup {
    /// Returns the number of this rank, which is the same in all of its groups.
    pub fn rank(&self) -> Rank {
        self.channels.rank()
    }

    /// Returns this rank's position in the group.
    pub fn position(&self) -> Position {
        self.channels.position()
    }

    /// Returns the ranks of the group.
    pub fn members(&self) -> &RankGroup {
        self.channels.members()
    }

    /// Returns the number of ranks in the group.
    pub fn world_size(&self) -> usize {
        self.channels.size() as usize
    }

    /// Sets the maximum duration of a call of this rank; the default is 5 minutes. A duration that
    /// no clock reaches, such as `Duration::MAX`, is no deadline.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.channels.timeout = deadline;
    }

    /// Aborts all groups of this rank: the calls of their members fail, with this reason.
    pub fn abort(&self, why: &str) {
        self.channels.abort(&format!("{} gave up: {why}", self.channels.member()));
    }

    /// Leaves the group, as dropping the handle does.
    pub fn destroy(self) {}

    // ---- Collectives with values and results on every rank ----

    /// Combines the values of all ranks in place, on every rank. `2 (world - 1) / world` of the
    /// bytes pass through each rank.
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

    /// Combines the `world * into.len()` values of all ranks; position `p` gets part `p` of
    /// the result. `(world - 1) / world` of the bytes pass through each rank.
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
            let result_at = group.position().index() * into.len();
            let slices = LocalSlices::Apart { own: values, own_at: 0, result: into, result_at };
            group.exchange(values.len(), slices, reducer, [true, false])
        })
    }

    /// Concatenates the values of all ranks, in order of positions, on every rank; `into` is
    /// `world` times as long as `values`. `(world - 1) / world` of its bytes pass through each
    /// rank.
    pub fn all_gather_into<T: Transferable>(&mut self, values: &[T], into: &mut [T]) -> Done {
        let call = CollectiveCall::new::<T>(CallKind::AllGather, values.len());
        self.call(call, |group| {
            group.expect_blocks("into", into.len(), values.len())?;
            group.gather_blocks(values, into)
        })
    }

    /// Gathers as [`Self::all_gather_into`] does, into one vector per rank.
    pub fn all_gather<T: Transferable>(&mut self, values: &[T]) -> Result<Vec<Vec<T>>, GroupError> {
        let mut all = vec![T::default(); self.world_size() * values.len()];
        self.all_gather_into(values, &mut all)?;
        let mut blocks = Vec::with_capacity(self.world_size());
        for position in 0..self.world_size() {
            blocks.push(all[block_of(Position(position as u32), values.len())].to_vec());
        }
        Ok(blocks)
    }

    /// Returns when every rank has called it.
    pub fn barrier(&mut self) -> Done {
        self.call(CollectiveCall::barrier(), Self::run_barrier)
    }

    // ---- Collectives with values or results on one rank ----

    /// Combines the values of all ranks in place on `dst`; on other ranks they stay unchanged.
    /// All values pass `ceil(log2(world))` times through `dst`.
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
            let dst = group.expect_rank(dst)?;
            let steps = rooted::reduce(group.channels.size(), dst, group.position());
            for range in chunks::<T>(values.len()) {
                let own = &mut values[range];
                if let Some(result) = group.reduce_to_root(&steps, own, &reducer)? {
                    own.copy_from_slice(&result);
                }
            }
            Ok(())
        })
    }

    /// Copies the values of `src` to every rank. They pass `ceil(log2(world))` times through
    /// `src`.
    pub fn broadcast<T: Transferable>(&mut self, values: &mut [T], src: Rank) -> Done {
        let call = CollectiveCall::new::<T>(CallKind::Broadcast { src }, values.len());
        self.call(call, |group| {
            let src = group.expect_rank(src)?;
            let steps = rooted::broadcast(group.channels.size(), src, group.position());
            for range in chunks::<T>(values.len()) {
                group.broadcast_from_root(&steps, &mut values[range], None)?;
            }
            Ok(())
        })
    }

    /// Concatenates the values of all ranks, in order of positions, on `dst`, where `into` is
    /// `world` times as long as `values`; on other ranks `into` must be empty.
    pub fn gather<T: Transferable>(&mut self, values: &[T], into: &mut [T], dst: Rank) -> Done {
        let call = CollectiveCall::new::<T>(CallKind::Gather { dst }, values.len());
        self.call(call, |group| {
            let dst = group.expect_rank(dst)?;
            let length = values.len();
            if group.position() == dst {
                group.expect_blocks("into", into.len(), length)?;
                into[block_of(dst, length)].copy_from_slice(values);
            } else {
                group.expect_length("into", into.len(), 0)?;
            }
            for step in rooted::gather(group.channels.size(), dst, group.position()) {
                match step {
                    RootedStep::Send { to, .. } => group.send_chunked(values, to)?,
                    RootedStep::Receive { from, block }
                    | RootedStep::Accumulate { from, block } => {
                        group.recv_chunked(&mut into[block_of(block, length)], from)?;
                    }
                }
            }
            Ok(())
        })
    }

    /// Sends part `p` of the values of `src` to position `p`. On `src`, `values` is `world` times
    /// as long as `into`; on other ranks it must be empty.
    pub fn scatter<T: Transferable>(&mut self, values: &[T], into: &mut [T], src: Rank) -> Done {
        let call = CollectiveCall::new::<T>(CallKind::Scatter { src }, into.len());
        self.call(call, |group| {
            let src = group.expect_rank(src)?;
            let length = into.len();
            if group.position() == src {
                group.expect_blocks("values", values.len(), length)?;
                into.copy_from_slice(&values[block_of(src, length)]);
            } else {
                group.expect_length("values", values.len(), 0)?;
            }
            for step in rooted::scatter(group.channels.size(), src, group.position()) {
                match step {
                    RootedStep::Send { to, block } => {
                        group.send_chunked(&values[block_of(block, length)], to)?;
                    }
                    RootedStep::Receive { from, .. } | RootedStep::Accumulate { from, .. } => {
                        group.recv_chunked(into, from)?;
                    }
                }
            }
            Ok(())
        })
    }

    // ---- Point to point ----

    /// Sends values to a rank, which must call [`Self::recv`]. Returns when all values are
    /// queued: at once while at most 16 messages of 256 KiB, at least one per send, wait for that
    /// rank, and otherwise when it has taken enough of them (backpressure). Collectives in
    /// between do not use these credits.
    pub fn send<T: Transferable>(&mut self, values: &[T], dst: Rank) -> Done {
        let call = CollectiveCall::new::<T>(CallKind::Send { dst }, values.len());
        self.call(call, |group| {
            let dst = group.expect_other(dst)?;
            group.send_chunked(values, dst)
        })
    }

    /// Receives the values that a rank sends, which must have the same length.
    pub fn recv<T: Transferable>(&mut self, values: &mut [T], src: Rank) -> Done {
        let call = CollectiveCall::new::<T>(CallKind::Recv { src }, values.len());
        self.call(call, |group| {
            let src = group.expect_other(src)?;
            group.recv_chunked(values, src)
        })
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.channels.leave(std::thread::panicking());
    }
}
