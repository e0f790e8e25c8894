//! Opening of a worker group's devices: with given or recorded shares, or with measured ones.

use std::sync::Arc;

use super::host_memory;
use super::names::is_named;
use super::open_measured::open_measured;
use super::reduce_sites::reduce_sites;
use super::shares::{fixed_counts, layout_of, moments};
use super::types::{OpenedRanks, PlacementRequest};
use crate::autotune;
use crate::base::Setting;
use crate::collective::{BucketGroups, ShardLayout};
use crate::device::Selection;
use crate::exec::Moments;
use crate::graph::Plan;
use crate::parallel::{Placement, RankPlacement, ReduceSite};
use crate::runtime::open::{DeviceToOpen, OpenDevice, open_selected, tuning_of};
use crate::runtime::remote::RemoteOpening;
use crate::runtime::{RuntimeError, memory};

/// Requested devices with their display names.
#[derive(Clone, Copy)]
pub struct RequestedDevices<'a> {
    pub selections: &'a [Selection],
    pub names: &'a [String],
}

/// Device that is to be opened.
struct Candidate {
    /// Index of the device among the requested ones.
    position: usize,
    selection: Selection,
    name: String,
    /// Samples of the device in each step; `micro_batch` is the most that it runs at a time.
    count: u32,
    micro_batch: u32,
    /// Rows of the device's plan.
    rows: u32,
}

/// Device that is to be opened as a rank.
pub struct RankOpening<'a> {
    /// Index of the device among the requested ones.
    pub position: usize,
    pub selection: &'a Selection,
    pub name: &'a str,
    /// Plan of what the rank holds.
    pub plan: Arc<Plan>,
    pub moments: Moments,
}

