//! Opening of the devices of a [`Trainer`](super::Trainer).

use std::cell::RefCell;
use std::mem;
use std::sync::Arc;

use super::TrainerOptions;
use crate::autotune::TuneOptions;
use crate::base::{HostTensor, TensorId};
use crate::data::{Dataset, Split};
use crate::graph::{Graph, differentiate, fuse};
use crate::metrics::Trace;
use crate::parallel::Placement;
use crate::runtime::placement::assemble::assemble;
use crate::runtime::placement::plans::Plans;
use crate::runtime::placement::types::PlacementRequest;
use crate::runtime::remote::NO_NODES;
use crate::runtime::step::Inputs;
use crate::runtime::timing::Probe;
use crate::train::error::TrainError;
use crate::train::loader::{BatchSource, sampler_of};
use crate::train::session::{Session, SessionOptions};

/// Session on opened devices, which hold no values yet.
pub(super) struct OpenedSession {
    pub session: Session,
    /// Messages for the user.
    pub notes: Vec<String>,
    pub trace: Option<Trace>,
}

/// Returns the graph that trains a forward graph.
pub(super) fn training_graph(
    forward: Graph,
    options: &TrainerOptions,
) -> Result<Graph, TrainError> {
    let training = differentiate(forward)?;
    Ok(if options.fuse { fuse(training) } else { training })
}

/// Opens the devices for a training graph, as `saved` has it if its devices are the same. Devices
/// are timed on samples of `data` if given, or else on zeros.
pub(super) fn open(
    graph: Graph,
    options: &TrainerOptions,
    saved: Option<&Placement>,
    data: Option<&Arc<dyn Dataset>>,
) -> Result<OpenedSession, TrainError> {
    let probe = match data {
        Some(data) => probe_of(source(&graph, data.clone(), options, (0, 0))?),
        None => zeros(&graph),
    };
    let tuning = TuneOptions {
        seconds: options.tune_s,
        retune: options.retune,
        update: Some(options.optimizer.update(1e-3, 1)),
        corrupted_kernels: options.faults.wrong_kernels().to_vec(),
        ..TuneOptions::default()
    };
    let notes = RefCell::new(Vec::new());
    let request = PlacementRequest {
        nodes: &NO_NODES,
        selector: &options.devices,
        parallel: &options.parallel(),
        batch: options.batch as u32,
        micro_batch: options.micro_batch_size as u32,
        optimizer: &options.optimizer,
        plans: &Plans::new(graph),
        probe: options.is_measured().then_some(probe),
        seed: options.seed,
        opening: options.opening(),
        tuning: &tuning,
        saved,
        retune: options.retune,
        notify: &|note| notes.borrow_mut().push(note.to_string()),
        trace: options.trace.clone(),
        faults: options.faults.clone(),
    };
    let mut placed = assemble(&request, &mut |_, _| {})?;
    let trace = placed.trace.take();
    let placing = mem::take(&mut placed.notes);
    let TrainerOptions { optimizer, clip, seed, .. } = *options;
    let faults = options.faults.clone();
    let session = Session::new(placed, SessionOptions { optimizer, clip, seed, faults });
    let mut notes = notes.into_inner();
    notes.extend(placing);
    Ok(OpenedSession { session, notes, trace })
}

/// Creates the source of the inputs of a graph; `done` are the steps and samples so far.
///
/// # Errors
/// Returns `TrainError::InvalidRequest` if the data have no sample to train on, or do not fit the
/// graph.
pub(super) fn source(
    graph: &Graph,
    data: Arc<dyn Dataset>,
    options: &TrainerOptions,
    (steps, samples): (u64, u64),
) -> Result<BatchSource, TrainError> {
    if data.is_empty(Split::Train) {
        return Err(TrainError::InvalidRequest("the data have no sample to train on".into()));
    }
    let sampler = sampler_of(graph, &*data, (options.seed, options.batch as u32))?;
    let source = BatchSource::new(graph, data, sampler.after(steps, samples))?;
    let filled = source.data.inputs();
    let is_filled = |name: &str| name == "samples" || filled.iter().any(|one| one.name == name);
    match graph.inputs_of_samples().find(|(name, _)| !is_filled(name)) {
        None => Ok(source),
        Some((name, _)) => Err(TrainError::InvalidRequest(format!(
            "the graph has the input '{name}', for which the data have no values"
        ))),
    }
}

fn probe_of(source: BatchSource) -> Probe {
    Arc::new(move |rows| source.probe(1, rows as u32))
}

/// Returns inputs of zeros, and samples that are numbered.
fn zeros(graph: &Graph) -> Probe {
    let input = |(name, id): &(String, TensorId)| {
        let tensor = graph.tensor(*id);
        (*id, tensor.dtype, tensor.shape.clone(), name == "samples")
    };
    let inputs: Vec<_> = graph.inputs.iter().map(input).collect();
    Arc::new(move |rows| -> Inputs {
        let values = inputs.iter().map(|(id, dtype, shape, is_numbered)| {
            let count = shape.elements(rows);
            let values = match is_numbered {
                true => HostTensor::Int((0..rows as u32).collect()),
                false => HostTensor::zeros(*dtype, count),
            };
            (*id, values)
        });
        values.collect()
    })
}
