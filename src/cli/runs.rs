//! `potluck runs`: the runs of a directory with their steps, losses, devices and states. Reads only
//! the end of each record and the newest manifest, so that a list of thousands of runs is fast.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::{Value, json};

use super::args::RunsArgs;
use super::runs_directory::{RUNS, is_run, last_change};
use super::train::{config_of, saved_config};
use super::{UsageError, print};
use crate::ui::ranks::short_name;
use crate::ui::terminal::print_line;
use potluck_core::Table;
use potluck_train::checkpoint::{Meta, Store};
use potluck_train::config::RunConfig;

/// Bytes read from the end of a record: more than in its longest lines.
const TAIL_BYTES: u64 = 64 << 10;
/// Maximum size of a `run.toml`.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// State of a run on disk.
#[derive(Clone, Debug, PartialEq)]
enum RunState {
    /// A process holds its lock.
    Running,
    /// Its last checkpoint is from its last step.
    Done,
    /// It ended before its last step and can be resumed.
    Interrupted,
    NoCheckpoint,
    /// A trainer of the library saved it, without the configuration of a run.
    OfLibrary,
    /// Its checkpoints need another version of potluck.
    OtherVersion(String),
    /// Its configuration or all its checkpoints cannot be read, with the reason.
    Damaged(String),
}

impl RunState {
    fn word(&self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Done => "done",
            Self::Interrupted => "interrupted",
            Self::NoCheckpoint => "no-checkpoint",
            Self::OfLibrary => "of-library",
            Self::OtherVersion(_) => "other-version",
            Self::Damaged(_) => "damaged",
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Running => "running".into(),
            Self::Done => "done".into(),
            Self::Interrupted => "interrupted, can go on".into(),
            Self::NoCheckpoint => "no checkpoint".into(),
            Self::OfLibrary => "saved by the library".into(),
            Self::OtherVersion(why) => format!("of another version: {why}"),
            Self::Damaged(why) => format!("damaged: {why}"),
        }
    }
}

struct ListedRun {
    name: String,
    path: PathBuf,
    /// Steps done.
    step: Option<u64>,
    /// Step of the newest checkpoint.
    saved: Option<u64>,
    /// Step after which the run ends.
    steps: Option<u64>,
    /// Loss of the last step; NaN if it was not finite.
    loss: Option<f64>,
    /// Best loss on the validation split.
    best: Option<f64>,
    /// Cost of the steps of its last part on several devices, as in its record.
    cost: Option<Value>,
    devices: Vec<String>,
    state: RunState,
    /// Time of the last change.
    changed: SystemTime,
}

/// Prints the runs of a directory, the last changed one at the end.
///
/// # Errors
/// Returns `UsageError` if the directory cannot be read; an unreadable run is in the list.
pub fn run(args: &RunsArgs) -> anyhow::Result<()> {
    let directory = &args.directory;
    let mut runs = match runs_in(directory) {
        Ok(runs) => runs,
        Err(why) if why.kind() == io::ErrorKind::NotFound && directory == Path::new(RUNS) => {
            Vec::new()
        }
        Err(why) => {
            let why =
                format!("{}: cannot be read: {why}; name a directory of runs", directory.display());
            return Err(UsageError(why).into());
        }
    };
    runs.sort_by(|a, b| (a.changed, &a.name).cmp(&(b.changed, &b.name)));
    if args.json {
        let rows: Vec<Value> = runs.iter().map(ListedRun::json).collect();
        print(&format!("{}\n", Value::Array(rows)));
    } else if runs.is_empty() {
        print_line(&format!("there are no runs in {}", directory.display()));
    } else {
        print(&table(&runs));
    }
    Ok(())
}

/// Runs directly below a directory, or the run that the directory is.
fn runs_in(directory: &Path) -> io::Result<Vec<ListedRun>> {
    let entries = fs::read_dir(directory)?;
    if is_run(directory) {
        return Ok(vec![ListedRun::read(directory)]);
    }
    let mut runs = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        if is_run(&path) {
            runs.push(ListedRun::read(&path));
        }
    }
    Ok(runs)
}

