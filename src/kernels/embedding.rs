//! Rows of a table by ids, and the gradient of the table. Twin of `shaders/embedding.wgsl`, which
//! has the formulas.

use rayon::prelude::*;

use super::dispatch::grid;
use super::{Arg, Call, Cost, Dispatch, Operand, Real, Shader};
use crate::graph::Op;

/// Elements per task of the fast version: enough to outweigh handing it to a thread.
const TASK: usize = 16 * 1024;

/// Invocations that the gradient aims at: enough to fill a device, where the table has the rows
/// for it, and few enough that their walks over all ids stay cheap.
const GRAD_INVOCATIONS: usize = 4096;

/// `ids (..), table (v, c) -> (.., c)`, or `ids (..), dy (.., c) -> dtable (v, c)`. Loading the
/// data checks ids; one beyond the table means its last row here, as in the shader.
pub fn reference<T: Real>(call: &Call, inputs: &[Arg<'_, T>], outputs: &mut [&mut [T]]) {
    let (ids, (v, c)) = (inputs[0].ints(), table_size(call));
    let row_of = |id: u32| (id as usize).min(v - 1);
    match call.op {
        Op::Embedding => {
            let table = inputs[1].floats();
            for (y, &id) in outputs[0].chunks_exact_mut(c).zip(ids) {
                y.copy_from_slice(&table[row_of(id) * c..][..c]);
            }
        }
        Op::EmbeddingGrad { .. } => {
            if !call.accumulate {
                outputs[0].fill(T::zero());
            }
            for (dy, &id) in inputs[1].floats().chunks_exact(c).zip(ids) {
                for (sum, dy) in outputs[0][row_of(id) * c..][..c].iter_mut().zip(dy) {
                    *sum += *dy;
                }
            }
        }
        other => panic!("{other} is not an embedding"),
    }
}

/// `(v, c)`
fn table_size(call: &Call) -> (usize, usize) {
    match call.op {
        Op::EmbeddingGrad { rows } => (*rows, call.rows_and_last(1).1),
        _ => call.rows_and_last(1),
    }
}

/// In parallel over tokens. The gradient is in parallel over rows of the table: each task walks
/// over all tokens in order, so that how many tasks there are changes no bit.
pub fn fast(call: &Call, inputs: &[Arg<'_, f32>], outputs: &mut [&mut [f32]]) {
    let (ids, (v, c)) = (inputs[0].ints(), table_size(call));
    let row_of = |id: u32| (id as usize).min(v - 1);
    let values = inputs[1].floats();
    if let Op::Embedding = call.op {
        let rows = (TASK / c).max(1);
        let tasks = outputs[0].par_chunks_mut(rows * c).zip(ids.par_chunks(rows));
        tasks.for_each(|(y, ids)| {
            for (y, &id) in y.chunks_exact_mut(c).zip(ids) {
                y.copy_from_slice(&values[row_of(id) * c..][..c]);
            }
        });
        return;
    }
    let rows = v.div_ceil(4 * rayon::current_num_threads());
    outputs[0].par_chunks_mut(rows * c).enumerate().for_each(|(part, sums)| {
        if !call.accumulate {
            sums.fill(0.0);
        }
        let covered = part * rows..part * rows + sums.len() / c;
        for (&id, dy) in ids.iter().zip(values.chunks_exact(c)) {
            let row = row_of(id);
            if covered.contains(&row) {
                let sums = &mut sums[(row - covered.start) * c..][..c];
                sums.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
            }
        }
    });
}

/// One invocation per element of the output; the gradient zeroes the table first, unless it
/// accumulates, and then takes one per column and part of the table.
pub fn dispatch(call: &Call) -> Vec<Dispatch> {
    let (n, (v, c)) = (call.input_len(0), table_size(call));
    let parts = (GRAD_INVOCATIONS / c).clamp(1, v);
    let one = |entry, invocations| Dispatch {
        shader: Shader::new("embedding", entry),
        operands: vec![Operand::Input(0), Operand::Input(1), Operand::Output(0)],
        params: vec![n as u32, c as u32, v as u32, parts as u32],
        groups: grid(invocations, 64),
    };
    match call.op {
        Op::Embedding => vec![one("embedding", n * c)],
        _ if call.accumulate => vec![one("embedding_grad", parts * c)],
        _ => vec![one("clear", v * c), one("embedding_grad", parts * c)],
    }
}

/// An addition per element of `dy`; only the rows that occur are moved.
pub fn cost(call: &Call) -> Cost {
    let (ids, elements) = (call.input_len(0) as f64, call.output_len(0) as f64);
    match call.op {
        Op::Embedding => Cost { flops: 0.0, bytes: 4.0 * (ids + 2.0 * elements) },
        _ => Cost { flops: call.input_len(1) as f64, bytes: Cost::moved(call) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Shape;
    use crate::kernels::testing::gradient::check_gradient;
    use crate::kernels::testing::{Fill, Values, check, check_with, values};

    #[test]
    fn rows_are_found_and_their_gradients_added() {
        for (t, v, c, rows) in [(7, 5, 3, 2), (1, 1, 1, 1), (64, 65, 130, 3), (11, 301, 7, 5)] {
            let ids = (Shape::batched(&[1, t]), Fill::Ids(v as u32));
            check(Op::Embedding, &[ids.clone(), (Shape::fixed(&[v, c]), Fill::Normal)], rows);
            let dy = (Shape::batched(&[1, t, c]), Fill::Normal);
            check(Op::EmbeddingGrad { rows: v }, &[ids, dy], rows);
        }
    }

    /// More columns than the gradient wants invocations, so that the table is one part.
    #[test]
    fn a_wide_table_is_one_part() {
        let c = GRAD_INVOCATIONS + 1;
        let ids = (Shape::batched(&[3]), Fill::Ids(4));
        check(Op::EmbeddingGrad { rows: 4 }, &[ids, (Shape::batched(&[3, c]), Fill::Normal)], 2);
    }

    #[test]
    fn ids_beyond_the_table_mean_its_last_row() {
        let (v, c) = (6, 5);
        let ids = (Shape::batched(&[1]), Values::Int(vec![0, 5, 6, 1 << 31, u32::MAX]));
        let table = (Shape::fixed(&[v, c]), values(Fill::Normal, v * c, 1));
        check_with(Op::Embedding, &[ids.clone(), table], 5);
        let dy = (Shape::batched(&[1, c]), values(Fill::Normal, 5 * c, 2));
        check_with(Op::EmbeddingGrad { rows: v }, &[ids, dy], 5);
    }

    #[test]
    fn the_gradient_is_the_derivative() {
        let (v, c, n) = (4, 3, 6);
        let ids = (Shape::batched(&[1]), values(Fill::Ids(v as u32), n, 0));
        let table = (Shape::fixed(&[v, c]), values(Fill::Normal, v * c, 1));
        let dy = (Shape::batched(&[1, c]), values(Fill::Normal, n * c, 2));
        let grad = Op::EmbeddingGrad { rows: v };
        let dtable = crate::kernels::testing::reference(&grad, &[ids.clone(), dy.clone()], n);
        let Values::Float(weights) = dy.1 else { panic!("dy is of floats") };
        check_gradient(&Op::Embedding, &[ids, table], n, 1, &[weights], &dtable[0]);
    }
}
