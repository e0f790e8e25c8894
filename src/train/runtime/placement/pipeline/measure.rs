//! Measurement of a model's blocks on the requested devices, one block at a time, so that a model
//! that fits on none of them can be measured.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::runtime::blocks::BlockKinds;
use crate::runtime::open::no_room;
use crate::runtime::placement::candidates::kinds;
use crate::runtime::placement::open_one::{BegunOpening, RankOpening, RequestedDevices};
use crate::runtime::placement::types::PlacementRequest;
use crate::runtime::timing::REPEATS;
use crate::runtime::{RuntimeError, memory};
use potluck_core::faults::{Fault, InjectedFault, Point};
use potluck_core::{Rank, Wording};
use potluck_graph::{Plan, PlanPart};
use potluck_kernels::autotune;
use potluck_kernels::exec::{BlockTiming, Moments};
use potluck_parallel::planner::cut::{BlockTimes, crossing_elements};

/// Shortest timing of a block: threads that were just started may share a core for some time.
pub(crate) const TIMING_MIN: Duration = Duration::from_millis(50);

/// Measured times of blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredBlocks {
    /// Samples of the micro-batch.
    pub rows: u32,
    /// By requested device: the first device of the same identity, which has the same times.
    pub kinds: Vec<usize>,
    /// Seconds for one micro-batch, by requested device and block; infinite for a block that a
    /// device cannot run.
    pub times: Vec<Vec<BlockTimes>>,
    /// Cost of a cut before a block for the device on either side, in seconds for one micro-batch,
    /// by requested device and block.
    pub cut_s: Vec<Vec<f64>>,
    /// Seconds to read an element of a tensor back, and to write one, by requested device.
    pub transfers_s: Vec<[f64; 2]>,
    /// Reason that a device cannot run a block, if it cannot, by requested device and block.
    pub refusals: Vec<Vec<Option<Wording>>>,
    /// True if such a block would fit a device without other programs.
    pub may_fit_later: bool,
}

/// Times the blocks of a model on the requested devices, for micro-batches of `rows` samples.
/// Equal blocks, and copies of a device, are timed once.
///
/// # Errors
/// Returns `RuntimeError` if a device cannot be opened or fails, or if the request has no inputs
/// for the measurement.
pub fn measure_blocks(
    request: &PlacementRequest,
    devices: RequestedDevices,
    rows: u32,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<MeasuredBlocks, RuntimeError> {
    let whole = request.plans.of_rows(rows);
    let blocks = BlockKinds::of(&whole.graph);
    let kinds = kinds(devices.selections);
    let different = (0..kinds.len()).filter(|position| kinds[*position] == *position).count();
    (request.notify)(&format!(
        "measuring {} different blocks of {} on {different} device{}",
        blocks.first.len(),
        whole.graph.blocks.len(),
        if different == 1 { "" } else { "s" }
    ));
    let elements = crossing_elements(&whole);
    let mut measured = MeasuredBlocks {
        rows,
        kinds,
        times: Vec::new(),
        cut_s: Vec::new(),
        transfers_s: Vec::new(),
        refusals: Vec::new(),
        may_fit_later: false,
    };
    for position in 0..devices.selections.len() {
        let kind = measured.kinds[position];
        if kind < position {
            measured.times.push(measured.times[kind].clone());
            measured.cut_s.push(measured.cut_s[kind].clone());
            measured.transfers_s.push(measured.transfers_s[kind]);
            measured.refusals.push(measured.refusals[kind].clone());
            continue;
        }
        let selection = &devices.selections[position];
        let setting = request.opening.device_memory_mib;
        let mut timings = Vec::new();
        let mut fault = injected(request, &measured.kinds, kind);
        for block in &blocks.first {
            let held = HeldBlock { block: *block, plan: Arc::new(part_of(&whole, *block)) };
            let needed = memory::needed(selection, &held.plan, &Moments::default());
            timings.push(match time_on(request, devices, position, held, fault.take(), report)? {
                Ok(timing) => (timing, None),
                Err(error) => {
                    measured.may_fit_later |= error.is_lack_of_memory()
                        && memory::may_fit_later(selection, setting, needed);
                    (BlockTiming::impossible(), Some(refusal(&error)))
                }
            });
        }
        let mut times = Vec::new();
        let mut cut_s = Vec::new();
        let mut refusals = Vec::new();
        for (block, elements) in elements.iter().enumerate() {
            let (timing, refusal) = &timings[blocks.of_block[block]];
            times.push(BlockTimes {
                forward_s: timing.forward_s,
                backward_input_s: timing.backward_input_s,
                backward_weight_s: timing.backward_weight_s,
            });
            // The mean of both sides: each tensor is read from one device and written to the other.
            cut_s.push(*elements as f64 * (timing.read_s + timing.write_s) / 2.0);
            refusals.push(refusal.clone());
        }
        measured.transfers_s.push(transfers_of(timings.iter().map(|(timing, _)| timing)));
        measured.times.push(times);
        measured.cut_s.push(cut_s);
        measured.refusals.push(refusals);
    }
    Ok(measured)
}

/// Mean seconds to read and to write an element over the blocks that read tensors of others.
fn transfers_of<'t>(timings: impl Iterator<Item = &'t BlockTiming>) -> [f64; 2] {
    let mut sums = [0.0; 2];
    let mut count = 0;
    for timing in timings {
        if timing.read_s > 0.0 && timing.write_s > 0.0 {
            sums[0] += timing.read_s;
            sums[1] += timing.write_s;
            count += 1;
        }
    }
    sums.map(|sum| sum / f64::from(count.max(1)))
}

