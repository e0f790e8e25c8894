//! Group normalization and its gradients. Twin of `shaders/group_norm.wgsl`, which has the
//! formulas.

use rayon::prelude::*;

use super::dispatch_parts::{all_tensors, as_words, lanes_of, suffix};
use super::row_sums;
use super::row_terms::RowTerms;
use crate::call_shapes::calls;
use crate::dispatch::{ITERATIONS_MAX, grid};
use crate::simd::{add, add_elements, mul_add, vectorized};
use crate::twin::{Forward, IndependentAxis, normal_inputs};
use crate::{
    CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant, source,
};
use potluck_core::HostTensorView;
use potluck_graph::Op;

/// Twin of [`Op::GroupNorm`] and its gradients.
pub static TWIN: Twin = Twin {
    name: "group_norm",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
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

/// Terms of the gradients of weight and bias for `shaders/row_sums.wgsl`: x, stats and dy are
/// bound; the parameters are positions of a sample, groups, and channels of a group.
const TERMS: &str = "
@group(0) @binding(0) var<storage, read> x: array<Value>;
@group(0) @binding(1) var<storage, read> stats: array<vec2f>;
@group(0) @binding(2) var<storage, read> dy: array<Value>;
fn term(row: u32, at: u32) -> Sums {
    let column = (at - row * p.width) * FLOATS;
    let of_group = stats[row / p.word0 * p.word1 + column / p.word2];
    let bias = dy[at];
    return Sums(bias * (x[at] - of_group.x) * of_group.y, bias);
}
";

/// Invocations of a workgroup on software adapters, where barriers are costly, and on GPUs.
const GROUPS: [u32; 2] = [64, 256];

/// Sizes of a call: `x (samples, positions, groups * width)`.
#[derive(Clone, Copy)]
struct GroupedSizes {
    samples: usize,
    positions: usize,
    groups: usize,
    /// Channels of a group.
    width: usize,
}

impl GroupedSizes {
    fn of(call: &OpCall) -> Self {
        let groups = match call.op {
            Op::GroupNorm { groups, .. } => *groups,
            Op::GroupNormGrad { groups } | Op::GroupNormAffineGrad { groups } => *groups,
            other => panic!("{other} is not a group normalization"),
        };
        let samples = call.inputs[0][0];
        let (rows, c) = call.rows_and_last(0);
        Self { samples, positions: rows / samples.max(1), groups, width: c / groups }
    }

    fn channels(self) -> usize {
        self.groups * self.width
    }

    fn of_sample(self) -> usize {
        self.positions * self.channels()
    }

    /// Elements of a group in a sample: the index and the channel of each.
    fn places(self, group: usize) -> impl Iterator<Item = (usize, usize)> + Clone {
        let channels = group * self.width..(group + 1) * self.width;
        (0..self.positions).flat_map(move |position| {
            channels.clone().map(move |k| (position * self.channels() + k, k))
        })
    }

    /// Number of elements of a group in a sample.
    fn of_group(self) -> usize {
        self.positions * self.width
    }
}

/// Reference: `x, weight, bias -> y, stats`, or `x, weight, stats, dy -> dx`, or
/// `x, stats, dy -> dweight, dbias`.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let inputs: Vec<&[T]> = inputs.iter().map(|input| input.floats()).collect();
    let sizes = GroupedSizes::of(call);
    if matches!(call.op, Op::GroupNormAffineGrad { .. }) && !call.accumulates() {
        for output in outputs.iter_mut() {
            output.fill(T::zero());
        }
    }
    let whole = sizes.of_sample();
    for sample in 0..sizes.samples {
        let x = &inputs[0][sample * whole..][..whole];
        for group in 0..sizes.groups {
            let at = sample * sizes.groups + group;
            match (call.op, &mut *outputs) {
                (Op::GroupNorm { eps, .. }, [y, stats]) => {
                    let weight = inputs[1];
                    let bias = inputs[2];
                    let [mean, rstd] = statistics(sizes, x, group, T::from_f64(f64::from(*eps)));
                    stats[2 * at] = mean;
                    stats[2 * at + 1] = rstd;
                    let y = &mut y[sample * whole..][..whole];
                    for (i, k) in sizes.places(group) {
                        y[i] = (x[i] - mean) * rstd * weight[k] + bias[k];
                    }
                }
                (Op::GroupNormGrad { .. }, [dx]) => {
                    let dy = &inputs[3][sample * whole..][..whole];
                    let stats = [inputs[2][2 * at], inputs[2][2 * at + 1]];
                    let dx = &mut dx[sample * whole..][..whole];
                    gradient(sizes, [x, inputs[1], dy], stats, group, dx);
                }
                (_, [dweight, dbias]) => {
                    let dy = &inputs[2][sample * whole..][..whole];
                    let mean = inputs[1][2 * at];
                    let rstd = inputs[1][2 * at + 1];
                    for (i, k) in sizes.places(group) {
                        dweight[k] += dy[i] * (x[i] - mean) * rstd;
                        dbias[k] += dy[i];
                    }
                }
                (other, _) => panic!("{other} is not a group normalization"),
            }
        }
    }
}

