//! Every shader with every constant set in use, which tests translate and compile.
#![allow(dead_code, reason = "each test binary uses a part of this file")]

use naga::back::{self, spv};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{EntryPoint, Module};
use potluck_core::Site;
use potluck_core::rng::Key;
use potluck_graph::{
    Accumulation, AttentionOptions, Binary, BinarySide, Conv2dOptions, EpilogueOp, Op, Precision,
    Unary,
};
use potluck_kernels::autotune::catalog::{self, catalog_calls};
use potluck_kernels::device::CooperativeSquare;
use potluck_kernels::ops::attention::tiles;
use potluck_kernels::ops::matmul::split_k::SPLIT_TILES;
use potluck_kernels::ops::matmul::{shared, tile};
use potluck_kernels::ops::{embedding_rows, layer_norm_rows};
use potluck_kernels::source::{FILES, snippet, text};
use potluck_kernels::{
    Caps, Dispatch, OpCall, OwnedCall, RandomContext, Shader, twin, update_twin,
};

/// Bytes of workgroup memory that every device has.
pub const WORKGROUP_BYTES: u32 = 16 * 1024;

/// What the portable core may use: parameters as immediates, and nothing else that is optional.
pub const CAPABILITIES: Capabilities = Capabilities::IMMEDIATES;

/// Returns the capabilities that a module may use: files of kernels by subgroup operations, which
/// run where the device has them, say so in their names.
pub fn capabilities_of(name: &str) -> Capabilities {
    let subgroups = name.split(' ').next().is_some_and(|file| file.ends_with("_subgroups"));
    if subgroups { CAPABILITIES | Capabilities::SUBGROUP } else { CAPABILITIES }
}

/// Whether the operands of a product are stored transposed.
const TRANSPOSES: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];

/// Shaders whose text is emitted, with every shape in use: `(name, text)`.
fn emitted() -> Vec<(String, String)> {
    let mut texts = Vec::new();
    for tile in tile::TILES.into_iter().chain(tile::NARROW) {
        for transposed in 0..4 {
            let (a, b) = (transposed & 1 != 0, transposed & 2 != 0);
            let name = format!("{} {a} {b}", tile.name);
            let prepended = [snippet("operand_f32"), snippet("store")].concat();
            let emitted = tile::text(tile, a, b, &prepended);
            texts.push((name, text(&Shader::emitted("tile", "tile", emitted))));
        }
    }
    texts
}

/// Formulas of update rules on their skeletons.
fn updates() -> Vec<(String, String)> {
    let mut texts = Vec::new();
    for (index, (rule, range)) in catalog::updates().iter().enumerate() {
        let shader = (update_twin(rule).dispatch)(rule, range).shader;
        if shader.file.starts_with("update") {
            texts.push((format!("{} {index}", shader.file), text(&shader)));
        }
    }
    texts
}

/// Chains and products with every kind of step, with repeating and whole operands.
fn fused() -> Vec<(String, String)> {
    let (add, mul) = (EpilogueOp::Binary(Binary::Add), EpilogueOp::Binary(Binary::Mul));
    let mut chains = vec![
        vec![add, EpilogueOp::Store, mul],
        vec![mul, mul, EpilogueOp::Store, EpilogueOp::Store],
    ];
    let binary = EpilogueOp::Binary;
    chains.push(vec![binary(Binary::Sub), binary(Binary::Div), binary(Binary::Maximum)]);
    let new = [Unary::Sigmoid, Unary::Tanh, Unary::Silu];
    let functions = [Unary::Relu, Unary::Gelu, Unary::GeluTanh, Unary::Scale(-1e-7)];
    for f in functions.into_iter().chain(new) {
        chains.push(vec![EpilogueOp::Unary(f)]);
        chains.push(vec![
            add,
            EpilogueOp::Store,
            EpilogueOp::Unary(f),
            mul,
            EpilogueOp::UnaryGrad(f),
        ]);
    }
    let product = |a, b| Op::MatMul { transpose_a: a, transpose_b: b };
    let mut firsts = vec![Op::Unary(Unary::Gelu), Op::UnaryGrad(Unary::Relu)];
    firsts.extend([Op::Binary(Binary::Add), product(false, false), product(true, true)]);
    let mut texts = Vec::new();
    for root in firsts {
        for epilogue in &chains {
            let op = Op::Fused { root: Box::new(root.clone()), epilogue: epilogue.clone() };
            for variant in (twin(&op).unwrap().variants)(&fused_call(&op, epilogue), &Caps::EVERY) {
                let shader = &variant.dispatches[0].shader;
                texts.push((format!("{op} by {}", variant.name), text(shader)));
            }
        }
    }
    texts
}

