//! Embedding lookup (rows of a table by ids), and the gradient of the table. Twin of
//! `shaders/embedding.wgsl`, which has the formulas.

use std::ops::Range;

use rayon::prelude::*;

use super::dispatch_parts::as_words;
use super::embedding_rows;
use crate::call_shapes::{C, N, V, calls};
use crate::cpu_kernel::TASK;
use crate::dispatch::{ITERATIONS_MAX, grid};
use crate::harness::InputFill;
use crate::simd::{add_elements, vectorized};
use crate::twin::{IndependentAxis, InputSpec, no_forward, short_loops};
use crate::{CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant};
use potluck_core::HostTensorView;
use potluck_graph::Op;

/// Twin of [`Op::Embedding`] and its gradient.
pub static TWIN: Twin = Twin {
    name: "embedding",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: false,
    iterations: short_loops,
    inputs,
    forward: no_forward,
    independent_axes,
    probes,
    catalog,
};

/// Elements of a row per invocation.
const PER_INVOCATION: usize = 8;

/// Maximum number of workgroups of the gradient: enough to fill a device if the table has enough
/// rows, and few enough that it stays cheap for each of them to read all ids.
const GRAD_WORKGROUPS: usize = 1024;

/// Number of ids behind the rows of a shard that the inputs of its calls may have.
const OTHER_IDS: usize = 3;

/// Tokens that a workgroup of the gradient scans in one round, to list the tokens of its rows.
const NOTED: usize = 2048;

/// Reference: `ids (..), table (v, c) -> (.., c)`, or `ids (..), dy (.., c) -> dtable (v, c)`.
/// An id without a row in the table selects zeros, and adds to no row, as in the shader.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let ids = inputs[0].ints();
    let EmbeddingTable { first, rows, columns } = EmbeddingTable::of(call);
    match call.op {
        Op::Embedding { .. } => {
            let table = inputs[1].floats();
            for (y, &id) in outputs[0].chunks_exact_mut(columns).zip(ids) {
                match row(id, first, rows) {
                    Some(row) => y.copy_from_slice(&table[row * columns..][..columns]),
                    None => y.fill(T::zero()),
                }
            }
        }
        Op::EmbeddingGrad { .. } => {
            if !call.accumulates() {
                outputs[0].fill(T::zero());
            }
            for (dy, &id) in inputs[1].floats().chunks_exact(columns).zip(ids) {
                let Some(row) = row(id, first, rows) else { continue };
                for (sum, dy) in outputs[0][row * columns..][..columns].iter_mut().zip(dy) {
                    *sum += *dy;
                }
            }
        }
        other => panic!("{other} is not an embedding"),
    }
}

/// Table `(rows, columns)` of a call, whose row 0 has the id `first`.
#[derive(Clone, Copy)]
pub(super) struct EmbeddingTable {
    pub first: usize,
    pub rows: usize,
    pub columns: usize,
}

impl EmbeddingTable {
    pub fn of(call: &OpCall) -> Self {
        let (rows, columns) = call.rows_and_last(1);
        match call.op {
            Op::Embedding { first } => Self { first: *first, rows, columns },
            Op::EmbeddingGrad { first, rows } => Self { first: *first, rows: *rows, columns },
            other => panic!("{other} is not an embedding"),
        }
    }
}

/// Row of an id in a table whose row 0 has the id `first`, if the table has it.
#[inline(always)]
fn row(id: u32, first: usize, rows: usize) -> Option<usize> {
    (id as usize).checked_sub(first).filter(|row| *row < rows)
}

