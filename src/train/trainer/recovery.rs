//! Recovery of a [`Trainer`] from the loss of a device: opens the others again, and continues from
//! the last saved state.

use std::mem;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::opening::open_on;
use super::{Trainer, TrainerOptions};
use crate::checkpoint::Checkpoint;
use crate::error::TrainError;
use crate::left_devices::LeftDevices;
use potluck_core::files;
use potluck_core::setting::as_fields;

/// Failure to open devices, with the remaining ones.
pub(crate) struct FailedOpening {
    pub error: TrainError,
    /// Devices without the failed one; `None` if none failed, or there is no other.
    pub left: Option<Box<LeftDevices>>,
}

impl FailedOpening {
    /// Returns the failure of the requested device at a position, if a device failed; `without`
    /// returns the devices without it.
    fn at(
        error: TrainError,
        position: Option<usize>,
        without: impl FnOnce(usize) -> Option<LeftDevices>,
    ) -> Self {
        Self { error, left: position.and_then(without).map(Box::new) }
    }

    /// Returns a failure without a failed device.
    pub(crate) fn of_none(error: TrainError) -> Self {
        Self { error, left: None }
    }

    /// Failure of devices before there is a placement: ranks are positions.
    pub(crate) fn unplaced(
        error: TrainError,
        without: impl FnOnce(usize) -> Option<LeftDevices>,
    ) -> Self {
        let position = error.failed_rank().map(|rank| rank.index());
        Self::at(error, position, without)
    }
}

/// File of the trace after a recovery at a step: the earlier file is kept.
pub(crate) fn trace_from(trace: Option<&Path>, step: u64) -> Option<PathBuf> {
    trace.map(|path| files::beside(path, &format!(".from-{step}")))
}

impl Trainer {
    /// Opens the devices again without a failed one, and restores the last saved state: the later
    /// one of the last [`Trainer::save`] and the last copy in host memory
    /// (`TrainerOptions::snapshot_every`), if it was made after the last change of parameters or
    /// restored save. Returns its number of steps. Further steps have the same bits as after
    /// [`Trainer::load`] of that state on those devices.
    ///
    /// Given shares and blocks of pipelines are replaced by measured or newly chosen ones. A device
    /// that fails during its opening, or during the transfer of the state, is excluded too.
    ///
    /// # Errors
    /// Returns `TrainError` if no device of several has failed, if no state was saved, if no other
    /// device remains, or if no remaining one can be opened, after which this can be called again.
    pub fn recover(&mut self) -> Result<u64, TrainError> {
        as_fields(|| self.reopen()).map_err(TrainError::of_library)
    }

    pub(super) fn reopen(&mut self) -> Result<u64, TrainError> {
        let Some(failed) = self.failed else {
            return Err(TrainError::InvalidRequest(
                "none of several devices has failed, so that there is nothing to recover from"
                    .into(),
            ));
        };
        let Some(left) = self.options.left_without(failed) else {
            let why = "no other device is left to recover on";
            return Err(TrainError::InvalidRequest(why.into()));
        };
        let state = self.last_state()?;
        // The devices' memory must be free before they are opened again.
        self.session.group.close();
        self.reopen_on(left, state)
    }

    /// Opens the remaining devices, and restores a state on them.
    pub(super) fn reopen_on(
        &mut self,
        left: LeftDevices,
        state: Arc<Checkpoint>,
    ) -> Result<u64, TrainError> {
        self.go_on_with(left, |trainer, left| {
            trainer.opened_at(&trainer.options.on(left), &state)
        })?;
        Ok(self.steps())
    }

    /// Continues with the remaining devices after one has failed; `open` opens a trainer on them
    /// for the last state of this one. A device that fails then is excluded too. If none remains,
    /// the states for a recovery are kept.
    ///
    /// # Errors
    /// Returns the last error of `open` if no device remains.
    pub(crate) fn go_on_with(
        &mut self,
        mut left: LeftDevices,
        mut open: impl FnMut(&Self, &LeftDevices) -> Result<Self, FailedOpening>,
    ) -> Result<(), TrainError> {
        let opened = loop {
            match open(self, &left) {
                Ok(opened) => break opened,
                Err(failed) => left = *failed.left.ok_or(failed.error)?,
            }
        };
        let earlier = mem::take(&mut self.notes);
        let saved = self.saved.take();
        let snapshot = self.snapshot.take();
        let best_parameters = self.best_parameters.take();
        *self = opened;
        self.best_parameters = best_parameters;
        self.notes.splice(0..0, earlier);
        // Another device may fail before the next copy.
        let step = self.steps();
        let is_alone = self.world() == 1;
        self.snapshot = snapshot.filter(|kept| kept.meta.step == step && !is_alone);
        self.saved = saved;
        Ok(())
    }

    /// Opens a trainer at a state of this one.
    fn opened_at(
        &self,
        options: &TrainerOptions,
        state: &Arc<Checkpoint>,
    ) -> Result<Self, FailedOpening> {
        let trace = trace_from(self.options.trace.as_deref(), state.meta.step);
        let traced = TrainerOptions { trace, ..options.clone() };
        let before = Some(&state.meta.placement);
        let without = |position| options.left_without(position);
        let opened = open_on(self.model.clone(), &traced, before, None)
            .map_err(|error| FailedOpening::unplaced(error, without))?;
        let mut opened = Self::of(opened, self.model.clone(), options.clone());
        match opened.restore_checkpoint(state) {
            Ok(()) => Ok(opened),
            Err(error) => {
                let position = opened.failed_position(&error);
                Err(FailedOpening::at(error, position, without))
            }
        }
    }

    /// The last saved state that can be read.
    pub(super) fn last_state(&mut self) -> Result<Arc<Checkpoint>, TrainError> {
        let in_memory_at = self.snapshot.as_ref().map(|checkpoint| checkpoint.meta.step);
        let saved = self.saved.clone().filter(|(step, _)| in_memory_at < Some(*step));
        if let Some((_, directory)) = saved {
            match Checkpoint::load_path(&directory) {
                Ok((checkpoint, warnings)) => {
                    self.notes.extend(warnings);
                    let step = checkpoint.meta.step;
                    // An earlier state if the newest is damaged.
                    self.saved = Some((step, directory));
                    if in_memory_at < Some(step) {
                        return Ok(Arc::new(checkpoint));
                    }
                }
                Err(error) if in_memory_at.is_some() => {
                    self.notes.push(error.to_string());
                    // Its step is saved again when it is reached.
                    self.saved = None;
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.snapshot.clone().ok_or_else(|| {
            TrainError::InvalidRequest(
                "no state was kept to recover from; save the trainer, or set \
                 TrainerOptions::snapshot_every"
                    .into(),
            )
        })
    }
}
