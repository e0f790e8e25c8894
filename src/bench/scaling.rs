//! Benchmark of scaling: the training step of a small GPT on the fastest device, the two fastest
//! ones, and so on to all, with the same batch, compared with each device alone.
//!
//! All cases are open at the same time and are measured in turns, so that a machine that slows down
//! affects all alike.

use std::time::{Duration, Instant};

use crate::collectives::devices::apis;
use crate::report::{
    DeviceReport, Direction, Figure, FigureKind, FigureRecorder, Report, ScalingFigure,
};
use crate::sample::{Effort, SamplingPlan};
use crate::step::small;
use crate::training::TrainingWorkload;
use potluck_core::arithmetic::median;
use potluck_core::metrics::RunCost;
use potluck_graph::ModelGraph;
use potluck_graph::model::gpt;
use potluck_kernels::device::{Adapter, Selection, select_all, selector_of};
use potluck_parallel::ParallelOptions;
use potluck_train::TrainError;
use potluck_train::runtime::placement::assemble::assemble_on;
use potluck_train::runtime::placement::candidates::adapters_for;
use potluck_train::runtime::placement::names::display_names;
use potluck_train::runtime::placement::types::PlacementRequest;
use potluck_train::session::Session;

/// Steps of each case before the measured ones.
const WARM_UP: usize = 2;
/// Steps of a turn of a case, of which the first is not measured: its values left the caches.
const TURN: usize = 3;
/// Fewest turns of a case, regardless of their duration.
const TURNS_MIN: usize = 2;

/// Options of a benchmark of scaling.
#[derive(Clone, Debug)]
pub struct ScalingOptions {
    /// Device selectors as for `potluck train --devices`.
    pub devices: String,
    pub effort: Effort,
    /// Samples of a step; `None`: by the effort and the number of devices.
    pub batch: Option<usize>,
}

/// Model and options that all cases share.
struct ScalingWorkload {
    training: TrainingWorkload,
    parallel: ParallelOptions,
    batch: u32,
    /// Requested devices with their names, and the adapters among which they were found.
    selector: String,
    adapters: Vec<Adapter>,
    selections: Vec<Selection>,
    names: Vec<String>,
}

/// Devices in training, with their measured steps.
struct ScalingCase {
    /// Positions among the requested devices.
    positions: Vec<usize>,
    session: Session,
    /// Seconds of each measured step.
    steps: Vec<f64>,
}

impl ScalingCase {
    fn step_s(&self) -> f64 {
        median(&self.steps)
    }
}

/// Measures each device alone, and then the fastest ones together with all alone, in turns; reports
/// each next measurement to `progress`.
///
/// # Errors
/// Returns `TrainError` if a selector chooses no device or the batch has too few samples; then
/// nothing is measured. Any other failure is recorded in [`DeviceReport::error`].
pub fn run(options: &ScalingOptions, progress: &mut dyn FnMut(&str)) -> Result<Report, TrainError> {
    let workload = ScalingWorkload::new(options)?;
    let mut recorder = FigureRecorder::new(progress);
    let plan = options.effort.sampling_plan();
    let error = workload.measure(&plan, &mut recorder).err().map(|error| error.to_string());
    let (figures, skipped) = recorder.finish();
    let kind = match workload.selections.len() {
        1 => "one device".into(),
        count => format!("{count} devices"),
    };
    let report = DeviceReport {
        name: workload.names.join(" + "),
        api: apis(&workload.selections),
        driver: String::new(),
        kind,
        figures,
        skipped,
        error,
    };
    Ok(Report::new(options.effort, vec![report]))
}

impl ScalingWorkload {
    fn new(options: &ScalingOptions) -> Result<Self, TrainError> {
        let adapters = adapters_for(&options.devices);
        let selections = select_all(&options.devices, &adapters)?;
        let of_effort = options.effort.sampling_plan().batch * selections.len();
        let batch = options.batch.unwrap_or(of_effort);
        if batch < selections.len() {
            return Err(TrainError::InvalidRequest(format!(
                "a batch of {batch} has no sample for each of {} devices; raise --batch",
                selections.len()
            )));
        }
        let model = ModelGraph::training(gpt(&small())?, false)?;
        Ok(Self {
            training: TrainingWorkload::new(model, small().vocabulary, options.effort),
            parallel: ParallelOptions::default(),
            batch: batch as u32,
            selector: options.devices.clone(),
            names: display_names(&selections),
            adapters,
            selections,
        })
    }

