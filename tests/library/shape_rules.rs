//! Shape rules refuse what kernels, which trust them, cannot take: every argument of the wrong
//! shape or type, tensors without elements, probabilities outside of 0 to 1.

use potluck_core::{DType, Shape, Site};
use potluck_graph::builder::BuildResult;
use potluck_graph::shapes::{Typed, outputs};
use potluck_graph::{
    AttentionOptions, Binary, BinarySide, Builder, Cell, Conv2dOptions, EpilogueOp, Init,
    LossClasses, NormBackward, Op, Pool2dOptions, Reduction, Unary,
};

/// An op, its inputs, and which changes of each input fit as well.
type Case = (Op, Vec<(Typed, Free)>);

/// Changes of an input that still fit.
#[derive(Clone, Copy)]
struct Free {
    axes: &'static [usize],
    batched: bool,
    rank: bool,
}

const NONE: Free = Free { axes: &[], batched: false, rank: false };

fn batched(dims: &[usize]) -> (Typed, Free) {
    ((Shape::batched(dims), DType::F32), NONE)
}

fn fixed(dims: &[usize]) -> (Typed, Free) {
    ((Shape::fixed(dims), DType::F32), NONE)
}

fn ids(dims: &[usize]) -> (Typed, Free) {
    ((Shape::batched(dims), DType::U32), NONE)
}

fn free((typed, _): (Typed, Free), axes: &'static [usize], batched: bool) -> (Typed, Free) {
    (typed, Free { axes, batched, rank: false })
}

/// Every normalization of several inputs, with its gradients.
fn norms() -> Vec<Case> {
    let groups = 2;
    let norm = Op::GroupNorm { groups, eps: 1e-5 };
    vec![
        (
            Op::LayerNorm { eps: 1e-5 },
            vec![
                (batched(&[3, 6]).0, Free { axes: &[0], batched: true, rank: true }),
                fixed(&[6]),
                fixed(&[6]),
            ],
        ),
        (
            Op::LayerNormGrad,
            vec![batched(&[3, 6]), fixed(&[6]), batched(&[3, 2]), batched(&[3, 6])],
        ),
        (Op::LayerNormWeightGrad, vec![batched(&[3, 6]), batched(&[3, 2]), batched(&[3, 6])]),
        (Op::LayerNormAffineGrad, vec![batched(&[3, 6]), batched(&[3, 2]), batched(&[3, 6])]),
        (
            Op::RmsNorm { eps: 1e-5 },
            vec![(batched(&[3, 6]).0, Free { axes: &[0], batched: true, rank: true }), fixed(&[6])],
        ),
        (Op::RmsNormGrad, vec![batched(&[3, 6]), fixed(&[6]), batched(&[3, 2]), batched(&[3, 6])]),
        (
            Op::NormBackward(NormBackward { centered: true, bias: true, adds: true }),
            vec![
                batched(&[3, 6]),
                fixed(&[6]),
                batched(&[3, 2]),
                batched(&[3, 6]),
                batched(&[3, 6]),
            ],
        ),
        (
            norm,
            vec![
                (batched(&[1, 5, 6]).0, Free { axes: &[0, 1], batched: true, rank: true }),
                fixed(&[6]),
                fixed(&[6]),
            ],
        ),
        (
            Op::GroupNormGrad { groups },
            vec![batched(&[1, 5, 6]), fixed(&[6]), batched(&[1, 2, 2]), batched(&[1, 5, 6])],
        ),
        (
            Op::GroupNormAffineGrad { groups },
            vec![batched(&[1, 5, 6]), batched(&[1, 2, 2]), batched(&[1, 5, 6])],
        ),
    ]
}

