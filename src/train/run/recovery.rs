//! Recovery: after the loss of a device a run continues in the same process, from its last
//! checkpoint on the devices that are left, bit by bit like a resume by hand.

use super::{Run, RunOptions, RunOutcome, startup, steps};
use crate::checkpoint::{Checkpoint, Meta};
use crate::error::TrainError;
use crate::left_devices::LeftDevices;
use crate::run_data::RunData;
use crate::runtime::placement::candidates::selections;
use crate::spec::RunSpec;
use crate::trainer::Trainer;
use crate::trainer::recovery::{FailedOpening, trace_from};
use crate::trainer::steps::Fit;
use potluck_core::metrics::{Event, Sinks};
use potluck_parallel::DeviceLoss;
use potluck_parallel::planner::plans::Plans;

impl Run {
    /// Reopens the session after the loss of a device, on the devices that are left, if the run is
    /// to continue; returns the checkpoint to continue from.
    ///
    /// # Errors
    /// Returns the error if the run ends with it.
    pub(super) fn recover(&mut self, cause: TrainError) -> Result<Checkpoint, TrainError> {
        let is_over = self.spec.on_loss == DeviceLoss::Stop || self.fit.signals.pending().is_some();
        if is_over {
            return Err(cause);
        }
        let Some(rank) = cause.lost_rank() else { return Err(cause) };
        let Some(lost) = self.trainer.session.placement.ranks.get(rank.index()) else {
            return Err(cause);
        };
        let Some(step) = self.last_saved() else { return Err(cause) };
        let Some(left) = self.devices_left(&cause, lost.position) else { return Err(cause) };
        match self.reopen(&cause, left, step) {
            Ok(checkpoint) => Ok(checkpoint),
            Err(why) => {
                self.warn(format!("automatic recovery failed: {why}"))?;
                Err(cause)
            }
        }
    }

    /// Devices of this node with which the run continues. Excludes what was lost on other nodes: a
    /// device, or all their devices if the cluster has ended with the loss of a node. A run of
    /// pipelines over several nodes does not continue by itself.
    fn devices_left(&self, cause: &TrainError, position: usize) -> Option<LeftDevices> {
        let own = self.own_devices();
        let Some(nodes) = self.host.options.nodes.as_ref().filter(|nodes| nodes.offered() > 0)
        else {
            return self.spec.left_without(position);
        };
        if self.trainer.session.placement.mesh.is_divided() {
            return None;
        }
        let devices = self.spec.devices.clone();
        if cause.is_of_node() {
            nodes.leave_all_out();
        } else if position >= own {
            nodes.leave_out(position - own);
        } else {
            return self.spec.left_without(position);
        }
        Some(LeftDevices { devices, stages: None, tensor: None, spare: 0, are_as_typed: true })
    }

    /// Number of requested devices on this node.
    pub(super) fn own_devices(&self) -> usize {
        match self.host.options.nodes {
            Some(_) => selections(&self.spec.devices).map_or(0, |own| own.len()),
            None => self.trainer.session.placement.candidates.len(),
        }
    }

    pub(super) fn go_on(&mut self, checkpoint: Checkpoint) -> Result<RunOutcome, TrainError> {
        self.restore(checkpoint)?;
        self.write_files()?;
        steps(self)
    }

    pub(super) fn last_saved(&self) -> Option<u64> {
        match &self.trainer.saved {
            Some((step, _)) => Some(*step),
            None => self.host.store.steps().ok()?.last().copied(),
        }
    }

    /// Reopens the session on the devices that are left, at a checkpoint, and reports what is left
    /// out.
    fn reopen(
        &mut self,
        cause: &TrainError,
        left: LeftDevices,
        step: u64,
    ) -> Result<Checkpoint, TrainError> {
        self.emit(Event::Opening)?;
        let checkpoint = Checkpoint::load(&self.host.store.path(step))?;
        // Frees the memory of the devices before they are opened again.
        self.trainer.session.group.close();
        self.finish_trace()?;
        let options = self.recovery_options(step);
        let mut without = if cause.is_of_node() {
            format!("the other nodes, of which one was lost: {cause}")
        } else {
            format!("the failed device: {cause}")
        };
        let Self { spec, data, trainer, fit, host, .. } = self;
        // These notes were already shown.
        trainer.notes.clear();
        trainer.go_on_with(left, |trainer, left| {
            let mut devices = left.devices.clone();
            if let Some(nodes) = &options.nodes {
                let count = nodes.offered();
                if count > 0 {
                    devices += &format!(" and {count} of other nodes");
                }
            }
            host.warn(format!("continuing from step {step} on {devices}, without {without}"))
                .map_err(FailedOpening::of_none)?;
            let now = spec.on_devices(left).map_err(FailedOpening::of_none)?;
            let opening = RunOpening { spec: &now, data, options: &options, trainer };
            match opening.at(&checkpoint, fit, &mut host.sinks) {
                Ok(opened) => {
                    *spec = now;
                    Ok(opened)
                }
                Err(error) => {
                    without = format!("the failed device: {error}");
                    Err(FailedOpening::unplaced(error, |position| now.left_without(position)))
                }
            }
        })?;
        let trace = self.host.options.trace.clone();
        self.host.options = RunOptions { trace, ..options };
        self.tell_notes()?;
        self.emit(Event::Started {
            done: checkpoint.meta.step,
            steps: self.spec.steps,
            device: self.trainer.device().to_string(),
        })?;
        Ok(checkpoint)
    }

    /// Options of the run when it continues from its own step.
    fn recovery_options(&self, step: u64) -> RunOptions {
        let trace = trace_from(self.host.options.trace.as_deref(), step);
        RunOptions { continued: Some(step), retune: false, trace, ..self.host.options.clone() }
    }
}

/// Opening of a run's devices in place of a trainer's.
struct RunOpening<'a> {
    spec: &'a RunSpec,
    data: &'a RunData,
    options: &'a RunOptions,
    trainer: &'a Trainer,
}

impl RunOpening<'_> {
    /// Opens the devices at a checkpoint, for steps that continue from there.
    fn at(
        &self,
        checkpoint: &Checkpoint,
        fit: &mut Fit,
        sinks: &mut Sinks,
    ) -> Result<Trainer, TrainError> {
        let Self { spec, data, options, trainer } = *self;
        let model = trainer.model.clone();
        let Meta { step, samples, .. } = checkpoint.meta;
        let source = spec.batch_source(model.whole(), data, step, samples)?;
        let plans = Plans::new(model);
        let mut opened = startup::open(spec, options, Some(checkpoint), &plans, &source, sinks)?;
        let loader = opened.loader(&source, spec.steps)?;
        fit.go_on(source, loader);
        opened.data.clone_from(&trainer.data);
        opened.description.clone_from(&trainer.description);
        opened.files.clone_from(&trainer.files);
        opened.of_run = spec.saved_run(data);
        Ok(opened)
    }
}
