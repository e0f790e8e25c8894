//! Opening of devices with measured shares: each is opened with a reserve for its moments, then
//! timed, and the batch is divided among them. With `auto`, devices that make a step longer are
//! excluded; with `auto` and `all`, also devices that fail before the run.

use super::candidates::adapters_for;
use super::laid_out::lay_out;
use super::names::{is_auto, is_named};
use super::open_one::{BegunOpening, RankOpening, RequestedDevices};
use super::open_plan::{self, MeasuredCandidate, OpenPlan, admit, reserves_hold};
use super::reduce_sites::reduce_sites;
use super::requested_pipelines::arrangement_of_replicas;
use super::shares::moments;
use super::start::ReadyRanks;
use super::statistics::require_statistics;
use super::types::PlacementRequest;
use crate::runtime::RuntimeError;
use crate::runtime::device_thread::DeviceThread;
use crate::runtime::expected_step::ExpectedStep;
use crate::runtime::open::{OpenDevice, no_room};
use crate::runtime::remote::FIRST_NODE;
use crate::runtime::timing::{self, BatchSplit, BatchToSplit, CostOfDevices, Network, Probe};
use potluck_core::faults::{Fault, InjectedFault, Point};
use potluck_core::format::{counted, milliseconds};
use potluck_core::{DType, Rank, Setting};
use potluck_kernels::autotune;
use potluck_kernels::device::host::available_memory;
use potluck_kernels::device::{DeviceError, Selection, selector_of};
use potluck_kernels::exec::Moments;
use potluck_parallel::collective::BucketGroups;
use potluck_parallel::planner::laid_out::layout_of;
use potluck_parallel::planner::links::RingLinks;
use potluck_parallel::{Placement, ReduceSite, contiguous_shares};

