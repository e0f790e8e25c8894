//! The endpoint of a process: one UDP socket, with which it accepts and dials, and the threads
//! that serve it.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use quinn::{Connection, ConnectionError, Incoming, RecvStream, Runtime as _, VarInt};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{timeout, timeout_at};

use super::closing::close;
use super::endpoint_options::EndpointOptions;
use super::error::{NetError, TlsRefusal, sentence};
use super::handshake_limiter::{
    Entrance, HandshakeLimiter, HandshakePermit, Refusals, RefusedPeer, canonical,
};
use super::identity::{self, Identity, NODE_NAME};
use super::knock::Knock;
use super::link::{Control, Link, LinkParts};
use super::moderation::Moderation;
use super::quiet_socket::QuietSocket;
use super::reading::{Stop, read_full};
use super::receiver::Receiver;
use super::secret::Secret;
use super::shared::Shared;
use super::socket_buffers::SocketBuffers;
use super::transport::{self, CONTROL_PRIORITY, Transport};
use super::wire::{self, CloseCode, GREETING_HEAD_BYTES, Greeting, GreetingError, HELLO_MAX};
use potluck_core::Lock;
use potluck_parallel::comm::Mailbox;

/// Upper bound of [`EndpointOptions::links_max`].
const LINKS_LIMIT: usize = 1 << 16;
/// Time after which the next address of a node is dialed beside the earlier ones: a little more
/// than the longest usual round trip (RFC 8305, section 5, has 250 ms for web servers).
const DIALS_APART: Duration = Duration::from_millis(200);
/// Time for the last packets of an endpoint that closes.
const CLOSE_MARGIN: Duration = Duration::from_millis(200);

/// Socket of a process with its threads. Dropped, it closes all links.
pub struct Endpoint {
    core: Arc<EndpointCore>,
    /// None only while it is dropped.
    runtime: Option<Runtime>,
}

/// Request to reach a node.
#[derive(Clone, Debug)]
pub(crate) struct Approach {
    /// Addresses of the node, the likeliest one first.
    pub addresses: Vec<SocketAddr>,
    /// Longest time for all addresses.
    pub limit: Duration,
    /// Idle timeout of the link, if it differs from the endpoint's.
    pub idle_timeout: Option<Duration>,
    /// Hello of the node, if it is known: the address may also belong to another node, in another
    /// network, which is then refused.
    pub hello: Option<Vec<u8>>,
}

/// Common parameters of the attempts to reach a node.
#[derive(Clone)]
struct Dial {
    until: tokio::time::Instant,
    limit: Duration,
    options: EndpointOptions,
    hello: Option<Vec<u8>>,
}

/// Connection to a peer after the exchange of greetings.
struct GreetedPeer {
    address: SocketAddr,
    connection: Connection,
    greeting: Greeting,
    control: Control,
}

/// Part of an endpoint that its tasks hold.
struct EndpointCore {
    endpoint: quinn::Endpoint,
    client: quinn::ClientConfig,
    buffers: SocketBuffers,
    options: EndpointOptions,
    /// Bytes that peers get right after authentication.
    hello: Vec<u8>,
    handle: Handle,
    places: Arc<Semaphore>,
    knock: Arc<Knock>,
    handshake_limiter: Arc<HandshakeLimiter>,
    refusals: Arc<Refusals>,
    moderation: Arc<Moderation>,
    accepted: Mailbox<PendingPeer>,
    links: Lock<Vec<Weak<Shared>>>,
}

