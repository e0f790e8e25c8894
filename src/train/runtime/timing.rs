//! Benchmark of devices: times each on real micro-batches, first alone and then concurrently with
//! other devices, because devices may share a processor or a bus. The batch split and the
//! excluded devices follow from the timings.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::device_thread::{DeviceThread, PendingJob};
use super::expected_step::{ExpectedStep, fastest_alone};
use super::step::Inputs;
use potluck_core::format::milliseconds;
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::Executor;
use potluck_parallel::ReduceSite;
use potluck_parallel::collective::Chunk;
use potluck_parallel::planner::balance::{
    DeviceSelection, ThroughputModel, apportion, give_at_least, give_each_a_sample, makespan,
    select_devices,
};
use potluck_parallel::planner::links::RingLinks;
use potluck_parallel::planner::profile::line;

/// Timed repetitions of a micro-batch. The result is the fastest for a device that runs alone, and
/// the mean for concurrent devices.
const REPEATS: u32 = 3;

/// Threshold of a clear speedup: a time below this fraction of the other time.
const CLEARLY: f64 = 0.9;

/// Function that returns the inputs of a micro-batch with a number of rows.
pub type Probe = Arc<dyn Fn(usize) -> Inputs + Send + Sync>;

/// Measured split of the batch among devices.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BatchSplit {
    /// Positions of the selected devices; `counts` are the samples of each.
    pub members: Vec<usize>,
    pub counts: Vec<u32>,
    /// Maximum micro-batch of each selected device.
    pub micro_batches: Vec<u32>,
    /// Sentences for the user on excluded devices.
    pub notes: Vec<String>,
    /// Devices that are used although a step would be shorter without them.
    pub cost: Option<CostOfDevices>,
    /// Expected step of the selected devices; `None` for a single device, which is not timed.
    pub expected: Option<ExpectedStep>,
}

/// Ratio of the times of a step from which a note says that devices make it longer.
const TOLD_COST: f64 = 1.02;

/// Cost of devices that are used only because the user requested them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CostOfDevices {
    /// Positions of the devices.
    pub devices: Vec<usize>,
    /// Seconds of a step with them and without them.
    pub with_s: f64,
    pub without_s: f64,
}

impl CostOfDevices {
    /// Returns the cost of devices with these names as a sentence for the user.
    pub fn sentence(&self, names: &[&str]) -> String {
        let (slow, them, are) =
            if names.len() == 1 { ("slows", "it", "is") } else { ("slow", "them", "are") };
        format!(
            "{} {slow} training down ({} ms per step with {them}, {} ms without), but {are} used \
             as requested",
            names.join(", "),
            milliseconds(self.with_s),
            milliseconds(self.without_s)
        )
    }

    /// Returns true if a step is longer by more than two measurements of the same differ.
    fn is_worth_telling(&self) -> bool {
        self.with_s >= TOLD_COST * self.without_s
    }
}

impl BatchSplit {
    /// Assigns all samples to one device.
    pub fn of_one(batch: u32, micro_batch: u32) -> Self {
        Self {
            members: vec![0],
            counts: vec![batch],
            micro_batches: vec![micro_batch],
            notes: Vec::new(),
            cost: None,
            expected: None,
        }
    }
}

/// Error of a device during its timing, with its index.
#[derive(Debug)]
pub(crate) struct TimingFailure {
    pub index: usize,
    pub error: DeviceError,
}

/// Batch to split, and its limits.
pub(crate) struct BatchToSplit<'a> {
    /// Samples of the batch.
    pub batch: u32,
    /// Maximum micro-batch of each device.
    pub rows: &'a [u32],
    /// Minimum number of samples of a device.
    pub rows_min: u32,
    /// True to use all devices, even if some make a step longer.
    pub(crate) takes_all: bool,
    /// Network between the devices, if they are on several nodes.
    pub(crate) network: Option<&'a Network>,
}

/// Network between devices of several nodes.
pub(crate) struct Network {
    pub links: RingLinks,
    /// Number of the node of each device.
    pub node_of_device: Vec<u32>,
    /// Bytes of the gradients, and also of the updated parameters.
    pub gradient_bytes: f64,
    /// True if gradients are sent during the backward pass, and parameters during the forward pass
    /// of the next step.
    pub is_overlapped: bool,
}

/// Seconds between two transfers of the state to the first node: the default of
/// `train.checkpoint_minutes` with several nodes.
const STATE_INTERVAL_S: f64 = 120.0;

