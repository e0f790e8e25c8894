//! Layer normalization, root mean square normalization, and their gradients. Twin of
//! `shaders/layer_norm.wgsl`, which has the formulas.

use rayon::prelude::*;

use super::dispatch_parts::push_new;
use super::layer_norm_consts::{adds, is_centered, with_consts};
use super::row_terms::RowTerms;
use super::{layer_norm_group, layer_norm_rows, row_sums};
use crate::call_shapes::{C, N, PROBE_ROWS, calls};
use crate::cpu_kernel::TASK;
use crate::dispatch::grid;
use crate::simd::{add, mul_add, sum_of, vectorized};
use crate::twin::{Forward, IndependentAxis, normal_inputs};
use crate::{CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant};
use potluck_core::HostTensorView;
use potluck_graph::Op;

/// Twin of [`Op::LayerNorm`], [`Op::RmsNorm`] and their gradients.
pub static TWIN: Twin = Twin {
    name: "layer_norm",
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

/// Terms of the gradients of weight and bias for `shaders/row_sums.wgsl`, up to the return
/// statement of `term`: x, stats and dy are bound.
const TERMS: &str = "
@group(0) @binding(0) var<storage, read> x: array<Value>;
@group(0) @binding(1) var<storage, read> stats: array<vec2f>;
@group(0) @binding(2) var<storage, read> dy: array<Value>;
fn term(row: u32, at: u32) -> Sums {
    let of_row = stats[row];
    let bias = dy[at];
    let weight = bias * (x[at] - of_row.x) * of_row.y;
";

/// Rows per partial sum of the weight gradient in `fast`. The number is fixed, so that the order
/// of the sum depends neither on timing nor on the number of threads.
const CHUNK_ROWS: usize = 64;

/// Reference: `x, weight [, bias] -> y, stats`, or `x, weight, stats, dy -> dx`, or
/// `x, stats, dy -> dweight [, dbias]`. Without centering the mean in `stats` is 0.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let inputs: Vec<&[T]> = inputs.iter().map(|input| input.floats()).collect();
    let (rows, c) = call.rows_and_last(0);
    match (call.op, inputs.as_slice(), outputs) {
        (Op::LayerNorm { eps } | Op::RmsNorm { eps }, [x, weight, bias @ ..], [y, stats]) => {
            let eps = T::from_f64(f64::from(*eps));
            for (row, y) in y.chunks_mut(c).enumerate() {
                let x = &x[row * c..][..c];
                let (mean, rstd) = statistics(x, eps, is_centered(call.op));
                stats[2 * row] = mean;
                stats[2 * row + 1] = rstd;
                for k in 0..c {
                    let bias = if let [bias] = bias { bias[k] } else { T::zero() };
                    y[k] = (x[k] - mean) * rstd * weight[k] + bias;
                }
            }
        }
        (Op::LayerNormGrad | Op::RmsNormGrad, [x, weight, stats, dy], [dx]) => {
            for (row, dx) in dx.chunks_mut(c).enumerate() {
                let own = [&x[row * c..][..c], &dy[row * c..][..c]];
                let stats = [stats[2 * row], stats[2 * row + 1]];
                reference_gradient(own, weight, stats, is_centered(call.op), dx);
            }
        }
        (op, [x, stats, dy], [dweight, dbias @ ..]) if sums_of(op).is_some() => {
            for (k, dweight) in dweight.iter_mut().enumerate() {
                let terms = (0..rows).map(|row| {
                    let i = row * c + k;
                    dy[i] * (x[i] - stats[2 * row]) * stats[2 * row + 1]
                });
                let sum: T = terms.sum();
                *dweight = if call.accumulates() { *dweight + sum } else { sum };
            }
            if let [dbias] = dbias {
                for (k, dbias) in dbias.iter_mut().enumerate() {
                    let sum: T = (0..rows).map(|row| dy[row * c + k]).sum();
                    *dbias = if call.accumulates() { *dbias + sum } else { sum };
                }
            }
        }
        (other, ..) => panic!("{other} is not a layer normalization"),
    }
}

/// Computes the gradient of a row, given its `x` and `dy`, and its mean and reciprocal standard
/// deviation.
fn reference_gradient<T: Float>(
    [x, dy]: [&[T]; 2],
    weight: &[T],
    [mean, rstd]: [T; 2],
    is_centered: bool,
    dx: &mut [T],
) {
    let c = x.len();
    let count = T::from_f64(c as f64);
    let xhat = |k: usize| (x[k] - mean) * rstd;
    let g = |k: usize| weight[k] * dy[k];
    let mean_g = if is_centered { (0..c).map(g).sum::<T>() / count } else { T::zero() };
    let mean_g_xhat = (0..c).map(|k| g(k) * xhat(k)).sum::<T>() / count;
    for (k, dx) in dx.iter_mut().enumerate() {
        *dx = rstd * (g(k) - mean_g - xhat(k) * mean_g_xhat);
    }
}

/// Returns the number of sums over rows that an op computes, the gradients of weight and bias;
/// `None` if it is the normalization or its gradient by `x`.
fn sums_of(op: &Op) -> Option<usize> {
    match op {
        Op::LayerNormWeightGrad => Some(1),
        Op::LayerNormAffineGrad => Some(2),
        _ => None,
    }
}

/// Returns true if an op is a normalization, and not a gradient of one.
fn is_forward(op: &Op) -> bool {
    matches!(op, Op::LayerNorm { .. } | Op::RmsNorm { .. })
}

/// Returns the mean and the reciprocal standard deviation of a row; 0 and the reciprocal root mean
/// square without centering.
fn statistics<T: Float>(x: &[T], eps: T, is_centered: bool) -> (T, T) {
    let count = T::from_f64(x.len() as f64);
    let mean = if is_centered { x.iter().copied().sum::<T>() / count } else { T::zero() };
    let variance = x.iter().map(|x| (*x - mean) * (*x - mean)).sum::<T>() / count;
    (mean, (variance + eps).sqrt().recip())
}

/// CPU kernel: parallel over tasks of whole rows, each row in vectorized loops.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let inputs: Vec<&[f32]> = inputs.iter().map(|input| input.floats()).collect();
    let c = call.rows_and_last(0).1;
    let rows = (TASK / c).max(1);
    match (call.op, inputs.as_slice(), outputs) {
        (Op::LayerNorm { eps } | Op::RmsNorm { eps }, [x, weight, bias @ ..], [y, stats]) => {
            let bias = bias.first().copied();
            let kind = (*eps, is_centered(call.op));
            let x = x.par_chunks(rows * c);
            let tasks = (x, y.par_chunks_mut(rows * c), stats.par_chunks_mut(rows * 2));
            tasks.into_par_iter().for_each(|(x, y, stats)| {
                forward_rows(x, weight, bias, kind, y, stats);
            });
        }
        (Op::LayerNormGrad | Op::RmsNormGrad, [x, weight, stats, dy], [dx]) => {
            let is_centered = is_centered(call.op);
            let x = x.par_chunks(rows * c);
            let dy = dy.par_chunks(rows * c);
            let tasks = (x, stats.par_chunks(rows * 2), dy, dx.par_chunks_mut(rows * c));
            tasks.into_par_iter().for_each(|(x, stats, dy, dx)| {
                grad_rows(x, weight, stats, dy, dx, is_centered);
            });
        }
        (op, [x, stats, dy], outputs) if sums_of(op) == Some(outputs.len()) => {
            let x = x.par_chunks(CHUNK_ROWS * c);
            let chunks = (x, stats.par_chunks(CHUNK_ROWS * 2), dy.par_chunks(CHUNK_ROWS * c));
            let has_bias = outputs.len() == 2;
            let sums =
                chunks.into_par_iter().map(|(x, stats, dy)| affine_rows(x, stats, dy, c, has_bias));
            let sums: Vec<Vec<f32>> = sums.collect();
            add_sums(&sums, outputs, call.accumulates());
        }
        (other, ..) => panic!("{other} is not a layer normalization"),
    }
}

