//! Messages between the first node of a run and the others, about the devices of the others.

use serde::{Deserialize, Serialize};

use super::calls::{CallReply, DeviceCall};
use crate::runtime::step::{Inputs, StepReport};
use crate::runtime::trace_labels::TraceLabels;
use potluck_core::rng::Key;
use potluck_core::{Rank, Round, raw};
use potluck_graph::{PlanOptions, PlannedPart, Update, VariantChoices};
use potluck_kernels::autotune::TuneOptions;
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::Moments;
use potluck_parallel::collective::{BucketGroups, ShardLayout};
use potluck_parallel::planner::links::LinkRate;
use potluck_parallel::{EdgeLayout, Program, ReduceSite, Verdict, Vote};

/// Message from the first node to another one.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToNode {
    /// Description of the run for the layer above; [`ToFirst::Offer`] answers.
    Begin(#[serde(with = "raw")] Vec<u8>),
    /// News of the run, for the layer above.
    Show(#[serde(with = "raw")] Vec<u8>),
    /// The run is over, for the layer above.
    End(#[serde(with = "raw")] Vec<u8>),
    /// Opens a device under a number; [`ToFirst::Opened`] answers.
    Open { slot: u32, order: OpenOrder },
    /// Closes a device.
    Close { slot: u32 },
    /// Performs a call on a device; [`ToFirst::Reply`] answers if it has an id.
    Call { slot: u32, id: Option<u64>, call: DeviceCall },
    /// Seats devices as ranks of a group; [`ToFirst::Assembled`] answers.
    Assemble(Box<RankGroupSpec>),
    /// Begins the step of a rank; its vote and its end are sent back.
    Step { rank: Rank, order: StepOrder },
    /// The verdict on a round.
    Decided { rank: Rank, round: Round, verdict: Verdict },
    /// Ends the steps of a rank and its group.
    Abort { rank: Rank, why: String },
    /// Measures the link to the next node of the ring; [`ToFirst::LinkRate`] answers.
    MeasureLink,
    /// Asks for the rate at which the values of the previous node's measurement have arrived, which
    /// is over; [`ToFirst::ArrivalRate`] answers.
    ArrivalRate,
    /// Asks for the time of the node; [`ToFirst::Clock`] answers.
    Clock,
    /// Asks for the rest of the trace, which [`ToFirst::Flushed`] follows.
    FlushTrace,
}

/// Message to the first node from another one.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToFirst {
    Offer(Result<NodeDevices, String>),
    /// The node received a signal, with this number in the list of the layer above.
    Signal(u8),
    Opened {
        slot: u32,
        opened: Result<Opened, OpenFailure>,
    },
    /// Progress of the certification and timing of kernels, before a device is open.
    Tuning {
        slot: u32,
        done: usize,
        total: usize,
        elapsed_ms: u64,
        /// Names of kernels in compilation, if it is slow.
        compiling: Option<String>,
    },
    Reply {
        id: u64,
        reply: Result<CallReply, DeviceError>,
    },
    Assembled(Result<(), String>),
    /// Rate of the link to the next node of the ring, if there is a network in between.
    LinkRate(Option<LinkRate>),
    /// Bytes per second at which the previous node's values have arrived, if it has measured.
    ArrivalRate(Option<f64>),
    Vote(Vote),
    Finished {
        rank: Rank,
        /// Generation of the first round of its group.
        group: u64,
        result: Result<StepReport, DeviceError>,
    },
    Activity(Vec<SlotActivity>),
    /// The node works on what was asked for, or receives it.
    Working,
    /// Nanoseconds since the node's server was created.
    Clock(u64),
    /// Lines of the trace.
    Trace(#[serde(with = "raw")] Vec<u8>),
    Flushed,
}

/// Devices that a node offers to a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeDevices {
    pub devices: Vec<RemoteDeviceSpec>,
    /// True if the node has the data: it reads the inputs of its ranks.
    pub(crate) has_data: bool,
}

/// Device that a node offers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteDeviceSpec {
    pub name: String,
    /// Identity that decides the bits of its results.
    pub identity: String,
    pub is_cpu: bool,
    /// True if the node's processor computes for it.
    pub(crate) is_on_host: bool,
    /// The most bytes of a tensor that it can bind; `None` without a limit.
    pub(crate) binding_bytes: Option<u64>,
    /// Bytes of memory for it alone; `None` if unknown.
    pub(crate) memory: Option<u64>,
    /// Bytes of memory that its host has available, if that is where it has its tensors.
    pub(crate) host_memory: Option<u64>,
    /// Number of its adapter on the node; `None` for a CPU device.
    pub(crate) adapter: Option<u32>,
}

