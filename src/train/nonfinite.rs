//! Diagnosis of non-finite values: finds the tensor in which the first one arose. Runs only after a
//! skipped step: the parameters are then unchanged, so that the same step can be repeated node by
//! node.

use std::fmt;
use std::ops::Range;

use crate::runtime::step::StepInput;
use potluck_core::{BucketId, DType, ParamId, TensorId};
use potluck_graph::{Role, TensorLocation};
use potluck_kernels::RandomContext;
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::{BucketTensor, Executor, PassContext};
use potluck_parallel::collective::Collective;
use potluck_parallel::{Instruction, Program};

pub(crate) const OVERFLOW_CAUSE: &str =
    "the sum of the loss or of the squared gradients, which overflowed";

/// Tensor with a non-finite value; variants in the order in which a step computes them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NotFinite {
    Parameter(NamedParameter),
    Activation(BadOutput),
    Gradient(NamedParameter),
    /// Gradient summed over all ranks; the value may come from any of them.
    Sum(NamedParameter),
}

/// Parameter, in the model's order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NamedParameter {
    id: ParamId,
    name: String,
}

/// Output of a node for a micro-batch, in the order of execution.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BadOutput {
    micro_batch: usize,
    node: usize,
    /// Name of the tensor, with its op.
    name: String,
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Parameter(parameter) => write!(f, "parameter {}", parameter.name),
            Self::Activation(output) => {
                write!(f, "{} in micro-batch {}", output.name, output.micro_batch)
            }
            Self::Gradient(parameter) => write!(f, "gradient of {}", parameter.name),
            Self::Sum(parameter) => write!(f, "the sum of the gradients of {}", parameter.name),
        }
    }
}

/// First non-finite tensor of a skipped step, in order of execution; `None` if all are finite.
pub(crate) fn first_not_finite(
    device: &mut dyn Executor,
    input: &StepInput,
) -> Result<Option<NotFinite>, DeviceError> {
    let state = bad_state(device, &input.program)?;
    if let Some(NotFinite::Parameter(_)) = state {
        return Ok(state);
    }
    // After the state, because repeating the step overwrites the gradients.
    let activation = bad_activation(device, input)?;
    Ok(activation.map(NotFinite::Activation).or(state))
}

/// First non-finite parameter of a skipped step, or else the first non-finite gradient; `None` if
/// all are finite.
pub(crate) fn bad_state(
    device: &mut dyn Executor,
    program: &Program,
) -> Result<Option<NotFinite>, DeviceError> {
    if let Some((parameter, _)) = bad_bucket(device, BucketTensor::Parameters, &|_| false)? {
        return Ok(Some(NotFinite::Parameter(parameter)));
    }
    let gradient = bad_bucket(device, BucketTensor::Gradients, &|bucket| {
        program.instructions.contains(&Instruction::Start(Collective::reduce_scatter(bucket)))
    })?;
    Ok(match gradient {
        Some((parameter, true)) => Some(NotFinite::Sum(parameter)),
        Some((parameter, false)) => Some(NotFinite::Gradient(parameter)),
        None => None,
    })
}

