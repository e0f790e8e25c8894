//! Memory of the devices of a placement, and of the host.

use super::Explanation;
use super::placement::ExplainedPlacement;
use potluck_core::format::{counted, gibibytes, gibibytes_up};
use potluck_graph::print::{RankMemoryUsage, memory_table, memory_tables};
use potluck_graph::{ActivationFormat, Graph, MomentFormat, Recompute};
use potluck_kernels::device::Selection;
use potluck_kernels::device::host::available_memory;
use potluck_kernels::exec::Moments;
use potluck_parallel::planner::plans::Plans;
use potluck_train::runtime::limit_basis::LimitBasis;
use potluck_train::runtime::memory::{comparison, limit};
use potluck_train::runtime::placement::laid_out::{memory_of_ranks, moments_of_rank};
use potluck_train::runtime::placement::names::is_named;
use potluck_train::runtime::placement::rank_memory::{
    RankMemory, host_bytes, micro_batch_sizes, pools_most, pools_of,
};
use potluck_train::runtime::placement::shares::owned_elements;
use potluck_train::spec::RunSpec;
use potluck_train::{carried, loader};

/// Returns the table of the memory of each rank, and a line about the memory of the host. It fits
/// if the devices and the host have enough memory for it, or for the smallest micro-batches that
/// the run tries.
pub fn memory(placement: &ExplainedPlacement) -> Explanation {
    let ExplainedPlacement { spec, request, laid_out, .. } = placement;
    let plans = &laid_out.written.plans;
    let world = placement.world();
    let ranks =
        memory_of_ranks(laid_out, request, (0..world).map(|rank| placement.selection(rank)));
    let tries_fewer = placement.tries_fewer();
    // With as many rows as the run opens devices for, if it measures shares.
    let mut most = ranks.clone();
    let mut titles = Vec::new();
    let mut limits = Vec::new();
    let mut stashes = Vec::new();
    let mut owned = Vec::new();
    // Memory with fewer rows, if the run tries fewer.
    let mut least = Vec::new();
    let mut fitting = 0;
    for (rank, memory) in ranks.iter().enumerate() {
        titles.push(placement.title(rank));
        let selection = placement.selection(rank);
        let limit = limit(selection, spec.opening.device_memory_mib);
        let moments = moments_of_rank(laid_out, request, rank);
        let mut note = String::new();
        if let Some(rows) = placement.measured_rows() {
            let RankMemory { device, workspace, .. } =
                RankMemory::of(selection, &request.plans.of_rows(rows), &moments, world);
            if device > memory.device {
                (most[rank].device, most[rank].workspace) = (device, workspace);
                note = format!(
                    "at most {} with a measured share, of up to {} at a time\n  ",
                    gibibytes_up(device as u64),
                    counted(rows as usize, "sample", "samples")
                );
            }
        }
        let largest = most[rank];
        let mut smallest = largest;
        if tries_fewer {
            let plan = request.plans.of_rows(request.plans.of_rows(1).rows_min());
            smallest = RankMemory::of(selection, &plan, &moments, world);
        }
        if limit.is_none_or(|(has, _)| smallest.device as u64 <= has) {
            fitting += 1;
        }
        least.push(smallest);
        let mut line = note + &limit_line(selection, largest.device, limit);
        if tries_fewer
            && let Some((has, _)) = limit
            && largest.device as u64 > has
        {
            line += &fewer_rows_text(placement, rank, &moments, has);
        }
        limits.push(line);
        stashes.push(if placement.is_divided() { Some(placement.stashes(rank)) } else { None });
        owned.push(owned_elements(&moments));
    }
    let pools = if tries_fewer {
        pools_most(request.parallel, laid_out.whole(), world, !request.nodes.nodes.is_empty())
    } else {
        pools_of(&ranks)
    };
    let batches = batches_bytes(&laid_out.whole().graph, spec.batch as usize);
    let of_host = host_bytes(request, most, pools).saturating_add(batches);
    let least_of_host = host_bytes(request, least, pools).saturating_add(batches);
    let available = available_memory().map(|bytes| (bytes, "which are available"));
    // The run leaves out devices that do not fit, unless they were selected by name.
    let leaves_out = tries_fewer && !is_named(&spec.devices);
    let enough = if leaves_out { fitting > 0 } else { fitting == world };
    let fits = enough && available.is_none_or(|(has, _)| least_of_host as u64 <= has);
    let host = format!("memory of the host: {}\n", comparison(of_host, available));
    let mut last = recomputation_line(spec, &laid_out.whole().graph) + &host;
    if !fits && !placement.is_divided() {
        last.push_str(&savings(placement, &ranks));
    }
    let may_plan = !placement.is_divided() && request.parallel.shares.are_measured();
    if fitting < world && world > 1 && may_plan {
        last.push_str(
            "not every device holds the whole model: a run divides it among them if that fits, as \
             potluck plan shows\n",
        );
    }
    let count = request.optimizer.moments();
    if let [plan] = &plans[..] {
        let text = memory_table(plan, count, ranks[0].workspace, &limits[0]) + &last;
        return Explanation { text, fits };
    }
    let mut usages = Vec::new();
    for (rank, memory) in ranks.iter().enumerate() {
        usages.push(RankMemoryUsage {
            name: &titles[rank],
            plan: &plans[rank],
            owned: owned[rank],
            workspace: memory.workspace,
            staging: Some(memory.staging),
            pool: Some(memory.pool),
            edges: if placement.is_divided() { Some(memory.edges) } else { None },
            stashes: stashes[rank].as_deref(),
            limit: &limits[rank],
        });
    }
    Explanation { text: memory_tables(&usages, count) + &last, fits }
}

