//! Recurrent layers beside PyTorch 2: values in f64 of parameters that are a pattern.

use potluck_core::{HostTensor, TensorId};
use potluck_graph::builder::BuildResult;
use potluck_graph::{Builder, Init, LossTerm, Unary, differentiate};
use potluck_kernels::exec::Cpu;

use crate::pytorch_samples::{Expected, NMSE_MAX, SampleGraph, Tensor};

/// Three steps of two inputs.
const X: [f32; 6] = [-1.5, -0.25, 0.25, 1.5, -1.25, 0.0];

/// Graph of a layer, and the values of its parameters.
struct Layer {
    b: Builder,
    parameters: Vec<(String, Vec<f32>)>,
}

impl Layer {
    fn new() -> Self {
        Self { b: Builder::new(), parameters: Vec::new() }
    }

    fn add(&mut self, dims: &[usize], values: Vec<f32>) -> TensorId {
        let name = format!("in.{}", self.parameters.len());
        self.parameters.push((name.clone(), values));
        self.b.parameter(&name, dims, Init::Zeros)
    }

    /// Adds parameters of so many rows, the first of which is number `first`.
    fn cell(&mut self, rows: usize, first: usize) -> [TensorId; 4] {
        let mut number = first;
        [&[rows, 2][..], &[rows, 2], &[rows], &[rows]].map(|dims| {
            let count: usize = dims.iter().product();
            let value = |at: usize| ((at * 7 + 3 * number) % 11) as f32 / 8.0 - 0.625;
            let values = (0..count).map(value).collect();
            number += 1;
            self.add(dims, values)
        })
    }

    /// Compares the result with what PyTorch computes.
    fn compare(mut self, y: BuildResult, expected: &[f64]) {
        let y = y.unwrap();
        let dims = self.b.shape(y).dims().to_vec();
        let weights = self.add(&dims, vec![1.0; expected.len()]);
        let name = self.parameters.last().unwrap().0.clone();
        let batch = self.b.input("batch", &[1]);
        let product = self.b.mul(y, weights).unwrap();
        let sum = self.b.sum(product, &[0, 1, 2]).unwrap();
        let loss = self.b.add(batch, sum).unwrap();
        self.b.loss(&[LossTerm::sum("loss", loss)]).unwrap();
        let graph = differentiate(self.b.finish()).unwrap();
        let values = expected.iter().map(|value| *value as f32).collect();
        let expected = vec![Expected { sample: 0, name, tensor: Tensor { dims, values } }];
        let parameters = self.parameters.into_iter().collect();
        let inputs = vec![("batch".into(), HostTensor::Float(vec![0.0]))];
        let sample = SampleGraph { graph, parameters, inputs, expected };
        let mut device = Cpu::fast(sample.plan(false), 0);
        let (error, what) = &sample.worst(&mut device)[&0];
        assert!(*error <= NMSE_MAX, "NMSE {error:.1e}, {what}");
    }
}

#[test]
fn layers_both_directions_are_pytorchs() {
    let with_tanh = [
        0.90514825,
        -0.15499073,
        0.95339901,
        0.53819453,
        0.47815812,
        0.58581142,
        0.82739849,
        -0.70404326,
        0.92924667,
        -0.21881342,
        0.90514825,
        0.03123983,
    ];
    let with_relu = [
        1.5, 0.0, 1.39306641, 0.49511719, 0.46875, 0.6875, 1.10546875, 0.0, 1.71875, 0.0, 1.5,
        0.03125,
    ];
    for (function, expected) in [(Unary::Tanh, with_tanh), (Unary::Relu, with_relu)] {
        let mut layer = Layer::new();
        let x = layer.add(&[1, 3, 2], X.to_vec());
        let directions = [layer.cell(2, 0), layer.cell(2, 4)];
        let y = layer.b.bidirectional(x, |b, x, is_reversed| {
            b.rnn(x, directions[usize::from(is_reversed)], None, function)
        });
        layer.compare(y, &expected);
    }
}

#[test]
fn reset_gate_before_product_is_right() {
    let expected = [0.29764071, 0.06460326, -0.01844662, -0.29833294, 0.0439874, -0.15782686];
    let mut layer = Layer::new();
    let x = layer.add(&[1, 3, 2], X.to_vec());
    let parameters = layer.cell(6, 0);
    let state = layer.add(&[1, 2], vec![0.5, -0.25]);
    let y = layer.b.gru_reset_before(x, parameters, Some(state));
    layer.compare(y, &expected);
}
