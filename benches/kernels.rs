//! Benchmark of every variant of the memory-bound kernels, at the shapes of the small GPT step
//! (768 tokens, width 128, vocabulary 65) and of GPT-2 124M (1024 tokens, width 768, vocabulary
//! 50257), on every adapter found or named: milliseconds, and GB/s in relation to those of a copy
//! in the same run.
//!
//!     cargo bench --bench kernels -- [ADAPTER ..] [--only TEXT] [--rounds N]
//!
//! Variants of a case are timed in turns, and the table has medians. A star marks the static
//! choice, the variant that runs without autotuning.

use std::time::Instant;

use potluck_core::rng::Key;
use potluck_core::{DType, HostTensor, Shape, Site, TensorSlice};
use potluck_graph::{
    Accumulation, Binary, EpilogueOp, LossClasses, MomentRounding, NormBackward, Op, Precision,
    Unary, Update, UpdateRange, shapes,
};
use potluck_kernels::device::{DeviceError, Gpu, ShaderChecks, list_adapters};
use potluck_kernels::harness::{self, InputFill};
use potluck_kernels::ops::norm::NormSlots;
use potluck_kernels::ops::{hash, norm};
use potluck_kernels::{
    BoundDispatch, Caps, OpCall, Pipelines, RandomContext, Variant, twin, update_twin,
};

/// Target duration of one timed submission, in seconds.
const SUBMISSION: f64 = 0.02;
/// Largest number of repetitions in one submission.
const REPEATS_MAX: usize = 100;

/// Benchmark case: kernel variants that compute one result from the same buffers.
struct Case {
    name: String,
    ways: Vec<Variant>,
    /// Index of the static choice among the variants.
    chosen: usize,
    /// Distribution and length of each input.
    inputs: Vec<(InputFill, usize)>,
    /// Length of each output in 32-bit words.
    outputs: Vec<usize>,
    /// Bytes that every variant has to move.
    bytes: f64,
}

/// Sizes of a model's training step.
struct Sizes {
    name: &'static str,
    tokens: usize,
    width: usize,
    /// Rows of logits; fewer than tokens where all would not fit a portable binding.
    logits: usize,
    vocabulary: usize,
    /// Elements of one bucket.
    bucket: usize,
}

const SMALL: Sizes = Sizes {
    name: "small",
    tokens: 768,
    width: 128,
    logits: 768,
    vocabulary: 65,
    bucket: 12 * 128 * 128,
};
const GPT2: Sizes = Sizes {
    name: "gpt2",
    tokens: 1024,
    width: 768,
    logits: 128,
    vocabulary: 50257,
    bucket: 12 * 768 * 768,
};

struct Arguments {
    adapters: Vec<usize>,
    only: String,
    rounds: usize,
}

fn main() -> Result<(), DeviceError> {
    let Arguments { adapters, only, rounds } = arguments();
    let found = list_adapters();
    for index in adapters {
        let Some(adapter) = found.get(index) else {
            println!("there is no adapter {index}");
            continue;
        };
        let gpu = match Gpu::open(adapter, ShaderChecks::Disabled, Precision::F32) {
            Ok(gpu) => gpu,
            Err(error) => {
                println!("{error}");
                continue;
            }
        };
        let mut bench = Bench { gpu, pipelines: Pipelines::default(), rounds };
        let copied = bench.copy()?;
        println!("\n{} ({}): a copy moves {copied:.2} GB/s", bench.gpu.name, bench.gpu.api);
        println!("{:<34}{:<22}{:>10}{:>9}{:>9}", "", "", "ms", "GB/s", "of copy");
        for case in
            cases(&Caps::of(&bench.gpu)).into_iter().filter(|case| case.name.contains(&only))
        {
            bench.report(&case, copied)?;
        }
    }
    Ok(())
}

fn arguments() -> Arguments {
    // Cargo passes --bench to every benchmark.
    let mut words = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let mut arguments = Arguments { adapters: Vec::new(), only: String::new(), rounds: 7 };
    while let Some(word) = words.next() {
        match word.as_str() {
            "--only" => arguments.only = words.next().unwrap_or_default(),
            "--rounds" => {
                arguments.rounds = words.next().and_then(|n| n.parse().ok()).unwrap_or(7).max(1);
            }
            index => arguments.adapters.extend(index.parse::<usize>()),
        }
    }
    if arguments.adapters.is_empty() {
        let adapters = list_adapters();
        let shown = (0..adapters.len()).filter(|&index| adapters[index].merged_into.is_none());
        arguments.adapters = shown.collect();
    }
    arguments
}

