//! Measured profile of open devices that hold the whole model: micro-batches in two sizes, the
//! passes of each block, transfers, updates, and the slowdown of the devices of a node while all of
//! them compute.

use std::sync::Arc;

use super::block_work::{block_flops, half_parts};
use super::candidates::is_on_host;
use super::open_measured::ReservedDevice;
use super::profile::{FEWER, addition_rate, links_of, network_s_per_byte, thread_message_s};
use super::types::PlacementRequest;
use crate::runtime::memory;
use crate::runtime::timing::{CLEARLY, Probe, REPEATS, TimingFailure, slowdowns_together};
use potluck_graph::{Plan, Update};
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::{BlockTiming, Executor, Moments};
use potluck_parallel::planner::cut::BlockTimes;
use potluck_parallel::planner::links::RingLinks;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::planner::profile::{
    BlockSpeed, DeviceProfile, PlanProfile, SharedProcessor, equalize_slowdowns, line,
};
use potluck_parallel::sim::LinkModel;

/// Relative difference of the speeds of two devices of one kind up to which they count as equal, as
/// fast as the fastest of them: on a machine that does other work, measurements of equal ones
/// differ as much.
const EQUAL: f64 = 0.25;

/// Longest measurement, in seconds, and as a part of the run; for a part of less than the last, no
/// measurement is cut short, because noise would decide.
const MEASUREMENT_S_MAX: f64 = 20.0;
const MEASUREMENT_PART_MAX: f64 = 0.05;
const MEASUREMENT_S_MIN: f64 = 0.1;

/// Micro-batches of the largest size that a thorough measurement of a device takes: repetitions of
/// both sizes with their warm-ups, of the blocks, and of all devices together.
const THOROUGH_MICRO_BATCHES: f64 = 14.0;

/// The same of a brief one: one alone, and one of all devices together.
const BRIEF_MICRO_BATCHES: f64 = 3.0;

/// Returns the most seconds of a measurement for a run of `steps` steps, each of which takes
/// devices these seconds alone.
pub(crate) fn measurement_s_max(
    steps: Option<u64>,
    step_s_of_devices: impl IntoIterator<Item = f64>,
) -> f64 {
    let Some(steps) = steps else { return MEASUREMENT_S_MAX };
    let steps_per_s: f64 = step_s_of_devices.into_iter().map(|step_s| 1.0 / step_s).sum();
    let part_s = MEASUREMENT_PART_MAX * steps as f64 / steps_per_s;
    part_s.clamp(MEASUREMENT_S_MIN, MEASUREMENT_S_MAX)
}

/// Measured profile of open devices.
pub(crate) struct OpenProfile {
    pub profile: PlanProfile,
    /// False if there was too little time for the times of the blocks, which then count as equal.
    pub has_block_times: bool,
}

/// What is measured on one device.
struct SoloRequest {
    probe: Probe,
    rows: u32,
    rows_min: u32,
    first: FirstTiming,
    /// Most seconds of the measurement of this device.
    most_s: f64,
    update: Update,
    /// Moments for which the device has reserved memory.
    reserve: Moments,
}

/// Timing of a device that runs alone.
#[derive(Clone, Debug)]
struct SoloTiming {
    /// Most samples of a micro-batch that are not clearly slower than half of them.
    micro_batch: u32,
    /// Samples of the timed micro-batch, which may be fewer, and its seconds.
    timed_rows: u32,
    timed_s: f64,
    /// Line of a micro-batch over the samples.
    fixed_s: f64,
    row_s: f64,
    /// By block; empty if there was too little time for a thorough measurement.
    blocks: Vec<BlockTiming>,
    /// Seconds to read one element back, and to write one.
    read_s: f64,
    write_s: f64,
    update_element_s: f64,
}

impl SoloTiming {
    /// Seconds of a sample of the timed micro-batch.
    fn sample_s(&self) -> f64 {
        self.timed_s / f64::from(self.timed_rows.max(1))
    }

    fn is_thorough(&self) -> bool {
        !self.blocks.is_empty()
    }
}

