//! Cross-entropy of the logits of a linear layer, and its gradient, in chunks of rows: the loss
//! reads the logits of a chunk, their gradient replaces them, and the products with the weight and
//! the input read the gradient. Composed of the kernels of [`matmul`] and [`cross_entropy`], on the
//! host and on GPUs.

use std::ops::Range;

use super::matmul::split_k::{CACHED_TERMS_MIN, OF_REGISTERS, SPLIT_TERMS_MIN};
use super::matmul::tile::TILES;
use super::{cross_entropy, matmul};
use crate::call_shapes::N;
use crate::dispatch::TensorPart;
use crate::harness::InputFill;
use crate::twin::{Forward, IndependentAxis};
use crate::{
    CallShape, Caps, Cost, CpuKernel, Dims, Dispatch, Float, InputSpec, OpCall, Operand, Twin,
    Variant,
};
use potluck_core::{DType, HostTensorView};
use potluck_graph::{Accumulation, LossClasses, Op};

/// Twin of [`Op::LinearCrossEntropy`], its gradient, and both at once.
pub static TWIN: Twin = Twin {
    name: "linear_cross_entropy",
    reference_f32: |call, inputs, outputs| run(call, inputs, outputs, &reference::<f32>()),
    reference_f64: |call, inputs, outputs| run(call, inputs, outputs, &reference::<f64>()),
    fast: |call, inputs, outputs| run(call, inputs, outputs, &FAST),
    dispatch,
    variants,
    cost,
    counts_as_model_flops: true,
    iterations,
    inputs,
    forward,
    independent_axes,
    probes,
    catalog,
};

/// Chunks on GPUs begin at multiples of this many rows, so that parts of every tensor can be bound.
const ROWS_UNIT: usize = 64;

/// CPU kernels that make up an op.
struct Kernels<T> {
    product: CpuKernel<T>,
    loss: CpuKernel<T>,
    /// Replaces logits by their gradient, given the call, the targets and `lse` of the rows.
    gradient: fn(&OpCall, &mut [T], &[u32], &[T]),
}

const FAST: Kernels<f32> = Kernels {
    product: matmul::fast,
    loss: cross_entropy::fast,
    gradient: cross_entropy::fast_in_place,
};

fn reference<T: Float>() -> Kernels<T> {
    Kernels {
        product: matmul::reference,
        loss: cross_entropy::reference,
        gradient: cross_entropy::reference_in_place,
    }
}

/// Rows of a chunk and classes of an op; `None` of another op.
fn chunks_of(op: &Op) -> Option<(usize, LossClasses)> {
    match *op {
        Op::LinearCrossEntropy { rows, classes }
        | Op::LinearCrossEntropyGrad { rows, classes, .. }
        | Op::LinearCrossEntropyPass { rows, classes, .. } => Some((rows, classes)),
        _ => None,
    }
}

/// Dimensions and classes of a call.
#[derive(Clone, Copy)]
struct LinearSizes {
    n: usize,
    c: usize,
    v: usize,
    /// Rows of a chunk.
    rows: usize,
    classes: LossClasses,
}

impl LinearSizes {
    fn of(call: &OpCall) -> Self {
        let [x, weight] = [&call.inputs[0][..], &call.inputs[1][..]];
        let (&[n, c], &[v, _]) = (x, weight) else {
            panic!("{}: x is (n, c), weight (v, c)", call.op);
        };
        let Some((rows, classes)) = chunks_of(call.op) else {
            panic!("{} is no linear cross-entropy", call.op);
        };
        // A larger chunk would only take more memory.
        Self { n, c, v, rows: rows.min(n), classes }
    }

    /// Returns the sizes of a call on a GPU. Its chunks begin where tensors can be bound, and the
    /// logits of a chunk fit into a binding, unless the logits of [`ROWS_UNIT`] rows do not.
    fn on_gpu(call: &OpCall, caps: &Caps) -> Self {
        let sizes = Self::of(call);
        let wanted = sizes.rows.next_multiple_of(ROWS_UNIT);
        let row = (sizes.v * DType::F32.bytes()) as u64;
        let most = usize::try_from(caps.binding_bytes / row.max(1)).unwrap_or(usize::MAX);
        let most = (most / ROWS_UNIT).max(1).saturating_mul(ROWS_UNIT);
        Self { rows: wanted.min(most).min(sizes.n), ..sizes }
    }