/// Adds the sums of chunks of rows, each with the sums of all outputs one after the other, to the
/// outputs, or replaces the outputs.
fn add_sums(sums: &[Vec<f32>], outputs: &mut [&mut [f32]], accumulate: bool) {
    if !accumulate {
        for output in outputs.iter_mut() {
            output.fill(0.0);
        }
    }
    for sum in sums {
        let parts = sum.chunks(outputs[0].len());
        for (output, part) in outputs.iter_mut().zip(parts) {
            add(output, part);
        }
    }
}

vectorized! {
    fn forward_rows<S>(
        x: &[f32],
        weight: &[f32],
        bias: Option<&[f32]>,
        kind: (f32, bool),
        y: &mut [f32],
        stats: &mut [f32],
    ) {
        let (eps, is_centered) = kind;
        let c = weight.len();
        let rows = x.chunks_exact(c).zip(y.chunks_exact_mut(c)).zip(stats.chunks_mut(2));
        for ((x, y), stats) in rows {
            let mean = if is_centered { sum_of(c, |k| x[k]) / c as f32 } else { 0.0 };
            let variance = sum_of(c, |k| (x[k] - mean) * (x[k] - mean)) / c as f32;
            let rstd = 1.0 / (variance + eps).sqrt();
            for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
                *y = (*x - mean) * rstd * *weight;
            }
            if let Some(bias) = bias {
                for (y, bias) in y.iter_mut().zip(bias) {
                    *y += *bias;
                }
            }
            (stats[0], stats[1]) = (mean, rstd);
        }
    }

    fn grad_rows<S>(
        x: &[f32],
        weight: &[f32],
        stats: &[f32],
        dy: &[f32],
        dx: &mut [f32],
        is_centered: bool,
    ) {
        let c = weight.len();
        let rows = x.chunks_exact(c).zip(dy.chunks_exact(c)).zip(dx.chunks_exact_mut(c));
        for (((x, dy), dx), stats) in rows.zip(stats.chunks_exact(2)) {
            let (mean, rstd) = (stats[0], stats[1]);
            let sum_g = if is_centered { sum_of(c, |k| weight[k] * dy[k]) } else { 0.0 };
            let mean_g = sum_g / c as f32;
            let mean_g_xhat = sum_of(c, |k| weight[k] * dy[k] * (x[k] - mean)) * rstd / c as f32;
            for (((dx, x), dy), weight) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                let xhat = (*x - mean) * rstd;
                *dx = rstd * (mul_add::<S>(*weight, *dy, -mean_g) - xhat * mean_g_xhat);
            }
        }
    }

    fn affine_rows<S>(
        x: &[f32],
        stats: &[f32],
        dy: &[f32],
        c: usize,
        has_bias: bool,
    ) -> Vec<f32> {
        let mut sums = vec![0.0; if has_bias { 2 * c } else { c }];
        let (dweight, dbias) = sums.split_at_mut(c);
        let rows = x.chunks_exact(c).zip(dy.chunks_exact(c)).zip(stats.chunks_exact(2));
        for ((x, dy), stats) in rows {
            let (mean, rstd) = (stats[0], stats[1]);
            for ((sum, x), dy) in dweight.iter_mut().zip(x).zip(dy) {
                *sum = mul_add::<S>(*dy, (*x - mean) * rstd, *sum);
            }
            for (sum, dy) in dbias.iter_mut().zip(dy) {
                *sum += *dy;
            }
        }
        sums
    }
}

