//! Errors that end a run before its last step, and the process's exit codes.

use std::fmt;
use std::path::PathBuf;

use super::continuation::ResumeCommand;
use crate::checkpoint::CheckpointError;
use crate::families::FamilyError;
use crate::gguf::GgufError;
use crate::hugging_face::HuggingFaceError;
use crate::runtime::RuntimeError;
use potluck_core::faults::FaultError;
use potluck_core::files::is_disk_full;
use potluck_core::format::{gibibytes_down, gibibytes_up};
use potluck_core::metrics::MetricsError;
use potluck_core::setting::as_fields;
use potluck_core::{Rank, Setting};
use potluck_data::{DataError, PrepareError};
use potluck_graph::ShapeError;
use potluck_graph::optim::ParameterGroupError;
use potluck_kernels::device::DeviceError;

pub use crate::runtime::error::{EXIT_CONFIGURATION, EXIT_DEFECT, EXIT_RESTART};

/// Error that keeps a run from starting or continuing.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Fault(#[from] FaultError),
    #[error("{setting}: {0}", setting = Setting::Groups)]
    Groups(ParameterGroupError),
    #[error(transparent)]
    HuggingFace(#[from] HuggingFaceError),
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(
        "{device} ({rank}) does not hold the same parameters as the other ranks after step {step}: \
         {what}; set {} to repair them",
        Setting::Repair
    )]
    ReplicaMismatch { rank: Rank, device: String, step: u64, what: String },
    /// End of a run that can be continued.
    #[error(
        "{cause}; the last checkpoint is {checkpoint}; {}: {command}",
        how(*.left_out, *.spare)
    )]
    Stopped {
        cause: Box<TrainError>,
        checkpoint: PathBuf,
        command: Box<ResumeCommand>,
        left_out: LeftOut,
        /// Number of other devices left out because they fit in no pipeline or tensor group.
        spare: usize,
    },
    #[error(
        "the run used {devices}, but {} {} not here; continue it on the devices found here with: \
         {command}",
        missing.join(" and "),
        if missing.len() == 1 { "is" } else { "are" }
    )]
    MissingDevices { devices: String, missing: Vec<String>, command: Box<ResumeCommand> },
    #[error(
        "{path}: the training data are missing, and so is {beside}; move the data to one of these \
         paths, or pass --data PATH"
    )]
    MissingData { path: PathBuf, beside: PathBuf },
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    #[error(
        "{path}: {why}; {}choose another {}",
        if is_disk_full(why) { "free space there or " } else { "" },
        Setting::Out
    )]
    Io { path: PathBuf, why: std::io::Error },
    #[error(
        "{path}: the disk has {} left, and the first checkpoints ({count}) take {}; free space \
         there or choose another --out",
        gibibytes_down(*.free),
        gibibytes_up(*.needed)
    )]
    DiskFull { path: PathBuf, count: u64, needed: u64, free: u64 },
    #[error("{what} cannot be started: {why}; raise the limits of this user (see ulimit -a)")]
    System { what: &'static str, why: std::io::Error },
    #[error("the model cannot be built: {0}")]
    Model(ShapeError),
    #[error(
        "{out} holds a run already; continue it with: {}; or choose another directory with --out",
        ResumeCommand::of_run(out)
    )]
    Occupied { out: PathBuf },
    #[error(
        "{out} was trained from step {loaded} to {now} by another process meanwhile; resume it \
         again with: {}",
        ResumeCommand::of_run(out)
    )]
    WentOn { out: PathBuf, loaded: u64, now: u64 },
    #[error("{what} does not fit the checkpoint: {why}")]
    Mismatch { what: String, why: String },
    #[error("{0}")]
    InvalidRequest(String),
    #[error(
        "{count} steps in a row were not finite; in the last one, {reason}, which began at \
         {began}; lower {} or set {}, then resume from {checkpoint}",
        Setting::LearningRate,
        Setting::Clip
    )]
    Diverged { count: u64, reason: String, began: String, checkpoint: PathBuf },
    #[error(
        "{count} steps in a row were not finite; in the last one, {reason}; lower the learning \
         rate, or set {}",
        Setting::Clip
    )]
    NotFinite { count: u64, reason: String },
    /// Non-finite parameter that a save would keep; `saved` is the last save, if any.
    #[error(
        "the parameter '{name}' is not finite after step {step}; lower {} or set {}{}",
        Setting::LearningRate,
        Setting::Clip,
        match saved {
            Some(path) => format!(", then resume from {}", path.display()),
            None => String::new(),
        }
    )]
    WorthlessSave { name: String, step: u64, saved: Option<PathBuf> },
    #[error(
        "the model carries its state from step to step, so each of the {batch} samples of a batch \
         goes through a part of the text of its own, which must have a sample of {distance} \
         tokens: set {} or {} lower",
        Setting::Batch,
        Setting::Context
    )]
    ShortStreams { batch: u32, distance: u64 },
    /// Error of a [`Trainer`](super::Trainer): its message names fields of options where the
    /// program's names keys and flags.
    #[error("{0}")]
    Library(LibraryError),
    /// The run of this node is over, because it lost the other nodes.
    #[error("{why}")]
    NodesLost { why: String },
    #[error("{0}; this is a defect of potluck, please report it")]
    Defect(String),
}