    fn chunks(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.n).step_by(self.rows).map(move |start| start..self.n.min(start + self.rows))
    }

    fn logits_bytes(&self) -> usize {
        self.rows * self.v * DType::F32.bytes()
    }
}

/// Steps of a chunk, with the outputs of the op that they write.
struct ChunkSteps {
    /// Outputs of the loss: `parts` and `lse`.
    loss: Option<[usize; 2]>,
    /// True to compute the gradients: output 0, and the one of the weight.
    gradient: bool,
    dweight: Option<usize>,
}

impl ChunkSteps {
    fn of(op: &Op) -> Self {
        let loss = match op {
            Op::LinearCrossEntropy { .. } => Some([0, 1]),
            Op::LinearCrossEntropyPass { .. } => Some([1, 2]),
            _ => None,
        };
        let accumulates = op.accumulates();
        let dweight = (0..=3).find(|output| accumulates.has(*output));
        Self { loss, gradient: !matches!(op, Op::LinearCrossEntropy { .. }), dweight }
    }
}

/// Call of a product of a chunk, given the dimensions of its matrices.
fn product_call<'a>(
    call: &OpCall,
    op: &'a Op,
    inputs: [[usize; 2]; 2],
    output: [usize; 2],
) -> OpCall<'a> {
    OpCall {
        op,
        inputs: inputs.map(Vec::from).to_vec(),
        outputs: vec![output.to_vec()],
        accumulate: Accumulation::NONE,
        precision: call.precision,
        loss_scale: call.loss_scale,
        random: call.random,
    }
}

const LOGITS: Op = Op::MatMul { transpose_a: false, transpose_b: true };
const INPUT_GRADIENT: Op = Op::MatMul { transpose_a: false, transpose_b: false };
const WEIGHT_GRADIENT: Op = Op::MatMul { transpose_a: true, transpose_b: false };

/// Calls that make up a chunk.
struct ChunkCalls<'a> {
    logits: OpCall<'a>,
    loss: OpCall<'a>,
    gradient: OpCall<'a>,
    dx: OpCall<'a>,
    dweight: OpCall<'a>,
}

/// Ops of the losses of a call.
struct LossOps {
    loss: Op,
    gradient: Op,
}

impl LossOps {
    fn of(sizes: &LinearSizes) -> Self {
        let classes = sizes.classes;
        Self { loss: Op::CrossEntropy(classes), gradient: Op::CrossEntropyGrad(classes) }
    }
}

impl<'a> ChunkCalls<'a> {
    fn of(call: &OpCall, ops: &'a LossOps, chunk: &Range<usize>) -> Self {
        let LinearSizes { c, v, .. } = LinearSizes::of(call);
        let r = chunk.len();
        let logits = product_call(call, &LOGITS, [[r, c], [v, c]], [r, v]);
        let loss = OpCall {
            op: &ops.loss,
            inputs: vec![vec![r, v], vec![r]],
            outputs: vec![vec![r, 2], vec![r]],
            ..logits.clone()
        };
        let gradient = OpCall {
            op: &ops.gradient,
            inputs: vec![vec![r, v], vec![r], vec![r]],
            ..logits.clone()
        };
        let dx = product_call(call, &INPUT_GRADIENT, [[r, v], [v, c]], [r, c]);
        let mut dweight = product_call(call, &WEIGHT_GRADIENT, [[r, v], [r, c]], [v, c]);
        let output = ChunkSteps::of(call.op).dweight;
        if chunk.start > 0 || output.is_some_and(|output| call.accumulate.has(output)) {
            dweight.accumulate = Accumulation::all(1);
        }
        Self { logits, loss, gradient, dx, dweight }
    }
}