/// Factor by which devices of only other nodes must be faster than one of the first node, which
/// saves the state and reads the batches: more than the noise of timings.
const AWAY: f64 = 1.05;

/// Fraction of the last micro-batch of a step that hides the sums of gradients: the backward pass
/// is about two thirds of it, and the first gradients are complete after a part of that.
const HIDDEN: f64 = 0.5;

/// Fraction of the first micro-batch that hides the transfer of updated parameters: the forward
/// pass is about a third of it, and its first blocks wait for their parameters.
const HIDDEN_GATHER: f64 = 0.25;

impl Network {
    fn nodes(&self, set: &[usize]) -> Vec<u32> {
        set.iter().map(|device| self.node_of_device[*device]).collect()
    }

    /// Returns true if links between devices have measured rates, which slow each step.
    fn is_slow_between(&self, set: &[usize]) -> bool {
        self.links.collective_s(&self.nodes(set), self.gradient_bytes) > 0.0
    }

    /// Returns the seconds that a step on these devices waits for the network, with micro-batches
    /// of at least `last_s`. All-gathers are not hidden after a step whose parameters were read
    /// before the next one.
    fn exposed_s(&self, set: &[usize], last_s: f64) -> f64 {
        let collective_s = self.links.collective_s(&self.nodes(set), self.gradient_bytes);
        if !self.is_overlapped {
            return 2.0 * collective_s;
        }
        let exposed = |part: f64| (collective_s - part * last_s).max(0.0);
        exposed(HIDDEN) + exposed(HIDDEN_GATHER)
    }

    /// Returns the factor by which runs on devices of only other nodes take longer than their
    /// steps: parameters and the two moments of AdamW are sent to the first node.
    fn factor_of_states(&self, set: &[usize]) -> f64 {
        if set.iter().any(|device| self.node_of_device[*device] == 0) {
            return 1.0;
        }
        let shard = 3.0 * self.gradient_bytes / set.len() as f64;
        let mut travels_s = 0.0;
        for device in set {
            travels_s += self.links.transfer_s(self.node_of_device[*device], 0, shard);
        }
        AWAY * (1.0 + travels_s / STATE_INTERVAL_S)
    }
}

/// Times devices on micro-batches of `probe`, selects the fastest set of them unless all are used,
/// and divides a batch among them. Concurrent timings take at most `timeout`. Only sets of devices
/// that `hold` the moments of their shards are selected; returns `None` without such a set.
///
/// # Errors
/// Returns the first device that fails, with its error.
pub(crate) fn split_by_speed(
    drivers: &[&DeviceThread],
    probe: &Probe,
    request: BatchToSplit,
    timeout: Duration,
    hold: &dyn Fn(&[usize]) -> bool,
) -> Result<Option<BatchSplit>, TimingFailure> {
    let BatchToSplit { batch, rows, rows_min, takes_all, network } = request;
    let mut solo = Vec::new();
    for (index, (driver, &rows)) in drivers.iter().zip(rows).enumerate() {
        let probe = Arc::clone(probe);
        let timed = driver
            .run("timing micro-batches", move |device| time_alone(device, &probe, rows, rows_min));
        solo.push(timed.map_err(|error| TimingFailure { index, error })?);
    }
    let mut timer = SetTimer {
        drivers,
        solo: &solo,
        probe,
        batch,
        rows_min,
        timeout,
        hold,
        network,
        gives_each_a_sample: false,
        tried: HashMap::new(),
        failed: None,
    };
    let mut selection = select_devices(drivers.len(), |set| timer.step_seconds(set));
    let mut cost = None;
    let has_idle = |timer: &SetTimer| {
        timer.tried.get(&selection.taken).is_some_and(|tried| tried.counts.contains(&0))
    };
    if takes_all && (selection.taken.len() < drivers.len() || has_idle(&timer)) {
        let all: Vec<usize> = (0..drivers.len()).collect();
        timer.gives_each_a_sample = true;
        let with_s = timer.step_seconds(&all);
        let devices = selection.excluded.iter().map(|left| left.device).collect();
        cost = Some(CostOfDevices { devices, with_s, without_s: selection.step_s });
        selection = DeviceSelection { taken: all, excluded: Vec::new(), step_s: with_s };
    }
    if let Some(error) = timer.failed {
        return Err(error);
    }
    if selection.step_s.is_infinite() {
        return Ok(None);
    }
    let TriedSet { counts, step_s, network_s, .. } =
        timer.tried.remove(&selection.taken).unwrap_or_default();
    let names: Vec<&str> = drivers.iter().map(|driver| driver.name()).collect();
    let micro_batches: Vec<u32> = solo.iter().map(|one| one.speed.micro_batch).collect();
    let mut split = split_of(selection, counts, &names, &micro_batches, rows_min);
    if network.is_some_and(|network| network.is_slow_between(&split.members)) {
        let of_network = if network_s > 0.0 {
            format!(", {} of them for the network between nodes", milliseconds(network_s))
        } else {
            ", in which the network between nodes is hidden".into()
        };
        let step_ms = milliseconds(step_s);
        split.notes.push(format!("a step is expected to take {step_ms} ms{of_network}"));
    }
    split.expected =
        Some(expected(&split.members, step_s, &names, &solo_steps(&solo, batch, hold)));
    if let Some(mut cost) = cost {
        cost.devices.retain(|device| split.members.contains(device));
        if !cost.devices.is_empty() && cost.is_worth_telling() {
            split.cost = Some(cost);
        }
    }
    Ok(Some(split))
}

