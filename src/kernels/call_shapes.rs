//! Sizes of the calls on which kernels are certified: those of the catalog, a small GPT, and those
//! of probes, which are smaller and odd.

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

/// Sizes up to this are kept in probes where a kernel may depend on them.
pub const KEPT: usize = 4096;

/// Sizes that dimensions shrink to if the kernel does not depend on them; all are different.
pub const SMALL: [usize; 4] = [3, 7, 5, 11];

/// Returns calls of an op with inputs of each of these dimensions.
pub fn calls(op: &Op, sizes: impl IntoIterator<Item = Vec<Dims>>) -> Vec<CallShape> {
    sizes.into_iter().map(|inputs| (op.clone(), inputs)).collect()
}

/// Returns the dimensions of a tensor with all of them made small.
pub(crate) fn shrunk(dims: &Dims) -> Dims {
    shrunk_around(dims, dims.len()..=dims.len())
}

/// Returns the dimensions of a tensor with all but those of `axes` made small.
pub(crate) fn shrunk_around(dims: &Dims, axes: RangeInclusive<usize>) -> Dims {
    let shrink = |(axis, dim): (usize, &usize)| {
        if axes.contains(&axis) { *dim } else { small(SMALL[axis % 4], *dim) }
    };
    dims.iter().enumerate().map(shrink).collect()
}

/// Returns about `size`, and at most `of`; a multiple of four if `of` is one, because kernels then
/// load four values at a time.
fn small(size: usize, of: usize) -> usize {
    let size = if of.is_multiple_of(4) { size.next_multiple_of(4) } else { size };
    size.min(of)
}
