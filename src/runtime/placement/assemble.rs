//! Assembly of a worker group from a request: selects and opens the devices, decides their
//! shares, and starts the group. Everything measured here is decided before step 1, recorded, and
//! kept on resume.

use std::sync::Arc;

use super::names::display_names;
use super::open_ranks::{RequestedDevices, open_new, open_recorded};
use super::pipeline::{advised, assemble_pipelines};
use super::shares::layout_of;
use super::statistics::require_statistics;
use super::types::{OpenedRanks, PlacedWorkers, PlacementRequest};
use crate::autotune::{self, cache};
use crate::collective::BucketGroups;
use crate::device::{Adapter, Selection, list_adapters, select_all, selector_of};
use crate::exec::cpu::host_name;
use crate::graph::Plan;
use crate::metrics::Trace;
use crate::parallel::{
    Mesh, Placement, Program, RankPlacement, Share, contiguous_shares, data_parallel, single_rank,
};
use crate::runtime::RuntimeError;
use crate::runtime::open::OpenDevice;
use crate::runtime::workers::{WorkerGroup, WorkerGroupOptions};

/// Opens the requested devices, measures them if requested, and starts them as a worker group.
///
/// # Errors
/// Returns `RuntimeError` if no device matches, if the plan exceeds a device's limits or memory,
/// if the shares do not fit the devices, or if a device fails.
pub fn assemble(
    request: &PlacementRequest,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<PlacedWorkers, RuntimeError> {
    let adapters = adapters_for(request.selector);
    let mut selections = select_all(request.selector, &adapters)?;
    selections.extend(request.nodes.offered());
    let names = display_names(&selections);
    let devices = RequestedDevices { selections: &selections, names: &names };
    let candidates = candidates(&selections);
    let has_stages = request.parallel.pipeline.stages > 1;
    let saved = request.saved.filter(|saved| saved.is_of(&candidates, has_stages));
    if has_stages {
        return assemble_pipelines(request, devices, (candidates, &adapters), saved, report);
    }
    let is_kept = |saved: &&Placement| {
        let has_measured = request.parallel.shares.is_none();
        !request.retune && has_measured && saved.shares_fit(request.batch, request.micro_batch)
    };
    let kept = saved.filter(is_kept);
    let chosen = match kept {
        Some(kept) => open_recorded(request, devices, kept, report),
        None => open_new(request, devices, saved, report),
    };
    let chosen = chosen.map_err(|error| advised(request, &selections, error))?;
    let mut placed = start_workers(request, chosen, candidates)?;
    // A run that keeps its shares says nothing new.
    let repeated = match kept {
        None => repeated_by(request, &adapters, &placed.placement, &placed.plan),
        Some(_) => None,
    };
    placed.notes.extend(shares_note(&placed.placement, repeated));
    Ok(placed)
}

/// Returns a note with the samples of each device per step, and the flags that repeat them if
/// they were measured; `None` for one device that was chosen without measuring.
fn shares_note(placement: &Placement, repeated: Option<String>) -> Option<String> {
    let share = |rank: &RankPlacement| format!("{}: {}", rank.name, rank.share);
    let shares: Vec<String> = placement.ranks.iter().map(share).collect();
    let shares = format!("samples per step: {}", shares.join(", "));
    match repeated {
        Some(flags) => Some(format!("{shares}; to repeat this, add {flags}")),
        None => (placement.ranks.len() > 1).then_some(shares),
    }
}

/// Returns the flags with which another run gets these measured shares, in words for a shell;
/// `None` if the shares were not measured.
pub fn repeated_by(
    request: &PlacementRequest,
    adapters: &[Adapter],
    placement: &Placement,
    plan: &Plan,
) -> Option<String> {
    let ranks = &placement.ranks;
    let has_measured = request.probe.is_some() && request.parallel.shares.is_none();
    if !has_measured || !placement.has_alternatives() {
        return None;
    }
    let mut flags = Vec::new();
    if ranks.len() < placement.candidates.len() {
        // No selector names devices of other nodes.
        if !request.nodes.devices.is_empty() {
            return None;
        }
        let taken: Vec<usize> = ranks.iter().map(|rank| rank.position).collect();
        flags.push(format!("--devices '{}'", selector_of(request.selector, &taken, adapters)?));
    }
    let counts: Vec<u32> = ranks.iter().map(|rank| rank.share).collect();
    if ranks.len() > 1 {
        flags.push(format!("--set parallel.shares='{counts:?}'"));
    }
    let repeats = |micro_batch: u32| {
        let micro_batches: Vec<u32> = counts.iter().map(|count| micro_batch.min(*count)).collect();
        let shares = contiguous_shares(&counts, &micro_batches);
        let programs = programs(request, plan, &shares);
        let rows = programs.iter().map(|program| program.micro_batches.iter().map(|m| m.rows));
        rows.zip(ranks).all(|(rows, rank)| rows.eq(rank.micro_batches.iter().copied()))
    };
    let largest = ranks.iter().map(|rank| rank.micro_batch).max().unwrap_or(request.micro_batch);
    if !repeats(request.micro_batch) {
        flags.push(match repeats(largest) {
            true => format!("--set train.micro_batch_size={largest}"),
            false => "(but in other micro-batches, so in other bits)".into(),
        });
    }
    Some(flags.join(" "))
}

/// Returns the devices that a selector chooses.
pub fn selections(selector: &str) -> Result<Vec<Selection>, RuntimeError> {
    Ok(select_all(selector, &adapters_for(selector))?)
}

/// Returns the adapters among which a selector chooses. Enumerating them takes a while, so it is
/// skipped for a selector that names only the CPU.
pub fn adapters_for(selector: &str) -> Vec<Adapter> {
    let is_cpu = |part: &str| {
        let name = part.split('*').next().unwrap_or_default();
        name.trim().eq_ignore_ascii_case("cpu")
    };
    match selector.split(',').all(is_cpu) {
        true => Vec::new(),
        false => list_adapters(),
    }
}

/// Returns the identities of devices, by which a placement knows them.
pub fn candidates(selections: &[Selection]) -> Vec<String> {
    selections.iter().map(identity).collect()
}

/// Returns the identity of a device, which decides the bits of its results.
pub fn identity(selection: &Selection) -> String {
    match selection {
        Selection::Cpu { .. } => host_name(),
        Selection::Adapter(adapter) => cache::device_key(adapter),
        Selection::Offered(device) => device.identity.clone(),
    }
}

/// Builds the programs and starts the worker group.
fn start_workers(
    request: &PlacementRequest,
    OpenedRanks { members, reduce_sites, mut notes }: OpenedRanks,
    candidates: Vec<String>,
) -> Result<PlacedWorkers, RuntimeError> {
    let world = members.len();
    let plan = request.plans.of_rows(members[0].0.rows);
    let layout = layout_of(request.parallel, &plan, world);
    let shares = shares(&members);
    let programs = programs(request, &plan, &shares);
    notes.extend(require_statistics(&plan, programs.iter().map(|program| &**program))?);
    let plans = members.iter().map(|(one, ..)| request.plans.of_rows(one.rows)).collect();
    let mut ranks = Vec::new();
    for (rank, (one, ..)) in members.iter().enumerate() {
        notes.extend(one.notes.iter().cloned());
        ranks.push(RankPlacement {
            name: one.driver.name().to_string(),
            identity: one.identity.clone(),
            position: one.position,
            share: shares[rank].count,
            micro_batch: shares[rank].micro_batch,
            rows: one.rows,
            micro_batches: programs[rank].micro_batches.iter().map(|m| m.rows).collect(),
            blocks: Vec::new(),
            reduce_site: reduce_sites[rank],
            kernels: one.choices.clone(),
            untimed: one.untimed.clone(),
        });
    }
    let trace = request.trace.as_deref().map(Trace::create).transpose()?;
    let options = WorkerGroupOptions {
        reduce_site: reduce_sites,
        trace: trace.clone(),
        ..Default::default()
    };
    let drivers = members.into_iter().map(|(one, ..)| one.driver).collect();
    let groups = BucketGroups::all(layout.size, layout.buckets());
    let group = WorkerGroup::start(drivers, layout, groups, &options)?;
    let placement = Placement {
        candidates,
        micro_batch_max: request.micro_batch,
        mesh: Mesh::of_pipelines(world, 1),
        schedule: request.parallel.pipeline.schedule,
        virtual_stages: request.parallel.pipeline.virtual_stages,
        ranks,
    };
    let pipelines = None;
    Ok(PlacedWorkers { group, plan, programs, placement, pipelines, plans, notes, trace })
}

/// Returns the shares of opened devices; none runs more samples at a time than its plan has rows.
fn shares(members: &[(OpenDevice, u32, u32)]) -> Vec<Share> {
    let counts: Vec<u32> = members.iter().map(|(_, count, _)| *count).collect();
    let micro_batches: Vec<u32> =
        members.iter().map(|(one, _, micro_batch)| (*micro_batch).min(one.rows)).collect();
    contiguous_shares(&counts, &micro_batches)
}

fn programs(request: &PlacementRequest, plan: &Plan, shares: &[Share]) -> Vec<Arc<Program>> {
    if let [one] = shares {
        return vec![Arc::new(single_rank(plan, one.count, one.micro_batch))];
    }
    let program = |share: &Share| Arc::new(data_parallel(plan, *share, request.parallel.overlap));
    shares.iter().map(program).collect()
}
