//! Measure of the sentences of a run on the built-in corpus, at its end.

use std::path::{Path, PathBuf};
use std::{fs, io};

use super::Run;
use crate::files;
use crate::metrics::{Event, SentenceRecord};
use crate::train::error::TrainError;
use crate::train::sentences::SampledSentences;

/// Parts of the names of files of sentences, around the step.
const PREFIX: &str = "sentences-";
const ENDING: &str = ".txt";

impl Run {
    /// Samples sentences, writes them to `sentences-STEP.txt`, and emits their counts. Returns
    /// `None` if the run is on another text or samples nothing, or if a signal arrives.
    ///
    /// # Errors
    /// Returns `TrainError` if a device or a sink fails, or if the file cannot be written.
    pub(super) fn measure_sentences(&mut self) -> Result<Option<SentenceRecord>, TrainError> {
        if self.spec.sample_tokens == 0 {
            return Ok(None);
        }
        let sampled = self.at_end(|ending| self.fit.options.task.sentences(ending))?;
        let Some(SampledSentences { lines, held_out_sums, record }) = sampled else {
            return Ok(None);
        };
        let path = self.host.options.out.join(format!("{PREFIX}{:08}{ENDING}", self.step()));
        let mut text = String::new();
        for line in lines.iter().chain(&held_out_sums) {
            text += &format!("{line}\n");
        }
        self.keep_other_sentences(&path, &text)?;
        files::replace(&path, text.as_bytes()).map_err(|why| TrainError::Io { path, why })?;
        self.emit(Event::Sentences(record))?;
        Ok(Some(record))
    }

    /// Sets a file of another course of the run aside, if there is one.
    fn keep_other_sentences(&mut self, path: &Path, text: &str) -> Result<(), TrainError> {
        match fs::read(path) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(()),
            Ok(found) if found == text.as_bytes() => return Ok(()),
            _ => {}
        }
        let aside = files::set_aside(path).map_err(|why| TrainError::Io { path: path.into(), why });
        self.note(format!("set aside: {} as {}", path.display(), aside?.display()))
    }

    /// Sets the files of steps after this start's aside and returns their new paths, oldest first.
    pub(super) fn set_later_sentences_aside(&self) -> Result<Vec<PathBuf>, TrainError> {
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

/// Returns the step of a file of sentences.
fn step_of(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix(PREFIX)?.strip_suffix(ENDING)?.parse().ok()
}
