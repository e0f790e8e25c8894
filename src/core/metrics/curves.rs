//! Curves of a run: losses, metrics and learning rates over the steps, read from its record.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::MetricsError;

/// Most points of a curve: more than a drawing has columns.
const POINTS_MAX: usize = 1000;
/// Keys of an evaluation that are not metrics.
const NO_METRICS: [&str; 4] = ["step", "val_loss", "samples", "targets"];

/// Values of some neighbouring steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CurvePoint {
    /// Means of the steps and of the values.
    pub step: f64,
    pub mean: f64,
    /// Least and greatest value.
    pub least: f64,
    pub most: f64,
    /// Number of values.
    pub count: u64,
}

impl CurvePoint {
    /// Adds the values of another point.
    fn join(&mut self, other: &Self) {
        let count = self.count + other.count;
        let share = other.count as f64 / count as f64;
        self.step += (other.step - self.step) * share;
        self.mean += (other.mean - self.mean) * share;
        self.least = self.least.min(other.least);
        self.most = self.most.max(other.most);
        self.count = count;
    }
}

/// Finite values over steps. A long curve is thinned: each point stands for the values of the same
/// number of steps, a power of two.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    points: Vec<CurvePoint>,
    /// Number of steps per point.
    width: u64,
    /// Last step and its value.
    last: Option<(u64, f64)>,
}

impl Default for Curve {
    fn default() -> Self {
        Self { points: Vec::new(), width: 1, last: None }
    }
}

impl Curve {
    /// Appends the value of a step that is not before the last one, unless the value is not finite
    /// as an `f32`, with which devices compute.
    pub fn push(&mut self, step: u64, value: f64) {
        if !(value as f32).is_finite() {
            return;
        }
        let point =
            CurvePoint { step: step as f64, mean: value, least: value, most: value, count: 1 };
        append(&mut self.points, point, self.width);
        self.last = Some((step, value));
        if self.points.len() > POINTS_MAX {
            self.width *= 2;
            for point in std::mem::take(&mut self.points) {
                append(&mut self.points, point, self.width);
            }
        }
    }

    /// Returns the points in the order of their steps.
    pub fn points(&self) -> &[CurvePoint] {
        &self.points
    }

    /// Returns the last step with a finite value, and the value.
    pub fn last(&self) -> Option<(u64, f64)> {
        self.last
    }
}

/// Appends a point to points of `width` steps each, or joins it with the last one.
fn append(points: &mut Vec<CurvePoint>, point: CurvePoint, width: u64) {
    let bucket = point.step as u64 / width;
    match points.last_mut() {
        Some(last) if last.step as u64 / width == bucket => last.join(&point),
        _ => points.push(point),
    }
}

/// The curves of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curves {
    /// Loss of the training steps.
    pub loss: Curve,
    pub lr: Curve,
    pub val_loss: Curve,
    /// Other metrics of the evaluations by name, in the order of their first appearance.
    pub metrics: Vec<(String, Curve)>,
}

impl Curves {
    /// Returns all curves.
    pub fn all(&self) -> impl Iterator<Item = &Curve> {
        let metrics = self.metrics.iter().map(|(_, curve)| curve);
        [&self.loss, &self.lr, &self.val_loss].into_iter().chain(metrics)
    }

    /// Appends the values of a line of a record; lines other than steps and evaluations, and
    /// damaged lines, are ignored.
    fn add_line(&mut self, line: &[u8]) {
        let Ok(Value::Object(line)) = serde_json::from_slice(line) else { return };
        let Some(step) = line.get("step").and_then(Value::as_u64) else { return };
        let number = |key: &str| line.get(key).and_then(Value::as_f64).unwrap_or(f64::NAN);
        if line.contains_key("loss") {
            self.loss.push(step, number("loss"));
            self.lr.push(step, number("lr"));
        } else if line.contains_key("val_loss") {
            self.val_loss.push(step, number("val_loss"));
            self.add_metrics(step, &line);
        }
    }

    fn add_metrics(&mut self, step: u64, line: &Map<String, Value>) {
        for (name, value) in line {
            if NO_METRICS.contains(&name.as_str()) {
                continue;
            }
            let Some(value) = value.as_f64() else { continue };
            match self.metrics.iter_mut().find(|(other, _)| other == name) {
                Some((_, curve)) => curve.push(step, value),
                None => {
                    let mut curve = Curve::default();
                    curve.push(step, value);
                    self.metrics.push((name.clone(), curve));
                }
            }
        }
    }
}

/// Reader of the curves of a record that grows.
#[derive(Debug)]
pub struct CurveReader {
    path: PathBuf,
    /// Number of bytes that were read.
    read: u64,
    curves: Curves,
}

impl CurveReader {
    /// Creates a reader of the record at a path, which need not exist yet.
    pub fn new(path: &Path) -> Self {
        Self { path: path.into(), read: 0, curves: Curves::default() }
    }

