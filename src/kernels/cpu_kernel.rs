//! Types of CPU kernels and references, of ops and of updates, and the sizes of the tasks in which
//! kernels divide their work between threads.

use super::OpCall;
use potluck_core::HostTensorView;
use potluck_graph::{Update, UpdateRange};

/// A CPU kernel: computes the outputs of a call, which must have the lengths of its output
/// shapes, from its inputs.
pub(crate) type CpuKernel<T> = fn(&OpCall, &[HostTensorView<'_, T>], &mut [&mut [T]]);

/// CPU implementation of an update over the slices of a whole bucket: parameters, gradients,
/// moments.
pub(crate) type UpdateKernel<T> = fn(&Update, &UpdateRange, &mut [T], &[T], &mut [&mut [T]]);

/// Elements of a task of a CPU kernel that does a few operations with each: enough to outweigh the
/// scheduling overhead.
pub(crate) const TASK: usize = 16 * 1024;

/// The same for a kernel that computes an exponential or a random number for each element.
pub(crate) const COSTLY_TASK: usize = 4 * 1024;
