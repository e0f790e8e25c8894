//! Benchmark of plans: the step that `potluck plan` predicts for each layout of some models and
//! devices, beside the step that `potluck train` takes with the flags of that layout.
//!
//!     cargo bench --bench plans -- [--repeats N] [--layouts N] [--only NAME,..] [--out FILE]
//!
//! Repeats of the layouts of a setting take turns, so that a change of the machine's speed meets
//! all of them alike. The error is the distance of the prediction to the nearest repeat: what is
//! beyond the spread of the measurement. A plan is as good as its chosen layout, by measurement,
//! beside the best measured one.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::Command;

use potluck_bench::System;
use potluck_core::arithmetic::median;
use serde_json::{Value, json};

/// Steps of a run, and those at its beginning that are not counted.
const STEPS: usize = 25;
const WARM_UP: usize = 5;

/// Model of a setting: its name, and arguments of `potluck train`.
struct Model {
    name: &'static str,
    arguments: &'static str,
}

const MODELS: [Model; 5] = [
    Model {
        name: "gpt",
        arguments: "--set model.width=128 --set model.layers=4 --set model.heads=4 \
                    --set model.context=64 --batch 12 \
                    --set train.sample_tokens=0",
    },
    Model {
        name: "gpt-wide",
        arguments: "--set model.width=256 --set model.layers=6 --set model.heads=8 \
                    --set model.context=128 --batch 8 \
                    --set train.sample_tokens=0",
    },
    Model {
        name: "gpt-small",
        arguments: "--set model.width=64 --set model.layers=2 --set model.heads=2 \
                    --set model.context=32 --batch 32 \
                    --set train.sample_tokens=0",
    },
    Model {
        name: "llama",
        arguments: "--set model.kind=llama --set model.width=128 --set model.layers=4 \
                    --set model.heads=4 --set model.context=64 --batch 16 \
                    --set train.sample_tokens=0",
    },
    Model { name: "lenet", arguments: "--data pictures --set model.kind=cnn --batch 64" },
];

/// Devices of a setting: their name, selector, cores as `taskset` lists them, and threads of each
/// software adapter.
struct Devices {
    name: &'static str,
    selector: &'static str,
    cores: &'static str,
    adapter_threads: u32,
}

const DEVICES: [Devices; 3] = [
    Devices { name: "cpu", selector: "cpu", cores: "0,1", adapter_threads: 0 },
    Devices { name: "cpu*2", selector: "cpu*2", cores: "0,1", adapter_threads: 0 },
    Devices {
        name: "llvmpipe+cpu",
        selector: "vulkan:llvmpipe,cpu",
        cores: "0,1",
        adapter_threads: 1,
    },
];

/// What is asked for on the command line.
struct Options {
    repeats: usize,
    layouts: usize,
    only: Option<Vec<String>>,
    out: Option<String>,
}

impl Options {
    fn parsed() -> Result<Self, Box<dyn Error>> {
        let mut options = Self { repeats: 5, layouts: 6, only: None, out: None };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            match word.as_str() {
                // Cargo adds it.
                "--bench" => {}
                "--repeats" => options.repeats = words.next().ok_or("--repeats N")?.parse()?,
                "--layouts" => options.layouts = words.next().ok_or("--layouts N")?.parse()?,
                "--only" => {
                    let names = words.next().ok_or("--only NAME,..")?;
                    options.only = Some(names.split(',').map(str::to_owned).collect());
                }
                "--out" => options.out = words.next(),
                other => return Err(format!("unknown argument {other}").into()),
            }
        }
        Ok(options)
    }
}

/// Layout with its predicted step and the measured ones, in milliseconds.
struct Layout {
    name: String,
    flags: String,
    predicted: f64,
    measured: Vec<f64>,
}

impl Layout {
    fn median(&self) -> f64 {
        median(&self.measured)
    }

