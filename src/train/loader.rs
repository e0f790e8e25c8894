//! Loader: prefetches the inputs of the coming steps in a thread while the devices compute.

use std::sync::{Arc, mpsc};
use std::thread;

use crate::error::TrainError;
use crate::runtime::step::Inputs;
use potluck_core::{DType, HostTensor, Rank, TensorId};
use potluck_data::{Augmentation, DataError, Dataset, DatasetInput, NamedInputs, Sampler, Split};
use potluck_graph::{Graph, IdRange, Plan};
use potluck_kernels::device::panics::{PanicText, catch_quietly};
use potluck_parallel::pipeline::used_inputs;
use potluck_parallel::{MicroBatch, Program};

/// Prefetch depth: steps that may be ready before the device needs them.
const AHEAD: usize = 2;

/// Returns the bytes of inputs that a loader and the current step hold simultaneously, with samples
/// of `row_bytes`: the prefetched steps, the step being assembled, and the running one.
pub fn bytes(batch: usize, row_bytes: usize) -> usize {
    (AHEAD + 2).saturating_mul(batch).saturating_mul(row_bytes)
}

/// Creates the sampler of a model's data, from a seed and the batch size. It draws streams if the
/// model carries its state from step to step.
///
/// # Errors
/// Returns `TrainError` if the model carries its state and the data are not a sequence, or too
/// short for a stream per slot of the batch.
pub(crate) fn sampler_of(
    graph: &Graph,
    data: &dyn Dataset,
    seed: u64,
    batch: u32,
) -> Result<Sampler, TrainError> {
    let sampler = Sampler::new(seed, data.len(Split::Train), batch);
    if graph.carried.is_empty() {
        return Ok(sampler);
    }
    let Some(distance) = data.next_distance() else {
        return Err(TrainError::InvalidRequest(
            "the model carries its state from step to step, and the data are no sequence".into(),
        ));
    };
    sampler.of_streams(distance).ok_or(TrainError::ShortStreams { batch, distance })
}

/// Source of the inputs of steps.
#[derive(Clone)]
pub struct BatchSource {
    pub data: Arc<dyn Dataset>,
    pub sampler: Sampler,
    /// Inputs that the data set fills, in its order, with their tensors.
    inputs: Vec<(DatasetInput, TensorId)>,
    /// Ranges of ids and targets among the inputs.
    ranges: Vec<IdRange>,
    /// Input tensor of sample ids, if the model uses random numbers.
    samples: Option<TensorId>,
    /// Inputs carried from step to step, with their values per sample.
    carried: Vec<(TensorId, usize)>,
    /// Random changes of training samples, with their seed.
    pub augmentation: Option<(Augmentation, u64)>,
}

impl BatchSource {
    /// Creates the source of the inputs of a graph.
    ///
    /// # Errors
    /// Returns `TrainError::InvalidRequest` if the graph lacks an input that the data set fills, or
    /// if its type or size differs.
    pub fn new(
        graph: &Graph,
        data: Arc<dyn Dataset>,
        sampler: Sampler,
    ) -> Result<Self, TrainError> {
        let mut inputs = Vec::new();
        for input in data.inputs() {
            inputs.push((input, tensor_of(graph, input)?));
        }
        Ok(Self {
            data,
            sampler,
            inputs,
            ranges: graph.id_ranges(),
            samples: graph.input("samples"),
            carried: graph.carried_sizes().collect(),
            augmentation: None,
        })
    }

    /// Checks that the data have values for all inputs of a graph.
    ///
    /// # Errors
    /// Returns `TrainError::InvalidRequest` for the first input without values.
    pub(crate) fn require_all_inputs(&self, graph: &Graph) -> Result<(), TrainError> {
        require_no_shared(graph)?;
        for (name, id) in graph.inputs_of_samples() {
            if name != "samples" && self.inputs.iter().all(|(_, filled)| filled != id) {
                return Err(TrainError::InvalidRequest(format!(
                    "the graph has the input '{name}', for which the data have no values"
                )));
            }
        }
        Ok(())
    }

    /// Returns true if the model carries states from step to step.
    pub fn carries(&self) -> bool {
        !self.carried.is_empty()
    }