/// Mean and reciprocal standard deviation of a group of a sample.
fn statistics<T: Float>(sizes: GroupedSizes, x: &[T], group: usize, eps: T) -> [T; 2] {
    let count = T::from_f64(sizes.of_group() as f64);
    let mean = sizes.places(group).map(|(i, _)| x[i]).sum::<T>() / count;
    let squares: T = sizes.places(group).map(|(i, _)| (x[i] - mean) * (x[i] - mean)).sum();
    [mean, (squares / count + eps).sqrt().recip()]
}

/// Computes the gradient of a group of a sample, given its x, weight and dy.
fn gradient<T: Float>(
    sizes: GroupedSizes,
    [x, weight, dy]: [&[T]; 3],
    [mean, rstd]: [T; 2],
    group: usize,
    dx: &mut [T],
) {
    let count = T::from_f64(sizes.of_group() as f64);
    let places = sizes.places(group);
    let sum_g: T = places.clone().map(|(i, k)| weight[k] * dy[i]).sum();
    let products = places.clone().map(|(i, k)| weight[k] * dy[i] * (x[i] - mean) * rstd);
    let mean_g = sum_g / count;
    let mean_product = products.sum::<T>() / count;
    for (i, k) in places {
        let xhat = (x[i] - mean) * rstd;
        dx[i] = rstd * (weight[k] * dy[i] - mean_g - xhat * mean_product);
    }
}

/// CPU kernel: parallel over samples, each in vectorized loops over the channels of a position.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let inputs: Vec<&[f32]> = inputs.iter().map(|input| input.floats()).collect();
    let sizes = GroupedSizes::of(call);
    let whole = sizes.of_sample();
    let stat = 2 * sizes.groups;
    let x = inputs[0].par_chunks(whole);
    match (call.op, outputs) {
        (Op::GroupNorm { eps, .. }, [y, stats]) => {
            let tasks = (x, y.par_chunks_mut(whole), stats.par_chunks_mut(stat));
            tasks.into_par_iter().for_each(|(x, y, stats)| {
                forward_of_sample(sizes, *eps, [x, inputs[1], inputs[2]], y, stats);
            });
        }
        (Op::GroupNormGrad { .. }, [dx]) => {
            let stats = inputs[2].par_chunks(stat);
            let dy = inputs[3].par_chunks(whole);
            let tasks = (x, stats, dy, dx.par_chunks_mut(whole));
            tasks.into_par_iter().for_each(|(x, stats, dy, dx)| {
                grad_of_sample(sizes, [x, inputs[1], stats, dy], dx);
            });
        }
        (_, [dweight, dbias]) => {
            let tasks = (x, inputs[1].par_chunks(stat), inputs[2].par_chunks(whole));
            let sums = tasks.into_par_iter().map(|(x, stats, dy)| {
                let [means, rstds] = sizes.by_channel(stats);
                affine_sums(x, dy, &means, &rstds)
            });
            let sums: Vec<[Vec<f32>; 2]> = sums.collect();
            if !call.accumulates() {
                dweight.fill(0.0);
                dbias.fill(0.0);
            }
            for [of_weight, of_bias] in sums {
                add(dweight, &of_weight);
                add(dbias, &of_bias);
            }
        }
        (other, _) => panic!("{other} is not a group normalization"),
    }
}

/// Positions per partial sum of the CPU kernel: few enough that rounding stays small.
const BLOCK: usize = 64;

impl GroupedSizes {
    /// Mean over each group, given the sum over positions of each channel.
    fn means(self, sums: &[f32]) -> Vec<f32> {
        let count = self.of_group() as f32;
        sums.chunks(self.width).map(|sums| sums.iter().sum::<f32>() / count).collect()
    }

