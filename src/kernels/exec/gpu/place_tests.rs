//! Tests of places and of parts of plans, on the CPU device and on every adapter: tensors that are
//! read back and written, copies of several micro-batches, buckets that are not held.

use super::tests::{executors, pass, plan};
use super::*;
use crate::exec::Cpu;
use potluck_core::DType;
use potluck_graph::{MomentFormat, PassKind, SlotKind};

const ROWS: usize = 4;
const WIDTH: usize = 128;

/// The CPU device and all adapters, with readbacks of at most `piece` elements.
fn devices(plan: &Plan, piece: usize) -> Vec<Box<dyn Executor>> {
    let mut cpu = Cpu::fast(plan.clone(), 2);
    cpu.set_readback_elements_max(piece);
    let mut all: Vec<Box<dyn Executor>> = vec![Box::new(cpu)];
    for mut device in executors(plan) {
        // A budget of few slots, however many elements there are.
        device.stream.readback_queue = ReadbackQueue::new(
            piece,
            ReadbackBudget { count: 4, bytes: piece * DType::F32.bytes() },
        );
        all.push(Box::new(device));
    }
    all
}

/// Pass of a micro-batch of all rows.
fn pass_of(micro_batch: usize) -> PassContext {
    PassContext { micro_batch, ..pass(1, ROWS) }
}

fn values(start: usize) -> Vec<f32> {
    (start..start + ROWS * WIDTH).map(|i| i as f32).collect()
}

/// Starts readbacks of a whole tensor in pieces of 64 elements.
fn begin(device: &mut dyn Executor, tensor: TensorId, micro_batch: usize) {
    for start in (0..ROWS * WIDTH).step_by(64) {
        let range = start..start + 64;
        device.start_readback(Region::Tensor { tensor, micro_batch, range }).unwrap();
    }
}

/// Takes the readbacks of a whole tensor, which must come in order; returns its values.
fn take(device: &mut dyn Executor, tensor: TensorId, micro_batch: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for start in (0..ROWS * WIDTH).step_by(64) {
        let piece = device.next_readback(true).unwrap().unwrap();
        let range = start..start + 64;
        assert_eq!(piece.place, Region::Tensor { tensor, micro_batch, range });
        all.extend_from_slice(piece.values());
    }
    all
}

fn with_copies(copies: usize) -> Plan {
    let mut plan = plan(WIDTH);
    plan.options.in_flight = copies;
    for slot in plan.slots.iter_mut().filter(|slot| slot.kind == SlotKind::Stash) {
        slot.copies = copies;
    }
    plan
}

/// The first tensor that a node computes in a stash slot, and the node.
fn stashed(plan: &Plan) -> (TensorId, usize) {
    let is_stash = |tensor: &TensorId| match plan.place(*tensor) {
        TensorLocation::Slot(slot) => plan.slots[slot.index()].kind == SlotKind::Stash,
        _ => false,
    };
    let nodes = plan.graph.nodes.iter().enumerate();
    let mut found = nodes.filter_map(|(i, n)| Some((*n.outputs.iter().find(|t| is_stash(t))?, i)));
    found.next().unwrap()
}

#[test]
fn tensors_are_read_back_and_written_in_the_copy_of_a_micro_batch() {
    let plan = with_copies(2);
    let (tensor, _) = stashed(&plan);
    for mut device in devices(&plan, 64) {
        let device = device.as_mut();
        let whole = |micro_batch| Region::Tensor { tensor, micro_batch, range: 0..ROWS * WIDTH };
        device.write_place(&whole(0), &values(1)).unwrap();
        device.write_place(&whole(3), &values(1000)).unwrap();
        let part = Region::Tensor { tensor, micro_batch: 4, range: 100..103 };
        device.write_place(&part, &[-1.0, -2.0, -3.0]).unwrap();
        let mut first = values(1);
        first[100..103].copy_from_slice(&[-1.0, -2.0, -3.0]);
        begin(device, tensor, 2);
        // Readbacks of both kinds share one order.
        let bucket_tensor = Region::bucket(BucketTensor::Parameters, BucketId(1), 5..6);
        device.start_readback(bucket_tensor.clone()).unwrap();
        begin(device, tensor, 1);
        assert!(take(device, tensor, 2) == first, "{}", device.name());
        assert_eq!(device.next_readback(true).unwrap().unwrap().place, bucket_tensor);
        assert!(take(device, tensor, 1) == values(1000), "{}", device.name());
        assert!(device.read(tensor, &pass_of(6)).unwrap() == first, "{}", device.name());
    }
}

