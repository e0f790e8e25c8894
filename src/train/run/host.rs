//! Hooks of a run in the steps of its trainer: its record and its checkpoints.

use std::ops::ControlFlow;

use super::RunOptions;
use crate::checkpoint::Store;
use crate::error::TrainError;
use crate::trainer::Trainer;
use crate::trainer::steps::{Fit, FitHooks, SkippedStep};
use potluck_core::metrics::{Event, Sink, Sinks};

pub(super) struct RunHost {
    pub options: RunOptions,
    pub store: Store,
    /// The record on disk first, then the caller's sink.
    pub sinks: Sinks,
    /// Tensor that was non-finite in the first of the current consecutive skipped steps.
    pub began: String,
}

impl RunHost {
    pub fn note(&mut self, text: String) -> Result<(), TrainError> {
        Ok(self.sinks.event(&Event::Note(text))?)
    }

    pub(crate) fn warn(&mut self, text: String) -> Result<(), TrainError> {
        Ok(self.sinks.event(&Event::Warning(text))?)
    }
}

impl FitHooks for RunHost {
    fn event(&mut self, event: Event) -> Result<ControlFlow<()>, TrainError> {
        self.sinks.event(&event)?;
        Ok(ControlFlow::Continue(()))
    }

    fn skipped(
        &mut self,
        trainer: &Trainer,
        fit: &Fit,
        step: SkippedStep,
    ) -> Result<ControlFlow<()>, TrainError> {
        self.handle_skipped(trainer, &fit.source, step)?;
        Ok(ControlFlow::Continue(()))
    }

    fn store(&mut self) -> Option<&mut Store> {
        Some(&mut self.store)
    }

    fn saved(&mut self) {
        // The checkpoint contains them.
        self.options.unsaved.clear();
    }
}
