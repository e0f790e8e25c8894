//! Errors of checkpoints: each message is one sentence with the next action.

use std::io;
use std::path::PathBuf;

use potluck_core::Setting;
use potluck_core::files::is_disk_full;
use potluck_core::format::listed;

/// A checkpoint that cannot be written, read or trusted.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error(
        "{}: the checkpoint cannot be written ({why}); {}set another {}",
        path.display(),
        if is_disk_full(why) { "free space there or " } else { "" },
        Setting::Out
    )]
    Write { path: PathBuf, why: io::Error },
    #[error("{}: cannot be read ({why}); use another checkpoint", path.display())]
    Read { path: PathBuf, why: io::Error },
    #[error("{}: is damaged: {why}; use another checkpoint", path.display())]
    Damaged { path: PathBuf, why: String },
    #[error(
        "{}: has format {found}, and this version of potluck reads formats {oldest} to {newest}; \
         use the version that wrote it{}",
        path.display(),
        reader.map_or_else(String::new, |commit| format!(", that of commit {commit}"))
    )]
    Format {
        path: PathBuf,
        found: u64,
        oldest: u64,
        newest: u64,
        /// Last commit of the program that reads the format found.
        reader: Option<&'static str>,
    },
    #[error(
        "{}: needs {}, which this version of potluck does not know; use the version that wrote it",
        path.display(),
        listed(names)
    )]
    Needs { path: PathBuf, names: Vec<String> },
    #[error(
        "{}: there is no checkpoint; give the directory of a run or of a checkpoint",
        path.display()
    )]
    None { path: PathBuf },
    #[error(
        "{}: is a checkpoint itself and has checkpoints/ as a run; name the one of \
         checkpoints/ that is meant, or move {} elsewhere",
        path.display(), path.join("manifest.json").display()
    )]
    Ambiguous { path: PathBuf },
    #[error("{}: does not name the best checkpoint ({why}); name a checkpoint directory",
        path.display())]
    Best { path: PathBuf, why: String },
    #[error(
        "{}: {}: {}",
        path.display(),
        match older {
            Some(older) => format!(
                "the two newest checkpoints are damaged; to go back further, name an older one, \
                 such as {}",
                older.display()
            ),
            None => "no checkpoint is good; start a new run".into(),
        },
        reasons.join("; ")
    )]
    NoneGood {
        path: PathBuf,
        reasons: Vec<String>,
        /// An older checkpoint, which was not tried.
        older: Option<PathBuf>,
    },
    #[error(
        "{}: the run is in use by {by}; wait until it ends or set another {}",
        path.display(),
        Setting::Out
    )]
    InUse { path: PathBuf, by: String },
    #[error("{}: was opened to be read only", path.display())]
    ReadOnly { path: PathBuf },
    #[error("the tensor '{name}' cannot be saved: {why}")]
    Unsavable { name: String, why: &'static str },
    #[error(
        "the checkpoint has no moments of '{name}', which was frozen; freeze it here too ({}), or \
         start a new run",
        Setting::Groups
    )]
    NoMoments { name: String },
    #[error("the checkpoint has no tensor '{name}'; use the model that it was trained with")]
    NoTensor { name: String },
    #[error(
        "the checkpoint's tensor '{name}' has the shape {found:?} instead of {wanted:?}; \
         use the model that it was trained with"
    )]
    Shape { name: String, found: Vec<usize>, wanted: Vec<usize> },
}

impl CheckpointError {
    /// Returns true for a checkpoint that another version of potluck can read.
    pub fn is_of_another_version(&self) -> bool {
        matches!(self, Self::Format { .. } | Self::Needs { .. })
    }
}
