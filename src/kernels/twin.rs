//! The type of a twin: everything an op needs to run.

use super::{Arg, Call, Cost, Dispatch, Variant};

/// A CPU function: inputs, and outputs of the lengths that the call says.
pub type Host<T> = fn(&Call, &[Arg<'_, T>], &mut [&mut [T]]);

/// Everything an op needs to run.
pub struct Twin {
    pub name: &'static str,
    pub reference_f32: Host<f32>,
    pub reference_f64: Host<f64>,
    pub fast: Host<f32>,
    /// How a call runs where nothing was measured.
    pub dispatch: fn(&Call) -> Vec<Dispatch>,
    /// Every way to run it. The first is the plain one, which fits every call.
    pub variants: fn(&Call) -> Vec<Variant>,
    pub cost: fn(&Call) -> Cost,
}
