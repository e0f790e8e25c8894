//! Recorder of a run: a file with one line of JSON per step, per evaluation and per measure.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::event::JsonLine;
use super::{Event, MetricsError, Sink};
use crate::files;

/// Appends steps, evaluations and measures to a file; each is written to the file (though not yet
/// synced to the disk) when [`Recorder::event`] returns.
#[derive(Debug)]
pub struct Recorder {
    path: PathBuf,
    file: File,
    /// Length of the file in bytes, up to the end of the last complete line.
    length: u64,
}

impl Recorder {
    /// Creates the empty record of a new run. Returns also how many lines of another run's record
    /// were there; they move to the end of the file [`aside`].
    pub fn create(path: &Path) -> Result<(Self, u64), MetricsError> {
        let Truncation { dropped, damaged, .. } = truncate(path, None)?;
        let file = File::create(path).map_err(|why| write_error(path, why))?;
        Ok((Self { path: path.into(), file, length: 0 }, dropped + damaged))
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
        Ok((Self { path: path.into(), file, length }, truncation))
    }

    /// Appends one line. If that fails, nothing of the line stays in the file, so that later
    /// lines can still be appended.
    fn record(&mut self, record: &impl Serialize) -> Result<(), MetricsError> {
        let mut line =
            serde_json::to_vec(record).map_err(|why| write_error(&self.path, why.into()))?;
        line.push(b'\n');
        if let Err(why) = self.file.write_all(&line) {
            // Best effort: if this fails too, resuming drops the torn line.
            let _ = self.file.set_len(self.length);
            let _ = self.file.seek(SeekFrom::Start(self.length));
            return Err(write_error(&self.path, why));
        }
        self.length += line.len() as u64;
        Ok(())
    }
}

impl Sink for Recorder {
    fn event(&mut self, event: &Event) -> Result<(), MetricsError> {
        match event {
            Event::Step(record) => self.record(&JsonLine(record)),
            Event::Evaluation(record) => self.record(&JsonLine(record)),
            Event::Measure(record) => self.record(&record.json()),
            Event::Note(_)
            | Event::Warning(_)
            | Event::Tuning { .. }
            | Event::Started { .. }
            | Event::Evaluating { .. }
            | Event::Saving { .. }
            | Event::Checkpoint { .. }
            | Event::Ended => Ok(()),
        }
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
/// after what leaves it is on the disk. A missing record stays missing.
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
                Ok(0) => return left.sync().and_then(|()| kept.flush()),
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
                    truncation.val_loss =
                        val_loss.filter(|_| Some(found) == step).or(truncation.val_loss);
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
    Some((line.get("step")?.as_u64()?, line.get("val_loss").and_then(|loss| loss.as_f64())))
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
    fn a_full_disk_is_an_error_and_not_a_torn_line() {
        let path = PathBuf::from("/dev/full");
        let file = File::create(&path).unwrap();
        let mut recorder = Recorder { path, file, length: 0 };
        let error = recorder.event(&Event::Step(step(1))).unwrap_err();
        assert!(matches!(
            &error,
            MetricsError::Write { why, .. } if why.kind() == io::ErrorKind::StorageFull
        ));
        assert_eq!(recorder.length, 0);
    }
}
