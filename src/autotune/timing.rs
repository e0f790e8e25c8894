//! Benchmark of the variants of a call at its real shape, on random input.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use crate::device::{DeviceError, Gpu, Timestamps};
use crate::kernels::harness::{generate, upload_new};
use crate::kernels::{
    BoundDispatch, Caps, DeviceClass, OpCall, OwnedCall, Pipelines, Variant, source,
};

/// Target duration of one sample, in which the cost of a submission vanishes.
const SAMPLE: Duration = Duration::from_millis(4);

/// The most runs in one sample.
const RUNS_MAX: u32 = 500;

/// Samples of a variant; sampling ends early if the two fastest ones agree within [`AGREEMENT`].
const SAMPLES: std::ops::RangeInclusive<usize> = 3..=10;
const AGREEMENT: f64 = 0.03;

/// Pruning: a variant is not timed further if it is slower than the best one by this factor after
/// one run, which may include warm-up, after one sample, and after the minimum number of samples.
const PRUNE_RATIOS: [f64; 3] = [3.0, 1.5, 1.1];

/// Length of the random pattern that fills an input repeatedly: drawing millions of numbers would
/// take longer than measuring.
const PATTERN: usize = 4099;

/// Words of the block with which large inputs are filled: whole patterns, about 4 MiB.
const BLOCK: usize = 256 * PATTERN;

/// Returns a buffer of so many words that repeats a pattern, which is as long as [`PATTERN`] or as
/// the buffer. A large one is filled by the device: the host holds one block, and sends no more.
fn filled(gpu: &Gpu, pattern: &[u32], words: usize) -> Result<wgpu::Buffer, DeviceError> {
    let repeated = pattern.iter().copied().cycle().take(words.min(BLOCK));
    let block: Vec<u32> = repeated.collect();
    let source = upload_new(gpu, bytemuck::cast_slice(&block))?;
    if words <= BLOCK {
        return Ok(source);
    }
    let buffer = gpu.storage("tuning", 4 * words as u64)?;
    let mut encoder = gpu.device.create_command_encoder(&Default::default());
    for first in (0..words).step_by(BLOCK) {
        let (at, bytes) = (4 * first as u64, 4 * BLOCK.min(words - first) as u64);
        encoder.copy_buffer_to_buffer(&source, 0, &buffer, at, bytes);
    }
    gpu.submit_and_wait(encoder)?;
    Ok(buffer)
}

/// Buffers of a call at its real shape, on which its variants are timed.
pub struct VariantTimer<'a> {
    gpu: &'a Gpu,
    inputs: Vec<wgpu::Buffer>,
    outputs: Vec<wgpu::Buffer>,
    timestamps: Option<Timestamps>,
    /// Staging buffer of the timestamps.
    staging: wgpu::Buffer,
}

impl<'a> VariantTimer<'a> {
    /// Allocates and fills the buffers of a call.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory, or if the device fails.
    pub fn new(gpu: &'a Gpu, owned_call: &OwnedCall) -> Result<Self, DeviceError> {
        let count = |dims: &Vec<usize>| dims.iter().product::<usize>();
        let fills = owned_call.fills();
        let input = |(index, dims): (usize, &Vec<usize>)| {
            let pattern = generate(fills[index], PATTERN.min(count(dims)), index).map(|v| v as f32);
            let pattern: Vec<u32> = bytemuck::pod_collect_to_vec(pattern.as_view().bytes());
            filled(gpu, &pattern, count(dims))
        };
        let output = |dims: &Vec<usize>| gpu.storage("tuning", 4 * count(dims) as u64);
        Ok(Self {
            gpu,
            inputs: owned_call.inputs.iter().enumerate().map(input).collect::<Result<_, _>>()?,
            outputs: owned_call.outputs.iter().map(output).collect::<Result<_, _>>()?,
            timestamps: Timestamps::new(gpu, 1)?,
            staging: gpu.readback(16)?,
        })
    }

