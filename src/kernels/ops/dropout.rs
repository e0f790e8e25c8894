//! Dropout keyed by sample; the op is its own gradient. Twin of `shaders/dropout.wgsl`, which has
//! the formula.

use rayon::prelude::*;

use crate::call_shapes::{B, C, T, calls};
use crate::cpu_kernel::COSTLY_TASK;
use crate::dispatch::grid;
use crate::harness::InputFill;
use crate::simd::vectorized;
use crate::twin::{InputSpec, leading_axis, no_forward, short_loops};
use crate::{CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant};
use potluck_core::rng::{Key, drop_threshold, kept_factor, threefry2x32};
use potluck_core::{HostTensorView, Site};
use potluck_graph::{ColumnRange, Op};

/// Twin of [`Op::Dropout`].
pub static TWIN: Twin = Twin {
    name: "dropout",
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

struct Mask {
    key: Key,
    /// An element is kept if its random word is at least this value; 0 keeps all.
    threshold: u32,
    /// Factor of the kept elements.
    factor: f64,
    /// Elements per sample.
    elements: usize,
    /// Columns of a row of this call; a sample is one row if the call has all columns.
    width: usize,
    /// Range of these columns in the whole graph's row, by which elements are numbered.
    columns: ColumnRange,
}

impl Mask {
    fn new(call: &OpCall) -> Self {
        let Op::Dropout { p, site, columns } = call.op else {
            panic!("{} is not a dropout", call.op)
        };
        let elements = call.input_len(0) / call.input_len(1).max(1);
        let (width, columns) = match *columns {
            Some(columns) => (call.rows_and_last(0).1, columns),
            None => (elements, ColumnRange { first: 0, all: elements }),
        };
        let training = call.random.training;
        Self {
            key: call.random.step_key.site(*site),
            threshold: if training { drop_threshold(*p) } else { 0 },
            factor: if training { kept_factor(*p) } else { 1.0 },
            elements,
            width,
            columns,
        }
    }

    fn keeps(&self, sample: u32, element: usize) -> bool {
        self.threshold == 0 || self.key.words([sample, self.place(element)])[0] >= self.threshold
    }

    /// Number of an element of a sample in the whole graph's rows.
    fn place(&self, element: usize) -> u32 {
        let row = element / self.width;
        let column = element % self.width;
        (row * self.columns.all + self.columns.first + column) as u32
    }

    /// Computes `y` of the elements of a sample from `first` on.
    fn apply(&self, sample: u32, first: usize, mut x: &[f32], mut y: &mut [f32]) {
        let factor = self.factor as f32;
        if self.threshold == 0 {
            for (y, x) in y.iter_mut().zip(x) {
                *y = factor * x;
            }
            return;
        }
        let mut element = first;
        while !x.is_empty() {
            // Elements up to the end of a row are adjacent in the whole graph's row.
            let length = (self.width - element % self.width).min(x.len());
            let (own, rest) = y.split_at_mut(length);
            let counter = [sample, self.place(element)];
            drop_run(self.key, counter, (self.threshold, factor), &x[..length], own);
            x = &x[length..];
            y = rest;
            element += length;
        }
    }
}

vectorized! {
    /// Computes `y` of adjacent elements; `counter` belongs to the first.
    fn drop_run<S>(key: Key, counter: [u32; 2], kept: (u32, f32), x: &[f32], y: &mut [f32]) {
        let ([sample, first], (threshold, factor)) = (counter, kept);
        for (at, (y, x)) in y.iter_mut().zip(x).enumerate() {
            let word = threefry2x32(key.0, [sample, first.wrapping_add(at as u32)])[0];
            *y = if word >= threshold { factor * x } else { 0.0 };
        }
    }
}

/// Reference: `x (b, ..), samples (b) -> y (b, ..)`.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let x = inputs[0].floats();
    let samples = inputs[1].ints();
    let mask = Mask::new(call);
    for (i, (y, x)) in outputs[0].iter_mut().zip(x).enumerate() {
        let keep = mask.keeps(samples[i / mask.elements], i % mask.elements);
        *y = if keep { T::from_f64(mask.factor) * *x } else { T::zero() };
    }
}

/// CPU kernel: parallel over runs of elements within a sample.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let mask = Mask::new(call);
    let elements = mask.elements.max(1);
    let x = inputs[0].floats().par_chunks(elements);
    let samples = (x, inputs[1].ints(), outputs[0].par_chunks_mut(elements));
    samples.into_par_iter().for_each(|(x, &sample, y)| {
        let runs = (x.par_chunks(COSTLY_TASK), y.par_chunks_mut(COSTLY_TASK)).into_par_iter();
        runs.enumerate().for_each(|(run, (x, y))| mask.apply(sample, run * COSTLY_TASK, x, y));
    });
}

/// Static choice: vectors of 4 if the number of elements is a multiple of 4.
pub fn dispatch(call: &OpCall, _: &Caps) -> Vec<Dispatch> {
    let whole = call.output_len(0).is_multiple_of(4);
    vec![one(call, if whole { "dropout4" } else { "dropout" })]
}