/// CPU kernel: parallel over tokens. The gradient is parallel over rows of the table: each task
/// processes all tokens in order, so the result is bitwise independent of the number of tasks.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let ids = inputs[0].ints();
    let table = EmbeddingTable::of(call);
    let c = table.columns;
    let values = inputs[1].floats();
    if let Op::Embedding { .. } = call.op {
        let rows = (TASK / c).max(1);
        let tasks = (ids.par_chunks(rows), outputs[0].par_chunks_mut(rows * c));
        tasks.into_par_iter().for_each(|(ids, y)| {
            for (y, &id) in y.chunks_exact_mut(c).zip(ids) {
                match row(id, table.first, table.rows) {
                    Some(row) => y.copy_from_slice(&values[row * c..][..c]),
                    None => y.fill(0.0),
                }
            }
        });
        return;
    }
    let rows = table.rows.div_ceil(4 * rayon::current_num_threads());
    outputs[0].par_chunks_mut(rows * c).enumerate().for_each(|(part, sums)| {
        if !call.accumulates() {
            sums.fill(0.0);
        }
        add_rows(ids, values, table, part * rows, sums);
    });
}

vectorized! {
    /// Adds rows of `dy` to `sums`, which has the rows of the table from `start` on.
    fn add_rows<S>(
        ids: &[u32],
        dy: &[f32],
        table: EmbeddingTable,
        start: usize,
        sums: &mut [f32],
    ) {
        let c = table.columns;
        let covered = start..start + sums.len() / c;
        for (&id, dy) in ids.iter().zip(dy.chunks_exact(c)) {
            let row = row(id, table.first, table.rows).filter(|row| covered.contains(row));
            if let Some(row) = row {
                add_elements(&mut sums[(row - start) * c..][..c], dy);
            }
        }
    }
}

/// Static choice: on GPUs, sums of the gradient in registers; else vectors of 4 if the row width is
/// a multiple of 4 and, for the gradient, large enough to keep a workgroup busy.
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let is_gradient = !matches!(call.op, Op::Embedding { .. });
    if is_gradient && caps.wants_gpu_variants() {
        return embedding_rows::variant(call).dispatches;
    }
    let is_wide = EmbeddingTable::of(call).columns >= 4 * 64;
    if (!is_gradient || is_wide)
        && let Some(dispatches) = vectors(call)
    {
        return dispatches;
    }
    plain(call)
}

/// Returns all GPU kernel variants of the call.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let mut variants = vec![named(plain(call))];
    if let Some(dispatches) = vectors(call) {
        variants.push(named(dispatches));
    }
    if matches!(call.op, Op::EmbeddingGrad { .. }) && caps.wants_gpu_variants() {
        variants.push(embedding_rows::variant(call));
    }
    variants
}

fn named(dispatches: Vec<Dispatch>) -> Variant {
    Variant::new(dispatches[0].shader.entry, dispatches)
}

fn plain(call: &OpCall) -> Vec<Dispatch> {
    match call.op {
        Op::Embedding { .. } => gather(call, "embedding", PER_INVOCATION),
        _ => scatter(call, "embedding_grad", 1),
    }
}

/// Kernel on vectors of 4, if the row width is a multiple of 4.
fn vectors(call: &OpCall) -> Option<Vec<Dispatch>> {
    if !EmbeddingTable::of(call).columns.is_multiple_of(4) {
        return None;
    }
    Some(match call.op {
        Op::Embedding { .. } => gather(call, "embedding4", 2 * PER_INVOCATION),
        _ => scatter(call, "embedding_grad4", 4),
    })
}

/// Dispatch of the lookup, with `per_invocation` elements of a row per invocation.
fn gather(call: &OpCall, entry: &'static str, per_invocation: usize) -> Vec<Dispatch> {
    let n = call.input_len(0);
    let across = EmbeddingTable::of(call).columns.div_ceil(per_invocation);
    vec![one(call, entry, 0..n, across, grid(n * across, 64))]
}

