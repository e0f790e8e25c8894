//! The types `Twin`, all implementations of one op or of a few related ones, and `UpdateTwin`, all
//! implementations of an update rule, with everything that certification, timing and benchmarks
//! need.

use super::harness::InputFill;
use super::{Caps, Cost, CpuKernel, Dispatch, OpCall, UpdateKernel, Variant, twin};
use potluck_core::arithmetic::gcd;
use potluck_graph::{Op, Update, UpdateRange};

/// Dimensions of a tensor.
pub(crate) type Dims = Vec<usize>;

/// An op and the dimensions of its inputs, which determine a call.
pub(crate) type CallShape = (Op, Vec<Dims>);

/// All implementations of one op or of a few related ones: references, CPU kernel, GPU kernel
/// variants; their cost; and the calls on which the kernels are certified.
pub struct Twin {
    pub name: &'static str,
    pub(crate) reference_f32: CpuKernel<f32>,
    pub(crate) reference_f64: CpuKernel<f64>,
    pub fast: CpuKernel<f32>,
    /// Returns the static choice of GPU dispatches on a device with these capabilities, used for
    /// calls without timings.
    pub dispatch: fn(&OpCall, &Caps) -> Vec<Dispatch>,
    /// Returns the GPU kernel variants of a call that may win on a device with these capabilities.
    /// The first is the baseline, which fits every call and every device.
    pub variants: fn(&OpCall, &Caps) -> Vec<Variant>,
    pub cost: fn(&OpCall) -> Cost,
    /// True if its FLOPs count in the FLOP rate of a training step.
    pub counts_as_model_flops: bool,
    /// Returns an upper bound of the loop iterations of one invocation, if the kernels do not
    /// split long loops between invocations; 0 if all loops stay below
    /// [`super::dispatch::ITERATIONS_MAX`].
    pub(crate) iterations: fn(&OpCall) -> usize,
    /// Returns the specification of the inputs of a call.
    pub inputs: fn(&Op, &[Dims]) -> InputSpec,
    /// Returns the forward op of a gradient that takes some of its outputs as inputs.
    pub forward: fn(&Op) -> Option<Forward>,
    /// Returns axes along which a call falls into independent parts; none if it is not known to.
    pub(crate) independent_axes: fn(&OpCall) -> Vec<IndependentAxis>,
    /// Returns small calls that may run the kernels of a call, the cheapest first, with odd sizes,
    /// so that tiles and loops meet their edges.
    pub probes: fn(&Op, &[Dims]) -> Vec<CallShape>,
    /// Returns one call per op and, if the kernels differ, per attribute; large enough for all
    /// variants.
    pub catalog: fn() -> Vec<CallShape>,
}

impl Twin {
    /// Returns the static choice of a call as a variant: the one with these dispatches, or one with
    /// the name of the twin.
    pub fn static_choice(&self, call: &OpCall, caps: &Caps) -> Variant {
        let chosen = (self.dispatch)(call, caps);
        let variants = (self.variants)(call, caps);
        let named = variants.into_iter().find(|variant| variant.dispatches == chosen);
        named.unwrap_or_else(|| Variant::new(self.name, chosen))
    }
}

/// GPU kernel variants of a call; none if its op has no twin.
pub(crate) fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    match twin(call.op) {
        Some(twin) => (twin.variants)(call, caps),
        None => Vec::new(),
    }
}

/// All implementations of one update rule, their cost, and the updates on which the kernels are
/// certified.
pub struct UpdateTwin {
    pub name: &'static str,
    pub(crate) reference_f32: UpdateKernel<f32>,
    pub reference_f64: UpdateKernel<f64>,
    pub fast: UpdateKernel<f32>,
    pub dispatch: fn(&Update, &UpdateRange) -> Dispatch,
    /// Returns the FLOPs per element by the formulas in [`Update`]; a square root and a division
    /// count as one each.
    pub flops: fn(&Update) -> f64,
    /// Returns the update on which the kernel of an update is certified, with hyperparameters that
    /// move every value a long way: after a small step, only rounding would be visible.
    pub probe: fn(&Update) -> Update,
    /// Returns one update per kernel.
    pub catalog: fn() -> Vec<Update>,
}