/// Open device with memory reserved for its moments.
struct ReservedDevice {
    device: OpenDevice,
    selection: Selection,
    reserve: Moments,
    /// Bytes of the device's memory in use, with the reserve.
    bytes: usize,
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

/// Error of a device, with its index among the open ones.
struct Failure {
    index: usize,
    error: RuntimeError,
}

/// Opens devices, selects some for the run, and divides the batch by their measured speed. On an
/// error, the user is notified of the devices excluded before.
///
/// # Errors
/// Returns the `RuntimeError` of the first named device that fails, or of the last remaining
/// device.
pub(crate) fn open_measured(
    request: &PlacementRequest,
    devices: RequestedDevices,
    saved: Option<&Placement>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<ReadyRanks, RuntimeError> {
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
    let MeasuredRanks { shared, reduce_sites, expected } = measured?;
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
    Ok(ReadyRanks { arrangement, laid_out, members, reduce_sites, is_kept, notes, expected })
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

/// Divides the batch among the open devices, and returns the devices that the run uses. A device
/// that fails is excluded with a note, unless it is named or the last of the `count` requested
/// devices.
fn measured(
    request: &PlacementRequest,
    probe: &Probe,
    count: usize,
    saved: Option<&Placement>,
    mut opened: Vec<ReservedDevice>,
    notes: &mut Vec<String>,
) -> Result<MeasuredRanks, RuntimeError> {
    let links = measure_links(request, &opened, count)?;
    loop {
        let network = links.as_ref().map(|links| network(request, &opened, links));
        let network = network.as_ref();
        let split = split_with_sites(request, probe, &opened, network, saved);
        let Failure { index, error } = match split {
            Ok((mut split, reduce_sites)) => {
                notes.extend(split.notes.iter().cloned());
                if let Some(cost) = &split.cost {
                    notes.push(cost_note(request, &opened, cost));
                }
                let expected = split.expected.take();
                let shared = members(request, opened, &split);
                return Ok(MeasuredRanks { shared, reduce_sites, expected });
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

/// Returns a sentence on the requested devices that make a step longer, with the selector of the
/// others.
fn cost_note(
    request: &PlacementRequest,
    opened: &[ReservedDevice],
    cost: &CostOfDevices,
) -> String {
    let mut names = Vec::new();
    let mut others = Vec::new();
    for (index, ReservedDevice { device, .. }) in opened.iter().enumerate() {
        if cost.devices.contains(&index) {
            names.push(device.driver.name());
        } else {
            others.push(device.position);
        }
    }
    let mut note = cost.sentence(&names);
    // No selector names devices of other nodes.
    if request.nodes.devices.is_empty()
        && let Some(rest) = selector_of(request.selector, &others, &adapters_for(request.selector))
    {
        note.push_str(&format!("; to train without: {}", Setting::Devices.given(rest)));
    }
    note
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

/// Measures the devices, divides the batch among them, and allocates the moments of the devices
/// with a share.
fn split(
    request: &PlacementRequest,
    probe: &Probe,
    opened: &[ReservedDevice],
    network: Option<&Network>,
) -> Result<BatchSplit, Failure> {
    let hold = |set: &[usize]| {
        let reserves: Vec<&Moments> = set.iter().map(|index| &opened[*index].reserve).collect();
        reserves_hold(request, &reserves)
    };
    let found = match opened {
        [_] if !hold(&[0]) => None,
        [_] => {
            let rows = request.micro_batch.min(request.batch);
            Some(BatchSplit::of_one(request.batch, rows))
        }
        _ => measure(request, probe, opened, network, &hold)?,
    };
    let Some(found) = found else {
        let index = (0..opened.len()).find(|index| !hold(&[*index])).unwrap_or(0);
        let ReservedDevice { device, selection, .. } = &opened[index];
        let name = device.driver.name();
        let error = open_plan::too_little_for_one(request, selection, name, device.rows);
        return Err(Failure { index, error });
    };
    let layout = layout_of(request.parallel, &request.plans.of_rows(1), found.members.len());
    for (rank, &index) in found.members.iter().enumerate() {
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
    Ok(found)
}

/// Divides the batch, and decides the reduce sites of the devices with a share.
fn split_with_sites(
    request: &PlacementRequest,
    probe: &Probe,
    opened: &[ReservedDevice],
    network: Option<&Network>,
    saved: Option<&Placement>,
) -> Result<(BatchSplit, Vec<ReduceSite>), Failure> {
    let split = split(request, probe, opened, network)?;
    let layout = layout_of(request.parallel, &request.plans.of_rows(1), split.members.len());
    let members: Vec<&OpenDevice> =
        split.members.iter().map(|index| &opened[*index].device).collect();
    let groups = BucketGroups::all(layout.size, layout.buckets());
    match reduce_sites(request, &members, &layout, &groups, saved) {
        Ok(sites) => Ok((split, sites)),
        Err(failed) => Err(Failure { index: split.members[failed.rank], error: failed.error }),
    }
}

/// Times the devices, and divides the batch among them or a faster subset.
fn measure(
    request: &PlacementRequest,
    probe: &Probe,
    opened: &[ReservedDevice],
    network: Option<&Network>,
    hold: &dyn Fn(&[usize]) -> bool,
) -> Result<Option<BatchSplit>, Failure> {
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
    let mut drivers: Vec<&DeviceThread> = Vec::new();
    let mut rows = Vec::new();
    for one in opened {
        drivers.push(&one.device.driver);
        rows.push(one.device.rows);
    }
    let timeout = request.opening.deadline;
    let rows_min = request.plans.of_rows(1).rows_min();
    let takes_all = !is_auto(request.selector);
    let to_split = BatchToSplit { batch: request.batch, rows: &rows, rows_min, takes_all, network };
    timing::split_by_speed(&drivers, probe, to_split, timeout, hold)
        .map_err(|failed| failure(failed.index, failed.error))
}

fn node_of(one: &ReservedDevice) -> u32 {
    match &one.selection {
        Selection::Offered(device) => device.node,
        Selection::Adapter(_) | Selection::Cpu { .. } => FIRST_NODE,
    }
}

/// Measures the links between nodes, if devices are on several, and notifies the user of them.
/// `count` is the number of requested devices.
fn measure_links(
    request: &PlacementRequest,
    opened: &[ReservedDevice],
    count: usize,
) -> Result<Option<RingLinks>, RuntimeError> {
    let other = opened.iter().find(|one| node_of(one) != node_of(&opened[0]));
    let Some(other) = other else { return Ok(None) };
    let measured = request.nodes.measure_links();
    let links = measured.map_err(|error| error.of_position(other.device.position, count))?;
    if let Some(note) = links_note(&links, &request.nodes.hosts) {
        (request.notify)(&note);
    }
    Ok(Some(links))
}

fn network(request: &PlacementRequest, opened: &[ReservedDevice], links: &RingLinks) -> Network {
    let plan = request.plans.of_rows(1);
    let gradients: usize = plan.buckets.iter().map(|bucket| bucket.gradient_length()).sum();
    Network {
        links: links.clone(),
        node_of_device: opened.iter().map(node_of).collect(),
        gradient_bytes: (gradients * DType::F32.bytes()) as f64,
        is_overlapped: request.parallel.overlap,
    }
}

/// Maximum number of links in a note.
const LINKS_TOLD: usize = 8;

/// Returns a sentence on the links between hosts, or the slowest of many; `None` without any.
fn links_note(links: &RingLinks, hosts: &[String]) -> Option<String> {
    let mut known = Vec::new();
    for (from, rate) in links.0.iter().enumerate() {
        if let Some(rate) = rate {
            known.push((from, *rate));
        }
    }
    known.sort_by(|a, b| a.1.bytes_per_s.total_cmp(&b.1.bytes_per_s));
    let mut told = Vec::new();
    for (from, rate) in known.iter().take(LINKS_TOLD) {
        let to = (from + 1) % links.0.len();
        let name = |node: usize| hosts.get(node).map_or("?", |host| host);
        told.push(format!(
            "{} to {} {:.1} MB/s and {} ms",
            name(*from),
            name(to),
            rate.bytes_per_s / 1e6,
            milliseconds(rate.round_trip_s)
        ));
    }
    let which = if known.len() > LINKS_TOLD { "slowest links between nodes" } else { "links" };
    if told.is_empty() {
        return None;
    }
    Some(format!("{which}, with their round trips: {}", told.join(", ")))
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