/// Static choice: on GPUs, workgroups that share rows; on software adapters one invocation per row,
/// with vectors of 4 if the width is a multiple of 4, else scalars.
///
/// On two busy cores of an AMD EPYC with (1024, 768), the vector kernels took 0.6 (llvmpipe 0.4)
/// of the time of the scalar kernels in the forward pass and 0.85 (0.3) for the gradient.
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    if let Some((name, terms)) = terms(call) {
        return row_sums::chosen(name, &terms, call.accumulates(), caps).dispatches;
    }
    if caps.wants_gpu_variants()
        && let Some(best) = by_workgroups(call).pop()
    {
        return best.dispatches;
    }
    vec![by_rows(call)]
}

/// Returns the sums over rows of a gradient of parameters, with the name of its kernels; `None` of
/// another op.
pub(super) fn terms(call: &OpCall) -> Option<(&'static str, RowTerms)> {
    let sums = sums_of(call.op)?;
    let (rows, c) = call.rows_and_last(0);
    let (name, result) = match sums {
        1 => ("layer_norm_weight", "weight"),
        _ => ("layer_norm_affine", "Sums(weight, bias)"),
    };
    let terms = RowTerms {
        outer: 1,
        middle: rows,
        inner: c,
        operands: [0, 1, 2].map(Operand::Input).to_vec(),
        sums,
        vectors: true,
        words: [0; 3],
        text: format!("{TERMS}    return {result};\n}}\n"),
    };
    Some((name, terms))
}