impl ListedRun {
    /// Reads a run; unreadable values remain unknown.
    fn read(path: &Path) -> Self {
        let name = path.file_name().unwrap_or(path.as_os_str());
        let config = path.join("run.toml");
        let store = Store::open_to_read(path);
        let meta = store.newest_meta();
        let end = RecordEnd::read(&path.join("metrics.jsonl"));
        let newest = match &meta {
            Ok(meta) => meta.as_ref(),
            Err(_) => None,
        };
        let length = RunLength::read(&config, newest);
        let state = if store.is_in_use() {
            RunState::Running
        } else {
            match (&meta, &length) {
                (Err(error), _) if error.is_of_another_version() => {
                    RunState::OtherVersion(error.to_string())
                }
                (Err(error), _) => RunState::Damaged(error.to_string()),
                (Ok(None), _) => RunState::NoCheckpoint,
                (Ok(Some(meta)), _) if meta.is_of_library() => RunState::OfLibrary,
                (Ok(Some(_)), Err(why)) => RunState::Damaged(why.clone()),
                (Ok(Some(meta)), Ok(length)) if length.is_reached(meta) => RunState::Done,
                (Ok(Some(_)), Ok(_)) => RunState::Interrupted,
            }
        };
        let mut run = Self {
            name: name.to_string_lossy().into_owned(),
            path: path.into(),
            step: None,
            saved: None,
            steps: length.ok().and_then(|length| length.steps),
            loss: None,
            best: None,
            cost: end.cost,
            devices: Vec::new(),
            state,
            changed: last_change(path),
        };
        if let Some((step, loss)) = end.last_step {
            run.step = Some(step);
            run.loss = Some(loss);
        }
        if let Ok(Some(meta)) = meta {
            run.saved = Some(meta.step);
            run.step = run.step.max(run.saved);
            run.best = meta.best.map(|best| best.val_loss);
            run.devices = devices(&meta);
        }
        run
    }

    fn json(&self) -> Value {
        let problem = match &self.state {
            RunState::OtherVersion(why) | RunState::Damaged(why) => Some(why),
            _ => None,
        };
        json!({
            "name": self.name, "path": self.path.to_string_lossy(), "step": self.step,
            "steps": self.steps, "saved_step": self.saved, "loss": self.loss,
            "best_val_loss": self.best, "cost": self.cost,
            "devices": self.devices, "state": self.state.word(), "problem": problem,
        })
    }

    fn cells(&self) -> Vec<String> {
        let devices = if self.devices.is_empty() { "-".into() } else { self.devices.join(", ") };
        vec![
            self.name.clone(),
            format!("{}/{}", number_or(self.step, "?"), number_or(self.steps, "?")),
            number_or(self.saved, "-"),
            loss_text(self.loss),
            loss_text(self.best),
            devices,
            self.state.text(),
        ]
    }
}

fn number_or(number: Option<u64>, unknown: &str) -> String {
    match number {
        Some(number) => number.to_string(),
        None => unknown.into(),
    }
}

fn loss_text(loss: Option<f64>) -> String {
    match loss {
        Some(loss) => format!("{loss:.4}"),
        None => "-".into(),
    }
}

/// Names of a run's devices in the order of their ranks.
fn devices(meta: &Meta) -> Vec<String> {
    meta.placement.ranks.iter().map(|rank| short_name(&rank.name)).collect()
}

/// Length of a run by its configuration.
struct RunLength {
    /// Step after which it ends; `None` if it is given in epochs and nothing is saved.
    steps: Option<u64>,
    patience: u64,
}

impl RunLength {
    /// Reads the length of a run from its `run.toml`, or its newest checkpoint without one. With
    /// epochs, only a checkpoint has the number of steps.
    fn read(path: &Path, meta: Option<&Meta>) -> Result<Self, String> {
        let is_missing =
            path.symlink_metadata().is_err_and(|why| why.kind() == io::ErrorKind::NotFound);
        let saved = match meta {
            Some(meta) if !meta.is_of_library() => Some(meta),
            _ => None,
        };
        let config = match saved {
            // Checkpoints have the configuration too.
            Some(meta) if is_missing => saved_config(meta).map_err(|why| why.to_string())?,
            _ => read_config(path)?,
        };
        let steps = match saved {
            _ if config.train.epochs == 0 => Some(config.train.steps),
            Some(meta) => Some(saved_config(meta).map_err(|why| why.to_string())?.train.steps),
            None => None,
        };
        Ok(Self { steps, patience: config.train.patience })
    }

