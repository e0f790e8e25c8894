//! Saved states of a [`Trainer`]: directories of checkpoints, and copies in host memory.

use std::mem;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::opening::open_on;
use super::{SavedRun, Trainer, TrainerOptions};
use crate::carried::STATES_OF_ZEROS;
use crate::checkpoint::store::aside::later_aside_text;
use crate::checkpoint::{Checkpoint, Meta, NamedTensor, Store};
use crate::error::TrainError;
use crate::session::{SessionState, StepsTaken};
use potluck_core::setting::as_fields;
use potluck_graph::optim::Optimizer;
use potluck_graph::{Graph, MomentFormat};

impl Trainer {
    /// Saves the state in a directory, as `checkpoints/step-00001234`: parameters, moments,
    /// averages, carried states, steps, the position in the data, and the placement. A crash leaves
    /// earlier saves intact. Saves of later steps, and another state of this step that this trainer
    /// has not saved last, are renamed to `.aside`, with a note ([`Trainer::notes`]).
    ///
    /// # Errors
    /// Returns `TrainError` if the directory cannot be written or another process writes there, if
    /// a parameter is not finite, if devices hold different parameters, or if a device fails.
    pub fn save(&mut self, directory: &Path) -> Result<(), TrainError> {
        let saved = self.save_below(directory);
        self.noting_failure(saved)
    }

    fn save_below(&mut self, directory: &Path) -> Result<(), TrainError> {
        let checkpoint = self.saveable()?;
        let mut store = self.open_store(directory)?;
        self.save_to(&mut store, directory, &checkpoint, None)?;
        Ok(())
    }

    /// Opens the devices for a forward graph and restores a save. With the same graph, options and
    /// devices, further steps have the same bits as without the interruption. Measured shares are
    /// taken from the save unless the devices differ or `options.retune` is set.
    ///
    /// `directory` holds saves, and the newest valid one is used, or is a single checkpoint.
    ///
    /// # Errors
    /// Returns `TrainError` if there is no valid save, if it belongs to another model, with the
    /// name of a tensor, and the errors of [`Trainer::new`].
    pub fn load(
        forward: Graph,
        options: &TrainerOptions,
        directory: &Path,
    ) -> Result<Self, TrainError> {
        Self::open_at(forward, options, directory).map_err(TrainError::of_library)
    }

    fn open_at(
        forward: Graph,
        options: &TrainerOptions,
        directory: &Path,
    ) -> Result<Self, TrainError> {
        options.check(&forward)?;
        let (checkpoint, warnings) = Checkpoint::load_path(directory)?;
        let model = options.training_graph(forward)?;
        check(model.whole(), &options.optimizer, &checkpoint)?;
        let opened = open_on(model.clone(), options, Some(&checkpoint.meta.placement), None)?;
        let mut trainer = Self::of(opened, model, options.clone());
        trainer.notes.extend(warnings);
        trainer.restore_checkpoint(&checkpoint)?;
        trainer.note_other_seed(checkpoint.meta.seed);
        Ok(trainer)
    }

    /// Restores an earlier or later save, like [`Trainer::load`], on the open devices with their
    /// shares. [`Trainer::recover`] needs a save after that.
    ///
    /// # Errors
    /// Returns `TrainError` if there is no valid save, if it belongs to another model, or if a
    /// device fails or has failed.
    pub fn restore(&mut self, directory: &Path) -> Result<(), TrainError> {
        let restored = self.go_to(directory);
        self.noting_failure(restored)
    }

    fn go_to(&mut self, directory: &Path) -> Result<(), TrainError> {
        let (checkpoint, warnings) = Checkpoint::load_path(directory)?;
        check(self.graph(), &self.options.optimizer, &checkpoint)?;
        self.notes.extend(warnings);
        self.restore_checkpoint(&checkpoint)?;
        self.note_other_seed(checkpoint.meta.seed);
        self.forget_kept_states();
        Ok(())
    }

    /// Opens the saves of a directory for writing.
    pub(super) fn open_store(&self, directory: &Path) -> Result<Store, TrainError> {
        Ok(Store::open(directory)?.with_faults(self.options.faults.clone()))
    }

    /// Returns the state if its parameters are finite: a save of other ones is useless, and would
    /// remove valid saves of a directory.
    pub(crate) fn saveable(&mut self) -> Result<Checkpoint, TrainError> {
        self.compare_parameters()?;
        let checkpoint = self.checkpoint()?;
        let bad = checkpoint.parameters.iter().find(|tensor| !tensor.is_finite());
        let Some(NamedTensor { name, .. }) = bad else { return Ok(checkpoint) };
        let mut saved = None;
        if let Some((step, place)) = &self.saved {
            saved = Some(Store::open_to_read(place).path(*step));
        }
        Err(TrainError::WorthlessSave { name: name.clone(), step: checkpoint.meta.step, saved })
    }

    /// Path of the last save in a directory, or else of step 0's.
    pub(crate) fn last_save_in(&self, directory: &Path) -> PathBuf {
        let step = match &self.saved {
            Some((step, _)) => *step,
            None => 0,
        };
        Store::open_to_read(directory).path(step)
    }

