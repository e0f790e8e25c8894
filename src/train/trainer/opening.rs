//! Opening of the devices of a [`Trainer`](super::Trainer).

use std::cell::RefCell;
use std::mem;
use std::sync::Arc;

use super::TrainerOptions;
use crate::error::TrainError;
use crate::loader::{BatchSource, sampler_of};
use crate::runtime::placement::assemble::assemble;
use crate::runtime::placement::types::PlacementRequest;
use crate::runtime::remote::{NO_NODES, RemoteNodes};
use crate::runtime::step::Inputs;
use crate::runtime::timing::Probe;
use crate::session::{Session, SessionOptions};
use potluck_core::HostTensor;
use potluck_core::metrics::Trace;
use potluck_core::setting::as_fields;
use potluck_data::{Dataset, Split};
use potluck_graph::{Graph, ModelGraph};
use potluck_kernels::autotune::{TuneOptions, TuneProgress};
use potluck_parallel::Placement;
use potluck_parallel::planner::plans::Plans;

/// Session on opened devices, which have no values yet.
pub(crate) struct OpenedSession {
    pub session: Session,
    /// Messages for the user.
    pub notes: Vec<String>,
    pub trace: Option<Trace>,
}

/// Inputs for the opening of devices, besides the options of a trainer.
pub(crate) struct Opening<'a> {
    /// Other nodes; their devices follow the devices of the options.
    pub nodes: &'a RemoteNodes,
    /// Inputs of a micro-batch for the timing of devices.
    pub probe: Probe,
    /// Learning rate of timed updates.
    pub lr: f64,
    /// Steps that the run still takes, which bound the time of measurements; `None` if unknown.
    pub steps: Option<u64>,
    /// Placement of a save, kept if its devices are the same.
    pub saved: Option<&'a Placement>,
    /// Receives messages for the user about slow operations.
    pub notify: &'a dyn Fn(&str),
    /// Receives the progress of tuning, with the device.
    pub report: &'a mut dyn FnMut(&str, TuneProgress),
}

/// Opens the devices of a trainer for the plans of its training graph.
///
/// # Errors
/// Returns `TrainError` if the devices do not fit the options, or if one fails.
pub(crate) fn open(
    plans: &Plans,
    options: &TrainerOptions,
    opening: Opening,
) -> Result<OpenedSession, TrainError> {
    let tuning = TuneOptions {
        seconds: options.tune_s,
        retune: options.retune,
        update: Some(options.optimizer.update(opening.lr, 1)),
        faulty_kernels: options.faults.kernels().to_vec(),
        ..TuneOptions::default()
    };
    let parallel = options.parallel();
    let request = PlacementRequest {
        nodes: opening.nodes,
        probe: if options.times_devices() { Some(opening.probe) } else { None },
        steps: opening.steps,
        saved: opening.saved,
        notify: opening.notify,
        ..options.placement_request(&parallel, plans, &tuning)
    };
    let mut placed = assemble(&request, opening.report)?;
    let notes = mem::take(&mut placed.notes);
    let trace = placed.trace.take();
    let session = Session::new(
        placed,
        SessionOptions {
            optimizer: options.optimizer,
            ema: options.ema,
            clip: options.clip,
            precision: options.precision,
            seed: options.seed,
            follows_speed: options.follows_speed,
            faults: options.faults.clone(),
        },
    );
    Ok(OpenedSession { session, notes, trace })
}

/// Opens the devices of a trainer of the library. Keeps the placement `saved` if its devices are
/// the same. Devices are timed on samples of `data` if given, or else on zeros.
pub(super) fn open_on(
    model: ModelGraph,
    options: &TrainerOptions,
    saved: Option<&Placement>,
    data: Option<&Arc<dyn Dataset>>,
) -> Result<OpenedSession, TrainError> {
    let probe = match data {
        Some(data) => probe_of(source(model.whole(), data.clone(), options, 0, 0)?, 1),
        None => probe_of_zeros(model.whole()),
    };
    let notes = RefCell::new(Vec::new());
    let opening = Opening {
        nodes: &NO_NODES,
        probe,
        lr: 1e-3,
        steps: None,
        saved,
        notify: &|note| notes.borrow_mut().push(note.to_string()),
        report: &mut |_, _| {},
    };
    // Notes are texts, in the words of the library.
    let mut opened = as_fields(|| open(&Plans::new(model), options, opening))?;
    opened.notes.splice(0..0, notes.take());
    Ok(opened)
}

/// Creates the source of a graph's inputs, after `steps` steps with `samples` samples.
///
/// # Errors
/// Returns `TrainError::InvalidRequest` if the data have no training sample, or do not fit the
/// graph.
pub(super) fn source(
    graph: &Graph,
    data: Arc<dyn Dataset>,
    options: &TrainerOptions,
    steps: u64,
    samples: u64,
) -> Result<BatchSource, TrainError> {
    if data.is_empty(Split::Train) {
        return Err(TrainError::InvalidRequest("the data have no sample to train on".into()));
    }
    let sampler = sampler_of(graph, &*data, options.seed, options.batch as u32)?;
    let source = BatchSource::new(graph, data, sampler.after(steps, samples))?;
    source.require_all_inputs(graph)?;
    Ok(source)
}

/// Probe of a source at a step: inputs of its first samples.
pub(crate) fn probe_of(source: BatchSource, step: u64) -> Probe {
    Arc::new(move |rows| source.probe(step, rows as u32))
}

/// Probe of inputs of zeros, with numbered samples.
fn probe_of_zeros(graph: &Graph) -> Probe {
    let mut inputs = Vec::with_capacity(graph.inputs.len());
    for (name, id) in &graph.inputs {
        let tensor = graph.tensor(*id);
        inputs.push((*id, tensor.dtype, tensor.shape.clone(), name == "samples"));
    }
    Arc::new(move |rows| -> Inputs {
        let mut values = Inputs::with_capacity(inputs.len());
        for (id, dtype, shape, is_numbered) in &inputs {
            let of_input = if *is_numbered {
                HostTensor::Int((0..rows as u32).collect())
            } else {
                HostTensor::zeros(*dtype, shape.elements(rows))
            };
            values.push((*id, of_input));
        }
        values
    })
}
