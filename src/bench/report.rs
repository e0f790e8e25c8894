//! Benchmark report, as values and as JSON.
//!
//! A report contains no date and no path: two runs of one program on one machine differ in their
//! figures only.

use serde::{Deserialize, Serialize};

use super::sample::Effort;
use super::system::System;
use potluck_core::arithmetic::median;
use potluck_core::metrics::RankCost;
use potluck_parallel::PipelineSchedule;

/// Version of the JSON schema. It changes when a reader of the old schema would misunderstand the
/// new one.
pub(crate) const SCHEMA: u32 = 2;

/// Benchmark report: the figures of one or more devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`] of the program that wrote the report.
    pub schema: u32,
    /// Version of potluck.
    pub potluck: String,
    /// Effort of the measurements: `tiny`, `quick` or `normal`.
    pub effort: String,
    pub system: System,
    pub devices: Vec<DeviceReport>,
}

/// Report of one device: its figures, skipped figures and error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceReport {
    pub name: String,
    /// API of the device: `vulkan`, `metal`, `dx12`, `gl`, or `cpu`; `quic` between nodes.
    pub api: String,
    pub driver: String,
    /// Kind of the device, such as `discrete GPU` or `software`.
    pub kind: String,
    /// Figures in the order of measurement, which is the same on every device.
    pub figures: Vec<Figure>,
    /// Figures that were not measured, with the reasons.
    pub skipped: Vec<Skipped>,
    /// Error that ended the measurements early.
    pub error: Option<String>,
}

/// Direction in which a figure improves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    Higher,
    Lower,
}

/// Kind of a figure, which determines its table, with the details of this kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FigureKind {
    /// Peak rate of floating-point operations of the otherwise idle device.
    Peak,
    /// Streams through the device's memory.
    Memory,
    /// Uploads and readbacks.
    Transfer,
    /// Overhead of a dispatch.
    Dispatch,
    Matmul,
    /// Matrix product with the checks of shaders, or without them.
    Robustness,
    /// Matrix product in a precision.
    Precision,
    /// Training step of a model.
    Step,
    /// Text generation by a model.
    Generation,
    Link(LinkFigure),
    /// Call of a collective; the value of the figure is the bus bandwidth.
    Collective(CollectiveFigure),
    /// Step of a pipeline; the value of the figure is the tokens per second.
    Pipeline(PipelineFigure),
    /// Step on some of the devices; the value of the figure is the samples per second.
    Scaling(ScalingFigure),
}

/// Subject of a figure of a link between two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkFigure {
    RoundTrip,
    Send,
    Receive,
    /// Both directions at the same time.
    Both,
    /// All-reduce of the gradients of a model.
    Step,
}

impl FigureKind {
    /// Returns the group of figures to which the kind belongs, the first part of their names.
    pub fn group(&self) -> &str {
        match self {
            Self::Peak => "peak",
            Self::Memory => "memory",
            Self::Transfer => "transfer",
            Self::Dispatch => "dispatch",
            Self::Matmul => "matmul",
            Self::Robustness => "robustness",
            Self::Precision => "precision",
            Self::Step => "step",
            Self::Generation => "generation",
            Self::Link(_) => "link",
            Self::Collective(collective) => &collective.by,
            Self::Pipeline(_) => "pipeline",
            Self::Scaling(_) => "scaling",
        }
    }
}

/// Benchmark figure: the median of some samples, and their range.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// Name of the form `GROUP.WHAT`, the same in every report.
    pub name: String,
    pub kind: FigureKind,
    pub unit: String,
    pub median: f64,
    pub min: f64,
    pub max: f64,
    pub samples: usize,
    pub better: Direction,
    /// Share of the device's `peak.flops`, or of a rate above that, if the peak was measured too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_peak: Option<f64>,
    /// Name of the fastest of several alternatives, such as a kernel variant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// Best value of each alternative by name, in the unit of the figure.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub among: Vec<(String, f64)>,
    /// Measured problem: shapes, sizes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on: Option<String>,
}

