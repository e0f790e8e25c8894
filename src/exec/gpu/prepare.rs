//! Prepared kernels: pipeline, bind group, parameters and grid of each dispatch, so that running
//! it again records four commands and allocates nothing.

use std::ops::Range;
use std::sync::Arc;

use crate::device::{DeviceError, Gpu};
use crate::kernels::pipeline::Pipeline;
use crate::kernels::{Cost, Dispatch, Operand, Pipelines};

/// Nominal rates, from which the time of the first step is estimated; below those of any device
/// that trains. The measured time of a step replaces the estimate.
const NOMINAL_FLOPS: f64 = 2e9;
const NOMINAL_BYTES: f64 = 2e9;

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

/// A dispatch ready to record.
pub struct Prepared {
    pipeline: Arc<Pipeline>,
    group: wgpu::BindGroup,
    params: Vec<u32>,
    groups: [u32; 3],
}

/// Prepared dispatches of a node, an update or a norm.
pub struct PreparedKernel {
    pub dispatches: Vec<Prepared>,
    /// Display name: the variant of a node, or else the shaders.
    pub variant: String,
    /// Estimated seconds at the nominal rates.
    pub seconds: f64,
}

impl PreparedKernel {
    /// Prepares dispatches, with each operand bound to the range that `binding` returns for it.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device refuses a shader.
    pub fn new(
        gpu: &Gpu,
        pipelines: &mut Pipelines,
        dispatches: &[Dispatch],
        binding: &dyn Fn(Operand) -> Binding,
        cost: Cost,
    ) -> Result<Self, DeviceError> {
        let prepare = |dispatch| prepare(gpu, pipelines, dispatch, binding);
        let seconds = cost.flops / NOMINAL_FLOPS + cost.bytes / NOMINAL_BYTES;
        let variant = variant(dispatches);
        let dispatches = dispatches.iter().map(prepare).collect::<Result<_, DeviceError>>()?;
        Ok(Self { dispatches, variant, seconds })
    }

    /// Replaces the values that may change from step to step: parameters and grids.
    pub fn refresh(&mut self, dispatches: Vec<Dispatch>) {
        for (ready, dispatch) in self.dispatches.iter_mut().zip(dispatches) {
            (ready.params, ready.groups) = (dispatch.params, dispatch.groups);
        }
    }

    /// Records the dispatches into a pass.
    pub fn record(&self, pass: &mut wgpu::ComputePass) {
        for ready in &self.dispatches {
            pass.set_pipeline(&ready.pipeline.pipeline);
            pass.set_bind_group(0, &ready.group, &[]);
            pass.set_immediates(0, bytemuck::cast_slice(&ready.params));
            let [x, y, z] = ready.groups;
            pass.dispatch_workgroups(x, y, z);
        }
    }
}

/// Returns the shader files in order, each with its entry point if that has another name.
fn variant(dispatches: &[Dispatch]) -> String {
    let name = |dispatch: &Dispatch| {
        let (file, entry) = (dispatch.shader.file, dispatch.shader.entry);
        if file == entry { file.to_string() } else { format!("{file}.{entry}") }
    };
    let mut names: Vec<String> = dispatches.iter().map(name).collect();
    names.dedup();
    names.join(" ")
}

fn prepare(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    dispatch: &Dispatch,
    binding: &dyn Fn(Operand) -> Binding,
) -> Result<Prepared, DeviceError> {
    let pipeline = pipelines.get(gpu, dispatch)?;
    let bound: Vec<Binding> = dispatch.operands.iter().map(|operand| binding(*operand)).collect();
    let entries: Vec<wgpu::BindGroupEntry> = bound
        .iter()
        .enumerate()
        .map(|(index, bound)| wgpu::BindGroupEntry {
            binding: index as u32,
            resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                buffer: &bound.buffer,
                offset: bound.offset,
                size: std::num::NonZeroU64::new(bound.bytes),
            }),
        })
        .collect();
    gpu.count_allocation();
    let group = gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.bindings,
        entries: &entries,
    });
    let params = dispatch.params.clone();
    Ok(Prepared { pipeline, group, params, groups: dispatch.groups })
}