    /// Mean and reciprocal standard deviation of each channel's group.
    fn by_channel(self, stats: &[f32]) -> [Vec<f32>; 2] {
        let mut means = Vec::with_capacity(self.channels());
        let mut rstds = Vec::with_capacity(self.channels());
        for k in 0..self.channels() {
            let group = k / self.width;
            means.push(stats[2 * group]);
            rstds.push(stats[2 * group + 1]);
        }
        [means, rstds]
    }
}

fn products(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a * b).collect()
}

/// Normalizes a sample of `x`, given `weight` and `bias`.
fn forward_of_sample(
    sizes: GroupedSizes,
    eps: f32,
    [x, weight, bias]: [&[f32]; 3],
    y: &mut [f32],
    stats: &mut [f32],
) {
    let zeros = vec![0.0; sizes.channels()];
    let [sums, _] = column_sums(x, &zeros);
    for (group, mean) in sizes.means(&sums).into_iter().enumerate() {
        stats[2 * group] = mean;
    }
    let [means, _] = sizes.by_channel(stats);
    let [_, squares] = column_sums(x, &means);
    for (group, variance) in sizes.means(&squares).into_iter().enumerate() {
        stats[2 * group + 1] = 1.0 / (variance + eps).sqrt();
    }
    let [means, rstds] = sizes.by_channel(stats);
    normalize(x, y, &means, &products(&rstds, weight), bias);
}

/// Computes the gradient of a sample, given its `x, weight, stats, dy`.
fn grad_of_sample(sizes: GroupedSizes, inputs: [&[f32]; 4], dx: &mut [f32]) {
    let [x, weight, stats, dy] = inputs;
    let [means, rstds] = sizes.by_channel(stats);
    let [of_weight, of_bias] = affine_sums(x, dy, &means, &rstds);
    let mean_g = sizes.means(&products(&of_bias, weight));
    let mean_product = sizes.means(&products(&of_weight, weight));

    // dx = rstd weight dy - rstd mean_g - rstd^2 mean_product (x - mean)
    let channels = sizes.channels();
    let mut a = vec![0.0; channels];
    let mut b = vec![0.0; channels];
    let mut c = vec![0.0; channels];
    for k in 0..channels {
        let group = k / sizes.width;
        a[k] = rstds[k] * weight[k];
        b[k] = rstds[k] * mean_g[group];
        c[k] = rstds[k] * rstds[k] * mean_product[group];
    }
    grad_rows([x, dy, &means], [&a, &b, &c], dx);
}

vectorized! {
    /// Sums over positions of `x - offset` and of its square, by blocks of positions.
    fn column_sums<S>(x: &[f32], offsets: &[f32]) -> [Vec<f32>; 2] {
        let c = offsets.len();
        let mut total = [vec![0.0; c], vec![0.0; c]];
        for block in x.chunks(BLOCK * c) {
            let (mut sums, mut squares) = (vec![0.0; c], vec![0.0; c]);
            for row in block.chunks_exact(c) {
                let each = sums.iter_mut().zip(squares.iter_mut()).zip(row).zip(offsets);
                for (((sum, square), x), offset) in each {
                    let value = x - offset;
                    *sum += value;
                    *square = mul_add::<S>(value, value, *square);
                }
            }
            add_elements(&mut total[0], &sums);
            add_elements(&mut total[1], &squares);
        }
        total
    }

    /// Gradients of weight and bias of a sample.
    fn affine_sums<S>(x: &[f32], dy: &[f32], means: &[f32], rstds: &[f32]) -> [Vec<f32>; 2] {
        let c = means.len();
        let mut total = [vec![0.0; c], vec![0.0; c]];
        for (x, dy) in x.chunks(BLOCK * c).zip(dy.chunks(BLOCK * c)) {
            let (mut products, mut sums) = (vec![0.0; c], vec![0.0; c]);
            for (x, dy) in x.chunks_exact(c).zip(dy.chunks_exact(c)) {
                let each = products.iter_mut().zip(sums.iter_mut()).zip(x).zip(dy).zip(means);
                for ((((product, sum), x), dy), mean) in each {
                    *product = mul_add::<S>(*dy, x - mean, *product);
                    *sum += dy;
                }
            }
            for (product, rstd) in products.iter_mut().zip(rstds) {
                *product *= rstd;
            }
            add_elements(&mut total[0], &products);
            add_elements(&mut total[1], &sums);
        }
        total
    }

    fn normalize<S>(x: &[f32], y: &mut [f32], means: &[f32], factors: &[f32], bias: &[f32]) {
        let c = means.len();
        for (y, x) in y.chunks_exact_mut(c).zip(x.chunks_exact(c)) {
            let each = y.iter_mut().zip(x).zip(means).zip(factors).zip(bias);
            for ((((y, x), mean), factor), bias) in each {
                *y = mul_add::<S>(x - mean, *factor, *bias);
            }
        }
    }

    /// Computes `dx = a dy - b - c (x - mean)`, with all but `x` and `dy` per channel.
    fn grad_rows<S>(inputs: [&[f32]; 3], factors: [&[f32]; 3], dx: &mut [f32]) {
        let ([x, dy, means], [a, b, c]) = (inputs, factors);
        let rows = x.chunks_exact(c.len()).zip(dy.chunks_exact(c.len()));
        for ((x, dy), dx) in rows.zip(dx.chunks_exact_mut(c.len())) {
            let each = dx.iter_mut().zip(x).zip(dy).zip(means).zip(a).zip(b).zip(c);
            for ((((((dx, x), dy), mean), a), b), c) in each {
                *dx = mul_add::<S>(*a, *dy, -mul_add::<S>(*c, x - mean, *b));
            }
        }
    }
}

