//! Catalog of calls that cover every kernel, which `potluck devices --certify` certifies.

use super::probes::OwnedCall;
use crate::base::Site;
use crate::base::rng::Key;
use crate::graph::{Binary, EpilogueOp, Op, Unary, Update, UpdateRange};
use crate::kernels::{RandomContext, twin};

/// Samples, tokens, heads, channels and classes of the calls: a small GPT.
const B: usize = 4;
const T: usize = 64;
const HEADS: usize = 4;
const C: usize = 128;
const V: usize = 65;
/// Tokens of all samples.
const N: usize = B * T;

/// Returns one call per op and, for matrix products, per pair of transposes; large enough for all
/// variants.
pub fn catalog_calls() -> Vec<OwnedCall> {
    let random = RandomContext { step_key: Key::new(1), training: true };
    let owned_call = |(op, inputs): (Op, Vec<Vec<usize>>)| {
        let name = op.to_string();
        let owned_call = OwnedCall::new(op, inputs, random);
        owned_call.unwrap_or_else(|| panic!("the catalog's shapes do not fit {name}"))
    };
    let all = [products(), elementwise(), fused(), moves(), rows(), attention()].concat();
    all.into_iter().map(owned_call).collect()
}

/// Element counts of buckets: kernels that work on buckets have one version for multiples of four
/// and one for other counts.
pub const COUNTS: [usize; 2] = [4, 1];

/// Update ranges with the lengths of `COUNTS`.
pub const RANGES: [UpdateRange; 2] = [
    UpdateRange { start: 0, length: COUNTS[0], decay_end: 0, gradient_scale: 1.0 },
    UpdateRange { start: 0, length: COUNTS[1], decay_end: 0, gradient_scale: 1.0 },
];

/// Returns an update of each rule over each of the ranges.
pub fn updates() -> Vec<(Update, UpdateRange)> {
    let sgd = |momentum| Update::Sgd { lr: 0.1, momentum, weight_decay: 0.1 };
    let adamw = Update::AdamW {
        lr: 0.1,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.1,
        correction1: 0.1,
        correction2: 0.01,
    };
    let rules = [sgd(0.0), sgd(0.9), adamw];
    rules.into_iter().flat_map(|rule| RANGES.map(|range| (rule, range))).collect()
}

/// Returns the name of every variant of every kernel, sorted.
pub fn names() -> Vec<String> {
    let mut names: Vec<String> = ["norm", "hash", "sgd", "adamw"].map(String::from).to_vec();
    for owned_call in catalog_calls() {
        let call = owned_call.call();
        let variants = twin(call.op).map(|twin| (twin.variants)(&call)).unwrap_or_default();
        names.extend(variants.into_iter().map(|variant| variant.name));
    }
    names.sort();
    names.dedup();
    names
}

type CatalogEntry = (Op, Vec<Vec<usize>>);

fn products() -> Vec<CatalogEntry> {
    let pair =
        |first, second, swapped| if swapped { vec![second, first] } else { vec![first, second] };
    let product = |(transpose_a, transpose_b)| {
        let op = Op::MatMul { transpose_a, transpose_b };
        (op, vec![pair(2 * N, C, transpose_a), pair(C, 3 * C, transpose_b)])
    };
    let mut entries: Vec<CatalogEntry> =
        [(false, false), (false, true), (true, false), (true, true)].map(product).to_vec();
    // A few rows, as in generation; and one output row, or one column.
    for m in [1, 4] {
        let op = |transpose_b| Op::MatMul { transpose_a: false, transpose_b };
        entries.push((op(true), vec![vec![m, C], vec![3 * C, C]]));
        entries.push((op(false), vec![vec![3 * C, C], vec![C, m]]));
    }
    entries
}

fn elementwise() -> Vec<CatalogEntry> {
    let x = vec![N, C];
    let mut entries = Vec::new();
    entries.push((Op::Unary(Unary::Scale(0.5)), vec![x.clone()]));
    for function in [Unary::Relu, Unary::Gelu, Unary::GeluTanh] {
        entries.push((Op::Unary(function), vec![x.clone()]));
        entries.push((Op::UnaryGrad(function), vec![x.clone(); 2]));
    }
    for function in [Binary::Add, Binary::Mul] {
        entries.push((Op::Binary(function), vec![x.clone(); 2]));
        entries.push((Op::Binary(function), vec![x.clone(), vec![C]]));
    }
    entries.push((Op::Dropout { p: 0.1, site: Site(1) }, vec![vec![B, T, C], vec![B]]));
    entries.push((Op::SquaredError, vec![x.clone(); 2]));
    entries.push((Op::SquaredErrorGrad, vec![x; 2]));
    entries
}

