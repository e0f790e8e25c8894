//! Batch normalization and its gradients. Twin of `shaders/batch_norm.wgsl`, which has the
//! formulas.

use rayon::prelude::*;

use super::dispatch_parts::as_words;
use crate::call_shapes::{C, N, calls};
use crate::dispatch::{ITERATIONS_MAX, grid};
use crate::harness::InputFill;
use crate::simd::{mul_add, vectorized};
use crate::twin::{Forward, IndependentAxis, InputSpec, short_loops};
use crate::{CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant};
use potluck_core::HostTensorView;
use potluck_graph::Op;

/// Twin of [`Op::BatchNorm`] and its gradients.
pub static TWIN: Twin = Twin {
    name: "batch_norm",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: false,
    iterations: short_loops,
    inputs,
    forward,
    independent_axes,
    probes,
    catalog,
};

/// Invocations that sum blocks of rows: enough to fill a large GPU.
const INVOCATIONS: usize = 16 * 1024;

/// Minimum rows of a block, so that there are far fewer sums of blocks than rows.
const STRIP_MIN: usize = 16;

/// Columns of a workgroup that adds the sums of blocks.
const COLUMNS: u32 = 16;

/// Elements per rayon task of `fast`; this fixes the order of its sums.
const TASK: usize = 16 * 1024;

/// Elements of the columns of `fast`, repeated so that short rows fill vectors too.
const TILED: usize = 64;

/// Reference: `x, weight, bias, running_mean, running_variance -> y, stats, mean_sum,
/// variance_sum`, or `x, stats, dy -> dweight, dbias`, or
/// `x, weight, stats, dy, dweight, dbias -> dx`.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let inputs: Vec<&[T]> = inputs.iter().map(|input| input.floats()).collect();
    let (rows, c) = call.rows_and_last(0);
    let training = call.random.training;
    match (call.op, inputs.as_slice(), outputs) {
        (Op::BatchNorm { eps }, [x, w, b, mean, variance], [y, stats, mean_sum, variance_sum]) => {
            let eps = T::from_f64(f64::from(*eps));
            let samples = T::from_f64(call.inputs[0][0] as f64);
            for k in 0..c {
                let values: Vec<T> = x.iter().skip(k).step_by(c).copied().collect();
                let (mean, variance, unbiased) = if training {
                    statistics(&values)
                } else {
                    (mean[k], variance[k], variance[k])
                };
                let rstd = (variance + eps).sqrt().recip();
                stats[k] = mean;
                stats[c + k] = rstd;
                mean_sum[k] = samples * mean;
                variance_sum[k] = samples * unbiased;
                for (row, x) in values.iter().enumerate() {
                    y[row * c + k] = (*x - mean) * rstd * w[k] + b[k];
                }
            }
        }
        (Op::BatchNormAffineGrad, [x, stats, dy], [dweight, dbias]) => {
            for k in 0..c {
                let column = (0..rows).map(|row| row * c + k);
                let products = column.clone().map(|i| (x[i] - stats[k]) * stats[c + k] * dy[i]);
                dweight[k] = products.sum();
                dbias[k] = column.map(|i| dy[i]).sum();
            }
        }
        (Op::BatchNormGrad, [x, weight, stats, dy, dweight, dbias], [dx]) => {
            let share = if training { T::from_f64(rows as f64).recip() } else { T::zero() };
            for (i, dx) in dx.iter_mut().enumerate() {
                let k = i % c;
                let xhat = (x[i] - stats[k]) * stats[c + k];
                let common = (dbias[k] + xhat * dweight[k]) * share;
                *dx = weight[k] * stats[c + k] * (dy[i] - common);
            }
        }
        (other, ..) => panic!("{other} is not a batch normalization"),
    }
}

/// Mean, variance and unbiased variance, which is 0 for a single value.
fn statistics<T: Float>(values: &[T]) -> (T, T, T) {
    let count = T::from_f64(values.len() as f64);
    let mean = values.iter().copied().sum::<T>() / count;
    let squares = values.iter().map(|x| (*x - mean) * (*x - mean)).sum::<T>();
    (mean, squares / count, squares / (count - T::one()).max(T::one()))
}

