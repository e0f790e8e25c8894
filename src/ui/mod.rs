//! Progress display of a run on the terminal.

mod format;
pub mod ranks;
pub mod terminal;
