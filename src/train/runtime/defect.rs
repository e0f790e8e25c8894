//! Errors of devices for violations of the protocol between threads.

use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::Executor;
use potluck_parallel::StepError;

/// Returns the error of a device that received an unexpected message.
pub fn defect(device: &dyn Executor, error: &StepError) -> DeviceError {
    refused(device, &error.to_string())
}

/// Returns the error of a device for a violation of the protocol between threads.
pub(crate) fn refused(device: &dyn Executor, why: &str) -> DeviceError {
    DeviceError::Refused {
        adapter: device.name().to_string(),
        what: "a step".into(),
        why: format!("{why}, which is a defect of potluck; please report it"),
    }
}
