//! State of a run on disk: its files, and its checkpoints.

use super::Run;
use crate::checkpoint::{Checkpoint, CheckpointError, Meta, NamedTensor};
use crate::files;
use crate::metrics::Event;
use crate::train::error::TrainError;
use crate::train::resolved::resolved_toml;
use crate::train::run_data::SavedData;

/// Version of potluck, as checkpoints and resolved.toml record it.
const VERSION: &str = env!("CARGO_PKG_VERSION");

impl Run {
    /// Writes `run.toml` (the configuration) and `resolved.toml` (the decisions).
    pub(super) fn write_files(&self) -> Result<(), TrainError> {
        let decided =
            resolved_toml(&self.session.placement, (&self.fingerprint, &self.files), VERSION);
        let files = [("run.toml", self.spec.run_toml.clone()), ("resolved.toml", decided)];
        for (name, text) in files {
            let path = self.options.out.join(name);
            files::replace(&path, text.as_bytes()).map_err(|why| TrainError::Io { path, why })?;
        }
        Ok(())
    }

    /// Saves a checkpoint. A failing disk and non-finite parameters are only reported, and the
    /// run continues from memory: earlier checkpoints are untouched, and the next save may
    /// succeed.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails, if its parameters differ from those of the other
    /// ranks, or if a sink takes no more events.
    pub(super) fn save_or_warn(&mut self) -> Result<(), TrainError> {
        use TrainError::{Checkpoint, InvalidRequest, Io};
        match self.save() {
            Err(
                error @ (Checkpoint(CheckpointError::Write { .. }) | Io { .. } | InvalidRequest(_)),
            ) => self.warn(format!("step {} was not saved: {error}", self.step())),
            saved => saved,
        }
    }

    pub(super) fn save(&mut self) -> Result<(), TrainError> {
        if self.saved == Some(self.step()) {
            return Ok(());
        }
        self.compare_parameters()?;
        let (parameters, moments) = self.session.state()?;
        self.check_finite(&parameters)?;
        let SavedData { tokenizer, description } = self.data.saved();
        let meta = Meta {
            step: self.step(),
            optimizer_step: self.session.taken.updates,
            seed: self.spec.seed,
            model: self.spec.model_toml.clone(),
            samples: self.source.sampler.consumed(self.step()),
            run: self.spec.saved_toml.clone(),
            typed: self.spec.saved_keys(),
            tokenizer,
            description,
            files: self.files.clone(),
            best: self.best,
            placement: self.session.placement.clone(),
            data: self.fingerprint.clone(),
            version: VERSION.into(),
            unknown: self.unknown.clone(),
        };
        let carried = self.session.carried();
        let checkpoint = Checkpoint { meta, parameters, moments, carried };
        let now = self.step();
        let kept = match self.found.take_if(|step| *step == now) {
            Some(_) => self.store.save_and_keep(&checkpoint)?,
            None => self.store.save(&checkpoint).map(|_| None)?,
        };
        if self.best.is_some_and(|best| best.step == self.step()) {
            self.store.mark_best(self.step())?;
        }
        self.saved = Some(self.step());
        self.options.unsaved.clear();
        if let Err(error) = self.store.prune(self.spec.checkpoints_kept) {
            // This checkpoint is saved; the next save tries again.
            self.warn(format!("old checkpoints were not removed: {error}"))?;
        }
        if let Some(path) = kept {
            let step = self.step();
            self.note(format!("set aside: the checkpoint of step {step} as {}", path.display()))?;
        }
        self.emit(Event::Checkpoint { step: self.step() })
    }

    /// Checks that all parameters are finite. Non-finite ones cannot be trained further, and saving
    /// them would prune the good checkpoints.
    fn check_finite(&self, parameters: &[NamedTensor]) -> Result<(), TrainError> {
        let bad = parameters.iter().find(|tensor| !tensor.is_finite());
        let Some(bad) = bad else { return Ok(()) };
        let (step, name) = (self.step(), &bad.name);
        let last = self.store.path(self.saved.unwrap_or(0));
        Err(TrainError::InvalidRequest(format!(
            "the parameter {name} is not finite after step {step}, which is not worth saving; \
             lower optim.lr or set optim.clip, then resume from {}",
            last.display()
        )))
    }
}
