//! Event files of TensorBoard: a sink that writes the scalars of a run's steps and evaluations.

pub mod format;

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use super::{EvalRecord, Event, MetricsError, Sink, StepRecord};
use format::EventContent;

/// Beginning of the names of event files, by which TensorBoard finds them.
const PREFIX: &str = "events.out.tfevents.";
/// Longest time for which an event is buffered while other events follow.
const BUFFER_TIME: Duration = Duration::from_secs(5);

/// Sink that writes an event file. Events are in the file at the latest after the next evaluation
/// or checkpoint, and at the end. After a failure the file is left as it is.
#[derive(Debug)]
pub struct TensorBoard {
    path: PathBuf,
    /// `None` after a failure.
    file: Option<BufWriter<File>>,
    /// Time of the last write of the buffer.
    flushed: Instant,
}

impl TensorBoard {
    /// Creates an event file for the steps from `first` on in a directory, which is created if it
    /// is missing. TensorBoard drops what earlier files there have at these steps.
    ///
    /// # Errors
    /// Returns [`MetricsError::Chart`] if the file cannot be written.
    pub fn create(directory: &Path, first: u64) -> Result<Self, MetricsError> {
        let failed = |path: &Path, why| MetricsError::Chart { path: path.into(), why };
        fs::create_dir_all(directory).map_err(|why| failed(directory, why))?;
        let path = free_path(directory).map_err(|why| failed(directory, why))?;
        let file = File::create_new(&path).map_err(|why| failed(&path, why))?;
        let mut opened = Self { path, file: Some(BufWriter::new(file)), flushed: Instant::now() };
        opened.write(0, &EventContent::Version, false)?;
        opened.write(first, &EventContent::Start, true)?;
        Ok(opened)
    }

    /// Writes an event, and the buffer if `flush` asks for it or it is due.
    fn write(
        &mut self,
        step: u64,
        content: &EventContent,
        flush: bool,
    ) -> Result<(), MetricsError> {
        let record = format::record(&format::event(now_s(), step, content));
        let flush = flush || self.flushed.elapsed() >= BUFFER_TIME;
        self.with_file(|file| {
            file.write_all(&record)?;
            if flush { file.flush() } else { Ok(()) }
        })?;
        if flush {
            self.flushed = Instant::now();
        }
        Ok(())
    }

