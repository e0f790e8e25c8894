//! Collectives between the threads of a process: values in owned boxes, handed from rank to rank.
//!
//! [`init`] and [`Group`] are the whole of it for whoever has slices; a trainer with values on
//! devices drives [`Member`] itself.

pub mod add;
mod element;
mod link;
pub mod mailbox;
pub mod member;
mod op;
mod packet;
mod perform;
mod pool;
pub mod process_group;
mod side;

pub use element::Element;
pub use link::GroupError;
pub use mailbox::{Closed, Mailbox, Waited};
pub use member::{Member, Message, Own};
pub use op::Op;
pub use packet::Transferable;
pub use pool::{Pool, Shared, Values};
pub use process_group::{Group, init};

/// What [`mailbox`] waits with; `tests/loom.rs` puts loom's in its place.
mod sync {
    pub use std::sync::{Arc, Condvar, Mutex, MutexGuard};
}
