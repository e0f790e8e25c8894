//! Outputs of a model for any number of samples, computed on all devices.

use std::sync::Arc;

use super::error::TrainError;
use crate::base::{DType, HostTensor, TensorId};
use crate::graph::Graph;
use crate::runtime::pipelines::ForwardUnits;
use crate::runtime::step::{Inputs, forward, load};

/// Request for an output.
pub struct OutputRequest<'a> {
    pub units: ForwardUnits<'a>,
    pub graph: &'a Graph,
    /// Name of the output, which has a row per sample.
    pub output: &'a str,
    /// Number of samples, at least 1.
    pub rows: usize,
    /// Values of inputs by name, for all samples; others are zeros.
    pub inputs: &'a [(&'a str, HostTensor)],
    /// The most samples of a device at a time.
    pub most: u32,
    /// Weights by which the samples are divided among the devices or pipelines.
    pub weights: &'a [u32],
}

/// Returns the values of an output, a row per sample, without dropout.
///
/// # Errors
/// Returns `TrainError` if there is no such output, or if a device fails.
pub fn model_outputs(request: &OutputRequest) -> Result<Vec<f32>, TrainError> {
    let OutputRequest { units, graph, output, rows, most, weights, .. } = *request;
    let missing = || TrainError::InvalidRequest(format!("the model has no output {output}"));
    let tensor = graph.output(output).ok_or_else(missing)?;
    let total: u64 = weights.iter().map(|weight| u64::from(*weight)).sum();
    let (mut seen, mut from, mut work) = (0, 0, Vec::with_capacity(weights.len()));
    for weight in weights {
        seen += u64::from(*weight);
        let to = (rows as u64 * seen).div_ceil(total.max(1)) as usize;
        let starts = (from..to).step_by(most.max(1) as usize);
        let part = |first: usize| {
            let end = to.min(first + most.max(1) as usize);
            (end - first, inputs(request, first..end))
        };
        work.push(starts.map(part).collect::<Vec<(usize, Inputs)>>());
        from = to;
    }
    outputs_of(units, tensor, work)
}

/// Returns the values of a tensor for the micro-batches of each unit, (rows, inputs), one behind
/// the other.
///
/// # Errors
/// Returns `TrainError` if a device fails.
pub fn outputs_of(
    units: ForwardUnits,
    tensor: TensorId,
    work: Vec<Vec<(usize, Inputs)>>,
) -> Result<Vec<f32>, TrainError> {
    if let Some(pipelines) = units.pipelines {
        let mut values = Vec::new();
        for (pipeline, parts) in work.iter().enumerate() {
            for (rows, inputs) in parts {
                values.extend(pipelines.output(units.group, pipeline, (*rows, inputs), tensor)?);
            }
        }
        return Ok(values);
    }
    let work = Arc::new(work);
    let values = units.group.run_on_all("a prediction", move |rank, device| {
        let mut values = Vec::new();
        for (rows, inputs) in &work[rank.index()] {
            load(device, inputs, 0)?;
            let pass = forward(device, *rows)?;
            values.extend(device.read(tensor, &pass)?);
        }
        Ok(values)
    })?;
    Ok(values.concat())
}

/// Returns the inputs of the samples of a range; zeros for those that are not given.
fn inputs(request: &OutputRequest, range: std::ops::Range<usize>) -> Inputs {
    let of_input = |(name, id): &(String, TensorId)| {
        let tensor = request.graph.tensor(*id);
        let per_row = tensor.shape.per_row();
        let part = range.start * per_row..range.end * per_row;
        let given = request.inputs.iter().find(|(known, _)| known == name);
        let values = match (given.map(|(_, values)| values), tensor.dtype) {
            (Some(HostTensor::Float(values)), DType::F32) => {
                HostTensor::Float(values[part].to_vec())
            }
            (Some(HostTensor::Int(values)), DType::U32) => HostTensor::Int(values[part].to_vec()),
            _ => HostTensor::zeros(tensor.dtype, part.len()),
        };
        (*id, values)
    };
    request.graph.inputs.iter().map(of_input).collect()
}
