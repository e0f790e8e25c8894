//! Request for a placement, and its result.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::autotune::TuneOptions;
use crate::collective::Topology;
use crate::graph::{Plan, VariantChoices};
use crate::metrics::Trace;
use crate::optim::Optimizer;
use crate::parallel::{Program, ReduceSite};
use crate::runtime::open::{OpenDevice, OpenOptions};
use crate::runtime::timing::Probe;
use crate::runtime::workers::WorkerGroup;

/// Separator between the identities of devices.
pub const SEPARATOR: &str = " | ";

/// Options for sharing the work of a step among devices.
#[derive(Clone, Debug, PartialEq)]
pub struct ParallelOptions {
    /// Samples per device, in the order of devices; empty: evenly. `None`: by measured speed.
    pub shares: Option<Vec<u64>>,
    pub topology: Topology,
    /// True if reductions start while the backward pass still runs.
    pub overlap: bool,
    /// `None`: the faster site of each device, by measurement.
    pub reduce_site: Option<ReduceSite>,
    /// The most bytes of one message.
    pub chunk_bytes: usize,
}

impl Default for ParallelOptions {
    fn default() -> Self {
        let (topology, chunk_bytes) = (Topology::Ring, 1 << 20);
        Self { shares: None, topology, overlap: true, reduce_site: None, chunk_bytes }
    }
}

/// Request for the worker group of a run.
pub struct PlacementRequest<'a> {
    /// Device selector, as `--devices` takes it.
    pub selector: &'a str,
    pub parallel: &'a ParallelOptions,
    pub batch: u32,
    /// The most samples that a device runs at a time.
    pub micro_batch: u32,
    pub optimizer: &'a Optimizer,
    /// Returns the plan for up to this many rows.
    pub plan: &'a dyn Fn(u32) -> Plan,
    /// Inputs of a micro-batch of the plan, for timing devices.
    pub probe: Option<Probe>,
    pub seed: u64,
    pub opening: OpenOptions,
    /// Returns the autotuning options of a device from its identity and its entries in a
    /// checkpoint.
    pub tuning: &'a dyn Fn(&str, &BTreeMap<String, String>) -> TuneOptions,
    /// Resolved values of the run that is resumed.
    pub saved: Option<&'a BTreeMap<String, String>>,
    /// True to measure again, ignoring saved measurements.
    pub retune: bool,
    /// Receives messages for the user about slow operations.
    pub notify: &'a dyn Fn(&str),
    /// File of the trace, if one is to be written.
    pub trace: Option<PathBuf>,
}

/// Placement of one rank: its device, its share and its resolved options.
#[derive(Clone, Debug, PartialEq)]
pub struct RankPlacement {
    /// Display name of the device; never a lookup key.
    pub name: String,
    /// Device identity that decides the bits of results: recorded, and compared on resume.
    pub identity: String,
    /// Index of the device among the requested ones.
    pub position: usize,
    /// Samples of the device in each step; `micro_batch` is the most that it runs at a time.
    pub count: u32,
    pub micro_batch: u32,
    /// Rows of the device's plan.
    pub rows: u32,
    pub reduce_site: ReduceSite,
    /// Selected kernel variant of each call that has several.
    pub choices: VariantChoices,
}

/// Worker group, with the decisions by which it was placed.
pub struct PlacedWorkers {
    pub group: WorkerGroup,
    /// Plan of the first rank; the plans of other ranks differ in the rows that fit.
    pub plan: Plan,
    /// Programs by rank.
    pub programs: Vec<Arc<Program>>,
    pub placed: Vec<RankPlacement>,
    /// Identities of all requested devices.
    pub candidates: String,
    /// Messages for the user.
    pub notes: Vec<String>,
    pub trace: Option<Trace>,
    /// The most samples that any device was allowed to run at a time.
    pub micro_batch_max: u32,
}

/// Opened devices of a run, and the split of the batch among them.
pub struct OpenedRanks {
    /// By rank: the device, its samples per step, and the most that it runs at a time.
    pub members: Vec<(OpenDevice, u32, u32)>,
    pub notes: Vec<String>,
}
