//! Types of CPU kernels and references: of ops, and of updates.

use super::OpCall;
use potluck_core::HostTensorView;
use potluck_graph::{Update, UpdateRange};

/// A CPU kernel: computes the outputs of a call, which must have the lengths of its output
/// shapes, from its inputs.
pub(crate) type CpuKernel<T> = fn(&OpCall, &[HostTensorView<'_, T>], &mut [&mut [T]]);

/// CPU implementation of an update over the slices of a whole bucket: parameters, gradients,
/// moments.
pub(crate) type UpdateKernel<T> = fn(&Update, &UpdateRange, &mut [T], &[T], &mut [&mut [T]]);
