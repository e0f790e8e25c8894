//! Measurement of a model's blocks on the requested devices, one block at a time, so that a model
//! that fits on none of them can be measured.

use crate::autotune;
use crate::base::{Rank, Wording};
use crate::device::InjectedFault;
use crate::exec::{BlockTiming, Executor, Moments};
use crate::faults::{Fault, Point};
use crate::graph::{Plan, PlanPart, crossings};
use crate::planner::cut::BlockTimes;
use crate::runtime::blocks::BlockKinds;
use crate::runtime::open::no_room;
use crate::runtime::placement::assemble::identity;
use crate::runtime::placement::open_ranks::{RequestedDevices, open_one};
use crate::runtime::placement::types::PlacementRequest;
use crate::runtime::{RuntimeError, memory};

/// Measured times of blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredBlocks {
    /// Samples of the micro-batch.
    pub rows: u32,
    /// By requested device: the first device of the same identity, whose times it shares.
    pub kinds: Vec<usize>,
    /// Seconds for one micro-batch, by requested device, then by block. A block that a device
    /// cannot run takes forever.
    pub times: Vec<Vec<BlockTimes>>,
    /// Seconds that a cut before a block costs the device on either side of it for one
    /// micro-batch, by requested device, then by block.
    pub cut_s: Vec<Vec<f64>>,
    /// Why a device cannot run a block, if it cannot, by requested device, then by block.
    pub refusals: Vec<Vec<Option<Wording>>>,
}

/// Times the blocks of a model on the requested devices, for micro-batches of `rows` samples.
/// Equal blocks, and copies of a device, are timed once.
///
/// # Errors
/// Returns `RuntimeError` if a device cannot be opened or fails, or if the request has no inputs
/// to measure with.
pub fn measure_blocks(
    request: &PlacementRequest,
    devices: RequestedDevices,
    rows: u32,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<MeasuredBlocks, RuntimeError> {
    let whole = request.plans.of_rows(rows);
    let blocks = BlockKinds::of(&whole.graph);
    let identities: Vec<String> = devices.selections.iter().map(identity).collect();
    let first = |of: &String| identities.iter().position(|other| other == of).unwrap_or(0);
    let kinds: Vec<usize> = identities.iter().map(first).collect();
    let is_first = |position: &usize| kinds[*position] == *position;
    let different = (0..kinds.len()).filter(is_first).count();
    (request.notify)(&format!(
        "measuring {} different blocks of {} on {different} device{}",
        blocks.first.len(),
        whole.graph.blocks.len(),
        if different == 1 { "" } else { "s" }
    ));
    let elements = crossing_elements(&whole);
    let (times, cut_s, refusals) = (Vec::new(), Vec::new(), Vec::new());
    let mut measured = MeasuredBlocks { rows, kinds, times, cut_s, refusals };
    for position in 0..identities.len() {
        let kind = measured.kinds[position];
        if kind < position {
            measured.times.push(measured.times[kind].clone());
            measured.cut_s.push(measured.cut_s[kind].clone());
            measured.refusals.push(measured.refusals[kind].clone());
            continue;
        }
        let (mut timings, mut refusals) = (Vec::new(), Vec::new());
        let mut fault = injected(request, &measured.kinds, kind);
        for block in &blocks.first {
            let part = part_of(&whole, *block);
            let timed = time_on(request, (devices, position), part, fault.take(), report)?;
            refusals.push(timed.as_ref().err().map(refusal));
            timings.push(timed.unwrap_or_else(|_| BlockTiming::impossible()));
        }
        let of_block = |block: usize| timings[blocks.of_block[block]];
        let all = 0..whole.graph.blocks.len();
        let times = |block: usize| {
            let BlockTiming { forward_s, backward_input_s, backward_weight_s, .. } =
                of_block(block);
            BlockTimes { forward_s, backward_input_s, backward_weight_s }
        };
        measured.times.push(all.clone().map(times).collect());
        let refusal = |block: usize| refusals[blocks.of_block[block]].clone();
        measured.refusals.push(all.clone().map(refusal).collect());
        // The mean of both sides: one writes what the other reads back.
        let cost = |block: usize| {
            let BlockTiming { read_s, write_s, .. } = of_block(block);
            elements[block] as f64 * (read_s + write_s) / 2.0
        };
        measured.cut_s.push(all.map(cost).collect());
    }
    Ok(measured)
}

/// Returns the fault that is planned for one of the devices of a kind, with that device.
fn injected(
    request: &PlacementRequest,
    kinds: &[usize],
    kind: usize,
) -> Option<(usize, InjectedFault)> {
    let members = (0..kinds.len()).filter(|position| kinds[*position] == kind);
    let mut faults = members.filter_map(|position| {
        let planned = request.faults.at_rank(Point::Timing, 0, Rank(position as u32));
        Some((position, planned.and_then(Fault::of_device)?))
    });
    faults.next()
}

/// Returns by block the elements that cross a cut before it, in both directions.
pub fn crossing_elements(whole: &Plan) -> Vec<usize> {
    let count = whole.graph.blocks.len() as u32;
    let elements = |cut: u32| {
        let stages: Vec<u32> = (0..count).map(|block| u32::from(block >= cut)).collect();
        let crossing = crossings(&whole.graph, &stages).into_iter();
        let shapes = crossing.map(|crossing| &whole.graph.tensor(crossing.tensor).shape);
        shapes.map(|shape| shape.elements(whole.options.rows)).sum()
    };
    (0..count).map(elements).collect()
}

fn part_of(whole: &Plan, block: u32) -> Plan {
    let held: Vec<bool> = (0..whole.graph.blocks.len() as u32).map(|one| one == block).collect();
    let part = PlanPart { blocks: &held, runs: &[] };
    Plan::part(whole.graph.clone(), whole.options, &part)
}

/// Returns why a device cannot run a block, without the advice for a run of a whole model.
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

/// Opens a device with one block, and times it. The inner error is that the device is too small
/// for the block, which others may hold.
fn time_on(
    request: &PlacementRequest,
    (devices, position): (RequestedDevices, usize),
    part: Plan,
    fault: Option<(usize, InjectedFault)>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<Result<BlockTiming, RuntimeError>, RuntimeError> {
    let count = devices.selections.len();
    let (selection, name) = (&devices.selections[position], &*devices.names[position]);
    let (rows, moments) = (part.options.rows, Moments::default());
    let needed = memory::needed(selection, &part, &moments);
    memory::require_of_host(selection, &part, &moments)?;
    let opened = match open_one(request, (selection, name), part, moments, None, report) {
        Ok(opened) => opened,
        Err(error) if error.is_capacity_error() => return Ok(Err(error)),
        Err(error) => return Err(error.of_position(position, count)),
    };
    // Without inputs there is nothing to measure with, which the caller has checked.
    let none = || RuntimeError::Defect("blocks are measured without inputs".into());
    let inputs = request.probe.as_ref().ok_or_else(none)?(rows);
    let (seed, failing) = (request.seed, fault.map_or(position, |(position, _)| position));
    let job = move |device: &mut dyn Executor| {
        fault.map_or(Ok(()), |(_, fault)| device.inject_fault(fault))?;
        device.initialize(seed)?;
        device.time_block(&inputs, rows)
    };
    let timed = opened.driver.run("the timing of a block", job);
    match timed.map_err(|error| no_room(error, needed)) {
        Err(error) if !error.is_capacity_error() => Err(error.of_position(failing, count)),
        timed => Ok(timed),
    }
}
