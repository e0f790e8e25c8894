//! Tests of the grids of calls far larger than the tests can run: every dispatch of every variant
//! stays within the limits of all devices.

use crate::dispatch::GROUPS_MAX;
use crate::{CallShape, Caps, DeviceClass, OwnedCall, RandomContext, TWINS, twin};
use potluck_core::Site;
use potluck_core::rng::Key;
use potluck_graph::{
    AttentionOptions, AttentionPlace, Binary, BinarySide, CacheUpdateOptions,
    CachedAttentionOptions, Cell, Conv2dOptions, EpilogueOp, LossClasses, NormBackward, Op,
    Pool2dOptions, Unary,
};

/// A GPU and a driver that runs on a processor.
const CLASSES: [Caps; 2] = [
    Caps {
        class: DeviceClass::Hardware,
        workgroup_bytes: 32 << 10,
        subgroups: true,
        ..Caps::EVERY
    },
    Caps {
        class: DeviceClass::Software,
        workgroup_bytes: 32 << 10,
        subgroups: true,
        ..Caps::EVERY
    },
];

/// Elements of the largest tensors: a multiple of 4, and below 2^31.
const HUGE: usize = (1 << 31) - 4;

fn products() -> Vec<CallShape> {
    let op = |transpose_a, transpose_b| Op::MatMul { transpose_a, transpose_b };
    let fused = |root: Op, epilogue: Vec<EpilogueOp>| Op::Fused { root: Box::new(root), epilogue };
    let relu = || vec![EpilogueOp::Unary(Unary::Relu)];
    let shapes = [
        [vec![1 << 21, 64], vec![1000, 64]],
        [vec![HUGE / 4, 4], vec![3, 4]],
        [vec![2, 64], vec![HUGE / 64, 64]],
        [vec![1 << 22, 16, 8], vec![1 << 22, 16, 8]],
    ];
    let mut calls: Vec<CallShape> = shapes.map(|inputs| (op(false, true), inputs.into())).into();
    calls.push((op(true, false), vec![vec![8, 1 << 16], vec![8, 1 << 14]]));
    calls.push((Op::LinearWeightGrad, vec![vec![8, 1 << 16], vec![8, 1 << 14]]));
    calls.push((Op::LinearWeightGrad, vec![vec![HUGE / 4, 4], vec![HUGE / 4, 3]]));
    calls.push((fused(op(false, true), relu()), vec![vec![1 << 21, 64], vec![1000, 64]]));
    calls.push((fused(Op::Unary(Unary::Gelu), relu()), vec![vec![HUGE]]));
    calls
}

fn elementwise() -> Vec<CallShape> {
    let mut calls = Vec::new();
    for count in [HUGE, HUGE + 1] {
        calls.push((Op::Unary(Unary::Relu), vec![vec![count]]));
        calls.push((Op::UnaryGrad(Unary::Gelu), vec![vec![count]; 2]));
        calls.push((Op::Binary(Binary::Add), vec![vec![count]; 2]));
        let by = BinarySide::Second;
        calls.push((Op::BinaryGrad { function: Binary::Maximum, by }, vec![vec![count]; 3]));
    }
    calls.push((Op::Binary(Binary::Mul), vec![vec![1 << 20, 2047], vec![2047]]));
    for width in [2000, 1999] {
        let dropout = Op::Dropout { p: 0.1, site: Site(1), columns: None };
        calls.push((dropout, vec![vec![1 << 20, width], vec![1 << 20]]));
    }
    calls.push((Op::PackBf16, vec![vec![1 << 10, (HUGE >> 10) - 1]]));
    let dims = vec![1, (HUGE >> 12) * 2];
    calls.push((Op::UnpackBf16 { dims }, vec![vec![1 << 11, HUGE >> 12]]));
    calls.push((Op::Permute { axes: vec![1, 0] }, vec![vec![1 << 20, 2047]]));
    let slice = Op::Slice { axis: 1, start: 1, length: 2000 };
    calls.push((slice, vec![vec![1 << 20, 2047]]));
    calls.push((Op::Pad { axis: 1, before: 1, after: 2 }, vec![vec![1 << 20, 2000]]));
    calls.push((Op::Concat { axis: 1 }, vec![vec![1 << 20, 1000]; 2]));
    calls
}