/// Step times of sets of devices, each timed once.
struct SetTimer<'a> {
    drivers: &'a [&'a DeviceThread],
    solo: &'a [SoloTiming],
    probe: &'a Probe,
    batch: u32,
    rows_min: u32,
    timeout: Duration,
    hold: &'a dyn Fn(&[usize]) -> bool,
    network: Option<&'a Network>,
    /// True if each device of a set has a sample, although a step may be shorter otherwise.
    gives_each_a_sample: bool,
    tried: HashMap<Vec<usize>, TriedSet>,
    /// The first failure, after which no further set is timed.
    failed: Option<TimingFailure>,
}

/// Timed set of devices.
#[derive(Default)]
struct TriedSet {
    /// Samples of each device.
    counts: Vec<u32>,
    /// Seconds of a step, including the wait for the network between nodes.
    step_s: f64,
    network_s: f64,
    /// Seconds of a step with its part of the work between steps, by which sets are compared.
    cost_s: f64,
}

impl SetTimer<'_> {
    /// Returns the seconds of a step on a set of devices, ascending, with its part of the work
    /// between steps; infinite if they do not hold the state, if the batch has too few samples for
    /// them, or after a failure.
    fn step_seconds(&mut self, set: &[usize]) -> f64 {
        if !(self.hold)(set) || self.failed.is_some() {
            return f64::INFINITY;
        }
        let mut speeds = vec![self.solo[set[0]].speed];
        let mut exchange_s = 0.0;
        if set.len() > 1 {
            match time_concurrently(self.drivers, set, self.solo, self.probe, self.timeout) {
                Ok(measured) => speeds = measured,
                Err(error) => {
                    self.failed = Some(error);
                    return f64::INFINITY;
                }
            }
            for device in set {
                exchange_s = f64::max(exchange_s, self.solo[*device].exchange_s);
            }
        }
        let mut counts = apportion(self.batch, &speeds);
        if self.gives_each_a_sample {
            // With fewer samples than devices some have none.
            give_each_a_sample(&mut counts);
        }
        give_at_least(&mut counts, self.rows_min);
        // Without idle devices the others have larger shards.
        let mut working = Vec::new();
        for (device, count) in set.iter().zip(&counts) {
            if *count > 0 {
                working.push(*device);
            }
        }
        if !(self.hold)(&working) && !give_each_a_sample(&mut counts) {
            return f64::INFINITY;
        }
        let network_s = self.network_s(&working, &counts, &speeds);
        let step_s = makespan(&counts, &speeds) + exchange_s + network_s;
        let mut cost_s = step_s;
        if let Some(network) = self.network {
            cost_s *= network.factor_of_states(&working);
        }
        // A device without a sample must not be selected because of the noise of timings.
        for (idle, count) in set.iter().zip(&counts) {
            if *count > 0 {
                continue;
            }
            let others: Vec<usize> = set.iter().copied().filter(|one| one != idle).collect();
            if let Some(without) = self.tried.get(&others) {
                cost_s = cost_s.max(without.cost_s);
            }
        }
        self.tried.insert(set.to_vec(), TriedSet { counts, step_s, network_s, cost_s });
        cost_s
    }

    /// Returns the seconds that a step waits for the network between working devices; `counts` and
    /// `speeds` have an entry per device of a set.
    fn network_s(&self, working: &[usize], counts: &[u32], speeds: &[ThroughputModel]) -> f64 {
        let Some(network) = self.network else { return 0.0 };
        let mut last_s = f64::INFINITY;
        for (count, speed) in counts.iter().zip(speeds) {
            if *count > 0 {
                last_s = last_s.min(speed.seconds((*count).min(speed.micro_batch)));
            }
        }
        network.exposed_s(working, last_s)
    }
}