/// Measures open devices for a model, each alone and then those of each node together. `staged` are
/// the plans of stages of pipelines.
///
/// # Errors
/// Returns the first device that fails, with its error.
pub(crate) fn open_profile(
    request: &PlacementRequest,
    probe: &Probe,
    opened: &[ReservedDevice],
    staged: &Plans,
    links: Option<&RingLinks>,
) -> Result<OpenProfile, TimingFailure> {
    let rows_min = request.plans.of_rows(1).rows_min();
    let first = first_timings(probe, opened, rows_min)?;
    let step_s =
        first.iter().map(|one| one.seconds * f64::from(request.batch) / f64::from(one.rows));
    let most_s = measurement_s_max(request.steps, step_s) / opened.len() as f64;
    let mut solo: Vec<SoloTiming> = Vec::new();
    for (index, one) in opened.iter().enumerate() {
        let asked = SoloRequest {
            probe: Arc::clone(probe),
            rows: one.device.rows,
            rows_min,
            first: first[index],
            most_s,
            update: request.optimizer.update(0.0, 1),
            reserve: one.reserve.clone(),
        };
        let timed =
            one.device.driver.run("timing micro-batches", move |device| alone(device, asked));
        solo.push(timed.map_err(|error| TimingFailure { index, error })?);
    }
    let kinds = kinds(opened, &solo);
    let weights = weight_parts(&staged.of_rows(1));
    let host = LinkModel { latency_s: 0.0, bytes_per_s: addition_rate() };
    let setting = request.opening.device_memory_mib;
    let mut devices = Vec::with_capacity(opened.len());
    for (index, one) in opened.iter().enumerate() {
        // Equal devices have equal times, so that noise does not divide their samples.
        let timing = &solo[kinds[index]];
        devices.push(DeviceProfile {
            name: one.device.driver.name().to_string(),
            kind: kinds[index],
            node: one.node(),
            is_on_host: is_on_host(&one.selection),
            blocks: block_speeds(timing, &weights),
            // Loading is a part of the timed micro-batches.
            load_row_s: 0.0,
            update_element_s: timing.update_element_s,
            read_back: LinkModel::of_element_s(timing.read_s),
            upload: LinkModel::of_element_s(timing.write_s),
            host,
            shares: None,
            memory: memory::limit(&one.selection, setting).map(|(bytes, _)| bytes),
            micro_batch: Some(solo[index].micro_batch),
            refusals: Vec::new(),
        });
    }
    measure_slowdowns(request, probe, opened, &solo, &mut devices)?;
    let thread_message_s = thread_message_s();
    let half_parts = half_parts(request.plans, request.micro_batch.min(request.batch).max(1));
    let profile = PlanProfile {
        links: links_of(&devices, links),
        network_s_per_byte: network_s_per_byte(links),
        receives_inputs: request.nodes.receive_inputs(),
        devices,
        thread_message_s,
        half_parts,
    };
    let has_block_times = solo.iter().all(SoloTiming::is_thorough);
    Ok(OpenProfile { profile, has_block_times })
}

/// Small micro-batch, with its seconds.
#[derive(Clone, Copy)]
struct FirstTiming {
    rows: u32,
    seconds: f64,
}

/// Times a small micro-batch on each device, after one in which drivers compile.
fn first_timings(
    probe: &Probe,
    opened: &[ReservedDevice],
    rows_min: u32,
) -> Result<Vec<FirstTiming>, TimingFailure> {
    let mut first = Vec::with_capacity(opened.len());
    for (index, one) in opened.iter().enumerate() {
        let rows = one.device.rows.div_ceil(FEWER).max(rows_min).min(one.device.rows);
        let probe = Arc::clone(probe);
        let timed = one.device.driver.run("timing micro-batches", move |device| {
            let inputs = probe(rows as usize);
            device.time_micro_batch(&inputs, rows, 1)?;
            device.time_micro_batch(&inputs, rows, 1)
        });
        let seconds = timed.map_err(|error| TimingFailure { index, error })?;
        first.push(FirstTiming { rows, seconds });
    }
    Ok(first)
}

