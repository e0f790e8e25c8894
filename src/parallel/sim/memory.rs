//! Tensors in the memory of a virtual device: the tensor, the step and the micro-batch that each
//! copy of each slot holds. No values.

use std::collections::HashMap;
use std::sync::Arc;

use potluck_core::{SegmentId, SlotId, TensorId};
use potluck_graph::{Node, Plan, Role, TensorLocation};

/// Tensor of one micro-batch of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TensorOf {
    pub step: u64,
    pub micro_batch: usize,
    /// Samples of the micro-batch.
    pub rows: usize,
    pub tensor: TensorId,
}

/// Contents of the slots of a device.
#[derive(Debug)]
pub(crate) struct TensorMemory {
    plan: Arc<Plan>,
    /// Number of copies of each slot that are left out; one copy is always kept.
    missing: usize,
    /// By slot and copy: the tensor that was written last, and the number of its written elements.
    holds: HashMap<(SlotId, usize), (TensorOf, usize)>,
}

impl TensorMemory {
    /// Creates an empty memory with the slots of a plan, each with `missing` copies less.
    pub fn new(plan: Arc<Plan>, missing: usize) -> Self {
        Self { plan, missing, holds: HashMap::new() }
    }

    /// Writes the inputs of a micro-batch; the tensor of `batch` does not matter.
    pub fn load(&mut self, batch: TensorOf) {
        let plan = self.plan.clone();
        for (_, input) in &plan.graph.inputs {
            self.write(TensorOf { tensor: *input, ..batch });
        }
    }

    /// Runs a segment: reads and writes the tensors of its nodes. The tensor of `batch` does not
    /// matter.
    ///
    /// # Errors
    /// Returns a sentence about the first tensor that is not in its slot when it is read.
    pub fn run(&mut self, segment: SegmentId, batch: TensorOf) -> Result<(), String> {
        let plan = self.plan.clone();
        for index in plan.segments[segment.index()].nodes.clone() {
            let Node { inputs, outputs, .. } = &plan.graph.nodes[index];
            for input in inputs {
                self.require(TensorOf { tensor: plan.graph.root(*input), ..batch })
                    .map_err(|why| format!("{segment}: {why}"))?;
            }
            for output in outputs {
                if plan.graph.tensor(*output).alias_of.is_none() {
                    self.write(TensorOf { tensor: *output, ..batch });
                }
            }
        }
        Ok(())
    }

    /// Writes a whole tensor.
    fn write(&mut self, tensor: TensorOf) {
        if let Some(copy) = self.copy(tensor) {
            let elements = self.elements(tensor);
            self.holds.insert(copy, (tensor, elements));
        }
    }

    /// Writes some elements of a tensor; pieces do not overlap.
    pub fn write_piece(&mut self, tensor: TensorOf, elements: usize) {
        let Some(copy) = self.copy(tensor) else { return };
        let (held, written) = self.holds.entry(copy).or_insert((tensor, 0));
        if *held != tensor {
            *held = tensor;
            *written = 0;
        }
        *written += elements;
    }

    /// Checks that a tensor in a slot has been written whole.
    ///
    /// # Errors
    /// Returns a sentence about the contents of the slot otherwise.
    pub fn require(&self, tensor: TensorOf) -> Result<(), String> {
        let Some(key) = self.copy(tensor) else { return Ok(()) };
        let TensorOf { step, micro_batch, tensor: id, .. } = tensor;
        let what = format!("{id} of micro-batch {micro_batch} in step {step} is read, but");
        let (slot, copy) = key;
        let elements = self.elements(tensor);
        match self.holds.get(&key) {
            Some((held, written)) if *held == tensor && *written == elements => Ok(()),
            Some((held, written)) if *held == tensor => {
                Err(format!("{what} {written} of {elements} elements are there"))
            }
            Some((TensorOf { step, micro_batch, tensor: id, .. }, _)) => Err(format!(
                "{what} {slot}, copy {copy}, holds {id} of micro-batch {micro_batch} in step {step}"
            )),
            None => Err(format!("{what} {slot}, copy {copy}, holds nothing")),
        }
    }

    fn elements(&self, tensor: TensorOf) -> usize {
        self.plan.graph.tensor(tensor.tensor).shape.elements(tensor.rows)
    }

    /// Slot of a tensor and the copy that its micro-batch uses, if it is in a slot.
    fn copy(&self, tensor: TensorOf) -> Option<(SlotId, usize)> {
        let is_kept = self.plan.graph.tensor(tensor.tensor).role != Role::Loss;
        match self.plan.place(tensor.tensor) {
            TensorLocation::Slot(slot) if is_kept => {
                let copies = self.plan.slots[slot.index()].copies.saturating_sub(self.missing);
                Some((slot, tensor.micro_batch % copies.max(1)))
            }
            _ => None,
        }
    }
}