/// Kernel with one invocation per row.
fn by_rows(call: &OpCall) -> Dispatch {
    let (rows, c) = call.rows_and_last(0);
    let entry = match (is_forward(call.op), c.is_multiple_of(4)) {
        (true, true) => "forward4",
        (true, false) => "forward",
        (_, true) => "grad4",
        (_, false) => "grad",
    };
    one(call, entry, grid(rows, 64))
}

/// Returns all GPU kernel variants of the call: one invocation per row, or per column for the
/// gradients of parameters; the static choice for software adapters; and variants whose workgroups
/// share rows.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    if let Some((name, terms)) = terms(call) {
        return row_sums::variants(name, &terms, call.accumulates(), caps);
    }
    let (rows, _) = call.rows_and_last(0);
    let entry = if is_forward(call.op) { "forward" } else { "grad" };
    let mut variants = vec![named(one(call, entry, grid(rows, 64)))];
    push_new(&mut variants, named(by_rows(call)));
    for variant in by_workgroups(call) {
        let is_for_gpus = variant.dispatches[0].shader.file == "layer_norm_rows";
        if caps.wants_gpu_variants() || !is_for_gpus {
            push_new(&mut variants, variant);
        }
    }
    variants
}

/// Returns the variants whose workgroups share rows, the best for GPUs at the end; none if a row
/// fits neither in workgroup memory nor in registers.
fn by_workgroups(call: &OpCall) -> Vec<Variant> {
    let Dispatch { operands, params, .. } = one(call, "", [1; 3]);
    let mut variants = Vec::new();
    variants.extend(layer_norm_group::variant(call, operands.clone(), params.clone()));
    variants.extend(layer_norm_rows::variant(call, operands, params));
    variants
}

fn named(way: Dispatch) -> Variant {
    Variant::new(format!("layer_norm_{}", way.shader.entry), vec![way])
}

fn one(call: &OpCall, entry: &'static str, groups: [u32; 3]) -> Dispatch {
    use Operand::{Input, Output};
    let (rows, c) = call.rows_and_last(0);
    let (operands, eps, flag) = match call.op.root_op() {
        Op::LayerNorm { eps } | Op::RmsNorm { eps } => {
            // Without a bias, the weight is bound in its place and not read.
            let has_bias = call.inputs.len() == 3;
            let bias = Input(if has_bias { 2 } else { 1 });
            (vec![Input(0), Input(1), bias, Output(0), Output(1)], *eps, has_bias)
        }
        Op::LayerNormGrad | Op::RmsNormGrad => {
            let residual = Input(if adds(call) { 4 } else { 3 });
            let inputs = [0, 1, 2, 3].map(Input);
            ([&inputs[..], &[Output(0), residual]].concat(), 0.0, false)
        }
        other => panic!("{other} is not a layer normalization"),
    };
    Dispatch {
        shader: with_consts(Shader::new("layer_norm", entry), call),
        operands,
        params: vec![rows as u32, c as u32, eps.to_bits(), u32::from(flag)],
        groups,
    }
}

/// Returns the cost: a few FLOPs per element of `x`. The kernels are bound by memory bandwidth.
pub fn cost(call: &OpCall) -> Cost {
    let flops = match call.op {
        Op::LayerNormGrad | Op::RmsNormGrad => 11.0,
        Op::LayerNormWeightGrad => 4.0,
        Op::LayerNormAffineGrad => 5.0,
        _ => 8.0,
    };
    Cost { flops: flops * call.input_len(0) as f64, bytes: Cost::moved(call) }
}

/// See [`Twin::iterations`]: a row in three passes, by blocks of 64; the gradients of parameters
/// are sums over rows.
fn iterations(call: &OpCall) -> usize {
    if let Some((_, terms)) = terms(call) {
        return row_sums::iterations(&terms);
    }
    let (_, c) = call.rows_and_last(0);
    3 * c + c / 32
}

