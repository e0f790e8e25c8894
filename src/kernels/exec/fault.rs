//! Injected faults on an opened adapter, for tests: a lost device is destroyed, and a hanging one
//! is kept busy.

use std::time::{Duration, Instant};

use crate::Pipelines;
use crate::bench::spin::{self, Spin};
use crate::device::{DeviceError, Gpu, INJECTED_HANG_MAX, inject_on_host};
use potluck_core::faults::InjectedFault;

/// Injects a fault into a device.
pub fn inject(
    fault: InjectedFault,
    gpu: &Gpu,
    pipelines: &mut Pipelines,
) -> Result<(), DeviceError> {
    match fault {
        // The next call detects the loss, as after a real one.
        InjectedFault::Lost => {
            gpu.destroy();
            Ok(())
        }
        InjectedFault::Hang => hang(gpu, pipelines, INJECTED_HANG_MAX),
        InjectedFault::OutOfMemory => inject_on_host(fault, &gpu.name),
    }
}

/// Keeps the device busy and the thread in its driver, with no tick of the heartbeat.
fn hang(gpu: &Gpu, pipelines: &mut Pipelines, time: Duration) -> Result<(), DeviceError> {
    let spinning = Spin::new(gpu, pipelines)?;
    let end = Instant::now() + time;
    while Instant::now() < end {
        let submission_index = Some(spinning.submit(gpu, spin::GROUPS_MAX));
        let timeout = Some(end.saturating_duration_since(Instant::now()));
        // A timeout ends the loop as well; the fault is over then.
        let _ = gpu.device.poll(wgpu::PollType::Wait { submission_index, timeout });
    }
    Ok(())
}
