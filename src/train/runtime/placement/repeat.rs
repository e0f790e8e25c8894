//! Note on what was decided, with the flags by which another run gets the same without measuring.

use super::laid_out::programs_of_replicas;
use super::pipeline::names_of_runs;
use super::types::{PlacedWorkers, PlacementRequest};
use potluck_core::Setting;
use potluck_graph::{Graph, Plan};
use potluck_kernels::device::{Adapter, selector_of};
use potluck_parallel::{Placement, RankPlacement, contiguous_shares};

/// Returns a note on the samples or the stages of each device, with the flags that repeat them if
/// they were measured; `None` for one device that was chosen without measuring.
pub fn note(placed: &PlacedWorkers, repeated: Option<String>) -> Option<String> {
    let placement = &placed.placement;
    let decided = if placement.mesh.has_stages() {
        stages_text(placement, &placed.plan.graph)
    } else {
        samples_text(placement)
    };
    match repeated {
        Some(flags) => Some(format!("{decided}; to repeat this, add {flags}")),
        None => (placement.ranks.len() > 1).then_some(decided),
    }
}

/// Returns the samples of each device per step.
fn samples_text(placement: &Placement) -> String {
    let mut shares = Vec::new();
    for rank in &placement.ranks {
        shares.push(format!("{}: {}", rank.name, rank.share));
    }
    format!("samples per step: {}", shares.join(", "))
}

/// Returns which device has which blocks, and how many samples each pipeline has.
fn stages_text(placement: &Placement, graph: &Graph) -> String {
    let mut pipelines = Vec::new();
    for ranks in placement.pipelines() {
        let mut stages = Vec::new();
        for rank in &ranks {
            stages.push(format!("{}: {}", rank.name, names_of_runs(graph, &rank.blocks)));
        }
        pipelines.push(format!("{} ({} samples per step)", stages.join(", "), ranks[0].share));
    }
    format!("stages: {}", pipelines.join("; "))
}

/// Returns the flags with which another run gets this measured placement, in words for a shell;
/// `None` if nothing was measured, or if no flags name the devices. `plan` is that of the whole
/// model.
pub(crate) fn repeated_by(
    request: &PlacementRequest,
    adapters: &[Adapter],
    placement: &Placement,
    plan: &Plan,
) -> Option<String> {
    let mesh = placement.mesh;
    let parallel = request.parallel;
    let has_shares = mesh.data > 1 && parallel.shares.are_measured();
    let is_measured = if mesh.has_stages() {
        has_shares || parallel.lacks_cut()
    } else {
        parallel.shares.are_measured() && placement.has_alternatives()
    };
    if request.probe.is_none() || !is_measured {
        return None;
    }
    let mut flags = Vec::new();
    let positions: Vec<usize> = placement.ranks.iter().map(|rank| rank.position).collect();
    if !positions.iter().copied().eq(0..placement.candidates.len()) {
        // No selector names devices of other nodes.
        if !request.nodes.devices.is_empty() {
            return None;
        }
        let selector = selector_of(request.selector, &positions, adapters)?;
        flags.push(Setting::Devices.given(selector).to_string());
    }
    if mesh.has_stages() {
        flags.push(cut_flag(placement));
    }
    if has_shares {
        let shares: Vec<u32> = placement.units().map(|rank| rank.share).collect();
        flags.push(Setting::Shares.given(format_args!("{shares:?}")).to_string());
    }
    if !mesh.has_stages() {
        flags.extend(micro_batch_flag(request, placement, plan));
    }
    Some(flags.join(" "))
}

/// Returns the flag that gives the cut of all pipelines, or that there is none.
fn cut_flag(placement: &Placement) -> String {
    let cuts: Vec<Vec<usize>> =
        placement.pipelines().map(|ranks| blocks_of_chunks(&ranks)).collect();
    if cuts.iter().any(|cut| *cut != cuts[0]) {
        return "(but with one cut for all pipelines)".into();
    }
    Setting::BlocksPerStage.given(format_args!("{:?}", cuts[0])).to_string()
}

/// Returns the numbers of blocks of a pipeline's model chunks, in the order of the model.
fn blocks_of_chunks(pipeline: &[&RankPlacement]) -> Vec<usize> {
    let chunks = pipeline.first().map_or(0, |rank| rank.blocks.len());
    let mut blocks = Vec::new();
    for chunk in 0..chunks {
        for rank in pipeline {
            blocks.push(rank.blocks[chunk].len());
        }
    }
    blocks
}

/// Returns the flag that gives replicas the micro-batches that were measured, or that there is
/// none; nothing if those of the request are the same.
fn micro_batch_flag(
    request: &PlacementRequest,
    placement: &Placement,
    plan: &Plan,
) -> Option<String> {
    if repeats(request, placement, plan, request.micro_batch) {
        return None;
    }
    let largest = placement.ranks.iter().map(|rank| rank.micro_batch).max();
    let largest = largest.unwrap_or(request.micro_batch);
    if !repeats(request, placement, plan, largest) {
        return Some("(but in other micro-batches, so in other bits)".into());
    }
    Some(Setting::MicroBatchSize.given(largest).to_string())
}

/// Returns true if replicas that run up to `micro_batch` samples at a time have the micro-batches
/// of a placement.
fn repeats(
    request: &PlacementRequest,
    placement: &Placement,
    plan: &Plan,
    micro_batch: u32,
) -> bool {
    let counts: Vec<u32> = placement.ranks.iter().map(|rank| rank.share).collect();
    let micro_batches: Vec<u32> = counts.iter().map(|count| micro_batch.min(*count)).collect();
    let shares = contiguous_shares(&counts, &micro_batches);
    let programs = programs_of_replicas(request.parallel, plan, &shares);
    for (program, rank) in programs.iter().zip(&placement.ranks) {
        let rows: Vec<u32> = program.micro_batches.iter().map(|of| of.rows).collect();
        if rows != rank.micro_batches {
            return false;
        }
    }
    true
}