/// Specification of the inputs of a call.
#[derive(Clone, Debug)]
pub struct InputSpec {
    /// Distribution of the values of each input.
    pub fills: Vec<InputFill>,
    /// Number of samples in the batch, if the shape rule requires batched tensors.
    pub samples: Option<usize>,
    /// An input that is not batched although the others are.
    pub unbatched: Option<usize>,
}

impl InputSpec {
    /// Returns the specification of inputs of normally distributed floats.
    pub fn normal(inputs: &[Dims]) -> Self {
        let fills = vec![InputFill::Normal; inputs.len()];
        Self { fills, samples: None, unbatched: None }
    }

    /// Returns this specification with another distribution of one input.
    pub fn with(mut self, index: usize, fill: InputFill) -> Self {
        self.fills[index] = fill;
        self
    }
}

/// Forward op of a gradient op that takes some of its outputs as inputs.
pub struct Forward {
    pub op: Op,
    /// Indices of the gradient's inputs that are the inputs of the forward op.
    pub inputs: Vec<usize>,
    /// Indices of the forward op's outputs, each with the index of the same tensor among the
    /// gradient's inputs.
    pub outputs: Vec<(usize, usize)>,
}

/// An axis of tensors of a call along which it falls into parts: a part of its outputs depends only
/// on the same part of its inputs, and on all of the tensors that lack the axis. With several such
/// axes, this holds for each of them. They correspond to `in_axes` and `out_axes` of `vmap` in JAX.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct IndependentAxis {
    /// Parts, which divide the length of the axis in every tensor that has it.
    pub parts: usize,
    /// Axis of each input.
    pub inputs: Vec<Option<usize>>,
    /// Axis of each output. An output without it is a sum over the parts.
    pub outputs: Vec<Option<usize>>,
}

impl IndependentAxis {
    /// Returns the axis of a call with as many parts as its tensors allow; `None` if a tensor has
    /// fewer dimensions.
    pub fn of(
        call: &OpCall,
        inputs: Vec<Option<usize>>,
        outputs: Vec<Option<usize>>,
    ) -> Option<Self> {
        let mut parts = 0;
        let sides = [(&call.inputs, &inputs), (&call.outputs, &outputs)];
        for (dims, axes) in sides {
            for (dims, axis) in dims.iter().zip(axes) {
                if let Some(axis) = *axis {
                    parts = gcd(parts, *dims.get(axis)?);
                }
            }
        }
        if parts == 0 {
            return None;
        }
        Some(Self { parts, inputs, outputs })
    }

    /// Returns the first axis of all tensors of a call, except the inputs `whole`, as the only
    /// independent axis.
    pub fn leading(call: &OpCall, whole: &[usize]) -> Vec<Self> {
        let mut inputs = Vec::with_capacity(call.inputs.len());
        for input in 0..call.inputs.len() {
            inputs.push(if whole.contains(&input) { None } else { Some(0) });
        }
        Self::of(call, inputs, vec![Some(0); call.outputs.len()]).into_iter().collect()
    }
}

/// [`Twin::independent_axes`] of ops that compute all tensors along their first axis.
pub(crate) fn leading_axis(call: &OpCall) -> Vec<IndependentAxis> {
    IndependentAxis::leading(call, &[])
}

/// [`Twin::independent_axes`] of ops that are not known to fall into parts.
pub(crate) fn no_axes(_: &OpCall) -> Vec<IndependentAxis> {
    Vec::new()
}

/// [`Twin::inputs`] of ops whose inputs are all floats.
pub(crate) fn normal_inputs(_: &Op, inputs: &[Dims]) -> InputSpec {
    InputSpec::normal(inputs)
}

/// [`Twin::forward`] of ops that take no outputs of another op.
pub(crate) fn no_forward(_: &Op) -> Option<Forward> {
    None
}

/// [`Twin::iterations`] of ops whose kernels split long loops between invocations.
pub(crate) fn short_loops(_: &OpCall) -> usize {
    0
}