    /// Relative error of the prediction beyond the spread of the measurement.
    fn error(&self) -> f64 {
        let fastest = self.measured.iter().copied().fold(f64::INFINITY, f64::min);
        let slowest = self.measured.iter().copied().fold(0.0, f64::max);
        let nearest = self.predicted.clamp(fastest, slowest);
        (self.predicted - nearest).abs() / self.median()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parsed()?;
    let here = System::here();
    println!("{}, {} cores; medians of {} repeats", here.cpu, here.cores, options.repeats);
    println!(
        "{:20} {:34} {:>8}  {:>8}  {:>6}  error",
        "setting", "layout", "predicted", "ms", "+-"
    );
    let mut errors = Vec::new();
    let mut losses = Vec::new();
    let mut rows = Vec::new();
    for model in &MODELS {
        for devices in &DEVICES {
            let name = format!("{}@{}", model.name, devices.name);
            let is_asked = |names: &Vec<String>| {
                names.iter().any(|one| *one == name || one == model.name || one == devices.name)
            };
            if options.only.as_ref().is_some_and(|names| !is_asked(names)) {
                continue;
            }
            let layouts = measured_setting(model, devices, &options)?;
            let best = layouts.iter().map(Layout::median).fold(f64::INFINITY, f64::min);
            losses.push(layouts[0].median() / best - 1.0);
            for layout in &layouts {
                errors.push(layout.error());
                rows.push(row(&name, layout));
            }
            println!(
                "{name}: the chosen layout takes {:.3} of the best",
                layouts[0].median() / best
            );
        }
    }
    errors.sort_by(f64::total_cmp);
    let at = |part: f64| errors[((errors.len() - 1) as f64 * part).round() as usize];
    let good = losses.iter().filter(|loss| **loss <= 0.07).count();
    println!(
        "{} layouts: error beyond the spread, median {:.1} %, 90th percentile {:.1} %; {good} of \
         {} choices within 7 % of the best",
        errors.len(),
        100.0 * at(0.5),
        100.0 * at(0.9),
        losses.len()
    );
    if let Some(path) = &options.out {
        let report = json!({
            "processor": format!("{}, {} cores", here.cpu, here.cores),
            "repeats": options.repeats,
            "layouts": rows,
        });
        fs::write(path, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    Ok(())
}

/// The layouts of a setting with their steps, the chosen one first.
fn measured_setting(
    model: &Model,
    devices: &Devices,
    options: &Options,
) -> Result<Vec<Layout>, Box<dyn Error>> {
    let place = tempfile::tempdir()?;
    write_pictures(&place.path().join("pictures"))?;
    let output = program(devices, place.path())
        .arg("plan")
        .args(model.arguments.split_whitespace())
        .args(["--devices", devices.selector, "--json", "--retune"])
        .output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    let plan: Value = serde_json::from_slice(&output.stdout)?;
    let mut layouts = vec![layout(&plan["chosen"])];
    // Of each kind of layout the fastest first, and then the rest.
    let others: Vec<Layout> =
        plan["others"].as_array().ok_or("no others")?.iter().map(layout).collect();
    let mut later = Vec::new();
    for other in others {
        let is_new = layouts.iter().all(|one| one.name != other.name);
        if is_new {
            layouts.push(other);
        } else {
            later.push(other);
        }
    }
    layouts.extend(later);
    layouts.retain(|one| !one.flags.is_empty());
    layouts.truncate(options.layouts);
    for repeat in 0..options.repeats {
        for (index, layout) in layouts.iter_mut().enumerate() {
            let run = place.path().join(format!("run-{repeat}-{index}"));
            layout.measured.push(step_ms(model, devices, layout, &run)?);
        }
    }
    for layout in &layouts {
        let fastest = layout.measured.iter().copied().fold(f64::INFINITY, f64::min);
        let slowest = layout.measured.iter().copied().fold(0.0, f64::max);
        println!(
            "{:20} {:34} {:8.2}  {:8.2}  {:4.1} %  {:5.1} %",
            format!("{}@{}", model.name, devices.name),
            layout.name,
            layout.predicted,
            layout.median(),
            50.0 * (slowest - fastest) / layout.median(),
            100.0 * layout.error()
        );
    }
    Ok(layouts)
}

fn layout(candidate: &Value) -> Layout {
    let text = |key: &str| candidate[key].as_str().unwrap_or_default().to_string();
    Layout {
        name: format!("{} m{}", text("layout"), candidate["micro_batch"]),
        flags: text("flags"),
        predicted: candidate["step_ms"].as_f64().unwrap_or(f64::NAN),
        measured: Vec::new(),
    }
}

fn row(setting: &str, layout: &Layout) -> Value {
    json!({
        "setting": setting,
        "layout": layout.name,
        "predicted_ms": layout.predicted,
        "measured_ms": layout.measured,
        "error": layout.error(),
    })
}

/// Median milliseconds of the steps of a run.
fn step_ms(
    model: &Model,
    devices: &Devices,
    layout: &Layout,
    run: &Path,
) -> Result<f64, Box<dyn Error>> {
    let place = run.parent().ok_or("a run has a directory above it")?;
    // Flags are quoted for a shell, and none of their values has a space after this.
    let flags = layout.flags.replace(", ", ",").replace('\'', "");
    let ended = program(devices, place)
        .arg("train")
        .args(model.arguments.split_whitespace())
        .args(flags.split_whitespace())
        .args(["--quiet", "--eval-every", "0"])
        .args(["--set", "train.checkpoint_every=0", "--steps", &STEPS.to_string(), "--out"])
        .arg(run)
        .output()?;
    if !ended.status.success() {
        let why = String::from_utf8_lossy(&ended.stderr).into_owned();
        return Err(format!("{}: {why}", layout.flags).into());
    }
    let mut steps = Vec::new();
    for line in fs::read_to_string(run.join("metrics.jsonl"))?.lines() {
        let line: Value = serde_json::from_str(line)?;
        // Of steps only, not of evaluations.
        if line["grad_norm"].is_number() {
            steps.extend(line["ms"].as_f64());
        }
    }
    fs::remove_dir_all(run)?;
    Ok(median(&steps[WARM_UP.min(steps.len().saturating_sub(1))..]))
}

/// The program on the cores of a setting, where the system has `taskset`.
fn program(devices: &Devices, place: &Path) -> Command {
    let path = env!("CARGO_BIN_EXE_potluck");
    let has_taskset = Command::new("taskset").arg("--version").output().is_ok();
    let mut command = if has_taskset {
        let mut command = Command::new("taskset");
        command.args(["-c", devices.cores, path]);
        command
    } else {
        Command::new(path)
    };
    command.current_dir(place).env("LP_NUM_THREADS", devices.adapter_threads.to_string());
    command
}

/// Writes 256 pictures of 28 x 28 bytes with their digits, as MNIST's files have them.
fn write_pictures(directory: &Path) -> Result<(), Box<dyn Error>> {
    const COUNT: u32 = 256;
    const SIDE: u32 = 28;
    fs::create_dir_all(directory)?;
    for split in ["train", "t10k"] {
        let mut images = vec![0, 0, 8, 3];
        let mut labels = vec![0, 0, 8, 1];
        labels.extend(COUNT.to_be_bytes());
        for length in [COUNT, SIDE, SIDE] {
            images.extend(length.to_be_bytes());
        }
        for picture in 0..COUNT {
            labels.push((picture % 10) as u8);
            for pixel in 0..SIDE * SIDE {
                images.push((pixel * (1 + picture % 10) % 251) as u8);
            }
        }
        fs::write(directory.join(format!("{split}-images-idx3-ubyte")), images)?;
        fs::write(directory.join(format!("{split}-labels-idx1-ubyte")), labels)?;
    }
    Ok(())
}