fn fused_call<'a>(op: &'a Op, epilogue: &[EpilogueOp]) -> OpCall<'a> {
    let own = if matches!(op.root_op(), Op::Unary(_)) { 1 } else { 2 };
    let mut inputs = vec![vec![32, 32]; own];
    for step in epilogue.iter().filter(|step| step.has_operand()) {
        let repeats = *step == EpilogueOp::Binary(Binary::Add);
        inputs.push(if repeats { vec![32] } else { vec![32, 32] });
    }
    let kept = epilogue.iter().filter(|step| **step == EpilogueOp::Store).count();
    let random = RandomContext { step_key: Key::new(1), training: true };
    OpCall {
        op,
        inputs,
        outputs: vec![vec![32, 32]; 1 + kept],
        accumulate: Accumulation::NONE,
        precision: Precision::F32,
        loss_scale: 1.0,
        random,
    }
}

/// The elementwise functions of one tensor and of two, as their dispatches put them in front.
fn elementwise() -> Vec<(String, String)> {
    let x = vec![vec![64, 8]];
    let mut calls: Vec<(Op, Vec<Vec<usize>>)> = Vec::new();
    for f in Unary::SAMPLES {
        calls.push((Op::Unary(*f), x.clone()));
    }
    for f in Binary::ALL {
        calls.push((Op::Binary(*f), vec![x[0].clone(); 2]));
        for by in [BinarySide::First, BinarySide::Second] {
            calls.push((Op::BinaryGrad { function: *f, by }, vec![x[0].clone(); 3]));
        }
    }
    let shader = |(op, inputs): (Op, Vec<Vec<usize>>)| {
        let random = RandomContext { step_key: Key::new(1), training: true };
        let owned_call = OwnedCall::new(op.clone(), inputs, random).unwrap();
        let chosen = (twin(&op).unwrap().dispatch)(&owned_call.call(), &Caps::EVERY);
        let shader = &chosen[0].shader;
        (format!("{} {op}", shader.file), text(shader))
    };
    calls.into_iter().map(shader).collect()
}

/// The text of a file that needs something in front, as its dispatches put it there, for head
/// widths of every kind: odd, of one slab and of several, with and without dropout.
fn attention() -> Vec<(String, String)> {
    let mut texts = Vec::new();
    for d in [5, 16, 32, 64, 128, 256] {
        for (causal, dropout) in [(true, 0.0), (true, 0.1), (false, 0.0)] {
            let packed = AttentionOptions::packed(2, d);
            let options = AttentionOptions { causal, dropout, site: Site(1), ..packed };
            let op = Op::Attention(options);
            let call = OpCall {
                op: &op,
                inputs: vec![vec![3, 7, 6 * d], vec![3]],
                outputs: vec![vec![3, 7, 2 * d], vec![3, 2, 7]],
                accumulate: Accumulation::NONE,
                precision: Precision::F32,
                loss_scale: 1.0,
                random: RandomContext { step_key: Key::new(1), training: true },
            };
            let shader =
                &(twin(&op).unwrap().variants)(&call, &Caps::EVERY)[0].dispatches[0].shader;
            assert_eq!(shader.file, "attention");
            let of_all = if causal { "" } else { " full" };
            texts.push((format!("attention {d} {dropout}{of_all}"), text(shader)));
        }
    }
    texts
}

