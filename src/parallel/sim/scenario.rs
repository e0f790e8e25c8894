//! Scenario of a simulation: ranks with their programs and speeds, links, and injected faults.

use std::sync::Arc;

use super::model_part::ModelPart;
use super::queue::nanos;
use crate::collective::{BucketGroups, Chunk, ShardLayout};
use crate::{EdgeLayout, Program, ReduceSite, SpreadPrograms};
use potluck_core::{BucketId, Nanos, Rank, Round};

const F32_BYTES: f64 = 4.0;

/// Model of a link, which carries one message at a time.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LinkModel {
    pub latency_s: f64,
    pub bytes_per_s: f64,
}

impl LinkModel {
    /// A link that takes no time.
    pub const INSTANT: Self = Self { latency_s: 0.0, bytes_per_s: f64::INFINITY };

    /// Returns the link on which each element takes these seconds; for 0, one that takes no time.
    pub fn of_element_s(element_s: f64) -> Self {
        if element_s > 0.0 {
            Self { latency_s: 0.0, bytes_per_s: F32_BYTES / element_s }
        } else {
            Self::INSTANT
        }
    }

    /// Returns the time for which `elements` keep the link busy; they arrive one latency later.
    pub fn busy(&self, elements: usize) -> Nanos {
        nanos(elements as f64 * F32_BYTES / self.bytes_per_s)
    }

    /// Returns the time after which a chunk has arrived on an idle link.
    pub fn time(&self, chunk: &Chunk) -> Nanos {
        self.busy(chunk.range.len()) + nanos(self.latency_s)
    }
}

/// Duration of a segment: `fixed_s + rows * row_s`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SegmentCost {
    pub fixed_s: f64,
    pub row_s: f64,
}

/// Inputs of a rank that the first node sends with the order of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InputTransfer {
    pub path: InputPath,
    /// 4-byte elements.
    pub elements: usize,
}

/// Way of inputs from the first node to another one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum InputPath {
    /// The link between two ranks of these nodes, which also carries the inputs of other ranks and
    /// the values that these two send each other.
    Ranks { from: Rank, to: Rank },
    /// A link to this node that no ranks use, because none is on the first node.
    Apart { node: u32, link: LinkModel },
}

/// Speeds of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// Durations, per segment of the plan.
    pub segments: Vec<SegmentCost>,
    /// Inputs that come with the order of each step; `None` if the rank's node reads its own.
    pub inputs: Option<InputTransfer>,
    /// Seconds to load one micro-batch.
    pub load_s: f64,
    /// Seconds to update one element that the rank owns.
    pub update_element_s: f64,
    /// Readback from the device to the ring thread.
    pub read_back: LinkModel,
    /// Upload from the ring thread to the device.
    pub upload: LinkModel,
    /// Additions by the ring thread, or copies for the first message of a chunk.
    pub host: LinkModel,
}

/// Time at which a fault occurs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FaultTime {
    Seconds(f64),
    /// Before the event of this number, counted from 0.
    Event(u64),
}

/// Detection of a dead rank by the coordinator thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detection {
    /// A component that outlives the rank reports the death immediately.
    AtOnce,
    /// Heartbeat timeout: the coordinator sees no heartbeat for [`Scenario::deadline_s`].
    ByDeadline,
}

/// Injected fault.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SimulatedFault {
    /// Device thread and ring thread stop for ever.
    Die { rank: Rank, when: FaultTime, detection: Detection },
    /// Device and device thread do nothing for a while; the ring thread continues. A hang that is
    /// shorter than [`Scenario::deadline_s`] only slows the run down. One that is longer by a
    /// fourth ends it: heartbeats are checked eight times per deadline.
    Hang { rank: Rank, when: FaultTime, seconds: f64 },
    /// One element of the rank's gradient is a NaN in this step, counted from 1.
    NotFinite { rank: Rank, step: u64 },
}

