//! Why a run ends before its last step, and the exit code that says so.

use std::path::PathBuf;

use super::checkpoint::CheckpointError;
use super::fault::FaultError;
use crate::base::Rank;
use crate::data::DataError;
use crate::device::DeviceError;
use crate::metrics::MetricsError;

/// A defect of ours.
pub const EXIT_DEFECT: i32 = 70;
/// Please restart me: a lost device, a full disk, SIGTERM.
pub const EXIT_RESTART: i32 = 75;
/// The configuration or the data must change first.
pub const EXIT_CONFIGURATION: i32 = 78;

/// A run that cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Fault(#[from] FaultError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Of one of several devices.
    #[error("{rank}: {error}")]
    Rank { rank: Rank, error: DeviceError },
    #[error(
        "{device} ({rank}) does not hold the same parameters as the others after step {step}: \
         {what}; resume from {checkpoint}, without that device or with \
         parallel.on_difference=repair"
    )]
    Differs { rank: Rank, device: String, step: u64, what: String, checkpoint: PathBuf },
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    #[error("{path}: {why}; free space there or choose another --out, then resume")]
    Io { path: PathBuf, why: std::io::Error },
    #[error("the model cannot be built: {0}")]
    Model(#[from] crate::graph::ShapeError),
    #[error(
        "{out} holds a run already: continue it with --resume latest, \
         or choose another directory with --out"
    )]
    Occupied { out: PathBuf },
    #[error(
        "the run needs {needed} of memory and {available} are available; lower \
         train.micro_batch, train.batch, model.context, model.width or model.layers"
    )]
    Memory { needed: String, available: String },
    #[error(
        "{adapter}: the run needs {needed} of its memory and it has {has}, {told}; lower \
         train.micro_batch, model.context, model.width or model.layers, or choose another device"
    )]
    DeviceMemory { adapter: String, needed: String, has: String, told: &'static str },
    #[error(
        "{adapter}: its driver has no memory for {what}, of {needed} that the run needs; lower \
         train.micro_batch, model.context, model.width or model.layers, or choose another device"
    )]
    NoRoom { adapter: String, what: String, needed: String },
    #[error("{what} does not fit the checkpoint: {why}")]
    Mismatch { what: String, why: String },
    #[error("{0}")]
    Unusable(String),
    #[error(
        "{count} steps in a row were not finite, the last because {reason}, which began at \
         {began}; lower optim.lr or set optim.clip, then resume from {checkpoint}"
    )]
    Diverged { count: u64, reason: String, began: String, checkpoint: PathBuf },
    #[error("{0}; this is a defect of potluck, please report it")]
    Defect(String),
}

impl TrainError {
    /// Whether fewer samples at a time may help.
    pub fn is_of_size(&self) -> bool {
        use DeviceError::{LoopTooLong, OutOfMemory, TooLarge};
        let of_device = |error: &DeviceError| {
            matches!(error, TooLarge { .. } | LoopTooLong { .. } | OutOfMemory { .. })
        };
        match self {
            Self::Memory { .. } | Self::DeviceMemory { .. } | Self::NoRoom { .. } => true,
            Self::Device(error) => of_device(error),
            _ => false,
        }
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Device(error) | Self::Rank { error, .. } => match error {
                DeviceError::NoAdapter { .. }
                | DeviceError::NoMatch { .. }
                | DeviceError::BadSelector { .. }
                | DeviceError::Open { .. }
                | DeviceError::TooLarge { .. }
                | DeviceError::LoopTooLong { .. }
                | DeviceError::Uncertified { .. } => EXIT_CONFIGURATION,
                DeviceError::Refused { .. } => EXIT_DEFECT,
                DeviceError::OutOfMemory { .. }
                | DeviceError::Lost { .. }
                | DeviceError::ReadBack { .. }
                | DeviceError::Timeout { .. } => EXIT_RESTART,
            },
            // A disk that is full or gone: nothing is wrong with the run itself.
            Self::Checkpoint(CheckpointError::Write { .. }) => EXIT_RESTART,
            Self::Differs { .. } | Self::Metrics(_) | Self::Io { .. } => EXIT_RESTART,
            Self::Defect(_) => EXIT_DEFECT,
            _ => EXIT_CONFIGURATION,
        }
    }
}
