//! Shape rule of each op: computes the shapes of the outputs from the inputs' shapes, or the reason
//! why they do not fit. The rules are in the submodules, by topic.

mod attention;
mod checks;
mod elementwise;
mod fused;
mod indexing;
mod layout;
mod losses;
mod norms;
mod pictures;
mod products;
mod recurrent;

use super::custom;
use super::op::{Op, Reduction};
use potluck_core::format::listed;
use potluck_core::{DType, Shape};

/// Error of an op whose inputs do not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op} of {inputs}: {why}")]
pub struct ShapeError {
    pub op: String,
    pub inputs: String,
    pub why: String,
}

/// Largest number of inputs of an [`Op::Concat`]: with the output, as many as every device binds.
pub(super) const CONCAT_INPUTS_MAX: usize = 7;

/// Shape and type of a tensor: the input of a shape rule.
pub type Typed = (Shape, DType);

/// Returns the shapes and types of the outputs of `op` on `inputs`.
pub fn outputs(op: &Op, inputs: &[Typed]) -> Result<Vec<Typed>, ShapeError> {
    let fail = |why: String| ShapeError {
        op: op.to_string(),
        inputs: listed(inputs.iter().map(|(s, _)| s)),
        why,
    };
    if !fits_arity(op, inputs.len()) {
        let (least, most) = arity(op);
        return Err(fail(format!("takes {least} to {most} inputs, not {}", inputs.len())));
    }
    if let Some(at) = (0..inputs.len()).find(|&i| inputs[i].1 != input_type(op, i, inputs.len())) {
        let want = input_type(op, at, inputs.len());
        return Err(fail(format!("input {at} must be of {want:?}")));
    }
    let shapes: Vec<&Shape> = inputs.iter().map(|(shape, _)| shape).collect();
    for shape in &shapes {
        check_computable(shape).map_err(fail)?;
    }
    let mut outputs = Vec::new();
    for shape in rule(op, &shapes).map_err(fail)? {
        check_computable(&shape).map_err(fail)?;
        outputs.push((shape, DType::F32));
    }
    Ok(outputs)
}

/// Checks that a tensor has at least one element, which kernels require, and that their number fits
/// in a `usize`.
fn check_computable(shape: &Shape) -> Result<(), String> {
    if shape.dims().contains(&0) {
        return Err(format!("{shape} has a dimension of size 0, of which nothing is computed"));
    }
    let mut count = 1usize;
    for dim in shape.dims() {
        let Some(product) = count.checked_mul(*dim) else {
            return Err(format!("{shape} has more elements than can be counted"));
        };
        count = product;
    }
    Ok(())
}

pub(super) fn fits_arity(op: &Op, count: usize) -> bool {
    let (least, most) = arity(op);
    (least..=most).contains(&count)
}

