//! Part of a graph that a plan is of, as the plan keeps it.

use potluck_core::SegmentId;

/// Blocks and runs of a plan of a part, as it keeps them.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PlannedPart {
    /// By block: true if the rank holds it.
    pub blocks: Vec<bool>,
    /// Segments of the rank's program, each with its micro-batch, in the order in which they run.
    pub runs: Vec<(SegmentId, usize)>,
}
