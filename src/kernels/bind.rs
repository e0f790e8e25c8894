//! Dispatches bound to buffers: pipeline, bind group, parameters and grid, so that running one
//! again records four commands and allocates nothing.

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;

use super::dispatch::workspace_bytes;
use super::pipeline::Pipeline;
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

    /// Returns the range of bytes of the buffer that the binding covers.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes
    }
}

/// Bind groups made for one set of buffers, by pipeline and operands. Dispatches that differ in
/// their parameters or grids only share one.
#[derive(Default)]
pub struct BindGroups {
    made: Vec<(Arc<Pipeline>, Vec<Operand>, wgpu::BindGroup)>,
}

impl BindGroups {
    /// Returns the number of bind groups made so far.
    pub fn count(&self) -> usize {
        self.made.len()
    }

    /// Returns the bind group of a dispatch, which is made at first use.
    fn get(
        &mut self,
        gpu: &Gpu,
        pipeline: &Arc<Pipeline>,
        operands: &[Operand],
        binding: &dyn Fn(Operand) -> Binding,
    ) -> wgpu::BindGroup {
        let bound: Vec<Operand> = operands.iter().map(|one| one.unsized_operand()).collect();
        let known = self
            .made
            .iter()
            .find(|(known, same, _)| Arc::ptr_eq(known, pipeline) && *same == bound);
        if let Some((.., group)) = known {
            return group.clone();
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
    let entries: Vec<wgpu::BindGroupEntry> = (0..)
        .zip(&bound)
        .map(|(index, bound)| wgpu::BindGroupEntry {
            binding: index,
            resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                buffer: &bound.buffer,
                offset: bound.offset,
                size: NonZeroU64::new(bound.bytes),
            }),
        })
        .collect();
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

    /// Does the same as [`BoundDispatch::new`] with a bind group of `made`, in which all bind
    /// groups have the same `binding`.
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
        let (params, groups) = (dispatch.params.clone(), dispatch.groups);
        Ok(Self { pipeline, group, params, groups })
    }

    /// Binds whole buffers, the operands of each dispatch by their index, and a buffer of its own
    /// as workspace; see [`BoundDispatch::new`].
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
        let workspace = gpu.storage("workspace", workspace_bytes(dispatches).max(4) as u64)?;
        Self::with_workspace(gpu, pipelines, dispatches, [inputs, outputs], &workspace)
    }

    /// Does the same as [`BoundDispatch::of_buffers`], inputs and outputs, with the given
    /// workspace.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the driver or the validation rejects a shader.
    pub fn with_workspace(
        gpu: &Gpu,
        pipelines: &mut Pipelines,
        dispatches: &[Dispatch],
        [inputs, outputs]: [&[wgpu::Buffer]; 2],
        workspace: &wgpu::Buffer,
    ) -> Result<Vec<Self>, DeviceError> {
        let binding = |operand| match operand {
            Operand::Input(index) => Binding::whole(&inputs[index]),
            Operand::Output(index) => Binding::whole(&outputs[index]),
            Operand::Workspace { .. } => Binding::whole(workspace),
        };
        dispatches.iter().map(|dispatch| Self::new(gpu, pipelines, dispatch, &binding)).collect()
    }

    /// Replaces the values that may change from run to run: parameters and grid.
    pub fn refresh(&mut self, dispatch: Dispatch) {
        (self.params, self.groups) = (dispatch.params, dispatch.groups);
    }

    /// Records the dispatch into a pass.
    pub fn record(&self, pass: &mut wgpu::ComputePass) {
        self.record_grid(pass, self.groups);
    }

    /// Records the dispatch with another grid.
    pub fn record_grid(&self, pass: &mut wgpu::ComputePass, [x, y, z]: [u32; 3]) {
        pass.set_pipeline(&self.pipeline.pipeline);
        pass.set_bind_group(0, &self.group, &[]);
        pass.set_immediates(0, bytemuck::cast_slice(&self.params));
        pass.dispatch_workgroups(x, y, z);
    }
}
