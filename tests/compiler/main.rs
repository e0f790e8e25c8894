//! Kernels as AMD's compiler makes them for graphics cards that are not there: registers, scratch
//! memory, waves, and the share of multiply-adds in hot loops. Software adapters prove that a
//! kernel is right; what its compiler makes of it shows how it runs on hardware. The compilers of
//! other vendors are asked by hand (`vendors`).

#![cfg(target_os = "linux")]

mod assembly;
mod choices;
mod heads;
mod kept;
mod radv;
mod roofline;
#[path = "../common/shader_modules.rs"]
mod shader_modules;
mod vendors;
mod vendors_table;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use assembly::HotLoop;
use radv::{Compiler, Report};
use serde::{Deserialize, Serialize};
use shader_modules::{capabilities_of, demanding_modules, modules, parse, resolved, spirv};

/// Families of GPUs, by the names that versions of the driver know: RDNA 3 and RDNA 2.
const FAMILIES: [(&str, &[&str]); 2] =
    [("RDNA 3", &["gfx1100", "navi31"]), ("RDNA 2", &["navi21", "gfx1030"])];

/// Kernels that are made for adapters that compute on a processor, by parts of their names.
const OF_SOFTWARE: [&str; 4] =
    ["matmul_tile_16x16", "matmul_tile_16x8", "attention ", "conv_tile_"];

/// Waves that a SIMD must hold at a time, to hide the latency of memory, and those that are enough
/// for products of large tiles, which hide it by what they compute.
const WAVES_MIN: u64 = 8;
const WAVES_OF_TILES_MIN: u64 = 4;
/// Products of tiles of 64x64 and more.
const LARGE_TILES: [&str; 3] = ["64x64", "128x64", "128x128"];

/// Cycles of a product of the head of GPT-2, and instructions of its hot loop, in those of one with
/// a padded vocabulary, at most. If they are more, it may pay to pad the logits. Mesa 22 and 25
/// have up to 1.05 for tiles of 128x128, which are chosen, and 1.07 for those of 64x64; loops of 1
/// and 1.02.
const HEAD_CYCLES_MAX: f64 = 1.1;
const HEAD_LOOP_MAX: f64 = 1.05;

/// Kernels that may lack waves, by the beginning of `name entry point`, with the reason.
const EXCEPTIONS: [(&str, &str); 1] = [(
    "layer_norm_group 64 1976 grad",
    "its row of 1976 values and their products are in workgroup memory, 16 KiB for 64 invocations",
)];

/// Variable with the directory of a process that compiles.
const DIRECTORY: &str = "POTLUCK_COMPILER_DIRECTORY";
/// Variable with the file that the table is written to.
const TABLE: &str = "POTLUCK_COMPILER_TABLE";

/// Variable with the file that the roofline is written to.
const ROOFLINE: &str = "POTLUCK_COMPILER_ROOFLINE";

/// A kernel in SPIR-V.
#[derive(Serialize, Deserialize)]
struct Kernel {
    name: String,
    entry_point: String,
    words: Vec<u32>,
}

impl Kernel {
    /// Returns the name and the entry point, without others that the name lists.
    fn title(&self) -> String {
        let is_listed = |entries: &str| entries.split('+').any(|one| one == self.entry_point);
        let name = match self.name.rsplit_once(' ') {
            Some((name, entries)) if is_listed(entries) => name,
            _ => &self.name,
        };
        format!("{name} {}", self.entry_point)
    }
}

/// Figures of the compiler for a kernel, and its hot loop.
type Figures = (BTreeMap<String, u64>, HotLoop);

/// What became of a kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Compiled {
    name: String,
    entry_point: String,
    figures: BTreeMap<String, u64>,
    hot_loop: HotLoop,
}

impl Compiled {
    fn figure(&self, name: &str) -> u64 {
        // Other drivers have other names; a figure that is missing must not pass for a good one.
        *self.figures.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", self.figures))
    }

    /// Returns the name without the list of entry points that run.
    fn shown_name(&self) -> &str {
        let is_listed = self.name.starts_with("attention_tiles");
        let families = ["matmul_shared_", "row_blocks "];
        let short = families.iter().find_map(|family| self.name.strip_prefix(family));
        let name = short.unwrap_or(&self.name);
        name.rsplit_once(' ').filter(|_| is_listed).map_or(name, |(name, _)| name)
    }

