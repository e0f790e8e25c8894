//! What a placement is asked for, and what comes out of it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::autotune::{TuneOptions, VariantChoices};
use crate::collective::Topology;
use crate::graph::Plan;
use crate::metrics::Trace;
use crate::optim::Optimizer;
use crate::parallel::Program;
use crate::runtime::open::{OpenDevice, OpenOptions};
use crate::runtime::peers::ReduceSite;
use crate::runtime::timing::Probe;
use crate::runtime::workers::WorkerGroup;

/// What stands between the identities of devices.
pub const SEPARATOR: &str = " | ";

/// How devices share the work of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct ParallelOptions {
    /// Samples per device, in their order; nothing in it: evenly. None: by measured speed.
    pub shares: Option<Vec<u64>>,
    pub topology: Topology,
    /// Reductions start while the backward pass goes on.
    pub overlap: bool,
    /// None: where it is faster.
    pub reduce_site: Option<ReduceSite>,
    /// The most bytes that travel in one message.
    pub chunk_bytes: usize,
}

impl Default for ParallelOptions {
    fn default() -> Self {
        let (topology, chunk_bytes) = (Topology::Ring, 1 << 20);
        Self { shares: None, topology, overlap: true, reduce_site: None, chunk_bytes }
    }
}

/// What a team is made from.
pub struct PlacementRequest<'a> {
    /// As `--devices` has it.
    pub selector: &'a str,
    pub parallel: &'a ParallelOptions,
    pub batch: u32,
    /// The most samples that a device runs at a time.
    pub micro_batch: u32,
    pub optimizer: &'a Optimizer,
    /// The plan for so many rows.
    pub plan: &'a dyn Fn(u32) -> Plan,
    /// The inputs of a micro-batch of the plan, to measure with.
    pub probe: Option<Probe>,
    pub seed: u64,
    pub opening: OpenOptions,
    /// How the kernels of a device are chosen: its identity, and what a checkpoint says of it.
    pub tuning: &'a dyn Fn(&str, &BTreeMap<String, String>) -> TuneOptions,
    /// What the run that goes on had resolved.
    pub saved: Option<&'a BTreeMap<String, String>>,
    /// Measure anew, whatever was saved.
    pub retune: bool,
    /// Tells a person what takes a while.
    pub say: &'a dyn Fn(&str),
    /// Where a trace goes, if it is to be made.
    pub trace: Option<PathBuf>,
}

/// A device of a team, as it was resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct RankPlacement {
    /// For people.
    pub name: String,
    /// What decides about bits: recorded, and compared on resume.
    pub identity: String,
    /// Its place among those that were asked for.
    pub position: usize,
    /// Samples of each step, and the most of them that it runs at a time.
    pub count: u32,
    pub micro_batch: u32,
    /// The rows of its plan.
    pub rows: u32,
    pub reduce_site: ReduceSite,
    /// Which kernels run, where there is a choice.
    pub choices: VariantChoices,
}

/// A team, and how it came about.
pub struct PlacedWorkers {
    pub group: WorkerGroup,
    /// Of the first rank; the others' differ in the rows that fit.
    pub plan: Plan,
    /// By rank.
    pub programs: Vec<Arc<Program>>,
    pub placed: Vec<RankPlacement>,
    /// The identities of all devices that were asked for.
    pub candidates: String,
    /// What a person should know.
    pub notes: Vec<String>,
    pub trace: Option<Trace>,
    /// The most samples that any device was to run at a time.
    pub micro_batch_max: u32,
}

/// Devices, and how the batch is shared out among them.
pub struct OpenedRanks {
    /// With the samples of each, and the most that it runs at a time.
    pub members: Vec<(OpenDevice, u32, u32)>,
    pub notes: Vec<String>,
}
