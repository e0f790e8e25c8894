//! Metrics of a run: typed events, the sinks that receive them, their record `metrics.jsonl` with
//! its curves, event files of TensorBoard, the trace of the devices, and times as text. Nothing
//! here prints.

pub mod curves;
mod error;
pub mod event;
pub mod recorder;
mod run_cost;
pub mod sink;
pub mod tensorboard;
mod timestamp;
pub mod trace;

pub use curves::{Curve, CurvePoint, CurveReader, Curves};
pub use error::MetricsError;
pub use event::{
    EvalRecord, Event, MeasureRecord, MeasuredValue, PredictedGain, RankRecord, ShareRecord,
    StageRecord, StepRecord, Unit,
};
pub use recorder::{Recorder, Truncation, aside};
pub use run_cost::{RankCost, RunCost, SoloSpeed};
pub use sink::{Sink, Sinks};
pub use tensorboard::TensorBoard;
pub use timestamp::rfc3339;
pub use trace::{Span, Trace, TraceFile, Track};
