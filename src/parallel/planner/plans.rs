//! Plans of one model for different numbers of rows, undivided and divided over tensor groups.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use potluck_graph::{ModelGraph, Plan, RankGraph, ShardError};

/// Plans of a model's shards on the ranks of a tensor group.
#[derive(Clone, Debug)]
pub struct GroupPlans {
    /// By rank of the group; for a single rank, the plan of the whole model.
    pub plans: Vec<Arc<Plan>>,
    /// By rank and output of the graph: the ranges of its last dimension that the rank computes.
    pub outputs: Vec<Vec<Vec<Range<usize>>>>,
}

/// Plans of a model by the shares of a tensor group and the maximum rows, each built once.
pub struct Plans {
    model: ModelGraph,
    built: RefCell<BTreeMap<(Vec<u32>, u32), GroupPlans>>,
}

impl Plans {
    /// Returns the plans of a model, each built on demand.
    pub fn new(model: ModelGraph) -> Self {
        Self { model, built: RefCell::default() }
    }

    /// Returns the model.
    pub fn model(&self) -> &ModelGraph {
        &self.model
    }

    /// Returns the plan of the whole model for up to `rows` rows.
    pub fn of_rows(&self, rows: u32) -> Arc<Plan> {
        self.of_one(rows).plans[0].clone()
    }

    /// Returns the plans of a tensor group with these shares for up to `rows` rows; for fewer than
    /// two shares, the plan of the whole model.
    ///
    /// # Errors
    /// Returns `ShardError` if the model cannot be divided by these shares.
    pub fn of_group(&self, shares: &[u32], rows: u32) -> Result<GroupPlans, ShardError> {
        if shares.len() < 2 {
            return Ok(self.of_one(rows));
        }
        let key = (shares.to_vec(), rows);
        if let Some(known) = self.built.borrow().get(&key) {
            return Ok(known.clone());
        }
        let mut group = GroupPlans { plans: Vec::new(), outputs: Vec::new() };
        let options = self.model.plan_options(rows as usize);
        for position in 0..shares.len() {
            let RankGraph { graph, outputs } = self.model.of_rank(shares, position)?;
            group.plans.push(Arc::new(Plan::new(graph, options)));
            group.outputs.push(outputs);
        }
        self.built.borrow_mut().insert(key, group.clone());
        Ok(group)
    }

    /// Plan of the whole model as a group of one rank.
    fn of_one(&self, rows: u32) -> GroupPlans {
        let mut built = self.built.borrow_mut();
        let group = built.entry((Vec::new(), rows)).or_insert_with(|| {
            let graph = self.model.whole().clone();
            let mut outputs = Vec::with_capacity(graph.outputs.len());
            for (_, id) in &graph.outputs {
                outputs.push(std::iter::once(0..graph.tensor(*id).shape.last()).collect());
            }
            let plan = Plan::new(graph, self.model.plan_options(rows as usize));
            GroupPlans { plans: vec![Arc::new(plan)], outputs: vec![outputs] }
        });
        group.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_graph::model::{MlpConfig, MlpLoss, mlp};
    use potluck_graph::{Builder, Init, Unary};

    #[test]
    fn a_plan_is_built_once_for_a_number_of_rows() {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 2]);
        let w = b.parameter("w", &[2, 2], Init::Zeros);
        let y = b.linear(x, w, None).unwrap();
        b.squared_error_loss(y, x).unwrap();
        let plans = Plans::new(ModelGraph::training(b.finish(), true).unwrap());
        let (three, again, four) = (plans.of_rows(3), plans.of_rows(3), plans.of_rows(4));
        assert!(Arc::ptr_eq(&three, &again));
        assert_eq!((three.options.rows, four.options.rows), (3, 4));
        let alone = plans.of_group(&[7], 3).unwrap();
        assert!(Arc::ptr_eq(&alone.plans[0], &three));
        assert!(matches!(plans.of_group(&[1, 1], 3), Err(ShardError::NoRule)));
    }

    #[test]
    fn plans_of_a_group_have_its_shares_and_say_which_columns_of_outputs_are_theirs() {
        let widths = vec![8, 128, 5];
        let loss = MlpLoss::CrossEntropy;
        let config = MlpConfig { widths, activation: Unary::Relu, dropout: 0.0, loss };
        let plans = Plans::new(ModelGraph::training(mlp(&config).unwrap(), true).unwrap());
        let group = plans.of_group(&[3, 1], 2).unwrap();
        assert_eq!((group.plans.len(), group.outputs.len()), (2, 2));
        let again = plans.of_group(&[3, 1], 2).unwrap();
        assert!(Arc::ptr_eq(&group.plans[1], &again.plans[1]));
        let elements = |plan: &Arc<Plan>| -> usize {
            let held = plan.buckets.iter().zip(&plan.held).filter(|(_, held)| **held);
            held.map(|(bucket, _)| bucket.length).sum()
        };
        assert!(elements(&group.plans[0]) > 2 * elements(&group.plans[1]));
        for outputs in &group.outputs {
            assert_eq!(outputs[0].iter().cloned().flatten().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        }
    }
}
