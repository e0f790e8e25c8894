//! States that slots of the batch carry from step to step, in host memory between the steps: so
//! they do not depend on the devices that compute a slot, a step that is repeated begins with the
//! same ones, and a checkpoint has them.

use crate::base::{HostTensor, TensorId};
use crate::checkpoint::NamedTensor;
use crate::graph::{Graph, Plan};
use crate::parallel::MicroBatch;
use crate::runtime::remote::values::RawValues;
use crate::runtime::step::{Inputs, NextStates};

/// Note to the user if the states of a checkpoint do not fit.
pub const STATES_OF_ZEROS: &str = "what the model carries from step to step begins with zeros: \
                                   the checkpoint has none of this batch size";

/// States of all slots of the batch.
#[derive(Clone, Debug, Default)]
pub struct CarriedStates {
    states: Vec<SlotStates>,
}

/// Values of one carried input.
#[derive(Clone, Debug)]
struct SlotStates {
    name: String,
    input: TensorId,
    /// Dimensions of one slot.
    dims: Vec<usize>,
    /// `(batch, dims)`.
    values: Vec<f32>,
}

impl SlotStates {
    /// Returns the values of a slot.
    fn per_slot(&self) -> usize {
        self.dims.iter().product()
    }

    fn range(&self, part: &MicroBatch) -> std::ops::Range<usize> {
        let (first, rows) = (part.first as usize, part.rows as usize);
        first * self.per_slot()..(first + rows) * self.per_slot()
    }

    /// Returns the shape with the batch.
    fn shape(&self) -> Vec<usize> {
        let batch = self.values.len() / self.per_slot().max(1);
        [batch].into_iter().chain(self.dims.iter().copied()).collect()
    }
}

impl CarriedStates {
    /// Returns states of zeros for a batch of this many samples.
    pub fn zeros(graph: &Graph, batch: usize) -> Self {
        let states = graph.carried.iter().filter_map(|carried| {
            let (name, input) = graph.inputs.iter().find(|(_, id)| *id == carried.input)?;
            let shape = &graph.tensor(*input).shape;
            let (name, dims) = (name.clone(), shape.dims()[1..].to_vec());
            Some(SlotStates { name, input: *input, dims, values: vec![0.0; shape.elements(batch)] })
        });
        Self { states: states.collect() }
    }

    /// Returns true if the model carries nothing.
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// Sets all states to zeros.
    pub fn reset(&mut self) {
        self.states.iter_mut().for_each(|state| state.values.fill(0.0));
    }

    /// Returns the states of a micro-batch that a device with this plan reads.
    pub fn of(&self, part: &MicroBatch, plan: &Plan) -> Inputs {
        let here = self.states.iter().filter(|state| plan.is_placed(state.input));
        here.map(|state| (state.input, HostTensor::Float(state.values[state.range(part)].to_vec())))
            .collect()
    }

    /// Takes over the states behind a micro-batch.
    ///
    /// # Errors
    /// Returns a sentence if they are not those of the model, as a defective device may report.
    pub fn take(&mut self, part: &MicroBatch, next: &NextStates) -> Result<(), String> {
        for (input, RawValues(values)) in next {
            let state = self.states.iter_mut().find(|state| state.input == *input);
            let state = state.ok_or_else(|| format!("{input} is carried by no slot"))?;
            let range = state.range(part);
            let wanted = range.len();
            match state.values.get_mut(range) {
                Some(of_part) if wanted == values.len() => of_part.copy_from_slice(values),
                _ => {
                    let (name, got) = (&state.name, values.len());
                    return Err(format!("{got} values for {wanted} of {name}"));
                }
            }
        }
        Ok(())
    }

    /// Returns the states by name, as checkpoints have them.
    pub fn named(&self) -> Vec<NamedTensor> {
        let named = |state: &SlotStates| NamedTensor {
            name: state.name.clone(),
            shape: state.shape(),
            values: state.values.clone(),
        };
        self.states.iter().map(named).collect()
    }

    /// Takes over the states of a checkpoint. Returns false, with zeros for all, if they are those
    /// of another batch size or of a model that carried others.
    #[must_use]
    pub fn restore(&mut self, saved: &[NamedTensor]) -> bool {
        let find = |state: &SlotStates| {
            NamedTensor::find(saved, &state.name, &state.shape()).map(|found| found.values.clone())
        };
        match self.states.iter().map(find).collect::<Result<Vec<_>, _>>() {
            Ok(all) => {
                self.states.iter_mut().zip(all).for_each(|(state, values)| state.values = values);
                true
            }
            Err(_) => {
                self.reset();
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Builder, Cell, PlanOptions};
    use crate::model::{RnnConfig, rnn};

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
        states.take(&part, &vec![(input, RawValues(values.clone()))]).unwrap();
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
    fn states_that_do_not_fit_are_refused() {
        let plan = plan();
        let mut states = CarriedStates::zeros(&plan.graph, 4);
        let input = plan.graph.carried[0].input;
        let mut take = |input, first, count| {
            let next = vec![(input, RawValues(vec![1.0; count]))];
            states.take(&MicroBatch { first, rows: 2 }, &next)
        };
        assert_eq!(take(input, 0, 6), Ok(()));
        assert_eq!(take(input, 0, 5), Err("5 values for 6 of h_l0".into()));
        assert_eq!(take(input, 3, 6), Err("6 values for 6 of h_l0".into()));
        assert!(take(plan.graph.input("tokens").unwrap(), 0, 6).is_err());
    }
}
