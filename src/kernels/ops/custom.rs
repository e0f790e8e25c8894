//! Twin of the ops that are defined outside the crate: calls, host functions and dispatches made
//! from their definitions. The CPU device runs the reference, in f64.

use super::dispatch_parts::all_tensors;
use crate::call_shapes::calls;
use crate::harness::InputFill;
use crate::twin::{no_axes, no_forward, short_loops};
use crate::{
    CallShape, Caps, Cost, Dims, Dispatch, Float, InputSpec, OpCall, Shader, Twin, Variant,
};
use potluck_core::HostTensorView;
use potluck_graph::{CustomCall, CustomInput, Op, SharedCustomOp};

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
    independent_axes: no_axes,
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

/// Reference: calls the reference of the definition, whose arithmetic is f64.
fn reference<T: Float>(call: &OpCall, inputs: &[HostTensorView<'_, T>], outputs: &mut [&mut [T]]) {
    let mut widened: Vec<Vec<f64>> = Vec::new();
    for view in inputs {
        widened.push(match view {
            HostTensorView::Float(values) => values.iter().map(|value| value.as_f64()).collect(),
            HostTensorView::Int(_) => Vec::new(),
        });
    }
    let mut views: Vec<HostTensorView<f64>> = Vec::new();
    for (view, floats) in inputs.iter().zip(&widened) {
        views.push(match view {
            HostTensorView::Float(_) => HostTensorView::Float(floats),
            HostTensorView::Int(values) => HostTensorView::Int(values),
        });
    }
    let mut output = vec![f64::NAN; call.output_len(0)];
    definition(call.op).reference(&described(call), &views, &mut output);
    for (to, from) in outputs[0].iter_mut().zip(output) {
        *to = T::from_f64(from);
    }
}

fn dispatch(call: &OpCall, _: &Caps) -> Vec<Dispatch> {
    let op = definition(call.op);
    let kernel = op.kernel(&described(call));
    vec![Dispatch {
        shader: Shader::foreign(first_word(&op.name()), "main", kernel.wgsl),
        operands: all_tensors(call),
        params: kernel.params,
        groups: kernel.workgroups,
    }]
}

fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    vec![Variant::new(first_word(&definition(call.op).name()), dispatch(call, caps))]
}

fn first_word(name: &str) -> String {
    name.split_whitespace().next().unwrap_or("custom").to_string()
}

fn cost(call: &OpCall) -> Cost {
    Cost { flops: definition(call.op).flops(&described(call)), bytes: Cost::moved(call) }
}

fn input_spec(op: &Op, _: &[Dims]) -> InputSpec {
    let mut fills = Vec::new();
    for input in definition(op).inputs() {
        fills.push(match input {
            CustomInput::Float { low, high } => InputFill::Uniform(low, high),
            CustomInput::Ids { below } => InputFill::Ids(below.max(1)),
        });
    }
    InputSpec { fills, samples: None, unbatched: None }
}

