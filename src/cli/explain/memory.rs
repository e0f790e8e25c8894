//! Memory of the devices of a placement, and that of the host.

use super::is_measured;
use super::placement::ExplainedPlacement;
use crate::base::Rank;
use crate::base::shape::ELEMENT_BYTES;
use crate::comm::ring_pool_bytes_max;
use crate::device::Selection;
use crate::device::host::available_memory;
use crate::exec::Moments;
use crate::graph::print::{RankMemoryUsage, memory_table, memory_tables};
use crate::graph::{Graph, Plan};
use crate::runtime;
use crate::runtime::memory::{comparison, gibibytes, limit, workspace};
use crate::runtime::placement::host_memory;
use crate::runtime::placement::pipeline::host_bytes;
use crate::runtime::placement::shares::owned_elements;
use crate::train::spec::RunSpec;
use crate::train::{carried, loader};

/// Returns the table of the memory of each rank, and a line about that of the host.
pub fn memory(placement: &ExplainedPlacement) -> String {
    let ExplainedPlacement { spec, request, laid_out, .. } = placement;
    let written = &laid_out.written;
    let world = placement.world();
    let mut moments = Vec::new();
    let mut titles = Vec::new();
    let mut limits = Vec::new();
    let mut stashes = Vec::new();
    for (rank, plan) in written.plans.iter().enumerate() {
        let of_rank = laid_out.moments(request, rank);
        titles.push(placement.title(rank));
        limits.push(limit_line(spec, placement.selection(rank), plan, &of_rank));
        stashes.push(if placement.has_stages() { Some(placement.stashes(rank)) } else { None });
        moments.push(of_rank);
    }
    let needed = host_needed(placement, &moments)
        .saturating_add(batches_bytes(&laid_out.whole.graph, spec.batch as usize));
    let available = available_memory().map(|bytes| (bytes, "which are available"));
    let host = format!("memory of the host: {}\n", comparison(needed, available));
    let count = request.optimizer.moments();
    if let [plan] = &written.plans[..] {
        let workspace = workspace(placement.selection(0), plan, &moments[0]);
        return memory_table(plan, count, workspace, &limits[0]) + &host;
    }
    let mut usages = Vec::new();
    for (rank, plan) in written.plans.iter().enumerate() {
        let id = Rank(rank as u32);
        let selection = placement.selection(rank);
        let edges = written.edges.bytes_from(id);
        usages.push(RankMemoryUsage {
            name: &titles[rank],
            plan,
            owned: owned_elements(&moments[rank]),
            workspace: workspace(selection, plan, &moments[rank]),
            staging: Some(host_memory::staging(selection, plan, world)),
            pool: Some(ring_pool_bytes_max(&laid_out.layout, written.groups.positions(id))),
            edges: if placement.has_stages() { Some(edges) } else { None },
            stashes: stashes[rank].as_deref(),
            limit: &limits[rank],
        });
    }
    memory_tables(&usages, count) + &host
}

/// Returns the bytes of host memory that the ranks take, with their moments; those of replicas
/// also if some of their devices are left out.
fn host_needed(placement: &ExplainedPlacement, moments: &[Moments]) -> usize {
    let ExplainedPlacement { request, selections, planned, laid_out, .. } = placement;
    if placement.has_stages() {
        return host_bytes(request, selections, planned, laid_out);
    }
    let world = placement.world();
    let count = request.optimizer.moments();
    let mut needed = host_memory::shared(request.parallel, &laid_out.whole, world, count);
    for (rank, plan) in laid_out.written.plans.iter().enumerate() {
        let selection = placement.selection(rank);
        let of_device = host_memory::of_device(selection, plan, &moments[rank], world);
        needed = needed.saturating_add(of_device);
    }
    needed
}

/// Returns the bytes of host memory that batches take: prefetched inputs, and carried states.
fn batches_bytes(graph: &Graph, batch: usize) -> usize {
    let mut values = 0;
    for (_, id) in graph.inputs_of_samples() {
        values += graph.tensor(*id).shape.per_row();
    }
    loader::bytes(batch, values * ELEMENT_BYTES).saturating_add(carried::bytes(graph, batch))
}

/// Returns a line that compares what a device needs with the memory that it has.
fn limit_line(spec: &RunSpec, selection: &Selection, plan: &Plan, moments: &Moments) -> String {
    let needed = runtime::memory::needed(selection, plan, moments);
    match (selection, limit(selection, spec.opening.device_memory_mib)) {
        (Selection::Cpu { .. }, None) => {
            format!("{} needed, of the memory of the host", gibibytes(needed as u64))
        }
        (_, Some((has, basis))) if needed as u64 > has && moments.owned.is_some() => {
            // Pipelines take the micro-batches that are given.
            let next = if is_measured(spec) && spec.parallel.pipeline.stages == 1 {
                "; a run that measures its shares tries fewer samples at a time"
            } else {
                ""
            };
            comparison(needed, Some((has, basis))) + next
        }
        (_, limit) => comparison(needed, limit),
    }
}
