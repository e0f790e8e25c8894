//! Slices as the input and output of one rank in an exchange.

use std::ops::Range;

use super::connection::PeerChannels;
use super::payload::{Payload, TypedPayload};
use super::reduce_op::Reducer;
use crate::collective::{Chunk, CollectiveKind};
use crate::comm::{
    Addition, ExchangeIo, GroupError, Message, PooledBuffer, SharedBuffer, Transferable,
};
use potluck_core::{BucketId, ChunkId, Position};

/// Slices of a rank's own values and of its results, by position in the only bucket of the
/// exchange.
pub(crate) enum LocalSlices<'a, T> {
    /// One slice for both, as long as the bucket.
    InPlace(&'a mut [T]),
    /// Separate slices of parts of the bucket, with the positions of their first elements.
    Apart { own: &'a [T], own_at: usize, result: &'a mut [T], result_at: usize },
}

impl<T> LocalSlices<'_, T> {
    fn own(&self, range: &Range<usize>) -> &[T] {
        match self {
            Self::InPlace(values) => &values[range.clone()],
            Self::Apart { own, own_at, .. } => &own[range.start - own_at..range.end - own_at],
        }
    }

    fn result(&mut self, range: &Range<usize>) -> &mut [T] {
        match self {
            Self::InPlace(values) => &mut values[range.clone()],
            Self::Apart { result, result_at, .. } => {
                &mut result[range.start - *result_at..range.end - *result_at]
            }
        }
    }
}

/// Input and output of one rank in one collective.
pub(crate) struct SliceIo<'a, T: Transferable> {
    pub channels: &'a mut PeerChannels,
    pub slices: LocalSlices<'a, T>,
    pub(crate) reducer: Reducer<'a, T>,
    /// Number of completed phases.
    pub done: u32,
    /// Number of chunks of other owners whose final values were received.
    pub gathered: usize,
}

impl<T: Transferable> ExchangeIo<T> for SliceIo<'_, T> {
    type Error = GroupError;

    fn read_local(&mut self, _: ChunkId, chunk: &Chunk, into: &mut [T]) -> Result<(), GroupError> {
        self.reducer.copy(self.slices.own(&chunk.range), into);
        Ok(())
    }

    fn add_local(
        &mut self,
        _: ChunkId,
        chunk: &Chunk,
        mut partial: PooledBuffer<T>,
    ) -> Result<Addition<T>, GroupError> {
        self.reducer.add_own(&mut partial, self.slices.own(&chunk.range));
        Ok(Addition::Done(partial))
    }

    fn add_message(&mut self, partial: &mut [T], values: &[T]) {
        self.reducer.add(partial, values);
    }

    fn on_reduced(
        &mut self,
        _: ChunkId,
        chunk: &Chunk,
        mut sum: PooledBuffer<T>,
    ) -> Result<SharedBuffer<T>, GroupError> {
        self.reducer.finish(&mut sum);
        self.slices.result(&chunk.range).copy_from_slice(&sum);
        Ok(sum.share())
    }

    fn read_final(&mut self, _: ChunkId, chunk: &Chunk) -> Result<SharedBuffer<T>, GroupError> {
        let mut values = T::pool(&self.channels.pools).take(chunk.range.len());
        values.copy_from_slice(self.slices.own(&chunk.range));
        Ok(values.share())
    }

    fn on_gathered(
        &mut self,
        _: ChunkId,
        chunk: &Chunk,
        values: &SharedBuffer<T>,
    ) -> Result<(), GroupError> {
        self.slices.result(&chunk.range).copy_from_slice(values);
        self.gathered += 1;
        Ok(())
    }

    fn send(&mut self, to: Position, message: Message<T>) -> Result<(), GroupError> {
        let payload: Payload = T::wrap(TypedPayload::Message(message));
        self.channels.send(to, payload)
    }

    fn on_done(&mut self, _: CollectiveKind, _: BucketId) -> Result<(), GroupError> {
        self.done += 1;
        Ok(())
    }
}
