//! Basis of a limit of a device's memory.

use std::fmt;

use potluck_core::Setting;

/// Basis of a limit of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitBasis {
    /// Report of the driver on the memory that there is.
    Driver,
    /// Report of the driver on what other programs left of it.
    Free,
    /// `train.device_memory_mib`.
    Setting,
}

impl fmt::Display for LimitBasis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Driver => {
                write!(f, "as its driver reports ({} overrides that)", Setting::DeviceMemory)
            }
            Self::Free => {
                write!(f, "free, as its driver reports ({} overrides that)", Setting::DeviceMemory)
            }
            Self::Setting => write!(f, "as {} sets it", Setting::DeviceMemory),
        }
    }
}