    /// Returns the seconds that a variant takes, the least of several samples; of fewer if it is
    /// far slower than `best`, or if `until` has passed.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device fails.
    pub fn time(
        &mut self,
        pipelines: &mut Pipelines,
        variant: &Variant,
        best: Option<f64>,
        until: Instant,
    ) -> Result<f64, DeviceError> {
        let (inputs, outputs) = (&self.inputs, &self.outputs);
        let bound =
            BoundDispatch::of_buffers(self.gpu, pipelines, &variant.dispatches, inputs, outputs)?;
        let hopeless = |seconds: f64, factor| best.is_some_and(|best| seconds > factor * best);
        // Warm-up: the driver may still compile.
        let warm = self.sample(&bound, 1)?;
        if hopeless(warm, PRUNE_RATIOS[0]) {
            return Ok(warm);
        }
        let mut runs = runs_for(warm);
        let mut fastest = vec![self.sample(&bound, runs)?];
        while fastest.len() < *SAMPLES.end() {
            let is_enough = fastest.len() >= *SAMPLES.start();
            let agree = || fastest[1] - fastest[0] <= AGREEMENT * fastest[0];
            let settled = is_enough && (agree() || hopeless(fastest[0], PRUNE_RATIOS[2]));
            if settled || hopeless(fastest[0], PRUNE_RATIOS[1]) || Instant::now() >= until {
                break;
            }
            runs = runs.max(runs_for(fastest[0]));
            fastest.push(self.sample(&bound, runs)?);
            fastest.sort_by(f64::total_cmp);
        }
        Ok(fastest[0])
    }

    /// Returns the seconds per run of `runs` runs in one submission, by the device's clock or else
    /// by the host's.
    fn sample(&mut self, bound: &[BoundDispatch], runs: u32) -> Result<f64, DeviceError> {
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        {
            let timestamp_writes = self.timestamps.as_mut().and_then(Timestamps::next_pass);
            let descriptor = wgpu::ComputePassDescriptor { label: None, timestamp_writes };
            let mut pass = encoder.begin_compute_pass(&descriptor);
            for _ in 0..runs {
                bound.iter().for_each(|dispatch| dispatch.record(&mut pass));
            }
        }
        let resolved = self.timestamps.as_ref().and_then(|ticks| ticks.resolve(&mut encoder));
        let started = Instant::now();
        self.gpu.submit_and_wait(encoder)?;
        let elapsed = started.elapsed().as_secs_f64();
        let mut measured = None;
        if let (Some(timestamps), Some((buffer, bytes))) = (&mut self.timestamps, resolved) {
            let ticks = self.gpu.read(&self.staging, &[(&buffer, 0, bytes)])?;
            measured = timestamps.busy_seconds(&ticks);
            timestamps.forget();
        }
        // A device time that is zero or exceeds the wall time is discarded.
        let is_usable = |seconds: &f64| *seconds > 0.0 && *seconds <= elapsed;
        let seconds = measured.filter(is_usable).unwrap_or(elapsed);
        Ok(seconds / f64::from(runs))
    }
}

/// Returns the number of runs of so many seconds that fill a sample.
fn runs_for(seconds: f64) -> u32 {
    (SAMPLE.as_secs_f64() / seconds.max(1e-9)).ceil().clamp(1.0, f64::from(RUNS_MAX)) as u32
}

/// Returns the order in which variants are timed, as indices into `variants`: first the one chosen
/// without measurements, then, on a software adapter, those without workgroup memory (barriers are
/// slow there) and the plain one last, on hardware those with it.
pub fn timing_order(call: &OpCall, variants: &[Variant], caps: &Caps) -> Vec<usize> {
    let is_software = caps.class == DeviceClass::Software;
    let unmeasured = default_variant(call, variants, caps);
    let mut order: Vec<usize> = (0..variants.len()).collect();
    order.sort_by_key(|&index| {
        (index != unmeasured, index == 0, Reverse(shares(&variants[index]) != is_software), index)
    });
    // On GPUs the plain variant is there to be right, and may take a hundred times as long.
    order.retain(|&index| is_software || index != 0 || variants.len() == 1);
    order
}

