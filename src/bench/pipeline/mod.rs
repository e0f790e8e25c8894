//! Benchmark of pipelines: the training steps of a GPT under every schedule, for several numbers
//! of stages and micro-batches, with the prediction by simulation and the bubble by formula.
//!
//! The prediction is the step that [`potluck_parallel::planner::price`] simulates with the times of
//! the blocks, measured separately on each device, and with transfers. It leaves out the slowdown
//! of devices that share a processor, loading, reductions and updates. The formula
//! ([`ideal_bubble`]) assumes equal stages and free transfers.
//!
//! [`ideal_bubble`]: potluck_parallel::schedule::ideal_bubble

mod measure;
mod price;

use crate::collectives::devices::apis;
use crate::report::{DeviceReport, Direction, Figure, FigureKind, FigureRecorder, Report};
use crate::sample::Effort;
use measure::{PipelineWorkload, TimedSteps};
use potluck_core::arithmetic::median;
use potluck_kernels::device::{Adapter, Selection, select_all, selector_of};
use potluck_parallel::schedule::require_fit;
use potluck_parallel::{PipelineSchedule, PipelineShape};
use potluck_train::TrainError;
use potluck_train::runtime::placement::candidates::adapters_for;

/// Model chunks per stage of the interleaved schedule.
const CHUNKS: usize = 2;

/// Cut of the model into stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutChoice {
    /// Nearly equal numbers of blocks.
    Even,
    /// By measured times of blocks, as in a run.
    Measured,
}

/// Options of a benchmark of pipelines.
#[derive(Clone, Debug)]
pub struct PipelineBenchOptions {
    /// Device selectors as for `potluck train --devices`. A single device is used for every stage;
    /// of several devices, the first ones are used, one per stage.
    pub devices: String,
    pub effort: Effort,
    pub schedules: Vec<PipelineSchedule>,
    pub stages: Vec<usize>,
    pub micro_batches: Vec<usize>,
    /// Samples of a micro-batch.
    pub samples: usize,
    pub width: usize,
    pub layers: usize,
    pub context: usize,
    pub cut: CutChoice,
}

/// Schedule with the shape of a pipeline: one row of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PipelineCase {
    schedule: PipelineSchedule,
    shape: PipelineShape,
}

impl PipelineCase {
    fn name(&self) -> String {
        let PipelineShape { stages, micro_batches, .. } = self.shape;
        format!("pipeline.{}_{stages}_stages_{micro_batches}_micro_batches", self.schedule)
    }

    /// Refuses a case that cannot run on a model of `blocks` blocks.
    ///
    /// # Errors
    /// Returns the reason.
    fn require_fit(&self, blocks: usize) -> Result<(), String> {
        require_fit(self.schedule, self.shape).map_err(|error| error.to_string())?;
        let parts = self.shape.stages * self.shape.chunks;
        if blocks < parts {
            Err(format!("a model of {blocks} blocks has no {parts} parts; raise --layers"))
        } else {
            Ok(())
        }
    }
}

/// Cases in order: by stages, micro-batches, schedule.
fn cases(options: &PipelineBenchOptions) -> Vec<PipelineCase> {
    let mut cases = Vec::new();
    for &stages in &options.stages {
        for &micro_batches in &options.micro_batches {
            for &schedule in &options.schedules {
                let chunks = if schedule == PipelineSchedule::Interleaved { CHUNKS } else { 1 };
                let shape = PipelineShape { stages, chunks, micro_batches };
                cases.push(PipelineCase { schedule, shape });
            }
        }
    }
    cases
}

/// Devices from which every case takes its devices.
struct CaseDevices<'a> {
    selector: &'a str,
    adapters: Vec<Adapter>,
    selections: Vec<Selection>,
}

impl CaseDevices<'_> {
    /// Returns the selector of the devices of `stages` stages.
    ///
    /// # Errors
    /// Returns the reason if there are fewer.
    fn of_stages(&self, stages: usize) -> Result<String, String> {
        let positions: Vec<usize> = match self.selections.len() {
            1 => vec![0; stages],
            count if count < stages => {
                return Err(format!(
                    "{stages} stages need {stages} devices, and there are {count}"
                ));
            }
            _ => (0..stages).collect(),
        };
        let found = selector_of(self.selector, &positions, &self.adapters);
        found.ok_or_else(|| format!("{} does not choose {stages} devices", self.selector))
    }
}

