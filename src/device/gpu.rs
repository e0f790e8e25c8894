//! An opened adapter: its queue, buffers and transfers, and the faults it reported.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use super::adapters::Adapter;
use super::error::DeviceError;

/// The longest a submission may take before the device counts as hung.
const SUBMISSION_DEADLINE: Duration = Duration::from_secs(120);

/// Whether shaders run with the checks that wgpu injects (array bounds, loop counters).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checks {
    /// All of them: for tests.
    Checked,
    /// None: for runs. Kernels are right in both, so this changes the speed only.
    Trusted,
}

/// What a plan must respect on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one binding, and so of one tensor.
    pub binding_bytes: u64,
    /// Bytes of one buffer, and so of one bucket.
    pub buffer_bytes: u64,
    /// Workgroups in one dimension of a dispatch.
    pub workgroups: u32,
    /// Storage buffers that one kernel may bind.
    pub storage_buffers: u32,
}

impl From<&wgpu::Limits> for Limits {
    fn from(limits: &wgpu::Limits) -> Self {
        Self {
            binding_bytes: limits.max_storage_buffer_binding_size,
            buffer_bytes: limits.max_buffer_size,
            workgroups: limits.max_compute_workgroups_per_dimension,
            storage_buffers: limits.max_storage_buffers_per_shader_stage,
        }
    }
}

/// An opened device. Owned by one thread at a time.
pub struct Gpu {
    pub name: String,
    pub api: &'static str,
    pub checks: Checks,
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub limits: Limits,
    /// Nanoseconds per tick of the device's clock, if passes can be timed by it.
    pub timestamp_period_ns: Option<f32>,
    faults: Arc<Mutex<Option<DeviceError>>>,
    made: AtomicU64,
}

impl Gpu {
    /// Opens `adapter` with the limits it has.
    pub fn open(adapter: &Adapter, checks: Checks) -> Result<Self, DeviceError> {
        let own = adapter.wgpu.limits();
        let limits = wgpu::Limits {
            max_storage_buffer_binding_size: own.max_storage_buffer_binding_size,
            max_buffer_size: own.max_buffer_size,
            ..Self::portable_limits(&own)
        };
        Self::open_with(adapter, checks, limits)
    }

    /// Opens `adapter` with exactly the portable limits: what kernel tests run under, so that a
    /// kernel that needs more fails there.
    pub fn open_portable(adapter: &Adapter, checks: Checks) -> Result<Self, DeviceError> {
        let limits = Self::portable_limits(&adapter.wgpu.limits());
        Self::open_with(adapter, checks, limits)
    }

    /// What every kernel may rely on: the WebGPU defaults and 128 bytes of immediates; less
    /// where the adapter has less, which concerns textures only.
    fn portable_limits(own: &wgpu::Limits) -> wgpu::Limits {
        let portable = wgpu::Limits { max_immediate_size: 128, ..wgpu::Limits::defaults() };
        // `Adapter::usable` has refused those that have less of what kernels rely on.
        portable.or_worse_values_from(own)
    }