/// Returns the case of an op on inputs of these shapes, of `rows` rows where they are batched;
/// integers are below `bound`. It has the variants of a device with these capabilities.
fn op_case(
    name: String,
    op: &Op,
    rows: usize,
    inputs: &[(Shape, DType)],
    bound: usize,
    caps: &Caps,
) -> Case {
    let outputs = shapes::outputs(op, inputs).unwrap_or_else(|error| panic!("{name}: {error}"));
    let dims = |typed: &[(Shape, DType)]| typed.iter().map(|(s, _)| s.resolve(rows)).collect();
    let call = OpCall {
        op,
        inputs: dims(inputs),
        outputs: dims(&outputs),
        accumulate: Accumulation::NONE,
        precision: Precision::F32,
        loss_scale: 1.0,
        random: RandomContext { step_key: Key::new(3), training: true },
    };
    let twin = twin(op).unwrap_or_else(|| panic!("{name}: {op} has a kernel"));
    let mut ways = (twin.variants)(&call, caps);
    let choice = (twin.dispatch)(&call, caps);
    let chosen = ways.iter().position(|way| way.dispatches == choice).unwrap_or_else(|| {
        ways.push(Variant::new("the static choice", choice));
        ways.len() - 1
    });
    let contents = |(shape, dtype): &(Shape, DType)| match dtype {
        DType::F32 => (InputFill::Normal, shape.elements(rows)),
        DType::U32 => (InputFill::Ids(bound as u32), shape.elements(rows)),
    };
    Case {
        ways,
        chosen,
        inputs: inputs.iter().map(contents).collect(),
        outputs: (0..call.outputs.len()).map(|i| call.output_len(i)).collect(),
        bytes: (twin.cost)(&call).bytes,
        name,
    }
}

fn cases(caps: &Caps) -> Vec<Case> {
    let all = |sizes| {
        let of_pictures = picture_cases(sizes, caps);
        [op_cases(sizes, caps), of_pictures, bucket_cases(sizes, caps)].into_iter().flatten()
    };
    [&SMALL, &GPT2].into_iter().flat_map(all).collect()
}

fn op_cases(sizes: &Sizes, caps: &Caps) -> Vec<Case> {
    let Sizes { tokens, width: c, logits, vocabulary: v, .. } = *sizes;
    let rows = |dims: &[usize]| (Shape::batched(&[&[1], dims].concat()), DType::F32);
    let fixed = |dims: &[usize]| (Shape::fixed(dims), DType::F32);
    let ids = || (Shape::batched(&[1]), DType::U32);
    let (x, stats, wide, table) = (|| rows(&[c]), || rows(&[2]), || rows(&[4 * c]), fixed(&[v, c]));
    let dropout = Op::Dropout { p: 0.1, site: Site(1), columns: None };
    let chain = Op::Fused {
        root: Box::new(Op::Unary(Unary::Gelu)),
        epilogue: vec![EpilogueOp::Binary(Binary::Add)],
    };
    let with_sum = Op::Fused {
        root: Box::new(Op::LayerNormGrad),
        epilogue: vec![EpilogueOp::Binary(Binary::Add)],
    };
    let backward = Op::NormBackward(NormBackward { centered: true, bias: true, adds: true });
    let by_width = [
        (Op::LayerNorm { eps: 1e-5 }, "layer_norm", vec![x(), fixed(&[c])]),
        (Op::LayerNormGrad, "layer_norm_grad", vec![x(), fixed(&[c]), stats(), x()]),
        (with_sum, "layer_norm_grad + sum", vec![x(), fixed(&[c]), stats(), x(), x()]),
        (Op::LayerNormWeightGrad, "layer_norm_weight_grad", vec![x(), stats(), x()]),
        (Op::LayerNormAffineGrad, "layer_norm_affine_grad", vec![x(), stats(), x()]),
        (backward, "norm_backward", vec![x(), fixed(&[c]), stats(), x(), x()]),
        (Op::LinearWeightGrad, "linear_weight_grad", vec![wide(), x()]),
        (Op::RmsNorm { eps: 1e-5 }, "rms_norm", vec![x(), fixed(&[c])]),
        (Op::RmsNormGrad, "rms_norm_grad", vec![x(), fixed(&[c]), stats(), x()]),
        (Op::Softmax, "softmax", vec![x()]),
        (Op::SoftmaxGrad, "softmax_grad", vec![x(), x()]),
        (Op::Sum { first: 0, last: 0 }, "sum of narrow rows", vec![x()]),
        (Op::Sum { first: 0, last: 0 }, "sum of rows", vec![wide()]),
        (Op::Sum { first: 1, last: 1 }, "sum of columns", vec![wide()]),
        (Op::Unary(Unary::Gelu), "gelu", vec![wide()]),
        (Op::UnaryGrad(Unary::Gelu), "gelu_grad", vec![wide(), wide()]),
        (Op::Unary(Unary::Scale(0.5)), "scale", vec![wide()]),
        (Op::Binary(Binary::Add), "add", vec![wide(), wide()]),
        (Op::Binary(Binary::Add), "add narrow", vec![x(), x()]),
        (Op::Binary(Binary::Add), "add row", vec![wide(), fixed(&[4 * c])]),
        (chain, "gelu + row", vec![wide(), fixed(&[4 * c])]),
        (Op::Permute { axes: vec![1, 0] }, "transpose", vec![fixed(&[tokens, c])]),
        (Op::Slice { axis: 1, start: c, length: c }, "slice", vec![wide()]),
        (dropout, "dropout", vec![x(), ids()]),
        (Op::Embedding { first: 0 }, "embedding", vec![ids(), table]),
        (Op::EmbeddingGrad { first: 0, rows: v }, "embedding_grad", vec![ids(), x()]),
        (Op::SquaredError, "squared_error", vec![x(), x()]),
        (Op::SquaredErrorGrad, "squared_error_grad", vec![x(), x()]),
    ];
    let by_classes = [
        (Op::CrossEntropy(LossClasses::whole(v)), "cross_entropy", vec![rows(&[v]), ids()]),
        (
            Op::CrossEntropyGrad(LossClasses::whole(v)),
            "cross_entropy_grad",
            vec![rows(&[v]), ids(), rows(&[])],
        ),
    ];
    let case = |(op, what, inputs): (Op, &str, Vec<(Shape, DType)>), rows| {
        op_case(format!("{} {what}", sizes.name), &op, rows, &inputs, v, caps)
    };
    let by_width = by_width.into_iter().map(|each| case(each, tokens));
    by_width.chain(by_classes.into_iter().map(|each| case(each, logits))).collect()
}