/// Static choice: vectors of 4 if the channels of a group are a multiple of 4; on GPUs a workgroup
/// per group of a sample, on software adapters an invocation if it stays within the iteration
/// limit.
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    if let Some(terms) = terms(call) {
        return row_sums::chosen(NAME, &terms, call.accumulates(), caps).dispatches;
    }
    let lanes = lanes(call);
    if caps.wants_gpu_variants() {
        return vec![by_groups(call, lanes, GROUPS[1])];
    }
    vec![each(call, lanes).unwrap_or_else(|| by_groups(call, lanes, GROUPS[0]))]
}

/// Name of the kernels of the gradients of weight and bias.
const NAME: &str = "group_norm_affine";

/// Sums over rows of the gradients of weight and bias.
fn terms(call: &OpCall) -> Option<RowTerms> {
    let Op::GroupNormAffineGrad { .. } = call.op else { return None };
    let sizes = GroupedSizes::of(call);
    Some(RowTerms {
        outer: 1,
        middle: sizes.samples * sizes.positions,
        inner: sizes.channels(),
        operands: [0, 1, 2].map(Operand::Input).to_vec(),
        sums: 2,
        vectors: sizes.width.is_multiple_of(4),
        words: [sizes.positions, sizes.groups, sizes.width],
        text: TERMS.into(),
    })
}

/// Returns all GPU kernel variants of the call.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    if let Some(terms) = terms(call) {
        return row_sums::variants(NAME, &terms, call.accumulates(), caps);
    }
    let lanes = lanes(call);
    let mut variants = vec![group_variant(call, 1, GROUPS[0])];
    if lanes == 4 {
        variants.push(group_variant(call, 4, GROUPS[0]));
    }
    if caps.wants_gpu_variants() {
        variants.push(group_variant(call, lanes, GROUPS[1]));
    }
    if caps.wants_cpu_driver_variants()
        && let Some(way) = each(call, lanes)
    {
        let name = format!("group_norm_{}{}", way.shader.entry, suffix(lanes));
        variants.push(Variant::new(name, vec![way]));
    }
    variants
}

fn group_variant(call: &OpCall, lanes: usize, group: u32) -> Variant {
    let way = by_groups(call, lanes, group);
    let name = format!("group_norm_{}{}_{group}", way.shader.entry, suffix(lanes));
    Variant::new(name, vec![way])
}

fn lanes(call: &OpCall) -> usize {
    lanes_of(GroupedSizes::of(call).width)
}

/// Kernel with one workgroup per group of a sample.
fn by_groups(call: &OpCall, lanes: usize, group: u32) -> Dispatch {
    let GroupedSizes { samples, groups, .. } = GroupedSizes::of(call);
    one(call, ["forward", "grad"], lanes, group, grid(samples * groups, 1))
}

/// Returns the kernel with one invocation per group of a sample; `None` if it would exceed the
/// iteration limit.
fn each(call: &OpCall, lanes: usize) -> Option<Dispatch> {
    let GroupedSizes { samples, positions, groups, width } = GroupedSizes::of(call);
    if 3 * positions * (width / lanes + 1) > ITERATIONS_MAX {
        return None;
    }
    let entries = ["forward_each", "grad_each"];
    Some(one(call, entries, lanes, GROUPS[0], grid(samples * groups, 64)))
}

