//! Collectives as state machines: who sends which range to whom, and what is added to what. They
//! hold no values, do no IO and know no time; whoever drives them moves the bytes.

pub mod cost;
pub mod exchange;
pub mod layout;
pub mod rooted;

pub use cost::CommCost;
pub use exchange::{Action, Collective, CollectiveKind, Event, Exchange};
pub use layout::{Chunk, ShardLayout, Topology};
pub use rooted::RootedStep;