/// Ops with a state: recurrent layers and batch normalization.
fn with_state() -> Vec<Case> {
    vec![
        (
            Op::Recurrent { cell: Cell::Lstm },
            vec![
                free(batched(&[1, 3, 8]), &[1], false),
                fixed(&[8, 2]),
                fixed(&[8]),
                batched(&[1, 2]),
                batched(&[1, 2]),
            ],
        ),
        (
            Op::RecurrentGrad { cell: Cell::Gru },
            vec![
                batched(&[1, 3, 8]),
                fixed(&[6, 2]),
                batched(&[1, 3, 2]),
                batched(&[1, 3, 2]),
                batched(&[1, 2]),
            ],
        ),
        (
            Op::BatchNorm { eps: 1e-5 },
            [
                vec![(batched(&[1, 3, 6]).0, Free { axes: &[1], batched: true, rank: true })],
                vec![fixed(&[6]); 4],
            ]
            .concat(),
        ),
        (Op::BatchNormAffineGrad, vec![batched(&[1, 3, 6]), fixed(&[2, 6]), batched(&[1, 3, 6])]),
        (
            Op::BatchNormGrad,
            vec![
                batched(&[1, 3, 6]),
                fixed(&[6]),
                fixed(&[2, 6]),
                batched(&[1, 3, 6]),
                fixed(&[6]),
                fixed(&[6]),
            ],
        ),
    ]
}

/// Every other op of several inputs.
fn cases() -> Vec<Case> {
    let site = Site(1);
    let classes = LossClasses { first: 2, ..LossClasses::whole(u32::MAX as usize) };
    let options = |dropout| AttentionOptions { dropout, site, ..AttentionOptions::packed(2, 4) };
    let attention = |dropout| Op::Attention(options(dropout));
    let attention_grad = |dropout| Op::AttentionGrad(options(dropout));
    let (qkv, y, lse) = (batched(&[1, 5, 24]), batched(&[1, 5, 8]), batched(&[1, 2, 5]));
    let any_rank = Free { axes: &[], batched: false, rank: true };
    vec![
        (
            Op::MatMul { transpose_a: false, transpose_b: false },
            vec![free(batched(&[3, 8]), &[0], true), free(fixed(&[8, 5]), &[1], false)],
        ),
        (
            Op::LinearWeightGrad,
            vec![free(batched(&[3, 8]), &[1], false), free(batched(&[3, 5]), &[1], false)],
        ),
        (
            Op::MatMul { transpose_a: true, transpose_b: false },
            vec![free(batched(&[3, 8]), &[1], false), free(batched(&[3, 5]), &[1], false)],
        ),
        (Op::UnaryGrad(Unary::Gelu), vec![batched(&[3, 4]), batched(&[3, 4])]),
        (
            Op::Binary(Binary::Add),
            vec![
                (batched(&[1, 4, 6]).0, Free { axes: &[0], batched: true, rank: true }),
                (fixed(&[4, 6]).0, any_rank),
            ],
        ),
        (
            Op::BinaryGrad { function: Binary::Maximum, by: BinarySide::Second },
            vec![batched(&[1, 4, 6]), (fixed(&[4, 6]).0, any_rank), batched(&[1, 4, 6])],
        ),
        (
            Op::Concat { axis: 1 },
            vec![free(batched(&[1, 4, 6]), &[1], false), free(batched(&[1, 3, 6]), &[1], false)],
        ),
        (Op::SoftmaxGrad, vec![batched(&[3, 4]), batched(&[3, 4])]),
        (attention(0.5), vec![free(qkv.clone(), &[1], false), ids(&[1])]),
        (attention_grad(0.0), vec![qkv.clone(), y.clone(), lse.clone(), y.clone()]),
        (attention_grad(0.5), vec![qkv, y.clone(), lse, y, ids(&[1])]),
        (
            Op::Attention(AttentionOptions::separate(4, 2, 3)),
            [12, 6, 6].map(|columns| batched(&[1, 5, columns])).to_vec(),
        ),
        (
            Op::Rotary { inverse: false },
            vec![free(batched(&[1, 5, 12]), &[0], true), fixed(&[5, 6])],
        ),
        (
            Op::Embedding { first: 0 },
            vec![
                (ids(&[1, 5]).0, Free { axes: &[0, 1], batched: true, rank: true }),
                free(fixed(&[9, 4]), &[0, 1], false),
            ],
        ),
        (
            Op::EmbeddingGrad { first: 0, rows: 9 },
            vec![ids(&[1, 5]), free(batched(&[1, 5, 4]), &[2], false)],
        ),
        // Places of each element, or of the axes before: other numbers of axes are other forms.
        (
            Op::Gather { axis: 1 },
            vec![
                (batched(&[1, 9, 4]).0, Free { axes: &[1], batched: false, rank: false }),
                (batched(&[1, 5, 4]).0, Free { axes: &[1], batched: false, rank: true }),
            ],
        ),
        (
            Op::Gather { axis: 1 },
            vec![
                (batched(&[1, 9, 4]).0, Free { axes: &[1, 2], batched: false, rank: true }),
                (batched(&[1, 5]).0, Free { axes: &[1], batched: false, rank: false }),
            ],
        ),
        (
            Op::ScatterAdd { axis: 1, length: 9 },
            vec![
                (batched(&[1, 5, 4]).0, Free { axes: &[], batched: false, rank: true }),
                batched(&[1, 5, 4]),
            ],
        ),
        (
            Op::Dropout { p: 0.5, site, columns: None },
            vec![
                (batched(&[3, 4]).0, Free { axes: &[0, 1], batched: false, rank: true }),
                ids(&[1]),
            ],
        ),
        (Op::CrossEntropy(classes), vec![free(batched(&[3, 7]), &[1], false), ids(&[3])]),
        (
            Op::CrossEntropyGrad(classes),
            vec![free(batched(&[3, 7]), &[1], false), ids(&[3]), batched(&[3])],
        ),
        (Op::SquaredError, vec![batched(&[3, 4]), batched(&[3, 4])]),
        (Op::SquaredErrorGrad, vec![batched(&[3, 4]), batched(&[3, 4])]),
    ]
}