/// Returns the split among the selected devices with samples, by `counts`, with notes on all
/// others.
fn split_of(
    selection: DeviceSelection,
    counts: Vec<u32>,
    names: &[&str],
    micro_batches: &[u32],
    rows_min: u32,
) -> BatchSplit {
    let mut split = BatchSplit {
        members: Vec::new(),
        counts: Vec::new(),
        micro_batches: Vec::new(),
        notes: Vec::new(),
        cost: None,
        expected: None,
    };
    for left in &selection.excluded {
        split.notes.push(left.sentence(names[left.device]));
    }
    for (device, count) in selection.taken.into_iter().zip(counts) {
        if count == 0 {
            // It was selected before faster ones, with which it has no samples.
            let name = names[device];
            split.notes.push(format!("{name} is left out: no sample is left for it"));
            continue;
        }
        split.members.push(device);
        split.counts.push(count);
        split.micro_batches.push(micro_batches[device]);
    }
    if rows_min > 1 && split.members.len() < names.len() {
        split.notes.push(format!(
            "each device gets at least {rows_min} samples of a step, for batch normalization"
        ));
    }
    split
}

/// Seconds of a step with the whole batch on each device alone; infinite for one that does not hold
/// the state.
fn solo_steps(solo: &[SoloTiming], batch: u32, hold: &dyn Fn(&[usize]) -> bool) -> Vec<f64> {
    let mut seconds = Vec::with_capacity(solo.len());
    for (device, one) in solo.iter().enumerate() {
        seconds.push(if hold(&[device]) { one.speed.seconds(batch) } else { f64::INFINITY });
    }
    seconds
}

/// Expected step of the members of a split, given the seconds of each device alone.
fn expected(members: &[usize], step_s: f64, names: &[&str], solo_s: &[f64]) -> ExpectedStep {
    ExpectedStep {
        step_s: Some(step_s),
        solo_s: members.iter().map(|member| solo_s[*member]).collect(),
        fastest: fastest_alone(names.iter().copied(), solo_s),
    }
}

/// Timing of a device that runs alone.
#[derive(Clone, Copy, Debug)]
struct SoloTiming {
    speed: ThroughputModel,
    /// Seconds of a micro-batch of the maximum size.
    full_s: f64,
    /// Seconds to read all gradients back to the host and to upload all parameters.
    exchange_s: f64,
}

/// Times micro-batches of all rows that fit and of half of them. Selects the smaller size if it is
/// clearly faster per sample: a larger one may not fit a cache.
fn time_alone(
    device: &mut dyn Executor,
    probe: &Probe,
    rows: u32,
    rows_min: u32,
) -> Result<SoloTiming, DeviceError> {
    let full_s = run_timed(device, probe, rows, REPEATS)?;
    let half = rows.div_ceil(2);
    if half == rows || half < rows_min {
        let speed =
            ThroughputModel { fixed_s: 0.0, row_s: full_s / f64::from(rows), micro_batch: rows };
        return Ok(SoloTiming { speed, full_s, exchange_s: device.time_exchange()? });
    }
    let half_s = run_timed(device, probe, half, REPEATS)?;
    let per_row = full_s / f64::from(rows);
    let per_row_of_half = half_s / f64::from(half);
    if per_row_of_half < CLEARLY * per_row {
        let speed = ThroughputModel { fixed_s: 0.0, row_s: per_row_of_half, micro_batch: half };
        return Ok(SoloTiming { speed, full_s: half_s, exchange_s: device.time_exchange()? });
    }
    let [fixed_s, row_s] = line(half, half_s, rows, full_s);
    let speed = ThroughputModel { fixed_s, row_s, micro_batch: rows };
    Ok(SoloTiming { speed, full_s, exchange_s: device.time_exchange()? })
}

/// Seconds of forward and backward on `rows` rows, by [`Executor::time_micro_batch`].
fn run_timed(
    device: &mut dyn Executor,
    probe: &Probe,
    rows: u32,
    repeats: u32,
) -> Result<f64, DeviceError> {
    device.time_micro_batch(&probe(rows as usize), rows, repeats)
}