/// Times a device alone: micro-batches of all rows that fit and of half of them, the passes of its
/// blocks, transfers and updates. Selects the smaller size if it is clearly faster per sample: a
/// larger one may not fit a cache. If there is too little time for that, micro-batches are timed
/// once, in one size or in a small one.
fn alone(device: &mut dyn Executor, asked: SoloRequest) -> Result<SoloTiming, DeviceError> {
    let SoloRequest { probe, rows, rows_min, first, most_s, update, reserve } = asked;
    let timed = |device: &mut dyn Executor, rows: u32, repeats: u32| {
        device.time_micro_batch(&probe(rows as usize), rows, repeats)
    };
    let row_s = first.seconds / f64::from(first.rows);
    let expected_s = f64::from(rows) * row_s;
    let is_thorough = THOROUGH_MICRO_BATCHES * expected_s <= most_s;
    let mut timing = SoloTiming {
        micro_batch: rows,
        timed_rows: first.rows,
        timed_s: first.seconds,
        fixed_s: 0.0,
        row_s,
        blocks: Vec::new(),
        read_s: 0.0,
        write_s: 0.0,
        update_element_s: 0.0,
    };
    if BRIEF_MICRO_BATCHES * expected_s <= most_s {
        timing.timed_rows = rows;
        timing.timed_s = timed(device, rows, if is_thorough { REPEATS } else { 1 })?;
        timing.row_s = timing.timed_s / f64::from(rows);
    }
    let half = rows.div_ceil(2);
    if is_thorough && half < rows && half >= rows_min {
        let half_s = timed(device, half, REPEATS)?;
        let row_of_half_s = half_s / f64::from(half);
        if row_of_half_s < CLEARLY * timing.row_s {
            timing.micro_batch = half;
            timing.timed_rows = half;
            timing.timed_s = half_s;
            timing.row_s = row_of_half_s;
        } else {
            let [fixed_s, row_s] = line(half, half_s, rows, timing.timed_s);
            timing.fixed_s = fixed_s;
            timing.row_s = row_s;
        }
    }
    if is_thorough {
        let rows = timing.micro_batch as usize;
        timing.blocks = device.time_blocks(&probe(rows), rows, 1)?;
    }
    [timing.read_s, timing.write_s] = transfer_seconds(device)?;
    match device.set_moments(reserve) {
        Ok(()) => timing.update_element_s = device.time_update(&update)?,
        // The shard of a smaller group may fit.
        Err(DeviceError::OutOfMemory { .. }) => {}
        Err(error) => return Err(error),
    }
    Ok(timing)
}

/// Seconds to read an element of the gradients back, and to write one of the parameters.
pub(super) fn transfer_seconds(device: &mut dyn Executor) -> Result<[f64; 2], DeviceError> {
    let elements = updated_elements(device.plan()).max(1) as f64;
    let (read_s, write_s) = device.time_exchange()?;
    Ok([read_s / elements, write_s / elements])
}

fn updated_elements(plan: &Plan) -> usize {
    plan.updated_and_held().map(|bucket| plan.buckets[bucket.index()].length).sum()
}

/// By device: the fastest one of its kind, which is of the same identity on the same node, and
/// hardly faster.
fn kinds(opened: &[ReservedDevice], solo: &[SoloTiming]) -> Vec<usize> {
    let sample_s: Vec<f64> = solo.iter().map(SoloTiming::sample_s).collect();
    let is_alike = |one: usize, other: usize| {
        opened[one].device.identity == opened[other].device.identity
            && opened[one].node() == opened[other].node()
    };
    kinds_by_speed(&sample_s, is_alike)
}

fn kinds_by_speed(sample_s: &[f64], is_alike: impl Fn(usize, usize) -> bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sample_s.len()).collect();
    order.sort_by(|a, b| sample_s[*a].total_cmp(&sample_s[*b]));
    let mut kinds: Vec<usize> = (0..sample_s.len()).collect();
    let mut fastest: Vec<usize> = Vec::new();
    for device in order {
        let of_kind = fastest.iter().find(|first| {
            is_alike(**first, device) && sample_s[device] <= (1.0 + EQUAL) * sample_s[**first]
        });
        match of_kind {
            Some(first) => kinds[device] = *first,
            None => fastest.push(device),
        }
    }
    kinds
}

/// By block: the part of the gradients of parameters in the operations of its backward pass, which
/// is not known from a device that runs both as one pass.
fn weight_parts(plan: &Plan) -> Vec<f64> {
    let mut parts = Vec::new();
    for flops in block_flops(&plan.graph) {
        let all = flops.backward_input + flops.backward_weight;
        parts.push(if all > 0.0 { flops.backward_weight / all } else { 0.0 });
    }
    parts
}

/// Times of the blocks as lines over the samples. They add up to the timed micro-batch, in which
/// the device did not wait between passes.
fn block_speeds(timing: &SoloTiming, weights: &[f64]) -> Vec<BlockSpeed> {
    let mut times = Vec::with_capacity(weights.len());
    for (block, part) in weights.iter().enumerate() {
        let BlockTiming { forward_s, backward_input_s, backward_weight_s, .. } =
            timing.blocks.get(block).copied().unwrap_or_default();
        let is_merged = backward_weight_s == 0.0;
        let part = if is_merged { *part } else { 0.0 };
        times.push(BlockTimes {
            forward_s,
            backward_input_s: (1.0 - part) * backward_input_s,
            backward_weight_s: backward_weight_s + part * backward_input_s,
        });
    }
    let mut all_s: f64 = times.iter().map(BlockTimes::sum_s).sum();
    if all_s <= 0.0 {
        // Each block takes the same time, and each of its passes a third of it.
        let equal = BlockTimes { forward_s: 1.0, backward_input_s: 1.0, backward_weight_s: 1.0 };
        times.fill(equal);
        all_s = equal.sum_s() * times.len() as f64;
    }
    let mut speeds = Vec::with_capacity(times.len());
    for times in times {
        speeds.push(BlockSpeed {
            fixed: times.scaled(timing.fixed_s / all_s),
            per_row: times.scaled(timing.row_s / all_s),
        });
    }
    speeds
}

