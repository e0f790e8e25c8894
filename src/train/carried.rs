//! States that slots of the batch carry from step to step. They are kept in host memory between
//! steps, so that they do not depend on the device that computes a slot, a repeated step begins
//! with the same states, and checkpoints contain them.

use crate::checkpoint::NamedTensor;
use crate::runtime::step::{Inputs, NextState, NextStates};
use potluck_core::{DType, HostTensor, Shape, TensorId};
use potluck_graph::{Graph, Plan};
use potluck_parallel::MicroBatch;

/// Note to the user if the states of a checkpoint do not fit.
pub(crate) const STATES_OF_ZEROS: &str = "what the model carries from step to step begins with \
                                          zeros: the checkpoint has none of these data and this \
                                          batch size";

/// Largest number of copies of the states that a run holds: the session's, those sent with a step
/// and returned in its reports, and those being saved.
const COPIES: usize = 4;

/// Upper bound of the bytes of host memory that the states of a batch take.
pub fn bytes(graph: &Graph, batch: usize) -> usize {
    let per_slot: usize = graph.carried_sizes().map(|(_, values)| values).sum();
    COPIES.saturating_mul(per_slot).saturating_mul(batch).saturating_mul(DType::F32.bytes())
}

#[derive(Clone, Debug, Default)]
pub(crate) struct CarriedStates {
    states: Vec<SlotStates>,
}

#[derive(Clone, Debug)]
struct SlotStates {
    name: String,
    input: TensorId,
    /// Shape, with the slots of the batch as its first dimension.
    shape: Shape,
    values: Vec<f32>,
}

impl SlotStates {
    fn per_slot(&self) -> usize {
        self.shape.per_row()
    }

    fn slots(&self) -> usize {
        self.values.len() / self.per_slot().max(1)
    }

    fn range(&self, part: &MicroBatch) -> std::ops::Range<usize> {
        let first = part.first as usize;
        let end = first + part.rows as usize;
        first * self.per_slot()..end * self.per_slot()
    }

    /// Dimensions, with the batch first.
    fn dims(&self) -> Vec<usize> {
        self.shape.resolve(self.slots())
    }

    /// Stores the states after a micro-batch. A slot whose new states are not all finite restarts
    /// with zeros.
    fn take(&mut self, part: &MicroBatch, next: &[f32]) -> Result<(), String> {
        let range = self.range(part);
        let per_slot = self.per_slot().max(1);
        let wanted = range.len();
        let of_part = match self.values.get_mut(range) {
            Some(of_part) if next.len() == wanted => of_part,
            _ => return Err(format!("{} values for {wanted} of {}", next.len(), self.name)),
        };
        for (slot, next) in of_part.chunks_mut(per_slot).zip(next.chunks(per_slot)) {
            if next.iter().all(|value| value.is_finite()) {
                slot.copy_from_slice(next);
            } else {
                slot.fill(0.0);
            }
        }
        Ok(())
    }
}

impl CarriedStates {
    /// Returns zeros as states for a batch of this many samples.
    pub fn zeros(graph: &Graph, batch: usize) -> Self {
        let mut states = Vec::new();
        for carried in &graph.carried {
            let found = graph.inputs.iter().find(|(_, id)| *id == carried.input);
            let Some((name, input)) = found else { continue };
            let shape = graph.tensor(*input).shape.clone();
            let values = vec![0.0; shape.elements(batch)];
            states.push(SlotStates { name: name.clone(), input: *input, shape, values });
        }
        Self { states }
    }

    /// Returns true if the model carries nothing.
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// Sets all states to zeros.
    pub fn reset(&mut self) {
        for state in &mut self.states {
            state.values.fill(0.0);
        }
    }

    /// Returns the states that a device with this plan reads for a micro-batch.
    pub fn of(&self, part: &MicroBatch, plan: &Plan) -> Inputs {
        let mut inputs = Inputs::new();
        for state in &self.states {
            if plan.is_placed(state.input) {
                let values = state.values[state.range(part)].to_vec();
                inputs.push((state.input, HostTensor::Float(values)));
            }
        }
        inputs
    }

