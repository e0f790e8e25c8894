//! An opened adapter: its queue, buffers and transfers, and the faults it reported.

use std::collections::VecDeque;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::Heartbeat;
use super::adapter_kind::AdapterKind;
use super::adapters::Adapter;
use super::error::DeviceError;
use super::features::{self, CooperativeSquare, Features};
use super::limits::{self, Limits};
use super::mapped_reads::{self, ReadMethod};
use super::panics::{PanicText, catch_quietly};
use potluck_core::Lock;
use potluck_core::format::listed;
use potluck_graph::Precision;

/// Default deadline of a submission, after which the device counts as hung; a run may set a longer
/// one.
const DEADLINE: Duration = Duration::from_secs(120);

/// Default for the longest time that a submission should take.
pub(crate) const SUBMISSION_SECONDS: f64 = 0.2;

/// The same for a device that may draw the screen, which freezes during a submission.
const SUBMISSION_SECONDS_ON_SCREEN: f64 = 0.02;

/// Names of submitted kernels that are kept for the error of a lost device.
const SUBMITTED_KEPT: usize = 4;

/// The longest single wait in the driver: GL holds a lock meanwhile, for which other threads wait
/// six seconds before they panic, and ends the wait after four seconds.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Checks that wgpu adds to shaders (array bounds, loop counters).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShaderChecks {
    /// All checks: for tests.
    Enabled,
    /// No checks: for runs. Kernels are right in both, so this changes the speed only.
    Disabled,
}

/// An opened device. Owned by one thread at a time.
pub struct Gpu {
    pub name: String,
    pub api: &'static str,
    pub kind: AdapterKind,
    /// PCI vendor ID, or 0 if the API reports none.
    pub vendor: u32,
    pub checks: ShaderChecks,
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub limits: Limits,
    /// Features that shaders may use beyond the portable core.
    pub features: Features,
    /// Cooperative matrices that kernels may use.
    pub cooperative: Option<CooperativeSquare>,
    /// Nanoseconds per tick of the device's clock, if passes can be timed by it.
    pub timestamp_period_ns: Option<f32>,
    /// Deadline of a wait, after which the device counts as hung.
    pub deadline: Duration,
    /// The longest time that a submission should take.
    pub submission_seconds: f64,
    /// Method by which values are read from mapped memory.
    pub read_method: ReadMethod,
    /// Ticks whenever a call of the driver returns.
    pub heartbeat: Heartbeat,
    /// Version of the driver, for messages.
    driver: String,
    /// Names of the kernels that were submitted last, the oldest first.
    submitted: Lock<VecDeque<Arc<str>>>,
    faults: DeviceFaults,
    /// True after a wait beyond the deadline.
    is_hung: AtomicBool,
    allocation_count: AtomicU64,
}

impl Gpu {
    /// Opens `adapter` with its own limits and with the features that kernel variants of this
    /// precision use.
    pub fn open(
        adapter: &Adapter,
        checks: ShaderChecks,
        precision: Precision,
    ) -> Result<Self, DeviceError> {
        let features = features::for_runs(adapter.wgpu.features(), precision);
        Self::open_with(adapter, checks, features, limits::for_runs(&adapter.wgpu.limits()))
    }

    /// Opens `adapter` with exactly the portable limits, which kernel tests use so that a kernel
    /// that needs more fails there, and with subgroup operations if it has them.
    pub fn open_portable(adapter: &Adapter, checks: ShaderChecks) -> Result<Self, DeviceError> {
        let features = features::for_kernel_tests(adapter.wgpu.features());
        Self::open_with(adapter, checks, features, limits::portable(&adapter.wgpu.limits()))
    }

