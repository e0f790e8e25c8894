//! Recorder of a run: a file with one line of JSON per step, per evaluation and per measure.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Seek, SeekFrom, Write};
use std::mem;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::event::JsonLine;
use super::{Event, MetricsError, Sink};
use crate::faults::{Faults, Point};
use crate::files;
use crate::format::counted;

/// Most bytes of lines that wait to be written.
const WAITING_BYTES_MAX: usize = 64 << 20;
/// Longest time in which neither a line nor a checkpoint can be written.
const UNWRITTEN_MAX: Duration = Duration::from_secs(3600);

/// Appends steps, evaluations and measures to a file; each is written to the file (though not yet
/// synced to the disk) when [`Recorder::event`] returns. While the disk is full or unavailable,
/// lines are kept in memory and written before later ones: a lost line does not end a run.
#[derive(Debug)]
pub struct Recorder {
    path: PathBuf,
    file: File,
    /// Length of the file in bytes, up to the end of the last complete line.
    length: u64,
    waiting: VecDeque<Vec<u8>>,
    waiting_bytes: usize,
    /// First failure since the last line or checkpoint that was written.
    failing_since: Option<Instant>,
    /// Event for the user.
    news: Option<Event>,
    /// Faults to inject, for tests.
    faults: Faults,
}

impl Recorder {
    /// Creates the empty record of a new run. Returns also the number of lines of another run's
    /// record at this path; they move to the end of the file [`aside`].
    pub fn create(path: &Path) -> Result<(Self, u64), MetricsError> {
        let Truncation { dropped, damaged, .. } = truncate(path, None)?;
        let file = File::create(path).map_err(|why| write_error(path, why))?;
        Ok((Self::of(path, file, 0), dropped + damaged))
    }

    fn of(path: &Path, file: File, length: u64) -> Self {
        Self {
            path: path.into(),
            file,
            length,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            failing_since: None,
            news: None,
            faults: Faults::none(),
        }
    }

    /// Injects faults at the writes of steps, for tests.
    #[must_use]
    pub fn with_faults(self, faults: Faults) -> Self {
        Self { faults, ..self }
    }

    /// Opens the record of a run that is resumed after `step`, cut by [`truncate_after`]. A
    /// record that is missing starts empty.
    pub fn resume(path: &Path, step: u64) -> Result<(Self, Truncation), MetricsError> {
        let truncation = truncate_after(path, step)?;
        // Not in append mode, in which Windows may refuse to truncate a torn line.
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(|why| write_error(path, why))?;
        let length = file.seek(SeekFrom::End(0)).map_err(|why| write_error(path, why))?;
        Ok((Self::of(path, file, length), truncation))
    }

    /// Appends one line after the waiting ones. `prepared` is an injected error of a step's write,
    /// in tests.
    fn record(
        &mut self,
        record: &impl Serialize,
        prepared: io::Result<()>,
    ) -> Result<(), MetricsError> {
        let mut line =
            serde_json::to_vec(record).map_err(|why| write_error(&self.path, why.into()))?;
        line.push(b'\n');
        self.waiting_bytes += line.len();
        self.waiting.push_back(line);
        let waited = self.waiting.len() - 1;
        let written = match prepared {
            Ok(()) => self.write_waiting(),
            Err(why) => Err(why),
        };
        match written {
            Ok(()) => {
                self.note_written(waited);
                Ok(())
            }
            Err(why) => self.keep(why, waited == 0),
        }
    }

    /// Records that the file can be written, and notifies the user if lines had waited for that.
    fn note_written(&mut self, waited: usize) {
        self.failing_since = None;
        if waited > 0 {
            self.news = Some(Event::Note(format!(
                "{}: written again; {} had waited",
                self.path.display(),
                counted(waited, "line", "lines")
            )));
        }
    }

