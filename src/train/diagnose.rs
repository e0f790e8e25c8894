//! Where a value that is not finite began. Runs only after a step was skipped: the parameters are
//! unchanged then, so that the same step can be run again, node by node.

use crate::base::{DType, TensorId};
use crate::device::DeviceError;
use crate::exec::{Bank, Executor, Pass};
use crate::graph::{Place, Role};
use crate::kernels::Random;

use super::state;
use super::step::{StepInput, load};

/// Names the first tensor of a skipped step that is not finite, in order of execution: a
/// parameter, an activation, or a gradient.
pub fn first_not_finite(
    device: &mut dyn Executor,
    input: &StepInput,
) -> Result<String, DeviceError> {
    if let Some(name) = bad_bank(device, Bank::Parameters)? {
        return Ok(format!("parameter {name}"));
    }
    // Gradients first, because running the step again overwrites them.
    let gradient = bad_bank(device, Bank::Gradients)?;
    if let Some(found) = bad_activation(device, input)? {
        return Ok(found);
    }
    Ok(match gradient {
        Some(name) => format!("gradient of {name}"),
        None => "the sum of the loss or of the squared gradients, which overflowed".into(),
    })
}

/// The first parameter, in the model's order, whose values in a bank are not all finite.
fn bad_bank(device: &mut dyn Executor, bank: Bank) -> Result<Option<String>, DeviceError> {
    let mut tensors = state::read(device, bank)?.into_iter();
    Ok(tensors.find(|tensor| !tensor.is_finite()).map(|tensor| tensor.name))
}

fn bad_activation(
    device: &mut dyn Executor,
    input: &StepInput,
) -> Result<Option<String>, DeviceError> {
    let random = Random { step_key: input.run_key.step(input.step), training: true };
    device.begin_step()?;
    for (index, inputs) in input.micro_batches.iter().enumerate() {
        load(device, inputs, 0)?;
        let rows = input.program.micro_batches[index].rows as usize;
        let pass = Pass { copy: 0, rows, random };
        for node in 0..device.plan().graph.nodes.len() {
            device.run(node..node + 1, &pass)?;
            let outputs = device.plan().graph.nodes[node].outputs.clone();
            for output in outputs {
                if is_bad(device, output, &pass)? {
                    let graph = &device.plan().graph;
                    let (tensor, op) = (graph.tensor(output), &graph.nodes[node].op);
                    let name = &tensor.name;
                    return Ok(Some(format!("{name} ({output}, {op}) in micro-batch {index}")));
                }
            }
        }
    }
    Ok(None)
}

fn is_bad(device: &mut dyn Executor, tensor: TensorId, pass: &Pass) -> Result<bool, DeviceError> {
    let plan = device.plan();
    let found = plan.graph.tensor(tensor);
    // Tokens that an op reshaped are activations too, but integers.
    let is_float = found.role == Role::Activation && found.dtype == DType::F32;
    if !is_float || !matches!(plan.place(tensor), Place::Slot(_)) {
        return Ok(false);
    }
    Ok(device.read(tensor, pass)?.iter().any(|v| !v.is_finite()))
}