impl Endpoint {
    /// Opens the socket and starts the threads. Peers get the `hello` right after authentication.
    ///
    /// # Errors
    ///
    /// Returns an error if the hello is too long, the port is taken, or the certificate or the
    /// threads cannot be made.
    pub fn bind(options: EndpointOptions, secret: &Secret, hello: &[u8]) -> Result<Self, NetError> {
        if hello.len() > HELLO_MAX {
            return Err(NetError::HelloTooLong { bytes: hello.len() });
        }
        let identity = Arc::new(Identity::new(secret)?);
        let Transport { endpoint, server, client } = Transport::new(&options, &identity)?;
        let (socket, buffers) = transport::open_socket(options.listen)?;
        let threads = |error: std::io::Error| NetError::Threads(error.to_string());
        let moderation = Arc::<Moderation>::default();
        let runtime = start_threads(&options, moderation.clone()).map_err(threads)?;
        let guard = runtime.enter();
        let adapter = Arc::new(quinn::TokioRuntime);
        let knock = Arc::new(Knock::of(secret));
        let refusals = Arc::<Refusals>::default();
        let socket = adapter.wrap_udp_socket(socket).map_err(threads)?;
        let socket =
            Arc::new(QuietSocket::new(socket, knock.clone(), refusals.clone(), moderation.clone()));
        let endpoint =
            quinn::Endpoint::new_with_abstract_socket(endpoint, Some(server), socket, adapter)
                .map_err(threads)?;
        drop(guard);
        let core = Arc::new(EndpointCore {
            endpoint,
            client,
            buffers,
            hello: hello.to_vec(),
            handle: runtime.handle().clone(),
            places: Arc::new(Semaphore::new(options.links_max.min(LINKS_LIMIT))),
            knock,
            handshake_limiter: Arc::new(HandshakeLimiter::default()),
            refusals,
            moderation,
            // Each peer has one of the places, so this is never full.
            accepted: Mailbox::new(options.links_max),
            links: Lock::new(Vec::new()),
            options,
        });
        runtime.spawn(core.clone().accept());
        Ok(Self { core, runtime: Some(runtime) })
    }

    /// Returns the address of the socket, with its port.
    pub fn local_addr(&self) -> SocketAddr {
        self.core.endpoint.local_addr().unwrap_or(self.core.options.listen)
    }

    /// Connects to a node and exchanges greetings; blocks for at most the timeout.
    ///
    /// # Errors
    ///
    /// Returns an error that names the address: nothing answers, it is no node of this version, it
    /// refuses, or all links of this node are in use.
    pub fn dial(&self, address: SocketAddr, timeout: Duration) -> Result<PendingPeer, NetError> {
        let approach =
            Approach { addresses: vec![address], limit: timeout, idle_timeout: None, hello: None };
        let silence = NetError::RpcError { address, after: timeout };
        self.approach(approach).map_err(|mut errors| errors.pop().unwrap_or(silence))
    }

    /// Connects to a node at the first of its addresses that answers, and exchanges greetings. The
    /// addresses are dialed in parallel, each a little later than the previous one, or as soon as
    /// that one fails.
    ///
    /// # Errors
    ///
    /// Returns the error of each address, as [`Endpoint::dial`] does.
    pub(crate) fn approach(&self, approach: Approach) -> Result<PendingPeer, Vec<NetError>> {
        if Handle::try_current().is_ok() {
            return Err(vec![NetError::NetThread]);
        }
        self.core.handle.block_on(self.core.clone().approach(approach))
    }

    /// Returns the peers that have dialed, are authenticated, and have sent their greeting.
    pub fn accepted(&self) -> &Mailbox<PendingPeer> {
        &self.core.accepted
    }

    /// Returns the peers that were refused since the last call, at most one line per address in
    /// some seconds.
    pub fn refusals(&self) -> Vec<RefusedPeer> {
        self.core.refusals.take()
    }

    /// Returns the number of all attempts that were refused.
    pub fn refused_count(&self) -> u64 {
        self.core.refusals.count()
    }

    /// Returns the buffers of the socket, as the system has made them.
    pub fn socket_buffers(&self) -> SocketBuffers {
        self.core.buffers
    }

    #[cfg(test)]
    pub(crate) fn moderation(&self) -> &Moderation {
        &self.core.moderation
    }

    /// Number of handshakes in progress.
    #[cfg(test)]
    pub(crate) fn crowd(&self) -> usize {
        self.core.handshake_limiter.crowd()
    }