/// CPU kernel: parallel over tasks of whole rows, in loops over rows that are repeated until they
/// fill vectors.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let inputs: Vec<&[f32]> = inputs.iter().map(|input| input.floats()).collect();
    let (rows, c) = call.rows_and_last(0);
    let training = call.random.training;
    // Rows per tile, and tiles per task.
    let times = TILED.div_ceil(c);
    let task = (TASK / (times * c)).max(1) * times * c;
    match (call.op, inputs.as_slice(), outputs) {
        (Op::BatchNorm { eps }, [x, w, b, mean, variance], [y, stats, mean_sum, variance_sum]) => {
            let samples = call.inputs[0][0] as f32;
            let (new_mean, rstd) = stats.split_at_mut(c);
            if training {
                let origin = x[..c].repeat(times);
                let sums = two_sums(x, x, task, c, |x, _, sums| shifted_sums(x, &origin, sums));
                let count = rows as f64;
                for k in 0..c {
                    let shift = sums[k] / count;
                    let squares = (sums[c + k] - sums[k] * shift).max(0.0);
                    new_mean[k] = (f64::from(x[k]) + shift) as f32;
                    rstd[k] = (squares / count + f64::from(*eps)).sqrt().recip() as f32;
                    mean_sum[k] = samples * new_mean[k];
                    variance_sum[k] = samples * (squares / (count - 1.0).max(1.0)) as f32;
                }
            } else {
                for k in 0..c {
                    new_mean[k] = mean[k];
                    rstd[k] = (variance[k] + eps).sqrt().recip();
                    mean_sum[k] = samples * mean[k];
                    variance_sum[k] = samples * variance[k];
                }
            }
            let factor: Vec<f32> = rstd.iter().zip(*w).map(|(rstd, w)| rstd * w).collect();
            let mean = new_mean.repeat(times);
            let factor = factor.repeat(times);
            let b = b.repeat(times);
            let tasks = (x.par_chunks(task), y.par_chunks_mut(task)).into_par_iter();
            tasks.for_each(|(x, y)| normalize(x, &mean, &factor, &b, y));
        }
        (Op::BatchNormAffineGrad, [x, stats, dy], [dweight, dbias]) => {
            let mean = stats[..c].repeat(times);
            let sums = two_sums(x, dy, task, c, |x, dy, sums| affine_sums(x, dy, &mean, sums));
            for k in 0..c {
                dweight[k] = (sums[k] * f64::from(stats[c + k])) as f32;
                dbias[k] = sums[c + k] as f32;
            }
        }
        (Op::BatchNormGrad, [x, weight, stats, dy, dweight, dbias], [dx]) => {
            // dx = a dy + b x + d, with a, b and d per column.
            let share = if training { 1.0 / rows as f32 } else { 0.0 };
            let mut a = vec![0.0; c];
            let mut b = vec![0.0; c];
            let mut d = vec![0.0; c];
            for k in 0..c {
                let mean = stats[k];
                let rstd = stats[c + k];
                a[k] = weight[k] * rstd;
                b[k] = -a[k] * share * dweight[k] * rstd;
                d[k] = -a[k] * share * dbias[k] - b[k] * mean;
            }
            let [a, b, d] = [a, b, d].map(|factors| factors.repeat(times));
            let tasks = (x.par_chunks(task), dy.par_chunks(task), dx.par_chunks_mut(task));
            tasks.into_par_iter().for_each(|(x, dy, dx)| combine(x, dy, [&a, &b, &d], dx));
        }
        (other, ..) => panic!("{other} is not a batch normalization"),
    }
}

