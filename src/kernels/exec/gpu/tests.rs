//! Tests of the executor's guarantees beyond results: no allocation after the first step, few
//! bytes read back, transfers of any length, times that agree with the wall clock.

use super::limits::tensor_bytes_max;
use super::*;
use crate::autotune::KernelCache;
use crate::device::{Limits, ShaderChecks};
use crate::testing::adapters;
use crate::{OwnedCall, RandomContext};
use potluck_core::HostTensorView;
use potluck_core::rng::Key;
use potluck_graph::{Builder, Init, Node, Op, PassKind, PlanOptions, differentiate};

const ROWS: usize = 4;

/// Returns a plan of two layers with dropout, of this width.
pub fn plan(width: usize) -> Plan {
    let mut b = Builder::new();
    let x = b.input("x", &[1, width]);
    let dropped = b.dropout(x, 0.25).unwrap();
    let w = b.parameter("w", &[width, width], Init::Zeros);
    let hidden = b.linear(dropped, w, None).unwrap();
    b.block("second");
    let v = b.parameter("v", &[width, width], Init::Zeros);
    let y = b.linear(hidden, v, None).unwrap();
    let target = b.input("target", &[1, width]);
    b.squared_error_loss(y, target).unwrap();
    Plan::new(differentiate(b.finish()).unwrap(), PlanOptions::new(ROWS))
}

/// Returns an executor of the plan on every adapter of the kernel tests.
pub(crate) fn executors(plan: &Plan) -> impl Iterator<Item = GpuExecutor> {
    executors_with(plan, 2, |_| ())
}

/// Returns executors with these moments, on devices that `set` has changed.
pub(crate) fn executors_with(
    plan: &Plan,
    moments: impl Into<Moments>,
    set: impl Fn(&mut Gpu),
) -> impl Iterator<Item = GpuExecutor> {
    let adapters = adapters().into_iter().filter(|adapter| adapter.api != "gl");
    let moments = moments.into();
    adapters.map(move |adapter| {
        let mut gpu = Gpu::open_portable(&adapter, ShaderChecks::Disabled).unwrap();
        set(&mut gpu);
        let kernels = KernelSelector::new(KernelCache::in_memory());
        GpuExecutor::new(gpu, plan.clone(), moments.clone(), kernels).unwrap()
    })
}

pub fn pass(step: u64, rows: usize) -> PassContext {
    PassContext {
        micro_batch: 0,
        rows,
        loss_scale: 1.0,
        random: RandomContext { step_key: Key::new(1).step(step), training: true },
    }
}

fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let key = Key::new(seed);
    (0..count).map(|i| 0.1 * key.normal(i as u64) as f32).collect()
}

pub fn fill(device: &mut GpuExecutor) {
    for bucket in 0..device.plan.buckets.len() as u32 {
        let values = numbers(device.plan.buckets[bucket as usize].length, u64::from(bucket));
        device.write_bucket(BucketTensor::Parameters, BucketId(bucket), &values).unwrap();
    }
}

/// Runs a step of two micro-batches, the second with one row less, and its update.
pub fn step(device: &mut GpuExecutor, number: u64) -> StepSums {
    device.begin_step().unwrap();
    for rows in [ROWS, ROWS - 1] {
        for (name, id) in device.plan.graph.inputs.clone() {
            let count = device.plan.graph.tensor(id).shape.elements(rows);
            let (floats, ints) = (numbers(count, number), vec![number as u32; count]);
            let values = if name == "samples" {
                HostTensorView::Int(&ints)
            } else {
                HostTensorView::Float(&floats)
            };
            device.set_input(id, 0, values).unwrap();
        }
        for segment in device.plan.segments.clone() {
            device.run(segment.nodes, &pass(number, rows)).unwrap();
        }
    }
    let buckets: Vec<_> = (0..device.plan.buckets.len() as u32).map(BucketId).collect();
    let sums = device.finish_step(&buckets).unwrap();
    for bucket in 0..device.plan.buckets.len() {
        let (update, range) = adam(device, bucket, number);
        device.update(BucketId(bucket as u32), &update, &range).unwrap();
    }
    device.flush().unwrap();
    sums
}

fn adam(device: &GpuExecutor, bucket: usize, step: u64) -> (Update, UpdateRange) {
    let correction = |beta: f32| 1.0 - beta.powi(step as i32);
    let update = Update::AdamW {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.1,
        correction1: correction(0.9),
        correction2: correction(0.99),
    };
    let layout = &device.plan.buckets[bucket];
    let (length, decay_end) = (layout.length, layout.decay_end);
    (update, UpdateRange { start: 0, length, decay_end, gradient_scale: 0.1, rounding: None })
}