/// See [`Twin::forward`].
fn forward(op: &Op) -> Option<Forward> {
    let norm = match op {
        Op::LayerNormGrad => Op::LayerNorm { eps: 1e-5 },
        Op::RmsNormGrad => Op::RmsNorm { eps: 1e-5 },
        _ => return None,
    };
    Some(Forward { op: norm, inputs: vec![0, 1], outputs: vec![(1, 2)] })
}

/// See [`Twin::independent_axes`]: rows, or columns of the gradients by weight and bias.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    if call.inputs[0].len() < 2 {
        return Vec::new();
    }
    match call.op {
        Op::LayerNorm { .. } | Op::RmsNorm { .. } => IndependentAxis::leading(call, &[1, 2]),
        Op::LayerNormGrad | Op::RmsNormGrad => IndependentAxis::leading(call, &[1]),
        _ => {
            let last = call.inputs[0].len().checked_sub(1);
            let outputs = vec![Some(0); call.outputs.len()];
            IndependentAxis::of(call, vec![last, None, last], outputs).into_iter().collect()
        }
    }
}

/// See [`Twin::probes`].
pub(super) fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let c = inputs[0].last().copied().unwrap_or(1);
    let mut probe_rows = PROBE_ROWS.to_vec();
    if sums_of(op).is_some() {
        // Several blocks of rows.
        probe_rows.push(259);
    }
    let mut sizes = Vec::new();
    for rows in probe_rows {
        sizes.push(match op {
            Op::LayerNormGrad | Op::RmsNormGrad => {
                // With one or two values, the gradient is nearly 0 and consists of rounding errors.
                let c = if c < 8 { c + 8 } else { c };
                vec![vec![rows, c], vec![c], vec![rows, 2], vec![rows, c]]
            }
            Op::LayerNormWeightGrad | Op::LayerNormAffineGrad => {
                vec![vec![rows, c], vec![rows, 2], vec![rows, c]]
            }
            _ => [vec![vec![rows, c]], vec![vec![c]; inputs.len() - 1]].concat(),
        });
    }
    calls(op, sizes)
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    let x = vec![N, C];
    let stats = vec![N, 2];
    vec![
        (Op::LayerNorm { eps: 1e-5 }, vec![x.clone(), vec![C], vec![C]]),
        (Op::LayerNormGrad, vec![x.clone(), vec![C], stats.clone(), x.clone()]),
        (Op::RmsNorm { eps: 1e-5 }, vec![x.clone(), vec![C]]),
        (Op::RmsNormGrad, vec![x.clone(), vec![C], stats.clone(), x.clone()]),
        (Op::LayerNormWeightGrad, vec![x.clone(), stats.clone(), x.clone()]),
        (Op::LayerNormAffineGrad, vec![x.clone(), stats, x]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::InputFill;
    use crate::testing::{self, check, check_with};
    use potluck_core::{DType, HostTensor, Shape};
    use potluck_graph::{Binary, EpilogueOp, shapes};

    const EPS: f32 = 1e-5;

    /// Returns `x, weight, bias` for rows of `c` values around an offset.
    fn inputs(per_row: usize, c: usize, rows: usize, offset: f32) -> Vec<(Shape, HostTensor<f64>)> {
        let x = Shape::batched(&[per_row, c]);
        let fill = InputFill::Scaled(1.0, offset);
        let x_values = testing::generate(fill, x.elements(rows), 0);
        let weight = testing::generate(InputFill::Scaled(0.5, 1.0), c, 1);
        let bias = testing::generate(InputFill::Normal, c, 2);
        vec![(x, x_values), (Shape::fixed(&[c]), weight), (Shape::fixed(&[c]), bias)]
    }

    /// Inputs of both gradients for the same `x` and weight, and a random `dy`.
    fn gradient_inputs(
        forward: &[(Shape, HostTensor<f64>)],
        rows: usize,
    ) -> [Vec<(Shape, HostTensor<f64>)>; 2] {
        let op = Op::LayerNorm { eps: EPS };
        let stats = testing::reference(&op, forward, rows).remove(1);
        let (x, weight) = (forward[0].clone(), forward[1].clone());
        let stats = (Shape::batched(&[x.0.dims()[0], 2]), HostTensor::Float(stats));
        let dy = (x.0.clone(), testing::generate(InputFill::Normal, x.0.elements(rows), 3));
        [vec![x.clone(), weight, stats.clone(), dy.clone()], vec![x, stats, dy]]
    }

    /// Checks the gradient alone, and with a sum of another tensor.
    fn check_gradient(grad: &[(Shape, HostTensor<f64>)], rows: usize) {
        check_with(Op::LayerNormGrad, grad, rows);
        let x = &grad[0].0;
        let residual = testing::generate(InputFill::Normal, x.elements(rows), 4);
        check_with(with_sum(), &[grad, &[(x.clone(), residual)]].concat(), rows);
    }

    /// Checks the gradients of the weight, and of weight and bias.
    fn check_sums(inputs: &[(Shape, HostTensor<f64>)], rows: usize) {
        check_with(Op::LayerNormWeightGrad, inputs, rows);
        check_with(Op::LayerNormAffineGrad, inputs, rows);
    }

    /// Checks root mean square normalization and its gradients.
    fn check_rms(forward: &[(Shape, HostTensor<f64>)], rows: usize) {
        let (op, inputs) = (Op::RmsNorm { eps: EPS }, &forward[..2]);
        check_with(op.clone(), inputs, rows);
        let (x, weight) = (inputs[0].clone(), inputs[1].clone());
        let stats = testing::reference(&op, inputs, rows).remove(1);
        let stats = (Shape::batched(&[x.0.dims()[0], 2]), HostTensor::Float(stats));
        let dy = (x.0.clone(), testing::generate(InputFill::Normal, x.0.elements(rows), 3));
        let grad = [x.clone(), weight, stats.clone(), dy.clone()];
        check_with(Op::RmsNormGrad, &grad, rows);
        let residual = testing::generate(InputFill::Normal, x.0.elements(rows), 4);
        let epilogue = vec![EpilogueOp::Binary(Binary::Add)];
        let with_sum = Op::Fused { root: Box::new(Op::RmsNormGrad), epilogue };
        check_with(with_sum, &[&grad[..], &[(x.0.clone(), residual)]].concat(), rows);
        check_sums(&[x, stats, dy], rows);
    }

    fn with_sum() -> Op {
        let epilogue = vec![EpilogueOp::Binary(Binary::Add)];
        Op::Fused { root: Box::new(Op::LayerNormGrad), epilogue }
    }

    #[test]
    fn only_a_sum_of_whole_tensors_is_fused_with_the_gradient() {
        let x = Shape::batched(&[3, 8]);
        let (c, stats) = (Shape::fixed(&[8]), Shape::batched(&[3, 2]));
        let refused = |op: &Op, residual: Shape| {
            let inputs = [&x, &c, &stats, &x, &residual].map(|shape| (shape.clone(), DType::F32));
            shapes::outputs(op, &inputs).is_err()
        };
        assert!(!refused(&with_sum(), x.clone()));
        assert!(refused(&with_sum(), c.clone()));
        let epilogue = vec![EpilogueOp::Binary(Binary::Mul)];
        let product = Op::Fused { root: Box::new(Op::LayerNormGrad), epilogue };
        assert!(refused(&product, x.clone()));
    }

    #[test]
    fn every_width_agrees_with_and_without_bias() {
        for (per_row, c, rows) in
            [(1, 3, 3), (3, 7, 5), (5, 33, 4), (64, 128, 2), (2, 301, 3), (1, 2052, 2)]
        {
            let forward = inputs(per_row, c, rows, 0.3);
            check_with(Op::LayerNorm { eps: EPS }, &forward, rows);
            check_with(Op::LayerNorm { eps: EPS }, &forward[..2], rows);
            let [grad, weight_grad] = gradient_inputs(&forward, rows);
            check_gradient(&grad, rows);
            check_sums(&weight_grad, rows);
            check_rms(&forward, rows);
        }
    }

    /// Rows in registers: of one vector, with idle lanes, of several items per lane, of the most;
    /// and more rows than fill whole workgroups.
    #[test]
    fn rows_of_vectors_agree() {
        for (per_row, c, rows) in [(1, 4, 37), (3, 36, 7), (5, 768, 3), (3, 1600, 1), (2, 8192, 1)]
        {
            let forward = inputs(per_row, c, rows, 0.3);
            check_with(Op::LayerNorm { eps: EPS }, &forward, rows);
            check_with(Op::LayerNorm { eps: EPS }, &forward[..2], rows);
            let [grad, _] = gradient_inputs(&forward, rows);
            if c > 4 {
                check_gradient(&grad, rows);
                check_rms(&forward, rows);
            }
        }
    }

    /// The gradient of a row of one value is exactly zero, for which no relative error is
    /// defined, so only the forward pass is checked.
    #[test]
    fn a_row_of_one_value_gives_the_bias() {
        check_with(Op::LayerNorm { eps: EPS }, &inputs(1, 1, 3, 0.3), 3);
    }

    #[test]
    fn a_batched_vector_per_row_is_normalized() {
        let x = (Shape::batched(&[1, 2, 9]), InputFill::Normal);
        let weight = (Shape::fixed(&[9]), InputFill::Normal);
        check(Op::LayerNorm { eps: EPS }, &[x, weight], 3);
    }

    #[test]
    fn a_mean_far_above_the_deviation_loses_nothing() {
        let rows = 3;
        let forward = inputs(5, 96, rows, 100.0);
        check_with(Op::LayerNorm { eps: EPS }, &forward, rows);
        let [grad, weight_grad] = gradient_inputs(&forward, rows);
        check_with(Op::LayerNormGrad, &grad, rows);
        check_sums(&weight_grad, rows);
    }

    #[test]
    fn gradients_of_more_rows_than_a_task_has_agree() {
        let rows = 300;
        let forward = inputs(2, 65, rows, -0.5);
        check_with(Op::LayerNorm { eps: EPS }, &forward, rows);
        let [grad, weight_grad] = gradient_inputs(&forward, rows);
        check_with(Op::LayerNormGrad, &grad, rows);
        check_sums(&weight_grad, rows);
    }

    #[test]
    fn many_rows_are_summed_whole() {
        for c in [3, 8] {
            let forward = inputs(70_001, c, 1, 0.3);
            let [_, weight_grad] = gradient_inputs(&forward, 1);
            check_sums(&weight_grad, 1);
        }
    }

    /// Returns `sum(dy y)` with element `at` of input `which` shifted by `step`.
    fn objective(
        inputs: &[(Shape, HostTensor<f64>)],
        dy: &[f64],
        rows: usize,
        (which, at, step): (usize, usize, f64),
    ) -> f64 {
        let mut inputs = inputs.to_vec();
        if let HostTensor::Float(values) = &mut inputs[which].1 {
            values[at] += step;
        }
        let y = testing::reference(&Op::LayerNorm { eps: EPS }, &inputs, rows).remove(0);
        y.iter().zip(dy).map(|(y, dy)| y * dy).sum()
    }

    #[test]
    fn gradients_are_finite_differences() {
        let rows = 2;
        let forward = inputs(2, 5, rows, 0.3);
        let [grad, weight_grad] = gradient_inputs(&forward, rows);
        let HostTensor::Float(dy) = &grad[3].1 else { panic!("dy is of floats") };
        let dx = testing::reference(&Op::LayerNormGrad, &grad, rows).remove(0);
        let dweight = testing::reference(&Op::LayerNormWeightGrad, &weight_grad, rows).remove(0);
        let affine = testing::reference(&Op::LayerNormAffineGrad, &weight_grad, rows);
        assert_eq!(affine[0], dweight);
        for (which, gradient) in [(0, &dx), (1, &dweight), (2, &affine[1])] {
            let scale = gradient.iter().fold(0.0f64, |a, g| a.max(g.abs()));
            for (at, exact) in gradient.iter().enumerate() {
                let value = |step| objective(&forward, dy, rows, (which, at, step));
                let slope = (value(1e-6) - value(-1e-6)) / 2e-6;
                let error = (slope - exact).abs() / scale;
                assert!(error < 1e-5, "input {which}, element {at}: {slope} and {exact}");
            }
        }
    }
}
