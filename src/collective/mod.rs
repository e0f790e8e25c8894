//! Collectives as state machines, which determine the sender, receiver and range of every message
//! and the order of additions. They hold no values, do no IO and use no clock; the caller moves
//! the bytes.

pub mod cost;
mod error;
pub mod exchange;
pub mod group;
pub mod layout;
pub mod rooted;

pub use cost::CommCost;
pub use error::ExchangeError;
pub use exchange::{Action, Collective, CollectiveKind, Event, Exchange};
pub use group::{Member, RankGroup, RankGroupError};
pub use layout::{Chunk, ShardLayout, Topology};
pub use rooted::RootedStep;
