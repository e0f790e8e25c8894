//! Memory in which the dispatches of one call of a plan hand results on.

use crate::Caps;
use crate::autotune::plan_calls::{distinct_calls, distinct_calls_of};
use potluck_graph::Plan;

/// Bytes that a device allocates for what the dispatches of a call hand on, for all calls together,
/// which run one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallMemory {
    /// Partial results.
    pub workspace: usize,
    /// A tensor that dispatches hand on whole.
    pub scratch: usize,
}

impl CallMemory {
    /// Returns the memory for a plan on a device with these capabilities: the most that a variant
    /// of one of its calls needs, whichever of them is chosen later. A plan without gradients may
    /// run as in training too, and then normalizes by the statistics of the batch.
    pub fn of(plan: &Plan, caps: &Caps) -> Self {
        let mut calls = distinct_calls(plan, *caps);
        if !plan.graph.is_trained() {
            calls.extend(distinct_calls_of(plan, *caps, true));
        }
        let mut memory = Self::default();
        for variant in calls.iter().flat_map(|planned| &planned.variants) {
            memory.workspace = memory.workspace.max(variant.workspace_bytes());
            memory.scratch = memory.scratch.max(variant.scratch_bytes());
        }
        memory
    }

    /// Returns the bytes of both.
    pub fn bytes(&self) -> usize {
        self.workspace.saturating_add(self.scratch)
    }
}
