//! Store of a run's checkpoints: writes, verifies, loads and prunes them.

pub(crate) mod aside;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::{fs, io};

use super::lock::{self, RunLock};
use super::manifest::{FileEntry, Manifest, directory_name, step_of};
use super::{
    AVERAGES, Best, CARRIED, Checkpoint, CheckpointError, FILES, MOMENTS, Meta, NamedTensor,
    OPTIONAL_FILES, tensors,
};
use potluck_core::faults::{Faults, Point};
use potluck_core::files;
use potluck_data::tokenizer::TOKENIZER;
use potluck_data::{Tokenizer, TokenizerFile};

pub(super) const DIRECTORY: &str = "checkpoints";

/// File that names the best checkpoint.
const BEST: &str = "best";

// Endings of directories that are not checkpoints: one being written, one about to be replaced by a
// new one of the same step, and one being removed. Checkpoints set aside for the user do not count
// either.
const TEMPORARY: &str = ".tmp";
const OLD: &str = ".old";
const GONE: &str = ".gone";

/// Smallest number of checkpoints that pruning keeps, because the newest may turn out to be bad.
const KEEP_MIN: usize = 2;

/// Newest checkpoints among which a resume takes the first good one.
const FALL_BACK_MAX: usize = 2;

/// Checkpoints in `DIR/checkpoints`.
#[derive(Debug)]
pub struct Store {
    directory: PathBuf,
    /// `None` if the store is read-only.
    lock: Option<RunLock>,
    faults: Faults,
    /// Steps that this store has written or verified; pruning does not read them again.
    verified: BTreeSet<u64>,
}

impl Store {
    /// Opens the checkpoints of a run directory for writing. Creates a missing directory, and
    /// cleans up after a crash.
    ///
    /// # Errors
    /// Returns `CheckpointError::InUse` if another process writes there, and
    /// `CheckpointError::Write` if the directory cannot be written.
    pub fn open(run: &Path) -> Result<Self, CheckpointError> {
        let mut store = Self::open_to_read(run);
        let error = |why| CheckpointError::Write { path: store.directory.clone(), why };
        files::create_directories(&store.directory).map_err(error)?;
        store.lock = Some(RunLock::take(run)?);
        store.clean_up().map_err(|why| store.write_error(why))?;
        Ok(store)
    }

    /// Opens the checkpoints of a run directory for reading, also while another process writes.
    pub fn open_to_read(run: &Path) -> Self {
        Self {
            directory: directory(run),
            lock: None,
            faults: Faults::none(),
            verified: BTreeSet::new(),
        }
    }

    /// Adds injected faults for tests, at the points `checkpoint-...` of the step that is saved.
    #[must_use]
    pub fn with_faults(self, faults: Faults) -> Self {
        Self { faults, ..self }
    }

    /// Returns the directory of a step's checkpoint, whether it exists or not.
    pub fn path(&self, step: u64) -> PathBuf {
        self.directory.join(directory_name(step))
    }

