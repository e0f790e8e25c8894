//! Benchmark of the variants of a call at its real shape, on random input.

use std::cmp::Reverse;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::bind::CallBuffers;
use crate::device::{DeviceError, Gpu, Timestamps};
use crate::harness::generate;
use crate::pace::{PART_SECONDS, fitting, nominal_seconds, part_seconds};
use crate::{
    BoundDispatch, Caps, Cost, DeviceClass, OpCall, OwnedCall, PaceTrial, Pipelines, Variant,
    source, twin,
};
use potluck_core::HostTensor;

/// Target duration of one sample, in which the cost of a submission vanishes.
const SAMPLE: Duration = Duration::from_millis(4);

/// The most runs in one sample.
const RUNS_MAX: u32 = 500;

/// Samples of a variant; sampling ends early if the two fastest ones agree within [`AGREEMENT`].
const SAMPLES: std::ops::RangeInclusive<usize> = 3..=10;
const AGREEMENT: f64 = 0.03;

/// Samples of a variant that takes longer than a part of a dispatch, including its first run.
const LONG_SAMPLES: usize = 2;

/// Pruning: a variant is not timed further if it is slower than the best one by these factors:
/// after one run, which may include warm-up; after one sample; and after the minimum number of
/// samples.
const PRUNE_RATIOS: [f64; 3] = [3.0, 1.5, 1.1];

/// Length of the random pattern that fills an input repeatedly: drawing millions of numbers would
/// take longer than measuring.
const PATTERN: usize = 4099;

/// Words of the block with which large inputs are filled: whole patterns, about 4 MiB.
const BLOCK: usize = 256 * PATTERN;

/// Buffers on which the variants of calls are timed, and the device's clock. All calls share the
/// buffers, which grow to the largest tensors.
pub(crate) struct VariantTimer<'a> {
    gpu: &'a Gpu,
    /// Source of the contents of large inputs.
    block: wgpu::Buffer,
    inputs: Vec<wgpu::Buffer>,
    outputs: Vec<wgpu::Buffer>,
    between: CallBuffers,
    /// Seconds of the current call at the nominal rates.
    seconds_max: f64,
    timestamps: Option<Timestamps>,
    /// Staging buffer of the timestamps.
    staging: wgpu::Buffer,
    /// Longest submission so far, for tests.
    longest: f64,
}

impl<'a> VariantTimer<'a> {
    /// Makes a timer without buffers for tensors.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory.
    pub fn new(gpu: &'a Gpu) -> Result<Self, DeviceError> {
        Ok(Self {
            gpu,
            block: gpu.storage("tuning", 4 * BLOCK as u64)?,
            inputs: Vec::new(),
            outputs: Vec::new(),
            between: CallBuffers::new(gpu, 0, 0)?,
            seconds_max: 0.0,
            timestamps: Timestamps::new(gpu, 1)?,
            staging: gpu.readback(16)?,
            longest: 0.0,
        })
    }

    /// Makes the buffers large enough for a call, and fills its inputs.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory, or if the device fails.
    pub fn begin(&mut self, owned_call: &OwnedCall) -> Result<(), DeviceError> {
        let inputs = word_counts(&owned_call.inputs);
        let outputs = word_counts(&owned_call.outputs);
        if self.reserve(&inputs, &outputs).is_err() {
            // Large buffers of earlier calls may take the memory.
            self.inputs.clear();
            self.outputs.clear();
            self.reserve(&inputs, &outputs)?;
        }
        for (index, (pattern, words)) in patterns(owned_call).into_iter().zip(inputs).enumerate() {
            let pattern = pattern.map(|v| v as f32);
            let pattern: Vec<u32> = bytemuck::pod_collect_to_vec(pattern.as_view().bytes());
            self.fill(&self.inputs[index], &pattern, words)?;
        }
        let call = owned_call.call();
        let cost = match twin(call.op) {
            Some(twin) => (twin.cost)(&call),
            None => Cost::default(),
        };
        self.seconds_max = nominal_seconds(cost);
        Ok(())
    }

