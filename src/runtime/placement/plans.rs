//! Plans of one graph for different numbers of rows.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::graph::{Graph, Plan, PlanOptions};

/// Plans of a graph by their most rows, each built once.
pub struct Plans {
    graph: Graph,
    built: RefCell<BTreeMap<u32, Arc<Plan>>>,
}

impl Plans {
    pub fn new(graph: Graph) -> Self {
        Self { graph, built: RefCell::default() }
    }

    /// Returns the plan for up to this many rows.
    pub fn of_rows(&self, rows: u32) -> Arc<Plan> {
        let build = || Arc::new(Plan::new(self.graph.clone(), PlanOptions::new(rows as usize)));
        self.built.borrow_mut().entry(rows).or_insert_with(build).clone()
    }
}
