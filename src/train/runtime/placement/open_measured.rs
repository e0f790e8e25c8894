//! Opening of devices that hold the whole model for a planned layout: each is opened with a reserve
//! for its moments, then timed, and the planner chooses among all layouts. With `auto`, devices
//! that make a step longer are excluded; with `auto` and `all`, also devices that fail before the
//! run.

use super::automatic_layout::{PlannedLayout, PlannedPlacement};
use super::candidates::{adapters_for, node_of};
use super::device_memory::DeviceMemory;
use super::laid_out::{lay_out, memory_of_ranks};
use super::links::measured_links;
use super::names::{is_auto, is_named};
use super::open_one::{BegunOpening, RankOpening, RequestedDevices};
use super::open_plan::{self, MeasuredCandidate, OpenPlan, admit, reserves_hold};
use super::open_profile::{OpenProfile, open_profile};
use super::planned::left_out_notes;
use super::reduce_sites::reduce_sites;
use super::requested_pipelines::arrangement_of_replicas;
use super::shares::moments;
use super::start::ReadyRanks;
use super::statistics::require_statistics;
use super::types::PlacementRequest;
use crate::runtime::device_cost::CostOfDevices;
use crate::runtime::expected_step::ExpectedStep;
use crate::runtime::open::{OpenDevice, no_room};
use crate::runtime::timing::Probe;
use crate::runtime::{RuntimeError, memory};
use potluck_core::faults::{Fault, InjectedFault, Point};
use potluck_core::format::{counted, milliseconds};
use potluck_core::{Rank, Setting};
use potluck_kernels::autotune;
use potluck_kernels::device::host::available_memory;
use potluck_kernels::device::{DeviceError, Selection, selector_of};
use potluck_kernels::exec::Moments;
use potluck_parallel::collective::BucketGroups;
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::laid_out::{LaidOut, layout_of};
use potluck_parallel::planner::links::RingLinks;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::planner::profile::PlanProfile;
use potluck_parallel::planner::proposal::{Candidate, MemoryNeed, Proposal};
use potluck_parallel::planner::search::{
    MemoryModel, SearchRequest, StageFits, StageQuestion, search,
};
use potluck_parallel::planner::step_time::step_time;
use potluck_parallel::sim::LinkModel;
use potluck_parallel::{Placement, ReduceSite, contiguous_shares};

/// Open device with memory reserved for its moments.
pub(crate) struct ReservedDevice {
    pub device: OpenDevice,
    pub selection: Selection,
    pub reserve: Moments,
    /// Bytes of the device's memory in use, with the reserve.
    bytes: usize,
}

impl ReservedDevice {
    /// Returns the number of the device's node.
    pub fn node(&self) -> u32 {
        node_of(&self.selection)
    }
}

/// Device of the run, with its samples per step and the maximum of a micro-batch.
struct MeasuredShare {
    device: OpenDevice,
    count: u32,
    micro_batch: u32,
}

/// Devices of the run, with the sites where they add gradients.
struct MeasuredRanks {
    shared: Vec<MeasuredShare>,
    reduce_sites: Vec<ReduceSite>,
    expected: Option<ExpectedStep>,
}

/// Result of the measurement of open devices.
enum Measured {
    /// Devices with the whole model.
    Ranks(MeasuredRanks),
    Divided(Box<Divided>),
}

/// Layout of the requested devices that divides the model.
struct Divided {
    proposal: Proposal,
    expected: ExpectedStep,
    /// Sentences for the user.
    notes: Vec<String>,
}

/// Division of the batch among open devices with the whole model.
struct BatchSplit {
    /// Indices of the selected devices; the other lists have an entry for each.
    members: Vec<usize>,
    counts: Vec<u32>,
    /// Maximum micro-batch.
    micro_batches: Vec<u32>,
    /// Sentences for the user.
    notes: Vec<String>,
    /// Expected step; `None` for a single device, which is not timed.
    expected: Option<ExpectedStep>,
}

/// Error of a device, with its index among the open ones.
struct Failure {
    index: usize,
    error: RuntimeError,
}

