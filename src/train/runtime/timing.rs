//! Timing of devices before a run: work on several of them at the same time, because devices may
//! share a processor or a bus, and the addition of gradients.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::device_thread::{DeviceThread, PendingJob};
use super::step::Inputs;
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::Executor;
use potluck_parallel::ReduceSite;
use potluck_parallel::collective::Chunk;

/// Timed repetitions of a micro-batch. The result is the fastest for a device that runs alone, and
/// the mean for concurrent devices.
pub(crate) const REPEATS: u32 = 3;

/// Threshold of a clear speedup: a time below this fraction of the other time.
pub(crate) const CLEARLY: f64 = 0.9;

/// Function that returns the inputs of a micro-batch with a number of rows.
pub type Probe = Arc<dyn Fn(usize) -> Inputs + Send + Sync>;

/// Error of a device during its timing, with its index.
#[derive(Debug)]
pub(crate) struct TimingFailure {
    pub index: usize,
    pub error: DeviceError,
}

/// Repeats work on several devices at the same time until all have done it `repeats` times, or for
/// the timeout because one of them hangs. Returns the mean of the seconds that the work of each
/// device returns.
pub(crate) fn time_together<W>(
    works: Vec<(&DeviceThread, W)>,
    what: &str,
    repeats: u32,
    timeout: Duration,
) -> Vec<Result<f64, DeviceError>>
where
    W: FnMut(&mut dyn Executor) -> Result<f64, DeviceError> + Send + 'static,
{
    let untimed = Arc::new(AtomicUsize::new(works.len()));
    let until = Instant::now() + timeout;
    // All jobs are started and awaited, even if one fails: each runs until all have been timed.
    let mut pending = Vec::with_capacity(works.len());
    for (driver, mut work) in works {
        let timed = Timed(Arc::clone(&untimed));
        let together = Together { repeats, timed, until };
        pending.push(driver.submit(what, move |device| contended(device, &mut work, together)));
    }
    let mut ended = Vec::with_capacity(pending.len());
    for job in pending {
        ended.push(job.and_then(PendingJob::wait));
    }
    ended
}

/// Returns the factors by which work takes longer on each of these devices while all of them
/// compute than alone, which took so many seconds. Devices and `repeats` as for [`time_together`].
pub(crate) fn slowdowns_together<W>(
    works: Vec<(&DeviceThread, f64, W)>,
    repeats: u32,
    timeout: Duration,
) -> Vec<Result<f64, DeviceError>>
where
    W: FnMut(&mut dyn Executor) -> Result<f64, DeviceError> + Send + 'static,
{
    let mut alone = Vec::with_capacity(works.len());
    let mut timed = Vec::with_capacity(works.len());
    for (driver, alone_s, work) in works {
        alone.push(alone_s);
        timed.push((driver, work));
    }
    let mut slowdowns = Vec::with_capacity(alone.len());
    let ended = time_together(timed, "timing micro-batches", repeats, timeout);
    for (seconds, alone_s) in ended.into_iter().zip(alone) {
        slowdowns.push(seconds.map(|seconds| {
            // Noise cannot make a device faster beside others.
            if alone_s > 0.0 { (seconds / alone_s).max(1.0) } else { 1.0 }
        }));
    }
    slowdowns
}

/// Guard that counts a device as timed when it is dropped, also without a start of its job.
struct Timed(Arc<AtomicUsize>);

impl Drop for Timed {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Repetitions of work beside other devices.
struct Together {
    repeats: u32,
    timed: Timed,
    until: Instant,
}

/// Returns the mean seconds of work while other devices run too. Repeats until all have been timed,
/// or until the deadline.
fn contended(
    device: &mut dyn Executor,
    work: &mut dyn FnMut(&mut dyn Executor) -> Result<f64, DeviceError>,
    together: Together,
) -> Result<f64, DeviceError> {
    let Together { repeats, timed, until } = together;
    let untimed = Arc::clone(&timed.0);
    let mut timed = Some(timed);
    let mut count = 0;
    let mut sum = 0.0;
    while count < repeats || (untimed.load(Ordering::Relaxed) > 0 && Instant::now() < until) {
        sum += work(device)?;
        count += 1;
        if count == repeats {
            timed.take();
        }
    }
    Ok(sum / f64::from(count))
}

/// Times the addition of a device's gradients to partial sums of these chunks on the host and on
/// the device, and returns the faster site.
///
/// # Errors
/// Returns `DeviceError` if the device fails.
pub fn faster_reduce_site(
    device: &mut dyn Executor,
    chunks: &[Chunk],
) -> Result<ReduceSite, DeviceError> {
    let Some(chunk) = chunks.iter().max_by_key(|chunk| chunk.range.len()) else {
        return Ok(ReduceSite::Host);
    };
    let (on_host, on_device) = device.time_addition(chunk.bucket, chunk.range.clone())?;
    let is_device = on_device < CLEARLY * on_host;
    Ok(if is_device { ReduceSite::Device } else { ReduceSite::Host })
}

/// Splits a batch evenly; the first ranks get one sample more if there is a remainder.
pub(crate) fn split_evenly(batch: u32, world: usize) -> Vec<u32> {
    let world = world as u32;
    (0..world).map(|rank| batch / world + u32::from(rank < batch % world)).collect()
}