/// Returns the dispatches of the gradient, with columns in vectors of `lanes`. Each is for as many
/// tokens as the iteration limit of an invocation allows if all of them have the same id.
fn scatter(call: &OpCall, entry: &'static str, lanes: usize) -> Vec<Dispatch> {
    let n = call.input_len(0);
    let EmbeddingTable { rows, columns, .. } = EmbeddingTable::of(call);
    let tokens = ITERATIONS_MAX / (2 + columns.div_ceil(64 * lanes));
    let tokens = if tokens < NOTED { tokens.max(1) } else { tokens / NOTED * NOTED };
    let groups = grid(rows.div_ceil(share(rows)), 1);
    let mut dispatches = Vec::new();
    for first in (0..n.max(1)).step_by(tokens) {
        dispatches.push(one(call, entry, first..n.min(first + tokens), 1, groups));
    }
    dispatches
}

/// Number of table rows per workgroup of the gradient.
fn share(v: usize) -> usize {
    v.div_ceil(GRAD_WORKGROUPS).max(1)
}

fn one(
    call: &OpCall,
    entry: &'static str,
    tokens: Range<usize>,
    across: usize,
    groups: [u32; 3],
) -> Dispatch {
    let EmbeddingTable { first, rows, columns } = EmbeddingTable::of(call);
    let accumulate = usize::from(call.accumulates() || tokens.start > 0);
    let Range { start, end } = tokens;
    Dispatch {
        shader: Shader::new("embedding", entry),
        operands: vec![Operand::Input(0), Operand::Input(1), Operand::Output(0)],
        params: as_words(&[start, end, columns, rows, across, share(rows), accumulate, first]),
        groups,
    }
}

/// Returns the cost. The gradient has an addition per element of `dy` and, because each workgroup
/// searches all ids for its rows, a comparison per id and workgroup, of the variant with the most
/// workgroups. The lookup moves only the rows that it selects.
pub fn cost(call: &OpCall) -> Cost {
    let ids = call.input_len(0) as f64;
    let elements = call.output_len(0) as f64;
    match call.op {
        Op::Embedding { .. } => Cost { flops: 0.0, bytes: 4.0 * (ids + 2.0 * elements) },
        _ => {
            let scanned = ids * embedding_rows::workgroups(EmbeddingTable::of(call)) as f64;
            Cost { flops: call.input_len(1) as f64 + scanned, bytes: Cost::moved(call) }
        }
    }
}

/// See [`Twin::inputs`].
fn inputs(op: &Op, inputs: &[Dims]) -> InputSpec {
    let ids = match op {
        Op::EmbeddingGrad { first: 0, rows } => *rows,
        Op::Embedding { first: 0 } => inputs[1][0],
        // A shard also has ids before its rows and behind them.
        Op::Embedding { first } => first + inputs[1][0] + OTHER_IDS,
        Op::EmbeddingGrad { first, rows } => first + rows + OTHER_IDS,
        other => panic!("{other} is not an embedding"),
    };
    InputSpec::normal(inputs).with(0, InputFill::Ids(ids as u32))
}

/// See [`Twin::independent_axes`]: ids, or columns of the gradient.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    let axis = match call.op {
        Op::Embedding { .. } => IndependentAxis::of(call, vec![Some(0), None], vec![Some(0)]),
        _ => {
            let last = call.inputs[1].len().checked_sub(1);
            IndependentAxis::of(call, vec![None, last], vec![Some(1)])
        }
    };
    axis.into_iter().collect()
}

/// See [`Twin::probes`].
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    match op {
        Op::EmbeddingGrad { first, rows } => {
            let c = inputs[1].last().copied().unwrap_or(1);
            // More rows than workgroups, and more tokens than a workgroup notes in one round.
            let many = GRAD_WORKGROUPS.max(embedding_rows::OWNERS_MAX) + 77;
            let mut probes = Vec::new();
            for [v, n] in [[29, 67], [many, 67], [many, NOTED + 53]] {
                let op = Op::EmbeddingGrad { first: few(*first), rows: v.min(*rows) };
                probes.push((op, vec![vec![n], vec![n, c]]));
            }
            probes
        }
        Op::Embedding { first } => {
            let v = inputs[1][0];
            let c = inputs[1][1];
            let op = Op::Embedding { first: few(*first) };
            calls(&op, [7, 37].map(|n| vec![vec![n], vec![v.min(29), c]]))
        }
        other => panic!("{other} is not an embedding"),
    }
}

