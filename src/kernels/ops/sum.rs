//! Sums over adjacent axes, and the broadcast that is their gradient. Twin of `shaders/sum.wgsl`,
//! which has the formulas.

use rayon::prelude::*;

use super::dispatch_parts::as_words;
use super::row_sums::Way;
use super::row_terms::RowTerms;
use super::{row_blocks, row_sums};
use crate::call_shapes::{B, C, N, SMALL, T, calls, shrunk, shrunk_around};
use crate::cpu_kernel::TASK;
use crate::dispatch::{ITERATIONS_MAX, grid};
use crate::simd::{add, add_elements, vectorized};
use crate::twin::{IndependentAxis, no_forward, normal_inputs};
use crate::{CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant};
use potluck_core::HostTensorView;
use potluck_graph::Op;

/// Twin of [`Op::Sum`] and [`Op::Broadcast`].
pub static TWIN: Twin = Twin {
    name: "sum",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: false,
    iterations,
    inputs: normal_inputs,
    forward: no_forward,
    independent_axes,
    probes,
    catalog,
};

/// Elements of a block of a long sum in `fast`; this fixes the order of its sums.
const BLOCK: usize = 16 * 1024;

/// Minimum number of running sums of `fast`: enough to fill vector registers.
const LANES: usize = 64;

/// Invocations per workgroup of the `tree` kernel, in which a workgroup sums one output.
const TREE: usize = 256;

/// Minimum row width at which one invocation per column is enough for a software adapter.
const WIDE: usize = 512;

/// Terms of a sum for `shaders/row_sums.wgsl` and `shaders/row_blocks.wgsl`: the elements of x.
const TERMS: &str = "
@group(0) @binding(0) var<storage, read> x: array<Value>;
fn term(row: u32, at: u32) -> Sums { return x[at]; }
";

/// The larger tensor of a sum or a broadcast, viewed as (outer, middle, inner).
#[derive(Clone, Copy)]
struct View {
    outer: usize,
    /// Size of the axes that a sum reduces or a broadcast inserts.
    middle: usize,
    inner: usize,
}

impl View {
    fn of(call: &OpCall) -> Self {
        let (dims, first, end) = match call.op {
            Op::Sum { first, last } => (&call.inputs[0], *first, last + 1),
            Op::Broadcast { first, dims, .. } => (&call.outputs[0], *first, first + dims.len()),
            other => panic!("{other} is neither a sum nor a broadcast"),
        };
        Self {
            outer: dims[..first].iter().product(),
            middle: dims[first..end].iter().product(),
            inner: dims[end..].iter().product(),
        }
    }
}

/// Reference: `y[o, i] = sum over m of x[o, m, i]`, or `y[o, m, i] = x[o, i]`.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let View { outer, middle, inner } = View::of(call);
    let x = inputs[0].floats();
    let y = &mut *outputs[0];
    let sums = matches!(call.op, Op::Sum { .. });
    if sums && !call.accumulates() {
        y.fill(T::zero());
    }
    for o in 0..outer {
        for m in 0..middle {
            for i in 0..inner {
                let few = o * inner + i;
                let many = (o * middle + m) * inner + i;
                if sums {
                    y[few] += x[many];
                } else {
                    y[many] = x[few];
                }
            }
        }
    }
}

/// CPU kernel: parallel. A sum is split into blocks whose bounds depend on the shape only, and
/// the sums of the blocks are added in order, so results do not depend on the number of threads.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let View { middle, inner, .. } = View::of(call);
    let x = inputs[0].floats();
    let y = &mut *outputs[0];
    if x.is_empty() || y.is_empty() {
        return reference(call, inputs, outputs);
    }
    if let Op::Broadcast { .. } = call.op {
        let rows = y.par_chunks_mut(inner).enumerate().with_min_len((TASK / inner).max(1));
        rows.for_each(|(row, y)| y.copy_from_slice(&x[row / middle * inner..][..inner]));
        return;
    }
    let many = middle * inner;
    let sums = (y.par_chunks_mut(inner), x.par_chunks(many)).into_par_iter();
    let sums = sums.with_min_len((TASK / many).max(1));
    sums.for_each_init(Vec::new, |lanes, (y, x)| {
        if !call.accumulates() {
            y.fill(0.0);
        }
        sum_blocks(x, y, lanes);
    });
}