    /// Replaces buffers that have fewer than these words.
    fn reserve(&mut self, inputs: &[usize], outputs: &[usize]) -> Result<(), DeviceError> {
        for (buffers, words) in [(&mut self.inputs, inputs), (&mut self.outputs, outputs)] {
            for (index, words) in words.iter().enumerate() {
                let bytes = 4 * *words as u64;
                if buffers.get(index).is_some_and(|buffer| buffer.size() >= bytes) {
                    continue;
                }
                // A small buffer replaces the old one, which is freed before the new one is made.
                let small = self.gpu.storage("tuning", 4)?;
                match buffers.get_mut(index) {
                    Some(old) => *old = small,
                    None => buffers.push(small),
                }
                buffers[index] = self.gpu.storage("tuning", bytes)?;
            }
        }
        Ok(())
    }

    /// Fills the first `words` words of a buffer with repetitions of a pattern, which is as long as
    /// [`PATTERN`], as the buffer, or one word. The device copies one block repeatedly, which is
    /// all that the host holds and sends.
    fn fill(
        &self,
        buffer: &wgpu::Buffer,
        pattern: &[u32],
        words: usize,
    ) -> Result<(), DeviceError> {
        let repeated = pattern.iter().copied().cycle().take(words.min(BLOCK));
        let block: Vec<u32> = repeated.collect();
        self.gpu.upload(&self.block, 0, bytemuck::cast_slice(&block));
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        for first in (0..words).step_by(BLOCK) {
            let at = 4 * first as u64;
            let bytes = 4 * BLOCK.min(words - first) as u64;
            encoder.copy_buffer_to_buffer(&self.block, 0, buffer, at, bytes);
        }
        // The block must not change before, and a lack of memory must show in this call.
        self.gpu.submit_and_wait(encoder)
    }

    /// Returns the seconds that a variant takes, the least of several samples; fewer are taken if
    /// it is far slower than `best`, or if `until` has passed. The first run is in parts that grow:
    /// the time of a variant that is far slower is predicted from some of them. `None` if `until`
    /// has passed before the end of the first run.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device fails.
    pub fn time(
        &mut self,
        pipelines: &mut Pipelines,
        variant: &Variant,
        best: Option<f64>,
        until: Instant,
    ) -> Result<Option<f64>, DeviceError> {
        let bound = self.bind(pipelines, variant)?;
        // Without a best variant, none is too slow.
        let best = best.unwrap_or(f64::INFINITY);
        // Warm-up: the driver may still compile.
        let (warm, paces) = match self.first_run(&bound, Some(until), PRUNE_RATIOS[0] * best)? {
            FirstRun::Whole { seconds, paces } => (seconds, paces),
            FirstRun::Hopeless { seconds } => return Ok(Some(seconds)),
            FirstRun::TooLate => return Ok(None),
        };
        if warm > PRUNE_RATIOS[0] * best {
            return Ok(Some(warm));
        }

        let mut runs = runs_for(warm);
        let is_long = warm > PART_SECONDS;
        let samples_least = if is_long { LONG_SAMPLES } else { *SAMPLES.start() };
        let first = if is_long { warm } else { self.sample(&bound, &paces, runs)? };
        let mut samples = vec![first];
        while samples.len() < *SAMPLES.end() {
            let fastest = samples[0];
            if fastest > PRUNE_RATIOS[1] * best || Instant::now() >= until {
                break;
            }
            if samples.len() >= samples_least
                && (samples[1] - fastest <= AGREEMENT * fastest || fastest > PRUNE_RATIOS[2] * best)
            {
                break;
            }
            runs = runs.max(runs_for(fastest));
            samples.push(self.sample(&bound, &paces, runs)?);
            samples.sort_by(f64::total_cmp);
        }
        Ok(Some(samples[0]))
    }

    /// Runs a variant once; every element of an output begins with its value in `starts`.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory, or if the device fails.
    pub fn run(
        &mut self,
        pipelines: &mut Pipelines,
        variant: &Variant,
        starts: &[f32],
    ) -> Result<(), DeviceError> {
        for (output, start) in self.outputs.iter().zip(starts) {
            self.fill(output, &[start.to_bits()], (output.size() / 4) as usize)?;
        }
        let bound = self.bind(pipelines, variant)?;
        self.first_run(&bound, None, f64::INFINITY)?;
        Ok(())
    }

    /// Writes values to ranges of an input, one after the other.
    pub fn write(&self, input: usize, ranges: &[Range<usize>], values: &[f32]) {
        let mut rest = values;
        for range in ranges {
            let (values, behind) = rest.split_at(range.len());
            let at = 4 * range.start as u64;
            self.gpu.upload(&self.inputs[input], at, bytemuck::cast_slice(values));
            rest = behind;
        }
    }