/// Changes a tensor in the copy of a micro-batch.
type Change<'a> = &'a dyn Fn(&mut dyn Executor, usize);

/// Readbacks that wait for a slot return the values of the tensor when they were started, even if
/// its copy changes afterwards.
#[test]
fn a_waiting_readback_keeps_the_values_of_its_start() {
    let plan = with_copies(2);
    let (tensor, node) = stashed(&plan);
    let input = plan.graph.input("target").unwrap();
    let whole =
        |tensor, micro_batch| Region::Tensor { tensor, micro_batch, range: 0..ROWS * WIDTH };
    let ones = vec![1.0; ROWS * WIDTH];
    let changes: [(TensorId, Change); 3] = [
        (tensor, &|device, micro_batch| {
            device.run(node..node + 1, &pass_of(micro_batch)).unwrap();
        }),
        (input, &|device, micro_batch| {
            device.set_input(input, micro_batch, HostTensorView::Float(&ones)).unwrap();
        }),
        (tensor, &|device, micro_batch| {
            device.write_place(&whole(tensor, micro_batch), &ones).unwrap();
        }),
    ];
    for (i, (tensor, change)) in changes.iter().enumerate() {
        // New devices, because slots that were made are kept.
        for mut device in devices(&plan, 64) {
            let device = device.as_mut();
            device.write_place(&whole(*tensor, 0), &values(7)).unwrap();
            begin(device, *tensor, 0);
            change(device, 1);
            change(device, 2);
            let name = device.name().to_string();
            assert!(take(device, *tensor, 0) == values(7), "{name}: change {i}");
            let after = device.read(*tensor, &pass_of(0)).unwrap();
            assert!(after != values(7), "{name}: change {i} changes nothing");
        }
    }
}

#[test]
fn changes_of_another_copy_make_no_slots() {
    let plan = with_copies(2);
    let (tensor, node) = stashed(&plan);
    for mut device in executors(&plan) {
        device.set_readback_elements_max(64).unwrap();
        device.stream.readback_queue =
            ReadbackQueue::new(64, ReadbackBudget { count: 2, bytes: 256 });
        let run = |device: &mut GpuExecutor, micro_batch| {
            device.run(node..node + 1, &pass_of(micro_batch)).unwrap();
        };
        (0..2).for_each(|micro_batch| run(&mut device, micro_batch));
        begin(&mut device, tensor, 0);
        let made = device.gpu.allocation_count();
        run(&mut device, 3);
        assert_eq!(device.gpu.allocation_count(), made, "{}", device.name());
        run(&mut device, 2);
        assert!(device.gpu.allocation_count() > made, "{}", device.name());
    }
}

/// Runs two micro-batches of different inputs; returns the bits of all gradients.
fn gradients(device: &mut dyn Executor, numbers: [usize; 2], interleaved: bool) -> Vec<u32> {
    let plan = device.plan().clone();
    for (bucket, layout) in plan.buckets.iter().enumerate() {
        let values: Vec<f32> = (0..layout.length).map(|i| (i as f32 * 0.37).sin()).collect();
        let bucket = BucketId(bucket as u32);
        device.write_bucket(BucketTensor::Parameters, bucket, &values).unwrap();
    }
    device.begin_step().unwrap();
    let load = |device: &mut dyn Executor, which: usize| {
        for (name, id) in &plan.graph.inputs {
            let floats: Vec<f32> = (0..ROWS * WIDTH).map(|i| ((i + which) % 7) as f32).collect();
            let ints = vec![which as u32; ROWS];
            let values = match name.as_str() {
                "samples" => HostTensorView::Int(&ints),
                _ => HostTensorView::Float(&floats),
            };
            device.set_input(*id, numbers[which], values).unwrap();
        }
    };
    let run = |device: &mut dyn Executor, which: usize, forward: bool| {
        for segment in &plan.segments {
            if (segment.phase == PassKind::Forward) == forward {
                device.run(segment.nodes.clone(), &pass_of(numbers[which])).unwrap();
            }
        }
    };
    let order = if interleaved {
        [(0, true), (1, true), (0, false), (1, false)]
    } else {
        [(0, true), (0, false), (1, true), (1, false)]
    };
    if interleaved {
        load(device, 0);
        load(device, 1);
    }
    for (which, forward) in order {
        if forward && !interleaved {
            load(device, which);
        }
        run(device, which, forward);
    }
    let mut bits = Vec::new();
    for bucket in 0..plan.buckets.len() as u32 {
        let values = device.read_bucket(BucketTensor::Gradients, BucketId(bucket)).unwrap();
        bits.extend(values.iter().map(|value| value.to_bits()));
    }
    bits
}