    /// Closes all links, as [`Link::close`] does, and waits until they have sent their queues, for
    /// a bounded time.
    pub fn close(&self, why: &str) {
        self.core.accepted.close(why);
        if Handle::try_current().is_err() {
            self.core.handle.block_on(self.core.shut(why));
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close("the program ended its links");
        if let Some(runtime) = self.runtime.take() {
            match Handle::try_current() {
                // The socket is closed when this returns.
                Err(_) => runtime.shutdown_timeout(CLOSE_MARGIN),
                Ok(_) => runtime.shutdown_background(),
            }
        }
    }
}

impl EndpointCore {
    /// Admits clients until the endpoint is closed.
    async fn accept(self: Arc<Self>) {
        while let Some(incoming) = self.endpoint.accept().await {
            // The socket has checked the knock of first packets. A packet after a Retry has another
            // id, and its token has the first one.
            if !self.knock.opens(&incoming.orig_dst_cid()) {
                incoming.ignore();
                continue;
            }
            let address = canonical(incoming.remote_address());
            let is_proven = incoming.remote_address_validated();
            match self.handshake_limiter.enter(address.ip(), is_proven) {
                Entrance::Admit(ticket) => {
                    tokio::spawn(self.clone().admit(incoming, address, ticket));
                }
                Entrance::Prove => {
                    // Fails only for addresses that are proven.
                    let _ = incoming.retry();
                }
            }
        }
    }

    async fn admit(
        self: Arc<Self>,
        incoming: Incoming,
        address: SocketAddr,
        ticket: HandshakePermit,
    ) {
        if let Err(why) = self.clone().welcome(incoming, address, ticket).await {
            self.refusals.note(Instant::now(), address, why);
        }
    }

    /// Takes a client from its first packet to the accepted ones.
    async fn welcome(
        self: Arc<Self>,
        incoming: Incoming,
        address: SocketAddr,
        mut ticket: HandshakePermit,
    ) -> Result<(), String> {
        let limit = self.options.handshake_timeout;
        let connecting = incoming.accept().map_err(|error| refusal(&error))?;
        let connection = ticket
            .hold(timeout(limit, connecting))
            .await
            .ok_or("its handshake was unfinished as later ones needed its place")?
            .map_err(|_| format!("its handshake took over {} s", limit.as_secs_f32()))?
            .map_err(|error| refusal(&error))?;
        let refuse = |why: &str| {
            close(&connection, CloseCode::Refused, why);
            Err(why.to_owned())
        };
        if !identity::is_node(&connection) {
            return refuse("its certificate is not that of a node");
        }
        let Ok(place) = self.places.clone().try_acquire_owned() else {
            let max = self.options.links_max;
            return refuse(&format!("all {max} links of this node are in use"));
        };
        // It knows the secret: no stranger takes its place from now on.
        drop(ticket);
        let greeted = match timeout(limit, self.greet_client(&connection)).await {
            Err(_) => {
                return refuse(&format!("it sent no greeting within {} s", limit.as_secs_f32()));
            }
            Ok(Err(Stop::Violation(why))) => return refuse(&why),
            Ok(Err(Stop::Ended)) => return Err("its connection ended before its greeting".into()),
            Ok(Ok(greeted)) => greeted,
        };
        let (behind, control) = greeted;
        match Greeting::decode(&behind) {
            Err(error) => {
                if matches!(error, GreetingError::OtherProtocol { .. }) {
                    // The peer learns the fault from the greeting, unless a close overtakes that.
                    let _ = timeout(CLOSE_MARGIN, connection.closed()).await;
                }
                refuse(&error.sentence(false))
            }
            Ok(greeting) => {
                let peer = GreetedPeer { address, connection, greeting, control };
                let pending = self.pending(peer, place, self.options.clone());
                // Closed only while the endpoint closes.
                self.accepted.send(pending).map_err(|closed| closed.to_string())
            }
        }
    }

    /// Exchanges greetings; returns the bytes of the peer's greeting after its head.
    async fn greet_client(&self, connection: &Connection) -> Result<(Vec<u8>, Control), Stop> {
        let (mut send, mut receive) = connection.accept_bi().await.map_err(|_| Stop::Ended)?;
        let theirs = read_greeting(&mut receive).await?;
        let own = wire::greeting(&self.hello, self.options.idle_timeout);
        send.write_all(&own).await.map_err(|_| Stop::Ended)?;
        Ok((theirs, (send, receive)))
    }

