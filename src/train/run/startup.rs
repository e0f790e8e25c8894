//! Startup of a run: opens its devices and its data from the configuration.

use std::sync::Arc;

use super::RunOptions;
use crate::autotune::{TuneOptions, TuneProgress};
use crate::checkpoint::Checkpoint;
use crate::config::RunConfig;
use crate::data::TextData;
use crate::graph::{Graph, Plan, PlanOptions};
use crate::model::LanguageModel;
use crate::parallel::MicroBatch;
use crate::runtime::placement::assemble::assemble;
use crate::runtime::placement::types::{PlacedWorkers, PlacementRequest};
use crate::runtime::timing::Probe;
use crate::train::build;
use crate::train::error::TrainError;
use crate::train::loader::BatchSource;
use crate::ui::terminal::{kernels_note, print_line};

/// Opens the devices of a run.
pub(super) fn assembled(
    config: &RunConfig,
    options: &RunOptions,
    resumed: Option<&Checkpoint>,
    (training, source): (&Graph, &BatchSource),
) -> Result<PlacedWorkers, TrainError> {
    let optimizer = build::optimizer(config);
    let tuning = TuneOptions {
        seconds: config.train.tune_s,
        retune: options.retune,
        update: Some(optimizer.update(config.optim.lr, 1)),
        corrupted_kernels: options.faults.wrong_kernels().to_vec(),
        ..TuneOptions::default()
    };
    let plan = |rows: u32| Plan::new(training.clone(), PlanOptions::new(rows as usize));
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
        parallel: &build::parallel_options(config),
        batch: config.train.batch as u32,
        micro_batch: config.train.micro_batch as u32,
        optimizer: &optimizer,
        plan: &plan,
        probe: Some(probe),
        seed: config.train.seed,
        opening: build::open_options(config),
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

/// Creates the source of the inputs of a graph; `done` are the steps and samples of the run so
/// far.
pub fn batch_source(
    config: &RunConfig,
    graph: &Graph,
    data: &Arc<TextData>,
    done: (u64, u64),
) -> Result<BatchSource, TrainError> {
    let missing = || TrainError::Defect("the model has no tokens or no logits".into());
    Ok(BatchSource {
        data: data.clone(),
        sampler: build::sampler(config, data, done),
        model: LanguageModel::of(graph).ok_or_else(missing)?,
        samples: graph.input("samples"),
    })
}
