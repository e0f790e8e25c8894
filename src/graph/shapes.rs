//! Shape rule of each op: computes the shapes of the outputs from those of the inputs, or the
//! reason why they do not fit.

mod attention;
mod norms;
mod pictures;

use super::custom;
use super::op::{Binary, Cell, ColumnRange, EpilogueOp, Op, Reduction};
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
    shapes.iter().try_for_each(|shape| is_computable(shape)).map_err(fail)?;
    let computed = rule(op, &shapes).map_err(fail)?;
    computed.iter().try_for_each(is_computable).map_err(fail)?;
    Ok(computed.into_iter().map(|shape| (shape, DType::F32)).collect())
}

/// Checks that a tensor has elements, because no kernel takes one without, and no more than a
/// `usize` counts.
fn is_computable(shape: &Shape) -> Result<(), String> {
    if shape.dims().contains(&0) {
        return Err(format!("{shape} has a dimension of size 0, of which nothing is computed"));
    }
    let count = shape.dims().iter().try_fold(1usize, |count, dim| count.checked_mul(*dim));
    count.map(|_| ()).ok_or_else(|| format!("{shape} has more elements than can be counted"))
}

/// Returns true if the op takes so many inputs.
pub(super) fn fits_arity(op: &Op, count: usize) -> bool {
    let (least, most) = arity(op);
    (least..=most).contains(&count)
}

fn arity(op: &Op) -> (usize, usize) {
    match op {
        Op::MatMul { .. } | Op::UnaryGrad(_) | Op::Binary(_) => (2, 2),
        Op::Unary(_) | Op::Reshape | Op::Permute { .. } | Op::Slice { .. } => (1, 1),
        Op::Pad { .. } | Op::Sum { .. } | Op::Broadcast { .. } => (1, 1),
        Op::Concat { .. } => (1, 7),
        Op::LayerNorm { .. } => (2, 3),
        Op::MaximumGrad => (3, 3),
        Op::LayerNormGrad | Op::RmsNormGrad | Op::GroupNormGrad { .. } => (4, 4),
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
        Op::CrossEntropy { .. } | Op::SquaredError | Op::SquaredErrorGrad => (2, 2),
        Op::Conv2d(_) | Op::Conv2dInputGrad { .. } | Op::Conv2dWeightGrad { .. } => (2, 2),
        Op::MaxPool2dGrad { .. } => (2, 2),
        Op::MaxPool2d(_) | Op::AvgPool2d(_) | Op::AvgPool2dGrad { .. } => (1, 1),
        Op::CrossEntropyGrad { .. } => (3, 3),
        Op::Spread | Op::AllReduce(Reduction::Sum) => (1, 1),
        Op::AllReduce(Reduction::CrossEntropy { .. }) => (2, 2),
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
        Op::Custom(op) => return op.inputs()[index].dtype(),
        Op::Fused { root, .. } => return input_type(root, index, count),
        _ => op.is_random() && index + 1 == count,
    };
    if integer { DType::U32 } else { DType::F32 }
}