/// Returns the bytes that the logits of a chunk and its largest product take on the host; 0 for
/// another op.
pub(crate) fn host_bytes(call: &OpCall) -> usize {
    if chunks_of(call.op).is_none() {
        return 0;
    }
    let sizes = LinearSizes::of(call);
    let steps = ChunkSteps::of(call.op);
    let ops = LossOps::of(&sizes);
    let ChunkCalls { logits, dx, dweight, .. } = ChunkCalls::of(call, &ops, &(0..sizes.rows));
    let mut packed = matmul::host_bytes(&logits);
    if steps.gradient {
        packed = packed.max(matmul::host_bytes(&dx));
    }
    if steps.dweight.is_some() {
        packed = packed.max(matmul::host_bytes(&dweight));
    }
    sizes.logits_bytes().saturating_add(packed)
}

/// Computes a call on the host: `x, weight, targets [, lse]` to the outputs of the op.
fn run<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
    kernels: &Kernels<T>,
) {
    let sizes = LinearSizes::of(call);
    let ops = LossOps::of(&sizes);
    let steps = ChunkSteps::of(call.op);
    let x = inputs[0].floats();
    let weight = inputs[1];
    let targets = inputs[2].ints();
    let mut logits = vec![T::zero(); sizes.rows * sizes.v];
    for chunk in sizes.chunks() {
        let calls = ChunkCalls::of(call, &ops, &chunk);
        let rows = HostTensorView::Float(&x[chunk.start * sizes.c..chunk.end * sizes.c]);
        let logits = &mut logits[..chunk.len() * sizes.v];
        (kernels.product)(&calls.logits, &[rows, weight], &mut [logits]);
        let targets = &targets[chunk.clone()];
        if let Some([parts, lse]) = steps.loss {
            let [parts, lse] = outputs
                .get_disjoint_mut([parts, lse])
                .unwrap_or_else(|error| unreachable!("the op has both outputs: {error}"));
            let parts = &mut parts[2 * chunk.start..2 * chunk.end];
            let given = [HostTensorView::Float(&*logits), HostTensorView::Int(targets)];
            (kernels.loss)(&calls.loss, &given, &mut [parts, &mut lse[chunk.clone()]]);
        }
        if !steps.gradient {
            continue;
        }
        let lse = match steps.loss {
            Some([_, lse]) => &outputs[lse][chunk.clone()],
            None => &inputs[3].floats()[chunk.clone()],
        };
        (kernels.gradient)(&calls.gradient, logits, targets, lse);
        let slopes = HostTensorView::Float(&*logits);
        let dx = &mut outputs[0][chunk.start * sizes.c..chunk.end * sizes.c];
        (kernels.product)(&calls.dx, &[slopes, weight], &mut [dx]);
        if let Some(dweight) = steps.dweight {
            (kernels.product)(&calls.dweight, &[slopes, rows], &mut [&mut *outputs[dweight]]);
        }
    }
}

/// Static choice: for all products the kernel that is the static choice of the product of the
/// logits, or else the baseline.
fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let sizes = LinearSizes::on_gpu(call, caps);
    let ops = LossOps::of(&sizes);
    let whole = ChunkCalls::of(call, &ops, &(0..sizes.rows));
    let chosen = matmul::dispatch(&whole.logits, caps);
    let mut known = matmul::variants(&whole.logits, caps).into_iter();
    if let Some(variant) = known.find(|variant| variant.dispatches == chosen) {
        // `composed` decides which sums are split.
        let name = match variant.name.as_str() {
            OF_REGISTERS => TILES[0].name,
            name => name.strip_suffix(SPLIT).unwrap_or(name),
        };
        if let Some(dispatches) = composed(call, caps, name) {
            return dispatches;
        }
    }
    plain(call, caps)
}