/// Returns the cases of normalizations of 16 pictures of 32x32.
fn picture_cases(sizes: &Sizes, caps: &Caps) -> Vec<Case> {
    let c = sizes.width;
    let rows = |dims: &[usize]| (Shape::batched(&[&[1], dims].concat()), DType::F32);
    let fixed = |dims: &[usize]| (Shape::fixed(dims), DType::F32);
    let (groups, channels) = (8, c / 2);
    let picture = || rows(&[32, 32, channels]);
    let of_picture = || fixed(&[channels]);
    let of_groups = || rows(&[groups, 2]);
    let norm = Op::GroupNorm { groups, eps: 1e-5 };
    let by_picture = [
        (norm, "group_norm", vec![picture(), of_picture(), of_picture()]),
        (
            Op::GroupNormGrad { groups },
            "group_norm_grad",
            vec![picture(), of_picture(), of_groups(), picture()],
        ),
        (
            Op::GroupNormAffineGrad { groups },
            "group_norm_affine_grad",
            vec![picture(), of_groups(), picture()],
        ),
    ];
    let case = |(op, what, inputs): (Op, &str, Vec<(Shape, DType)>)| {
        op_case(format!("{} {what}", sizes.name), &op, 16, &inputs, 0, caps)
    };
    by_picture.into_iter().map(case).collect()
}

/// Returns the cases of kernels that work on buckets and belong to no op.
fn bucket_cases(sizes: &Sizes, caps: &Caps) -> Vec<Case> {
    let count = sizes.bucket;
    let range = UpdateRange {
        start: 0,
        length: count,
        decay_end: count,
        gradient_scale: 1.0,
        rounding: None,
    };
    let odd = UpdateRange { start: 1, length: count - 1, ..range };
    let adam = Update::AdamW {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.1,
        correction1: 0.1,
        correction2: 0.01,
    };
    let momentum = Update::Sgd { lr: 1e-3, momentum: 0.9, weight_decay: 0.1 };
    let places = NormSlots::new([count]);
    let of_norm = norm::dispatch(count, caps, places, 0);
    let one = |what: &str, ways: Vec<Variant>, outputs: Vec<usize>, words: usize| Case {
        name: format!("{} {what}", sizes.name),
        ways,
        chosen: 0,
        inputs: vec![(InputFill::Normal, count)],
        outputs,
        bytes: 4.0 * (words * count) as f64,
    };
    let series = TensorSlice::whole(&[count]).series()[0];
    let rounding = Some(MomentRounding { key: Key::new(1), series, number: 0 });
    let rounded = UpdateRange { rounding, ..range };
    // Ranges with an unaligned start are not read and written as vectors. Moments in bf16 move 20
    // bytes of 28, or 16 of 20.
    let whole = |update| {
        let ways = [("whole", range), ("from element 1", odd), ("moments in bf16", rounded)];
        ways.map(|(name, range)| {
            Variant::new(name, vec![(update_twin(&update).dispatch)(&update, &range)])
        })
    };
    let only = |what: &str, dispatches| vec![Variant::new(what, dispatches)];
    let hashed = hash::partials(count);
    vec![
        one("adamw", whole(adam).to_vec(), vec![count; 3], 7),
        one("sgd with momentum", whole(momentum).to_vec(), vec![count; 2], 5),
        one("norm", only("norm", of_norm.to_vec()), vec![places.words(), 2], 1),
        one("hash", only("hash", hash::dispatch(0..count, hashed)), vec![2 * hashed, 2], 1),
    ]
}