    /// Returns true if the run has ended with a checkpoint.
    fn is_reached(&self, meta: &Meta) -> bool {
        let Self { steps, patience } = *self;
        steps.is_some_and(|steps| meta.step >= steps)
            || (patience > 0 && meta.evaluations_since_best >= patience)
    }
}

/// Reads the configuration of a run from its `run.toml`.
fn read_config(path: &Path) -> Result<RunConfig, String> {
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(CONFIG_BYTES_MAX).read_to_string(&mut text))
        .map_err(|why| format!("{}: cannot be read: {why}", path.display()))?;
    config_of(path, &text).map_err(|why| why.to_string())
}

/// Last values at the end of a record.
#[derive(Debug, Default, PartialEq)]
struct RecordEnd {
    /// Number and loss of the last step.
    last_step: Option<(u64, f64)>,
    cost: Option<Value>,
}

impl RecordEnd {
    /// Reads the end of a record; what is unreadable is unknown.
    fn read(path: &Path) -> Self {
        let mut end = Self::default();
        let Some(bytes) = tail(path) else { return end };
        // The first and the last line may be incomplete, and then not JSON.
        for line in bytes.rsplit(|byte| *byte == b'\n') {
            let Ok(mut line) = serde_json::from_slice::<Value>(line) else { continue };
            if end.cost.is_none()
                && let Some(cost) = line.get_mut("cost")
            {
                end.cost = Some(cost.take());
            }
            end.last_step = step_and_loss(&line);
            if end.last_step.is_some() {
                break;
            }
        }
        end
    }
}

fn tail(path: &Path) -> Option<Vec<u8>> {
    let mut file = File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    let start = length.saturating_sub(TAIL_BYTES);
    file.seek(SeekFrom::Start(start)).ok()?;
    let mut bytes = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

fn step_and_loss(line: &Value) -> Option<(u64, f64)> {
    // A loss that was not finite is null.
    let loss = line.get("loss")?.as_f64().unwrap_or(f64::NAN);
    Some((line.get("step")?.as_u64()?, loss))
}

fn table(runs: &[ListedRun]) -> String {
    let head = ["<name", "step", "saved", "loss", "best val", "<devices", "<state"];
    let mut table = Table::new(&head);
    for run in runs {
        table.row(run.cells());
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write;

    #[test]
    fn the_last_step_is_read_from_the_end_of_a_long_record() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        let last_step = |path: &Path| RecordEnd::read(path).last_step;
        assert_eq!(RecordEnd::read(&path), RecordEnd::default());
        let mut text = String::new();
        for step in 1..=5000 {
            let _ = writeln!(text, r#"{{"step":{step},"loss":{}.5,"lr":0.001}}"#, 5000 - step);
        }
        assert!(text.len() as u64 > 2 * TAIL_BYTES);
        text += "{\"step\":5000,\"val_loss\":2.5}\n";
        fs::write(&path, &text).unwrap();
        assert_eq!(last_step(&path), Some((5000, 0.5)));
        fs::write(&path, text + "{\"step\":5001,\"lo").unwrap();
        assert_eq!(last_step(&path), Some((5000, 0.5)));
        fs::write(&path, "{\"step\":7,\"loss\":null}\n").unwrap();
        assert!(last_step(&path).unwrap().1.is_nan());
        fs::write(&path, b"\xFF\0{}").unwrap();
        assert_eq!(last_step(&path), None);
    }

    #[test]
    fn the_cost_behind_the_last_step_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        let mut text =
            String::from("{\"step\":7,\"cost\":{\"ms\":1.0}}\n{\"step\":8,\"loss\":2.5}\n");
        fs::write(&path, &text).unwrap();
        // A run that went on has no cost of its later steps yet.
        assert_eq!(RecordEnd::read(&path), RecordEnd { last_step: Some((8, 2.5)), cost: None });
        text += "{\"step\":8,\"val_loss\":2.5}\n{\"step\":8,\"cost\":{\"ms\":4.0}}\n";
        fs::write(&path, &text).unwrap();
        let cost = Some(json!({ "ms": 4.0 }));
        assert_eq!(RecordEnd::read(&path), RecordEnd { last_step: Some((8, 2.5)), cost });
    }
}