/// Seeded bug: deliberately wrong behaviour, to show that [`super::check()`] detects it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeededBug {
    /// The first rank that votes receives a verdict to commit while one vote is missing.
    CommitsEarly,
    /// Messages of one chunk are added in the order of their arrival.
    AccumulatesInArrivalOrder,
    /// The n-th message between rings is lost.
    LosesMessage(u64),
    /// The last live rank receives no message about a failure.
    LosesFailure,
    /// Each ring restarts when its own device thread begins a step, instead of all rings before.
    RestartsApart,
    /// Chunks are read back in the order of their positions, not of their use.
    ReadsByPosition,
    /// The device thread waits for a message while its own readbacks are in flight.
    IgnoresReadbacks,
    /// The device returns a readback before one that was started earlier.
    SwapsReadbacks,
    /// A device adds its gradients to a partial sum twice.
    AddsTwiceOnDevice,
    /// Mailboxes hold one message.
    ShortMailboxes,
    /// A program continues when it has begun to receive a tensor.
    ReceivesWithoutWaiting,
    /// An all-reduce does not wait for the parts of all ranks.
    ReducesWithoutWaiting,
    /// A tensor that is sent has the values of the next micro-batch.
    SendsNextMicroBatch,
    /// The n-th piece of a tensor between ranks is lost.
    LosesPiece(u64),
    /// Slots with several copies have one copy less.
    FewerCopies,
    /// Mailboxes allow for one piece less than may be in flight.
    FewerPieces,
}

/// Complete input of a simulated run.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub layout: Arc<ShardLayout>,
    /// Ranks that hold each bucket of the layout.
    pub groups: BucketGroups,
    /// Tensors that ranks send each other.
    pub edges: EdgeLayout,
    /// Programs, per rank.
    pub programs: Vec<Program>,
    /// Replacements of the programs, per rank, whose all-gathers run in the next step; a settling
    /// round follows the last step.
    pub spread: Option<Vec<SpreadPrograms>>,
    /// Parts of the model, per rank.
    pub parts: Vec<ModelPart>,
    /// Speeds, per rank.
    pub costs: Vec<Costs>,
    /// Sites of addition, per rank.
    pub reduce_site: Vec<ReduceSite>,
    /// Links, by sender and then by receiver.
    pub links: Vec<Vec<LinkModel>>,
    /// Latency in seconds of a message to or from the coordinator thread.
    pub control_s: f64,
    /// Maximum random delay in seconds, added to every action that takes time and to every
    /// message.
    pub jitter_s: f64,
    /// Deadline in seconds: the maximum silence of a rank.
    pub deadline_s: f64,
    /// Window as in [`crate::collective::Exchange::new`].
    pub window: usize,
    /// Maximum number of chunks and pieces that a rank is reading back, or has read back and not
    /// used yet; `None` for no limit.
    pub slots_max: Option<usize>,
    pub steps: u64,
    /// Seed of delays and of the order of simultaneous events.
    pub seed: u64,
    /// Seed of gradients and initial parameters; `None` for no values, only times.
    pub values: Option<u64>,
    pub faults: Vec<SimulatedFault>,
    pub seeded_bug: Option<SeededBug>,
    /// True to record a timeline.
    pub timeline: bool,
}

impl Scenario {
    /// Returns the deadline as virtual time; [`Nanos::MAX`] for none.
    pub fn deadline(&self) -> Nanos {
        nanos(self.deadline_s)
    }

    pub fn world(&self) -> usize {
        self.programs.len()
    }

    pub(crate) fn program(&self, rank: Rank, round: Round) -> &Program {
        let Some(spread) = &self.spread else { return &self.programs[rank.index()] };
        let programs = &spread[rank.index()];
        match round {
            Round { settles: true, .. } => &programs.settle,
            Round { step: 1, .. } => &programs.first,
            _ => &programs.next,
        }
    }

    /// Returns true if a rank holds a bucket.
    pub fn holds(&self, rank: Rank, bucket: BucketId) -> bool {
        self.groups.of(bucket).position(rank).is_some()
    }

    /// Returns the number of elements of each bucket.
    pub fn lengths(&self) -> Vec<usize> {
        let buckets = (0..self.layout.buckets() as u32).map(BucketId);
        buckets.map(|bucket| self.layout.length(bucket)).collect()
    }

    /// Returns true if an injected fault makes a rank's gradients not finite in a step.
    pub(crate) fn is_not_finite(&self, rank: Rank, step: u64) -> bool {
        self.faults.contains(&SimulatedFault::NotFinite { rank, step })
    }

    /// Returns true if an injected fault ends a rank, if the run gets that far.
    pub(crate) fn may_end(&self, rank: Rank) -> bool {
        self.faults.iter().any(|fault| match *fault {
            SimulatedFault::Die { rank: other, .. } => other == rank,
            SimulatedFault::Hang { rank: other, seconds, .. } => {
                other == rank && seconds >= self.deadline_s
            }
            SimulatedFault::NotFinite { .. } => false,
        })
    }
}