/// Opens devices, measures them, and selects the fastest layout: some or all of them with the whole
/// model and shares of the batch, or pipelines and tensor groups. On an error, the user is notified
/// of the devices excluded before.
///
/// # Errors
/// Returns the `RuntimeError` of the first named device that fails, or of the last remaining
/// device.
pub(crate) fn open_measured(
    request: &PlacementRequest,
    devices: RequestedDevices,
    saved: Option<&Placement>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<PlannedPlacement, RuntimeError> {
    let Some(probe) = &request.probe else {
        return Err(RuntimeError::Defect("devices are measured without inputs".into()));
    };
    let count = devices.selections.len();
    let mut notes = Vec::new();
    let measured = open_admitted(request, devices, &mut notes, report)
        .and_then(|opened| measured(request, probe, count, saved, opened, &mut notes));
    if measured.is_err() {
        for note in &notes {
            (request.notify)(note);
        }
    }
    let MeasuredRanks { shared, reduce_sites, expected } = match measured? {
        Measured::Ranks(ranks) => ranks,
        Measured::Divided(chosen) => {
            let Divided { proposal, expected, notes: told } = *chosen;
            notes.extend(told);
            let layout = PlannedLayout::of(request, devices.selections, &proposal, expected, notes);
            return Ok(PlannedPlacement::Layout(Box::new(layout)));
        }
    };
    let mut members = Vec::new();
    let mut positions = Vec::new();
    let mut counts = Vec::new();
    let mut micro_batches = Vec::new();
    let mut rows = Vec::new();
    for MeasuredShare { device, count, micro_batch } in shared {
        positions.push(device.position);
        counts.push(count);
        // A micro-batch has at most the rows of the plan.
        micro_batches.push(micro_batch.min(device.rows));
        rows.push(device.rows);
        members.push(device);
    }
    let shares = contiguous_shares(&counts, &micro_batches);
    let arrangement = arrangement_of_replicas(request, positions, shares, rows);
    let laid_out = lay_out(request, &arrangement)?;
    notes.extend(require_statistics(laid_out.whole(), laid_out.written.programs.iter())?);
    let is_kept = false;
    let ready =
        ReadyRanks { arrangement, laid_out, members, reduce_sites, is_kept, notes, expected };
    Ok(PlannedPlacement::Opened(Box::new(ready)))
}

/// Opens the admitted devices. Devices that fail are excluded with a note, unless they are named.
fn open_admitted(
    request: &PlacementRequest,
    devices: RequestedDevices,
    notes: &mut Vec<String>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<Vec<ReservedDevice>, RuntimeError> {
    let RequestedDevices { selections, names } = devices;
    let count = selections.len();
    let candidates = admit(request, selections, names, available_memory(), notes)?;
    let mut openings = Vec::new();
    for candidate in &candidates {
        let Some(preferred) = candidate.admissions.front() else {
            let name = &candidate.name;
            return Err(RuntimeError::Defect(format!("{name} is admitted with no rows")));
        };
        openings.push((candidate, begin(request, candidate, preferred)));
    }
    let mut opened = Vec::new();
    let mut failed = None;
    for (candidate, opening) in openings {
        let position = candidate.position;
        match open_reserved(request, candidate, opening, report) {
            Ok(one) => opened.push(one),
            // A named device must not be excluded.
            Err(error) if is_named(request.selector) => {
                return Err(error.of_position(position, count));
            }
            Err(error) => {
                notes.push(format!("left out: {error}"));
                failed = Some(error);
            }
        }
    }
    match failed {
        Some(error) if opened.is_empty() => Err(error),
        _ => Ok(opened),
    }
}

/// Chooses a layout of the open devices, and returns the devices that the run uses. A device that
/// fails is excluded with a note, unless it is named or the last of the `count` requested
/// devices.
fn measured(
    request: &PlacementRequest,
    probe: &Probe,
    count: usize,
    saved: Option<&Placement>,
    mut opened: Vec<ReservedDevice>,
    notes: &mut Vec<String>,
) -> Result<Measured, RuntimeError> {
    let links = if opened.len() > 1 {
        let places = opened.iter().map(|one| (one.node(), one.device.position));
        measured_links(request, places, count)?
    } else {
        None
    };
    loop {
        let choice = choose(request, probe, &opened, links.as_ref());
        let ready = match choice {
            Ok(Choice::Divided(chosen)) => return Ok(Measured::Divided(chosen)),
            Ok(Choice::Split(split)) => {
                prepare(request, &opened, &split, saved).map(|reduce_sites| (split, reduce_sites))
            }
            Err(failure) => Err(failure),
        };
        let Failure { index, error } = match ready {
            Ok((mut split, reduce_sites)) => {
                notes.append(&mut split.notes);
                let expected = split.expected.take();
                let shared = members(request, opened, &split);
                return Ok(Measured::Ranks(MeasuredRanks { shared, reduce_sites, expected }));
            }
            Err(failure) => failure,
        };
        if is_named(request.selector) || opened.len() == 1 {
            return Err(error.of_position(opened[index].device.position, count));
        }
        notes.push(format!("left out: {error}"));
        drop(opened.remove(index));
    }
}

/// Begins to open a device with an admission.
fn begin<'a>(
    request: &PlacementRequest,
    candidate: &'a MeasuredCandidate,
    open_plan: &OpenPlan,
) -> Result<BegunOpening<'a>, RuntimeError> {
    let rank = RankOpening {
        position: candidate.position,
        selection: &candidate.selection,
        name: &candidate.name,
        plan: request.plans.of_rows(open_plan.rows),
        tensor_shares: &[],
        moments: open_plan.reserve.clone(),
    };
    BegunOpening::begin(request, rank, None)
}

