//! Activations as words of two bfloat16 values, and back. Twin of `shaders/bf16.wgsl`, which has
//! the formulas.

use rayon::prelude::*;

use crate::bf16_words::{narrow, to_nearest, widen};
use crate::call_shapes::{B, C, T, calls};
use crate::cpu_kernel::TASK;
use crate::dispatch::grid;
use crate::harness::InputFill;
use crate::twin::{InputSpec, leading_axis, no_forward, short_loops};
use crate::{CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant};
use potluck_core::HostTensorView;
use potluck_graph::Op;

/// Twin of [`Op::PackBf16`] and [`Op::UnpackBf16`].
pub static TWIN: Twin = Twin {
    name: "bf16",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: false,
    iterations: short_loops,
    inputs,
    forward: no_forward,
    independent_axes: leading_axis,
    probes,
    catalog,
};

/// Samples of the probes whose words have zeros in their high halves: in others, the rounding of
/// the low half of a word disappears among the digits of the float that has its bits.
const LOW_HALF_SAMPLES: usize = 3;

fn packs(call: &OpCall) -> bool {
    matches!(call.op, Op::PackBf16)
}

/// Number of words of a call.
fn words(call: &OpCall) -> usize {
    if packs(call) { call.output_len(0) } else { call.input_len(0) }
}

/// Reference: `x -> words`, or `words -> x`. Words are the bits of floats.
fn reference<T: Float>(call: &OpCall, inputs: &[HostTensorView<'_, T>], outputs: &mut [&mut [T]]) {
    let from_bits = |bits: u32| T::from_f64(f64::from(f32::from_bits(bits)));
    let given: Vec<f32> = inputs[0].floats().iter().map(|value| value.as_f64() as f32).collect();
    if packs(call) {
        for (word, bits) in outputs[0].iter_mut().zip(to_nearest(&given)) {
            *word = from_bits(bits);
        }
        return;
    }
    for (pair, word) in outputs[0].chunks_exact_mut(2).zip(given) {
        let word = word.to_bits();
        pair[0] = from_bits(word << 16);
        pair[1] = from_bits(word & 0xffff_0000);
    }
}

/// CPU kernel: parallel over tasks of words.
fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    const { assert!(TASK.is_multiple_of(2)) };
    let given = inputs[0].floats();
    if packs(call) {
        let words: &mut [u32] = bytemuck::cast_slice_mut(outputs[0]);
        let tasks = (given.par_chunks(TASK), words.par_chunks_mut(TASK / 2)).into_par_iter();
        tasks.for_each(|(values, words)| narrow(values, words));
    } else {
        let words: &[u32] = bytemuck::cast_slice(given);
        let tasks = (words.par_chunks(TASK / 2), outputs[0].par_chunks_mut(TASK)).into_par_iter();
        tasks.for_each(|(words, values)| widen(words, values));
    }
}

/// Static choice: vectors of 4 words if their number is a multiple of 4.
fn dispatch(call: &OpCall, _: &Caps) -> Vec<Dispatch> {
    vec![one(call, words(call).is_multiple_of(4))]
}

fn variants(call: &OpCall, _: &Caps) -> Vec<Variant> {
    let [single, vectors] = if packs(call) { ["pack", "pack4"] } else { ["unpack", "unpack4"] };
    let mut variants = vec![Variant::new(single, vec![one(call, false)])];
    if words(call).is_multiple_of(4) {
        variants.push(Variant::new(vectors, vec![one(call, true)]));
    }
    variants
}

/// Dispatch of one invocation per 8 words, or per 4 vectors of 4.
fn one(call: &OpCall, has_vectors: bool) -> Dispatch {
    let entry = match (packs(call), has_vectors) {
        (true, false) => "pack",
        (true, true) => "pack4",
        (false, false) => "unpack",
        (false, true) => "unpack4",
    };
    let count = words(call);
    Dispatch {
        shader: Shader::new("bf16", entry),
        operands: vec![Operand::Input(0), Operand::Output(0)],
        params: vec![count as u32],
        groups: grid(count, if has_vectors { 1024 } else { 512 }),
    }
}