/// Opens one device with a plan. A resumed run keeps the kernel variants of
/// `saved` if it is the same device.
///
/// # Errors
/// Returns the errors of [`open_selected`].
pub fn open_one(
    request: &PlacementRequest,
    rank: RankOpening,
    saved: Option<&RankPlacement>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<OpenDevice, RuntimeError> {
    let RankOpening { position, selection, name, plan, moments } = rank;
    let plan = Arc::unwrap_or_clone(plan);
    let opened = if let Selection::Offered(device) = selection {
        let opening = RemoteOpening { name, tuning: request.tuning, kept: saved, report };
        let deadline = request.opening.deadline;
        request.nodes.open(device, plan, moments, opening, deadline)?
    } else {
        let tuning = |identity: &str| {
            tuning_of(request.tuning, saved.filter(|saved| saved.identity == identity))
        };
        let options = &request.opening;
        let selection = selection.clone();
        let to_open = DeviceToOpen { selection, name, plan, moments, options };
        open_selected(to_open, tuning, report)?
    };
    Ok(OpenDevice { position, ..opened })
}

/// Opens the devices of a resumed run with their recorded shares.
///
/// # Errors
/// Returns `RuntimeError::Unplaceable` if the record names other devices than `selections`, or
/// sizes that no run has, and `RuntimeError` if a device cannot be opened.
pub fn open_recorded(
    request: &PlacementRequest,
    devices: RequestedDevices,
    kept: &Placement,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<OpenedRanks, RuntimeError> {
    let count = devices.selections.len();
    if !kept.is_consistent() || kept.ranks.iter().any(|rank| rank.position >= count) {
        return Err(RuntimeError::unplaceable(format_args!(
            "the ranks that the checkpoint recorded are not those of its devices; measure again \
             with {}",
            Setting::Retune
        )));
    }
    let mut chosen = Vec::new();
    for rank in &kept.ranks {
        chosen.push(Candidate {
            position: rank.position,
            selection: devices.selections[rank.position].clone(),
            name: devices.names[rank.position].clone(),
            count: rank.share,
            micro_batch: rank.micro_batch,
            rows: rank.rows,
        });
    }
    open_fixed(request, chosen, Some(kept), report)
}

/// Opens devices with the shares given in `chosen`.
fn open_fixed(
    request: &PlacementRequest,
    chosen: Vec<Candidate>,
    saved: Option<&Placement>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<OpenedRanks, RuntimeError> {
    let world = chosen.len();
    let layout = layout_of(request.parallel, &request.plans.of_rows(1), world);
    require_host_memory(request, &chosen)?;
    let mut openings = Vec::new();
    for (rank, candidate) in chosen.iter().enumerate() {
        openings.push(RankOpening {
            position: candidate.position,
            selection: &candidate.selection,
            name: &candidate.name,
            plan: request.plans.of_rows(candidate.rows),
            moments: moments(request.optimizer, &layout, rank),
        });
    }
    let groups = BucketGroups::all(layout.size, layout.buckets());
    let (opened, reduce_sites) = open_all(request, openings, &layout, &groups, saved, report)?;
    let mut members = Vec::new();
    for (one, candidate) in opened.into_iter().zip(&chosen) {
        members.push((one, candidate.count, candidate.micro_batch));
    }
    Ok(OpenedRanks { members, reduce_sites, notes: Vec::new() })
}

/// Opens the devices of all ranks, and decides where each adds gradients. What `saved` records
/// about a device is kept.
///
/// # Errors
/// Returns the `RuntimeError` of the first device that fails.
pub fn open_all(
    request: &PlacementRequest,
    ranks: Vec<RankOpening>,
    layout: &ShardLayout,
    groups: &BucketGroups,
    saved: Option<&Placement>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<(Vec<OpenDevice>, Vec<ReduceSite>), RuntimeError> {
    let world = ranks.len();
    let mut opened: Vec<OpenDevice> = Vec::new();
    for rank in ranks {
        let position = rank.position;
        let kept = saved.and_then(|saved| saved.of_position(position, world));
        let one = open_one(request, rank, kept, report);
        opened.push(one.map_err(|error| error.of_position(position, world))?);
    }
    let devices: Vec<&OpenDevice> = opened.iter().collect();
    let sites = reduce_sites(request, &devices, layout, groups, saved)
        .map_err(|failed| failed.error.of_position(devices[failed.rank].position, world))?;
    Ok((opened, sites))
}

/// Checks that the host has memory for the devices that use it, for the values on their way
/// between devices, and for saving a checkpoint.
fn require_host_memory(
    request: &PlacementRequest,
    chosen: &[Candidate],
) -> Result<(), RuntimeError> {
    let world = chosen.len();
    let plan = request.plans.of_rows(1);
    let layout = layout_of(request.parallel, &plan, world);
    let kept = request.optimizer.moments();
    let mut bytes = host_memory::shared(request.parallel, &plan, world, kept);
    for (rank, candidate) in chosen.iter().enumerate() {
        let plan = request.plans.of_rows(candidate.rows);
        let moments = moments(request.optimizer, &layout, rank);
        let needed = host_memory::of_device(&candidate.selection, &plan, &moments, world);
        bytes = bytes.saturating_add(needed);
    }
    memory::require(bytes)
}

/// Opens the devices of a new run with fixed or measured shares.
///
/// # Errors
/// Returns `RuntimeError` if the shares do not fit the devices, if a device that was named cannot
/// be opened or has too little memory, or if none is left.
pub fn open_new(
    request: &PlacementRequest,
    devices: RequestedDevices,
    saved: Option<&Placement>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<OpenedRanks, RuntimeError> {
    if let Some(probe) = &request.probe
        && request.parallel.shares.is_none()
        && devices.selections.len() > 1
    {
        return open_measured(request, devices, probe, saved, report);
    }
    let (devices, note) = with_samples(request, devices);
    let world = devices.selections.len();
    let counts = fixed_counts(request.parallel, request.batch, world)?;
    let mut chosen = Vec::new();
    for (position, count) in counts.into_iter().enumerate() {
        chosen.push(Candidate {
            position,
            selection: devices.selections[position].clone(),
            name: devices.names[position].clone(),
            count,
            micro_batch: request.micro_batch,
            rows: request.micro_batch.min(count).max(1),
        });
    }
    let opened = open_fixed(request, chosen, saved, report)?;
    Ok(OpenedRanks { notes: Vec::from_iter(note), ..opened })
}

/// Returns as many devices as a batch that is split evenly has samples, with a note about the
/// others; devices that were named must all take part.
fn with_samples<'a>(
    request: &PlacementRequest,
    devices: RequestedDevices<'a>,
) -> (RequestedDevices<'a>, Option<String>) {
    let samples = request.batch as usize;
    let is_even = request.parallel.shares.as_ref().is_some_and(Vec::is_empty);
    if is_named(request.selector) || !is_even || devices.selections.len() <= samples {
        return (devices, None);
    }
    let (with, without) = devices.names.split_at(samples);
    let (are, them) = if without.len() == 1 { ("is", "it") } else { ("are", "them") };
    let without = without.join(", ");
    let note = format!("{without} {are} left out: a batch of {samples} has no sample for {them}");
    let selections = &devices.selections[..samples];
    (RequestedDevices { selections, names: with }, Some(note))
}