fn rule(op: &Op, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let require = |holds: bool, why: &str| if holds { Ok(()) } else { Err(why.to_string()) };
    let axis_fits = |axis: usize| {
        require(axis < x[0].rank(), "has no such axis")?;
        require(axis > 0 || !x[0].is_batched(), "the batch axis cannot be cut or joined")
    };
    let cut = |axis: usize, length: usize| {
        let mut dims = x[0].dims().to_vec();
        dims[axis] = length;
        x[0].with_dims(&dims)
    };
    match op {
        Op::MatMul { transpose_a, transpose_b } => matmul(x[0], x[1], *transpose_a, *transpose_b),
        Op::Unary(_) => Ok(vec![x[0].clone()]),
        Op::UnaryGrad(_) | Op::SquaredErrorGrad => {
            require(x[0] == x[1], "the two shapes must be equal")?;
            Ok(vec![x[0].clone()])
        }
        Op::Binary(_) => {
            require(x[1].is_suffix_of(x[0]), "the second must be a suffix of the first")?;
            Ok(vec![x[0].clone()])
        }
        Op::MaximumGrad => {
            require(x[1].is_suffix_of(x[0]), "the second must be a suffix of the first")?;
            require(x[2] == x[0], "dy has the shape of the first")?;
            Ok(vec![x[0].clone()])
        }
        // The wanted shape of a reshape is an argument of the builder, which checks it.
        Op::Reshape | Op::Spread | Op::AllReduce(_) => {
            Ok(x.iter().map(|shape| (*shape).clone()).collect())
        }
        Op::Permute { axes } => permute(x[0], axes),
        Op::Slice { axis, start, length } => {
            axis_fits(*axis)?;
            let end = start.checked_add(*length);
            require(end.is_some_and(|end| end <= x[0].dims()[*axis]), "out of range")?;
            Ok(vec![cut(*axis, *length)])
        }
        Op::Pad { axis, before, after } => {
            axis_fits(*axis)?;
            let length = x[0].dims()[*axis].saturating_add(*before).saturating_add(*after);
            Ok(vec![cut(*axis, length)])
        }
        Op::Concat { axis } => {
            axis_fits(*axis)?;
            let total: usize = x.iter().map(|s| s.dims().get(*axis).copied().unwrap_or(0)).sum();
            let same = |s: &&Shape| s.rank() == x[0].rank() && cut(*axis, s.dims()[*axis]) == **s;
            require(x.iter().all(same), "shapes may differ along the axis only")?;
            Ok(vec![cut(*axis, total)])
        }
        Op::Sum { first, last } => {
            require(first <= last && *last < x[0].rank(), "has no such axes")?;
            let mut dims = x[0].dims().to_vec();
            dims.drain(*first..=*last);
            let batched = x[0].is_batched() && *first > 0;
            Ok(vec![if batched { Shape::batched(&dims) } else { Shape::fixed(&dims) }])
        }
        Op::Broadcast { first, dims, batched } => {
            require(*first <= x[0].rank(), "has no such place")?;
            require(!dims.is_empty(), "needs a new dimension")?;
            require(!batched || (*first == 0 && !x[0].is_batched()), "the batch comes first")?;
            require(*first > 0 || !x[0].is_batched(), "the batch comes first")?;
            let mut all = x[0].dims().to_vec();
            all.splice(first..first, dims.iter().copied());
            let batched = *batched || x[0].is_batched();
            Ok(vec![if batched { Shape::batched(&all) } else { Shape::fixed(&all) }])
        }
        Op::LayerNorm { eps } | Op::RmsNorm { eps } => {
            require(*eps >= 0.0 && eps.is_finite(), "eps must be finite and not negative")?;
            let (channels, stats) = normalized(x[0])?;
            require(x[1..].iter().all(|s| **s == channels), "weight and bias are (c)")?;
            Ok(vec![x[0].clone(), stats])
        }
        Op::LayerNormGrad | Op::RmsNormGrad => {
            let (channels, stats) = normalized(x[0])?;
            let fits = *x[1] == channels && *x[2] == stats && x[3] == x[0];
            require(fits, "x and dy are (.., c), weight (c), stats (.., 2)")?;
            Ok(vec![x[0].clone()])
        }
        Op::LayerNormWeightGrad | Op::LayerNormAffineGrad => {
            let (channels, stats) = normalized(x[0])?;
            require(*x[1] == stats && x[2] == x[0], "x and dy are (.., c), stats (.., 2)")?;
            let outputs = if *op == Op::LayerNormAffineGrad { 2 } else { 1 };
            Ok(vec![channels; outputs])
        }
        Op::GroupNorm { groups, eps } => norms::group_norm(*groups, *eps, x),
        Op::GroupNormGrad { groups } => norms::group_norm_grad(*groups, x),
        Op::GroupNormAffineGrad { groups } => norms::group_norm_affine_grad(*groups, x),
        Op::Softmax => {
            normalized(x[0])?;
            Ok(vec![x[0].clone()])
        }
        Op::SoftmaxGrad => {
            normalized(x[0])?;
            require(x[0] == x[1], "the two shapes must be equal")?;
            Ok(vec![x[0].clone()])
        }
        Op::BatchNorm { eps } => {
            require(*eps >= 0.0 && eps.is_finite(), "eps must be finite and not negative")?;
            let (channels, stats) = batch_normalized(x[0])?;
            require(x[1..].iter().all(|s| **s == channels), "all but x are (c)")?;
            Ok(vec![x[0].clone(), stats, channels.clone(), channels])
        }
        Op::BatchNormAffineGrad => {
            let (channels, stats) = batch_normalized(x[0])?;
            require(*x[1] == stats && x[2] == x[0], "x and dy are (b, .., c), stats (2, c)")?;
            Ok(vec![channels.clone(), channels])
        }
        Op::BatchNormGrad => {
            let (channels, stats) = batch_normalized(x[0])?;
            let fits = *x[2] == stats && x[3] == x[0];
            let fits = fits && [x[1], x[4], x[5]].into_iter().all(|s| *s == channels);
            require(fits, "x and dy are (b, .., c), stats (2, c), all others (c)")?;
            Ok(vec![x[0].clone()])
        }
        Op::Recurrent { cell } => recurrent(*cell, x),
        Op::RecurrentGrad { cell } => recurrent_grad(*cell, x),
        Op::Attention(options) => attention::attention(options, x),
        Op::AttentionGrad(options) => attention::attention_grad(options, x),
        Op::Embedding { first } => {
            require(x[1].rank() == 2 && !x[1].is_batched(), "the table is (v, c)")?;
            are_numbered(*first, x[1].dims()[0])?;
            let mut dims = x[0].dims().to_vec();
            dims.push(x[1].last());
            Ok(vec![x[0].with_dims(&dims)])
        }
        Op::EmbeddingGrad { first, rows } => {
            are_numbered(*first, *rows)?;
            let c = x[1].last();
            let dims = [x[0].dims(), &[c]].concat();
            require(*x[1] == x[0].with_dims(&dims), "ids are (..), dy (.., c)")?;
            Ok(vec![Shape::fixed(&[*rows, c])])
        }
        Op::Dropout { p, columns, .. } => {
            is_probability(*p)?;
            let end = |of: ColumnRange| of.first.checked_add(x[0].last());
            let fits = columns.is_none_or(|of| end(of).is_some_and(|end| end <= of.all));
            require(fits, "the columns are more than there are")?;
            columns.map_or(Ok(()), |of| are_numbered(of.first, of.all - of.first))?;
            require(x[0].is_batched(), "only batched tensors have samples")?;
            are_samples(&x[1..])?;
            Ok(vec![x[0].clone()])
        }
        Op::CrossEntropy { first } => {
            let rows = rows_of_logits(x, "logits are (n, v), targets (n)")?;
            are_numbered(*first, x[0].last())?;
            Ok(vec![x[0].with_dims(&[x[0].dims()[0], 2]), rows])
        }
        Op::CrossEntropyGrad { first, classes } => {
            rows_of_logits(x, "logits are (n, v), targets and lse (n)")?;
            let end = first.checked_add(x[0].last());
            let fits = end.is_some_and(|end| end <= *classes);
            require(fits, "the logits have more classes than there are")?;
            are_numbered(*first, *classes - *first)?;
            Ok(vec![x[0].clone()])
        }
        Op::SquaredError => {
            require(x[0] == x[1], "the two shapes must be equal")?;
            require(x[0].rank() > 0, "scalars have no rows to sum over; reshape them to (1)")?;
            Ok(vec![x[0].with_dims(&[x[0].dims()[0], 2])])
        }
        Op::Conv2d(options) => Ok(vec![pictures::conv2d(options, x[0], x[1])?]),
        Op::Conv2dInputGrad { options, size } => {
            Ok(vec![pictures::conv2d_input(options, *size, x[0], x[1])?])
        }
        Op::Conv2dWeightGrad { options, kernel } => {
            Ok(vec![pictures::conv2d_weight(options, *kernel, x[0], x[1])?])
        }
        Op::MaxPool2d(options) => Ok(vec![pictures::pool2d(options, x[0])?; 2]),
        Op::AvgPool2d(options) => Ok(vec![pictures::pool2d(options, x[0])?]),
        Op::MaxPool2dGrad { options, size } | Op::AvgPool2dGrad { options, size } => {
            Ok(vec![pictures::pool2d_input(options, *size, x)?])
        }
        Op::Custom(op) => custom::shape(op, x),
        Op::Fused { root, epilogue } => fused(root, epilogue, x),
    }
}

