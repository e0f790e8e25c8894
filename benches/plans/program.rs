//! The program in the place of a setting: plans, and runs with the flags of a layout, on one node
//! or two.

use std::error::Error;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use potluck_core::arithmetic::median;
use serde_json::Value;
use tempfile::TempDir;

use crate::namespaces::Machines;
use crate::quota::CpuQuota;
use crate::settings::{SecondNode, Setting};

/// Longest use of the network namespaces of a setting.
const SETTING_MAX: Duration = Duration::from_secs(3_600);

/// Steps at the beginning of a run that are not counted.
const WARM_UP: usize = 5;

/// Words before the address of the first node, on its stderr.
const INVITATION: &str = "potluck join ";

/// Record of a run's steps, in the directory of a place.
pub const RECORD: &str = "run/metrics.jsonl";

/// Directory in which the program runs for a setting, and machines for its nodes.
pub struct Place<'a> {
    setting: &'a Setting<'a>,
    directory: TempDir,
    machines: Option<Machines>,
    /// Faults of the program, as its environment has them.
    faults: Option<String>,
    /// Quota of processor time of the second node.
    quota: Option<&'a CpuQuota>,
}

impl<'a> Place<'a> {
    pub fn new(setting: &'a Setting<'a>) -> Result<Self, Box<dyn Error>> {
        let directory = tempfile::tempdir()?;
        write_pictures(&directory.path().join("pictures"))?;
        let mut machines = None;
        if let Some(second) = &setting.devices.second {
            let two = Machines::start(2, SETTING_MAX)?;
            if let Some(rate) = second.mbit_per_s {
                two.limit_in_bursts(rate, Duration::from_micros(second.burst_us))?;
            }
            machines = Some(two);
        }
        let place = Self { setting, directory, machines, faults: None, quota: None };
        if place.machines.is_some() {
            let code = place.command(0, "secret").output()?.stdout;
            write_secret(&place.path("code"), &code)?;
        }
        Ok(place)
    }

    /// The same place, where the program has faults.
    pub fn with_faults(self, faults: String) -> Self {
        Self { faults: Some(faults), ..self }
    }