/// Convolutions, and the pooling of several inputs.
fn cases_of_pictures() -> Vec<Case> {
    let conv = Conv2dOptions::default().with_stride(2).with_padding(1).with_groups(2);
    vec![
        (
            Op::Conv2d(conv),
            vec![
                (batched(&[1, 7, 6, 8]).0, Free { axes: &[0, 1, 2], batched: true, rank: false }),
                free(fixed(&[4, 4, 3, 2]), &[2, 3], false),
            ],
        ),
        (
            Op::Conv2dInputGrad { options: conv, size: [7, 6] },
            vec![free(batched(&[1, 4, 4, 4]), &[0], true), free(fixed(&[4, 4, 3, 2]), &[1], false)],
        ),
        (
            Op::Conv2dWeightGrad { options: conv, kernel: [3, 2] },
            vec![free(batched(&[1, 7, 7, 8]), &[1], false), batched(&[1, 4, 4, 4])],
        ),
        (
            Op::MaxPool2dGrad { options: Pool2dOptions::new(2), size: [6, 8] },
            vec![batched(&[1, 3, 4, 5]), batched(&[1, 3, 4, 5])],
        ),
    ]
}

fn shape_of(is_batched: bool, dims: &[usize]) -> Shape {
    if is_batched && !dims.is_empty() { Shape::batched(dims) } else { Shape::fixed(dims) }
}

/// Returns the shapes that an input must not have.
fn wrong_shapes(shape: &Shape, free: Free) -> Vec<Shape> {
    let (dims, is_batched) = (shape.dims(), shape.is_batched());
    let mut wrong = Vec::new();
    for axis in 0..dims.len() {
        let mut changed = dims.to_vec();
        changed[axis] = 0;
        wrong.push(shape_of(is_batched, &changed));
        changed[axis] = dims[axis] + 1;
        if !free.axes.contains(&axis) {
            wrong.push(shape_of(is_batched, &changed));
        }
    }
    if !free.batched {
        wrong.push(shape_of(!is_batched, dims));
    }
    if !free.rank {
        wrong.push(shape_of(is_batched, &[&[1], dims].concat()));
        wrong.push(shape_of(is_batched, &[dims, &[2]].concat()));
        wrong.push(shape_of(is_batched, &dims[..dims.len() - 1]));
        wrong.push(shape_of(is_batched, &[]));
    }
    wrong
}

