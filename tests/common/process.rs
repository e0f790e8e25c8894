//! The program as its users run it: a working directory, command lines, exit codes, what was
//! printed. Waits have an end and say what they waited for.
#![allow(dead_code, reason = "each test binary uses a part of this file")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;
use std::{fs, thread};

use potluck_kernels::device::{Adapter, Selection, list_adapters, select, skip_exit_handlers};
use serde_json::Value;

/// The longest that one run of the program may take: most take a fraction of a second, and none
/// more than a minute.
const PATIENCE: Duration = Duration::from_secs(300);

/// A model so small that a step takes less than a millisecond.
const TINY: &str = "\
[model]
layers = 1
heads = 2
width = 16
context = 8

[train]
batch = 4
steps = 30
sample_tokens = 20

[optim]
lr = 0.01

[schedule]
warmup = 5
";

/// Selectors of the adapters to test on: those that `POTLUCK_TEST_ADAPTERS` names, or all that are
/// found if it is empty or not set; at least one.
pub fn adapter_selectors() -> Vec<String> {
    let named = std::env::var("POTLUCK_TEST_ADAPTERS").unwrap_or_default();
    let selectors: Vec<String> = match named.as_str() {
        "" => (0..found_adapters().len()).map(|index| index.to_string()).collect(),
        named => named.split(',').map(str::to_string).collect(),
    };
    assert!(!selectors.is_empty(), "no adapter to test on: ./x test installs software ones");
    selectors
}

/// The adapters of this machine, behind which the process may end: without the exit handlers of
/// their drivers.
fn found_adapters() -> Vec<Adapter> {
    let adapters = list_adapters();
    skip_exit_handlers();
    adapters
}

/// True if a selector of [`adapter_selectors`] selects SwiftShader, which compiles every kernel
/// again in each process.
pub fn is_swiftshader(selector: &str) -> bool {
    adapter_name(selector).contains("SwiftShader")
}

/// Name of the adapter that a selector of [`adapter_selectors`] selects.
pub fn adapter_name(selector: &str) -> String {
    match select(selector, &found_adapters()).unwrap_or_else(|e| panic!("{e}")) {
        Selection::Adapter(adapter) => adapter.name,
        other => panic!("{selector} selects {other:?}"),
    }
}

/// Reports that a test tests nothing here. `./x test` counts these lines, and lists them; libtest
/// counts the test as passed, and hides what it prints, but not what it writes.
pub fn skip(why: &str) {
    // Behind a line break, because libtest may have printed the test's name.
    let _ = writeln!(std::io::stderr(), "\nskipped: {why}");
}

/// Returns true for variables by which whoever runs the tests tells a program its place in a run,
/// or the secret of one.
fn tells_a_place(name: &str) -> bool {
    let beginnings = [
        "POTLUCK_RANK",
        "POTLUCK_WORLD",
        "POTLUCK_LOCAL_",
        "POTLUCK_ADDRESS",
        "POTLUCK_SECRET_FILE",
        "SLURM_",
        "OMPI_",
        "PMI_",
        "MPI_LOCAL",
        "SKYPILOT_",
        "MASTER_",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "JOB_COMPLETION_INDEX",
        "CREDENTIALS_DIRECTORY",
    ];
    ["RANK", "WORLD_SIZE"].contains(&name) || beginnings.iter().any(|one| name.starts_with(one))
}

/// A directory with `tiny.toml` and `text.txt`, in which the program runs.
pub struct Desk {
    directory: tempfile::TempDir,
    /// Directory of what the program keeps between runs.
    cache: Arc<tempfile::TempDir>,
}

/// A run of the program that ended.
pub struct Ran {
    pub status: ExitStatus,
    pub out: String,
    pub err: String,
}

impl Desk {
    pub fn new() -> Self {
        Self::with_cache(Arc::new(tempfile::tempdir().unwrap()))
    }

