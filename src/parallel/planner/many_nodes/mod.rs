//! Plans for more devices than can be searched one by one, up to 1,000 unequal nodes: the same
//! layout within every node, and a ring over all nodes that make a step shorter.
//!
//! Candidates are compared by [`RingEstimate`], which takes a ring for its slowest link; the best
//! ones are then timed by the recurrence of [`RingStep`], as the simulation would time them.

mod estimate;
mod left_out;
mod order;
mod sharing;
#[cfg(test)]
mod tests;
mod units;

use std::ops::Range;

use self::estimate::{RingEstimate, RingTrial};
use self::left_out::left_out;
use self::order::{node_costs, ring_order};
use self::units::{DeviceUnit, ModelSizes, UNIT_MAX, Units};
use super::balance::GAIN_MIN;
use super::laid_out::layout;
use super::plans::Plans;
use super::profile::PlanProfile;
use super::proposal::{Advice, MemoryNeed, Refused};
use super::ring_time::{RANKS_MAX, RingStep, RingStepTimes};
use crate::ParallelOptions;
use crate::collective::{SEND_WINDOW, Topology};
use crate::sim::queue::nanos;
use potluck_core::Setting;
use potluck_core::format::milliseconds;

pub use units::WithinNode;

/// Fraction of the best estimate up to which candidates are timed by the recurrence.
const NEAR: f64 = 1.1;
/// Most limits of the links that are tried.
const LIMITS_MAX: usize = 12;
/// Factor of the links' rates in an advice.
const FASTER_LINKS: f64 = 10.0;

/// Model and machines of a plan.
#[derive(Clone, Copy)]
pub struct ManyNodesRequest<'a> {
    pub profile: &'a PlanProfile,
    /// Profile of the same devices with the model in mixed precision, if it is in full precision:
    /// for advice only, because time never chooses an arithmetic.
    pub mixed: Option<&'a PlanProfile>,
    pub plans: &'a Plans,
    pub options: &'a ParallelOptions,
    /// Samples of a step.
    pub batch: u32,
    /// Most samples of a micro-batch.
    pub micro_batch: u32,
    /// True to run smaller micro-batches on devices with too little memory.
    pub fits_micro_batch: bool,
    /// Moments of the optimizer per parameter.
    pub moments: usize,
}

/// Devices that hold one model together, and their part of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedUnit {
    pub node: u32,
    /// Indices of its devices in the profile.
    pub devices: Vec<usize>,
    pub samples: u32,
    /// Most samples of a micro-batch.
    pub micro_batch: u32,
    /// Seconds of its passes in a step.
    pub computing_s: f64,
    /// Memory of its fullest device.
    pub memory: MemoryNeed,
}

/// Way to spread a run over nodes, with its predicted step.
#[derive(Clone, Debug, PartialEq)]
pub struct NodesCandidate {
    pub within: WithinNode,
    /// Units in the order of the ring.
    pub units: Vec<PlannedUnit>,
    /// Seconds of a step.
    pub step_s: f64,
    /// Seconds of the slowest device's passes.
    pub computing_s: f64,
    /// Fraction of the time of all units in which they do not compute.
    pub idle: f64,
    /// True if the step was timed by the recurrence, and not by an estimate of the ring.
    pub is_timed: bool,
}

impl NodesCandidate {
    /// Returns a short name of the layout, such as `data 12 x tensor 2` or `alone`.
    pub fn layout(&self) -> String {
        let units = self.units.len();
        match (self.within, units) {
            (WithinNode::Apart | WithinNode::Fastest, 1) => "alone".into(),
            (WithinNode::Apart, _) => format!("data {units}"),
            (WithinNode::Fastest, _) => format!("data {units} (the fastest device of a node)"),
            (within, 1) => within.to_string(),
            (within, _) => format!("data {units} x {within}"),
        }
    }

    /// Returns the seconds of a step in which devices wait for messages, updates and votes.
    pub fn communication_s(&self) -> f64 {
        (self.step_s - self.computing_s).max(0.0)
    }

    /// Returns the number of nodes that take part.
    pub fn nodes(&self) -> usize {
        let mut nodes: Vec<u32> = self.units.iter().map(|unit| unit.node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes.len()
    }
}

/// Devices that do not take part, with one reason.
#[derive(Clone, Debug, PartialEq)]
pub struct LeftOutGroup {
    /// Indices of the devices in the profile.
    pub devices: Vec<usize>,
    /// Reason, as the end of a sentence for the user.
    pub reason: String,
}

/// Answer of the planner for many nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct NodesProposal {
    pub chosen: NodesCandidate,
    /// Other candidates, the fastest first: the best of each layout, and the whole cluster.
    pub others: Vec<NodesCandidate>,
    pub left_out: Vec<LeftOutGroup>,
    pub refused: Vec<Refused>,
    pub advice: Vec<Advice>,
    /// Candidates whose step was estimated.
    pub tried: usize,
}