/// Returns all GPU kernel variants of the call: one for each kernel that all of its products may
/// have.
fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let sizes = LinearSizes::on_gpu(call, caps);
    let ops = LossOps::of(&sizes);
    let whole = ChunkCalls::of(call, &ops, &(0..sizes.rows));
    let mut variants = vec![Variant::new("linear_naive", plain(call, caps))];
    for product in matmul::variants(&whole.logits, caps).into_iter().skip(1) {
        if product.name.ends_with(SPLIT) {
            continue;
        }
        if let Some(dispatches) = composed(call, caps, &product.name) {
            let name = product.name.replace("matmul", "linear");
            variants.push(Variant::new(name, dispatches));
        }
    }
    variants
}

/// Dispatches with the baselines of all products and of the gradient of the logits.
fn plain(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let product = |product: &OpCall| {
        let baseline = matmul::variants(product, caps).swap_remove(0);
        Some(baseline.dispatches)
    };
    dispatches(call, caps, &product, true).unwrap_or_default()
}

/// Ending of the names of kernels that split sums.
const SPLIT: &str = "_split_k";

/// Dispatches with the kernel of this name for all products of whole chunks; `None` if a product
/// does not have it. Products of the remaining rows, which may be too few for it, have the baseline
/// then. Long sums are split: on software adapters for the largest tile, on GPUs the sums over
/// classes, which have too few outputs for all cores. Without it, the op took 32 % of a step of
/// GPT-2 124M with 8 x 1,024 tokens on an H100, at 0.63 of the rate of its other products.
fn composed(call: &OpCall, caps: &Caps, name: &str) -> Option<Vec<Dispatch>> {
    let rows = LinearSizes::on_gpu(call, caps).rows;
    let product = |product: &OpCall| {
        let all = matmul::variants(product, caps);
        let is_rest = product.inputs[0][0] != rows && call.inputs[0][0] > rows;
        let named = |name: &str| all.iter().find(|variant| variant.name == name);
        let mut chosen = None;
        if is_rest {
            chosen = named(name).or(all.first());
        } else {
            if name == TILES[0].name {
                chosen = named(OF_REGISTERS);
            } else if *product.op == INPUT_GRADIENT {
                chosen = named(&format!("{name}{SPLIT}"));
            }
            chosen = chosen.or_else(|| named(name));
        }
        chosen.map(|variant| variant.dispatches.clone())
    };
    dispatches(call, caps, &product, false)
}

/// Returns the dispatches of all chunks; `product` returns the dispatches of each product; `None`
/// if it returns `None` for one.
fn dispatches(
    call: &OpCall,
    caps: &Caps,
    product: &dyn Fn(&OpCall) -> Option<Vec<Dispatch>>,
    is_plain: bool,
) -> Option<Vec<Dispatch>> {
    let sizes = LinearSizes::on_gpu(call, caps);
    let ops = LossOps::of(&sizes);
    let steps = ChunkSteps::of(call.op);
    let bytes = sizes.logits_bytes();
    let [written, read] = [true, false].map(|is_writable| Operand::Scratch { bytes, is_writable });
    let mut all = Vec::new();
    for chunk in sizes.chunks() {
        let calls = ChunkCalls::of(call, &ops, &chunk);
        let rows_of = |tensor, columns: usize| {
            let row = columns * DType::F32.bytes();
            TensorPart { tensor, first: chunk.start * row, bytes: sizes.rows * row }
        };
        let x = Operand::InputPart(rows_of(0, sizes.c));
        let targets = Operand::InputPart(rows_of(2, 1));
        let weight = Operand::Input(1);
        all.extend(bound(product(&calls.logits)?, &[x, weight], &[written]));
        if let Some([parts, lse]) = steps.loss {
            let outputs = [rows_of(parts, 2), rows_of(lse, 1)].map(Operand::OutputPart);
            // `EVERY` selects workgroups for all but the shortest rows, so that the kernel which is
            // certified with a few classes also runs with many.
            let loss = cross_entropy::dispatch(&calls.loss, &Caps::EVERY);
            all.extend(bound(loss, &[read, targets], &outputs));
        }
        if !steps.gradient {
            continue;
        }
        let lse = match steps.loss {
            Some([_, lse]) => Operand::WrittenPart(rows_of(lse, 1)),
            None => Operand::InputPart(rows_of(3, 1)),
        };
        let mut gradient = cross_entropy::in_place(&calls.gradient, is_plain);
        gradient.operands = vec![written, targets, lse];
        all.push(gradient);
        let dx = Operand::OutputPart(rows_of(0, sizes.c));
        all.extend(bound(product(&calls.dx)?, &[read, weight], &[dx]));
        if let Some(dweight) = steps.dweight {
            all.extend(bound(product(&calls.dweight)?, &[read, x], &[Operand::Output(dweight)]));
        }
    }
    Some(all)
}