    async fn greet_server(
        &self,
        connection: &Connection,
        idle_timeout: Duration,
    ) -> Result<(Greeting, Control), Stop> {
        let (mut send, mut receive) = connection.open_bi().await.map_err(|_| Stop::Ended)?;
        let own = wire::greeting(&self.hello, idle_timeout);
        send.write_all(&own).await.map_err(|_| Stop::Ended)?;
        let theirs = read_greeting(&mut receive).await?;
        let greeting =
            Greeting::decode(&theirs).map_err(|error| Stop::Violation(error.sentence(true)))?;
        Ok((greeting, (send, receive)))
    }

    /// Dials the addresses of a node, one place for all of them.
    async fn approach(self: Arc<Self>, approach: Approach) -> Result<PendingPeer, Vec<NetError>> {
        let Approach { addresses, limit, idle_timeout, hello } = approach;
        let full = NetError::LinksFull { max: self.options.links_max };
        let place = self.places.clone().try_acquire_owned().map_err(|_| vec![full])?;
        let idle_timeout = idle_timeout.unwrap_or(self.options.idle_timeout);
        let options = EndpointOptions { idle_timeout, ..self.options.clone() };
        let until = tokio::time::Instant::now() + limit;
        let dial = Dial { until, limit, options: options.clone(), hello };
        let mut waiting = addresses.into_iter();
        let mut attempts = JoinSet::new();
        let mut errors = Vec::new();
        loop {
            if let Some(address) = waiting.next() {
                attempts.spawn(self.clone().dial(address, dial.clone()));
            }
            let ended = if waiting.len() == 0 {
                attempts.join_next().await
            } else {
                match timeout(DIALS_APART, attempts.join_next()).await {
                    Ok(ended) => ended,
                    Err(_) => continue,
                }
            };
            match ended {
                Some(Ok(Ok(peer))) => return Ok(self.pending(peer, place, options)),
                Some(Ok(Err(error))) => errors.push(error),
                // A task that panicked.
                Some(Err(_)) => {}
                None if waiting.len() == 0 => return Err(errors),
                None => {}
            }
        }
    }

    /// Connects to an address and exchanges greetings.
    async fn dial(
        self: Arc<Self>,
        address: SocketAddr,
        dial: Dial,
    ) -> Result<GreetedPeer, NetError> {
        let Dial { until, limit, options, hello } = dial;
        let mut client = self.client.clone();
        transport::set_up_dial(&mut client, &options);
        let knock = self.knock.fresh()?;
        client.initial_dst_cid_provider(Arc::new(move || knock));
        let connecting = self
            .endpoint
            .connect_with(client, address, NODE_NAME)
            .map_err(|error| NetError::of_dial(address, &error))?;
        let failed = |error: &_| NetError::of_handshake(address, limit, error);
        let connection = timeout_at(until, connecting)
            .await
            .map_err(|_| NetError::RpcError { address, after: limit })?
            .map_err(|error| failed(&error))?;
        let greeted = timeout_at(until, self.greet_server(&connection, options.idle_timeout))
            .await
            .map_err(|_| NetError::NoHello { address, after: limit })?;
        match greeted {
            Ok((greeting, _)) if hello.as_ref().is_some_and(|hello| *hello != greeting.hello) => {
                close(&connection, CloseCode::End, "another node is looked for");
                Err(NetError::OtherNode { address })
            }
            Ok((greeting, control)) => Ok(GreetedPeer { address, connection, greeting, control }),
            Err(Stop::Violation(why)) => {
                close(&connection, CloseCode::Violation, &why);
                Err(NetError::OtherProtocol { address, why })
            }
            Err(Stop::Ended) => Err(failed(&connection.closed().await)),
        }
    }

    fn pending(
        self: &Arc<Self>,
        peer: GreetedPeer,
        place: OwnedSemaphorePermit,
        mut options: EndpointOptions,
    ) -> PendingPeer {
        let GreetedPeer { address, connection, greeting, control } = peer;
        let Greeting { hello, idle_timeout } = greeting;
        // QUIC closes a connection after the shorter one of both (RFC 9000, section 10.1).
        options.idle_timeout = options.idle_timeout.min(idle_timeout);
        // A stream that is still open has a priority, so this cannot fail here.
        let _ = control.0.set_priority(CONTROL_PRIORITY);
        let handle = self.handle.clone();
        let moderation = self.moderation.clone();
        let parts = LinkParts { connection, control, place, options, handle, moderation };
        PendingPeer { hello, address, parts: Some(parts), core: Arc::downgrade(self) }
    }

