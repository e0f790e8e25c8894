//! The type of a twin: everything an op needs to run.

use super::{Arg, Cost, Dispatch, OpCall, Variant};

/// A CPU function: inputs, and outputs of the lengths that the call says.
pub type CpuKernel<T> = fn(&OpCall, &[Arg<'_, T>], &mut [&mut [T]]);

/// Everything an op needs to run.
pub struct Twin {
    pub name: &'static str,
    pub reference_f32: CpuKernel<f32>,
    pub reference_f64: CpuKernel<f64>,
    pub fast: CpuKernel<f32>,
    /// How a call runs where nothing was measured.
    pub dispatch: fn(&OpCall) -> Vec<Dispatch>,
    /// Every way to run it. The first is the plain one, which fits every call.
    pub variants: fn(&OpCall) -> Vec<Variant>,
    pub cost: fn(&OpCall) -> Cost,
}
