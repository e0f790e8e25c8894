//! Part of the model that a virtual rank runs.

use std::sync::Arc;

use potluck_core::BucketId;
use potluck_graph::{Plan, Role, Segment, TensorLocation};

/// Part of the model that a rank runs.
#[derive(Clone, Debug)]
pub struct ModelPart {
    /// By segment: the buckets to whose gradients it adds.
    pub(crate) adds_to: Vec<Vec<BucketId>>,
    /// True if the rank computes the losses of its samples.
    pub(crate) has_loss: bool,
    /// Plan with the places of tensors on the device, which are checked; `None` if the model has no
    /// tensors.
    pub plan: Option<Arc<Plan>>,
}

impl ModelPart {
    /// Creates a whole model without tensors; each segment adds to these buckets.
    pub fn whole(adds_to: Vec<Vec<BucketId>>) -> Self {
        Self { adds_to, has_loss: true, plan: None }
    }

    /// Creates the part of the model that a rank with this plan holds.
    pub fn of(plan: &Arc<Plan>) -> Self {
        let has_loss = plan.graph.nodes.iter().any(|node| {
            plan.holds_block(node.block)
                && node.outputs.iter().any(|output| plan.graph.tensor(*output).role == Role::Loss)
        });
        let adds_to = plan.segments.iter().map(|segment| gradients_of(plan, segment)).collect();
        Self { adds_to, has_loss, plan: Some(plan.clone()) }
    }
}

/// Buckets to whose gradients the nodes of a segment add.
fn gradients_of(plan: &Plan, segment: &Segment) -> Vec<BucketId> {
    let mut buckets = Vec::new();
    if !plan.holds_block(segment.block) {
        return buckets;
    }
    let nodes = &plan.graph.nodes[segment.nodes.clone()];
    for output in nodes.iter().flat_map(|node| &node.outputs) {
        if let TensorLocation::Gradient { bucket, .. } = plan.place(plan.graph.root(*output))
            && !buckets.contains(&bucket)
        {
            buckets.push(bucket);
        }
    }
    buckets
}