fn sums() -> Vec<CallShape> {
    let sum = |first| Op::Sum { first, last: first };
    let mut calls = Vec::new();
    // The gradient of a table of positions of 2,048 tokens of 1,024 channels is the first.
    for inner in [1 << 21, 1 << 26, (1 << 26) + 1, (1 << 21) + 3] {
        calls.push((sum(0), vec![vec![16, inner]]));
    }
    for dims in [[1 << 20, 16, 64], [100_000, 300, 17], [1 << 22, 256, 1], [HUGE / 16, 16, 1]] {
        calls.push((sum(1), vec![dims.to_vec()]));
    }
    calls.push((sum(0), vec![vec![HUGE / 2, 2]]));
    calls.push((Op::Broadcast { first: 0, dims: vec![2047], batched: false }, vec![vec![1 << 20]]));
    calls
}

fn norms_and_losses() -> Vec<CallShape> {
    let norm = Op::LayerNorm { eps: 1e-5 };
    let mut calls = Vec::new();
    for [n, c] in
        [[1 << 25, 60], [1 << 25, 61], [4, 1 << 28], [4, (1 << 28) + 1], [100_000, 20_000]]
    {
        let x = vec![n, c];
        let stats = vec![n, 2];
        calls.push((norm.clone(), vec![x.clone(), vec![c], vec![c]]));
        calls.push((Op::LayerNormGrad, vec![x.clone(), vec![c], stats.clone(), x.clone()]));
        let sums = vec![x.clone(), stats, x.clone()];
        calls.push((Op::LayerNormWeightGrad, sums.clone()));
        calls.push((Op::LayerNormAffineGrad, sums));
        calls.push((Op::RmsNorm { eps: 1e-5 }, vec![x.clone(), vec![c]]));
        let of_rms = vec![x.clone(), vec![c], vec![n, 2], x.clone()];
        calls.push((Op::RmsNormGrad, of_rms.clone()));
        for (centered, bias) in [(true, true), (false, false)] {
            let adds = false;
            calls.push((Op::NormBackward(NormBackward { centered, bias, adds }), of_rms.clone()));
        }
        calls.push((Op::Softmax, vec![x.clone()]));
        calls.push((Op::SoftmaxGrad, vec![x.clone(); 2]));
        let groups = 1;
        let stats = vec![n, 1, 2];
        let of_norm = vec![x.clone(), vec![c], vec![c]];
        calls.push((Op::GroupNorm { groups, eps: 1e-5 }, of_norm));
        let of_grad = vec![x.clone(), vec![c], stats.clone(), x.clone()];
        calls.push((Op::GroupNormGrad { groups }, of_grad));
        calls.push((Op::GroupNormAffineGrad { groups }, vec![x.clone(), stats, x.clone()]));
        calls.push((Op::SquaredError, vec![x.clone(); 2]));
        calls.push((Op::SquaredErrorGrad, vec![x.clone(); 2]));
        let of_classes = [vec![n, 2], vec![n]];
        calls.push((Op::JoinCrossEntropy, [of_classes.clone(), of_classes].concat()));
        let classes = LossClasses::whole(c);
        calls.push((Op::CrossEntropy(classes), vec![x.clone(), vec![n]]));
        calls.push((Op::CrossEntropyGrad(classes), vec![x, vec![n], vec![n]]));
    }
    for [n, c, v] in [[1 << 25, 60, 7], [1 << 25, 61, 300], [1 << 16, 64, 1 << 14]] {
        let rows = 1 << 20;
        let classes = LossClasses::whole(v);
        let given = vec![vec![n, c], vec![v, c], vec![n]];
        let with_lse = [given.clone(), vec![vec![n]]].concat();
        calls.push((Op::LinearCrossEntropy { rows, classes }, given.clone()));
        let by_weight = true;
        calls.push((Op::LinearCrossEntropyPass { rows, classes, by_weight }, given));
        calls.push((Op::LinearCrossEntropyGrad { rows, classes, by_weight }, with_lse));
    }
    calls
}

