//! Plans of the model with other options, priced without another measurement: what it would gain
//! where memory is short, or the devices wait for each other's values.

use super::block_work::block_flops;
use super::device_memory::DeviceMemory;
use super::types::PlacementRequest;
use potluck_core::Setting;
use potluck_core::format::milliseconds;
use potluck_graph::{ActivationFormat, ModelGraph, Recompute};
use potluck_parallel::planner::cut::BlockTimes;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::planner::profile::PlanProfile;
use potluck_parallel::planner::proposal::{Advice, Candidate, Proposal, layout_name};
use potluck_parallel::planner::search::{SearchRequest, search};

/// Time of a pass with activations in bf16, in f32 1: of GPT-2 124M on the CPU device
/// (`cargo bench --bench activations`), taken for all devices.
const PACKING: f64 = 1.07;

/// Change of the options of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ModelChange {
    /// Blocks compute their activations again in the backward pass.
    Recompute,
    /// Activations between blocks, and those that are kept, in bf16.
    Bf16,
}

impl ModelChange {
    const ALL: [Self; 2] = [Self::Recompute, Self::Bf16];

    fn name(self) -> &'static str {
        match self {
            Self::Recompute => "recomputed activations",
            Self::Bf16 => "activations in bf16",
        }
    }

    fn setting(self) -> Setting {
        match self {
            Self::Recompute => Setting::Recompute,
            Self::Bf16 => Setting::Activations,
        }
    }

    fn is_made(self, model: &ModelGraph) -> bool {
        match self {
            Self::Recompute => model.recompute() != Recompute::None,
            Self::Bf16 => model.activations() == ActivationFormat::Bf16,
        }
    }

    fn of(self, model: ModelGraph) -> ModelGraph {
        match self {
            Self::Recompute => model.with_recompute(Recompute::Blocks),
            Self::Bf16 => model.with_activations(ActivationFormat::Bf16),
        }
    }

    /// Returns the profile of the changed model.
    fn profile(
        self,
        profile: &PlanProfile,
        kept: &ModelGraph,
        changed: &ModelGraph,
    ) -> PlanProfile {
        match self {
            Self::Recompute => recomputed_profile(profile, kept, changed),
            Self::Bf16 => packed_profile(profile),
        }
    }

    /// Returns true if the change may make a step shorter than that of a proposal: if memory is
    /// short, or if it makes what devices send each other smaller.
    fn may_help(self, searched: &SearchRequest, proposal: &Proposal) -> bool {
        let chosen = &proposal.chosen;
        let is_short = !proposal.refused.is_empty() || !has_largest_micro_batches(searched, chosen);
        is_short || (self == Self::Bf16 && searched.profile.devices.len() > 1)
    }
}

/// Returns the advice to change options of the model, as far as that makes a step shorter than that
/// of a proposal.
pub(super) fn advice(
    searched: &SearchRequest,
    memory: &DeviceMemory,
    proposal: &Proposal,
) -> Vec<Advice> {
    let mut advice = Vec::new();
    for change in ModelChange::ALL {
        if change.may_help(searched, proposal)
            && let Some(found) = fastest_with(change, searched, memory)
        {
            let what = format!("{} (set {}) in {}", change.name(), change.setting(), name(&found));
            let before_s = proposal.chosen.prediction.step_s;
            advice.extend(Advice::of(&what, before_s, found.prediction.step_s));
        }
    }
    advice
}

/// Returns the end of the error that no layout fits, if one with other options of the model does.
pub(super) fn hint(searched: &SearchRequest, memory: &DeviceMemory) -> Option<String> {
    let mut fitting = Vec::new();
    for change in ModelChange::ALL {
        fitting.extend(fastest_with(change, searched, memory).map(|found| (change, found)));
    }
    let step_s = |found: &Candidate| found.prediction.step_s;
    let fastest = fitting.into_iter().min_by(|a, b| step_s(&a.1).total_cmp(&step_s(&b.1)));
    let (change, found) = fastest?;
    Some(format!(
        "with {}, {} fits, in about {} ms per step",
        change.setting(),
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

/// Fastest layout of the changed model; `None` if the request has the change already, or if nothing
/// fits.
fn fastest_with(
    change: ModelChange,
    searched: &SearchRequest,
    memory: &DeviceMemory,
) -> Option<Candidate> {
    let kept = searched.staged.model();
    if change.is_made(kept) {
        return None;
    }
    let whole = Plans::new(change.of(searched.whole.model().clone()));
    let staged = Plans::new(change.of(kept.clone()));
    let profile = change.profile(searched.profile, kept, staged.model());
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

/// Profile in which passes pack and unpack activations.
fn packed_profile(profile: &PlanProfile) -> PlanProfile {
    let mut profile = profile.clone();
    for block in profile.devices.iter_mut().flat_map(|device| &mut device.blocks) {
        block.fixed = block.fixed.scaled(PACKING);
        block.per_row = block.per_row.scaled(PACKING);
    }
    profile
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
            receives_inputs: Vec::new(),
            thread_message_s: 0.0,
            half_parts: Vec::new(),
        }
    }

    #[test]
    fn packing_takes_time_in_all_passes() {
        let times = BlockTimes { forward_s: 1.0, backward_input_s: 2.0, backward_weight_s: 0.5 };
        let speed = BlockSpeed { fixed: times, per_row: times.scaled(2.0) };
        let packed = packed_profile(&profile(vec![speed; 2]));
        let expected = speed.at(3).scaled(PACKING);
        let found = packed.devices[0].blocks[1].at(3);
        assert!((found.sum_s() - expected.sum_s()).abs() < 1e-12, "{found:?}");
        assert!(found.sum_s() > speed.at(3).sum_s());
    }

    #[test]
    fn a_change_is_made_once() {
        for change in ModelChange::ALL {
            assert!(!change.is_made(&model()));
            assert!(change.is_made(&change.of(model())));
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