    /// A desk with the one kernel cache that all such desks of this process have: what a test has
    /// certified is certified for those after it. For runs with `train.tune_s=0` only: what others
    /// time would choose the kernels of the next run.
    pub fn certified() -> Self {
        static CACHE: OnceLock<Arc<tempfile::TempDir>> = OnceLock::new();
        // Nothing drops it, so it is where cargo's own files are.
        let make = || {
            let directory = env!("CARGO_TARGET_TMPDIR");
            fs::create_dir_all(directory).unwrap();
            Arc::new(tempfile::tempdir_in(directory).unwrap())
        };
        Self::with_cache(CACHE.get_or_init(make).clone())
    }

    /// A desk with the kernel cache of another one: its runs choose the same kernels, and do not
    /// certify them again.
    pub fn with_cache_of(other: &Desk) -> Self {
        Self::with_cache(other.cache.clone())
    }

    fn with_cache(cache: Arc<tempfile::TempDir>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("tiny.toml"), TINY).unwrap();
        fs::write(directory.path().join("text.txt"), text()).unwrap();
        Self { directory, cache }
    }

    /// The directory of what is kept between runs.
    pub fn cache(&self) -> &Path {
        self.cache.path()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.path(name), bytes).unwrap();
    }

    /// Every file below the directory, sorted.
    pub fn files(&self) -> Vec<String> {
        fn walk(directory: &Path, prefix: &str, files: &mut Vec<String>) {
            for entry in fs::read_dir(directory).unwrap() {
                let entry = entry.unwrap();
                let name = format!("{prefix}{}", entry.file_name().to_str().unwrap());
                if entry.file_type().unwrap().is_dir() {
                    walk(&entry.path(), &format!("{name}/"), files);
                } else {
                    files.push(name);
                }
            }
        }
        let mut files = Vec::new();
        walk(self.directory.path(), "", &mut files);
        files.sort();
        files
    }

    /// The program with the words of `line`, here.
    pub fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_potluck"));
        command.args(line.split_whitespace()).current_dir(self.directory.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Some drivers complain on stderr when this is not set.
        command.env("XDG_RUNTIME_DIR", self.directory.path()).env_remove("POTLUCK_FAULT");
        for (name, _) in std::env::vars_os() {
            if tells_a_place(&name.to_string_lossy()) {
                command.env_remove(name);
            }
        }
        command.env("POTLUCK_CACHE", self.cache.path());
        command
    }

    pub fn run(&self, line: &str) -> Ran {
        finish(self.command(line).spawn().unwrap(), line)
    }

    /// Like [`Desk::run`], with faults.
    pub fn run_with(&self, faults: &str, line: &str) -> Ran {
        let child = self.command(line).env("POTLUCK_FAULT", faults).spawn().unwrap();
        finish(child, &format!("{faults}: {line}"))
    }

    /// Trains the tiny model on the text on the CPU device, with these words added.
    pub fn train(&self, line: &str) -> Ran {
        self.run(&train_line(line))
    }

    /// Like [`Desk::train`], with faults.
    pub fn train_with(&self, faults: &str, line: &str) -> Ran {
        self.run_with(faults, &train_line(line))
    }

    /// Continues the run in a directory.
    pub fn resume(&self, run: &str, line: &str) -> Ran {
        self.run(&format!("train --devices cpu --resume {run} {line}"))
    }

    /// Runs the command at the end of a message, in a shell.
    pub fn run_suggested(&self, message: &str) -> Ran {
        self.run_suggested_with("", message)
    }

    /// Like [`Desk::run_suggested`], with faults.
    pub fn run_suggested_with(&self, faults: &str, message: &str) -> Ran {
        let (_, command) = message.rsplit_once("with: ").expect("a command is suggested");
        let arguments = command.strip_prefix("potluck ").expect("the command is potluck");
        let mut shell = Command::new("sh");
        let program = env!("CARGO_BIN_EXE_potluck");
        shell.args(["-c", &format!("'{program}' {arguments} --quiet")]);
        let words = self.command("");
        shell.envs(words.get_envs().filter_map(|(name, value)| Some((name, value?))));
        shell.env("POTLUCK_FAULT", faults).current_dir(self.directory.path());
        shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        finish(shell.spawn().unwrap(), command)
    }

    /// The bytes of a file of the checkpoint of a step.
    pub fn checkpoint(&self, run: &str, step: u64, file: &str) -> Vec<u8> {
        let path = self.path(run).join(format!("checkpoints/step-{step:08}/{file}"));
        fs::read(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()))
    }

    pub fn manifest(&self, run: &str, step: u64) -> Value {
        serde_json::from_slice(&self.checkpoint(run, step, "manifest.json")).unwrap()
    }

    /// The lines of the run's record.
    pub fn metrics(&self, run: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap();
        assert!(text.is_empty() || text.ends_with('\n'), "a torn line: {text}");
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The lines of the record that are steps.
    pub fn steps(&self, run: &str) -> Vec<Value> {
        let lines = self.metrics(run).into_iter();
        lines.filter(|line| line.get("loss").is_some()).collect()
    }

    pub fn losses(&self, run: &str) -> Vec<f64> {
        self.steps(run).iter().map(|line| line["loss"].as_f64().unwrap()).collect()
    }
}

