//! All gradients of a layer or RMS norm ([`super::layer_norm`]) in one op. On GPUs the kernel that
//! computes `dx` from `x` and `dy` also computes the sums for the parameters
//! ([`super::layer_norm_rows`]).

use super::joint::{self, twin_of};
use super::{layer_norm, layer_norm_rows, row_blocks};
use crate::call_shapes::{C, N, calls};
use crate::cpu_kernel::CpuKernel;
use crate::twin::{Forward, IndependentAxis, normal_inputs};
use crate::{CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Twin, Variant, twin};
use potluck_core::HostTensorView;
use potluck_graph::{Accumulation, NormBackward, Op, Precision};

/// Twin of [`Op::NormBackward`].
pub static TWIN: Twin = Twin {
    name: "norm_backward",
    reference_f32: |call, inputs, outputs| on_host(call, inputs, outputs, |of| of.reference_f32),
    reference_f64: |call, inputs, outputs| on_host(call, inputs, outputs, |of| of.reference_f64),
    fast: |call, inputs, outputs| on_host(call, inputs, outputs, |of| of.fast),
    dispatch,
    variants,
    cost,
    counts_as_model_flops: false,
    iterations,
    inputs: normal_inputs,
    forward,
    independent_axes,
    probes,
    catalog,
};

/// Inputs of the gradients of the parameters: x, stats and dy.
const SUMMED: [usize; 3] = [0, 2, 3];

/// Ops that make up a call: the gradients by the input, and by the parameters.
struct Parts {
    input: Op,
    parameters: Op,
}

impl Parts {
    fn of(op: &Op) -> Self {
        let Op::NormBackward(options) = op else { panic!("{op} has not all gradients of a norm") };
        Self { input: options.input_gradient(), parameters: options.parameter_gradient() }
    }

    fn input_call(&self, call: &OpCall) -> OpCall<'_> {
        OpCall {
            op: &self.input,
            inputs: call.inputs.clone(),
            outputs: vec![call.outputs[0].clone()],
            accumulate: Accumulation::NONE,
            precision: Precision::F32,
            loss_scale: call.loss_scale,
            random: call.random,
        }
    }

    fn parameter_call(&self, call: &OpCall) -> OpCall<'_> {
        let outputs = call.outputs[1..].to_vec();
        let accumulate = Accumulation::all(outputs.len());
        OpCall {
            op: &self.parameters,
            inputs: SUMMED.map(|input| call.inputs[input].clone()).to_vec(),
            outputs,
            accumulate: if call.accumulates() { accumulate } else { Accumulation::NONE },
            precision: Precision::F32,
            loss_scale: call.loss_scale,
            random: call.random,
        }
    }
}

/// Runs the kernels of both parts on the host.
fn on_host<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
    kernel: fn(&Twin) -> CpuKernel<T>,
) {
    let parts = Parts::of(call.op);
    let (dx, gradients) = outputs.split_at_mut(1);
    let part = parts.input_call(call);
    kernel(twin_of(&part))(&part, inputs, dx);
    let part = parts.parameter_call(call);
    kernel(twin_of(&part))(&part, &SUMMED.map(|input| inputs[input]), gradients);
}

/// Static choice: on GPUs both parts in one kernel if rows suit it, else the static choices of the
/// parts.
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    if caps.wants_gpu_variants()
        && let Some(whole) = in_one(call, caps)
    {
        return whole;
    }
    let parts = Parts::of(call.op);
    let part = parts.input_call(call);
    let input = (twin_of(&part).dispatch)(&part, caps);
    joint::dispatch(input, &parts.parameter_call(call), &SUMMED, caps)
}

/// Returns the GPU kernel variants of the gradient by the input, each with the static choice of the
/// other part, and for GPUs the kernel that computes both.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let parts = Parts::of(call.op);
    let part = parts.input_call(call);
    let input = (twin_of(&part).variants)(&part, caps);
    let parameters = parts.parameter_call(call);
    let mut variants = joint::variants(input, &parameters, &SUMMED, caps);
    if caps.wants_gpu_variants()
        && let Some(whole) = in_one(call, caps)
    {
        variants.push(Variant::new("norm_backward_rows", whole));
    }
    variants
}

/// Returns the dispatches that compute both parts: dx with sums over blocks of rows, and the totals
/// of these sums; `None` if rows do not fit in registers, or are too few.
fn in_one(call: &OpCall, caps: &Caps) -> Option<Vec<Dispatch>> {
    let parts = Parts::of(call.op);
    let part = parts.input_call(call);
    let variants = (twin_of(&part).variants)(&part, caps);
    let rows = variants.into_iter().find(|variant| variant.name == "layer_norm_rows")?;
    let [dx] = <[Dispatch; 1]>::try_from(rows.dispatches).ok()?;
    let parameters = parts.parameter_call(call);
    let (_, terms) = layer_norm::terms(&parameters)?;
    let (first, blocks) = layer_norm_rows::with_sums(&part, dx, terms.sums)?;
    let totals = row_blocks::totals(&terms, blocks, call.accumulates());
    Some([vec![first], joint::behind(vec![totals], &SUMMED)].concat())
}

