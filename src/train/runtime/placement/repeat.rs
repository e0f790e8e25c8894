//! Note on the decision about devices, with flags that repeat it without a measurement.

use std::ops::Range;

use super::candidates::adapters_for;
use super::pipeline::names_of_runs;
use super::types::{PlacedWorkers, PlacementRequest};
use potluck_core::Setting;
use potluck_core::format::{counted, percent};
use potluck_graph::Plan;
use potluck_kernels::device::{Adapter, selector_of};
use potluck_parallel::planner::arrangement::micro_batches_for;
use potluck_parallel::planner::laid_out::programs_of_replicas;
use potluck_parallel::planner::tensor::tensor_parts;
use potluck_parallel::{Mesh, Placement, RankPlacement, contiguous_shares};

/// Returns a note on the samples or the stages of each device, with the flags that repeat them if
/// they were measured; `None` for a single device chosen without a measurement.
pub fn note(placed: &PlacedWorkers, repeated: Option<String>) -> Option<String> {
    let placement = &placed.placement;
    let decided = if placement.mesh.is_divided() {
        stages_text(placement, &placed.plan)
    } else {
        samples_text(placement)
    };
    match repeated {
        Some(flags) => Some(format!("{decided}; to repeat this, add {flags}")),
        None if placement.ranks.len() > 1 => Some(decided),
        None => None,
    }
}

fn samples_text(placement: &Placement) -> String {
    let mut shares = Vec::new();
    for rank in &placement.ranks {
        shares.push(format!("{}: {}", rank.name, rank.share));
    }
    format!("samples per step: {}", shares.join(", "))
}

/// Returns the blocks of each device, with its part of the tensors in a tensor group, and the
/// samples of each pipeline.
fn stages_text(placement: &Placement, plan: &Plan) -> String {
    let mut pipelines = Vec::new();
    for of_pipeline in placement.pipelines() {
        let mut stages = Vec::new();
        for group in &of_pipeline {
            let names: Vec<&str> = group.iter().map(|rank| &*rank.name).collect();
            stages.push(stage_text(plan, &names, &group[0].blocks));
        }
        let samples = counted(of_pipeline[0][0].share as usize, "sample", "samples");
        pipelines.push(format!("{} ({samples} per step)", stages.join(", ")));
    }
    format!("{}: {}", name_of_parts(placement.mesh), pipelines.join("; "))
}

/// Name of the units into which the devices of a run are divided.
pub(crate) fn name_of_parts(mesh: Mesh) -> &'static str {
    if mesh.pipeline > 1 { "stages" } else { "tensor groups" }
}

/// Returns the device of a stage with its blocks: `cpu: embed to h.1`, or the devices of a tensor
/// group with their parts: `cpu (75 %) + llvmpipe (25 %): embed to h.1`.
pub(crate) fn stage_text(plan: &Plan, names: &[&str], blocks: &[Range<u32>]) -> String {
    let mut devices = Vec::new();
    for (name, part) in names.iter().zip(tensor_parts(plan, names.len())) {
        devices.push(if names.len() > 1 {
            format!("{name} ({})", percent(part, 0))
        } else {
            (*name).to_string()
        });
    }
    format!("{}: {}", devices.join(" + "), names_of_runs(&plan.graph, blocks))
}

/// Returns the flags that repeat this measured placement, quoted for a shell; `None` if nothing was
/// measured, or if no flags can name the devices. `plan` is the whole model's.
pub(crate) fn repeated_by(
    request: &PlacementRequest,
    adapters: &[Adapter],
    placement: &Placement,
    plan: &Plan,
) -> Option<String> {
    let mesh = placement.mesh;
    let parallel = request.parallel;
    // Layouts with tensor groups are planned only for different devices.
    let has_tensor_shares = mesh.tensor > 1
        && parallel.tensor.shares.is_empty()
        && placement.tensor_shares.iter().any(|share| *share != placement.tensor_shares[0]);
    let is_planned = mesh.tensor == 1 || has_tensor_shares;
    let has_shares = is_planned && mesh.data > 1 && parallel.shares.are_measured();
    let has_cut = is_planned && mesh.pipeline > 1;
    let is_measured = if mesh.is_divided() {
        has_shares || has_tensor_shares || (has_cut && parallel.lacks_cut())
    } else {
        parallel.shares.are_measured() && placement.has_alternatives()
    };
    if request.probe.is_none() || !is_measured {
        return None;
    }
    let mut flags = Vec::new();
    if !has_all_devices(placement) {
        // No selector names devices of other nodes.
        if !request.nodes.devices.is_empty() {
            return None;
        }
        flags.push(devices_flag(request.selector, placement, adapters)?);
    }
    if has_cut {
        flags.push(cut_flag(placement));
    }
    if has_tensor_shares {
        let shares = &placement.tensor_shares;
        flags.push(Setting::TensorShares.given(format_args!("{shares:?}")).to_string());
    }
    if has_shares {
        let shares: Vec<u32> = placement.units().map(|rank| rank.share).collect();
        flags.push(Setting::Shares.given(format_args!("{shares:?}")).to_string());
    }
    flags.extend(micro_batch_flag(request, placement, plan));
    Some(flags.join(" "))
}