#[test]
fn arguments_of_wrong_shape_are_refused() {
    let mut accepted = Vec::new();
    for (op, inputs) in
        cases().into_iter().chain(with_state()).chain(norms()).chain(cases_of_pictures())
    {
        let right: Vec<Typed> = inputs.iter().map(|(typed, _)| typed.clone()).collect();
        outputs(&op, &right).unwrap_or_else(|error| panic!("{error}"));
        for (index, ((shape, dtype), free)) in inputs.iter().enumerate() {
            for wrong in wrong_shapes(shape, *free) {
                let mut given = right.clone();
                given[index] = (wrong.clone(), *dtype);
                if outputs(&op, &given).is_ok() {
                    accepted.push(format!("{op}: input {index} as {wrong} for {shape}"));
                }
            }
            let mut given = right.clone();
            given[index].1 = if *dtype == DType::F32 { DType::U32 } else { DType::F32 };
            assert!(outputs(&op, &given).is_err(), "{op}: input {index} of another type");
        }
    }
    assert!(accepted.is_empty(), "accepted:\n{}", accepted.join("\n"));
}

#[test]
fn ops_of_one_input_refuse_wrong_axes() {
    let x = (Shape::batched(&[1, 4, 6]), DType::F32);
    let most = usize::MAX;
    let wrong = [
        Op::Permute { axes: vec![0, 1] },
        Op::Permute { axes: vec![0, 1, 1] },
        Op::Permute { axes: vec![1, 0, 2] },
        Op::Slice { axis: 3, start: 0, length: 1 },
        Op::Slice { axis: 1, start: 2, length: 3 },
        Op::Slice { axis: 1, start: 2, length: 0 },
        Op::Slice { axis: 1, start: most, length: 2 },
        Op::Slice { axis: 0, start: 0, length: 1 },
        Op::Pad { axis: 3, before: 1, after: 1 },
        Op::Pad { axis: 1, before: most, after: most },
        Op::Sum { first: 2, last: 1 },
        Op::Sum { first: 0, last: 3 },
        Op::Broadcast { first: 4, dims: vec![2], batched: false },
        Op::Broadcast { first: 1, dims: vec![0], batched: false },
        Op::Broadcast { first: 1, dims: vec![], batched: false },
        Op::Broadcast { first: 1, dims: vec![most], batched: false },
        Op::Broadcast { first: 0, dims: vec![2], batched: false },
        Op::EmbeddingGrad { first: 0, rows: 0 },
    ];
    for op in wrong {
        let inputs = match op {
            Op::EmbeddingGrad { .. } => {
                vec![(Shape::batched(&[1, 4]), DType::U32), x.clone()]
            }
            _ => vec![x.clone()],
        };
        assert!(outputs(&op, &inputs).is_err(), "{op}");
    }
    let empty = [(Shape::batched(&[1, 0]), DType::F32)];
    let error = outputs(&Op::Unary(Unary::Relu), &empty).unwrap_err().to_string();
    assert!(error.contains("(b, 0) has a dimension of size 0"), "{error}");
}

#[test]
fn convolutions_impossible_are_refused() {
    let mut b = Builder::new();
    let x = b.input("x", &[1, 4, 6, 8]);
    let conv = Conv2dOptions::default();
    let weight = |b: &mut Builder, dims: &[usize]| {
        b.parameter(&format!("{dims:?}"), dims, potluck_graph::Init::Zeros)
    };
    let large = weight(&mut b, &[2, 8, 5, 3]);
    let error = b.conv2d(x, large, None, conv).unwrap_err().to_string();
    assert_eq!(
        error,
        "conv2d of (b, 4, 6, 8), (2, 8, 5, 3): windows of 5x3 are larger than the padded picture \
         of 4x6"
    );
    b.conv2d(x, large, None, conv.with_padding(1)).unwrap();
    let error = b.conv2d(x, large, None, conv.with_stride(0)).unwrap_err().to_string();
    assert!(error.contains("a stride of 0x0 does not exist"), "{error}");
    let wide = weight(&mut b, &[6, 3, 1, 1]);
    let error = b.conv2d(x, wide, None, conv.with_groups(3)).unwrap_err().to_string();
    assert!(error.contains("3 groups do not divide 8 input channels"), "{error}");
    assert!(b.conv2d(x, wide, None, conv.with_groups(0)).is_err());
    let error = b.conv2d(x, wide, None, conv.with_groups(2)).unwrap_err().to_string();
    assert!(error.contains("takes 3 channels per group, and the pictures have 4"), "{error}");
    let pool = Pool2dOptions::new(5);
    let error = b.max_pool2d(x, pool).unwrap_err().to_string();
    assert!(error.contains("larger than the padded picture of 4x6"), "{error}");
    assert!(b.avg_pool2d(x, Pool2dOptions::new(2).with_padding(2)).is_err());
    assert!(b.max_pool2d(x, Pool2dOptions::new(0)).is_err());
    let y = b.global_avg_pool(x).unwrap();
    assert_eq!(b.shape(y).to_string(), "(b, 8)");
    assert!(b.global_avg_pool(y).is_err());
}

