//! Sink that draws the curves of a run into a file of its directory.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::charts;
use potluck_core::files;
use potluck_core::metrics::{CurveReader, Event, MetricsError, Sink};

/// Least time between two drawings, except for the last one: evaluations may be frequent.
const INTERVAL: Duration = Duration::from_secs(1);

/// Sink that draws `curves.svg` from the record `metrics.jsonl` of a run's directory, at
/// evaluations, at checkpoints and at the end. Its failures end no run: the next drawing may
/// succeed.
#[derive(Debug)]
pub struct CurveDrawing {
    path: PathBuf,
    title: String,
    reader: CurveReader,
    /// Time of the last drawing.
    drawn: Option<Instant>,
}

impl CurveDrawing {
    /// Creates the sink of a run in a directory, after which the drawing is named. Nothing is
    /// written before there is a point to draw.
    pub fn new(run: &Path) -> Self {
        Self {
            path: run.join("curves.svg"),
            title: run.display().to_string(),
            reader: CurveReader::new(&run.join("metrics.jsonl")),
            drawn: None,
        }
    }

    fn draw(&mut self) -> Result<(), MetricsError> {
        self.drawn = Some(Instant::now());
        let curves = self.reader.read()?;
        if curves.all().all(|curve| curve.points().is_empty()) {
            return Ok(());
        }
        let written = charts::curves::draw(curves, &self.title)
            .and_then(|drawing| files::replace(&self.path, drawing.as_bytes()));
        written.map_err(|why| MetricsError::Chart { path: self.path.clone(), why })
    }
}

impl Sink for CurveDrawing {
    /// # Errors
    /// Returns [`MetricsError`] if the record cannot be read or the drawing cannot be written.
    fn event(&mut self, event: &Event) -> Result<(), MetricsError> {
        match event {
            // The record is opened after this, also when a run continues after a loss of a device.
            Event::Started { .. } => self.reader.restart(),
            Event::Evaluation(_) | Event::Checkpoint { .. } => {
                if self.drawn.is_none_or(|drawn| drawn.elapsed() >= INTERVAL) {
                    self.draw()?;
                }
            }
            Event::Ended => self.draw()?,
            Event::Note(_)
            | Event::Warning(_)
            | Event::Opening
            | Event::Measuring
            | Event::Tuning { .. }
            | Event::Step(_)
            | Event::Evaluating { .. }
            | Event::Saving { .. }
            | Event::Measure(_)
            | Event::Shares(_)
            | Event::Cost(_) => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn started() -> Event {
        Event::Started { done: 0, steps: 9, device: "cpu".into() }
    }

    #[test]
    fn the_drawing_follows_the_record() {
        let run = tempfile::tempdir().unwrap();
        let path = run.path().join("curves.svg");
        let mut sink = CurveDrawing::new(run.path());
        let record = |text: &str| fs::write(run.path().join("metrics.jsonl"), text).unwrap();
        sink.event(&started()).unwrap();
        sink.event(&Event::Checkpoint { step: 0 }).unwrap();
        assert!(!path.exists(), "there is nothing to draw");
        record("{\"step\":1,\"loss\":4.0,\"lr\":0.1}\n{\"step\":1,\"val_loss\":4.25}\n");
        sink.event(&Event::Checkpoint { step: 1 }).unwrap();
        assert!(!path.exists(), "a second has not passed");
        sink.drawn = Instant::now().checked_sub(2 * INTERVAL);
        sink.event(&Event::Checkpoint { step: 1 }).unwrap();
        let first = fs::read_to_string(&path).unwrap();
        assert!(first.contains("val_loss 4.25"), "{first}");
        // Another course of the run, from an earlier step on.
        sink.event(&started()).unwrap();
        record("{\"step\":1,\"loss\":3.0,\"lr\":0.1}\n");
        sink.event(&Event::Ended).unwrap();
        let second = fs::read_to_string(&path).unwrap();
        assert!(second.contains("training loss 3") && !second.contains("val_loss"), "{second}");
    }

    #[test]
    fn a_drawing_that_cannot_be_written_is_named() {
        let run = tempfile::tempdir().unwrap();
        let mut sink = CurveDrawing::new(run.path());
        let line = "{\"step\":1,\"loss\":4.0,\"lr\":0.1}\n";
        fs::write(run.path().join("metrics.jsonl"), line).unwrap();
        fs::create_dir(run.path().join("curves.svg")).unwrap();
        let error = sink.event(&Event::Ended).unwrap_err().to_string();
        assert!(error.contains("curves.svg: cannot be written"), "{error}");
    }
}