/// Returns two sums of each of `c` columns of `x` and `y`. For each task of this many elements,
/// `sum` adds them to the two halves of its last argument, each a tile of whole rows; the sums of
/// tasks are added in order.
fn two_sums(
    x: &[f32],
    y: &[f32],
    task: usize,
    c: usize,
    sum: impl Fn(&[f32], &[f32], &mut [f32]) + Sync,
) -> Vec<f64> {
    let tile = TILED.div_ceil(c) * c;
    let tasks = (x.par_chunks(task), y.par_chunks(task)).into_par_iter().map(|(x, y)| {
        let mut sums = vec![0.0; 2 * tile];
        sum(x, y, &mut sums);
        sums
    });
    let tasks: Vec<Vec<f32>> = tasks.collect();

    let mut sums = vec![0.0; 2 * c];
    for of_task in tasks {
        for (half, tile) in of_task.chunks(tile).enumerate() {
            for (i, value) in tile.iter().enumerate() {
                sums[half * c + i % c] += f64::from(*value);
            }
        }
    }
    sums
}

vectorized! {
    /// Adds `x - origin` and its square to the halves of `sums`.
    fn shifted_sums<S>(x: &[f32], origin: &[f32], sums: &mut [f32]) {
        let (sum, squares) = sums.split_at_mut(origin.len());
        for x in x.chunks(origin.len()) {
            let columns = x.iter().zip(origin).zip(sum.iter_mut().zip(squares.iter_mut()));
            for ((x, origin), (sum, squares)) in columns {
                let d = x - origin;
                *sum += d;
                *squares = mul_add::<S>(d, d, *squares);
            }
        }
    }

    /// Adds `dy (x - mean)` and `dy` to the halves of `sums`.
    fn affine_sums<S>(x: &[f32], dy: &[f32], mean: &[f32], sums: &mut [f32]) {
        let (of_weight, of_bias) = sums.split_at_mut(mean.len());
        for (x, dy) in x.chunks(mean.len()).zip(dy.chunks(mean.len())) {
            let sums = of_weight.iter_mut().zip(of_bias.iter_mut());
            for (((x, dy), mean), (of_weight, of_bias)) in x.iter().zip(dy).zip(mean).zip(sums) {
                *of_weight = mul_add::<S>(*dy, x - mean, *of_weight);
                *of_bias += dy;
            }
        }
    }

    fn normalize<S>(x: &[f32], mean: &[f32], factor: &[f32], bias: &[f32], y: &mut [f32]) {
        for (y, x) in y.chunks_mut(mean.len()).zip(x.chunks(mean.len())) {
            let columns = mean.iter().zip(factor).zip(bias);
            for ((y, x), ((mean, factor), bias)) in y.iter_mut().zip(x).zip(columns) {
                *y = mul_add::<S>(x - mean, *factor, *bias);
            }
        }
    }

    /// Computes `a dy + b x + d`.
    fn combine<S>(x: &[f32], dy: &[f32], factors: [&[f32]; 3], dx: &mut [f32]) {
        let [a, b, d] = factors;
        let tiles = x.chunks(a.len()).zip(dy.chunks(a.len()));
        for (dx, (x, dy)) in dx.chunks_mut(a.len()).zip(tiles) {
            let columns = a.iter().zip(b).zip(d);
            for ((dx, (x, dy)), ((a, b), d)) in dx.iter_mut().zip(x.iter().zip(dy)).zip(columns) {
                *dx = mul_add::<S>(*a, *dy, mul_add::<S>(*b, *x, *d));
            }
        }
    }
}

/// Static choice: the only variant.
pub fn dispatch(call: &OpCall, _: &Caps) -> Vec<Dispatch> {
    BatchNormCall::new(call).dispatches()
}

/// Returns the GPU kernel variant of the call.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    vec![Variant::new(call.op.to_string(), dispatch(call, caps))]
}

/// Sizes of a call on a GPU.
struct BatchNormCall<'a> {
    call: &'a OpCall<'a>,
    rows: usize,
    c: usize,
    /// Values per row, vectors of 4 where `c` is a multiple of 4.
    width: usize,
    blocks: usize,
    /// Rows per block.
    strip: usize,
    /// Blocks for which there is workspace: with fewer rows there are never more than these.
    blocks_max: usize,
}

