//! Workspace of a plan's kernels, in which the dispatches of one call hand results on.

use crate::Caps;
use crate::autotune::plan_calls::{distinct_calls, distinct_calls_of};
use potluck_graph::Plan;

/// Returns the bytes of workspace that a device with these capabilities allocates for a plan:
/// the most that a variant of one of its calls needs, whichever of them is chosen later. Calls run
/// one after the other and share it. A plan without gradients may run as in training too, and then
/// normalizes by the statistics of the batch.
pub fn workspace_bytes(plan: &Plan, caps: &Caps) -> usize {
    let mut calls = distinct_calls(plan, *caps);
    if !plan.graph.is_trained() {
        calls.extend(distinct_calls_of(plan, *caps, true));
    }
    let variants = calls.iter().flat_map(|planned| &planned.variants);
    variants.map(|variant| variant.workspace_bytes()).max().unwrap_or(0)
}
