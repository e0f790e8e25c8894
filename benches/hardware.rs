//! Everything that is to be known of this machine's graphics cards, in one folder: certification,
//! a training curve beside that of the CPU device, the benchmark suite, the kernel tests, and one
//! page that sums it up, written anew after each part. Each part is a process of its own with a
//! limit of time, so that a driver that fails in one of them leaves the others. The exit code is 1
//! if a part failed.
//!
//!     ./x hardware [OUT] [PART-OF-AN-ADAPTER'S-NAME]

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use potluck_bench::Report;
use potluck_kernels::device::{Adapter, AdapterKind, list_adapters};

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

/// The most tests that use an adapter at a time.
const TEST_THREADS_MAX: usize = 8;

/// The longest time of a part: of the build of the tests, and of any other.
const BUILD_S: u64 = 3600;
const PART_S: u64 = 1800;

const USAGE: &str = "usage: ./x hardware [OUT] [NAME]\n\n  \
    OUT   folder of the report (hardware-report)\n  \
    NAME  part of the name of the adapters to report on (all graphics cards)";

fn main() -> ExitCode {
    // Cargo passes --bench to every benchmark.
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    if words.len() > 2 || words.iter().any(|word| word.starts_with('-')) {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    }
    let out = PathBuf::from(words.first().map_or("hardware-report", |word| word.as_str()));
    let wanted = words.get(1).map(|part| part.to_lowercase());
    let is_wanted = |adapter: &&Adapter| match &wanted {
        Some(part) => adapter.name.to_lowercase().contains(part),
        None => adapter.kind != AdapterKind::Software && adapter.merged_into.is_none(),
    };
    let listed = list_adapters();
    if let (1, Some(name)) = (words.len(), adapter_meant(&out, &listed)) {
        eprintln!("{} is part of the name of {name}; name the folder before it\n{USAGE}", words[0]);
        return ExitCode::from(2);
    }
    // Indices are selectors; a name may have a comma, which separates devices.
    let wanted = listed.iter().enumerate().filter(|(_, adapter)| is_wanted(adapter));
    let adapters: Vec<(usize, Adapter)> = wanted.map(|(at, one)| (at, one.clone())).collect();
    if adapters.is_empty() {
        eprintln!("no graphics card was found; potluck devices lists what there is");
        return ExitCode::FAILURE;
    }
    match report(&out, &adapters) {
        Ok(page) => {
            println!("{}\nthe report is in {}", page.text, out.display());
            if page.has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
        }
        Err(why) => {
            eprintln!("{}: {why}", out.display());
            ExitCode::FAILURE
        }
    }
}

/// Returns the name of the adapter that a folder which does not exist is part of.
fn adapter_meant<'a>(out: &Path, listed: &'a [Adapter]) -> Option<&'a str> {
    let word = out.file_name()?.to_str()?.to_lowercase();
    let mut names = listed.iter().map(|adapter| adapter.name.as_str());
    names.find(|name| !out.exists() && name.to_lowercase().contains(&word))
}

/// The summary, whose file has what is known so far.
struct Page {
    path: PathBuf,
    text: String,
    has_failed: bool,
}

impl Page {
    fn add(&mut self, text: &str) -> io::Result<()> {
        self.text += text;
        fs::write(&self.path, &self.text)
    }

    /// Adds the line of a part of the report.
    fn part(&mut self, title: &str, line: &str, is_right: bool) -> io::Result<()> {
        self.has_failed |= !is_right;
        let mark = if is_right { "" } else { "**failed:** " };
        self.add(&format!("- {title}: {mark}{line}\n"))
    }
}

fn report(out: &Path, adapters: &[(usize, Adapter)]) -> io::Result<Page> {
    fs::create_dir_all(out)?;
    let out = &fs::canonicalize(out)?;
    let cache = &out.join("cache");
    let mut page = Page { path: out.join("SUMMARY.md"), text: String::new(), has_failed: false };
    page.add(&format!(
        "# potluck {} on {} {}\n\nThe training curves are of {STEPS} steps of the default model; \
         a difference is that of a loss from the CPU device's at the same step.\n\n",
        env!("POTLUCK_BUILD").chars().take(12).collect::<String>(),
        std::env::consts::OS,
        std::env::consts::ARCH
    ))?;
    for (what, words) in tests() {
        let words = [&words[..], &["--no-run"]].concat();
        let log = out.join(format!("build-{what}.log"));
        let built = logged(cargo_tests((cache, ""), &words), &log, BUILD_S)?;
        let title = format!("build of the tests of {what}");
        page.part(&title, &format!("{:.0} s", built.seconds), built.is_right)?;
    }
    let cpu = train((out, cache), "cpu", "cpu")?;
    page.part("training on the CPU device", &compared(&cpu, &cpu), cpu.len() as u64 == STEPS)?;
    for (number, adapter) in adapters {
        let part = out.join(format!("adapter-{number}"));
        fs::create_dir_all(&part)?;
        report_on((&part, cache), (*number, adapter), &cpu, &mut page)?;
    }
    Ok(page)
}

