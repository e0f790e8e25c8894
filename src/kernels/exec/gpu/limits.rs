//! Checks of a plan against the limits of a device.

use crate::RandomContext;
use crate::device::{DeviceError, Gpu, Limits};
use crate::exec::PassContext;
use potluck_core::DType;
use potluck_core::rng::Key;
use potluck_graph::{Plan, TensorLocation};

/// The most elements of a tensor: shaders index elements by 32-bit integers, and the last
/// workgroups reach beyond the end; up to this number, no index wraps around.
const ELEMENTS_MAX: u64 = 1 << 31;

/// Refuses a plan that the device cannot bind, before anything is allocated.
pub fn check(gpu: &Gpu, plan: &Plan) -> Result<(), DeviceError> {
    let mut bytes = plan.tensor_bytes_max();
    for (bucket, held) in plan.buckets.iter().zip(&plan.held) {
        if *held {
            bytes = bytes.max(bucket.length * DType::F32.bytes());
        }
    }
    let bytes = bytes as u64;
    let limit = tensor_bytes_max(&gpu.limits);
    if bytes > limit {
        return Err(DeviceError::TooLarge { adapter: gpu.name.clone(), bytes, limit });
    }
    match gpu.loop_iterations_max() {
        Some(limit) => check_loops(gpu, plan, limit),
        None => Ok(()),
    }
}

/// Refuses a plan in which an invocation would make more loop iterations than the driver allows.
fn check_loops(gpu: &Gpu, plan: &Plan, limit: usize) -> Result<(), DeviceError> {
    let random = RandomContext { step_key: Key::new(0), training: true };
    let full = PassContext { micro_batch: 0, rows: plan.options.rows, loss_scale: 1.0, random };
    let mut longest = None;
    let mut iterations = 0;
    for node in &plan.graph.nodes {
        // Nodes of other parts of the plan have outputs without a place.
        let is_of_other_part =
            node.outputs.iter().any(|output| plan.place(*output) == TensorLocation::Unallocated);
        if is_of_other_part {
            continue;
        }
        let of_node = full.call(&plan.graph, node).iterations();
        if of_node >= iterations {
            longest = Some(&node.op);
            iterations = of_node;
        }
    }
    match longest {
        Some(op) if iterations > limit => {
            let adapter = gpu.name.clone();
            Err(DeviceError::LoopTooLong { adapter, what: op.to_string(), iterations, limit })
        }
        _ => Ok(()),
    }
}

/// Returns the most bytes of a tensor or a bucket that the device can bind and shaders can index.
pub fn tensor_bytes_max(limits: &Limits) -> u64 {
    limits.binding_bytes.min(ELEMENTS_MAX * DType::F32.bytes() as u64)
}
