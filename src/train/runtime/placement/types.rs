//! Request for a placement, and its result.

use std::path::PathBuf;
use std::sync::Arc;

use crate::runtime::expected_step::ExpectedStep;
use crate::runtime::open::OpenOptions;
use crate::runtime::pipelines::ModelPipelines;
use crate::runtime::remote::RemoteNodes;
use crate::runtime::timing::Probe;
use crate::runtime::workers::WorkerGroup;
use potluck_core::faults::Faults;
use potluck_core::metrics::Trace;
use potluck_graph::Plan;
use potluck_graph::optim::Optimizer;
use potluck_kernels::autotune::TuneOptions;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::{ParallelOptions, Placement, Program, SpreadPrograms};

/// Request for the worker group of a run.
#[derive(Clone)]
pub struct PlacementRequest<'a> {
    /// Device selector, as for `--devices`.
    pub selector: &'a str,
    /// Other nodes, whose devices follow the selected ones.
    pub nodes: &'a RemoteNodes,
    pub parallel: &'a ParallelOptions,
    pub batch: u32,
    /// Maximum micro-batch of a device.
    pub micro_batch: u32,
    /// True for smaller micro-batches on devices with too little memory; false to refuse these.
    pub fits_micro_batch: bool,
    pub optimizer: &'a Optimizer,
    pub plans: &'a Plans,
    /// Steps that the run still takes, which bound the time of measurements; `None` if unknown.
    pub steps: Option<u64>,
    /// Inputs of a micro-batch of the plan, for timing devices.
    pub probe: Option<Probe>,
    pub seed: u64,
    pub opening: OpenOptions,
    /// Autotuning options of every device; the choices to keep come from `saved`.
    pub tuning: &'a TuneOptions,
    /// Placement of the resumed run.
    pub saved: Option<&'a Placement>,
    /// True to ignore saved measurements.
    pub retune: bool,
    /// Receives messages for the user about slow operations.
    pub notify: &'a dyn Fn(&str),
    /// File of the trace, if one is requested.
    pub trace: Option<PathBuf>,
    /// Faults to inject, for tests.
    pub faults: Faults,
}

/// Worker group with its placement.
pub struct PlacedWorkers {
    pub group: WorkerGroup,
    /// Plan of all stages for the first rank of a tensor group, for the rows of the first rank:
    /// buckets are the same on all ranks.
    pub plan: Arc<Plan>,
    /// Programs by rank.
    pub programs: Vec<Arc<Program>>,
    /// By rank: programs of steps whose all-gathers run in the next one, if they do.
    pub spread: Option<Vec<SpreadPrograms>>,
    pub placement: Placement,
    /// True if the arrangement is the resumed run's.
    pub is_kept: bool,
    /// Pipelines of the run, of one stage each if every rank has the whole model.
    pub pipelines: Arc<ModelPipelines>,
    /// By rank: the plan of its device's part of the model.
    pub plans: Vec<Arc<Plan>>,
    /// Messages for the user.
    pub notes: Vec<String>,
    pub trace: Option<Trace>,
    /// Expected step, if the devices were timed for this run.
    pub expected: Option<ExpectedStep>,
}
