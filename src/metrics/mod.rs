//! Typed events of a run and their record, `metrics.jsonl`, and the trace of its devices. Nothing
//! here prints.

pub mod event;
pub mod recorder;
pub mod trace;

pub use event::{EvalRecord, RankRecord, Record, StepRecord};
pub use recorder::{MetricsError, Recorder, Truncated, truncate_after};
pub use trace::{Lane, Span, Trace};
