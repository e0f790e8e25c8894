//! `train --resume`: finds its checkpoint, and the directory in which the run continues.

use std::path::{Path, PathBuf};
use std::{fs, io};

use super::UsageError;
use super::runs_directory::{RUNS, by_age, by_name, nothing_at};
use crate::ui::terminal::print_warning;
use potluck_core::format::counted;
use potluck_kernels::device::{DeviceError, missing_devices};
use potluck_train::checkpoint::{self, Checkpoint, CheckpointError, Store};
use potluck_train::continuation::ResumeCommand;
use potluck_train::error::TrainError;
use potluck_train::runtime::RuntimeError;
use potluck_train::runtime::placement::candidates::{adapters_for, selections};
use potluck_train::spec::RunSpec;

/// Checkpoint from which a run starts.
pub struct ResumePoint {
    pub checkpoint: Checkpoint,
    /// Path of the run or checkpoint, as given.
    pub from: PathBuf,
    /// Run of the checkpoint; `None` for a checkpoint outside a run.
    pub run: Option<PathBuf>,
    /// Newest step of that run before the checkpoint was loaded.
    newest: u64,
}

impl ResumePoint {
    /// Loads the checkpoint of `--resume`, which is `latest`, a run or a checkpoint. Prints
    /// warnings about damaged ones.
    ///
    /// # Errors
    /// Returns `UsageError` if `latest` finds no run, and `CheckpointError` if there is no good
    /// checkpoint.
    pub fn find(from: &Path, out: Option<&Path>) -> anyhow::Result<Self> {
        let is_latest = from == Path::new("latest");
        let (point, warnings) = match out {
            None if is_latest => newest(Path::new(RUNS))?,
            Some(out) if is_latest => Self::load(out)?,
            _ => {
                let path = by_name(from);
                if let Some(why) = nothing_at(&path) {
                    return Err(UsageError(why).into());
                }
                Self::load(&path)?
            }
        };
        for warning in warnings {
            print_warning(&warning);
        }
        Ok(point)
    }

    fn load(from: &Path) -> Result<(Self, Vec<String>), TrainError> {
        let run = source_run(from);
        // Listed before the checkpoint is loaded: another process may save newer steps meanwhile.
        let steps = match &run {
            Some(run) => Store::open_to_read(run).steps()?,
            None => Vec::new(),
        };
        let (checkpoint, warnings) = Checkpoint::load_path(from)?;
        let newest = steps.last().copied().unwrap_or(checkpoint.meta.step);
        Ok((Self { checkpoint, from: from.into(), run, newest }, warnings))
    }

    /// Returns the directory of the loaded checkpoint.
    pub fn loaded(&self) -> PathBuf {
        match &self.run {
            Some(run) if !checkpoint::is_checkpoint(&self.from) => {
                Store::open_to_read(run).path(self.checkpoint.meta.step)
            }
            _ => self.from.clone(),
        }
    }

    /// Checks that the requested steps do not end before the checkpoint: the record of the run
    /// would contradict itself.
    ///
    /// # Errors
    /// Returns `UsageError` if they do.
    pub fn require_steps(&self, steps: u64) -> Result<(), UsageError> {
        let done = self.checkpoint.meta.step;
        if steps >= done {
            return Ok(());
        }
        Err(UsageError(format!(
            "train.steps = {steps} is below the {} of {}; set more steps, or resume from an \
             earlier checkpoint with another --out",
            counted(done as usize, "step", "steps"),
            self.loaded().display()
        )))
    }

    /// Returns the newest step of the run if a run in `out` continues it; `None` if that is a new
    /// run.
    pub fn continued(&self, out: &Path) -> Option<u64> {
        let run = self.run.as_ref()?.canonicalize().ok()?;
        let out = out.canonicalize().ok()?;
        if run == out { Some(self.newest) } else { None }
    }