/// Returns products with the epilogues that they have in a GPT, and elementwise chains without a
/// product.
fn fused() -> Vec<CatalogEntry> {
    let gelu = Unary::Gelu;
    let (bias, sum) = (EpilogueOp::Binary(Binary::Add), EpilogueOp::Binary(Binary::Add));
    let (x, y, wide) = (vec![2 * N, C], vec![2 * N, 3 * C], vec![3 * C]);
    let product = |transpose_b, epilogue: &[EpilogueOp], operands: &[Vec<usize>]| {
        let root = Box::new(Op::MatMul { transpose_a: false, transpose_b });
        let w = if transpose_b { vec![3 * C, C] } else { vec![C, 3 * C] };
        (Op::Fused { root, epilogue: epilogue.to_vec() }, [&[x.clone(), w], operands].concat())
    };
    let chain = |root, epilogue: &[EpilogueOp], inputs: Vec<Vec<usize>>| {
        (Op::Fused { root: Box::new(root), epilogue: epilogue.to_vec() }, inputs)
    };
    let add = Op::Binary(Binary::Add);
    vec![
        product(true, &[sum], std::slice::from_ref(&y)),
        product(
            true,
            &[bias, EpilogueOp::Store, EpilogueOp::Unary(gelu)],
            std::slice::from_ref(&wide),
        ),
        product(false, &[EpilogueOp::UnaryGrad(gelu)], std::slice::from_ref(&y)),
        chain(add, &[EpilogueOp::Unary(gelu)], vec![y.clone(), wide.clone()]),
        chain(Op::Unary(gelu), &[bias, sum], vec![y.clone(), wide, y]),
    ]
}

fn moves() -> Vec<CatalogEntry> {
    let qkv = vec![B, T, 3 * C];
    vec![
        (Op::Permute { axes: vec![0, 2, 1, 3] }, vec![vec![B, T, HEADS, C / HEADS]]),
        (Op::Slice { axis: 2, start: C, length: C }, vec![qkv]),
        (Op::Pad { axis: 2, before: C, after: C }, vec![vec![B, T, C]]),
        (Op::Concat { axis: 2 }, vec![vec![B, T, C]; 3]),
        (Op::Sum { first: 0, last: 0 }, vec![vec![N, C]]),
        (Op::Sum { first: 0, last: 0 }, vec![vec![4 * N, 2]]),
        (Op::Broadcast { first: 0, dims: vec![B], batched: false }, vec![vec![T, C]]),
        (Op::Embedding, vec![vec![N], vec![V, C]]),
        (Op::EmbeddingGrad { rows: V }, vec![vec![N], vec![N, C]]),
    ]
}

fn rows() -> Vec<CatalogEntry> {
    let (x, stats) = (vec![N, C], vec![N, 2]);
    vec![
        (Op::LayerNorm { eps: 1e-5 }, vec![x.clone(), vec![C], vec![C]]),
        (Op::LayerNormGrad, vec![x.clone(), vec![C], stats.clone(), x.clone()]),
        (Op::LayerNormWeightGrad, vec![x.clone(), stats, x]),
        (Op::CrossEntropy, vec![vec![N, V], vec![N]]),
        (Op::CrossEntropyGrad, vec![vec![N, V], vec![N], vec![N]]),
    ]
}

fn attention() -> Vec<CatalogEntry> {
    let (qkv, y, lse) = (vec![B, T, 3 * C], vec![B, T, C], vec![B, HEADS, T]);
    let mut entries = Vec::new();
    for dropout in [0.0, 0.1] {
        let site = Site(2);
        let samples = (dropout > 0.0).then_some(vec![B]);
        let with_samples = |inputs: Vec<Vec<usize>>| -> Vec<Vec<usize>> {
            inputs.into_iter().chain(samples.clone()).collect()
        };
        let heads = HEADS;
        let forward = Op::Attention { heads, dropout, site };
        let gradient = Op::AttentionGrad { heads, dropout, site };
        entries.push((forward, with_samples(vec![qkv.clone()])));
        let inputs = vec![qkv.clone(), y.clone(), lse.clone(), y.clone()];
        entries.push((gradient, with_samples(inputs)));
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::source::FILES;
    use std::collections::BTreeSet;

    /// A shader file, or a kernel in one, that no call uses would never be certified.
    #[test]
    fn every_shader_file_is_used() {
        // Kernels on buckets have their own probes; two files are no part of training.
        let mut used: BTreeSet<&str> = ["adamw", "hash", "norm", "sgd", "peak", "spin"].into();
        for owned_call in catalog_calls() {
            let call = owned_call.call();
            for variant in (twin(call.op).unwrap().variants)(&call) {
                used.extend(variant.dispatches.iter().map(|dispatch| dispatch.shader.file));
            }
        }
        for (file, _) in FILES {
            assert!(used.contains(file), "{file} is used by no call of the catalog");
        }
    }

    #[test]
    fn names_are_those_of_all_variants() {
        let names = names();
        for name in
            ["norm", "adamw", "sgd", "hash", "matmul_naive", "matmul_tile_16x16", "attention"]
        {
            assert!(names.iter().any(|known| known == name), "{name} is not among {names:?}");
        }
    }
}
