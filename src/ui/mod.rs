//! Display of a run's events on stderr, its progress, notes and warnings; its curves; Gantt charts
//! of steps.

pub mod curves;
pub mod ranks;
pub mod terminal;
