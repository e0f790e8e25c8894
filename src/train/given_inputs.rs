//! Values of a graph's inputs given by a caller of the library, for some rows.

use super::error::TrainError;
use crate::runtime::step::Inputs;
use potluck_core::{DType, HostTensor, TensorId};
use potluck_graph::Graph;
use potluck_parallel::MicroBatch;

/// Values of inputs by name, for all rows; the graph knows each of the inputs.
pub(crate) struct GivenInputs<'a> {
    pub graph: &'a Graph,
    pub rows: usize,
    values: &'a [(&'a str, HostTensor)],
}

impl<'a> GivenInputs<'a> {
    /// Checks that each value belongs to an input, that no input is given twice, and that the graph
    /// knows each id and each target.
    ///
    /// # Errors
    /// Returns `TrainError::InvalidRequest` for the first violation.
    pub fn new(
        graph: &'a Graph,
        values: &'a [(&'a str, HostTensor)],
        rows: usize,
    ) -> Result<Self, TrainError> {
        require_known(graph, values)?;
        Self::from_sample(graph, values, rows, 0)
    }

    /// Like [`Self::new`], for the rows of a data set from sample `first` on, whose names are names
    /// of inputs.
    ///
    /// # Errors
    /// Returns `TrainError::InvalidRequest` for the first unknown id or target.
    pub fn from_sample(
        graph: &'a Graph,
        values: &'a [(&'a str, HostTensor)],
        rows: usize,
        first: u64,
    ) -> Result<Self, TrainError> {
        for range in graph.id_ranges() {
            for (name, values) in values {
                if let HostTensor::Int(values) = values
                    && *name == range.name
                {
                    let checked = range.check(values, |row| first + row as u64);
                    checked.map_err(|error| TrainError::InvalidRequest(error.to_string()))?;
                }
            }
        }
        Ok(Self { graph, rows, values })
    }

    /// Returns true if an input has values.
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    fn find(&self, name: &str) -> Option<&HostTensor> {
        self.values.iter().find(|(known, _)| *known == name).map(|(_, values)| values)
    }

    /// Returns all inputs for the rows of a micro-batch; values shared by all samples are in each.
    ///
    /// # Errors
    /// Returns `TrainError::InvalidRequest` if an input is missing, or has another type or length.
    pub fn cut(&self, part: &MicroBatch) -> Result<Inputs, TrainError> {
        let mut inputs = Inputs::new();
        for (name, id) in &self.graph.inputs {
            inputs.push((*id, self.cut_one(name, *id, part)?));
        }
        Ok(inputs)
    }

    /// Returns all inputs for the rows of a micro-batch, with zeros for inputs that are not given.
    ///
    /// # Errors
    /// Returns `TrainError::InvalidRequest` if an input has another type or length.
    pub fn cut_or_zero(&self, part: &MicroBatch) -> Result<Inputs, TrainError> {
        let mut inputs = Inputs::new();
        for (name, id) in &self.graph.inputs {
            let is_given = name == "samples" || self.has(name);
            let values =
                if is_given { self.cut_one(name, *id, part)? } else { self.zeros(*id, part) };
            inputs.push((*id, values));
        }
        Ok(inputs)
    }

    fn zeros(&self, id: TensorId, part: &MicroBatch) -> HostTensor {
        let tensor = self.graph.tensor(id);
        HostTensor::zeros(tensor.dtype, tensor.shape.elements(part.rows as usize))
    }

    fn cut_one(
        &self,
        name: &str,
        id: TensorId,
        part: &MicroBatch,
    ) -> Result<HostTensor, TrainError> {
        let slots = part.first..part.first + part.rows;
        if name == "samples" {
            return Ok(HostTensor::Int(slots.collect()));
        }
        let given = self.find(name);
        if self.graph.is_carried(id) || self.graph.is_selector(id) && given.is_none() {
            // A step overwrites carried inputs, and does not run the part that a selector is for.
            return Ok(self.zeros(id, part));
        }
        let Some(given) = given else {
            return Err(TrainError::InvalidRequest(format!("input {name} is missing")));
        };
        let tensor = self.graph.tensor(id);
        let length = tensor.shape.elements(self.rows);
        let mut range = 0..length;
        if tensor.shape.is_batched() {
            let per_row = tensor.shape.per_row();
            range = slots.start as usize * per_row..slots.end as usize * per_row;
        }
        match (given, tensor.dtype) {
            (HostTensor::Float(values), DType::F32) if values.len() == length => {
                Ok(HostTensor::Float(values[range].to_vec()))
            }
            (HostTensor::Int(values), DType::U32) if values.len() == length => {
                Ok(HostTensor::Int(values[range].to_vec()))
            }
            (given, dtype) => {
                let (found, found_dtype) = match given {
                    HostTensor::Float(values) => (values.len(), DType::F32),
                    HostTensor::Int(values) => (values.len(), DType::U32),
                };
                Err(TrainError::InvalidRequest(format!(
                    "input {name} must be {dtype:?} of {} for {} rows, which are {length} values; \
                     it has {found} of {found_dtype:?}",
                    tensor.shape, self.rows
                )))
            }
        }
    }
}

/// Checks that each value belongs to an input, and that no input is given twice.
fn require_known(graph: &Graph, values: &[(&str, HostTensor)]) -> Result<(), TrainError> {
    let mut inputs: Vec<&str> = Vec::new();
    for (input, id) in &graph.inputs {
        if input != "samples" && !graph.is_carried(*id) {
            inputs.push(input);
        }
    }
    for (at, (name, _)) in values.iter().enumerate() {
        if *name == "samples" {
            let why = "the input 'samples' is numbered by the trainer; leave it out";
            return Err(TrainError::InvalidRequest(why.into()));
        }
        if !inputs.contains(name) && graph.input(name).is_some() {
            return Err(TrainError::InvalidRequest(format!(
                "the input '{name}' is carried from step to step by the trainer; leave it out"
            )));
        }
        if !inputs.contains(name) {
            let known = inputs.join(", ");
            let why = format!("the graph has no input '{name}'; its inputs are {known}");
            return Err(TrainError::InvalidRequest(why));
        }
        if values[..at].iter().any(|(earlier, _)| earlier == name) {
            let why = format!("input {name} is given twice");
            return Err(TrainError::InvalidRequest(why));
        }
    }
    Ok(())
}
