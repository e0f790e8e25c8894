//! Every shader, with every constant set in use, translated by naga to the languages of all back
//! ends and held to the portable core. Needs no GPU.
//!
//! That a shader is translated does not prove that a vendor's compiler takes it; that a vendor's
//! device runs it right is for the kernel tests.

use naga::back::{self, glsl, hlsl, msl, spv};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::{Capabilities, FunctionInfo, ModuleInfo, ValidationFlags, Validator};
use naga::{AddressSpace, EntryPoint, Module};
use potluck::base::Site;
use potluck::base::rng::Key;
use potluck::graph::{Binary, EpilogueOp, Op, Unary};
use potluck::kernels::ops::matmul::{shared, tile, vector};
use potluck::kernels::source::{FILES, snippet, text};
use potluck::kernels::{OpCall, RandomContext, Shader, twin};

/// What the portable core may use: parameters as immediates, and nothing else that is optional.
const CAPABILITIES: Capabilities = Capabilities::IMMEDIATES;

/// Shaders whose text is emitted, with every shape in use: `(name, text)`.
fn emitted() -> Vec<(String, String)> {
    let mut texts = Vec::new();
    for tile in tile::TILES.into_iter().chain(tile::NARROW) {
        for transposed in 0..4 {
            let (a, b) = (transposed & 1 != 0, transposed & 2 != 0);
            let name = format!("{} {a} {b}", tile.name);
            texts.push((name, tile::text(tile, a, b, snippet("store"))));
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
    for f in [Unary::Relu, Unary::Gelu, Unary::GeluTanh, Unary::Scale(-1e-7)] {
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
            for variant in (twin(&op).unwrap().variants)(&fused_call(&op, epilogue)) {
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
    OpCall { op, inputs, outputs: vec![vec![32, 32]; 1 + kept], accumulate: false, random }
}

/// The text of a file that needs something in front, as its dispatches put it there, for head
/// widths of every kind: odd, of one slab and of several, with and without dropout.
fn attention() -> Vec<(String, String)> {
    let mut texts = Vec::new();
    for d in [5, 16, 32, 64, 128, 256] {
        for dropout in [0.0, 0.1] {
            let op = Op::Attention { heads: 2, dropout, site: Site(1) };
            let call = OpCall {
                op: &op,
                inputs: vec![vec![3, 7, 6 * d], vec![3]],
                outputs: vec![vec![3, 7, 2 * d], vec![3, 2, 7]],
                accumulate: false,
                random: RandomContext { step_key: Key::new(1), training: true },
            };
            let shader = &(twin(&op).unwrap().dispatch)(&call)[0].shader;
            assert_eq!(shader.file, "attention");
            texts.push((format!("attention {d} {dropout}"), text(shader)));
        }
    }
    texts
}

/// The files of matrix products as their dispatches complete them, in every combination.
fn products() -> Vec<(String, String)> {
    let store = snippet("store");
    let naive = Shader::new("matmul", "naive").with_text(store);
    let mut texts = vec![("matmul".to_string(), text(&naive))];
    for tile in shared::TILES {
        for bits in 0..16 {
            let [a, b] = [0, 2].map(|shift| shared::Layout {
                transposed: bits >> shift & 1 == 1,
                vectors: bits >> shift & 2 == 2,
            });
            let shader = shared::shader(tile, a, b, store);
            texts.push((format!("{} {a:?} {b:?}", tile.name), text(&shader)));
        }
    }
    for along in [false, true] {
        let shader = vector::shader(along, store);
        texts.push((format!("matmul_vector {along}"), text(&shader)));
    }
    texts
}

/// The same of the layer normalization by workgroups, for the widest rows of each size.
fn layer_norm_group() -> Vec<(String, String)> {
    let text = |group, c| {
        let shader = Shader::new("layer_norm_group", "").with_const("GROUP", group);
        (format!("layer_norm_group {group} {c}"), text(&shader.with_const("C", c)))
    };
    vec![text(64, 1), text(64, 1984), text(256, 1792)]
}

/// Every module: `(name, text)`.
fn modules() -> Vec<(String, String)> {
    let mut modules = emitted();
    modules.extend(attention());
    modules.extend(products());
    modules.extend(fused());
    modules.extend(layer_norm_group());
    let completed =
        ["attention", "fused", "layer_norm_group", "matmul", "matmul_shared", "matmul_vector"];
    let alone = FILES.iter().filter(|(file, _)| !completed.contains(file));
    modules.extend(alone.map(|(file, _)| (file.to_string(), text(&Shader::new(file, "")))));
    modules
}

#[test]
fn every_shader_is_portable_and_translates() {
    let modules = modules();
    // tests/guard/guard.sh compares the texts of two commits.
    if let Some(path) = std::env::var_os("POTLUCK_WRITE_SHADERS") {
        let texts = modules.iter().map(|(name, text)| format!("==> {name} <==\n{text}\n"));
        std::fs::write(path, texts.collect::<String>()).unwrap();
    }
    let mut failures = Vec::new();
    for (name, text) in modules {
        match check(&text) {
            Err(why) => failures.push(format!("{name}: {why}")),
            Ok(0) => failures.push(format!("{name}: no entry point")),
            Ok(_) => {}
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Checks a module; the number of its entry points, or the first thing that is wrong.
fn check(text: &str) -> Result<usize, String> {
    let mut options = naga::front::wgsl::Options::new();
    options.capabilities = CAPABILITIES;
    let parsed = naga::front::wgsl::Frontend::new_with_options(options).parse(text);
    let module = parsed.map_err(|error| error.emit_to_string(text))?;
    let mut validator = Validator::new(ValidationFlags::all(), CAPABILITIES);
    let validated = validator.validate(&module);
    let info = validated.map_err(|error| error.emit_to_string(text))?;
    for entry in &module.entry_points {
        check_entry(&module, &info, entry).map_err(|why| format!("{}: {why}", entry.name))?;
    }
    Ok(module.entry_points.len())
}

/// Checks one entry point with all overrides put in, which sizes may depend on.
fn check_entry(module: &Module, info: &ModuleInfo, entry: &EntryPoint) -> Result<(), String> {
    let stage = Some((entry.stage, entry.name.as_str()));
    let constants = back::PipelineConstants::default();
    let resolved = back::pipeline_constants::process_overrides(module, info, stage, &constants);
    let (module, info) = resolved.map_err(|error| error.to_string())?;
    let index = module.entry_points.iter().position(|known| known.name == entry.name);
    let index = index.ok_or("it vanished with the overrides")?;
    portable(&module, &module.entry_points[index], info.get_entry_point(index))?;
    translate(&module, &info, entry)
}

/// Holds an entry point to what every device allows.
fn portable(module: &Module, entry: &EntryPoint, info: &FunctionInfo) -> Result<(), String> {
    let (mut buffers, mut workgroup_bytes, mut immediate_bytes) = (0, 0, 0);
    for (handle, variable) in module.global_variables.iter() {
        if info[handle].is_empty() {
            continue;
        }
        let bytes = || module.types[variable.ty].inner.size(module.to_ctx());
        match variable.space {
            AddressSpace::Storage { .. } => buffers += 1,
            AddressSpace::WorkGroup => workgroup_bytes += bytes(),
            AddressSpace::Immediate => immediate_bytes += bytes(),
            AddressSpace::Private => {}
            other => return Err(format!("{:?} lies in {other:?}", variable.name)),
        }
    }
    let [x, y, z] = entry.workgroup_size;
    let limits = [
        ("storage buffers", buffers, 8),
        ("bytes of workgroup memory", workgroup_bytes, 16 * 1024),
        ("bytes of immediates", immediate_bytes, 128),
        ("invocations in a workgroup", x, 256),
        ("invocations in y or z", y.max(z), 1),
    ];
    match limits.iter().find(|(_, used, limit)| used > limit) {
        Some((what, used, limit)) => Err(format!("{used} {what}, and {limit} are portable")),
        None => Ok(()),
    }
}

/// Writes an entry point in the language of each back end, with and without runtime checks.
fn translate(module: &Module, info: &ModuleInfo, entry: &EntryPoint) -> Result<(), String> {
    for checked in [true, false] {
        let named = |language: &'static str| move |why: String| format!("to {language}: {why}");
        to_spirv(module, info, entry, checked).map_err(named("SPIR-V"))?;
        to_msl(module, info, entry, checked).map_err(named("MSL"))?;
        to_hlsl(module, info, entry, checked).map_err(named("HLSL"))?;
        to_glsl(module, info, entry, checked).map_err(named("GLSL"))?;
    }
    Ok(())
}

fn policies(checked: bool) -> BoundsCheckPolicies {
    let policy = if checked { BoundsCheckPolicy::Restrict } else { BoundsCheckPolicy::Unchecked };
    BoundsCheckPolicies { index: policy, buffer: policy, image_load: policy, binding_array: policy }
}

fn to_spirv(m: &Module, i: &ModuleInfo, entry: &EntryPoint, checked: bool) -> Result<(), String> {
    let options = spv::Options {
        lang_version: (1, 3),
        bounds_check_policies: policies(checked),
        force_loop_bounding: checked,
        zero_initialize_workgroup_memory: match checked {
            true => spv::ZeroInitializeWorkgroupMemoryMode::Polyfill,
            false => spv::ZeroInitializeWorkgroupMemoryMode::None,
        },
        ..Default::default()
    };
    let entry = spv::PipelineOptions { shader_stage: entry.stage, entry_point: entry.name.clone() };
    let words = spv::write_vec(m, i, &options, Some(&entry)).map_err(|e| e.to_string())?;
    written(!words.is_empty())
}

fn to_msl(m: &Module, i: &ModuleInfo, entry: &EntryPoint, checked: bool) -> Result<(), String> {
    let options = msl::Options {
        lang_version: (3, 0),
        bounds_check_policies: policies(checked),
        force_loop_bounding: checked,
        zero_initialize_workgroup_memory: checked,
        ..Default::default()
    };
    let entry_point = Some((entry.stage, entry.name.clone()));
    let entry = msl::PipelineOptions { entry_point, ..Default::default() };
    let (text, names) = msl::write_string(m, i, &options, &entry).map_err(|e| e.to_string())?;
    names
        .entry_point_names
        .into_iter()
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| e.to_string())?;
    written(text.contains("kernel void"))
}

fn to_hlsl(m: &Module, i: &ModuleInfo, entry: &EntryPoint, checked: bool) -> Result<(), String> {
    let options = hlsl::Options {
        shader_model: hlsl::ShaderModel::V6_2,
        immediates_target: Some(hlsl::BindTarget::default()),
        restrict_indexing: checked,
        force_loop_bounding: checked,
        zero_initialize_workgroup_memory: checked,
        ..Default::default()
    };
    let entry_point = Some((entry.stage, entry.name.clone()));
    let entry = hlsl::PipelineOptions { entry_point };
    let mut text = String::new();
    let mut writer = hlsl::Writer::new(&mut text, &options, &entry);
    let names = writer.write(m, i, None).map_err(|e| e.to_string())?;
    names
        .entry_point_names
        .into_iter()
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| e.to_string())?;
    written(text.contains("[numthreads("))
}

fn to_glsl(m: &Module, i: &ModuleInfo, entry: &EntryPoint, checked: bool) -> Result<(), String> {
    let options = glsl::Options {
        version: glsl::Version::new_gles(310),
        zero_initialize_workgroup_memory: checked,
        ..Default::default()
    };
    let entry = glsl::PipelineOptions {
        shader_stage: entry.stage,
        entry_point: entry.name.clone(),
        multiview: None,
    };
    let mut text = String::new();
    let writer = glsl::Writer::new(&mut text, m, i, &options, &entry, policies(checked));
    writer.map_err(|e| e.to_string())?.write().map_err(|e| e.to_string())?;
    written(text.contains("void main()"))
}

/// A writer that writes no entry point must not pass for one that translates.
fn written(found: bool) -> Result<(), String> {
    if found { Ok(()) } else { Err("the entry point is missing".to_string()) }
}

/// A shader with these declarations, this workgroup size and this body.
fn planted(declarations: &str, size: &str, body: &str) -> String {
    format!("{declarations}\n@compute @workgroup_size({size})\nfn main() {{ {body} }}\n")
}

/// `count` buffers, each of which is written to.
fn buffers(count: usize) -> String {
    let declare =
        |i| format!("@group(0) @binding({i}) var<storage, read_write> b{i}: array<f32>;\n");
    let declarations: String = (0..count).map(declare).collect();
    let body: String = (0..count).map(|i| format!("b{i}[0] = 1.0; ")).collect();
    planted(&declarations, "64", &body)
}

fn workgroup_memory(floats: usize) -> String {
    planted(&format!("var<workgroup> a: array<f32, {floats}>;"), "64", "a[0] = 1.0;")
}

fn immediates(words: usize) -> String {
    let fields: String = (0..words).map(|i| format!("p{i}: u32, ")).collect();
    let declarations = format!(
        "struct Params {{ {fields} }}\nvar<immediate> p: Params;\n\
         @group(0) @binding(0) var<storage, read_write> y: array<u32>;"
    );
    planted(&declarations, "64", "y[0] = p.p0;")
}

#[test]
fn what_just_fits_is_accepted() {
    let empty = |size| planted("", size, "");
    let texts = [buffers(8), workgroup_memory(4096), immediates(32), empty("256"), empty("1")];
    for text in texts {
        assert_eq!(check(&text), Ok(1), "{text}");
    }
}

#[test]
fn each_limit_refuses_what_breaks_it() {
    let broken = [
        (buffers(9), "9 storage buffers"),
        (workgroup_memory(4097), "16388 bytes of workgroup memory"),
        (immediates(33), "132 bytes of immediates"),
        (planted("", "257", ""), "257 invocations in a workgroup"),
        (planted("override SIZE = 512u;", "SIZE", ""), "512 invocations in a workgroup"),
        (planted("", "16, 16", ""), "16 invocations in y or z"),
        (planted("", "8, 1, 2", ""), "2 invocations in y or z"),
        (planted("@group(0) @binding(0) var<uniform> u: vec4f;", "64", "_ = u;"), "Uniform"),
        (planted("enable f16; var<private> h: f16;", "64", "h = 1.0h;"), "f16"),
        (planted("", "64", "_ = 1.0 + 1u;"), "error"),
    ];
    for (text, why) in broken {
        let refused = check(&text).expect_err(&text);
        assert!(refused.contains(why), "{refused}\nshould name {why}");
    }
}

/// A buffer that another entry point of the file uses does not count.
#[test]
fn only_what_an_entry_point_uses_counts() {
    let second = "@compute @workgroup_size(1) fn second() { b8[0] = 1.0; }";
    let extra = "@group(0) @binding(8) var<storage, read_write> b8: array<f32>;";
    assert_eq!(check(&format!("{}{extra}\n{second}", buffers(8))), Ok(2));
}