    /// Writes to the file, unless that failed before.
    fn with_file(
        &mut self,
        write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> Result<(), MetricsError> {
        let Some(mut file) = self.file.take() else { return Ok(()) };
        if let Err(why) = write(&mut file) {
            // Records after a torn one could not be read, so the buffer is dropped unwritten.
            let _ = file.into_parts();
            return Err(MetricsError::Chart { path: self.path.clone(), why });
        }
        self.file = Some(file);
        Ok(())
    }
}

impl Sink for TensorBoard {
    fn event(&mut self, event: &Event) -> Result<(), MetricsError> {
        match event {
            Event::Step(step) => {
                self.write(step.step, &EventContent::Scalars(step_scalars(step)), false)
            }
            Event::Evaluation(evaluation) => {
                let scalars = EventContent::Scalars(evaluation_scalars(evaluation));
                self.write(evaluation.step, &scalars, true)
            }
            Event::Checkpoint { .. } | Event::Ended => self.with_file(|file| file.flush()),
            Event::Note(_)
            | Event::Warning(_)
            | Event::Opening
            | Event::Measuring
            | Event::Tuning { .. }
            | Event::Started { .. }
            | Event::Evaluating { .. }
            | Event::Saving { .. }
            | Event::Measure(_)
            | Event::Shares(_)
            | Event::Cost(_) => Ok(()),
        }
    }
}

fn step_scalars(step: &StepRecord) -> Vec<(String, f64)> {
    let mut scalars = vec![
        ("train/loss".into(), step.loss),
        ("train/lr".into(), step.lr),
        ("train/grad_norm".into(), step.grad_norm),
    ];
    for (name, value) in &step.terms {
        scalars.push((format!("train/terms/{name}"), *value));
    }
    scalars.extend(step.loss_scale.map(|scale| ("train/loss_scale".into(), scale)));
    scalars.push((format!("throughput/{}_per_s", step.unit.name()), step.per_s));
    scalars
}

/// Values of an evaluation: `val_accuracy` becomes `val/accuracy`.
fn evaluation_scalars(evaluation: &EvalRecord) -> Vec<(String, f64)> {
    let mut scalars = vec![("val/loss".into(), evaluation.val_loss)];
    for (name, value) in &evaluation.metrics {
        scalars.push((format!("val/{}", name.strip_prefix("val_").unwrap_or(name)), *value));
    }
    for (name, value) in &evaluation.terms {
        scalars.push((format!("val/terms/{name}"), *value));
    }
    scalars
}

fn now_s() -> f64 {
    // A clock before 1970 gives 0: times are for display.
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
}

/// Returns the path of a new event file: its second, the host and the process. TensorBoard reads
/// the files in the order of their names, so the second is above the seconds of existing files.
fn free_path(directory: &Path) -> io::Result<PathBuf> {
    let mut second = now_s() as u64;
    for entry in fs::read_dir(directory)? {
        let name = entry?.file_name();
        if let Some(name) = name.to_str()
            && let Some(rest) = name.strip_prefix(PREFIX)
            && let Some(other) = rest.split('.').next()
            && let Ok(other) = other.parse::<u64>()
        {
            second = second.max(other.saturating_add(1));
        }
    }
    let host = gethostname::gethostname().to_string_lossy().into_owned();
    let host = host.replace(|c: char| !c.is_ascii_alphanumeric() && !"-_.".contains(c), "_");
    Ok(directory.join(format!("{PREFIX}{second:010}.{host}.{}", std::process::id())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::event::tests::step;

    fn files(directory: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(directory).unwrap();
        let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    }

    fn has(path: &Path, tag: &str) -> bool {
        fs::read(path).unwrap().windows(tag.len()).any(|bytes| bytes == tag.as_bytes())
    }

    #[test]
    fn later_files_have_later_names() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().join("run/tensorboard");
        let created: Vec<PathBuf> =
            (0..3).map(|first| TensorBoard::create(&directory, first).unwrap().path).collect();
        assert_eq!(files(&directory), created);
        // A clock that was ahead does not change the order.
        let ahead = directory.join(format!("{PREFIX}9000000000.host.1"));
        fs::write(&ahead, "").unwrap();
        let path = TensorBoard::create(&directory, 9).unwrap().path;
        assert!(path > ahead, "{}", path.display());
    }

    #[test]
    fn values_are_in_the_file_after_an_evaluation_a_checkpoint_and_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::create(directory.path(), 1).unwrap();
        let path = board.path.clone();
        assert!(has(&path, "brain.Event:2"), "the head is written at once");
        let terms = vec![("kl".into(), 0.5)];
        board.event(&Event::Step(StepRecord { terms, ..step(1) })).unwrap();
        assert!(!has(&path, "train/loss"), "steps are buffered");
        let evaluation = EvalRecord {
            step: 1,
            val_loss: 1.5,
            metrics: vec![("val_accuracy".into(), 0.5), ("other".into(), 2.0)],
            terms: vec![("kl".into(), 0.25)],
            samples: 2,
            targets: 16,
            is_best: true,
        };
        board.event(&Event::Evaluation(evaluation)).unwrap();
        let tags = ["train/loss", "train/lr", "train/grad_norm", "throughput/tokens_per_s"];
        let more = ["train/terms/kl", "val/loss", "val/accuracy", "val/other", "val/terms/kl"];
        for tag in tags.iter().chain(&more) {
            assert!(has(&path, tag), "{tag}");
        }
        for ending in [Event::Checkpoint { step: 2 }, Event::Ended] {
            let length = fs::metadata(&path).unwrap().len();
            board.event(&Event::Step(step(2))).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().len(), length);
            board.event(&ending).unwrap();
            assert!(fs::metadata(&path).unwrap().len() > length, "{ending:?}");
        }
        board.flushed = Instant::now().checked_sub(2 * BUFFER_TIME).unwrap();
        let length = fs::metadata(&path).unwrap().len();
        board.event(&Event::Step(step(3))).unwrap();
        assert!(fs::metadata(&path).unwrap().len() > length, "written after some seconds");
    }

    #[test]
    fn a_place_that_is_none_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tensorboard");
        fs::write(&file, "").unwrap();
        let error = TensorBoard::create(&file, 1).unwrap_err().to_string();
        assert!(error.contains("tensorboard: cannot be written"), "{error}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_told_once() {
        let directory = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::create(directory.path(), 1).unwrap();
        let full = File::options().write(true).open("/dev/full").unwrap();
        board.file = Some(BufWriter::new(full));
        board.event(&Event::Step(step(1))).unwrap();
        let error = board.event(&Event::Checkpoint { step: 1 }).unwrap_err().to_string();
        assert!(error.contains("the run goes on without it"), "{error}");
        board.event(&Event::Step(step(2))).unwrap();
        board.event(&Event::Ended).unwrap();
    }
}
