//! Typed events of a run and their record, `metrics.jsonl`, and the trace of its devices. Nothing
//! here prints.

pub mod event;
pub mod recorder;
pub mod trace;

pub use event::{EvalRecord, Event, RankRecord, StepRecord};
pub use recorder::{MetricsError, Recorder, ResumePoint, truncate_after};
pub use trace::{Span, Trace, Track};
