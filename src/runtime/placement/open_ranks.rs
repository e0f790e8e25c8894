//! Opening of a worker group's devices: with given or recorded shares, or with measured ones.

use super::shares::{fixed_counts, layout_of, moments};
use super::types::{OpenedRanks, PlacementRequest};
use crate::autotune::{self, TuneOptions};
use crate::device::Selection;
use crate::exec::{Executor, Moments, staging_bytes};
use crate::graph::Plan;
use crate::parallel::{Placement, RankPlacement};
use crate::runtime::device_thread::DeviceThread;
use crate::runtime::open::{OpenDevice, initialize, open_selected};
use crate::runtime::timing::{self, Probe};
use crate::runtime::{RuntimeError, memory};

/// Device that is to be opened.
struct Candidate {
    /// Index of the device among the requested ones.
    position: usize,
    selection: Selection,
    /// Samples of the device in each step; `micro_batch` is the most that it runs at a time.
    count: u32,
    micro_batch: u32,
    /// Rows of the device's plan.
    rows: u32,
}

fn open_one(
    request: &PlacementRequest,
    selection: &Selection,
    rows: u32,
    moments: Moments,
    saved: Option<&RankPlacement>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<OpenDevice, RuntimeError> {
    // A resumed run keeps its kernel variants on the same device.
    let tuning = |identity: &str| TuneOptions {
        saved: saved
            .filter(|saved| saved.identity == identity)
            .map(|saved| saved.kernels.clone())
            .unwrap_or_default(),
        ..request.tuning.clone()
    };
    let plan = Plan::clone(&request.plans.of_rows(rows));
    let one = open_selected(selection.clone(), plan, moments, &request.opening, tuning, report)?;
    Ok(OpenDevice { rows, ..one })
}

/// Opens the devices of a resumed run with their recorded shares.
///
/// # Errors
/// Returns `RuntimeError::InvalidRequest` if the record names other devices than `selections`, or
/// sizes that no run has, and `RuntimeError` if a device cannot be opened.
pub fn open_recorded(
    request: &PlacementRequest,
    selections: &[Selection],
    kept: &Placement,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<OpenedRanks, RuntimeError> {
    let candidate = |rank: &RankPlacement| {
        let selection = selections.get(rank.position)?.clone();
        let &RankPlacement { position, share: count, micro_batch, rows, .. } = rank;
        Some(Candidate { position, selection, count, micro_batch, rows })
    };
    let unknown = || {
        let why = "the ranks that the checkpoint recorded are not those of its devices; measure \
                   again with --retune";
        RuntimeError::InvalidRequest(why.into())
    };
    let chosen: Option<Vec<Candidate>> = kept.ranks.iter().map(candidate).collect();
    let chosen = chosen.filter(|_| kept.is_consistent()).ok_or_else(unknown)?;
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
    let plan = request.plans.of_rows(1);
    let layout = layout_of(request.parallel, &plan, world);
    require_host_memory(request, &chosen)?;
    let mut members = Vec::new();
    for (rank, candidate) in chosen.into_iter().enumerate() {
        let moments = moments(request.optimizer, &layout, plan.buckets.len(), rank);
        let saved = saved.and_then(|saved| saved.of_rank(rank, world));
        let Candidate { position, selection, count, micro_batch, rows } = candidate;
        let one = open_one(request, &selection, rows, moments, saved, report)?;
        members.push((OpenDevice { position, ..one }, count, micro_batch));
    }
    Ok(OpenedRanks { members, notes: Vec::new() })
}

/// Checks that the host has memory for all devices that use host memory, and for the staging
/// buffers through which values move between devices.
fn require_host_memory(
    request: &PlacementRequest,
    chosen: &[Candidate],
) -> Result<(), RuntimeError> {
    let world = chosen.len();
    let layout = layout_of(request.parallel, &request.plans.of_rows(1), world);
    let need = |(rank, candidate): (usize, &Candidate)| {
        let plan = request.plans.of_rows(candidate.rows);
        let moments = moments(request.optimizer, &layout, plan.buckets.len(), rank);
        let staging = if world > 1 { staging_bytes(&plan) } else { 0 };
        match memory::uses_host_memory(&candidate.selection) {
            true => staging.saturating_add(memory::device_bytes(&plan, &moments)),
            false => staging,
        }
    };
    memory::require(chosen.iter().enumerate().map(need).fold(0, usize::saturating_add))
}

/// Opens the devices of a new run with fixed or measured shares.
pub fn open_new(
    request: &PlacementRequest,
    selections: &[Selection],
    saved: Option<&Placement>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<OpenedRanks, RuntimeError> {
    let world = selections.len();
    let probe = request.probe.as_ref().filter(|_| request.parallel.shares.is_none());
    if let Some(probe) = probe.filter(|_| world > 1) {
        return open_measured(request, selections, probe, report);
    }
    let counts = match world {
        1 => vec![request.batch],
        _ => fixed_counts(request.parallel, request.batch, world)?,
    };
    let candidate = |(position, (selection, count)): (usize, (&Selection, u32))| Candidate {
        position,
        selection: selection.clone(),
        count,
        micro_batch: request.micro_batch,
        rows: request.micro_batch.min(count).max(1),
    };
    let chosen = selections.iter().zip(counts).enumerate().map(candidate).collect();
    open_fixed(request, chosen, saved, report)
}

/// Opens devices, selects those that are worth using, and splits the batch by their measured
/// speed.
fn open_measured(
    request: &PlacementRequest,
    selections: &[Selection],
    probe: &Probe,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<OpenedRanks, RuntimeError> {
    let (mut opened, mut notes, mut failed) = (Vec::new(), Vec::new(), None);
    let named = !["auto", "all"].contains(&request.selector.trim().to_lowercase().as_str());
    for (position, selection) in selections.iter().enumerate() {
        match open_fitting(request, selection, selections.len(), report) {
            Ok(one) => opened.push(OpenDevice { position, ..one }),
            // A device that was named must not be left out silently.
            Err(error) if named => return Err(error),
            Err(error) => {
                notes.push(format!("left out: {error}"));
                failed = Some(error);
            }
        }
    }
    if let Some(error) = failed.filter(|_| opened.is_empty()) {
        return Err(error);
    }
    let found = match &opened[..] {
        [_] => timing::BatchSplit::of_one(request.batch, request.micro_batch.min(request.batch)),
        _ => {
            (request.notify)(&format!(
                "measuring {} devices, alone and together, on micro-batches of up to {} samples",
                opened.len(),
                request.micro_batch.min(request.batch)
            ));
            let drivers: Vec<&DeviceThread> = opened.iter().map(|one| &one.driver).collect();
            let rows: Vec<u32> = opened.iter().map(|one| one.rows).collect();
            let timeout = request.opening.deadline;
            timing::split_by_speed(&drivers, probe, request.batch, &rows, timeout)?
        }
    };
    notes.extend(found.notes.iter().cloned());
    let mut members = Vec::new();
    for (place, one) in opened.into_iter().enumerate() {
        if let Some(rank) = found.members.iter().position(|member| *member == place) {
            let (count, micro_batch) = (found.counts[rank], found.micro_batches[rank]);
            members.push((one, count, micro_batch.min(request.micro_batch)));
        }
    }
    let plan = request.plans.of_rows(1);
    let layout = layout_of(request.parallel, &plan, members.len());
    for (rank, (one, ..)) in members.iter().enumerate() {
        let moments = moments(request.optimizer, &layout, plan.buckets.len(), rank);
        one.driver
            .run("making room for moments", move |device| device.set_moments(moments.clone()))?;
    }
    Ok(OpenedRanks { members, notes })
}

/// Opens a device with the most rows that fit its memory, halved until they fit. The host's
/// memory check includes the moments of its shard, which are allocated once the devices of the
/// run are selected.
fn open_fitting(
    request: &PlacementRequest,
    selection: &Selection,
    world: usize,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<OpenDevice, RuntimeError> {
    let mut rows = request.micro_batch.min(request.batch);
    loop {
        let candidate = |_| Candidate {
            position: 0,
            selection: selection.clone(),
            count: rows,
            micro_batch: rows,
            rows,
        };
        let fits = require_host_memory(request, &(0..world).map(candidate).collect::<Vec<_>>());
        let opened =
            fits.and_then(|()| open_one(request, selection, rows, Moments::from(0), None, report));
        match opened {
            Err(error) if rows > 1 && error.is_capacity_error() => rows = rows.div_ceil(2),
            Err(error) => return Err(error),
            Ok(one) => {
                let seed = request.seed;
                let initialize = move |device: &mut dyn Executor| initialize(device, seed);
                one.driver.run("initialization", initialize)?;
                return Ok(one);
            }
        }
    }
}