    /// Writes the waiting lines, in order. Nothing of a failed line stays in the file, so that it
    /// can still be appended later.
    fn write_waiting(&mut self) -> io::Result<()> {
        while let Some(line) = self.waiting.front() {
            if let Err(why) = self.file.write_all(line) {
                // Best effort: if this fails too, resuming drops the torn line.
                let _ = self.file.set_len(self.length);
                let _ = self.file.seek(SeekFrom::Start(self.length));
                return Err(why);
            }
            self.length += line.len() as u64;
            self.waiting_bytes -= line.len();
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// Keeps lines that could not be written; the user is warned at the first one.
    fn keep(&mut self, why: io::Error, is_first: bool) -> Result<(), MetricsError> {
        let since = *self.failing_since.get_or_insert_with(Instant::now);
        if since.elapsed() > UNWRITTEN_MAX || self.waiting_bytes > WAITING_BYTES_MAX {
            return Err(write_error(&self.path, why));
        }
        if is_first {
            let advice = if files::is_disk_full(&why) { "; free space there" } else { "" };
            self.news = Some(Event::Warning(format!(
                "{}: cannot be written ({why}); the run goes on, and keeps its lines until they \
                 can be{advice}",
                self.path.display()
            )));
        }
        Ok(())
    }
}

impl Sink for Recorder {
    fn event(&mut self, event: &Event) -> Result<(), MetricsError> {
        match event {
            Event::Step(record) => {
                let prepared = self.faults.at_write(Point::Metrics, record.step);
                self.record(&JsonLine(record), prepared)
            }
            Event::Evaluation(record) => self.record(&JsonLine(record), Ok(())),
            Event::Measure(record) => self.record(&record.json(), Ok(())),
            Event::Shares(record) => self.record(&JsonLine(record), Ok(())),
            Event::Cost(cost) => self.record(&cost.json(), Ok(())),
            Event::Saving { .. } => {
                // A checkpoint that outlives a loss of power needs the lines before it; a disk that
                // cannot keep them fails the checkpoint too.
                let _ = self.file.sync_data();
                Ok(())
            }
            Event::Checkpoint { .. } => {
                // The run is safe, and the disk has room, perhaps for the waiting lines too.
                self.failing_since = None;
                let waited = self.waiting.len();
                if self.write_waiting().is_ok() {
                    self.note_written(waited);
                }
                Ok(())
            }
            Event::Ended => {
                let waited = self.waiting.len();
                self.write_waiting().map_err(|why| write_error(&self.path, why))?;
                self.note_written(waited);
                Ok(())
            }
            Event::Note(_)
            | Event::Warning(_)
            | Event::Opening
            | Event::Measuring
            | Event::Tuning { .. }
            | Event::Started { .. }
            | Event::Evaluating { .. } => Ok(()),
        }
    }

    fn take_news(&mut self) -> Option<Event> {
        mem::take(&mut self.news)
    }
}

/// Result of [`truncate_after`], in lines.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Truncation {
    pub kept: u64,
    /// Lines of later steps, which were set aside.
    pub dropped: u64,
    /// Lines that are not JSON with a step, such as a last line torn by a crash, which were set
    /// aside too.
    pub damaged: u64,
    /// Loss of the evaluation after exactly this step, if there was one; it need not be repeated.
    pub val_loss: Option<f64>,
}

/// Returns the path of the file to which [`truncate_after`] moves lines of a record.
pub fn aside(path: &Path) -> PathBuf {
    files::beside(path, ".aside")
}

/// Truncates a record after the step that a run is resumed from: moves lines of later steps and
/// damaged lines to the end of the file [`aside`]. The record is replaced whole or not at all,
/// after the moved lines are on the disk. A missing record stays missing.
pub(crate) fn truncate_after(path: &Path, step: u64) -> Result<Truncation, MetricsError> {
    truncate(path, Some(step))
}

/// Like [`truncate_after`]; without a step, all lines move.
fn truncate(path: &Path, step: Option<u64>) -> Result<Truncation, MetricsError> {
    let read_error = |why| MetricsError::Read { path: path.into(), why };
    let record = match File::open(path) {
        Ok(record) => record,
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(Truncation::default()),
        Err(why) => return Err(read_error(why)),
    };
    let mut truncation = Truncation::default();
    let mut unread = None;
    let mut left = LinesAside { path: aside(path), file: None };
    let written = files::replace_with(path, |file| {
        // Closed when this returns, before the rename, which Windows refuses for open files.
        let mut reader = BufReader::new(record);
        let mut kept = BufWriter::new(file);
        let mut line = Vec::new();
        loop {
            line.clear();
            match reader.read_until(b'\n', &mut line) {
                Ok(0) => {
                    left.sync()?;
                    return kept.flush();
                }
                Ok(_) => {}
                Err(why) => {
                    let kind = why.kind();
                    unread = Some(why);
                    return Err(kind.into());
                }
            }
            match read_line(&line) {
                Some((found, val_loss)) if step.is_some_and(|step| found <= step) => {
                    kept.write_all(&line)?;
                    truncation.kept += 1;
                    if Some(found) == step && val_loss.is_some() {
                        truncation.val_loss = val_loss;
                    }
                }
                found => {
                    left.append(&line)?;
                    match found {
                        Some(_) => truncation.dropped += 1,
                        None => truncation.damaged += 1,
                    }
                }
            }
        }
    });
    match (written, unread) {
        (_, Some(why)) => Err(read_error(why)),
        (Err(why), None) => Err(write_error(path, why)),
        (Ok(()), None) => Ok(truncation),
    }
}

/// File of lines that leave a record; opened when there is one.
struct LinesAside {
    path: PathBuf,
    file: Option<BufWriter<File>>,
}

impl LinesAside {
    /// Appends a line, with its end if it has none.
    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        if self.file.is_none() {
            let file = OpenOptions::new().append(true).create(true).open(&self.path)?;
            self.file = Some(BufWriter::new(file));
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        file.write_all(line)?;
        if line.ends_with(b"\n") { Ok(()) } else { file.write_all(b"\n") }
    }

