//! Typed events of a run and their record, `metrics.jsonl`. Nothing here prints.

pub mod event;
pub mod recorder;

pub use event::{EvalRecord, Record, StepRecord};
pub use recorder::{MetricsError, Recorder, Truncated, truncate_after};