/// Returns the output shape of `root` once for the final value, and once per stored value. An
/// operand is read in the order of its elements, whatever its shape: it has as many as the value,
/// or fewer, which repeat. The gradient of layer norm is fused with one sum of whole tensors only.
fn fused(root: &Op, epilogue: &[EpilogueOp], x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let operands = epilogue.iter().filter(|step| step.has_operand()).count();
    let (own, operands) = x.split_at(x.len().saturating_sub(operands));
    let outputs = rule(root, own)?;
    let [y] = outputs.as_slice() else {
        return Err(format!("{root} has {} outputs", outputs.len()));
    };
    let is_summed = matches!(root, Op::LayerNormGrad | Op::RmsNormGrad);
    if is_summed && *epilogue != [EpilogueOp::Binary(Binary::Add)] {
        return Err(format!("only a sum is fused with {root}"));
    }
    for (step, operand) in epilogue.iter().filter(|step| step.has_operand()).zip(operands) {
        let (elements, whole) = (operand.per_row(), y.per_row());
        let equal = operand.is_batched() == y.is_batched() && elements == whole;
        let repeats = !operand.is_batched() && elements > 0 && whole % elements == 0;
        let fits = equal || (repeats && !is_summed && matches!(step, EpilogueOp::Binary(_)));
        if !fits {
            return Err(format!("an operand {operand} does not fit values {y} in {step}"));
        }
    }
    let kept = epilogue.iter().filter(|step| **step == EpilogueOp::Store).count();
    Ok(vec![y.clone(); 1 + kept])
}

