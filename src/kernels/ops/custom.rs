//! Twin of the ops that are defined outside the crate: what their definitions give, as calls, host
//! functions and dispatches. The CPU device runs the reference, in f64.

use crate::base::HostTensorView;
use crate::graph::{CustomCall, CustomInput, Op, SharedCustomOp};
use crate::kernels::harness::InputFill;
use crate::kernels::twin::{no_forward, short_loops};
use crate::kernels::{
    CallShape, Cost, Dims, Dispatch, Float, InputSpec, OpCall, Operand, Shader, Twin, Variant,
};

/// Twin of [`Op::Custom`].
pub static TWIN: Twin = Twin {
    name: "custom",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast: reference::<f32>,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: false,
    iterations: short_loops,
    inputs: input_spec,
    forward: no_forward,
    probes,
    catalog: Vec::new,
};

fn definition(op: &Op) -> &SharedCustomOp {
    match op {
        Op::Custom(custom) => custom,
        other => panic!("{other} is not a custom op"),
    }
}

fn described<'a>(call: &'a OpCall) -> CustomCall<'a> {
    CustomCall { inputs: &call.inputs, output: &call.outputs[0] }
}

/// Reference: the definition's own, whose arithmetic is f64.
fn reference<T: Float>(call: &OpCall, inputs: &[HostTensorView<'_, T>], outputs: &mut [&mut [T]]) {
    let wide = |view: &HostTensorView<'_, T>| match view {
        HostTensorView::Float(values) => values.iter().map(|value| value.as_f64()).collect(),
        HostTensorView::Int(_) => Vec::new(),
    };
    let floats: Vec<Vec<f64>> = inputs.iter().map(wide).collect();
    let views = inputs.iter().zip(&floats).map(|(view, floats)| match view {
        HostTensorView::Int(values) => HostTensorView::Int(values),
        HostTensorView::Float(_) => HostTensorView::<f64>::Float(floats),
    });
    let inputs: Vec<HostTensorView<f64>> = views.collect();
    let mut output = vec![f64::NAN; call.output_len(0)];
    definition(call.op).reference(&described(call), &inputs, &mut output);
    for (to, from) in outputs[0].iter_mut().zip(output) {
        *to = T::from_f64(from);
    }
}

fn dispatch(call: &OpCall) -> Vec<Dispatch> {
    let op = definition(call.op);
    let kernel = op.kernel(&described(call));
    let inputs = (0..call.inputs.len()).map(Operand::Input);
    vec![Dispatch {
        shader: Shader::foreign(first_word(&op.name()), "main", kernel.wgsl),
        operands: inputs.chain([Operand::Output(0)]).collect(),
        params: kernel.params,
        groups: kernel.workgroups,
    }]
}

fn variants(call: &OpCall) -> Vec<Variant> {
    vec![Variant::new(first_word(&definition(call.op).name()), dispatch(call))]
}

fn first_word(name: &str) -> String {
    name.split_whitespace().next().unwrap_or("custom").to_string()
}

fn cost(call: &OpCall) -> Cost {
    Cost { flops: definition(call.op).flops(&described(call)), bytes: Cost::moved(call) }
}

fn input_spec(op: &Op, _: &[Dims]) -> InputSpec {
    let fill = |input| match input {
        CustomInput::Float { low, high } => InputFill::Uniform(low, high),
        CustomInput::Ids { below } => InputFill::Ids(below.max(1)),
    };
    InputSpec { fills: definition(op).inputs().into_iter().map(fill).collect(), samples: None }
}

/// See [`Twin::probes`].
fn probes(op: &Op, _: &[Dims]) -> Vec<CallShape> {
    definition(op).probes().into_iter().map(|inputs| (op.clone(), inputs)).collect()
}
