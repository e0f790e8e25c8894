//! Search for the fastest way to spread a run: over all sets of devices, data x pipeline x tensor
//! parallelism, schedules and micro-batches, each priced by a simulated step.

mod advice;
mod layouts;
mod selection;
#[cfg(test)]
mod tests;

use super::arrangement::Arrangement;
use super::balance::GAIN_MIN;
use super::cut::CutStage;
use super::laid_out::LaidOut;
use super::plans::Plans;
use super::profile::PlanProfile;
use super::proposal::{
    Candidate, MemoryNeed, Prediction, Proposal, Refused, UnusedDevice, mesh_name,
};
use super::step_time::{least_replica_step_s, least_step_s, step_time};
use crate::{Mesh, ParallelOptions, PipelineSchedule, Shares};
use advice::advice;
use layouts::{DividedLayout, divided, replicas, within_memory};
use potluck_core::format::milliseconds;
use selection::{device_sets, most_of_divided, simplest_of_fastest, state_factor};

/// Most devices over which the search divides a model by itself. All subsets of up to
/// [`SUBSETS_MAX`] devices are tried, otherwise the fastest 1, 2, 3, .. of them, and those of each
/// node. Of more devices each has the whole model, unless pipelines or tensor groups are given.
pub const DEVICES_MAX: usize = 16;

/// Most devices of which all subsets are tried.
const SUBSETS_MAX: usize = 5;

/// Most micro-batches of a pipeline in a step that are tried: more of them hardly shorten the
/// bubble.
const MICRO_BATCHES_MAX: u32 = 64;

/// Memory of a stage that a search asks about.
#[derive(Clone, Copy, Debug)]
pub struct StageQuestion<'a> {
    /// Devices of the pipelines, by their numbers in the profile.
    pub devices: &'a [usize],
    pub mesh: Mesh,
    pub schedule: PipelineSchedule,
    /// Model chunks of a stage.
    pub chunks: usize,
    pub batch: u32,
    pub micro_batch: u32,
    /// False if a fast upper bound suffices.
    pub is_exact: bool,
}

/// True if a device may have memory for the chunks of a stage.
pub type StageFits<'a> = dyn Fn(CutStage<'_>) -> bool + 'a;

/// Memory of the devices for parts of a model.
pub trait MemoryModel {
    /// Returns the memory of each rank of an arrangement, and what its device has.
    fn needs(&self, arrangement: &Arrangement, laid_out: &LaidOut) -> Vec<MemoryNeed>;

    /// Calls `cut` with a function that is true if the device, by its place in `question.devices`,
    /// may have memory for these chunks as that stage. [`MemoryModel::needs`] decides in the end.
    fn with_stage_memory(&self, question: StageQuestion<'_>, cut: &mut dyn FnMut(&StageFits<'_>));
}

/// Request for a plan.
#[derive(Clone, Copy)]
pub struct SearchRequest<'a> {
    pub profile: &'a PlanProfile,
    /// Plans of devices with the whole model or a part of all its tensors.
    pub whole: &'a Plans,
    /// Plans of stages of pipelines.
    pub staged: &'a Plans,
    /// Options of the run: stages or tensor ranks above 1, and blocks per stage, are kept.
    pub options: &'a ParallelOptions,
    /// True if every device must take part.
    pub uses_all: bool,
    pub batch: u32,
    /// Most samples of a micro-batch.
    pub micro_batch: u32,
    /// True for smaller micro-batches where memory is short or bubbles are long.
    pub fits_micro_batch: bool,
    /// True to price layouts that cannot be chosen, for the explanation of a plan.
    pub prices_runners_up: bool,
    /// True if the model may be divided although no pipelines or tensor groups are given.
    pub may_divide: bool,
    pub memory: &'a dyn MemoryModel,
}

impl SearchRequest<'_> {
    /// Returns the number of blocks of the model.
    fn blocks(&self) -> usize {
        self.whole.model().whole().blocks.len()
    }

    fn has_given_layout(&self) -> bool {
        self.options.is_divided()
    }

    /// Plans of a layout.
    fn plans(&self, mesh: Mesh) -> &Plans {
        if mesh.pipeline > 1 { self.staged } else { self.whole }
    }
}

/// No layout is possible.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{}", sentence(refused, impossible.as_deref()))]
pub struct NoPlan {
    pub refused: Vec<Refused>,
    /// Block that no device can run, if there is one, as a sentence.
    pub impossible: Option<String>,
}

fn sentence(refused: &[Refused], impossible: Option<&str>) -> String {
    if let Some(why) = impossible {
        return why.into();
    }
    let mut text = "no way to spread the model over these devices is possible".to_string();
    for one in refused {
        text.push_str(&format!("; {}: {}", one.layouts, one.reason));
    }
    text
}

