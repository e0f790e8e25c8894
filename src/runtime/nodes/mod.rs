//! Nodes of a run over several machines: the thread that drives the machines of `cluster` with the
//! links of `net`, the connections between nodes that come of it, and process groups over them.

mod connection;
mod driver;
mod group;

pub use connection::{NodeLink, ValueReceiver};
pub use driver::{ClusterNews, Meeting, MeetingOptions};
pub use group::{
    ClusterOptions, ConnectNews, First, StartedCluster, any_port_towards, connect, greeting,
    group_over, host_name, rank_greeting,
};