    /// Returns the inputs of one micro-batch of a step, except for states carried from the previous
    /// step.
    ///
    /// # Errors
    /// Returns `DataError` if a sample cannot be read.
    pub fn micro_batch(&self, step: u64, micro_batch: &MicroBatch) -> Result<Inputs, DataError> {
        let slots = micro_batch.first..micro_batch.first + micro_batch.rows;
        let indices: Vec<u64> =
            slots.clone().map(|slot| self.sampler.sample(step, slot).index).collect();
        let mut inputs = self.data_rows(Split::Train, &indices)?;
        if let Some((changes, seed)) = &self.augmentation
            && let Some((_, HostTensor::Float(pictures))) = inputs.first_mut()
        {
            let size = pictures.len() / indices.len().max(1);
            for (slot, picture) in slots.clone().zip(pictures.chunks_mut(size.max(1))) {
                changes.apply((*seed, step, slot), picture);
            }
        }
        if let Some(samples) = self.samples {
            inputs.push((samples, HostTensor::Int(slots.collect())));
        }
        Ok(inputs)
    }

    /// Returns the inputs of the first samples of a step, for timing devices. Samples that cannot
    /// be read are replaced by zeros; the step itself reports them.
    pub fn probe(&self, step: u64, rows: u32) -> Inputs {
        let mut inputs = match self.micro_batch(step, &MicroBatch { first: 0, rows }) {
            Ok(inputs) => inputs,
            Err(_) => {
                let mut zeros = Inputs::new();
                for (input, id) in &self.inputs {
                    let elements = input.elements * rows as usize;
                    zeros.push((*id, HostTensor::zeros(input.dtype, elements)));
                }
                if let Some(samples) = self.samples {
                    zeros.push((samples, HostTensor::Int((0..rows).collect())));
                }
                zeros
            }
        };
        inputs.extend(self.states_of_zeros(rows as usize));
        inputs
    }

    /// Returns the inputs of samples of a split, one row each, with states of zeros.
    ///
    /// # Errors
    /// Returns `DataError` if a sample cannot be read, or if the data set's values do not match its
    /// announced inputs.
    pub fn rows(&self, split: Split, indices: &[u64]) -> Result<Inputs, DataError> {
        let mut inputs = self.data_rows(split, indices)?;
        inputs.extend(self.states_of_zeros(indices.len()));
        Ok(inputs)
    }

    fn states_of_zeros(&self, rows: usize) -> impl Iterator<Item = (TensorId, HostTensor)> + '_ {
        self.carried
            .iter()
            .map(move |(id, per_row)| (*id, HostTensor::zeros(DType::F32, per_row * rows)))
    }

    fn data_rows(&self, split: Split, indices: &[u64]) -> Result<Inputs, DataError> {
        let mut rows = rows_of(&*self.data, split, indices)?.into_iter();
        let mut inputs = Inputs::with_capacity(self.inputs.len());
        for (announced, id) in &self.inputs {
            let given = rows.next();
            let elements = announced.elements * indices.len();
            match given {
                Some((name, values)) if is_of(announced, elements, name, &values) => {
                    self.require_ids(announced, &values, indices)?;
                    inputs.push((*id, values));
                }
                given => return Err(unannounced(announced, elements, given)),
            }
        }
        Ok(inputs)
    }

    /// Checks that the model knows the ids and targets of samples.
    fn require_ids(
        &self,
        input: &DatasetInput,
        values: &HostTensor,
        indices: &[u64],
    ) -> Result<(), DataError> {
        let HostTensor::Int(values) = values else { return Ok(()) };
        for range in &self.ranges {
            if range.name != input.name {
                continue;
            }
            if let Err(error) = range.check(values, |row| indices[row]) {
                return Err(DataError::Invalid {
                    name: format!("the data set's {}", error.name),
                    place: error.place(),
                    why: error.why().into(),
                });
            }
        }
        Ok(())
    }
}

/// Returns rows of a data set. It may be the user's own, whose panic must not end the thread of a
/// device.
///
/// # Errors
/// Returns the errors of [`Dataset::rows`], and `DataError::Invalid` with the text of a panic.
pub(crate) fn rows_of(
    data: &dyn Dataset,
    split: Split,
    indices: &[u64],
) -> Result<NamedInputs, DataError> {
    let text = PanicText::default();
    catch_quietly(&text, || data.rows(split, indices)).unwrap_or_else(|| {
        let why = text.get().map_or("no message", String::as_str);
        Err(DataError::Invalid {
            name: "the data set".into(),
            place: String::new(),
            why: format!("panicked: {why}").into(),
        })
    })
}

fn is_of(announced: &DatasetInput, elements: usize, name: &str, values: &HostTensor) -> bool {
    let (dtype, length) = type_and_length(values);
    announced.name == name && announced.dtype == dtype && elements == length
}

fn type_and_length(values: &HostTensor) -> (DType, usize) {
    match values {
        HostTensor::Float(values) => (DType::F32, values.len()),
        HostTensor::Int(values) => (DType::U32, values.len()),
    }
}

