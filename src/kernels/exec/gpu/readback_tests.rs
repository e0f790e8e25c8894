//! Tests of the cost of readbacks: no allocation after the first round, few submissions, bounded
//! memory. Their values are tested in `tests/adapters/readbacks.rs`.

use std::time::{Duration, Instant};

use super::tests::{executors, executors_with, fill, pass, plan, step};
use super::*;

/// Writes elements of a bucket from `start` on.
fn write(
    device: &mut GpuExecutor,
    bucket_tensor: BucketTensor,
    bucket: BucketId,
    start: usize,
    values: &[f32],
) {
    let place = Region::bucket(bucket_tensor, bucket, start..start + values.len());
    device.write_place(&place, values).unwrap();
}

fn range(readback: &Readback) -> Range<usize> {
    let Region::Bucket { range, .. } = &readback.place else { panic!("{}", readback.place) };
    range.clone()
}

/// Takes all readbacks that were started; returns their number.
fn drain(device: &mut GpuExecutor) -> usize {
    std::iter::from_fn(|| device.next_readback(true).unwrap()).count()
}

/// Starts readbacks of a bucket's gradients, of `size` elements each; returns their number.
fn begin(device: &mut GpuExecutor, size: usize) -> usize {
    let length = device.plan.buckets[0].length;
    for start in (0..length).step_by(size) {
        let range = start..length.min(start + size);
        device.start_readback(Region::bucket(BucketTensor::Gradients, BucketId(0), range)).unwrap();
    }
    length.div_ceil(size)
}

/// Runs the transfers of a data-parallel step at a small size.
fn round(device: &mut GpuExecutor, number: u64) {
    step(device, number);
    let readbacks = begin(device, 1000);
    assert_eq!(drain(device), readbacks);
    let mut sums = vec![1.0; 5000];
    device.add(BucketId(0), 64, &mut sums).unwrap();
    device.add(BucketId(0), 0, &mut sums[..77]).unwrap();
    write(device, BucketTensor::Parameters, BucketId(1), 128, &sums);
    device.on_queue_done(Box::new(|| ())).unwrap();
    device.finish_step(&[]).unwrap();
}

#[test]
fn after_the_first_round_nothing_is_made() {
    for mut device in executors(&plan(128)) {
        device.set_readback_elements_max(2000).unwrap();
        fill(&mut device);
        round(&mut device, 1);
        let made = device.gpu.allocation_count();
        for number in 2..5 {
            round(&mut device, number);
        }
        assert_eq!(device.gpu.allocation_count(), made, "{}", device.name());
    }
}

/// A device that is one of several ranks has its slots before the first step.
#[test]
fn slots_are_made_with_the_shards() {
    let plan = plan(128);
    for device in executors(&plan) {
        assert!(device.stream.readback_queue.slots().is_empty(), "one device alone needs none");
    }
    let owned = plan.buckets.iter().map(|bucket| 0..bucket.length).collect();
    let moments = Moments { count: 1, owned: Some(owned) };
    for mut device in executors_with(&plan, moments, |_| ()) {
        let slots = device.stream.readback_queue.slots();
        let bytes: u64 = slots.iter().map(wgpu::Buffer::size).sum();
        assert!((4..=256).contains(&slots.len()) && bytes <= 64 << 20, "{}", slots.len());
        let made = device.gpu.allocation_count();
        let readbacks = begin(&mut device, 1000);
        assert_eq!(drain(&mut device), readbacks);
        assert_eq!(device.gpu.allocation_count(), made, "{}", device.name());
    }
}

#[test]
fn pieces_begun_in_a_row_share_a_submission_and_leave_with_what_follows() {
    for mut device in executors(&plan(64)) {
        let readbacks = begin(&mut device, 400);
        let before = device.stream.traffic.submissions;
        device.run(0..1, &pass(1, 1)).unwrap();
        assert_eq!(device.stream.traffic.submissions, before + 1, "{}", device.name());
        assert_eq!(drain(&mut device), readbacks);
        assert_eq!(device.stream.traffic.submissions, before + 1, "{}", device.name());
        // Readbacks that find no slot share submissions too.
        let (slots, readbacks) =
            (device.stream.readback_queue.slots().len(), begin(&mut device, 20));
        assert!(readbacks > 10 * slots && slots >= 16, "{readbacks} readbacks, {slots} slots");
        let before = device.stream.traffic.submissions;
        assert_eq!(drain(&mut device), readbacks);
        let submissions = device.stream.traffic.submissions - before;
        assert!(submissions as usize <= readbacks.div_ceil(slots / 4), "{submissions}");
    }
}

