//! What a kernel is told about the node it computes, and the tensors it works on.

use std::fmt::Debug;
use std::iter::Sum;

use crate::base::rng::Key;
use crate::graph::Op;

/// One application of an op with all sizes known.
#[derive(Clone, Debug)]
pub struct OpCall<'a> {
    pub op: &'a Op,
    /// The dimensions of each input, with the rows of this run put in.
    pub inputs: Vec<Vec<usize>>,
    pub outputs: Vec<Vec<usize>>,
    /// Add to what the (only) output holds.
    pub accumulate: bool,
    pub random: RandomContext,
}

/// Where random numbers of a pass come from.
#[derive(Clone, Copy, Debug)]
pub struct RandomContext {
    /// The key of this step; a site's key is derived from it.
    pub step_key: Key,
    /// Whether anything is dropped: false in evaluation and generation.
    pub training: bool,
}

impl OpCall<'_> {
    /// Elements of input `index`.
    pub fn input_len(&self, index: usize) -> usize {
        self.inputs[index].iter().product()
    }

    /// Elements of output `index`.
    pub fn output_len(&self, index: usize) -> usize {
        self.outputs[index].iter().product()
    }

    /// The most iterations that one invocation makes in its loops, of ops whose kernels do not
    /// share long loops out: those of the others stay below
    /// [`super::dispatch::ITERATIONS_MAX`].
    pub fn iterations(&self) -> usize {
        let x = &self.inputs[0];
        match self.op.root_op() {
            // One per term of a sum, and one per row of the largest tile.
            Op::MatMul { transpose_a, .. } => x[x.len() - if *transpose_a { 2 } else { 1 }] + 16,
            // The row in three passes, by blocks of 64.
            Op::LayerNorm { .. } | Op::LayerNormGrad => {
                let c = x[x.len() - 1];
                3 * c + c / 32
            }
            // Keys or queries by fours, with two passes over the parts of a head in each.
            Op::Attention { heads, .. } | Op::AttentionGrad { heads, .. } => {
                let parts = (x[2] / (3 * heads)).div_ceil(4);
                x[1].div_ceil(4) * (2 * parts + 1) + 4 * (parts + 1)
            }
            _ => 0,
        }
    }

    /// The input as a matrix: all leading dimensions in one, and the last.
    pub fn rows_and_last(&self, index: usize) -> (usize, usize) {
        let last = self.inputs[index].last().copied().unwrap_or(1);
        (self.input_len(index) / last.max(1), last)
    }
}

/// An input on the host.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a, T> {
    Float(&'a [T]),
    Int(&'a [u32]),
}

impl<'a, T> Arg<'a, T> {
    /// The floats. The shape rules have checked the type, so another one is a defect.
    pub fn floats(self) -> &'a [T] {
        match self {
            Arg::Float(values) => values,
            Arg::Int(_) => panic!("an integer tensor where the shape rule wants floats"),
        }
    }

    /// The integers.
    pub fn ints(self) -> &'a [u32] {
        match self {
            Arg::Int(values) => values,
            Arg::Float(_) => panic!("a float tensor where the shape rule wants integers"),
        }
    }
}

/// The numbers that references compute in: f32, and f64 for the tests' oracle.
pub trait Float:
    num_traits::Float + num_traits::NumAssign + Sum + Debug + Send + Sync + 'static
{
    fn from_f64(value: f64) -> Self;
    fn to_real(self) -> f64;
    /// The error function.
    fn erf(self) -> Self;
}

impl Float for f32 {
    fn from_f64(value: f64) -> Self {
        value as f32
    }
    fn to_real(self) -> f64 {
        f64::from(self)
    }
    fn erf(self) -> Self {
        libm::erff(self)
    }
}

impl Float for f64 {
    fn from_f64(value: f64) -> Self {
        value
    }
    fn to_real(self) -> f64 {
        self
    }
    fn erf(self) -> Self {
        libm::erf(self)
    }
}

/// What a call costs: the formula, not a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    pub flops: f64,
    /// Bytes read and written, each operand counted once.
    pub bytes: f64,
}

impl Cost {
    /// `flops_per_element` on each element of output 0, all operands moved once.
    pub fn elementwise(call: &OpCall, flops_per_element: f64) -> Self {
        Self { flops: flops_per_element * call.output_len(0) as f64, bytes: Self::moved(call) }
    }

    /// The bytes of all operands.
    pub fn moved(call: &OpCall) -> f64 {
        let inputs: usize = (0..call.inputs.len()).map(|i| call.input_len(i)).sum();
        let outputs: usize = (0..call.outputs.len()).map(|i| call.output_len(i)).sum();
        4.0 * (inputs + outputs) as f64
    }
}
