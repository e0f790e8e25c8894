//! How values of several ranks become one.

use std::fmt;
use std::sync::Arc;

use crate::comm::Element;
use crate::comm::add::add_assign;

/// What a reduction does with the values of all ranks, element by element, in a fixed order.
#[derive(Clone)]
pub enum ReduceOp<T> {
    /// Integers wrap.
    Sum,
    /// `sum(weight[r] * value[r]) / sum(weight[r])`, where each rank gives its own weight; of
    /// floating point numbers only. With a weight of 1 everywhere it is the mean.
    Mean { weight: f64 },
    /// A value that is not a number wins.
    Max,
    /// A value that is not a number wins.
    Min,
    /// The user's own. It should be commutative, and associative but for rounding.
    User(Arc<dyn Fn(T, T) -> T + Send + Sync>),
}

impl<T> ReduceOp<T> {
    /// An operation of the user's own, the same on every rank.
    pub fn user(reducer: impl Fn(T, T) -> T + Send + Sync + 'static) -> Self {
        Self::User(Arc::new(reducer))
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Mean { .. } => "mean",
            Self::Max => "max",
            Self::Min => "min",
            Self::User(_) => "user",
        }
    }
}

impl<T> fmt::Debug for ReduceOp<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `into[i] = reducer(into[i], from[i])`.
fn zip<T: Copy>(into: &mut [T], from: &[T], reducer: impl Fn(T, T) -> T) {
    for (into, from) in into.iter_mut().zip(from) {
        *into = reducer(*into, *from);
    }
}

/// An operation with what all ranks know of it.
pub(super) struct Reducer<'a, T> {
    pub op: &'a ReduceOp<T>,
    /// The weights of all ranks, for a mean.
    pub weights: f64,
}

impl<T: Element> Reducer<'_, T> {
    /// A rank's own values, as they go into a partial result.
    pub fn copy(&self, own: &[T], into: &mut [T]) {
        match self.op {
            ReduceOp::Mean { weight } => zip(into, own, |_, own| own.scale(*weight)),
            _ => into.copy_from_slice(own),
        }
    }

    /// A rank's own values come to a partial result.
    pub fn add_own(&self, partial: &mut [T], own: &[T]) {
        match self.op {
            ReduceOp::Mean { weight } => zip(partial, own, |sum, own| sum.add(own.scale(*weight))),
            _ => self.add(partial, own),
        }
    }

    /// Two partial results become one.
    #[expect(clippy::eq_op, reason = "only what is not a number differs from itself")]
    pub fn add(&self, partial: &mut [T], other: &[T]) {
        match self.op {
            ReduceOp::Sum | ReduceOp::Mean { .. } => add_assign(partial, other),
            ReduceOp::Max => zip(partial, other, |a, b| if a > b || a != a { a } else { b }),
            ReduceOp::Min => zip(partial, other, |a, b| if a < b || a != a { a } else { b }),
            ReduceOp::User(reducer) => zip(partial, other, |a, b| reducer(a, b)),
        }
    }

    /// What has come from all ranks becomes the result.
    pub fn finish(&self, sum: &mut [T]) {
        if let ReduceOp::Mean { .. } = self.op {
            sum.iter_mut().for_each(|sum| *sum = sum.div(self.weights));
        }
    }
}