/// Returns lines with the memory of the device that needs the most, with smaller micro-batches,
/// with recomputation, with both, with activations and with moments in bf16, and with smaller
/// micro-batches, recomputation and moments in bf16.
fn savings(placement: &ExplainedPlacement, ranks: &[RankMemory]) -> String {
    let ExplainedPlacement { spec, request, laid_out, planned, .. } = placement;
    let most = (0..ranks.len()).max_by_key(|rank| ranks[*rank].device);
    let Some(rank) = most else { return String::new() };
    let moments = moments_of_rank(laid_out, request, rank);
    let selection = placement.selection(rank);
    let bytes = |plans: &Plans, rows: u32| {
        RankMemory::of(selection, &plans.of_rows(rows), &moments, ranks.len()).device
    };
    let rows = planned.rows[rank];
    let mut ways = Vec::new();
    if rows > 1 {
        ways.push(("--micro-batch 1", bytes(request.plans, 1)));
    }
    if spec.recompute == Recompute::None {
        let model = request.plans.model().clone().with_recompute(Recompute::Blocks);
        let plans = Plans::new(model);
        ways.push(("--set train.recompute=blocks", bytes(&plans, rows)));
        if rows > 1 {
            ways.push(("--micro-batch 1 --set train.recompute=blocks", bytes(&plans, 1)));
        }
    }
    if spec.activations == ActivationFormat::F32 {
        let model = request.plans.model().clone().with_activations(ActivationFormat::Bf16);
        ways.push(("--set train.activations=bf16", bytes(&Plans::new(model), rows)));
    }
    if spec.moments == MomentFormat::F32 {
        let model = request.plans.model().clone().with_moments(MomentFormat::Bf16);
        ways.push(("--set optim.moments=bf16", bytes(&Plans::new(model.clone()), rows)));
        let all = Plans::new(model.with_recompute(Recompute::Blocks));
        if rows > 1 && spec.recompute == Recompute::None {
            let flags = "--micro-batch 1 --set train.recompute=blocks --set optim.moments=bf16";
            ways.push((flags, bytes(&all, 1)));
        }
    }
    let mut text = String::new();
    for (flags, bytes) in ways {
        if bytes < ranks[rank].device {
            text += &format!("with {flags}, {} needed\n", gibibytes_up(bytes as u64));
        }
    }
    text
}

/// Returns a line on the recomputation for the backward pass; empty without recomputation.
fn recomputation_line(spec: &RunSpec, graph: &Graph) -> String {
    if spec.recompute == Recompute::None {
        return String::new();
    }
    let again = graph.repeated_nodes().count();
    let all = graph.forward_nodes().count();
    let name = spec.recompute.name();
    format!(
        "recomputation (train.recompute = \"{name}\"): {again} of {all} forward operations run \
         again in the backward pass\n"
    )
}

/// Bytes of host memory that batches take: prefetched inputs, and carried states.
fn batches_bytes(graph: &Graph, batch: usize) -> usize {
    let mut of_sample = 0;
    for (_, id) in graph.inputs_of_samples() {
        of_sample += graph.tensor(*id).bytes(1);
    }
    loader::bytes(batch, of_sample).saturating_add(carried::bytes(graph, batch))
}

/// Returns a line that compares the bytes that a device needs with its memory.
fn limit_line(selection: &Selection, needed: usize, limit: Option<(u64, LimitBasis)>) -> String {
    if limit.is_none() && matches!(selection, Selection::Cpu { .. }) {
        return format!("{} needed, of the memory of the host", gibibytes(needed as u64));
    }
    comparison(needed, limit)
}

/// Returns a clause on the samples at a time with which the device of a rank, with `has` bytes,
/// holds what they need.
fn fewer_rows_text(
    placement: &ExplainedPlacement,
    rank: usize,
    moments: &Moments,
    has: u64,
) -> String {
    let ExplainedPlacement { request, .. } = placement;
    let selection = placement.selection(rank);
    let rows_min = request.plans.of_rows(1).rows_min();
    let sizes = micro_batch_sizes(placement.measured_rows().unwrap_or(1));
    for rows in sizes.into_iter().skip(1).filter(|rows| *rows >= rows_min) {
        let plan = request.plans.of_rows(rows);
        let bytes = RankMemory::of(selection, &plan, moments, placement.world()).device as u64;
        if bytes <= has {
            return format!(
                "; it fits with {} at a time ({}), which a run that measures its shares tries",
                counted(rows as usize, "sample", "samples"),
                gibibytes_up(bytes)
            );
        }
    }
    "; with fewer samples at a time neither".into()
}
