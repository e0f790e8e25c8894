//! Loader: prefetches the inputs of the coming steps in a thread while the device works.

use std::sync::{Arc, mpsc};
use std::thread;

use crate::base::shape::ELEMENT_BYTES;
use crate::base::{HostTensor, TensorId};
use crate::data::{Sampler, Split, TextData};
use crate::model::LanguageModel;
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

/// Prefetching loader, some steps ahead of the run.
pub struct Loader {
    ready: mpsc::Receiver<Vec<Vec<Inputs>>>,
}

impl Loader {
    /// Starts loading the inputs of all ranks for the steps from `first` to `last`; the thread
    /// ends with the last step, or when the loader is dropped.
    pub fn start(
        source: BatchSource,
        programs: Vec<Arc<Program>>,
        first: u64,
        last: u64,
    ) -> std::io::Result<Self> {
        let (sender, ready) = mpsc::sync_channel(AHEAD);
        thread::Builder::new().name("loader".into()).spawn(move || {
            for step in first..=last {
                let of_rank = |program: &Arc<Program>| {
                    let micro_batches = program.micro_batches.iter();
                    micro_batches.map(|m| source.micro_batch(step, m)).collect()
                };
                let inputs = programs.iter().map(of_rank).collect();
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