/// Dispatches of a part with its tensors bound to these operands.
fn bound(mut dispatches: Vec<Dispatch>, inputs: &[Operand], outputs: &[Operand]) -> Vec<Dispatch> {
    for dispatch in &mut dispatches {
        for operand in &mut dispatch.operands {
            match *operand {
                Operand::Input(index) => *operand = inputs[index],
                Operand::Output(index) => *operand = outputs[index],
                _ => {}
            }
        }
    }
    dispatches
}

/// Returns the cost: one product for the logits, one for the gradient by the input and one for the
/// gradient by the weight, and the loss.
fn cost(call: &OpCall) -> Cost {
    let LinearSizes { n, c, v, .. } = LinearSizes::of(call);
    let ChunkSteps { loss, gradient, dweight } = ChunkSteps::of(call.op);
    let products = 1 + usize::from(gradient) + usize::from(dweight.is_some());
    let passes = usize::from(loss.is_some()) + usize::from(gradient);
    let of_logit = (2 * c * products + 12 * passes) as f64;
    Cost { flops: n as f64 * v as f64 * of_logit, bytes: Cost::moved(call) }
}

/// See [`Twin::iterations`]: the iterations of the longest sum.
fn iterations(call: &OpCall) -> usize {
    let sizes = LinearSizes::on_gpu(call, &Caps::EVERY);
    let ops = LossOps::of(&sizes);
    let ChunkCalls { logits, dx, dweight, .. } = ChunkCalls::of(call, &ops, &(0..sizes.rows));
    let steps = ChunkSteps::of(call.op);
    let mut most = matmul::iterations(&logits);
    if steps.gradient {
        most = most.max(matmul::iterations(&dx));
    }
    if steps.dweight.is_some() {
        most = most.max(matmul::iterations(&dweight));
    }
    most
}

/// See [`Twin::inputs`].
fn inputs(op: &Op, inputs: &[Dims]) -> InputSpec {
    let classes = match chunks_of(op) {
        Some((_, classes)) => classes.all,
        None => inputs[1][0],
    };
    InputSpec::normal(inputs).with(2, InputFill::Targets(classes as u32))
}

/// See [`Twin::forward`].
fn forward(op: &Op) -> Option<Forward> {
    let &Op::LinearCrossEntropyGrad { rows, classes, .. } = op else { return None };
    let op = Op::LinearCrossEntropy { rows, classes };
    Some(Forward { op, inputs: vec![0, 1, 2], outputs: vec![(1, 3)] })
}

/// See [`Twin::independent_axes`]: rows.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    let mut inputs = vec![Some(0); call.inputs.len()];
    // The weight.
    inputs[1] = None;
    let mut outputs = vec![Some(0); call.outputs.len()];
    if let Op::LinearCrossEntropyGrad { by_weight: true, .. }
    | Op::LinearCrossEntropyPass { by_weight: true, .. } = call.op
    {
        // The gradient by the weight, which is the last one, is a sum over rows.
        outputs[call.outputs.len() - 1] = None;
    }
    IndependentAxis::of(call, inputs, outputs).into_iter().collect()
}

