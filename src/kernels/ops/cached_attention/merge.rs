//! Sum of the partial sums of attention over a cache whose keys are split between workgroups. Twin
//! of `shaders/cached_attention_merge.wgsl`.

use super::CachedSizes;
use crate::dispatch::grid;
use crate::{Dispatch, Operand, Shader, source};

/// Invocations per workgroup.
const SIZE: u32 = 64;

/// Returns the workspace of the partial sums: for each row, head and split the values of a head,
/// the largest product, and the sum of the weights.
pub fn partials(sizes: &CachedSizes, lanes: usize, splits: usize) -> Operand {
    Operand::workspace(sizes.rows * sizes.heads * splits * (sizes.d + 2 * lanes))
}

/// Returns the dispatch that adds the partial sums.
pub fn dispatch(sizes: &CachedSizes, lanes: usize, splits: usize) -> Dispatch {
    let d = sizes.d / lanes;
    let count = sizes.rows * sizes.heads * d;
    Dispatch {
        shader: Shader::new("cached_attention_merge", "merge").with_text(source::values_of(lanes)),
        operands: vec![partials(sizes, lanes, splits), Operand::Output(0)],
        params: [count, d, splits].map(|word| word as u32).to_vec(),
        groups: grid(count, SIZE),
    }
}
