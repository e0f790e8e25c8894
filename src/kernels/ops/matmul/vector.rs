//! Products of a few rows or columns and a matrix. Twin of `shaders/matmul_vector.wgsl`, which
//! has the formula.
//!
//! Such a product reads every element of the matrix once or a few times, so it is bound by memory
//! bandwidth: adjacent invocations must read adjacent elements, and there must be enough of them.

use super::sizes::Sizes;
use crate::kernels::ops::epilogue::{self, Epilogue};
use crate::kernels::{Dispatch, OpCall, Operand, Shader, dispatch};

/// Maximum number of rows or columns that count as few: each of them reads the whole matrix.
pub const FEW: usize = 8;
/// Invocations per workgroup.
const SIZE: usize = 64;

/// Invocations that share an output, if adjacent elements of the matrix are terms of the sum.
const SLICES_OF_TERMS: usize = 16;
/// Invocations that share an output, if adjacent elements of the matrix are columns.
const SLICES_OF_COLUMNS: usize = 8;

/// Returns true if the output has at most `FEW` rows or columns.
pub fn fits(sizes: &Sizes) -> bool {
    sizes.m.min(sizes.n) <= FEW
}

/// Returns the shader for a matrix whose adjacent elements are terms of the sum, or else columns;
/// `store` is that of [`crate::kernels::ops::epilogue`].
pub fn shader(terms_are_neighbours: bool, store: &str) -> Shader {
    Shader::new("matmul_vector", "vector")
        .with_const("SLICES", slices(terms_are_neighbours) as u32)
        .with_const("TERMS_ARE_NEIGHBOURS", u32::from(terms_are_neighbours))
        .with_text(store)
}

fn slices(terms_are_neighbours: bool) -> usize {
    if terms_are_neighbours { SLICES_OF_TERMS } else { SLICES_OF_COLUMNS }
}

/// Returns the dispatch of a call. If b has fewer columns than a has rows, it computes the
/// product of the transposes with the operands exchanged.
pub fn dispatch(call: &OpCall, sizes: &Sizes) -> Dispatch {
    let Sizes { batch, m, n, k, .. } = *sizes;
    let ((a_row, a_step), (b_step, b_column)) = (sizes.a_strides(), sizes.b_strides());
    let exchanged = n < m;
    let (rows, few, columns, many, c) = match exchanged {
        false => (m, [a_row, a_step], n, [b_step, b_column], [n, 1]),
        true => (n, [b_column, b_step], m, [a_step, a_row], [1, n]),
    };
    let terms_are_neighbours = many[0] == 1;
    let across = columns.div_ceil(SIZE / slices(terms_are_neighbours));
    let workgroups = batch * rows * across;
    let accumulate = usize::from(call.accumulate);
    let head = [workgroups, across, rows, columns, k];
    let params = [&head[..], &few, &many, &c, &[accumulate]].concat();
    let inputs = if exchanged { [1, 0] } else { [0, 1] };
    let own = [Operand::Input(inputs[0]), Operand::Input(inputs[1]), Operand::Output(0)];
    let Epilogue { text: store, operands } = epilogue::of(call, own.len());
    Dispatch {
        shader: shader(terms_are_neighbours, &store),
        operands: [&own[..], &operands].concat(),
        params: params.into_iter().map(|word| word as u32).collect(),
        groups: dispatch::grid(workgroups, 1),
    }
}