/// Dispatch of one of two entry points, for the normalization and for its gradient.
fn one(
    call: &OpCall,
    entries: [&'static str; 2],
    lanes: usize,
    group: u32,
    workgroups: [u32; 3],
) -> Dispatch {
    let GroupedSizes { samples, positions, groups, width } = GroupedSizes::of(call);
    let (entry, eps) = match call.op {
        Op::GroupNorm { eps, .. } => (entries[0], *eps),
        _ => (entries[1], 0.0),
    };
    let mut params = as_words(&[samples, positions, groups, width / lanes]);
    params.push(eps.to_bits());
    Dispatch {
        shader: Shader::new("group_norm", entry)
            .with_text(source::values_of(lanes))
            .with_const("GROUP", group),
        operands: all_tensors(call),
        params,
        groups: workgroups,
    }
}

/// Returns the cost: a few FLOPs per element of `x`, as of layer normalization.
pub fn cost(call: &OpCall) -> Cost {
    let flops = match call.op {
        Op::GroupNormGrad { .. } => 11.0,
        Op::GroupNormAffineGrad { .. } => 5.0,
        _ => 8.0,
    };
    Cost { flops: flops * call.input_len(0) as f64, bytes: Cost::moved(call) }
}

/// See [`Twin::iterations`]: a group in three passes, by a workgroup if it is too large for one
/// invocation.
fn iterations(call: &OpCall) -> usize {
    if let Some(terms) = terms(call) {
        return row_sums::iterations(&terms);
    }
    let sizes = GroupedSizes::of(call);
    let whole = 3 * sizes.positions * (sizes.width + 1);
    if whole <= ITERATIONS_MAX {
        return whole;
    }
    3 * (sizes.positions * sizes.width).div_ceil(GROUPS[0] as usize)
}

/// See [`Twin::forward`].
fn forward(op: &Op) -> Option<Forward> {
    let Op::GroupNormGrad { groups } = op else { return None };
    // The bias does not matter for the statistics.
    let op = Op::GroupNorm { groups: *groups, eps: 1e-5 };
    Some(Forward { op, inputs: vec![0, 1, 1], outputs: vec![(1, 2)] })
}

/// See [`Twin::independent_axes`]: samples.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    match call.op {
        Op::GroupNorm { .. } => IndependentAxis::leading(call, &[1, 2]),
        Op::GroupNormGrad { .. } => IndependentAxis::leading(call, &[1]),
        _ => Vec::new(),
    }
}

