//! Execution of programs on real devices: a device thread and a ring thread per device, the steps
//! that they run, and the placement that is decided before the first step.

pub mod addresses;
pub mod blocks;
pub mod device_thread;
pub mod error;
pub mod memory;
pub mod messages;
pub mod open;
pub mod peers;
pub mod pipelines;
pub mod placement;
pub mod remote;
pub(crate) mod replica_check;
pub mod ring;
pub mod step;
pub mod timing;
pub mod trace_labels;
pub mod workers;

pub use error::RuntimeError;
