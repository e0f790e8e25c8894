//! Owned form of the part of a graph that a plan covers.

use potluck_core::SegmentId;

/// Owned form of a [`PlanPart`](super::PlanPart), which a plan keeps.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PlannedPart {
    /// True for each block that the rank holds.
    pub blocks: Vec<bool>,
    /// Segments of the rank's program, each with its micro-batch, in the order in which they run.
    pub runs: Vec<(SegmentId, usize)>,
}