/// Step of a pipeline: measurement and prediction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PipelineFigure {
    pub schedule: PipelineSchedule,
    pub stages: usize,
    /// Model chunks per stage.
    pub chunks: usize,
    pub micro_batches: usize,
    /// Blocks of each model chunk, in forward order.
    pub blocks: Vec<u32>,
    /// Median seconds of a step.
    pub step_s: f64,
    /// Seconds of a step by simulation with measured times of blocks.
    pub predicted_s: f64,
    /// Median share of a step in which ranks wait for each other.
    pub bubble: f64,
    /// Idle share by simulation.
    pub predicted_bubble: f64,
    /// Idle share by formula, for equal stages.
    pub formula_bubble: f64,
}

/// Step on one or several devices with the same batch: measurement and prediction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScalingFigure {
    /// Names of the devices, the fastest first.
    pub devices: Vec<String>,
    /// Median seconds of a step.
    pub step_s: f64,
    /// Throughput relative to the fastest device alone.
    pub speedup: f64,
    /// Throughput relative to the sum of the throughputs of the devices alone.
    pub efficiency: f64,
    /// Seconds of a step as predicted from timings of the devices; of several devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_s: Option<f64>,
    /// Seconds of communication that every device waits for, and that computing hides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exposed_s: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden_s: Option<f64>,
    /// Shares of a step by rank, of several devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<RankCost>,
    /// Sentence on the change that would help the most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// Communication details of a collective: size, duration and bandwidths.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CollectiveFigure {
    /// Name of the collective, or of the operation with which it is compared.
    pub by: String,
    pub ranks: usize,
    /// Bytes of the longest buffer of a rank.
    pub bytes: u64,
    /// Median duration of a call on the slowest rank, in seconds.
    pub seconds: f64,
    /// Algorithm bandwidth: bytes per second, in the figure's unit.
    pub algorithm: f64,
    /// Bus bandwidth as a share of the bandwidth of a copy of the same bytes in the same rounds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_copy: Option<f64>,
    /// Seconds of a readback and an upload of the same bytes in the same rounds, as a share of the
    /// seconds of the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_transfers: Option<f64>,
}

/// Figure that was not measured, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    pub name: String,
    pub why: String,
}

/// Error of a text that is not a readable report.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("is not a report of `potluck bench --json`: {0}")]
    Unreadable(String),
    #[error("is a report of schema {0}, and this version of potluck reads {SCHEMA}")]
    Schema(u64),
}

impl Figure {
    /// Creates a figure from samples.
    ///
    /// # Panics
    /// Panics if there is no sample.
    pub fn new(
        kind: FigureKind,
        name: &str,
        unit: &str,
        better: Direction,
        samples: &[f64],
    ) -> Self {
        Self {
            name: name.into(),
            kind,
            unit: unit.into(),
            median: median(samples),
            min: samples.iter().copied().fold(f64::INFINITY, f64::min),
            max: samples.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            samples: samples.len(),
            better,
            of_peak: None,
            by: None,
            among: Vec::new(),
            on: None,
        }
    }

    /// Creates the figure of a rate: `work` per second from samples of seconds, in `unit`s of
    /// 1e9.
    pub fn rate(kind: FigureKind, name: &str, unit: &str, work: f64, seconds: &[f64]) -> Self {
        let rates: Vec<f64> = seconds.iter().map(|seconds| work / seconds / 1e9).collect();
        Self::new(kind, name, unit, Direction::Higher, &rates)
    }

    /// Creates the figure of a duration from samples of seconds; `per_second` is the number of
    /// `unit`s in a second.
    pub fn duration(
        kind: FigureKind,
        name: &str,
        unit: &str,
        per_second: f64,
        seconds: &[f64],
    ) -> Self {
        let times: Vec<f64> = seconds.iter().map(|seconds| seconds * per_second).collect();
        Self::new(kind, name, unit, Direction::Lower, &times)
    }

