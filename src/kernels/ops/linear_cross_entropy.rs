//! Cross-entropy of the logits of a linear layer, and its gradient, in chunks of rows: the logits
//! of a chunk are handed on from the product to the loss, and their gradient, in their place, to
//! the products with the weight and the input. Composed of the kernels of [`matmul`] and
//! [`cross_entropy`], on the host and on GPUs.

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

/// Chunks begin at multiples of so many rows on GPUs: there, parts of every tensor can be bound.
const ROWS_UNIT: usize = 64;

/// Kernels of the host of which an op is composed.
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

/// Returns the rows of a chunk and the classes of an op; `None` of another op.
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
        let ([n, c], [v, _]) = (&call.inputs[0][..], &call.inputs[1][..]) else {
            panic!("{}: x is (n, c), weight (v, c)", call.op);
        };
        let (n, c, v) = (*n, *c, *v);
        let Some((rows, classes)) = chunks_of(call.op) else {
            panic!("{} is no linear cross-entropy", call.op);
        };
        // More than there are would take memory for nothing.
        Self { n, c, v, rows: rows.min(n), classes }
    }

    /// Returns the sizes of a call on a GPU, whose chunks begin where tensors can be bound, and
    /// whose logits are no larger than a binding if that can be.
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

    /// Returns the bytes of the logits of a chunk.
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

/// Call of an op on a chunk.
fn part<'a>(
    call: &OpCall,
    op: &'a Op,
    inputs: &[[usize; 2]],
    outputs: &[[usize; 2]],
) -> OpCall<'a> {
    // A vector is a matrix whose second dimension is left out.
    let dims = |list: &[[usize; 2]]| {
        list.iter().map(|[rows, columns]| vec![*rows, *columns]).collect::<Vec<_>>()
    };
    OpCall {
        op,
        inputs: dims(inputs),
        outputs: dims(outputs),
        accumulate: Accumulation::NONE,
        precision: call.precision,
        loss_scale: call.loss_scale,
        random: call.random,
    }
}

const LOGITS: Op = Op::MatMul { transpose_a: false, transpose_b: true };
const INPUT_GRADIENT: Op = Op::MatMul { transpose_a: false, transpose_b: false };
const WEIGHT_GRADIENT: Op = Op::MatMul { transpose_a: true, transpose_b: false };

/// Calls of which a chunk of so many rows is composed.
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
        let vectors = |count| vec![vec![r]; count];
        let logits = part(call, &LOGITS, &[[r, c], [v, c]], &[[r, v]]);
        let is_added = |output| call.accumulate.has(output);
        let accumulates = chunk.start > 0 || ChunkSteps::of(call.op).dweight.is_some_and(is_added);
        let dweight = part(call, &WEIGHT_GRADIENT, &[[r, v], [r, c]], &[[v, c]]);
        Self {
            loss: OpCall {
                op: &ops.loss,
                inputs: [vec![vec![r, v]], vectors(1)].concat(),
                outputs: [vec![vec![r, 2]], vectors(1)].concat(),
                ..logits.clone()
            },
            gradient: OpCall {
                op: &ops.gradient,
                inputs: [vec![vec![r, v]], vectors(2)].concat(),
                ..logits.clone()
            },
            dx: part(call, &INPUT_GRADIENT, &[[r, v], [v, c]], &[[r, c]]),
            dweight: if accumulates {
                OpCall { accumulate: Accumulation::all(1), ..dweight }
            } else {
                dweight
            },
            logits,
        }
    }
}

/// Returns the bytes that the logits of a chunk and its largest product take on the host; 0 for
/// another op.
pub(crate) fn host_bytes(call: &OpCall) -> usize {
    if chunks_of(call.op).is_none() {
        return 0;
    }
    let (sizes, steps) = (LinearSizes::of(call), ChunkSteps::of(call.op));
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
    let (ops, steps) = (LossOps::of(&sizes), ChunkSteps::of(call.op));
    let (x, weight, targets) = (inputs[0].floats(), inputs[1], inputs[2].ints());
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

/// Static choice: the kernel that the product of the logits of a chunk would have, for all
/// products, or else the plain one.
fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let sizes = LinearSizes::on_gpu(call, caps);
    let ops = LossOps::of(&sizes);
    let whole = ChunkCalls::of(call, &ops, &(0..sizes.rows));
    let chosen = matmul::dispatch(&whole.logits, caps);
    let known = matmul::variants(&whole.logits, caps);
    let name = known.into_iter().find(|variant| variant.dispatches == chosen).map(|one| one.name);
    // Which of the sums are split, the composition decides.
    let name = name.map(|name| if name == OF_REGISTERS { TILES[0].name.into() } else { name });
    let by_name = name.and_then(|name| {
        let tile = name.strip_suffix(SPLIT).unwrap_or(&name);
        composed(call, caps, tile)
    });
    by_name.unwrap_or_else(|| plain(call, caps))
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
        let name = product.name.replace("matmul", "linear");
        let dispatches = composed(call, caps, &product.name);
        variants.extend(dispatches.map(|dispatches| Variant::new(name, dispatches)));
    }
    variants
}