/// Adds all that is to be known of one adapter.
fn report_on(
    places: (&Path, &Path),
    (number, adapter): (usize, &Adapter),
    cpu: &[f64],
    page: &mut Page,
) -> io::Result<()> {
    let (selector, Adapter { name, api, kind, driver, .. }) = (number.to_string(), adapter);
    page.add(&format!("\n## {name} on {api}\n\n{kind}, {driver}\n\n"))?;
    let begins = name.split(',').next().unwrap_or_default();
    let certify = ["devices", "--certify", &selector].map(String::from);
    let ended = logged(program(places, &certify), &places.0.join("certify.log"), PART_S)?;
    let last = ended.text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    page.part("certification", last.trim(), ended.is_right)?;
    let losses = train(places, &selector, "run")?;
    page.part("training", &compared(&losses, cpu), losses.len() == cpu.len())?;
    benchmarks(places, &selector, page)?;
    // Last, because a vendor's compiler takes long for all variants of all kernels.
    for (what, words) in tests() {
        let command = cargo_tests((places.1, &format!("{api}:{begins}")), &words);
        let ended = logged(command, &places.0.join(format!("{what}.log")), PART_S)?;
        page.part(&format!("tests of {what}"), &tested(&ended), ended.is_right)?;
    }
    Ok(())
}

/// Returns the tests that use adapters, with what cargo is given for each.
fn tests() -> [(&'static str, Vec<&'static str>); 2] {
    [
        ("kernels", vec!["--package", "potluck-kernels", "--lib"]),
        ("plans", vec!["--test", "adapters"]),
    ]
}

/// Returns a command of cargo that tests an adapter. Tests compile far longer than they run.
fn cargo_tests((cache, selector): (&Path, &str), words: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let directory = env!("CARGO_MANIFEST_DIR");
    command.current_dir(directory).env("POTLUCK_TEST_ADAPTERS", selector).arg("test").args(words);
    let threads = thread::available_parallelism().map_or(1, usize::from).min(TEST_THREADS_MAX);
    command.env("POTLUCK_CACHE", cache).env("RUST_TEST_THREADS", threads.to_string());
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

/// Runs a command whose output goes to a file, for so many seconds at most.
fn logged(mut command: Command, log: &Path, seconds_max: u64) -> io::Result<Ended> {
    eprintln!("{command:?}");
    let (file, started) = (File::create(log)?, Instant::now());
    let mut child = command.stdout(file.try_clone()?).stderr(file.try_clone()?).spawn()?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if started.elapsed().as_secs() >= seconds_max {
            writeln!(&file, "\nended after {seconds_max} s")?;
            end(&mut child)?;
            break None;
        }
        thread::sleep(Duration::from_millis(100));
    };
    let text = String::from_utf8_lossy(&fs::read(log)?).into_owned();
    let is_right = status.is_some_and(|status| status.success());
    Ok(Ended { text, seconds: started.elapsed().as_secs_f64(), is_right })
}

/// Ends a process and the one that it started: cargo would leave its test behind. Does not wait for
/// them, because a driver may hold them.
fn end(child: &mut Child) -> io::Result<()> {
    #[cfg(unix)]
    let _ = Command::new("pkill").args(["-KILL", "-P", &child.id().to_string()]).status();
    child.kill()
}

/// Returns what libtest says at the end, or that it says nothing.
fn tested(ended: &Ended) -> String {
    let result = ended.text.lines().rfind(|line| line.starts_with("test result: "));
    let result = result.map_or("did not end", |line| &line["test result: ".len()..]);
    let counts: Vec<&str> = result.split(';').take(2).collect();
    format!("{} ({:.0} s)", counts.join(";"), ended.seconds)
}

/// Trains the default model on a device; returns its losses.
fn train(places: (&Path, &Path), device: &str, run: &str) -> io::Result<Vec<f64>> {
    let out = places.0;
    let line = format!(
        "train --steps {STEPS} --seed 1 --quiet --set train.sample_tokens=0 --out {run} --devices"
    );
    let mut words: Vec<String> = line.split(' ').map(String::from).collect();
    words.push(device.into());
    let _ = fs::remove_dir_all(out.join(run));
    logged(program(places, &words), &out.join(format!("{run}.log")), PART_S)?;
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

/// Runs the benchmark suite, and adds the figures of the summary.
fn benchmarks(places: (&Path, &Path), selector: &str, page: &mut Page) -> io::Result<()> {
    let json = places.0.join("bench.json");
    let words = ["bench", "--full", "--devices", selector, "--json"].map(String::from);
    let words: Vec<String> = words.into_iter().chain([json.display().to_string()]).collect();
    let ended = logged(program(places, &words), &places.0.join("bench.log"), PART_S)?;
    let report = fs::read_to_string(&json).ok().and_then(|text| Report::from_json(&text).ok());
    let Some(report) = report.filter(|_| ended.is_right) else {
        return page.part("benchmarks", "see bench.log", false);
    };
    let mut text = String::new();
    let figures = report.devices.iter().flat_map(|device| &device.figures);
    for figure in figures.filter(|figure| FIGURES.contains(&figure.name.as_str())) {
        let share = figure.of_peak.map(|share| format!(", {:.0} % of its peak", 100.0 * share));
        let share = share.unwrap_or_default();
        let _ = writeln!(text, "- {}: {:.4} {}{share}", figure.name, figure.median, figure.unit);
    }
    page.add(&text)
}
