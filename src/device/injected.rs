//! Faults of devices that tests ask for.

use std::thread;
use std::time::Duration;

use super::error::DeviceError;

/// The longest that an injected hang lasts: a device with a longer deadline gets over it.
pub const INJECTED_HANG_MAX: Duration = Duration::from_secs(120);

/// A fault that a device is told to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedFault {
    /// The device is gone.
    Lost,
    /// The driver refuses an allocation.
    OutOfMemory,
    /// The driver does not come back, for [`INJECTED_HANG_MAX`].
    Hang,
}

impl InjectedFault {
    /// The fault on a device without a driver: the errors that a driver's failures become.
    pub fn to_error(self, adapter: &str) -> Result<(), DeviceError> {
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
