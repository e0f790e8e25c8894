//! Benchmark of peak rates: floating-point operations in registers, streams through memory,
//! transfers, and the overhead of a dispatch.

use std::convert::Infallible;
use std::time::Instant;

use super::report::{Figure, FigureKind, FigureRecorder, GBS, GFLOPS};
use super::sample::{SamplingPlan, fastest, samples};
use potluck_core::DType;
use potluck_kernels::Dispatch;
use potluck_kernels::bench::device::{BenchDevice, DeviceBuffer};
use potluck_kernels::bench::peak::{self, FmaChains, MemoryStream};
use potluck_kernels::device::DeviceError;

/// Minimum and maximum number of invocations of the multiply-add chains: from enough for two
/// cores to enough for every large GPU.
const INVOCATIONS: [usize; 2] = [1 << 14, 1 << 22];

/// Scalar factor of the triad, as in STREAM.
const FACTOR: f32 = 3.0;

/// Minimum bytes of an array of the memory figures, for devices that lack memory for more.
const MEMORY_BYTES_MIN: u64 = 4 << 20;

const STREAMS: [(&str, MemoryStream); 2] =
    [("memory.copy", MemoryStream::Copy), ("memory.triad", MemoryStream::Triad)];

/// Returns values between -1/2 and 1/2 that are neither zero nor equal, because some devices are
/// faster on zero or equal values.
pub fn values(count: usize) -> Vec<f32> {
    let mut pattern = Vec::with_capacity(count.min(1 << 16));
    for i in 0..count.min(1 << 16) {
        // The fractional parts of multiples of the golden ratio are evenly spread.
        pattern.push((i as f64 * 0.618_033_988_749_894_9).fract() as f32 - 0.5);
    }
    pattern.iter().copied().cycle().take(count).collect()
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20))
}

// ---- The CPU device ----

/// Measures the peak rates of the CPU device: multiply-adds in vector registers and streams, on
/// all threads.
pub fn of_host(sampling_plan: &SamplingPlan, recorder: &mut FigureRecorder) {
    recorder.progress("multiply-adds");
    // Few invocations run concurrently, so each one is longer.
    let chains = FmaChains::new(64 * 1024, 4 * sampling_plan.rounds);
    let mut sums = vec![0.0; chains.count];
    let seconds = timed(sampling_plan, || peak::fast(&chains, &mut sums));
    let threads = rayon::current_num_threads();
    let figure = Figure::rate(FigureKind::Peak, "peak.flops", GFLOPS, chains.flops(), &seconds);
    recorder.add(figure.by("vector registers").on(format!("{threads} threads")));

    recorder.progress("memory");
    let bytes = sampling_plan.memory_bytes[0];
    let count = bytes as usize / DType::F32.bytes();
    let x = values(count);
    let z = values(count);
    let mut y = vec![0.0; count];
    for (name, stream) in STREAMS {
        let seconds = timed(sampling_plan, || stream.fast(&x, &z, FACTOR, &mut y));
        let moved = stream.bytes_per_element() * count as f64;
        let figure = Figure::rate(FigureKind::Memory, name, GBS, moved, &seconds);
        recorder.add(figure.on(sizes(stream, bytes)));
    }
}

/// Returns samples of the duration of `work` on the host, in seconds.
pub fn timed(sampling_plan: &SamplingPlan, mut work: impl FnMut()) -> Vec<f64> {
    let sampled = samples(sampling_plan, |repeats| {
        let begun = Instant::now();
        for _ in 0..repeats {
            work();
        }
        Ok::<f64, Infallible>(begun.elapsed().as_secs_f64())
    });
    match sampled {
        Ok(samples) => samples,
        Err(never) => match never {},
    }
}

fn sizes(stream: MemoryStream, bytes: u64) -> String {
    let arrays = if stream == MemoryStream::Copy { 2 } else { 3 };
    format!("{arrays} x {}", mebibytes(bytes))
}

// ---- GPUs ----

/// Measures the peak rates of an adapter.
pub(crate) fn of_gpu(
    device: &mut BenchDevice,
    is_hardware: bool,
    sampling_plan: &SamplingPlan,
    recorder: &mut FigureRecorder,
) -> Result<(), DeviceError> {
    recorder.progress("multiply-adds");
    recorder.add(flops(device, sampling_plan)?);
    recorder.progress("memory");
    memory(device, is_hardware, sampling_plan, recorder)?;
    recorder.progress("transfers");
    transfers(device, sampling_plan, recorder)?;
    recorder.progress("dispatches");
    dispatches(device, sampling_plan, recorder)
}

/// Measures floating-point operations per second in registers, by the faster of two formulations.
fn flops(device: &mut BenchDevice, sampling_plan: &SamplingPlan) -> Result<Figure, DeviceError> {
    let [least, most] = INVOCATIONS;
    let sums = device.memory((DType::F32.bytes() * most) as u64)?;
    // Enough invocations to keep the device busy for a while: large devices need many.
    let mut count = least;
    loop {
        let [(_, dispatch), _] = FmaChains::new(count, sampling_plan.rounds).dispatches();
        let ready = device.prepare(&[dispatch], &[], &[&sums])?;
        device.run(&ready, 1)?;
        if count >= most || device.run(&ready, 1)?.running > sampling_plan.sample_seconds / 8.0 {
            break;
        }
        count *= 4;
    }
    let chains = FmaChains::new(count, sampling_plan.rounds);
    let (way, seconds) = fastest_way(device, sampling_plan, &chains.dispatches(), &[], &[&sums])?;
    let figure = Figure::rate(FigureKind::Peak, "peak.flops", GFLOPS, chains.flops(), &seconds);
    Ok(figure.by(way).on(format!("{count} invocations")))
}