/// Searches for the fastest way to spread a run over the devices of a profile.
///
/// Among candidates within 2 % of the fastest, the one with the fewest devices is chosen, then the
/// one that divides the model the least. A model that devices can hold is divided only for steps
/// that are shorter by a tenth, because predictions are not exact. Candidates whose lower bound
/// exceeds the best step found by 2 % are not simulated. All samples of a step are the batch of the
/// request.
///
/// # Errors
/// Returns [`NoPlan`] with the reasons if nothing fits.
///
/// # Panics
/// If the profile has no device.
pub fn search(request: &SearchRequest) -> Result<Proposal, NoPlan> {
    assert!(!request.profile.devices.is_empty(), "a search over no devices");
    let mut found = LayoutSearch { request, candidates: Vec::new(), refused: Vec::new(), tried: 0 };
    for set in device_sets(request.profile, request.micro_batch, request.uses_all) {
        found.try_set(&set);
    }
    let LayoutSearch { candidates, mut refused, tried, .. } = found;
    // Layouts that fit with other micro-batches are possible.
    refused.retain(|one| {
        candidates.iter().all(|other| mesh_name(other.arrangement.mesh) != one.layouts)
    });
    let Some(chosen) = simplest_of_fastest(&candidates) else {
        let impossible = impossible_block(request);
        return Err(NoPlan { refused, impossible });
    };
    let chosen = candidates[chosen].clone();
    let mut others: Vec<Candidate> =
        candidates.into_iter().filter(|other| *other != chosen).collect();
    others.sort_by(|a, b| a.prediction.step_s.total_cmp(&b.prediction.step_s));
    let left_out = left_out(request, &chosen, &others);
    let advice = if request.prices_runners_up { advice(request, &chosen) } else { Vec::new() };
    let alone_s = alone_seconds(request);
    Ok(Proposal { chosen, others, left_out, refused, advice, tried, alone_s })
}

/// Names a block that no device can run, with the reason of the first one.
fn impossible_block(request: &SearchRequest) -> Option<String> {
    let devices = &request.profile.devices;
    let graph = request.whole.model().whole();
    for (block, name) in graph.blocks.iter().enumerate() {
        let mut reasons = Vec::new();
        for device in devices {
            let refusal = device.refusals.iter().find(|refusal| refusal.block as usize == block);
            reasons.extend(refusal.map(|refusal| &refusal.reason));
        }
        if reasons.len() == devices.len() {
            let why = reasons[0];
            return Some(format!("no device can run block {name}, not even alone ({why})"));
        }
    }
    None
}

/// Seconds of a step with the whole batch on each device alone.
fn alone_seconds(request: &SearchRequest) -> Vec<f64> {
    let devices = 0..request.profile.devices.len();
    devices.map(|device| replicas_seconds(request, &[device]).unwrap_or(f64::INFINITY)).collect()
}

/// Seconds of a step with the whole model on each device of a set, all of which get samples by
/// their speed; `None` if it does not fit.
fn replicas_seconds(request: &SearchRequest, set: &[usize]) -> Option<f64> {
    let mut options = request.options.clone();
    options.shares = Shares::Measured;
    let of_set = SearchRequest { options: &options, uses_all: true, ..*request };
    let found = replicas(&of_set, set).ok().flatten()?;
    let step = step_time(request.profile, &found.arrangement, &found.laid_out, options.overlap)?;
    Some(step.seconds)
}

/// Arrangement to be priced, with its programs and the memory of its ranks.
struct LaidOutCandidate {
    arrangement: Arrangement,
    laid_out: LaidOut,
    memory: Vec<MemoryNeed>,
}

impl LaidOutCandidate {
    fn of(request: &SearchRequest, arrangement: Arrangement) -> Result<Self, String> {
        let plans = request.plans(arrangement.mesh);
        let laid_out =
            LaidOut::of(request.options, plans, &arrangement).map_err(|error| error.to_string())?;
        let memory = request.memory.needs(&arrangement, &laid_out);
        Ok(Self { arrangement, laid_out, memory })
    }
}

/// State of a search.
struct LayoutSearch<'a> {
    request: &'a SearchRequest<'a>,
    candidates: Vec<Candidate>,
    refused: Vec<Refused>,
    tried: usize,
}

