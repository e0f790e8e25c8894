//! Busy-loop kernel for tests of deadlines. Twin of `shaders/spin.wgsl`, which has the formula.

use crate::device::{DeviceError, Gpu};
use crate::{Binding, BoundDispatch, Dispatch, Operand, Pipelines, Shader};

/// Workgroups of a dispatch: on a software adapter they take seconds, on a large card milliseconds.
pub const GROUPS_MAX: u32 = 32_768;

/// Number of elements that are written; all further invocations only consume time.
const ELEMENTS: u32 = 64;

/// Returns the final value of element `i`.
pub fn reference(i: u32) -> u32 {
    let mut word = i + 1;
    for _ in 0..4096 {
        word ^= word << 13;
        word ^= word >> 17;
        word ^= word << 5;
    }
    word
}

/// The busy-loop kernel, compiled and bound.
pub struct Spin {
    bound: BoundDispatch,
    pub words: wgpu::Buffer,
}

impl Spin {
    /// Compiles the kernel and allocates its buffer.
    pub fn new(gpu: &Gpu, pipelines: &mut Pipelines) -> Result<Self, DeviceError> {
        let dispatch = Dispatch {
            shader: Shader::new("spin", "spin"),
            operands: vec![Operand::Output(0)],
            params: vec![ELEMENTS],
            groups: [GROUPS_MAX, 1, 1],
        };
        let words = gpu.storage("spin", 4 * u64::from(ELEMENTS))?;
        let bound = BoundDispatch::new(gpu, pipelines, &dispatch, &|_| Binding::whole(&words))?;
        Ok(Self { bound, words })
    }

    /// Submits work that keeps the device busy in proportion to `groups`, in dispatches of at most
    /// [`GROUPS_MAX`].
    pub fn submit(&self, gpu: &Gpu, groups: u32) -> wgpu::SubmissionIndex {
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            for first in (0..groups).step_by(GROUPS_MAX as usize) {
                let part = self.bound.part(0, GROUPS_MAX.min(groups - first));
                self.bound.record_part(&mut pass, &part);
            }
        }
        gpu.queue.submit([encoder.finish()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::for_each_gpu;

    #[test]
    fn every_step_of_the_chain_is_taken() {
        let expected: Vec<u32> = (0..ELEMENTS).map(reference).collect();
        for_each_gpu(|gpu, pipelines| {
            let spin = Spin::new(gpu, pipelines).unwrap();
            let submission = spin.submit(gpu, 2);
            gpu.wait("the chain", Some(submission)).unwrap();
            let bytes = 4 * u64::from(ELEMENTS);
            let staging = gpu.readback(bytes).unwrap();
            let read = gpu.read(&staging, &[(&spin.words, 0, bytes)]).unwrap();
            assert_eq!(bytemuck::pod_collect_to_vec::<u8, u32>(&read), expected, "{}", gpu.name);
        });
    }
}
