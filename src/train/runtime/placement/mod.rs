//! Placement of a run: its devices and their shares, measured or kept from a checkpoint. The result
//! is a `parallel::Placement`.

pub mod assemble;
pub mod automatic_layout;
pub mod block_work;
pub mod candidate_flags;
pub mod candidates;
pub mod decision;
pub mod device_limits;
pub mod device_memory;
pub mod laid_out;
mod links;
mod model_changes;
pub mod names;
mod network_note;
pub(crate) mod open_measured;
pub mod open_one;
pub(crate) mod open_plan;
pub(crate) mod open_profile;
mod open_ranks;
pub mod pipeline;
pub mod planned;
pub mod profile;
mod profile_file;
pub mod rank_memory;
pub(crate) mod reduce_sites;
pub(crate) mod repeat;
mod requested_pipelines;
pub mod shares;
mod start;
mod statistics;
#[cfg(test)]
mod tests;
pub mod types;
