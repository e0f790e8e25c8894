//! Nodes of a run over several machines: the thread that drives the machines of `cluster` with the
//! links of `net`, and the connections between nodes that come of it.

mod connection;
mod driver;

pub use connection::NodeLink;
pub use driver::{ClusterNews, Meeting, MeetingOptions};
