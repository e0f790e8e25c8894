//! For the benchmark of links alone: settings of quinn with which a bare stream can be measured
//! beside a link.

use std::net::SocketAddr;
use std::sync::Arc;

use super::endpoint_options::{Congestion, EndpointOptions};
use super::error::NetError;
use super::identity::{self, Identity};
use super::secret::Secret;
use super::transport::{self, Transport};

/// Creates an endpoint of quinn with the TLS of links, in the context of a tokio runtime: with
/// quinn's defaults for all other settings, or with the settings of links that have this congestion
/// control.
pub fn bare_endpoint(
    secret: &Secret,
    listen: SocketAddr,
    tuned: Option<Congestion>,
) -> Result<quinn::Endpoint, NetError> {
    let congestion = tuned.unwrap_or_default();
    let options = EndpointOptions { congestion, ..EndpointOptions::new(listen) };
    let identity = Arc::new(Identity::new(secret)?);
    let Transport { mut endpoint, mut server, mut client } = Transport::new(&options, &identity)?;
    if tuned.is_none() {
        let (tls_server, tls_client) = identity::quic(identity.server()?, identity.client()?)?;
        endpoint = quinn::EndpointConfig::default();
        server = quinn::ServerConfig::with_crypto(tls_server);
        client = quinn::ClientConfig::new(tls_client);
    }
    let (socket, _) = transport::open_socket(listen)?;
    let adapter = Arc::new(quinn::TokioRuntime);
    let bare = quinn::Endpoint::new(endpoint, Some(server), socket, adapter);
    let mut bare = bare.map_err(|error| NetError::Threads(error.to_string()))?;
    bare.set_default_client_config(client);
    Ok(bare)
}

/// Name of a node in its certificate, which a client gives to [`quinn::Endpoint::connect`].
pub const NODE_NAME: &str = identity::NODE_NAME;
