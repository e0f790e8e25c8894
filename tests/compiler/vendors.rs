//! Kernels as the compilers of all vendors' drivers make them, for GPUs that need not be there:
//! `./x compiler --all-vendors DIR`. DIR has a program that knows these compilers, such as Mesa's
//! drivers on its libraries that stand in for the kernel's (drm-shim):
//!
//! `DIR/compile GPU KERNELS ASSEMBLY` compiles every file `NAME@ENTRY.spv` of the directory KERNELS
//! for a GPU of [`GPUS`], with robust buffer access, as wgpu does. It prints a line for each: name,
//! entry point, milliseconds of the compiler and the driver's figures (those of
//! `VK_KHR_pipeline_executable_properties`) as `figure=value; figure=value`, or `FAILED` and the
//! reason, between tabs. The directory ASSEMBLY gets `NAME@ENTRY.0.txt` of each: sections that
//! begin with a line `--- TITLE`, of which the last one is the assembly. It may be called for
//! several GPUs at a time. An exit status other than 0 means that it could not do its work, and
//! what it wrote to stderr why.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::process::Command;
use std::{env, fs, io, thread};

use potluck_kernels::caps::registers;
use potluck_kernels::{Caps, DeviceClass};

use super::assembly::HotLoop;
use super::shader_modules::{demanding_modules, modules};
use super::{Kernel, choices, is_of_software, kernels, kernels_by_entry, roofline, vendors_table};

/// Variable with the directory of the program.
const DIRECTORY: &str = "POTLUCK_VENDORS_DIRECTORY";
/// Variable with the file that the table is written to.
const TABLE: &str = "POTLUCK_VENDORS_TABLE";

/// Names that a driver gives its figures.
pub struct FigureNames {
    pub registers: &'static str,
    pub instructions: &'static str,
    /// Accesses of memory in place of registers.
    spills: &'static [&'static str],
    /// Bytes of memory in place of registers.
    scratch: &'static str,
}

const NVIDIA: FigureNames = FigureNames {
    registers: "Number of GPRs",
    instructions: "Instruction count",
    spills: &["Spills to memory", "Fills from memory"],
    scratch: "SLM size",
};
const INTEL: FigureNames = FigureNames {
    registers: "Max live registers",
    instructions: "Instructions",
    spills: &["Spills", "Fills"],
    scratch: "Scratch Memory Size",
};
const APPLE: FigureNames = FigureNames {
    registers: "GPRs",
    instructions: "Instructions",
    spills: &["Spills", "Fills"],
    scratch: "Scratch",
};
const AMD: FigureNames = FigureNames {
    registers: "VGPRs",
    instructions: "Instructions",
    spills: &["Spilled VGPRs"],
    scratch: "Scratch size",
};

/// A GPU whose compiler is asked.
pub struct VendorGpu {
    /// Name by which the program knows it.
    pub name: &'static str,
    pub title: &'static str,
    pub names: FigureNames,
    /// What its driver says of it: PCI's number of the vendor, the name, and the bytes of workgroup
    /// memory, by which kernels are chosen.
    vendor: u32,
    device: &'static str,
    workgroup_bytes: u32,
}

/// Numbers of vendors, as the drivers report them: Mesa's driver for Apple has Mesa's.
const OF_NVIDIA: u32 = 0x10DE;
const OF_INTEL: u32 = 0x8086;
const OF_MESA: u32 = 0x1_0005;
const OF_AMD: u32 = 0x1002;

pub const GPUS: [VendorGpu; 6] = [
    VendorGpu {
        name: "ga102",
        title: "RTX 30",
        names: NVIDIA,
        vendor: OF_NVIDIA,
        device: "NVIDIA GeForce RTX 3090 (NVK GA102)",
        workgroup_bytes: 48 * 1024,
    },
    VendorGpu {
        name: "ad102",
        title: "RTX 40",
        names: NVIDIA,
        vendor: OF_NVIDIA,
        device: "NVIDIA GeForce RTX 4090 (NVK AD102)",
        workgroup_bytes: 48 * 1024,
    },
    VendorGpu {
        name: "dg2",
        title: "Arc A",
        names: INTEL,
        vendor: OF_INTEL,
        device: "Intel(R) Arc(tm) A770 Graphics (DG2)",
        workgroup_bytes: 48 * 1024,
    },
    VendorGpu {
        name: "bmg",
        title: "Arc B",
        names: INTEL,
        vendor: OF_INTEL,
        device: "Intel(R) Arc(tm) B580 Graphics (BMG G21)",
        workgroup_bytes: 48 * 1024,
    },
    VendorGpu {
        name: "m1",
        title: "M1",
        names: APPLE,
        vendor: OF_MESA,
        device: "Apple M1 (G13G B1)",
        workgroup_bytes: 32 * 1024,
    },
    VendorGpu {
        name: "navi31",
        title: "RX 7900",
        names: AMD,
        vendor: OF_AMD,
        device: "AMD Radeon RX 7900 XTX (RADV NAVI31)",
        workgroup_bytes: 64 * 1024,
    },
];

