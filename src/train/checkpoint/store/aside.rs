//! Checkpoints set aside: kept under names that no run reads, replaces or prunes.

use std::path::{Path, PathBuf};

use super::{Store, verify};
use crate::checkpoint::{Checkpoint, CheckpointError};
use potluck_core::files;

impl Store {
    /// Like [`Store::save`], for a step whose checkpoint another start of the run may have written.
    /// If that checkpoint differs in more than the best evaluation and the number of evaluations
    /// since it, sets it aside and returns its new path.
    pub fn save_and_keep(
        &mut self,
        checkpoint: &Checkpoint,
    ) -> Result<Option<PathBuf>, CheckpointError> {
        let mut kept = None;
        self.save_with(checkpoint, |manifest, path| {
            let is_there = path.symlink_metadata().is_ok();
            if is_there && !verify(path).is_ok_and(|there| there.equals_but_for_best(manifest)) {
                kept = Some(rename_aside(path)?);
            }
            Ok(())
        })?;
        Ok(kept)
    }

    /// Sets the checkpoints of later steps aside and returns their new paths, oldest first. Used
    /// when a run resumes from an older checkpoint: the later ones belong to an abandoned course of
    /// the run, and would be mistaken for its newest.
    pub fn set_aside_after(&mut self, step: u64) -> Result<Vec<PathBuf>, CheckpointError> {
        self.check_writable()?;
        let later = self.steps()?.into_iter().filter(|found| *found > step);
        let paths = later.map(|step| self.set_aside(step)).collect::<Result<_, _>>()?;
        // A damaged mark refers to no checkpoint.
        if self.best().is_ok_and(|best| best.is_some_and(|best| best > step)) {
            self.unmark_best()?;
        }
        Ok(paths)
    }

    /// Renames the checkpoint of a step with the first free ending of `.aside`, `.aside.1`,
    /// `.aside.2`, and so on; returns its new path. It is never removed automatically.
    pub fn set_aside(&mut self, step: u64) -> Result<PathBuf, CheckpointError> {
        self.check_writable()?;
        let aside = rename_aside(&self.path(step))?;
        self.verified.remove(&step);
        Ok(aside)
    }
}

fn rename_aside(path: &Path) -> Result<PathBuf, CheckpointError> {
    files::set_aside(path).map_err(|why| CheckpointError::Write { path: path.into(), why })
}
