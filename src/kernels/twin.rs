//! The `Twin` type: all implementations of one op.

use super::{Cost, Dispatch, OpCall, Variant};
use crate::base::HostTensorView;

/// A CPU kernel: computes the outputs of a call, which must have the lengths of its output
/// shapes, from its inputs.
pub type CpuKernel<T> = fn(&OpCall, &[HostTensorView<'_, T>], &mut [&mut [T]]);

/// All implementations of one op: references, CPU kernel, GPU kernel variants and cost.
pub struct Twin {
    pub name: &'static str,
    pub reference_f32: CpuKernel<f32>,
    pub reference_f64: CpuKernel<f64>,
    pub fast: CpuKernel<f32>,
    /// Returns the static choice of GPU dispatches, used for calls without timings.
    pub dispatch: fn(&OpCall) -> Vec<Dispatch>,
    /// Returns all GPU kernel variants of a call. The first is the baseline, which fits every
    /// call.
    pub variants: fn(&OpCall) -> Vec<Variant>,
    pub cost: fn(&OpCall) -> Cost,
}