    /// Checks that this machine has the saved devices of a run.
    ///
    /// # Errors
    /// Returns `TrainError::MissingDevices` if one of the list is missing, and `RuntimeError` for
    /// an invalid list.
    pub fn require_devices(
        &self,
        spec: &RunSpec,
        out: Option<&Path>,
        settings: Vec<(&'static str, String)>,
    ) -> Result<(), TrainError> {
        let devices = spec.devices.as_str();
        use DeviceError::{NoAdapter, NoMatch};
        match selections(devices) {
            Ok(_) => return Ok(()),
            Err(RuntimeError::Device(NoAdapter { .. } | NoMatch { .. })) => {}
            Err(error) => return Err(error.into()),
        }
        let missing = missing_devices(devices, &adapters_for(devices));
        let out = out.map(Path::to_path_buf);
        let command = ResumeCommand { out, settings, ..ResumeCommand::of_run(&self.from) };
        let command = Box::new(spec.resume_on(spec.left_on_any(), command));
        Err(TrainError::MissingDevices { devices: devices.into(), missing, command })
    }
}

/// Run of a checkpoint or of a run's directory; `None` for a checkpoint outside a run.
fn source_run(from: &Path) -> Option<PathBuf> {
    if checkpoint::is_checkpoint(from) { checkpoint::run_of(from) } else { Some(from.into()) }
}

/// Returns the path of the data of a resumed run: the saved path, or else the same name in the
/// directory of the run, or among the files of a checkpoint outside a run.
///
/// # Errors
/// Returns `TrainError::MissingData` if they are at neither place.
pub fn find_data(saved: &Path, from: &Path) -> Result<PathBuf, TrainError> {
    if saved.exists() {
        return Ok(saved.into());
    }
    let directory = source_run(from).unwrap_or_else(|| from.into());
    let beside = directory.join(saved.file_name().unwrap_or_default());
    if beside.exists() && saved.file_name().is_some() {
        return Ok(beside);
    }
    Err(TrainError::MissingData { path: saved.into(), beside })
}

/// Directory of a run.
#[derive(Debug)]
pub struct RunDirectory {
    pub path: PathBuf,
    /// Directories created for the run, the inner one first.
    pub created: Vec<PathBuf>,
}

impl RunDirectory {
    /// Returns the directory of a run: the given one, or the directory of the checkpoint's run, or
    /// else the next free number in `runs`, which is created so that no other process takes it.
    ///
    /// # Errors
    /// Returns `UsageError` if the path leads through a file, and `CheckpointError::Write` if the
    /// directory cannot be created.
    pub fn choose(
        named: Option<&Path>,
        point: Option<&ResumePoint>,
        runs: &Path,
    ) -> anyhow::Result<Self> {
        let Some(path) = named.or(point.and_then(|point| point.run.as_deref())) else {
            return Ok(Self::reserve(runs).map_err(TrainError::from)?);
        };
        let there = path.ancestors().find(|above| above.symlink_metadata().is_ok());
        if let Some(file) = there
            && !file.is_dir()
        {
            let file = file.display();
            let why = format!("{}: {file} is no directory; set another --out", path.display());
            return Err(UsageError(why).into());
        }
        Ok(Self { path: path.into(), created: Vec::new() })
    }

    fn reserve(runs: &Path) -> Result<Self, CheckpointError> {
        let mut created = Vec::new();
        loop {
            let path = next_free(runs);
            match fs::create_dir(&path) {
                Ok(()) => {
                    created.insert(0, path.clone());
                    return Ok(Self { path, created });
                }
                Err(why) if why.kind() == io::ErrorKind::NotFound => {
                    fs::create_dir_all(runs).map_err(|why| CheckpointError::Write { path, why })?;
                    created = vec![runs.into()];
                }
                // Another process has just taken this number.
                Err(why) if why.kind() == io::ErrorKind::AlreadyExists => {}
                Err(why) => return Err(CheckpointError::Write { path, why }),
            }
        }
    }
}

/// Removes created directories that are still empty: the run did not start.
impl Drop for RunDirectory {
    fn drop(&mut self) {
        for directory in &self.created {
            // Fails if it is not empty; a remaining directory does no harm.
            let _ = fs::remove_dir(directory);
        }
    }
}

/// Returns `runs/0001`, or the number after the highest that exists.
fn next_free(runs: &Path) -> PathBuf {
    let mut highest = 0;
    for entry in fs::read_dir(runs).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        // `parse` would accept a sign.
        if name.bytes().all(|byte| byte.is_ascii_digit())
            && let Ok(number) = name.parse::<u64>()
            && number < u64::MAX
        {
            highest = highest.max(number);
        }
    }
    runs.join(format!("{:04}", highest + 1))
}

