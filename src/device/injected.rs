//! Injected faults of devices, for tests.

use std::thread;
use std::time::Duration;

use super::error::DeviceError;

/// The longest that an injected hang lasts; a device with a longer deadline recovers from it.
pub const INJECTED_HANG_MAX: Duration = Duration::from_secs(120);

/// Fault to inject into a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum InjectedFault {
    /// The device is lost.
    Lost,
    /// The driver refuses an allocation.
    OutOfMemory,
    /// The driver does not return, for [`INJECTED_HANG_MAX`].
    Hang,
}

impl InjectedFault {
    /// Injects the fault into a device without a driver: returns the error that the driver's
    /// failure becomes, or sleeps for a hang.
    pub fn inject_on_host(self, adapter: &str) -> Result<(), DeviceError> {
        let adapter = adapter.to_string();
        match self {
            Self::Lost => Err(DeviceError::Lost { adapter, why: "injected".into() }),
            Self::OutOfMemory => {
                Err(DeviceError::OutOfMemory { adapter, what: "an injected allocation".into() })
            }
            Self::Hang => {
                thread::sleep(INJECTED_HANG_MAX);
                Ok(())
            }
        }
    }
}