/// Starts far more readbacks of 500 elements from the first bucket than there are slots, and
/// returns as many of them as there are slots.
fn with_full_slots(device: &mut GpuExecutor) -> Vec<Readback> {
    device.stream.readback_queue = ReadbackQueue::new(500, ReadbackBudget::new(500, &[500]));
    let readbacks = begin(device, 500);
    let slots = device.stream.readback_queue.slots().len();
    assert!(slots == 8 && readbacks > 3 * slots, "{readbacks} readbacks, {slots} slots");
    (0..slots).map(|_| device.next_readback(true).unwrap().unwrap()).collect()
}

/// The holder of the readbacks may be waiting for the thread that asks for more.
#[test]
fn a_device_whose_pieces_are_all_held_neither_waits_nor_fails() {
    let plan = plan(128);
    let soon = |gpu: &mut Gpu| gpu.deadline = Duration::from_secs(3);
    for mut device in executors_with(&plan, 0, soon) {
        let mut held = with_full_slots(&mut device);
        let slots = held.len();
        for wait in [false, true] {
            let asked = Instant::now();
            assert!(device.next_readback(wait).unwrap().is_none(), "there is no slot");
            assert!(asked.elapsed() < device.gpu.deadline && device.has_readbacks());
        }
        // The holder may take longer than this device's deadline.
        std::thread::sleep(device.gpu.deadline + Duration::from_millis(100));
        assert!(device.next_readback(true).unwrap().is_none(), "still no slot");
        held.remove(3);
        let next = device.next_readback(true).unwrap().unwrap();
        assert_eq!(range(&next), 500 * slots..500 * (slots + 1), "{}", device.name());
        assert!(device.next_readback(true).unwrap().is_none() && device.has_readbacks());
        drop((held, next));
        assert_eq!(drain(&mut device), device.plan.buckets[0].length.div_ceil(500) - slots - 1);
        assert!(!device.has_readbacks() && device.stream.readback_queue.slots().len() == slots);
    }
}

/// A write to elements that no waiting readback covers allocates nothing; a write to elements that
/// one covers allocates as many slots as needed.
#[test]
fn slots_are_made_only_for_copies_of_what_is_about_to_change() {
    for mut device in executors(&plan(128)) {
        let (first, second) = (BucketId(0), BucketId(1));
        fill(&mut device);
        let before: Vec<f32> = (0..device.plan.buckets[0].length).map(|i| i as f32).collect();
        device.write_bucket(BucketTensor::Gradients, first, &before).unwrap();
        let held = with_full_slots(&mut device);
        let (slots, made) = (held.len(), device.gpu.allocation_count());
        let copied = 500 * slots;
        write(&mut device, BucketTensor::Gradients, first, 0, &vec![-1.0; copied]);
        write(&mut device, BucketTensor::Gradients, second, 0, &vec![-1.0; 3 * copied]);
        write(&mut device, BucketTensor::Parameters, first, 0, &vec![-1.0; 3 * copied]);
        write(&mut device, BucketTensor::Gradients, first, copied, &[]);
        assert_eq!(device.gpu.allocation_count(), made, "{}", device.name());
        // The last element of one waiting readback and the first of the next: these two and the
        // one before them need slots.
        write(&mut device, BucketTensor::Gradients, first, copied + 999, &[-1.0; 2]);
        assert_eq!(device.gpu.allocation_count(), made + 3, "{}", device.name());
        drop(held);
        // Now slots are free.
        write(&mut device, BucketTensor::Gradients, first, copied + 1500, &[-1.0]);
        assert_eq!(device.gpu.allocation_count(), made + 3, "{}", device.name());
        let mut at = copied;
        while let Some(piece) = device.next_readback(true).unwrap() {
            let range = range(&piece);
            assert!(piece.values() == &before[range.clone()], "{range:?}");
            assert_eq!(range.start, at);
            at = range.end;
        }
        assert_eq!(at, before.len(), "{}", device.name());
    }
}