/// Measures the slowdown of the devices of each node that has several, while all of them compute.
fn measure_slowdowns(
    request: &PlacementRequest,
    probe: &Probe,
    opened: &[ReservedDevice],
    solo: &[SoloTiming],
    devices: &mut [DeviceProfile],
) -> Result<(), TimingFailure> {
    let of_node = |node: u32| opened.iter().filter(|one| one.node() == node).count();
    let shared: Vec<usize> =
        (0..opened.len()).filter(|index| of_node(opened[*index].node()) > 1).collect();
    let mut works = Vec::with_capacity(shared.len());
    for &index in &shared {
        let probe = Arc::clone(probe);
        let rows = solo[index].timed_rows;
        let work = move |device: &mut dyn Executor| {
            device.time_micro_batch(&probe(rows as usize), rows, 1)
        };
        // The time alone that the profile has, of which the slowdown is a factor.
        let alone_s = f64::from(rows) * solo[devices[index].kind].sample_s();
        works.push((&opened[index].device.driver, alone_s, work));
    }
    let is_thorough = shared.iter().all(|index| solo[*index].is_thorough());
    let repeats = if is_thorough { REPEATS } else { 1 };
    let deadline = request.opening.deadline;
    let slowdowns = slowdowns_together(works, repeats, deadline);
    for (&index, slowdown) in shared.iter().zip(slowdowns) {
        let slowdown = slowdown.map_err(|error| TimingFailure { index, error })?;
        devices[index].shares = Some(SharedProcessor { number: opened[index].node(), slowdown });
    }
    equalize_slowdowns(devices);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timing(blocks: Vec<BlockTiming>) -> SoloTiming {
        SoloTiming {
            micro_batch: 4,
            timed_rows: 4,
            timed_s: 0.5,
            fixed_s: 0.1,
            row_s: 0.1,
            blocks,
            read_s: 0.0,
            write_s: 0.0,
            update_element_s: 0.0,
        }
    }

    #[test]
    fn blocks_add_up_to_the_micro_batch_and_split_a_merged_backward_pass() {
        let block = |forward_s: f64, backward_input_s: f64| BlockTiming {
            forward_s,
            backward_input_s,
            ..BlockTiming::default()
        };
        let speeds = block_speeds(&timing(vec![block(1.0, 1.0), block(2.0, 4.0)]), &[0.0, 0.5]);
        let sum: f64 = speeds.iter().map(|speed| speed.at(4).sum_s()).sum();
        assert!((sum - 0.5).abs() < 1e-12);
        let second = speeds[1].at(4);
        assert!((second.backward_weight_s - 0.125).abs() < 1e-12, "{second:?}");
        assert!((second.backward_input_s - 0.125).abs() < 1e-12, "{second:?}");
        assert!((speeds[0].at(4).backward_weight_s).abs() < 1e-12);
        // Without times of blocks, each takes the same part.
        let equal = block_speeds(&timing(Vec::new()), &[0.0, 0.5]);
        assert!((equal[0].at(4).sum_s() - 0.25).abs() < 1e-12 && equal[0] == equal[1]);
    }

    #[test]
    fn devices_of_a_kind_are_hardly_slower_than_the_fastest_of_them() {
        let of = |sample_s: &[f64]| kinds_by_speed(sample_s, |_, _| true);
        assert_eq!(of(&[1.0, 0.8, 1.25]), [1, 1, 2]);
        assert_eq!(of(&[1.25, 1.0, 1.0]), [1, 1, 1]);
        assert_eq!(kinds_by_speed(&[1.0, 1.0], |_, _| false), [0, 1]);
    }

    #[test]
    fn measurement_takes_a_twentieth_of_a_run_and_twenty_seconds_at_most() {
        assert_eq!(measurement_s_max(None, [1.0, 1.0]), 20.0);
        assert_eq!(measurement_s_max(Some(1_000_000), [1.0, 1.0]), 20.0);
        // 100 steps of 0.2 s on two devices take 10 s; a slow one hardly counts.
        assert!((measurement_s_max(Some(100), [0.2, 0.2]) - 0.5).abs() < 1e-12);
        assert!(measurement_s_max(Some(100), [0.2, 1e6]) < 1.01);
        assert_eq!(measurement_s_max(Some(3), [0.001, 0.001]), 0.1);
    }
}
