//! Everything that is to be known of this machine's graphics cards, in one folder: the kernel tests
//! on each of them, certification, the benchmark suite, a training curve beside that of the CPU
//! device, and one page that sums it up. Each part is a process of its own, so that a driver that
//! fails in one of them leaves the others.
//!
//!     ./x hardware [OUT] [PART-OF-AN-ADAPTER'S-NAME]

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use potluck::bench::Report;
use potluck::device::{Adapter, AdapterKind, list_adapters};

const PROGRAM: &str = env!("CARGO_BIN_EXE_potluck");
/// Steps of the training curve, on the built-in text.
const STEPS: u64 = 200;
/// Figures of the benchmark suite that the summary shows.
const FIGURES: [&str; 8] = [
    "peak.flops",
    "memory.triad",
    "matmul.square_2048",
    "matmul.gpt2_mlp_up",
    "matmul.gpt2_head_dx",
    "matmul.gpt2_head_padded_dx",
    "step.gpt_small_tokens",
    "step.gpt2_tokens",
];

fn main() -> ExitCode {
    // Cargo passes --bench to every benchmark.
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let out = PathBuf::from(words.first().map_or("hardware-report", |word| word.as_str()));
    let wanted = words.get(1).map(|part| part.to_lowercase());
    let is_wanted = |adapter: &&Adapter| match &wanted {
        Some(part) => adapter.name.to_lowercase().contains(part),
        None => adapter.kind != AdapterKind::Software && adapter.merged_into.is_none(),
    };
    let listed = list_adapters();
    // Indices are selectors; a name may have a comma, which separates devices.
    let wanted = listed.iter().enumerate().filter(|(_, adapter)| is_wanted(adapter));
    let adapters: Vec<(usize, Adapter)> = wanted.map(|(at, one)| (at, one.clone())).collect();
    if adapters.is_empty() {
        eprintln!("no graphics card was found; potluck devices lists what there is");
        return ExitCode::FAILURE;
    }
    match report(&out, &adapters) {
        Ok(page) => {
            println!("{page}\nthe report is in {}", out.display());
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("{}: {why}", out.display());
            ExitCode::FAILURE
        }
    }
}

fn report(out: &Path, adapters: &[(usize, Adapter)]) -> std::io::Result<String> {
    fs::create_dir_all(out)?;
    let out = &fs::canonicalize(out)?;
    let cache = &out.join("cache");
    let cpu = train((out, cache), "cpu", "cpu")?;
    let mut page = format!(
        "# potluck {} on {} {}\n\nThe training curves are of {STEPS} steps of the default model; \
         a difference is that of a loss from the CPU device's at the same step.\n",
        env!("POTLUCK_BUILD").chars().take(12).collect::<String>(),
        std::env::consts::OS,
        std::env::consts::ARCH
    );
    for (number, adapter) in adapters {
        let (selector, Adapter { name, api, kind, driver, .. }) = (number.to_string(), adapter);
        let part = out.join(format!("adapter-{number}"));
        fs::create_dir_all(&part)?;
        let _ = writeln!(page, "\n## {name} on {api}\n\n{kind}, {driver}\n");
        let begins = name.split(',').next().unwrap_or_default();
        for (what, words) in tests() {
            let command = cargo_tests(&format!("{api}:{begins}"), &words);
            let line = tested(&logged(command, &part.join(format!("{what}.log")))?);
            let _ = writeln!(page, "- tests of {what}: {line}");
        }
        let certify = ["devices", "--certify", &selector].map(String::from);
        let ended = logged(program((&part, cache), &certify), &part.join("certify.log"))?;
        let last = ended.text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
        let _ = writeln!(page, "- certification: {}", last.trim());
        let losses = train((&part, cache), &selector, "run")?;
        let _ = writeln!(page, "- training: {}", compared(&losses, &cpu));
        page += &benchmarks((&part, cache), &selector)?;
    }
    fs::write(out.join("SUMMARY.md"), &page)?;
    Ok(page)
}

/// Returns the tests that use adapters, with what cargo is given for each.
fn tests() -> [(&'static str, Vec<&'static str>); 2] {
    [
        ("kernels", vec!["--lib", "--", "kernels::", "autotune::", "exec::gpu::"]),
        ("plans", vec!["--test", "adapters"]),
    ]
}

