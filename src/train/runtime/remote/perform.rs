//! Calls of the first node on a device of this one.

use super::calls::{CallReply, DeviceCall, device_calls};
use super::wire::PlanRecipe;
use potluck_core::{BucketId, HostTensor, TensorId};
use potluck_graph::{ModelGraph, Plan, PlanPart, PlannedPart, Region};
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::Executor;
use potluck_parallel::TENSOR_SHARE_MAX;

/// Calls with other arguments or results on the wire.
pub(super) trait OnNode: Executor {
    /// Writes the first rows of an input tensor.
    fn set_owned(
        &mut self,
        tensor: TensorId,
        micro_batch: usize,
        values: HostTensor,
    ) -> Result<(), DeviceError> {
        self.set_input(tensor, micro_batch, values.as_view())
    }

    /// Reads a place, and waits for the values.
    fn read_place(&mut self, place: Region) -> Result<Vec<f32>, DeviceError> {
        self.start_readback(place)?;
        let read = self.next_readback(true)?;
        Ok(read.map(|read| read.values().to_vec()).unwrap_or_default())
    }

    /// Returns `partial + gradients[start..]`.
    fn sum(
        &mut self,
        bucket: BucketId,
        start: usize,
        mut partial: Vec<f32>,
    ) -> Result<Vec<f32>, DeviceError> {
        self.add(bucket, start, &mut partial)?;
        Ok(partial)
    }
}

impl<E: Executor + ?Sized> OnNode for E {}

macro_rules! server {
    ($($call:ident $name:literal: $client:ident $method:ident(
        $($(#[$field:meta])* $(&$borrowed:ident)? $($owned:ident)?: $type:ty),*
    ) -> $(#[$result:meta])* $reply:ty;)*) => {
        /// Performs a call on a device.
        ///
        /// # Errors
        /// Returns `DeviceError` if the device fails.
        pub fn perform_call(
            device: &mut dyn Executor,
            call: DeviceCall,
        ) -> Result<CallReply, DeviceError> {
            match call {
                $(DeviceCall::$call { $($($borrowed)? $($owned)?),* } => {
                    device.$method($($(&$borrowed)? $($owned)?),*).map(CallReply::$call)
                })*
            }
        }
    };
}
device_calls!(server);

/// Maximum number of ranks of a tensor group in a configuration.
const TENSOR_RANKS_MAX: usize = 64;

impl PlanRecipe {
    /// Returns the recipe of a plan; `tensor_shares` has the shares of its tensor group, if any.
    pub fn of(plan: &Plan, tensor_shares: &[u32]) -> Self {
        Self {
            options: plan.options,
            part: plan.part.clone(),
            tensor_shares: tensor_shares.to_vec(),
            tensor_rank: plan.graph.tensor_rank.unwrap_or(0),
            is_merged: plan.graph.has_merged_backward(),
        }
    }

    /// Returns the plan of a model by this recipe.
    ///
    /// # Errors
    /// Returns the reason that the recipe does not fit this model.
    pub fn plan(self, model: &ModelGraph) -> Result<Plan, String> {
        let Self { options, part, tensor_shares, tensor_rank, is_merged } = self;
        let has_rank = (tensor_rank as usize) < tensor_shares.len().max(1);
        let sizes = 1..=TENSOR_SHARE_MAX;
        let has_shares = tensor_shares.iter().all(|share| sizes.contains(share));
        if !has_shares || !has_rank || tensor_shares.len() > TENSOR_RANKS_MAX {
            return Err(format!("rank {tensor_rank} of a tensor group of {tensor_shares:?}"));
        }
        let divided;
        let model = if model.whole().has_merged_backward() == is_merged {
            model
        } else {
            let model = model.clone();
            divided = if is_merged {
                model.with_merged_backward()
            } else {
                model.with_separate_backward()
            };
            &divided
        };
        let limited;
        let model = if options.parameter_bytes_max.is_some() {
            let cut = model.clone().with_parameter_bytes_max(options.parameter_bytes_max);
            limited = cut.map_err(|error| error.to_string())?;
            &limited
        } else {
            model
        };
        let graph = if tensor_shares.len() < 2 {
            model.whole().clone()
        } else {
            let part = model.of_rank(&tensor_shares, tensor_rank as usize);
            part.map_err(|error| error.to_string())?.graph
        };
        if options.rows == 0 || options.in_flight == 0 {
            return Err("a plan has rows and a copy of each slot".into());
        }
        let Some(PlannedPart { blocks, runs }) = part else { return Ok(Plan::new(graph, options)) };
        if blocks.len() != graph.blocks.len() {
            let given = blocks.len();
            let has = graph.blocks.len();
            return Err(format!("a part of {given} blocks of a model that has {has}"));
        }
        Ok(Plan::part(graph, options, &PlanPart { blocks: &blocks, runs: &runs }))
    }
}

/// Hash of a plan, by which two nodes check that they have the same one.
pub(crate) fn plan_hash(plan: &Plan) -> [u8; 32] {
    struct Hashed(blake3::Hasher);
    impl std::fmt::Write for Hashed {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            self.0.update(text.as_bytes());
            Ok(())
        }
    }
    let mut hashed = Hashed(blake3::Hasher::new());
    // Writing to a hasher never fails.
    let _ = std::fmt::Write::write_fmt(&mut hashed, format_args!("{plan:?}"));
    *hashed.0.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_graph::model::{MlpConfig, MlpLoss, mlp};
    use potluck_graph::{PlanOptions, Unary};

    #[test]
    fn recipes_of_tensor_groups_give_their_plans_or_are_refused() {
        let widths = vec![8, 128, 5];
        let loss = MlpLoss::CrossEntropy;
        let config = MlpConfig { widths, activation: Unary::Relu, dropout: 0.0, loss };
        let model = ModelGraph::training(mlp(&config).unwrap(), true).unwrap();
        let shares = [3, 1];
        for rank in 0..2 {
            let graph = model.of_rank(&shares, rank).unwrap().graph;
            let plan = Plan::new(graph, PlanOptions::new(4));
            let recipe = PlanRecipe::of(&plan, &shares);
            assert_eq!(plan_hash(&recipe.plan(&model).unwrap()), plan_hash(&plan));
        }
        let whole = Plan::new(model.whole().clone(), PlanOptions::new(4));
        let recipe = PlanRecipe::of(&whole, &[]);
        assert_eq!(recipe.clone().plan(&model).unwrap(), whole);
        let merged = model.clone().with_merged_backward();
        assert_eq!(recipe.clone().plan(&merged).unwrap(), whole);
        let of_merged = Plan::new(merged.whole().clone(), PlanOptions::new(4));
        assert_eq!(PlanRecipe::of(&of_merged, &[]).plan(&model).unwrap(), of_merged);
        assert!(of_merged != whole);
        for (tensor_shares, tensor_rank) in [
            (vec![3, 1], 2),
            (vec![], 1),
            (vec![1, 0], 0),
            (vec![1, u32::MAX], 0),
            (vec![1; 5], 0),
            (vec![1; 65], 0),
        ] {
            let damaged = PlanRecipe { tensor_shares, tensor_rank, ..recipe.clone() };
            let told = format!("{damaged:?}");
            assert!(damaged.plan(&model).is_err(), "{told}");
        }
    }
}