/// Measures all cases, and reports each next one to `progress`. Cases that do not fit are skipped
/// with the reason.
///
/// # Errors
/// Returns `TrainError` if a selector chooses no device or the model cannot be built; then nothing
/// is measured. Any other failure is recorded in [`DeviceReport::error`].
pub fn run(
    options: &PipelineBenchOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<Report, TrainError> {
    let adapters = adapters_for(&options.devices);
    let selections = select_all(&options.devices, &adapters)?;
    let devices = CaseDevices { selector: &options.devices, adapters, selections };
    let workload = PipelineWorkload::new(options)?;
    let mut recorder = FigureRecorder::new(progress);
    let error = measure_all(options, &devices, &workload, &mut recorder);
    let error = error.err().map(|error| error.to_string());
    let (figures, skipped) = recorder.finish();
    let names = devices.selections.iter().map(Selection::name).collect::<Vec<_>>();
    let kind = match devices.selections.len() {
        1 => "one device, which all stages share".into(),
        count => format!("{count} devices"),
    };
    let report = DeviceReport {
        name: names.join(" + "),
        api: apis(&devices.selections),
        driver: String::new(),
        kind,
        figures,
        skipped,
        error,
    };
    Ok(Report::new(options.effort, vec![report]))
}

fn measure_all(
    options: &PipelineBenchOptions,
    devices: &CaseDevices,
    workload: &PipelineWorkload,
    recorder: &mut FigureRecorder,
) -> Result<(), TrainError> {
    let on = format!(
        "{} layers, width {}, context {}, micro-batches of {}, AdamW",
        options.layers, options.width, options.context, options.samples
    );
    let mut measured = None;
    for case in cases(options) {
        let fits = case.require_fit(workload.blocks());
        let selector = match fits.and_then(|()| devices.of_stages(case.shape.stages)) {
            Ok(selector) => selector,
            Err(why) => {
                recorder.skip(&case.name(), why);
                continue;
            }
        };
        let PipelineShape { stages, micro_batches, .. } = case.shape;
        let schedule = case.schedule;
        recorder.progress(&format!("{schedule}, {stages} stages, {micro_batches} micro-batches"));
        match workload.measure(&case, &selector, &mut measured) {
            Ok(timed) => recorder.add(figure(&case, options, &timed).on(&on)),
            Err(TrainError::Runtime(error)) if error.is_capacity_error() => {
                recorder.skip(&case.name(), error.to_string());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Figure of a case: the tokens per second of its steps, with times and bubbles.
fn figure(case: &PipelineCase, options: &PipelineBenchOptions, timed: &TimedSteps) -> Figure {
    let tokens = (case.shape.micro_batches * options.samples * options.context) as f64;
    let rates: Vec<f64> = timed.steps.iter().map(|seconds| tokens / seconds).collect();
    let kind = FigureKind::Pipeline(super::PipelineFigure {
        schedule: case.schedule,
        stages: case.shape.stages,
        chunks: case.shape.chunks,
        micro_batches: case.shape.micro_batches,
        blocks: timed.blocks.clone(),
        step_s: median(&timed.steps),
        predicted_s: timed.predicted.seconds,
        bubble: median(&timed.bubbles),
        predicted_bubble: timed.predicted.bubble,
        formula_bubble: timed.predicted.formula,
    });
    Figure::new(kind, &case.name(), "tokens/s", Direction::Higher, &rates)
}

#[cfg(test)]
mod tests {
    use super::*;
    use price::PredictedStep;

    fn options() -> PipelineBenchOptions {
        PipelineBenchOptions {
            devices: "cpu".into(),
            effort: Effort::Tiny,
            schedules: PipelineSchedule::ALL.to_vec(),
            stages: vec![2, 4],
            micro_batches: vec![4, 6],
            samples: 2,
            width: 8,
            layers: 2,
            context: 4,
            cut: CutChoice::Even,
        }
    }

    #[test]
    fn cases_that_cannot_run_say_why() {
        let all = cases(&options());
        assert_eq!(all.len(), 16);
        assert_eq!(all[0].name(), "pipeline.gpipe_2_stages_4_micro_batches");
        let refused: Vec<String> =
            all.iter().filter_map(|case| case.require_fit(4).err()).collect();
        let [parts, round] = &refused[..] else { panic!("{refused:?}") };
        assert!(parts.contains("4 blocks has no 8 parts"), "{parts}");
        assert!(round.contains("a multiple of 4 micro-batches"), "{round}");
    }

    #[test]
    fn one_device_is_used_by_all_stages_and_of_several_the_first_ones() {
        let of = |selector: &str, stages| {
            let selections = select_all(selector, &[]).unwrap();
            CaseDevices { selector, adapters: Vec::new(), selections }.of_stages(stages)
        };
        assert_eq!(of("cpu", 3).unwrap(), "cpu*3");
        assert_eq!(of("cpu*4", 2).unwrap(), "cpu*2");
        assert!(of("cpu*2", 3).unwrap_err().contains("3 stages need 3 devices"));
    }

    #[test]
    fn a_figure_has_the_medians_of_its_steps() {
        let case = cases(&options())[1];
        let predicted = PredictedStep { seconds: 0.75, bubble: 0.25, formula: 0.2 };
        let (steps, bubbles) = (vec![1.0, 0.5, 2.0], vec![0.4, 0.3, 0.1]);
        let timed = TimedSteps { steps, bubbles, blocks: vec![2, 2], predicted };
        let figure = figure(&case, &options(), &timed);
        // 4 micro-batches of 2 samples of 4 tokens.
        assert_eq!((figure.median, figure.min, figure.max), (32.0, 16.0, 64.0));
        let FigureKind::Pipeline(found) = figure.kind else { panic!("{figure:?}") };
        assert_eq!((found.step_s, found.bubble, found.predicted_s), (1.0, 0.3, 0.75));
        assert_eq!((found.predicted_bubble, found.formula_bubble), (0.25, 0.2));
        assert_eq!((found.schedule, found.stages), (PipelineSchedule::OneFOneB, 2));
    }
}
