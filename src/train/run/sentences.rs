//! Measure of the sentences of a run on the built-in corpus, at its end.

use super::Run;
use crate::files;
use crate::metrics::{Event, SentenceRecord};
use crate::train::error::TrainError;
use crate::train::sentences::{SampledSentences, measure_sentences};
use crate::train::spec::DataSource;

impl Run {
    /// Samples sentences, writes them to `sentences-STEP.txt`, and emits their counts. Returns
    /// `None` if the run is on another text or samples nothing, or if a signal arrives.
    ///
    /// # Errors
    /// Returns `TrainError` if a device or a sink fails, or if the file cannot be written.
    pub(super) fn measure_sentences(&mut self) -> Result<Option<SentenceRecord>, TrainError> {
        if self.spec.data.source != DataSource::Builtin || self.spec.sample_tokens == 0 {
            return Ok(None);
        }
        let (data, model) = (&self.source.data, self.source.model);
        let ranks = self.placement.ranks.iter();
        let rows: Vec<u32> = ranks.map(|rank| rank.micro_batch.min(rank.share)).collect();
        let stop = || self.signals.pending().is_some();
        let from = (self.step, self.spec.seed);
        let sampled = measure_sentences(&self.group, data.tokenizer(), model, &rows, from, stop)?;
        let Some(SampledSentences { lines, held_out_sums, record }) = sampled else {
            return Ok(None);
        };
        // A later measure, of a resumed run, does not replace it.
        let path = self.options.out.join(format!("sentences-{:08}.txt", self.step));
        let text: String = lines.iter().chain(&held_out_sums).map(|l| format!("{l}\n")).collect();
        files::replace(&path, text.as_bytes()).map_err(|why| TrainError::Io { path, why })?;
        self.emit(Event::Sentences(record))?;
        Ok(Some(record))
    }
}