#[test]
fn after_the_first_step_nothing_is_made_and_only_the_sums_come_back() {
    for mut device in executors(&plan(64)) {
        fill(&mut device);
        step(&mut device, 1);
        let (made, buckets) = (device.gpu.allocation_count(), device.plan.buckets.len() as u64);
        assert!(made > 20 && buckets == 2, "{made} made, {buckets} buckets");
        for number in 2..5 {
            let before = device.stream.traffic;
            step(&mut device, number);
            let after = device.stream.traffic;
            // Loss and count, two floats per bucket; 16 bytes per timed pass.
            let sums = 8 + 8 * buckets;
            let submissions = after.submissions - before.submissions;
            let clock = if device.gpu.timestamp_period_ns.is_some() { 16 * 8 } else { 0 };
            let back = after.bytes_back - before.bytes_back;
            assert!((sums..=sums + clock).contains(&back), "{}: {back} bytes", device.name());
            // One for everything up to the report, and one for the updates.
            assert_eq!(submissions, 2, "{}", device.name());
        }
        assert_eq!(device.gpu.allocation_count(), made, "{}: made in a later step", device.name());
    }
}

#[test]
fn a_pass_with_another_loss_scale_has_gradients_with_that_factor() {
    let plan = plan(15);
    let buckets = (0..plan.buckets.len() as u32).map(BucketId);
    for mut device in executors(&plan) {
        fill(&mut device);
        let mut gradients = |loss_scale: f32| -> Vec<f32> {
            let of_training = PassContext { loss_scale, ..pass(1, ROWS) };
            device.begin_step().unwrap();
            for (name, id) in plan.graph.inputs.clone() {
                let count = plan.graph.tensor(id).shape.elements(ROWS);
                let floats = numbers(count, id.index() as u64);
                let values = if name == "samples" {
                    HostTensorView::Int(&[3, 1, 4, 2])
                } else {
                    HostTensorView::Float(&floats)
                };
                device.set_input(id, 0, values).unwrap();
            }
            for segment in &plan.segments {
                device.run(segment.nodes.clone(), &of_training).unwrap();
            }
            let read = |bucket| device.read_bucket(BucketTensor::Gradients, bucket).unwrap();
            buckets.clone().flat_map(read).collect()
        };
        let plain = gradients(1.0);
        assert!(plain.iter().any(|value| *value != 0.0), "{}", device.name());
        for loss_scale in [4.0, 0.5, 1.0] {
            let scaled: Vec<f32> = plain.iter().map(|value| loss_scale * value).collect();
            assert!(gradients(loss_scale) == scaled, "{loss_scale}");
        }
    }
}

/// A forward pass with each of many numbers of rows, as predictions of lists of any length make.
#[test]
fn bind_groups_do_not_grow_with_the_numbers_of_rows() {
    const ROWS: usize = 64;
    let plan = Plan::new(plan(16).graph, PlanOptions::new(ROWS));
    let forward = plan.segments.iter().filter(|segment| segment.phase == PassKind::Forward);
    let nodes: Vec<usize> = forward.flat_map(|segment| segment.nodes.clone()).collect();
    for mut device in executors(&plan) {
        let forward = |device: &mut GpuExecutor, rows: usize| {
            for node in &nodes {
                device.run(*node..*node + 1, &pass(1, rows)).unwrap();
            }
            device.flush().unwrap();
        };
        let before = device.gpu.allocation_count();
        // Numbers with every remainder by 4, on which the kernels depend.
        (57..=ROWS).for_each(|rows| forward(&mut device, rows));
        let made = device.gpu.allocation_count();
        assert!(made > before, "{}: the counter counts", device.name());
        (41..57).for_each(|rows| forward(&mut device, rows));
        assert_eq!(device.gpu.allocation_count(), made, "{}: made for other rows", device.name());
        let bound: usize = device.bind_groups.values().map(BindGroups::count).sum();
        assert!(bound <= 3 * nodes.len(), "{}: {bound} bind groups", device.name());
        assert!(device.prepared.len() <= ROWS_KEPT * nodes.len(), "{}", device.name());
    }
}

#[test]
fn transfers_longer_than_the_rings_arrive_whole_and_in_order() {
    // A bucket of 36 MiB: more than twice what all slots hold.
    let plan = plan(3 * 1024);
    let length = plan.buckets[0].length;
    let values = |start: u32| -> Vec<f32> {
        (0..length as u32).map(|i| f32::from_bits((i + start) % 0x7F00_0000)).collect()
    };
    for mut device in executors(&plan) {
        for bucket_tensor in [BucketTensor::Parameters, BucketTensor::Moment(1)] {
            let start = if bucket_tensor == BucketTensor::Parameters { 0 } else { 1 << 20 };
            device.write_bucket(bucket_tensor, BucketId(0), &values(start)).unwrap();
        }
        let made = device.gpu.allocation_count();
        let read = device.read_bucket(BucketTensor::Parameters, BucketId(0)).unwrap();
        assert!(read == values(0), "{}: parameters", device.name());
        // Overwritten after it was read, and before it is read again.
        device.write_bucket(BucketTensor::Parameters, BucketId(0), &values(77)).unwrap();
        let read = device.read_bucket(BucketTensor::Moment(1), BucketId(0)).unwrap();
        assert!(read == values(1 << 20), "{}: moments", device.name());
        let read = device.read_bucket(BucketTensor::Parameters, BucketId(0)).unwrap();
        assert!(read == values(77), "{}: parameters again", device.name());
        assert_eq!(
            device.gpu.allocation_count(),
            made,
            "{}: a transfer made something",
            device.name()
        );
    }
}