    /// Stores the states after all micro-batches of a step. A slot whose new states are not all
    /// finite restarts with zeros, since all further steps would be non-finite too.
    ///
    /// # Errors
    /// Returns a sentence if the states do not cover all slots of the model, as from a defective
    /// device.
    pub fn take<'a>(
        &mut self,
        parts: impl Iterator<Item = (&'a MicroBatch, &'a NextStates)>,
    ) -> Result<(), String> {
        let mut taken = vec![0; self.states.len()];
        for (part, next) in parts {
            for NextState { input, values } in next {
                let found = self.states.iter().position(|state| state.input == *input);
                let index = found.ok_or_else(|| format!("{input} is carried by no slot"))?;
                self.states[index].take(part, values)?;
                taken[index] += part.rows as usize;
            }
        }
        for (state, taken) in self.states.iter().zip(taken) {
            let slots = state.slots();
            if slots != taken {
                return Err(format!("{} of {taken} samples in place of {slots}", state.name));
            }
        }
        Ok(())
    }

    /// Returns the states by name, as in checkpoints.
    pub fn named(&self) -> Vec<NamedTensor> {
        let mut named = Vec::with_capacity(self.states.len());
        for state in &self.states {
            named.push(NamedTensor {
                name: state.name.clone(),
                shape: state.dims(),
                values: state.values.clone(),
            });
        }
        named
    }

    /// Restores the states of a checkpoint. Sets all to zeros and returns false if the checkpoint
    /// has another batch size or its model carried other states.
    #[must_use]
    pub fn restore(&mut self, saved: &[NamedTensor]) -> bool {
        let mut all = Vec::with_capacity(self.states.len());
        for state in &self.states {
            let Ok(found) = NamedTensor::find(saved, &state.name, &state.dims()) else {
                self.reset();
                return false;
            };
            all.push(found.values.clone());
        }
        for (state, values) in self.states.iter_mut().zip(all) {
            state.values = values;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_graph::model::{RnnConfig, rnn};
    use potluck_graph::{Builder, Cell, PlanOptions};

    fn plan() -> Plan {
        let (vocabulary, context, layers, width) = (5, 4, 2, 3);
        let cell = Cell::Gru;
        let config =
            RnnConfig { vocabulary, context, layers, width, cell, dropout: 0.0, stateful: true };
        Plan::new(rnn(&config).unwrap(), PlanOptions::new(2))
    }

    #[test]
    fn slots_keep_their_states() {
        let plan = plan();
        let mut states = CarriedStates::zeros(&plan.graph, 4);
        let (input, part) = (plan.graph.carried[1].input, MicroBatch { first: 1, rows: 2 });
        let values: Vec<f32> = (0..6).map(|value| value as f32).collect();
        states.states[1].take(&part, &values).unwrap();
        let of = |states: &CarriedStates, first| states.of(&MicroBatch { first, rows: 2 }, &plan);
        assert_eq!(of(&states, 1)[1], (input, HostTensor::Float(values)));
        let shifted = vec![3.0, 4.0, 5.0, 0.0, 0.0, 0.0];
        assert_eq!(of(&states, 2)[1], (input, HostTensor::Float(shifted)));
        assert_eq!(of(&states, 1)[0].1, HostTensor::Float(vec![0.0; 6]));
        let named = states.named();
        assert_eq!((&*named[1].name, &named[1].shape[..]), ("h_l1", &[4, 3][..]));
        let mut restored = CarriedStates::zeros(&plan.graph, 4);
        assert!(restored.restore(&named));
        assert_eq!(of(&restored, 2), of(&states, 2));
        states.reset();
        assert_eq!(of(&states, 1)[1].1, HostTensor::Float(vec![0.0; 6]));
        // Another batch size.
        let mut larger = CarriedStates::zeros(&plan.graph, 5);
        assert!(!larger.restore(&named));
        assert!(CarriedStates::zeros(&Builder::new().finish(), 4).is_empty());
    }

    #[test]
    fn a_slot_whose_state_is_not_finite_begins_anew() {
        let mut states = CarriedStates::zeros(&plan().graph, 4);
        let part = MicroBatch { first: 1, rows: 2 };
        states.states[0].take(&part, &[1.0; 6]).unwrap();
        let bad = [1.0, f32::INFINITY, 2.0, 3.0, 4.0, 5.0];
        states.states[0].take(&part, &bad).unwrap();
        assert_eq!(states.states[0].values[3..9], [0.0, 0.0, 0.0, 3.0, 4.0, 5.0]);
    }

    #[test]
    fn states_of_several_rows_per_sample_have_their_shape() {
        let mut b = Builder::new();
        let (x, h) = (b.input("x", &[2, 3]), b.input("h", &[2, 3]));
        let next = b.add(h, x).unwrap();
        b.carry(h, next).unwrap();
        let plan = Plan::new(b.finish(), PlanOptions::new(4));
        let mut states = CarriedStates::zeros(&plan.graph, 4);
        let part = MicroBatch { first: 3, rows: 1 };
        let of = |values| vec![NextState { input: h, values }];
        let next = of((0..6).map(|value| value as f32).collect());
        let all = [MicroBatch { first: 0, rows: 3 }, part];
        let none = of(vec![0.0; 18]);
        states.take(all.iter().zip([&none, &next])).unwrap();
        assert_eq!(states.of(&part, &plan)[0].1, HostTensor::Float(next[0].values.clone()));
        assert_eq!(states.named()[0].shape, [8, 3]);
        assert_eq!(bytes(&plan.graph, 4), COPIES * 4 * 6 * 4);
    }

    #[test]
    fn states_that_do_not_fit_are_refused() {
        let plan = plan();
        let inputs: Vec<_> = plan.graph.carried.iter().map(|carried| carried.input).collect();
        let take = |input, first, count| {
            let mut states = CarriedStates::zeros(&plan.graph, 4);
            let all = [MicroBatch { first: 0, rows: 2 }, MicroBatch { first, rows: 2 }];
            let of = |input, count| NextState { input, values: vec![1.0; count] };
            let both = vec![of(inputs[0], 6), of(inputs[1], 6)];
            states.take(all.iter().zip([&both, &vec![of(inputs[0], 6), of(input, count)]]))
        };
        assert_eq!(take(inputs[1], 2, 6), Ok(()));
        assert_eq!(take(inputs[1], 2, 5), Err("5 values for 6 of h_l1".into()));
        assert_eq!(take(inputs[1], 3, 6), Err("6 values for 6 of h_l0".into()));
        // One state is returned twice, another not at all.
        assert_eq!(take(inputs[0], 2, 6), Err("h_l0 of 6 samples in place of 4".into()));
        assert!(take(plan.graph.input("tokens").unwrap(), 2, 6).is_err());
    }
}