    /// Returns what is wrong with the kernel for hardware.
    fn violations(&self) -> Vec<String> {
        let title = format!("{} {}", self.name, self.entry_point);
        let mut found = Vec::new();
        for what in ["spilled vgprs", "scratch size"] {
            let figure = self.figure(what);
            if figure > 0 {
                found.push(format!("{title}: {what} {figure}"));
            }
        }
        let is_large = LARGE_TILES.iter().any(|tile| title.contains(tile));
        let least = if is_large { WAVES_OF_TILES_MIN } else { WAVES_MIN };
        let waves = self.figure("subgroups per simd");
        let is_excepted = EXCEPTIONS.iter().any(|(begins, _)| title.starts_with(begins));
        if waves < least && !is_excepted {
            found.push(format!("{title}: {waves} waves per SIMD, and it needs {least}"));
        }
        found
    }
}

fn is_of_software(name: &str) -> bool {
    OF_SOFTWARE.iter().any(|part| name.contains(part))
}

/// Translates every entry point of these modules as wgpu does.
fn kernels(modules: Vec<(String, String)>) -> Vec<Kernel> {
    let mut kernels = Vec::new();
    for (name, text) in modules {
        let (module, info) =
            parse(&text, capabilities_of(&name)).unwrap_or_else(|why| panic!("{name}: {why}"));
        // Of the text for a tile of attention, not every entry point runs.
        let runs = |entry: &str| {
            let listed =
                name.split(' ').next_back().filter(|_| name.starts_with("attention_tiles"));
            listed.is_none_or(|listed| listed.split('+').any(|one| one == entry))
        };
        for entry in module.entry_points.iter().filter(|entry| runs(&entry.name)) {
            let (module, info) = resolved((&module, &info), entry).unwrap();
            let words = spirv((&module, &info), entry, false).unwrap();
            let (name, entry_point) = (name.clone(), entry.name.clone());
            kernels.push(Kernel { name, entry_point, words });
        }
    }
    kernels
}

/// Translates these modules, of whose entry points the last word of a name runs.
fn kernels_by_entry(modules: Vec<(String, String)>) -> Vec<Kernel> {
    let mut kernels = kernels(modules);
    kernels.retain(|one| one.name.ends_with(&format!(" {}", one.entry_point)));
    kernels
}

fn driver_manifest() -> Option<PathBuf> {
    let places = ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d"];
    let files = places.iter().flat_map(fs::read_dir).flatten().flatten().map(|file| file.path());
    let is_driver = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with("radeon_icd") && name.ends_with(".json") && !name.contains("i686")
    };
    files.into_iter().find(is_driver)
}

/// Compiles kernels for a family, in a process of its own, as the driver reads the family from the
/// environment when it is loaded. The error says why that cannot be done on this machine.
fn compiled(family: &str, kernels: &[Kernel]) -> Result<Vec<Compiled>, String> {
    let manifest = driver_manifest().ok_or("AMD's Vulkan driver (radeon_icd) is not installed")?;
    let directory = tempfile::tempdir().unwrap();
    let of_kernels = serde_json::to_vec(kernels).unwrap();
    fs::write(directory.path().join("kernels.json"), of_kernels).unwrap();
    let ran = Command::new(env::current_exe().unwrap())
        .args(["--exact", "a_kernel_with_scratch_memory_is_found", "--nocapture"])
        .env(DIRECTORY, directory.path())
        .env("RADV_FORCE_FAMILY", family)
        .env("VK_DRIVER_FILES", manifest)
        .env("MESA_SHADER_CACHE_DISABLE", "true")
        .env("XDG_RUNTIME_DIR", directory.path())
        .env_remove("VK_ICD_FILENAMES")
        .output()
        .unwrap();
    let report = fs::read(directory.path().join("compiled.json"));
    let report = report.map_err(|_| String::from_utf8_lossy(&ran.stderr).into_owned());
    // A compiler that ends the process, or refuses a kernel, is no reason to skip. A driver that
    // does not know the family by this name ends it too.
    let is_other_name = report.as_ref().is_err_and(|why| why.contains("Unknown family"));
    let has_begun = directory.path().join("begun").exists();
    assert!(report.is_ok() || is_other_name || !has_begun, "{}", report.unwrap_err());
    let report = report?;
    serde_json::from_slice::<Result<_, String>>(&report).unwrap()
}