/// The same of the tiles of attention of one name, of the forward pass and the gradient, for head
/// widths of one slice and of several. The last word of a name lists the entry points that run.
pub fn attention_tiles(name: &str) -> Vec<(String, String)> {
    let mut texts: Vec<(String, String)> = Vec::new();
    for d in [5, 20, 32, 64, 80, 256] {
        for (causal, dropout) in [(true, 0.0), (true, 0.1), (false, 0.0)] {
            let (b, t, heads) = (2, 128, 1);
            let (qkv, y) = (vec![b, t, 3 * d], vec![b, t, d]);
            let samples = (dropout > 0.0).then(|| vec![b]);
            let inputs = vec![qkv.clone(), y.clone(), vec![b, heads, t], y];
            let packed = AttentionOptions::packed(heads, d);
            let options = AttentionOptions { causal, dropout, site: Site(1), ..packed };
            let calls = [(Op::Attention(options), vec![qkv]), (Op::AttentionGrad(options), inputs)];
            for (op, mut inputs) in calls {
                inputs.extend(samples.clone());
                let random = RandomContext { step_key: Key::new(1), training: true };
                let owned_call = OwnedCall::new(op, inputs, random).unwrap();
                let call = owned_call.call();
                let variants = (twin(call.op).unwrap().variants)(&call, &Caps::EVERY);
                let variant = variants.into_iter().find(|variant| variant.name == name).unwrap();
                for dispatch in variant.dispatches {
                    assert_eq!(dispatch.shader.file, "attention_tiles");
                    let (entry, text) = (dispatch.shader.entry, text(&dispatch.shader));
                    match texts.iter_mut().find(|(_, known)| *known == text) {
                        Some((named, _)) => *named += &format!("+{entry}"),
                        None => texts.push((format!("{name} {d} {dropout} {entry}"), text)),
                    }
                }
            }
        }
    }
    texts
}

/// The files of matrix products as their dispatches complete them, for all transposes.
fn products() -> Vec<(String, String)> {
    let naive = Shader::new("matmul", "naive").with_text(snippet("operand_f32"));
    let naive = naive.with_text(snippet("store"));
    let mut texts = vec![("matmul".to_string(), text(&naive))];
    for tile in shared::TILES {
        let smaller = |side: u32| side as usize / 4 * 3 + 1;
        let sizes = [
            // Whole tiles in vectors; sums that end within a stage; scalars; less than a tile.
            ("whole", [256, 256, 256]),
            ("k4", [256, 260, 256]),
            ("odd", [257, 259, 261]),
            ("small4", [smaller(tile.m) - 1, 256, smaller(tile.n) - 1]),
            ("small", [smaller(tile.m), 259, smaller(tile.n)]),
        ];
        // Tiles that differ in their loop over a stage have the same edges.
        let kinds = if tile.by_terms || tile.in_blocks { 2 } else { sizes.len() };
        for (kind, product) in sizes.into_iter().take(kinds) {
            texts.extend(of_product(tile.name, kind, product));
        }
    }
    for (name, _) in SPLIT_TILES.into_iter().filter(|(name, _)| !name.contains("_coop")) {
        texts.extend(of_product(name, "whole", [256, 2048, 256]));
        texts.extend(of_product(name, "odd", [257, 2051, 261]));
    }
    texts.extend(in_mixed_precision());
    let few = [
        ("row", [1, 256, 256]),
        ("column", [256, 256, 1]),
        ("rows", [8, 256, 256]),
        ("odd", [7, 257, 259]),
    ];
    for (kind, sizes) in few {
        texts.extend(of_product("matmul_vector", kind, sizes));
        // Where the terms of a sum are neighbours in the matrix of many columns or rows.
        let transposes = [(false, kind != "column")];
        for name in ["matmul_vector_64", "matmul_vector_128"] {
            texts.extend(of_transposes(&transposes, name, kind, sizes));
        }
    }
    texts
}

