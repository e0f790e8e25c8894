//! Prediction of a whole training step: the programs of all ranks, run by `sim` with the times of a
//! profile.

use std::sync::Arc;

use super::arrangement::Arrangement;
use super::laid_out::LaidOut;
use super::price::segment_costs;
use super::profile::{BlockSpeed, DeviceProfile, FIRST_NODE, PlanProfile};
use super::tensor::tensor_part;
use crate::collective::SEND_WINDOW;
use crate::pipeline::{runs, used_inputs};
use crate::sim::{
    Costs, InputPath, InputTransfer, LinkModel, MachineModel, ModelPart, Scenario,
    SimulationReport, one_step, run,
};
use crate::{Program, SpreadPrograms};
use potluck_core::{DType, Rank};
use potluck_graph::Plan;

/// Predicted step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Seconds of a step.
    pub seconds: f64,
    /// Seconds of a step of the same programs whose messages take no time.
    pub without_messages_s: f64,
    /// Mean over ranks of the seconds of its passes and updates.
    pub busy_s: f64,
}

/// Predicts a step of an arrangement of the profile's devices.
///
/// Included are inputs from the first node, loading, passes, tensors between stages and within
/// tensor groups, reductions and gathers with their overlap, votes, updates, and what the network
/// takes from devices on the host. Not included are the sampling of batches, which runs ahead,
/// states that ranks of other nodes send back, and work between steps such as evaluations. `None`
/// if a device cannot run one of its blocks.
pub fn step_time(
    profile: &PlanProfile,
    arrangement: &Arrangement,
    laid_out: &LaidOut,
    overlap: bool,
) -> Option<StepTime> {
    let links = rank_links(profile, arrangement);
    let spread = spread(profile, arrangement, laid_out, overlap);
    let nodes = arrangement.positions.iter().map(|position| profile.devices[*position].node);
    let control_s = profile.control_s(nodes);
    // Devices that share a processor slow each other down while they are busy, and the network
    // slows those on the host down while it carries messages: a step in which they do not tells by
    // how much.
    let mut costs = rank_costs(profile, arrangement, laid_out, &vec![1.0; links.len()])?;
    let mut busy = busy_seconds(&costs, laid_out);
    let mut step = simulated(control_s, &costs, &links, laid_out, spread.as_ref());
    let slowdowns = slowdowns(profile, arrangement, &step, &busy);
    if slowdowns.iter().any(|slowdown| *slowdown > 1.0) {
        costs = rank_costs(profile, arrangement, laid_out, &slowdowns)?;
        busy = busy_seconds(&costs, laid_out);
        step = simulated(control_s, &costs, &links, laid_out, spread.as_ref());
    }
    let busy_s = busy.iter().sum::<f64>() / busy.len().max(1) as f64;
    let none = vec![vec![LinkModel::INSTANT; costs.len()]; costs.len()];
    let free: Vec<Costs> = costs.iter().map(with_free_messages).collect();
    let without_messages = simulated(0.0, &free, &none, laid_out, spread.as_ref());
    Some(StepTime { seconds: step.seconds, without_messages_s: without_messages.seconds, busy_s })
}

/// Returns a lower bound of the seconds of a step of devices that each hold the whole model: the
/// work of the batch in the largest micro-batches, divided by speed, with free messages.
pub fn least_replica_step_s(
    profile: &PlanProfile,
    set: &[usize],
    batch: u32,
    micro_batch: u32,
) -> f64 {
    let mut samples_per_s = 0.0;
    for device in set {
        let seconds = profile.whole_model_s(*device, micro_batch);
        samples_per_s += f64::from(micro_batch) / seconds;
    }
    f64::from(batch) / samples_per_s
}

/// Returns a lower bound of the seconds of a step on a set of devices in any layout: each block of
/// the whole batch on the device that is the fastest for it, all devices busy all the time.
pub fn least_step_s(profile: &PlanProfile, set: &[usize], batch: u32, micro_batch: u32) -> f64 {
    let blocks = set.first().map_or(0, |device| profile.devices[*device].blocks.len());
    let mut all_s = 0.0;
    for block in 0..blocks {
        let seconds =
            set.iter().map(|device| profile.devices[*device].blocks[block].at(micro_batch).sum_s());
        all_s += seconds.fold(f64::INFINITY, f64::min);
    }
    all_s / f64::from(micro_batch.max(1)) * f64::from(batch) / set.len().max(1) as f64
}