/// Formats the seconds of a step: in milliseconds, from 10 s on in seconds.
pub fn duration(seconds: f64) -> String {
    if seconds < 10.0 { format!("{} ms", milliseconds(seconds)) } else { format!("{seconds:.1} s") }
}

/// No layout is possible on these nodes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoNodesLayout {
    /// The model fits on no device, in no layout; with the need of the device that lacks least.
    #[error("no device has the memory for one sample of this model: {0}")]
    NoRoom(String),
    /// No node has the devices of the given pipelines or tensor groups.
    #[error(
        "no node of the file has {devices} devices for the given pipelines or tensor groups, which \
         are of at most {UNIT_MAX} devices here"
    )]
    TooFewDevices { devices: usize },
    /// The model cannot be divided as given.
    #[error("{layouts} is not possible: {reason}")]
    Impossible { layouts: String, reason: String },
}

/// Proposes a layout for many nodes.
///
/// # Errors
/// Returns [`NoNodesLayout`] if the model fits on no device, in no layout, or not in a given one.
pub fn propose(request: &ManyNodesRequest<'_>) -> Result<NodesProposal, NoNodesLayout> {
    let sizes = ModelSizes::of(request);
    let node_order = ring_order(request.profile, sizes.bytes());
    let mut search = NodesSearch { request, sizes: &sizes, node_order, tried: 0, scale: 1.0 };
    let mut found = Vec::new();
    let mut refused = Vec::new();
    let layouts = WithinNode::of_nodes(request.profile, request.options);
    if layouts.is_empty() {
        return Err(NoNodesLayout::TooFewDevices {
            devices: request.options.devices_per_pipeline(),
        });
    }
    for within in &layouts {
        let refusal = |reason| Refused { layouts: within.to_string(), reason };
        match Units::new(request, &sizes, *within).map(|units| search.best_of(units)) {
            Ok(Some(best)) => found.push(best),
            Ok(None) if *within != WithinNode::Fastest => {
                refused.push(refusal("no device has the memory for its part of the model".into()));
            }
            Ok(None) => {}
            Err(why) => refused.push(refusal(why)),
        }
    }
    found.sort_by(|a, b| a.trial.step_s.total_cmp(&b.trial.step_s));
    let Some(best_s) = found.first().map(|layout| layout.trial.step_s) else {
        return Err(match refused.into_iter().next() {
            Some(Refused { layouts, reason }) if request.options.is_divided() => {
                NoNodesLayout::Impossible { layouts, reason }
            }
            _ => NoNodesLayout::NoRoom(units::least_need(request, &sizes)),
        });
    };
    let mut candidates = Vec::new();
    for layout in &found {
        let is_near = layout.trial.step_s <= NEAR * best_s;
        candidates.push(search.candidate(layout, is_near));
    }
    let mut order: Vec<usize> = (0..found.len()).collect();
    order.sort_by(|a, b| candidates[*a].step_s.total_cmp(&candidates[*b].step_s));
    let chosen = &found[order[0]];
    // Other steps are estimated, and compared with one that was timed.
    search.scale = candidates[order[0]].step_s / chosen.trial.step_s;
    let left_out = left_out(&mut search, chosen);
    let advice = search.advice(chosen);
    let mut others: Vec<NodesCandidate> =
        order[1..].iter().map(|index| candidates[*index].clone()).collect();
    others.extend(search.whole_cluster(chosen));
    others.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
    let chosen = candidates[order[0]].clone();
    // Layouts in which the same devices do the same.
    others.retain(|other| other.units != chosen.units);
    Ok(NodesProposal { chosen, others, left_out, refused, advice, tried: search.tried })
}

/// Best units of a layout.
struct BestOfLayout {
    units: Units,
    trial: RingTrial,
}

struct NodesSearch<'a> {
    request: &'a ManyNodesRequest<'a>,
    sizes: &'a ModelSizes,
    /// By node: its place in the ring.
    node_order: Vec<usize>,
    tried: usize,
    /// Seconds of the chosen step for each that was estimated.
    scale: f64,
}