/// The kernels of a product in mixed precision, but for those by cooperative matrices.
fn in_mixed_precision() -> Vec<(String, String)> {
    let random = RandomContext { step_key: Key::new(1), training: true };
    let op = Op::MatMul { transpose_a: false, transpose_b: true };
    let mut texts = Vec::new();
    for inputs in [vec![vec![256, 2048], vec![256, 2048]], vec![vec![4, 259], vec![257, 259]]] {
        let of_f32 = OwnedCall::new(op.clone(), inputs, random).unwrap();
        let owned_call = OwnedCall { precision: Precision::Mixed, ..of_f32 };
        let call = owned_call.call();
        let caps = Caps { cooperative: None, ..Caps::EVERY };
        for variant in (twin(call.op).unwrap().variants)(&call, &caps) {
            let name = format!("{} mixed {}", variant.name, call.inputs[0][0]);
            texts.push((name, text(&variant.dispatches[0].shader)));
        }
    }
    texts
}

/// The texts of a variant for products `(m, k, n)` with all transposes; those that transposes do
/// not change are one.
fn of_product(variant: &str, kind: &str, sizes: [usize; 3]) -> Vec<(String, String)> {
    of_transposes(&TRANSPOSES, variant, kind, sizes)
}

/// The same for some transposes.
fn of_transposes(
    transposes: &[(bool, bool)],
    variant: &str,
    kind: &str,
    [m, k, n]: [usize; 3],
) -> Vec<(String, String)> {
    let mut texts: Vec<(String, String)> = Vec::new();
    for &(transpose_a, transpose_b) in transposes {
        let pair = |first, second, swapped| if swapped { [second, first] } else { [first, second] };
        let inputs = vec![pair(m, k, transpose_a).to_vec(), pair(k, n, transpose_b).to_vec()];
        let random = RandomContext { step_key: Key::new(1), training: true };
        let op = Op::MatMul { transpose_a, transpose_b };
        let owned_call = OwnedCall::new(op, inputs, random).unwrap();
        let call = owned_call.call();
        let variants = (twin(call.op).unwrap().variants)(&call, &Caps::EVERY);
        let found = variants.into_iter().find(|one| one.name == variant);
        let found = found.unwrap_or_else(|| panic!("{variant} {kind} is no candidate"));
        let order = |transposed| if transposed { "t" } else { "n" };
        let name = format!("{variant} {} {} {kind}", order(transpose_a), order(transpose_b));
        for text in found.dispatches.iter().map(|dispatch| text(&dispatch.shader)) {
            if texts.iter().all(|(_, known)| *known != text) {
                texts.push((name.clone(), text));
            }
        }
    }
    texts
}

/// The same of the layer normalization by workgroups, for the widest rows of each size.
fn layer_norm_group() -> Vec<(String, String)> {
    let text = |group, c, centered| {
        let shader = Shader::new("layer_norm_group", "").with_const("ADDS", 1);
        let shader = shader.with_const("GROUP", group).with_const("CENTERED", centered);
        let what = if centered == 1 { "" } else { " rms" };
        (format!("layer_norm_group {group} {c}{what}"), text(&shader.with_const("C", c)))
    };
    vec![text(64, 1, 1), text(64, 1976, 1), text(256, 1760, 1), text(64, 768, 0)]
}

/// The same in registers, for widths of every kind, and by invocations that have a row each.
fn layer_norm_rows() -> Vec<(String, String)> {
    let mut texts = Vec::new();
    for (adds, centered, what) in [(0, 1, ""), (1, 1, " + sum"), (1, 0, " rms + sum")] {
        let with_consts =
            |shader: Shader| shader.with_const("ADDS", adds).with_const("CENTERED", centered);
        for (c, sums) in [(4, 2), (128, 2), (768, 2), (768, 1), (1600, 2), (3072, 1), (8192, 0)] {
            let shader = with_consts(layer_norm_rows::shader("", c / 4, sums));
            texts.push((format!("layer_norm_rows {c}{what} {sums} sums"), text(&shader)));
        }
        let shader = with_consts(Shader::new("layer_norm", ""));
        texts.push((format!("layer_norm{what}"), text(&shader)));
    }
    texts
}