/// Returns the cost: the FLOPs of both parts, with everything moved once.
pub fn cost(call: &OpCall) -> Cost {
    let parts = Parts::of(call.op);
    let flops = flops_of(&parts.input_call(call)) + flops_of(&parts.parameter_call(call));
    Cost { flops, bytes: Cost::moved(call) }
}

fn flops_of(part: &OpCall) -> f64 {
    (twin_of(part).cost)(part).flops
}

/// See [`Twin::iterations`]: the most of both parts.
fn iterations(call: &OpCall) -> usize {
    let parts = Parts::of(call.op);
    let [by_input, by_parameters] = [parts.input_call(call), parts.parameter_call(call)]
        .map(|part| (twin_of(&part).iterations)(&part));
    by_input.max(by_parameters)
}

/// See [`Twin::forward`]: the forward op of the gradient by the input.
fn forward(op: &Op) -> Option<Forward> {
    let root = Parts::of(op).input;
    (twin(root.root_op())?.forward)(root.root_op())
}

/// See [`Twin::independent_axes`]: rows, over which the gradients by the parameters are sums.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    if call.inputs[0].len() < 2 {
        return Vec::new();
    }
    let mut inputs = vec![Some(0); call.inputs.len()];
    // The weight.
    inputs[1] = None;
    let mut outputs = vec![None; call.outputs.len()];
    outputs[0] = Some(0);
    IndependentAxis::of(call, inputs, outputs).into_iter().collect()
}

/// See [`Twin::probes`]: the probes of the gradient by the input, and one of several blocks of
/// rows.
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let root = Parts::of(op).input;
    let c = inputs[0].last().copied().unwrap_or(1);
    // As in layer_norm: with one or two values, the gradient consists of rounding errors.
    let c = if c < 8 { c + 8 } else { c };
    let mut sizes = Vec::new();
    for (_, dims) in layer_norm::probes(root.root_op(), inputs) {
        sizes.push(dims);
    }
    sizes.push(vec![vec![259, c], vec![c], vec![259, 2], vec![259, c]]);
    for dims in &mut sizes {
        // The gradient that is added.
        if inputs.len() > dims.len() {
            dims.push(dims[0].clone());
        }
    }
    calls(op, sizes)
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    let x = vec![8 * N, C];
    let mut calls = Vec::new();
    for [centered, bias, adds] in [[true, true, true], [true, true, false], [false, false, true]] {
        let mut inputs = vec![x.clone(), vec![C], vec![8 * N, 2], x.clone()];
        if adds {
            inputs.push(x.clone());
        }
        calls.push((Op::NormBackward(NormBackward { centered, bias, adds }), inputs));
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::InputFill;
    use crate::testing::check;
    use crate::{DeviceClass, OwnedCall, RandomContext};
    use potluck_core::Shape;
    use potluck_core::rng::Key;

    fn check_rows(options: NormBackward, [rows, c]: [usize; 2]) {
        let x = || (Shape::fixed(&[rows, c]), InputFill::Normal);
        let weight = (Shape::fixed(&[c]), InputFill::Scaled(0.5, 1.0));
        let stats = (Shape::fixed(&[rows, 2]), InputFill::Scaled(0.1, 1.0));
        let mut inputs = vec![x(), weight, stats, x()];
        inputs.extend(options.adds.then(x));
        check(Op::NormBackward(options), &inputs, 1);
    }

    /// One row and several in a workgroup, blocks of equal and of unequal numbers of rows, rows
    /// that are no vectors, and too few for blocks.
    #[test]
    fn both_parts_agree_with_their_references() {
        let layer = NormBackward { centered: true, bias: true, adds: true };
        check_rows(layer, [37, 36]);
        check_rows(layer, [18, 768]);
        check_rows(layer, [30, 33]);
        check_rows(NormBackward { bias: false, ..layer }, [40, 36]);
        let rms = NormBackward { centered: false, bias: false, adds: false };
        check_rows(rms, [40, 1600]);
        check_rows(rms, [5, 36]);
        check_rows(NormBackward { adds: true, ..rms }, [33, 64]);
        check_rows(layer, [37, 300]);
        check_rows(rms, [35, 200]);
        // Rows of a block in several rounds.
        check_rows(layer, [67, 36]);
    }

    /// The gradients of the parameters cost GPUs one dispatch, which adds up blocks.
    #[test]
    fn gradients_of_parameters_cost_one_dispatch() {
        let options = NormBackward { centered: true, bias: true, adds: true };
        let x = vec![8192, 768];
        let inputs = vec![x.clone(), vec![768], vec![8192, 2], x.clone(), x];
        let random = RandomContext { step_key: Key::new(1), training: true };
        let owned = OwnedCall::new(Op::NormBackward(options), inputs, random).unwrap();
        let hardware = Caps { class: DeviceClass::Hardware, ..Caps::EVERY };
        assert_eq!(dispatch(&owned.call(), &hardware).len(), 2);
    }
}