    /// Returns the steps of the existing checkpoints, good or bad, oldest first.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let error = |why| CheckpointError::Read { path: self.directory.clone(), why };
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            // A file has no checkpoints either.
            Err(why) if matches!(why.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Ok(Vec::new());
            }
            Err(why) => return Err(error(why)),
        };
        let mut steps = Vec::new();
        for entry in entries {
            steps.extend(step_of(&entry.map_err(error)?.path()));
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// Writes a checkpoint and returns its directory, synced to the disk under its final name.
    /// Keeps an existing checkpoint of the same step and content. After an error the other
    /// checkpoints are unchanged, and no unfinished files are left.
    pub fn save(&mut self, checkpoint: &Checkpoint) -> Result<PathBuf, CheckpointError> {
        self.save_with(checkpoint, |_, _| Ok(()))?;
        Ok(self.path(checkpoint.meta.step))
    }

    /// Like [`Store::save`]; calls `before` with the complete new manifest and the final path of
    /// the checkpoint, just before the checkpoint is moved there.
    fn save_with(
        &mut self,
        checkpoint: &Checkpoint,
        before: impl FnOnce(&Manifest, &Path) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        self.check_writable()?;
        tensors::check(&checkpoint.parameters)?;
        tensors::check(&checkpoint.moments)?;
        tensors::check(&checkpoint.averages)?;
        tensors::check(&checkpoint.carried)?;
        let step = checkpoint.meta.step;
        let path = self.path(step);
        let temporary = files::beside(&path, TEMPORARY);
        let saved = self
            .write_files(checkpoint, &temporary)
            .and_then(|manifest| before(&manifest, &path).map(|()| manifest))
            .and_then(|manifest| self.put_in_place(&manifest, &temporary, &path));
        if let Err(error) = saved {
            // The first error is reported; the next save or start removes what remains.
            let _ = fs::remove_dir_all(&temporary);
            return Err(error);
        }
        self.verified.insert(step);
        Ok(())
    }

    /// Writes all files of a checkpoint into a new directory, the manifest last.
    fn write_files(
        &self,
        checkpoint: &Checkpoint,
        directory: &Path,
    ) -> Result<Manifest, CheckpointError> {
        let step = checkpoint.meta.step;
        let error = |path: &Path, why| CheckpointError::Write { path: path.into(), why };
        let at = |point| self.faults.at_write(point, step);
        at(Point::CheckpointBegin)
            .and_then(|()| remove_if_there(directory))
            .and_then(|()| fs::create_dir(directory))
            .map_err(|why| error(directory, why))?;

        let mut entries = Vec::new();
        for name in FILES {
            let (path, tensors) = (directory.join(name), tensors_of(checkpoint, name));
            if OPTIONAL_FILES.contains(&name) && tensors.is_empty() {
                continue;
            }
            let written = tensors::write(&path, tensors, || at(Point::CheckpointTensors));
            entries.push(written.map_err(|why| error(&path, why))?);
        }
        if let Some(Tokenizer::File(file)) = &checkpoint.meta.tokenizer {
            let path = directory.join(TOKENIZER);
            entries.push(write_tokenizer(&path, file).map_err(|why| error(&path, why))?);
        }
        let manifest = Manifest::new(checkpoint.meta.clone(), entries);
        at(Point::CheckpointManifest).map_err(|why| error(directory, why))?;
        // This syncs the directory to the disk too.
        manifest.write(directory)?;
        at(Point::CheckpointRename).map_err(|why| error(directory, why))?;
        Ok(manifest)
    }

    /// Renames a complete checkpoint to its final name; replaces an existing checkpoint of that
    /// name.
    fn put_in_place(
        &self,
        manifest: &Manifest,
        temporary: &Path,
        path: &Path,
    ) -> Result<(), CheckpointError> {
        let error = |why| CheckpointError::Write { path: path.into(), why };
        if fs::symlink_metadata(path).is_err() {
            fs::rename(temporary, path).map_err(error)?;
            return files::sync_directory(&self.directory).map_err(error);
        }
        if verify(path).is_ok_and(|there| there.blake3 == manifest.blake3) {
            return fs::remove_dir_all(temporary).map_err(error);
        }
        let old = files::beside(path, OLD);
        remove_if_there(&old).and_then(|()| fs::rename(path, &old)).map_err(error)?;
        if let Err(why) = fs::rename(temporary, path) {
            // If this fails too, the next start renames it back.
            let _ = fs::rename(&old, path);
            return Err(error(why));
        }
        files::sync_directory(&self.directory).map_err(error)?;
        // The new checkpoint is safe; if the old one cannot be removed, the next start tries
        // again.
        let _ = fs::remove_dir_all(&old);
        Ok(())
    }

    /// Loads the newest checkpoint or, if it is damaged, the one before, with a warning. An older
    /// one would lose more than a run should without the user's decision.
    ///
    /// # Errors
    /// Returns `CheckpointError::None` if there is no checkpoint. If all checkpoints tried are of
    /// other versions, returns the `CheckpointError::Format` or `CheckpointError::Needs` of the
    /// newest. Otherwise returns `CheckpointError::NoneGood`, which names an older checkpoint if
    /// one is left.
    pub fn load_latest(&self) -> Result<(Checkpoint, Vec<String>), CheckpointError> {
        let mut errors = Vec::new();
        let texts = |errors: &[CheckpointError]| -> Vec<String> {
            errors.iter().map(ToString::to_string).collect()
        };
        let mut steps = self.steps()?.into_iter().rev();
        for step in steps.by_ref().take(FALL_BACK_MAX) {
            match Checkpoint::load_with_warnings(&self.path(step)) {
                Ok((checkpoint, warnings)) => {
                    let mut all = texts(&errors);
                    if !errors.is_empty() {
                        let path = self.path(step);
                        all.push(format!("{}, the checkpoint before, is taken", path.display()));
                    }
                    all.extend(warnings);
                    return Ok((checkpoint, all));
                }
                Err(error) => errors.push(error),
            }
        }
        let path = self.directory.clone();
        if errors.is_empty() {
            return Err(CheckpointError::None { path });
        }
        // Checkpoints of another version of potluck are good for that version.
        if errors.iter().all(CheckpointError::is_of_another_version) {
            return Err(errors.swap_remove(0));
        }
        let older = steps.next().map(|step| self.path(step));
        Err(CheckpointError::NoneGood { path, reasons: texts(&errors), older })
    }

    /// Loads the newest checkpoint for use without training: its moments are neither read nor
    /// needed, and averages replace the parameters that have one.
    ///
    /// # Errors
    /// Returns `CheckpointError::None` if there is no checkpoint, and the errors of
    /// [`Checkpoint::load`] for its other files. Does not fall back to an older checkpoint, which
    /// has other parameters.
    pub fn load_newest_parameters(&self) -> Result<(Checkpoint, Vec<String>), CheckpointError> {
        let newest = self.steps()?.last().copied();
        let none = || CheckpointError::None { path: self.directory.clone() };
        Checkpoint::load_parameters(&self.path(newest.ok_or_else(none)?))
    }

    /// Returns the metadata of the newest checkpoint with a good manifest, without reading its
    /// tensors; `None` if there is no checkpoint.
    ///
    /// # Errors
    /// Returns the `CheckpointError` of the newest manifest if none is good.
    pub fn newest_meta(&self) -> Result<Option<Meta>, CheckpointError> {
        let mut first = None;
        for step in self.steps()?.into_iter().rev() {
            match Manifest::read(&self.path(step)) {
                Ok(manifest) => return Ok(Some(manifest.meta)),
                Err(error) => first = first.or(Some(error)),
            }
        }
        first.map_or(Ok(None), Err)
    }

    /// Waits up to half a second until no process writes to the run.
    ///
    /// # Errors
    /// Returns `CheckpointError::InUse` if one still does.
    pub fn wait_until_free(&self) -> Result<(), CheckpointError> {
        match self.directory.parent() {
            Some(run) => lock::wait(run),
            None => Ok(()),
        }
    }

    /// Returns true if a process writes to the run; false where the file system has no locks.
    pub fn is_in_use(&self) -> bool {
        self.directory.parent().is_some_and(lock::is_held)
    }

    /// Loads the checkpoint marked as the best one like [`Store::load_newest_parameters`], with a
    /// warning if its manifest has unknown fields.
    ///
    /// # Errors
    /// Returns `CheckpointError::None` if none is marked, `CheckpointError::Best` if the mark is
    /// damaged, and the errors of [`Checkpoint::load`].
    pub fn load_best(&self) -> Result<(Checkpoint, Vec<String>), CheckpointError> {
        let none = || CheckpointError::None { path: self.directory.join(BEST) };
        let step = self.best()?.ok_or_else(none)?;
        Checkpoint::load_parameters(&self.path(step))
    }

    /// Removes old checkpoints and returns their steps. Keeps the newest `keep` (at least 2) that
    /// verify, damaged ones newer than these, and the best one.
    pub fn prune(&mut self, keep: usize) -> Result<Vec<u64>, CheckpointError> {
        self.check_writable()?;
        let steps = self.steps()?;
        let newest = steps.last().copied().unwrap_or(0);
        self.faults
            .at_write(Point::CheckpointPrune, newest)
            .map_err(|why| self.write_error(why))?;
        let best = self.best()?;
        let mut kept = 0;
        let mut removed = Vec::new();
        for step in steps.into_iter().rev() {
            let path = self.path(step);
            if kept < keep.max(KEEP_MIN) {
                if self.verified.contains(&step) || verify(&path).is_ok() {
                    self.verified.insert(step);
                    kept += 1;
                }
            } else if best != Some(step) {
                self.move_to(step, GONE)?;
                let gone = files::beside(&path, GONE);
                fs::remove_dir_all(&gone).map_err(|why| self.write_error(why))?;
                removed.push(step);
            }
        }
        Ok(removed)
    }

    /// Removes the mark of the best checkpoint, if any; the checkpoint stays.
    pub fn unmark_best(&mut self) -> Result<(), CheckpointError> {
        self.check_writable()?;
        let path = self.directory.join(BEST);
        match fs::remove_file(&path) {
            Err(why) if why.kind() != io::ErrorKind::NotFound => {
                Err(CheckpointError::Write { path, why })
            }
            _ => Ok(()),
        }
    }

    /// Marks the checkpoint of this step as the best one, which is never pruned.
    pub fn mark_best(&mut self, step: u64) -> Result<(), CheckpointError> {
        self.check_writable()?;
        if !self.path(step).is_dir() {
            return Err(CheckpointError::None { path: self.path(step) });
        }
        let path = self.directory.join(BEST);
        files::replace(&path, format!("{}\n", directory_name(step)).as_bytes())
            .map_err(|why| CheckpointError::Write { path, why })
    }

    /// Returns the step of the checkpoint marked as the best one.
    ///
    /// # Errors
    /// Returns `CheckpointError::Best` if the mark is damaged or cannot be read.
    pub fn best(&self) -> Result<Option<u64>, CheckpointError> {
        let path = self.directory.join(BEST);
        match fs::read_to_string(&path) {
            Ok(text) => match step_of(Path::new(text.trim_end())) {
                Some(step) => Ok(Some(step)),
                None => Err(CheckpointError::Best { path, why: "it names no step".into() }),
            },
            Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(why) => Err(CheckpointError::Best { path, why: why.to_string() }),
        }
    }

    /// Returns the evaluation of the checkpoint that is marked as the best one; `None` if there is
    /// none with a good manifest.
    pub fn marked_evaluation(&self) -> Option<Best> {
        let marked = self.best().ok()??;
        let meta = Manifest::read(&self.path(marked)).ok()?.meta;
        meta.best.filter(|best| best.step == marked)
    }

    /// Returns the metadata of a loaded checkpoint as they are now: another start of the run may
    /// have evaluated it and saved it again since. Those that were loaded, if the checkpoint is
    /// gone or is of another state.
    pub(crate) fn evaluated_since(&self, loaded: &Meta) -> Meta {
        match Manifest::read(&self.path(loaded.step)) {
            Ok(there) if there.meta.equals_but_for_best(loaded) => there.meta,
            _ => loaded.clone(),
        }
    }

    /// Adds an ending to the directory name of a step's checkpoint. Replaces a directory of the new
    /// name, which is one about to be removed.
    fn move_to(&mut self, step: u64, ending: &str) -> Result<(), CheckpointError> {
        let path = self.path(step);
        let target = files::beside(&path, ending);
        remove_if_there(&target)
            .and_then(|()| fs::rename(&path, &target))
            .and_then(|()| files::sync_directory(&self.directory))
            .map_err(|why| self.write_error(why))?;
        self.verified.remove(&step);
        Ok(())
    }

    /// Finishes or undoes the writes, replacements and removals that a crash interrupted.
    fn clean_up(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.directory)? {
            let path = entry?.path();
            let is = |ending| without(&path, ending).is_some_and(|path| step_of(&path).is_some());
            if is(TEMPORARY) || is(GONE) {
                remove_if_there(&path)?;
            } else if let Some(original) = without(&path, OLD).filter(|p| step_of(p).is_some()) {
                if original.exists() {
                    remove_if_there(&path)?;
                } else {
                    fs::rename(&path, &original)?;
                }
            }
        }
        files::sync_directory(&self.directory)
    }

    fn check_writable(&self) -> Result<(), CheckpointError> {
        match self.lock {
            Some(_) => Ok(()),
            None => Err(CheckpointError::ReadOnly { path: self.directory.clone() }),
        }
    }

    fn write_error(&self, why: io::Error) -> CheckpointError {
        CheckpointError::Write { path: self.directory.clone(), why }
    }
}