/// Not `#[from]`: the message contains the whole cause, which must not be printed again as the
/// source.
impl From<ShapeError> for TrainError {
    fn from(error: ShapeError) -> Self {
        Self::Model(error)
    }
}

impl From<ParameterGroupError> for TrainError {
    fn from(error: ParameterGroupError) -> Self {
        Self::Groups(error)
    }
}

impl From<FamilyError> for TrainError {
    fn from(error: FamilyError) -> Self {
        match error {
            FamilyError::Shape(error) => Self::Model(error),
            FamilyError::Unfit(why) => Self::InvalidRequest(why),
        }
    }
}

/// Error worded for the library, also in debug output.
pub struct LibraryError {
    pub cause: Box<TrainError>,
}

impl fmt::Display for LibraryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        as_fields(|| self.cause.fmt(f))
    }
}

impl fmt::Debug for LibraryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

impl TrainError {
    /// This error as an error of the library.
    pub(super) fn of_library(self) -> Self {
        match self {
            Self::Library(_) => self,
            other => Self::Library(LibraryError { cause: Box::new(other) }),
        }
    }

    /// Returns the error itself, without the additions for the user of a run or of the library.
    pub fn cause(&self) -> &Self {
        match self {
            Self::Library(LibraryError { cause }) | Self::Stopped { cause, .. } => cause.cause(),
            other => other,
        }
    }

    /// Returns the process's exit code.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Library(error) => error.cause.exit_code(),
            Self::Runtime(error) => error.exit_code(),
            Self::Stopped { cause, .. } => cause.exit_code(),
            // Space may become available; a path that cannot be written stays so.
            Self::Checkpoint(CheckpointError::Write { why, .. })
            | Self::Prepare(PrepareError::Write { why, .. })
            | Self::HuggingFace(HuggingFaceError::Write { why, .. })
            | Self::Gguf(GgufError::Files(HuggingFaceError::Write { why, .. }))
            | Self::Io { why, .. } => {
                if is_disk_full(why) {
                    EXIT_RESTART
                } else {
                    EXIT_CONFIGURATION
                }
            }
            Self::Metrics(error) => {
                if error.is_disk_full() {
                    EXIT_RESTART
                } else {
                    EXIT_CONFIGURATION
                }
            }
            Self::ReplicaMismatch { .. } | Self::DiskFull { .. } => EXIT_RESTART,
            Self::NodesLost { .. } => EXIT_RESTART,
            // A process that is to be replaced may still save the run.
            Self::Checkpoint(CheckpointError::InUse { .. }) | Self::WentOn { .. } => EXIT_RESTART,
            Self::Defect(_) => EXIT_DEFECT,
            _ => EXIT_CONFIGURATION,
        }
    }

    /// Returns true if the run can continue from its last checkpoint after this error.
    pub fn can_go_on(&self) -> bool {
        match self {
            Self::Runtime(error) => error.can_go_on(),
            Self::Library(error) => error.cause.can_go_on(),
            // The run itself is sound.
            Self::Checkpoint(CheckpointError::Write { .. })
            | Self::Io { .. }
            | Self::Metrics(_) => true,
            other => other.exit_code() == EXIT_RESTART,
        }
    }

    /// Returns the rank of the device that was lost, hangs or is out of memory, if the run has
    /// several devices.
    pub fn lost_rank(&self) -> Option<Rank> {
        use DeviceError::{Lost, NodeLost, OutOfMemory, Timeout};
        match self {
            Self::Runtime(RuntimeError::Rank {
                rank,
                error: Lost { .. } | NodeLost { .. } | OutOfMemory { .. } | Timeout { .. },
            }) => Some(*rank),
            Self::Library(error) => error.cause.lost_rank(),
            _ => None,
        }
    }

    /// Returns true if the error is the loss of another node.
    pub fn is_of_node(&self) -> bool {
        use DeviceError::NodeLost;
        matches!(self, Self::Runtime(RuntimeError::Rank { error: NodeLost { .. }, .. }))
    }

    /// Returns the rank of the device that failed, if the run has several devices.
    pub fn failed_rank(&self) -> Option<Rank> {
        match self {
            Self::Runtime(RuntimeError::Rank { rank, .. }) | Self::ReplicaMismatch { rank, .. } => {
                Some(*rank)
            }
            Self::Library(error) => error.cause.failed_rank(),
            Self::Stopped { cause, .. } => cause.failed_rank(),
            _ => None,
        }
    }
}