/// Workgroup memory under DirectX 12, whatever the GPU has.
const DIRECTX_BYTES: u32 = 32 * 1024;

impl VendorGpu {
    /// Returns what the drivers of the GPU offer under Vulkan or Metal, and under DirectX 12.
    fn capabilities(&self) -> [Caps; 2] {
        [self.workgroup_bytes, self.workgroup_bytes.min(DIRECTX_BYTES)].map(|workgroup_bytes| {
            Caps {
                class: DeviceClass::Hardware,
                workgroup_bytes,
                registers: registers(self.vendor, self.device),
                ..Caps::EVERY
            }
        })
    }
}

/// Outcome of a compiler for a kernel.
#[derive(Debug)]
pub struct Made {
    pub milliseconds: f64,
    figures: BTreeMap<String, u64>,
    pub hot_loop: HotLoop,
}

impl Made {
    pub fn figure(&self, name: &str) -> u64 {
        // Another version may have other names; a figure that is missing must not pass for a good
        // one.
        *self.figures.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", self.figures))
    }

    /// Returns accesses and bytes of memory in place of registers: zeros if registers suffice.
    pub fn spilled(&self, names: &FigureNames) -> (u64, u64) {
        let accesses = names.spills.iter().map(|name| self.figure(name)).sum();
        (accesses, self.figure(names.scratch))
    }
}

/// A kernel by a name, and its number in [`Survey::kernels`].
pub struct NamedKernel {
    pub name: String,
    pub number: usize,
}

/// A GPU, what it takes and what its compiler made of all kernels.
pub struct Surveyed {
    pub gpu: &'static VendorGpu,
    /// Kernels of a step of GPT-2 124M.
    pub step: Vec<NamedKernel>,
    /// Kernels of all static choices.
    pub choices: Vec<NamedKernel>,
    /// By the number of a kernel.
    pub made: Vec<Made>,
}

impl Surveyed {
    /// Returns kernels that the static choice takes, and that spill: a line for all of one name.
    fn violations(&self) -> Vec<String> {
        let mut by_name: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for NamedKernel { name, number } in self.step.iter().chain(&self.choices) {
            let numbers = by_name.entry(name).or_default();
            if self.spilled(*number) > (0, 0) && !numbers.contains(number) {
                numbers.push(*number);
            }
        }
        let mut found = Vec::new();
        for (name, numbers) in by_name {
            let Some(worst) = numbers.iter().max_by_key(|number| self.spilled(**number)) else {
                continue;
            };
            let (accesses, bytes) = self.spilled(*worst);
            found.push(format!(
                "{}: {name}: {accesses} spills and fills, {bytes} bytes (kernel {worst:04}, the \
                 worst of {})",
                self.gpu.name,
                numbers.len()
            ));
        }
        found
    }

    fn spilled(&self, number: usize) -> (u64, u64) {
        self.made[number].spilled(&self.gpu.names)
    }
}

/// All kernels for hardware, and what became of them on every GPU.
pub struct Survey {
    /// Modules with all constants in use.
    pub modules: Vec<NamedKernel>,
    pub gpus: Vec<Surveyed>,
}

/// Kernels in SPIR-V, each once.
#[derive(Default)]
struct Collection {
    kernels: Vec<Kernel>,
    numbers: HashMap<Vec<u32>, usize>,
}

impl Collection {
    fn add(&mut self, kernels: Vec<Kernel>) -> Vec<NamedKernel> {
        kernels.into_iter().map(|kernel| self.listed(kernel)).collect()
    }

    fn listed(&mut self, kernel: Kernel) -> NamedKernel {
        let name = kernel.title();
        let number = *self.numbers.entry(kernel.words.clone()).or_insert_with(|| {
            self.kernels.push(kernel);
            self.kernels.len() - 1
        });
        NamedKernel { name, number }
    }
}

/// Returns the name of a kernel's files.
fn stem(number: usize, kernel: &Kernel) -> String {
    format!("{number:04}@{}", kernel.entry_point)
}