#[test]
fn an_input_written_twice_in_one_submission_serves_both_passes() {
    for mut device in executors(&plan(16)) {
        let (x, node) = (device.plan.graph.input("x").unwrap(), 0);
        let output = device.plan.graph.nodes[node].outputs[0];
        let evaluation = PassContext {
            random: RandomContext { training: false, ..pass(1, 1).random },
            ..pass(1, 1)
        };
        let submissions = device.stream.traffic.submissions;
        device.set_input(x, 0, HostTensorView::Float(&[1.0; 16])).unwrap();
        device.run(node..node + 1, &evaluation).unwrap();
        let at = device.binding(output, 0);
        let kept = device.norm_parts.clone();
        device.stream.copy(&at.buffer, 0, &kept, 8);
        device.set_input(x, 0, HostTensorView::Float(&[2.0; 16])).unwrap();
        device.run(node..node + 1, &evaluation).unwrap();
        assert_eq!(device.stream.traffic.submissions, submissions, "{}", device.name());
        assert_eq!(device.read_range(&kept, 0, 2).unwrap(), [1.0; 2], "{}", device.name());
        assert_eq!(device.read(output, &evaluation).unwrap(), [2.0; 16], "{}", device.name());
    }
}

#[test]
fn an_evaluation_of_batch_norm_after_a_pass_of_training_takes_the_running_averages() {
    let mut b = Builder::new();
    let (x, target) = (b.input("x", &[1, 4]), b.input("target", &[1, 4]));
    let y = b.batch_norm("norm", x).unwrap();
    b.squared_error_loss(y, target).unwrap();
    let plan = Plan::new(differentiate(b.finish()).unwrap(), PlanOptions::new(2));
    let is_norm = |node: &Node| matches!(node.op, Op::BatchNorm { .. });
    let node = plan.graph.nodes.iter().position(is_norm).unwrap();
    for mut device in executors(&plan) {
        for bucket in 0..plan.buckets.len() {
            let ones = vec![1.0; plan.buckets[bucket].length];
            device.write_bucket(BucketTensor::Parameters, BucketId(bucket as u32), &ones).unwrap();
        }
        let values = [1.0, 2.0, 3.0, 4.0, 11.0, 12.0, 13.0, 14.0];
        let output = plan.graph.nodes[node].outputs[0];
        for (training, expected) in [(true, [0.0; 4]), (false, [1.0, 2.0, 3.0, 4.0])] {
            let random = RandomContext { training, ..pass(1, 2).random };
            let pass = PassContext { random, ..pass(1, 2) };
            device.set_input(x, 0, HostTensorView::Float(&values)).unwrap();
            device.run(node..node + 1, &pass).unwrap();
            let y = device.read(output, &pass).unwrap();
            let near = |(y, expected): (&f32, &f32)| (y - expected).abs() < 1e-3;
            assert!(y.iter().zip(&expected).all(near), "{}: {y:?}", device.name());
        }
    }
}

#[test]
fn slow_steps_are_cut_into_more_submissions_with_the_same_bits() {
    let bits = |device: &mut GpuExecutor| {
        let values = device.read_bucket(BucketTensor::Parameters, BucketId(1)).unwrap();
        values.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
    };
    let plan = plan(64);
    for (mut whole, mut cut) in executors(&plan).zip(executors(&plan)) {
        for device in [&mut whole, &mut cut] {
            fill(device);
            step(device, 1);
        }
        // As if every node took seconds.
        cut.stream.cost_ratio = 1e9;
        let before = cut.stream.traffic.submissions;
        assert_eq!(step(&mut whole, 2).loss, step(&mut cut, 2).loss);
        let nodes = cut.plan.graph.nodes.len() as u64;
        assert!(cut.stream.traffic.submissions - before >= nodes, "{}", cut.name());
        assert!(bits(&mut whole) == bits(&mut cut), "{}: other bits", cut.name());
    }
}

