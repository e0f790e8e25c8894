//! Outputs of a model for any number of samples, computed on all devices.

use super::error::TrainError;
use super::given_inputs::GivenInputs;
use crate::runtime::pipelines::ForwardUnits;
use potluck_core::HostTensor;
use potluck_graph::Graph;
use potluck_parallel::MicroBatch;

/// Request for an output.
pub struct OutputRequest<'a> {
    pub units: ForwardUnits<'a>,
    pub graph: &'a Graph,
    /// Name of the output, which has one row per sample.
    pub output: &'a str,
    /// Number of samples, at least 1.
    pub rows: u32,
    /// Values of inputs by name, for all samples; other inputs are zeros.
    pub inputs: &'a [(&'a str, HostTensor)],
    /// Largest number of samples in a pass of a device.
    pub most: u32,
    /// Weights for dividing the samples among the devices or pipelines.
    pub weights: &'a [u32],
}

/// Returns the values of an output, one row per sample, without dropout.
///
/// # Errors
/// Returns `TrainError` if the output does not exist, if an input has another type or length, or if
/// a device fails.
pub fn model_outputs(request: &OutputRequest) -> Result<Vec<f32>, TrainError> {
    let OutputRequest { units, graph, output, rows, inputs, most, weights } = *request;
    let Some(tensor) = graph.output(output) else {
        return Err(TrainError::InvalidRequest(format!("the model has no output {output}")));
    };
    let given = GivenInputs::from_sample(graph, inputs, rows as usize, 0)?;
    let mut work = Vec::with_capacity(weights.len());
    for parts in divided(rows, weights, &vec![most; weights.len()]) {
        let mut of_unit = Vec::with_capacity(parts.len());
        for part in parts {
            of_unit.push((part.rows as usize, given.cut_or_zero(&part)?));
        }
        work.push(of_unit);
    }
    Ok(units.outputs(tensor, work)?)
}

/// Returns the micro-batches of each unit for `rows` samples, divided in proportion to the weights.
/// `most` is the largest number of samples in a pass of each unit.
pub fn divided(rows: u32, weights: &[u32], most: &[u32]) -> Vec<Vec<MicroBatch>> {
    let mut units = Vec::with_capacity(weights.len());
    let mut first = 0;
    for (count, most) in proportional(rows, weights).into_iter().zip(most) {
        let end = first + count;
        let mut parts = Vec::new();
        while first < end {
            let rows = (*most).max(1).min(end - first);
            parts.push(MicroBatch { first, rows });
            first += rows;
        }
        units.push(parts);
    }
    units
}

/// Divides `count` in proportion to weights, not all of which are 0; the first gets the remainder.
fn proportional(count: u32, weights: &[u32]) -> Vec<u32> {
    let total: u128 = weights.iter().map(|weight| u128::from(*weight)).sum();
    let mut parts = Vec::with_capacity(weights.len());
    let mut seen = 0;
    let mut from = 0;
    for weight in weights {
        seen += u128::from(*weight);
        // At most `count`, a u32.
        let to = (u128::from(count) * seen).div_ceil(total.max(1)) as u32;
        parts.push(to - from);
        from = to;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_divided_in_proportion_and_the_first_takes_the_rest() {
        assert_eq!(proportional(1, &[1, 1]), [1, 0]);
        assert_eq!(proportional(7, &[1, 1]), [4, 3]);
        assert_eq!(proportional(8, &[3, 0, 1]), [6, 0, 2]);
        assert_eq!(proportional(u32::MAX, &[u32::MAX, u32::MAX]), [1 << 31, (1 << 31) - 1]);
    }
}
