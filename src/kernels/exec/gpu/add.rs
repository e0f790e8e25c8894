//! Addition of this device's gradients to the partial sums of other ranks, on the device: for
//! devices that add faster than their host does, although the sums must be uploaded and read back.

use std::sync::Arc;

use super::prepare::PreparedKernel;
use super::stream::CommandStream;
use crate::autotune::KernelSelector;
use crate::device::{DeviceError, Gpu};
use crate::exec::staging::held_lengths;
use crate::{Binding, Cost, OpCall, Operand, RandomContext, Variant, twin};
use potluck_core::DType;
use potluck_core::rng::Key;
use potluck_graph::{Accumulation, Binary, Op, Plan, Precision};

/// The most elements that are added, and read back, in one part.
const ELEMENTS_MAX: usize = 1 << 20;

/// Number of tensors of a part in the device's memory: a partial sum, gradients, and their sum.
const TENSORS: usize = 3;

/// Returns the most bytes of a device's memory that adding its gradients to partial sums takes.
pub fn adder_bytes(plan: &Plan) -> usize {
    let longest = held_lengths(plan).into_iter().max().unwrap_or(0);
    TENSORS * DType::F32.bytes() * scratch_elements(longest)
}

/// Returns the elements of each tensor of an adder for sums of about `elements` elements: whole
/// vectors of 4, so that every part runs the variant of the full length.
fn scratch_elements(elements: usize) -> usize {
    elements.next_multiple_of(4).clamp(4, ELEMENTS_MAX)
}

/// Scratch buffers for sums of a bounded length, made once, and the prepared kernel that adds.
pub(crate) struct PartialSumAdder {
    gpu: Arc<Gpu>,
    elements: usize,
    partial: wgpu::Buffer,
    gradients: wgpu::Buffer,
    sum: wgpu::Buffer,
    task: PreparedKernel,
}

impl PartialSumAdder {
    /// Makes an adder for sums of about `elements` elements; longer ones are split into parts.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory, or if a kernel fails certification
    /// on this driver.
    pub fn new(
        gpu: &Arc<Gpu>,
        kernels: &mut KernelSelector,
        elements: usize,
    ) -> Result<Self, DeviceError> {
        let elements = scratch_elements(elements);
        let bytes = (elements * DType::F32.bytes()) as u64;
        let partial = gpu.storage("sums", bytes)?;
        let gradients = gpu.storage("sums", bytes)?;
        let sum = gpu.storage("sums", bytes)?;
        let binding = |operand| match operand {
            Operand::Input(0) => Binding::whole(&partial),
            Operand::Input(_) => Binding::whole(&gradients),
            Operand::Output(_) => Binding::whole(&sum),
            other => unreachable!("no kernel that adds has {other:?}"),
        };
        let full = call(elements);
        let variant = kernels.variant(gpu, &full, &full)?;
        let cost = match twin(full.op) {
            Some(twin) => (twin.cost)(&full),
            None => Cost::default(),
        };
        let task =
            PreparedKernel::new(gpu, &mut kernels.pipelines, &variant.dispatches, &binding, cost)?;
        Ok(Self { gpu: gpu.clone(), elements, partial, gradients, sum, task })
    }

    /// Returns the bytes of the scratch buffers.
    #[cfg(test)]
    pub fn bytes(&self) -> u64 {
        [&self.partial, &self.gradients, &self.sum].map(wgpu::Buffer::size).iter().sum()
    }

    /// Certifies and selects the kernels for sums of these lengths.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if a kernel fails certification on this driver.
    pub fn prepare(
        &mut self,
        kernels: &mut KernelSelector,
        lengths: &[usize],
    ) -> Result<(), DeviceError> {
        for length in lengths {
            if *length >= self.elements {
                self.variant(kernels, self.elements)?;
            }
            let rest = length % self.elements;
            if rest > 0 {
                self.variant(kernels, rest)?;
            }
        }
        Ok(())
    }

    /// Returns the variant that adds `part` elements: the variant of the full length, because a
    /// prepared kernel keeps its pipeline. It adds whole vectors of 4 if the full length has them;
    /// the buffers have room for that.
    fn variant(&self, kernels: &mut KernelSelector, part: usize) -> Result<Variant, DeviceError> {
        let part = part.next_multiple_of(4).min(self.elements);
        kernels.variant(&self.gpu, &call(part), &call(self.elements))
    }

    /// Computes `partial += source`, from byte `offset` of `source` on.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device fails.
    pub fn add(
        &mut self,
        stream: &mut CommandStream,
        kernels: &mut KernelSelector,
        source: &wgpu::Buffer,
        mut offset: u64,
        partial: &mut [f32],
    ) -> Result<(), DeviceError> {
        for part in partial.chunks_mut(self.elements) {
            let bytes = size_of_val(part) as u64;
            let variant = self.variant(kernels, part.len())?;
            self.task.refresh(variant.dispatches);
            stream.upload(&self.partial, 0, bytemuck::cast_slice(part))?;
            stream.copy(source, offset, &self.gradients, bytes);
            stream.run(&self.task)?;
            stream.transfer(&[(&self.sum, 0, bytes)], bytemuck::cast_slice_mut(part))?;
            offset += bytes;
        }
        Ok(())
    }
}

fn call(elements: usize) -> OpCall<'static> {
    OpCall {
        op: &Op::Binary(Binary::Add),
        inputs: vec![vec![elements]; 2],
        outputs: vec![vec![elements]],
        accumulate: Accumulation::NONE,
        precision: Precision::F32,
        loss_scale: 1.0,
        random: RandomContext { step_key: Key::new(0), training: false },
    }
}
