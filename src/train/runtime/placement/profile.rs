//! Measured profile of the requested devices: what the planner needs to know of them.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::block_work::half_parts;
use super::candidates::{is_on_host, node_of};
use super::links::measured_links;
use super::open_one::{BegunOpening, RankOpening, RequestedDevices};
use super::open_profile::{measurement_s_max, transfer_seconds};
use super::pipeline::{MeasuredBlocks, TIMING_MIN, measure_blocks, part_of};
use super::planned::PlanPurpose;
use super::types::PlacementRequest;
use crate::runtime::open::{OpenDevice, no_room};
use crate::runtime::timing::{Probe, REPEATS, slowdowns_together};
use crate::runtime::{RuntimeError, memory};
use potluck_core::arithmetic::median;
use potluck_core::format::counted;
use potluck_core::{DType, Wording};
use potluck_graph::{Graph, Plan};
use potluck_kernels::autotune;
use potluck_kernels::device::DeviceError;
use potluck_kernels::device::host::available_memory;
use potluck_kernels::exec::{BlockTiming, Executor, Moments};
use potluck_parallel::comm::Mailbox;
use potluck_parallel::planner::cut::BlockTimes;
use potluck_parallel::planner::links::RingLinks;
use potluck_parallel::planner::profile::{
    BlockRefusal, BlockSpeed, DeviceProfile, PlanProfile, SharedProcessor, equalize_slowdowns,
};
use potluck_parallel::sim::LinkModel;

/// Part of the samples of a micro-batch in the measurement of a small one.
pub(crate) const FEWER: u32 = 4;

/// Timed repetitions of an addition.
const ADDITIONS: u32 = 3;

/// Bytes of the arrays whose addition on the host is timed: as many as of a message.
const ADDED_BYTES: usize = 1 << 20;

/// Messages between threads that are timed, and the pause before each.
const MESSAGES: usize = 40;
const MESSAGE_PAUSE: Duration = Duration::from_micros(200);

/// Bounds of the factor by which the blocks of a model take longer one after the other than alone.
const WHOLE_BY_BLOCKS: [f64; 2] = [0.5, 2.0];

/// Measured profile.
pub struct MeasuredProfile {
    pub profile: PlanProfile,
    /// False if a run had too little time for the second size of micro-batches, or too little time
    /// for the whole model, or if memory was short that other programs may have had.
    pub is_complete: bool,
}