/// Makes the kernels, compiles them for every GPU with the program of this directory, and leaves
/// them and the assembly in the directory `work`. The error says what failed.
fn survey(directory: &Path, work: &Path) -> Result<Survey, String> {
    let demanding = demanding_modules().into_iter().map(|(name, text, _)| (name, text));
    let mut of_hardware = kernels(modules().into_iter().chain(demanding).collect());
    of_hardware.retain(|kernel| !is_of_software(&kernel.name));
    let mut collection = Collection::default();
    let modules = collection.add(of_hardware);
    let plan = roofline::plan();
    let mut taken = Vec::new();
    for gpu in &GPUS {
        let step =
            collection.add(kernels_by_entry(roofline::modules(&plan, &gpu.capabilities()[0])));
        let mut choices = Vec::new();
        for caps in gpu.capabilities() {
            choices.extend(collection.add(kernels_by_entry(choices::modules(&caps))));
        }
        taken.push((gpu, step, choices));
    }
    let kernels = collection.kernels;
    write_kernels(&work.join("kernels"), &kernels).map_err(|why| why.to_string())?;
    let compile = |gpu| compiled(directory, work, gpu, &kernels);
    let made: Vec<_> = thread::scope(|scope| {
        let threads = GPUS.each_ref().map(|gpu| scope.spawn(move || compile(gpu)));
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    });
    let mut gpus = Vec::new();
    for ((gpu, step, choices), made) in taken.into_iter().zip(made) {
        gpus.push(Surveyed { gpu, step, choices, made: made? });
    }
    Ok(Survey { modules, gpus })
}

/// Writes `NUMBER@ENTRY.spv` of each kernel, and `index.tsv`: number, entry point and name.
fn write_kernels(directory: &Path, kernels: &[Kernel]) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let mut index = String::new();
    for (number, kernel) in kernels.iter().enumerate() {
        let bytes: Vec<u8> = kernel.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        fs::write(directory.join(format!("{}.spv", stem(number, kernel))), bytes)?;
        index += &format!("{number:04}\t{}\t{}\n", kernel.entry_point, kernel.title());
    }
    fs::write(directory.join("index.tsv"), index)
}

/// Compiles all kernels for a GPU.
fn compiled(
    directory: &Path,
    work: &Path,
    gpu: &VendorGpu,
    kernels: &[Kernel],
) -> Result<Vec<Made>, String> {
    let (gpu, assembly) = (gpu.name, work.join(gpu.name));
    let failed = |why: io::Error| format!("compile for {gpu}: {why}");
    fs::create_dir_all(&assembly).map_err(failed)?;
    let mut program = Command::new(directory.join("compile"));
    let ran = program.arg(gpu).arg(work.join("kernels")).arg(&assembly).output().map_err(failed)?;
    let table = String::from_utf8_lossy(&ran.stdout);
    fs::write(work.join(format!("{gpu}.tsv")), table.as_bytes()).map_err(failed)?;
    if !ran.status.success() {
        let why = String::from_utf8_lossy(&ran.stderr);
        return Err(format!("compile for {gpu} ended with {}: {}", ran.status, why.trim()));
    }
    eprintln!("compiled for {gpu}");
    let mut rows = parse(&table).map_err(|why| format!("{gpu}: {why}"))?;
    let mut all = Vec::new();
    for (number, kernel) in kernels.iter().enumerate() {
        let stem = stem(number, kernel);
        let row = rows.remove(&stem);
        let made = row.ok_or_else(|| format!("{gpu}: no line for {stem}, {}", kernel.title()))?;
        let text = fs::read(assembly.join(format!("{stem}.0.txt"))).map_err(failed)?;
        let hot_loop = HotLoop::of(last_section(&String::from_utf8_lossy(&text)));
        all.push(Made { hot_loop, ..made });
    }
    Ok(all)
}

/// Reads the lines that the program printed, by `NAME@ENTRY`, without hot loops. A kernel that was
/// not compiled is an error.
fn parse(table: &str) -> Result<HashMap<String, Made>, String> {
    let mut rows = HashMap::new();
    for line in table.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        let &[name, entry_point, milliseconds, figures] = fields.as_slice() else {
            return Err(format!("four fields between tabs are expected: {line}"));
        };
        if figures.starts_with("FAILED") {
            return Err(format!("{name}@{entry_point}: {figures}"));
        }
        let milliseconds =
            milliseconds.parse().map_err(|_| format!("no milliseconds in {line}"))?;
        // Hashes, names and fractions are not figures of this table.
        let figure = |one: &str| {
            let (name, value) = one.split_once('=')?;
            Some((name.to_string(), value.parse().ok()?))
        };
        let figures = figures.split("; ").filter_map(figure).collect();
        let made = Made { milliseconds, figures, hot_loop: HotLoop::default() };
        rows.insert(format!("{name}@{entry_point}"), made);
    }
    Ok(rows)
}