/// Order to open one of a node's devices.
#[derive(Debug, Serialize, Deserialize)]
pub struct OpenOrder {
    /// Index of the device among the devices that the node offers.
    pub device: u32,
    /// Display name.
    pub name: String,
    pub(crate) recipe: PlanRecipe,
    /// Hash of the plan that the recipe must give.
    pub(crate) plan_hash: [u8; 32],
    pub moments: Moments,
    /// Options of kernel selection. The choices to keep apply if the device has this identity.
    pub tuning: TuneOptions,
    pub(crate) kept_identity: Option<String>,
}

/// Recipe of a plan: all that it is made from besides the graph of the model, which every node has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PlanRecipe {
    pub options: PlanOptions,
    /// Part that it is a plan of; `None` for a whole graph.
    pub part: Option<PlannedPart>,
    /// Shares of the ranks of a tensor group; none for the whole model. The plan is for
    /// `tensor_rank`.
    pub tensor_shares: Vec<u32>,
    pub tensor_rank: u32,
    /// True if passes B and W are merged. A planned layout may need them apart although the
    /// configuration of the run has no pipelines.
    pub is_merged: bool,
}

/// Device that was opened.
#[derive(Debug, Serialize, Deserialize)]
pub struct Opened {
    pub notes: Vec<String>,
    pub identity: String,
    pub is_cpu: bool,
    pub choices: VariantChoices,
    pub untimed: Vec<String>,
    pub readback_elements_max: usize,
}

/// Reason for which a device was not opened.
#[derive(Debug, Serialize, Deserialize)]
pub enum OpenFailure {
    Device(DeviceError),
    /// Too little memory on the device or the host: what it is, and what is needed.
    NoRoom {
        adapter: String,
        what: String,
        needed: String,
    },
    Other(String),
}

/// Order to seat devices of a node as ranks of a group.
#[derive(Debug, Serialize, Deserialize)]
pub struct RankGroupSpec {
    pub layout: ShardLayout,
    pub groups: BucketGroups,
    pub edges: EdgeLayout,
    /// By rank.
    pub reduce_site: Vec<ReduceSite>,
    pub all_reduces: bool,
    /// Generation of the group's first round.
    pub generation: u64,
    /// By rank: its node.
    pub nodes: Vec<u32>,
    /// Ranks of this node, with the numbers of their devices.
    pub(crate) endpoints: Vec<(Rank, u32)>,
    /// Time of the node at which the trace begins, in nanoseconds since its server was created;
    /// may be negative. `None` without a trace.
    pub(crate) trace_epoch: Option<i64>,
    pub labels: TraceLabels,
}

/// Order of a step to a rank.
#[derive(Debug, Serialize, Deserialize)]
pub struct StepOrder {
    pub round: Round,
    /// `None`: the program of the rank's last step.
    pub program: Option<Program>,
    /// Inputs per micro-batch of the program; none if the node reads them.
    pub micro_batches: Vec<Inputs>,
    /// State that is carried into the step, per micro-batch; none if the model carries none.
    pub states: Vec<Inputs>,
    pub run_key: Key,
    pub(crate) is_training: bool,
    pub samples: usize,
    pub update: Update,
    pub average_weight: Option<f32>,
    pub clip: f64,
    pub loss_scale: f32,
}

/// Signs of life of a device, and of its rank if it is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotActivity {
    pub slot: u32,
    pub heartbeats: u64,
    pub is_waiting: bool,
    pub received: u64,
}
