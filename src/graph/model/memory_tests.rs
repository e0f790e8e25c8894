//! Memory of plans of models: moments that are rounded by their places, and the slot of logits.

use super::{GptConfig, gpt};
use crate::{
    ModelGraph, MomentFormat, Plan, Recompute, SlotKind, TensorLocation, Unary, Update,
    UpdateRange, replay,
};
use potluck_core::rng::Key;
use potluck_core::{BucketId, SegmentId, SlotId};

/// Of every element of a plan's trained parameters, updated in parts of `part` elements: the
/// number of its parameter, its place in it, and the key of its random numbers.
fn roundings(plan: &Plan, part: usize) -> Vec<(u32, usize, Key)> {
    let momentum = Update::Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.0 };
    let step_key = Key::new(3).step(7);
    let mut found = Vec::new();
    for (index, bucket) in plan.buckets.iter().enumerate().filter(|(at, _)| plan.held[*at]) {
        for start in (0..bucket.length).step_by(part) {
            let length = part.min(bucket.length - start);
            let (decay_end, gradient_scale) = (bucket.decay_end, 1.0);
            let range = UpdateRange { start, length, decay_end, gradient_scale, rounding: None };
            let id = BucketId(index as u32);
            for range in plan.update_ranges(id, &momentum, range, step_key) {
                let rounding = range.rounding.unwrap();
                let of = bucket.parameters.iter().rfind(|(_, at)| *at <= range.start).unwrap();
                let number = plan.graph.parameters[of.0.index()].whole.number;
                let places = (0..range.length).map(|element| rounding.place(element));
                found.extend(places.map(|place| (number, place, rounding.key)));
            }
        }
    }
    found.sort_unstable_by_key(|(number, place, _)| (*number, *place));
    found
}

/// However a model is divided, an element of a parameter has one key and one place.
#[test]
fn moments_are_rounded_by_their_places_in_whole_tensors() {
    let config = GptConfig {
        vocabulary: 200,
        context: 4,
        positions: 4,
        layers: 1,
        heads: 4,
        width: 64,
        bias: true,
        dropout: 0.0,
        tie: true,
        activation: Unary::Gelu,
    };
    let model = ModelGraph::training(gpt(&config).unwrap(), true).unwrap();
    let model = model.with_moments(MomentFormat::Bf16);
    let whole = Plan::new(model.whole().clone(), model.plan_options(2));
    let expected = roundings(&whole, usize::MAX);
    assert_eq!(expected.len(), whole.graph.parameter_count());
    let mut keys: Vec<[u32; 2]> = expected.iter().map(|(.., key)| key.0).collect();
    keys.dedup();
    assert_eq!(keys.len(), whole.graph.parameters.len());
    assert_eq!(roundings(&whole, 64), expected);
    for shares in [&[1, 1][..], &[2, 1, 1]] {
        let mut divided = Vec::new();
        for rank in 0..shares.len() {
            let part = model.of_rank(shares, rank).unwrap().graph;
            divided.extend(roundings(&Plan::new(part, model.plan_options(2)), 128));
        }
        divided.sort_unstable_by_key(|(number, place, _)| (*number, *place));
        // What all ranks have, they round alike.
        divided.dedup();
        assert!(divided == expected, "{shares:?}");
    }
}

/// Tensors of a layer share the memory of logits, which is overwritten when these are computed.
#[test]
fn the_slot_of_logits_has_nothing_when_they_are_computed() {
    let config = GptConfig {
        vocabulary: 300,
        context: 8,
        positions: 8,
        layers: 2,
        heads: 2,
        width: 16,
        bias: false,
        dropout: 0.0,
        tie: false,
        activation: Unary::Gelu,
    };
    let model = ModelGraph::training(gpt(&config).unwrap(), true).unwrap();
    let model = model.with_recompute(Recompute::Blocks).with_merged_backward();
    let mut plan = Plan::new(model.whole().clone(), model.plan_options(2));
    let runs: Vec<(SegmentId, usize)> =
        (0..plan.segments.len() as u32).map(|id| (SegmentId(id), 0)).collect();
    assert_eq!(replay(&plan, &runs), Ok(()));
    // The hidden layer of an MLP is the largest.
    assert_eq!(plan.logits_slot_bytes(), 2 * 8 * 64 * 4);
    let slot = plan.slots.iter().position(|slot| slot.kind == SlotKind::Logits).unwrap();
    let slot = TensorLocation::Slot(SlotId(slot as u32));
    // A layer's input is kept from forward to backward pass.
    let kept = plan.graph.nodes.iter().find(|node| node.op.to_string() == "layer_norm");
    let kept = plan.graph.root(kept.unwrap().inputs[0]);
    plan.places[kept.index()] = slot;
    let error = replay(&plan, &runs).unwrap_err();
    assert!(error.contains("reads"), "{error}");
    let head = plan.graph.nodes.iter().find(|node| node.op.logits_rows().is_some()).unwrap();
    let input = plan.graph.root(head.inputs[0]);
    plan.places[kept.index()] = TensorLocation::Loss;
    plan.places[input.index()] = slot;
    let error = replay(&plan, &runs).unwrap_err();
    assert!(error.contains("where its logits are"), "{error}");
}
