//! Requests of data parallelism to a device, on the CPU device and on every adapter: values that
//! come back in pieces while it works on, ranges that are written, updates of shards, sums.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::common::{devices, devices_with, fill_inputs, fill_parameters, pass, run_phase};
use potluck_core::BucketId;
use potluck_core::faults::InjectedFault;
use potluck_core::rng::Key;
use potluck_graph::{Builder, Init, Plan, PlanOptions, Region, Update, UpdateRange, differentiate};
use potluck_kernels::exec::{BucketTensor, Executor, Moments, Readback};

const ROWS: usize = 3;

/// Writes elements of a bucket from `start` on.
fn write(
    device: &mut dyn Executor,
    bucket_tensor: BucketTensor,
    bucket: BucketId,
    start: usize,
    values: &[f32],
) {
    let place = Region::bucket(bucket_tensor, bucket, start..start + values.len());
    device.write_place(&place, values).unwrap();
}

/// Returns the elements of a bucket that a readback is of.
fn range(readback: &Readback) -> Range<usize> {
    let Region::Bucket { range, .. } = &readback.place else { panic!("{}", readback.place) };
    range.clone()
}

/// Two layers of this width with biases, so that buckets have a part that does not decay.
fn plan(width: usize) -> Plan {
    let mut b = Builder::new();
    let x = b.input("x", &[1, width]);
    let w = b.parameter("w", &[width, width], Init::Zeros);
    let bias = b.parameter("bias", &[width], Init::Zeros);
    let hidden = b.linear(x, w, Some(bias)).unwrap();
    b.block("second");
    let v = b.parameter("v", &[width, width], Init::Zeros);
    let y = b.linear(hidden, v, None).unwrap();
    let target = b.input("target", &[1, width]);
    b.squared_error_loss(y, target).unwrap();
    Plan::new(differentiate(b.finish()).unwrap(), PlanOptions::new(ROWS))
}