/// Returns true if the ranks are all requested devices in their order.
fn has_all_devices(placement: &Placement) -> bool {
    let positions = placement.ranks.iter().map(|rank| rank.position);
    positions.eq(0..placement.candidates.len())
}

/// Flag that requests the devices of the ranks among those that `selector` chooses; `None` if no
/// selector names them.
fn devices_flag(selector: &str, placement: &Placement, adapters: &[Adapter]) -> Option<String> {
    let positions: Vec<usize> = placement.ranks.iter().map(|rank| rank.position).collect();
    let selector = selector_of(selector, &positions, adapters)?;
    Some(Setting::Devices.given(selector).to_string())
}

/// Flag with the cut of all pipelines, or a remark if their cuts differ.
fn cut_flag(placement: &Placement) -> String {
    let cuts: Vec<Vec<usize>> =
        placement.pipelines().map(|stages| blocks_of_chunks(&stages)).collect();
    if cuts.iter().any(|cut| *cut != cuts[0]) {
        return "(but with one cut for all pipelines)".into();
    }
    Setting::BlocksPerStage.given(format_args!("{:?}", cuts[0])).to_string()
}

/// Numbers of blocks of a pipeline's model chunks, in the order of the model.
fn blocks_of_chunks(pipeline: &[Vec<&RankPlacement>]) -> Vec<usize> {
    let chunks = pipeline.first().map_or(0, |group| group[0].blocks.len());
    let mut blocks = Vec::new();
    for chunk in 0..chunks {
        for group in pipeline {
            blocks.push(group[0].blocks[chunk].len());
        }
    }
    blocks
}

/// Flag for the measured micro-batches, or a remark if no flag repeats them; `None` if
/// the request has the same ones.
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

/// Returns a sentence on the changes of measured shares, with the flags that repeat them; `None`
/// without changes. `micro_batch` is the requested one, and `plan` is the whole model's.
pub(crate) fn changes_note(placement: &Placement, plan: &Plan, micro_batch: u32) -> Option<String> {
    let history = &placement.share_history;
    let (Some(first), true) = (history.first(), history.len() > 1) else { return None };
    let count = counted(history.len() - 1, "time", "times");
    let told = format!("the shares have changed {count} to follow the speed of the devices");
    if first.step > 1 {
        let step = first.step;
        return Some(format!(
            "{told}; no flags repeat the whole run, because its devices were chosen anew at step \
             {step}"
        ));
    }
    let mut flags = Vec::new();
    if !has_all_devices(placement) {
        let selector = &placement.devices_asked;
        let mut named = None;
        // No selector names devices of other nodes.
        if placement.cluster.is_none() {
            named = devices_flag(selector, placement, &adapters_for(selector));
        }
        let Some(flag) = named else {
            return Some(format!(
                "{told}; no flags repeat the run, because no selector names its devices alone"
            ));
        };
        flags.push(flag);
    }
    let changes: Vec<String> = history[1..].iter().map(|change| format!("\"{change}\"")).collect();
    let shares = &first.shares;
    flags.push(Setting::Shares.given(format_args!("{shares:?}")).to_string());
    let changes = format!("[{}]", changes.join(", "));
    flags.push(Setting::ShareChanges.given(changes).to_string());
    let largest = placement.ranks.iter().map(|rank| rank.micro_batch).max().unwrap_or(micro_batch);
    let repeats = |micro_batch: u32| {
        let given = micro_batches_for(history, micro_batch);
        history.iter().all(|of| repeats_shares(placement, plan, &of.shares, &given))
    };
    if !repeats(micro_batch) {
        flags.push(if repeats(largest) {
            Setting::MicroBatchSize.given(largest).to_string()
        } else {
            "(but in other micro-batches, so in other bits)".into()
        });
    }
    Some(format!("{told}; to repeat this run on these devices, add {}", flags.join(" ")))
}

/// Returns true if replicas with these samples, in micro-batches of up to `given` samples by rank,
/// have the micro-batches that the ranks of a placement have with these samples.
fn repeats_shares(placement: &Placement, plan: &Plan, counts: &[u32], given: &[u32]) -> bool {
    let measured: Vec<u32> =
        placement.ranks.iter().map(|rank| rank.micro_batch.min(rank.rows)).collect();
    let [measured, given] = [&measured[..], given].map(|micro_batches| {
        let shares = contiguous_shares(counts, micro_batches);
        programs_of_replicas(&placement.options, plan, &shares)
    });
    measured == given
}

/// Returns true if ranks with micro-batches of up to `micro_batch` samples have the micro-batches
/// of a placement.
fn repeats(
    request: &PlacementRequest,
    placement: &Placement,
    plan: &Plan,
    micro_batch: u32,
) -> bool {
    if placement.mesh.is_divided() {
        return placement.ranks.iter().all(|rank| rank.micro_batch == micro_batch.min(rank.share));
    }
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