#[test]
fn every_part_of_a_step_can_be_timed_and_the_busy_share_is_one() {
    for mut device in executors(&plan(256)) {
        fill(&mut device);
        for number in 1..4 {
            let busy = step(&mut device, number).busy;
            let has_clock = device.gpu.timestamp_period_ns.is_some();
            assert_eq!(busy.is_some(), has_clock, "{}", device.name());
            assert!(busy.is_none_or(|busy| busy > 0.0 && busy <= 1.0), "{busy:?}");
        }
        let (update, range) = adam(&device, 0, 4);
        let mut work: Vec<ProfileTarget> =
            (0..device.plan.graph.nodes.len()).map(ProfileTarget::Node).collect();
        work.extend([
            ProfileTarget::Norm(BucketId(0)),
            ProfileTarget::Update(BucketId(0), update, range),
        ]);
        for work in work {
            let timing = device.profile(&work, &pass(4, ROWS)).unwrap().unwrap();
            let is_sane = timing.seconds > 0.0 && timing.seconds < 10.0;
            assert!(is_sane && !timing.variant.is_empty(), "{}: {timing:?}", device.name());
        }
    }
}

/// Ticks in another unit than nanoseconds, or ticks taken when a pass is recorded instead of when
/// it runs, would be off by more.
#[test]
fn the_clock_agrees_with_the_wall_clock_within_a_factor_of_ten() {
    for mut device in executors(&plan(1024)) {
        fill(&mut device);
        step(&mut device, 1);
        let seconds = |device: &GpuExecutor, node: usize| {
            device.prepared.get(&device.key(node, &pass(1, ROWS))).map_or(0.0, |t| t.seconds)
        };
        let nodes = 0..device.plan.graph.nodes.len();
        let longest = nodes.max_by(|a, b| seconds(&device, *a).total_cmp(&seconds(&device, *b)));
        let key = device.key(longest.unwrap(), &pass(1, ROWS));
        let (mut ticks, mut wall) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..3 {
            let task = &device.prepared[&key];
            ticks = ticks.min(device.stream.time(task).unwrap());
            wall = wall.min(device.stream.time_by_repeating(task).unwrap());
        }
        let ratio = ticks / wall;
        assert!((0.1..10.0).contains(&ratio), "{}: {ticks} s, {wall} s", device.name());
    }
}

#[test]
fn tensors_stay_within_what_32_bits_index() {
    let limits = |binding_bytes| Limits { binding_bytes, ..Limits::portable() };
    assert_eq!(tensor_bytes_max(&limits(128 << 20)), 128 << 20);
    assert_eq!(tensor_bytes_max(&limits(64 << 30)), 8 << 30);
}

/// Ops whose kernels for software adapters share sums among few invocations, which then loop longer
/// than a driver allows.
#[test]
fn long_sums_are_counted() {
    let iterations = |op: Op, inputs: &[&[usize]]| {
        let inputs = inputs.iter().map(|dims| dims.to_vec()).collect();
        let random = RandomContext { step_key: Key::new(0), training: true };
        OwnedCall::new(op, inputs, random).unwrap().call().iterations()
    };
    const LONG: usize = 32_768_000;
    let rows = LONG / 16;
    let all = Op::Sum { first: 1, last: 1 };
    assert_eq!(iterations(all, &[&[1, LONG]]), LONG / 256);
    assert_eq!(iterations(Op::SquaredError, &[&[1, LONG], &[1, LONG]]), LONG / 256);
    let norm = |c| iterations(Op::LayerNormAffineGrad, &[&[rows, c], &[rows, 2], &[rows, c]]);
    assert_eq!((norm(3), norm(4)), (rows / 16, rows / 32));
}

/// A gradient that sums over 70,000 rows is accepted if loops may be that long, and refused if the
/// driver would end them early.
#[test]
fn loops_that_a_driver_would_end_early_are_refused() {
    const LONG: usize = 70_000;
    let mut b = Builder::new();
    let x = b.input("x", &[LONG, 2]);
    let w = b.parameter("w", &[3, 2], Init::Zeros);
    let y = b.linear(x, w, None).unwrap();
    let target = b.input("target", &[LONG, 3]);
    b.squared_error_loss(y, target).unwrap();
    let plan = Plan::new(differentiate(b.finish()).unwrap(), PlanOptions::new(1));
    for adapter in adapters() {
        let gpu = Gpu::open_portable(&adapter, ShaderChecks::Disabled).unwrap();
        let limited = gpu.loop_iterations_max().is_some();
        let refused =
            GpuExecutor::new(gpu, plan.clone(), 0, KernelSelector::new(KernelCache::in_memory()));
        match refused {
            Ok(_) => assert!(!limited, "{}", adapter.name),
            Err(error) => {
                let text = error.to_string();
                assert!(limited && text.contains("matmul") && text.contains("70016"), "{text}");
            }
        }
    }
}