impl NodesSearch<'_> {
    /// Predicts a step of these units of a layout; those that have no memory or no sample are left
    /// out. `None` if none is left.
    fn estimate(&mut self, units: &Units, set: &[usize]) -> Option<RingTrial> {
        self.tried += 1;
        let estimate = RingEstimate { request: self.request, sizes: self.sizes, units };
        estimate.trial(set)
    }

    /// Units in the order of the ring.
    fn in_order(&self, units: &Units, mut set: Vec<usize>) -> Vec<usize> {
        set.sort_by_key(|unit| (self.node_order[units.all[*unit].node as usize], *unit));
        set
    }

    /// Chooses how many units of a layout take part, the fastest first, of the nodes whose links
    /// are fast enough.
    fn best_of(&mut self, units: Units) -> Option<BestOfLayout> {
        let costs = node_costs(self.request.profile, self.sizes.bytes());
        let mut by_speed: Vec<usize> = (0..units.all.len()).collect();
        let speeds = units.speeds(self.request, self.sizes, units.all.len());
        by_speed.retain(|unit| speeds[units.all[*unit].kind].is_some());
        let sample_s = |unit: &usize| {
            let speed = speeds[units.all[*unit].kind].as_ref();
            speed.map_or(f64::INFINITY, |speed| speed.sample_s())
        };
        by_speed.sort_by(|a, b| sample_s(a).total_cmp(&sample_s(b)));
        let limits = limits(&costs);
        let mut trials: Vec<RingTrial> = Vec::new();
        let mut best = 0;
        let mut best_s = f64::INFINITY;
        let coarse = spread(0..limits.len());
        // Then those between the best one and its neighbours.
        for round in 0..2 {
            let indices = match round {
                0 => coarse.clone(),
                _ => spread(between(&coarse, best, limits.len())),
            };
            for index in indices {
                let mut fast = by_speed.clone();
                fast.retain(|unit| costs[units.all[*unit].node as usize] <= limits[index]);
                fast.truncate((self.request.batch / self.sizes.samples_min) as usize);
                let found = self.trials_of(&units, &fast);
                let found_s = shortest(&found);
                if found_s < best_s {
                    best_s = found_s;
                    best = index;
                }
                trials.extend(found);
                trials.retain(|trial| trial.step_s * (1.0 - GAIN_MIN) <= best_s);
            }
        }
        // The fewest units of those that are as fast.
        let trial = trials.into_iter().min_by_key(|trial| trial.units.len())?;
        Some(BestOfLayout { units, trial })
    }

    /// Tries numbers of these units, the fastest first.
    fn trials_of(&mut self, units: &Units, fast: &[usize]) -> Vec<RingTrial> {
        let mut trials = Vec::new();
        for count in counts(fast.len()) {
            let set = self.in_order(units, fast[..count].to_vec());
            trials.extend(self.estimate(units, &set));
        }
        self.refine(units, fast, &mut trials);
        trials
    }

    /// Tries numbers of units between those that were tried, around the best.
    fn refine(&mut self, units: &Units, fast: &[usize], trials: &mut Vec<RingTrial>) {
        let of_best = trials.iter().min_by(|a, b| a.step_s.total_cmp(&b.step_s));
        let Some(mut best) = of_best.map(|trial| trial.units.len()) else { return };
        let mut best_s = f64::INFINITY;
        let mut step = best / 4;
        while step > 0 {
            for count in [best.saturating_sub(step), best + step] {
                if count == 0 || count > fast.len() {
                    continue;
                }
                let set = self.in_order(units, fast[..count].to_vec());
                let Some(trial) = self.estimate(units, &set) else { continue };
                if trial.step_s < best_s {
                    best_s = trial.step_s;
                    best = count;
                }
                trials.push(trial);
            }
            step /= 2;
        }
    }

    /// The candidate of a trial, timed by the recurrence if that is asked for and possible.
    fn candidate(&self, layout: &BestOfLayout, is_timed: bool) -> NodesCandidate {
        let BestOfLayout { units, trial } = layout;
        let world = trial.units.len();
        let mut step_s = trial.step_s;
        let is_timed = is_timed && (2..=RANKS_MAX).contains(&world);
        if is_timed {
            step_s = self.times(units, trial).ended as f64 / 1e9;
        }
        let mut busy_s = 0.0;
        let mut planned = Vec::with_capacity(world);
        for (at, unit) in trial.units.iter().enumerate() {
            let DeviceUnit { node, devices, .. } = &units.all[*unit];
            let speed = &trial.speeds[at];
            let computing_s = speed.seconds(trial.counts[at]);
            busy_s += computing_s;
            planned.push(PlannedUnit {
                node: *node,
                devices: devices.clone(),
                samples: trial.counts[at],
                micro_batch: speed.throughput.micro_batch,
                computing_s,
                memory: speed.memory,
            });
        }
        let computing_s = trial.computing_s;
        let idle = (1.0 - busy_s / (step_s * world as f64)).max(0.0);
        NodesCandidate { within: units.within, units: planned, step_s, computing_s, idle, is_timed }
    }

    fn times(&self, units: &Units, trial: &RingTrial) -> RingStepTimes {
        let estimate = RingEstimate { request: self.request, sizes: self.sizes, units };
        let plan = self.request.plans.of_rows(1);
        let world = trial.units.len();
        let layout = layout(&plan, Topology::Ring, world, self.request.options.chunk_bytes);
        let mut complete = Vec::with_capacity(world);
        for (speed, samples) in trial.speeds.iter().zip(&trial.counts) {
            let seconds = speed.complete_s(*samples, self.request.options.overlap);
            complete.push(seconds.into_iter().map(nanos).collect());
        }
        let step = RingStep {
            layout: &layout,
            order: &self.sizes.order,
            ranks: &estimate.ring(&trial.units, &trial.speeds),
            complete: &complete,
            control_s: estimate.control_s(&trial.units),
            window: SEND_WINDOW,
        };
        step.times()
    }

    /// The candidate with every unit of the chosen layout that has the memory, if that is another.
    fn whole_cluster(&mut self, chosen: &BestOfLayout) -> Option<NodesCandidate> {
        let units = &chosen.units;
        let set = self.in_order(units, (0..units.all.len()).collect());
        let trial = self.estimate(units, &set)?;
        if trial.units.len() == chosen.trial.units.len() {
            return None;
        }
        let whole = BestOfLayout { units: units.clone(), trial };
        Some(self.candidate(&whole, false))
    }

    /// Changes that would help most, by estimate.
    fn advice(&mut self, chosen: &BestOfLayout) -> Vec<Advice> {
        let before_s = chosen.trial.step_s;
        let mut advice = Vec::new();
        let mut faster = self.request.profile.clone();
        for link in faster.links.iter_mut().flatten() {
            link.bytes_per_s *= FASTER_LINKS;
        }
        let request = ManyNodesRequest { profile: &faster, ..*self.request };
        let estimate = RingEstimate { request: &request, sizes: self.sizes, units: &chosen.units };
        if let Some(trial) = estimate.trial(&chosen.trial.units) {
            let text = format!("links {FASTER_LINKS} times as fast between the same nodes");
            advice.push(Advice { text, step_s: self.scale * trial.step_s });
        }
        if let Some(mixed) = self.request.mixed {
            let request = ManyNodesRequest { profile: mixed, mixed: None, ..*self.request };
            let estimate =
                RingEstimate { request: &request, sizes: self.sizes, units: &chosen.units };
            if let Some(trial) = estimate.trial(&chosen.trial.units) {
                let text =
                    format!("products in f16 with sums in f32 ({})", Setting::MixedPrecision);
                advice.push(Advice { text, step_s: self.scale * trial.step_s });
            }
        }
        let enough_s = (1.0 - GAIN_MIN) * self.scale * before_s;
        advice.retain(|advice| advice.step_s < enough_s);
        advice.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
        advice
    }
}

