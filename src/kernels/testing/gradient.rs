//! Gradient check: compares gradients with central differences of the f64 references.

use super::{Shape, reference};
use potluck_core::HostTensor;
use potluck_graph::Op;

/// Asserts that `gradient` is the derivative of the objective `sum_i sum_k weights[i][k] y_i[k]`
/// over the outputs `y_i` of `op`, by each element of input `which`.
pub fn check_gradient(
    op: &Op,
    inputs: &[(Shape, HostTensor<f64>)],
    rows: usize,
    which: usize,
    weights: &[Vec<f64>],
    gradient: &[f64],
) {
    const STEP: f64 = 1e-4;
    let objective = |inputs: &[(Shape, HostTensor<f64>)]| -> f64 {
        let outputs = reference(op, inputs, rows);
        assert_eq!(outputs.len(), weights.len(), "{op}: one list of weights per output");
        let mut objective = 0.0;
        for (output, weights) in outputs.iter().zip(weights) {
            assert_eq!(output.len(), weights.len(), "{op}: one weight per element");
            objective += output.iter().zip(weights).map(|(y, w)| y * w).sum::<f64>();
        }
        objective
    };
    for (at, gradient) in gradient.iter().enumerate() {
        let shifted = |by: f64| {
            let mut inputs = inputs.to_vec();
            let HostTensor::Float(values) = &mut inputs[which].1 else {
                panic!("{op}: integers have no gradient")
            };
            values[at] += by;
            objective(&inputs)
        };
        let difference = (shifted(STEP) - shifted(-STEP)) / (2.0 * STEP);
        let error = (difference - gradient).abs();
        let within = error <= 1e-6 * (1.0 + gradient.abs());
        assert!(within, "{op}: element {at} of input {which}: {gradient}, not {difference}");
    }
}