fn unannounced(
    announced: &DatasetInput,
    elements: usize,
    given: Option<(&str, HostTensor)>,
) -> DataError {
    let given = match given {
        Some((name, values)) => {
            let (dtype, length) = type_and_length(&values);
            format!("{length} values of type {dtype:?} for {name}")
        }
        None => "nothing".into(),
    };
    let DatasetInput { name, dtype, .. } = announced;
    let why =
        format!("gives {given}, and announces {elements} values of type {dtype:?} for {name}");
    DataError::Invalid { name: "the data set".into(), place: String::new(), why: why.into() }
}

/// Checks that a graph has no inputs shared by all samples, since data sets have none.
///
/// # Errors
/// Returns `TrainError::InvalidRequest` for the first one.
pub(crate) fn require_no_shared(graph: &Graph) -> Result<(), TrainError> {
    for (name, id) in graph.inputs_of_samples() {
        if !graph.tensor(*id).shape.is_batched() {
            return Err(TrainError::InvalidRequest(format!(
                "the input '{name}' is one that all samples share, of which data have no values: \
                 give it with the inputs of a step, an evaluation or a prediction"
            )));
        }
    }
    Ok(())
}

/// Tensor of a graph that an input of a data set fills.
fn tensor_of(graph: &Graph, input: DatasetInput) -> Result<TensorId, TrainError> {
    let DatasetInput { name, dtype, elements } = input;
    let Some(tensor) = graph.input(name) else {
        let why = format!("the data have {name}, which the model does not take");
        return Err(TrainError::InvalidRequest(why));
    };
    let wanted = graph.tensor(tensor);
    if !wanted.shape.is_batched() {
        return Err(TrainError::InvalidRequest(format!(
            "the data have {name} of each sample, and the model takes one that all samples share"
        )));
    }
    if wanted.dtype != dtype || wanted.shape.per_row() != elements {
        return Err(TrainError::InvalidRequest(format!(
            "the data have {name}, {elements} values of type {dtype:?} per sample, and the model \
             takes {} of type {:?}",
            wanted.shape.per_row(),
            wanted.dtype
        )));
    }
    Ok(tensor)
}

/// Work of a loader: the micro-batches of all ranks, and the inputs that each of them reads.
pub struct LoadedRanks {
    /// By rank.
    pub programs: Vec<Arc<Program>>,
    /// By rank: input tensors of its plan.
    pub inputs: Vec<Vec<TensorId>>,
    /// By rank: false if its node reads its inputs from its own copy of the data.
    pub are_read: Vec<bool>,
}

impl LoadedRanks {
    /// Returns the ranks with these programs, which read the inputs of these plans.
    pub fn of(programs: &[Arc<Program>], plans: &[Arc<Plan>]) -> Self {
        let inputs = plans.iter().map(|plan| used_inputs(plan)).collect();
        Self { programs: programs.to_vec(), inputs, are_read: vec![true; programs.len()] }
    }

    /// Excludes ranks whose nodes read their own inputs.
    pub fn without(mut self, is_left: impl Fn(Rank) -> bool) -> Self {
        for (rank, is_read) in self.are_read.iter_mut().enumerate() {
            *is_read = !is_left(Rank(rank as u32));
        }
        self
    }

    /// Inputs of a step per rank and micro-batch; empty for ranks whose nodes read their own. Ranks
    /// with equal micro-batches, such as the stages of a pipeline, share one reading of the data.
    fn step(&self, source: &BatchSource, step: u64) -> Result<Vec<Vec<Inputs>>, DataError> {
        let mut read: Option<(&[MicroBatch], Vec<Inputs>)> = None;
        let mut ranks = Vec::with_capacity(self.programs.len());
        for (rank, program) in self.programs.iter().enumerate() {
            if !self.are_read[rank] {
                ranks.push(Vec::new());
                continue;
            }
            let micro_batches = &program.micro_batches[..];
            let all = match read.take() {
                Some((of, inputs)) if of == micro_batches => inputs,
                _ => {
                    let mut inputs = Vec::with_capacity(micro_batches.len());
                    for part in micro_batches {
                        inputs.push(source.micro_batch(step, part)?);
                    }
                    inputs
                }
            };
            let wanted = &self.inputs[rank];
            let mut of_rank = Vec::with_capacity(all.len());
            for inputs in &all {
                let of_part = inputs.iter().filter(|(tensor, _)| wanted.contains(tensor));
                of_rank.push(of_part.cloned().collect());
            }
            ranks.push(of_rank);
            read = Some((micro_batches, all));
        }
        Ok(ranks)
    }
}

/// Loader that prefetches a few steps.
pub struct Loader {
    ready: mpsc::Receiver<Result<Vec<Vec<Inputs>>, DataError>>,
}