/// Opens a device with the first of its admissions that fits its memory; `begun` is its opening
/// with the preferred one.
fn open_reserved<'a>(
    request: &PlacementRequest,
    candidate: &'a MeasuredCandidate,
    begun: Result<BegunOpening<'a>, RuntimeError>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<ReservedDevice, RuntimeError> {
    let mut opening = begun;
    let mut admissions: Vec<&OpenPlan> = candidate.admissions.iter().collect();
    loop {
        let now = admissions.remove(0);
        let error = match open_initialized(request, opening?, now.memory.device, report) {
            Ok(device) => {
                return Ok(ReservedDevice {
                    device,
                    selection: candidate.selection.clone(),
                    reserve: now.reserve.clone(),
                    bytes: now.memory.device,
                });
            }
            Err(error) => error,
        };
        if !error.is_capacity_error() {
            return Err(error);
        }
        admissions.retain(|next| is_smaller(next, now, &error));
        let Some(next) = admissions.first() else { return Err(error) };
        opening = begin(request, candidate, next);
    }
}

/// Opens a device that uses `bytes` of its memory, and initializes its parameters.
fn open_initialized(
    request: &PlacementRequest,
    opening: BegunOpening,
    bytes: usize,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<OpenDevice, RuntimeError> {
    let opened = opening.finish(request, report)?;
    let seed = request.seed;
    let initialized = opened.driver.run("initialization", move |device| device.initialize(seed));
    initialized.map_err(|error| no_room(error, bytes))?;
    Ok(opened)
}

/// Returns true if a device may open with `next` after the error of `now`: with less memory, or
/// with fewer rows if a tensor was too large.
fn is_smaller(next: &OpenPlan, now: &OpenPlan, error: &RuntimeError) -> bool {
    let is_memory = matches!(error, RuntimeError::NoRoom { .. });
    let is_smaller =
        if is_memory { next.memory.device < now.memory.device } else { next.rows < now.rows };
    is_smaller && next.memory.of_host() <= now.memory.of_host()
}

/// Layout of open devices.
enum Choice {
    Split(BatchSplit),
    Divided(Box<Divided>),
}

/// Measures the devices, if there are several, and chooses their fastest layout.
fn choose(
    request: &PlacementRequest,
    probe: &Probe,
    opened: &[ReservedDevice],
    links: Option<&RingLinks>,
) -> Result<Choice, Failure> {
    let lacks_memory = |index: usize| {
        let ReservedDevice { device, selection, .. } = &opened[index];
        let name = device.driver.name();
        let error = open_plan::too_little_for_one(request, selection, name, device.rows);
        Failure { index, error }
    };
    let holds = |index: usize| reserves_hold(request, &[&opened[index].reserve]);
    if let [_] = opened {
        if !holds(0) {
            return Err(lacks_memory(0));
        }
        return Ok(Choice::Split(BatchSplit {
            members: vec![0],
            counts: vec![request.batch],
            micro_batches: vec![request.micro_batch.min(request.batch)],
            notes: Vec::new(),
            expected: None,
        }));
    }
    let staged = Plans::new(request.plans.model().clone().with_separate_backward());
    let measured = measure(request, probe, opened, &staged, links)?;
    let planner = OpenPlanner::new(request, opened, &staged, &measured);
    let Some(ChosenLayout { proposal, notes }) = planner.chosen() else {
        return Err(lacks_memory((0..opened.len()).find(|index| !holds(*index)).unwrap_or(0)));
    };
    if proposal.chosen.arrangement.mesh.is_divided() {
        let expected = ExpectedStep::of(&proposal, &planner.names);
        let proposal = of_requested(proposal, opened);
        return Ok(Choice::Divided(Box::new(Divided { proposal, expected, notes })));
    }
    Ok(Choice::Split(planner.split(&proposal, notes)))
}

/// Search for the fastest layout of open devices.
struct OpenPlanner<'a> {
    request: &'a PlacementRequest<'a>,
    opened: &'a [ReservedDevice],
    /// Plans of stages of pipelines.
    staged: &'a Plans,
    profile: &'a PlanProfile,
    selections: Vec<Selection>,
    names: Vec<String>,
    has_block_times: bool,
    /// Bytes of host memory without the open devices.
    available: Option<u64>,
}