/// Adds the rows of `x (middle, inner)` to `y (inner)`, block by block.
fn sum_blocks(x: &[f32], y: &mut [f32], lanes: &mut Vec<f32>) {
    let block = y.len() * BLOCK.div_ceil(y.len());
    if x.len() <= block {
        return sum_rows(x, y, lanes);
    }
    let sums = x.par_chunks(block).map_init(Vec::new, |lanes, x| {
        let mut sum = vec![0.0; y.len()];
        sum_rows(x, &mut sum, lanes);
        sum
    });
    let sums: Vec<Vec<f32>> = sums.collect();
    for sum in &sums {
        add(y, sum);
    }
}

vectorized! {
    /// Adds the rows of `x` to `y`, several together where rows are short.
    fn sum_rows<S>(x: &[f32], y: &mut [f32], lanes: &mut Vec<f32>) {
        if let [sum] = y {
            return sum_row(x, sum);
        }
        lanes.clear();
        lanes.resize(y.len() * LANES.div_ceil(y.len()), 0.0);
        for rows in x.chunks(lanes.len()) {
            add_elements(lanes, rows);
        }
        for row in lanes.chunks(y.len()) {
            add_elements(y, row);
        }
    }
}

/// Computes the same as [`sum_rows`] for rows of one element.
#[inline(always)]
fn sum_row(x: &[f32], sum: &mut f32) {
    let mut lanes = [0.0; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for chunk in whole {
        for lane in 0..LANES {
            lanes[lane] += chunk[lane];
        }
    }
    add_elements(&mut lanes, rest);
    for lane in lanes {
        *sum += lane;
    }
}

/// Static choice: one workgroup per output for few outputs with long sums, where one invocation per
/// output would leave a device idle (see `is_few`); on GPUs, two stages, or tiles if there are
/// enough rows and columns; tiles of vectors for narrow rows; else one invocation per output, which
/// on (1024, 3072) took 0.4 of a tile's time on llvmpipe and 1.4 on SwiftShader.
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let view = View::of(call);
    if let Op::Broadcast { .. } = call.op {
        return vec![plain(call)];
    }
    if is_few(view) {
        return vec![one(call, "tree", grid(call.output_len(0), 1))];
    }
    if caps.wants_gpu_variants()
        && let Some(way) = blocks(call).or_else(|| tall(call))
    {
        return way.dispatches;
    }
    if view.inner < WIDE
        && let Some(way) = tile4(call)
    {
        return way.dispatches;
    }
    vec![plain(call)]
}

/// Returns true if one workgroup per output is the static choice.
fn is_few(view: View) -> bool {
    view.middle >= TREE && view.outer * view.inner <= TREE / 4
}

/// Returns all GPU kernel variants of the call.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let mut variants = vec![named(plain(call))];
    if let Op::Broadcast { .. } = call.op {
        return variants;
    }
    let view = View::of(call);
    let is_narrow = view.inner < 16 && view.middle >= 64;
    let is_baseline = view.middle > ITERATIONS_MAX;
    if (is_narrow || is_few(view)) && !is_baseline {
        variants.push(named(one(call, "tree", grid(call.output_len(0), 1))));
    }
    variants.extend(tile4(call));
    variants.extend(tall(call));
    if caps.wants_gpu_variants() {
        variants.extend(blocks(call));
    }
    variants
}

fn named(way: Dispatch) -> Variant {
    Variant::new(format!("sum_{}", way.shader.entry), vec![way])
}

/// Terms of a sum: the elements of x.
fn terms(call: &OpCall) -> RowTerms {
    let View { outer, middle, inner } = View::of(call);
    RowTerms {
        outer,
        middle,
        inner,
        operands: vec![Operand::Input(0)],
        sums: 1,
        vectors: true,
        words: [0; 3],
        text: TERMS.to_string(),
    }
}

/// Variant of two stages for a sum, if there are enough rows and columns.
fn blocks(call: &OpCall) -> Option<Variant> {
    if View::of(call).inner < 16 {
        return None;
    }
    row_blocks::variant("sum_blocks", &terms(call), call.accumulates())
}

/// Variant whose workgroups have 16 vectors of columns.
fn tile4(call: &OpCall) -> Option<Variant> {
    let terms = terms(call);
    if !terms.has_vectors() || !suits_tiles(call) {
        return None;
    }
    Some(row_sums::one("sum", &terms, call.accumulates(), Way::Tile4))
}

