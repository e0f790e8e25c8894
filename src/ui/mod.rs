//! Display of a run's events on stderr, its progress, notes and warnings; line charts.

pub mod charts;
pub mod curves;
pub mod ranks;
pub mod terminal;
