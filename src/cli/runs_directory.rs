//! Directory of runs: its name where none is given, and the runs in it by age.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use potluck_train::checkpoint::Store;
use potluck_train::hugging_face::ModelDirectory;

/// Parent directory of runs for which no --out is given.
pub const RUNS: &str = "runs";
/// Entries of a run directory; each one has at least one of them.
const PARTS: [&str; 4] = ["run.toml", "metrics.jsonl", CHECKPOINTS, "lock"];
/// Directory of the checkpoints of a run.
const CHECKPOINTS: &str = "checkpoints";
/// Number of runs or checkpoints that are named instead of one that is missing: the last ones.
const NAMED_MAX: usize = 3;

/// Returns the runs directly below a directory, the one that changed last at the end; none if the
/// directory cannot be read.
pub fn by_age(directory: &Path) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if is_run(&path) {
            paths.push(path);
        }
    }
    paths.sort_by_cached_key(|path| (last_change(path), path.clone()));
    paths
}

/// Returns the newest run that has a checkpoint for `latest`, the run of a name in the directory of
/// runs, and any other path as it is.
///
/// # Errors
/// Returns a sentence if there is no such run.
pub fn named_run(typed: PathBuf) -> Result<PathBuf, String> {
    if typed != Path::new("latest") {
        let run = by_name(&typed);
        // A model in the cache of Hugging Face's files comes first, as for --init.
        let is_cached = run != typed && ModelDirectory::open(&typed.to_string_lossy()).is_ok();
        return Ok(if is_cached { typed } else { run });
    }
    newest_with_checkpoint(Path::new(RUNS))
        .ok_or_else(|| format!("no run in {RUNS}/ has a checkpoint; name a directory"))
}

/// Returns the run of this name in the directory of runs, if nothing is at the path itself.
pub fn by_name(typed: &Path) -> PathBuf {
    let run = Path::new(RUNS).join(typed);
    let is_name = typed.components().count() == 1 && fs::symlink_metadata(typed).is_err();
    if is_name && is_run(&run) { run } else { typed.into() }
}

/// Returns a sentence on a path where nothing is, with what there is: the checkpoints of its run,
/// or the runs of its directory.
pub fn nothing_at(path: &Path) -> Option<String> {
    if fs::symlink_metadata(path).is_ok() {
        return None;
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new(RUNS));
    let mut names = Vec::new();
    if parent.ends_with(CHECKPOINTS)
        && let Some(run) = parent.parent()
    {
        let steps = Store::open_to_read(run).steps().unwrap_or_default();
        names.extend(steps.into_iter().map(|step| Store::open_to_read(run).path(step)));
    } else {
        names = by_age(parent);
    }
    names.drain(..names.len().saturating_sub(NAMED_MAX));
    let there: Vec<String> = names.iter().map(|name| name.display().to_string()).collect();
    let there = match &there[..] {
        [] => String::new(),
        there => format!("; there is {}", there.join(", ")),
    };
    Some(format!("{}: no run or checkpoint is there{there}", path.display()))
}

fn newest_with_checkpoint(runs: &Path) -> Option<PathBuf> {
    by_age(runs).into_iter().rev().find(|run| {
        // One that cannot be read has none to use.
        Store::open_to_read(run).steps().is_ok_and(|steps| !steps.is_empty())
    })
}

/// Returns the time at which a run last wrote to its record, or was created.
pub fn last_change(run: &Path) -> SystemTime {
    for place in [run.join("metrics.jsonl"), run.join("run.toml"), run.to_path_buf()] {
        if let Ok(found) = fs::metadata(place)
            && let Ok(modified) = found.modified()
        {
            return modified;
        }
    }
    SystemTime::UNIX_EPOCH
}

pub fn is_run(path: &Path) -> bool {
    path.is_dir() && PARTS.iter().any(|part| fs::symlink_metadata(path.join(part)).is_ok())
}
