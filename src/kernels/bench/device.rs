//! Benchmark device: times dispatches on buffers that belong to no plan.
//!
//! Times are host times from the submission to the end of the wait, so a benchmark must repeat a
//! dispatch until that overhead is small compared to the total.

use std::time::Instant;

use crate::device::{Adapter, DeviceError, Gpu, ShaderChecks};
use crate::{BoundDispatch, Dispatch, Pipelines};
use potluck_graph::Precision;

/// An opened device with its pipeline cache.
pub struct BenchDevice {
    pub gpu: Gpu,
    pipelines: Pipelines,
}

/// A buffer of a benchmark: device memory that dispatches bind, or a staging buffer.
#[derive(Clone)]
pub struct DeviceBuffer(wgpu::Buffer);

impl DeviceBuffer {
    pub fn bytes(&self) -> u64 {
        self.0.size()
    }
}

fn raw_buffers(buffers: &[&DeviceBuffer]) -> Vec<wgpu::Buffer> {
    buffers.iter().map(|buffer| buffer.0.clone()).collect()
}

/// Compiled dispatches with bound buffers.
pub struct BoundKernel(Vec<BoundDispatch>);

/// Durations of one submission in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SubmissionTiming {
    /// Host time to record the commands, until the submission.
    pub recording: f64,
    /// Time from the submission until the device has finished.
    pub running: f64,
}

impl BenchDevice {
    /// Opens an adapter with its own limits, as training runs do, which disable the checks.
    pub fn open(
        adapter: &Adapter,
        checks: ShaderChecks,
        precision: Precision,
    ) -> Result<Self, DeviceError> {
        let gpu = Gpu::open(adapter, checks, precision)?;
        Ok(Self { gpu, pipelines: Pipelines::default() })
    }

    /// Allocates a zeroed device buffer of at least `bytes` bytes.
    ///
    /// # Errors
    /// Returns `DeviceError` if the size exceeds the device memory or the limit of one buffer.
    pub fn memory(&self, bytes: u64) -> Result<DeviceBuffer, DeviceError> {
        self.gpu.storage("benchmark", bytes).map(DeviceBuffer)
    }

    /// Compiles dispatches and binds their operands.
    ///
    /// # Panics
    /// Panics if an operand is not among the inputs and outputs.
    pub fn prepare(
        &mut self,
        dispatches: &[Dispatch],
        inputs: &[&DeviceBuffer],
        outputs: &[&DeviceBuffer],
    ) -> Result<BoundKernel, DeviceError> {
        let inputs = raw_buffers(inputs);
        let outputs = raw_buffers(outputs);
        let pipelines = &mut self.pipelines;
        let ready = BoundDispatch::of_buffers(&self.gpu, pipelines, dispatches, &inputs, &outputs)?;
        let ready = BoundKernel(ready);
        self.gpu.check()?;
        Ok(ready)
    }

    /// Runs the dispatches `repeats` times in sequence in one compute pass, and waits for
    /// completion.
    pub fn run(
        &self,
        ready: &BoundKernel,
        repeats: usize,
    ) -> Result<SubmissionTiming, DeviceError> {
        let begun = Instant::now();
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            for _ in 0..repeats {
                for bound in &ready.0 {
                    bound.record(&mut pass);
                }
            }
        }
        let commands = encoder.finish();
        let submitted = Instant::now();
        let submission = self.gpu.queue.submit([commands]);
        self.gpu.wait("a measurement", Some(submission))?;
        let recording = (submitted - begun).as_secs_f64();
        Ok(SubmissionTiming { recording, running: submitted.elapsed().as_secs_f64() })
    }

    /// Uploads bytes to a device buffer, waits for completion and returns the elapsed seconds.
    pub fn upload(&self, memory: &DeviceBuffer, bytes: &[u8]) -> Result<f64, DeviceError> {
        let begun = Instant::now();
        self.gpu.upload(&memory.0, 0, bytes);
        let empty = self.gpu.device.create_command_encoder(&Default::default());
        self.gpu.submit_and_wait(empty)?;
        Ok(begun.elapsed().as_secs_f64())
    }

    /// Creates a staging buffer for [`BenchDevice::read`].
    pub fn staging(&self, bytes: u64) -> Result<DeviceBuffer, DeviceError> {
        self.gpu.readback(bytes).map(DeviceBuffer)
    }

    /// Fills `bytes` from the front of a device buffer through `staging`; returns the elapsed
    /// seconds.
    pub fn read(
        &self,
        memory: &DeviceBuffer,
        staging: &DeviceBuffer,
        bytes: &mut [u8],
    ) -> Result<f64, DeviceError> {
        let begun = Instant::now();
        self.gpu.read_into(&staging.0, &[(&memory.0, 0, bytes.len() as u64)], bytes)?;
        Ok(begun.elapsed().as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::peak::MemoryStream;
    use crate::testing::adapters;

    #[test]
    fn dispatches_run_on_memory_that_is_uploaded_and_read_back() {
        for adapter in adapters().iter().filter(|adapter| adapter.api != "gl") {
            let mut device =
                BenchDevice::open(adapter, ShaderChecks::Disabled, Precision::F32).unwrap();
            let values: Vec<f32> = (0..256).map(|i| i as f32).collect();
            let (x, y) = (device.memory(1024).unwrap(), device.memory(1024).unwrap());
            assert!(device.upload(&x, bytemuck::cast_slice(&values)).unwrap() > 0.0);
            let [(_, copy), _] = MemoryStream::Copy.dispatches(256, 0.0);
            let kernel = device.prepare(&[copy], &[&x], &[&y]).unwrap();
            let timing = device.run(&kernel, 3).unwrap();
            assert!(timing.recording > 0.0 && timing.running > 0.0);
            let staging = device.staging(1024).unwrap();
            let mut read = vec![0; 1024];
            assert!(device.read(&y, &staging, &mut read).unwrap() > 0.0);
            assert!(read == bytemuck::cast_slice::<f32, u8>(&values));
        }
    }
}
