//! Convolutions on which the kernels are certified.

use crate::base::rng::Key;
use crate::graph::{Conv2dOptions, Op};
use crate::kernels::call_shapes::calls;
use crate::kernels::{CallShape, Dims, OwnedCall, RandomContext};

use super::geometry::{ConvKind, Geometry};

/// Pictures, and height and width of their output, of probes, the cheapest first: less than a tile
/// of places, and more than one.
const PLACES: [[usize; 3]; 4] = [[2, 3, 5], [1, 9, 8], [3, 7, 7], [2, 13, 11]];

/// Channels of a group up to this are kept, because kernels for few of them depend on the number.
const FEW: usize = 8;

/// See [`crate::kernels::Twin::probes`].
pub fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    probes_with_channels(op, inputs, None)
}

/// Returns the convolution of smaller pictures with fewer channels, and with `channels` channels of
/// the result if given.
pub fn probes_with_channels(op: &Op, inputs: &[Dims], channels: Option<usize>) -> Vec<CallShape> {
    let random = RandomContext { step_key: Key::new(0), training: true };
    let Some(owned_call) = OwnedCall::new(op.clone(), inputs.to_vec(), random) else {
        return Vec::new();
    };
    let geometry = Geometry::of(&owned_call.call());
    PLACES.iter().flat_map(|places| probe(&geometry, *places, channels)).collect()
}

/// Returns the call for so many pictures with outputs of about this size.
fn probe(geometry: &Geometry, [b, oh, ow]: [usize; 3], channels: Option<usize>) -> Vec<CallShape> {
    let Geometry { kernel, options, .. } = *geometry;
    let groups = geometry.groups().min(if geometry.is_depthwise() { usize::MAX } else { 3 });
    let depthwise = geometry.is_depthwise().then(|| like(37, geometry.c));
    let groups = depthwise.unwrap_or(groups);
    let of_group = |count: usize| groups * like(21, count / geometry.groups());
    let (mut c, mut o) = (of_group(geometry.c), of_group(geometry.o));
    match (channels, geometry.kind) {
        (None, _) => {}
        (Some(kept), ConvKind::InputGrad) => c = kept,
        (Some(kept), _) => o = kept,
    }
    let groups = if channels.is_some() { geometry.groups() } else { groups };
    if channels.is_some() && groups > 1 {
        (c, o) = (geometry.c, geometry.o);
    }
    // The smallest picture with such an output, or one of the padding's size.
    let side = |axis: usize, out: usize| {
        let span = options.dilation[axis] * (kernel[axis] - 1) + 1;
        ((out - 1) * options.stride[axis] + span).saturating_sub(2 * options.padding[axis]).max(1)
    };
    let (size, options) = ([side(0, oh), side(1, ow)], Conv2dOptions { groups, ..options });
    let Ok([oh, ow]) = options.output_size(size, kernel) else { return Vec::new() };
    let (x, w) = (vec![b, size[0], size[1], c], vec![o, c / groups, kernel[0], kernel[1]]);
    let y = vec![b, oh, ow, o];
    match geometry.kind {
        ConvKind::Forward => calls(&Op::Conv2d(options), [vec![x, w]]),
        ConvKind::InputGrad => calls(&Op::Conv2dInputGrad { options, size }, [vec![y, w]]),
        ConvKind::WeightGrad => calls(&Op::Conv2dWeightGrad { options, kernel }, [vec![x, y]]),
    }
}

/// Returns about `size` channels of a group, and a multiple of 16 or of 4 if `of` is one, as
/// kernels then read vectors; `of` itself if it is a few.
fn like(size: usize, of: usize) -> usize {
    let multiple = [16, 4].into_iter().find(|multiple| of.is_multiple_of(*multiple));
    match of {
        0..=FEW => of,
        _ => size.next_multiple_of(multiple.unwrap_or(1)),
    }
}

/// See [`crate::kernels::Twin::catalog`]: the layers of small networks, and one of each kind.
pub fn catalog() -> Vec<CallShape> {
    let conv = Conv2dOptions::default();
    let same = conv.with_padding(1);
    let layers = [
        (conv.with_padding(2), [4, 28, 28, 1], 6, 5),
        (same, [4, 16, 16, 64], 64, 3),
        (same.with_stride(2), [4, 16, 16, 32], 64, 3),
        (conv, [4, 16, 16, 32], 32, 1),
        (same.with_groups(4), [4, 8, 8, 32], 32, 3),
        (same.with_groups(64), [4, 16, 16, 64], 64, 3),
    ];
    layers.into_iter().flat_map(|(options, x, o, side)| layer(options, x, o, [side; 2])).collect()
}

/// Returns the forward pass and both gradients of a layer.
fn layer(options: Conv2dOptions, x: [usize; 4], o: usize, kernel: [usize; 2]) -> Vec<CallShape> {
    let [b, h, w, c] = x;
    let [oh, ow] = options.output_size([h, w], kernel).unwrap_or([1; 2]);
    let weight = vec![o, c / options.groups, kernel[0], kernel[1]];
    let (x, y, size) = (x.to_vec(), vec![b, oh, ow, o], [h, w]);
    vec![
        (Op::Conv2d(options), vec![x.clone(), weight.clone()]),
        (Op::Conv2dInputGrad { options, size }, vec![y.clone(), weight]),
        (Op::Conv2dWeightGrad { options, kernel }, vec![x, y]),
    ]
}
