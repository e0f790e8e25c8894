//! Pipeline cache of one device, with one compiled pipeline per (shader, constants, access).

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use super::dispatch::{Dispatch, Operand, Shader};
use super::source;
use crate::device::host::cores;
use crate::device::panics::{PanicText, catch_quietly};
use crate::device::{DeviceError, Gpu, ShaderChecks};
use potluck_core::Lock;

/// Maximum number of bytes of immediates of a pipeline; see [`Dispatch::params`].
pub(crate) const IMMEDIATE_BYTES_MAX: u32 = 128;

/// A compiled compute pipeline with its bind group layout.
pub struct Pipeline {
    /// Name of its shader, for messages.
    pub label: Arc<str>,
    pub pipeline: wgpu::ComputePipeline,
    pub bindings: wgpu::BindGroupLayout,
    /// Bytes of immediates that a dispatch sets.
    pub immediate_bytes: u32,
}

type PipelineKey = (Shader, Vec<bool>);

/// The most threads that compile pipelines concurrently. Drivers have their own locks, and other
/// devices of the run compile too.
const THREADS_MAX: usize = 8;

/// Pipelines compiled so far, and the driver's cache of compiled code if it has one.
#[derive(Default)]
pub struct Pipelines {
    made: HashMap<PipelineKey, Arc<Pipeline>>,
    driver_cache: Option<wgpu::PipelineCache>,
}

impl Pipelines {
    /// Sets the driver's cache, in which pipelines are looked up and to which they are added from
    /// now on.
    pub(crate) fn set_driver_cache(&mut self, cache: wgpu::PipelineCache) {
        self.driver_cache = Some(cache);
    }

    pub(crate) fn driver_cache(&self) -> Option<&wgpu::PipelineCache> {
        self.driver_cache.as_ref()
    }

    /// Returns the number of pipelines compiled so far.
    pub fn count(&self) -> usize {
        self.made.len()
    }

    pub(crate) fn has(&self, dispatches: &[Dispatch]) -> bool {
        dispatches.iter().all(|dispatch| self.made.contains_key(&key(dispatch)))
    }

    /// Returns the pipeline of a dispatch, which is compiled at first use.
    pub fn get(&mut self, gpu: &Gpu, dispatch: &Dispatch) -> Result<Arc<Pipeline>, DeviceError> {
        let key = key(dispatch);
        if let Some(pipeline) = self.made.get(&key) {
            return Ok(pipeline.clone());
        }
        let cache = self.driver_cache.as_ref();
        let bytes = immediate_bytes(dispatch);
        let compiled = thread::scope(|scope| {
            let (working, ended) = mpsc::channel();
            scope.spawn(move || wait(gpu, &ended, &mut |_| {}));
            let compiled = compile(gpu, &key, bytes, cache);
            drop(working);
            compiled
        });
        let pipeline = Arc::new(compiled?);
        self.made.insert(key, pipeline.clone());
        Ok(pipeline)
    }

    /// Compiles the pipelines of dispatches that are not compiled yet, several concurrently.
    /// Pipelines that do not compile are left out: [`Pipelines::get`] returns the error. Calls
    /// `report` with the names of the shaders that are being compiled whenever they take long.
    pub fn compile_all<'a>(
        &mut self,
        gpu: &Gpu,
        dispatches: impl IntoIterator<Item = &'a Dispatch>,
        report: &mut dyn FnMut(String),
    ) {
        let mut missing: Vec<(PipelineKey, u32)> = Vec::new();
        for dispatch in dispatches {
            let key = key(dispatch);
            if !self.made.contains_key(&key) && missing.iter().all(|(known, _)| *known != key) {
                missing.push((key, immediate_bytes(dispatch)));
            }
        }
        let threads = threads(gpu).min(missing.len());
        if threads < 2 {
            // The caller compiles the pipelines that it needs one by one.
            return;
        }
        let cache = self.driver_cache.as_ref();
        let work = Compilation {
            gpu,
            cache,
            missing,
            next: AtomicUsize::new(0),
            current: Lock::default(),
            compiled: Lock::default(),
        };
        thread::scope(|scope| {
            let (working, ended) = mpsc::channel();
            for _ in 0..threads {
                let working = working.clone();
                // Pipelines that a panicked thread has not compiled are compiled by the caller.
                scope.spawn(|| {
                    catch_quietly(&PanicText::default(), || work.run());
                    drop(working);
                });
            }
            drop(working);
            wait(gpu, &ended, &mut |waited| {
                report(format!("{}, for {} s", work.current_names(), waited.as_secs()));
            });
        });
        self.made.extend(work.compiled.into_inner());
    }
}

/// Pipelines that several threads compile.
struct Compilation<'a> {
    gpu: &'a Gpu,
    cache: Option<&'a wgpu::PipelineCache>,
    /// Pipelines to compile, with the bytes of their immediates.
    missing: Vec<(PipelineKey, u32)>,
    /// Index of the next one in `missing`.
    next: AtomicUsize,
    /// Indices of the pipelines being compiled.
    current: Lock<Vec<usize>>,
    compiled: Lock<Vec<(PipelineKey, Arc<Pipeline>)>>,
}

