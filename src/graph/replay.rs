//! Replay of a program on the slots of a plan, which shows that no tensor is overwritten before
//! it was read for the last time.

use std::collections::{BTreeMap, BTreeSet};

use super::{Graph, Node, PassKind, Plan, Role, Segment, SlotKind, TensorLocation};
use potluck_core::{SegmentId, SlotId, TensorId};

/// Replays the segments that a rank runs, each with its micro-batch, on the slots of the rank's
/// plan: tensor by tensor and copy by copy. Inputs are written before the first segment of a
/// micro-batch, what other ranks compute before the first segment that reads it, and what other
/// ranks read is read after the segment that computes it, as in a rank's program.
///
/// # Errors
/// Returns a sentence that names node, tensor and micro-batch if a node, another rank or the
/// caller would read something else than what was written, if a node would write into the memory
/// of an input of its own, or if something has no memory.
pub fn replay(plan: &Plan, runs: &[(SegmentId, usize)]) -> Result<(), String> {
    let mut memory = Replay::new(plan, runs);
    runs.iter().enumerate().try_for_each(|(index, run)| memory.run(index, *run))
}

/// Contents of the slots in the course of a replay.
struct Replay<'a> {
    plan: &'a Plan,
    /// By slot and copy: the tensor and the micro-batch that it holds.
    holds: BTreeMap<(SlotId, usize), (TensorId, usize)>,
    /// Writes so far, by tensor and micro-batch.
    written: BTreeSet<(TensorId, usize)>,
    /// By tensor: true if a node of this rank computes it.
    own: Vec<bool>,
    /// By tensor: true if a node of another rank reads it.
    needed_elsewhere: Vec<bool>,
    /// Index of the last run of the forward pass of each micro-batch, after which the caller reads
    /// the outputs.
    forward_end: BTreeMap<usize, usize>,
    /// Index of the last run of each micro-batch, after which the caller reads what is carried.
    end: BTreeMap<usize, usize>,
}

impl<'a> Replay<'a> {
    fn new(plan: &'a Plan, runs: &[(SegmentId, usize)]) -> Self {
        let graph = &plan.graph;
        let mut own = vec![false; graph.tensors.len()];
        let mut needed_elsewhere = own.clone();
        for node in &graph.nodes {
            if plan.holds_block(node.block) {
                node.outputs.iter().for_each(|t| own[t.index()] = true);
            } else {
                node.inputs.iter().for_each(|t| needed_elsewhere[graph.root(*t).index()] = true);
            }
        }
        let is_forward =
            |segment: &SegmentId| plan.segments[segment.index()].phase == PassKind::Forward;
        let forward = runs.iter().enumerate().filter(|(_, (segment, _))| is_forward(segment));
        let forward_end = forward.map(|(index, (_, micro_batch))| (*micro_batch, index)).collect();
        let end = runs.iter().enumerate().map(|(index, (_, micro_batch))| (*micro_batch, index));
        let end = end.collect();
        let (holds, written) = (BTreeMap::new(), BTreeSet::new());
        Self { plan, holds, written, own, needed_elsewhere, forward_end, end }
    }

    fn run(&mut self, index: usize, run: (SegmentId, usize)) -> Result<(), String> {
        let (id, micro_batch) = run;
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
            let outputs = plan.graph.outputs.iter().map(|(name, output)| (name.as_str(), *output));
            self.read_own(outputs, micro_batch)?;
        }
        if self.end.get(&micro_batch) == Some(&index) {
            let carried =
                plan.graph.carried.iter().map(|carried| ("the next step", carried.output));
            self.read_own(carried, micro_batch)?;
        }
        Ok(())
    }

    /// Writes what a transfer writes, once per micro-batch.
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
        let real = |tensor: &&TensorId| graph.tensor(**tensor).alias_of.is_none();
        let outputs: Vec<TensorId> = node.outputs.iter().filter(real).copied().collect();
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
                let (node, (slot, copy)) = (label(index, node), copy);
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

    /// Overwrites the slot of logits, in which a node that computes them has no tensor.
    fn overwrite_logits(&mut self, index: usize, node: &Node) -> Result<(), String> {
        let plan = self.plan;
        let is_of_logits = |slot: SlotId| plan.slots[slot.index()].kind == SlotKind::Logits;
        for tensor in node.inputs.iter().chain(&node.outputs) {
            if let TensorLocation::Slot(slot) = plan.place(*tensor)
                && is_of_logits(slot)
            {
                let node = label(index, node);
                return Err(format!("{node} has its {tensor} in {slot}, where its logits are"));
            }
        }
        self.holds.retain(|(slot, _), _| !is_of_logits(*slot));
        Ok(())
    }

    /// Reads what other ranks need of a segment's results.
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

    /// Reads those of some tensors, with their uses, that this rank computed.
    fn read_own<'t>(
        &self,
        tensors: impl Iterator<Item = (&'t str, TensorId)>,
        micro_batch: usize,
    ) -> Result<(), String> {
        for (name, output) in tensors {
            let root = self.plan.graph.root(output);
            if self.own[root.index()] && self.written.contains(&(root, micro_batch)) {
                self.read(output, micro_batch, &|| format!("the caller, for {name},"))?;
            }
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
        let held = held.map_or("nothing".into(), |(t, m)| format!("{t} of micro-batch {m}"));
        let reader = reader();
        Err(format!(
            "{reader} reads {root} of micro-batch {micro_batch}, but {slot}, copy {copy}, holds \
             {held}"
        ))
    }

    /// Returns the slot and the copy that hold a tensor of a micro-batch, if it is in a slot.
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
