//! The loader: a thread that puts together the inputs of the coming steps while the device works.

use std::sync::{Arc, mpsc};
use std::thread;

use crate::base::TensorId;
use crate::base::shape::ELEMENT_BYTES;
use crate::data::{Sampler, Split, TextData};
use crate::model::LanguageModel;
use crate::parallel::{MicroBatch, Program};
use crate::runtime::step::{Inputs, Values};

/// Steps that wait ready.
const AHEAD: usize = 2;

/// The bytes of tokens and targets that a loader and the step under way hold at a time: what
/// waits ready, what is put together, and what runs.
pub fn bytes(batch: usize, context: usize) -> usize {
    let tensors = 2 * ELEMENT_BYTES;
    [batch, context, tensors].into_iter().fold(AHEAD + 2, usize::saturating_mul)
}

/// Where the inputs of steps come from.
#[derive(Clone)]
pub struct BatchSource {
    pub data: Arc<TextData>,
    pub sampler: Sampler,
    pub model: LanguageModel,
    /// The sample ids, if anything in the model is random.
    pub samples: Option<TensorId>,
}

impl BatchSource {
    /// The inputs of one micro-batch of a step.
    pub fn micro_batch(&self, step: u64, micro_batch: &MicroBatch) -> Inputs {
        let slots = micro_batch.first..micro_batch.first + micro_batch.rows;
        let starts = slots.clone().map(|slot| self.sampler.sample(step, slot).index);
        let mut inputs = self.windows(Split::Train, starts);
        if let Some(samples) = self.samples {
            inputs.push((samples, Values::Int(slots.collect())));
        }
        inputs
    }

    /// The inputs of windows that begin at `window_count`, one row each.
    pub fn windows(&self, split: Split, starts: impl Iterator<Item = u64>) -> Inputs {
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for start in starts {
            let (window, next) = self.data.sample(split, start, self.model.context);
            tokens.extend_from_slice(window);
            targets.extend_from_slice(next);
        }
        vec![(self.model.tokens, Values::Int(tokens)), (self.model.targets, Values::Int(targets))]
    }
}

/// A loader that is some steps ahead.
pub struct Loader {
    ready: mpsc::Receiver<Vec<Vec<Inputs>>>,
}

impl Loader {
    /// Loads what all ranks need in the steps from `leader` to `last`; the thread ends with them, or
    /// when the loader is dropped.
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

    /// The inputs of the next step, per rank and micro-batch; `None` after the last.
    pub fn next_step(&self) -> Option<Vec<Vec<Inputs>>> {
        self.ready.recv().ok()
    }
}
