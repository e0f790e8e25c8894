//! Parameters and moments by name, to and from a device: what checkpoints hold.

use crate::base::{BucketId, ParamId};
use crate::device::DeviceError;
use crate::exec::{Bank, Executor};
use crate::graph::Plan;
use crate::model;

use super::checkpoint::{CheckpointError, NamedTensor};
use super::driver::Driver;
use super::error::TrainError;

/// Every parameter in one bank, in the model's order.
pub fn read(device: &mut dyn Executor, bank: Bank) -> Result<Vec<NamedTensor>, DeviceError> {
    let mut tensors: Vec<(ParamId, NamedTensor)> = Vec::new();
    for bucket in 0..device.plan().buckets.len() as u32 {
        let values = device.read_bank(bank, BucketId(bucket))?;
        let plan = device.plan();
        for &(id, start) in &plan.buckets[bucket as usize].parameters {
            let parameter = &plan.graph.parameters[id.index()];
            let shape = plan.graph.tensor(parameter.tensor).shape.dims().to_vec();
            let length: usize = shape.iter().product();
            let values = values[start..start + length].to_vec();
            tensors.push((id, NamedTensor { name: parameter.name.clone(), shape, values }));
        }
    }
    tensors.sort_by_key(|(id, _)| *id);
    Ok(tensors.into_iter().map(|(_, tensor)| tensor).collect())
}

/// Writes a bank from values by name; every parameter must be there with its shape.
///
/// # Errors
/// A tensor that is missing or has another shape; a device that fails.
fn write(
    device: &mut dyn Executor,
    bank: Bank,
    tensors: &[NamedTensor],
) -> Result<Result<(), CheckpointError>, DeviceError> {
    let buckets = match lay_out(device.plan(), tensors) {
        Ok(buckets) => buckets,
        Err(error) => return Ok(Err(error)),
    };
    for (index, values) in buckets.iter().enumerate() {
        device.write_bank(bank, BucketId(index as u32), values)?;
    }
    Ok(Ok(()))
}

fn lay_out(plan: &Plan, tensors: &[NamedTensor]) -> Result<Vec<Vec<f32>>, CheckpointError> {
    let mut buckets = Vec::with_capacity(plan.buckets.len());
    for bucket in &plan.buckets {
        let mut values = vec![0.0; bucket.length];
        for &(id, start) in &bucket.parameters {
            let parameter = &plan.graph.parameters[id.index()];
            let wanted = plan.graph.tensor(parameter.tensor).shape.dims();
            let tensor = NamedTensor::find(tensors, &parameter.name, wanted)?;
            values[start..start + tensor.values.len()].copy_from_slice(&tensor.values);
        }
        buckets.push(values);
    }
    Ok(buckets)
}

/// Moments of all parameters under one list of names: `NAME.0`, `NAME.1`.
pub fn join_moments(moments: Vec<Vec<NamedTensor>>) -> Vec<NamedTensor> {
    let number = |(index, list): (usize, Vec<NamedTensor>)| {
        list.into_iter().map(move |mut tensor| {
            tensor.name = format!("{}.{index}", tensor.name);
            tensor
        })
    };
    moments.into_iter().enumerate().flat_map(number).collect()
}

/// The moments of one index out of such a list.
fn split_moments(moments: &[NamedTensor], index: usize) -> Vec<NamedTensor> {
    let suffix = format!(".{index}");
    let of_index = |tensor: &NamedTensor| {
        let name = tensor.name.strip_suffix(&suffix)?.to_string();
        let (shape, values) = (tensor.shape.clone(), tensor.values.clone());
        Some(NamedTensor { name, shape, values })
    };
    moments.iter().filter_map(of_index).collect()
}

/// How many moments of a checkpoint are restored: one of an optimizer that kept none has none,
/// and those of another then start as zeros, as in a new run.
fn restored(moments: &[NamedTensor], kept: usize) -> usize {
    if moments.is_empty() { 0 } else { kept }
}

/// Whether a checkpoint's tensors fit a plan whose optimizer keeps `kept` moments.
///
/// # Errors
/// A tensor that is missing or has another shape.
pub fn check(
    plan: &Plan,
    parameters: &[NamedTensor],
    moments: &[NamedTensor],
    kept: usize,
) -> Result<(), CheckpointError> {
    for parameter in &plan.graph.parameters {
        let wanted = plan.graph.tensor(parameter.tensor).shape.dims();
        NamedTensor::find(parameters, &parameter.name, wanted)?;
        for index in 0..restored(moments, kept) {
            NamedTensor::find(moments, &format!("{}.{index}", parameter.name), wanted)?;
        }
    }
    Ok(())
}

/// Puts a checkpoint's tensors on a device.
///
/// # Errors
/// A tensor that is missing or has another shape; a device that fails.
pub fn restore(
    driver: &Driver,
    parameters: Vec<NamedTensor>,
    moments: Vec<NamedTensor>,
    kept: usize,
) -> Result<(), TrainError> {
    let restored = driver.run("restoring the state", move |device| {
        let mut written = write(device, Bank::Parameters, &parameters)?;
        for index in 0..restored(&moments, kept) {
            if written.is_ok() {
                written = write(device, Bank::Moment(index), &split_moments(&moments, index))?;
            }
        }
        Ok(written)
    })?;
    Ok(restored?)
}

/// Sets the initial parameters of a seed; moments start as zeros.
pub fn initialize(device: &mut dyn Executor, seed: u64) -> Result<(), DeviceError> {
    for bucket in 0..device.plan().buckets.len() {
        let plan = device.plan();
        let mut values = vec![0.0; plan.buckets[bucket].length];
        for &(id, start) in &plan.buckets[bucket].parameters {
            let initial = model::init::values(&plan.graph, id, seed);
            values[start..start + initial.len()].copy_from_slice(&initial);
        }
        device.write_bank(Bank::Parameters, BucketId(bucket as u32), &values)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Builder, Init, PlanOptions};

    fn tensor(name: &str, shape: &[usize]) -> NamedTensor {
        let values = vec![0.0; shape.iter().product()];
        NamedTensor { name: name.into(), shape: shape.into(), values }
    }

    #[test]
    fn what_does_not_fit_is_named_and_no_moments_start_as_zeros() {
        let mut b = Builder::new();
        b.parameter("w", &[2, 3], Init::Zeros);
        let plan = Plan::new(b.finish(), PlanOptions::new(1));
        let check = |parameters: &[NamedTensor], moments: &[NamedTensor]| {
            check(&plan, parameters, moments, 2).map_err(|error| error.to_string())
        };
        let w = [tensor("w", &[2, 3])];
        let moments = [tensor("w.0", &[2, 3]), tensor("w.1", &[2, 3])];
        assert_eq!(check(&w, &moments), Ok(()));
        assert_eq!(check(&w, &[]), Ok(()));
        assert!(check(&w, &moments[..1]).unwrap_err().contains("'w.1'"));
        assert!(check(&[tensor("w", &[3, 2])], &moments).unwrap_err().contains("[3, 2]"));
        assert!(check(&[], &moments).unwrap_err().contains("'w'"));
    }
}