/// Proposal with sentences for the user.
struct ChosenLayout {
    proposal: Proposal,
    notes: Vec<String>,
}

impl<'a> OpenPlanner<'a> {
    fn new(
        request: &'a PlacementRequest,
        opened: &'a [ReservedDevice],
        staged: &'a Plans,
        measured: &'a OpenProfile,
    ) -> Self {
        let mut of_host = 0;
        for one in opened {
            if memory::uses_host_memory(&one.selection) {
                of_host += one.bytes as u64;
            }
        }
        Self {
            request,
            opened,
            staged,
            profile: &measured.profile,
            has_block_times: measured.has_block_times,
            selections: opened.iter().map(|one| one.selection.clone()).collect(),
            names: opened.iter().map(|one| one.device.driver.name().to_string()).collect(),
            available: available_memory().map(|bytes| bytes + of_host),
        }
    }

    /// Returns the fastest layout, which has all devices unless some may be left out; `None` if
    /// nothing fits.
    fn chosen(&self) -> Option<ChosenLayout> {
        let some = self.search(false);
        let takes_all = !is_auto(self.request.selector);
        if takes_all && let Some(all) = self.search(true) {
            let cost = some.and_then(|some| self.cost_note(&all, &some));
            return Some(ChosenLayout { proposal: all, notes: cost.into_iter().collect() });
        }
        // All open devices have memory together: the batch may have too few samples for them.
        let proposal = some?;
        let notes = left_out_notes(&proposal);
        Some(ChosenLayout { proposal, notes })
    }

    fn search(&self, uses_all: bool) -> Option<Proposal> {
        let Self { request, opened, staged, profile, .. } = self;
        let devices = RequestedDevices { selections: &self.selections, names: &self.names };
        let available = self.available;
        let of_parts = DeviceMemory { request, devices, staged, available };
        search(&SearchRequest {
            profile,
            whole: request.plans,
            staged,
            options: request.parallel,
            uses_all,
            batch: request.batch,
            micro_batch: request.micro_batch,
            fits_micro_batch: request.fits_micro_batch,
            prices_runners_up: false,
            // Without times of the blocks, a cut is a guess.
            may_divide: self.has_block_times,
            memory: &OpenMemory { of_parts, opened },
        })
        .ok()
    }