/// Variant whose workgroups share the rows of few columns.
fn tall(call: &OpCall) -> Option<Variant> {
    if !suits_tiles(call) {
        return None;
    }
    let terms = terms(call);
    let way = if terms.has_vectors() { Way::Tall4 } else { Way::Tall };
    Some(row_sums::one("sum", &terms, call.accumulates(), way))
}

/// Returns true if there are enough rows for the invocations that share a column, at least 4 each,
/// and enough columns for a workgroup.
fn suits_tiles(call: &OpCall) -> bool {
    let View { outer, middle, inner } = View::of(call);
    (16..=4 * ITERATIONS_MAX).contains(&middle) && inner >= 16 && outer > 0
}

/// Returns the baseline: one invocation per output, or one workgroup if an invocation would
/// exceed the iteration limit.
fn plain(call: &OpCall) -> Dispatch {
    let count = call.output_len(0);
    match call.op {
        Op::Broadcast { .. } => one(call, "broadcast", grid(count, 64)),
        _ if View::of(call).middle > ITERATIONS_MAX => one(call, "tree", grid(count, 1)),
        _ => one(call, "columns", grid(count, 64)),
    }
}

/// See [`Twin::iterations`]: those of the kernel for long sums, whose workgroups share an output.
fn iterations(call: &OpCall) -> usize {
    match call.op {
        Op::Broadcast { .. } => 0,
        _ => View::of(call).middle.div_ceil(TREE),
    }
}

fn one(call: &OpCall, entry: &'static str, groups: [u32; 3]) -> Dispatch {
    let View { middle, inner, .. } = View::of(call);
    Dispatch {
        shader: Shader::new("sum", entry),
        operands: vec![Operand::Input(0), Operand::Output(0)],
        params: as_words(&[call.output_len(0), middle, inner, usize::from(call.accumulates())]),
        groups,
    }
}

/// Returns the cost: one FLOP per element of a sum, none of a broadcast.
pub fn cost(call: &OpCall) -> Cost {
    let flops = match call.op {
        Op::Broadcast { .. } => 0.0,
        _ => call.input_len(0) as f64,
    };
    Cost { flops, bytes: Cost::moved(call) }
}

/// See [`Twin::independent_axes`]: an axis that is neither reduced nor inserted.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    let rank = call.inputs[0].len();
    let (input, output) = match call.op {
        Op::Sum { first: 0, last } if last + 1 == rank => return Vec::new(),
        Op::Sum { first: 0, last } => (last + 1, 0),
        Op::Broadcast { first: 0, .. } => (0, call.outputs[0].len() - rank),
        _ => (0, 0),
    };
    IndependentAxis::of(call, vec![Some(input)], vec![Some(output)]).into_iter().collect()
}

