//! Check of a custom op's gradient by central differences of its f64 reference.

use super::call::resolved_dims;
use super::{CpuKernel, OpCall, RandomContext, harness, twin};
use potluck_core::rng::Key;
use potluck_core::{HostTensor, Shape};
use potluck_graph::{CustomOp, Graph, Node, Op, ShapeError, op_gradients};

/// Rows of inputs whose shapes are batched.
const ROWS: usize = 3;

/// Half the distance of the two values of a central difference, relative to values above 1.
const STEP: f64 = 1e-4;

/// The largest error of a gradient, relative to the largest element of the two.
const TOLERANCE: f64 = 1e-5;

/// Error of a gradient check.
#[derive(Clone, Debug, thiserror::Error)]
pub enum GradientError {
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error("{op} has no gradient by input {input}")]
    Missing { op: String, input: usize },
    #[error(
        "{op}: the gradient by element {element} of input {input} is {gradient}, and by \
         differences of the reference it is {difference}; correct the gradient or the reference"
    )]
    Wrong { op: String, input: usize, element: usize, gradient: f64, difference: f64 },
}

/// Checks the gradient of a custom op by each input of floats, on random inputs of these shapes and
/// a random gradient by the output, against central differences of the reference. Everything is
/// computed in f64 on the host; batched shapes get three rows. The time grows with the square of
/// the number of elements.
///
/// # Errors
/// Returns [`GradientError`] if the shapes do not fit, or with the first element whose gradient is
/// wrong.
///
/// # Panics
/// Panics if a function of the op does.
pub fn check_gradient(
    op: impl CustomOp + 'static,
    inputs: &[Shape],
    seed: u64,
) -> Result<(), GradientError> {
    let op = Op::custom(op);
    let built = op_gradients(&op, inputs)?;
    let graph = &built.graph;
    let (x, dy) = values(graph, &op, seed);
    let mut known: Vec<Option<HostTensor<f64>>> = vec![None; graph.tensors.len()];
    for ((_, id), values) in graph.inputs.iter().zip(x.iter().chain([&dy])) {
        known[id.index()] = Some(values.clone());
    }
    for node in &graph.nodes {
        run(graph, node, &mut known);
    }
    for (input, gradient) in built.gradients.iter().enumerate() {
        let HostTensor::Float(values) = &x[input] else { continue };
        let Some(gradient) = gradient.and_then(|id| known[id.index()].as_ref()) else {
            return Err(GradientError::Missing { op: op.to_string(), input });
        };
        let gradient = gradient.as_view().floats();
        let differences = differences(graph, &x, input, values, dy.as_view().floats());
        let tolerance = TOLERANCE * largest(gradient).max(largest(&differences)).max(1e-3);
        for (element, (&gradient, &difference)) in gradient.iter().zip(&differences).enumerate() {
            // False for NaN.
            let is_right = (gradient - difference).abs() <= tolerance;
            if !is_right {
                let op = op.to_string();
                return Err(GradientError::Wrong { op, input, element, gradient, difference });
            }
        }
    }
    Ok(())
}

/// Returns random values of the op's inputs, and of the gradient by its output.
fn values(graph: &Graph, op: &Op, seed: u64) -> (Vec<HostTensor<f64>>, HostTensor<f64>) {
    let mut fills = Vec::new();
    if let Some(twin) = twin(op) {
        fills = (twin.inputs)(op, &[]).fills;
    }
    fills.push(harness::InputFill::Normal);
    // The streams of two seeds differ.
    let first_stream = (seed as usize % (1 << 20)) * 16;
    let mut x = Vec::with_capacity(fills.len());
    for (index, fill) in fills.into_iter().enumerate() {
        let (_, id) = graph.inputs[index];
        let count = graph.tensor(id).shape.elements(ROWS);
        x.push(harness::generate(fill, count, first_stream + index));
    }
    let dy = x.remove(x.len() - 1);
    (x, dy)
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |most: f64, value| most.max(value.abs()))
}

/// Returns the central differences of the sum of the op's outputs times `weights`, by each element
/// of an input with these values.
fn differences(
    graph: &Graph,
    x: &[HostTensor<f64>],
    input: usize,
    values: &[f64],
    weights: &[f64],
) -> Vec<f64> {
    let mut differences = Vec::with_capacity(values.len());
    for (element, value) in values.iter().enumerate() {
        let step = STEP * value.abs().max(1.0);
        let [above, below] = [step, -step].map(|by| {
            let mut shifted = values.to_vec();
            shifted[element] += by;
            outputs_with(graph, x, input, shifted)
        });
        let changes = above.iter().zip(&below).zip(weights);
        let change: f64 = changes.map(|((above, below), weight)| (above - below) * weight).sum();
        differences.push(change / (2.0 * step));
    }
    differences
}

/// The op's output with other values of an input.
fn outputs_with(graph: &Graph, x: &[HostTensor<f64>], input: usize, values: Vec<f64>) -> Vec<f64> {
    let node = &graph.nodes[0];
    let Some(twin) = twin(&node.op) else { return values };
    let mut x: Vec<&HostTensor<f64>> = x.iter().collect();
    let values = HostTensor::Float(values);
    x[input] = &values;
    host(graph, node, &x, twin.reference_f64).swap_remove(0)
}

/// Computes the outputs of a node from known inputs.
fn run(graph: &Graph, node: &Node, known: &mut [Option<HostTensor<f64>>]) {
    let inputs: Vec<&HostTensor<f64>> =
        node.inputs.iter().filter_map(|id| known[id.index()].as_ref()).collect();
    let outputs: Vec<HostTensor<f64>> = match twin(&node.op) {
        Some(twin) => {
            let computed = host(graph, node, &inputs, twin.reference_f64);
            computed.into_iter().map(HostTensor::Float).collect()
        }
        // An alias has the elements of its input.
        None => inputs.into_iter().cloned().collect(),
    };
    for (id, values) in node.outputs.iter().zip(outputs) {
        known[id.index()] = Some(values);
    }
}

/// Outputs of a CPU kernel for a node.
fn host(
    graph: &Graph,
    node: &Node,
    inputs: &[&HostTensor<f64>],
    function: CpuKernel<f64>,
) -> Vec<Vec<f64>> {
    let call = OpCall {
        op: &node.op,
        inputs: resolved_dims(graph, &node.inputs, ROWS),
        outputs: resolved_dims(graph, &node.outputs, ROWS),
        accumulate: node.accumulate,
        precision: node.precision,
        loss_scale: 1.0,
        random: RandomContext { step_key: Key::new(0), training: true },
    };
    harness::host(&call, inputs, 0.0, function)
}