/// Slots with different numbers of copies, as parts of a pipeline have them.
#[test]
fn micro_batches_in_flight_give_the_bits_of_one_after_the_other() {
    let mut mixed = with_copies(2);
    let stash = mixed.slots.iter_mut().filter(|slot| slot.kind == SlotKind::Stash);
    stash.enumerate().for_each(|(i, slot)| slot.copies = 2 + i % 2);
    let same = with_copies(1);
    for plan in [with_copies(2), mixed] {
        for (mut device, mut one) in devices(&plan, 64).into_iter().zip(devices(&same, 64)) {
            let expected = gradients(one.as_mut(), [0, 1], false);
            assert!(expected.iter().any(|bits| *bits != 0));
            let name = device.name().to_string();
            for first in 0..6 {
                let bits = gradients(device.as_mut(), [first, first + 1], true);
                assert!(bits == expected, "{name}: from micro-batch {first}");
            }
            // The test can fail: one copy is not enough.
            assert!(gradients(one.as_mut(), [0, 1], true) != expected, "{name}");
        }
    }
}

#[test]
fn steps_of_many_micro_batches_make_bind_groups_per_copy() {
    let mut plan = with_copies(2);
    let stash = plan.slots.iter_mut().filter(|slot| slot.kind == SlotKind::Stash);
    stash.enumerate().for_each(|(i, slot)| slot.copies = 2 + i % 2);
    for mut device in executors(&plan) {
        let run = |device: &mut GpuExecutor, micro_batch: usize| {
            for segment in &plan.segments {
                device.run(segment.nodes.clone(), &pass_of(micro_batch)).unwrap();
            }
            device.flush().unwrap();
        };
        (0..6).for_each(|micro_batch| run(&mut device, micro_batch));
        let (made, prepared) = (device.gpu.allocation_count(), device.prepared.len());
        assert!(device.periods.iter().all(|period| 6 % period == 0));
        assert!(device.periods.contains(&6) && device.periods.contains(&2));
        assert!(prepared <= device.periods.iter().sum(), "{prepared}");
        (6..20).for_each(|micro_batch| run(&mut device, micro_batch));
        assert_eq!(device.gpu.allocation_count(), made, "{}", device.name());
        assert_eq!(device.prepared.len(), prepared, "{}", device.name());
    }
}

/// Returns the second block of the plan, whose input is computed elsewhere: without the first
/// block's bucket, and without places for what only the first block's nodes touch.
fn second_block() -> Plan {
    let mut plan = plan(WIDTH);
    let mut used = vec![false; plan.places.len()];
    for node in plan.graph.nodes.iter().filter(|node| node.block == 1) {
        for tensor in node.inputs.iter().chain(&node.outputs) {
            used[plan.graph.root(*tensor).index()] = true;
        }
    }
    for (place, used) in plan.places.iter_mut().zip(used) {
        if !used {
            *place = TensorLocation::Unallocated;
        }
    }
    // Buckets are in the order of the backward pass.
    plan.held[1] = false;
    plan
}

#[test]
fn buckets_that_are_not_held_are_empty() {
    let plan = second_block();
    let (held, other) = (BucketId(0), BucketId(1));
    let samples = HostTensorView::Int(&[7; ROWS]);
    for mut device in devices(&plan, 64) {
        let device = device.as_mut();
        for bucket_tensor in
            [BucketTensor::Parameters, BucketTensor::Gradients, BucketTensor::Moment(1)]
        {
            assert!(device.read_bucket(bucket_tensor, other).unwrap().is_empty());
            assert_eq!(device.hash(bucket_tensor, other).unwrap(), hash::fast(&[], 0));
            device.write_bucket(bucket_tensor, other, &[]).unwrap();
            assert_eq!(device.read_bucket(bucket_tensor, held).unwrap().len(), WIDTH * WIDTH);
        }
        assert_eq!((device.owned(other), device.owned(held)), (0..0, 0..WIDTH * WIDTH));
        // Inputs of the other block are ignored.
        for (name, id) in plan.graph.inputs.clone() {
            let floats = values(1);
            let is_samples = name == "samples";
            let given = if is_samples { samples } else { HostTensorView::Float(&floats) };
            device.set_input(id, 0, given).unwrap();
        }
        device.write_bucket(BucketTensor::Parameters, held, &[0.5; WIDTH * WIDTH]).unwrap();
        device.begin_step().unwrap();
        let mine: Vec<_> = plan.segments.iter().filter(|s| s.block == 1).cloned().collect();
        for segment in &mine {
            device.run(segment.nodes.clone(), &pass_of(0)).unwrap();
        }
        let sums = device.finish_step(&[held]).unwrap();
        assert!(sums.loss.loss > 0.0 && sums.loss.count == (ROWS * WIDTH) as f64, "{sums:?}");
        assert_eq!(sums.gradients.len(), 1);
        let owned = Some(vec![0..64, 64..64]);
        device.set_moments(Moments { count: 1, owned }).unwrap();
        assert_eq!((device.owned(other), device.owned(held)), (0..0, 0..64));
    }
}

