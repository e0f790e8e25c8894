//! Loader: prefetches the inputs of the coming steps in a thread while the device works.

use std::sync::{Arc, mpsc};
use std::thread;

use crate::base::shape::ELEMENT_BYTES;
use crate::base::{HostTensor, TensorId};
use crate::data::{Sampler, Split, TextData};
use crate::graph::Plan;
use crate::model::LanguageModel;
use crate::parallel::pipeline::used_inputs;
use crate::parallel::{MicroBatch, Program};
use crate::runtime::step::Inputs;

/// Prefetch depth: steps that may be ready ahead of the device.
const AHEAD: usize = 2;

/// Returns the bytes of tokens and targets that a loader and the current step hold at a time: the
/// prefetched steps, the one being assembled, and the one that runs.
pub fn bytes(batch: usize, context: usize) -> usize {
    let tensors = 2 * ELEMENT_BYTES;
    [batch, context, tensors].into_iter().fold(AHEAD + 2, usize::saturating_mul)
}

/// Source of the inputs of steps.
#[derive(Clone)]
pub struct BatchSource {
    pub data: Arc<TextData>,
    pub sampler: Sampler,
    pub model: LanguageModel,
    /// Input tensor of sample ids, if anything in the model is random.
    pub samples: Option<TensorId>,
}

impl BatchSource {
    /// Returns the inputs of one micro-batch of a step.
    pub fn micro_batch(&self, step: u64, micro_batch: &MicroBatch) -> Inputs {
        let slots = micro_batch.first..micro_batch.first + micro_batch.rows;
        let starts = slots.clone().map(|slot| self.sampler.sample(step, slot).index);
        let mut inputs = self.windows(Split::Train, starts);
        if let Some(samples) = self.samples {
            inputs.push((samples, HostTensor::Int(slots.collect())));
        }
        inputs
    }

    /// Returns the inputs of the windows that begin at `starts`, one row each.
    pub fn windows(&self, split: Split, starts: impl Iterator<Item = u64>) -> Inputs {
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for start in starts {
            let (window, next) = self.data.sample(split, start, self.model.context);
            tokens.extend_from_slice(window);
            targets.extend_from_slice(next);
        }
        vec![
            (self.model.tokens, HostTensor::Int(tokens)),
            (self.model.targets, HostTensor::Int(targets)),
        ]
    }
}

/// What a loader loads: the micro-batches of all ranks, and the inputs that each of them reads.
pub struct LoadedRanks {
    /// By rank.
    pub programs: Vec<Arc<Program>>,
    /// By rank: the input tensors of its plan.
    pub inputs: Vec<Vec<TensorId>>,
}

impl LoadedRanks {
    /// Returns the ranks with these programs, which read the inputs of these plans.
    pub fn of(programs: &[Arc<Program>], plans: &[Arc<Plan>]) -> Self {
        let inputs = plans.iter().map(|plan| used_inputs(plan)).collect();
        Self { programs: programs.to_vec(), inputs }
    }

    /// Returns the inputs of a step per rank and micro-batch. Ranks with equal micro-batches, the
    /// stages of a pipeline, share one reading of the data.
    fn step(&self, source: &BatchSource, step: u64) -> Vec<Vec<Inputs>> {
        let mut read: Option<(&[MicroBatch], Vec<Inputs>)> = None;
        let mut ranks = Vec::with_capacity(self.programs.len());
        for (program, wanted) in self.programs.iter().zip(&self.inputs) {
            let micro_batches = &program.micro_batches[..];
            let all = match read.take() {
                Some((of, inputs)) if of == micro_batches => inputs,
                _ => micro_batches.iter().map(|m| source.micro_batch(step, m)).collect(),
            };
            let is_wanted = |(tensor, _): &&(TensorId, HostTensor)| wanted.contains(tensor);
            let of_rank = |inputs: &Inputs| inputs.iter().filter(is_wanted).cloned().collect();
            ranks.push(all.iter().map(of_rank).collect());
            read = Some((micro_batches, all));
        }
        ranks
    }
}

/// Prefetching loader, some steps ahead of the run.
pub struct Loader {
    ready: mpsc::Receiver<Vec<Vec<Inputs>>>,
}

impl Loader {
    /// Starts loading the inputs of all ranks for the steps from `first` to `last`; the thread
    /// ends with the last step, or when the loader is dropped.
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
                if sender.send(inputs).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { ready })
    }

    /// Returns the inputs of the next step, per rank and micro-batch; `None` after the last.
    pub fn next_step(&self) -> Option<Vec<Vec<Inputs>>> {
        self.ready.recv().ok()
    }
}