/// Returns by which factor the passes of each rank take longer in a step in which the ranks are
/// busy for these seconds.
fn slowdowns(
    profile: &PlanProfile,
    arrangement: &Arrangement,
    step: &SimulatedStep,
    busy: &[f64],
) -> Vec<f64> {
    if step.seconds <= 0.0 {
        return vec![1.0; busy.len()];
    }
    let positions = &arrangement.positions;
    let parts: Vec<f64> = busy.iter().map(|busy_s| (busy_s / step.seconds).min(1.0)).collect();
    let mut slowdowns = Vec::with_capacity(busy.len());
    for (rank, position) in positions.iter().enumerate() {
        let beside = profile.slowdown(*position, positions) - 1.0;
        let by_others = beside * busy_part_of_others(profile, arrangement, rank, &parts);
        let device = &profile.devices[*position];
        let by_network = if device.is_on_host {
            network_s(profile, arrangement, &step.elements_sent, device.node) / step.seconds
        } else {
            0.0
        };
        slowdowns.push(1.0 + by_others + by_network);
    }
    slowdowns
}

/// Seconds of all cores of a node that the network takes for messages of its ranks to other nodes.
fn network_s(
    profile: &PlanProfile,
    arrangement: &Arrangement,
    elements_sent: &[Vec<u64>],
    node: u32,
) -> f64 {
    let byte_s = profile.network_s_per_byte.get(node as usize).copied().unwrap_or(0.0);
    let node_of = |rank: usize| profile.devices[arrangement.positions[rank]].node;
    let mut elements = 0;
    for (from, to_ranks) in elements_sent.iter().enumerate() {
        for (to, sent) in to_ranks.iter().enumerate() {
            if node_of(from) == node && node_of(to) != node {
                elements += sent;
            }
        }
    }
    (elements * DType::F32.bytes() as u64) as f64 * byte_s
}

/// Mean busy part of the other ranks whose devices share a device's processor.
fn busy_part_of_others(
    profile: &PlanProfile,
    arrangement: &Arrangement,
    rank: usize,
    parts: &[f64],
) -> f64 {
    let positions = &arrangement.positions;
    let mut sum = 0.0;
    let mut count = 0;
    for (other, part) in parts.iter().enumerate() {
        let pair = [positions[rank], positions[other]];
        if other != rank && profile.slowdown(positions[rank], &pair) > 1.0 {
            sum += part;
            count += 1;
        }
    }
    sum / f64::from(count.max(1))
}

/// Costs of each rank, whose passes take longer by its factor; `None` if a device cannot run one of
/// its blocks.
fn rank_costs(
    profile: &PlanProfile,
    arrangement: &Arrangement,
    laid_out: &LaidOut,
    slowdowns: &[f64],
) -> Option<Vec<Costs>> {
    let mut costs = Vec::new();
    for (rank, &position) in arrangement.positions.iter().enumerate() {
        let device = &profile.devices[position];
        let plan = &laid_out.written.plans[rank];
        let program = &laid_out.written.programs[rank];
        let part = tensor_part(arrangement.mesh, laid_out.whole(), Rank(rank as u32));
        let slowdown = slowdowns[rank];
        let mut speeds = Vec::with_capacity(device.blocks.len());
        for (block, speed) in device.blocks.iter().enumerate() {
            let part = profile.part_of_block(block, part);
            speeds.push(BlockSpeed {
                fixed: speed.fixed.scaled(slowdown),
                per_row: speed.per_row.scaled(slowdown * part),
            });
        }
        for (segment, _) in runs(&program.instructions) {
            let block = plan.segments[segment.index()].block as usize;
            if !speeds[block].at(1).sum_s().is_finite() {
                return None;
            }
        }
        let rows = program.micro_batches.iter().map(|batch| batch.rows).max().unwrap_or(0);
        let inputs = input_transfer(profile, arrangement, plan, program, position);
        costs.push(Costs { inputs, ..costs_of(device, plan, &speeds, rows) });
    }
    Some(costs)
}

fn costs_of(device: &DeviceProfile, plan: &Plan, speeds: &[BlockSpeed], rows: u32) -> Costs {
    Costs {
        segments: segment_costs(plan, speeds),
        inputs: None,
        load_s: device.load_row_s * f64::from(rows),
        update_element_s: device.update_element_s,
        read_back: device.read_back,
        upload: device.upload,
        host: device.host,
    }
}