/// See [`Twin::probes`].
fn probes(op: &Op, _: &[Dims]) -> Vec<CallShape> {
    calls(op, definition(op).probes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Elementwise;
    use crate::dispatch::grid;
    use crate::harness::generate;
    use crate::testing::{check, for_each_gpu, on_gpu};
    use potluck_core::{HostTensor, Shape};
    use potluck_graph::{Accumulation, CustomKernel, CustomOp, Precision};

    /// `ids (n), table (4, c) -> y (n)`: the sum of a row of the table, by a workgroup for each id.
    struct RowSum;

    const ROW_SUM: &str = "
        struct Params { count: u32, c: u32 }
        var<immediate> p: Params;
        @group(0) @binding(0) var<storage, read> ids: array<u32>;
        @group(0) @binding(1) var<storage, read> table: array<f32>;
        @group(0) @binding(2) var<storage, read_write> y: array<f32>;
        var<workgroup> parts: array<f32, 8>;

        @compute @workgroup_size(8)
        fn main(
            @builtin(workgroup_id) group: vec3u,
            @builtin(num_workgroups) groups: vec3u,
            @builtin(local_invocation_index) local: u32,
        ) {
            let row = group.x + group.y * groups.x;
            if row >= p.count { return; }
            for (var i = local; i < p.c; i += 8u) { parts[local] += table[ids[row] * p.c + i]; }
            workgroupBarrier();
            if local == 0u {
                var sum = 0.0;
                for (var i = 0u; i < 8u; i++) { sum += parts[i]; }
                y[row] = sum;
            }
        }
    ";

    impl CustomOp for RowSum {
        fn name(&self) -> String {
            "row_sum".into()
        }

        fn inputs(&self) -> Vec<CustomInput> {
            vec![CustomInput::Ids { below: 4 }, CustomInput::default()]
        }

        fn shape(&self, inputs: &[&Shape]) -> Result<Shape, String> {
            Ok(inputs[0].clone())
        }

        fn reference(&self, call: &CustomCall, x: &[HostTensorView<'_, f64>], y: &mut [f64]) {
            let c = call.inputs[1][1];
            for (id, y) in x[0].ints().iter().zip(y) {
                *y = x[1].floats()[*id as usize * c..][..c].iter().sum();
            }
        }

        fn kernel(&self, call: &CustomCall) -> CustomKernel {
            let (count, c) = (call.output_len(), call.inputs[1][1]);
            let params = vec![count as u32, c as u32];
            CustomKernel { wgsl: ROW_SUM.into(), params, workgroups: grid(count, 1) }
        }
    }

    /// A grid of workgroups and their memory, which is zeroed, in trusted modules too.
    #[test]
    fn any_dispatch_agrees_with_its_reference_everywhere() {
        let ids = (Shape::batched(&[3]), InputFill::Ids(4));
        let table = (Shape::fixed(&[4, 21]), InputFill::Normal);
        check(Op::custom(RowSum), &[ids, table], 5);
    }

    #[test]
    fn elementwise_ops_agree_everywhere() {
        let fill = InputFill::Uniform(0.5, 2.0);
        let x = (Shape::batched(&[1, 37]), fill);
        let log = Elementwise::new("log", &["x", "y"], "y * log(x)", |v| v[1] * v[0].ln());
        check(Op::custom(log.with_range(0.5, 2.0)), &[x.clone(), x], 5);
        let HostTensor::Float(drawn) = generate(fill, 1000, 0) else { panic!("not floats") };
        assert!(drawn.iter().all(|v| (0.5..2.0).contains(v)) && drawn.iter().any(|v| *v > 1.9));
    }

    /// Reads and writes far beyond the buffers, with checks switched off for the device: the checks
    /// of the op's own module keep them inside, and the values that are in bounds are right.
    #[test]
    fn what_lies_out_of_bounds_is_not_touched() {
        struct Far;
        impl CustomOp for Far {
            fn name(&self) -> String {
                "far".into()
            }
            fn shape(&self, inputs: &[&Shape]) -> Result<Shape, String> {
                Ok(inputs[0].clone())
            }
            fn reference(&self, _: &CustomCall, x: &[HostTensorView<'_, f64>], y: &mut [f64]) {
                y.copy_from_slice(x[0].floats());
            }
            fn kernel(&self, call: &CustomCall) -> CustomKernel {
                let wgsl = "
                    @group(0) @binding(0) var<storage, read> x: array<f32>;
                    @group(0) @binding(1) var<storage, read_write> y: array<f32>;
                    @compute @workgroup_size(1)
                    fn main(@builtin(global_invocation_id) id: vec3u) {
                        let far = id.x * 0x02000000u + 0x01000000u;
                        y[id.x] = select(x[id.x], 0.0, x[far] == 12345.0);
                    }
                ";
                let workgroups = [call.output_len() as u32, 1, 1];
                CustomKernel { wgsl: wgsl.into(), params: Vec::new(), workgroups }
            }
        }
        let x = (Shape::batched(&[64]), generate(InputFill::Normal, 64, 0));
        let op = Op::custom(Far);
        let call = OpCall {
            op: &op,
            inputs: vec![vec![64]],
            outputs: vec![vec![64]],
            accumulate: Accumulation::NONE,
            precision: Precision::F32,
            loss_scale: 1.0,
            random: crate::RandomContext {
                step_key: potluck_core::rng::Key::new(1),
                training: true,
            },
        };
        for_each_gpu(|gpu, pipelines| {
            let given = std::slice::from_ref(&x);
            let y = on_gpu(gpu, pipelines, &call, &dispatch(&call, &Caps::EVERY), given, f32::NAN);
            let wide: Vec<f64> = y[0].iter().map(|v| f64::from(*v)).collect();
            assert_eq!(HostTensor::Float(wide), x.1, "{}", gpu.name);
        });
    }
}