/// See [`Twin::probes`]: the sizes of the call, or similar ones where they are larger than the
/// largest tile, in chunks like the call's. A binding may make chunks smaller than the op's, so
/// there are probes of one chunk, of two, and of one with every kind of rest.
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let [x, weight] = [&inputs[0][..], &inputs[1][..]];
    let (&[n, c], &[v, _]) = (x, weight) else { return Vec::new() };
    let near = matmul::probes::near;
    let c_near = near(c, ABOVE_TILES);
    let v_near = near(v, MANY_CLASSES);
    let mut sizes = vec![[c_near, v_near]];
    // Long sums are split, on GPUs the sums over the classes.
    let c_long = if c < CACHED_TERMS_MIN { c_near } else { near(c, CACHED_TERMS_MIN + 7) };
    let v_long = if v < CACHED_TERMS_MIN { v_near } else { near(v, CACHED_TERMS_MIN + 7) };
    let v_parts = if v < SPLIT_TERMS_MIN { v_near } else { near(v, SPLIT_TERMS_MIN + 7) };
    for long in [[c_near, v_parts], [c_near, v_long], [c_long, v_near], [c_long, v_long]] {
        if long != [c_near, v_near] {
            sizes.push(long);
        }
    }

    let chunks = chunks_like(n);
    let mut probes = Vec::new();
    for [c, v] in sizes {
        for &[rows, n] in &chunks {
            let dims = [vec![vec![n, c], vec![v, c]], vec![vec![n]; inputs.len() - 2]].concat();
            probes.push((resized(op, rows, v), dims));
        }
    }
    probes
}

/// Returns an op with these rows of a chunk, for `v` classes.
fn resized(op: &Op, rows: usize, v: usize) -> Op {
    let mut op = op.clone();
    if let Op::LinearCrossEntropy { rows: of_chunk, classes }
    | Op::LinearCrossEntropyGrad { rows: of_chunk, classes, .. }
    | Op::LinearCrossEntropyPass { rows: of_chunk, classes, .. } = &mut op
    {
        *of_chunk = rows;
        // As many classes behind the own ones as before them.
        classes.all = classes.first + v + classes.first;
    }
    op
}

/// A few rows or columns more than the largest tile has.
const ABOVE_TILES: usize = 131;

/// A few classes more than a workgroup has invocations.
const MANY_CLASSES: usize = 261;