    /// Returns the figure with the name of the fastest alternative.
    #[must_use]
    pub fn by(mut self, way: impl Into<String>) -> Self {
        self.by = Some(way.into());
        self
    }

    /// Returns the figure with the best value of each alternative.
    #[must_use]
    pub fn among(mut self, values: Vec<(String, f64)>) -> Self {
        self.among = values;
        self
    }

    /// Returns the figure with the measured problem.
    #[must_use]
    pub fn on(mut self, what: impl Into<String>) -> Self {
        self.on = Some(what.into());
        self
    }

    /// Returns half of the distance from the least to the greatest sample, relative to the
    /// median.
    pub fn spread(&self) -> f64 {
        (self.max - self.min) / 2.0 / self.median
    }

    fn is_sane(&self) -> bool {
        let ordered = self.min <= self.median && self.median <= self.max;
        self.min > 0.0 && self.max.is_finite() && ordered && self.samples > 0
    }
}

impl DeviceReport {
    /// Returns the figure with this name.
    pub fn figure(&self, name: &str) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.name == name)
    }

    /// The figures of a kind without details.
    pub(crate) fn of_kind(&self, kind: FigureKind) -> impl Iterator<Item = &Figure> {
        self.figures.iter().filter(move |figure| figure.kind == kind)
    }
}

impl Report {
    /// Creates the report of this program on this machine.
    pub fn new(effort: Effort, devices: Vec<DeviceReport>) -> Self {
        Self {
            schema: SCHEMA,
            potluck: env!("CARGO_PKG_VERSION").into(),
            effort: effort.name().into(),
            system: System::here(),
            devices,
        }
    }

    /// Returns the report as JSON, with a line break at its end.
    pub fn to_json(&self) -> String {
        let text = serde_json::to_string_pretty(self);
        text.expect("strings, numbers and lists are JSON") + "\n"
    }

    /// Parses the output of [`Report::to_json`].
    ///
    /// # Errors
    /// Returns `ReportError` if the text is other JSON or none, has another schema, or contains
    /// impossible figures.
    pub fn from_json(text: &str) -> Result<Self, ReportError> {
        let value: serde_json::Value = serde_json::from_str(text).map_err(unreadable)?;
        match value.get("schema").and_then(serde_json::Value::as_u64) {
            Some(schema) if schema != u64::from(SCHEMA) => return Err(ReportError::Schema(schema)),
            Some(_) => {}
            None => return Err(ReportError::Unreadable("it has no schema".into())),
        }
        let report: Self = serde_json::from_value(value).map_err(unreadable)?;
        for device in &report.devices {
            for figure in &device.figures {
                if !figure.is_sane() {
                    let why = format!("the figure {} cannot be", figure.name);
                    return Err(ReportError::Unreadable(why));
                }
            }
        }
        Ok(report)
    }
}

fn unreadable(why: serde_json::Error) -> ReportError {
    ReportError::Unreadable(why.to_string())
}

/// Recorder of the figures of a device during its measurement.
pub struct FigureRecorder<'a> {
    figures: Vec<Figure>,
    skipped: Vec<Skipped>,
    progress: &'a mut dyn FnMut(&str),
}

impl<'a> FigureRecorder<'a> {
    pub fn new(progress: &'a mut dyn FnMut(&str)) -> Self {
        Self { figures: Vec::new(), skipped: Vec::new(), progress }
    }

    /// Reports the next measurement to the progress callback.
    pub fn progress(&mut self, what: &str) {
        (self.progress)(what);
    }

    pub fn add(&mut self, figure: Figure) {
        self.figures.push(figure);
    }

    pub fn skip(&mut self, name: &str, why: impl Into<String>) {
        self.skipped.push(Skipped { name: name.into(), why: why.into() });
    }