impl LayoutSearch<'_> {
    /// Tries all layouts of a set of devices, ascending.
    fn try_set(&mut self, set: &[usize]) {
        let request = self.request;
        let count = set.len();
        for tensor in divisors(count) {
            for pipeline in divisors(count / tensor) {
                let mesh = Mesh { data: count / tensor / pipeline, pipeline, tensor };
                let may_divide = request.may_divide && count <= DEVICES_MAX;
                let is_possible = !mesh.is_divided() || may_divide || request.has_given_layout();
                if !is_asked(request, mesh) || !is_possible {
                    continue;
                }
                if mesh.is_divided() {
                    self.try_divided(set, mesh);
                } else {
                    self.try_replicas(set);
                }
            }
        }
    }

    /// Tries every device of a set with the whole model.
    fn try_replicas(&mut self, set: &[usize]) {
        let SearchRequest { profile, batch, micro_batch, .. } = *self.request;
        if self.is_slower(least_replica_step_s(profile, set, batch, micro_batch), false) {
            return;
        }
        match replicas(self.request, set) {
            Ok(Some(found)) => {
                self.price(found);
            }
            Ok(None) => {}
            Err(reason) => self.refuse(Mesh::of_pipelines(set.len(), 1), reason),
        }
    }

    /// Tries the pipelines and tensor groups of a mesh, with every schedule and micro-batch.
    fn try_divided(&mut self, set: &[usize], mesh: Mesh) {
        let request = self.request;
        if let Err(reason) = require_divisible(request, set, mesh) {
            return self.refuse(mesh, reason);
        }
        for micro_batch in micro_batches(request, mesh) {
            let least_s = least_step_s(request.profile, set, request.batch, micro_batch);
            if self.is_slower(least_s, true) || self.cannot_be_chosen(least_s) {
                continue;
            }
            for (schedule, chunks) in schedules(request, mesh) {
                // The memory of stages by a fast bound, and exactly if that was too little.
                for is_exact in [false, true] {
                    let layout = DividedLayout { mesh, schedule, chunks, micro_batch, is_exact };
                    let found = divided(request, set, layout)
                        .and_then(|arrangement| LaidOutCandidate::of(request, arrangement))
                        .and_then(|found| within_memory(request, found));
                    let has_memory = match found {
                        Ok(found) => self.price(found),
                        Err(reason) => {
                            self.refuse(mesh, reason);
                            false
                        }
                    };
                    if has_memory || mesh.pipeline == 1 {
                        break;
                    }
                }
            }
        }
    }

    /// Returns true if a lower bound of a step is clearly above the best candidate, or for devices
    /// with the whole model the best of these: a layout that divides it must gain more.
    fn is_slower(&self, least_s: f64, is_divided: bool) -> bool {
        let mut best_s = f64::INFINITY;
        for one in &self.candidates {
            if is_divided || !one.arrangement.mesh.is_divided() {
                best_s = best_s.min(one.prediction.cost_s());
            }
        }
        // A simpler layout may be chosen that is nearly as fast.
        least_s * (1.0 - GAIN_MIN) > best_s
    }

    /// Returns true if a layout that divides the model, with this lower bound of a step, gains too
    /// little over devices with the whole model, unless it has to be priced nevertheless.
    fn cannot_be_chosen(&self, least_s: f64) -> bool {
        !self.request.prices_runners_up && least_s > most_of_divided(&self.candidates)
    }

    /// Predicts the step of a candidate, and keeps it if it is possible; returns false if its
    /// memory does not suffice.
    fn price(&mut self, found: LaidOutCandidate) -> bool {
        let request = self.request;
        let LaidOutCandidate { arrangement, laid_out, memory } = found;
        let mesh = arrangement.mesh;
        let rows_min = laid_out.whole().rows_min();
        let mut micro_batches =
            laid_out.written.programs.iter().flat_map(|program| &program.micro_batches);
        let may_choose_others = mesh.is_divided() && !request.has_given_layout();
        if may_choose_others && micro_batches.any(|one| one.rows < rows_min) {
            let why = format!("batch normalization needs micro-batches of {rows_min} samples");
            self.refuse(mesh, why);
            return true;
        }
        if let Some(rank) = memory.iter().position(|need| !need.fits()) {
            let name = &request.profile.devices[arrangement.positions[rank]].name;
            self.refuse(mesh, format!("{name} has too little memory for its part"));
            return false;
        }
        self.tried += 1;
        let overlap = request.options.overlap;
        let Some(time) = step_time(request.profile, &arrangement, &laid_out, overlap) else {
            self.refuse(mesh, "a device cannot run one of its blocks".into());
            return true;
        };
        let prediction = Prediction {
            step_s: time.seconds,
            state_factor: state_factor(request.profile, &arrangement, &laid_out),
            communication_s: (time.seconds - time.without_messages_s).max(0.0),
            idle: (1.0 - time.busy_s / time.without_messages_s.max(f64::MIN_POSITIVE)).max(0.0),
            memory,
        };
        self.candidates.push(Candidate { arrangement, prediction });
        true
    }

    /// Records why layouts are not possible; the first reason of each kind of layouts is kept.
    fn refuse(&mut self, mesh: Mesh, reason: String) {
        let layouts = mesh_name(mesh);
        if self.refused.iter().all(|other| other.layouts != layouts) {
            self.refused.push(Refused { layouts, reason });
        }
    }
}

