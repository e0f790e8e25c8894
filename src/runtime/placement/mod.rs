//! Placement of a run: which devices it uses with which shares. Devices are measured, or taken
//! over from a checkpoint; the result is a `parallel::Placement`.

pub mod assemble;
pub mod open_ranks;
pub mod plans;
pub mod shares;
pub mod types;