/// The gradient of an embedding for tables of few and of many rows, of values and of vectors.
fn embedding_rows() -> Vec<(String, String)> {
    let mut texts = Vec::new();
    for v in [65, 50_257] {
        for c in [3, 768, 769] {
            let op = Op::EmbeddingGrad { first: 0, rows: v };
            let random = RandomContext { step_key: Key::new(1), training: true };
            let owned_call = OwnedCall::new(op, vec![vec![7], vec![7, c]], random).unwrap();
            let shader = &embedding_rows::variant(&owned_call.call()).dispatches[0].shader;
            texts.push((format!("embedding_rows {v} {c}"), text(shader)));
        }
    }
    texts
}

/// The softmax, group normalization, caches of keys, gathers and rotary positions, of values and of
/// vectors, the first two by workgroups of each size.
fn values_and_vectors() -> Vec<(String, String)> {
    let mut texts = Vec::new();
    for file in ["softmax", "group_norm"] {
        for (value, group) in [("value", 64), ("value4", 64), ("value4", 256)] {
            let shader = Shader::new(file, "").with_text(snippet(value)).with_const("GROUP", group);
            texts.push((format!("{file} {value} {group}"), text(&shader)));
        }
    }
    for value in ["value", "value4"] {
        for file in ["cache_update", "cached_attention_merge", "gather", "rotary"] {
            let shader = Shader::new(file, "").with_text(snippet(value));
            texts.push((format!("{file} {value}"), text(&shader)));
        }
        for (keys, is_split) in [(256, 0), (64, 1)] {
            let shader = Shader::new("cached_attention", "")
                .with_const("KEYS", keys)
                .with_const("IS_SPLIT", is_split)
                .with_text(snippet(value));
            texts.push((format!("cached_attention {value} {keys}"), text(&shader)));
        }
    }
    texts
}

/// The sums over rows in one and in two stages, of each kind of terms.
fn row_sums() -> Vec<(String, String)> {
    let mut texts = Vec::new();
    for c in [768, 65] {
        let (x, stats) = (vec![1000, c], vec![1000, 2]);
        let of_norm = vec![x.clone(), stats, x.clone()];
        let of_groups = vec![x.clone(), vec![1000, 1, 2], x.clone()];
        let calls = [
            (Op::Sum { first: 0, last: 0 }, vec![x]),
            (Op::LayerNormWeightGrad, of_norm.clone()),
            (Op::LayerNormAffineGrad, of_norm),
            (Op::GroupNormAffineGrad { groups: 1 }, of_groups),
        ];
        for (op, inputs) in calls {
            let name = format!("{op} of {c}");
            let random = RandomContext { step_key: Key::new(1), training: true };
            let owned_call = OwnedCall::new(op, inputs, random).unwrap();
            let call = owned_call.call();
            let chosen = (twin(call.op).unwrap().dispatch)(&call, &Caps::EVERY);
            assert_eq!(chosen[0].shader.file, "row_blocks", "{name}");
            texts.push((format!("row_blocks {name}"), text(&chosen[0].shader)));
            for way in (twin(call.op).unwrap().variants)(&call, &Caps::EVERY) {
                let shader = &way.dispatches[0].shader;
                if shader.file == "row_sums" {
                    texts.push((way.name, text(shader)));
                }
            }
        }
    }
    texts
}