    /// Returns the elements in ranges of an output, one range after the other.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory, or if the device fails.
    pub fn read(&self, output: usize, ranges: &[Range<usize>]) -> Result<Vec<f32>, DeviceError> {
        let count: usize = ranges.iter().map(Range::len).sum();
        let staging = self.gpu.readback(4 * count as u64)?;
        let mut sources = Vec::with_capacity(ranges.len());
        for range in ranges {
            sources.push((&self.outputs[output], 4 * range.start as u64, 4 * range.len() as u64));
        }
        Ok(bytemuck::pod_collect_to_vec(&self.gpu.read(&staging, &sources)?))
    }

    /// Binds the dispatches of a variant to the buffers.
    fn bind(
        &mut self,
        pipelines: &mut Pipelines,
        variant: &Variant,
    ) -> Result<Vec<BoundDispatch>, DeviceError> {
        let workspace = (variant.workspace_bytes() as u64).max(self.between.workspace.size());
        let scratch = (variant.scratch_bytes() as u64).max(self.between.scratch.size());
        if workspace > self.between.workspace.size() || scratch > self.between.scratch.size() {
            self.between = CallBuffers::new(self.gpu, workspace as usize, scratch as usize)?;
        }
        BoundDispatch::handing_on(
            self.gpu,
            pipelines,
            &variant.dispatches,
            [&self.inputs, &self.outputs],
            &self.between,
        )
    }

    /// Runs dispatches for the first time, in parts that grow, until the predicted seconds of the
    /// dispatches so far exceed `seconds_max`, or until a time if there is one.
    fn first_run(
        &mut self,
        bound: &[BoundDispatch],
        until: Option<Instant>,
        seconds_max: f64,
    ) -> Result<FirstRun, DeviceError> {
        let mut seconds = 0.0;
        let mut paces = Vec::new();
        for dispatch in bound {
            let submission = self.gpu.submission_seconds;
            let mut trial = PaceTrial::new(dispatch.workgroups(), self.seconds_max, submission);
            while let Some((first, most)) = trial.next_part() {
                let most = if dispatch.can_split() { most } else { u32::MAX };
                let part = dispatch.part(first, most);
                let taken = self.submission(|pass| dispatch.record_part(pass, &part))?;
                trial.note(&part, taken);
                if trial.next_part().is_none() {
                    break;
                }
                if let Some(whole) = trial.predicted()
                    && seconds + whole > seconds_max
                {
                    return Ok(FirstRun::Hopeless { seconds: seconds + whole });
                }
                if until.is_some_and(|until| Instant::now() >= until) {
                    return Ok(FirstRun::TooLate);
                }
            }
            seconds += trial.seconds();
            paces.push(trial.pace().unwrap_or_default());
        }
        Ok(FirstRun::Whole { seconds, paces })
    }

    /// Returns the seconds per run of `runs` runs in one submission, or of one run in parts if it
    /// is long at these paces.
    fn sample(
        &mut self,
        bound: &[BoundDispatch],
        paces: &[f64],
        runs: u32,
    ) -> Result<f64, DeviceError> {
        let mut predicted = 0.0;
        for (dispatch, pace) in bound.iter().zip(paces) {
            if dispatch.can_split() {
                predicted += f64::from(dispatch.workgroups()) * pace;
            }
        }
        if predicted <= part_seconds(self.gpu.submission_seconds) {
            let seconds = self.submission(|pass| {
                for _ in 0..runs {
                    for dispatch in bound {
                        dispatch.record(pass);
                    }
                }
            })?;
            return Ok(seconds / f64::from(runs));
        }
        let mut seconds = 0.0;
        for (dispatch, pace) in bound.iter().zip(paces) {
            let mut first = 0;
            while first < dispatch.workgroups() {
                let most = fitting(part_seconds(self.gpu.submission_seconds), *pace);
                let part = dispatch.part(first, most);
                seconds += self.submission(|pass| dispatch.record_part(pass, &part))?;
                first = part.end;
            }
        }
        Ok(seconds)
    }