/// Inputs that the first node sends with each step to the rank of a device: all that the rank uses,
/// or those that are carried from step to step if the node has the data.
fn input_transfer(
    profile: &PlanProfile,
    arrangement: &Arrangement,
    plan: &Plan,
    program: &Program,
    position: usize,
) -> Option<InputTransfer> {
    let node = profile.devices[position].node;
    if node == FIRST_NODE || profile.receives_inputs.is_empty() {
        return None;
    }
    let has_data = !profile.receives_inputs(position);
    let mut of_row = 0;
    for input in used_inputs(plan) {
        if !has_data || plan.graph.is_carried(input) {
            of_row += plan.graph.tensor(input).shape.elements(1);
        }
    }
    if of_row == 0 {
        return None;
    }
    let rows: u32 = program.micro_batches.iter().map(|batch| batch.rows).sum();
    // In a ring or a pipeline over consecutive ranks of each node, the last rank of the first node
    // sends to the first one of the next node. In other layouts, values and inputs do not meet.
    let is_on = |of: u32| move |position: &usize| profile.devices[*position].node == of;
    let sender = arrangement.positions.iter().rposition(is_on(FIRST_NODE));
    let receiver = arrangement.positions.iter().position(is_on(node));
    let path = match (sender, receiver) {
        (Some(from), Some(to)) => InputPath::Ranks { from: Rank(from as u32), to: Rank(to as u32) },
        _ => InputPath::Apart { node, link: profile.input_link(position) },
    };
    Some(InputTransfer { path, elements: of_row * rows as usize })
}

/// Links between ranks.
fn rank_links(profile: &PlanProfile, arrangement: &Arrangement) -> Vec<Vec<LinkModel>> {
    let mut links = Vec::with_capacity(arrangement.positions.len());
    for &from in &arrangement.positions {
        links.push(arrangement.positions.iter().map(|to| profile.link(from, *to)).collect());
    }
    links
}

/// Programs of steps whose all-gathers run in the next one, if the run has these.
fn spread(
    profile: &PlanProfile,
    arrangement: &Arrangement,
    laid_out: &LaidOut,
    overlap: bool,
) -> Option<Vec<SpreadPrograms>> {
    let node = |position: &usize| profile.devices[*position].node;
    let nodes: Vec<u32> = arrangement.positions.iter().map(node).collect();
    SpreadPrograms::are_used(overlap, arrangement.mesh, &nodes)
        .then(|| SpreadPrograms::of_ranks(&laid_out.written.programs, laid_out.whole()))
}

fn with_free_messages(costs: &Costs) -> Costs {
    Costs {
        inputs: None,
        read_back: LinkModel::INSTANT,
        upload: LinkModel::INSTANT,
        host: LinkModel::INSTANT,
        ..costs.clone()
    }
}

/// Step of a simulation.
struct SimulatedStep {
    seconds: f64,
    /// Elements that a step sends, by sender and receiver.
    elements_sent: Vec<Vec<u64>>,
}

/// Simulates a step. With spread programs, it is one between the first and the last.
fn simulated(
    control_s: f64,
    costs: &[Costs],
    links: &[Vec<LinkModel>],
    laid_out: &LaidOut,
    spread: Option<&Vec<SpreadPrograms>>,
) -> SimulatedStep {
    let written = &laid_out.written;
    let machine = MachineModel { costs, links, control_s, window: SEND_WINDOW };
    let layout = Arc::new(laid_out.layout.clone());
    let step = Scenario {
        parts: written.plans.iter().map(ModelPart::of).collect(),
        groups: written.groups.clone(),
        edges: written.edges.clone(),
        ..one_step(&written.programs, &layout, machine)
    };
    let Some(spread) = spread else {
        let report = report_of(&step);
        return SimulatedStep { seconds: report.seconds, elements_sent: report.elements_sent };
    };
    let two = Scenario { steps: 2, spread: Some(spread.clone()), ..step };
    let four = Scenario { steps: 4, ..two.clone() };
    let (two, four) = (report_of(&two), report_of(&four));
    let mut elements_sent = four.elements_sent;
    for (of_four, of_two) in
        elements_sent.iter_mut().flatten().zip(two.elements_sent.iter().flatten())
    {
        *of_four = (*of_four - of_two) / 2;
    }
    SimulatedStep { seconds: (four.seconds - two.seconds) / 2.0, elements_sent }
}

/// Runs a simulation, which must end without a violation.
fn report_of(scenario: &Scenario) -> SimulationReport {
    let report = run(scenario);
    debug_assert!(report.violations.is_empty(), "{report}");
    report
}

/// Seconds of the passes and updates of each rank.
fn busy_seconds(costs: &[Costs], laid_out: &LaidOut) -> Vec<f64> {
    let mut busy = Vec::with_capacity(costs.len());
    for (rank, costs) in costs.iter().enumerate() {
        let mut sum = 0.0;
        let program = &laid_out.written.programs[rank];
        for (segment, micro_batch) in runs(&program.instructions) {
            let rows = f64::from(program.micro_batches[micro_batch].rows);
            let cost = costs.segments[segment.index()];
            sum += cost.fixed_s + rows * cost.row_s;
        }
        let owned = laid_out.owned(Rank(rank as u32));
        let elements: usize = owned.iter().map(ExactSizeIterator::len).sum();
        sum += elements as f64 * costs.update_element_s;
        busy.push(sum);
    }
    busy
}
