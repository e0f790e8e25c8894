//! The benchmark suite: what a device can do at most, how much of that matrix products reach, and
//! how long a training step takes. The same figures on every platform, so that reports of
//! different machines can be compared.
//!
//! [`run`] measures device after device and gives a [`Report`], which is printed as tables
//! ([`Report`]'s `Display`) or kept as JSON; [`compare()`] sets two of them side by side.
//! [`collectives::run`] does the same for what ranks exchange.
//!
//! ```
//! use potluck::bench::{Effort, Options, Part, compare, run};
//!
//! let options = Options {
//!     devices: "cpu".into(),
//!     effort: Effort::Tiny,
//!     parts: vec![Part::Peaks],
//!     full: false,
//! };
//! let report = run(&options, &mut |progress| eprintln!("{progress}"))?;
//! let peak = report.devices[0].figure("peak.flops").expect("every device has it");
//! assert!(peak.median > 0.0 && peak.unit == "GFLOP/s");
//! println!("{report}\n{}", compare(&report, &report));
//! # Ok::<(), potluck::train::TrainError>(())
//! ```

pub mod collectives;
pub mod compare;
pub mod matmul;
pub mod peaks;
pub mod profile;
pub mod report;
pub mod sample;
pub mod step;
pub mod system;
pub mod table;
pub mod target;
pub mod units;

pub use compare::compare;
pub use report::{CollectiveFigure, DeviceReport, Direction, Figure, Report, ReportError, Skipped};
pub use sample::Effort;
pub use system::System;

use crate::device::DeviceError;
use crate::kernels::bench::device::BenchDevice;
use crate::train::TrainError;
use report::FigureRecorder;
use sample::SamplingPlan;
use target::{Target, TargetDevice};

/// A part of the suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Floating-point operations, memory, transfers, and the cost of a dispatch.
    Peaks,
    /// Matrix products over shapes.
    Matmul,
    /// A training step of a GPT.
    Step,
}

/// What is measured, where and how thoroughly.
#[derive(Clone, Debug)]
pub struct Options {
    /// Selectors as for `potluck train --devices`, separated by commas; or `all`: the CPU device
    /// and every usable adapter, each physical one once.
    pub devices: String,
    pub effort: Effort,
    pub parts: Vec<Part>,
    /// Also the step of GPT-2 with 124 million parameters, on hardware GPUs.
    pub full: bool,
}

/// Runs the suite on one device after the other; `progress` is told what is measured next.
///
/// A device that fails has the reason in [`DeviceReport::error`] beside the figures it gave
/// before, and the others are measured all the same.
///
/// # Errors
/// A selector that chooses no device; then nothing is measured.
pub fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Report, TrainError> {
    let targets = target::targets(&options.devices)?;
    let devices = targets.iter().map(|target| measure(target, options, progress)).collect();
    Ok(Report::new(options.effort, devices))
}

fn measure(target: &Target, options: &Options, progress: &mut dyn FnMut(&str)) -> DeviceReport {
    let name = target.name();
    let mut say = |what: &str| progress(&format!("{name}: {what}"));
    let mut recorder = FigureRecorder::new(&mut say);
    let error = measure_parts(target, options, &mut recorder).err().map(|error| error.to_string());
    let (figures, skipped) = recorder.finish();
    let (driver, kind) = (target.driver(), target.kind());
    DeviceReport { name, api: target.api(), driver, kind, figures, skipped, error }
}

/// The step comes first, so that its first one is cold: nothing has opened the device before.
fn measure_parts(
    target: &Target,
    options: &Options,
    recorder: &mut FigureRecorder,
) -> Result<(), TrainError> {
    let plan_of_samples = options.effort.plan_of_samples();
    if options.parts.contains(&Part::Step) {
        step::measure(target, &plan_of_samples, options.full, recorder)?;
    }
    match &target.place {
        TargetDevice::Cpu => measure_host(&options.parts, &plan_of_samples, recorder),
        TargetDevice::Adapter(adapter) if options.parts.iter().any(|part| *part != Part::Step) => {
            let mut device = BenchDevice::open(adapter)?;
            measure_gpu(&mut device, target, &options.parts, &plan_of_samples, recorder)?;
        }
        TargetDevice::Adapter(_) => (),
    }
    Ok(())
}

fn measure_host(parts: &[Part], plan_of_samples: &SamplingPlan, recorder: &mut FigureRecorder) {
    if parts.contains(&Part::Peaks) {
        peaks::of_host(plan_of_samples, recorder);
    }
    if parts.contains(&Part::Matmul) {
        matmul::of_host(plan_of_samples, recorder);
    }
}

fn measure_gpu(
    device: &mut BenchDevice,
    target: &Target,
    parts: &[Part],
    plan_of_samples: &SamplingPlan,
    recorder: &mut FigureRecorder,
) -> Result<(), DeviceError> {
    if parts.contains(&Part::Peaks) {
        peaks::of_gpu(device, target.is_hardware(), plan_of_samples, recorder)?;
    }
    if parts.contains(&Part::Matmul) {
        matmul::of_gpu(device, plan_of_samples, recorder)?;
    }
    Ok(())
}