/// Convolutions as their dispatches complete them: every variant of layers of every kind.
fn conv() -> Vec<(String, String)> {
    let conv = Conv2dOptions::default();
    let same = conv.with_padding(1);
    let layers = [
        ("64 to 64", same, [2, 16, 16, 64], 64),
        ("64 to 128 by 2", same.with_stride(2), [8, 16, 16, 64], 128),
        ("3 to 64", conv, [2, 16, 16, 3], 64),
        ("70 to 70", conv, [2, 16, 16, 70], 70),
        ("groups of 12", same.with_groups(2), [2, 16, 16, 24], 24),
        ("64 channels", same.with_groups(64), [2, 16, 16, 64], 64),
    ];
    let mut texts: Vec<(String, String)> = Vec::new();
    for (name, options, x, o) in layers {
        let [b, h, w, c] = x;
        let [oh, ow] = options.output_size([h, w], [3, 3]).unwrap();
        let (weight, y) = (vec![o, c / options.groups, 3, 3], vec![b, oh, ow, o]);
        let (size, kernel) = ([h, w], [3, 3]);
        let relu = vec![EpilogueOp::Unary(Unary::Relu)];
        let fused = Op::Fused { root: Box::new(Op::Conv2d(options)), epilogue: relu };
        let calls = [
            ("forward", Op::Conv2d(options), vec![x.to_vec(), weight.clone()]),
            ("forward + relu", fused, vec![x.to_vec(), weight.clone()]),
            ("dx", Op::Conv2dInputGrad { options, size }, vec![y.clone(), weight]),
            ("dw", Op::Conv2dWeightGrad { options, kernel }, vec![x.to_vec(), y]),
        ];
        // What follows the products differs by the epilogue alone.
        let is_fused = |what: &str| what == "forward + relu";
        let calls = calls.into_iter().filter(|(what, ..)| !is_fused(what) || name == "64 to 64");
        for (what, op, inputs) in calls {
            let random = RandomContext { step_key: Key::new(1), training: true };
            let owned_call = OwnedCall::new(op, inputs, random).unwrap();
            let call = owned_call.call();
            for variant in (twin(call.op).unwrap().variants)(&call, &Caps::EVERY) {
                for dispatch in variant.dispatches {
                    let text = text(&dispatch.shader);
                    if texts.iter().all(|(_, known)| *known != text) {
                        texts.push((format!("{} {what} {name}", variant.name), text));
                    }
                }
            }
        }
    }
    texts
}

/// Poolings of single channels and of four at a time.
fn pool() -> Vec<(String, String)> {
    let kinds = [
        ("pool 1", "alias Value = f32;\nalias Bits = u32;\n"),
        ("pool 4", "alias Value = vec4f;\nalias Bits = vec4u;\n"),
    ];
    let shader = |types| text(&Shader::new("pool", "").with_text(types));
    kinds.map(|(name, types)| (name.to_string(), shader(types))).to_vec()
}

/// Every text of the ops whose dispatches put something in front of their files: of values and of
/// vectors.
fn of_catalog(ops: &[&str]) -> Vec<(String, String)> {
    let calls = catalog_calls().into_iter().filter(|owned| {
        let name = owned.op.to_string();
        ops.iter().any(|op| name.starts_with(op))
    });
    let mut texts: Vec<(String, String)> = Vec::new();
    for owned in calls {
        let call = owned.call();
        for way in (twin(call.op).unwrap().variants)(&call, &Caps::EVERY) {
            for dispatch in &way.dispatches {
                let text = text(&dispatch.shader);
                if texts.iter().all(|(_, known)| *known != text) {
                    let name = format!("{} {} {}", dispatch.shader.file, way.name, texts.len());
                    texts.push((name, text));
                }
            }
        }
    }
    texts
}

/// Modules that need more workgroup memory than every device has: `(name, text, bytes)`. Each
/// variant declares how much, and is a candidate where that much is there.
pub fn demanding_modules() -> Vec<(String, String, u32)> {
    let demanding = tiles::TILES.into_iter().filter(|tile| tile.workgroup_bytes > WORKGROUP_BYTES);
    let texts = |tile: tiles::AttentionTile| {
        let texts = attention_tiles(tile.name).into_iter();
        texts.map(move |(name, text)| (name, text, tile.workgroup_bytes))
    };
    demanding.flat_map(texts).collect()
}

/// What modules by cooperative matrices may use.
pub const COOPERATIVE: Capabilities = CAPABILITIES
    .union(Capabilities::SUBGROUP)
    .union(Capabilities::SHADER_FLOAT16)
    .union(Capabilities::COOPERATIVE_MATRIX);