fn plain(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let naive = |call: &OpCall| matmul::variants(call, caps).swap_remove(0).dispatches;
    dispatches(call, caps, &|product| Some(naive(product)), true).unwrap_or_default()
}

/// Ending of the names of kernels that split sums.
const SPLIT: &str = "_split_k";

/// Returns the dispatches with the kernel of this name for all products of whole chunks; `None` if
/// one of them cannot have it. What remains of the rows may be too little for it. Long sums are
/// split: on a processor those of the largest tile, on GPUs those over the classes, which have too
/// few outputs for all cores. In a step of GPT-2 124M with 8 x 1,024 tokens on an H100, where they
/// were not, the op took 32 % of the time, at 0.63 of the rate of its other products.
fn composed(call: &OpCall, caps: &Caps, name: &str) -> Option<Vec<Dispatch>> {
    let rows = LinearSizes::on_gpu(call, caps).rows;
    let product = |product: &OpCall| {
        let all = matmul::variants(product, caps);
        let is_rest = product.inputs[0][0] != rows && call.inputs[0][0] > rows;
        let named = |name: &str| all.iter().find(|variant| variant.name == name);
        let split = if name == TILES[0].name {
            named(OF_REGISTERS)
        } else if *product.op == INPUT_GRADIENT {
            named(&format!("{name}{SPLIT}"))
        } else {
            None
        };
        let chosen = split.filter(|_| !is_rest).or_else(|| named(name));
        let chosen = chosen.or_else(|| all.first().filter(|_| is_rest));
        chosen.map(|variant| variant.dispatches.clone())
    };
    dispatches(call, caps, &product, false)
}

