//! Execution of programs on real devices: a device thread and a ring thread per device, their
//! steps, and the placement of the run before the first step.

pub mod addresses;
pub mod blocks;
mod defect;
pub(crate) mod device_cost;
pub mod device_thread;
pub mod error;
pub mod expected_step;
mod group_layout;
pub mod limit_basis;
pub mod memory;
pub mod messages;
pub mod open;
mod peers;
pub mod pipelines;
pub mod placement;
pub mod remote;
mod remote_endpoint;
pub(crate) mod replica_check;
pub mod ring;
mod ring_work;
pub mod step;
pub mod timing;
mod trace_file;
pub mod trace_labels;
pub mod trace_tracks;
pub mod workers;

pub use error::RuntimeError;
