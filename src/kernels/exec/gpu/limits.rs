//! Checks of a plan against the limits of a device.

use crate::device::{DeviceError, Gpu, Limits};
use crate::exec::PassContext;
use crate::{OpCall, RandomContext};
use potluck_core::rng::Key;
use potluck_core::{DType, TensorId};
use potluck_graph::{Plan, TensorLocation};

/// The most elements of a tensor: shaders index elements by 32-bit integers, and the last
/// workgroups reach beyond the end; with this many at most, no index wraps around.
const ELEMENTS_MAX: u64 = 1 << 31;

/// Refuses a plan that the device cannot bind, before anything is allocated.
pub fn check(gpu: &Gpu, plan: &Plan) -> Result<(), DeviceError> {
    let held = plan.buckets.iter().zip(&plan.held).filter(|(_, held)| **held);
    let largest_bucket = held.map(|(b, _)| b.length * DType::F32.bytes()).max().unwrap_or(0);
    let bytes = plan.tensor_bytes_max().max(largest_bucket) as u64;
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
    // Nodes of other parts of the plan have outputs without a place.
    let is_run = |output: &TensorId| plan.place(*output) != TensorLocation::Unallocated;
    let nodes = plan.graph.nodes.iter().filter(|node| node.outputs.iter().all(is_run));
    let calls = nodes.map(|node| full.call(&plan.graph, node));
    let longest = calls.max_by_key(OpCall::iterations);
    let Some(call) = longest.filter(|call| call.iterations() > limit) else { return Ok(()) };
    let (adapter, what) = (gpu.name.clone(), call.op.to_string());
    Err(DeviceError::LoopTooLong { adapter, what, iterations: call.iterations(), limit })
}

/// Returns the most bytes of a tensor or a bucket that the device can bind and shaders can index.
pub fn tensor_bytes_max(limits: &Limits) -> u64 {
    limits.binding_bytes.min(ELEMENTS_MAX * DType::F32.bytes() as u64)
}
