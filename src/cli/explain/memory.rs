//! Memory of the devices of a placement, and that of the host.

use super::Explanation;
use super::placement::ExplainedPlacement;
use crate::base::Rank;
use crate::base::shape::ELEMENT_BYTES;
use crate::comm::ring_pool_bytes_max;
use crate::device::Selection;
use crate::device::host::available_memory;
use crate::exec::Moments;
use crate::graph::print::{RankMemoryUsage, memory_table, memory_tables};
use crate::graph::{Graph, Plan};
use crate::runtime::memory::{LimitBasis, comparison, gibibytes, limit, needed, workspace};
use crate::runtime::placement::host_memory::{self, host_bytes};
use crate::runtime::placement::shares::owned_elements;
use crate::train::{carried, loader};

/// Returns the table of the memory of each rank, and a line about that of the host; it fits if both
/// the devices and the host have as much, or if the run finds smaller micro-batches that fit.
pub fn memory(placement: &ExplainedPlacement) -> Explanation {
    let ExplainedPlacement { spec, request, laid_out, .. } = placement;
    let written = &laid_out.written;
    let world = placement.world();
    let mut moments = Vec::new();
    let mut titles = Vec::new();
    let mut limits = Vec::new();
    let mut stashes = Vec::new();
    let mut fits = true;
    for (rank, plan) in written.plans.iter().enumerate() {
        let of_rank = laid_out.moments(request, rank);
        titles.push(placement.title(rank));
        let selection = placement.selection(rank);
        let limit = limit(selection, spec.opening.device_memory_mib);
        let tries_fewer = placement.tries_fewer();
        let least = if tries_fewer {
            &request.plans.of_rows(request.plans.of_rows(1).rows_min())
        } else {
            plan
        };
        fits &= limit.is_none_or(|(has, _)| needed(selection, least, &of_rank) as u64 <= has);
        limits.push(limit_line(selection, plan, &of_rank, limit, tries_fewer));
        stashes.push(if placement.has_stages() { Some(placement.stashes(rank)) } else { None });
        moments.push(of_rank);
    }
    let of_host = host_needed(placement, &moments)
        .saturating_add(batches_bytes(&laid_out.whole.graph, spec.batch as usize));
    let available = available_memory().map(|bytes| (bytes, "which are available"));
    fits &= available.is_none_or(|(has, _)| of_host as u64 <= has);
    let host = format!("memory of the host: {}\n", comparison(of_host, available));
    let count = request.optimizer.moments();
    if let [plan] = &written.plans[..] {
        let workspace = workspace(placement.selection(0), plan, &moments[0]);
        let text = memory_table(plan, count, workspace, &limits[0]) + &host;
        return Explanation { text, fits };
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
    Explanation { text: memory_tables(&usages, count) + &host, fits }
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

/// Returns a line that compares what a device needs with the memory that it has. A run that
/// `tries_fewer` samples at a time may fit all the same.
fn limit_line(
    selection: &Selection,
    plan: &Plan,
    moments: &Moments,
    limit: Option<(u64, LimitBasis)>,
    tries_fewer: bool,
) -> String {
    let needed = needed(selection, plan, moments);
    if limit.is_none() && matches!(selection, Selection::Cpu { .. }) {
        return format!("{} needed, of the memory of the host", gibibytes(needed as u64));
    }
    let exceeds = limit.is_some_and(|(has, _)| needed as u64 > has);
    let mut line = comparison(needed, limit);
    if exceeds && tries_fewer && moments.owned.is_some() {
        line.push_str("; a run that measures its shares tries fewer samples at a time");
    }
    line
}
