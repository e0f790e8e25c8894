//! Reduction operations, which combine the values of several ranks into one.

use std::fmt;
use std::sync::Arc;

use crate::comm::Element;
use crate::comm::add::add_assign;

/// Operation that combines the values of all ranks, element by element, in a fixed order.
#[derive(Clone)]
pub enum ReduceOp<T> {
    /// Sum; integers wrap.
    Sum,
    /// Weighted mean `sum(weight[r] * value[r]) / sum(weight[r])` of floating-point numbers,
    /// where each rank passes its own weight. With a weight of 1 on every rank it is the mean.
    Mean { weight: f64 },
    /// Maximum; a NaN takes precedence.
    Max,
    /// Minimum; a NaN takes precedence.
    Min,
    /// User-defined operation. It should be commutative, and associative except for rounding.
    User(Arc<dyn Fn(T, T) -> T + Send + Sync>),
}

impl<T> ReduceOp<T> {
    /// Creates a user-defined operation, which must be the same on every rank.
    pub fn user(combine: impl Fn(T, T) -> T + Send + Sync + 'static) -> Self {
        Self::User(Arc::new(combine))
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

/// Combines element by element: `into[i] = combine(into[i], from[i])`.
fn zip<T: Copy>(into: &mut [T], from: &[T], combine: impl Fn(T, T) -> T) {
    for (into, from) in into.iter_mut().zip(from) {
        *into = combine(*into, *from);
    }
}

/// Reduction operation with the data that all ranks share.
pub(super) struct Reducer<'a, T> {
    pub op: &'a ReduceOp<T>,
    /// Sum of the weights of all ranks, for a mean.
    pub weights: f64,
}

impl<T: Element> Reducer<'_, T> {
    /// Copies a rank's own values to a new partial result; a mean weights them.
    pub fn copy(&self, own: &[T], into: &mut [T]) {
        match self.op {
            ReduceOp::Mean { weight } => zip(into, own, |_, own| own.scale(*weight)),
            _ => into.copy_from_slice(own),
        }
    }

    /// Combines a rank's own values into a partial result; a mean weights them.
    pub(crate) fn add_own(&self, partial: &mut [T], own: &[T]) {
        match self.op {
            ReduceOp::Mean { weight } => zip(partial, own, |sum, own| sum.add(own.scale(*weight))),
            _ => self.add(partial, own),
        }
    }

    /// Combines another partial result into `partial`.
    #[expect(clippy::eq_op, reason = "only what is not a number differs from itself")]
    pub fn add(&self, partial: &mut [T], other: &[T]) {
        match self.op {
            ReduceOp::Sum | ReduceOp::Mean { .. } => add_assign(partial, other),
            ReduceOp::Max => zip(partial, other, |a, b| if a > b || a != a { a } else { b }),
            ReduceOp::Min => zip(partial, other, |a, b| if a < b || a != a { a } else { b }),
            ReduceOp::User(reducer) => zip(partial, other, |a, b| reducer(a, b)),
        }
    }

    /// Turns the combined values of all ranks into the result: a mean is divided by the sum of
    /// weights.
    pub fn finish(&self, sum: &mut [T]) {
        if let ReduceOp::Mean { .. } = self.op {
            for element in sum {
                *element = element.div(self.weights);
            }
        }
    }
}
