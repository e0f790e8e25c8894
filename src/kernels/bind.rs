//! Dispatches bound to buffers: pipeline, bind group, parameters and grid, so that running one
//! again records four commands and allocates nothing.

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;

use super::dispatch::{self, workspace_bytes};
use super::pipeline::{IMMEDIATE_BYTES_MAX, Pipeline};
use super::{Dispatch, Operand, Pipelines};
use crate::device::{DeviceError, Gpu};

/// Buffer range to bind: offset and size in bytes.
#[derive(Clone)]
pub struct Binding {
    pub buffer: wgpu::Buffer,
    pub offset: u64,
    pub bytes: u64,
}

impl Binding {
    /// Returns the binding of a whole buffer.
    pub fn whole(buffer: &wgpu::Buffer) -> Self {
        Self { buffer: buffer.clone(), offset: 0, bytes: buffer.size() }
    }

    /// Returns the part of this binding that begins at byte `first` and has `bytes` bytes, or fewer
    /// at the end of the binding.
    fn part(&self, first: usize, bytes: usize) -> Self {
        let first = first as u64;
        let bytes = (bytes as u64).min(self.bytes.saturating_sub(first));
        Self { buffer: self.buffer.clone(), offset: self.offset + first, bytes }
    }

    /// Returns the range of bytes of the buffer that the binding covers.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes
    }
}

/// Buffers for intermediate results between the dispatches of a call.
pub(crate) struct CallBuffers {
    pub workspace: wgpu::Buffer,
    pub scratch: wgpu::Buffer,
}

impl CallBuffers {
    /// Allocates buffers of at least these bytes, which may be 0.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory.
    pub fn new(gpu: &Gpu, workspace: usize, scratch: usize) -> Result<Self, DeviceError> {
        Ok(Self {
            workspace: gpu.storage("workspace", workspace.max(4) as u64)?,
            scratch: gpu.storage("scratch of calls", scratch.max(4) as u64)?,
        })
    }

    /// Returns the buffers for the dispatches of a call.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory.
    pub fn of(gpu: &Gpu, dispatches: &[Dispatch]) -> Result<Self, DeviceError> {
        Self::new(gpu, workspace_bytes(dispatches), dispatch::scratch_bytes(dispatches))
    }

    /// Returns the binding of an operand of a call with these tensors.
    pub fn binding(&self, operand: Operand, inputs: &[Binding], outputs: &[Binding]) -> Binding {
        match operand {
            Operand::Input(index) => inputs[index].clone(),
            Operand::Output(index) => outputs[index].clone(),
            Operand::InputPart(part) => inputs[part.tensor].part(part.first, part.bytes),
            Operand::OutputPart(part) | Operand::WrittenPart(part) => {
                outputs[part.tensor].part(part.first, part.bytes)
            }
            Operand::Workspace { .. } => Binding::whole(&self.workspace),
            Operand::Scratch { .. } => Binding::whole(&self.scratch),
        }
    }
}

/// Bind groups made for one set of buffers, by pipeline and operands. Dispatches that differ only
/// in their parameters or grids share one.
#[derive(Default)]
pub struct BindGroups {
    made: Vec<(Arc<Pipeline>, Vec<Operand>, wgpu::BindGroup)>,
}

impl BindGroups {
    /// Returns the number of bind groups made so far.
    pub fn count(&self) -> usize {
        self.made.len()
    }

    /// Bind group of a dispatch, which is made at first use.
    fn get(
        &mut self,
        gpu: &Gpu,
        pipeline: &Arc<Pipeline>,
        operands: &[Operand],
        binding: &dyn Fn(Operand) -> Binding,
    ) -> wgpu::BindGroup {
        let bound: Vec<Operand> = operands.iter().map(|one| one.unsized_operand()).collect();
        for (known, same, group) in &self.made {
            if Arc::ptr_eq(known, pipeline) && *same == bound {
                return group.clone();
            }
        }
        let group = bind_group(gpu, pipeline, operands, binding);
        self.made.push((pipeline.clone(), bound, group.clone()));
        group
    }
}

/// Binds each operand to the range that `binding` returns for it.
fn bind_group(
    gpu: &Gpu,
    pipeline: &Pipeline,
    operands: &[Operand],
    binding: &dyn Fn(Operand) -> Binding,
) -> wgpu::BindGroup {
    let bound: Vec<Binding> = operands.iter().map(|operand| binding(*operand)).collect();
    let mut entries = Vec::with_capacity(bound.len());
    for (index, bound) in bound.iter().enumerate() {
        entries.push(wgpu::BindGroupEntry {
            binding: index as u32,
            resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                buffer: &bound.buffer,
                offset: bound.offset,
                size: NonZeroU64::new(bound.bytes),
            }),
        });
    }
    gpu.count_allocation();
    gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.bindings,
        entries: &entries,
    })
}

/// A dispatch ready to record.
pub struct BoundDispatch {
    pipeline: Arc<Pipeline>,
    group: wgpu::BindGroup,
    params: Vec<u32>,
    groups: [u32; 3],
    can_split: bool,
}