/// Devices that the command which continues a run leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftOut {
    None,
    /// The device that failed.
    Failed,
    /// All of them, because no other is left: the command uses the devices that are found.
    All,
}

/// Words before the command that continues a run. `spare` is the number of devices that fit in no
/// pipeline or tensor group.
fn how(left_out: LeftOut, spare: usize) -> String {
    let others = match spare {
        0 => String::new(),
        1 => ", and without another one, which fits in no pipeline or tensor group,".into(),
        spare => format!(", and without {spare} others, which fit in no pipeline or tensor group,"),
    };
    let none_left = "no other device of the run is left, continue on";
    match (left_out, spare) {
        (LeftOut::None, _) => "continue it with".into(),
        (LeftOut::Failed, _) => format!("continue without that device{others} with"),
        (LeftOut::All, 0) => format!("{none_left} what is found with"),
        (LeftOut::All, _) => format!("{none_left} some that are found with"),
    }
}

impl From<DeviceError> for TrainError {
    fn from(error: DeviceError) -> Self {
        Self::Runtime(error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_command_leaves_out_is_said() {
        assert_eq!(how(LeftOut::None, 0), "continue it with");
        assert_eq!(how(LeftOut::Failed, 0), "continue without that device with");
        let one = "continue without that device, and without another one, which fits in no \
                   pipeline or tensor group, with";
        assert_eq!(how(LeftOut::Failed, 1), one);
        assert!(how(LeftOut::Failed, 2).contains("without 2 others"));
        assert!(how(LeftOut::All, 0).ends_with("continue on what is found with"));
        assert!(how(LeftOut::All, 1).ends_with("continue on some that are found with"));
    }

    #[test]
    fn an_error_of_the_library_names_fields_and_its_cause_keys() {
        let of = || TrainError::ShortStreams { batch: 4, distance: 8 }.of_library();
        let (error, text) = (of(), of().to_string());
        assert!(text.ends_with("set TrainerOptions::batch or the context lower"), "{text}");
        assert_eq!(format!("{error:?}"), format!("Library({text:?})"));
        let cause = error.cause().to_string();
        assert!(cause.ends_with("set train.batch or model.context lower"), "{cause}");
    }

    #[test]
    fn a_full_disk_is_healed_by_time_wherever_it_is_met() {
        let full = || std::io::Error::from(std::io::ErrorKind::StorageFull);
        let write = |why| HuggingFaceError::Write { path: "model".into(), why };
        assert_eq!(TrainError::from(write(full())).exit_code(), EXIT_RESTART);
        assert_eq!(TrainError::from(GgufError::from(write(full()))).exit_code(), EXIT_RESTART);
        let refused = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        assert_eq!(TrainError::from(write(refused)).exit_code(), EXIT_CONFIGURATION);
    }

    #[test]
    fn a_thread_that_cannot_be_started_is_no_full_disk() {
        let why = std::io::Error::from(std::io::ErrorKind::WouldBlock);
        let error = TrainError::System { what: "the loader's thread", why };
        let text = error.to_string();
        assert!(text.starts_with("the loader's thread cannot be started: "), "{text}");
        assert!(text.contains("limits") && !text.contains("--out"), "{text}");
        assert_eq!(error.exit_code(), EXIT_CONFIGURATION);
    }
}