#[test]
fn the_norm_of_a_bucket_that_is_not_held_is_a_defect() {
    for mut device in devices(&second_block(), 64) {
        let norm = std::panic::AssertUnwindSafe(|| device.finish_step(&[BucketId(1)]));
        let why = std::panic::catch_unwind(norm).unwrap_err();
        let why = why.downcast_ref::<String>().unwrap();
        assert!(why.contains("does not hold bucket 1"), "{why}");
    }
}

#[test]
fn buckets_that_are_not_held_take_no_memory() {
    // Parameters, gradients, and two moments.
    check_memory_of_bucket(MomentFormat::F32, 4);
    check_memory_of_bucket(MomentFormat::Bf16, 3);
}

/// Checks that a device without a bucket takes `words` per parameter less.
fn check_memory_of_bucket(moments: MomentFormat, words: usize) {
    let (mut whole, mut part) = (plan(WIDTH), second_block());
    whole.options.moments = moments;
    part.options.moments = moments;
    let bytes = |plan: &Plan| Cpu::fast(plan.clone(), 2).allocated().unwrap().tensors;
    // And the samples' numbers.
    let bucket = words * WIDTH * WIDTH * DType::F32.bytes();
    assert_eq!(bytes(&whole) - bytes(&part), bucket + ROWS * DType::F32.bytes());
    let extra = crate::exec::cpu::host_extra_bytes;
    assert_eq!(extra(&whole) - extra(&part), ROWS * DType::F32.bytes());
    for (whole, part) in executors(&whole).zip(executors(&part)) {
        let made = |device: &GpuExecutor| device.gpu.allocation_count();
        assert!(made(&whole) >= made(&part) + 4, "{}", whole.name());
        let report = |device: &GpuExecutor| device.gpu.device.generate_allocator_report();
        if let (Some(all), Some(some)) = (report(&whole), report(&part)) {
            let (all, some) = (all.total_allocated_bytes, some.total_allocated_bytes);
            assert!(all >= some + bucket as u64, "{}: {all} and {some} bytes", whole.name());
        }
    }
}

/// A part has slots for the tensors that it sends, even if they are longer than its buckets; a
/// whole plan, which sends none, has none.
#[test]
fn staging_of_a_part_has_room_for_tensors() {
    let (whole, mut part) = (plan(2), second_block());
    let budget = |plan: &Plan| ReadbackBudget::of(plan, READBACK_ELEMENTS_MAX).bytes;
    assert_eq!(budget(&whole), whole.buckets[0].length * DType::F32.bytes());
    assert_eq!(budget(&part), WIDTH * WIDTH * DType::F32.bytes());
    let (staged, gradients) = (crate::exec::host_staging_bytes, WIDTH * WIDTH * DType::F32.bytes());
    assert_eq!(staged(&part), gradients + 2 * ROWS * WIDTH * DType::F32.bytes());
    part.held[0] = false;
    assert_eq!(budget(&part), ROWS * WIDTH * DType::F32.bytes());
    assert_eq!(staged(&part), 2 * ROWS * WIDTH * DType::F32.bytes());
    for mut device in executors(&part) {
        let (tensor, range) = (part.graph.input("target").unwrap(), 0..ROWS * WIDTH);
        let place = Region::Tensor { tensor, micro_batch: 0, range };
        device.write_place(&place, &values(5)).unwrap();
        device.start_readback(place).unwrap();
        let read = device.next_readback(true).unwrap().unwrap();
        assert!(read.values() == values(5), "{}", device.name());
    }
}