    fn remember(&self, link: Weak<Shared>) {
        let mut links = self.links.lock();
        links.retain(|link| link.strong_count() > 0);
        links.push(link);
    }

    /// Closes all links and the socket.
    async fn shut(&self, why: &str) {
        let links = std::mem::take(&mut *self.links.lock());
        for link in links.iter().filter_map(Weak::upgrade) {
            link.end(why);
        }
        // All places are free when all links have ended. Pending peers are not waited for.
        let all = self.options.links_max.min(LINKS_LIMIT) as u32;
        let all = self.places.acquire_many(all);
        let limit = self.options.flush_timeout + CLOSE_MARGIN;
        let _ = timeout(limit, all).await;
        self.endpoint.close(VarInt::from_u32(CloseCode::End as u32), wire::reason_bytes(why));
        // So that the last packet of each connection is sent.
        let _ = timeout(CLOSE_MARGIN, self.endpoint.wait_idle()).await;
    }
}

/// Starts the threads of an endpoint.
fn start_threads(
    options: &EndpointOptions,
    moderation: Arc<Moderation>,
) -> std::io::Result<Runtime> {
    let mut builder = Builder::new_multi_thread();
    builder
        .worker_threads(options.threads.max(1))
        .thread_name("potluck-net")
        .enable_io()
        .enable_time();
    if options.threads <= 1 {
        // Of several threads, one that waits would keep another one from the socket.
        builder.on_thread_park(move || moderation.wait());
    }
    builder.build()
}

/// Reads a greeting, and returns its bytes after the head.
async fn read_greeting(receive: &mut RecvStream) -> Result<Vec<u8>, Stop> {
    let mut head = [0; GREETING_HEAD_BYTES];
    // Read on its own: it identifies another program, which may send less than a greeting.
    read_full(receive, &mut head, None).await?;
    let mut behind = vec![0; wire::greeting_length(&head).map_err(Stop::Violation)?];
    read_full(receive, &mut behind, None).await?;
    Ok(behind)
}

/// Reason for which a handshake ended, for the side that accepts.
fn refusal(end: &ConnectionError) -> String {
    match TlsRefusal::of(end) {
        Some(TlsRefusal::Code) => "it does not have the code of this run".into(),
        Some(TlsRefusal::Clocks) => "its clock differs from this one by more than a day".into(),
        Some(TlsRefusal::Protocol) => "it does not speak the protocol of this version".into(),
        None => sentence(end),
    }
}

/// Authenticated peer with a known hello that is not accepted yet. Dropping it refuses the peer.
pub struct PendingPeer {
    hello: Vec<u8>,
    address: SocketAddr,
    /// None once it was refused or opened.
    parts: Option<LinkParts>,
    core: Weak<EndpointCore>,
}

impl std::fmt::Debug for PendingPeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PendingPeer({})", self.address)
    }
}

impl PendingPeer {
    /// Returns the hello that the peer passed to [`Endpoint::bind`].
    pub fn hello(&self) -> &[u8] {
        &self.hello
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes the connection; the peer gets the sentence as [`CloseReason::Refused`], or as the
    /// error of its dial.
    ///
    /// [`CloseReason::Refused`]: super::CloseReason::Refused
    pub fn refuse(mut self, why: &str) {
        self.turn_away(why);
    }

    fn turn_away(&mut self, why: &str) {
        if let Some(parts) = self.parts.take() {
            close(&parts.connection, CloseCode::Refused, why);
        }
    }

    /// Accepts the peer: from now on the receiver is called.
    pub fn open(mut self, receiver: Arc<dyn Receiver>) -> Link {
        let parts = self.parts.take().expect("only refuse and open take it, and they consume self");
        let link = Link::open(parts, receiver);
        match self.core.upgrade() {
            Some(core) => core.remember(link.shared()),
            None => link.close("the endpoint is closed"),
        }
        link
    }
}

impl Drop for PendingPeer {
    fn drop(&mut self) {
        self.turn_away("the node did not take the connection up");
    }
}