pub(super) fn directory(run: &Path) -> PathBuf {
    run.join(DIRECTORY)
}

/// Path without an ending; `None` if it does not have the ending.
fn without(path: &Path, ending: &str) -> Option<PathBuf> {
    let stem = path.file_name()?.to_str()?.strip_suffix(ending)?;
    Some(path.with_file_name(stem))
}

fn tensors_of<'a>(checkpoint: &'a Checkpoint, file: &str) -> &'a [NamedTensor] {
    match file {
        MOMENTS => &checkpoint.moments,
        AVERAGES => &checkpoint.averages,
        CARRIED => &checkpoint.carried,
        _ => &checkpoint.parameters,
    }
}

/// Writes the file of a tokenizer, synced to the disk on return.
fn write_tokenizer(path: &Path, tokenizer: &TokenizerFile) -> io::Result<FileEntry> {
    let mut file = fs::File::create_new(path)?;
    file.write_all(tokenizer.json())?;
    file.sync_all()?;
    Ok(FileEntry {
        name: TOKENIZER.into(),
        bytes: tokenizer.json().len() as u64,
        blake3: tokenizer.blake3().into(),
        slices: BTreeMap::new(),
    })
}

/// Verifies the manifest of a checkpoint directory, and its files against the manifest.
fn verify(directory: &Path) -> Result<Manifest, CheckpointError> {
    let manifest = Manifest::read(directory)?;
    for entry in &manifest.files {
        tensors::verify(&directory.join(&entry.name), entry)?;
    }
    Ok(manifest)
}

fn remove_if_there(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(why) if why.kind() != io::ErrorKind::NotFound => Err(why),
        _ => Ok(()),
    }
}
