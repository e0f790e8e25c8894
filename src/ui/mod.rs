//! Display of a run's events on stderr, its progress, notes and warnings; Gantt charts of steps.

mod format;
pub mod gantt;
pub mod ranks;
pub mod terminal;
