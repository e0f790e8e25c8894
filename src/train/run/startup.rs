//! Startup of a run: opens its devices and its data as its specification requires.

use std::sync::Arc;

use super::RunOptions;
use crate::autotune::{TuneOptions, TuneProgress};
use crate::checkpoint::Checkpoint;
use crate::parallel::MicroBatch;
use crate::runtime::placement::assemble::assemble;
use crate::runtime::placement::plans::Plans;
use crate::runtime::placement::types::{PlacedWorkers, PlacementRequest};
use crate::runtime::timing::Probe;
use crate::train::error::TrainError;
use crate::train::loader::BatchSource;
use crate::train::spec::RunSpec;
use crate::ui::terminal::{kernels_note, print_line};

/// Opens the devices of a run.
pub(super) fn assembled(
    spec: &RunSpec,
    options: &RunOptions,
    resumed: Option<&Checkpoint>,
    (plans, source): (&Plans, &BatchSource),
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
    let probe: Probe = Arc::new(move |rows| {
        let micro_batch = MicroBatch { first: 0, rows: rows as u32 };
        probing.micro_batch(next, &micro_batch)
    });
    let note = |text: &str| {
        if !options.quiet {
            print_line(text);
        }
    };
    let request = PlacementRequest {
        selector: &options.devices,
        parallel: &spec.parallel,
        batch: spec.batch,
        micro_batch: spec.micro_batch,
        optimizer: &spec.optimizer,
        plans,
        probe: Some(probe),
        seed: spec.seed,
        opening: spec.opening,
        tuning: &tuning,
        saved: resumed.map(|checkpoint| &checkpoint.meta.placement),
        retune: options.retune,
        notify: &note,
        trace: options.trace.clone(),
    };
    let mut note = kernels_note(options.quiet);
    let mut report =
        |device: &str, TuneProgress { done, total, elapsed }| note(device, (done, total), elapsed);
    Ok(assemble(&request, &mut report)?)
}
