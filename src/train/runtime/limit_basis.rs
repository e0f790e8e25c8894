//! Basis of a limit of a device's memory.

use std::fmt;

use potluck_core::Setting;

/// Basis of a limit of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitBasis {
    /// Total memory as reported by the driver.
    Driver,
    /// Memory not used by other programs, as reported by the driver.
    Free,
    /// `train.device_memory_mib`.
    Setting,
    /// Memory for the device as its node reports.
    Node,
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
            Self::Node => {
                write!(f, "as its node reports ({} there overrides that)", Setting::DeviceMemory)
            }
            Self::Setting => write!(f, "as {} sets it", Setting::DeviceMemory),
        }
    }
}