/// Returns true if the invocations of a workgroup share memory.
fn shares(variant: &Variant) -> bool {
    let mut texts = variant.dispatches.iter().map(|dispatch| source::text(&dispatch.shader));
    texts.any(|text| text.contains("var<workgroup>"))
}

/// Returns the index of the variant that the twin dispatches without measurements.
pub fn default_variant(call: &OpCall, variants: &[Variant], caps: &Caps) -> usize {
    let twin = crate::kernels::twin(call.op);
    let dispatches = twin.map(|twin| (twin.dispatch)(call, caps)).unwrap_or_default();
    variants.iter().position(|variant| variant.dispatches == dispatches).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autotune::catalog::catalog_calls;
    use crate::kernels::testing::for_each_gpu;
    use crate::kernels::{Caps, twin};

    fn product() -> OwnedCall {
        catalog_calls().into_iter().find(|p| p.op.to_string() == "matmul a b^T").unwrap()
    }

    /// Workgroup memory is likely to be fast on hardware, and is no candidate on the processor.
    /// There the plain variant comes last, and on hardware not at all.
    #[test]
    fn the_likeliest_variants_come_first() {
        let owned_call = product();
        let call = owned_call.call();
        for class in [DeviceClass::Software, DeviceClass::Hardware] {
            let caps = Caps { class, ..Caps::EVERY };
            let is_software = class == DeviceClass::Software;
            let variants = (twin(call.op).unwrap().variants)(&call, &caps);
            let chosen = default_variant(&call, &variants, &caps);
            assert!(chosen > 0, "the call is large enough for a tile");
            assert_eq!(shares(&variants[chosen]), !is_software);
            let order = timing_order(&call, &variants, &caps);
            assert_eq!(order[0], chosen);
            let plain = order.iter().position(|index| *index == 0);
            assert_eq!(plain, is_software.then_some(order.len() - 1));
            let rest = &order[1..order.len() - usize::from(is_software)];
            let shared: Vec<bool> = rest.iter().map(|at| shares(&variants[*at])).collect();
            assert!(shared.is_sorted_by_key(|shares| !shares), "{shared:?}");
            assert_eq!(shared.contains(&true), !is_software);
            assert!(shared.contains(&false));
        }
    }

    #[test]
    fn large_inputs_repeat_the_pattern_across_blocks() {
        let pattern: Vec<u32> = (0..PATTERN as u32).collect();
        let words = 2 * BLOCK + 5;
        for_each_gpu(|gpu, _| {
            let buffer = filled(gpu, &pattern, words).unwrap();
            let staging = gpu.readback(4 * words as u64).unwrap();
            let bytes = gpu.read(&staging, &[(&buffer, 0, 4 * words as u64)]).unwrap();
            let read: Vec<u32> = bytemuck::pod_collect_to_vec(&bytes);
            assert!(read.iter().eq(pattern.iter().cycle().take(words)), "{}", gpu.name);
        });
    }

    #[test]
    fn more_work_takes_longer() {
        let small = product();
        let mut large = small.clone();
        // Four times the rows.
        large.inputs[0][0] *= 4;
        large.outputs[0][0] *= 4;
        for_each_gpu(|gpu, pipelines| {
            let mut time = |owned_call: &OwnedCall| {
                let call = owned_call.call();
                let plain = (twin(call.op).unwrap().variants)(&call, &Caps::EVERY).swap_remove(0);
                let mut timer = VariantTimer::new(gpu, owned_call).unwrap();
                let until = Instant::now() + Duration::from_secs(60);
                timer.time(pipelines, &plain, None, until).unwrap()
            };
            let (few, many) = (time(&small), time(&large));
            assert!(many > 1.5 * few, "{few} s and {many} s on {}", gpu.name);
        });
    }
}
