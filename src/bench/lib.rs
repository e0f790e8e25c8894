//! Benchmark suite: peak rates of a device, the fraction of the peaks that matrix products reach,
//! and the duration of a training step. The figures are the same on every platform, so that reports
//! of different machines can be compared.
//!
//! [`run`] measures one device after the other and returns a [`Report`], which is printed as
//! tables ([`Report`]'s `Display`) or kept as JSON; [`compare()`] compares two reports.
//! [`collectives::run`] measures the communication between ranks, [`link::run`] the link between
//! two nodes, [`pipeline::run`] the steps of pipelines under every schedule, and [`scaling::run`]
//! the step on more and more devices. [`machines::plan_machines`] plans a run on machines that are
//! not here.

pub mod collectives;
pub mod compare;
mod generation;
mod large_product;
pub mod link;
pub mod machines;
mod matmul;
mod peaks;
pub mod pipeline;
pub mod profile;
pub mod report;
mod sample;
pub mod scaling;
pub mod step;
mod system;
mod table;
mod target;
mod training;
pub mod units;

pub use compare::compare;
pub use report::{
    CollectiveFigure, DeviceReport, Direction, Figure, FigureKind, LinkFigure, PipelineFigure,
    Report, ReportError, ScalingFigure, Skipped,
};
pub use sample::Effort;
pub use system::System;

use large_product::{PRECISIONS, ROBUSTNESS};
use potluck_graph::Precision;
use potluck_kernels::bench::device::BenchDevice;
use potluck_kernels::device::{DeviceError, ShaderChecks};
use potluck_train::TrainError;
use report::FigureRecorder;
use sample::SamplingPlan;
use target::{Target, TargetDevice};

/// Part of the benchmark suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Peak rates: floating-point operations, memory, transfers, and the overhead of a dispatch.
    Peaks,
    /// Matrix products over shapes.
    Matmul,
    /// A large matrix product with the checks of shaders and without them.
    Robustness,
    /// A large matrix product in f32 and in mixed precision.
    Precision,
    /// A training step of a GPT.
    Step,
    /// Text generation by a GPT.
    Generation,
}

/// Options of a benchmark: devices, effort and parts.
#[derive(Clone, Debug)]
pub struct Options {
    /// Device selectors as for `potluck train --devices`, separated by commas; or `all`: the CPU
    /// device and every usable adapter, each physical device once.
    pub devices: String,
    pub effort: Effort,
    pub parts: Vec<Part>,
    /// True to measure the steps of a LeNet, a ResNet, an LSTM and a GRU as well, and on hardware
    /// GPUs the step of GPT-2 with 124 million parameters.
    pub full: bool,
}

/// Runs the suite on one device after the other and reports each next measurement to `progress`.
///
/// If a device fails, its [`DeviceReport::error`] has the reason, its report keeps the figures
/// measured before, and the remaining devices are still measured.
///
/// # Errors
/// Returns `TrainError` if a selector chooses no device; then nothing is measured.
pub fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Report, TrainError> {
    let targets = target::targets(&options.devices)?;
    let devices = targets.iter().map(|target| measure(target, options, progress)).collect();
    Ok(Report::new(options.effort, devices))
}

fn measure(target: &Target, options: &Options, progress: &mut dyn FnMut(&str)) -> DeviceReport {
    let name = target.name();
    let mut note = |what: &str| progress(&format!("{name}: {what}"));
    let mut recorder = FigureRecorder::new(&mut note);
    let error = measure_parts(target, options, &mut recorder).err().map(|error| error.to_string());
    let (figures, skipped) = recorder.finish();
    DeviceReport {
        name,
        api: target.api(),
        driver: target.driver(),
        kind: target.kind(),
        figures,
        skipped,
        error,
    }
}

/// Measures the parts on one device. The training step comes first, so that its first run is cold:
/// the device was not opened before.
fn measure_parts(
    target: &Target,
    options: &Options,
    recorder: &mut FigureRecorder,
) -> Result<(), TrainError> {
    let sampling_plan = options.effort.sampling_plan();
    if options.parts.contains(&Part::Step) {
        step::measure(target, &sampling_plan, options.full, recorder)?;
    }
    if options.parts.contains(&Part::Generation) {
        generation::measure(target, &sampling_plan, options.full, recorder)?;
    }
    match &target.place {
        TargetDevice::Cpu => measure_host(&options.parts, &sampling_plan, recorder),
        TargetDevice::Adapter(adapter) => {
            if options.parts.iter().any(|part| matches!(part, Part::Peaks | Part::Matmul)) {
                let mut device =
                    BenchDevice::open(adapter, ShaderChecks::Disabled, Precision::F32)?;
                measure_gpu(&mut device, target, &options.parts, &sampling_plan, recorder)?;
            }
            for (part, cases) in [(Part::Robustness, &ROBUSTNESS), (Part::Precision, &PRECISIONS)] {
                if options.parts.contains(&part) {
                    large_product::measure(adapter, cases, options.effort, recorder)?;
                }
            }
        }
    }
    Ok(())
}

fn measure_host(parts: &[Part], sampling_plan: &SamplingPlan, recorder: &mut FigureRecorder) {
    if parts.contains(&Part::Peaks) {
        peaks::of_host(sampling_plan, recorder);
    }
    if parts.contains(&Part::Matmul) {
        matmul::of_host(sampling_plan, recorder);
    }
}

fn measure_gpu(
    device: &mut BenchDevice,
    target: &Target,
    parts: &[Part],
    sampling_plan: &SamplingPlan,
    recorder: &mut FigureRecorder,
) -> Result<(), DeviceError> {
    if parts.contains(&Part::Peaks) {
        peaks::of_gpu(device, target.is_hardware(), sampling_plan, recorder)?;
    }
    if parts.contains(&Part::Matmul) {
        matmul::of_gpu(device, sampling_plan, recorder)?;
    }
    Ok(())
}
