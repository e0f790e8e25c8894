//! Errors of the record, the trace and the charts of a run.

use std::io;
use std::path::PathBuf;

use crate::Setting;
use crate::files::is_disk_full;

/// Failure to read or write the record, the trace or a chart.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    #[error(
        "{}: cannot be written ({why}); {}set another {}",
        path.display(),
        if is_disk_full(why) { "free space there or " } else { "" },
        Setting::Out
    )]
    Write { path: PathBuf, why: io::Error },
    #[error(
        "{}: cannot be read ({why}); move it away or set another {}",
        path.display(),
        Setting::Out
    )]
    Read { path: PathBuf, why: io::Error },
    #[error("{}: the trace cannot be written ({why}); free space there or name another file",
        path.display())]
    Trace { path: PathBuf, why: io::Error },
    #[error("{}: cannot be written ({why}); the run goes on without it; free space there",
        path.display())]
    Chart { path: PathBuf, why: io::Error },
}

impl MetricsError {
    /// Returns true if the disk or the user's quota is full.
    pub fn is_disk_full(&self) -> bool {
        match self {
            Self::Write { why, .. } | Self::Trace { why, .. } | Self::Chart { why, .. } => {
                is_disk_full(why)
            }
            Self::Read { .. } => false,
        }
    }
}