/// Returns the shapes of a weight `(c)` and of the statistics `(.., 2)` of the rows of `x (.., c)`.
fn normalized(x: &Shape) -> Result<(Shape, Shape), String> {
    if x.rank() <= usize::from(x.is_batched()) {
        return Err("needs a dimension to normalize that is not the batch".into());
    }
    let leading = &x.dims()[..x.rank() - 1];
    Ok((Shape::fixed(&[x.last()]), x.with_dims(&[leading, &[2]].concat())))
}

/// Returns the shapes of a weight `(c)` and of the statistics `(2, c)` of `x (b, .., c)`.
fn batch_normalized(x: &Shape) -> Result<(Shape, Shape), String> {
    if x.rank() < 2 || x.is_batched() && x.dims()[0] != 1 {
        return Err("x is (b, .., c)".into());
    }
    Ok((Shape::fixed(&[x.last()]), Shape::fixed(&[2, x.last()])))
}

/// Returns the output shapes of a recurrent layer on `x, weight, bias` and a whole state or none.
fn recurrent(cell: Cell, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let gates = cell.gates();
    let wanted = format!("x is (b, t, {gates}h), weight ({gates}h, h), bias ({gates}h)");
    let [b, t, columns] = *x[0].dims() else { return Err(wanted) };
    let h = columns / gates;
    let is_weight = *x[1] == Shape::fixed(&[columns, h]) && *x[2] == Shape::fixed(&[columns]);
    if h * gates != columns || !is_weight || x[0].is_batched() && b != 1 {
        return Err(wanted);
    }
    let states = x.len() - 3;
    if states != 0 && states != cell.states()
        || x[3..].iter().any(|s| **s != x[0].with_dims(&[b, h]))
    {
        return Err(format!("the state is {} of (b, h)", cell.states()));
    }
    let (y, gates) = (x[0].with_dims(&[b, t, h]), x[0].with_dims(&[b, t, 4 * h]));
    Ok(match cell {
        Cell::Lstm => vec![y.clone(), gates, y],
        Cell::Gru => vec![y, gates],
    })
}

/// Returns the output shapes of the gradient of a recurrent layer.
fn recurrent_grad(cell: Cell, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let gates = cell.gates();
    let wanted = format!(
        "gates are (b, t, 4h), weight ({gates}h, h), hidden values and dy (b, t, h), a state (b, h)"
    );
    let [b, t, h] = *x[3].dims() else { return Err(wanted) };
    let state = x[3].with_dims(&[b, h]);
    let fits = *x[0] == x[3].with_dims(&[b, t, 4 * h])
        && *x[1] == Shape::fixed(&[gates * h, h])
        && x[2] == x[3]
        && x[4..].iter().all(|s| **s == state)
        && (b == 1 || !x[3].is_batched());
    if !fits {
        return Err(wanted);
    }
    let dx = x[3].with_dims(&[b, t, gates * h]);
    Ok(match cell {
        Cell::Lstm => vec![dx, state.clone(), state],
        Cell::Gru => vec![dx.clone(), dx, state],
    })
}

/// Returns the shape `(n)` of the rows of logits `x[0] (n, v)`, which all other inputs have.
fn rows_of_logits(x: &[&Shape], wanted: &str) -> Result<Shape, String> {
    if x[0].rank() != 2 {
        return Err(wanted.into());
    }
    let rows = x[0].with_dims(&x[0].dims()[..1]);
    if x[1..].iter().all(|shape| **shape == rows) { Ok(rows) } else { Err(wanted.into()) }
}

