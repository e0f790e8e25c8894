//! Sums over neighbouring axes, and the broadcast that is their gradient. Twin of
//! `shaders/sum.wgsl`, which has the formulas.

use rayon::prelude::*;

use super::dispatch::grid;
use super::{Arg, Call, Cost, Dispatch, Operand, Real, Shader};
use crate::graph::Op;

/// Elements per task of the fast version: enough to outweigh handing it to a thread.
const TASK: usize = 16 * 1024;

/// The fewest running sums that the fast version keeps, so that they fill vector registers.
const LANES: usize = 64;

/// The invocations of a workgroup that sums one output.
const TREE: usize = 256;

/// The larger tensor of a sum or a broadcast, seen as (outer, middle, inner).
#[derive(Clone, Copy)]
struct View {
    outer: usize,
    /// What a sum takes away and a broadcast puts in.
    middle: usize,
    inner: usize,
}

impl View {
    fn of(call: &Call) -> Self {
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

/// `y[o, i] = sum over m of x[o, m, i]`, or `y[o, m, i] = x[o, i]`.
pub fn reference<T: Real>(call: &Call, inputs: &[Arg<'_, T>], outputs: &mut [&mut [T]]) {
    let View { outer, middle, inner } = View::of(call);
    let (x, y) = (inputs[0].floats(), &mut *outputs[0]);
    let sums = matches!(call.op, Op::Sum { .. });
    if sums && !call.accumulate {
        y.fill(T::zero());
    }
    for o in 0..outer {
        for m in 0..middle {
            for i in 0..inner {
                let (few, many) = (o * inner + i, (o * middle + m) * inner + i);
                match sums {
                    true => y[few] += x[many],
                    false => y[many] = x[few],
                }
            }
        }
    }
}

/// The same in parallel. A sum is cut into blocks whose bounds depend on the shape only, and the
/// blocks' sums are added in order, so results do not depend on the number of threads.
pub fn fast(call: &Call, inputs: &[Arg<'_, f32>], outputs: &mut [&mut [f32]]) {
    let view = View::of(call);
    let (x, y) = (inputs[0].floats(), &mut *outputs[0]);
    if x.is_empty() || y.is_empty() {
        return reference(call, inputs, outputs);
    }
    let (few, many) = (view.inner, view.middle * view.inner);
    let tasks_of = (TASK / many).max(1);
    if let Op::Broadcast { .. } = call.op {
        let rows = y.par_chunks_mut(few).enumerate().with_min_len((TASK / few).max(1));
        return rows.for_each(|(row, y)| {
            let from = row / view.middle * few;
            y.copy_from_slice(&x[from..from + few]);
        });
    }
    let each = y.par_chunks_mut(few).zip(x.par_chunks(many)).with_min_len(tasks_of);
    each.for_each_init(Vec::new, |lanes, (y, x)| {
        if !call.accumulate {
            y.fill(0.0);
        }
        sum_blocks(x, y, lanes);
    });
}

/// Adds the rows of `x (middle, inner)` to `y (inner)`, block by block.
fn sum_blocks(x: &[f32], y: &mut [f32], lanes: &mut Vec<f32>) {
    let block = y.len() * TASK.div_ceil(y.len());
    if x.len() <= block {
        return sum_rows(x, y, lanes);
    }
    let blocks = x.par_chunks(block).map_init(Vec::new, |lanes, x| {
        let mut sum = vec![0.0; y.len()];
        sum_rows(x, &mut sum, lanes);
        sum
    });
    let sums: Vec<Vec<f32>> = blocks.collect();
    sums.iter().for_each(|sum| add(y, sum));
}

/// Adds the rows of `x` to `y`, several rows at a time where rows are short.
fn sum_rows(x: &[f32], y: &mut [f32], lanes: &mut Vec<f32>) {
    lanes.clear();
    lanes.resize(y.len() * LANES.div_ceil(y.len()), 0.0);
    x.chunks(lanes.len()).for_each(|rows| add(lanes, rows));
    lanes.chunks(y.len()).for_each(|row| add(y, row));
}

/// Adds `x` to the first elements of `y`.
fn add(y: &mut [f32], x: &[f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
}

/// One invocation per output; or one workgroup per output, where few outputs sum up so much that
/// single invocations would leave a device idle.
pub fn dispatch(call: &Call) -> Vec<Dispatch> {
    let View { middle, inner, .. } = View::of(call);
    let count = call.output_len(0);
    let (entry, groups) = match call.op {
        Op::Broadcast { .. } => ("broadcast", grid(count, 64)),
        _ if middle >= TREE && count <= TREE / 4 => ("tree", grid(count, 1)),
        _ => ("columns", grid(count, 64)),
    };
    let params = [count, middle, inner, usize::from(call.accumulate)];
    vec![Dispatch {
        shader: Shader::new("sum", entry),
        operands: vec![Operand::Input(0), Operand::Output(0)],
        params: params.map(|word| word as u32).to_vec(),
        groups,
    }]
}

/// One FLOP per element of a sum, none of a broadcast.
pub fn cost(call: &Call) -> Cost {
    let flops = match call.op {
        Op::Broadcast { .. } => 0.0,
        _ => call.input_len(0) as f64,
    };
    Cost { flops, bytes: Cost::moved(call) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Shape;
    use crate::kernels::testing::{Fill, check};

    fn check_sum(shape: Shape, first: usize, last: usize, rows: usize) {
        // The offset keeps sums away from zero, where rounding errors would not be small.
        check(Op::Sum { first, last }, &[(shape, Fill::Scaled(1.0, 0.5))], rows);
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
            check(op, &[(shape, Fill::Normal)], 3);
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
        let call = Call {
            op: &op,
            inputs: vec![vec![100_000, 3]],
            outputs: vec![vec![3]],
            accumulate: false,
            random: crate::kernels::Random {
                step_key: crate::base::rng::Key::new(0),
                training: true,
            },
        };
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut y = [0.0f32; 3];
            pool.install(|| fast(&call, &[Arg::Float(&x)], &mut [&mut y]));
            y.map(f32::to_bits)
        };
        assert_eq!(run(1), run(3));
    }
}