/// Seconds of the shortest step; infinite without one.
fn shortest(trials: &[RingTrial]) -> f64 {
    trials.iter().map(|trial| trial.step_s).fold(f64::INFINITY, f64::min)
}

/// Different costs of nodes' links, ascending: limits below which nodes are taken.
fn limits(costs: &[f64]) -> Vec<f64> {
    let mut distinct = costs.to_vec();
    distinct.sort_by(f64::total_cmp);
    distinct.dedup_by(|one, before| *one <= 1.01 * *before);
    // The costs that were merged into one are within a percent of it.
    for cost in &mut distinct {
        *cost *= 1.01;
    }
    distinct
}

/// Some of the indices of a range, the last one among them.
fn spread(indices: Range<usize>) -> Vec<usize> {
    let count = indices.len();
    if count <= LIMITS_MAX {
        return indices.collect();
    }
    (1..=LIMITS_MAX).map(|part| indices.start + part * count / LIMITS_MAX - 1).collect()
}

/// Indices between the neighbours of one that was tried.
fn between(tried: &[usize], index: usize, count: usize) -> Range<usize> {
    let before = tried.iter().rfind(|other| **other < index);
    let after = tried.iter().find(|other| **other > index);
    before.map_or(0, |before| before + 1)..after.copied().unwrap_or(count)
}

/// Numbers of units that are tried: each about a third more than the one before.
fn counts(most: usize) -> Vec<usize> {
    let mut counts = Vec::new();
    let mut count = 1;
    while count < most {
        counts.push(count);
        count += (count / 3).max(1);
    }
    if most > 0 {
        counts.push(most);
    }
    counts
}
