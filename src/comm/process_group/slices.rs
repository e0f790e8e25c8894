//! Slices as a rank's own side of an exchange.

use std::ops::Range;

use super::connection::Link;
use super::packet::{Body, Load};
use super::reduce_op::Combine;
use crate::base::{BucketId, ChunkId, Rank};
use crate::collective::{Chunk, Phase};
use crate::comm::{GroupError, Message, Own, Shared, Transferable, Values};

/// Where own values are and where results go, by position in the one bucket of the exchange.
pub enum Slices<'a, T> {
    /// Both are the whole bucket.
    InPlace(&'a mut [T]),
    /// Parts of it, with the position of their first element.
    Apart { own: &'a [T], own_at: usize, result: &'a mut [T], result_at: usize },
}

impl<T> Slices<'_, T> {
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

/// A rank's side of one collective.
pub struct Side<'a, T: Transferable> {
    pub link: &'a mut Link,
    pub slices: Slices<'a, T>,
    pub combine: Combine<'a, T>,
    /// Phases that are over.
    pub done: u32,
    /// Chunks of others whose final values have come.
    pub gathered: usize,
}

impl<T: Transferable> Own<T> for Side<'_, T> {
    type Error = GroupError;

    fn copy_to(&mut self, _: ChunkId, chunk: &Chunk, into: &mut [T]) -> Result<(), GroupError> {
        self.combine.copy(self.slices.own(&chunk.range), into);
        Ok(())
    }

    fn add_to(&mut self, _: ChunkId, chunk: &Chunk, partial: &mut [T]) -> Result<(), GroupError> {
        self.combine.add_own(partial, self.slices.own(&chunk.range));
        Ok(())
    }

    fn add_message(&mut self, partial: &mut [T], values: &[T]) {
        self.combine.add(partial, values);
    }

    fn reduced(
        &mut self,
        _: ChunkId,
        chunk: &Chunk,
        mut sum: Values<T>,
    ) -> Result<Shared<T>, GroupError> {
        self.combine.finish(&mut sum);
        self.slices.result(&chunk.range).copy_from_slice(&sum);
        Ok(sum.share())
    }

    fn hand_out(&mut self, _: ChunkId, chunk: &Chunk) -> Result<Shared<T>, GroupError> {
        let mut values = T::pool(&self.link.pools).take(chunk.range.len());
        values.copy_from_slice(self.slices.own(&chunk.range));
        Ok(values.share())
    }

    fn gathered(
        &mut self,
        _: ChunkId,
        chunk: &Chunk,
        values: &Shared<T>,
    ) -> Result<(), GroupError> {
        self.slices.result(&chunk.range).copy_from_slice(values);
        self.gathered += 1;
        Ok(())
    }

    fn send(&mut self, to: Rank, message: Message<T>) -> Result<(), GroupError> {
        let body: Body = T::wrap(Load::Message(message));
        self.link.send(to, body)
    }

    fn done(&mut self, _: Phase, _: BucketId) -> Result<(), GroupError> {
        self.done += 1;
        Ok(())
    }
}