impl BoundDispatch {
    /// Binds each operand of a dispatch to the range that `binding` returns for it, and compiles
    /// its pipeline at first use.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the driver or the validation rejects the shader.
    pub fn new(
        gpu: &Gpu,
        pipelines: &mut Pipelines,
        dispatch: &Dispatch,
        binding: &dyn Fn(Operand) -> Binding,
    ) -> Result<Self, DeviceError> {
        Self::sharing(gpu, pipelines, &mut BindGroups::default(), dispatch, binding)
    }

    /// Does the same as [`BoundDispatch::new`] with a bind group of `made`, whose bind groups all
    /// have the same `binding`.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the driver or the validation rejects the shader.
    pub fn sharing(
        gpu: &Gpu,
        pipelines: &mut Pipelines,
        made: &mut BindGroups,
        dispatch: &Dispatch,
        binding: &dyn Fn(Operand) -> Binding,
    ) -> Result<Self, DeviceError> {
        let pipeline = pipelines.get(gpu, dispatch)?;
        let group = made.get(gpu, &pipeline, &dispatch.operands, binding);
        Ok(Self {
            pipeline,
            group,
            params: dispatch.params.clone(),
            groups: dispatch.groups,
            can_split: dispatch.can_split(),
        })
    }

    /// Binds whole buffers to the operands of each dispatch by their index, and new buffers for the
    /// results between dispatches; see [`BoundDispatch::new`].
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the driver or the validation rejects a shader, or if there is too
    /// little memory.
    pub fn of_buffers(
        gpu: &Gpu,
        pipelines: &mut Pipelines,
        dispatches: &[Dispatch],
        inputs: &[wgpu::Buffer],
        outputs: &[wgpu::Buffer],
    ) -> Result<Vec<Self>, DeviceError> {
        let between = CallBuffers::of(gpu, dispatches)?;
        Self::handing_on(gpu, pipelines, dispatches, [inputs, outputs], &between)
    }

    /// Does the same as [`BoundDispatch::of_buffers`] on `[inputs, outputs]`, with the given
    /// buffers between dispatches.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the driver or the validation rejects a shader.
    pub(crate) fn handing_on(
        gpu: &Gpu,
        pipelines: &mut Pipelines,
        dispatches: &[Dispatch],
        [inputs, outputs]: [&[wgpu::Buffer]; 2],
        between: &CallBuffers,
    ) -> Result<Vec<Self>, DeviceError> {
        let inputs: Vec<Binding> = inputs.iter().map(Binding::whole).collect();
        let outputs: Vec<Binding> = outputs.iter().map(Binding::whole).collect();
        let mut bound = Vec::with_capacity(dispatches.len());
        for dispatch in dispatches {
            bound.push(Self::new(gpu, pipelines, dispatch, &|operand| {
                between.binding(operand, &inputs, &outputs)
            })?);
        }
        Ok(bound)
    }

    /// Replaces the values that may change from run to run: parameters and grid.
    pub(crate) fn refresh(&mut self, dispatch: Dispatch) {
        self.params = dispatch.params;
        self.groups = dispatch.groups;
    }

    /// Name of its shader, for messages.
    pub(crate) fn label(&self) -> &Arc<str> {
        &self.pipeline.label
    }

    /// Returns the number of workgroups.
    pub fn workgroups(&self) -> u32 {
        dispatch::workgroups(self.groups)
    }

    /// Returns true if the dispatch can be recorded in parts.
    pub(crate) fn can_split(&self) -> bool {
        self.can_split
    }

    /// Returns the part that begins at workgroup `first` and has at most `most` workgroups, at
    /// least one.
    pub fn part(&self, first: u32, most: u32) -> Range<u32> {
        first..dispatch::part_end(self.groups, first, most)
    }

    /// Records the dispatch into a pass.
    pub fn record(&self, pass: &mut wgpu::ComputePass) {
        self.record_grid(pass, 0, self.groups);
    }

    /// Records a part of the dispatch (see [`BoundDispatch::part`]), which must be splittable. All
    /// parts in any order make up the dispatch.
    pub(crate) fn record_part(&self, pass: &mut wgpu::ComputePass, part: &Range<u32>) {
        if *part == self.part(0, u32::MAX) {
            return self.record(pass);
        }
        assert!(self.can_split, "a shader from outside the crate is recorded whole");
        self.record_grid(pass, part.start, dispatch::part_grid(self.groups, part));
    }

    fn record_grid(&self, pass: &mut wgpu::ComputePass, first: u32, [x, y, z]: [u32; 3]) {
        // Room on the stack for the most words of a pipeline.
        let mut words = [0; IMMEDIATE_BYTES_MAX as usize / 4];
        words[..self.params.len()].copy_from_slice(&self.params);
        if self.can_split {
            words[self.params.len()] = first;
        }
        let bytes = self.pipeline.immediate_bytes as usize;
        pass.set_pipeline(&self.pipeline.pipeline);
        pass.set_bind_group(0, &self.group, &[]);
        pass.set_immediates(0, &bytemuck::cast_slice(&words)[..bytes]);
        pass.dispatch_workgroups(x, y, z);
    }
}
