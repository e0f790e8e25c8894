//! Timings of work on a device, performed in its process: none of them includes the network.

use std::ops::Range;
use std::time::Instant;

use super::{BucketTensor, Executor, PassContext, load};
use crate::RandomContext;
use crate::device::DeviceError;
use potluck_core::rng::Key;
use potluck_core::{BucketId, HostTensor, TensorId};
use potluck_graph::{Region, Update, UpdateRange};

/// Timed repetitions; the fastest counts.
const REPEATS: u32 = 3;

/// Returns the seconds of the fastest of `repeats` repetitions of forward and backward on `rows`
/// rows, including the wait for their end. If there are several, one more comes before as a
/// warm-up.
///
/// # Errors
/// Returns `DeviceError` if the device fails.
pub(super) fn fastest(
    device: &mut (impl Executor + ?Sized),
    inputs: &[(TensorId, HostTensor)],
    rows: u32,
    repeats: u32,
) -> Result<f64, DeviceError> {
    if repeats > 1 {
        micro_batch(device, inputs, rows)?;
    }
    let mut best = f64::INFINITY;
    for _ in 0..repeats {
        best = best.min(micro_batch(device, inputs, rows)?);
    }
    Ok(best)
}

fn micro_batch(
    device: &mut (impl Executor + ?Sized),
    inputs: &[(TensorId, HostTensor)],
    rows: u32,
) -> Result<f64, DeviceError> {
    let random = RandomContext { step_key: Key::new(0), training: true };
    let started = Instant::now();
    device.begin_step()?;
    load(device, inputs, 0)?;
    let segments: Vec<_> = device.plan().segments.iter().map(|s| s.nodes.clone()).collect();
    let pass = PassContext { micro_batch: 0, rows: rows as usize, loss_scale: 1.0, random };
    for nodes in segments {
        device.run(nodes, &pass)?;
    }
    device.finish_step(&[])?;
    Ok(started.elapsed().as_secs_f64())
}

/// Returns the seconds to read all gradients back to the host, and to upload all parameters; their
/// values do not change.
///
/// # Errors
/// Returns `DeviceError` if the device fails.
pub(super) fn exchange(device: &mut (impl Executor + ?Sized)) -> Result<(f64, f64), DeviceError> {
    let held: Vec<_> = device.plan().updated_and_held().collect();
    let mut buckets = Vec::with_capacity(held.len());
    for bucket in held {
        buckets.push((bucket, device.read_bucket(BucketTensor::Parameters, bucket)?));
    }
    let piece = device.readback_elements_max();
    let mut read_s = f64::INFINITY;
    let mut write_s = f64::INFINITY;
    for _ in 0..REPEATS {
        let started = Instant::now();
        for (bucket, parameters) in &buckets {
            let length = parameters.len();
            for start in (0..length).step_by(piece) {
                let range = start..(start + piece).min(length);
                device.start_readback(Region::bucket(BucketTensor::Gradients, *bucket, range))?;
            }
        }
        while device.next_readback(true)?.is_some() {}
        read_s = read_s.min(started.elapsed().as_secs_f64());
        let started = Instant::now();
        for (bucket, values) in &buckets {
            let range = 0..values.len();
            device
                .write_place(&Region::bucket(BucketTensor::Parameters, *bucket, range), values)?;
        }
        device.finish_step(&[])?;
        write_s = write_s.min(started.elapsed().as_secs_f64());
    }
    Ok((read_s, write_s))
}

/// Returns the seconds to update one parameter of a device's shard; zero without any. The first of
/// several repetitions is a warm-up.
///
/// Gradients are set to zero before, so that a rate of zero leaves the parameters as they are.
///
/// # Errors
/// Returns `DeviceError` if the device fails.
pub(super) fn update(
    device: &mut (impl Executor + ?Sized),
    update: &Update,
) -> Result<f64, DeviceError> {
    device.begin_step()?;
    let mut fastest = f64::INFINITY;
    let mut elements = 0;
    for _ in 0..=REPEATS {
        device.finish_step(&[])?;
        let started = Instant::now();
        elements = update_shard(device, update)?;
        device.finish_step(&[])?;
        fastest = fastest.min(started.elapsed().as_secs_f64());
    }
    Ok(if elements == 0 { 0.0 } else { fastest / elements as f64 })
}

/// Updates all parameters of a device's shard; returns their number.
fn update_shard(
    device: &mut (impl Executor + ?Sized),
    update: &Update,
) -> Result<usize, DeviceError> {
    let held: Vec<_> = device.plan().updated_and_held().collect();
    let mut elements = 0;
    for bucket in held {
        let owned = device.owned(bucket);
        if owned.is_empty() {
            continue;
        }
        let range = UpdateRange {
            start: owned.start,
            length: owned.len(),
            decay_end: owned.end,
            gradient_scale: 1.0,
            rounding: None,
        };
        for range in device.plan().update_ranges(bucket, update, range, Key::new(0)) {
            device.update(bucket, update, &range)?;
        }
        elements += owned.len();
    }
    Ok(elements)
}

/// Returns the seconds to add gradients of a bucket to partial sums on the host and on the device,
/// the readback and the upload included.
///
/// # Errors
/// Returns `DeviceError` if the device fails.
pub(super) fn addition(
    device: &mut (impl Executor + ?Sized),
    bucket: BucketId,
    range: Range<usize>,
) -> Result<(f64, f64), DeviceError> {
    let mut partial = vec![0.0; range.len()];
    let mut host_s = f64::INFINITY;
    let mut device_s = f64::INFINITY;
    // The first repetition is a warm-up.
    for repeat in 0..=REPEATS {
        let started = Instant::now();
        device.start_readback(Region::bucket(BucketTensor::Gradients, bucket, range.clone()))?;
        if let Some(piece) = device.next_readback(true)? {
            // The same loop as in the ring threads.
            for (sum, gradient) in partial.iter_mut().zip(piece.values()) {
                *sum += gradient;
            }
        }
        let on_host = started.elapsed().as_secs_f64();
        let started = Instant::now();
        device.add(bucket, range.start, &mut partial)?;
        let on_device = started.elapsed().as_secs_f64();
        if repeat > 0 {
            host_s = host_s.min(on_host);
            device_s = device_s.min(on_device);
        }
    }
    Ok((host_s, device_s))
}