fn lookups_and_attention() -> Vec<CallShape> {
    let ids = vec![1 << 21];
    let y = vec![1 << 21, 1000];
    let [b, t, c, heads] = [1 << 16, 1 << 10, 8, 8];
    let qkv = vec![b, t, 3 * c];
    let y_of_heads = vec![b, t, c];
    let lse = vec![b, heads, t];
    let mut calls = vec![
        (Op::Embedding { first: 0 }, vec![ids.clone(), vec![50_257, 1000]]),
        (Op::EmbeddingGrad { first: 0, rows: 50_257 }, vec![ids, y]),
        (Op::EmbeddingGrad { first: 0, rows: HUGE / 4 }, vec![vec![64], vec![64, 4]]),
    ];
    let places = [vec![1000], vec![1 << 20, 1000], vec![1 << 20, 1000, 3]];
    for (places, inner) in places.into_iter().zip([4, 3, 3]) {
        let x = vec![1 << 20, 700, inner];
        let y = vec![1 << 20, 1000, inner];
        calls.push((Op::Gather { axis: 1 }, vec![x, places.clone()]));
        calls.push((Op::ScatterAdd { axis: 1, length: 700 }, vec![places, y]));
    }
    let table = vec![t, c / 4];
    calls.push((Op::Rotary { inverse: false }, vec![vec![b * 7, t, 4], vec![t, 2]]));
    calls.push((Op::Rotary { inverse: true }, vec![vec![b, t, c], table]));
    let packed = AttentionOptions::packed(heads, c / heads);
    let options = AttentionOptions { dropout: 0.1, site: Site(1), ..packed };
    calls.push((Op::Attention(options), vec![qkv.clone(), vec![b]]));
    let inputs = vec![qkv, y_of_heads.clone(), lse, y_of_heads, vec![b]];
    calls.push((Op::AttentionGrad(options), inputs));
    let rows = 1 << 20;
    let places = vec![rows, 1];
    for d in [64, 66] {
        let cache = CacheUpdateOptions {
            places: [AttentionPlace::new(0, 8 * d), AttentionPlace::new(0, 9 * d)],
            kv_heads: 1,
            head_width: d,
            sequences: 16,
            context: 1 << 18,
        };
        let qkv = vec![rows, 1, 10 * d];
        calls.push((Op::CacheUpdate(cache), vec![qkv.clone(), places.clone()]));
        let attention = CachedAttentionOptions { heads: 8, first: 0 };
        let inputs = vec![qkv, cache.cache().to_vec(), places.clone()];
        calls.push((Op::CachedAttention(attention), inputs));
    }
    calls
}

fn with_state() -> Vec<CallShape> {
    let mut calls = Vec::new();
    for [n, c] in [[1 << 25, 60], [1 << 25, 61], [4, 1 << 28]] {
        let x = vec![n, c];
        let column = vec![c];
        let stats = vec![2, c];
        let inputs = [vec![x.clone()], vec![column.clone(); 4]].concat();
        calls.push((Op::BatchNorm { eps: 1e-5 }, inputs));
        calls.push((Op::BatchNormAffineGrad, vec![x.clone(), stats.clone(), x.clone()]));
        let inputs = vec![x.clone(), column.clone(), stats, x, column.clone(), column];
        calls.push((Op::BatchNormGrad, inputs));
    }
    for [b, t, h] in [[1 << 26, 2, 4], [1 << 18, 2, 1023], [2, 2, 8000]] {
        for cell in [Cell::Lstm, Cell::Gru] {
            let columns = cell.gates() * h;
            let weight = vec![columns, h];
            let hidden = vec![b, t, h];
            let inputs = vec![vec![b, t, columns], weight.clone(), vec![columns]];
            calls.push((Op::Recurrent { cell }, inputs));
            let inputs = vec![vec![b, t, 4 * h], weight, hidden.clone(), hidden];
            calls.push((Op::RecurrentGrad { cell }, inputs));
        }
    }
    calls
}

