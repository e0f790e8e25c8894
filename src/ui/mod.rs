//! Display of a run's events on stderr: its progress, notes and warnings.

mod format;
pub mod ranks;
pub mod terminal;
