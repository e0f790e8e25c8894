//! Workspace of a plan's kernels, in which the dispatches of one call hand results on.

use crate::autotune::plan_calls::distinct_calls;
use crate::graph::Plan;
use crate::kernels::Caps;

/// Returns the bytes of workspace that a device with these capabilities allocates for a plan:
/// the most that a variant of one of its calls needs, whichever of them is chosen later. Calls run
/// one after the other and share it.
pub fn workspace_bytes(plan: &Plan, caps: &Caps) -> usize {
    let calls = distinct_calls(plan, *caps);
    let variants = calls.iter().flat_map(|planned| &planned.variants);
    variants.map(|variant| variant.workspace_bytes()).max().unwrap_or(0)
}