    /// Syncs the appended lines to the disk.
    fn sync(&mut self) -> io::Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        file.flush()?;
        file.get_ref().sync_all()
    }
}

/// Parses a complete line: its step, and its loss if it is an evaluation's.
fn read_line(line: &[u8]) -> Option<(u64, Option<f64>)> {
    let line = line.strip_suffix(b"\n")?;
    let line: serde_json::Value = serde_json::from_slice(line).ok()?;
    // JSON has no number for a loss that is not finite.
    let val_loss = line.get("val_loss").map(|loss| loss.as_f64().unwrap_or(f64::NAN));
    Some((line.get("step")?.as_u64()?, val_loss))
}

fn write_error(path: &Path, why: io::Error) -> MetricsError {
    MetricsError::Write { path: path.into(), why }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::EvalRecord;
    use crate::metrics::event::tests::step;
    use std::fs;

    fn evaluation(step: u64, val_loss: f64) -> Event {
        let (samples, targets) = (2, 16);
        Event::Evaluation(EvalRecord {
            step,
            val_loss,
            metrics: Vec::new(),
            terms: Vec::new(),
            samples,
            targets,
            is_best: false,
        })
    }

    fn steps(path: &Path) -> Vec<u64> {
        let text = fs::read_to_string(path).unwrap();
        assert!(text.is_empty() || text.ends_with('\n'));
        text.lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
            .map(|value| value["step"].as_u64().unwrap())
            .collect()
    }

    #[test]
    fn resuming_cuts_the_record_at_the_step() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        let (mut recorder, _) = Recorder::create(&path).unwrap();
        recorder.event(&evaluation(0, 4.0)).unwrap();
        for number in 1..=5 {
            recorder.event(&Event::Step(step(number))).unwrap();
        }
        recorder.event(&evaluation(3, 3.0)).unwrap();
        assert_eq!(steps(&path), [0, 1, 2, 3, 4, 5, 3]);
        drop(recorder);

        let (mut recorder, truncation) = Recorder::resume(&path, 3).unwrap();
        assert_eq!(truncation, Truncation { kept: 5, dropped: 2, damaged: 0, val_loss: Some(3.0) });
        recorder.event(&Event::Note("not a line".into())).unwrap();
        recorder.event(&Event::Step(step(4))).unwrap();
        recorder.event(&Event::Step(step(5))).unwrap();
        assert_eq!(steps(&path), [0, 1, 2, 3, 3, 4, 5]);
        assert_eq!(steps(&aside(&path)), [4, 5]);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
        drop(recorder);

        // Lines that were set aside stay.
        Recorder::resume(&path, 4).unwrap();
        assert_eq!((steps(&path), steps(&aside(&path))), (vec![0, 1, 2, 3, 3, 4], vec![4, 5, 5]));
    }

    #[test]
    fn a_loss_that_is_not_finite_is_an_evaluation_too() {
        let (step, val_loss) = read_line(b"{\"step\":3,\"val_loss\":null}\n").unwrap();
        assert!(step == 3 && val_loss.unwrap().is_nan());
        assert_eq!(read_line(b"{\"step\":3,\"loss\":2.5}\n"), Some((3, None)));
    }

    #[test]
    fn a_torn_last_line_goes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        for torn in
            ["{\"step\":2,\"lo", "{\"step\":2}", "\0\0\0\n", "{\"step\":null}\n", "\u{FF}\n"]
        {
            fs::write(&path, format!("{{\"step\":1}}\n{torn}")).unwrap();
            let (mut recorder, truncation) = Recorder::resume(&path, 9).unwrap();
            let expected = Truncation { kept: 1, damaged: 1, ..Truncation::default() };
            assert_eq!(truncation, expected, "{torn:?}");
            recorder.event(&Event::Step(step(2))).unwrap();
            assert_eq!(steps(&path), [1, 2]);
            let kept = fs::read(aside(&path)).unwrap();
            assert!(kept.ends_with(format!("{}\n", torn.trim_end()).as_bytes()), "{torn:?}");
        }
    }

    #[test]
    fn a_new_record_starts_empty_and_sets_another_one_aside() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        let (mut recorder, truncation) = Recorder::resume(&path, 9).unwrap();
        assert_eq!(truncation, Truncation::default());
        recorder.event(&Event::Step(step(10))).unwrap();
        let (mut recorder, moved) = Recorder::create(&path).unwrap();
        assert_eq!((moved, steps(&path), steps(&aside(&path))), (1, vec![], vec![10]));
        recorder.event(&Event::Step(step(3))).unwrap();
        let (_, moved) = Recorder::create(&path).unwrap();
        assert_eq!((moved, steps(&path), steps(&aside(&path))), (1, vec![], vec![10, 3]));
        assert_eq!(Recorder::create(&path).unwrap().1, 0);
    }

    #[test]
    fn errors_name_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let missing = directory.path().join("none/metrics.jsonl");
        let error = Recorder::create(&missing).unwrap_err().to_string();
        assert!(error.contains("none/metrics.jsonl: cannot be written"), "{error}");
    }

    /// Writes to a device that is always full, on the platform that has one.
    #[test]
    #[cfg(target_os = "linux")]
    fn lines_wait_while_a_disk_is_full_and_are_written_in_order_when_it_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        let full = File::create("/dev/full").unwrap();
        let mut recorder = Recorder::of(&path, full, 0);
        recorder.event(&Event::Step(step(1))).unwrap();
        let Some(Event::Warning(text)) = recorder.take_news() else { panic!("no warning") };
        assert!(
            text.contains("(No space left on device (os error 28)); the run goes on"),
            "{text}"
        );
        recorder.event(&Event::Step(step(2))).unwrap();
        assert_eq!(recorder.take_news(), None);
        let error = recorder.event(&Event::Ended).unwrap_err();
        assert!(error.is_disk_full(), "{error}");
        assert_eq!((recorder.length, recorder.waiting.len()), (0, 2));

        recorder.file = File::create(&path).unwrap();
        recorder.event(&Event::Checkpoint { step: 2 }).unwrap();
        assert_eq!(steps(&path), [1, 2]);
        recorder.event(&Event::Step(step(3))).unwrap();
        let Some(Event::Note(text)) = recorder.take_news() else { panic!("no note") };
        assert!(text.ends_with("written again; 2 lines had waited"), "{text}");
        recorder.event(&Event::Ended).unwrap();
        assert_eq!(steps(&path), [1, 2, 3]);
        assert_eq!(recorder.waiting_bytes, 0);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_record_fails_if_nothing_can_be_written_for_an_hour_not_even_a_checkpoint() {
        let full = File::create("/dev/full").unwrap();
        let mut recorder = Recorder::of(Path::new("metrics.jsonl"), full, 0);
        recorder.event(&Event::Step(step(1))).unwrap();
        let hours_ago = Instant::now().checked_sub(2 * UNWRITTEN_MAX).unwrap();
        recorder.failing_since = Some(hours_ago);
        recorder.event(&Event::Checkpoint { step: 1 }).unwrap();
        recorder.event(&Event::Step(step(2))).unwrap();
        recorder.failing_since = Some(hours_ago);
        recorder.event(&Event::Step(step(3))).unwrap_err();
        let mut recorder =
            Recorder { waiting_bytes: WAITING_BYTES_MAX, failing_since: None, ..recorder };
        recorder.event(&Event::Step(step(4))).unwrap_err();
    }
}
