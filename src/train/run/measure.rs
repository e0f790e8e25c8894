//! Measure of a run's model at its end, defined by its task, and the files of measures.

use std::path::{Path, PathBuf};
use std::{fs, io};

use super::Run;
use crate::error::TrainError;
use crate::task::{FinalMeasure, MEASURES};
use potluck_core::files;
use potluck_core::metrics::Event;

impl Run {
    /// Measures the model, writes the text of the measure to `NAME-STEP.txt`, and emits its values.
    /// Returns the sentence for the user; `None` if the task has no measure, if the run generates
    /// no samples, or if a signal arrives.
    ///
    /// # Errors
    /// Returns `TrainError` if a device or a sink fails, or if the file cannot be written.
    pub(super) fn measure(&mut self) -> Result<Option<String>, TrainError> {
        if self.spec.sample_tokens == 0 || self.fit.signals.pending().is_some() {
            return Ok(None);
        }
        self.emit(Event::Measuring)?;
        let measured = self.at_end(|task, ending| task.measure(ending))?;
        let Some(FinalMeasure { summary, record, text }) = measured else { return Ok(None) };
        if let Some(text) = text {
            let path = self.host.options.out.join(file_name(&record.name, self.step()));
            if self.is_there(&path, &text)? {
                // The record already contains it.
                return Ok(Some(summary));
            }
            files::replace(&path, text.as_bytes()).map_err(|why| TrainError::Io { path, why })?;
        }
        self.emit(Event::Measure(record))?;
        Ok(Some(summary))
    }

    /// Returns true if a file already has this text; sets a file from another course of the run
    /// aside.
    fn is_there(&mut self, path: &Path, text: &str) -> Result<bool, TrainError> {
        match fs::read(path) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(false),
            Ok(found) if found == text.as_bytes() => return Ok(true),
            _ => {}
        }
        let aside = files::set_aside(path).map_err(|why| TrainError::Io { path: path.into(), why });
        self.note(format!("set aside: {} as {}", path.display(), aside?.display()))?;
        Ok(false)
    }

    /// Sets the files of steps after the step of this start aside and returns their new paths,
    /// oldest first.
    pub(super) fn set_later_measures_aside(&self) -> Result<Vec<PathBuf>, TrainError> {
        let out = &self.host.options.out;
        let entries = fs::read_dir(out).map_err(|why| TrainError::Io { path: out.clone(), why })?;
        let mut later = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|why| TrainError::Io { path: out.clone(), why })?;
            let path = entry.path();
            if let Some(step) = step_of(&path)
                && step > self.step()
            {
                later.push((step, path));
            }
        }
        later.sort_unstable();
        let mut aside = Vec::with_capacity(later.len());
        for (_, path) in later {
            aside.push(files::set_aside(&path).map_err(|why| TrainError::Io { path, why })?);
        }
        Ok(aside)
    }
}

fn file_name(measure: &str, step: u64) -> String {
    format!("{measure}-{step:08}.txt")
}

fn step_of(path: &Path) -> Option<u64> {
    let (measure, step) = path.file_name()?.to_str()?.strip_suffix(".txt")?.rsplit_once('-')?;
    if !MEASURES.contains(&measure) {
        return None;
    }
    step.parse().ok()
}
