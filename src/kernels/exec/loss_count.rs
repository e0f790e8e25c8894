//! Count of the loss, kept by the host. The device's own count, next to its sum, is an f32, which
//! is exact below 2^24 only.

use std::ops::Range;

use super::{PassContext, copies};
use potluck_core::{HostTensorView, Shape, TensorId};
use potluck_graph::{Graph, LossCount, Plan};

/// Counter of the elements or targets that the loss of a plan sums.
pub(crate) struct LossCounter {
    loss: Option<CountedLoss>,
    /// Count since the step began.
    count: u64,
}

/// Loss whose count follows from the rows of a pass and from the inputs.
struct CountedLoss {
    /// Node that adds to the loss.
    node: usize,
    counted: Counted,
}

enum Counted {
    /// All elements of a tensor of this shape.
    Elements(Shape),
    Targets(TargetCounts),
}

/// Numbers of targets that are classes.
struct TargetCounts {
    input: TensorId,
    /// Targets per row, and classes.
    per_row: usize,
    classes: usize,
    /// Per copy of the targets' slot and row: the number of targets that are classes, as set last.
    /// Empty if the targets have no place.
    rows: Vec<Vec<u64>>,
}

impl LossCounter {
    pub fn new(plan: &Plan) -> Self {
        Self { loss: CountedLoss::of(plan), count: 0 }
    }

    /// Notes the values of the first rows of an input, in the copy of a micro-batch.
    pub fn set_input(&mut self, tensor: TensorId, micro_batch: usize, values: HostTensorView) {
        if let Some(CountedLoss { counted: Counted::Targets(targets), .. }) = &mut self.loss
            && targets.input == tensor
        {
            targets.set(micro_batch, values.ints());
        }
    }

    pub fn begin_step(&mut self) {
        self.count = 0;
    }

    /// Adds the count of a pass if the node that adds to the loss is among `nodes`.
    pub fn run(&mut self, nodes: &Range<usize>, pass: &PassContext) {
        if let Some(loss) = &self.loss
            && nodes.contains(&loss.node)
        {
            self.count += match &loss.counted {
                Counted::Elements(shape) => shape.elements(pass.rows) as u64,
                Counted::Targets(targets) => targets.count(pass),
            };
        }
    }

    /// Returns the count since the step began; `None` if the graph has no loss or one that the
    /// host cannot count, so that only the device's count is known.
    pub fn count(&self) -> Option<f64> {
        self.loss.as_ref()?;
        Some(self.count as f64)
    }
}

impl CountedLoss {
    fn of(plan: &Plan) -> Option<Self> {
        let graph = &plan.graph;
        let node = writer(graph, graph.loss?)?;
        let mut parts = &graph.nodes[writer(graph, graph.nodes[node].inputs[0])?];
        // Each part over some of the classes has the targets.
        while parts.op.joins_losses() {
            parts = &graph.nodes[writer(graph, parts.inputs[0])?];
        }
        if let Some(losses) = graph.losses_of_samples() {
            let counted = Counted::Elements(graph.tensor(losses).shape.clone());
            return Some(Self { node, counted });
        }
        let counted = match parts.op.loss_count()? {
            LossCount::Elements => Counted::Elements(graph.tensor(parts.inputs[0]).shape.clone()),
            LossCount::Targets => {
                let (targets, classes) = parts.op.targets()?;
                Counted::Targets(TargetCounts::new(plan, parts.inputs[targets], classes))
            }
        };
        Some(Self { node, counted })
    }
}

fn writer(graph: &Graph, tensor: TensorId) -> Option<usize> {
    graph.nodes.iter().position(|node| node.outputs.contains(&tensor))
}

impl TargetCounts {
    /// Returns the counts of targets that are zero, like the memory of a device before they are
    /// set. Integers are never computed, so `targets` is an input or an alias of one.
    fn new(plan: &Plan, targets: TensorId, classes: usize) -> Self {
        let graph = &plan.graph;
        let per_row = graph.tensor(targets).shape.per_row();
        let rows = vec![vec![per_row as u64; plan.options.rows]; copies(plan, targets)];
        Self { input: graph.root(targets), per_row, classes, rows }
    }

    fn set(&mut self, micro_batch: usize, values: &[u32]) {
        let copies = self.rows.len();
        if copies == 0 {
            return;
        }
        let rows = values.chunks(self.per_row);
        for (count, row) in self.rows[micro_batch % copies].iter_mut().zip(rows) {
            *count = row.iter().filter(|target| (**target as usize) < self.classes).count() as u64;
        }
    }

    fn count(&self, pass: &PassContext) -> u64 {
        self.rows[pass.micro_batch % self.rows.len()][..pass.rows].iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RandomContext;
    use potluck_core::rng::Key;
    use potluck_graph::{Builder, IGNORE_INDEX, Init, PlanOptions, differentiate, fuse};

    fn pass(micro_batch: usize, rows: usize) -> PassContext {
        let random = RandomContext { step_key: Key::new(1), training: true };
        PassContext { micro_batch, rows, loss_scale: 1.0, random }
    }

    /// A plan of 3 rows and 2 copies, with 2 targets per row and 4 classes.
    fn classifier() -> (LossCounter, usize, TensorId) {
        let mut b = Builder::new();
        let (x, targets) = (b.input("x", &[1, 2, 3]), b.input_ids("targets", &[1, 2]));
        let weight = b.parameter("weight", &[4, 3], Init::Ones);
        let logits = b.linear(x, weight, None).unwrap();
        b.cross_entropy_loss(logits, targets).unwrap();
        let graph = fuse(differentiate(b.finish()).unwrap());
        let plan = Plan::new(graph, PlanOptions { in_flight: 2, ..PlanOptions::new(3) });
        (LossCounter::new(&plan), plan.graph.nodes.len(), targets)
    }

    #[test]
    fn targets_are_counted_per_copy_and_row() {
        let (mut counter, nodes, targets) = classifier();
        let set = |counter: &mut LossCounter, micro_batch, values: &[u32]| {
            counter.set_input(targets, micro_batch, HostTensorView::Int(values));
        };
        set(&mut counter, 0, &[0, 3, 4, 1, IGNORE_INDEX, IGNORE_INDEX]);
        // Micro-batch 3 of 2 copies has copy 1.
        set(&mut counter, 3, &[0, 1, 2, 3, 3, IGNORE_INDEX]);
        // The rows after the first one keep their values.
        set(&mut counter, 1, &[IGNORE_INDEX, 1]);
        let counts = [(0, 3, 3), (2, 2, 3), (4, 1, 2), (1, 3, 4), (5, 1, 1)];
        for (micro_batch, rows, expected) in counts {
            counter.begin_step();
            counter.run(&(0..nodes), &pass(micro_batch, rows));
            let count = counter.count();
            assert_eq!(count, Some(f64::from(expected)), "{micro_batch}, {rows} rows");
        }
    }

    #[test]
    fn a_pass_counts_once_in_whatever_ranges_its_nodes_run() {
        let (mut counter, nodes, _) = classifier();
        (0..nodes).for_each(|node| counter.run(&(node..node + 1), &pass(0, 3)));
        assert_eq!(counter.count(), Some(6.0), "targets that were never set are 0");
    }

    #[test]
    fn graphs_without_a_loss_are_not_counted() {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 3]);
        b.scale(x, 2.0).unwrap();
        let plan = Plan::new(b.finish(), PlanOptions::new(3));
        assert_eq!(LossCounter::new(&plan).count(), None);
    }
}
