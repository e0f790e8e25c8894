//! Startup of a run: opens its devices and its data as its specification requires.

use std::cell::RefCell;
use std::mem;
use std::sync::Arc;

use super::RunOptions;
use crate::autotune::{TuneOptions, TuneProgress};
use crate::checkpoint::{Checkpoint, Store};
use crate::metrics::{Event, Sink, Trace};
use crate::runtime::placement::assemble::assemble;
use crate::runtime::placement::plans::Plans;
use crate::runtime::placement::types::{PlacedWorkers, PlacementRequest};
use crate::runtime::timing::Probe;
use crate::train::error::TrainError;
use crate::train::loader::{BatchSource, LoadedRanks, Loader};
use crate::train::session::{Session, StepsTaken};
use crate::train::spec::RunSpec;

/// Opens the devices of a run; messages on the way go to `sink`.
fn assembled(
    spec: &RunSpec,
    options: &RunOptions,
    resumed: Option<&Checkpoint>,
    (plans, source): (&Plans, &BatchSource),
    sink: &mut dyn Sink,
) -> Result<PlacedWorkers, TrainError> {
    let tuning = TuneOptions {
        seconds: spec.opening.tune_s,
        retune: options.retune,
        update: Some(spec.optimizer.update(spec.schedule.lr, 1)),
        corrupted_kernels: options.faults.wrong_kernels().to_vec(),
        ..TuneOptions::default()
    };
    let probing = source.clone();
    let next = 1 + resumed.map_or(0, |checkpoint| checkpoint.meta.step);
    let probe: Probe = Arc::new(move |rows| probing.probe(next, rows as u32));
    // Both callbacks send events, and neither can return a failure of the sink.
    let (sink, failed) = (RefCell::new(sink), RefCell::new(None));
    let emit = |event: Event| {
        if let Err(error) = sink.borrow_mut().event(&event) {
            failed.borrow_mut().get_or_insert(error);
        }
    };
    let note = |text: &str| emit(Event::Note(text.into()));
    let remote = options.nodes.as_ref().map(|nodes| nodes.remote()).unwrap_or_default();
    let request = PlacementRequest {
        nodes: &remote,
        probe: Some(probe),
        saved: resumed
            .filter(|_| !spec.decides_placement)
            .map(|checkpoint| &checkpoint.meta.placement),
        retune: options.retune,
        notify: &note,
        trace: options.trace.clone(),
        faults: options.faults.clone(),
        ..spec.placement_request(plans, &tuning)
    };
    let mut report = |device: &str, TuneProgress { done, total, elapsed }| {
        emit(Event::Tuning { device: device.into(), done, total, elapsed });
    };
    let placed = assemble(&request, &mut report)?;
    failed.take().map_or(Ok(placed), |error| Err(error.into()))
}

/// Opens the checkpoints of a run for writing.
///
/// # Errors
/// Returns `TrainError::Occupied` if another start has begun a run there since the directory was
/// chosen, `TrainError::WentOn` if one has continued the run since its checkpoint was loaded, and
/// the errors of [`Store::open`].
pub(super) fn open_store(options: &RunOptions) -> Result<Store, TrainError> {
    let store = Store::open(&options.out)?;
    let out = options.out.clone();
    match (store.steps()?.last(), options.continued) {
        (Some(_), None) => Err(TrainError::Occupied { out }),
        (Some(&now), Some(loaded)) if now > loaded => Err(TrainError::WentOn { out, loaded, now }),
        _ => Ok(store.with_faults(options.faults.clone())),
    }
}

/// Session of a run on opened devices, and what feeds it.
pub(super) struct OpenedRun {
    pub session: Session,
    pub source: BatchSource,
    pub loader: Loader,
    /// Messages for the user.
    pub notes: Vec<String>,
    pub trace: Option<Trace>,
}

/// Opens the devices of a run, without the values of its state, and starts to load its inputs.
///
/// # Errors
/// Returns `TrainError` if the devices do not fit the specification, or if one or a sink fails.
pub(super) fn open(
    spec: &RunSpec,
    options: &RunOptions,
    resumed: Option<&Checkpoint>,
    (plans, source): (&Plans, BatchSource),
    sink: &mut dyn Sink,
) -> Result<OpenedRun, TrainError> {
    let mut placed = assembled(spec, options, resumed, (plans, &source), sink)?;
    let (notes, trace) = (mem::take(&mut placed.notes), placed.trace.take());
    let mut session = Session::new(placed, spec.session_options(&options.faults));
    session.taken = taken(resumed);
    let ranks = LoadedRanks::of(&session.programs, &session.rank_plans)
        .without(|rank| session.group.reads_inputs(rank));
    let loader = Loader::start(source.clone(), ranks, session.taken.steps + 1, spec.steps)
        .map_err(|why| TrainError::System { what: "the loader's thread", why })?;
    Ok(OpenedRun { session, source, loader, notes, trace })
}

/// Returns the steps that the run of a checkpoint has taken; none for a new run.
fn taken(resumed: Option<&Checkpoint>) -> StepsTaken {
    let of = |checkpoint: &Checkpoint| StepsTaken {
        steps: checkpoint.meta.step,
        updates: checkpoint.meta.optimizer_step,
    };
    resumed.map(of).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::Faults;

    #[test]
    fn a_directory_in_which_another_start_went_on_is_refused() {
        let run = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(run.path().join("checkpoints/step-00000009")).unwrap();
        let opened = |continued: Option<u64>| {
            let options = RunOptions {
                out: run.path().into(),
                continued,
                unsaved: Vec::new(),
                trace: None,
                retune: false,
                faults: Faults::none(),
                nodes: None,
            };
            open_store(&options).map(drop)
        };
        opened(Some(9)).unwrap();
        let error = opened(Some(8)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("went on from step 8 to 9"), "{text}");
        assert!(text.contains("again with: potluck train --resume "), "{text}");
        assert_eq!(error.exit_code(), crate::train::error::EXIT_CONFIGURATION);
        assert!(matches!(opened(None), Err(TrainError::Occupied { .. })));
    }
}