/// Fault planned for one of the devices of a kind, with that device.
fn injected(
    request: &PlacementRequest,
    kinds: &[usize],
    kind: usize,
) -> Option<(usize, InjectedFault)> {
    for (position, other) in kinds.iter().enumerate() {
        // A query removes the fault, so that only devices of this kind may be asked.
        if *other != kind {
            continue;
        }
        let planned = request.faults.at_rank(Point::Timing, 0, Rank(position as u32));
        if let Some(fault) = planned.and_then(Fault::of_device) {
            return Some((position, fault));
        }
    }
    None
}

/// Returns the plan of a device that holds one block.
pub(crate) fn part_of(whole: &Plan, block: u32) -> Plan {
    let held: Vec<bool> = (0..whole.graph.blocks.len() as u32).map(|one| one == block).collect();
    let part = PlanPart { blocks: &held, runs: &[] };
    Plan::part(whole.graph.clone(), whole.options, &part)
}

/// Reason that a device cannot run a block, without the advice for a whole model.
fn refusal(error: &RuntimeError) -> Wording {
    match error {
        RuntimeError::DeviceMemory { adapter, needed, has, basis } => Wording::new(format_args!(
            "{adapter}: it needs {needed} of the device's memory, which has {has}, {basis}"
        )),
        RuntimeError::NoRoom { adapter, what, needed } => Wording::new(format_args!(
            "{adapter}: there is no memory for {what}, of {needed} that it needs"
        )),
        other => Wording::new(other),
    }
}

/// Block with the plan of a device that holds only this block.
struct HeldBlock {
    block: u32,
    plan: Arc<Plan>,
}

/// Opens a device with one block, and times it. The inner error is insufficient memory of the
/// device: others may have enough for the block.
fn time_on(
    request: &PlacementRequest,
    devices: RequestedDevices,
    position: usize,
    held: HeldBlock,
    fault: Option<(usize, InjectedFault)>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<Result<BlockTiming, RuntimeError>, RuntimeError> {
    let HeldBlock { block, plan: part } = held;
    let count = devices.selections.len();
    let selection = &devices.selections[position];
    let rows = part.options.rows;
    let moments = Moments::default();
    let needed = memory::needed(selection, &part, &moments);
    memory::require_of_host(selection, &part, &moments)?;
    let name = &devices.names[position];
    let tensor_shares = &[];
    let opening = RankOpening { position, selection, name, plan: part, tensor_shares, moments };
    let opening = BegunOpening::begin(request, opening, None);
    let opened = match opening.and_then(|opening| opening.finish(request, report)) {
        Ok(opened) => opened,
        Err(error) if error.is_capacity_error() => return Ok(Err(error)),
        Err(error) => return Err(error.of_position(position, count)),
    };
    // The caller has checked that there are inputs.
    let Some(probe) = &request.probe else {
        return Err(RuntimeError::Defect("blocks are measured without inputs".into()));
    };
    let inputs = probe(rows);
    let seed = request.seed;
    let timed = opened.driver.run("the timing of a block", move |device| {
        if let Some((_, fault)) = fault {
            device.inject_fault(fault)?;
        }
        device.initialize(seed)?;
        let started = Instant::now();
        let mut fastest = device.time_blocks(&inputs, rows, REPEATS)?[block as usize];
        while started.elapsed() < TIMING_MIN {
            fastest = fastest.fastest(device.time_blocks(&inputs, rows, REPEATS)?[block as usize]);
        }
        Ok(fastest)
    });
    match timed.map_err(|error| no_room(error, needed)) {
        Err(error) if !error.is_capacity_error() => {
            let failing = fault.map_or(position, |(position, _)| position);
            Err(error.of_position(failing, count))
        }
        timed => Ok(timed),
    }
}
