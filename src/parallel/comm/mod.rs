//! Collectives between ranks, which are threads of one process or of several: values are sent from
//! rank to rank in owned buffers, and as bytes to another process.
//!
//! [`ProcessGroup`] is the complete interface for values in slices. [`init`] creates the handles
//! of threads of one process. For several processes, on one machine or on several, it is
//! `potluck_net::connect`, which is not in this crate because it needs the network: here,
//! [`init_over`] takes links of any kind ([`PacketLink`]), and [`PacketReceiver`] checks their
//! packets. A trainer with values on devices uses [`ExchangeDriver`] directly.

pub mod add;
mod element;
pub(crate) mod exchange_driver;
pub mod frame;
pub(crate) mod mailbox;
mod pool;
pub mod process_group;
pub mod ring;

use std::time::Duration;

use potluck_core::Nanos;

pub use element::Element;
pub use exchange_driver::{Addition, ExchangeDriver, ExchangeIo, Message};
pub use frame::{Carrier, FrameContent, FrameHeader, FrameValues};
pub use mailbox::{Closed, Mailbox, RecvError, SendError};
pub use pool::{BufferPool, PooledBuffer, SharedBuffer};
pub use process_group::error::GroupError;
pub use process_group::payload::Transferable;
pub use process_group::reduce_op::ReduceOp;
pub use process_group::remote::{ArrivingPacket, PacketReceiver, init_over};
pub use process_group::remote_process::{PacketLink, PacketValues, RemoteProcess, process_name};
pub use process_group::{ProcessGroup, init};
pub use ring::{
    HostWork, RingMsg, RingOutput, RingWorker, arriving_bytes_max, ring_inbox_max,
    ring_pool_bytes_max, send_restart,
};

/// Converts a duration for state machines; the maximum is 584 years.
pub fn nanos(duration: Duration) -> Nanos {
    duration.as_nanos().try_into().unwrap_or(Nanos::MAX)
}

/// Synchronization primitives of [`mailbox`]; `tests/library/loom_mailbox.rs` substitutes loom's.
mod sync {
    pub use std::sync::{Arc, Condvar, Mutex, MutexGuard};
}