    fn open_with(
        adapter: &Adapter,
        checks: ShaderChecks,
        required_features: wgpu::Features,
        required_limits: wgpu::Limits,
    ) -> Result<Self, DeviceError> {
        let name = adapter.name.clone();
        if let Err(why) = adapter.usable() {
            return Err(DeviceError::Open { adapter: name, why });
        }
        let limits = Limits::from(&required_limits);
        let features = Features::of(required_features, &adapter.wgpu.get_info());
        let experimental = if features.cooperative_matrix {
            // SAFETY: the kernels that use the feature have only configurations that the driver
            // lists, and are certified before they run.
            unsafe { wgpu::ExperimentalFeatures::enabled() }
        } else {
            wgpu::ExperimentalFeatures::disabled()
        };
        let cooperative =
            CooperativeSquare::of(&adapter.cooperative_matrices(), &features, adapter.api);
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("potluck"),
            required_features,
            experimental_features: experimental,
            required_limits,
            // The default hint suballocates from blocks of 128 MiB and more, a large part of what
            // an integrated or a software adapter has.
            memory_hints: wgpu::MemoryHints::MemoryUsage,
            ..Default::default()
        };
        let opened = pollster::block_on(adapter.wgpu.request_device(&descriptor));
        let (device, queue) = opened
            .map_err(|error| DeviceError::Open { adapter: name.clone(), why: error.to_string() })?;
        let faults = DeviceFaults::watch(&device, &name);
        Ok(Self {
            timestamp_period_ns: features.timestamps.then(|| queue.get_timestamp_period()),
            name,
            api: adapter.api,
            kind: adapter.kind,
            vendor: adapter.vendor,
            checks,
            device,
            queue,
            limits,
            features,
            cooperative,
            deadline: DEADLINE,
            submission_seconds: submission_seconds(adapter.kind),
            read_method: ReadMethod::default(),
            heartbeat: Heartbeat::default(),
            driver: adapter.driver.clone(),
            submitted: Lock::default(),
            faults,
            is_hung: AtomicBool::new(false),
            allocation_count: AtomicU64::new(0),
        })
    }

    /// Returns the most iterations that an invocation may make in all its loops, if the driver
    /// ends them silently after that, as llvmpipe does (gallivm's limit of 65,535, not a Vulkan
    /// limit).
    pub fn loop_iterations_max(&self) -> Option<usize> {
        if self.name.contains("llvmpipe") { Some(65_535) } else { None }
    }

    /// Returns the first fault that the driver or the validation reported since the last call. For
    /// a lost device, every call returns the reason of the loss.
    pub fn check(&self) -> Result<(), DeviceError> {
        self.heartbeat.tick();
        match self.first_fault() {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    /// Returns true if the device has reported that it is lost.
    pub fn is_lost(&self) -> bool {
        self.faults.is_lost()
    }

    /// Reports a fault as the driver does, for tests.
    #[cfg(test)]
    pub fn report_fault(&self, fault: DeviceError) {
        self.faults.reported.lock().first = Some(fault);
    }

    fn first_fault(&self) -> Option<DeviceError> {
        if self.faults.is_refusal() {
            self.learn_of_loss();
        }
        let mut fault = self.faults.take()?;
        if let DeviceError::Lost { why, .. } = &mut fault {
            *why = format!("{why}; the driver is {}{}", self.driver, self.last_submitted());
        }
        Some(fault)
    }

    /// Returns true if the device does not answer or is lost, and not because there was too little
    /// memory: a kernel that ran then may be the cause.
    pub(crate) fn has_failed(&self) -> bool {
        self.is_hung.load(Ordering::Relaxed) || self.faults.is_lost_with_memory()
    }

    /// Notes the names of kernels that are about to be submitted, for the error of a lost device.
    pub(crate) fn note_submitted(&self, names: &[Arc<str>]) {
        let mut submitted = self.submitted.lock();
        for name in names {
            submitted.retain(|known| known != name);
            submitted.push_back(name.clone());
            if submitted.len() > SUBMITTED_KEPT {
                submitted.pop_front();
            }
        }
    }

    /// Returns a clause on the kernels that were submitted last; empty if there are none.
    fn last_submitted(&self) -> String {
        let submitted = self.submitted.lock();
        if submitted.is_empty() {
            return String::new();
        }
        format!(", and the kernels that it got last are {}", listed(submitted.iter()))
    }

    /// Waits for the device briefly, so that it reports a loss: a lost device refuses commands,
    /// possibly before it reports the loss, but after a wait it has reported it.
    fn learn_of_loss(&self) {
        // The result of the wait does not matter.
        let _ = self.poll(None, WAIT_MAX);
    }

    /// Allocates a zeroed storage buffer of at least `bytes` bytes that can be the source and the
    /// target of copies.
    pub fn storage(&self, label: &str, bytes: u64) -> Result<wgpu::Buffer, DeviceError> {
        use wgpu::BufferUsages as Usage;
        self.buffer(label, bytes, Usage::STORAGE | Usage::COPY_SRC | Usage::COPY_DST)
    }

    /// Returns the number of buffers, bind groups and pipelines made so far: a step in the middle
    /// of a run makes none.
    pub fn allocation_count(&self) -> u64 {
        self.allocation_count.load(Ordering::Relaxed)
    }

    /// Adds one to [`Gpu::allocation_count`].
    pub fn count_allocation(&self) {
        self.allocation_count.fetch_add(1, Ordering::Relaxed);
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
        self.count_allocation();
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

    /// Makes objects of the device. Errors that the driver or the validation reports meanwhile on
    /// this thread are returned, and are no faults that the next call would find.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if `what` is refused, if there is too little memory, or if the
    /// device is lost.
    pub fn scoped<T>(&self, what: &str, make: impl FnOnce() -> T) -> Result<T, DeviceError> {
        use wgpu::ErrorFilter::{Internal, OutOfMemory, Validation};
        let scopes = [Internal, OutOfMemory, Validation].map(|of| self.device.push_error_scope(of));
        let made = make();
        let mut first = None;
        // All scopes must end, also after an error.
        for scope in scopes.into_iter().rev() {
            if let Some(error) = pollster::block_on(scope.pop()) {
                first.get_or_insert(error);
            }
        }
        let Some(error) = first else { return Ok(made) };
        self.learn_of_loss();
        if self.is_lost() {
            self.check()?;
        }
        let adapter = self.name.clone();
        let what = what.to_string();
        Err(match error {
            wgpu::Error::OutOfMemory { .. } => DeviceError::OutOfMemory { adapter, what },
            other => DeviceError::Refused { adapter, what, why: other.to_string() },
        })
    }

    /// Writes bytes at `offset`, both multiples of 4, before everything submitted later.
    pub fn upload(&self, buffer: &wgpu::Buffer, offset: u64, bytes: &[u8]) {
        self.queue.write_buffer(buffer, offset, bytes);
    }

    /// Submits the encoded commands and waits until the device is done with them.
    pub fn submit_and_wait(&self, encoder: wgpu::CommandEncoder) -> Result<(), DeviceError> {
        let submission = self.queue.submit([encoder.finish()]);
        self.wait("a submission", Some(submission))
    }

    /// Waits until the device is done with a submission, or with all of them.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device reported a fault, or if it is not done within
    /// [`Gpu::deadline`].
    pub fn wait(
        &self,
        what: &str,
        mut submission_index: Option<wgpu::SubmissionIndex>,
    ) -> Result<(), DeviceError> {
        let end = Instant::now() + self.deadline;
        let mut unknown = None;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let polled = self.poll(submission_index.clone(), left.min(WAIT_MAX));
            if let Some(fault) = self.first_fault() {
                return Err(fault);
            }
            match polled {
                Ok(_) => {
                    self.heartbeat.tick();
                    return match unknown {
                        Some(why) => Err(self.refused(what, why)),
                        None => Ok(()),
                    };
                }
                Err(wgpu::PollError::Timeout) if left.is_zero() => return Err(self.timeout(what)),
                Err(wgpu::PollError::Timeout) => {}
                // The submission failed. The reason is reported once the ones before it are done.
                Err(error @ wgpu::PollError::WrongSubmissionIndex(..)) => {
                    unknown = Some(error.to_string());
                    submission_index = None;
                }
            }
        }
    }

    /// Runs the callbacks of everything that the device has completed by now, without waiting. The
    /// heartbeat does not tick, because polling a device is no sign of its progress.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device reported a fault.
    pub fn poll_now(&self) -> Result<(), DeviceError> {
        let polled = self.poll_for(wgpu::PollType::Poll);
        if let Some(fault) = self.first_fault() {
            return Err(fault);
        }
        match polled {
            Ok(_) => Ok(()),
            Err(why) => Err(self.refused("a look at the device", why.to_string())),
        }
    }

    fn poll(
        &self,
        submission_index: Option<wgpu::SubmissionIndex>,
        timeout: Duration,
    ) -> Result<wgpu::PollStatus, wgpu::PollError> {
        self.poll_for(wgpu::PollType::Wait { submission_index, timeout: Some(timeout) })
    }

    fn poll_for(&self, what: wgpu::PollType) -> Result<wgpu::PollStatus, wgpu::PollError> {
        // A poll of a lost device frees its buffers, including mapped ones that another thread may
        // still read.
        if self.faults.is_lost() {
            return Ok(wgpu::PollStatus::QueueEmpty);
        }
        // wgpu panics when the driver reports during a wait that the device is lost. The panic
        // leaves nothing half done: it comes after the wait, and after the callback for lost
        // devices.
        if let Some(polled) = catch_quietly(&PanicText::default(), || self.device.poll(what)) {
            return polled;
        }
        let why = "the driver failed in a wait".into();
        self.faults.lose(DeviceError::Lost { adapter: self.name.clone(), why });
        Ok(wgpu::PollStatus::QueueEmpty)
    }

    /// Notes that the device is lost, for a reason that neither the driver nor wgpu reports. Every
    /// later call returns the same error.
    pub(crate) fn lose(&self, why: &str) -> DeviceError {
        let lost = DeviceError::Lost { adapter: self.name.clone(), why: why.into() };
        self.faults.lose(lost.clone());
        self.first_fault().unwrap_or(lost)
    }

    /// Destroys the device, for tests of a device loss.
    pub fn destroy(&self) {
        self.faults.lose(lost(self.name.clone(), wgpu::DeviceLostReason::Destroyed, ""));
        self.device.destroy();
    }

    /// Returns the error that `what` took longer than [`Gpu::deadline`], after which the device
    /// counts as hung.
    pub fn timeout(&self, what: &str) -> DeviceError {
        if !self.is_hung.swap(true, Ordering::Relaxed) {
            // The drop of the last handle of a queue waits for all of its work, without a limit.
            mem::forget(self.queue.clone());
        }
        DeviceError::Timeout {
            adapter: self.name.clone(),
            what: format!("{what}{}", self.last_submitted()),
            seconds: self.deadline.as_secs_f64(),
        }
    }

    /// Returns the error that `what` was refused, or the earlier fault that caused the refusal.
    pub fn refused(&self, what: &str, why: String) -> DeviceError {
        self.learn_of_loss();
        self.faults.take().unwrap_or_else(|| DeviceError::Refused {
            adapter: self.name.clone(),
            what: what.to_string(),
            why,
        })
    }

    /// Allocates a staging buffer for [`Gpu::read`].
    pub fn readback(&self, bytes: u64) -> Result<wgpu::Buffer, DeviceError> {
        use wgpu::BufferUsages as Usage;
        self.buffer("readback", bytes, Usage::MAP_READ | Usage::COPY_DST)
    }

    /// Allocates a buffer of `bytes` bytes to which timestamps are resolved.
    pub fn query_results(&self, bytes: u64) -> Result<wgpu::Buffer, DeviceError> {
        use wgpu::BufferUsages as Usage;
        self.buffer("query results", bytes, Usage::QUERY_RESOLVE | Usage::COPY_SRC)
    }

    /// Copies ranges `(buffer, offset, bytes)` to the host through `staging`, after everything
    /// submitted before; returns their bytes one after the other. Ranges are multiples of 4 bytes.
    pub fn read(
        &self,
        staging: &wgpu::Buffer,
        ranges: &[(&wgpu::Buffer, u64, u64)],
    ) -> Result<Vec<u8>, DeviceError> {
        let total: u64 = ranges.iter().map(|(_, _, bytes)| bytes).sum();
        let mut bytes = vec![0; total as usize];
        self.read_into(staging, ranges, &mut bytes)?;
        Ok(bytes)
    }

    /// Does the same as [`Gpu::read`], into memory of the caller.
    ///
    /// # Panics
    /// Panics if `bytes` is not as long as all ranges.
    pub fn read_into(
        &self,
        staging: &wgpu::Buffer,
        ranges: &[(&wgpu::Buffer, u64, u64)],
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        self.read_with(staging, ranges, |view| mapped_reads::copy(self.read_method, view, bytes))
    }

    /// Does the same as [`Gpu::read`], but passes the mapped bytes to a function.
    pub(crate) fn read_with<T>(
        &self,
        staging: &wgpu::Buffer,
        ranges: &[(&wgpu::Buffer, u64, u64)],
        body: impl FnOnce(&[u8]) -> T,
    ) -> Result<T, DeviceError> {
        let mut encoder = self.device.create_command_encoder(&Default::default());
        let mut total = 0;
        for (buffer, offset, length) in ranges {
            encoder.copy_buffer_to_buffer(buffer, *offset, staging, total, *length);
            total += length;
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        let submission = self.queue.submit([encoder.finish()]);
        staging.map_async(wgpu::MapMode::Read, 0..total, move |result| {
            // The receiver outlives the wait below; it is gone only if the wait failed.
            let _ = sender.send(result);
        });
        self.wait("a readback", Some(submission))?;
        let refused = |why: String| self.refused("reading a buffer", why);
        let mapped = receiver.recv().map_err(|error| refused(error.to_string()))?;
        mapped.map_err(|error| refused(error.to_string()))?;
        let view = staging.get_mapped_range(0..total).map_err(|e| refused(e.to_string()))?;
        let result = body(&view);
        drop(view);
        staging.unmap();
        Ok(result)
    }
}

/// Returns the longest time that a submission should take on a device of this kind: short if it may
/// draw the screen.
fn submission_seconds(kind: AdapterKind) -> f64 {
    let has_desktop = cfg!(any(windows, target_os = "macos"));
    match kind {
        AdapterKind::Software => SUBMISSION_SECONDS,
        AdapterKind::Integrated => SUBMISSION_SECONDS_ON_SCREEN,
        _ if has_desktop => SUBMISSION_SECONDS_ON_SCREEN,
        _ => SUBMISSION_SECONDS,
    }
}

/// Faults that wgpu reports, as values instead of panics. Clones share them.
#[derive(Clone, Default)]
struct DeviceFaults {
    reported: Arc<Lock<Reported>>,
}

#[derive(Default)]
struct Reported {
    /// The first fault; later ones are its consequences.
    first: Option<DeviceError>,
    /// True if the device is lost: `first` then holds the reason permanently.
    lost: bool,
}

impl DeviceFaults {
    /// Collects the faults of a device from now on.
    fn watch(device: &wgpu::Device, name: &str) -> Self {
        let faults = Self::default();
        let on_lost = faults.clone();
        let adapter = name.to_string();
        device.set_device_lost_callback(move |reason, message| {
            // Dropping the device also reports it as destroyed, but no call asks for faults after
            // that.
            on_lost.lose(lost(adapter.clone(), reason, &message));
        });
        let on_error = faults.clone();
        let adapter = name.to_string();
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            let adapter = adapter.clone();
            let fault = match error {
                wgpu::Error::OutOfMemory { .. } => {
                    DeviceError::OutOfMemory { adapter, what: "a submission".into() }
                }
                other => {
                    let why = other.to_string();
                    DeviceError::Refused { adapter, what: "a command".into(), why }
                }
            };
            on_error.reported.lock().first.get_or_insert(fault);
        }));
        faults
    }

    fn lose(&self, why: DeviceError) {
        let mut reported = self.reported.lock();
        match &reported.first {
            // Lack of memory is the cause of the loss; a refusal is its consequence.
            Some(first) if !matches!(first, DeviceError::Refused { .. }) => {}
            _ => reported.first = Some(why),
        }
        reported.lost = true;
    }

    fn is_lost(&self) -> bool {
        self.reported.lock().lost
    }

    fn is_lost_with_memory(&self) -> bool {
        let reported = self.reported.lock();
        reported.lost && !matches!(reported.first, Some(DeviceError::OutOfMemory { .. }))
    }

    fn is_refusal(&self) -> bool {
        let reported = self.reported.lock();
        !reported.lost && matches!(reported.first, Some(DeviceError::Refused { .. }))
    }

    fn take(&self) -> Option<DeviceError> {
        let mut reported = self.reported.lock();
        if reported.lost { reported.first.clone() } else { reported.first.take() }
    }
}

