//! Nodes of a run over several machines: the thread that drives the machines of
//! [`cluster`](crate::cluster) with [`Link`](crate::Link)s, the resulting connections between
//! nodes, and process groups over them.

mod addresses;
mod connection;
mod driver;
mod group;
mod incoming_messages;
mod link_rate;
mod link_status;

pub use addresses::{advertised, all_addresses, resolve};
pub use connection::{FrameReceiver, NodeConnection, NodeLink, ReceiveFrames, ValueReceiver};
pub use driver::{ClusterEvent, ClusterHandle, ClusterHandleError, ClusterHandleOptions};
pub use group::{
    ClusterOptions, ConnectEvent, First, StartedCluster, any_port_towards, connect, greeting,
    group_over, host_name, rank_greeting, run_name,
};
pub use link_status::{LinkBoard, LinkStatus, LinksStatus};
