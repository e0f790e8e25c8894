//! Placement of a run: which devices it uses with which shares. Devices are measured, or taken
//! over from a checkpoint; the result is a `parallel::Placement`.

pub mod admission;
pub mod assemble;
pub mod host_memory;
pub mod names;
pub mod open_measured;
pub mod open_ranks;
pub mod pipeline;
pub mod plans;
pub mod reduce_sites;
pub mod shares;
mod statistics;
#[cfg(test)]
mod tests;
pub mod types;
