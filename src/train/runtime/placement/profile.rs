//! Measured profile of the requested devices: what the planner needs to know of them.

use std::sync::Arc;
use std::time::Instant;

use super::candidates::node_of;
use super::open_one::{BegunOpening, RankOpening, RequestedDevices};
use super::open_profile::measurement_s_max;
use super::pipeline::{MeasuredBlocks, measure_blocks, part_of};
use super::planned::PlanPurpose;
use super::types::PlacementRequest;
use crate::runtime::open::{OpenDevice, no_room};
use crate::runtime::remote::FIRST_NODE;
use crate::runtime::timing::{REPEATS, time_together};
use crate::runtime::{RuntimeError, memory};
use potluck_core::{DType, Wording};
use potluck_graph::{Graph, Plan};
use potluck_kernels::autotune;
use potluck_kernels::device::{AdapterKind, Selection};
use potluck_kernels::exec::{BlockTiming, Executor, Moments};
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

/// Seconds of a message between threads of this process.
pub(crate) const THREAD_MESSAGE_S: f64 = 20e-6;

/// Number of the processor of this host, on which the CPU devices and software adapters compute.
const HOST: u32 = 0;

/// Measured profile.
pub struct MeasuredProfile {
    pub profile: PlanProfile,
    /// False if a run had too little time for the second size of micro-batches.
    pub is_complete: bool,
}

/// Measures the requested devices for a model: its blocks in two sizes of micro-batches, transfers,
/// updates, the slowdown of devices that share the host's processor, and links between nodes.
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
    let input_bytes = input_bytes_per_row(&whole.graph);
    let mut profiles = Vec::new();
    for (position, selection) in devices.selections.iter().enumerate() {
        let [read_s, write_s] = many.transfers_s[position];
        profiles.push(DeviceProfile {
            name: devices.names[position].clone(),
            kind: many.kinds[position],
            node: node_of(selection),
            blocks: block_speeds(position, &many, few.as_ref()),
            load_row_s: input_bytes as f64 / DType::F32.bytes() as f64 * write_s,
            update_element_s: 0.0,
            read_back: LinkModel::of_element_s(read_s),
            upload: LinkModel::of_element_s(write_s),
            host,
            shares: None,
            memory: memory::limit(selection, request.opening.device_memory_mib)
                .map(|(bytes, _)| bytes),
            micro_batch: None,
            refusals: refusals_of(&few.as_ref().unwrap_or(&many).refusals[position]),
        });
    }
    measure_together(request, devices, &mut profiles, &whole, report)?;
    let links = if request.nodes.nodes.is_empty() {
        vec![vec![LinkModel::INSTANT]]
    } else {
        links_between(&request.nodes.measure_links()?)
    };
    let is_complete = few.is_some() || few_rows == many_rows;
    let profile = PlanProfile { devices: profiles, links, thread_message_s: THREAD_MESSAGE_S };
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