    /// Returns a sentence on the requested devices that make a step longer, with the selector of
    /// the others.
    fn cost_note(&self, all: &Proposal, some: &Proposal) -> Option<String> {
        let Self { request, opened, names, .. } = self;
        let mut cost = CostOfDevices {
            devices: Vec::new(),
            with_s: all.chosen.prediction.step_s,
            without_s: some.chosen.prediction.step_s,
        };
        let mut others = Vec::new();
        for (index, one) in opened.iter().enumerate() {
            if some.chosen.arrangement.positions.contains(&index) {
                others.push(one.device.position);
            } else {
                cost.devices.push(index);
            }
        }
        if cost.devices.is_empty() || !cost.is_worth_telling() {
            return None;
        }
        let slow: Vec<&str> = cost.devices.iter().map(|index| &*names[*index]).collect();
        let mut note = cost.sentence(&slow);
        // No selector names devices of other nodes.
        if request.nodes.devices.is_empty()
            && let Some(rest) =
                selector_of(request.selector, &others, &adapters_for(request.selector))
        {
            note.push_str(&format!("; to train without: {}", Setting::Devices.given(rest)));
        }
        Some(note)
    }

    /// Division of the batch by a proposal of devices with the whole model.
    fn split(&self, proposal: &Proposal, mut notes: Vec<String>) -> BatchSplit {
        let arrangement = &proposal.chosen.arrangement;
        let rows_min = self.request.plans.of_rows(1).rows_min();
        if rows_min > 1 && arrangement.positions.len() < self.opened.len() {
            notes.push(format!(
                "each device gets at least {rows_min} samples of a step, for batch normalization"
            ));
        }
        notes.extend(self.network_note(proposal));
        // Not cut to the first shares, which may become larger while the run trains.
        let mut micro_batches = Vec::with_capacity(arrangement.positions.len());
        for &index in &arrangement.positions {
            let rows = self.opened[index].device.rows;
            micro_batches.push(self.profile.devices[index].micro_batch.unwrap_or(rows));
        }
        BatchSplit {
            members: arrangement.positions.clone(),
            counts: arrangement.shares.iter().map(|share| share.count).collect(),
            micro_batches,
            notes,
            expected: Some(ExpectedStep::of(proposal, &self.names)),
        }
    }

    /// Returns a sentence on the expected step of devices on several nodes.
    fn network_note(&self, proposal: &Proposal) -> Option<String> {
        let prediction = &proposal.chosen.prediction;
        let positions = &proposal.chosen.arrangement.positions;
        let first = self.opened[positions[0]].node();
        let has_rates = self.profile.links.iter().flatten().any(|link| *link != LinkModel::INSTANT);
        if !has_rates || positions.iter().all(|index| self.opened[*index].node() == first) {
            return None;
        }
        let step_ms = milliseconds(prediction.step_s);
        let network_s = prediction.step_s - self.step_without_network(&proposal.chosen)?;
        Some(if network_s > 0.0 {
            let network_ms = milliseconds(network_s);
            format!(
                "a step is expected to take {step_ms} ms, {network_ms} of them for the network \
                 between nodes"
            )
        } else {
            format!(
                "a step is expected to take {step_ms} ms, in which the network between nodes is \
                 hidden"
            )
        })
    }

    /// Seconds of a step of a candidate whose links between nodes take no time.
    fn step_without_network(&self, candidate: &Candidate) -> Option<f64> {
        let mut profile = self.profile.clone();
        for link in profile.links.iter_mut().flatten() {
            *link = LinkModel::INSTANT;
        }
        let laid_out = lay_out(self.request, &candidate.arrangement).ok()?;
        let overlap = self.request.parallel.overlap;
        Some(step_time(&profile, &candidate.arrangement, &laid_out, overlap)?.seconds)
    }
}

/// Memory of open devices: that with which they were opened for the whole model, and all of it for
/// parts of the model, for which they would be opened again.
struct OpenMemory<'a> {
    of_parts: DeviceMemory<'a>,
    opened: &'a [ReservedDevice],
}

impl MemoryModel for OpenMemory<'_> {
    fn needs(&self, arrangement: &Arrangement, laid_out: &LaidOut) -> Vec<MemoryNeed> {
        if arrangement.mesh.is_divided() {
            return self.of_parts.needs(arrangement, laid_out);
        }
        let opened = arrangement.positions.iter().map(|index| &self.opened[*index]);
        let selections = opened.clone().map(|one| &one.selection);
        let request = self.of_parts.request;
        let needed = memory_of_ranks(laid_out, request, selections);
        let reserves: Vec<&Moments> = opened.clone().map(|one| &one.reserve).collect();
        let is_reserved = reserves_hold(request, &reserves);
        let mut needs = Vec::with_capacity(needed.len());
        for (one, rank) in opened.zip(needed) {
            // Without a reserve for a shard, the device is open with too little.
            let has = if is_reserved { Some(one.bytes as u64) } else { Some(0) };
            needs.push(MemoryNeed { needed: rank.device as u64, has });
        }
        needs
    }

    fn with_stage_memory(&self, question: StageQuestion<'_>, cut: &mut dyn FnMut(&StageFits<'_>)) {
        self.of_parts.with_stage_memory(question, cut);
    }
}

