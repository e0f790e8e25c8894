//! Benchmark of the ways to train: one device, several unlike ones, pipelines, tensor groups and
//! nodes, each by the program as a user starts it, and PyTorch on the same model if `python3` has
//! it.
//!
//!     cargo bench --bench ways -- [--record] [--repeats N] [--only NAME,..] [--peer PEER]..
//!     cargo bench --bench ways -- --table
//!
//! `--record` writes `benches/results/ways-COMMIT.json`, and `--table` puts the newest of these
//! into README. Repeats take turns, so that a change of the machine's speed meets all ways alike.
//! A peer that this bench cannot start, such as burn, is given with its measured rate, as
//! `NAME@WAY=TOKENS_PER_S`.

#[path = "../tests/common/ways.rs"]
mod ways;

use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use potluck_bench::System;
use ways::{MARKERS, MeasuredPeer, MeasuredWay, WAYS, WaysReport, newest_report, table};

/// Steps of a run, and those at its beginning that are not counted.
const STEPS: usize = 40;
const WARM_UP: usize = 10;

/// The model of nanoGPT's recipe for a CPU, on the built-in corpus.
const MODEL: [&str; 16] = [
    "--set",
    "model.width=128",
    "--set",
    "model.bias=false",
    "--set",
    "model.layers=4",
    "--set",
    "model.heads=4",
    "--set",
    "model.context=64",
    "--batch",
    "12",
    "--eval-every",
    "0",
    "--set",
    "train.sample_tokens=0",
];

/// Batch, layers, heads, width, context, vocabulary and steps, for PyTorch.
const PEER_SIZES: [&str; 7] = ["12", "4", "4", "128", "64", "65", "60"];
const PEER_SCRIPT: &str = include_str!("../src/cli/hardware/peer.py");

const PORT: u16 = 7797;

/// How a way is started.
struct Start {
    /// Name of the [`Way`].
    name: &'static str,
    /// Arguments of `potluck train`.
    arguments: &'static [&'static str],
    /// Cores of the process, as `taskset` lists them.
    cores: &'static str,
    /// Threads of each software adapter.
    adapter_threads: u32,
}

/// A start for each of [`WAYS`]; that of nodes is joined by a second process.
const STARTS: [Start; WAYS.len()] = [
    Start { name: "cpu", arguments: &["--devices", "cpu"], cores: "0,1", adapter_threads: 0 },
    Start {
        name: "llvmpipe-2",
        arguments: &["--devices", "vulkan:llvmpipe"],
        cores: "0,1",
        adapter_threads: 2,
    },
    Start {
        name: "llvmpipe",
        arguments: &["--devices", "vulkan:llvmpipe", "--batch", LARGE_BATCH],
        cores: "0,1",
        adapter_threads: 1,
    },
    Start {
        name: "swiftshader",
        arguments: &["--devices", "swiftshader", "--batch", LARGE_BATCH],
        cores: "0,1",
        adapter_threads: 1,
    },
    Start {
        name: "data",
        arguments: &["--devices", "vulkan:llvmpipe,swiftshader", "--batch", LARGE_BATCH],
        cores: "0,1",
        adapter_threads: 1,
    },
    Start { name: "cpu-1", arguments: &["--devices", "cpu"], cores: "0", adapter_threads: 0 },
    Start {
        name: "data-cpu",
        arguments: &["--devices", "cpu*2", "--set", "parallel.shares=6,6"],
        cores: "0,1",
        adapter_threads: 0,
    },
    Start {
        name: "pipeline",
        arguments: &["--devices", "cpu*2", "--pipeline", "2", "--micro-batch", "3"],
        cores: "0,1",
        adapter_threads: 0,
    },
    Start {
        name: "tensor",
        arguments: &["--devices", "cpu*2", "--tensor", "2"],
        cores: "0,1",
        adapter_threads: 0,
    },
    Start {
        name: NODES,
        arguments: &["--devices", "cpu", "--set", "parallel.shares=6,6", "--nodes", "2"],
        cores: "0",
        adapter_threads: 0,
    },
];

/// Samples of a step of devices of unlike speed, so that both have some at a time.
const LARGE_BATCH: &str = "48";

/// The way with a second process.
const NODES: &str = "nodes";

/// What is asked for on the command line.
struct Options {
    is_recorded: bool,
    is_table: bool,
    repeats: usize,
    only: Option<Vec<String>>,
    peers: Vec<MeasuredPeer>,
}

impl Options {
    fn parsed() -> Result<Self, Box<dyn Error>> {
        let mut options =
            Self { is_recorded: false, is_table: false, repeats: 3, only: None, peers: Vec::new() };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            match word.as_str() {
                // Cargo adds it.
                "--bench" => {}
                "--record" => options.is_recorded = true,
                "--table" => options.is_table = true,
                "--repeats" => options.repeats = words.next().ok_or("--repeats N")?.parse()?,
                "--only" => {
                    let names = words.next().ok_or("--only NAME,..")?;
                    options.only = Some(names.split(',').map(str::to_owned).collect());
                }
                "--peer" => options.peers.push(peer(&words.next().ok_or("--peer NAME@WAY=RATE")?)?),
                other => return Err(format!("unknown argument {other}").into()),
            }
        }
        Ok(options)
    }
}

