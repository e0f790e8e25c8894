//! Collectives as state machines, which determine the sender, receiver and range of every message
//! and the order of additions. They hold no values, do no IO and use no clock; the caller moves
//! the bytes.

mod bucket_groups;
pub mod cost;
mod error;
pub mod exchange;
pub mod group;
mod kind;
pub mod layout;
pub(crate) mod rooted;

pub use bucket_groups::{BucketGroups, Positions};
pub use cost::CommCost;
pub use error::ExchangeError;
pub use exchange::{Action, Collective, Event, Exchange, SEND_WINDOW};
pub use group::{Member, RankGroup, RankGroupError};
pub use kind::CollectiveKind;
pub(crate) use layout::ring_chunk_length;
pub use layout::{Chunk, LaidOutBucket, ShardLayout, Topology};
pub(crate) use rooted::RootedStep;
