//! Replay of a program on the slots of a plan, which shows that no tensor is overwritten before
//! it was read for the last time.

use std::collections::{BTreeMap, BTreeSet};

use super::{Graph, Node, PassKind, Plan, Role, Segment, SlotKind, TensorLocation};
use potluck_core::{SegmentId, SlotId, TensorId};

/// Replays the segments that a rank runs, each with its micro-batch, on the slots of the rank's
/// plan: tensor by tensor and copy by copy. As in a rank's program, inputs are written before the
/// first segment of a micro-batch, tensors of other ranks before the first segment that reads them,
/// and other ranks read a tensor after the segment that computes it.
///
/// # Errors
/// Returns a sentence that names node, tensor and micro-batch if a node, another rank or the
/// caller would read memory without the tensor of that micro-batch, if a node would write into the
/// memory of one of its own inputs, or if a tensor has no memory.
pub fn replay(plan: &Plan, runs: &[(SegmentId, usize)]) -> Result<(), String> {
    let mut memory = Replay::new(plan, runs);
    for (index, (segment, micro_batch)) in runs.iter().enumerate() {
        memory.run(index, *segment, *micro_batch)?;
    }
    Ok(())
}

/// Contents of the slots in the course of a replay.
struct Replay<'a> {
    plan: &'a Plan,
    /// Tensor and micro-batch held by each copy of each slot.
    holds: BTreeMap<(SlotId, usize), (TensorId, usize)>,
    /// Writes so far, by tensor and micro-batch.
    written: BTreeSet<(TensorId, usize)>,
    /// True for each tensor that a node of this rank computes.
    own: Vec<bool>,
    /// True for each tensor that a node of another rank reads.
    needed_elsewhere: Vec<bool>,
    /// Index of the last run of the forward pass of each micro-batch, after which the caller reads
    /// the outputs.
    forward_end: BTreeMap<usize, usize>,
    /// Index of the last run of each micro-batch, after which the caller reads carried states.
    end: BTreeMap<usize, usize>,
}

impl<'a> Replay<'a> {
    fn new(plan: &'a Plan, runs: &[(SegmentId, usize)]) -> Self {
        let graph = &plan.graph;
        let mut own = vec![false; graph.tensors.len()];
        let mut needed_elsewhere = own.clone();
        for node in &graph.nodes {
            if plan.holds_block(node.block) {
                for output in &node.outputs {
                    own[output.index()] = true;
                }
            } else {
                for input in &node.inputs {
                    needed_elsewhere[graph.root(*input).index()] = true;
                }
            }
        }

        let mut forward_end = BTreeMap::new();
        let mut end = BTreeMap::new();
        for (index, (segment, micro_batch)) in runs.iter().enumerate() {
            if plan.segments[segment.index()].phase == PassKind::Forward {
                forward_end.insert(*micro_batch, index);
            }
            end.insert(*micro_batch, index);
        }
        Self {
            plan,
            holds: BTreeMap::new(),
            written: BTreeSet::new(),
            own,
            needed_elsewhere,
            forward_end,
            end,
        }
    }

    fn run(&mut self, index: usize, id: SegmentId, micro_batch: usize) -> Result<(), String> {
        let plan = self.plan;
        let segment = &plan.segments[id.index()];
        if !plan.holds_segment(id) {
            return Err(format!("{id} runs on a rank that does not hold its block"));
        }
        for (_, input) in &plan.graph.inputs {
            self.write_once(*input, micro_batch);
        }
        let nodes = &plan.graph.nodes[segment.nodes.clone()];
        for input in nodes.iter().flat_map(|node| &node.inputs) {
            let root = plan.graph.root(*input);
            if is_activation(&plan.graph, root) && !self.own[root.index()] {
                self.write_once(root, micro_batch);
            }
        }
        for node in segment.nodes.clone() {
            self.run_node(node, micro_batch)?;
        }
        self.send(segment, micro_batch)?;
        if self.forward_end.get(&micro_batch) == Some(&index) {
            for (name, output) in &plan.graph.outputs {
                self.read_own(name, *output, micro_batch)?;
            }
        }
        if self.end.get(&micro_batch) == Some(&index) {
            for carried in &plan.graph.carried {
                self.read_own("the next step", carried.output, micro_batch)?;
            }
        }
        Ok(())
    }

    /// Writes a tensor by a transfer, once per micro-batch.
    fn write_once(&mut self, tensor: TensorId, micro_batch: usize) {
        if let Some(copy) = self.copy(tensor, micro_batch)
            && self.written.insert((tensor, micro_batch))
        {
            self.holds.insert(copy, (tensor, micro_batch));
        }
    }

