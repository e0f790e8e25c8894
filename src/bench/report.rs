//! What a benchmark found, as values and as JSON.
//!
//! A report has no date and no path in it: two runs of one program on one machine differ in their
//! figures only.

use serde::{Deserialize, Serialize};

use super::sample::{Effort, median};
use super::system::System;

/// The version of the JSON. It changes when a reader of the old one would misunderstand the new.
pub const SCHEMA: u32 = 1;

/// The figures of some devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`] of the program that wrote it.
    pub schema: u32,
    /// The version of potluck.
    pub potluck: String,
    /// `tiny`, `quick` or `normal`.
    pub effort: String,
    pub system: System,
    pub devices: Vec<DeviceReport>,
}

/// The figures of a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceReport {
    pub name: String,
    /// `vulkan`, `metal`, `dx12`, `gl`, or `cpu`.
    pub api: String,
    pub driver: String,
    /// What it is made of, such as `discrete GPU` or `software`.
    pub kind: String,
    /// In the order of measuring, the same on every device.
    pub figures: Vec<Figure>,
    /// Figures that were left out.
    pub skipped: Vec<Skipped>,
    /// What ended the measurements early.
    pub error: Option<String>,
}

/// Which direction is an improvement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    Higher,
    Lower,
}

/// A figure: the median of some samples, and how far they lie apart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// `GROUP.WHAT`, the same in every report.
    pub name: String,
    pub unit: String,
    pub median: f64,
    pub min: f64,
    pub max: f64,
    pub samples: usize,
    pub better: Direction,
    /// The share of the device's `peak.flops`, where that was measured too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_peak: Option<f64>,
    /// Which of several ways was the fastest: the name of a kernel's variant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// What was worked on: shapes, sizes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on: Option<String>,
    /// Of a collective: what it moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved: Option<CollectiveFigure>,
}

/// What a collective moved, and how fast. Its figure is the bus bandwidth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CollectiveFigure {
    /// The collective, or what is measured beside it.
    pub by: String,
    pub ranks: usize,
    /// Of the longest buffer of a rank.
    pub bytes: u64,
    /// The median of a call on the slowest rank.
    pub seconds: f64,
    /// The algorithm bandwidth: bytes per second, in the figure's unit.
    pub algorithm: f64,
    /// The bus bandwidth as a share of a copy of the same bytes in the same rounds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_copy: Option<f64>,
    /// Seconds of a readback and an upload of the same bytes in the same rounds, as a share of
    /// those of the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_transfers: Option<f64>,
}

/// A figure that was not measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    pub name: String,
    pub why: String,
}

/// Text that is no report.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("is not a report of `potluck bench --json`: {0}")]
    Unreadable(String),
    #[error("is a report of schema {0}, and this version of potluck reads {SCHEMA}")]
    Schema(u64),
}

impl Figure {
    /// The figure of some samples.
    ///
    /// # Panics
    /// If there is none.
    pub fn new(name: &str, unit: &str, better: Direction, samples: &[f64]) -> Self {
        Self {
            name: name.into(),
            unit: unit.into(),
            median: median(samples),
            min: samples.iter().copied().fold(f64::INFINITY, f64::min),
            max: samples.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            samples: samples.len(),
            better,
            of_peak: None,
            by: None,
            on: None,
            moved: None,
        }
    }

    /// `work` per second from samples of seconds, in `unit`s of 1e9.
    pub fn rate(name: &str, unit: &str, work: f64, seconds: &[f64]) -> Self {
        let rates: Vec<f64> = seconds.iter().map(|seconds| work / seconds / 1e9).collect();
        Self::new(name, unit, Direction::Higher, &rates)
    }

    /// Samples of seconds as a time, in `unit`s of which `per_second` make a second.
    pub fn profile(name: &str, unit: &str, per_second: f64, seconds: &[f64]) -> Self {
        let times: Vec<f64> = seconds.iter().map(|seconds| seconds * per_second).collect();
        Self::new(name, unit, Direction::Lower, &times)
    }

    /// The same with the way that was the fastest.
    pub fn by(mut self, way: impl Into<String>) -> Self {
        self.by = Some(way.into());
        self
    }

    /// The same with what was worked on.
    pub fn on(mut self, what: impl Into<String>) -> Self {
        self.on = Some(what.into());
        self
    }

    /// Half of the way from the least to the greatest sample, relative to the median.
    pub fn spread(&self) -> f64 {
        (self.max - self.min) / 2.0 / self.median
    }

    fn is_sane(&self) -> bool {
        let ordered = self.min <= self.median && self.median <= self.max;
        self.min > 0.0 && self.max.is_finite() && ordered && self.samples > 0
    }
}

impl DeviceReport {
    /// A figure by its name.
    pub fn figure(&self, name: &str) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.name == name)
    }

    /// The figures whose names begin with `group` and a dot.
    pub fn group<'a>(&'a self, group: &'a str) -> impl Iterator<Item = &'a Figure> {
        self.figures.iter().filter(move |figure| group_of(&figure.name) == group)
    }
}

/// The part of a figure's name in front of its first dot.
pub fn group_of(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}

impl Report {
    /// A report of this program on this machine.
    pub fn new(effort: Effort, devices: Vec<DeviceReport>) -> Self {
        Self {
            schema: SCHEMA,
            potluck: env!("CARGO_PKG_VERSION").into(),
            effort: effort.name().into(),
            system: System::here(),
            devices,
        }
    }