/// Compiles for the first name of a family that the driver knows.
fn compiled_for(names: &[&str], kernels: &[Kernel]) -> Result<Vec<Compiled>, String> {
    let mut why = String::new();
    for name in names {
        match compiled(name, kernels) {
            Ok(compiled) => return Ok(compiled),
            Err(error) => why = error,
        }
    }
    Err(why)
}

/// Compiles the kernels of a directory; the work of the process that [`compiled`] starts.
fn compile_all(directory: &Path) {
    let write = |report: &Result<Vec<Compiled>, String>| {
        fs::write(directory.join("compiled.json"), serde_json::to_vec(report).unwrap()).unwrap();
    };
    fs::write(directory.join("begun"), "").unwrap();
    let compiler = match Compiler::open() {
        Ok(compiler) if compiler.name.contains("RADV") => compiler,
        Ok(other) => return write(&Err(format!("{} is another driver", other.name))),
        Err(why) => return write(&Err(why)),
    };
    let kernels = fs::read(directory.join("kernels.json")).unwrap();
    let kernels: Vec<Kernel> = serde_json::from_slice(&kernels).unwrap();
    let compile = |kernel: Kernel| {
        let (figures, hot_loop) =
            kept::or_made(&compiler, &kernel, || measured(&compiler, &kernel));
        let Kernel { name, entry_point, .. } = kernel;
        Compiled { name, entry_point, figures, hot_loop }
    };
    write(&Ok(kernels.into_iter().map(compile).collect()));
}

/// Compiles a kernel, and returns its figures and what its hot loop has.
fn measured(compiler: &Compiler, kernel: &Kernel) -> Figures {
    let report = compiler.compile(&kernel.words, &kernel.entry_point);
    let Report { figures, assembly } =
        report.unwrap_or_else(|why| panic!("{}: {why}", kernel.name));
    (figures, HotLoop::of(&assembly))
}

/// Returns a table of kernels in Markdown.
fn table(title: &str, compiled: &[Compiled]) -> String {
    let mut text = format!(
        "## {title}\n\n\
         The hot loop is the block with the most multiply-adds: instructions and their share.\n\n\
         | kernel | registers | spilled | scratch | LDS | waves | code | hot loop | share |\n\
         |---|---|---|---|---|---|---|---|---|\n"
    );
    // A fused product differs from its tile by what follows the loop.
    for one in compiled.iter().filter(|one| !one.name.contains(" by ")) {
        let HotLoop { instructions: hot, multiply_adds: products, .. } = one.hot_loop;
        let share =
            if products > 0 { format!("{} %", 100 * products / hot) } else { String::new() };
        let figure = |name| one.figure(name);
        let _ = writeln!(
            text,
            "| {} {} | {} | {} | {} | {} | {} | {} | {hot} | {share} |",
            one.shown_name(),
            one.entry_point,
            figure("vgprs"),
            figure("spilled vgprs"),
            figure("scratch size"),
            figure("lds size"),
            figure("subgroups per simd"),
            figure("instructions"),
        );
    }
    text
}

/// Reports what a test could not test, in one line, which `./x test` counts; libtest counts the
/// test as passed, and hides what it prints, but not what it writes.
fn skip(missing: &[String]) {
    if !missing.is_empty() {
        // Behind a line break, because libtest may have printed the test's name.
        let _ = writeln!(io::stderr(), "\nskipped: {}", missing.join("; ").replace('\n', " "));
    }
}

#[test]
fn kernels_for_hardware_use_no_scratch_and_leave_waves() {
    let demanding = demanding_modules().into_iter().map(|(name, text, _)| (name, text));
    let kernels = kernels(modules().into_iter().chain(demanding).collect());
    assert!(kernels.len() > 100, "{} kernels", kernels.len());
    let (mut tables, mut violations, mut missing) = (Vec::new(), Vec::new(), Vec::new());
    for (title, names) in FAMILIES {
        match compiled_for(names, &kernels) {
            Ok(compiled) => {
                assert_eq!(compiled.len(), kernels.len());
                let of_hardware = compiled.iter().filter(|one| !is_of_software(&one.name));
                let found = of_hardware.flat_map(Compiled::violations);
                violations.extend(found.map(|why| format!("{title}: {why}")));
                tables.push(table(title, &compiled));
            }
            Err(why) => missing.push(format!("no compiler for {title}: {}", why.trim())),
        }
    }
    if let Some(path) = env::var_os(TABLE) {
        fs::write(Path::new(&path), tables.join("\n")).unwrap();
    }
    assert!(violations.is_empty(), "{} violations:\n{}", violations.len(), violations.join("\n"));
    skip(&missing);
}