    /// The same place, where the second node is under a quota of processor time.
    pub fn with_quota(self, quota: &'a CpuQuota) -> Self {
        Self { quota: Some(quota), ..self }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Returns the plan of the setting.
    pub fn plan(&self) -> Result<Value, Box<dyn Error>> {
        let mut words = format!("plan {}", self.setting.model.arguments);
        words += &format!(" --devices '{}' --json --retune", self.setting.devices.selector);
        if self.machines.is_some() {
            words += " --nodes 2";
        }
        Ok(serde_json::from_slice(&self.run(&words)?)?)
    }

    /// Returns the number of parameters of the setting's model.
    pub fn parameters(&self) -> Result<f64, Box<dyn Error>> {
        let arguments = self.setting.model.arguments;
        let told = self.run(&format!("train {arguments} --devices cpu --explain memory"))?;
        let told = String::from_utf8_lossy(&told).into_owned();
        let line = told.lines().find(|line| line.trim_start().starts_with("parameters"));
        let values = line.and_then(|line| line.strip_suffix(" values"));
        let count = values.and_then(|line| line.split(' ').next_back());
        Ok(count.ok_or("no number of parameters")?.parse()?)
    }

    /// Runs some steps with the flags of a layout, as a plan has them, and returns the median
    /// milliseconds of a step.
    pub fn step_ms(&self, flags: &str, steps: usize) -> Result<f64, Box<dyn Error>> {
        let record = self.train(flags, WARM_UP + steps)?;
        Ok(median(&step_times(&record)[WARM_UP..]))
    }

    /// Runs some steps with the flags of a layout, and returns the lines of the run's record.
    pub fn train(&self, flags: &str, steps: usize) -> Result<Vec<Value>, Box<dyn Error>> {
        let arguments = self.setting.model.arguments;
        self.run(&format!(
            "train {arguments} {flags} --quiet --eval-every 0 --set train.checkpoint_every=0 \
             --steps {steps} --out run"
        ))?;
        let mut record = Vec::new();
        for line in fs::read_to_string(self.path(RECORD))?.lines() {
            record.push(serde_json::from_str(line)?);
        }
        fs::remove_dir_all(self.path("run"))?;
        Ok(record)
    }

    /// Runs the program with these words, quoted for a shell, on both nodes if they ask for that;
    /// returns what it prints.
    fn run(&self, words: &str) -> Result<Vec<u8>, Box<dyn Error>> {
        let second = self.setting.devices.second.as_ref().filter(|_| words.contains("--nodes 2"));
        let (output, told) = match second {
            Some(second) => self.run_with(second, words)?,
            None => {
                let output = self.command(0, words).output()?;
                let told = String::from_utf8_lossy(&output.stderr).into_owned();
                (output, told)
            }
        };
        if output.status.success() {
            Ok(output.stdout)
        } else {
            Err(format!("{words}: {told}").into())
        }
    }

    /// Runs the program on the first node, and then `potluck join` on the second one; returns the
    /// output of the first node, and what it has told.
    fn run_with(
        &self,
        second: &SecondNode,
        words: &str,
    ) -> Result<(Output, String), Box<dyn Error>> {
        let mut first = self
            .command(0, &format!("{words} --secret-file code"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let stderr = first.stderr.take().ok_or("stderr is not piped")?;
        let (tell, address) = mpsc::channel();
        // It reads on, so that the first node never waits for its reader.
        let reader = thread::spawn(move || {
            let mut text = String::new();
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if let Some((_, address)) = line.split_once(INVITATION) {
                    // Only the first address is awaited.
                    let _ = tell.send(address.split(' ').next().unwrap_or_default().to_owned());
                }
                text.push_str(&(line + "\n"));
            }
            text
        });
        // Without an address, the first node has ended with an error.
        if let Ok(address) = address.recv() {
            let selector = second.selector;
            let words = format!("join {address} --secret-file code --quiet --devices '{selector}'");
            self.command(1, &words).stdout(Stdio::null()).status()?;
        }
        let output = first.wait_with_output()?;
        Ok((output, reader.join().unwrap_or_default()))
    }

    /// The program with these words, quoted for a shell, on a node: nodes have a core each, where
    /// the system has `taskset`.
    fn command(&self, node: usize, line: &str) -> Command {
        let mut words = Vec::new();
        let has_taskset = Command::new("taskset").arg("--version").output().is_ok();
        if has_taskset {
            let cores = if self.machines.is_some() { node_core(node) } else { "0,1".into() };
            words.extend(["taskset".to_string(), "-c".into(), cores]);
        }
        let mut line = format!("exec '{}' {line}", env!("CARGO_BIN_EXE_potluck"));
        if let Some(quota) = self.quota.filter(|_| node == 1) {
            line = format!("{} && {line}", quota.enter());
        }
        words.extend(["sh".into(), "-c".into(), line]);
        let mut command = match &self.machines {
            Some(machines) => {
                let mut command = machines.enter(node);
                command.args(words);
                command
            }
            None => {
                let mut command = Command::new(&words[0]);
                command.args(&words[1..]);
                command
            }
        };
        command.current_dir(self.directory.path()).env("LP_NUM_THREADS", "1");
        if let Some(faults) = &self.faults {
            command.env("POTLUCK_FAULT", faults);
        }
        command
    }
}

/// Core of a node: the second core for the first node. SwiftShader counts the cores it may use, and
/// then runs its threads on as many from core 0 on; it is the second node.
fn node_core(node: usize) -> String {
    if node == 0 { "1".into() } else { "0".into() }
}

/// Milliseconds of the steps of a record.
pub fn step_times(record: &[Value]) -> Vec<f64> {
    // Lines of evaluations have no norm of a gradient.
    record
        .iter()
        .filter(|line| line["grad_norm"].is_number())
        .filter_map(|line| line["ms"].as_f64())
        .collect()
}

fn write_secret(path: &Path, code: &[u8]) -> std::io::Result<()> {
    fs::write(path, code)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    }
    Ok(())
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
