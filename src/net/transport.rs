//! Settings of UDP and QUIC.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use quinn::{
    ClientConfig, EndpointConfig, IdleTimeout, MtuDiscoveryConfig, ServerConfig, TransportConfig,
    VarInt,
};
use socket2::{Domain, Protocol, Socket, Type};

use super::congestion::controllers;
use super::endpoint_options::EndpointOptions;
use super::error::NetError;
use super::handshake_limiter::HANDSHAKES_MAX;
use super::identity::{self, Identity};
use super::socket_buffers::{SOCKET_BYTES, SocketBuffers};
use super::wire::IDLE_TIMEOUT_MIN;

/// Maximum number of blobs in flight, per direction.
pub(crate) const BLOBS_MAX: usize = 4;
/// Priorities of streams; payloads have 0. The inputs of a step are blobs: a node waits for them
/// before it sends payloads of its own.
pub(crate) const CONTROL_PRIORITY: i32 = 2;
pub(crate) const BLOB_PRIORITY: i32 = 1;
/// Largest datagram to probe; on loopback it doubles the speed of quinn's 1452 bytes. quinn hands
/// up to ten to the system at once, which together must not exceed 65,507 bytes: larger ones are
/// lost.
const DATAGRAM_MAX: u16 = 6500;
/// Assumed round trip before the first measurement: the packets of a dial are repeated after three
/// times this.
const ROUND_TRIP_GUESS: Duration = Duration::from_millis(100);
/// Bounds of the window of a stream.
const WINDOW_MIN: u64 = 64 << 10;
const WINDOW_MAX: u64 = 1 << 30;
/// Part of the windows of a link that only control messages fill.
const CONTROL_ROOM: u64 = 1 << 20;
/// Buffered bytes of a client that is not admitted yet.
const INCOMING_BYTES: u64 = 16 << 10;

/// Settings of both sides of connections, and of their endpoint.
pub(crate) struct Transport {
    pub endpoint: EndpointConfig,
    pub server: ServerConfig,
    pub client: ClientConfig,
}

impl Transport {
    pub fn new(options: &EndpointOptions, identity: &Arc<Identity>) -> Result<Self, NetError> {
        let (tls_server, tls_client) = identity::quic(identity.server()?, identity.client()?)?;
        let mut endpoint = EndpointConfig::default();
        endpoint.max_udp_payload_size(DATAGRAM_MAX).map_err(NetError::identity)?;
        let mut server = ServerConfig::with_crypto(tls_server);
        server
            .transport_config(Arc::new(settings(options, false)))
            .migration(true)
            .max_incoming(HANDSHAKES_MAX)
            .incoming_buffer_size(INCOMING_BYTES)
            .incoming_buffer_size_total(INCOMING_BYTES * HANDSHAKES_MAX as u64);
        let mut client = ClientConfig::new(tls_client);
        set_up_dial(&mut client, options);
        Ok(Self { endpoint, server, client })
    }
}

/// Configures the dialing side for connections with these options.
pub(crate) fn set_up_dial(client: &mut ClientConfig, options: &EndpointOptions) {
    client.transport_config(Arc::new(settings(options, true)));
}

/// Returns the settings of a connection. Only the dialing side opens a bidirectional stream, and
/// only one.
fn settings(options: &EndpointOptions, is_client: bool) -> TransportConfig {
    let idle = options.idle_timeout.max(IDLE_TIMEOUT_MIN);
    let window = options.window_bytes.clamp(WINDOW_MIN, WINDOW_MAX);
    // All streams together: so payloads and blobs that are not read, or not sent yet, leave room
    // for control messages.
    let windows = window * (1 + BLOBS_MAX as u64) + CONTROL_ROOM;
    let mut mtu = MtuDiscoveryConfig::default();
    mtu.upper_bound(DATAGRAM_MAX);
    let mut settings = TransportConfig::default();
    settings
        .max_concurrent_bidi_streams(u32::from(!is_client).into())
        .max_concurrent_uni_streams((1 + BLOBS_MAX as u32).into())
        .max_idle_timeout(IdleTimeout::try_from(idle).ok())
        .keep_alive_interval(Some((idle / 4).min(Duration::from_secs(5))))
        .stream_receive_window(VarInt::from_u64(window).unwrap_or(VarInt::MAX))
        .receive_window(VarInt::from_u64(windows).unwrap_or(VarInt::MAX))
        // Received data is acknowledged a little later.
        .send_window(windows + window)
        .datagram_receive_buffer_size(None)
        .initial_rtt(ROUND_TRIP_GUESS)
        .mtu_discovery_config(Some(mtu))
        .congestion_controller_factory(controllers(options.congestion));
    settings
}

/// Opens the socket of a process, with the largest buffers up to [`SOCKET_BYTES`] that the system
/// gives.
pub(crate) fn open_socket(address: SocketAddr) -> Result<(UdpSocket, SocketBuffers), NetError> {
    bind(address).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => NetError::PortTaken(address),
        _ => NetError::Bind { address, why: error.to_string() },
    })
}

fn bind(address: SocketAddr) -> io::Result<(UdpSocket, SocketBuffers)> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        // Accepts IPv4 too if the system can; otherwise IPv6 alone, as requested.
        let _ = socket.set_only_v6(false);
    }
    let buffers = SocketBuffers::ask(&socket, SOCKET_BYTES);
    socket.bind(&address.into())?;
    Ok((socket.into(), buffers))
}
