//! Start of a run from new parameters or from the state of a checkpoint, and the command that
//! continues the run after its end.

use std::path::{Path, PathBuf};

use super::Run;
use super::starting::StartingParameters;
use super::stopping::with_command;
use crate::best::is_better;
use crate::checkpoint::store::aside::later_aside_text;
use crate::checkpoint::{Best, Checkpoint, CheckpointError, Meta};
use crate::continuation::ResumeCommand;
use crate::error::TrainError;
use potluck_core::format::counted;
use potluck_core::metrics::{Recorder, Sink, TensorBoard, aside};
use potluck_parallel::{Placement, PlacementChange};

impl Run {
    /// Loads the first state onto the devices: a checkpoint's, or a new one, which is saved. The
    /// state is also saved if the run starts in another directory than the checkpoint's.
    pub(super) fn begin(
        &mut self,
        resumed: Option<Checkpoint>,
        initial: Option<StartingParameters>,
    ) -> Result<(), TrainError> {
        match resumed {
            Some(checkpoint) => self.restore(checkpoint)?,
            None => self.initialize(initial)?,
        }
        // Before the first checkpoint this compares the parameters of all devices, as every save
        // does.
        if self.trainer.saved.is_none() {
            self.trainer.save_fit(&mut self.fit, &mut self.host)?;
        }
        self.write_files()
    }

    fn initialize(&mut self, initial: Option<StartingParameters>) -> Result<(), TrainError> {
        // Before anything is written, since a value may be invalid.
        let initial = initial.map(StartingParameters::read).transpose()?;
        self.create_record()?;
        self.trainer.session.initialize()?;
        match initial {
            Some(initial) => self.trainer.set_parameters(&initial),
            None => Ok(()),
        }
    }

    /// Loads the state of a checkpoint onto the devices, and sets a later course of the run aside.
    pub(super) fn restore(&mut self, mut checkpoint: Checkpoint) -> Result<(), TrainError> {
        let meta = self.host.store.evaluated_since(&checkpoint.meta);
        self.fit.found = Some(meta.step).filter(|step| self.host.store.path(*step).is_dir());
        self.trainer.saved = self.fit.found.map(|step| (step, self.host.options.out.clone()));
        self.trainer.of_run.unknown = meta.unknown.clone();
        self.warn_if_changed(&meta.placement)?;
        // In other data, the slots of a batch continue other texts.
        if meta.data != self.trainer.data {
            checkpoint.carried.clear();
        }
        self.trainer.bring(&checkpoint)?;
        self.tell_notes()?;
        self.compare_parameters()?;
        // The other course of the run is replaced only now, after the devices have the state.
        match self.host.options.continued {
            Some(_) => self.set_later_aside()?,
            None => self.create_record()?,
        }
        match self.incomparable(&meta) {
            None => self.take_over_best(&meta),
            Some(why) => self.forget_evaluations(&meta, why),
        }
    }

    fn metrics_path(&self) -> PathBuf {
        self.host.options.out.join("metrics.jsonl")
    }

    /// Creates the record of a new run. Keeps the record of an earlier run whose checkpoints are
    /// gone.
    fn create_record(&mut self) -> Result<(), TrainError> {
        let metrics = self.metrics_path();
        let (recorder, moved) = Recorder::create(&metrics)?;
        self.host.sinks.set_record(recorder.with_faults(self.host.options.faults.clone()));
        self.open_tensorboard(0)?;
        if moved > 0 {
            self.note(format!("set aside: {}", lines_aside(moved, &metrics)))?;
        }
        Ok(())
    }

    /// Opens a new event file for TensorBoard, if enabled. It supersedes the events of earlier
    /// files from step `first` on.
    fn open_tensorboard(&mut self, first: u64) -> Result<(), TrainError> {
        if !self.spec.tensorboard {
            return Ok(());
        }
        match TensorBoard::create(&self.host.options.out.join("tensorboard"), first) {
            Ok(chart) => self.host.sinks.set_chart(chart),
            Err(error) => self.warn(error.to_string())?,
        }
        Ok(())
    }

    /// Sets aside checkpoints, lines of the record and files of measures after the step of this
    /// start, and opens the record.
    fn set_later_aside(&mut self) -> Result<(), TrainError> {
        let metrics = self.metrics_path();
        let checkpoints = self.host.store.set_aside_after(self.step())?;
        // The file is replaced, which some systems refuse while it is open.
        self.host.sinks.close_record();
        let (recorder, cut) = Recorder::resume(&metrics, self.step())?;
        self.host.sinks.set_record(recorder.with_faults(self.host.options.faults.clone()));
        self.open_tensorboard(self.step() + 1)?;
        self.fit.evaluated = cut.val_loss.map(|val_loss| (self.step(), val_loss));
        let mut what = Vec::new();
        what.extend(later_aside_text(&checkpoints));
        let lines = cut.dropped + cut.damaged;
        if lines > 0 {
            what.push(lines_aside(lines, &metrics));
        }
        let measures = self.set_later_measures_aside()?;
        what.extend(measures.iter().map(|path| path.display().to_string()));
        if !what.is_empty() {
            self.note(format!("set aside: {}", what.join("; ")))?;
        }
        Ok(())
    }

