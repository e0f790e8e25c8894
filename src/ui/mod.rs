//! Display of a run's events on stderr, its progress, notes and warnings; the log of
//! the program; line charts.

pub mod charts;
mod cost;
pub mod curves;
pub mod log;
pub mod ranks;
pub mod terminal;
