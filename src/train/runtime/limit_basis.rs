//! Basis of a limit of a device's memory.

use std::fmt;

use potluck_core::Setting;

/// Basis of a limit of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitBasis {
    /// Report of the driver.
    Driver,
    /// `train.device_memory_mib`.
    Setting,
}

impl fmt::Display for LimitBasis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Driver => {
                write!(f, "as its driver reports ({} overrides that)", Setting::DeviceMemory)
            }
            Self::Setting => write!(f, "as {} sets it", Setting::DeviceMemory),
        }
    }
}