impl<'a> BatchNormCall<'a> {
    fn new(call: &'a OpCall<'a>) -> Self {
        let (rows, c) = call.rows_and_last(0);
        let width = if c.is_multiple_of(4) { c / 4 } else { c };
        let blocks = (INVOCATIONS / width).min(rows / STRIP_MIN);
        let blocks_max = blocks.max(rows.div_ceil(ITERATIONS_MAX)).max(1);
        let strip = rows.div_ceil(blocks_max);
        Self { call, rows, c, width, blocks: rows.div_ceil(strip), strip, blocks_max }
    }

    fn dispatches(&self) -> Vec<Dispatch> {
        use Operand::{Input, Output};
        let partials = Operand::workspace(2 * self.blocks_max * self.c);
        let blocks = grid(self.blocks * self.width, 64);
        let columns = grid(self.c, COLUMNS);
        let elements = grid(self.rows * self.width, 256);
        match self.call.op {
            Op::BatchNorm { .. } => {
                let outputs = [Output(1), Output(2), Output(3)];
                let last = [Input(0), Output(1), Input(1), Input(2), Output(0)];
                let last = self.one("normalize", &last, elements);
                if !self.call.random.training {
                    let running = [&[Input(3), Input(4)], &outputs[..]].concat();
                    return vec![self.one("running", &running, grid(self.c, 64)), last];
                }
                let statistics = [&[partials, Input(0)], &outputs[..]].concat();
                vec![
                    self.one("forward_blocks", &[Input(0), partials], blocks),
                    self.one("statistics", &statistics, columns),
                    last,
                ]
            }
            Op::BatchNormAffineGrad => {
                let inputs = [Input(0), Input(1), Input(2), partials];
                vec![
                    self.one("affine_blocks", &inputs, blocks),
                    self.one("affine", &[partials, Output(0), Output(1)], columns),
                ]
            }
            Op::BatchNormGrad => {
                let inputs = [0, 2, 3, 1, 4, 5].map(Input);
                vec![self.one("grad", &[&inputs[..], &[Output(0)]].concat(), elements)]
            }
            other => panic!("{other} is not a batch normalization"),
        }
    }

    fn one(&self, entry: &'static str, operands: &[Operand], groups: [u32; 3]) -> Dispatch {
        let eps = if let Op::BatchNorm { eps } = self.call.op { *eps } else { 0.0 };
        let value = if self.width == self.c { "f32" } else { "vec4f" };
        let mut params = as_words(&[self.rows, self.width, self.c, self.blocks, self.strip]);
        let samples = self.call.inputs[0][0] as f32;
        params.extend([u32::from(self.call.random.training), eps.to_bits(), samples.to_bits()]);
        Dispatch {
            shader: Shader::new("batch_norm", entry)
                .with_text(&format!("alias Value = {value};\n")),
            operands: operands.to_vec(),
            params,
            groups,
        }
    }
}

/// Returns the cost: a few FLOPs per element of `x`, which the forward pass reads twice. The
/// kernels are bound by memory bandwidth.
pub fn cost(call: &OpCall) -> Cost {
    let elements = call.input_len(0) as f64;
    let (flops, again) = match call.op {
        Op::BatchNorm { .. } if call.random.training => (7.0, 4.0 * elements),
        Op::BatchNorm { .. } | Op::BatchNormAffineGrad => (4.0, 0.0),
        _ => (7.0, 0.0),
    };
    Cost { flops: flops * elements, bytes: Cost::moved(call) + again }
}

/// See [`Twin::inputs`]. A variance is not negative.
fn inputs(op: &Op, inputs: &[Dims]) -> InputSpec {
    match op {
        Op::BatchNorm { .. } => InputSpec::normal(inputs).with(4, InputFill::Uniform(0.5, 2.0)),
        _ => InputSpec::normal(inputs),
    }
}

/// See [`Twin::forward`].
fn forward(op: &Op) -> Option<Forward> {
    let Op::BatchNormGrad = op else { return None };
    // In training, bias and running averages do not affect the statistics.
    let op = Op::BatchNorm { eps: 1e-5 };
    Some(Forward { op, inputs: vec![0, 1, 1, 1, 1], outputs: vec![(1, 2)] })
}