fn pictures() -> Vec<CallShape> {
    let b = 1 << 14;
    let size = [64, 64];
    let mut calls = Vec::new();
    for (c, groups) in [(16, 1), (24, 2), (16, 16), (1, 1)] {
        let options = Conv2dOptions::default().with_padding(1).with_groups(groups);
        let x = vec![b, 64, 64, c];
        let w = vec![c, c / groups, 3, 3];
        calls.push((Op::Conv2d(options), vec![x.clone(), w.clone()]));
        calls.push((Op::Conv2dInputGrad { options, size }, vec![x.clone(), w]));
        calls.push((Op::Conv2dWeightGrad { options, kernel: [3, 3] }, vec![x.clone(), x]));
    }
    for c in [28, 31] {
        let options = Pool2dOptions::new(3).with_padding(1).with_stride(1);
        let x = vec![b, 64, 64, c];
        calls.push((Op::MaxPool2d(options), vec![x.clone()]));
        calls.push((Op::AvgPool2d(options), vec![x.clone()]));
        calls.push((Op::MaxPool2dGrad { options, size }, vec![x.clone(), x.clone()]));
        calls.push((Op::AvgPool2dGrad { options, size }, vec![x.clone()]));
        let dilated = options.with_dilation(2).with_padding(2).with_ceil_mode(true);
        calls.push((Op::MaxPool2d(dilated), vec![x.clone()]));
        calls.push((Op::MaxPool2dGrad { options: dilated, size }, vec![x.clone(), x]));
    }
    calls
}

fn owned((op, inputs): CallShape) -> OwnedCall {
    let name = format!("{op} of {inputs:?}");
    let random = RandomContext { step_key: Key::new(1), training: true };
    OwnedCall::new(op, inputs, random).unwrap_or_else(|| panic!("{name} does not fit"))
}

fn huge() -> Vec<OwnedCall> {
    let all = [
        products(),
        elementwise(),
        sums(),
        norms_and_losses(),
        lookups_and_attention(),
        with_state(),
        pictures(),
    ];
    all.concat().into_iter().map(owned).collect()
}

fn catalog() -> Vec<OwnedCall> {
    TWINS.iter().flat_map(|twin| (twin.catalog)()).map(owned).collect()
}

#[test]
fn grids_of_huge_calls_stay_within_the_limits() {
    let huge = huge();
    let kind = |call: &OwnedCall| std::mem::discriminant(&call.op);
    for known in catalog() {
        assert!(huge.iter().any(|call| kind(call) == kind(&known)), "{} is missing", known.op);
    }
    let mut wrong = Vec::new();
    for owned in huge {
        let call = owned.call();
        let twin = twin(call.op).unwrap();
        let variants =
            (twin.variants)(&call, &Caps::EVERY).into_iter().map(|v| (v.name, v.dispatches));
        let choices =
            CLASSES.map(|caps| ("a static choice".to_string(), (twin.dispatch)(&call, &caps)));
        for (name, dispatches) in variants.chain(choices) {
            let mut grids = dispatches.iter().map(|dispatch| dispatch.groups);
            if let Some(grid) = grids.find(|grid| grid.iter().any(|n| *n > GROUPS_MAX)) {
                wrong.push(format!("{grid:?}: {name} of {} of {:?}", call.op, call.inputs));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Otherwise the baseline, which may be far slower, would run without measurements.
#[test]
fn static_choices_are_variants() {
    let columns = |inner| owned((Op::Sum { first: 0, last: 0 }, vec![vec![40_000, inner]]));
    let sums = [1, 15, 16, 31, 63, 64, 65, 512].map(columns);
    for owned in huge().into_iter().chain(catalog()).chain(sums) {
        let call = owned.call();
        let twin = twin(call.op).unwrap();
        for caps in CLASSES {
            let chosen = (twin.dispatch)(&call, &caps);
            let is_variant = (twin.variants)(&call, &caps).iter().any(|v| v.dispatches == chosen);
            assert!(is_variant, "{} of {:?}: {}", call.op, call.inputs, chosen[0].shader.entry);
        }
    }
}