/// Products, convolutions and attention by the cooperative matrices of NVIDIA, AMD, Apple and
/// Mesa's
/// llvmpipe, as their dispatches complete them: `(name, text, entry point)`.
pub fn cooperative_modules() -> Vec<(String, String, &'static str)> {
    let squares = [(16, [32, 32]), (16, [32, 64]), (8, [32, 32]), (8, [8, 8])];
    let random = RandomContext { step_key: Key::new(1), training: true };
    let options = Conv2dOptions { stride: [1; 2], padding: [1; 2], dilation: [1; 2], groups: 1 };
    let mut calls: Vec<(Op, Vec<Vec<usize>>)> = vec![
        (Op::Conv2d(options), vec![vec![2, 24, 24, 32], vec![256, 32, 3, 3]]),
        (
            Op::Conv2dInputGrad { options, size: [24, 24] },
            vec![vec![2, 24, 24, 32], vec![32, 256, 3, 3]],
        ),
        (
            Op::Conv2dWeightGrad { options, kernel: [3, 3] },
            vec![vec![2, 24, 24, 32], vec![2, 24, 24, 256]],
        ),
        (Op::LinearWeightGrad, vec![vec![2048, 256], vec![2048, 256]]),
    ];
    for (transpose_a, transpose_b) in TRANSPOSES {
        for [m, k, n] in [[256, 256, 256], [257, 1029, 261]] {
            let pair = |rows, columns, swapped| {
                if swapped { vec![columns, rows] } else { vec![rows, columns] }
            };
            let op = Op::MatMul { transpose_a, transpose_b };
            calls.push((op, vec![pair(m, k, transpose_a), pair(k, n, transpose_b)]));
        }
    }
    calls.extend(attention_calls());
    let mut texts = Vec::new();
    for (op, inputs) in calls {
        let of_f32 = OwnedCall::new(op, inputs, random).unwrap();
        let owned_call = OwnedCall { precision: Precision::Mixed, ..of_f32 };
        let call = owned_call.call();
        for (size, subgroups) in squares {
            let cooperative = Some(CooperativeSquare { size, subgroups });
            let caps = Caps { cooperative, ..Caps::EVERY };
            let variants = (twin(call.op).unwrap().variants)(&call, &caps);
            for variant in variants.iter().filter(|variant| variant.name.contains("_coop")) {
                let before = texts.len();
                for Dispatch { shader, .. } in &variant.dispatches {
                    let (text, entry) = (text(shader), shader.entry);
                    if text.contains("enable wgpu_cooperative_matrix;") {
                        let of = format!("{size} {subgroups:?} {} {entry}", call.op);
                        texts.push((format!("{} {of}", variant.name), text, entry));
                    }
                }
                assert!(texts.len() > before, "{}", variant.name);
            }
        }
    }
    texts
}

/// Attention and its gradient with narrow heads, with those of one unit across and with those of
/// two, with keys that are shared and with masks.
fn attention_calls() -> Vec<(Op, Vec<Vec<usize>>)> {
    let (b, t) = (2, 256);
    let dropped = AttentionOptions { dropout: 0.1, ..AttentionOptions::packed(2, 64) };
    let full = AttentionOptions { causal: false, ..AttentionOptions::separate(4, 2, 128) };
    let mut calls = Vec::new();
    for options in [AttentionOptions::packed(1, 6), dropped, full] {
        let tensors: Vec<Vec<usize>> =
            (0..options.tensors()).map(|input| vec![b, t, options.input_columns(input)]).collect();
        let samples = if options.dropout > 0.0 { vec![vec![b]] } else { Vec::new() };
        let y = vec![b, t, options.columns()[0]];
        let results = vec![y.clone(), vec![b, options.heads, t], y];
        calls.push((Op::Attention(options), [tensors.clone(), samples.clone()].concat()));
        calls.push((Op::AttentionGrad(options), [tensors, results, samples].concat()));
    }
    calls
}

