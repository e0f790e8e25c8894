//! Collectives between the threads of a process: values in owned boxes, handed from rank to rank.
//!
//! [`init`] and [`ProcessGroup`] are the whole of it for whoever has slices; a trainer with values on
//! devices drives [`ExchangeDriver`] itself.

pub mod add;
mod element;
pub mod exchange_driver;
pub mod mailbox;
mod pool;
pub mod process_group;

pub use element::Element;
pub use exchange_driver::{ExchangeDriver, ExchangeIo, Message};
pub use mailbox::{Closed, Mailbox, RecvError};
pub use pool::{BufferPool, PooledBuffer, SharedBuffer};
pub use process_group::connection::GroupError;
pub use process_group::packet::Transferable;
pub use process_group::reduce_op::ReduceOp;
pub use process_group::{ProcessGroup, init};

/// What [`mailbox`] waits with; `tests/loom.rs` puts loom's in its place.
mod sync {
    pub use std::sync::{Arc, Condvar, Mutex, MutexGuard};
}
