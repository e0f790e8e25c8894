//! Errors of opening and running devices, and the process's exit codes.

use std::fmt;

use super::limit_basis::LimitBasis;
use potluck_core::format::no_thread;
use potluck_core::metrics::MetricsError;
use potluck_core::{Rank, Setting, Wording};
use potluck_kernels::device::DeviceError;

/// Exit code of a defect of potluck.
pub const EXIT_DEFECT: i32 = 70;
/// Exit code that asks the job manager to restart the run: a lost device, a full disk, SIGTERM.
pub const EXIT_RESTART: i32 = 75;
/// Exit code of an error that needs a change of the configuration or the data.
pub const EXIT_CONFIGURATION: i32 = 78;

/// Error of devices that cannot start or continue a run.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Error of one of several devices, with its rank, or, before ranks are assigned, its position
    /// in the list of devices.
    #[error("{rank}: {error}")]
    Rank { rank: Rank, error: DeviceError },
    #[error(transparent)]
    Trace(#[from] MetricsError),
    #[error(
        "the run needs {needed} of memory and {available} are available; lower {}, {} or {}",
        Setting::MicroBatchSize,
        Setting::Batch,
        Setting::ModelSize
    )]
    Memory { needed: String, available: String },
    #[error(
        "{adapter}: the run needs {needed} of its memory and it has {has}, {basis}; lower {} or \
         {}, set {}, {}, or choose another device",
        Setting::MicroBatchSize,
        Setting::ModelSize,
        Setting::Recompute,
        Setting::MoreStages
    )]
    DeviceMemory { adapter: String, needed: String, has: String, basis: LimitBasis },
    #[error(
        "{adapter}: it has no memory for {what}, of {needed} that the run needs; lower {} or {}, \
         {}, or choose another device",
        Setting::MicroBatchSize,
        Setting::ModelSize,
        Setting::MoreStages
    )]
    NoRoom { adapter: String, what: String, needed: String },
    /// Request without a possible placement on the devices.
    #[error("{0}")]
    Unplaceable(Wording),
    /// Failure of a step during its update.
    #[error(
        "{error}; the update of that step had begun, so that the parameters on the devices that \
         are left may be those of two steps"
    )]
    HalfUpdated { error: Box<Self> },
    #[error("{0}")]
    InvalidRequest(String),
    #[error("{0}; this is a defect of potluck, please report it")]
    Defect(String),
}

impl RuntimeError {
    pub(crate) fn unplaceable(why: impl fmt::Display) -> Self {
        Self::Unplaceable(Wording::new(why))
    }

    /// Returns the error of a thread that cannot be started.
    pub fn no_thread(error: std::io::Error) -> Self {
        Self::InvalidRequest(no_thread(error))
    }

    /// Returns true if a smaller micro-batch may help.
    pub fn is_capacity_error(&self) -> bool {
        use DeviceError::{LoopTooLong, OutOfMemory, TooLarge};
        matches!(
            self,
            Self::Memory { .. }
                | Self::DeviceMemory { .. }
                | Self::NoRoom { .. }
                | Self::Device(TooLarge { .. } | LoopTooLong { .. } | OutOfMemory { .. })
        )
    }

    /// Returns true if memory is short, which other programs may have.
    pub(crate) fn is_lack_of_memory(&self) -> bool {
        self.is_capacity_error()
            && !matches!(
                self,
                Self::Device(DeviceError::TooLarge { .. } | DeviceError::LoopTooLong { .. })
            )
    }

    /// Attributes the error to the device at a position in the list of `count` devices, if other
    /// devices may not have it.
    pub fn of_position(self, position: usize, count: usize) -> Self {
        let is_not_open = matches!(self, Self::Device(DeviceError::Open { .. }));
        if count <= 1 || !(is_not_open || self.can_go_on()) {
            return self;
        }
        match self {
            Self::Device(error) => Self::Rank { rank: Rank(position as u32), error },
            other => other,
        }
    }

    /// Returns true if the run can continue from its last checkpoint: after a fault, and after a
    /// panic of a device's thread, which may not occur again.
    pub(crate) fn can_go_on(&self) -> bool {
        use DeviceError::Panicked;
        let is_panic = matches!(
            self,
            Self::Device(Panicked { .. }) | Self::Rank { error: Panicked { .. }, .. }
        );
        is_panic || self.exit_code() == EXIT_RESTART
    }

    /// Returns the process's exit code.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Device(error) | Self::Rank { error, .. } => match error {
                DeviceError::NoAdapter { .. }
                | DeviceError::NoMatch { .. }
                | DeviceError::BadSelector { .. }
                | DeviceError::Repeated { .. }
                | DeviceError::Open { .. }
                | DeviceError::TooLarge { .. }
                | DeviceError::LoopTooLong { .. }
                | DeviceError::Uncertified { .. }
                | DeviceError::CustomKernel { .. }
                | DeviceError::Input { .. } => EXIT_CONFIGURATION,
                DeviceError::Refused { .. } | DeviceError::Panicked { .. } => EXIT_DEFECT,
                DeviceError::OutOfMemory { .. }
                | DeviceError::Lost { .. }
                | DeviceError::NodeLost { .. }
                | DeviceError::ReadBack { .. }
                | DeviceError::Timeout { .. } => EXIT_RESTART,
            },
            Self::HalfUpdated { error } => error.exit_code(),
            Self::Trace(_) => EXIT_RESTART,
            Self::Defect(_) => EXIT_DEFECT,
            Self::Memory { .. }
            | Self::DeviceMemory { .. }
            | Self::NoRoom { .. }
            | Self::Unplaceable(_)
            | Self::InvalidRequest(_) => EXIT_CONFIGURATION,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_cannot_be_opened_is_named_by_its_position_like_one_that_fails() {
        let adapter = String::from("a device");
        let failures = [
            DeviceError::Open { adapter: adapter.clone(), why: "it is gone".into() },
            DeviceError::Panicked { adapter: adapter.clone(), what: "a step".into(), text: None },
            DeviceError::Lost { adapter, why: "injected".into() },
        ];
        for error in failures {
            let named = RuntimeError::Device(error.clone()).of_position(2, 3);
            assert!(matches!(named, RuntimeError::Rank { rank: Rank(2), .. }), "{named:?}");
            let alone = RuntimeError::Device(error).of_position(0, 1);
            assert!(matches!(alone, RuntimeError::Device(_)), "{alone:?}");
        }
        // Without that device the selector would be as wrong.
        let unmatched = DeviceError::BadSelector { selector: "?".into(), why: "no".into() };
        let named = RuntimeError::Device(unmatched).of_position(1, 2);
        assert!(matches!(named, RuntimeError::Device(_)), "{named:?}");
    }
}
