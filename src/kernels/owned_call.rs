//! Op calls that own their op, with reproducible input values and the reference result.

use super::harness::{self, InputFill, generate};
use super::twin::Dims;
use super::{OpCall, RandomContext, Twin, twin};
use potluck_core::{DType, HostTensor, Shape};
use potluck_graph::{Accumulation, Op, Precision, shapes};

/// Op call that owns its op.
#[derive(Clone, Debug)]
pub struct OwnedCall {
    pub op: Op,
    pub inputs: Vec<Dims>,
    pub outputs: Vec<Dims>,
    pub accumulate: Accumulation,
    pub precision: Precision,
    /// Input whose random floats are multiplied by a factor.
    pub scaled: Option<(usize, f32)>,
    pub random: RandomContext,
}

impl OwnedCall {
    pub fn of(call: &OpCall) -> Self {
        Self {
            op: call.op.clone(),
            inputs: call.inputs.clone(),
            outputs: call.outputs.clone(),
            accumulate: call.accumulate,
            precision: call.precision,
            scaled: None,
            random: call.random,
        }
    }

    /// Returns the call of an op on inputs of these dimensions; `None` if the op has no kernel or
    /// the shape rule refuses them. The inputs must have the number and the ranks that the op
    /// takes, and the first dimension of batched ones must be a multiple of the samples.
    ///
    /// # Panics
    /// May panic if there are fewer inputs or dimensions, or no samples.
    pub fn new(op: Op, inputs: Vec<Dims>, random: RandomContext) -> Option<Self> {
        let spec = (twin(&op)?.inputs)(&op, &inputs);
        let mut typed: Vec<(Shape, DType)> = Vec::with_capacity(inputs.len());
        for (index, (dims, fill)) in inputs.iter().zip(&spec.fills).enumerate() {
            let shape = match (spec.samples, dims.split_first()) {
                (Some(samples), Some((first, rest))) if spec.unbatched != Some(index) => {
                    Shape::batched(&[&[first / samples], rest].concat())
                }
                _ => Shape::fixed(dims),
            };
            typed.push((shape, fill.dtype()));
        }
        let shapes = shapes::outputs(&op, &typed).ok()?;
        let samples = spec.samples.unwrap_or(1);
        let outputs = shapes.iter().map(|(shape, _)| shape.resolve(samples)).collect();
        let accumulate = op.changes_in_place();
        Some(Self {
            op,
            inputs,
            outputs,
            accumulate,
            precision: Precision::F32,
            scaled: None,
            random,
        })
    }

    pub fn call(&self) -> OpCall<'_> {
        OpCall {
            op: &self.op,
            inputs: self.inputs.clone(),
            outputs: self.outputs.clone(),
            accumulate: self.accumulate,
            precision: self.precision,
            loss_scale: 1.0,
            random: self.random,
        }
    }

    /// Returns the twin of the op.
    ///
    /// # Panics
    /// Panics if the op has no kernel.
    fn twin(&self) -> &'static Twin {
        twin(&self.op).unwrap_or_else(|| panic!("{} has no kernel", self.op))
    }

    /// Returns the distribution of the values of each input.
    ///
    /// # Panics
    /// Panics if the op has no kernel.
    pub fn fills(&self) -> Vec<InputFill> {
        (self.twin().inputs)(&self.op, &self.inputs).fills
    }

    /// Returns random inputs, the same every time. Inputs that are outputs of the forward op
    /// (statistics, logarithms of sums) are computed by it.
    ///
    /// # Panics
    /// Panics if the op has no kernel.
    pub fn values(&self) -> Vec<HostTensor<f64>> {
        let mut all = Vec::with_capacity(self.inputs.len());
        for (index, (dims, fill)) in self.inputs.iter().zip(self.fills()).enumerate() {
            let mut values = generate(fill, dims.iter().product(), index);
            if let Some((input, factor)) = self.scaled
                && input == index
            {
                values = values.map(|value| f64::from(value as f32 * factor));
            }
            all.push(values);
        }
        self.fill_in_forward(&mut all);
        all
    }

    /// Replaces the inputs that are outputs of the forward op by its results; returns their
    /// indices.
    ///
    /// # Panics
    /// Panics if the op has no kernel.
    pub fn fill_in_forward(&self, all: &mut [HostTensor<f64>]) -> Vec<usize> {
        let mut filled = Vec::new();
        let Some(forward) = (self.twin().forward)(&self.op) else { return filled };
        let inputs = forward.inputs.iter().map(|index| self.inputs[*index].clone()).collect();
        if let Some(call) = OwnedCall::new(forward.op, inputs, self.random) {
            let owned_call = Self { precision: self.precision, ..call };
            let given: Vec<HostTensor<f64>> =
                forward.inputs.iter().map(|at| all[*at].clone()).collect();
            let computed = owned_call.expected(&given);
            for (output, index) in forward.outputs {
                all[index] = HostTensor::Float(computed[output].clone());
                filled.push(index);
            }
        }
        filled
    }

    /// Returns the outputs of the f64 reference.
    ///
    /// # Panics
    /// Panics if the op has no kernel.
    pub fn expected(&self, inputs: &[HostTensor<f64>]) -> Vec<Vec<f64>> {
        let inputs: Vec<&HostTensor<f64>> = inputs.iter().collect();
        harness::host(&self.call(), &inputs, f64::NAN, self.twin().reference_f64)
    }
}
