//! Options of [`Trainer::fit`](crate::Trainer::fit): its length, evaluations and saves.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::options::refused;
use crate::error::TrainError;
use crate::task::{LossTask, Task};
use potluck_core::DType;
use potluck_data::{Augmentation, Dataset, Split};
use potluck_graph::optim::{Decay, Schedule};

/// Options of [`Trainer::fit`](crate::Trainer::fit).
#[derive(Clone, Debug)]
pub struct FitOptions {
    pub length: FitLength,
    /// Learning rate of each step of the trainer.
    pub schedule: Schedule,
    /// Steps between evaluations on the validation split, with another one at the end; 0: none.
    pub eval_every: u64,
    /// Samples per evaluation, spread over the split; 0: all.
    pub eval_samples: u64,
    /// Task with the metrics of evaluations and the unit of steps, such as the result of
    /// [`task_of_samples`](crate::task::task_of_samples).
    pub task: Arc<dyn Task>,
    /// Random changes of the training pictures: of the first input of the data.
    pub augmentation: Option<Augmentation>,
    /// Maximum number of evaluations after the best one; 0: unlimited. Needs `eval_every`.
    pub patience: u64,
    /// True to keep the parameters of the best evaluation of this call, in host memory: for its
    /// report or, after an error, `Trainer::take_best_parameters`. Needs `eval_every`.
    pub keep_best: bool,
    /// Directory of saves, which are written at the start, at the best evaluations and at the end.
    /// Saves of later steps that it has, and another state of the first step, are renamed to
    /// `.aside`, with an [`Event::Note`](potluck_core::metrics::Event::Note) and one of
    /// [`Trainer::notes`](crate::Trainer::notes).
    pub directory: Option<PathBuf>,
    /// Steps between further saves; 0: none.
    pub save_every: u64,
    /// Longest time between saves, longer if saves would otherwise take more than 5 % of the time;
    /// `None`: unlimited.
    pub save_interval: Option<Duration>,
    /// Number of newest saves to keep, at least 2, besides the best.
    pub saves_kept: usize,
    /// Number of consecutive steps skipped because of values that are not finite, after which the
    /// call ends with an error; at least 1.
    pub skipped_steps_max: u64,
}

/// End of the steps of [`Trainer::fit`](crate::Trainer::fit), counted from the first step of the
/// trainer, including steps before a save and on other data. If it is reached before the first step
/// of the call, the call takes none and emits an
/// [`Event::Note`](potluck_core::metrics::Event::Note).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FitLength {
    Steps(u64),
    /// Passes through the samples of the training split; ends with the first step that completes
    /// the last pass. The samples of a text are overlapping windows, one per token; `train.epochs`
    /// of the program counts tokens instead, and ends earlier by a factor of the context's length.
    Epochs(u64),
}

impl FitOptions {
    /// Returns options for steps at one learning rate, without evaluations and saves.
    pub fn constant(length: FitLength, lr: f64) -> Self {
        let decay = Decay::Constant;
        let schedule =
            Schedule { decay, lr, min_lr: lr, warmup: 0, decay_steps: 0, cooldown_steps: 0 };
        Self::new(length, schedule)
    }

    /// Returns options for steps by a schedule, without evaluations and saves; 100 consecutive
    /// skipped steps are an error.
    pub fn new(length: FitLength, schedule: Schedule) -> Self {
        Self {
            length,
            schedule,
            eval_every: 0,
            eval_samples: 0,
            task: Arc::new(LossTask),
            augmentation: None,
            patience: 0,
            keep_best: false,
            directory: None,
            save_every: 0,
            save_interval: None,
            saves_kept: 2,
            skipped_steps_max: 100,
        }
    }
}

impl FitOptions {
    /// Checks that the options fit each other and the data.
    pub(super) fn check(&self, data: &Arc<dyn Dataset>) -> Result<(), TrainError> {
        if self.skipped_steps_max == 0 {
            return refused("skipped_steps_max must be at least 1");
        }
        if let Some(why) = self.schedule.flaw() {
            return refused(&format!("FitOptions::schedule: {why}"));
        }
        if self.eval_every > 0 && data.evaluation_samples(Split::Validation).is_empty() {
            return refused("the data hold no sample out to evaluate on; set eval_every to 0");
        }
        if self.eval_every == 0 && self.patience > 0 {
            return refused("patience counts evaluations, of which there are none; set eval_every");
        }
        if self.eval_every == 0 && self.keep_best {
            return refused("keep_best needs evaluations, of which there are none; set eval_every");
        }
        if let Some(changes) = &self.augmentation {
            check_pictures(changes, data)?;
        }
        Ok(())
    }
}

/// Checks that a learning rate keeps parameters finite numbers.
pub(super) fn check_rate(rate: f64) -> Result<(), TrainError> {
    if (0.0..=f64::from(f32::MAX)).contains(&rate) {
        return Ok(());
    }
    refused(&format!("a learning rate must be 0 or more, and is {rate}"))
}

/// Checks that the samples are pictures of the size of the augmentation.
fn check_pictures(changes: &Augmentation, data: &Arc<dyn Dataset>) -> Result<(), TrainError> {
    let [channels, height, width] = changes.shape();
    // The input that the loader changes.
    let input = match data.inputs().first() {
        Some(input) if input.dtype == DType::F32 => *input,
        _ => return refused("the data have no pictures for an augmentation to change"),
    };
    if input.elements != channels * height * width {
        return Err(TrainError::InvalidRequest(format!(
            "the augmentation is one of pictures of {channels} x {height} x {width} values, and \
             the data have {} values of '{}' per sample",
            input.elements, input.name
        )));
    }
    Ok(())
}