impl Compilation<'_> {
    /// Compiles pipelines until none is left. Error scopes belong to the thread that opens them.
    fn run(&self) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some((key, bytes)) = self.missing.get(index) else { return };
            self.current.lock().push(index);
            let pipeline = compile(self.gpu, key, *bytes, self.cache);
            self.current.lock().retain(|other| *other != index);
            if let Ok(pipeline) = pipeline {
                self.compiled.lock().push((key.clone(), Arc::new(pipeline)));
            }
        }
    }

    fn current_names(&self) -> String {
        let mut names = Vec::new();
        for index in self.current.lock().iter() {
            let (shader, _) = &self.missing[*index].0;
            names.push(label(shader));
        }
        names.join(", ")
    }
}

/// Time between two ticks of the heartbeat while a driver compiles, and between two reports to the
/// user.
const TICK: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(10);

/// Time after which the heartbeat stops ticking: a driver that has compiled for longer hangs.
const COMPILATION_MAX: Duration = Duration::from_secs(900);

/// Lets the heartbeat tick while a driver compiles, until all senders of `ended` are gone. Calls
/// `report` with the time that has passed whenever it is a multiple of [`LONG`].
fn wait(gpu: &Gpu, ended: &Receiver<()>, report: &mut dyn FnMut(Duration)) {
    let started = Instant::now();
    let mut told = LONG;
    while ended.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
        let elapsed = started.elapsed();
        if elapsed < COMPILATION_MAX {
            gpu.heartbeat.tick();
        }
        if elapsed >= told {
            report(told);
            told += LONG;
        }
    }
}

fn label(shader: &Shader) -> String {
    format!("{}.{}", shader.file, shader.entry)
}

/// Returns the number of threads that may compile concurrently for a device: one on GL, whose
/// context belongs to one thread at a time.
fn threads(gpu: &Gpu) -> usize {
    if gpu.api == "gl" { 1 } else { cores().min(THREADS_MAX) }
}

fn key(dispatch: &Dispatch) -> PipelineKey {
    let access = dispatch.operands.iter().map(Operand::is_writable).collect();
    (dispatch.shader.clone(), access)
}

fn immediate_bytes(dispatch: &Dispatch) -> u32 {
    let bytes = dispatch.immediate_bytes();
    assert!(bytes <= IMMEDIATE_BYTES_MAX, "{}: too many parameters", dispatch.shader.file);
    bytes
}

fn compile(
    gpu: &Gpu,
    key: &PipelineKey,
    immediates: u32,
    cache: Option<&wgpu::PipelineCache>,
) -> Result<Pipeline, DeviceError> {
    let (shader, access) = key;
    let label = label(shader);
    let checks = checks(gpu, shader);
    let mut entries = Vec::with_capacity(access.len());
    for (binding, writable) in access.iter().enumerate() {
        entries.push(wgpu::BindGroupLayoutEntry {
            binding: binding as u32,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: wgpu::BufferBindingType::Storage { read_only: !writable },
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        });
    }
    gpu.count_allocation();
    let compiled = gpu.scoped(&format!("shader {label}"), || {
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
                // Kernels of this crate write before they read; zeros would hide violations from
                // the tests. SwiftShader compiles the zeroing of 16 KiB for seconds.
                zero_initialize_workgroup_memory: shader.is_foreign,
                ..Default::default()
            },
            cache,
        });
        let label = label.as_str().into();
        Pipeline { label, pipeline, bindings, immediate_bytes: immediates }
    });
    // Heartbeat: compilation may take long, and several pipelines may be compiled in a row.
    gpu.heartbeat.tick();
    compiled
}

/// Checks with which a shader is compiled: all if its text is not this crate's.
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
    use crate::testing::for_each_gpu;

    /// One of several concurrent compilations fails: its error belongs to its own thread.
    #[test]
    fn pipelines_are_compiled_several_at_a_time() {
        let one = |entry: &'static str, text: String| Dispatch {
            shader: Shader::emitted("copies", entry, text),
            operands: vec![Operand::Input(0), Operand::Output(0)],
            params: Vec::new(),
            groups: [1, 1, 1],
        };
        let text = |number: usize| {
            let kind = if number == 7 { "nonsense" } else { "f32" };
            format!(
                "@group(0) @binding(0) var<storage, read> x: array<{kind}>;
                @group(0) @binding(1) var<storage, read_write> y: array<f32>;
                @compute @workgroup_size(1) fn copy() {{ y[0] = x[0] + {number}.0; }}"
            )
        };
        let dispatches: Vec<Dispatch> = (0..20).map(|number| one("copy", text(number))).collect();
        for_each_gpu(|gpu, _| {
            let mut pipelines = Pipelines::default();
            pipelines.compile_all(gpu, dispatches.iter().chain(&dispatches), &mut |_| {});
            let expected = if threads(gpu) > 1 { dispatches.len() - 1 } else { 0 };
            assert_eq!(pipelines.count(), expected, "{}", gpu.name);
            gpu.check().unwrap();
            for (number, dispatch) in dispatches.iter().enumerate() {
                let made = pipelines.get(gpu, dispatch);
                assert_eq!(made.is_ok(), number != 7, "{number} on {}", gpu.name);
            }
            assert_eq!(pipelines.count(), dispatches.len() - 1, "{}", gpu.name);
        });
    }

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