/// Name of the fastest of several equivalent dispatches, and samples of its seconds.
fn fastest_way(
    device: &mut BenchDevice,
    sampling_plan: &SamplingPlan,
    ways: &[(&'static str, Dispatch)],
    inputs: &[&DeviceBuffer],
    outputs: &[&DeviceBuffer],
) -> Result<(&'static str, Vec<f64>), DeviceError> {
    let mut ready = Vec::with_capacity(ways.len());
    for (_, dispatch) in ways {
        ready.push(device.prepare(std::slice::from_ref(dispatch), inputs, outputs)?);
    }
    let (way, seconds) = fastest(sampling_plan, ways.len(), |way, repeats| {
        Ok::<f64, DeviceError>(device.run(&ready[way], repeats)?.running)
    })?;
    Ok((ways[way].0, seconds))
}

fn memory(
    device: &mut BenchDevice,
    is_hardware: bool,
    sampling_plan: &SamplingPlan,
    recorder: &mut FigureRecorder,
) -> Result<(), DeviceError> {
    let limits = device.gpu.limits;
    let wanted = sampling_plan.memory_bytes[usize::from(is_hardware)];
    let mut bytes = wanted.min(limits.binding_bytes).min(limits.buffer_bytes) / 256 * 256;
    let arrays = loop {
        let three = [0, 1, 2].map(|_| device.memory(bytes));
        match three {
            [Ok(x), Ok(z), Ok(y)] => break [x, z, y],
            // A device with little memory is measured on smaller arrays.
            [.., Err(DeviceError::OutOfMemory { .. })] if bytes > MEMORY_BYTES_MIN => bytes /= 2,
            [x, z, y] => break [x?, z?, y?],
        }
    };
    let [x, z, y] = &arrays;
    let count = bytes as usize / DType::F32.bytes();
    let floats = values(count);
    device.upload(x, bytemuck::cast_slice(&floats))?;
    device.upload(z, bytemuck::cast_slice(&floats))?;
    for (name, stream) in STREAMS {
        let ways = stream.dispatches(count, FACTOR);
        let (way, seconds) = fastest_way(device, sampling_plan, &ways, &[x, z], &[y])?;
        let moved = stream.bytes_per_element() * count as f64;
        let figure = Figure::rate(FigureKind::Memory, name, GBS, moved, &seconds);
        recorder.add(figure.by(way).on(sizes(stream, bytes)));
    }
    Ok(())
}

/// Measures transfers from the host to the device and back, and checks that the bytes are
/// unchanged.
fn transfers(
    device: &BenchDevice,
    sampling_plan: &SamplingPlan,
    recorder: &mut FigureRecorder,
) -> Result<(), DeviceError> {
    let bytes = sampling_plan.transfer_bytes.min(device.gpu.limits.buffer_bytes) / 256 * 256;
    let memory = device.memory(bytes)?;
    let staging = device.staging(bytes)?;
    let sent = values(bytes as usize / DType::F32.bytes());
    let sent: &[u8] = bytemuck::cast_slice(&sent);
    let mut up = Vec::new();
    let mut down = Vec::new();
    // Warm-up: the first transfers allocate and touch pages, also of the host's memory, which takes
    // several times as long as the transfer.
    device.upload(&memory, sent)?;
    let mut read = vec![0; sent.len()];
    device.read(&memory, &staging, &mut read)?;
    let begun = Instant::now();
    while !sampling_plan.is_enough(up.len(), begun) {
        up.push(device.upload(&memory, sent)?);
        read.fill(0);
        down.push(device.read(&memory, &staging, &mut read)?);
        if read != sent {
            return Err(DeviceError::Refused {
                adapter: device.gpu.name.clone(),
                what: "a readback".into(),
                why: "other bytes came back than were sent".into(),
            });
        }
    }
    for (name, seconds) in [("transfer.upload", up), ("transfer.readback", down)] {
        let figure = Figure::rate(FigureKind::Transfer, name, GBS, bytes as f64, &seconds);
        recorder.add(figure.on(mebibytes(bytes)));
    }
    Ok(())
}

/// Measures the overhead of an empty dispatch: many in one pass, and one with its own wait.
fn dispatches(
    device: &mut BenchDevice,
    sampling_plan: &SamplingPlan,
    recorder: &mut FigureRecorder,
) -> Result<(), DeviceError> {
    let sums = device.memory(256)?;
    let [(_, empty), _] = FmaChains::new(0, 0).dispatches();
    let ready = device.prepare(&[empty], &[], &[&sums])?;
    let in_pass = samples(sampling_plan, |repeats| {
        device.run(&ready, repeats).map(|timing| timing.recording + timing.running)
    })?;
    let alone = samples(sampling_plan, |repeats| {
        let begun = Instant::now();
        for _ in 0..repeats {
            device.run(&ready, 1)?;
        }
        Ok::<_, DeviceError>(begun.elapsed().as_secs_f64())
    })?;
    for (name, seconds) in [("dispatch.in_pass", in_pass), ("dispatch.round_trip", alone)] {
        recorder.add(Figure::duration(FigureKind::Dispatch, name, "us", 1e6, &seconds));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_spread_and_not_zero() {
        let values = values(100_000);
        assert_eq!(values.len(), 100_000);
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        assert!(mean.abs() < 0.01 && values.iter().all(|v| (-0.5..=0.5).contains(v)));
        let zeros = values.iter().filter(|v| **v == 0.0).count();
        assert!(zeros < 10, "{zeros}");
    }
}