    /// Returns the seconds of a submission with one pass, which `record` fills, by the device's
    /// clock or else by the host's.
    fn submission(
        &mut self,
        mut record: impl FnMut(&mut wgpu::ComputePass),
    ) -> Result<f64, DeviceError> {
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        {
            let timestamp_writes = self.timestamps.as_mut().and_then(Timestamps::next_pass);
            let descriptor = wgpu::ComputePassDescriptor { label: None, timestamp_writes };
            record(&mut encoder.begin_compute_pass(&descriptor));
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
        let seconds = match measured {
            Some(seconds) if seconds > 0.0 && seconds <= elapsed => seconds,
            _ => elapsed,
        };
        self.longest = self.longest.max(seconds);
        Ok(seconds)
    }
}

/// Values that repeat in each input of a call.
pub(crate) fn patterns(owned_call: &OwnedCall) -> Vec<HostTensor<f64>> {
    let words = word_counts(&owned_call.inputs);
    let mut patterns = Vec::with_capacity(words.len());
    for (index, (fill, words)) in owned_call.fills().into_iter().zip(words).enumerate() {
        patterns.push(generate(fill, PATTERN.min(words), index));
    }
    patterns
}

fn word_counts(shapes: &[Vec<usize>]) -> Vec<usize> {
    shapes.iter().map(|dims| dims.iter().product()).collect()
}

enum FirstRun {
    /// It ran as a whole; `paces` are the seconds per workgroup of each dispatch.
    Whole { seconds: f64, paces: Vec<f64> },
    /// It is far slower than another variant, by the predicted seconds.
    Hopeless { seconds: f64 },
    /// The time budget was over before its end.
    TooLate,
}

/// Number of runs of this duration that fill a sample.
fn runs_for(seconds: f64) -> u32 {
    (SAMPLE.as_secs_f64() / seconds.max(1e-9)).ceil().clamp(1.0, f64::from(RUNS_MAX)) as u32
}

/// Returns the order in which variants are timed, as indices into `variants`: first the one chosen
/// without measurements; then, on a software adapter, the variants without workgroup memory
/// (barriers are slow there), with the plain one last, and on hardware the variants with it.
pub(crate) fn timing_order(call: &OpCall, variants: &[Variant], caps: &Caps) -> Vec<usize> {
    let is_software = caps.class == DeviceClass::Software;
    let unmeasured = default_variant(call, variants, caps);
    let mut order: Vec<usize> = (0..variants.len()).collect();
    order.sort_by_key(|&index| {
        (index != unmeasured, index == 0, Reverse(shares(&variants[index]) != is_software), index)
    });
    // On GPUs a plain variant that is not the choice without measurements only serves correctness,
    // and may take a hundred times as long.
    order.retain(|&index| is_software || index != 0 || index == unmeasured);
    order
}

/// Returns true if the invocations of a workgroup share memory.
fn shares(variant: &Variant) -> bool {
    let mut texts = variant.dispatches.iter().map(|dispatch| source::text(&dispatch.shader));
    texts.any(|text| text.contains("var<workgroup>"))
}

/// Index of the variant that the twin dispatches without measurements.
pub(crate) fn default_variant(call: &OpCall, variants: &[Variant], caps: &Caps) -> usize {
    let dispatches = match twin(call.op) {
        Some(twin) => (twin.dispatch)(call, caps),
        None => Vec::new(),
    };
    if let Some(chosen) = variants.iter().position(|variant| variant.dispatches == dispatches) {
        return chosen;
    }
    // The twin's choice is missing if it needs too much workspace. The last variants are for GPUs,
    // where the plain one would take a hundred times as long.
    if caps.wants_gpu_variants() { variants.len() - 1 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autotune::catalog::catalog_calls;
    use crate::device::ShaderChecks;
    use crate::testing::for_each_gpu;
    use crate::{Caps, RandomContext, twin};
    use potluck_core::rng::Key;
    use potluck_graph::{LossClasses, Op};

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

    /// The loss over a large vocabulary, whose plain variant is the one that runs unmeasured.
    #[test]
    fn a_plain_variant_that_runs_without_measurements_is_timed_on_hardware() {
        let random = RandomContext { step_key: Key::new(1), training: true };
        let inputs = vec![vec![8, 60_000], vec![8]];
        let owned_call =
            OwnedCall::new(Op::CrossEntropy(LossClasses::whole(inputs[0][1])), inputs, random)
                .unwrap();
        let call = owned_call.call();
        let caps = Caps { class: DeviceClass::Hardware, ..Caps::EVERY };
        let variants = (twin(call.op).unwrap().variants)(&call, &caps);
        assert_eq!((default_variant(&call, &variants, &caps), variants.len()), (0, 2));
        assert_eq!(timing_order(&call, &variants, &caps), [0, 1]);
    }

    #[test]
    fn large_inputs_repeat_the_pattern_across_blocks() {
        let pattern: Vec<u32> = (0..PATTERN as u32).collect();
        let words = 2 * BLOCK + 5;
        for_each_gpu(|gpu, _| {
            let mut timer = VariantTimer::new(gpu).unwrap();
            timer.reserve(&[words], &[]).unwrap();
            timer.fill(&timer.inputs[0], &pattern, words).unwrap();
            let staging = gpu.readback(4 * words as u64).unwrap();
            let bytes = gpu.read(&staging, &[(&timer.inputs[0], 0, 4 * words as u64)]).unwrap();
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
                let mut timer = VariantTimer::new(gpu).unwrap();
                timer.begin(owned_call).unwrap();
                let until = Instant::now() + Duration::from_secs(60);
                timer.time(pipelines, &plain, None, until).unwrap().unwrap()
            };
            let (few, many) = (time(&small), time(&large));
            assert!(many > 1.5 * few, "{few} s and {many} s on {}", gpu.name);
        });
    }

    /// A product that takes longer than a part on every software adapter.
    fn long_product() -> OwnedCall {
        let mut owned_call = product();
        owned_call.inputs = vec![vec![512, 512], vec![512, 512]];
        owned_call.outputs = vec![vec![512, 512]];
        owned_call
    }

    #[test]
    fn no_submission_of_timing_is_long() {
        let owned_call = long_product();
        let call = owned_call.call();
        for_each_gpu(|gpu, pipelines| {
            if gpu.checks == ShaderChecks::Enabled {
                return;
            }
            let plain = (twin(call.op).unwrap().variants)(&call, &Caps::EVERY).swap_remove(0);
            let mut timer = VariantTimer::new(gpu).unwrap();
            timer.begin(&owned_call).unwrap();
            let until = Instant::now() + Duration::from_secs(60);
            let seconds = timer.time(pipelines, &plain, None, until).unwrap().unwrap();
            let longest = timer.longest;
            println!("{}: {seconds:.3} s, longest submission {longest:.3} s", gpu.name);
            // Half of what watchdogs allow, because other processes use the processor too.
            assert!(longest < 1.0, "{longest} s of {seconds} s on {}", gpu.name);
            // Hopeless compared with a variant that takes a hundredth, and predicted from a part. A
            // pause of the processor may hide that parts agree, but not each time.
            let best = Some(0.01 * seconds);
            let predicted = timer.time(pipelines, &plain, best, until).unwrap().unwrap();
            println!("{}: predicted {predicted:.3} s", gpu.name);
            let ratio = predicted / seconds;
            assert!((0.1..10.0).contains(&ratio), "{predicted} s of {seconds} s on {}", gpu.name);
            let (inputs, outputs) = (&timer.inputs, &timer.outputs);
            let dispatches = &plain.dispatches;
            let bound = BoundDispatch::of_buffers(gpu, pipelines, dispatches, inputs, outputs);
            let bound = bound.unwrap();
            let mut is_predicted = || {
                let run = timer.first_run(&bound, Some(until), 0.0).unwrap();
                matches!(run, FirstRun::Hopeless { .. })
            };
            assert!((0..5).any(|_| is_predicted()), "never predicted on {}", gpu.name);
            // Nothing is known when the time is over after the first part.
            let now = Instant::now();
            assert_eq!(timer.time(pipelines, &plain, None, now).unwrap(), None);
        });
    }

    #[test]
    fn calls_share_their_buffers() {
        let (small, large) = (product(), long_product());
        for_each_gpu(|gpu, _| {
            let mut timer = VariantTimer::new(gpu).unwrap();
            timer.begin(&large).unwrap();
            let made = gpu.allocation_count();
            timer.begin(&small).unwrap();
            timer.begin(&large).unwrap();
            assert_eq!(gpu.allocation_count(), made, "{}", gpu.name);
        });
    }
}