/// Returns all GPU kernel variants of the call.
pub fn variants(call: &OpCall, _: &Caps) -> Vec<Variant> {
    let mut variants = vec![Variant::new("dropout", vec![one(call, "dropout")])];
    if call.output_len(0).is_multiple_of(4) {
        variants.push(Variant::new("dropout4", vec![one(call, "dropout4")]));
    }
    variants
}

/// Dispatch of an entry point: one invocation per 8 elements, or per 4 vectors of 4.
fn one(call: &OpCall, entry: &'static str) -> Dispatch {
    let mask = Mask::new(call);
    let count = call.output_len(0);
    let [key0, key1] = mask.key.0;
    let factor = (mask.factor as f32).to_bits();
    Dispatch {
        shader: Shader::new("dropout", entry),
        operands: vec![Operand::Input(0), Operand::Input(1), Operand::Output(0)],
        params: vec![
            count as u32,
            mask.elements as u32,
            mask.threshold,
            factor,
            key0,
            key1,
            mask.width as u32,
            mask.columns.first as u32,
            mask.columns.all as u32,
        ],
        groups: grid(count, if entry == "dropout4" { 1024 } else { 512 }),
    }
}

/// Returns the cost: about 110 integer operations per element in training, one FLOP otherwise.
pub fn cost(call: &OpCall) -> Cost {
    Cost::elementwise(call, if call.random.training { 110.0 } else { 1.0 })
}

/// See [`Twin::inputs`].
fn inputs(_: &Op, inputs: &[Dims]) -> InputSpec {
    let samples = Some(inputs[1][0]);
    InputSpec { samples, ..InputSpec::normal(inputs).with(1, InputFill::Samples) }
}

