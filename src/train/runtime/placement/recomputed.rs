//! Plan with activations that are recomputed in the backward pass instead of kept, priced without
//! another measurement: what it would gain where memory is short.

use super::block_work::block_flops;
use super::device_memory::DeviceMemory;
use super::types::PlacementRequest;
use potluck_core::Setting;
use potluck_core::format::milliseconds;
use potluck_graph::{ModelGraph, Recompute};
use potluck_parallel::planner::cut::BlockTimes;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::planner::profile::PlanProfile;
use potluck_parallel::planner::proposal::{Advice, Candidate, Proposal, layout_name};
use potluck_parallel::planner::search::{SearchRequest, search};

/// Returns the advice to recompute activations, if that makes a step shorter than that of a
/// proposal.
pub(super) fn recomputation_advice(
    searched: &SearchRequest,
    memory: &DeviceMemory,
    proposal: &Proposal,
) -> Option<Advice> {
    let before = &proposal.chosen;
    if proposal.refused.is_empty() && has_largest_micro_batches(searched, before) {
        // No layout lacks memory.
        return None;
    }
    let found = fastest_recomputed(searched, memory)?;
    let change = format!("recomputed activations (set {}) in {}", Setting::Recompute, name(&found));
    Advice::of(&change, before.prediction.step_s, found.prediction.step_s)
}

/// Returns the end of the error that no layout fits, if one with recomputed activations does.
pub(super) fn recomputation_hint(
    searched: &SearchRequest,
    memory: &DeviceMemory,
) -> Option<String> {
    let found = fastest_recomputed(searched, memory)?;
    Some(format!(
        "with {}, {} fits, in about {} ms per step",
        Setting::Recompute,
        name(&found),
        milliseconds(found.prediction.step_s)
    ))
}

fn name(candidate: &Candidate) -> String {
    layout_name(candidate.arrangement.mesh, candidate.arrangement.schedule)
}

fn has_largest_micro_batches(searched: &SearchRequest, chosen: &Candidate) -> bool {
    let largest = |share: u32| searched.micro_batch.min(share);
    chosen.arrangement.shares.iter().all(|share| share.micro_batch >= largest(share.count))
}

/// Fastest layout whose blocks recompute their activations; `None` if the request has them already,
/// or if nothing fits.
fn fastest_recomputed(searched: &SearchRequest, memory: &DeviceMemory) -> Option<Candidate> {
    let kept = searched.staged.model();
    if kept.recompute() != Recompute::None {
        return None;
    }
    let again = |plans: &Plans| plans.model().clone().with_recompute(Recompute::Blocks);
    let whole = Plans::new(again(searched.whole));
    let staged = Plans::new(again(searched.staged));
    let profile = recomputed_profile(searched.profile, kept, staged.model());
    let request = PlacementRequest { plans: &whole, ..memory.request.clone() };
    let memory = DeviceMemory { request: &request, staged: &staged, ..*memory };
    let searched = SearchRequest {
        profile: &profile,
        whole: &whole,
        staged: &staged,
        prices_runners_up: false,
        memory: &memory,
        ..*searched
    };
    Some(search(&searched).ok()?.chosen)
}

/// Profile in which the backward pass of a block also takes its part of the forward pass.
fn recomputed_profile(
    profile: &PlanProfile,
    kept: &ModelGraph,
    recomputed: &ModelGraph,
) -> PlanProfile {
    let mut profile = profile.clone();
    let before = block_flops(kept.whole());
    let after = block_flops(recomputed.whole());
    for (block, (before, after)) in before.iter().zip(&after).enumerate() {
        let extra = after.backward_input - before.backward_input;
        let part =
            if before.forward > 0.0 { (extra / before.forward).clamp(0.0, 1.0) } else { 0.0 };
        if part == 0.0 {
            // Times may be infinite.
            continue;
        }
        let with_forward = |times: BlockTimes| BlockTimes {
            backward_input_s: times.backward_input_s + part * times.forward_s,
            ..times
        };
        for device in &mut profile.devices {
            let speed = &mut device.blocks[block];
            speed.fixed = with_forward(speed.fixed);
            speed.per_row = with_forward(speed.per_row);
        }
    }
    profile
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_graph::{Builder, Init};
    use potluck_parallel::planner::profile::{BlockSpeed, DeviceProfile};
    use potluck_parallel::sim::LinkModel;

    /// A block of two layers, whose first output is recomputed, and one with the loss.
    fn model() -> ModelGraph {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 64]);
        b.block("layers");
        let w = b.parameter("w", &[64, 64], Init::Zeros);
        let hidden = b.linear(x, w, None).unwrap();
        let hidden = b.relu(hidden).unwrap();
        let v = b.parameter("v", &[64, 64], Init::Zeros);
        let y = b.linear(hidden, v, None).unwrap();
        b.block("loss");
        b.squared_error_loss(y, x).unwrap();
        ModelGraph::training(b.finish(), true).unwrap()
    }

    fn profile(blocks: Vec<BlockSpeed>) -> PlanProfile {
        let device = DeviceProfile {
            name: "card".into(),
            kind: 0,
            node: 0,
            is_on_host: false,
            blocks,
            load_row_s: 0.0,
            update_element_s: 0.0,
            read_back: LinkModel::INSTANT,
            upload: LinkModel::INSTANT,
            host: LinkModel::INSTANT,
            shares: None,
            memory: None,
            micro_batch: None,
            refusals: Vec::new(),
        };
        PlanProfile {
            devices: vec![device],
            links: vec![vec![LinkModel::INSTANT]],
            network_s_per_byte: Vec::new(),
            thread_message_s: 0.0,
            half_parts: Vec::new(),
        }
    }

    #[test]
    fn backward_pass_takes_the_recomputed_part_of_the_forward_pass_too() {
        let kept = model();
        let recomputed = model().with_recompute(Recompute::Blocks);
        let times = BlockTimes { forward_s: 1.0, backward_input_s: 2.0, backward_weight_s: 1.0 };
        let count = kept.whole().blocks.len();
        let speed = BlockSpeed::in_proportion(1, times);
        let again = recomputed_profile(&profile(vec![speed; count]), &kept, &recomputed);
        let of = |name: &str| kept.whole().blocks.iter().position(|block| block == name).unwrap();
        let layers = again.devices[0].blocks[of("layers")].at(1);
        // The first of two equal layers, and not the second.
        assert!((2.4..2.6).contains(&layers.backward_input_s), "{layers:?}");
        assert_eq!((layers.forward_s, layers.backward_weight_s), (1.0, 1.0));
        assert_eq!(again.devices[0].blocks[of("loss")].at(1), speed.at(1));
        let never = BlockSpeed::in_proportion(1, times.scaled(f64::INFINITY));
        let again = recomputed_profile(&profile(vec![never; count]), &kept, &recomputed);
        assert!(again.devices[0].blocks.iter().all(|block| block.at(1).sum_s() == f64::INFINITY));
    }
}