/// Cost: what is moved.
fn cost(call: &OpCall) -> Cost {
    Cost::elementwise(call, 0.0)
}

/// See [`Twin::inputs`].
fn inputs(op: &Op, inputs: &[Dims]) -> InputSpec {
    let samples = inputs[0][0];
    let fill = match op {
        Op::PackBf16 if samples == LOW_HALF_SAMPLES => InputFill::EvenPlaces,
        Op::PackBf16 => InputFill::Normal,
        _ => InputFill::Bf16Words,
    };
    InputSpec { samples: Some(samples), ..InputSpec::normal(inputs).with(0, fill) }
}

/// See [`Twin::probes`].
fn probes(op: &Op, _: &[Dims]) -> Vec<CallShape> {
    let mut probes = Vec::new();
    for [samples, words] in [[LOW_HALF_SAMPLES, 7], [LOW_HALF_SAMPLES, 260], [5, 259], [5, 260]] {
        probes.extend(match op {
            Op::PackBf16 => calls(op, [vec![vec![samples, 2 * words]]]),
            _ => calls(&Op::UnpackBf16 { dims: vec![1, 2 * words] }, [vec![vec![samples, words]]]),
        });
    }
    probes
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    vec![
        (Op::PackBf16, vec![vec![B, T, C]]),
        (Op::UnpackBf16 { dims: vec![1, T, C] }, vec![vec![B, T * C / 2]]),
    ]
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::testing::{check, for_each_gpu, run_dispatches};
    use crate::{OwnedCall, RandomContext};
    use potluck_core::Shape;
    use potluck_core::rng::Key;

    #[test]
    fn lengths_of_all_kinds_agree() {
        for (words, rows) in [(1, 1), (7, 3), (8, 3), (1000, 2), (TASK + 12, 1)] {
            let x = Shape::batched(&[1, 2 * words]);
            check(Op::PackBf16, &[(x, InputFill::Normal)], rows);
            let packed = Shape::batched(&[1, words]);
            let unpack = Op::UnpackBf16 { dims: vec![1, 2 * words] };
            check(unpack, &[(packed, InputFill::Bf16Words)], rows);
        }
    }

    /// Every bfloat16 value, and the places around it where rounding turns: all implementations
    /// have the bits of the `half` crate, and the way there and back is that of one rounding.
    #[test]
    fn bits_are_those_of_ieee_754_on_every_device() {
        let mut given = Vec::new();
        for upper in 0..=u16::MAX {
            for lower in [0x7fff, 0x8000, 0x8001, 0xffff] {
                given.push((u32::from(upper) << 16) | lower);
            }
        }
        let nearest = |bits: u32| bf16::from_f32(f32::from_bits(bits));
        let rounded: Vec<u32> =
            given.iter().map(|bits| u32::from(nearest(*bits).to_bits()) << 16).collect();
        let words: Vec<u32> = rounded.chunks(2).map(|pair| (pair[0] >> 16) | pair[1]).collect();
        let (pack, unpack) = (Op::PackBf16, Op::UnpackBf16 { dims: vec![1, given.len()] });
        for (op, from, to) in [(pack, &given, &words), (unpack, &words, &rounded)] {
            let random = RandomContext { step_key: Key::new(0), training: true };
            let call = OwnedCall::new(op.clone(), vec![vec![1, from.len()]], random).unwrap();
            let call = call.call();
            let mut outputs = vec![0.0f32; to.len()];
            let floats = bytemuck::cast_slice(from);
            fast(&call, &[HostTensorView::Float(floats)], &mut [&mut outputs]);
            assert!(bytemuck::cast_slice::<f32, u32>(&outputs) == *to, "{op} on the host");
            for_each_gpu(|gpu, pipelines| {
                let inputs = [bytemuck::cast_slice(from)];
                let start = [vec![0.0; to.len()]];
                for Variant { name, dispatches } in variants(&call, &Caps::of(gpu)) {
                    let got = run_dispatches(gpu, pipelines, &name, &dispatches, &inputs, &start);
                    let got: Vec<u32> = got[0].iter().map(|word| word.to_bits()).collect();
                    assert!(got == *to, "{name} on {}", gpu.name);
                }
            });
        }
    }
}
