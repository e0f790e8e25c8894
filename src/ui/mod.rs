//! Display of a run's events on stderr, its progress, notes and warnings; its curves; Gantt charts
//! of steps.

pub mod curves;
mod format;
pub mod gantt;
pub mod ranks;
pub mod terminal;