/// See [`Twin::probes`].
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let x = &inputs[0];
    match op {
        Op::Sum { first, last } => {
            // Long enough for tiles that share a sum, and for blocks of rows, even if only the last
            // axis is longer than 1.
            let mut kept = shrunk_around(x, last + 1..=x.len());
            for axis in *first..=*last {
                kept[axis] = x[axis].min(if axis == *last { 259 } else { 67 });
            }
            // More outputs than a workgroup computes, along the last axis that stays.
            let mut wide = shrunk(x);
            if last + 1 < x.len() {
                wide[x.len() - 1] = 131;
            } else if *first > 0 {
                wide[first - 1] = 131;
            }
            calls(op, [shrunk(x), shrunk_around(x, *first..=*last), kept, wide].map(|x| vec![x]))
        }
        Op::Broadcast { first, dims, .. } => {
            let dims = dims.iter().map(|d| *d.min(&SMALL[2])).collect();
            // The kernel does not depend on whether the new axes are the batch.
            let op = Op::Broadcast { first: *first, dims, batched: false };
            vec![(op, vec![shrunk(x)])]
        }
        other => panic!("{other} is neither a sum nor a broadcast"),
    }
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    vec![
        (Op::Sum { first: 0, last: 0 }, vec![vec![N, C]]),
        (Op::Sum { first: 0, last: 0 }, vec![vec![4 * N, 2]]),
        (Op::Broadcast { first: 0, dims: vec![B], batched: false }, vec![vec![T, C]]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::InputFill;
    use crate::testing::check;
    use crate::{OwnedCall, RandomContext};
    use potluck_core::Shape;
    use potluck_core::rng::Key;
    use potluck_graph::{Accumulation, Precision};

    fn check_sum(shape: Shape, first: usize, last: usize, rows: usize) {
        // The offset keeps sums away from zero, where rounding errors would not be small.
        check(Op::Sum { first, last }, &[(shape, InputFill::Scaled(1.0, 0.5))], rows);
    }

    #[test]
    fn sums_over_any_axes_of_any_rows() {
        for rows in 1..=7 {
            let shape = Shape::batched(&[2, 3, 5, 7]);
            for (first, last) in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 3), (3, 3)] {
                check_sum(shape.clone(), first, last, rows);
            }
        }
    }

    #[test]
    fn gradients_of_biases_and_losses() {
        check_sum(Shape::batched(&[64, 512]), 0, 0, 12);
        check_sum(Shape::batched(&[64, 65]), 0, 0, 12);
        check_sum(Shape::batched(&[64, 2]), 0, 0, 12);
        check_sum(Shape::batched(&[1, 64, 128]), 0, 0, 12);
        check_sum(Shape::batched(&[1, 64, 128]), 0, 1, 12);
    }

    /// Every kind of tile, with columns and rows beyond its edge, and several outer entries.
    #[test]
    fn tiles_of_columns() {
        for shape in [[3, 65, 68], [2, 16, 16], [1, 100, 260], [5, 33, 19], [1, 257, 131]] {
            check_sum(Shape::fixed(&shape), 1, 1, 1);
        }
    }

    /// Blocks of rows of several outer entries, with more columns than a workgroup has.
    #[test]
    fn blocks_of_rows() {
        for shape in [[3, 130, 68], [2, 1031, 16], [1, 700, 260], [5, 133, 19], [1, 257, 131]] {
            check_sum(Shape::fixed(&shape), 1, 1, 1);
            let op = Op::Sum { first: 1, last: 1 };
            let random = RandomContext { step_key: Key::new(0), training: true };
            let call = OwnedCall::new(op, vec![shape.to_vec()], random).unwrap();
            let ways = variants(&call.call(), &Caps::EVERY);
            assert!(ways.iter().any(|way| way.name == "sum_blocks"), "{shape:?}");
        }
    }

    #[test]
    fn few_outputs_of_many_entries() {
        for shape in [[1_000_003, 1], [257, 3], [256, 64], [70_001, 2], [3, 40_001]] {
            check_sum(Shape::fixed(&shape), 0, 0, 1);
        }
        check_sum(Shape::fixed(&[1_000_000]), 0, 0, 1);
        check_sum(Shape::fixed(&[3, 1025, 5]), 1, 1, 1);
    }

    #[test]
    fn broadcasts_put_axes_anywhere() {
        let check = |first, dims: &[usize], batched, shape| {
            let op = Op::Broadcast { first, dims: dims.to_vec(), batched };
            check(op, &[(shape, InputFill::Normal)], 3);
        };
        check(0, &[5], false, Shape::fixed(&[7, 3]));
        check(0, &[2, 5], true, Shape::fixed(&[7]));
        check(1, &[4, 2], false, Shape::batched(&[3, 5]));
        check(2, &[65], false, Shape::batched(&[3, 5]));
        check(0, &[1], true, Shape::fixed(&[]));
        check(0, &[40_001], false, Shape::fixed(&[2]));
    }

    #[test]
    fn fast_sums_are_the_same_for_any_number_of_threads() {
        let op = Op::Sum { first: 0, last: 0 };
        let x: Vec<f32> = (0..300_000).map(|i| (i as f32).sin()).collect();
        let call = OpCall {
            op: &op,
            inputs: vec![vec![100_000, 3]],
            outputs: vec![vec![3]],
            accumulate: Accumulation::NONE,
            precision: Precision::F32,
            loss_scale: 1.0,
            random: RandomContext { step_key: Key::new(0), training: true },
        };
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut y = [0.0f32; 3];
            pool.install(|| fast(&call, &[HostTensorView::Float(&x)], &mut [&mut y]));
            y.map(f32::to_bits)
        };
        assert_eq!(run(1), run(3));
    }
}