    /// Forgets all that was read, because the record is opened again and may lose its later lines.
    pub fn restart(&mut self) {
        *self = Self::new(&self.path);
    }

    /// Reads the complete lines that were appended since the last call, and returns the curves.
    ///
    /// # Errors
    /// Returns [`MetricsError::Read`] if the record exists and cannot be read.
    pub fn read(&mut self) -> Result<&Curves, MetricsError> {
        match self.read_lines() {
            Err(why) if why.kind() != io::ErrorKind::NotFound => {
                Err(MetricsError::Read { path: self.path.clone(), why })
            }
            _ => Ok(&self.curves),
        }
    }

    fn read_lines(&mut self) -> io::Result<()> {
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.read))?;
        let mut file = BufReader::new(file);
        let mut line = Vec::new();
        while file.read_until(b'\n', &mut line)? > 0 && line.ends_with(b"\n") {
            self.curves.add_line(&line);
            self.read += line.len() as u64;
            line.clear();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, OpenOptions};
    use std::io::Write;

    fn means(curve: &Curve) -> Vec<(f64, f64)> {
        curve.points().iter().map(|point| (point.step, point.mean)).collect()
    }

    #[test]
    fn curves_are_those_of_the_record() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        let mut reader = CurveReader::new(&path);
        assert_eq!(*reader.read().unwrap(), Curves::default());
        let lines = concat!(
            "{\"step\":0,\"val_loss\":4.5,\"val_accuracy\":0.1,\"samples\":9,\"targets\":72}\n",
            "{\"step\":1,\"loss\":4.0,\"lr\":0.1,\"grad_norm\":0.5,\"tokens\":768}\n",
            "{\"step\":2,\"loss\":null,\"lr\":0.2,\"grad_norm\":null,\"skipped\":true}\n",
            "{\"step\":3,\"loss\":3.0,\"lr\":0.3}\nnot a line\n",
            "{\"step\":3,\"val_loss\":3.5,\"val_accuracy\":null,\"val_rmse\":2.0,\"samples\":9}\n",
            "{\"step\":3,\"temperature\":0.8,\"sampled\":200}\n{\"step\":4,\"loss\":9",
        );
        fs::write(&path, lines).unwrap();
        let curves = reader.read().unwrap().clone();
        assert_eq!(means(&curves.loss), [(1.0, 4.0), (3.0, 3.0)]);
        assert_eq!(means(&curves.lr), [(1.0, 0.1), (2.0, 0.2), (3.0, 0.3)]);
        assert_eq!(means(&curves.val_loss), [(0.0, 4.5), (3.0, 3.5)]);
        let names: Vec<&str> = curves.metrics.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["val_accuracy", "val_rmse"]);
        assert_eq!(means(&curves.metrics[0].1), [(0.0, 0.1)]);
        assert_eq!((curves.loss.last(), curves.all().count()), (Some((3, 3.0)), 5));

        // The line that was not complete, and no line twice.
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b".5,\"lr\":0.4}\n").unwrap();
        assert_eq!(means(&reader.read().unwrap().loss), [(1.0, 4.0), (3.0, 3.0), (4.0, 9.5)]);

        fs::write(&path, "{\"step\":7,\"loss\":1.0,\"lr\":0.1}\n").unwrap();
        reader.restart();
        assert_eq!(means(&reader.read().unwrap().loss), [(7.0, 1.0)]);
    }

    #[test]
    fn a_record_that_cannot_be_read_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let error = CurveReader::new(directory.path()).read().unwrap_err().to_string();
        assert!(error.contains("cannot be read"), "{error}");
    }

    #[test]
    fn a_long_curve_is_thinned_and_keeps_its_mean_and_its_extremes() {
        let mut curve = Curve::default();
        let value = |step: u64| if step == 70_000 { 50.0 } else { (step % 10) as f64 };
        (1..=100_000).for_each(|step| curve.push(step, value(step)));
        let points = curve.points();
        assert!((POINTS_MAX / 2..=POINTS_MAX).contains(&points.len()), "{}", points.len());
        assert_eq!(points.iter().map(|point| point.count).sum::<u64>(), 100_000);
        let total: f64 = points.iter().map(|point| point.mean * point.count as f64).sum();
        assert!((total / 100_000.0 - 4.5005).abs() < 1e-6, "{total}");
        let high = points.iter().find(|point| point.most == 50.0).unwrap();
        assert!((high.step - 70_000.0).abs() < 128.0 && high.least == 0.0, "{high:?}");
        assert!(points.is_sorted_by(|a, b| a.step < b.step));
        assert_eq!(curve.last(), Some((100_000, 0.0)));
    }

    #[test]
    fn what_is_not_finite_has_no_point() {
        let mut curve = Curve::default();
        [1.0, f64::NAN, f64::INFINITY, 2.0].iter().zip(1..).for_each(|(v, s)| curve.push(s, *v));
        assert_eq!(means(&curve), [(1.0, 1.0), (4.0, 2.0)]);
    }
}