/// Links between all nodes, of which a ring is measured.
pub(crate) fn links_between(ring: &RingLinks) -> Vec<Vec<LinkModel>> {
    let nodes = ring.0.len();
    let mut links = Vec::with_capacity(nodes);
    for from in 0..nodes {
        let mut of_sender = Vec::with_capacity(nodes);
        for to in 0..nodes {
            of_sender.push(match ring.between(from, to) {
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

/// Device that is open for the measurements of updates and of the shared processor.
struct OpenBlock {
    position: usize,
    device: OpenDevice,
    bytes: usize,
}

/// Measures updates on each kind of device of this process, and the slowdown of the ones on the
/// host's processor while all of them compute. Devices of other nodes take the mean of the others.
fn measure_together(
    request: &PlacementRequest,
    devices: RequestedDevices,
    profiles: &mut [DeviceProfile],
    whole: &Plan,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<(), RuntimeError> {
    let mut opened = Vec::new();
    for (position, selection) in devices.selections.iter().enumerate() {
        let is_first = profiles[position].kind == position;
        if node_of(selection) != FIRST_NODE || !(is_first || is_on_host(selection)) {
            continue;
        }
        let Some(block) = longest_block(&profiles[position]) else { continue };
        let part = Arc::new(part_of(whole, block));
        opened.extend(open_block(request, devices, position, part, report)?);
    }
    let mut sum = 0.0;
    let mut count = 0;
    for one in &opened {
        if profiles[one.position].kind != one.position {
            continue;
        }
        let seconds = update_seconds(request, one)?;
        sum += seconds;
        count += 1;
        for kind in profiles.iter_mut().filter(|other| other.kind == one.position) {
            kind.update_element_s = seconds;
        }
    }
    for remote in profiles.iter_mut().filter(|one| one.node != FIRST_NODE) {
        remote.update_element_s = sum / f64::from(count.max(1));
    }
    opened.retain(|one| is_on_host(&devices.selections[one.position]));
    if opened.len() < 2 {
        return Ok(());
    }
    for (position, slowdown) in slowdowns(request, &opened, profiles)? {
        profiles[position].shares = Some(SharedProcessor { number: HOST, slowdown });
    }
    equalize_slowdowns(profiles);
    Ok(())
}

/// Returns true if a device computes on the processor of this host.
fn is_on_host(selection: &Selection) -> bool {
    match selection {
        Selection::Cpu { .. } => true,
        Selection::Adapter(adapter) => adapter.kind == AdapterKind::Software,
        Selection::Offered(_) => false,
    }
}

/// Block that takes a device the longest, if it can run one.
fn longest_block(profile: &DeviceProfile) -> Option<u32> {
    let seconds = |block: usize| profile.blocks[block].at(1).sum_s();
    let possible = (0..profile.blocks.len()).filter(|block| seconds(*block).is_finite());
    possible.max_by(|a, b| seconds(*a).total_cmp(&seconds(*b))).map(|block| block as u32)
}

/// Opens a device with a block and the moments of its parameters; `None` if they do not fit.
fn open_block(
    request: &PlacementRequest,
    devices: RequestedDevices,
    position: usize,
    part: Arc<Plan>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<Option<OpenBlock>, RuntimeError> {
    let selection = &devices.selections[position];
    let moments = Moments::from(request.optimizer.moments());
    let bytes = memory::needed(selection, &part, &moments);
    let opening = RankOpening {
        position,
        selection,
        name: &devices.names[position],
        plan: part,
        tensor_shares: &[],
        moments,
    };
    let opened = BegunOpening::begin(request, opening, None)
        .and_then(|opening| opening.finish(request, report));
    let device = match opened {
        Ok(device) => device,
        Err(error) if error.is_capacity_error() => return Ok(None),
        Err(error) => return Err(error.of_position(position, devices.selections.len())),
    };
    let seed = request.seed;
    let ready = device.driver.run("initialization", move |device| device.initialize(seed));
    match ready.map_err(|error| no_room(error, bytes)) {
        Ok(()) => Ok(Some(OpenBlock { position, device, bytes })),
        Err(error) if error.is_capacity_error() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Seconds to update one parameter of a block.
fn update_seconds(request: &PlacementRequest, one: &OpenBlock) -> Result<f64, RuntimeError> {
    let update = request.optimizer.update(0.0, 1);
    let timed = one.device.driver.run("timing updates", move |device| device.time_update(&update));
    timed.map_err(|error| no_room(error, one.bytes))
}

/// Slowdown of each open device while all compute, by its position.
fn slowdowns(
    request: &PlacementRequest,
    opened: &[OpenBlock],
    profiles: &[DeviceProfile],
) -> Result<Vec<(usize, f64)>, RuntimeError> {
    let Some(probe) = &request.probe else {
        return Err(RuntimeError::Defect("devices are measured without inputs".into()));
    };
    let mut works = Vec::new();
    for one in opened {
        let rows = one.device.rows as usize;
        let inputs = probe(rows);
        let block = longest_block(&profiles[one.position]).unwrap_or(0) as usize;
        let work = move |device: &mut dyn Executor| {
            let BlockTiming { forward_s, backward_input_s, backward_weight_s, .. } =
                device.time_blocks(&inputs, rows, REPEATS)?[block];
            Ok(forward_s + backward_input_s + backward_weight_s)
        };
        works.push((&one.device.driver, work));
    }
    let ended = time_together(works, "timing blocks", REPEATS, request.opening.deadline);
    let mut slowdowns = Vec::new();
    for (one, ended) in opened.iter().zip(ended) {
        let seconds = ended.map_err(|error| no_room(error, one.bytes))?;
        let profile = &profiles[one.position];
        let alone = longest_block(profile).map_or(0.0, |block| {
            let times: BlockTimes = profile.blocks[block as usize].at(one.device.rows);
            times.sum_s()
        });
        // Noise cannot make a device faster beside others.
        let slowdown = if alone > 0.0 { (seconds / alone).max(1.0) } else { 1.0 };
        slowdowns.push((one.position, slowdown));
    }
    Ok(slowdowns)
}