    /// As JSON, with a line break at its end.
    pub fn to_json(&self) -> String {
        let text = serde_json::to_string_pretty(self);
        text.expect("strings, numbers and lists are JSON") + "\n"
    }

    /// Reads what [`Report::to_json`] wrote.
    ///
    /// # Errors
    /// Other JSON or none, another schema, or figures that cannot be.
    pub fn from_json(text: &str) -> Result<Self, ReportError> {
        let unreadable = |why: serde_json::Error| ReportError::Unreadable(why.to_string());
        let value: serde_json::Value = serde_json::from_str(text).map_err(unreadable)?;
        match value.get("schema").and_then(serde_json::Value::as_u64) {
            Some(schema) if schema != u64::from(SCHEMA) => return Err(ReportError::Schema(schema)),
            Some(_) => {}
            None => return Err(ReportError::Unreadable("it has no schema".into())),
        }
        let report: Self = serde_json::from_value(value).map_err(unreadable)?;
        let mut figures = report.devices.iter().flat_map(|device| &device.figures);
        match figures.find(|figure| !figure.is_sane()) {
            Some(Figure { name, .. }) => {
                Err(ReportError::Unreadable(format!("the figure {name} cannot be")))
            }
            None => Ok(report),
        }
    }
}

/// The figures of a device while it is measured.
pub struct FigureRecorder<'a> {
    figures: Vec<Figure>,
    skipped: Vec<Skipped>,
    say: &'a mut dyn FnMut(&str),
}

impl<'a> FigureRecorder<'a> {
    pub fn new(say: &'a mut dyn FnMut(&str)) -> Self {
        Self { figures: Vec::new(), skipped: Vec::new(), say }
    }

    /// Tells what is measured next.
    pub fn say(&mut self, what: &str) {
        (self.say)(what);
    }

    pub fn add(&mut self, figure: Figure) {
        self.figures.push(figure);
    }

    pub fn skip(&mut self, name: &str, why: impl Into<String>) {
        self.skipped.push(Skipped { name: name.into(), why: why.into() });
    }

    /// What was found, with the shares of the peak, which may have been measured last.
    pub fn finish(mut self) -> (Vec<Figure>, Vec<Skipped>) {
        let peak = self.figures.iter().find(|figure| figure.name == super::units::FLOPS);
        let Some(peak) = peak.map(|peak| peak.median) else { return (self.figures, self.skipped) };
        for figure in &mut self.figures {
            if figure.unit == GFLOPS && figure.name != super::units::FLOPS {
                figure.of_peak = Some(figure.median / peak);
            }
        }
        (self.figures, self.skipped)
    }
}

/// The units of rates.
pub const GFLOPS: &str = "GFLOP/s";
pub const GBS: &str = "GB/s";

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let figure = Figure::rate("peak.flops", GFLOPS, 2e9, &[1.0, 0.5, 4.0]).by("fused");
        let mut say = |_: &str| {};
        let mut recorder = FigureRecorder::new(&mut say);
        recorder.add(Figure::rate("matmul.square_128", GFLOPS, 1e9, &[1.0]).on("a"));
        recorder.add(figure);
        recorder.add(Figure::profile("dispatch.in_pass", "us", 1e6, &[2e-6]));
        recorder.skip("matmul.square_256", "too slow");
        let (figures, skipped) = recorder.finish();
        let [name, api, driver, kind] = ["d", "vulkan", "", "software"].map(String::from);
        let device = DeviceReport { name, api, driver, kind, figures, skipped, error: None };
        Report::new(Effort::Quick, vec![device])
    }

    #[test]
    fn figures_are_medians_with_their_spread_and_shares_of_the_peak() {
        let report = report();
        let peak = report.devices[0].figure("peak.flops").unwrap();
        assert_eq!((peak.median, peak.min, peak.max, peak.samples), (2.0, 0.5, 4.0, 3));
        assert_eq!((peak.spread(), peak.of_peak), (3.5 / 2.0 / 2.0, None));
        let shares = report.devices[0].figures.iter().map(|figure| figure.of_peak);
        assert!(shares.eq([Some(0.5), None, None]));
        let time = report.devices[0].figure("dispatch.in_pass").unwrap();
        assert!((time.median - 2.0).abs() < 1e-9 && time.better == Direction::Lower);
        assert_eq!(report.devices[0].group("matmul").count(), 1);
    }

    #[test]
    fn what_is_written_reads_back_the_same() {
        let report = report();
        assert_eq!(Report::from_json(&report.to_json()).unwrap(), report);
    }

    #[test]
    fn what_is_no_report_is_refused_with_the_reason() {
        let refused = |text: &str| Report::from_json(text).unwrap_err().to_string();
        assert!(refused("").contains("potluck bench --json"));
        assert!(refused("{}").ends_with("it has no schema"));
        assert!(refused("{\"schema\": 2}").contains("schema 2, and this version"));
        assert!(refused("{\"schema\": 1}").contains("missing field"));
        let zero = report().to_json().replace("\"min\": 0.5", "\"min\": 0.0");
        assert!(refused(&zero).ends_with("the figure peak.flops cannot be"));
    }
}