/// First parameter, in the model's order, with a non-finite value in a bucket tensor. The flag is
/// true if such values are only in the shard that the device owns and, by `has_sums`, holds summed
/// over all ranks; parameters for which it is false come first.
fn bad_bucket(
    device: &mut dyn Executor,
    bucket_tensor: BucketTensor,
    has_sums: &dyn Fn(BucketId) -> bool,
) -> Result<Option<(NamedParameter, bool)>, DeviceError> {
    let mut found: Option<(bool, ParamId)> = None;
    for bucket in 0..device.plan().buckets.len() as u32 {
        let bucket = BucketId(bucket);
        let plan = device.plan();
        let is_updated = plan.buckets[bucket.index()].is_updated();
        if !plan.holds(bucket) || (bucket_tensor != BucketTensor::Parameters && !is_updated) {
            continue;
        }
        let values = device.read_bucket(bucket_tensor, bucket)?;
        let plan = device.plan();
        let layout = &plan.buckets[bucket.index()];
        let owned = device.owned(bucket);
        for &(id, start) in &layout.parameters {
            let shape = &plan.graph.tensor(plan.graph.parameters[id.index()].tensor).shape;
            let elements = start..start + shape.per_row();
            let bad: Vec<usize> = elements.filter(|index| !values[*index].is_finite()).collect();
            if bad.is_empty() {
                continue;
            }
            let is_summed = has_sums(bucket) && bad.iter().all(|index| owned.contains(index));
            found = match found {
                Some(known) => Some(known.min((is_summed, id))),
                None => Some((is_summed, id)),
            };
        }
    }
    let Some((is_summed, id)) = found else { return Ok(None) };
    let name = device.plan().graph.parameters[id.index()].whole.name.clone();
    Ok(Some((NamedParameter { id, name }, is_summed)))
}

fn bad_activation(
    device: &mut dyn Executor,
    input: &StepInput,
) -> Result<Option<BadOutput>, DeviceError> {
    let random = RandomContext { step_key: input.run_key.step(input.round.step), training: true };
    device.begin_step()?;
    for index in 0..input.micro_batches.len() {
        input.load(device, index)?;
        let rows = input.program.micro_batches[index].rows as usize;
        let pass = PassContext { micro_batch: index, rows, loss_scale: input.loss_scale, random };
        let nodes = 0..device.plan().graph.nodes.len();
        if let Some(found) = bad_output(device, nodes, &pass)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Runs nodes one by one up to the first with a non-finite output, which it returns.
pub(crate) fn bad_output(
    device: &mut dyn Executor,
    nodes: Range<usize>,
    pass: &PassContext,
) -> Result<Option<BadOutput>, DeviceError> {
    for node in nodes {
        if !device.plan().graph.nodes[node].when.includes(pass.random.training) {
            continue;
        }
        device.run(node..node + 1, pass)?;
        let outputs = device.plan().graph.nodes[node].outputs.clone();
        for output in outputs {
            if is_bad(device, output, pass)? {
                let graph = &device.plan().graph;
                let name = &graph.tensor(output).name;
                let op = &graph.nodes[node].op;
                let name = format!("{name} ({output}, {op})");
                return Ok(Some(BadOutput { micro_batch: pass.micro_batch, node, name }));
            }
        }
    }
    Ok(None)
}

fn is_bad(
    device: &mut dyn Executor,
    tensor: TensorId,
    pass: &PassContext,
) -> Result<bool, DeviceError> {
    let plan = device.plan();
    let found = plan.graph.tensor(tensor);
    // Reshaped tokens are activations too, but integers.
    let is_float = found.role == Role::Activation && found.dtype == DType::F32;
    if !is_float || !matches!(plan.place(tensor), TensorLocation::Slot(_)) {
        return Ok(false);
    }
    Ok(device.read(tensor, pass)?.iter().any(|v| !v.is_finite()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_step_computes_first_is_the_first_whatever_its_name() {
        let output = |micro_batch, node, name: &str| {
            NotFinite::Activation(BadOutput { micro_batch, node, name: name.into() })
        };
        let parameter = |id, name: &str| NamedParameter { id: ParamId(id), name: name.into() };
        let in_order = [
            NotFinite::Parameter(parameter(2, "z")),
            NotFinite::Parameter(parameter(10, "a")),
            output(0, 9, "h.9 (t9, tanh)"),
            output(0, 10, "h.10 (t10, tanh)"),
            output(1, 2, "a (t2, tanh)"),
            NotFinite::Gradient(parameter(3, "z")),
            NotFinite::Sum(parameter(1, "a")),
        ];
        assert!(in_order.is_sorted(), "{in_order:?}");
        assert_eq!(in_order[4].to_string(), "a (t2, tanh) in micro-batch 1");
    }
}