/// Measures the requested devices for a model: its blocks in two sizes of micro-batches, transfers,
/// updates, the slowdown of the devices of a node while all of them compute, and links between
/// nodes.
///
/// # Errors
/// Returns `RuntimeError` if a device cannot be opened or fails, or if the request has no inputs
/// for the measurement.
pub fn measure_profile(
    request: &PlacementRequest,
    devices: RequestedDevices,
    purpose: PlanPurpose,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<MeasuredProfile, RuntimeError> {
    let many_rows = request.micro_batch.min(request.batch).max(1);
    let begun = Instant::now();
    let many = measure_blocks(request, devices, many_rows, report)?;
    let few_rows = many_rows.div_ceil(FEWER);
    let is_possible = many.refusals.iter().flatten().all(Option::is_none);
    let is_in_time = 2.0 * begun.elapsed().as_secs_f64() <= measurement_s(request, &many);
    let may_skip = purpose == PlanPurpose::Run && is_possible && !is_in_time;
    let few = if few_rows < many_rows && !may_skip {
        Some(measure_blocks(request, devices, few_rows, report)?)
    } else {
        None
    };
    let whole = request.plans.of_rows(many_rows);
    let host = LinkModel { latency_s: 0.0, bytes_per_s: addition_rate() };
    let mut profiles = Vec::new();
    for (position, selection) in devices.selections.iter().enumerate() {
        let mut profile = DeviceProfile {
            name: devices.names[position].clone(),
            kind: many.kinds[position],
            node: node_of(selection),
            is_on_host: is_on_host(selection),
            blocks: block_speeds(position, &many, few.as_ref()),
            load_row_s: 0.0,
            update_element_s: 0.0,
            read_back: LinkModel::INSTANT,
            upload: LinkModel::INSTANT,
            host,
            shares: None,
            memory: memory::limit(selection, request.opening.device_memory_mib)
                .map(|(bytes, _)| bytes),
            micro_batch: None,
            refusals: refusals_of(&few.as_ref().unwrap_or(&many).refusals[position]),
        };
        set_transfers(&mut profile, &whole, many.transfers_s[position]);
        profiles.push(profile);
    }
    let most_s = match purpose {
        PlanPurpose::Run => measurement_s(request, &many) - begun.elapsed().as_secs_f64(),
        PlanPurpose::Explanation => f64::INFINITY,
    };
    let together = OpenedTogether { request, devices, whole: &whole, rows: many_rows, most_s };
    let is_whole = together.measure(&mut profiles, report)?;
    let nodes = profiles.iter().map(|device| device.node);
    let ring = measured_links(request, nodes.zip(0..), profiles.len())?;
    let links = links_of(&profiles, ring.as_ref());
    let may_fit_later =
        [Some(&many), few.as_ref()].into_iter().flatten().any(|one| one.may_fit_later);
    let is_complete = is_whole && !may_fit_later && (few.is_some() || few_rows == many_rows);
    let thread_message_s = thread_message_s();
    let half_parts = half_parts(request.plans, many_rows);
    let profile = PlanProfile {
        devices: profiles,
        links,
        network_s_per_byte: network_s_per_byte(ring.as_ref()),
        receives_inputs: request.nodes.receive_inputs(),
        thread_message_s,
        half_parts,
    };
    Ok(MeasuredProfile { profile, is_complete })
}

/// Most seconds of the measurement for a run.
fn measurement_s(request: &PlacementRequest, many: &MeasuredBlocks) -> f64 {
    let micro_batches = f64::from(request.batch) / f64::from(many.rows);
    let step_s =
        many.times.iter().map(|of| micro_batches * of.iter().map(BlockTimes::sum_s).sum::<f64>());
    measurement_s_max(request.steps, step_s)
}

/// Times of the blocks on a device as lines over the samples.
fn block_speeds(
    position: usize,
    many: &MeasuredBlocks,
    few: Option<&MeasuredBlocks>,
) -> Vec<BlockSpeed> {
    let mut speeds = Vec::new();
    for (block, of_many) in many.times[position].iter().enumerate() {
        speeds.push(match few {
            Some(few) if of_many.sum_s().is_finite() => {
                BlockSpeed::through(few.rows, few.times[position][block], many.rows, *of_many)
            }
            // The larger micro-batch does not fit the device.
            Some(few) => BlockSpeed::in_proportion(few.rows, few.times[position][block]),
            None => BlockSpeed::in_proportion(many.rows, *of_many),
        });
    }
    speeds
}

fn refusals_of(reasons: &[Option<Wording>]) -> Vec<BlockRefusal> {
    let mut refusals = Vec::new();
    for (block, reason) in reasons.iter().enumerate() {
        if let Some(reason) = reason {
            refusals.push(BlockRefusal { block: block as u32, reason: reason.to_string() });
        }
    }
    refusals
}

/// Sets the transfers of a device by its seconds to read an element back and to write one.
fn set_transfers(profile: &mut DeviceProfile, whole: &Plan, [read_s, write_s]: [f64; 2]) {
    let elements = input_bytes_per_row(&whole.graph) as f64 / DType::F32.bytes() as f64;
    profile.load_row_s = elements * write_s;
    profile.read_back = LinkModel::of_element_s(read_s);
    profile.upload = LinkModel::of_element_s(write_s);
}

/// Bytes of the inputs of a sample.
fn input_bytes_per_row(graph: &Graph) -> usize {
    graph.inputs.iter().map(|(_, id)| graph.tensor(*id).bytes(1)).sum()
}

/// Bytes of gradients per second that a thread of this host adds.
pub(crate) fn addition_rate() -> f64 {
    let count = ADDED_BYTES / DType::F32.bytes();
    let mut sums = vec![0.5f32; count];
    let gradients = vec![0.25f32; count];
    let mut fastest = f64::INFINITY;
    for _ in 0..=ADDITIONS {
        let started = Instant::now();
        // The same loop as in the ring threads.
        for (sum, gradient) in sums.iter_mut().zip(&gradients) {
            *sum += gradient;
        }
        fastest = fastest.min(started.elapsed().as_secs_f64());
        std::hint::black_box(&mut sums);
    }
    ADDED_BYTES as f64 / fastest.max(f64::MIN_POSITIVE)
}

/// Median seconds of a message to another thread of this process, which sleeps until it arrives.
pub(crate) fn thread_message_s() -> f64 {
    // With room for all of them, a receiver that starts late loses none.
    let mailbox: Mailbox<Instant> = Mailbox::new(MESSAGES);
    let receiving = mailbox.clone();
    let receiver = thread::Builder::new().name("timing of messages".into()).spawn(move || {
        let mut seconds = Vec::with_capacity(MESSAGES);
        while seconds.len() < MESSAGES
            && let Ok(sent) = receiving.recv(None)
        {
            seconds.push(sent.elapsed().as_secs_f64());
        }
        seconds
    });
    // Without another thread there is no run either, which says so.
    let Ok(receiver) = receiver else { return 0.0 };
    for _ in 0..MESSAGES {
        thread::sleep(MESSAGE_PAUSE);
        if mailbox.send(Instant::now()).is_err() {
            // The receiver has ended.
            return 0.0;
        }
    }
    let seconds = receiver.join().unwrap_or_default();
    if seconds.is_empty() { 0.0 } else { median(&seconds) }
}

/// Links between the nodes of devices, by a measured ring that has all of them; otherwise messages
/// take no time.
pub(crate) fn links_of(devices: &[DeviceProfile], ring: Option<&RingLinks>) -> Vec<Vec<LinkModel>> {
    let nodes = devices.iter().map(|device| device.node as usize + 1).max().unwrap_or(1);
    match ring {
        Some(ring) if ring.0.len() >= nodes => links_between(ring),
        _ => vec![vec![LinkModel::INSTANT; nodes]; nodes],
    }
}

/// By node: seconds of all its cores for each byte that it sends, by a measured ring.
pub(crate) fn network_s_per_byte(ring: Option<&RingLinks>) -> Vec<f64> {
    let mut seconds = Vec::new();
    for rate in ring.iter().flat_map(|ring| &ring.0) {
        seconds.push(rate.map_or(0.0, |rate| rate.processor_s_per_byte));
    }
    seconds
}

/// Links between all nodes, of which a ring is measured.
fn links_between(ring: &RingLinks) -> Vec<Vec<LinkModel>> {
    let nodes = ring.0.len();
    let mut links = Vec::with_capacity(nodes);
    for from in 0..nodes {
        let mut of_sender = Vec::with_capacity(nodes);
        for to in 0..nodes {
            of_sender.push(match ring.between(from, to).or_else(|| ring.between(to, from)) {
                // Of a link without a rate, that of the other direction.
                Some(rate) if from != to => {
                    LinkModel { latency_s: rate.round_trip_s / 2.0, bytes_per_s: rate.bytes_per_s }
                }
                _ => LinkModel::INSTANT,
            });
        }
        links.push(of_sender);
    }
    links
}

/// Device that is open for measurements with the whole model, or with a block if that does not fit.
struct OpenPart {
    position: usize,
    device: OpenDevice,
    /// Bytes of the device's memory that it needs, and of this host's.
    bytes: usize,
    host_bytes: usize,
    /// The only block that it has; `None` if it has the whole model.
    block: Option<u32>,
}

impl OpenPart {
    /// Returns the work that is timed on the device: a micro-batch of its part of the model.
    fn work(
        &self,
        probe: &Probe,
    ) -> impl FnMut(&mut dyn Executor) -> Result<f64, DeviceError> + Send + 'static {
        let rows = self.device.rows;
        let inputs = probe(rows as usize);
        let block = self.block;
        move |device: &mut dyn Executor| match block {
            None => device.time_micro_batch(&inputs, rows, 1),
            Some(block) => {
                let timings = device.time_blocks(&inputs, rows as usize, 1)?;
                let BlockTiming { forward_s, backward_input_s, backward_weight_s, .. } =
                    timings[block as usize];
                Ok(forward_s + backward_input_s + backward_weight_s)
            }
        }
    }
}