fn normals(count: usize, seed: u64) -> Vec<f32> {
    let key = Key::new(seed);
    (0..count).map(|i| key.normal(i as u64) as f32).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn buckets(device: &dyn Executor) -> Vec<(BucketId, usize)> {
    let lengths = device.plan().buckets.iter().map(|bucket| bucket.length);
    (0..).map(BucketId).zip(lengths).collect()
}

/// Neighbouring ranges of `size` elements.
fn ranges(length: usize, size: usize) -> Vec<Range<usize>> {
    (0..length).step_by(size).map(|start| start..length.min(start + size)).collect()
}

/// Begins to read a whole bucket in pieces.
fn begin_all(
    device: &mut dyn Executor,
    bucket_tensor: BucketTensor,
    (bucket, length): (BucketId, usize),
) {
    for range in ranges(length, device.readback_elements_max()) {
        device.start_readback(Region::bucket(bucket_tensor, bucket, range)).unwrap();
    }
}

/// Waits for all pieces under way, and puts those of one bucket together.
fn join(device: &mut dyn Executor, length: usize) -> Vec<f32> {
    let mut values = vec![f32::NAN; length];
    while let Some(piece) = device.next_readback(true).unwrap() {
        values[range(&piece)].copy_from_slice(piece.values());
    }
    values
}

#[test]
fn pieces_come_in_order_with_the_bits_of_their_ranges() {
    for mut device in devices(&plan(96), 1) {
        let device = device.as_mut();
        let mut wanted = Vec::new();
        for (bucket, length) in buckets(device) {
            for bucket_tensor in
                [BucketTensor::Parameters, BucketTensor::Gradients, BucketTensor::Moment(0)]
            {
                let seed = 10 * u64::from(bucket.0) + wanted.len() as u64;
                let values = normals(length, seed);
                device.write_bucket(bucket_tensor, bucket, &values).unwrap();
                for range in [0..length, 5..5, 7..8, 64..200, 1..length - 1] {
                    wanted.push((bucket_tensor, bucket, range.clone(), bits(&values[range])));
                }
            }
        }
        for (bucket_tensor, bucket, range, _) in &wanted {
            device.start_readback(Region::bucket(*bucket_tensor, *bucket, range.clone())).unwrap();
        }
        for (bucket_tensor, bucket, range, expected) in wanted {
            assert!(device.has_readbacks());
            let piece = device.next_readback(true).unwrap().unwrap();
            assert_eq!(piece.place, Region::bucket(bucket_tensor, bucket, range.clone()));
            assert!(
                bits(piece.values()) == expected,
                "{}: {bucket_tensor:?} {range:?}",
                device.name()
            );
        }
        assert!(!device.has_readbacks());
        assert!(device.next_readback(true).unwrap().is_none());
        assert!(device.next_readback(false).unwrap().is_none());
    }
}

/// Far more pieces than slots, most of them held by another thread until it has some hundreds.
#[test]
fn more_pieces_than_slots_come_while_another_thread_holds_the_first() {
    for mut device in devices_with(&plan(512), 0, Some(100)) {
        let device = device.as_mut();
        let (bucket, length) = buckets(device)[0];
        let values = normals(length, 3);
        device.write_bucket(BucketTensor::Gradients, bucket, &values).unwrap();
        begin_all(device, BucketTensor::Gradients, (bucket, length));
        let (sender, pieces) = mpsc::channel::<Readback>();
        let reader = std::thread::spawn(move || {
            let (mut held, mut read) = (Vec::new(), Vec::new());
            loop {
                match pieces.recv_timeout(Duration::from_secs(30)) {
                    Ok(piece) => held.push(piece),
                    Err(mpsc::RecvTimeoutError::Disconnected) => break,
                    Err(mpsc::RecvTimeoutError::Timeout) => panic!("they do not come"),
                }
                if held.len() == 200 {
                    held.drain(..).for_each(|p: Readback| read.extend_from_slice(p.values()));
                }
            }
            for piece in &held {
                read.extend_from_slice(piece.values());
            }
            read
        });
        while device.has_readbacks() {
            match device.next_readback(true).unwrap() {
                Some(piece) => sender.send(piece).unwrap(),
                // The reader has them all.
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        drop(sender);
        let read = reader.join().unwrap();
        assert!(bits(&read) == bits(&values), "{}", device.name());
    }
}

/// Copies that found no slot when they were begun have the values of then, whatever is written
/// afterwards.
#[test]
fn pieces_without_a_slot_keep_what_they_were_begun_with() {
    for mut device in devices_with(&plan(512), 0, Some(64)) {
        let device = device.as_mut();
        let (bucket, length) = buckets(device)[0];
        let values = normals(length, 4);
        device.write_bucket(BucketTensor::Gradients, bucket, &values).unwrap();
        begin_all(device, BucketTensor::Gradients, (bucket, length));
        write(device, BucketTensor::Gradients, bucket, length / 2, &[7.0; 1000]);
        device.begin_step().unwrap();
        assert!(bits(&join(device, length)) == bits(&values), "{}", device.name());
        let after = device.read_bucket(BucketTensor::Gradients, bucket).unwrap();
        assert!(after.iter().all(|value| *value == 0.0), "{}", device.name());
    }
}

/// Gradients of the first micro-batch are read while the second is added to them.
#[test]
fn gradients_that_are_read_while_backward_passes_follow_are_those_of_the_beginning() {
    for mut device in devices_with(&plan(128), 0, Some(1000)) {
        let device = device.as_mut();
        fill_parameters(device, 0.1);
        let micro_batch = |device: &mut dyn Executor, seed| {
            fill_inputs(device, 0, ROWS, seed, 10);
            run_phase(device, true, &pass(0, ROWS));
            run_phase(device, false, &pass(0, ROWS));
        };
        device.begin_step().unwrap();
        micro_batch(device, 1);
        let all = buckets(device);
        let read = |device: &mut dyn Executor, bucket: BucketId| {
            bits(&device.read_bucket(BucketTensor::Gradients, bucket).unwrap())
        };
        let expected: Vec<_> = all.iter().map(|(bucket, _)| read(device, *bucket)).collect();
        device.begin_step().unwrap();
        micro_batch(device, 1);
        for bucket in &all {
            begin_all(device, BucketTensor::Gradients, *bucket);
        }
        micro_batch(device, 2);
        let mut got: Vec<Vec<u32>> = vec![Vec::new(); all.len()];
        while let Some(piece) = device.next_readback(true).unwrap() {
            let Region::Bucket { bucket, .. } = piece.place else { panic!("{}", piece.place) };
            got[bucket.index()].extend(bits(piece.values()));
        }
        assert!(got == expected, "{}", device.name());
        assert!(read(device, all[0].0) != expected[0], "the second changes them");
    }
}

#[test]
fn pieces_come_without_waiting_once_the_device_is_done() {
    for mut device in devices(&plan(64), 0) {
        let device = device.as_mut();
        let (bucket, length) = buckets(device)[0];
        let done = Arc::new(AtomicBool::new(false));
        let told = done.clone();
        device.start_readback(Region::bucket(BucketTensor::Gradients, bucket, 0..length)).unwrap();
        device.on_queue_done(Box::new(move || told.store(true, Ordering::Relaxed))).unwrap();
        let end = Instant::now() + Duration::from_secs(30);
        let piece = loop {
            assert!(Instant::now() < end, "{}: nothing comes", device.name());
            if let Some(piece) = device.next_readback(false).unwrap() {
                break piece;
            }
        };
        assert_eq!(piece.values(), vec![0.0; length]);
        while !done.load(Ordering::Relaxed) {
            assert!(Instant::now() < end, "{}: nobody was told", device.name());
            device.next_readback(false).unwrap();
        }
    }
}

#[test]
fn pieces_outlive_their_device() {
    for mut device in devices(&plan(64), 0) {
        let (bucket, length) = buckets(device.as_ref())[0];
        let values = normals(length, 5);
        device.write_bucket(BucketTensor::Parameters, bucket, &values).unwrap();
        device.start_readback(Region::bucket(BucketTensor::Parameters, bucket, 0..length)).unwrap();
        device.start_readback(Region::bucket(BucketTensor::Parameters, bucket, 0..10)).unwrap();
        let piece = device.next_readback(true).unwrap().unwrap();
        drop(device);
        let reader = std::thread::spawn(move || bits(piece.values()));
        assert!(reader.join().unwrap() == bits(&values));
    }
}

/// Values that another thread reads stay there, and the device says that it is lost.
#[test]
fn a_device_that_is_lost_while_pieces_are_under_way_says_so() {
    for mut device in devices(&plan(256), 0) {
        let device = device.as_mut();
        let (bucket, length) = buckets(device)[0];
        let values = normals(length, 6);
        device.write_bucket(BucketTensor::Parameters, bucket, &values).unwrap();
        for _ in 0..3 {
            device
                .start_readback(Region::bucket(BucketTensor::Parameters, bucket, 0..length))
                .unwrap();
        }
        let piece = device.next_readback(true).unwrap().unwrap();
        if device.inject_fault(InjectedFault::Lost).is_err() {
            // The CPU device cannot be lost but by saying so.
            continue;
        }
        // What had come before is still given.
        let mut taken = (0..3).map(|_| device.next_readback(true));
        let error = taken.find_map(Result::err).expect("only two more were begun").to_string();
        assert!(error.contains("the device was lost"), "{error}");
        assert!(device.next_readback(false).is_err() && device.next_readback(true).is_err());
        let _ = device.start_readback(Region::bucket(BucketTensor::Parameters, bucket, 0..length));
        assert!(device.run(0..1, &pass(0, ROWS)).is_err());
        assert!(bits(piece.values()) == bits(&values), "{}", device.name());
    }
}

#[test]
fn ranges_are_written_where_they_belong() {
    for mut device in devices(&plan(96), 1) {
        let device = device.as_mut();
        for (bucket, length) in buckets(device) {
            for bucket_tensor in
                [BucketTensor::Parameters, BucketTensor::Gradients, BucketTensor::Moment(0)]
            {
                let mut expected = normals(length, 7);
                device.write_bucket(bucket_tensor, bucket, &expected).unwrap();
                for range in [0..3, 63..65, length - 70..length, 10..10] {
                    let values = normals(range.len(), range.start as u64);
                    write(device, bucket_tensor, bucket, range.start, &values);
                    expected[range].copy_from_slice(&values);
                }
                let got = device.read_bucket(bucket_tensor, bucket).unwrap();
                assert!(bits(&got) == bits(&expected), "{}: {bucket_tensor:?}", device.name());
            }
        }
    }
}

/// The rules with numbers of some step.
fn rules() -> [Update; 3] {
    [
        Update::Sgd { lr: 0.1, momentum: 0.0, weight_decay: 0.3 },
        Update::Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.3 },
        Update::AdamW {
            lr: 0.01,
            beta1: 0.9,
            beta2: 0.99,
            eps: 1e-8,
            weight_decay: 0.3,
            correction1: 0.19,
            correction2: 0.0199,
        },
    ]
}

/// Fills gradients, parameters and what is owned of the moments.
fn fill_banks(device: &mut dyn Executor, moments: usize) {
    for (bucket, length) in buckets(device) {
        let owned = device.owned(bucket);
        device.write_bucket(BucketTensor::Parameters, bucket, &normals(length, 20)).unwrap();
        device.write_bucket(BucketTensor::Gradients, bucket, &normals(length, 21)).unwrap();
        for moment in 0..moments {
            let values: Vec<f32> =
                normals(length, 22 + moment as u64).iter().map(|v| 0.1 + v * v).collect();
            device
                .write_bucket(BucketTensor::Moment(moment), bucket, &values[owned.clone()])
                .unwrap();
        }
    }
}

/// Updates what is owned; its bits in every bucket tensor, and the hashes of the moments.
fn update_owned(device: &mut dyn Executor, rule: &Update) -> Vec<(Range<usize>, Vec<Vec<u32>>)> {
    let mut results = Vec::new();
    for (bucket, _) in buckets(device) {
        let owned = device.owned(bucket);
        let decay_end = device.plan().buckets[bucket.index()].decay_end;
        // In two parts, as gradients come.
        let middle = (owned.start + owned.len() / 2).next_multiple_of(64).min(owned.end);
        for part in [owned.start..middle, middle..owned.end] {
            let (start, length) = (part.start, part.len());
            let range =
                UpdateRange { start, length, decay_end, gradient_scale: 0.7, rounding: None };
            device.update(bucket, rule, &range).unwrap();
        }
        let parameters = device.read_bucket(BucketTensor::Parameters, bucket).unwrap();
        let mut bucket_tensors = vec![bits(&parameters[owned.clone()])];
        for moment in 0..rule.moments() {
            let values = device.read_bucket(BucketTensor::Moment(moment), bucket).unwrap();
            let hash = potluck_kernels::ops::hash::fast(bytemuck::cast_slice(&values), 0);
            assert_eq!(device.hash(BucketTensor::Moment(moment), bucket).unwrap(), hash);
            bucket_tensors.push(bits(&values));
        }
        results.push((owned, bucket_tensors));
    }
    results
}

#[test]
fn updates_of_shards_have_the_bits_of_an_update_of_the_whole() {
    let plan = plan(128);
    let (length, decay_end) = (plan.buckets[1].length, plan.buckets[1].decay_end);
    assert!(0 < decay_end && decay_end < length, "{decay_end} of {length}");
    let decay_end = decay_end.next_multiple_of(64);
    // Bounds before, at and behind the end of decay, and a rank that owns nothing.
    let cuts = [0, 64, 64, 4096, decay_end - 64, decay_end, length];
    for rule in rules() {
        let whole: Vec<_> = devices(&plan, rule.moments())
            .map(|mut device| {
                fill_banks(device.as_mut(), rule.moments());
                update_owned(device.as_mut(), &rule)
            })
            .collect();
        for shard in cuts.windows(2).map(|cut| cut[0]..cut[1]) {
            let owned = plan
                .buckets
                .iter()
                .map(|bucket| shard.start.min(bucket.length)..shard.end.min(bucket.length));
            let moments = Moments { count: rule.moments(), owned: Some(owned.collect()) };
            for (mut device, whole) in devices(&plan, moments).zip(&whole) {
                fill_banks(device.as_mut(), rule.moments());
                let got = update_owned(device.as_mut(), &rule);
                for ((owned, got), (_, whole)) in got.iter().zip(whole) {
                    let whole: Vec<_> =
                        whole.iter().map(|bucket_tensor| &bucket_tensor[owned.clone()]).collect();
                    assert!(*got == whole, "{}: {rule:?} {owned:?}", device.name());
                }
            }
        }
    }
}

/// Sums on every device are those of the host, bit for bit: also where nearly nothing is left, and
/// over longer stretches than the device has room for at once.
#[test]
fn sums_on_the_device_are_those_of_the_host() {
    for mut device in devices_with(&plan(128), 0, Some(3000)) {
        let device = device.as_mut();
        let (bucket, length) = buckets(device)[1];
        let scale = |i: usize| 2f32.powi((i % 120) as i32 - 60);
        let gradients: Vec<f32> =
            normals(length, 8).iter().enumerate().map(|(i, v)| v * scale(i)).collect();
        device.write_bucket(BucketTensor::Gradients, bucket, &gradients).unwrap();
        for range in [0..length, 64..64 + 3000, 5..6, 1001..8002, length - 64..length, 9..9] {
            let mut partial = normals(range.len(), 9);
            for (i, (sum, gradient)) in
                partial.iter_mut().zip(&gradients[range.clone()]).enumerate()
            {
                match i % 4 {
                    0 => *sum *= scale(i),
                    1 => *sum = -gradient,
                    2 => *sum = -gradient * (1.0 + f32::EPSILON),
                    _ => {}
                }
            }
            let expected: Vec<f32> =
                partial.iter().zip(&gradients[range.clone()]).map(|(a, b)| a + b).collect();
            device.add(bucket, range.start, &mut partial).unwrap();
            assert!(bits(&partial) == bits(&expected), "{}: {range:?}", device.name());
        }
    }
}

#[test]
fn a_step_ends_with_the_norms_that_are_asked_for() {
    for mut device in devices(&plan(32), 0) {
        let device = device.as_mut();
        fill_parameters(device, 0.1);
        fill_inputs(device, 0, ROWS, 1, 10);
        device.begin_step().unwrap();
        run_phase(device, true, &pass(0, ROWS));
        run_phase(device, false, &pass(0, ROWS));
        let norms = |device: &mut dyn Executor, buckets: &[u32]| {
            let buckets: Vec<BucketId> = buckets.iter().map(|bucket| BucketId(*bucket)).collect();
            let sums = device.finish_step(&buckets).unwrap();
            (sums.loss.loss, sums.gradients)
        };
        let (loss, all) = norms(device, &[0, 1]);
        assert!(loss > 0.0 && all[0].0 > 0.0 && all[0] != all[1], "{all:?}");
        for buckets in [&[] as &[u32], &[1], &[0], &[1, 0], &[1, 0, 1]] {
            let wanted = buckets.iter().map(|bucket| all[*bucket as usize]).collect();
            assert_eq!(norms(device, buckets), (loss, wanted), "{}", device.name());
        }
    }
}
