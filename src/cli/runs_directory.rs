//! Directory of runs: its name where none is given, and the runs in it by age.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use potluck_train::checkpoint::Store;

/// Parent directory of runs for which no --out is given.
pub const RUNS: &str = "runs";
/// Entries of a run directory; each one has at least one of them.
const PARTS: [&str; 4] = ["run.toml", "metrics.jsonl", "checkpoints", "lock"];

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

/// Returns the newest run that has a checkpoint for `latest`, and any other path as it is.
///
/// # Errors
/// Returns a sentence if there is no such run.
pub fn named_run(typed: PathBuf) -> Result<PathBuf, String> {
    if typed != Path::new("latest") {
        return Ok(typed);
    }
    newest_with_checkpoint(Path::new(RUNS))
        .ok_or_else(|| format!("no run in {RUNS}/ has a checkpoint; name a directory"))
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