/// The step of GPT-2 as its kernels are chosen for hardware: what is compiled alone above, in the
/// sizes and with the epilogues of a real model.
#[test]
fn the_kernels_of_a_large_model_keep_the_rules_and_fill_a_roofline() {
    let kernels = kernels_by_entry(roofline::modules(&roofline::plan(), &roofline::CAPS));
    let (title, names) = FAMILIES[0];
    let compiled = match compiled_for(names, &kernels) {
        Ok(compiled) => compiled,
        Err(why) => return skip(&[format!("no compiler for {title}: {}", why.trim())]),
    };
    let violations: Vec<String> = compiled.iter().flat_map(Compiled::violations).collect();
    let share_of = |title: &str, entry: &str| {
        let name = format!("{title} {entry}");
        let found = compiled.iter().find(|one| one.name == name && one.entry_point == entry);
        let HotLoop { instructions, multiply_adds, .. } =
            found.unwrap_or_else(|| panic!("{name} was compiled")).hot_loop;
        multiply_adds as f64 / instructions.max(1) as f64
    };
    let table = roofline::table(&share_of);
    if let Some(path) = env::var_os(ROOFLINE) {
        let heads = compiled_for(names, &self::kernels(heads::modules())).unwrap();
        let heads = heads::table(title, &heads);
        fs::write(Path::new(&path), format!("{table}\n{heads}")).unwrap();
    }
    assert!(violations.is_empty(), "{table}\n{}", violations.join("\n"));
}

/// Why the logits of a vocabulary that is no multiple of 4 are not padded: their elements are read
/// and stored one by one, but beside the hot loop.
#[test]
fn a_head_of_odd_rows_takes_the_cycles_of_a_padded_one() {
    let kernels = kernels(heads::modules());
    for (title, names) in FAMILIES {
        let compiled = match compiled_for(names, &kernels) {
            Ok(compiled) => compiled,
            Err(why) => {
                println!("skipped: no compiler for {title}: {}", why.trim());
                continue;
            }
        };
        let table = heads::table(title, &compiled);
        println!("{table}");
        for pair in heads::pairs(&compiled) {
            assert!(pair.cycles() <= HEAD_CYCLES_MAX, "{table}");
            assert!(pair.hot_loop() <= HEAD_LOOP_MAX, "{table}");
        }
    }
}

/// A kernel that indexes private memory by what it reads, which no register can hold.
#[test]
fn a_kernel_with_scratch_memory_is_found() {
    // The process that compiles is this one with this test alone.
    if let Some(directory) = env::var_os(DIRECTORY) {
        return compile_all(Path::new(&directory));
    }
    let text = "@group(0) @binding(0) var<storage, read_write> y: array<u32>;\n\
        @compute @workgroup_size(64)\n\
        fn main(@builtin(global_invocation_id) at: vec3u) {\n\
            var own: array<u32, 512>;\n\
            for (var i = 0u; i < 512u; i += 1u) { own[y[i] & 511u] += i; }\n\
            for (var i = 0u; i < 512u; i += 1u) { y[at.x + i] = own[y[i] & 511u]; }\n\
        }\n";
    let kernels = kernels(vec![("planted".into(), text.into())]);
    let mut missing = Vec::new();
    for (title, names) in FAMILIES {
        match compiled_for(names, &kernels) {
            Ok(compiled) => {
                let found = compiled[0].violations();
                let scratch = found.iter().find(|why| why.contains("scratch size"));
                assert!(scratch.is_some(), "{title}: {compiled:?}");
            }
            Err(why) => missing.push(format!("no compiler for {title}: {}", why.trim())),
        }
    }
    skip(&missing);
}