/// Returns true if a mesh has the stages and the tensor ranks of the request, where it gives any.
fn is_asked(request: &SearchRequest, mesh: Mesh) -> bool {
    let options = request.options;
    let stages = options.stages();
    let tensor = options.tensor.ranks as usize;
    if request.has_given_layout() {
        return mesh.pipeline == stages && mesh.tensor == tensor;
    }
    let is_excluded = (mesh.pipeline > 1 && options.excluded.pipelines)
        || (mesh.tensor > 1 && options.excluded.tensor_groups);
    !is_excluded
}

/// Checks that a model and a set of devices can be divided by a mesh.
fn require_divisible(request: &SearchRequest, set: &[usize], mesh: Mesh) -> Result<(), String> {
    let blocks = request.blocks();
    if mesh.pipeline > 1 && blocks < mesh.pipeline.max(2) {
        return Err(format!("the model has {blocks} blocks"));
    }
    if mesh.tensor == 1 {
        return Ok(());
    }
    let equal = vec![1; mesh.tensor];
    request.whole.of_group(&equal, 1).map_err(|error| error.to_string())?;
    if request.has_given_layout() {
        return Ok(());
    }
    let devices = &request.profile.devices;
    for group in set.chunks(mesh.tensor) {
        let first = devices[group[0]].node;
        if group.iter().any(|device| devices[*device].node != first) {
            let why = "a tensor group would be on several machines, whose links are too slow";
            return Err(why.into());
        }
    }
    Ok(())
}

/// Micro-batches to try, the largest first.
fn micro_batches(request: &SearchRequest, mesh: Mesh) -> Vec<u32> {
    let per_pipeline = (request.batch / mesh.data as u32).max(1);
    let most = request.micro_batch.min(per_pipeline).max(1);
    let mut sizes = vec![most];
    let mut size = most / 2;
    while request.fits_micro_batch && size > 0 && per_pipeline / size <= MICRO_BATCHES_MAX {
        sizes.push(size);
        size /= 2;
    }
    sizes
}

/// Schedules to try, with the model chunks of a stage.
fn schedules(request: &SearchRequest, mesh: Mesh) -> Vec<(PipelineSchedule, usize)> {
    let given = &request.options.pipeline;
    if mesh.pipeline == 1 || given.has_stages() {
        let chunks = if given.has_stages() { given.virtual_stages as usize } else { 1 };
        return vec![(given.schedule, chunks)];
    }
    let mut schedules = vec![(PipelineSchedule::OneFOneB, 1), (PipelineSchedule::ZeroBubble, 1)];
    if request.blocks() >= 2 * mesh.pipeline {
        schedules.push((PipelineSchedule::Interleaved, 2));
    }
    schedules
}

/// Divisors of a number, ascending.
fn divisors(number: usize) -> Vec<usize> {
    (1..=number).filter(|divisor| number.is_multiple_of(*divisor)).collect()
}

/// Devices that the chosen candidate does not use, with the reason of each.
fn left_out(
    request: &SearchRequest,
    chosen: &Candidate,
    others: &[Candidate],
) -> Vec<UnusedDevice> {
    let mut left = Vec::new();
    let without = milliseconds(chosen.prediction.step_s);
    for (device, profile) in request.profile.devices.iter().enumerate() {
        if chosen.arrangement.positions.contains(&device) {
            continue;
        }
        let name = &profile.name;
        // The others are sorted by time. A layout without the chosen devices would say nothing of
        // what this one adds to them.
        let beside = others.iter().find(|one| {
            let positions = &one.arrangement.positions;
            let has_chosen = chosen.arrangement.positions.iter().any(|own| positions.contains(own));
            positions.contains(&device) && has_chosen
        });
        let with_s = match beside {
            Some(best) => Some(best.prediction.step_s),
            // A lower bound has ruled all of them out.
            None => {
                let mut set = chosen.arrangement.positions.clone();
                set.push(device);
                set.sort_unstable();
                replicas_seconds(request, &set)
            }
        };
        let reason = match with_s {
            Some(with_s) => {
                let is_shorter = with_s < chosen.prediction.step_s;
                let but = if is_shorter { ", which gains too little" } else { "" };
                let with = milliseconds(with_s);
                format!(
                    "{name} is left out: with it a step would take {with} ms, without it \
                     {without} ms{but}"
                )
            }
            None => format!(
                "{name} is left out: no layout with it beside the others fits, or can be as fast \
                 as {without} ms"
            ),
        };
        left.push(UnusedDevice { device, reason });
    }
    left
}
