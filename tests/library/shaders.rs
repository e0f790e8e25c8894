//! Every shader, with every constant set in use, translated by naga to the languages of all back
//! ends and held to the portable core. Needs no GPU.
//!
//! That a shader is translated does not prove that a vendor's compiler takes it; that a vendor's
//! device runs it right is for the kernel tests.

use naga::back::{glsl, hlsl, msl};
use naga::valid::{Capabilities, FunctionInfo, ModuleInfo};
use naga::{AddressSpace, EntryPoint, Module};

use potluck_kernels::ops::attention::tiles;
use potluck_kernels::source::FILES;

use crate::shader_modules::{
    CAPABILITIES, COOPERATIVE, WORKGROUP_BYTES, attention_tiles, capabilities_of,
    cooperative_modules, demanding_modules, modules, parse, policies, resolved, spirv,
};

#[test]
fn shaders_are_portable_and_translate() {
    let portable = modules().into_iter().map(|(name, text)| (name, text, WORKGROUP_BYTES));
    let modules: Vec<(String, String, u32)> = portable.chain(demanding_modules()).collect();
    // tests/guard/guard.sh compares the texts of two commits.
    if let Some(path) = std::env::var_os("POTLUCK_WRITE_SHADERS") {
        let texts = modules.iter().map(|(name, text, _)| format!("==> {name} <==\n{text}\n"));
        std::fs::write(path, texts.collect::<String>()).unwrap();
    }
    let mut failures = Vec::new();
    for (name, text, workgroup_bytes) in modules {
        match check_within(&text, workgroup_bytes, capabilities_of(&name)) {
            Err(why) => failures.push(format!("{name}: {why}")),
            Ok(0) => failures.push(format!("{name}: no entry point")),
            Ok(_) => {}
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Cooperative matrices are for Vulkan and Metal: naga has no others.
#[test]
fn cooperative_kernels_translate() {
    let modules = cooperative_modules();
    assert!(modules.len() > 100, "{} modules", modules.len());
    for (name, text, entry) in modules {
        let (module, info) =
            parse(&text, COOPERATIVE).unwrap_or_else(|why| panic!("{name}: {why}"));
        let entry = module.entry_points.iter().find(|one| one.name == entry);
        let entry = entry.unwrap_or_else(|| panic!("{name}: the entry point is missing"));
        let (module, info) = resolved((&module, &info), entry).unwrap();
        for checked in [true, false] {
            let words = spirv((&module, &info), entry, checked);
            assert!(!words.unwrap_or_else(|why| panic!("{name}: {why}")).is_empty());
            let metal = to_msl(&module, &info, entry, checked);
            metal.unwrap_or_else(|why| panic!("{name} to MSL: {why}"));
        }
    }
}

/// Checks a portable module; see [`check_within`].
fn check(text: &str) -> Result<usize, String> {
    check_within(text, WORKGROUP_BYTES, CAPABILITIES)
}

/// Checks a module that may use so many bytes of workgroup memory, and these capabilities; the
/// number of its entry points, or the first thing that is wrong.
fn check_within(
    text: &str,
    workgroup_bytes: u32,
    capabilities: Capabilities,
) -> Result<usize, String> {
    let (module, info) = parse(text, capabilities)?;
    for entry in &module.entry_points {
        check_entry(&module, &info, entry, workgroup_bytes)
            .map_err(|why| format!("{}: {why}", entry.name))?;
    }
    Ok(module.entry_points.len())
}

/// Checks one entry point with all overrides put in, which sizes may depend on.
fn check_entry(
    module: &Module,
    info: &ModuleInfo,
    entry: &EntryPoint,
    workgroup_bytes: u32,
) -> Result<(), String> {
    let (module, info) = resolved((module, info), entry)?;
    let index = module.entry_points.iter().position(|known| known.name == entry.name);
    let index = index.ok_or("it vanished with the overrides")?;
    portable(&module, &module.entry_points[index], info.get_entry_point(index), workgroup_bytes)?;
    translate(&module, &info, entry)
}

/// Holds an entry point to what every device allows, but for its workgroup memory, of which it may
/// use so many bytes.
fn portable(
    module: &Module,
    entry: &EntryPoint,
    info: &FunctionInfo,
    workgroup_bytes_max: u32,
) -> Result<(), String> {
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
        ("bytes of workgroup memory", workgroup_bytes, workgroup_bytes_max),
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
        let words = spirv((module, info), entry, checked).map_err(named("SPIR-V"))?;
        written(!words.is_empty()).map_err(named("SPIR-V"))?;
        to_msl(module, info, entry, checked).map_err(named("MSL"))?;
        to_hlsl(module, info, entry, checked).map_err(named("HLSL"))?;
        to_glsl(module, info, entry, checked).map_err(named("GLSL"))?;
    }
    Ok(())
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
fn limits_just_met_are_accepted() {
    let empty = |size| planted("", size, "");
    let texts = [buffers(8), workgroup_memory(4096), immediates(32), empty("256"), empty("1")];
    for text in texts {
        assert_eq!(check(&text), Ok(1), "{text}");
    }
}

#[test]
fn limits_broken_are_refused() {
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
        (planted("", "64", "_ = subgroupAdd(1u);"), "SUBGROUP"),
        (planted("", "64", "_ = 1.0 + 1u;"), "error"),
    ];
    for (text, why) in broken {
        let refused = check(&text).expect_err(&text);
        assert!(refused.contains(why), "{refused}\nshould name {why}");
    }
}

/// Returns the bytes of workgroup memory of the entry point of a module that uses the most.
fn most_workgroup_bytes(text: &str) -> u32 {
    let (module, info) = parse(text, CAPABILITIES).unwrap();
    let entries = (0..module.entry_points.len()).map(|index| {
        let entry = info.get_entry_point(index);
        let variables = module.global_variables.iter();
        let used = variables.filter(|(handle, _)| !entry[*handle].is_empty());
        let shared = used.filter(|(_, variable)| variable.space == AddressSpace::WorkGroup);
        shared.map(|(_, one)| module.types[one.ty].inner.size(module.to_ctx())).sum()
    });
    entries.max().unwrap()
}

/// Each tile of attention needs, for some width of heads, what it declares and what the head of its
/// file says, and for none more.
#[test]
fn attention_tiles_need_declared_memory() {
    let (_, file) = FILES.iter().find(|(file, _)| *file == "attention_tiles").unwrap();
    for tile in tiles::TILES {
        let tiles::AttentionTile { name, invocations, workgroup_bytes } = tile;
        let head = format!("//   {invocations} invocations: at most {workgroup_bytes} bytes\n");
        assert!(file.contains(&head), "the head of the file lacks {head}");
        let needed = attention_tiles(name).iter().map(|(_, text)| most_workgroup_bytes(text)).max();
        assert_eq!(needed, Some(workgroup_bytes), "{name}");
    }
}

/// A buffer that another entry point of the file uses does not count.
#[test]
fn limits_count_used_items_only() {
    let second = "@compute @workgroup_size(1) fn second() { b8[0] = 1.0; }";
    let extra = "@group(0) @binding(8) var<storage, read_write> b8: array<f32>;";
    assert_eq!(check(&format!("{}{extra}\n{second}", buffers(8))), Ok(2));
}