/// Loads the newest checkpoint of the last changed run that has one, with a warning for each run
/// that changed later.
fn newest(runs: &Path) -> anyhow::Result<(ResumePoint, Vec<String>)> {
    let mut skipped = Vec::new();
    let mut first = None;
    for run in by_age(runs).into_iter().rev() {
        if let Err(error) = Store::open_to_read(&run).wait_until_free() {
            skipped.push(format!("{} is in use by another process", run.display()));
            first.get_or_insert(error.into());
            continue;
        }
        match ResumePoint::load(&run) {
            Ok((point, warnings)) => return Ok((point, [skipped, warnings].concat())),
            Err(error @ TrainError::Checkpoint(CheckpointError::None { .. })) => {
                skipped.push(format!("{} has no checkpoint to resume from", run.display()));
                first.get_or_insert(error);
            }
            Err(error) => {
                skipped.push(format!("{} cannot be resumed: {error}", run.display()));
                first.get_or_insert(error);
            }
        }
    }
    let none = format!("there is no run in {}/ to resume", runs.display());
    Err(match first {
        None => UsageError(format!("{none}; name one with --resume DIR")).into(),
        Some(error) => UsageError(format!("{none}: {error}")).into(),
    })
}

/// Returns true if the directory has checkpoints, good or bad.
///
/// # Errors
/// Returns `TrainError::Checkpoint` if its checkpoints cannot be listed.
pub fn holds_run(out: &Path) -> Result<bool, TrainError> {
    Ok(!Store::open_to_read(out).steps()?.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_numbered_one_after_the_other() {
        let dir = tempfile::tempdir().unwrap();
        let none = newest(dir.path()).err().unwrap().to_string();
        assert!(none.contains("there is no run in"), "{none}");
        assert_eq!(next_free(dir.path()), dir.path().join("0001"));
        for name in ["9", "0003", "notes", "+12", "18446744073709551615"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        assert_eq!(next_free(dir.path()), dir.path().join("0010"));
        fs::create_dir(dir.path().join("9/checkpoints")).unwrap();
        let none = newest(dir.path()).err().unwrap().to_string();
        assert!(none.contains("there is no checkpoint"), "{none}");
    }

    #[test]
    fn starts_at_once_take_different_directories() {
        let dir = tempfile::tempdir().unwrap();
        let runs = dir.path().join("runs");
        let start = || RunDirectory::choose(None, None, &runs).unwrap();
        let taken: Vec<RunDirectory> = std::thread::scope(|scope| {
            let starts: Vec<_> = (0..8).map(|_| scope.spawn(start)).collect();
            starts.into_iter().map(|start| start.join().unwrap()).collect()
        });
        let mut paths: Vec<PathBuf> = taken.iter().map(|taken| taken.path.clone()).collect();
        paths.sort_unstable();
        paths.dedup();
        assert_eq!(paths.len(), 8);
        assert!(paths.iter().all(|path| path.is_dir()));
        fs::write(paths[2].join("run.toml"), "").unwrap();
        drop(taken);
        assert_eq!(fs::read_dir(&runs).unwrap().count(), 1, "empty directories are removed");
        assert!(paths[2].is_dir());
    }

    #[test]
    fn a_text_is_found_at_its_path_or_in_the_directory_of_the_run() {
        let dir = tempfile::tempdir().unwrap();
        let (saved, run) = (dir.path().join("gone/text.txt"), dir.path().join("run"));
        fs::create_dir(&run).unwrap();
        let error = find_data(&saved, &run).unwrap_err().to_string();
        for place in [&saved, &run.join("text.txt")] {
            assert!(error.contains(place.to_str().unwrap()), "{error}");
        }
        fs::write(run.join("text.txt"), "text").unwrap();
        assert_eq!(find_data(&saved, &run).unwrap(), run.join("text.txt"));
        fs::create_dir(dir.path().join("gone")).unwrap();
        fs::write(&saved, "text").unwrap();
        assert_eq!(find_data(&saved, &run).unwrap(), saved);
    }
}
