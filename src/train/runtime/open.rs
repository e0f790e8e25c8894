//! Opening of a device: checks its memory, certifies and selects its kernels, allocates all buffers
//! of a plan, and starts its device thread.

use std::time::Duration;

use super::device_thread::DeviceThread;
use super::{RuntimeError, memory};
use potluck_core::format::gibibytes_up;
use potluck_graph::{Plan, VariantChoices};
use potluck_kernels::autotune::{self, KernelCache, KernelSelector, TuneOptions, cache};
use potluck_kernels::device::{DeviceError, Gpu, Selection, ShaderChecks, list_adapters, select};
use potluck_kernels::exec::cpu::{cpu_identity, cpu_name};
use potluck_kernels::exec::{Cpu, Executor, GpuExecutor, Moments};
use potluck_parallel::RankPlacement;

/// Opened device on its own thread.
pub struct OpenDevice {
    pub driver: DeviceThread,
    /// Messages for the user: the reason for choosing this device, and notes on its kernels.
    pub notes: Vec<String>,
    /// Identity, which determines the bits of results: recorded, and compared on resume.
    pub identity: String,
    pub is_cpu: bool,
    /// Index of the device among the requested ones.
    pub position: usize,
    /// Maximum rows of the device's plan.
    pub rows: u32,
    /// Selected kernel variant of each call with several.
    pub choices: VariantChoices,
    /// Keys of calls with variants chosen without timings.
    pub untimed: Vec<String>,
}

/// Options for opening a device, besides its plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OpenOptions {
    /// Deadline of the watchdog: the longest time without a heartbeat (`faults.device_timeout_s`).
    pub deadline: Duration,
    /// The device's memory in MiB; 0: the amount that it reports (`train.device_memory_mib`).
    pub device_memory_mib: u64,
    /// Longest duration of a submission in milliseconds; 0: by the kind of adapter
    /// (`train.submission_ms`).
    pub submission_ms: u64,
    /// Time budget in seconds for autotuning kernels without cached timings (`train.tune_s`).
    pub tune_s: f64,
}

impl Default for OpenOptions {
    fn default() -> Self {
        let deadline = Duration::from_secs(300);
        Self { deadline, device_memory_mib: 0, submission_ms: 0, tune_s: 5.0 }
    }
}

/// Opens the device of `selector`, with `plan` and memory for `moments` optimizer moments.
/// Kernel variants come from the adapter's cache, or else from autotuning.
///
/// # Errors
/// Returns `RuntimeError` if no device matches, if the plan exceeds the device's limits or the
/// memory, or if a kernel fails certification on its GPU driver.
pub fn open(
    selector: &str,
    plan: Plan,
    moments: usize,
    options: &OpenOptions,
) -> Result<OpenDevice, RuntimeError> {
    let selection = if selector.trim().eq_ignore_ascii_case("cpu") {
        Selection::cpu(1)
    } else {
        select(selector, &list_adapters())?
    };
    open_alone(selection, plan, moments, options)
}

/// Opens a selected device like [`open`].
///
/// # Errors
/// Returns the same errors as [`open`].
pub fn open_alone(
    selection: Selection,
    plan: Plan,
    moments: usize,
    options: &OpenOptions,
) -> Result<OpenDevice, RuntimeError> {
    let name = display_name(&selection);
    open_named(selection, &name, plan, moments, options)
}

/// Opens a selected device like [`open`], with a given display name.
///
/// # Errors
/// Returns the same errors as [`open`].
pub(crate) fn open_named(
    selection: Selection,
    name: &str,
    plan: Plan,
    moments: usize,
    options: &OpenOptions,
) -> Result<OpenDevice, RuntimeError> {
    let tuning = TuneOptions { seconds: options.tune_s, ..TuneOptions::default() };
    let moments = Moments::from(moments);
    memory::require_of_host(&selection, &plan, &moments)?;
    let device = DeviceToOpen { selection, name, plan, moments, options };
    open_selected(device, |_| tuning, &mut |_, _| {})
}