    fn run_node(&mut self, index: usize, micro_batch: usize) -> Result<(), String> {
        let graph = &self.plan.graph;
        let node = &graph.nodes[index];
        for input in &node.inputs {
            self.read(*input, micro_batch, &|| label(index, node))?;
        }
        if graph.logits_bytes(node, self.plan.options.rows).is_some() {
            self.overwrite_logits(index, node)?;
        }
        let mut outputs: Vec<TensorId> = node.outputs.clone();
        outputs.retain(|output| graph.tensor(*output).alias_of.is_none());
        for (nth, &output) in outputs.iter().enumerate() {
            if !self.plan.is_placed(output) {
                let node = label(index, node);
                return Err(format!(
                    "{node} writes {output} of micro-batch {micro_batch}, which has no memory"
                ));
            }
            let Some(copy) = self.copy(output, micro_batch) else { continue };
            let mut others = node.inputs.iter().chain(&outputs[..nth]);
            if let Some(other) = others.find(|t| self.copy(**t, micro_batch) == Some(copy)) {
                let node = label(index, node);
                let (slot, copy) = copy;
                return Err(format!(
                    "{node} writes {output} of micro-batch {micro_batch} to {slot}, copy {copy}, \
                     where its {other} is"
                ));
            }
            self.holds.insert(copy, (output, micro_batch));
            self.written.insert((output, micro_batch));
        }
        Ok(())
    }

    /// Overwrites the slot of logits, which must not hold a tensor of the node that computes them.
    fn overwrite_logits(&mut self, index: usize, node: &Node) -> Result<(), String> {
        let plan = self.plan;
        for tensor in node.inputs.iter().chain(&node.outputs) {
            if let TensorLocation::Slot(slot) = plan.place(*tensor)
                && plan.slots[slot.index()].kind == SlotKind::Logits
            {
                let node = label(index, node);
                return Err(format!("{node} has its {tensor} in {slot}, where its logits are"));
            }
        }
        self.holds.retain(|(slot, _), _| plan.slots[slot.index()].kind != SlotKind::Logits);
        Ok(())
    }

    /// Reads the results of a segment that other ranks need.
    fn send(&mut self, segment: &Segment, micro_batch: usize) -> Result<(), String> {
        let graph = &self.plan.graph;
        for index in segment.nodes.clone() {
            let node = &graph.nodes[index];
            for output in &node.outputs {
                if is_activation(graph, *output) && self.needed_elsewhere[output.index()] {
                    let reader = || format!("another rank, after {},", label(index, node));
                    self.read(*output, micro_batch, &reader)?;
                }
            }
        }
        Ok(())
    }

    /// Reads a tensor for the caller, if this rank computed it.
    fn read_own(&self, purpose: &str, tensor: TensorId, micro_batch: usize) -> Result<(), String> {
        let root = self.plan.graph.root(tensor);
        if self.own[root.index()] && self.written.contains(&(root, micro_batch)) {
            self.read(tensor, micro_batch, &|| format!("the caller, for {purpose},"))?;
        }
        Ok(())
    }

    /// Checks that a tensor's memory holds the tensor of this micro-batch.
    fn read(
        &self,
        tensor: TensorId,
        micro_batch: usize,
        reader: &dyn Fn() -> String,
    ) -> Result<(), String> {
        let root = self.plan.graph.root(tensor);
        if !self.plan.is_placed(root) {
            let reader = reader();
            return Err(format!(
                "{reader} reads {root} of micro-batch {micro_batch}, which has no memory"
            ));
        }
        let Some((slot, copy)) = self.copy(root, micro_batch) else { return Ok(()) };
        let held = self.holds.get(&(slot, copy));
        if held == Some(&(root, micro_batch)) {
            return Ok(());
        }
        let held = match held {
            Some((other, of)) => format!("{other} of micro-batch {of}"),
            None => "nothing".into(),
        };
        let reader = reader();
        Err(format!(
            "{reader} reads {root} of micro-batch {micro_batch}, but {slot}, copy {copy}, holds \
             {held}"
        ))
    }

    /// Slot and copy that hold a tensor of a micro-batch, if it is in a slot.
    fn copy(&self, tensor: TensorId, micro_batch: usize) -> Option<(SlotId, usize)> {
        match self.plan.place(tensor) {
            TensorLocation::Slot(slot) => {
                Some((slot, micro_batch % self.plan.slots[slot.index()].copies))
            }
            _ => None,
        }
    }
}

fn is_activation(graph: &Graph, tensor: TensorId) -> bool {
    let tensor = graph.tensor(tensor);
    tensor.role == Role::Activation && tensor.alias_of.is_none()
}