/// Times concurrent devices. Returns their speeds when alone, scaled by the measured
/// slowdown from shared resources.
fn time_concurrently(
    drivers: &[&DeviceThread],
    members: &[usize],
    solo: &[SoloTiming],
    probe: &Probe,
    timeout: Duration,
) -> Result<Vec<ThroughputModel>, TimingFailure> {
    let mut works = Vec::with_capacity(members.len());
    for &member in members {
        let probe = Arc::clone(probe);
        let rows = solo[member].speed.micro_batch;
        let work = move |device: &mut dyn Executor| run_timed(device, &probe, rows, 1);
        works.push((drivers[member], work));
    }
    let ended = time_together(works, "timing micro-batches", timeout);
    let mut speeds = Vec::new();
    for (&index, ended) in members.iter().zip(ended) {
        let SoloTiming { speed, full_s, .. } = solo[index];
        let seconds = ended.map_err(|error| TimingFailure { index, error })?;
        let slower = seconds / full_s;
        speeds.push(ThroughputModel {
            fixed_s: speed.fixed_s * slower,
            row_s: speed.row_s * slower,
            ..speed
        });
    }
    Ok(speeds)
}

/// Repeats work on several devices at the same time until all have done it [`REPEATS`] times, or
/// for the timeout because one of them hangs. Returns the mean of the seconds that the work of each
/// device returns.
pub(crate) fn time_together<W>(
    works: Vec<(&DeviceThread, W)>,
    what: &str,
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
        pending.push(driver.submit(what, move |device| contended(device, &mut work, timed, until)));
    }
    let mut ended = Vec::with_capacity(pending.len());
    for job in pending {
        ended.push(job.and_then(PendingJob::wait));
    }
    ended
}

/// Guard that counts a device as timed when it is dropped, also without a start of its job.
struct Timed(Arc<AtomicUsize>);

impl Drop for Timed {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns the mean seconds of work while other devices run too. Repeats until all have been timed,
/// or until the deadline.
fn contended(
    device: &mut dyn Executor,
    work: &mut dyn FnMut(&mut dyn Executor) -> Result<f64, DeviceError>,
    timed: Timed,
    until: Instant,
) -> Result<f64, DeviceError> {
    let untimed = Arc::clone(&timed.0);
    let mut timed = Some(timed);
    let mut count = 0;
    let mut sum = 0.0;
    while count < REPEATS || (untimed.load(Ordering::Relaxed) > 0 && Instant::now() < until) {
        sum += work(device)?;
        count += 1;
        if count == REPEATS {
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

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_parallel::planner::links::LinkRate;

    #[test]
    fn states_that_travel_count_and_equal_devices_of_other_nodes_come_second() {
        let network = |bytes_per_s: f64| Network {
            links: RingLinks(vec![Some(LinkRate { bytes_per_s, round_trip_s: 0.0 }); 2]),
            node_of_device: vec![0, 1, 1],
            gradient_bytes: 60e6,
            is_overlapped: true,
        };
        let slow = network(2.5e6);
        assert_eq!(slow.factor_of_states(&[0]), 1.0);
        // Three times 60 MB at 2.5 MB/s in two minutes.
        assert!((slow.factor_of_states(&[1]) - 1.05 * 1.6).abs() < 1e-9);
        assert!((slow.factor_of_states(&[1, 2]) - 1.05 * 1.6).abs() < 1e-9);
        assert_eq!(slow.factor_of_states(&[0, 1]), 1.0);
        let fast = network(1e9);
        assert!((1.05..1.06).contains(&fast.factor_of_states(&[1])));
        let unknown = Network { links: RingLinks(vec![None, None]), ..network(1.0) };
        assert_eq!(unknown.factor_of_states(&[1]), 1.05);
        assert!(slow.is_slow_between(&[0, 1]) && !unknown.is_slow_between(&[0, 1]));
        assert!(!slow.is_slow_between(&[1, 2]) && !slow.is_slow_between(&[]));
    }

    #[test]
    fn the_cost_of_devices_is_a_sentence() {
        let cost = CostOfDevices { devices: vec![1], with_s: 0.412, without_s: 0.38 };
        let expected = "cpu slows training down (412 ms per step with it, 380 ms without), but is \
                        used as requested";
        assert_eq!(cost.sentence(&["cpu"]), expected);
        let both = cost.sentence(&["cpu", "Intel UHD 620"]);
        assert!(both.starts_with("cpu, Intel UHD 620 slow training down (412 ms"), "{both}");
        assert!(cost.is_worth_telling());
        assert!(!CostOfDevices { with_s: 0.2464, without_s: 0.2460, ..cost }.is_worth_telling());
    }
}
