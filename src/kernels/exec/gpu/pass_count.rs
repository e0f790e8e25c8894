//! Count of the passes that a device has run: each pass ends with a dispatch that adds 1 on the
//! device, and the count is read with the results of a step. wgpu counts a submission as done that
//! the driver has given up: command buffers of Metal end with an error that wgpu-hal 30 does not
//! read, and all fences of a removed DX12 device are reached. Without the count, a step would go on
//! with the values of the one before.
//!
//! A pass is a command buffer of Metal. Copies between passes are others, and are not counted.

use crate::device::{DeviceError, Gpu};
use crate::ops::passes;
use crate::{Binding, BoundDispatch, Pipelines};
use potluck_core::DType;

/// Bytes of the count.
pub(super) const COUNT_BYTES: u64 = DType::U32.bytes() as u64;

/// Counter of the passes of a command stream.
pub(super) struct PassCounter {
    bound: BoundDispatch,
    /// The device's count.
    pub count: wgpu::Buffer,
    /// Passes that were recorded, modulo 2^32 as on the device.
    pub recorded: u32,
    /// True if the commands that are not submitted have a counted pass.
    has_pass: bool,
}

impl PassCounter {
    /// Compiles the kernel and allocates its buffer.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device refuses the kernel or has too little memory.
    pub fn new(gpu: &Gpu, pipelines: &mut Pipelines) -> Result<Self, DeviceError> {
        let dispatch = passes::dispatch();
        let count = gpu.storage("count of passes", COUNT_BYTES)?;
        let bound = BoundDispatch::new(gpu, pipelines, &dispatch, &|_| Binding::whole(&count))?;
        Ok(Self { bound, count, recorded: 0, has_pass: false })
    }

    /// Counts a pass that ends now.
    pub fn end(&mut self, pass: &mut wgpu::ComputePass) {
        self.bound.record(pass);
        self.recorded = self.recorded.wrapping_add(1);
        self.has_pass = true;
    }

    /// Records a pass that is only counted, unless the commands that are not submitted have one.
    pub fn require_pass(&mut self, encoder: &mut wgpu::CommandEncoder) {
        if !self.has_pass {
            self.end(&mut encoder.begin_compute_pass(&Default::default()));
        }
    }

    /// Notes that the commands were submitted.
    pub fn sent(&mut self) {
        self.has_pass = false;
    }
}

/// Checks the device's count of `expected` passes.
///
/// # Errors
/// Returns [`DeviceError::Lost`] if the device has not run all of them; it counts as lost then.
pub(super) fn check(gpu: &Gpu, expected: u32, bytes: &[u8]) -> Result<(), DeviceError> {
    if bytes == expected.to_ne_bytes() {
        return Ok(());
    }
    Err(gpu.lose(
        "its driver gave up commands without an error, as for lack of memory or after a time limit \
         of the system",
    ))
}