    fn measure(
        &self,
        plan: &SamplingPlan,
        recorder: &mut FigureRecorder,
    ) -> Result<(), TrainError> {
        let mut alone = Vec::with_capacity(self.selections.len());
        for position in 0..self.selections.len() {
            recorder.progress(&format!("a step on {}", self.names[position]));
            let mut case = self.open(vec![position])?;
            self.take_turn(&mut case)?;
            alone.push(case);
        }
        alone.sort_by(|a, b| a.step_s().total_cmp(&b.step_s()));
        let order: Vec<usize> = alone.iter().map(|case| case.positions[0]).collect();
        let mut cases = alone;
        for count in 2..=order.len() {
            recorder.progress(&format!("opening the {count} fastest devices"));
            cases.push(self.open(order[..count].to_vec())?);
        }
        recorder.progress(&format!("steps of {} cases in turns", cases.len()));
        self.measure_in_turns(&mut cases, plan)?;
        let (alone, together) = cases.split_at(order.len());
        let solo_s: Vec<f64> = alone.iter().map(ScalingCase::step_s).collect();
        for (index, case) in alone.iter().enumerate() {
            recorder.add(self.figure(case, &solo_s, &name_alone(index)));
        }
        for case in together {
            let name = format!("scaling.{}_devices", case.positions.len());
            recorder.add(self.figure(case, &solo_s, &name));
        }
        Ok(())
    }

    /// Opens devices, and takes the steps before the measured ones.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails, or if one is left out.
    fn open(&self, positions: Vec<usize>) -> Result<ScalingCase, TrainError> {
        // Devices that are named must all take part.
        let mut ascending = positions.clone();
        ascending.sort_unstable();
        let selector = self.selector_of_case(&ascending)?;
        let selections = ascending.iter().map(|position| self.selections[*position].clone());
        let request = self.training.request(&selector, &self.parallel, self.batch);
        let request = PlacementRequest { fits_micro_batch: true, ..request };
        let placed = assemble_on(&request, &self.adapters, selections.collect(), &mut |_, _| {})?;
        require_all(&selector, positions.len(), placed.placement.ranks.len(), &placed.notes)?;
        let session = self.training.session(placed)?;
        let mut case = ScalingCase { positions, session, steps: Vec::new() };
        for _ in 0..WARM_UP {
            self.step(&mut case)?;
        }
        Ok(case)
    }

    /// Returns the selector of the requested devices at these ascending positions.
    fn selector_of_case(&self, positions: &[usize]) -> Result<String, TrainError> {
        let found = selector_of(&self.selector, positions, &self.adapters);
        found.ok_or_else(|| {
            let count = positions.len();
            let why = format!("no selector names {count} of the devices {}", self.selector);
            TrainError::InvalidRequest(why)
        })
    }

    fn measure_in_turns(
        &self,
        cases: &mut [ScalingCase],
        plan: &SamplingPlan,
    ) -> Result<(), TrainError> {
        for case in cases.iter_mut() {
            // The steps that were measured alone only gave the order.
            case.steps.clear();
        }
        let longest = Duration::from_secs_f64(plan.steps_seconds_max * cases.len() as f64);
        let begun = Instant::now();
        let turns = plan.steps.div_ceil(TURN - 1).max(TURNS_MIN);
        for turn in 0..turns {
            if turn >= TURNS_MIN && begun.elapsed() > longest {
                break;
            }
            for case in cases.iter_mut() {
                self.take_turn(case)?;
            }
        }
        Ok(())
    }

    fn take_turn(&self, case: &mut ScalingCase) -> Result<(), TrainError> {
        for index in 0..TURN {
            let seconds = self.step(case)?;
            if index > 0 {
                case.steps.push(seconds);
            }
        }
        Ok(())
    }

    /// Performs a step; returns its seconds.
    fn step(&self, case: &mut ScalingCase) -> Result<f64, TrainError> {
        let (seconds, reports) = self.training.step(&mut case.session)?;
        case.session.measure_samples(u64::from(self.batch), seconds, &reports);
        Ok(seconds)
    }

