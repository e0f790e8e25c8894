//! Startup of a run: opens its devices and its checkpoints as specified.

use std::cell::RefCell;

use super::RunOptions;
use crate::checkpoint::{Checkpoint, Store};
use crate::error::TrainError;
use crate::loader::BatchSource;
use crate::session::StepsTaken;
use crate::spec::RunSpec;
use crate::trainer::opening::{self, Opening, probe_of};
use crate::trainer::{Trainer, TrainerOptions};
use potluck_core::metrics::{Event, Sink};
use potluck_kernels::autotune::TuneProgress;
use potluck_parallel::planner::plans::Plans;

/// Opens the devices of a run, without initial values; messages go to `sink`.
///
/// # Errors
/// Returns `TrainError` if the devices do not fit the specification, or if a device or the sink
/// fails.
pub(super) fn open(
    spec: &RunSpec,
    options: &RunOptions,
    resumed: Option<&Checkpoint>,
    plans: &Plans,
    source: &BatchSource,
    sink: &mut dyn Sink,
) -> Result<Trainer, TrainError> {
    let trainer_options = TrainerOptions {
        retune: options.retune,
        trace: options.trace.clone(),
        faults: options.faults.clone(),
        ..spec.trainer_options()
    };
    let taken = match resumed {
        Some(checkpoint) => StepsTaken::of(&checkpoint.meta),
        None => StepsTaken::default(),
    };
    let saved = match resumed {
        Some(checkpoint) if !spec.decides_placement => Some(&checkpoint.meta.placement),
        _ => None,
    };
    // Both callbacks emit events, and neither can return a failure of the sink.
    let sink = RefCell::new(sink);
    let failed = RefCell::new(None);
    let emit = |event: Event| {
        if let Err(error) = sink.borrow_mut().event(&event) {
            failed.borrow_mut().get_or_insert(error);
        }
    };
    let opening = Opening {
        nodes: &options.nodes.as_ref().map(|nodes| nodes.remote()).unwrap_or_default(),
        probe: probe_of(source.clone(), taken.steps + 1),
        lr: spec.schedule.lr,
        steps: Some(spec.steps.saturating_sub(taken.steps)),
        saved,
        notify: &|text| emit(Event::Note(text.into())),
        report: &mut |device, progress| emit(event_of_tuning(device, progress)),
    };
    let opened = opening::open(plans, &trainer_options, opening)?;
    if let Some(error) = failed.take() {
        return Err(error.into());
    }
    let mut trainer = Trainer::of(opened, plans.model().clone(), trainer_options);
    // The notes so far have the shares of step 1.
    if let Some(change) = trainer.session.continue_after(taken) {
        trainer.notes.push(change.sentence());
    }
    Ok(trainer)
}

/// Returns the event that tells how far a device is with its kernels.
pub fn event_of_tuning(device: &str, progress: TuneProgress) -> Event {
    let TuneProgress { done, total, elapsed, compiling } = progress;
    match compiling {
        Some(what) => Event::Note(format!("the driver of {device} compiles {what}")),
        None => Event::Tuning { device: device.into(), done, total, elapsed },
    }
}

/// Opens the checkpoints of a run for writing.
///
/// # Errors
/// Returns `TrainError::Occupied` if another start has begun a run there since the directory was
/// chosen, `TrainError::WentOn` if another start has continued the run since its checkpoint was
/// loaded, and the errors of [`Store::open`].
pub(super) fn open_store(options: &RunOptions) -> Result<Store, TrainError> {
    let store = Store::open(&options.out)?;
    let out = options.out.clone();
    match (store.steps()?.last(), options.continued) {
        (Some(_), None) => Err(TrainError::Occupied { out }),
        (Some(&now), Some(loaded)) if now > loaded => Err(TrainError::WentOn { out, loaded, now }),
        _ => Ok(store.with_faults(options.faults.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hugging_face::ModelFiles;
    use potluck_core::faults::Faults;

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
                signals: Default::default(),
                init: None,
                add_tokens: None,
                files: ModelFiles::default(),
            };
            open_store(&options).map(drop)
        };
        opened(Some(9)).unwrap();
        let error = opened(Some(8)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("was trained from step 8 to 9"), "{text}");
        assert!(text.contains("again with: potluck train --resume "), "{text}");
        assert_eq!(error.exit_code(), crate::error::EXIT_RESTART);
        assert!(matches!(opened(None), Err(TrainError::Occupied { .. })));
    }
}
