//! What is simulated: ranks with their programs and speeds, links, and what goes wrong.

use std::sync::Arc;

use super::queue::{Nanos, nanos};
use crate::base::{BucketId, Rank};
use crate::collective::{Chunk, ShardLayout};
use crate::parallel::Program;

const F32_BYTES: f64 = 4.0;

/// A way from one place to another, for one chunk at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkModel {
    pub latency_s: f64,
    pub bytes_per_s: f64,
}

impl LinkModel {
    /// A link that takes no time.
    pub const INSTANT: Self = Self { latency_s: 0.0, bytes_per_s: f64::INFINITY };

    /// How long a chunk keeps the link busy; it is there a latency later.
    pub fn busy(&self, chunk: &Chunk) -> Nanos {
        nanos(chunk.range.len() as f64 * F32_BYTES / self.bytes_per_s)
    }
}

/// A segment takes `fixed_s + rows * row_s`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SegmentCost {
    pub fixed_s: f64,
    pub row_s: f64,
}

/// How fast a rank is.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// Per segment of the plan.
    pub segments: Vec<SegmentCost>,
    /// Loading of one micro-batch.
    pub load_s: f64,
    /// Update of one element that the rank owns.
    pub update_element_s: f64,
    /// From the device to the ring.
    pub read_back: LinkModel,
    /// From the ring to the device.
    pub upload: LinkModel,
    /// What the ring adds, or copies for the first message of a chunk.
    pub host: LinkModel,
}

/// When a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FaultTime {
    Seconds(f64),
    /// Before the event of this number, counted from 0.
    Event(u64),
}

/// How main learns that a rank died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detection {
    /// Something that outlives the rank says so.
    AtOnce,
    /// The rank gives no sign of life for [`Scenario::deadline_s`].
    ByDeadline,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// Driver and ring stop for ever.
    Die { rank: Rank, when: FaultTime, detection: Detection },
    /// The driver does nothing for a while; its ring goes on. A hang of [`Scenario::deadline_s`]
    /// or more ends the run, a shorter one is only slow.
    Hang { rank: Rank, when: FaultTime, seconds: f64 },
    /// One element of the rank's gradient is a NaN in this step, counted from 1.
    NotFinite { rank: Rank, step: u64 },
}

/// Wrong on purpose, to show that [`super::check()`] finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeededBug {
    /// The first rank that votes is told to commit while one vote is missing.
    CommitsEarly,
    /// Messages of one chunk are taken in the order in which they come.
    FoldsInArrivalOrder,
    /// The n-th message between rings is lost.
    LosesMessage(u64),
    /// The last live rank is not told of a failure.
    ForgetsToTell,
    /// A ring is restarted when its own driver begins a step, and not all before any does.
    RestartsApart,
    /// Chunks are read back in the order of their positions, not in that of their use.
    ReadsByPosition,
}

/// Everything that a run depends on.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub layout: Arc<ShardLayout>,
    /// Per rank.
    pub programs: Vec<Program>,
    /// Per segment: the buckets to whose gradients it adds.
    pub completes: Vec<Vec<BucketId>>,
    /// Per rank.
    pub costs: Vec<Costs>,
    /// From a rank, to a rank.
    pub links: Vec<Vec<LinkModel>>,
    /// How long a message to or from main takes.
    pub control_s: f64,
    /// The most that is added by chance to every run of a segment and to every message.
    pub jitter_s: f64,
    /// How long a rank may be silent.
    pub deadline_s: f64,
    /// As in [`crate::collective::Exchange::new`].
    pub window: usize,
    /// The chunks that a rank may be reading back or have read back, and not used yet; without it
    /// any number.
    pub places_max: Option<usize>,
    pub steps: u64,
    /// Decides delays, and the order of what happens at the same time.
    pub seed: u64,
    /// Decides gradients and initial parameters; without it there are no values, only times.
    pub values: Option<u64>,
    pub faults: Vec<Fault>,
    pub seeded_bug: Option<SeededBug>,
    /// Whether to keep a timeline.
    pub timeline: bool,
}

impl Scenario {
    pub fn world(&self) -> usize {
        self.layout.world as usize
    }

    /// Elements of each bucket.
    pub fn lengths(&self) -> Vec<usize> {
        let buckets = (0..self.layout.buckets() as u32).map(BucketId);
        buckets.map(|bucket| self.layout.length(bucket)).collect()
    }

    /// Whether a fault makes a rank's gradients not finite in a step.
    pub fn is_not_finite(&self, rank: Rank, step: u64) -> bool {
        self.faults.contains(&Fault::NotFinite { rank, step })
    }

    /// Whether a planned fault ends a rank, if the run gets that far.
    pub fn may_end(&self, rank: Rank) -> bool {
        self.faults.iter().any(|fault| match *fault {
            Fault::Die { rank: other, .. } => other == rank,
            Fault::Hang { rank: other, seconds, .. } => other == rank && seconds >= self.deadline_s,
            Fault::NotFinite { .. } => false,
        })
    }
}