/// Every other module: `(name, text)`.
pub fn modules() -> Vec<(String, String)> {
    let mut modules = emitted();
    let portable = tiles::TILES.into_iter().filter(|tile| tile.workgroup_bytes <= WORKGROUP_BYTES);
    modules.extend(portable.flat_map(|tile| attention_tiles(tile.name)));
    modules.extend(attention());
    modules.extend(products());
    modules.extend(fused());
    modules.extend(elementwise());
    modules.extend(layer_norm_group());
    modules.extend(layer_norm_rows());
    modules.extend(embedding_rows());
    modules.extend(row_sums());
    modules.extend(conv());
    modules.extend(pool());
    modules.extend(values_and_vectors());
    modules.extend(updates());
    modules.extend(of_catalog(&["batch_norm", "cross_entropy_grad", "lstm", "gru", "linear_"]));
    let completed = [
        "attention",
        "attention_coop",
        "attention_tiles",
        "batch_norm",
        "binary",
        "cache_update",
        "gather",
        "cached_attention",
        "cached_attention_merge",
        "conv",
        "conv_depthwise",
        "conv_shared",
        "conv_shared_weight",
        "cross_entropy_grad",
        "embedding_rows",
        "fused",
        "fused_vectors",
        "group_norm",
        "layer_norm",
        "layer_norm_group",
        "layer_norm_rows",
        "matmul",
        "matmul_split_k",
        "matmul_shared",
        "matmul_vector",
        "pool",
        "recurrent_gru",
        "recurrent_lstm",
        "rotary",
        "row_blocks",
        "row_sums",
        "softmax",
        "unary",
        "update",
        "update_bf16",
    ];
    let alone = FILES.iter().filter(|(file, _)| !completed.contains(file));
    modules.extend(alone.map(|(file, _)| (file.to_string(), text(&Shader::new(file, "")))));
    modules
}

/// Parses and validates the text of a shader, which may use these capabilities.
pub fn parse(text: &str, capabilities: Capabilities) -> Result<(Module, ModuleInfo), String> {
    let mut options = naga::front::wgsl::Options::new();
    options.capabilities = capabilities;
    let parsed = naga::front::wgsl::Frontend::new_with_options(options).parse(text);
    let module = parsed.map_err(|error| error.emit_to_string(text))?;
    let validated = Validator::new(ValidationFlags::all(), capabilities).validate(&module);
    let info = validated.map_err(|error| error.emit_to_string(text))?;
    Ok((module, info))
}

/// Puts all overrides of an entry point in, which sizes may depend on.
pub fn resolved(
    (module, info): (&Module, &ModuleInfo),
    entry: &EntryPoint,
) -> Result<(Module, ModuleInfo), String> {
    let stage = Some((entry.stage, entry.name.as_str()));
    let constants = back::PipelineConstants::default();
    let resolved = back::pipeline_constants::process_overrides(module, info, stage, &constants);
    let (module, info) = resolved.map_err(|error| error.to_string())?;
    Ok((module.into_owned(), info.into_owned()))
}

pub fn policies(checked: bool) -> BoundsCheckPolicies {
    let policy = if checked { BoundsCheckPolicy::Restrict } else { BoundsCheckPolicy::Unchecked };
    BoundsCheckPolicies { index: policy, buffer: policy, image_load: policy, binding_array: policy }
}

/// Returns an entry point in SPIR-V as wgpu makes it, of a trusted module or with checks.
pub fn spirv(
    (module, info): (&Module, &ModuleInfo),
    entry: &EntryPoint,
    checked: bool,
) -> Result<Vec<u32>, String> {
    let options = spv::Options {
        lang_version: (1, 3),
        bounds_check_policies: policies(checked),
        force_loop_bounding: checked,
        zero_initialize_workgroup_memory: if checked {
            spv::ZeroInitializeWorkgroupMemoryMode::Polyfill
        } else {
            spv::ZeroInitializeWorkgroupMemoryMode::None
        },
        ..Default::default()
    };
    let entry = spv::PipelineOptions { shader_stage: entry.stage, entry_point: entry.name.clone() };
    spv::write_vec(module, info, &options, Some(&entry)).map_err(|error| error.to_string())
}
