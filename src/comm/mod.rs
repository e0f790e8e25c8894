//! Collectives between the threads of a process: values are sent from rank to rank in owned
//! buffers.
//!
//! [`init`] and [`ProcessGroup`] are the complete interface for values in slices; a trainer with
//! values on devices uses [`ExchangeDriver`] directly.

pub mod add;
mod element;
pub mod exchange_driver;
pub mod frame;
pub mod mailbox;
mod pool;
pub mod process_group;
pub mod ring;

pub use element::Element;
pub use exchange_driver::{Addition, ExchangeDriver, ExchangeIo, Message};
pub use frame::{Carrier, FrameContent, FrameHeader, FrameValues};
pub use mailbox::{Closed, Mailbox, RecvError, SendError};
pub use pool::{BufferPool, PooledBuffer, SharedBuffer};
pub use process_group::error::GroupError;
pub use process_group::packet::Transferable;
pub use process_group::reduce_op::ReduceOp;
pub use process_group::{ProcessGroup, init};
pub use ring::{HostWork, RingMsg, RingOutput, RingWorker, ring_inbox_max, ring_pool_bytes_max};

/// Synchronization primitives of [`mailbox`]; `tests/library/loom_mailbox.rs` substitutes loom's.
mod sync {
    pub use std::sync::{Arc, Condvar, Mutex, MutexGuard};
}