/// Measurement of devices that are open at the same time.
struct OpenedTogether<'a> {
    request: &'a PlacementRequest<'a>,
    devices: RequestedDevices<'a>,
    /// Plan of the whole model.
    whole: &'a Arc<Plan>,
    /// Samples of its micro-batch.
    rows: u32,
    /// Most seconds of the measurement with the whole model.
    most_s: f64,
}

impl OpenedTogether<'_> {
    /// Measures updates on each kind of device, the micro-batch of the whole model where it fits,
    /// and the slowdown of the devices of each node that has several while all of them compute.
    /// Returns false if some device that can run every block had no time for all of them, or no
    /// memory that other programs may have had.
    fn measure(
        &self,
        profiles: &mut [DeviceProfile],
        report: &mut dyn FnMut(&str, autotune::TuneProgress),
    ) -> Result<bool, RuntimeError> {
        let Some(probe) = &self.request.probe else {
            return Err(RuntimeError::Defect("devices are measured without inputs".into()));
        };
        let (mut opened, is_whole) = self.open(profiles, report)?;
        (self.request.notify)(&format!(
            "measuring {} on {}",
            if opened.iter().all(|one| one.block.is_none()) { "the whole model" } else { "blocks" },
            counted(opened.len(), "device", "devices")
        ));
        let mut alone_s = vec![f64::INFINITY; profiles.len()];
        let mut updated_kinds = Vec::new();
        for one in &opened {
            let seconds = self.at(one, seconds_alone(one, probe))?;
            alone_s[one.position] = seconds;
            let kind = profiles[one.position].kind;
            if updated_kinds.contains(&kind) {
                continue;
            }
            updated_kinds.push(kind);
            if profiles[one.position].read_back == LinkModel::INSTANT {
                // No block reads a tensor of another one, such as the only block of a model.
                let seconds = one.device.driver.run("timing transfers", transfer_seconds);
                let transfers_s = self.at(one, seconds)?;
                for equal in profiles.iter_mut().filter(|other| other.kind == kind) {
                    set_transfers(equal, self.whole, transfers_s);
                }
            }
            let update_s = self.at(one, update_seconds(self.request, one))?;
            for equal in profiles.iter_mut().filter(|other| other.kind == kind) {
                equal.update_element_s = update_s;
                if one.block.is_none() {
                    scale_to(equal, one.device.rows, seconds);
                }
            }
        }
        let nodes: Vec<u32> = opened.iter().map(|one| profiles[one.position].node).collect();
        opened.retain(|one| {
            let node = profiles[one.position].node;
            nodes.iter().filter(|other| **other == node).count() > 1
        });
        let mut works = Vec::with_capacity(opened.len());
        for one in &opened {
            works.push((&one.device.driver, alone_s[one.position], one.work(probe)));
        }
        let slowdowns = slowdowns_together(works, REPEATS, self.request.opening.deadline);
        for (one, slowdown) in opened.iter().zip(slowdowns) {
            let slowdown = self.at(one, slowdown)?;
            let number = profiles[one.position].node;
            profiles[one.position].shares = Some(SharedProcessor { number, slowdown });
        }
        equalize_slowdowns(profiles);
        Ok(is_whole)
    }

    /// Opens each device with the whole model where it fits, otherwise with its longest block.
    fn open(
        &self,
        profiles: &[DeviceProfile],
        report: &mut dyn FnMut(&str, autotune::TuneProgress),
    ) -> Result<(Vec<OpenPart>, bool), RuntimeError> {
        let available = available_memory();
        // A device has its memory only once it is written, so that the host cannot tell.
        let mut held = 0;
        let mut opened = Vec::new();
        let mut is_whole = true;
        let able = profiles.iter().filter(|device| device.refusals.is_empty());
        let all_s: f64 = able.map(|device| device.whole_model_s(self.rows)).sum();
        let has_time = all_s * f64::from(2 * (1 + REPEATS)) <= self.most_s;
        for (position, profile) in profiles.iter().enumerate() {
            let Some(block) = longest_block(profile) else { continue };
            let mut part = None;
            if profile.refusals.is_empty() {
                let has_memory = self.fits_host(position, self.whole, available, held);
                is_whole &= has_time && has_memory;
                if has_time && has_memory {
                    part = match self.open_part(position, None, self.whole.clone(), report)? {
                        Ok(part) => Some(part),
                        Err(error) => {
                            is_whole &= !self.may_fit_later(position, &error);
                            None
                        }
                    };
                }
            }
            if part.is_none() {
                let plan = Arc::new(part_of(self.whole, block));
                if self.fits_host(position, &plan, available, held) {
                    part = self.open_part(position, Some(block), plan, report)?.ok();
                }
            }
            if let Some(part) = part {
                held += part.host_bytes as u64;
                opened.push(part);
            }
        }
        Ok((opened, is_whole))
    }

    fn moments(&self) -> Moments {
        Moments::from(self.request.optimizer.moments())
    }

    /// True if a device that does not hold the whole model, by this error, may hold it later.
    fn may_fit_later(&self, position: usize, error: &RuntimeError) -> bool {
        let selection = &self.devices.selections[position];
        let setting = self.request.opening.device_memory_mib;
        let needed = memory::needed(selection, self.whole, &self.moments());
        error.is_lack_of_memory() && memory::may_fit_later(selection, setting, needed)
    }

    /// True if the host has memory for a plan on a device, beside `held` bytes of other devices.
    fn fits_host(&self, position: usize, plan: &Plan, available: Option<u64>, held: u64) -> bool {
        let selection = &self.devices.selections[position];
        let bytes = memory::host_bytes_of(selection, plan, &self.moments());
        let left = available.map(|available| available.saturating_sub(held));
        memory::require_of(left, bytes).is_ok()
    }

    /// Opens a device with a block, or the whole model, and the moments of its parameters. The
    /// inner error is that they do not fit.
    fn open_part(
        &self,
        position: usize,
        block: Option<u32>,
        plan: Arc<Plan>,
        report: &mut dyn FnMut(&str, autotune::TuneProgress),
    ) -> Result<Result<OpenPart, RuntimeError>, RuntimeError> {
        let selection = &self.devices.selections[position];
        let moments = self.moments();
        let bytes = memory::needed(selection, &plan, &moments);
        let host_bytes = memory::host_bytes_of(selection, &plan, &moments);
        let opening = RankOpening {
            position,
            selection,
            name: &self.devices.names[position],
            plan,
            tensor_shares: &[],
            moments,
        };
        let opened = BegunOpening::begin(self.request, opening, None)
            .and_then(|opening| opening.finish(self.request, report));
        let device = match opened {
            Ok(device) => device,
            Err(error) if error.is_capacity_error() => return Ok(Err(error)),
            Err(error) => return Err(error.of_position(position, self.devices.selections.len())),
        };
        let seed = self.request.seed;
        let ready = device.driver.run("initialization", move |device| device.initialize(seed));
        let part = OpenPart { position, device, bytes, host_bytes, block };
        match self.at(&part, ready) {
            Ok(()) => Ok(Ok(part)),
            Err(error) if error.is_capacity_error() => Ok(Err(error)),
            Err(error) => Err(error),
        }
    }

    /// The result with an error that names the device and its memory.
    fn at<T>(&self, one: &OpenPart, result: Result<T, DeviceError>) -> Result<T, RuntimeError> {
        let count = self.devices.selections.len();
        result.map_err(|error| no_room(error, one.bytes).of_position(one.position, count))
    }
}

