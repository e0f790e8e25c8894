//! Elementwise custom ops, each given by a WGSL expression and the same function in f64.

use std::fmt::Write;
use std::sync::Arc;

use super::dispatch::grid;
use potluck_core::{HostTensorView, Shape};
use potluck_graph::builder::{BuildResult, Builder};
use potluck_graph::{CustomCall, CustomInput, CustomKernel, CustomNode, CustomOp};

/// Function of the values of the inputs at an element.
type Function = Arc<dyn Fn(&[f64]) -> f64 + Send + Sync>;

/// Custom op whose output is, element by element, a function of the inputs. All inputs and the
/// output have the same shape.
#[derive(Clone)]
pub struct Elementwise {
    name: String,
    inputs: Vec<String>,
    range: (f32, f32),
    expression: String,
    function: Function,
    /// Gradient by each input, in order: the expression and the function of the inputs and of the
    /// gradient by the output.
    gradients: Vec<(String, Function)>,
}

impl Elementwise {
    /// Creates the op of a WGSL expression of type `f32` in the names of the inputs, and of the
    /// equivalent function, which gets the values of the inputs in their order. Parameters that
    /// change the op are part of `name`, as in `snake 0.5`.
    pub fn new(
        name: impl Into<String>,
        inputs: &[&str],
        expression: impl Into<String>,
        function: impl Fn(&[f64]) -> f64 + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            inputs: inputs.iter().map(ToString::to_string).collect(),
            range: (-3.0, 3.0),
            expression: expression.into(),
            function: Arc::new(function),
            gradients: Vec::new(),
        }
    }

    /// Returns this op with the gradient by its next input: an expression and the equivalent
    /// function of the inputs followed by the gradient `dy` by the output.
    #[must_use]
    pub fn with_gradient(
        mut self,
        expression: impl Into<String>,
        function: impl Fn(&[f64]) -> f64 + Send + Sync + 'static,
    ) -> Self {
        self.gradients.push((expression.into(), Arc::new(function)));
        self
    }

    /// Returns this op with the range of the input values on which it is tested, instead of `-3 ..
    /// 3`: positive ones for a logarithm.
    #[must_use]
    pub fn with_range(mut self, low: f32, high: f32) -> Self {
        self.range = (low, high);
        self
    }

    /// Op of the gradient by an input; `None` without one.
    fn gradient_op(&self, input: usize) -> Option<Self> {
        let (expression, function) = self.gradients.get(input)?.clone();
        let (word, parameters) = self.name.split_once(' ').unwrap_or((&self.name, ""));
        let name = format!("{word}_grad_{} {parameters}", self.inputs[input]);
        let mut inputs = self.inputs.clone();
        inputs.push("dy".into());
        Some(Self {
            name: name.trim_end().to_string(),
            inputs,
            range: self.range,
            expression,
            function,
            gradients: Vec::new(),
        })
    }
}

impl CustomOp for Elementwise {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn inputs(&self) -> Vec<CustomInput> {
        let (low, high) = self.range;
        vec![CustomInput::Float { low, high }; self.inputs.len()]
    }

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape, String> {
        if inputs.iter().all(|shape| *shape == inputs[0]) {
            Ok(inputs[0].clone())
        } else {
            Err("all shapes must be equal".into())
        }
    }

    fn gradient(&self, b: &mut Builder, node: &CustomNode, input: usize) -> BuildResult {
        match self.gradient_op(input) {
            Some(op) => b.custom(op, &[node.inputs, &[node.dy]].concat()),
            None => Err(node.without_gradient(b, self.name(), input)),
        }
    }

    fn reference(&self, _: &CustomCall, inputs: &[HostTensorView<'_, f64>], output: &mut [f64]) {
        let inputs: Vec<&[f64]> = inputs.iter().map(|input| input.floats()).collect();
        let mut values = vec![0.0; inputs.len()];
        for (index, y) in output.iter_mut().enumerate() {
            for (value, input) in values.iter_mut().zip(&inputs) {
                *value = input[index];
            }
            *y = (self.function)(&values);
        }
    }

    fn kernel(&self, call: &CustomCall) -> CustomKernel {
        let mut bindings = String::new();
        let mut arguments = Vec::new();
        let mut values = Vec::new();
        for (index, name) in self.inputs.iter().enumerate() {
            // Writing to a string cannot fail.
            let _ = writeln!(
                bindings,
                "@group(0) @binding({index}) var<storage, read> input_{index}: array<f32>;"
            );
            arguments.push(format!("{name}: f32"));
            values.push(format!("input_{index}[i]"));
        }
        let last = self.inputs.len();
        let arguments = arguments.join(", ");
        let values = values.join(", ");
        let wgsl = format!(
            "struct Params {{ count: u32 }}
var<immediate> params: Params;
{bindings}@group(0) @binding({last}) var<storage, read_write> result: array<f32>;

fn value_of({arguments}) -> f32 {{
    return {};
}}

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {{
    let i = id.x + id.y * (groups.x * 64u);
    if i < params.count {{
        result[i] = value_of({values});
    }}
}}
",
            self.expression
        );
        let count = call.output_len();
        CustomKernel { wgsl, params: vec![count as u32], workgroups: grid(count, 64) }
    }
}