#[test]
fn probabilities_outside_are_refused() {
    for p in [-0.1, 1.1, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 4, 24]);
        let error = b.dropout(x, p).unwrap_err().to_string();
        assert!(error.contains("from 0 to 1"), "{error}");
        assert!(b.attention(x, 2, p).is_err(), "attention with dropout {p}");
    }
    let mut b = Builder::new();
    let x = b.input("x", &[1, 4, 24]);
    for p in [0.0, 0.5, 1.0] {
        b.dropout(x, p).unwrap();
        b.attention(x, 2, p).unwrap();
    }
    for eps in [-1.0, f32::NAN, f32::INFINITY] {
        let inputs = [batched(&[3, 6]).0, fixed(&[6]).0];
        assert!(outputs(&Op::LayerNorm { eps }, &inputs).is_err(), "eps {eps}");
    }
}

#[test]
fn ops_without_kernel_are_not_applied() {
    let mut b = Builder::new();
    let x = b.input("x", &[1, 4]);
    let error = b.apply(Op::Reshape, &[x]).unwrap_err().to_string();
    assert!(error.contains("Builder::reshape"), "{error}");
    for op in [Op::Spread, Op::AllReduce(Reduction::Sum)] {
        assert!(b.apply(op, &[x]).unwrap_err().to_string().contains("made by shard"));
    }
    let epilogue = vec![EpilogueOp::Unary(Unary::Relu)];
    let fused = Op::Fused { root: Box::new(Op::Unary(Unary::Gelu)), epilogue };
    assert!(b.apply(fused, &[x]).unwrap_err().to_string().contains("fusion"));
    let pack = b.apply(Op::PackBf16, &[x]).unwrap_err().to_string();
    assert!(pack.contains("ModelGraph::with_activations"), "{pack}");
}