fn peer(text: &str) -> Result<MeasuredPeer, Box<dyn Error>> {
    let (name, rest) = text.split_once('@').ok_or("--peer expects NAME@WAY=TOKENS_PER_S")?;
    let (way, rate) = rest.split_once('=').ok_or("--peer expects NAME@WAY=TOKENS_PER_S")?;
    Ok(MeasuredPeer { name: name.into(), beside: way.into(), tokens_per_s: rate.parse()? })
}

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut options = Options::parsed()?;
    if options.is_table {
        return write_table(root);
    }
    let mut rates: Vec<(&Start, Vec<f64>)> = Vec::new();
    for way in &STARTS {
        if options.only.as_ref().is_none_or(|names| names.iter().any(|name| name == way.name)) {
            rates.push((way, Vec::new()));
        }
    }
    for _ in 0..options.repeats {
        for (way, found) in &mut rates {
            let rate = measured(way)?;
            println!("{:12} {rate:10.0} tokens/s", way.name);
            found.push(rate);
        }
    }
    options.peers.extend(pytorch());
    let mut ways = Vec::new();
    for (way, mut found) in rates {
        found.sort_by(f64::total_cmp);
        let median = found[found.len() / 2];
        let spread = (found[found.len() - 1] - found[0]) / 2.0 / median;
        ways.push(MeasuredWay { name: way.name.into(), tokens_per_s: median, spread });
    }
    let here = System::here();
    let report = WaysReport {
        commit: output_of(Command::new("git").args(["rev-parse", "--short=8", "HEAD"]))?,
        date: output_of(Command::new("date").arg("+%Y-%m-%d"))?,
        processor: format!("{}, {} cores", here.cpu, here.cores),
        ways,
        peers: options.peers,
    };
    println!("\n{}", table(&report));
    if options.is_recorded {
        let path = root.join(format!("benches/results/ways-{}.json", report.commit));
        fs::write(&path, serde_json::to_string_pretty(&report)? + "\n")?;
        println!("\nwritten to {}", path.display());
    }
    Ok(())
}

/// Puts the newest results into README, between the markers.
fn write_table(root: &Path) -> Result<(), Box<dyn Error>> {
    let report = newest_report(root).ok_or("benches/results has no ways-COMMIT.json")?;
    let path = root.join("README.md");
    let text = fs::read_to_string(&path)?;
    let [begin, end] = MARKERS;
    let (before, rest) = text.split_once(begin).ok_or("README.md has no place for the table")?;
    let (_, after) = rest.split_once(end).ok_or("README.md has no end of the table")?;
    fs::write(path, format!("{before}{begin}\n{}\n{end}{after}", table(&report)))?;
    Ok(())
}

/// Tokens per second of the median step of a run.
fn measured(way: &Start) -> Result<f64, Box<dyn Error>> {
    let place = tempfile::tempdir()?;
    let run = place.path().join("run");
    // SwiftShader reads it in the directory of the process; 0 is a thread per core.
    let threads = format!("[Processor]\nThreadCount={}\n", way.adapter_threads);
    fs::write(place.path().join("SwiftShader.ini"), threads)?;
    let mut training = program(way.cores);
    training
        .current_dir(place.path())
        .arg("train")
        .args(MODEL)
        .args(way.arguments)
        .arg("--out")
        .arg(&run);
    training.args(["--steps", &STEPS.to_string()]);
    training.env("LP_NUM_THREADS", way.adapter_threads.to_string());
    let address = format!("127.0.0.1:{PORT}");
    let code = place.path().join("code");
    let mut joining: Option<Child> = None;
    if way.name == NODES {
        output_of(program("0,1").args(["secret", "--out"]).arg(&code))?;
        training.args(["--listen", &address, "--secret-file"]).arg(&code);
        let mut joiner = program("1");
        joiner.args(["join", &address, "--wait", "30", "--devices", "cpu", "--secret-file"]);
        joining = Some(joiner.arg(&code).stderr(Stdio::null()).stdout(Stdio::null()).spawn()?);
    }
    let ended = training.output()?;
    if let Some(mut joiner) = joining {
        joiner.wait()?;
    }
    if !ended.status.success() {
        return Err(format!("{}: {}", way.name, String::from_utf8_lossy(&ended.stderr)).into());
    }
    let mut rates = Vec::new();
    for line in fs::read_to_string(run.join("metrics.jsonl"))?.lines() {
        let line: serde_json::Value = serde_json::from_str(line)?;
        if let Some(rate) = line["tokens_per_s"].as_f64() {
            rates.push(rate);
        }
    }
    let mut steady = rates.split_off(WARM_UP);
    steady.sort_by(f64::total_cmp);
    Ok(steady[steady.len() / 2])
}

/// The program on some cores, where the system has `taskset`.
fn program(cores: &str) -> Command {
    let path = env!("CARGO_BIN_EXE_potluck");
    let has_taskset = Command::new("taskset").arg("--version").output().is_ok();
    if has_taskset {
        let mut command = Command::new("taskset");
        command.args(["-c", cores, path]);
        command
    } else {
        Command::new(path)
    }
}

/// PyTorch's step of the same model, if `python3` or `POTLUCK_TORCH_PYTHON` has it.
fn pytorch() -> Option<MeasuredPeer> {
    let python = std::env::var("POTLUCK_TORCH_PYTHON").unwrap_or_else(|_| "python3".into());
    let output = Command::new(python).args(["-c", PEER_SCRIPT]).args(PEER_SIZES).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let found: serde_json::Value = serde_json::from_str(text.lines().last()?).ok()?;
    let version = found["torch"].as_str()?.split('+').next()?.to_owned();
    Some(MeasuredPeer {
        name: format!("PyTorch {version}"),
        beside: "cpu".into(),
        tokens_per_s: found["rows"][0]["tokens_per_s"].as_f64()?,
    })
}

fn output_of(command: &mut Command) -> Result<String, Box<dyn Error>> {
    let output = command.output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
