//! Sizes of the calls on which kernels are certified: the catalog has the sizes of a small GPT, and
//! probes have smaller and odd ones.

use std::ops::RangeInclusive;

use super::twin::{CallShape, Dims};
use potluck_graph::Op;

/// Samples, tokens, heads, channels and classes of the catalog.
pub const B: usize = 4;
pub const T: usize = 64;
pub(crate) const HEADS: usize = 4;
pub const C: usize = 128;
pub const V: usize = 65;
/// Tokens of all samples of the catalog.
pub const N: usize = B * T;

/// Numbers of rows of probes: about one small tile, and more than one.
pub(crate) const PROBE_ROWS: [usize; 2] = [5, 67];

/// Sizes up to this are kept in probes if a kernel may depend on them.
pub const KEPT: usize = 4096;

/// Sizes to which dimensions shrink if the kernel does not depend on them; all are different.
pub const SMALL: [usize; 4] = [3, 7, 5, 11];

/// Returns one call of an op for each list of the dimensions of its inputs.
pub fn calls(op: &Op, sizes: impl IntoIterator<Item = Vec<Dims>>) -> Vec<CallShape> {
    sizes.into_iter().map(|inputs| (op.clone(), inputs)).collect()
}

pub(crate) fn shrunk(dims: &Dims) -> Dims {
    shrunk_around(dims, dims.len()..=dims.len())
}

/// Dimensions of a tensor, made small outside `axes`.
pub(crate) fn shrunk_around(dims: &Dims, axes: RangeInclusive<usize>) -> Dims {
    let mut shrunk = dims.clone();
    for (axis, dim) in shrunk.iter_mut().enumerate() {
        if !axes.contains(&axis) {
            *dim = small(SMALL[axis % 4], *dim);
        }
    }
    shrunk
}

/// Returns about `size`, and at most `of`; a multiple of four if `of` is one, because kernels then
/// load vectors of four values.
fn small(size: usize, of: usize) -> usize {
    let size = if of.is_multiple_of(4) { size.next_multiple_of(4) } else { size };
    size.min(of)
}
