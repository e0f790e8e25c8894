//! Assembly of a worker group from a request: selects and opens the devices, decides their
//! shares, and starts the group. Everything measured here is decided before step 1, recorded, and
//! kept on resume.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::open_ranks::{open_new, open_recorded};
use super::record::{key, recorded};
use super::shares::layout_of;
use super::types::{OpenedRanks, PlacedWorkers, PlacementRequest, RankPlacement, SEPARATOR};
use crate::autotune::{self, cache};
use crate::collective::ShardLayout;
use crate::device::{Selection, list_adapters, select_all};
use crate::exec::Executor;
use crate::exec::cpu::host_name;
use crate::graph::Plan;
use crate::metrics::Trace;
use crate::parallel::{Program, ReduceSite, contiguous_shares, data_parallel, single_rank};
use crate::runtime::RuntimeError;
use crate::runtime::open::OpenDevice;
use crate::runtime::timing::{self};
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
    let selections = selections(request.selector)?;
    let identities: Vec<String> = selections.iter().map(identity).collect();
    let candidates = identities.join(SEPARATOR);
    let saved = request.saved.filter(|saved| {
        let of_one = saved.get("device").filter(|_| identities.len() == 1);
        saved.get("devices").or(of_one) == Some(&candidates)
    });
    let recorded = saved.filter(|_| !request.retune).and_then(|saved| recorded(saved, request));
    let chosen = match recorded {
        Some(kept) => open_recorded(request, &selections, saved, &kept, report)?,
        None => open_new(request, &selections, saved, report)?,
    };
    start_workers(request, saved.filter(|_| !request.retune), chosen, candidates)
}

/// Returns the devices that a selector chooses. Enumerating adapters takes a while, so it is
/// skipped for a selector that names only the CPU.
pub fn selections(selector: &str) -> Result<Vec<Selection>, RuntimeError> {
    let is_cpu = |part: &str| {
        let name = part.split('*').next().unwrap_or_default();
        name.trim().eq_ignore_ascii_case("cpu")
    };
    let adapters = match selector.split(',').all(is_cpu) {
        true => Vec::new(),
        false => list_adapters(),
    };
    Ok(select_all(selector, &adapters)?)
}

fn identity(selection: &Selection) -> String {
    match selection {
        Selection::Cpu { .. } => host_name(),
        Selection::Adapter(adapter) => cache::device_key(adapter),
    }
}

/// Builds the programs, resolves the reduce site of each rank, and starts the worker group.
fn start_workers(
    request: &PlacementRequest,
    saved: Option<&BTreeMap<String, String>>,
    OpenedRanks { members, mut notes }: OpenedRanks,
    candidates: String,
) -> Result<PlacedWorkers, RuntimeError> {
    let world = members.len();
    let plan = (request.plan)(members[0].0.rows);
    let layout = layout_of(request.parallel, &plan, world);
    let mut placed = Vec::new();
    for (rank, (one, count, micro_batch)) in members.iter().enumerate() {
        notes.extend(one.notes.iter().cloned());
        let saved = saved.and_then(|saved| saved.get(&key(rank, world, "reduce_site")));
        placed.push(RankPlacement {
            name: one.driver.name().to_string(),
            identity: one.identity.clone(),
            position: one.position,
            count: *count,
            micro_batch: (*micro_batch).min(one.rows),
            rows: one.rows,
            reduce_site: reduce_site(request, one, &layout, saved)?,
            choices: one.choices.clone(),
        });
    }
    let programs = programs(request, &plan, &placed);
    let trace = request.trace.as_deref().map(Trace::create).transpose()?;
    let options = WorkerGroupOptions {
        reduce_site: placed.iter().map(|placed| placed.reduce_site).collect(),
        trace: trace.clone(),
        is_chained: false,
    };
    let drivers = members.into_iter().map(|(one, ..)| one.driver).collect();
    let group = WorkerGroup::start(drivers, layout, &options)?;
    let micro_batch_max = request.micro_batch;
    Ok(PlacedWorkers { group, plan, programs, placed, candidates, notes, trace, micro_batch_max })
}

fn programs(
    request: &PlacementRequest,
    plan: &Plan,
    placed: &[RankPlacement],
) -> Vec<Arc<Program>> {
    if let [one] = placed {
        return vec![Arc::new(single_rank(plan, one.count, one.micro_batch))];
    }
    let counts: Vec<u32> = placed.iter().map(|placed| placed.count).collect();
    let micro_batches: Vec<u32> = placed.iter().map(|placed| placed.micro_batch).collect();
    let shares = contiguous_shares(&counts, &micro_batches);
    let program = |share| Arc::new(data_parallel(plan, share, request.parallel.overlap));
    shares.into_iter().map(program).collect()
}

/// Returns the reduce site of a device, which is prepared for adding if the site is the device.
fn reduce_site(
    request: &PlacementRequest,
    one: &OpenDevice,
    layout: &ShardLayout,
    saved: Option<&String>,
) -> Result<ReduceSite, RuntimeError> {
    if layout.size == 1 || one.is_cpu {
        return Ok(ReduceSite::Host);
    }
    let mut lengths: Vec<usize> = layout.chunks.iter().map(|chunk| chunk.range.len()).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let prepare = move |device: &mut dyn Executor| device.prepare_add(&lengths);
    match (request.parallel.reduce_site, saved.map(String::as_str)) {
        (Some(ReduceSite::Host), _) | (None, Some("host")) => Ok(ReduceSite::Host),
        (Some(ReduceSite::Device), _) | (None, Some("device")) => {
            one.driver.run("preparing to add gradients", prepare)?;
            Ok(ReduceSite::Device)
        }
        (None, _) => {
            let layout = layout.clone();
            let timing = move |device: &mut dyn Executor| {
                prepare(device)?;
                timing::faster_reduce_site(device, &layout)
            };
            Ok(one.driver.run("timing the addition of gradients", timing)?)
        }
    }
}