/// Returns options of kernel selection that keep the choices of a record, if there is one.
pub(crate) fn tuning_of(tuning: &TuneOptions, kept: Option<&RankPlacement>) -> TuneOptions {
    let mut tuning = tuning.clone();
    if let Some(kept) = kept {
        tuning.saved = kept.kernels.clone();
        tuning.saved_untimed = kept.untimed.clone();
    }
    tuning
}

/// Returns the display name of a device.
pub fn display_name(selection: &Selection) -> String {
    match selection {
        Selection::Cpu { threads, .. } => cpu_name(*threads),
        Selection::Adapter(adapter) => adapter.name.clone(),
        Selection::Offered(device) => device.name.clone(),
    }
}

/// Selected device with its plan and options.
pub struct DeviceToOpen<'a> {
    pub selection: Selection,
    /// Display name.
    pub name: &'a str,
    pub plan: Plan,
    pub moments: Moments,
    pub options: &'a OpenOptions,
}

/// Opens a selected device. `tuning` maps the device's identity to the options of kernel selection;
/// `report` receives the device's name and the progress of autotuning.
///
/// # Errors
/// Returns the same errors as [`open`].
pub fn open_selected(
    device: DeviceToOpen,
    tuning: impl FnOnce(&str) -> TuneOptions,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<OpenDevice, RuntimeError> {
    let DeviceToOpen { selection, name, plan, moments, options } = device;
    let is_cpu = matches!(selection, Selection::Cpu { .. });
    let rows = plan.options.rows as u32;
    let setting = options.device_memory_mib;
    let needed = memory::needed(&selection, &plan, &moments);
    let mut notes = Vec::from_iter(memory::require_on(&selection, name, setting, &plan, &moments)?);
    let (executor, identity, (choices, untimed)): (Box<dyn Executor>, _, _) = match selection {
        Selection::Cpu { reason, threads } => {
            if let Some(why) = reason {
                notes.push(format!("running on the CPU: {why}"));
            }
            let device = Cpu::fast(plan, moments).with_threads(threads).named(name);
            (Box::new(device), cpu_identity(), Default::default())
        }
        Selection::Adapter(mut adapter) => {
            let identity = cache::device_key(&adapter);
            let tuning = tuning(&identity);
            let mut kernels = KernelSelector::new(KernelCache::of(&adapter));
            // After the cache and the identity, which use the adapter's own name.
            adapter.name = name.into();
            // Insufficient memory here is an error of the configuration, unlike during a run.
            let mut gpu = Gpu::open(&adapter, ShaderChecks::Disabled, plan.graph.precision())
                .map_err(|error| no_room(error, needed))?;
            gpu.deadline = options.deadline;
            if options.submission_ms > 0 {
                gpu.submission_seconds = options.submission_ms as f64 / 1000.0;
            }
            kernels.choose_read_method(&mut gpu).map_err(|error| no_room(error, needed))?;
            let of_kernels = kernels
                .prepare(&gpu, &plan, &tuning, &mut |progress| report(name, progress))
                .map_err(|error| no_room(error, needed))?;
            notes.extend(of_kernels);
            let choices = (kernels.choices().clone(), kernels.untimed().to_vec());
            let device = GpuExecutor::new(gpu, plan, moments, kernels)
                .map_err(|error| no_room(error, needed))?;
            notes.extend(memory::note_if_full(name, &adapter.memory_now()));
            (Box::new(device), identity, choices)
        }
        Selection::Offered(device) => {
            let why = format!("{} is on another node, and this is a run of one", device.name);
            return Err(RuntimeError::Defect(why));
        }
    };
    let driver =
        DeviceThread::start(executor, options.deadline).map_err(RuntimeError::no_thread)?;
    Ok(OpenDevice { driver, notes, identity, is_cpu, position: 0, rows, choices, untimed })
}

/// Converts the error of a device before the first step. If its memory is insufficient for the
/// `needed` bytes of the run, a restart does not help.
pub(crate) fn no_room(error: DeviceError, needed: usize) -> RuntimeError {
    match error {
        DeviceError::OutOfMemory { adapter, what } => {
            RuntimeError::NoRoom { adapter, what, needed: gibibytes_up(needed as u64) }
        }
        other => other.into(),
    }
}