/// The first row of a shard in a probe: small, so that the probe has ids of its rows.
fn few(first: usize) -> usize {
    first.min(5)
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    vec![
        (Op::Embedding { first: 0 }, vec![vec![N], vec![V, C]]),
        (Op::EmbeddingGrad { first: 0, rows: V }, vec![vec![N], vec![N, C]]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{InputFill, generate};
    use crate::testing::gradient::check_gradient;
    use crate::testing::{check, check_with};
    use crate::{OwnedCall, RandomContext};
    use potluck_core::rng::Key;
    use potluck_core::{HostTensor, Shape};

    #[test]
    fn rows_are_found_and_their_gradients_added() {
        for (t, v, c, rows) in [(7, 5, 3, 2), (1, 1, 1, 1), (64, 65, 132, 3), (11, 301, 7, 5)] {
            let ids = (Shape::batched(&[1, t]), InputFill::Ids(v as u32));
            let table = (Shape::fixed(&[v, c]), InputFill::Normal);
            check(Op::Embedding { first: 0 }, &[ids.clone(), table], rows);
            let dy = (Shape::batched(&[1, t, c]), InputFill::Normal);
            check(Op::EmbeddingGrad { first: 0, rows: v }, &[ids, dy], rows);
        }
    }

    /// Rows from the middle of a table of 40: ids before them, of them, and behind them.
    #[test]
    fn a_shard_has_the_rows_from_its_first_on() {
        for (first, v, c) in [(0, 13, 4), (17, 13, 3), (17, 23, 4), (39, 1, 260)] {
            let ids = (Shape::batched(&[1, 67]), InputFill::Ids(40));
            let table = (Shape::fixed(&[v, c]), InputFill::Normal);
            check(Op::Embedding { first }, &[ids.clone(), table], 2);
            let dy = (Shape::batched(&[1, 67, c]), InputFill::Normal);
            check(Op::EmbeddingGrad { first, rows: v }, &[ids, dy], 2);
        }
    }

    /// Several rows per workgroup, and more tokens than a workgroup scans in one round.
    #[test]
    fn rows_of_a_large_table_share_workgroups() {
        let v = 2 * GRAD_WORKGROUPS + 3;
        for c in [5, 68] {
            let ids = (Shape::batched(&[2100]), InputFill::Ids(v as u32));
            let dy = (Shape::batched(&[2100, c]), InputFill::Normal);
            check(Op::EmbeddingGrad { first: 0, rows: v }, &[ids, dy], 2);
        }
    }

    /// Frequent ids that are neighbours, and take turns, among rare ones; columns for several
    /// workgroups, and rows of one and of several per workgroup.
    #[test]
    fn frequent_ids_are_added_whole() {
        for (v, c) in [(65, 260), (65, 35), (2 * embedding_rows::OWNERS_MAX + 7, 260)] {
            let n = NOTED + 301;
            let HostTensor::Int(rare) = generate(InputFill::Ids(v as u32), n, 0) else {
                panic!("ids are integers")
            };
            let HostTensor::Int(dice) = generate(InputFill::Ids(8), n, 1) else {
                panic!("ids are integers")
            };
            let frequent = [10, 11, 12, 10 + embedding_rows::OWNERS_MAX as u32, v as u32 - 1];
            let id = |(die, rare): (&u32, &u32)| *frequent.get(*die as usize).unwrap_or(rare);
            let ids = dice.iter().zip(&rare).map(id).map(|id| id.min(v as u32 - 1)).collect();
            let ids = (Shape::batched(&[n]), HostTensor::Int(ids));
            let dy = (Shape::batched(&[n, c]), generate(InputFill::Normal, n * c, 2));
            check_with(Op::EmbeddingGrad { first: 0, rows: v }, &[ids, dy], 1);
        }
    }

    /// A kernel that is short at the nominal rates is not submitted in parts.
    #[test]
    fn the_cost_of_the_gradient_covers_the_search_for_ids() {
        let random = RandomContext { step_key: Key::new(1), training: true };
        for (n, v, c) in [(8192, 50_257, 768), (8192, 1000, 768), (70_001, 65, 4), (5, 3, 1)] {
            let (op, inputs) = (Op::EmbeddingGrad { first: 0, rows: v }, vec![vec![n], vec![n, c]]);
            let owned_call = OwnedCall::new(op, inputs, random).unwrap();
            let call = owned_call.call();
            for variant in variants(&call, &Caps::EVERY) {
                let of = |one: &Dispatch| {
                    let groups: u64 = one.groups.iter().map(|groups| u64::from(*groups)).product();
                    groups * u64::from(one.params[1] - one.params[0])
                };
                let scanned: u64 = variant.dispatches.iter().map(of).sum();
                // The last row of a folded grid may have idle workgroups.
                let scanned = scanned as f64 - (n * GRAD_WORKGROUPS) as f64;
                assert!(cost(&call).flops >= scanned, "{} of {:?}", variant.name, (n, v, c));
            }
        }
    }

    /// More tokens of the same id than the loops of an invocation may have iterations.
    #[test]
    fn one_id_may_be_everywhere() {
        for c in [3, 4] {
            let ids = (Shape::batched(&[70_001]), InputFill::Ids(1));
            let dy = (Shape::batched(&[70_001, c]), InputFill::Scaled(1.0, 0.5));
            check(Op::EmbeddingGrad { first: 0, rows: 2 }, &[ids, dy], 1);
        }
        // Rows so wide that few tokens are all that an invocation may add.
        for c in [2050, 8192] {
            let ids = (Shape::batched(&[2048]), InputFill::Ids(1));
            let dy = (Shape::batched(&[2048, c]), InputFill::Scaled(1.0, 0.5));
            check(Op::EmbeddingGrad { first: 0, rows: 2 }, &[ids, dy], 1);
        }
    }

    #[test]
    fn ids_of_no_row_mean_zeros_and_add_nothing() {
        for (first, c) in [(0, 5), (0, 8), (1, 5), (1, 8), (5, 8)] {
            let v = 6 - first;
            let ids = HostTensor::Int(vec![0, 5, 6, 1 << 31, u32::MAX]);
            let ids = (Shape::batched(&[1]), ids);
            let table = (Shape::fixed(&[v, c]), generate(InputFill::Normal, v * c, 1));
            let op = Op::Embedding { first };
            check_with(op.clone(), &[ids.clone(), table.clone()], 5);
            let y = crate::testing::reference(&op, &[ids.clone(), table], 5).remove(0);
            let is_row: Vec<bool> =
                y.chunks_exact(c).map(|y| y.iter().all(|y| *y != 0.0)).collect();
            assert_eq!(is_row, [first == 0, true, false, false, false]);
            let dy = (Shape::batched(&[1, c]), generate(InputFill::Normal, 5 * c, 2));
            check_with(Op::EmbeddingGrad { first, rows: v }, &[ids, dy], 5);
        }
    }

    #[test]
    fn the_gradient_is_the_derivative() {
        let (v, c, n) = (4, 3, 6);
        let ids = (Shape::batched(&[1]), generate(InputFill::Ids(v as u32), n, 0));
        let table = (Shape::fixed(&[v, c]), generate(InputFill::Normal, v * c, 1));
        let dy = (Shape::batched(&[1, c]), generate(InputFill::Normal, n * c, 2));
        let grad = Op::EmbeddingGrad { first: 0, rows: v };
        let dtable = crate::testing::reference(&grad, &[ids.clone(), dy.clone()], n);
        let HostTensor::Float(weights) = dy.1 else { panic!("dy is of floats") };
        check_gradient(&Op::Embedding { first: 0 }, &[ids, table], n, 1, &[weights], &dtable[0]);
    }
}
