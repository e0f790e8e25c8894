//! Authenticated links between the nodes of a run: QUIC (RFC 9000) with mutual TLS 1.3, over one
//! UDP socket per process.
//!
//! A peer that knows the [`Secret`] is a node. An [`Endpoint`] dials and accepts; a [`PendingPeer`]
//! is authenticated and has sent its greeting (hello), and becomes a [`Link`] or is refused. Links
//! carry bytes between addresses, and know nothing about runs. This is the only crate with
//! asynchronous code, whose threads call a [`Receiver`] back.

#[cfg(test)]
mod approaches;
#[cfg(test)]
mod attacks_by_nodes;
#[cfg(test)]
mod attacks_by_strangers;
#[doc(hidden)]
pub mod bench;
mod closing;
pub mod cluster;
mod code;
mod code_size;
mod congestion;
mod endpoint;
mod endpoint_options;
mod error;
mod handshake_limiter;
mod identity;
mod knock;
mod link;
mod link_stats;
mod moderation;
#[cfg(test)]
mod moving_relay;
pub mod nodes;
mod quiet_socket;
mod reading;
mod receiver;
mod secret;
mod secret_error;
mod send_queue;
mod shared;
mod socket_buffers;
#[cfg(feature = "status")]
pub mod status;
#[cfg(test)]
mod test_peer;
mod transport;
mod wire;
mod writing;

pub(crate) use endpoint::Approach;
pub use endpoint::{Endpoint, PendingPeer};
pub use endpoint_options::{Congestion, EndpointOptions};
pub use error::{CloseReason, NetError};
pub use handshake_limiter::RefusedPeer;
pub use link::{Link, Payload};
pub use link_stats::LinkStats;
pub use receiver::{ReceiveBuffer, Receiver};
pub use secret::Secret;
pub use secret_error::SecretError;
pub use socket_buffers::SocketBuffers;
pub use wire::{CONTROL_MAX, HELLO_MAX, PAYLOAD_MAX, TAG_BYTES};