/// Converts a device loss to an error. A driver that runs out of memory in a submission loses its
/// device; the error then reports the lack of memory, on which the user can act.
fn lost(adapter: String, reason: wgpu::DeviceLostReason, message: &str) -> DeviceError {
    if message == wgpu::hal::DeviceError::OutOfMemory.to_string() {
        return DeviceError::OutOfMemory { adapter, what: "a submission".into() };
    }
    let why = match reason {
        wgpu::DeviceLostReason::Destroyed => "it was destroyed".to_string(),
        wgpu::DeviceLostReason::Unknown => message.to_string(),
    };
    DeviceError::Lost { adapter, why }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device_lost(why: &str) -> DeviceError {
        DeviceError::Lost { adapter: "a".into(), why: why.into() }
    }

    #[test]
    fn a_lost_device_says_for_ever_why() {
        let faults = DeviceFaults::default();
        assert!(faults.take().is_none());
        faults.lose(device_lost("first"));
        faults.lose(device_lost("second"));
        for _ in 0..2 {
            assert!(matches!(faults.take(), Some(DeviceError::Lost { why, .. }) if why == "first"));
        }
    }

    #[test]
    fn a_refusal_is_a_consequence_of_the_loss_and_want_of_memory_its_cause() {
        let faults = DeviceFaults::default();
        let (adapter, what, why) = ("a".to_string(), "b".to_string(), "c".to_string());
        faults.reported.lock().first = Some(DeviceError::Refused { adapter, what, why });
        assert!(faults.is_refusal());
        faults.lose(device_lost("first"));
        assert!(!faults.is_refusal() && matches!(faults.take(), Some(DeviceError::Lost { .. })));

        let faults = DeviceFaults::default();
        let (adapter, what) = ("a".to_string(), "b".to_string());
        faults.reported.lock().first = Some(DeviceError::OutOfMemory { adapter, what });
        faults.lose(device_lost("later"));
        assert!(faults.is_lost() && !faults.is_lost_with_memory());
        assert!(matches!(faults.take(), Some(DeviceError::OutOfMemory { .. })));
    }

    #[test]
    fn other_faults_are_told_once() {
        let faults = DeviceFaults::default();
        faults.reported.lock().first =
            Some(DeviceError::OutOfMemory { adapter: "a".into(), what: "x".into() });
        assert!(matches!(faults.take(), Some(DeviceError::OutOfMemory { .. })));
        assert!(faults.take().is_none());
    }

    #[test]
    fn a_device_that_is_lost_for_want_of_memory_says_so() {
        let unknown = wgpu::DeviceLostReason::Unknown;
        let message = wgpu::hal::DeviceError::OutOfMemory.to_string();
        let error = lost("a".into(), unknown, &message);
        assert!(matches!(error, DeviceError::OutOfMemory { .. }), "{error}");
        let error = lost("a".into(), unknown, "it fell off the bus");
        assert!(error.to_string().contains("it fell off the bus"), "{error}");
    }
}