#[test]
fn words_hold_two_elements() {
    let shape = |op: Op, input: Typed| outputs(&op, &[input]).map(|found| found[0].0.to_string());
    let unpack = || Op::UnpackBf16 { dims: vec![1, 3, 6] };
    assert_eq!(shape(Op::PackBf16, batched(&[1, 3, 6]).0).unwrap(), "(b, 9)");
    assert_eq!(shape(unpack(), batched(&[1, 9]).0).unwrap(), "(b, 3, 6)");
    for (op, input, why) in [
        (Op::PackBf16, batched(&[1, 5]), "an odd number of elements"),
        (Op::PackBf16, fixed(&[4]), "must have a batch"),
        (unpack(), batched(&[1, 8]), "another number of words"),
        (unpack(), fixed(&[9]), "must have a batch"),
    ] {
        let error = shape(op, input.0).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

/// Refusals of the builder name what is wrong, and not what follows from it.
#[test]
fn refusals_name_what_is_wrong() {
    let refused = |build: &dyn Fn(&mut Builder) -> BuildResult| {
        build(&mut Builder::new()).unwrap_err().to_string()
    };
    let told = refused(&|b| {
        let qkv = b.parameter("qkv", &[1, 4, 12], Init::Zeros);
        b.attention(qkv, 2, 0.0)
    });
    assert!(told.contains("with the batch b, which inputs have; this has none"), "{told}");
    let told = refused(&|b| {
        let qkv = b.input("qkv", &[1, 4, 12]);
        b.attention(qkv, 0, 0.0)
    });
    assert!(told.contains("at least 1 head"), "{told}");
    let told = refused(&|b| {
        let qkv = b.input("qkv", &[2, 4, 12]);
        b.attention(qkv, 2, 0.0)
    });
    assert!(told.contains("one sequence per sample, and has 2"), "{told}");
    let told = refused(&|b| {
        let [x, y] = ["x", "y"].map(|name| b.parameter(name, &[], Init::Zeros));
        b.squared_error_loss(x, y)
    });
    assert!(told.contains("scalars have no rows to sum over"), "{told}");
    for targets in [&[5][..], &[1, 3], &[1]] {
        let told = refused(&|b| {
            let logits = b.input("logits", &[1, 4, 7]);
            let targets = b.input_ids("targets", targets);
            b.cross_entropy_loss(logits, targets)
        });
        let wanted = "the logits have (b*4) rows of 7 classes";
        assert!(told.contains(wanted) && told.contains("one target per row"), "{told}");
    }
    for first in [true, false] {
        let told = refused(&|b| {
            let x = b.input("x", &[1, 3]);
            let classes = b.input_ids("classes", &[1]);
            b.squared_error_loss(x, x)?;
            if first { b.squared_error_loss(x, x) } else { b.cross_entropy_loss(x, classes) }
        });
        assert!(told.contains("the graph has a loss already"), "{told}");
    }
}

#[test]
#[should_panic(expected = "the input 'x' has no dimension for the batch")]
fn input_without_dimension_is_named() {
    Builder::new().input("x", &[]);
}

#[test]
fn last_step_of_any_sequence_is_there() {
    let mut b = Builder::new();
    let fixed = b.parameter("fixed", &[5, 3, 2], Init::Zeros);
    let last = b.last_step(fixed).unwrap();
    assert_eq!(b.shape(last), &Shape::fixed(&[5, 2]));
    let several = b.input("several", &[4, 3, 2]);
    let last = b.last_step(several).unwrap();
    assert_eq!(b.shape(last), &Shape::batched(&[4, 2]));
    let empty = b.parameter("empty", &[5, 0, 2], Init::Zeros);
    assert!(b.last_step(empty).unwrap_err().to_string().contains("dimension of size 0"));
}

/// Samples of a batch do not meet: its parts are on several devices and in several micro-batches.
#[test]
fn functions_of_a_forward_pass_refuse_the_axis_of_the_batch() {
    type Reduction = fn(&mut Builder, potluck_core::TensorId) -> BuildResult;
    let functions: [(&str, Reduction); 14] = [
        ("sum", |b, x| b.sum(x, &[0])),
        ("sum of two axes", |b, x| b.sum(x, &[0, 1])),
        ("mean", |b, x| b.mean(x, &[0])),
        ("max", |b, x| b.max(x, &[0])),
        ("min", |b, x| b.min(x, &[0])),
        ("logsumexp", |b, x| b.logsumexp(x, &[0])),
        ("variance", |b, x| b.variance(x, &[0], 1)),
        ("argmax", |b, x| b.argmax(x, 0)),
        ("cumsum", |b, x| b.cumsum(x, 0)),
        ("flip", |b, x| b.flip(x, &[0])),
        ("slice", |b, x| b.slice(x, 0, 0, 1)),
        ("concat", |b, x| b.concat(&[x, x], 0)),
        ("permute", |b, x| b.permute(x, &[1, 0])),
        ("matmul", |b, x| b.matmul(x, x, true, false)),
    ];
    for (name, function) in functions {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 3]);
        assert!(function(&mut b, x).is_err(), "{name} over the batch");
        let fixed = b.parameter("w", &[2, 3], Init::Zeros);
        if name != "argmax" {
            assert!(function(&mut b, fixed).is_ok(), "{name} over an axis of a parameter");
        }
    }
}