    /// Writes a state, and renames later ones in the directory, with a note. Also renames another
    /// save of its step, unless it is this trainer's last one and its step is not `found`.
    pub(crate) fn save_to(
        &mut self,
        store: &mut Store,
        directory: &Path,
        checkpoint: &Checkpoint,
        found: Option<u64>,
    ) -> Result<(), TrainError> {
        let step = checkpoint.meta.step;
        if let Some(text) = later_aside_text(&store.set_aside_after(step)?) {
            self.notes.push(format!("set aside: {text}"));
        }
        let is_own =
            self.saved.as_ref().is_some_and(|(saved, place)| *saved == step && place == directory);
        if is_own && found != Some(step) {
            store.save(checkpoint)?;
        } else if let Some(path) = store.save_and_keep(checkpoint)? {
            let path = path.display();
            self.notes.push(format!("set aside: the checkpoint of step {step} as {path}"));
        }
        if checkpoint.meta.best.is_some_and(|best| best.step == step) {
            store.mark_best(step)?;
        }
        self.saved = Some((step, directory.to_path_buf()));
        Ok(())
    }

    pub(super) fn checkpoint(&self) -> Result<Checkpoint, TrainError> {
        let SessionState { parameters, moments, averages } = self.session.state()?;
        let StepsTaken { steps, updates } = self.session.taken;
        let SavedRun { model, config, typed, tokenizer, unknown } = self.of_run.clone();
        let meta = Meta {
            step: steps,
            optimizer_step: updates,
            moments: Some(self.options.optimizer.kind_of_moments().into()),
            loss_scale: self.session.loss_scale.saved(),
            seed: self.options.seed,
            samples: self.samples,
            model,
            run: config,
            typed,
            tokenizer,
            description: self.description.clone(),
            files: self.files.clone(),
            best: self.best,
            evaluations_since_best: self.evaluations_since_best,
            placement: self.session.placement.clone(),
            data: self.data.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            unknown,
        };
        let carried = self.session.carried();
        Ok(Checkpoint { meta, parameters, moments, averages, carried })
    }

    /// Discards the states for a recovery, which do not precede the current parameters.
    pub(super) fn forget_kept_states(&mut self) {
        self.saved = None;
        self.snapshot = None;
    }

    /// Writes a checked state to the devices, and restores its record of the data.
    pub(super) fn restore_checkpoint(&mut self, state: &Checkpoint) -> Result<(), TrainError> {
        // Notes are texts, in the words of the library.
        as_fields(|| self.bring(state))?;
        let meta = state.meta.clone();
        self.best = meta.best;
        self.evaluations_since_best = meta.evaluations_since_best;
        self.data = meta.data;
        self.description = meta.description;
        self.files = meta.files;
        Ok(())
    }

    /// Writes a checked state to the devices.
    pub(crate) fn bring(&mut self, state: &Checkpoint) -> Result<(), TrainError> {
        let meta = &state.meta;
        if !self.session.restore(state)? {
            self.notes.push(STATES_OF_ZEROS.into());
        }
        let begins_averages = self.options.ema > 0.0 && state.averages.is_empty();
        if begins_averages && meta.optimizer_step > 0 {
            let step = meta.step;
            self.notes.push(format!(
                "the checkpoint has no averages of the parameters: they begin at step {step}"
            ));
        }
        self.notes.extend(self.session.loss_scale.restore(meta.loss_scale));
        if let Some(change) = self.session.continue_after(StepsTaken::of(meta)) {
            self.notes.push(change.sentence());
        }
        self.samples = meta.samples;
        Ok(())
    }

    /// Adds a note if the seed of a save is another one.
    fn note_other_seed(&mut self, saved: u64) {
        let seed = self.options.seed;
        if saved != seed {
            let rounding = match self.options.moments {
                MomentFormat::F32 => "",
                MomentFormat::Bf16 => ", the rounding of moments",
            };
            self.notes.push(format!(
                "the save was made with seed {saved}, and training goes on with seed {seed}: \
                 dropout{rounding} and the order of samples are others"
            ));
        }
    }

    /// Copies the state to host memory if a copy is due and there are several devices.
    pub(super) fn take_snapshot_if_due(&mut self) -> Result<(), TrainError> {
        if self.world() == 1 {
            return Ok(());
        }
        let every = self.options.snapshot_every;
        let now = self.steps();
        let last = self.snapshot.as_ref().map(|checkpoint| checkpoint.meta.step);
        let is_due = every > 0 && last.is_none_or(|last| last != now && now.is_multiple_of(every));
        if is_due {
            self.session.settle()?;
            // The host may not have memory for two copies.
            drop(mem::take(&mut self.snapshot));
            self.snapshot = Some(Arc::new(self.checkpoint()?));
        }
        Ok(())
    }
}

/// Checks that a checkpoint has the tensors of a graph, and no others, and moments of the kind of
/// an optimizer, if it has any.
fn check(graph: &Graph, optimizer: &Optimizer, checkpoint: &Checkpoint) -> Result<(), TrainError> {
    let wanted = optimizer.kind_of_moments();
    if let Some(kind) = &checkpoint.meta.moments
        && kind != wanted
        && !checkpoint.moments.is_empty()
        && optimizer.moments() > 0
    {
        return Err(TrainError::Mismatch {
            what: "the optimizer".into(),
            why: format!(
                "its running averages are those of {kind} there, and {wanted} has others; go on \
                 with the same, or begin a new trainer with the parameters alone"
            ),
        });
    }
    for parameter in &graph.parameters {
        let wanted = graph.tensor(parameter.tensor).shape.dims();
        NamedTensor::find(&checkpoint.parameters, &parameter.name, wanted)?;
    }
    for NamedTensor { name, .. } in &checkpoint.parameters {
        if !graph.parameters.iter().any(|parameter| parameter.name == *name) {
            return Err(TrainError::Mismatch {
                what: "the model".into(),
                why: format!("it has no parameter '{name}'; use the model that was saved"),
            });
        }
    }
    Ok(())
}