/// Formats a node for a sentence: its index, pass, block and op.
fn label(index: usize, node: &Node) -> String {
    format!("node {index} ({}{}, {})", node.phase, node.block, node.op)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::part::tests::{chain, order};
    use crate::{PlanOptions, PlanPart};

    const DELAYED: &str = "F0 F1 F2 F3 B3 B2 B1 B0 W3 W2 W1 W0";

    fn whole() -> Plan {
        Plan::new(chain(), PlanOptions::new(4))
    }

    fn runs(plan: &Plan, text: &str, micro_batch: usize) -> Vec<(SegmentId, usize)> {
        order(plan, text).into_iter().map(|segment| (segment, micro_batch)).collect()
    }

    #[test]
    fn delayed_gradients_of_parameters_do_not_fit_the_usual_order() {
        let plan = whole();
        let canonical = "F0 F1 F2 F3 B3 W3 B2 W2 B1 W1 B0 W0";
        replay(&plan, &runs(&plan, canonical, 0)).unwrap();
        let delayed = runs(&plan, DELAYED, 0);
        let error = replay(&plan, &delayed).unwrap_err();
        assert!(error.contains("(W3, ") && error.contains("of micro-batch 0, but slot"), "{error}");

        let part = PlanPart { blocks: &[true; 4], runs: &delayed };
        let placed = Plan::part(chain(), PlanOptions::new(4), &part);
        assert_ne!(placed.places, plan.places);
        replay(&placed, &delayed).unwrap();
    }

    #[test]
    fn a_second_micro_batch_overwrites_the_first_one_without_a_second_copy() {
        let plan = whole();
        let forward = "F0 F1 F2 F3";
        let backward = "B3 W3 B2 W2 B1 W1 B0 W0";
        let texts = [(forward, 0), (forward, 1), (backward, 0), (backward, 1)];
        let program: Vec<_> =
            texts.iter().flat_map(|(text, micro_batch)| runs(&plan, text, *micro_batch)).collect();
        let error = replay(&plan, &program).unwrap_err();
        assert!(error.contains("of micro-batch 0, but slot"), "{error}");
        assert!(error.ends_with("of micro-batch 1"), "{error}");
        let two = Plan::new(chain(), PlanOptions { in_flight: 2, ..PlanOptions::new(4) });
        replay(&two, &program).unwrap();
    }

    #[test]
    fn a_result_in_the_place_of_an_operand_and_a_tensor_without_memory_are_found() {
        let mut plan = whole();
        let program = runs(&plan, "F0", 0);
        let node = plan.graph.nodes.iter().position(|n| n.op.to_string() == "gelu").unwrap();
        let (input, output) = (plan.graph.nodes[node].inputs[0], plan.graph.nodes[node].outputs[0]);
        let place = plan.places[output.index()];
        plan.places[output.index()] = plan.place(input);
        let error = replay(&plan, &program).unwrap_err();
        let expected = format!("node {node} (F0, gelu) writes {output} of micro-batch 0 to slot ");
        assert!(error.starts_with(&expected), "{error}");
        plan.places[output.index()] = place;
        replay(&plan, &program).unwrap();
        plan.places[plan.graph.root(input).index()] = TensorLocation::Unallocated;
        let error = replay(&plan, &program).unwrap_err();
        assert!(error.ends_with("of micro-batch 0, which has no memory"), "{error}");
    }

    /// The skip connection is written in the middle of the segment of block 0.
    #[test]
    fn what_is_sent_must_outlive_its_segment() {
        let runs = [(SegmentId(0), 0)];
        let part = PlanPart { blocks: &[true, false, false, false], runs: &runs };
        let mut plan = Plan::part(chain(), PlanOptions::new(4), &part);
        replay(&plan, &runs).unwrap();
        let skip = plan.graph.nodes[1].outputs[0];
        let after = &mut plan.graph.nodes[2];
        let last = after.outputs[0];
        // It has no reader in the segment any more, and its slot holds the next result.
        after.inputs.retain(|tensor| *tensor != skip);
        plan.places[last.index()] = plan.places[skip.index()];
        let error = replay(&plan, &runs).unwrap_err();
        assert!(error.starts_with("another rank, after node 1 (F0, gelu), reads "), "{error}");
    }

    #[test]
    fn a_segment_of_another_rank_is_refused() {
        let part = PlanPart { blocks: &[true, false, false, false], runs: &[] };
        let plan = Plan::part(chain(), PlanOptions::new(4), &part);
        let error = replay(&plan, &[(SegmentId(1), 0)]).unwrap_err();
        assert_eq!(error, "s1 runs on a rank that does not hold its block");
    }
}