/// See [`Twin::probes`].
fn probes(op: &Op, _: &[Dims]) -> Vec<CallShape> {
    let sizes = [vec![3, 7, 11], vec![5, 259], vec![3, 7, 12], vec![5, 260]];
    calls(op, sizes.map(|x| vec![x.clone(), vec![x[0]]]))
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    vec![(Op::Dropout { p: 0.1, site: Site(1), columns: None }, vec![vec![B, T, C], vec![B]])]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{InputFill, generate};
    use crate::testing::gradient::check_gradient;
    use crate::testing::{self, check, check_with, for_each_gpu};
    use crate::{RandomContext, source};
    use potluck_core::{HostTensor, Shape};
    use potluck_graph::{Accumulation, Precision};

    const SITE: Site = Site(9);

    #[test]
    fn dropped_elements_agree_everywhere() {
        for (dims, p, rows) in
            [(&[1, 37][..], 0.1, 5), (&[3, 5, 7], 0.5, 2), (&[1], 0.9, 1), (&[1, 777], 0.3, 4)]
        {
            let inputs = [
                (Shape::batched(dims), InputFill::Normal),
                (Shape::batched(&[1]), InputFill::Samples),
            ];
            check(Op::Dropout { p, site: SITE, columns: None }, &inputs, rows);
        }
    }

    /// Compares the random words themselves, so that a difference in any bit of an implementation
    /// is found.
    #[test]
    fn the_shader_draws_the_same_words() {
        const MAIN: &str = "
            struct Params { count: u32, key0: u32, key1: u32 }
            var<immediate> p: Params;
            @group(0) @binding(0) var<storage, read> counters: array<u32>;
            @group(0) @binding(1) var<storage, read_write> words: array<u32>;
            @compute @workgroup_size(64)
            fn draw(@builtin(global_invocation_id) id: vec3u) {
                if (id.x >= p.count) { return; }
                let counter = vec2u(counters[2u * id.x], counters[2u * id.x + 1u]);
                let drawn = threefry2x32(vec2u(p.key0, p.key1), counter);
                words[2u * id.x] = drawn.x;
                words[2u * id.x + 1u] = drawn.y;
            }";
        let (_, snippet) = source::LIBRARY.iter().find(|(name, _)| *name == "rng").unwrap();
        let count = 1000;
        let key = Key::new(0xFEDC_BA98_7654_3210).step(3).site(SITE);
        let counters: Vec<[u32; 2]> =
            (0..count).map(|i: u32| [i.wrapping_mul(0x9E37_79B9), i]).collect();
        let expected: Vec<u32> = counters.iter().flat_map(|c| key.words(*c)).collect();
        let dispatch = Dispatch {
            shader: Shader::emitted("draw", "draw", format!("{snippet}{MAIN}")),
            operands: vec![Operand::Input(0), Operand::Output(0)],
            params: vec![count, key.0[0], key.0[1]],
            groups: grid(count as usize, 64),
        };
        for_each_gpu(|gpu, pipelines| {
            let inputs = [bytemuck::cast_slice(&counters)];
            let start = [vec![0.0; 2 * count as usize]];
            let dispatches = std::slice::from_ref(&dispatch);
            let got = testing::run_dispatches(gpu, pipelines, "draw", dispatches, &inputs, &start);
            let got: Vec<u32> = got[0].iter().map(|word| word.to_bits()).collect();
            assert_eq!(got, expected, "{}", gpu.name);
        });
    }

    fn call(op: &Op, rows: usize, elements: usize, training: bool) -> OpCall<'_> {
        OpCall {
            op,
            inputs: vec![vec![rows, elements], vec![rows]],
            outputs: vec![vec![rows, elements]],
            accumulate: Accumulation::NONE,
            precision: Precision::F32,
            loss_scale: 1.0,
            random: RandomContext { step_key: Key::new(11).step(4), training },
        }
    }

    /// Asserts that every implementation computes `expected` from `x`, bit for bit.
    fn assert_bits(call: &OpCall, x: &[f32], samples: &[u32], expected: &[f32]) {
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let args = [HostTensorView::Float(x), HostTensorView::Int(samples)];
        for host in [reference::<f32>, fast] {
            let mut y = vec![f32::NAN; x.len()];
            host(call, &args, &mut [&mut y]);
            assert_eq!(bits(&y), bits(expected));
        }
        for_each_gpu(|gpu, pipelines| {
            let inputs = [bytemuck::cast_slice(x), bytemuck::cast_slice(samples)];
            let start = [vec![f32::NAN; x.len()]];
            for Variant { name, dispatches } in variants(call, &Caps::of(gpu).with_all_that_run()) {
                let y =
                    testing::run_dispatches(gpu, pipelines, &name, &dispatches, &inputs, &start);
                assert_eq!(bits(&y[0]), bits(expected), "{name} on {}", gpu.name);
            }
        });
    }

    #[test]
    fn masks_are_those_of_the_sample_to_the_bit() {
        let (op, samples) = (Op::Dropout { p: 0.25, site: SITE, columns: None }, [7, 0, u32::MAX]);
        let elements = COSTLY_TASK + 12;
        let call = call(&op, samples.len(), elements, true);
        let key = Key::new(11).step(4).site(SITE);
        let expected: Vec<f32> = samples
            .iter()
            .flat_map(|&sample| (0..elements as u32).map(move |e| key.words([sample, e])[0]))
            .map(|word| if word >= 1 << 30 { 1.0 / 0.75 } else { 0.0 })
            .collect();
        let kept = expected.iter().filter(|y| **y > 0.0).count() as f64 / expected.len() as f64;
        assert!((kept - 0.75).abs() < 0.02, "{kept}");
        assert_bits(&call, &vec![1.0; expected.len()], &samples, &expected);
    }

    /// Columns from the middle of rows of 11 and of 24.
    #[test]
    fn a_shard_drops_what_the_whole_drops_in_its_columns() {
        for (all, first, width) in [(11, 3, 5), (24, 8, 12), (24, 0, 24), (1, 0, 1)] {
            let (rows, per_sample) = (3, 7);
            let whole = Op::Dropout { p: 0.4, site: SITE, columns: None };
            let samples = (Shape::batched(&[1]), generate(InputFill::Samples, rows, 0));
            let ones = |width: usize| {
                let shape = Shape::batched(&[1, per_sample, width]);
                let values = HostTensor::Float(vec![1.0; shape.elements(rows)]);
                (shape, values)
            };
            let expected = testing::reference(&whole, &[ones(all), samples.clone()], rows);
            let expected: Vec<f64> = expected[0]
                .chunks_exact(all)
                .flat_map(|row| row[first..first + width].to_vec())
                .collect();
            let part =
                Op::Dropout { p: 0.4, site: SITE, columns: Some(ColumnRange { first, all }) };
            let inputs = [ones(width), samples];
            assert_eq!(testing::reference(&part, &inputs, rows)[0], expected);
            check_with(part, &inputs, rows);
        }
    }

    #[test]
    fn everything_is_dropped_with_probability_one() {
        let op = Op::Dropout { p: 1.0, site: SITE, columns: None };
        assert_bits(&call(&op, 2, 70, true), &[3.0; 140], &[3, 4], &[0.0; 140]);
    }

    #[test]
    fn nothing_is_dropped_in_evaluation() {
        let op = Op::Dropout { p: 0.5, site: SITE, columns: None };
        let HostTensor::Float(x) = generate(InputFill::Normal, 2 * 70, 0) else { panic!("floats") };
        let x: Vec<f32> = x.iter().map(|&x| x as f32).collect();
        assert_bits(&call(&op, 2, 70, false), &x, &[3, 4], &x);
    }

    #[test]
    fn it_is_its_own_gradient() {
        let op = Op::Dropout { p: 0.4, site: SITE, columns: None };
        let shape = Shape::batched(&[1, 9]);
        let samples = (Shape::batched(&[1]), generate(InputFill::Samples, 3, 0));
        let x = (shape.clone(), generate(InputFill::Normal, 27, 0));
        let dy = (shape, generate(InputFill::Normal, 27, 1));
        let dx = testing::reference(&op, &[dy.clone(), samples.clone()], 3);
        let HostTensor::Float(weights) = dy.1 else { panic!("floats") };
        check_gradient(&op, &[x, samples], 3, 0, &[weights], &dx[0]);
    }
}