/// Returns pairs of the rows of a chunk and of all rows, the fewest first, for a call of `n` rows
/// in chunks that begin at multiples of [`ROWS_UNIT`].
fn chunks_like(n: usize) -> Vec<[usize; 2]> {
    let all = matmul::probes::near(n, ABOVE_TILES);
    let mut chunks = vec![[all.next_multiple_of(ROWS_UNIT), all]];
    for rows in [ROWS_UNIT, ABOVE_TILES.next_multiple_of(ROWS_UNIT)] {
        for rest in (n % ROWS_UNIT..rows).step_by(ROWS_UNIT) {
            if rest > 0 {
                chunks.push([rows, rows + rest]);
            }
        }
        chunks.push([rows, 2 * rows]);
    }
    chunks
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    let c = 36;
    let rows = ROWS_UNIT;
    let mut calls = Vec::new();
    for v in [67, 260] {
        let given = vec![vec![N, c], vec![v, c], vec![N]];
        let with_lse = [given.clone(), vec![vec![N]]].concat();
        let classes = LossClasses::whole(v);
        calls.push((Op::LinearCrossEntropy { rows, classes }, given.clone()));
        for by_weight in [true, false] {
            let pass = Op::LinearCrossEntropyPass { rows, classes, by_weight };
            calls.push((pass, given.clone()));
            let gradient = Op::LinearCrossEntropyGrad { rows, classes, by_weight };
            calls.push((gradient, with_lse.clone()));
        }
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::scratch_bytes;
    use crate::harness::generate;
    use crate::testing::{check_loss_scale, check_mixed_with, check_with, reference as expected};
    use crate::{DeviceClass, OwnedCall, RandomContext};
    use potluck_core::rng::Key;
    use potluck_core::{HostTensor, Shape};
    use potluck_graph::IGNORE_INDEX;

    type Input = (Shape, HostTensor<f64>);

    /// `x, weight, targets`; some targets are ignored.
    fn given(n: usize, c: usize, v: usize) -> Vec<Input> {
        let HostTensor::Int(mut targets) = generate(InputFill::Targets(v as u32), n, 2) else {
            panic!("targets are integers")
        };
        targets.iter_mut().skip(2).step_by(5).for_each(|target| *target = IGNORE_INDEX);
        vec![
            (Shape::batched(&[n, c]), generate(InputFill::Normal, n * c, 0)),
            (Shape::fixed(&[v, c]), generate(InputFill::Normal, v * c, 1)),
            (Shape::batched(&[n]), HostTensor::Int(targets)),
        ]
    }

    /// There are more chunks where a binding is smaller than the logits of a chunk.
    #[test]
    fn logits_of_a_chunk_fit_a_binding() {
        let classes = LossClasses::whole(300);
        let op = Op::LinearCrossEntropyPass { rows: 1000, classes, by_weight: true };
        let inputs = vec![vec![3000, 8], vec![300, 8], vec![3000]];
        let random = RandomContext { step_key: Key::new(0), training: true };
        let owned = OwnedCall::new(op, inputs, random).unwrap();
        let call = owned.call();
        let rows = |binding_bytes| {
            let caps = Caps { binding_bytes, ..Caps::EVERY };
            for dispatches in variants(&call, &caps).into_iter().map(|one| one.dispatches) {
                let most = scratch_bytes(&dispatches) as u64;
                assert!(most <= binding_bytes || binding_bytes == 1000, "{most}");
            }
            LinearSizes::on_gpu(&call, &caps).rows
        };
        assert_eq!([u64::MAX, 200 * 1200, 1000].map(rows), [1024, 192, 64]);
    }

    /// Also where the logits are long sums, which would be split alone.
    #[test]
    fn products_of_wide_models_have_tiles() {
        let class = DeviceClass::Software;
        let caps = Caps { class, ..Caps::EVERY };
        let classes = LossClasses::whole(64);
        let op = Op::LinearCrossEntropyPass { rows: 1024, classes, by_weight: true };
        let inputs = vec![vec![256, 2048], vec![64, 2048], vec![256]];
        let random = RandomContext { step_key: Key::new(0), training: true };
        let owned = OwnedCall::new(op, inputs, random).unwrap();
        let chosen = dispatch(&owned.call(), &caps);
        let mut names = variants(&owned.call(), &caps).into_iter();
        let found = names.find(|variant| variant.dispatches == chosen).unwrap();
        assert_eq!(found.name, "linear_tile_16x16");
        assert!(names.all(|variant| variant.dispatches != chosen));
    }

    /// Sums over many classes have few outputs: of GPT-2, 48 tiles for a card of 132 cores.
    #[test]
    fn sums_over_the_classes_are_split_on_gpus() {
        let caps = Caps { class: DeviceClass::Hardware, ..Caps::EVERY };
        let random = RandomContext { step_key: Key::new(0), training: true };
        let of = |v: usize| {
            let classes = LossClasses::whole(v);
            let op = Op::LinearCrossEntropyPass { rows: 1024, classes, by_weight: true };
            let inputs = vec![vec![2048, 768], vec![v, 768], vec![2048]];
            let owned = OwnedCall::new(op, inputs, random).unwrap();
            let call = owned.call();
            let chosen = dispatch(&call, &caps);
            let known = variants(&call, &caps).into_iter();
            let names: Vec<String> = known
                .filter(|variant| variant.dispatches == chosen)
                .map(|variant| variant.name)
                .collect();
            let is_split = |dispatch: &&Dispatch| dispatch.shader.file == "matmul_split_k";
            (names, chosen.iter().filter(is_split).count())
        };
        let tile = vec!["linear_shared_128x128".to_string()];
        assert_eq!([50_257, 1000].map(of), [(tile.clone(), 2), (tile, 0)]);
    }

    #[test]
    fn chunks_of_every_kind_agree() {
        let sizes = [
            (3, 5, 7, 64),
            (130, 8, 20, 64),
            (67, 7, 261, 1),
            (64, 12, 300, 64),
            // Tiles whose sums over the classes are split, and a rest.
            (66, 64, 1027, 64),
        ];
        for (n, c, v, rows) in sizes {
            let given = given(n, c, v);
            let classes = LossClasses { smoothing: 0.1, ..LossClasses::whole(v) };
            let loss = Op::LinearCrossEntropy { rows, classes };
            check_with(loss.clone(), &given, 1);
            let lse = expected(&loss, &given, 1).swap_remove(1);
            let lse = (Shape::batched(&[n]), HostTensor::Float(lse));
            let with_lse = [given.clone(), vec![lse]].concat();
            for by_weight in [true, false] {
                check_with(Op::LinearCrossEntropyPass { rows, classes, by_weight }, &given, 1);
                check_with(Op::LinearCrossEntropyGrad { rows, classes, by_weight }, &with_lse, 1);
            }
        }
    }

    /// The gradient of the logits is rounded as well.
    #[test]
    fn products_of_a_chunk_are_in_mixed_precision() {
        let given = given(67, 12, 261);
        let classes = LossClasses::whole(261);
        // Of rounded gradients of logits.
        let nmse_max = 5e-8;
        check_mixed_with(&Op::LinearCrossEntropy { rows: 64, classes }, &given, 1, nmse_max);
        let pass = Op::LinearCrossEntropyPass { rows: 64, classes, by_weight: true };
        check_mixed_with(&pass, &given, 1, nmse_max);
    }

    #[test]
    fn the_loss_scale_multiplies_gradients() {
        for (n, c, v) in [(67, 5, 7), (66, 64, 260)] {
            let given = given(n, c, v);
            let (rows, classes) = (64, LossClasses::whole(v));
            let lse = expected(&Op::LinearCrossEntropy { rows, classes }, &given, 1).swap_remove(1);
            let lse = (Shape::batched(&[n]), HostTensor::Float(lse));
            let with_lse = [given.clone(), vec![lse]].concat();
            let pass = Op::LinearCrossEntropyPass { rows, classes, by_weight: true };
            check_loss_scale(&pass, &given, 1, &[0, 3]);
            let gradient = Op::LinearCrossEntropyGrad { rows, classes, by_weight: true };
            check_loss_scale(&gradient, &with_lse, 1, &[0, 1]);
        }
    }

    /// The op is the product, the cross-entropy and their gradients, whatever the chunks.
    #[test]
    fn it_is_what_it_is_composed_of() {
        let (n, c, v) = (150, 6, 11);
        let classes = LossClasses::whole(v);
        let given = given(n, c, v);
        let tensor =
            |dims: &[usize], values: Vec<f64>| (Shape::batched(dims), HostTensor::Float(values));
        let logits = expected(&LOGITS, &given[..2], 1).remove(0);
        let of_loss = vec![tensor(&[n, v], logits), given[2].clone()];
        let [parts, lse] = expected(&Op::CrossEntropy(classes), &of_loss, 1).try_into().unwrap();
        let of_gradient = [of_loss, vec![tensor(&[n], lse.clone())]].concat();
        let gradient = Op::CrossEntropyGrad(classes);
        let slopes = tensor(&[n, v], expected(&gradient, &of_gradient, 1).remove(0));
        let dx = expected(&INPUT_GRADIENT, &[slopes.clone(), given[1].clone()], 1).remove(0);
        let dweight = expected(&WEIGHT_GRADIENT, &[slopes, given[0].clone()], 1).remove(0);
        let whole = [dx, parts, lse, dweight];
        for (rows, by_weight) in [(1, true), (64, true), (64, false), (1000, true)] {
            let pass = Op::LinearCrossEntropyPass { rows, classes, by_weight };
            let found = expected(&pass, &given, 1);
            assert_eq!(found.len(), if by_weight { 4 } else { 3 });
            for (found, whole) in found.iter().zip(&whole) {
                let error = found.iter().zip(whole).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(error < 1e-12, "{rows} rows: {error:e}");
            }
        }
    }
}