    fn open_with(
        adapter: &Adapter,
        checks: Checks,
        required_limits: wgpu::Limits,
    ) -> Result<Self, DeviceError> {
        let name = adapter.name.clone();
        let fail = |why: String| DeviceError::Open { adapter: name.clone(), why };
        adapter.usable().map_err(fail)?;
        let limits = Limits::from(&required_limits);
        let clock = adapter.wgpu.features() & wgpu::Features::TIMESTAMP_QUERY;
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("potluck"),
            required_features: wgpu::Features::IMMEDIATES | clock,
            required_limits,
            // The default hint suballocates from blocks of 128 MiB and more, a large part of what
            // an integrated or a software adapter has.
            memory_hints: wgpu::MemoryHints::MemoryUsage,
            ..Default::default()
        };
        let opened = pollster::block_on(adapter.wgpu.request_device(&descriptor));
        let (device, queue) = opened.map_err(|error| fail(error.to_string()))?;
        let faults = Arc::new(Mutex::new(None));
        watch(&device, &name, &faults);
        let timestamp_period_ns = (!clock.is_empty()).then(|| queue.get_timestamp_period());
        let (api, made) = (adapter.api, AtomicU64::new(0));
        Ok(Self { name, api, checks, device, queue, limits, timestamp_period_ns, faults, made })
    }

    /// The first fault that the driver or the validation reported since the last call.
    pub fn check(&self) -> Result<(), DeviceError> {
        // A poisoned lock only means that a reporting thread panicked; the report is still good.
        match self.faults.lock().unwrap_or_else(|e| e.into_inner()).take() {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    /// A storage buffer of at least `bytes` bytes, zeroed, that can be copied from and to.
    pub fn storage(&self, label: &str, bytes: u64) -> Result<wgpu::Buffer, DeviceError> {
        use wgpu::BufferUsages as Usage;
        self.buffer(label, bytes, Usage::STORAGE | Usage::COPY_SRC | Usage::COPY_DST)
    }

    /// Buffers, bind groups and pipelines made so far: a step in the middle of a run makes none.
    pub fn made(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }

    /// Counts one more of what [`Gpu::made`] counts.
    pub fn count_made(&self) {
        self.made.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn buffer(
        &self,
        label: &str,
        bytes: u64,
        usage: wgpu::BufferUsages,
    ) -> Result<wgpu::Buffer, DeviceError> {
        let size = bytes.max(4).next_multiple_of(256);
        let limit = self.limits.buffer_bytes;
        if size > limit {
            let adapter = self.name.clone();
            return Err(DeviceError::TooLarge { adapter, bytes: size, limit });
        }
        let descriptor =
            wgpu::BufferDescriptor { label: Some(label), size, usage, mapped_at_creation: false };
        self.count_made();
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let buffer = self.device.create_buffer(&descriptor);
        match pollster::block_on(scope.pop()) {
            Some(_) => Err(DeviceError::OutOfMemory {
                adapter: self.name.clone(),
                what: format!("{label} ({size} bytes)"),
            }),
            None => Ok(buffer),
        }
    }

    /// Writes bytes at `offset`, both multiples of 4, before everything submitted later.
    pub fn upload(&self, buffer: &wgpu::Buffer, offset: u64, bytes: &[u8]) {
        self.queue.write_buffer(buffer, offset, bytes);
    }

    /// Submits what was encoded and waits until the device is done with it.
    pub fn submit_and_wait(&self, encoder: wgpu::CommandEncoder) -> Result<(), DeviceError> {
        let submission = self.queue.submit([encoder.finish()]);
        self.wait("a submission", Some(submission))
    }

    /// Waits until the device is done with a submission, or with all of them.
    pub fn wait(
        &self,
        what: &str,
        submission_index: Option<wgpu::SubmissionIndex>,
    ) -> Result<(), DeviceError> {
        let timeout = Some(SUBMISSION_DEADLINE);
        let polled = self.device.poll(wgpu::PollType::Wait { submission_index, timeout });
        self.check()?;
        polled.map(|_| ()).map_err(|_| DeviceError::Timeout {
            adapter: self.name.clone(),
            what: what.to_string(),
            seconds: SUBMISSION_DEADLINE.as_secs(),
        })
    }

    /// A buffer to read results through, for [`Gpu::read`].
    pub fn readback(&self, bytes: u64) -> Result<wgpu::Buffer, DeviceError> {
        use wgpu::BufferUsages as Usage;
        self.buffer("readback", bytes, Usage::MAP_READ | Usage::COPY_DST)
    }

    /// A buffer of `bytes` bytes that timestamps are resolved to.
    pub fn query_results(&self, bytes: u64) -> Result<wgpu::Buffer, DeviceError> {
        use wgpu::BufferUsages as Usage;
        self.buffer("query results", bytes, Usage::QUERY_RESOLVE | Usage::COPY_SRC)
    }

    /// Copies ranges `(buffer, offset, bytes)` to the host through `staging`, after everything
    /// submitted before; the results stand one after the other. Ranges are multiples of 4 bytes.
    pub fn read(
        &self,
        staging: &wgpu::Buffer,
        ranges: &[(&wgpu::Buffer, u64, u64)],
    ) -> Result<Vec<u8>, DeviceError> {
        let mut encoder = self.device.create_command_encoder(&Default::default());
        let mut total = 0;
        for (buffer, offset, bytes) in ranges {
            encoder.copy_buffer_to_buffer(buffer, *offset, staging, total, *bytes);
            total += bytes;
        }
        let (sender, receiver) = mpsc::channel();
        let submission = self.queue.submit([encoder.finish()]);
        staging.map_async(wgpu::MapMode::Read, 0..total, move |result| {
            // The receiver outlives the wait below; if it is gone, nobody wants the answer.
            let _ = sender.send(result);
        });
        self.wait("a readback", Some(submission))?;
        let refused = |why: String| DeviceError::Refused {
            adapter: self.name.clone(),
            what: "reading a buffer".into(),
            why,
        };
        let mapped = receiver.recv().map_err(|error| refused(error.to_string()))?;
        mapped.map_err(|error| refused(error.to_string()))?;
        let view = staging.get_mapped_range(0..total).map_err(|e| refused(e.to_string()))?;
        let bytes = view.to_vec();
        drop(view);
        staging.unmap();
        Ok(bytes)
    }
}

/// Turns what wgpu reports (by default: a panic) into a value for [`Gpu::check`].
fn watch(device: &wgpu::Device, name: &str, faults: &Arc<Mutex<Option<DeviceError>>>) {
    let record = {
        let faults = faults.clone();
        move |fault: DeviceError| {
            let mut first = faults.lock().unwrap_or_else(|e| e.into_inner());
            first.get_or_insert(fault);
        }
    };
    let (adapter, on_lost) = (name.to_string(), record.clone());
    device.set_device_lost_callback(move |reason, message| {
        // Dropping the device also reports it as destroyed: nobody asks for faults after that.
        let why = format!("{reason:?} {message}").trim().to_string();
        on_lost(DeviceError::Lost { adapter: adapter.clone(), why });
    });
    let adapter = name.to_string();
    device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
        let adapter = adapter.clone();
        record(match error {
            wgpu::Error::OutOfMemory { .. } => {
                DeviceError::OutOfMemory { adapter, what: "a submission".into() }
            }
            other => {
                DeviceError::Refused { adapter, what: "a command".into(), why: other.to_string() }
            }
        });
    }));
}
