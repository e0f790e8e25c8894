//! Checkpoints set aside: kept under names that no run reads, replaces or prunes.

use std::path::{Path, PathBuf};

use super::{Store, verify};
use crate::checkpoint::{Checkpoint, CheckpointError};
use potluck_core::files;
use potluck_core::format::counted;

impl Store {
    /// Like [`Store::save`], for a step whose checkpoint another start of the run may have written.
    /// If that checkpoint differs in more than the best evaluation and the number of evaluations
    /// since it (or in its tensors, for one of the library), sets it aside with its mark as the
    /// best one, and returns its new path.
    pub fn save_and_keep(
        &mut self,
        checkpoint: &Checkpoint,
    ) -> Result<Option<PathBuf>, CheckpointError> {
        let mut kept = None;
        self.save_with(checkpoint, |manifest, path| {
            let is_there = path.symlink_metadata().is_ok();
            if is_there && !verify(path).is_ok_and(|there| there.is_replaced_by(manifest)) {
                kept = Some(rename_aside(path)?);
            }
            Ok(())
        })?;
        // A damaged mark refers to no checkpoint.
        if kept.is_some() && self.best().is_ok_and(|best| best == Some(checkpoint.meta.step)) {
            self.unmark_best()?;
        }
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

/// Returns the new paths of checkpoints that were set aside, oldest first, for the user; `None` if
/// there are none.
pub(crate) fn later_aside_text(paths: &[PathBuf]) -> Option<String> {
    let (first, last) = (paths.first()?, paths.last()?);
    let to = if first == last { String::new() } else { format!(" to {}", last.display()) };
    let count = counted(paths.len(), "later checkpoint", "later checkpoints");
    Some(format!("{count} as {}{to}", first.display()))
}

fn rename_aside(path: &Path) -> Result<PathBuf, CheckpointError> {
    files::set_aside(path).map_err(|why| CheckpointError::Write { path: path.into(), why })
}
