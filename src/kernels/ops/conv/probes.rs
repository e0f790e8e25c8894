//! Convolutions on which the kernels are certified.

use crate::call_shapes::calls;
use crate::{CallShape, Dims, OwnedCall, RandomContext};
use potluck_core::rng::Key;
use potluck_graph::{Conv2dOptions, Op};

use super::geometry::{ConvKind, Geometry};
use super::shared::FLAT_MAX;

/// Pictures, height and width of their output, and channels of probes, the cheapest first: for each
/// size of a tile, less than a tile and more than one.
const PLACES: [[usize; 4]; 4] = [[2, 3, 5, 21], [1, 9, 8, 21], [2, 7, 7, 37], [2, 9, 8, 69]];

/// Up to this number, channels of a group are kept, because kernels for few channels depend on the
/// number.
const FEW: usize = FLAT_MAX;

/// See [`crate::Twin::probes`].
pub fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    probes_with_channels(op, inputs, None)
}

/// Returns the convolution of smaller pictures with fewer channels, and with `channels` channels of
/// the result if given.
pub(crate) fn probes_with_channels(
    op: &Op,
    inputs: &[Dims],
    channels: Option<usize>,
) -> Vec<CallShape> {
    let random = RandomContext { step_key: Key::new(0), training: true };
    let Some(owned_call) = OwnedCall::new(op.clone(), inputs.to_vec(), random) else {
        return Vec::new();
    };
    let geometry = Geometry::of(&owned_call.call());
    PLACES.iter().flat_map(|sizes| probe(&geometry, *sizes, channels)).collect()
}

/// Returns the groups, the input and the output channels of a probe with about `size` channels per
/// group.
fn small_channels(geometry: &Geometry, size: usize, channels: Option<usize>) -> [usize; 3] {
    let groups = geometry.groups();
    if groups > 1 && channels.is_some() {
        return [groups, geometry.c, geometry.o];
    }
    let few = if geometry.is_depthwise() { like(size, geometry.c) } else { groups.min(3) };
    let c = few * like(size, geometry.group_c());
    let o = few * like(size, geometry.group_o());
    match (channels, geometry.kind) {
        (None, _) => [few, c, o],
        (Some(kept), ConvKind::InputGrad) => [few, kept, o],
        (Some(kept), _) => [few, c, kept],
    }
}

/// Call for pictures with outputs of about these sizes.
fn probe(geometry: &Geometry, sizes: [usize; 4], channels: Option<usize>) -> Vec<CallShape> {
    let [b, oh, ow, size] = sizes;
    let kernel = geometry.kernel;
    let [groups, c, o] = small_channels(geometry, size, channels);
    let options = Conv2dOptions { groups, ..geometry.options };
    // The smallest picture with such an output, or one of the padding's size.
    let out = [oh, ow];
    let size = [0, 1].map(|axis| {
        let span = options.dilation[axis] * (kernel[axis] - 1) + 1;
        let padded = (out[axis] - 1) * options.stride[axis] + span;
        padded.saturating_sub(2 * options.padding[axis]).max(1)
    });
    let Ok([oh, ow]) = options.output_size(size, kernel) else { return Vec::new() };
    let x = vec![b, size[0], size[1], c];
    let w = vec![o, c / groups, kernel[0], kernel[1]];
    let y = vec![b, oh, ow, o];
    match geometry.kind {
        ConvKind::Forward => calls(&Op::Conv2d(options), [vec![x, w]]),
        ConvKind::InputGrad => calls(&Op::Conv2dInputGrad { options, size }, [vec![y, w]]),
        ConvKind::WeightGrad => calls(&Op::Conv2dWeightGrad { options, kernel }, [vec![x, y]]),
    }
}

/// Returns `of` if it is at most [`FEW`], or else about `size` channels of a group: a multiple of
/// 16 or of 4 if `of` is one, because kernels then read vectors.
fn like(size: usize, of: usize) -> usize {
    let multiple = [16, 4].into_iter().find(|multiple| of.is_multiple_of(*multiple));
    match of {
        0..=FEW => of,
        _ => size.next_multiple_of(multiple.unwrap_or(1)),
    }
}

/// See [`crate::Twin::catalog`]: the layers of small networks, and one of each kind.
pub fn catalog() -> Vec<CallShape> {
    let conv = Conv2dOptions::default();
    let same = conv.with_padding(1);
    let layers = [
        (conv.with_padding(2), [4, 28, 28, 1], 6, 5),
        (same, [4, 16, 16, 64], 64, 3),
        (same, [4, 8, 8, 128], 128, 3),
        (same.with_stride(2), [4, 16, 16, 32], 64, 3),
        (conv, [4, 16, 16, 32], 32, 1),
        (same.with_groups(4), [4, 8, 8, 32], 32, 3),
        (same.with_groups(64), [4, 16, 16, 64], 64, 3),
    ];
    layers.into_iter().flat_map(|(options, x, o, side)| layer(options, x, o, [side; 2])).collect()
}

/// Forward pass and both gradients of a layer.
fn layer(options: Conv2dOptions, x: [usize; 4], o: usize, kernel: [usize; 2]) -> Vec<CallShape> {
    let [b, h, w, c] = x;
    let [oh, ow] = options.output_size([h, w], kernel).unwrap_or([1; 2]);
    let weight = vec![o, c / options.groups, kernel[0], kernel[1]];
    let x = x.to_vec();
    let y = vec![b, oh, ow, o];
    vec![
        (Op::Conv2d(options), vec![x.clone(), weight.clone()]),
        (Op::Conv2dInputGrad { options, size: [h, w] }, vec![y.clone(), weight]),
        (Op::Conv2dWeightGrad { options, kernel }, vec![x, y]),
    ]
}
