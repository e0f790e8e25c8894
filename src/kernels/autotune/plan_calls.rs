//! Distinct calls of a plan, their keys, and the kernel variant that each of them runs.

use std::collections::BTreeSet;

use super::certify::variant_hash;
use crate::call::resolved_dims;
use crate::device::Gpu;
use crate::{Caps, OpCall, OwnedCall, RandomContext, Variant, twin};
use potluck_core::rng::Key;
use potluck_graph::{Graph, Node, Plan, Precision};

/// Returns the key of a call: a text such as `matmul a b^T (768, 128) (384, 128)`.
pub fn call_key(call: &OpCall) -> String {
    let mut text = call.op.to_string();
    for dims in &call.inputs {
        let dims: Vec<String> = dims.iter().map(usize::to_string).collect();
        text += &format!(" ({})", dims.join(", "));
    }
    if call.accumulates() {
        text += " accumulating";
    }
    if call.precision == Precision::Mixed {
        text += " mixed";
    }
    if call.op.depends_on_training() && call.random.training {
        text += " training";
    }
    text
}

/// Distinct call of a plan, which may occur at several nodes.
pub(crate) struct PlanCall {
    pub owned_call: OwnedCall,
    pub call_key: String,
    pub variants: Vec<Variant>,
    /// FLOPs and bytes of all its nodes; calls with more are timed first.
    pub weight: f64,
}

/// Returns the distinct calls of a plan at full capacity, with their variants on a device with
/// these capabilities.
pub(crate) fn distinct_calls(plan: &Plan, caps: Caps) -> Vec<PlanCall> {
    distinct_calls_of(plan, caps, plan.graph.is_trained(), plan.options.rows)
}

/// Returns the distinct calls of a plan like [`distinct_calls`], in training or not, on this number
/// of rows.
pub(crate) fn distinct_calls_of(
    plan: &Plan,
    caps: Caps,
    training: bool,
    rows: usize,
) -> Vec<PlanCall> {
    let mut calls: Vec<PlanCall> = Vec::new();
    for node in plan.graph.nodes.iter().filter(|node| plan.holds_block(node.block)) {
        let Some(twin) = twin(&node.op) else { continue };
        let owned_call = node_call(&plan.graph, node, rows, training);
        let call = owned_call.call();
        let call_key = call_key(&call);
        let cost = (twin.cost)(&call);
        // Calls that no step makes are timed last.
        let is_of_step = node.when.includes(true);
        let weight = if is_of_step { cost.flops + cost.bytes } else { 0.0 };
        match calls.iter_mut().find(|planned| planned.call_key == call_key) {
            Some(planned) => planned.weight += weight,
            None => {
                let mut variants = (twin.variants)(&call, &caps);
                let most = plan.options.workspace_bytes_max;
                let least = variants.iter().map(Variant::workspace_bytes).min().unwrap_or(0);
                variants.retain(|variant| variant.workspace_bytes() <= most.max(least));
                calls.push(PlanCall { owned_call, call_key, variants, weight });
            }
        }
    }
    calls
}

pub(super) fn node_call(graph: &Graph, node: &Node, rows: usize, training: bool) -> OwnedCall {
    let Node { op, accumulate, precision, .. } = node.clone();
    OwnedCall {
        op,
        inputs: resolved_dims(graph, &node.inputs, rows),
        outputs: resolved_dims(graph, &node.outputs, rows),
        accumulate,
        precision,
        scaled: None,
        random: RandomContext { step_key: Key::new(1), training },
    }
}

pub(crate) fn variant_set_hash(gpu: &Gpu, call: &OpCall, variants: &[Variant]) -> String {
    let hashes: BTreeSet<String> =
        variants.iter().map(|variant| variant_hash(gpu.checks, call, variant)).collect();
    let all: String = hashes.into_iter().collect();
    blake3::hash(all.as_bytes()).to_hex()[..32].to_string()
}