fn arity(op: &Op) -> (usize, usize) {
    match op {
        Op::MatMul { .. } | Op::LinearWeightGrad => (2, 2),
        Op::UnaryGrad(_) | Op::Binary(_) => (2, 2),
        Op::Unary(_) | Op::Reshape | Op::Permute { .. } | Op::Slice { .. } => (1, 1),
        Op::Pad { .. } | Op::Sum { .. } | Op::Broadcast { .. } => (1, 1),
        Op::Concat { .. } => (1, CONCAT_INPUTS_MAX),
        Op::LayerNorm { .. } => (2, 3),
        Op::BinaryGrad { .. } => (3, 3),
        Op::LayerNormGrad | Op::RmsNormGrad | Op::GroupNormGrad { .. } => (4, 4),
        Op::NormBackward(options) => {
            let count = 4 + usize::from(options.adds);
            (count, count)
        }
        Op::RmsNorm { .. } | Op::SoftmaxGrad => (2, 2),
        Op::GroupNorm { .. } | Op::GroupNormAffineGrad { .. } => (3, 3),
        Op::Softmax => (1, 1),
        Op::LayerNormWeightGrad | Op::LayerNormAffineGrad => (3, 3),
        Op::BatchNorm { .. } => (5, 5),
        Op::BatchNormAffineGrad => (3, 3),
        Op::BatchNormGrad => (6, 6),
        Op::Recurrent { cell } => (3, 3 + cell.states()),
        Op::RecurrentGrad { .. } => (4, 5),
        Op::Attention(options) => {
            let count = options.tensors() + usize::from(op.is_random());
            (count, count)
        }
        Op::AttentionGrad(options) => {
            let count = options.tensors() + 3 + usize::from(op.is_random());
            (count, count)
        }
        Op::Embedding { .. } | Op::EmbeddingGrad { .. } | Op::Dropout { .. } => (2, 2),
        Op::Gather { .. } | Op::ScatterAdd { .. } => (2, 2),
        Op::CacheUpdate(options) => (options.tensors() + 1, options.tensors() + 1),
        Op::CachedAttention(_) => (3, 3),
        Op::Rotary { .. } => (2, 2),
        Op::PackBf16 | Op::UnpackBf16 { .. } => (1, 1),
        Op::CrossEntropy { .. } | Op::SquaredError | Op::SquaredErrorGrad => (2, 2),
        Op::Conv2d(_) | Op::Conv2dInputGrad { .. } | Op::Conv2dWeightGrad { .. } => (2, 2),
        Op::MaxPool2dGrad { .. } => (2, 2),
        Op::MaxPool2d(_) | Op::AvgPool2d(_) | Op::AvgPool2dGrad { .. } => (1, 1),
        Op::CrossEntropyGrad { .. } => (3, 3),
        Op::LinearCrossEntropy { .. } | Op::LinearCrossEntropyPass { .. } => (3, 3),
        Op::LinearCrossEntropyGrad { .. } | Op::JoinCrossEntropy => (4, 4),
        Op::Spread | Op::AllReduce(Reduction::Sum) => (1, 1),
        Op::AllReduce(Reduction::SumBf16 | Reduction::CrossEntropy { .. }) => (2, 2),
        Op::Custom(op) => (op.inputs().len(), op.inputs().len()),
        Op::Fused { root, epilogue } => {
            let (least, most) = arity(root);
            let operands = epilogue.iter().filter(|step| step.has_operand()).count();
            (least + operands, most + operands)
        }
    }
}

/// Returns the type of an input: ids, targets and sample ids are integers; everything else is a
/// float.
pub(super) fn input_type(op: &Op, index: usize, count: usize) -> DType {
    let integer = match op {
        Op::Embedding { .. } | Op::EmbeddingGrad { .. } => index == 0,
        Op::CrossEntropy { .. } | Op::CrossEntropyGrad { .. } => index == 1,
        Op::LinearCrossEntropy { .. }
        | Op::LinearCrossEntropyGrad { .. }
        | Op::LinearCrossEntropyPass { .. } => index == 2,
        Op::CacheUpdate(_) | Op::CachedAttention(_) => index + 1 == count,
        Op::Custom(op) => return op.inputs()[index].dtype(),
        Op::Fused { root, .. } => return input_type(root, index, count),
        _ => op.is_random() && index + 1 == count,
    };
    if integer { DType::U32 } else { DType::F32 }
}