/// Benchmark of one adapter.
struct Bench {
    gpu: Gpu,
    pipelines: Pipelines,
    rounds: usize,
}

impl Bench {
    /// Returns the GB/s of a copy of 4 Mi elements.
    fn copy(&mut self) -> Result<f64, DeviceError> {
        let op = Op::Permute { axes: vec![0] };
        let (shape, caps) = (Shape::fixed(&[4 << 20]), Caps::of(&self.gpu));
        let case = op_case("copy".into(), &op, 1, &[(shape, DType::F32)], 0, &caps);
        Ok(case.bytes / self.seconds(&case)?[case.chosen] / 1e9)
    }

    fn report(&mut self, case: &Case, copied: f64) -> Result<(), DeviceError> {
        let inputs = case.inputs.iter().map(|(_, count)| *count);
        let words = inputs.chain(case.outputs.iter().copied()).max().unwrap_or(0);
        if 4 * words as u64 > self.gpu.limits.binding_bytes {
            println!("{:<34}has a tensor that the device does not bind", case.name);
            return Ok(());
        }
        let seconds = self.seconds(case)?;
        for (index, (way, seconds)) in case.ways.iter().zip(seconds).enumerate() {
            let name = if index == 0 { case.name.as_str() } else { "" };
            let star = if index == case.chosen { "*" } else { "" };
            let (ms, rate) = (1e3 * seconds, case.bytes / seconds / 1e9);
            let (way, share) = (format!("{}{star}", way.name), 100.0 * rate / copied);
            println!("{name:<34}{way:<22}{ms:>10.3}{rate:>9.2}{share:>8.0}%");
        }
        Ok(())
    }

    /// Returns the median seconds of each variant of a case.
    fn seconds(&mut self, case: &Case) -> Result<Vec<f64>, DeviceError> {
        let inputs: Vec<wgpu::Buffer> =
            case.inputs.iter().map(|input| self.input(*input)).collect::<Result<_, _>>()?;
        let outputs: Vec<wgpu::Buffer> = case
            .outputs
            .iter()
            .map(|words| self.gpu.storage("output", 4 * *words as u64))
            .collect::<Result<_, _>>()?;
        let mut ways = Vec::with_capacity(case.ways.len());
        for way in &case.ways {
            let Self { gpu, pipelines, .. } = self;
            let ready =
                BoundDispatch::of_buffers(gpu, pipelines, &way.dispatches, &inputs, &outputs)?;
            // The first run compiles; the second determines the number of repetitions.
            self.time(&ready, 1)?;
            let repeats = (SUBMISSION / self.time(&ready, 1)?).ceil() as usize;
            ways.push((ready, repeats.clamp(1, REPEATS_MAX), Vec::with_capacity(self.rounds)));
        }
        for _ in 0..self.rounds {
            for (ready, repeats, times) in &mut ways {
                times.push(self.time(ready, *repeats)?);
            }
        }
        let median = |mut times: Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        Ok(ways.into_iter().map(|(_, _, times)| median(times)).collect())
    }

    /// Uploads values that cost less to make than those of [`harness::generate`].
    fn input(&self, (fill, count): (InputFill, usize)) -> Result<wgpu::Buffer, DeviceError> {
        let mixed = |i: usize| (i as u32).wrapping_mul(0x9E37_79B9).rotate_left(13);
        let values: HostTensor = match fill {
            InputFill::Ids(bound) => {
                HostTensor::Int((0..count).map(|i| mixed(i) % bound).collect())
            }
            _ => HostTensor::Float(
                (0..count).map(|i| mixed(i) as f32 / 2.0f32.powi(31) - 1.0).collect(),
            ),
        };
        harness::upload_new(&self.gpu, values.as_view().bytes())
    }

    /// Returns the seconds per repetition of dispatches that run `repeats` times in one
    /// submission.
    fn time(&self, ready: &[BoundDispatch], repeats: usize) -> Result<f64, DeviceError> {
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            for dispatch in (0..repeats).flat_map(|_| ready) {
                dispatch.record(&mut pass);
            }
        }
        let started = Instant::now();
        self.gpu.submit_and_wait(encoder)?;
        Ok(started.elapsed().as_secs_f64() / repeats as f64)
    }
}