fn cargo_tests(selector: &str, words: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let directory = env!("CARGO_MANIFEST_DIR");
    command.current_dir(directory).env("POTLUCK_TEST_ADAPTERS", selector).arg("test").args(words);
    command
}

/// Returns a command of the program in a directory. What other runs found out about the adapters is
/// not this report's, so it has a cache of its own.
fn program((directory, cache): (&Path, &Path), words: &[String]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.current_dir(directory).env("POTLUCK_CACHE", cache).args(words);
    command
}

/// A process that ended: all of its output, and its time.
struct Ended {
    text: String,
    seconds: f64,
    is_right: bool,
}

/// Runs a command whose output goes to a file.
fn logged(mut command: Command, log: &Path) -> std::io::Result<Ended> {
    eprintln!("{command:?}");
    let (file, started) = (File::create(log)?, Instant::now());
    let status = command.stdout(file.try_clone()?).stderr(file).status()?;
    let text = String::from_utf8_lossy(&fs::read(log)?).into_owned();
    Ok(Ended { text, seconds: started.elapsed().as_secs_f64(), is_right: status.success() })
}

/// Returns what libtest says at the end, or that it says nothing.
fn tested(ended: &Ended) -> String {
    let result = ended.text.lines().rfind(|line| line.starts_with("test result: "));
    let result = result.map_or("did not end", |line| &line["test result: ".len()..]);
    let counts: Vec<&str> = result.split(';').take(2).collect();
    format!("{} ({:.0} s)", counts.join(";"), ended.seconds)
}

/// Trains the default model on a device; returns its losses.
fn train(places: (&Path, &Path), device: &str, run: &str) -> std::io::Result<Vec<f64>> {
    let out = places.0;
    let line = format!(
        "train --steps {STEPS} --seed 1 --quiet --set train.sample_tokens=0 --out {run} --devices"
    );
    let mut words: Vec<String> = line.split(' ').map(String::from).collect();
    words.push(device.into());
    let _ = fs::remove_dir_all(out.join(run));
    logged(program(places, &words), &out.join(format!("{run}.log")))?;
    let record = fs::read_to_string(out.join(run).join("metrics.jsonl")).unwrap_or_default();
    let steps = record.lines().filter_map(|line| serde_json::from_str(line).ok());
    let loss = |event: serde_json::Value| event.get("loss").and_then(serde_json::Value::as_f64);
    Ok(steps.filter_map(loss).collect())
}

fn compared(losses: &[f64], cpu: &[f64]) -> String {
    if losses.len() != cpu.len() || losses.is_empty() {
        return format!("{} of {} steps; see its log", losses.len(), cpu.len());
    }
    let differences = losses.iter().zip(cpu).map(|(a, b)| (a - b).abs());
    let largest = differences.fold(0.0, f64::max);
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    format!("loss {first:.3} to {last:.3}, largest difference {largest:.2e}")
}

/// Runs the benchmark suite; returns the figures for the summary.
fn benchmarks(places: (&Path, &Path), selector: &str) -> std::io::Result<String> {
    let json = places.0.join("bench.json");
    let words = ["bench", "--full", "--devices", selector, "--json"].map(String::from);
    let words: Vec<String> = words.into_iter().chain([json.display().to_string()]).collect();
    let ended = logged(program(places, &words), &places.0.join("bench.log"))?;
    let report = fs::read_to_string(&json).ok().and_then(|text| Report::from_json(&text).ok());
    let Some(report) = report.filter(|_| ended.is_right) else {
        return Ok("- benchmarks: failed; see bench.log\n".into());
    };
    let mut text = String::new();
    let figures = report.devices.iter().flat_map(|device| &device.figures);
    for figure in figures.filter(|figure| FIGURES.contains(&figure.name.as_str())) {
        let share = figure.of_peak.map(|share| format!(", {:.0} % of its peak", 100.0 * share));
        let share = share.unwrap_or_default();
        let _ = writeln!(text, "- {}: {:.4} {}{share}", figure.name, figure.median, figure.unit);
    }
    Ok(text)
}