fn is_probability(p: f32) -> Result<(), String> {
    if (0.0..=1.0).contains(&p) {
        return Ok(());
    }
    Err(format!("the probability of dropout must be from 0 to 1, not {p}"))
}

/// Checks that kernels, which count in u32, can number the rows, classes or columns of a rank, of
/// which there are `count` from `first` on.
fn are_numbered(first: usize, count: usize) -> Result<(), String> {
    let end = first.checked_add(count).filter(|end| u32::try_from(*end).is_ok());
    // Those of a whole graph are numbered from 0 on, and are as many as memory has room for.
    if first == 0 || end.is_some() {
        return Ok(());
    }
    Err(format!("kernels number less than 2^32, and not {count} from {first} on"))
}

fn are_samples(x: &[&Shape]) -> Result<(), String> {
    let fits = x.iter().all(|shape| **shape == Shape::batched(&[1]));
    if fits { Ok(()) } else { Err("sample ids are (b)".into()) }
}

fn matmul(a: &Shape, b: &Shape, ta: bool, tb: bool) -> Result<Vec<Shape>, String> {
    let rank = a.rank();
    if rank != b.rank() || !(2..=3).contains(&rank) {
        return Err("both sides must have 2 dimensions, or both 3".into());
    }
    let (ad, bd) = (&a.dims()[rank - 2..], &b.dims()[rank - 2..]);
    let (m, ka) = if ta { (ad[1], ad[0]) } else { (ad[0], ad[1]) };
    let (n, kb) = if tb { (bd[0], bd[1]) } else { (bd[1], bd[0]) };
    if ka != kb {
        return Err(format!("sums over {ka} on the left and {kb} on the right"));
    }
    if rank == 3 {
        if a.dims()[0] != b.dims()[0] || a.is_batched() != b.is_batched() {
            return Err("the leading dimensions must be equal".into());
        }
        return Ok(vec![a.with_dims(&[a.dims()[0], m, n])]);
    }
    match (a.is_batched(), b.is_batched()) {
        (false, false) => Ok(vec![Shape::fixed(&[m, n])]),
        (true, false) if !ta => Ok(vec![Shape::batched(&[m, n])]),
        (true, true) if ta && !tb => Ok(vec![Shape::fixed(&[m, n])]),
        _ => Err("the batch must be the rows of the left side, or summed over".into()),
    }
}

fn permute(x: &Shape, axes: &[usize]) -> Result<Vec<Shape>, String> {
    let mut sorted = axes.to_vec();
    sorted.sort_unstable();
    if !sorted.iter().copied().eq(0..x.rank()) || x.rank() > 5 {
        return Err("axes must name each of at most 5 dimensions once".into());
    }
    if x.is_batched() && axes[0] != 0 {
        return Err("the batch axis stays in front".into());
    }
    let dims: Vec<usize> = axes.iter().map(|&axis| x.dims()[axis]).collect();
    Ok(vec![x.with_dims(&dims)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AttentionOptions;

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
            shape_of(Op::CrossEntropy { first: 0 }, &[Shape::fixed(&[]), Shape::fixed(&[])])
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
            let own = AttentionOptions { first_head: first, ..AttentionOptions::packed(4, 4) };
            [
                (Op::Embedding { first }, vec![ids.clone(), Shape::fixed(&[7, 2])]),
                (
                    Op::EmbeddingGrad { first, rows: 7 },
                    vec![ids.clone(), Shape::batched(&[1, 4, 2])],
                ),
                (Op::CrossEntropy { first }, vec![logits.clone(), rows.clone()]),
                (
                    Op::CrossEntropyGrad { first, classes: first.saturating_add(7) },
                    vec![logits.clone(), rows.clone(), rows.clone()],
                ),
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
        let error = shape_of(Op::CrossEntropy { first: most }, &[logits, rows]).unwrap_err();
        let why = "kernels number less than 2^32, and not 7 from 4294967295 on";
        assert!(error.ends_with(why), "{error}");
    }

    #[test]
    fn wrong_types_are_refused() {
        let floats = [(Shape::batched(&[4]), DType::F32), (Shape::fixed(&[9, 2]), DType::F32)];
        assert!(outputs(&Op::Embedding { first: 0 }, &floats).unwrap_err().why.contains("U32"));
    }
}