/// See [`Twin::probes`]: many samples, more values of a group than a workgroup has invocations, and
/// more channels than a workgroup has columns. The number of channels is an odd multiple of the
/// call's, so that a group has whole vectors if it has them in the call.
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let c = inputs[0].last().copied().unwrap_or(1);
    let groups = match op {
        Op::GroupNorm { groups, .. } => *groups,
        Op::GroupNormGrad { groups } | Op::GroupNormAffineGrad { groups } => *groups,
        other => panic!("{other} is not a group normalization"),
    };
    let mut wide = c;
    while wide <= 128 {
        wide += 2 * c;
    }
    // More groups than a workgroup has invocations, as software adapters give each of them one.
    let many = 64 / groups + 1;
    let mut sizes = Vec::new();
    for [samples, positions, c] in [[many, 5, c], [3, 67, wide], [2, 131, c]] {
        let x = vec![samples, positions, c];
        let stats = vec![samples, groups, 2];
        sizes.push(match op {
            Op::GroupNorm { .. } => vec![x, vec![c], vec![c]],
            Op::GroupNormGrad { .. } => vec![x.clone(), vec![c], stats, x],
            _ => vec![x.clone(), stats, x],
        });
    }
    calls(op, sizes)
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    let mut calls = Vec::new();
    // Groups of vectors, and of floats.
    for (groups, c) in [(8, 64), (5, 35)] {
        let x = vec![4, 8, 8, c];
        let stats = vec![4, groups, 2];
        let norm = Op::GroupNorm { groups, eps: 1e-5 };
        calls.push((norm, vec![x.clone(), vec![c], vec![c]]));
        let inputs = vec![x.clone(), vec![c], stats.clone(), x.clone()];
        calls.push((Op::GroupNormGrad { groups }, inputs));
        calls.push((Op::GroupNormAffineGrad { groups }, vec![x.clone(), stats, x]));
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{InputFill, generate};
    use crate::testing::gradient::check_gradient;
    use crate::testing::{check_with, reference as expected};
    use potluck_core::{HostTensor, Shape};

    const EPS: f32 = 1e-5;

    type Input = (Shape, HostTensor<f64>);

    fn input(shape: Shape, rows: usize, fill: InputFill, which: usize) -> Input {
        let values = generate(fill, shape.elements(rows), which);
        (shape, values)
    }

    /// Returns `x, weight, bias` for samples of these dimensions.
    fn inputs(dims: &[usize], rows: usize, offset: f32) -> [Input; 3] {
        let c = Shape::fixed(&dims[dims.len() - 1..]);
        let x = Shape::batched(&[&[1], dims].concat());
        [
            input(x, rows, InputFill::Scaled(1.0, offset), 0),
            input(c.clone(), rows, InputFill::Scaled(0.5, 1.0), 1),
            input(c, rows, InputFill::Normal, 2),
        ]
    }

    /// Inputs of the gradients: `x, weight, stats, dy`.
    fn gradient_inputs(forward: &[Input; 3], groups: usize, rows: usize) -> [Input; 4] {
        let op = Op::GroupNorm { groups, eps: EPS };
        let stats = expected(&op, forward, rows).remove(1);
        let [x, weight, _] = forward.clone();
        let stats = (Shape::batched(&[1, groups, 2]), HostTensor::Float(stats));
        let dy = input(x.0.clone(), rows, InputFill::Normal, 3);
        [x, weight, stats, dy]
    }

    fn check_all(dims: &[usize], groups: usize, rows: usize, offset: f32) {
        let forward = inputs(dims, rows, offset);
        check_with(Op::GroupNorm { groups, eps: EPS }, &forward, rows);
        let grad = gradient_inputs(&forward, groups, rows);
        check_with(Op::GroupNormGrad { groups }, &grad, rows);
        let [x, _, stats, dy] = grad;
        check_with(Op::GroupNormAffineGrad { groups }, &[x, stats, dy], rows);
    }

    /// Groups of one channel, of all, of whole vectors and not; one position and many.
    #[test]
    fn pictures_and_sequences_agree() {
        let cases: [(&[usize], usize, usize); 8] = [
            (&[4, 5, 6], 3, 3),
            (&[4, 5, 6], 6, 2),
            (&[7, 12], 1, 3),
            (&[3, 3, 32], 4, 2),
            (&[16], 2, 3),
            (&[9, 9, 10], 2, 1),
            (&[17, 17, 8], 2, 2),
            (&[1, 300, 68], 17, 1),
        ];
        for (dims, groups, rows) in cases {
            check_all(dims, groups, rows, 0.3);
        }
    }

    #[test]
    fn a_mean_far_above_the_deviation_loses_nothing() {
        check_all(&[6, 6, 8], 2, 2, 100.0);
    }

    /// One group per channel normalizes each channel of a sample; one group over one position is a
    /// layer norm.
    #[test]
    fn one_group_at_one_position_is_layer_norm() {
        let forward = inputs(&[12], 3, 0.5);
        let ours = expected(&Op::GroupNorm { groups: 1, eps: EPS }, &forward, 3);
        let layer = expected(&Op::LayerNorm { eps: EPS }, &forward, 3);
        for (ours, layer) in ours[0].iter().zip(&layer[0]) {
            assert!((ours - layer).abs() < 1e-12, "{ours} and {layer}");
        }
    }

    #[test]
    fn gradients_are_the_derivatives() {
        let (groups, rows) = (2, 2);
        let forward = inputs(&[2, 3, 4], rows, 0.3);
        let grad = gradient_inputs(&forward, groups, rows);
        let HostTensor::Float(dy) = &grad[3].1 else { panic!("floats") };
        let op = Op::GroupNorm { groups, eps: EPS };
        let weights = [dy.clone(), vec![0.0; 2 * groups * rows]];
        let dx = expected(&Op::GroupNormGrad { groups }, &grad, rows);
        let [x, _, stats, dy] = grad;
        let affine = expected(&Op::GroupNormAffineGrad { groups }, &[x, stats, dy], rows);
        for (which, gradient) in [(0, &dx[0]), (1, &affine[0]), (2, &affine[1])] {
            check_gradient(&op, &forward, rows, which, &weights, gradient);
        }
    }
}
