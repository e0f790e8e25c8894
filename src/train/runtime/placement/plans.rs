//! Plans of one graph for different numbers of rows.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use potluck_graph::{Graph, Plan, PlanOptions};

/// Plans of a graph by their most rows, each built once.
pub struct Plans {
    graph: Graph,
    built: RefCell<BTreeMap<u32, Arc<Plan>>>,
}

impl Plans {
    /// Returns the plans of a graph, of which none is built yet.
    pub fn new(graph: Graph) -> Self {
        Self { graph, built: RefCell::default() }
    }

    /// Returns the plan for up to this many rows.
    pub fn of_rows(&self, rows: u32) -> Arc<Plan> {
        let mut built = self.built.borrow_mut();
        if let Some(plan) = built.get(&rows) {
            return plan.clone();
        }
        let plan = Arc::new(Plan::new(self.graph.clone(), PlanOptions::new(rows as usize)));
        built.insert(rows, plan.clone());
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_graph::{Builder, Init, differentiate};

    #[test]
    fn a_plan_is_built_once_for_a_number_of_rows() {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 2]);
        let w = b.parameter("w", &[2, 2], Init::Zeros);
        let y = b.linear(x, w, None).unwrap();
        b.squared_error_loss(y, x).unwrap();
        let plans = Plans::new(differentiate(b.finish()).unwrap());
        let (three, again, four) = (plans.of_rows(3), plans.of_rows(3), plans.of_rows(4));
        assert!(Arc::ptr_eq(&three, &again));
        assert_eq!((three.options.rows, four.options.rows), (3, 4));
    }
}