/// Seconds of the work of a device alone.
fn seconds_alone(one: &OpenPart, probe: &Probe) -> Result<f64, DeviceError> {
    let mut work = one.work(probe);
    one.device.driver.run("timing micro-batches", move |device| {
        work(device)?;
        let started = Instant::now();
        let mut fastest = work(device)?;
        for repeat in 1.. {
            if repeat >= REPEATS && started.elapsed() >= TIMING_MIN {
                break;
            }
            fastest = fastest.min(work(device)?);
        }
        Ok(fastest)
    })
}

/// Scales the times of the blocks so that with loading they add up to `timed_s`, the time of a
/// micro-batch of `rows` samples: blocks that are timed alone find their values in caches.
fn scale_to(profile: &mut DeviceProfile, rows: u32, timed_s: f64) {
    let by_blocks_s = profile.whole_model_s(rows);
    let passes_s = timed_s - f64::from(rows) * profile.load_row_s;
    if !by_blocks_s.is_finite() || by_blocks_s <= 0.0 {
        return;
    }
    let [least, most] = WHOLE_BY_BLOCKS;
    let factor = (passes_s / by_blocks_s).clamp(least, most);
    for block in &mut profile.blocks {
        block.fixed = block.fixed.scaled(factor);
        block.per_row = block.per_row.scaled(factor);
    }
}

/// Block that takes a device the longest, if it can run one.
fn longest_block(profile: &DeviceProfile) -> Option<u32> {
    let seconds = |block: usize| profile.blocks[block].at(1).sum_s();
    let possible = (0..profile.blocks.len()).filter(|block| seconds(*block).is_finite());
    possible.max_by(|a, b| seconds(*a).total_cmp(&seconds(*b))).map(|block| block as u32)
}

/// Seconds to update one parameter.
fn update_seconds(request: &PlacementRequest, one: &OpenPart) -> Result<f64, DeviceError> {
    let update = request.optimizer.update(0.0, 1);
    one.device.driver.run("timing updates", move |device| device.time_update(&update))
}