/// Returns the dispatches of all chunks, with those that `product` returns for their products.
fn dispatches(
    call: &OpCall,
    caps: &Caps,
    product: &dyn Fn(&OpCall) -> Option<Vec<Dispatch>>,
    is_plain: bool,
) -> Option<Vec<Dispatch>> {
    let sizes = LinearSizes::on_gpu(call, caps);
    let (ops, steps) = (LossOps::of(&sizes), ChunkSteps::of(call.op));
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
            // The same for all numbers of classes for workgroups: what is certified with a few also
            // runs with many.
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

/// Returns the dispatches of a part with its tensors bound to these operands.
fn bound(dispatches: Vec<Dispatch>, inputs: &[Operand], outputs: &[Operand]) -> Vec<Dispatch> {
    let of = |operand: Operand| match operand {
        Operand::Input(index) => inputs[index],
        Operand::Output(index) => outputs[index],
        other => other,
    };
    let bind = |dispatch: Dispatch| Dispatch {
        operands: dispatch.operands.iter().map(|operand| of(*operand)).collect(),
        ..dispatch
    };
    dispatches.into_iter().map(bind).collect()
}

/// Returns the cost: one product for the logits, one for the gradient by the input and one for that
/// by the weight, and what the loss costs.
fn cost(call: &OpCall) -> Cost {
    let LinearSizes { n, c, v, .. } = LinearSizes::of(call);
    let ChunkSteps { loss, gradient, dweight } = ChunkSteps::of(call.op);
    let products = 1 + usize::from(gradient) + usize::from(dweight.is_some());
    let passes = usize::from(loss.is_some()) + usize::from(gradient);
    let of_logit = (2 * c * products + 12 * passes) as f64;
    Cost { flops: n as f64 * v as f64 * of_logit, bytes: Cost::moved(call) }
}

/// See [`Twin::iterations`]: those of the longest sum.
fn iterations(call: &OpCall) -> usize {
    let sizes = LinearSizes::on_gpu(call, &Caps::EVERY);
    let ops = LossOps::of(&sizes);
    let ChunkCalls { logits, dx, dweight, .. } = ChunkCalls::of(call, &ops, &(0..sizes.rows));
    let steps = ChunkSteps::of(call.op);
    let mut products = vec![logits];
    products.extend(steps.gradient.then_some(dx));
    products.extend(steps.dweight.map(|_| dweight));
    products.iter().map(matmul::iterations).max().unwrap_or(0)
}

/// See [`Twin::inputs`].
fn inputs(op: &Op, inputs: &[Dims]) -> InputSpec {
    let classes = chunks_of(op).map_or(inputs[1][0], |(_, classes)| classes.all);
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
    let inputs = (0..call.inputs.len()).map(|input| (input != 1).then_some(0)).collect();
    let mut outputs = vec![Some(0); call.outputs.len()];
    if let Op::LinearCrossEntropyGrad { by_weight: true, .. }
    | Op::LinearCrossEntropyPass { by_weight: true, .. } = call.op
    {
        // The gradient by the weight, which is the last one, is a sum over rows.
        outputs[call.outputs.len() - 1] = None;
    }
    IndependentAxis::of(call, inputs, outputs).into_iter().collect()
}

/// See [`Twin::probes`]: as many rows of the sizes of the call, or nearly so many if they are more
/// than the largest tile, in chunks like its own. A binding may make chunks smaller than those of
/// the op, so there are probes of one chunk, of two, and of one with every kind of rest.
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let ([n, c], [v, _]) = (&inputs[0][..], &inputs[1][..]) else { return Vec::new() };
    let c_near = matmul::probes::near(*c, ABOVE_TILES);
    let v_near = matmul::probes::near(*v, MANY_CLASSES);
    let shape = |[rows, n]: [usize; 2], [c, v]: [usize; 2]| {
        let mut op = op.clone();
        if let Op::LinearCrossEntropy { rows: of_chunk, classes }
        | Op::LinearCrossEntropyGrad { rows: of_chunk, classes, .. }
        | Op::LinearCrossEntropyPass { rows: of_chunk, classes, .. } = &mut op
        {
            *of_chunk = rows;
            // As many behind the own classes as in front of them.
            classes.all = classes.first + v + classes.first;
        }
        (op, [vec![vec![n, c], vec![v, c]], vec![vec![n]; inputs.len() - 2]].concat())
    };
    let chunks = chunks_like(*n);
    let mut probes: Vec<CallShape> =
        chunks.iter().map(|chunk| shape(*chunk, [c_near, v_near])).collect();
    // Long sums are split, on GPUs those over the classes.
    let long = |size: usize, least: usize, near: usize| {
        if size < least { near } else { matmul::probes::near(size, least + 7) }
    };
    let c_long = long(*c, CACHED_TERMS_MIN, c_near);
    let v_long = long(*v, CACHED_TERMS_MIN, v_near);
    let v_parts = long(*v, SPLIT_TERMS_MIN, v_near);
    for of_long in [[c_near, v_parts], [c_near, v_long], [c_long, v_near], [c_long, v_long]] {
        if of_long != [c_near, v_near] {
            probes.extend(chunks.iter().map(|chunk| shape(*chunk, of_long)));
        }
    }
    probes
}

/// The fewest rows and columns above the largest tile with which it has edges.
const ABOVE_TILES: usize = 131;

/// As many classes as a workgroup adds up, and a few.
const MANY_CLASSES: usize = 261;

/// Returns pairs of the rows of a chunk and of all rows, the fewest first, for a call of `n` rows
/// in chunks that begin at multiples of [`ROWS_UNIT`].
fn chunks_like(n: usize) -> Vec<[usize; 2]> {
    let all = matmul::probes::near(n, ABOVE_TILES);
    let mut chunks = vec![[all.next_multiple_of(ROWS_UNIT), all]];
    for rows in [ROWS_UNIT, ABOVE_TILES.next_multiple_of(ROWS_UNIT)] {
        let rests = (n % ROWS_UNIT..rows).step_by(ROWS_UNIT).filter(|rest| *rest > 0);
        chunks.extend(rests.map(|rest| [rows, rows + rest]));
        chunks.push([rows, 2 * rows]);
    }
    chunks
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    let (c, rows) = (36, ROWS_UNIT);
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

    /// Returns `x, weight, targets`, some of which are ignored.
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

    /// Where a binding is smaller than the logits of a chunk, there are more chunks.
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
