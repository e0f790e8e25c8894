//! Memory for intermediate results between the dispatches of one call of a plan.

use crate::Caps;
use crate::autotune::plan_calls::{distinct_calls, distinct_calls_of};
use potluck_graph::Plan;

/// Bytes that a device allocates for intermediate results between the dispatches of a call. All
/// calls share the memory, as they run one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallMemory {
    /// Partial results.
    pub workspace: usize,
    /// A whole tensor between dispatches, and the slot that shares its memory.
    pub scratch: usize,
}

/// The most rows of small passes, of one token each of a few texts, which have their own kernels.
const FEW_ROWS: usize = 8;

impl CallMemory {
    /// Returns the memory for a plan on a device with these capabilities: the most that any variant
    /// of its calls needs. A plan without gradients may also run as in training, normalizing by the
    /// statistics of the batch, and on a few rows.
    pub fn of(plan: &Plan, caps: &Caps) -> Self {
        let mut calls = distinct_calls(plan, *caps);
        if !plan.graph.is_trained() {
            calls.extend(distinct_calls_of(plan, *caps, true, plan.options.rows));
            for rows in 1..=FEW_ROWS.min(plan.options.rows) {
                calls.extend(distinct_calls_of(plan, *caps, false, rows));
            }
        }
        let mut memory = Self::default();
        for planned in &calls {
            for variant in &planned.variants {
                memory.workspace = memory.workspace.max(variant.workspace_bytes());
                memory.scratch = memory.scratch.max(variant.scratch_bytes());
            }
        }
        memory.scratch = memory.scratch.max(plan.logits_slot_bytes());
        memory
    }

    /// Returns the bytes of both.
    pub fn bytes(&self) -> usize {
        self.workspace.saturating_add(self.scratch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceClass, Variant};
    use potluck_graph::model::GptConfig;
    use potluck_graph::model::gpt::cached_gpt;
    use potluck_graph::{
        Builder, Conv2dOptions, Init, ModelGraph, PlanOptions, Unary, differentiate,
    };

    /// Sums that kernels split, whose parts take memory.
    fn plan(workspace_bytes_max: usize) -> Plan {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 2048]);
        let w = b.parameter("w", &[64, 2048], Init::Normal { std: 0.1 });
        let y = b.linear(x, w, None).unwrap();
        let target = b.input("target", &[1, 64]);
        b.squared_error_loss(y, target).unwrap();
        let options = PlanOptions { workspace_bytes_max, ..PlanOptions::new(64) };
        Plan::new(differentiate(b.finish()).unwrap(), options)
    }

    #[test]
    fn a_plan_bounds_the_workspace_of_its_kernels() {
        let bytes = |most| CallMemory::of(&plan(most), &Caps::EVERY).workspace;
        let usual = bytes(PlanOptions::new(64).workspace_bytes_max);
        assert!(usual > 4096, "{usual}");
        assert!((1..usual).contains(&bytes(usual - 1)));
        assert!(bytes(0) < 4096, "{}", bytes(0));
    }

    /// Layers whose gradients by parameters are sums over the rows, which kernels split.
    fn layers_with_sums_over_rows() -> Plan {
        let mut b = Builder::new();
        let mut x = b.input("x", &[1, 12, 12, 32]);
        let weight = |b: &mut Builder, name: &str, dims: &[usize]| {
            b.parameter(name, dims, Init::Normal { std: 0.1 })
        };
        for (name, kernel, stride) in [("a", 2, 2), ("b", 3, 1), ("c", 1, 1)] {
            let w = weight(&mut b, name, &[32, 32, kernel, kernel]);
            let options = Conv2dOptions { stride: [stride; 2], ..Conv2dOptions::default() };
            x = b.conv2d(x, w, None, options).unwrap();
        }
        let w = weight(&mut b, "depthwise", &[32, 1, 3, 3]);
        let options = Conv2dOptions { groups: 32, padding: [1; 2], ..Conv2dOptions::default() };
        x = b.conv2d(x, w, None, options).unwrap();
        let x = b.reshape(x, &[1, 16 * 32]).unwrap();
        let w = weight(&mut b, "wide", &[128, 16 * 32]);
        let bias = b.parameter("bias", &[128], Init::Zeros);
        let x = b.linear(x, w, Some(bias)).unwrap();
        let x = b.batch_norm("norm", x).unwrap();
        let [gain, shift] = ["gain", "shift"].map(|name| b.parameter(name, &[128], Init::Ones));
        let x = b.layer_norm(x, gain, Some(shift)).unwrap();
        let target = b.input("target", &[1, 128]);
        b.squared_error_loss(x, target).unwrap();
        Plan::new(differentiate(b.finish()).unwrap(), PlanOptions::new(1100))
    }

    /// Micro-batches may have any number of rows up to the capacity, and kernels round the lengths
    /// of the parts of their sums.
    #[test]
    fn kernels_of_fewer_rows_have_room_wherever_sums_are_split() {
        let plan = layers_with_sums_over_rows();
        for class in [DeviceClass::Hardware, DeviceClass::Software] {
            let caps = Caps { class, ..Caps::EVERY };
            let full = distinct_calls(&plan, caps);
            for rows in (1..=1100).rev().step_by(7) {
                for call in distinct_calls_of(&plan, caps, true, rows) {
                    let op = &call.owned_call.op;
                    let same = full.iter().filter(|whole| whole.owned_call.op == *op);
                    for variant in &call.variants {
                        let rooms = same.clone().flat_map(|whole| &whole.variants);
                        let rooms = rooms.filter(|of_full| of_full.name == variant.name);
                        let Some(room) = rooms.map(Variant::workspace_bytes).max() else {
                            continue;
                        };
                        let needed = variant.workspace_bytes();
                        assert!(needed <= room, "{op} {}: {rows} rows {needed}", variant.name);
                    }
                }
            }
        }
    }

    /// Kernels split the keys for one token of a few texts, and not for a prompt.
    #[test]
    fn kernels_of_a_few_rows_have_room() {
        let config = GptConfig {
            vocabulary: 9,
            context: 512,
            positions: 512,
            layers: 1,
            heads: 4,
            width: 16,
            bias: true,
            dropout: 0.0,
            tie: true,
            activation: Unary::Gelu,
        };
        let graph = ModelGraph::forward(cached_gpt(&config, 8).unwrap(), true).whole().clone();
        let plan = Plan::new(graph, PlanOptions::new(128));
        let caps = Caps { class: DeviceClass::Hardware, ..Caps::EVERY };
        let room = CallMemory::of(&plan, &caps).workspace;
        let needed = |rows| {
            let calls = distinct_calls_of(&plan, caps, false, rows);
            calls.iter().flat_map(|call| &call.variants).map(Variant::workspace_bytes).max()
        };
        assert!(needed(128) < needed(1), "splits need memory");
        assert!((1..=8).all(|rows| needed(rows) <= Some(room)));
    }
}