/// Inputs of an op on `x`.
fn sized(op: &Op, x: Dims) -> Vec<Dims> {
    let c = x.last().copied().unwrap_or(1);
    let column = vec![c];
    let stats = vec![2, c];
    match op {
        Op::BatchNorm { .. } => [vec![x], vec![column; 4]].concat(),
        Op::BatchNormAffineGrad => vec![x.clone(), stats, x],
        _ => vec![x.clone(), column.clone(), stats, x, column.clone(), column],
    }
}

/// See [`Twin::independent_axes`]: channels.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    let last = call.inputs[0].len().checked_sub(1);
    let (inputs, outputs) = match call.op {
        Op::BatchNorm { .. } => {
            let column = Some(0);
            (vec![last, column, column, column, column], vec![last, Some(1), column, column])
        }
        Op::BatchNormAffineGrad => (vec![last, Some(1), last], vec![Some(0), Some(0)]),
        _ => (vec![last, Some(0), Some(1), last, Some(0), Some(0)], vec![last]),
    };
    IndependentAxis::of(call, inputs, outputs).into_iter().collect()
}

/// See [`Twin::probes`].
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let c = if inputs[0].last().is_some_and(|c| c.is_multiple_of(4)) { 20 } else { 19 };
    let rows = [vec![5, 3, c], vec![67, 1, c], vec![3, 259, c]];
    calls(op, rows.map(|x| sized(op, x)))
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    let ops = [Op::BatchNorm { eps: 1e-5 }, Op::BatchNormAffineGrad, Op::BatchNormGrad];
    let mut calls = Vec::new();
    for op in ops {
        for c in [C, C - 1] {
            calls.push((op.clone(), sized(&op, vec![N, 4, c])));
        }
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{self, check, check_with};
    use crate::{OwnedCall, RandomContext, harness};
    use potluck_core::rng::Key;
    use potluck_core::{HostTensor, Shape};

    const FORWARD: Op = Op::BatchNorm { eps: 1e-5 };

    type Values = Vec<(Shape, HostTensor<f64>)>;

    /// Inputs of the forward op for `x` around an offset.
    fn forward_inputs(dims: &[usize], rows: usize, offset: f32) -> Values {
        let (x, c) = (Shape::batched(dims), Shape::fixed(&dims[dims.len() - 1..]));
        let fills = [
            InputFill::Scaled(1.0, offset),
            InputFill::Scaled(0.5, 1.0),
            InputFill::Normal,
            InputFill::Normal,
            InputFill::Uniform(0.5, 2.0),
        ];
        let shapes = [&x, &c, &c, &c, &c];
        let value = |(i, (shape, fill)): (usize, (&Shape, InputFill))| {
            (shape.clone(), testing::generate(fill, shape.elements(rows), i))
        };
        shapes.into_iter().zip(fills).enumerate().map(value).collect()
    }

    /// Inputs of both gradients for the same `x` and weight, and a random `dy`.
    fn gradient_inputs(forward: &Values, rows: usize) -> [Values; 2] {
        let (x, weight) = (forward[0].clone(), forward[1].clone());
        let c = x.0.last();
        let stats = testing::reference(&FORWARD, forward, rows).remove(1);
        let stats = (Shape::fixed(&[2, c]), HostTensor::Float(stats));
        let dy = (x.0.clone(), testing::generate(InputFill::Normal, x.0.elements(rows), 7));
        let affine = vec![x.clone(), stats.clone(), dy.clone()];
        let sums = testing::reference(&Op::BatchNormAffineGrad, &affine, rows);
        let of_sum = |sum: &Vec<f64>| (Shape::fixed(&[c]), HostTensor::Float(sum.clone()));
        let grad = vec![x, weight, stats, dy, of_sum(&sums[0]), of_sum(&sums[1])];
        [affine, grad]
    }

    fn check_all(dims: &[usize], rows: usize, offset: f32) {
        let forward = forward_inputs(dims, rows, offset);
        check_with(FORWARD, &forward, rows);
        let [affine, grad] = gradient_inputs(&forward, rows);
        check_with(Op::BatchNormAffineGrad, &affine, rows);
        check_with(Op::BatchNormGrad, &grad, rows);
    }

    #[test]
    fn every_width_agrees() {
        for (dims, rows) in [
            (&[1, 3][..], 9),
            (&[1, 4], 40),
            (&[1, 5, 5, 6], 7),
            (&[1, 7, 3, 16], 5),
            (&[1, 33], 101),
            (&[1, 9, 260], 3),
        ] {
            check_all(dims, rows, 0.3);
        }
    }

    #[test]
    fn many_rows_agree() {
        check_all(&[1, 9000, 3], 2, -0.5);
        check_all(&[1, 9000, 4], 2, -0.5);
    }

    #[test]
    fn a_mean_far_above_the_deviation_loses_little() {
        check_all(&[1, 5, 8], 40, 100.0);
    }

    /// PyTorch 2: `nn.BatchNorm1d(2)(torch.tensor([[1., 10.], [2., 20.], [6., 60.]]))`, and the
    /// variances of `x.var(0)`.
    #[test]
    fn statistics_are_of_columns_and_sums_are_weighted_by_samples() {
        let floats = |values: &[f64]| HostTensor::Float(values.to_vec());
        let c = Shape::fixed(&[2]);
        let inputs = vec![
            (Shape::batched(&[1, 2]), floats(&[1.0, 10.0, 2.0, 20.0, 6.0, 60.0])),
            (c.clone(), floats(&[1.0, 1.0])),
            (c.clone(), floats(&[0.0, 0.0])),
            (c.clone(), floats(&[5.0, 5.0])),
            (c, floats(&[5.0, 5.0])),
        ];
        let outputs = testing::reference(&FORWARD, &inputs, 3);
        assert_eq!(outputs[2], [9.0, 90.0]);
        assert_eq!(outputs[3], [21.0, 2100.0]);
        let y: Vec<f64> = outputs[0].iter().step_by(2).copied().collect();
        for (y, expected) in y.iter().zip([-0.925_819, -0.462_909, 1.388_728]) {
            assert!((y - expected).abs() < 1e-5, "{y}, not {expected}");
        }
        testing::check_with(FORWARD, &inputs, 3);
    }

    /// Outside of training, every implementation takes the running averages.
    #[test]
    fn evaluations_agree() {
        let rows = 6;
        let inputs = forward_inputs(&[1, 3, 12], rows, 0.5);
        let (shapes, values): (Vec<Dims>, Vec<&HostTensor<f64>>) =
            inputs.iter().map(|(shape, values)| (shape.resolve(rows), values)).unzip();
        let random = RandomContext { step_key: Key::new(1), training: false };
        let owned = OwnedCall::new(FORWARD, shapes, random).unwrap();
        let call = owned.call();
        let expected = harness::host(&call, &values, 0.0, reference::<f64>);
        let deviation = (values[4].as_view().floats()[0] + 1e-5).sqrt().recip();
        assert!((expected[1][12] - deviation).abs() < 1e-9);
        let wide = |outputs: Vec<Vec<f32>>| -> Vec<Vec<f64>> {
            let wide = |output: Vec<f32>| output.into_iter().map(f64::from).collect();
            outputs.into_iter().map(wide).collect()
        };
        let got = harness::host(&call, &values, 0.0, fast);
        testing::compare("the fast version", &wide(got), &expected);
        testing::for_each_gpu(|gpu, pipelines| {
            let dispatches = dispatch(&call, &Caps::of(gpu));
            let got = testing::on_gpu(gpu, pipelines, &call, &dispatches, &inputs, f32::NAN);
            testing::compare(&gpu.name, &wide(got), &expected);
        });
    }

    #[test]
    fn a_batch_of_pictures_agrees() {
        let fills = [InputFill::Normal; 5];
        let (x, c) = (Shape::batched(&[1, 4, 4, 12]), Shape::fixed(&[12]));
        let shapes = [&x, &c, &c, &c, &c];
        let inputs: Vec<(Shape, InputFill)> = shapes.into_iter().cloned().zip(fills).collect();
        check(FORWARD, &inputs, 6);
    }
}
