//! Description of an op call, its input tensors on the host, and its analytic cost.

use std::fmt::Debug;
use std::iter::Sum;

use super::{operands, twin};
use potluck_core::TensorId;
use potluck_core::rng::Key;
use potluck_graph::{Accumulation, Graph, Op, Precision};

/// One call of an op with all dimensions resolved.
#[derive(Clone, Debug)]
pub struct OpCall<'a> {
    pub op: &'a Op,
    /// Dimensions of each input, with the rows of this run resolved.
    pub inputs: Vec<Vec<usize>>,
    pub outputs: Vec<Vec<usize>>,
    /// Outputs to whose contents the kernel adds its results.
    pub accumulate: Accumulation,
    /// Arithmetic of an op that multiplies matrices.
    pub precision: Precision,
    /// Factor of the gradient of a loss, a power of two; no other op reads it.
    pub loss_scale: f32,
    pub random: RandomContext,
}

/// Source of the random numbers of one pass.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
pub struct RandomContext {
    /// RNG key of this step, from which the key of each site is derived.
    pub step_key: Key,
    /// True if dropout is active; false in evaluation and generation.
    pub training: bool,
}

impl OpCall<'_> {
    /// Returns the number of elements of input `index`.
    pub fn input_len(&self, index: usize) -> usize {
        self.inputs[index].iter().product()
    }

    /// Returns the number of elements of output `index`.
    pub fn output_len(&self, index: usize) -> usize {
        self.outputs[index].iter().product()
    }

    /// Returns true if the kernel adds to an output; most ops add to all outputs or to none.
    pub fn accumulates(&self) -> bool {
        self.accumulate.any()
    }

    /// Returns an upper bound of the loop iterations of one invocation; see
    /// [`super::Twin::iterations`].
    pub(crate) fn iterations(&self) -> usize {
        match twin(self.op) {
            Some(twin) => (twin.iterations)(self),
            None => 0,
        }
    }

    /// Returns the shape of an input as a matrix: the product of all leading dimensions, and the
    /// last dimension.
    pub(crate) fn rows_and_last(&self, index: usize) -> (usize, usize) {
        let last = self.inputs[index].last().copied().unwrap_or(1);
        (self.input_len(index) / last.max(1), last)
    }
}

/// Dimensions of tensors of a graph with this number of rows.
pub(crate) fn resolved_dims(graph: &Graph, ids: &[TensorId], rows: usize) -> Vec<Vec<usize>> {
    ids.iter().map(|id| graph.tensor(*id).shape.resolve(rows)).collect()
}

/// Floating-point type of the reference implementations: f32, and f64 for the oracle of the tests
/// and of certification.
pub trait Float:
    num_traits::Float + num_traits::NumAssign + Sum + Debug + Send + Sync + 'static
{
    fn from_f64(value: f64) -> Self;
    fn as_f64(self) -> f64;
    /// A value of a device; of f32 the same bits, also of a NaN, which may be words of bf16.
    fn from_f32(value: f32) -> Self;
    fn as_f32(self) -> f32;
    /// The error function.
    fn erf(self) -> Self;
    /// 1 less the error function.
    fn erfc(self) -> Self;
    /// Rounds values to f16, to nearest, ties to even.
    fn round_to_f16(values: &mut [Self]);
}

impl Float for f32 {
    fn from_f64(value: f64) -> Self {
        value as f32
    }
    fn as_f64(self) -> f64 {
        f64::from(self)
    }
    fn from_f32(value: f32) -> Self {
        value
    }
    fn as_f32(self) -> f32 {
        self
    }
    fn erf(self) -> Self {
        libm::erff(self)
    }
    fn erfc(self) -> Self {
        libm::erfcf(self)
    }
    fn round_to_f16(values: &mut [Self]) {
        operands::round_to_f16(values);
    }
}

impl Float for f64 {
    fn from_f64(value: f64) -> Self {
        value
    }
    fn as_f64(self) -> f64 {
        self
    }
    fn from_f32(value: f32) -> Self {
        f64::from(value)
    }
    fn as_f32(self) -> f32 {
        self as f32
    }
    fn erf(self) -> Self {
        libm::erf(self)
    }
    fn erfc(self) -> Self {
        libm::erfc(self)
    }
    /// Values are rounded to f32 first, as they are on a device.
    fn round_to_f16(values: &mut [Self]) {
        for value in values {
            *value = half::f16::from_f32(*value as f32).to_f64();
        }
    }
}

/// Analytic cost of a call, computed from its shapes and not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    pub flops: f64,
    /// Bytes read and written, each operand counted once.
    pub bytes: f64,
}

impl Cost {
    /// Returns the cost of an elementwise op: `flops_per_element` for each element of output 0,
    /// and all operands moved once.
    pub fn elementwise(call: &OpCall, flops_per_element: f64) -> Self {
        Self { flops: flops_per_element * call.output_len(0) as f64, bytes: Self::moved(call) }
    }

    /// Returns the total bytes of all operands.
    pub fn moved(call: &OpCall) -> f64 {
        let inputs: usize = (0..call.inputs.len()).map(|i| call.input_len(i)).sum();
        let outputs: usize = (0..call.outputs.len()).map(|i| call.output_len(i)).sum();
        4.0 * (inputs + outputs) as f64
    }
}