    /// Returns the figures and the skipped ones, and computes the shares of the peak, which may
    /// have been measured last. Where another rate is higher, the peak was measured too low, and
    /// the shares are of that rate.
    pub fn finish(mut self) -> (Vec<Figure>, Vec<Skipped>) {
        let has_peak = self.figures.iter().any(|figure| figure.kind == FigureKind::Peak);
        let highest = highest_rate(&self.figures).map(|highest| highest.median);
        if let Some(peak) = highest
            && has_peak
        {
            for figure in &mut self.figures {
                if figure.unit == GFLOPS && figure.kind != FigureKind::Peak {
                    figure.of_peak = Some(figure.median / peak);
                }
            }
        }
        (self.figures, self.skipped)
    }
}

/// Figure with the most floating-point operations per second in f32.
pub(crate) fn highest_rate(figures: &[Figure]) -> Option<&Figure> {
    let is_f32 = |one: &&Figure| {
        one.unit == GFLOPS && (one.kind != FigureKind::Precision || one.name == "precision.f32")
    };
    figures.iter().filter(is_f32).max_by(|a, b| a.median.total_cmp(&b.median))
}

/// Units of rates.
pub(crate) const GFLOPS: &str = "GFLOP/s";
pub(crate) const GBS: &str = "GB/s";

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let peak = Figure::rate(FigureKind::Peak, "peak.flops", GFLOPS, 2e9, &[1.0, 0.5, 4.0]);
        let mut progress = |_: &str| {};
        let mut recorder = FigureRecorder::new(&mut progress);
        let square = Figure::rate(FigureKind::Matmul, "matmul.square_128", GFLOPS, 1e9, &[1.0]);
        recorder.add(square.on("a"));
        recorder.add(peak.by("fused"));
        recorder.add(Figure::duration(
            FigureKind::Dispatch,
            "dispatch.in_pass",
            "us",
            1e6,
            &[2e-6],
        ));
        let details = PipelineFigure {
            schedule: PipelineSchedule::GPipe,
            stages: 2,
            chunks: 1,
            micro_batches: 4,
            blocks: vec![2, 2],
            step_s: 0.5,
            predicted_s: 0.25,
            bubble: 0.5,
            predicted_bubble: 0.25,
            formula_bubble: 0.2,
        };
        recorder.add(Figure::new(
            FigureKind::Pipeline(details),
            "pipeline.gpipe",
            "tokens/s",
            Direction::Higher,
            &[8.0],
        ));
        let kind = FigureKind::Link(LinkFigure::RoundTrip);
        recorder.add(Figure::duration(kind, "link.round_trip", "us", 1e6, &[1e-4]));
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
        assert!(shares.eq([Some(0.5), None, None, None, None]));
        let time = report.devices[0].figure("dispatch.in_pass").unwrap();
        assert!((time.median - 2.0).abs() < 1e-9 && time.better == Direction::Lower);
        assert_eq!(report.devices[0].of_kind(FigureKind::Matmul).count(), 1);
    }

    #[test]
    fn a_rate_above_the_peak_stands_for_it() {
        let mut progress = |_: &str| {};
        let mut recorder = FigureRecorder::new(&mut progress);
        let rate = |kind, name: &str, work: f64| Figure::rate(kind, name, GFLOPS, work, &[1.0]);
        recorder.add(rate(FigureKind::Peak, "peak.flops", 2e9));
        recorder.add(rate(FigureKind::Matmul, "matmul.small", 4e9));
        recorder.add(rate(FigureKind::Matmul, "matmul.large", 8e9));
        recorder.add(rate(FigureKind::Precision, "precision.f32", 16e9));
        recorder.add(rate(FigureKind::Precision, "precision.mixed", 64e9));
        let (figures, _) = recorder.finish();
        let shares = figures.iter().map(|figure| figure.of_peak);
        assert!(shares.eq([None, Some(0.25), Some(0.5), Some(1.0), Some(4.0)]));
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
        assert!(refused("{\"schema\": 1}").contains("schema 1, and this version"));
        assert!(refused("{\"schema\": 2}").contains("missing field"));
        let zero = report().to_json().replace("\"min\": 0.5", "\"min\": 0.0");
        assert!(refused(&zero).ends_with("the figure peak.flops cannot be"));
    }
}