    /// Takes over the best evaluation of a checkpoint and its mark. Replaces or removes a damaged
    /// mark, with a warning.
    fn take_over_best(&mut self, meta: &Meta) -> Result<(), TrainError> {
        // A best checkpoint that is gone (in another directory, or its save failed) must not
        // prevent marking the next, and the marked one is the best then; one that exists may not be
        // marked yet. The checkpoint of this start, if not saved yet, is marked when it is saved.
        let is_there =
            |best: Best| best.step == self.step() || self.host.store.path(best.step).is_dir();
        self.trainer.best = match meta.best {
            Some(best) if !is_there(best) => self.host.store.marked_evaluation(),
            best => best,
        };
        self.trainer.evaluations_since_best = meta.evaluations_since_best;
        // A run that ended between an evaluation and its save repeats it, so that it is saved.
        let taken =
            self.fit.evaluated.take_if(|(_, val_loss)| is_better(*val_loss, self.trainer.best));
        self.repeats_evaluation = taken.is_some();
        if let Err(damage) = self.host.store.best() {
            let now = match self.trainer.best {
                Some(best) => format!("that of step {} is marked again", best.step),
                None => "none is marked until the next evaluation".into(),
            };
            let damage = match damage {
                CheckpointError::Best { path, why } => {
                    format!("{}: does not name the best checkpoint ({why})", path.display())
                }
                other => other.to_string(),
            };
            self.warn(format!("{damage}; {now}"))?;
            if let Err(error) = self.host.store.unmark_best() {
                self.warn(error.to_string())?;
            }
        }
        if let Some(best) = self.trainer.best
            && self.host.store.path(best.step).is_dir()
            && let Err(error) = self.host.store.mark_best(best.step)
        {
            self.warn(error.to_string())?;
        }
        Ok(())
    }

    /// Forgets the best and the last evaluation of a checkpoint, because later ones are not
    /// comparable. Sets the best checkpoint aside, because pruning no longer keeps it.
    fn forget_evaluations(&mut self, meta: &Meta, why: String) -> Result<(), TrainError> {
        self.trainer.best = None;
        self.trainer.evaluations_since_best = 0;
        self.fit.evaluated = None;
        let step = self.step();
        self.host.sinks.forget_evaluations(step);
        // The marked one is the best if the best of all could not be saved.
        let best = meta.best.map(|best| best.step);
        let best = best.filter(|step| self.host.store.path(*step).is_dir());
        let best = best.or_else(|| self.host.store.best().ok().flatten());
        self.host.store.unmark_best()?;
        let mut forgotten = String::new();
        if let Some(step) = best
            && self.host.store.path(step).is_dir()
            && step != self.step()
        {
            let aside = self.host.store.set_aside(step)?;
            forgotten =
                format!("; the best one so far, of step {step}, is now {}", aside.display());
        }
        let text =
            format!("{why}: earlier evaluations are not compared with later ones{forgotten}");
        // Other data may be a mistake; another number of samples was set deliberately.
        if meta.data == self.trainer.data { self.note(text) } else { self.warn(text) }
    }

    /// Reports decisions of a resumed run that differ from earlier ones, if they change bits.
    fn warn_if_changed(&mut self, before: &Placement) -> Result<(), TrainError> {
        let changes = self
            .trainer
            .session
            .placement
            .changes_since(before, self.trainer.session.plan.graph.has_tied_parameters());
        let what = match changes[..] {
            [] => return Ok(()),
            [PlacementChange::Devices] => {
                let was = before.devices();
                let is = self.trainer.session.placement.devices();
                format!("the run was on {was} and continues on {is}")
            }
            _ => {
                let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
                format!("the run continues with {}", changes.join(" and "))
            }
        };
        // Some changes of pipelines do not affect the bits.
        let has_stages =
            self.trainer.session.placement.mesh.is_divided() || before.mesh.is_divided();
        let verb = if has_stages { "may" } else { "will" };
        self.note(format!("{what}: bits {verb} differ from an uninterrupted run"))
    }

    /// Returns the command that continues the run from its last checkpoint, on all of its nodes.
    pub fn resume_command(&self) -> ResumeCommand {
        let settings = self.host.options.unsaved.clone();
        let nodes = match &self.host.options.nodes {
            Some(nodes) if nodes.offered() > 0 => Some(nodes.count()),
            _ => None,
        };
        ResumeCommand { settings, nodes, ..ResumeCommand::of_run(&self.host.options.out) }
    }

    /// Adds the last checkpoint and the command that continues the run to an error after which it
    /// can be continued. The command leaves out a device that failed, if the run has several.
    pub(super) fn stopped(&self, cause: TrainError) -> TrainError {
        let Some(step) = self.last_saved() else { return cause };
        if !cause.can_go_on() {
            return cause;
        }
        let ranks = &self.trainer.session.placement.ranks;
        let mut position = None;
        if ranks.len() > 1
            && let Some(rank) = cause.failed_rank()
        {
            let failed = ranks[rank.index()].position;
            // The command cannot leave out a device of another node.
            if failed < self.own_devices() {
                position = Some(failed);
            }
        }
        let checkpoint = self.host.store.path(step);
        let mut command = self.resume_command();
        if command.nodes.take().is_some() {
            command = self.spec.resume_on_own(command);
        }
        with_command(cause, checkpoint, command, &self.spec, position)
    }
}

fn lines_aside(lines: u64, metrics: &Path) -> String {
    let lines = counted(lines as usize, "line", "lines");
    format!("{lines} of metrics.jsonl in {}", aside(metrics).display())
}