/// Returns the last section of what a driver shows of its code.
fn last_section(text: &str) -> &str {
    let start = text.rfind("\n--- ").map_or(0, |at| at + 1);
    text[start..].split_once('\n').map_or("", |(_, section)| section)
}

/// Asks all compilers, writes the table, and fails if a kernel breaks the rule.
fn keep_the_rule(directory: &Path) {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vendors");
    let _ = fs::remove_dir_all(&work);
    let survey = survey(directory, &work).unwrap_or_else(|why| panic!("{why}"));
    let table = env::var_os(TABLE).unwrap_or_else(|| panic!("{TABLE} is not set"));
    fs::write(table, vendors_table::of(&survey)).unwrap();
    println!("kernels, their numbers and their assembly: {}", work.display());
    let violations: Vec<String> = survey.gpus.iter().flat_map(Surveyed::violations).collect();
    assert!(
        violations.is_empty(),
        "{} static choices spill:\n{}",
        violations.len(),
        violations.join("\n")
    );
}

/// Lines of drivers of NVIDIA and of Intel, the second of a kernel that spills.
const LINES: &str = "\
    0007\tshared_tile\t96.5\texecutable=compute; subgroup=32; Instruction count=2610; \
    Max warps/SM=16; Spills to memory=0; Fills from memory=0; Spills to reg=2; \
    Number of GPRs=112; SLM size=0\n\
    0008\tgrad_kv\t470.1\texecutable=compute; subgroup=8; Instructions=6278; Spills=132; \
    Fills=171; Scratch Memory Size=8192; Max live registers=228; \
    Source hash=9563853687824927292\n";

#[test]
fn lines_of_drivers_are_read() {
    let rows = parse(LINES).unwrap();
    assert_eq!(rows.len(), 2);
    let made = &rows["0008@grad_kv"];
    assert_eq!((made.milliseconds, made.figure("Instructions")), (470.1, 6278));
    assert!(!made.figures.contains_key("executable"));
    let failed = parse("0009\tmain\t1.0\tFAILED ERROR_UNKNOWN").unwrap_err();
    assert_eq!(failed, "0009@main: FAILED ERROR_UNKNOWN");
    assert!(parse("0009\tmain\t1.0").unwrap_err().contains("four fields"));
    assert!(parse("0009\tmain\tsoon\tSpills=0").unwrap_err().contains("milliseconds"));
    let text = "--- NIR\nblock b0:\n--- NAK assembly\nblock 0 {\n}\n";
    assert_eq!(last_section(text), "block 0 {\n}\n");
    assert_eq!(last_section("--- AGX\nblock0 {\n"), "block0 {\n");
}

#[test]
fn a_static_choice_that_spills_is_a_violation() {
    // `./x compiler --all-vendors DIR` runs this test alone.
    if let Some(directory) = env::var_os(DIRECTORY) {
        return keep_the_rule(Path::new(&directory));
    }
    let mut rows = parse(LINES).unwrap();
    let mut surveyed = |gpu, stem: &str| {
        let made = vec![rows.remove(stem).unwrap()];
        let listed = || vec![NamedKernel { name: "attention_tiles_64 grad_kv".into(), number: 0 }];
        Surveyed { gpu, step: listed(), choices: listed(), made }
    };
    assert_eq!(surveyed(&GPUS[0], "0007@shared_tile").violations(), Vec::<String>::new());
    let on_intel = surveyed(&GPUS[2], "0008@grad_kv");
    let expected = "dg2: attention_tiles_64 grad_kv: 303 spills and fills, 8192 bytes (kernel \
                    0000, the worst of 1)";
    assert_eq!(on_intel.violations(), [expected]);
    let not_taken = Surveyed { step: Vec::new(), choices: Vec::new(), ..on_intel };
    assert_eq!(not_taken.violations(), Vec::<String>::new());
}

#[test]
#[should_panic(expected = "no Spills in")]
fn a_figure_that_is_missing_is_no_good_one() {
    let made = Made { milliseconds: 0.0, figures: BTreeMap::new(), hot_loop: HotLoop::default() };
    made.spilled(&INTEL);
}