impl Loader {
    /// Starts loading the inputs of all ranks for the steps from `first` to `last`. The thread ends
    /// after the last step, when a sample cannot be read, or when the loader is dropped.
    pub fn start(
        source: BatchSource,
        ranks: LoadedRanks,
        first: u64,
        last: u64,
    ) -> std::io::Result<Self> {
        let (sender, ready) = mpsc::sync_channel(AHEAD);
        thread::Builder::new().name("loader".into()).spawn(move || {
            for step in first..=last {
                let inputs = ranks.step(&source, step);
                let is_last = inputs.is_err();
                if sender.send(inputs).is_err() || is_last {
                    return;
                }
            }
        })?;
        Ok(Self { ready })
    }

    /// Returns the inputs of the next step, per rank and micro-batch; `None` after the last. An
    /// unreadable sample is the error of its step.
    pub fn next_step(&self) -> Option<Result<Vec<Vec<Inputs>>, DataError>> {
        self.ready.recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_data::{TextData, TextWindows, TokenizerKind};
    use potluck_graph::Builder;

    fn source(graph: &Graph) -> Result<BatchSource, TrainError> {
        let text = TextData::from_bytes("digits", b"0123456789", TokenizerKind::Char, 0.0, 3);
        let windows = TextWindows { text: Arc::new(text.unwrap()), context: 3 };
        BatchSource::new(graph, Arc::new(windows), Sampler::new(0, 7, 2))
    }

    #[test]
    fn inputs_go_to_the_tensors_of_their_names() {
        let mut b = Builder::new();
        // In an order different from the data set's.
        let targets = b.input_ids("targets", &[3]);
        let tokens = b.input_ids("tokens", &[3]);
        let source = source(&b.finish()).unwrap();
        let [of_tokens, of_targets] = &source.rows(Split::Train, &[5]).unwrap()[..] else {
            panic!()
        };
        assert_eq!(*of_tokens, (tokens, HostTensor::Int(vec![5, 6, 7])));
        assert_eq!(*of_targets, (targets, HostTensor::Int(vec![6, 7, 8])));
    }

    #[test]
    fn inputs_that_the_model_does_not_take_are_named() {
        let refused = |build: &dyn Fn(&mut Builder)| {
            let mut b = Builder::new();
            b.input_ids("tokens", &[3]);
            build(&mut b);
            source(&b.finish()).err().unwrap().to_string()
        };
        let missing = "the data have targets, which the model does not take";
        assert_eq!(refused(&|_| ()), missing);
        let short = "the data have targets, 3 values of type U32 per sample, and the model takes 4 \
                     of type U32";
        assert_eq!(refused(&|b| _ = b.input_ids("targets", &[4])), short);
        let float = "the data have targets, 3 values of type U32 per sample, and the model takes 3 \
                     of type F32";
        assert_eq!(refused(&|b| _ = b.input("targets", &[3])), float);
    }

    /// Data set whose rows differ from its announcement.
    struct Broken(NamedInputs);

    impl Dataset for Broken {
        fn inputs(&self) -> Vec<DatasetInput> {
            vec![DatasetInput { name: "x", dtype: DType::F32, elements: 2 }]
        }
        fn len(&self, _: Split) -> u64 {
            3
        }
        fn evaluation_samples(&self, _: Split) -> Vec<u64> {
            vec![0, 1, 2]
        }
        fn fingerprint(&self) -> String {
            String::new()
        }
        fn rows(&self, _: Split, _: &[u64]) -> Result<NamedInputs, DataError> {
            Ok(self.0.clone())
        }
    }

    #[test]
    fn rows_that_are_not_as_announced_are_an_error_of_their_step() {
        let mut b = Builder::new();
        b.input("x", &[1, 2]);
        let graph = b.finish();
        let read = |given: NamedInputs| {
            let data = Arc::new(Broken(given));
            let source = BatchSource::new(&graph, data, Sampler::new(0, 3, 1)).unwrap();
            source.rows(Split::Train, &[0]).map(drop).map_err(|error| error.to_string())
        };
        let floats = |count| HostTensor::Float(vec![0.0; count]);
        assert_eq!(read(vec![("x", floats(2))]), Ok(()));
        let announces = "and announces 2 values of type F32 for x";
        let wrong = |given: &str| Err(format!("the data set: gives {given}, {announces}"));
        assert_eq!(read(vec![("x", floats(3))]), wrong("3 values of type F32 for x"));
        assert_eq!(read(vec![("y", floats(2))]), wrong("2 values of type F32 for y"));
        assert_eq!(read(Vec::new()), wrong("nothing"));
        let ids = HostTensor::Int(vec![1, 2]);
        assert_eq!(read(vec![("x", ids)]), wrong("2 values of type U32 for x"));
    }
}
