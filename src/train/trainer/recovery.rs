//! Recovery of a [`Trainer`] from the loss of a device: it opens the others again, and goes on from
//! the last saved state.

use super::opening::open;
use super::{Trainer, TrainerOptions};
use crate::checkpoint::Checkpoint;
use crate::files;
use crate::train::error::TrainError;
use crate::train::left_devices::LeftDevices;

impl Trainer {
    /// Opens the devices again without one that failed, and goes on from the last saved state: the
    /// later one of the last [`Trainer::save`] and the last copy in host memory
    /// (`TrainerOptions::snapshot_every`). Returns the number of steps taken by then. What follows
    /// has the bits of [`Trainer::load`] of that state on those devices.
    ///
    /// Shares and blocks of pipelines that were given are measured or chosen anew; a device that
    /// fails while it is opened is left out as well.
    ///
    /// # Errors
    /// Returns `TrainError` if no device of several has failed, if no state was saved, if no other
    /// device is left, or if none that is left can be opened; then this can be tried again.
    pub fn recover(&mut self) -> Result<u64, TrainError> {
        self.reopen().map_err(TrainError::of_library)
    }

    pub(super) fn reopen(&mut self) -> Result<u64, TrainError> {
        let fail = |why: &str| TrainError::InvalidRequest(why.into());
        let failed = self.failed.ok_or_else(|| {
            fail("none of several devices has failed, so that there is nothing to recover from")
        })?;
        let left = self.left_without(&self.options, failed);
        let mut left = left.ok_or_else(|| fail("no other device is left to recover on"))?;
        let checkpoint = self.last_state()?;
        // What is on the devices is freed before they are opened again.
        self.session.group.close();
        loop {
            let options = self.options.on(&left);
            // The trace of what was before stays.
            let ending = format!(".from-{}", checkpoint.meta.step);
            let trace = self.options.trace.as_deref().map(|path| files::beside(path, &ending));
            let options = TrainerOptions { trace, ..options };
            let before = Some(&checkpoint.meta.placement);
            match open(self.graph.clone(), &options, before, None) {
                Ok(opened) => {
                    let earlier = std::mem::take(&mut self.notes);
                    let (saved, snapshot) = (self.saved.take(), self.snapshot.take());
                    *self = Self::of(opened, options);
                    self.notes.splice(0..0, earlier);
                    let step = checkpoint.meta.step;
                    self.restore_checkpoint(checkpoint)?;
                    // Another device may fail before the next copy is due.
                    self.snapshot = snapshot.filter(|kept| kept.meta.step == step);
                    self.saved = saved;
                    return Ok(step);
                }
                Err(error) => {
                    // Before there is a placement, ranks are positions.
                    let position = error.failed_rank().map(|rank| rank.index());
                    let others = position.and_then(|at| self.left_without(&options, at));
                    left = others.ok_or(error)?;
                }
            }
        }
    }

    fn left_without(&self, options: &TrainerOptions, position: usize) -> Option<LeftDevices> {
        LeftDevices::without(&options.devices, position, &options.pipeline)
    }

    /// Returns the state of the last step that was kept.
    fn last_state(&self) -> Result<Checkpoint, TrainError> {
        let in_memory = self.snapshot.as_ref();
        let in_memory_at = in_memory.map(|checkpoint| checkpoint.meta.step);
        match (in_memory, &self.saved) {
            (Some(_), Some((step, directory))) if in_memory_at < Some(*step) => {
                Ok(Checkpoint::load_path(directory)?.0)
            }
            (Some(checkpoint), _) => Ok(checkpoint.clone()),
            (None, Some((_, directory))) => Ok(Checkpoint::load_path(directory)?.0),
            (None, None) => Err(TrainError::InvalidRequest(
                "no state was kept to recover from; save the trainer, or set \
                 TrainerOptions::snapshot_every"
                    .into(),
            )),
        }
    }
}
