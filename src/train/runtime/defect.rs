//! Errors of devices whose threads do not keep to their protocol.

use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::Executor;
use potluck_parallel::StepError;

/// Returns the error of a device that was given a message that it does not expect.
pub fn defect(device: &dyn Executor, error: &StepError) -> DeviceError {
    refused(device, &error.to_string())
}

/// Returns the error of a device whose threads do not keep to their protocol.
pub(crate) fn refused(device: &dyn Executor, why: &str) -> DeviceError {
    DeviceError::Refused {
        adapter: device.name().to_string(),
        what: "a step".into(),
        why: format!("{why}, which is a defect of potluck; please report it"),
    }
}