/// A rank updates its shard while readbacks of other ranks' shards still wait for a slot, and
/// readbacks of its own shard do not.
#[test]
fn an_update_makes_slots_only_for_copies_of_what_it_changes() {
    let plan = plan(128);
    let length = plan.buckets[0].length;
    let (owned, rule) = (1024..2048, Update::Sgd { lr: 0.5, momentum: 0.9, weight_decay: 0.0 });
    let shards = vec![owned.clone(), 0..plan.buckets[1].length];
    let moments = Moments { count: 1, owned: Some(shards) };
    for mut device in executors_with(&plan, moments, |_| ()) {
        let update = |device: &mut GpuExecutor, start: usize| {
            let (decay_end, gradient_scale) = (0, 1.0);
            let range =
                UpdateRange { start, length: 512, decay_end, gradient_scale, rounding: None };
            device.update(BucketId(0), &rule, &range).unwrap();
        };
        update(&mut device, owned.start);
        device.stream.readback_queue = ReadbackQueue::new(256, ReadbackBudget::new(256, &[256]));
        let begin = |device: &mut GpuExecutor, bucket_tensor: BucketTensor, all: Range<usize>| {
            for start in all.step_by(256) {
                let place = Region::bucket(bucket_tensor, BucketId(0), start..start + 256);
                device.start_readback(place).unwrap();
            }
        };
        begin(&mut device, BucketTensor::Gradients, 0..length);
        let held: Vec<Readback> =
            (0..8).map(|_| device.next_readback(true).unwrap().unwrap()).collect();
        begin(&mut device, BucketTensor::Parameters, 0..owned.start);
        begin(&mut device, BucketTensor::Parameters, owned.start + 512..length);
        begin(&mut device, BucketTensor::Moment(0), owned.start + 512..owned.end);
        let made = device.gpu.allocation_count();
        update(&mut device, owned.start);
        assert_eq!(device.gpu.allocation_count(), made, "{}", device.name());
        update(&mut device, owned.start + 512);
        assert!(device.gpu.allocation_count() > made, "{}", device.name());
        drop(held);
        assert!(drain(&mut device) > 8);
    }
}

/// wgpu tells nothing of commands that a driver gave up, as Metal's does after an error.
#[test]
fn commands_that_a_driver_gave_up_lose_the_device() {
    let plan = plan(128);
    for mut device in executors(&plan) {
        fill(&mut device);
        round(&mut device, 1);
        device.begin_step().unwrap();
        device.stream.drops_next = true;
        for segment in device.plan.segments.clone() {
            device.run(segment.nodes, &pass(2, device.plan.options.rows)).unwrap();
        }
        let error = device.finish_step(&[]).unwrap_err();
        assert!(matches!(error, DeviceError::Lost { .. }), "{}: {error}", device.name());
        assert!(error.to_string().contains("gave up commands"), "{error}");
        assert!(device.gpu.is_lost() && device.gpu.check().is_err());
    }
    // The commands that read the results too.
    for mut device in executors(&plan) {
        fill(&mut device);
        round(&mut device, 1);
        device.stream.submit().unwrap();
        device.stream.drops_next = true;
        let error = device.read_bucket(BucketTensor::Parameters, BucketId(1)).unwrap_err();
        assert!(matches!(error, DeviceError::Lost { .. }), "{}: {error}", device.name());
    }
}

/// `staging_bytes` is the memory that is allocated.
#[test]
fn staging_takes_what_is_said() {
    let plan = plan(300);
    let owned = plan.buckets.iter().map(|bucket| 0..bucket.length).collect();
    let moments = Moments { count: 1, owned: Some(owned) };
    for device in executors_with(&plan, moments, |_| ()) {
        let slot_bytes: u64 =
            device.stream.readback_queue.slots().iter().map(wgpu::Buffer::size).sum();
        let rings = device.stream.rings_bytes();
        assert_eq!((slot_bytes + rings) as usize, crate::exec::staging_bytes(&plan));
    }
}

/// A single device allocates its readback slots at first use.
#[test]
fn rings_and_sums_take_what_is_said() {
    let plan = plan(128);
    for mut device in executors(&plan) {
        assert_eq!(device.stream.rings_bytes() as usize, crate::exec::RING_BYTES);
        let longest = plan.buckets.iter().map(|bucket| bucket.length).max().unwrap();
        device.prepare_add(&[longest]).unwrap();
        let adder = device.adder.as_ref().unwrap();
        assert_eq!(adder.bytes() as usize, adder_bytes(&plan));
    }
}

#[test]
fn what_is_prepared_for_sums_makes_nothing_later() {
    for mut device in executors(&plan(128)) {
        device.prepare_add(&[]).unwrap();
        device.prepare_add(&[640, 6400, 77, 0]).unwrap();
        let made = device.gpu.allocation_count();
        for length in [77, 6400, 640, 0] {
            let mut sums = vec![1.0; length];
            let before = device.stream.traffic.submissions;
            device.add(BucketId(0), 64, &mut sums).unwrap();
            assert!(sums.iter().all(|sum| *sum == 1.0));
            let submissions = device.stream.traffic.submissions - before;
            assert_eq!(submissions, length.min(1) as u64, "{length} elements");
        }
        assert_eq!(device.gpu.allocation_count(), made, "{}", device.name());
        device.prepare_add(&[640]).unwrap();
        assert_eq!(device.gpu.allocation_count(), made, "{}", device.name());
    }
}
