//! Injected faults of devices, for tests.

use std::thread;
use std::time::Duration;

use super::error::DeviceError;
use potluck_core::faults::InjectedFault;

/// The longest that an injected hang lasts; a device with a longer deadline recovers from it.
pub const INJECTED_HANG_MAX: Duration = Duration::from_secs(120);

/// Injects a fault into a device without a driver: returns the error that the driver's failure
/// becomes, or sleeps for a hang.
pub(crate) fn inject_on_host(fault: InjectedFault, adapter: &str) -> Result<(), DeviceError> {
    let adapter = adapter.to_string();
    match fault {
        InjectedFault::Lost => Err(DeviceError::Lost { adapter, why: "injected".into() }),
        InjectedFault::OutOfMemory => {
            Err(DeviceError::OutOfMemory { adapter, what: "an injected allocation".into() })
        }
        InjectedFault::Hang => {
            thread::sleep(INJECTED_HANG_MAX);
            Ok(())
        }
    }
}