fn train_line(line: &str) -> String {
    format!("train tiny.toml --data text.txt --devices cpu {line}")
}

impl Ran {
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Asserts that it went well.
    pub fn ok(self) -> Self {
        assert_eq!(self.code(), Some(0), "{}\n{}{}", self.status, self.out, self.err);
        self
    }

    /// Asserts that it ended with this exit code.
    pub fn ended(self, code: i32) -> Self {
        assert_eq!(self.code(), Some(code), "{}\n{}{}", self.status, self.out, self.err);
        self
    }

    /// The lines on stderr that begin so.
    pub fn lines(&self, beginning: &str) -> Vec<&str> {
        self.err.lines().filter(|line| line.starts_with(beginning)).collect()
    }

    /// The one line on stderr that begins so.
    pub fn line(&self, beginning: &str) -> &str {
        let lines = self.lines(beginning);
        assert_eq!(lines.len(), 1, "not one line '{beginning}' in:\n{}", self.err);
        lines[0]
    }
}

/// Waits for the end of a child, and kills it if that does not come.
pub fn finish(child: Child, what: &str) -> Ran {
    let Output { status, stdout, stderr } = wait(child, what);
    let text = |bytes| String::from_utf8(bytes).expect("the program prints UTF-8");
    Ran { status, out: text(stdout), err: text(stderr) }
}

fn wait(child: Child, what: &str) -> Output {
    let (id, (sender, receiver)) = (child.id(), mpsc::channel());
    thread::spawn(move || sender.send(child.wait_with_output()));
    match receiver.recv_timeout(PATIENCE) {
        Ok(output) => output.unwrap(),
        Err(_) => {
            send_signal(id, "KILL");
            panic!("did not end within {} s: {what}", PATIENCE.as_secs());
        }
    }
}

/// Sends a signal to a process.
pub fn send_signal(process: u32, signal: &str) {
    let line = format!("kill -{signal} {process}");
    assert!(Command::new("sh").args(["-c", &line]).status().unwrap().success(), "{line}");
}

/// About 2000 characters that a small model learns something about.
fn text() -> String {
    let words =
        ["the", "cook", "brings", "bread", "and", "soup", "to", "a", "table", "of", "guests"];
    let mut text = String::new();
    for (index, step) in (0..400).zip((0..400).map(|i| (i * i) % 7 + i)) {
        text.push_str(words[step % words.len()]);
        text.push(if index % 9 == 8 { '\n' } else { ' ' });
    }
    text
}
