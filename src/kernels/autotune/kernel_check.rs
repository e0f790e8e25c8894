//! Check of a custom op's kernel on a device, for tests of the library's user.

use super::plan_calls::node_call;
use super::{KernelCache, KernelSelector};
use crate::device::{DeviceError, Gpu};
use crate::{OwnedCall, RandomContext};
use potluck_core::rng::Key;
use potluck_core::{DType, Shape};
use potluck_graph::{Accumulation, CustomOp, Op, Precision, ShapeError, op_gradients, shapes};

/// Error of a kernel check.
#[derive(Clone, Debug, thiserror::Error)]
pub enum KernelCheckError {
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Checks the kernel of a custom op, and the kernels of the ops in its gradient if it has one,
/// against their references on a device, as a run does before it uses them: on random inputs of
/// these shapes with `rows` rows.
///
/// # Errors
/// Returns [`KernelCheckError`] if the shapes do not fit, if a kernel does not compile, is wrong or
/// beyond the limits, or if the device fails.
pub fn check_kernel(
    gpu: &Gpu,
    op: impl CustomOp + 'static,
    inputs: &[Shape],
    rows: usize,
) -> Result<(), KernelCheckError> {
    let kinds = op.inputs();
    let op = Op::custom(op);
    let calls = match op_gradients(&op, inputs) {
        Ok(built) => {
            let nodes = built.graph.nodes.iter();
            nodes.map(|node| node_call(&built.graph, node, rows, true)).collect()
        }
        Err(error) if !error.is_missing_gradient() => return Err(error.into()),
        Err(_) => {
            let mut typed = Vec::new();
            for (index, shape) in inputs.iter().enumerate() {
                let dtype = match kinds.get(index) {
                    Some(kind) => kind.dtype(),
                    None => DType::F32,
                };
                typed.push((shape.clone(), dtype));
            }
            let outputs = shapes::outputs(&op, &typed)?;
            let inputs = inputs.iter().map(|shape| shape.resolve(rows)).collect();
            let outputs = outputs.iter().map(|(shape, _)| shape.resolve(rows)).collect();
            vec![OwnedCall {
                op,
                inputs,
                outputs,
                accumulate: Accumulation::NONE,
                precision: Precision::F32,
                scaled: None,
                random: RandomContext { step_key: Key::new(1), training: true },
            }]
        }
    };
    let mut kernels = KernelSelector::new(KernelCache::in_memory());
    for owned_call in calls {
        let call = owned_call.call();
        kernels.variant(gpu, &call, &call)?;
    }
    Ok(())
}