/// The same layouts of the requested devices, of which some may not be open.
fn of_requested(mut proposal: Proposal, opened: &[ReservedDevice]) -> Proposal {
    let requested = |index: usize| opened[index].device.position;
    for left in &mut proposal.left_out {
        left.device = requested(left.device);
    }
    let others = proposal.others.iter_mut().map(|other| &mut other.arrangement);
    for arrangement in others.chain([&mut proposal.chosen.arrangement]) {
        for position in &mut arrangement.positions {
            *position = requested(*position);
        }
    }
    proposal
}

/// Allocates the moments of the devices with a share, and decides where each adds gradients.
fn prepare(
    request: &PlacementRequest,
    opened: &[ReservedDevice],
    split: &BatchSplit,
    saved: Option<&Placement>,
) -> Result<Vec<ReduceSite>, Failure> {
    let layout = layout_of(request.parallel, &request.plans.of_rows(1), split.members.len());
    for (rank, &index) in split.members.iter().enumerate() {
        let moments = moments(request.optimizer, &layout, rank);
        let one = &opened[index];
        let injected = injected(request, Point::Moments, one);
        let done = one.device.driver.run("the allocation of moments", move |device| {
            if let Some(fault) = injected {
                device.inject_fault(fault)?;
            }
            device.set_moments(moments)
        });
        done.map_err(|error| Failure { index, error: no_room(error, one.bytes) })?;
    }
    let members: Vec<&OpenDevice> =
        split.members.iter().map(|index| &opened[*index].device).collect();
    let groups = BucketGroups::all(layout.size, layout.buckets());
    reduce_sites(request, &members, &layout, &groups, saved)
        .map_err(|failed| Failure { index: split.members[failed.rank], error: failed.error })
}

/// Times the devices, alone and together.
fn measure(
    request: &PlacementRequest,
    probe: &Probe,
    opened: &[ReservedDevice],
    staged: &Plans,
    links: Option<&RingLinks>,
) -> Result<OpenProfile, Failure> {
    (request.notify)(&format!(
        "measuring {} devices, alone and together, on micro-batches of up to {}",
        opened.len(),
        counted(request.micro_batch.min(request.batch) as usize, "sample", "samples")
    ));
    let failure = |index: usize, error: DeviceError| Failure {
        index,
        error: no_room(error, opened[index].bytes),
    };
    for (index, one) in opened.iter().enumerate() {
        if let Some(fault) = injected(request, Point::Timing, one) {
            let done = one
                .device
                .driver
                .run("timing micro-batches", move |device| device.inject_fault(fault));
            done.map_err(|error| failure(index, error))?;
        }
    }
    open_profile(request, probe, opened, staged, links)
        .map_err(|failed| failure(failed.index, failed.error))
}

/// Fault planned for a device at step 0, before the first step.
fn injected(
    request: &PlacementRequest,
    point: Point,
    one: &ReservedDevice,
) -> Option<InjectedFault> {
    let rank = Rank(one.device.position as u32);
    request.faults.at_rank(point, 0, rank).and_then(Fault::of_device)
}

/// Devices with a share.
fn members(
    request: &PlacementRequest,
    opened: Vec<ReservedDevice>,
    split: &BatchSplit,
) -> Vec<MeasuredShare> {
    let mut members = Vec::new();
    for (index, one) in opened.into_iter().enumerate() {
        if let Some(rank) = split.members.iter().position(|member| *member == index) {
            members.push(MeasuredShare {
                device: one.device,
                count: split.counts[rank],
                micro_batch: split.micro_batches[rank].min(request.micro_batch),
            });
        }
    }
    members
}
