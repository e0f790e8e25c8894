//! Pipeline cache of one device, with one compiled pipeline per (shader, constants, access).

use std::collections::HashMap;
use std::sync::Arc;

use super::dispatch::{Dispatch, Operand, Shader};
use super::source;
use crate::device::{DeviceError, Gpu, ShaderChecks};

/// Maximum number of bytes of immediates of a pipeline; see [`Dispatch::params`].
pub const IMMEDIATE_BYTES_MAX: u32 = 128;

/// A compiled compute pipeline with its bind group layout.
pub struct Pipeline {
    pub pipeline: wgpu::ComputePipeline,
    pub bindings: wgpu::BindGroupLayout,
    /// Bytes of immediates that a dispatch sets.
    pub immediate_bytes: u32,
}

type PipelineKey = (Shader, Vec<bool>);

/// Cache of the pipelines compiled so far.
#[derive(Default)]
pub struct Pipelines {
    made: HashMap<PipelineKey, Arc<Pipeline>>,
}

impl Pipelines {
    /// Returns the pipeline of a dispatch, which is compiled at first use.
    pub fn get(&mut self, gpu: &Gpu, dispatch: &Dispatch) -> Result<Arc<Pipeline>, DeviceError> {
        let access: Vec<bool> = dispatch.operands.iter().map(Operand::is_writable).collect();
        let key = (dispatch.shader.clone(), access);
        if let Some(pipeline) = self.made.get(&key) {
            return Ok(pipeline.clone());
        }
        let pipeline = Arc::new(compile(gpu, &key, immediate_bytes(dispatch))?);
        self.made.insert(key, pipeline.clone());
        Ok(pipeline)
    }
}

/// Returns the number of bytes of immediates that the dispatch sets.
fn immediate_bytes(dispatch: &Dispatch) -> u32 {
    let bytes = dispatch.immediate_bytes();
    assert!(bytes <= IMMEDIATE_BYTES_MAX, "{}: too many parameters", dispatch.shader.file);
    bytes
}

fn compile(
    gpu: &Gpu,
    (shader, access): &PipelineKey,
    immediates: u32,
) -> Result<Pipeline, DeviceError> {
    let label = format!("{}.{}", shader.file, shader.entry);
    let checks = checks(gpu, shader);
    let entries: Vec<wgpu::BindGroupLayoutEntry> = access
        .iter()
        .enumerate()
        .map(|(binding, writable)| wgpu::BindGroupLayoutEntry {
            binding: binding as u32,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: wgpu::BufferBindingType::Storage { read_only: !writable },
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        })
        .collect();
    gpu.count_allocation();
    let scope = gpu.device.push_error_scope(wgpu::ErrorFilter::Validation);
    let bindings = gpu.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
        label: Some(&label),
        entries: &entries,
    });
    let layout = gpu.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label: Some(&label),
        bind_group_layouts: &[Some(&bindings)],
        immediate_size: immediates,
    });
    let pipeline = gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(&label),
        layout: Some(&layout),
        module: &module(gpu, &label, source::text(shader), checks),
        entry_point: Some(shader.entry),
        compilation_options: wgpu::PipelineCompilationOptions {
            // Kernels of this crate write before they read, and the tests would not find one that
            // does not if zeros were there. SwiftShader compiles the zeros of 16 KiB for seconds.
            zero_initialize_workgroup_memory: shader.is_foreign,
            ..Default::default()
        },
        cache: None,
    });
    let refused = pollster::block_on(scope.pop());
    // Heartbeat: compilation may take long, and several pipelines may be compiled in a row.
    gpu.heartbeat.tick();
    match refused {
        Some(error) => Err(gpu.refused(&format!("shader {label}"), error.to_string())),
        None => Ok(Pipeline { pipeline, bindings, immediate_bytes: immediates }),
    }
}

/// Returns the checks that a shader is compiled with: all, if its text is not this crate's.
fn checks(gpu: &Gpu, shader: &Shader) -> ShaderChecks {
    if shader.is_foreign { ShaderChecks::Enabled } else { gpu.checks }
}

fn module(gpu: &Gpu, label: &str, text: String, checks: ShaderChecks) -> wgpu::ShaderModule {
    let source = wgpu::ShaderSource::Wgsl(text.into());
    let descriptor = wgpu::ShaderModuleDescriptor { label: Some(label), source };
    match checks {
        ShaderChecks::Enabled => gpu.device.create_shader_module(descriptor),
        // SAFETY: unchecked modules must not index out of bounds and must not loop for ever. All
        // text here comes from this crate (see `checks`); each kernel is bounded by its parameters,
        // and the tests run every one with sentinels after every buffer in both modes.
        ShaderChecks::Disabled => unsafe {
            let checks = wgpu::ShaderRuntimeChecks::unchecked();
            gpu.device.create_shader_module_trusted(descriptor, checks)
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::for_each_gpu;

    #[test]
    fn text_from_outside_is_compiled_with_checks_on_every_device() {
        let (own, text) = (Shader::new("sum", "columns"), String::new());
        let foreign = Shader::foreign("snake".into(), "main", text);
        for_each_gpu(|gpu, _| {
            assert_eq!(checks(gpu, &own), gpu.checks);
            assert_eq!(checks(gpu, &foreign), ShaderChecks::Enabled);
        });
    }
}