    /// Figure of a case, with the seconds of a step of all devices alone.
    fn figure(&self, case: &ScalingCase, solo_s: &[f64], name: &str) -> Figure {
        let samples = f64::from(self.batch);
        let rates: Vec<f64> = case.steps.iter().map(|seconds| samples / seconds).collect();
        let devices = case.positions.iter().map(|position| self.names[*position].clone());
        let cost = case.session.cost();
        let kind = FigureKind::Scaling(scaling(devices.collect(), case.step_s(), solo_s, cost));
        let config = small();
        let on = format!("batch {}, context {}, AdamW", self.batch, config.context);
        Figure::new(kind, name, "samples/s", Direction::Higher, &rates).on(on)
    }
}

/// Refuses a case of `devices` devices that trains with another number of ranks, whose notes may
/// have the reason.
///
/// # Errors
/// Returns `TrainError::InvalidRequest` with the notes.
fn require_all(
    selector: &str,
    devices: usize,
    ranks: usize,
    notes: &[String],
) -> Result<(), TrainError> {
    if ranks == devices {
        return Ok(());
    }
    let mut why = format!(
        "the devices {selector} cannot be compared with others: only {ranks} of {devices} train; \
         name devices that train together with --devices"
    );
    for note in notes {
        why.push_str("; ");
        why.push_str(note);
    }
    Err(TrainError::InvalidRequest(why))
}

/// Name of the figure of a device alone, in the order of speed.
fn name_alone(index: usize) -> String {
    match index {
        0 => "scaling.1_device".into(),
        _ => format!("scaling.alone_{}", index + 1),
    }
}

/// Details of a case of one device, or of as many of the first of all devices, which have these
/// seconds of a step alone.
fn scaling(
    devices: Vec<String>,
    step_s: f64,
    solo_s: &[f64],
    cost: Option<RunCost>,
) -> ScalingFigure {
    let fastest_s = solo_s.iter().copied().fold(f64::INFINITY, f64::min);
    let steps_per_s: f64 = solo_s[..devices.len()].iter().map(|seconds| 1.0 / seconds).sum();
    let efficiency = if devices.len() == 1 { 1.0 } else { 1.0 / (step_s * steps_per_s) };
    let mut figure = ScalingFigure {
        devices,
        step_s,
        speedup: fastest_s / step_s,
        efficiency,
        predicted_s: None,
        exposed_s: None,
        hidden_s: None,
        ranks: Vec::new(),
        advice: None,
    };
    if let Some(cost) = cost {
        figure.predicted_s = cost.predicted_s;
        figure.exposed_s = Some(cost.exposed_s);
        figure.hidden_s = cost.hidden_s;
        figure.ranks = cost.ranks;
        figure.advice = Some(cost.advice.into_owned());
    }
    figure
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_together_are_compared_with_the_fastest_and_with_all_alone() {
        let names = |count: usize| vec!["d".to_string(); count];
        let of_both = scaling(names(2), 0.4, &[0.5, 1.0, 2.0], None);
        assert!((of_both.speedup - 1.25).abs() < 1e-9, "{of_both:?}");
        // Alone they take 2 and 1 batches per second, together 2.5.
        assert!((of_both.efficiency - 2.5 / 3.0).abs() < 1e-9, "{of_both:?}");
        let slower = scaling(names(1), 1.0, &[0.5, 1.0, 2.0], None);
        assert_eq!((slower.speedup, slower.efficiency), (0.5, 1.0));
        assert_eq!([0, 1].map(name_alone), ["scaling.1_device", "scaling.alone_2"]);
    }

    #[test]
    fn a_case_names_its_devices_and_has_them_all() {
        let options = ScalingOptions { devices: "cpu*3".into(), effort: Effort::Tiny, batch: None };
        let workload = ScalingWorkload::new(&options).unwrap();
        assert_eq!(workload.selector_of_case(&[0, 2]).unwrap(), "cpu*2");
        let error = workload.selector_of_case(&[3]).unwrap_err().to_string();
        assert_eq!(error, "no selector names 1 of the devices cpu*3");

        let notes = ["left out: a device is slow".to_string()];
        assert!(require_all("cpu*2", 2, 2, &notes).is_ok());
        let error = require_all("cpu*2", 2, 1, &notes).unwrap_err().to_string();
        assert!(error.contains("only 1 of 2 train; name devices that"), "{error}");
        assert!(error.ends_with("; left out: a device is slow"), "{error}");
    }

    #[test]
    fn a_batch_has_a_sample_for_each_device() {
        let options =
            ScalingOptions { devices: "cpu*2".into(), effort: Effort::Tiny, batch: Some(1) };
        let error = run(&options, &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains("a batch of 1 has no sample for each of 2 devices"), "{error}");
    }
}