fn rule(op: &Op, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    match op {
        Op::MatMul { transpose_a, transpose_b } => {
            products::matmul(x[0], x[1], *transpose_a, *transpose_b)
        }
        Op::LinearWeightGrad => products::linear_weight_grad(x[0], x[1]),
        Op::Unary(function) => elementwise::unary(*function, x[0]),
        Op::UnaryGrad(_) => elementwise::unary_grad(x),
        Op::Binary(_) => elementwise::binary(x),
        Op::BinaryGrad { .. } => elementwise::binary_grad(x),
        Op::AllReduce(Reduction::SumBf16) => layout::sum_of_words(x),
        Op::Reshape | Op::Spread | Op::AllReduce(_) => layout::aliases(x),
        Op::Permute { axes } => layout::permute(axes, x[0]),
        Op::Slice { axis, start, length } => layout::slice(*axis, *start, *length, x[0]),
        Op::Pad { axis, before, after } => layout::pad(*axis, *before, *after, x[0]),
        Op::Concat { axis } => layout::concat(*axis, x),
        Op::Sum { first, last } => layout::sum(*first, *last, x[0]),
        Op::Broadcast { first, dims, batched } => layout::broadcast(*first, dims, *batched, x[0]),
        Op::LayerNorm { eps } | Op::RmsNorm { eps } => norms::layer_norm(*eps, x),
        Op::LayerNormGrad | Op::RmsNormGrad => norms::layer_norm_grad(x),
        Op::NormBackward(options) => norms::norm_backward(*options, x),
        Op::LayerNormWeightGrad => norms::layer_norm_weight_grad(x),
        Op::LayerNormAffineGrad => norms::layer_norm_affine_grad(x),
        Op::GroupNorm { groups, eps } => norms::group_norm(*groups, *eps, x),
        Op::GroupNormGrad { groups } => norms::group_norm_grad(*groups, x),
        Op::GroupNormAffineGrad { groups } => norms::group_norm_affine_grad(*groups, x),
        Op::Softmax => norms::softmax(x[0]),
        Op::SoftmaxGrad => norms::softmax_grad(x),
        Op::BatchNorm { eps } => norms::batch_norm(*eps, x),
        Op::BatchNormAffineGrad => norms::batch_norm_affine_grad(x),
        Op::BatchNormGrad => norms::batch_norm_grad(x),
        Op::Recurrent { cell } => recurrent::recurrent(*cell, x),
        Op::RecurrentGrad { cell } => recurrent::recurrent_grad(*cell, x),
        Op::Attention(options) => attention::attention(options, x),
        Op::AttentionGrad(options) => attention::attention_grad(options, x),
        Op::CacheUpdate(options) => attention::cache_update(options, x),
        Op::CachedAttention(options) => attention::cached_attention(options, x),
        Op::Rotary { .. } => attention::rotary(x),
        Op::Embedding { first } => products::embedding(*first, x),
        Op::EmbeddingGrad { first, rows } => products::embedding_grad(*first, *rows, x),
        Op::Gather { axis } => indexing::gather(*axis, x[0], x[1]),
        Op::ScatterAdd { axis, length } => indexing::scatter_add(*axis, *length, x[0], x[1]),
        Op::Dropout { p, columns, .. } => elementwise::dropout(*p, *columns, x),
        Op::CrossEntropy(classes) => losses::cross_entropy(*classes, x),
        Op::CrossEntropyGrad(classes) => losses::cross_entropy_grad(*classes, x),
        Op::LinearCrossEntropy { rows, classes } => {
            losses::linear_cross_entropy(*rows, *classes, x)
        }
        Op::LinearCrossEntropyGrad { rows, classes, by_weight } => {
            losses::linear_cross_entropy_grad(*rows, *classes, *by_weight, x)
        }
        Op::LinearCrossEntropyPass { rows, classes, by_weight } => {
            losses::linear_cross_entropy_pass(*rows, *classes, *by_weight, x)
        }
        Op::JoinCrossEntropy => losses::join_cross_entropy(x),
        Op::SquaredError => losses::squared_error(x),
        Op::SquaredErrorGrad => losses::squared_error_grad(x),
        Op::Conv2d(options) => pictures::conv2d(options, x),
        Op::Conv2dInputGrad { options, size } => pictures::conv2d_input_grad(options, *size, x),
        Op::Conv2dWeightGrad { options, kernel } => {
            pictures::conv2d_weight_grad(options, *kernel, x)
        }
        Op::MaxPool2d(options) => pictures::max_pool2d(options, x[0]),
        Op::AvgPool2d(options) => pictures::avg_pool2d(options, x[0]),
        Op::MaxPool2dGrad { options, size } | Op::AvgPool2dGrad { options, size } => {
            pictures::pool2d_grad(options, *size, x)
        }
        Op::PackBf16 => layout::packed(x[0]),
        Op::UnpackBf16 { dims } => layout::unpacked(dims, x[0]),
        Op::Custom(op) => custom::shape(op, x),
        Op::Fused { root, epilogue } => fused::fused(root, epilogue, x),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttentionOptions, ColumnRange, LossClasses};

    fn shape_of(op: Op, inputs: &[Shape]) -> Result<String, String> {
        let typed: Vec<Typed> = inputs
            .iter()
            .enumerate()
            .map(|(i, s)| (s.clone(), input_type(&op, i, inputs.len())))
            .collect();
        let names = |shapes: Vec<Typed>| {
            shapes.iter().map(|(s, _)| s.to_string()).collect::<Vec<_>>().join(" ")
        };
        outputs(&op, &typed).map(names).map_err(|e| e.to_string())
    }

    #[test]
    fn matmul_sums_a_batched_dimension_away() {
        let op = |ta, tb| Op::MatMul { transpose_a: ta, transpose_b: tb };
        let x = Shape::batched(&[64, 128]);
        let w = Shape::fixed(&[512, 128]);
        assert_eq!(shape_of(op(false, true), &[x.clone(), w]).unwrap(), "(b*64, 512)");
        let dy = Shape::batched(&[64, 512]);
        assert_eq!(shape_of(op(true, false), &[dy.clone(), x.clone()]).unwrap(), "(512, 128)");
        let error = shape_of(op(false, false), &[dy, x]).unwrap_err();
        assert!(error.contains("sums over 512 on the left and 64 on the right"), "{error}");
    }

    #[test]
    fn the_batch_axis_is_kept_in_front() {
        let x = Shape::batched(&[1, 4, 6]);
        let swap = Op::Permute { axes: vec![1, 0, 2] };
        assert!(shape_of(swap, std::slice::from_ref(&x)).unwrap_err().contains("batch axis"));
        let sum = Op::Sum { first: 0, last: 1 };
        assert_eq!(shape_of(sum, std::slice::from_ref(&x)).unwrap(), "(6)");
        let sum = Op::Sum { first: 1, last: 1 };
        assert_eq!(shape_of(sum, std::slice::from_ref(&x)).unwrap(), "(b, 6)");
    }

    #[test]
    fn attention_wants_whole_heads() {
        let op = |heads| Op::Attention(AttentionOptions::packed(heads, 4));
        let qkv = Shape::batched(&[1, 8, 48]);
        assert_eq!(shape_of(op(4), std::slice::from_ref(&qkv)).unwrap(), "(b, 8, 16) (b, 4, 8)");
        assert!(shape_of(op(5), &[qkv]).is_err());
    }

    #[test]
    fn the_batch_is_not_normalized_and_scalars_are_no_logits() {
        let norm = Op::LayerNorm { eps: 1e-5 };
        let gain = Shape::fixed(&[4]);
        let error = shape_of(norm.clone(), &[Shape::batched(&[4]), gain.clone()]).unwrap_err();
        assert!(error.contains("not the batch"), "{error}");
        assert_eq!(shape_of(norm, &[Shape::batched(&[1, 4]), gain]).unwrap(), "(b, 4) (b, 2)");
        assert!(
            shape_of(
                Op::CrossEntropy(LossClasses::whole(1)),
                &[Shape::fixed(&[]), Shape::fixed(&[])]
            )
            .is_err()
        );
    }

    #[test]
    fn kernels_can_number_what_a_rank_has() {
        let most = u32::MAX as usize;
        let (ids, samples) = (Shape::batched(&[1, 4]), Shape::batched(&[1]));
        let (logits, rows) = (Shape::batched(&[4, 7]), Shape::batched(&[4]));
        let qkv = Shape::batched(&[1, 8, 48]);
        // Each with 7 entries from `first` on: an op, and its inputs.
        let all = |first: usize| {
            let columns = Some(ColumnRange { first, all: first.saturating_add(7) });
            let site = Default::default();
            let classes = LossClasses { first, all: first.saturating_add(7), smoothing: 0.0 };
            let own = AttentionOptions { first_head: first, ..AttentionOptions::packed(4, 4) };
            [
                (Op::Embedding { first }, vec![ids.clone(), Shape::fixed(&[7, 2])]),
                (
                    Op::EmbeddingGrad { first, rows: 7 },
                    vec![ids.clone(), Shape::batched(&[1, 4, 2])],
                ),
                (Op::CrossEntropy(classes), vec![logits.clone(), rows.clone()]),
                (Op::CrossEntropyGrad(classes), vec![logits.clone(), rows.clone(), rows.clone()]),
                (Op::Dropout { p: 0.5, site, columns }, vec![logits.clone(), samples.clone()]),
                (Op::Attention(own), vec![qkv.clone()]),
            ]
        };
        for (op, inputs) in all(most - 7) {
            assert!(shape_of(op.clone(), &inputs).is_ok(), "{op}");
        }
        for first in [most, most + 1, usize::MAX - 8, usize::MAX] {
            for (op, inputs) in all(first) {
                assert!(shape_of(op.clone(), &inputs).is_err(), "{op}");
            }
        }
        let classes = LossClasses { first: most, all: most + 7, smoothing: 0.0 };
        let error = shape_of(Op::CrossEntropy(classes), &[logits, rows]).unwrap_err();
        let why = "kernels number less than 2^32, and not 7 from 4294967295 on";
        assert!(error.ends_with(why), "{error}");
    }

    #[test]
    fn wrong_types_are_refused() {
        let floats = [(Shape::batched(&[4]), DType::F32), (Shape::fixed(&[9, 2]), DType::F32)];
        assert!(outputs(&Op::Embedding { first: 0 }, &floats).unwrap_err().why.contains("U32"));
    }
}
