//! Profiles of single kernels: measured time, cost and display names.

use super::PassContext;
use crate::{Cost, update_twin};
use potluck_core::{BucketId, DType};
use potluck_graph::{MomentFormat, Plan, Update, UpdateRange};

/// Part of a step that can be timed by itself.
#[derive(Clone, Copy, Debug)]
pub enum ProfileTarget {
    /// A node of the graph, by its index.
    Node(usize),
    /// The norm of a bucket's gradients.
    Norm(BucketId),
    Update(BucketId, Update, UpdateRange),
}

/// Measured time and cost of one part of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelProfile {
    /// Name of the op, `norm`, or name of the optimizer.
    pub op: String,
    /// Dimensions of inputs and outputs; a run of equal ones is written once, with its length.
    pub shape: String,
    /// Kernel variant that the device ran, for display.
    pub variant: String,
    pub seconds: f64,
    pub cost: Cost,
}

impl KernelProfile {
    /// Returns the profile of a target, without time and variant; `None` for a node that moves no
    /// data.
    pub(super) fn of(plan: &Plan, work: &ProfileTarget, pass: &PassContext) -> Option<Self> {
        let (op, shape, cost) = match work {
            ProfileTarget::Node(index) => {
                let node = &plan.graph.nodes[*index];
                let call = pass.call(&plan.graph, node);
                let arrow = if call.accumulates() { "+=>" } else { "->" };
                let shape = format!("{} {arrow} {}", dims(&call.inputs), dims(&call.outputs));
                (node.op.to_string(), shape, pass.cost(&plan.graph, node)?)
            }
            ProfileTarget::Norm(bucket) => {
                let length = plan.buckets[bucket.index()].length;
                ("norm".into(), format!("({length})"), norm_cost(length))
            }
            ProfileTarget::Update(_, update, range) => {
                let name = update_twin(update).name;
                (name.into(), format!("({})", range.length), update_cost(update, range))
            }
        };
        Some(Self { op, shape, variant: String::new(), seconds: 0.0, cost })
    }
}

/// Formats dimensions such as `2*(64,128) (128)`.
fn dims(tensors: &[Vec<usize>]) -> String {
    let mut texts = Vec::new();
    for run in tensors.chunk_by(|a, b| a == b) {
        let numbers: Vec<String> = run[0].iter().map(usize::to_string).collect();
        let dims = numbers.join(",");
        texts.push(match run.len() {
            1 => format!("({dims})"),
            count => format!("{count}*({dims})"),
        });
    }
    texts.join(" ")
}

/// Cost of a norm: every gradient is read once, squared and added.
pub(super) fn norm_cost(length: usize) -> Cost {
    Cost { flops: 2.0 * length as f64, bytes: (DType::F32.bytes() * length) as f64 }
}

/// Cost of an update: gradients are read, parameters and moments are read and written.
pub(super) fn update_cost(update: &Update, range: &UpdateRange) -> Cost {
    let flops = (update_twin(update).flops)(update) * range.length as f64;
    let format = if range.rounding.is_some() { MomentFormat::Bf16 } else { MomentFormat::F32 };
    let moments = 2 * update.moments() * format.bytes(range.length);
    Cost { flops, bytes: (3 * DType::F32.bytes() * range.length + moments) as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_dimensions_in_a_row_are_counted() {
        assert_eq!(dims(&[vec![64, 128], vec![64, 128], vec![128]]), "2*(64,128) (128)");
        assert_eq!(dims(&[vec![2], vec![3], vec![2]]), "(2) (3) (2)");
    }
}
