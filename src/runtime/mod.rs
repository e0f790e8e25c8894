//! Programs performed on real devices: a thread per device, ring threads between them, steps, and
//! what is decided about devices before the first one.

pub mod device_thread;
pub mod error;
pub mod memory;
pub mod messages;
pub mod open;
pub mod peers;
pub mod placement;
pub mod replica_check;
pub mod ring;
pub mod step;
pub mod timing;
pub mod workers;

pub use error::RuntimeError;
