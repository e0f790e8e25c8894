//! Socket that hands no packet of a stranger to QUIC, which would answer some of them: with its
//! versions, with errors, with a certificate. So a port is silent to peers that do not know the
//! secret. First packets with an id of the length of our own pass, because they may belong to a
//! connection; the endpoint drops them without an answer.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};

use super::handshake_limiter::{Refusals, canonical};
use super::knock::Knock;
use super::moderation::Moderation;

/// Version of QUIC of nodes (RFC 9000); 0 marks packets with the versions of a server.
const VERSION: u32 = 1;
const VERSIONS_OF_A_SERVER: u32 = 0;
/// Bytes of the connection ids of nodes.
const ID_BYTES: usize = 8;
/// Sentence about a packet that begins a connection without the knock.
const NO_KNOCK: &str = "it has another code than this node, or is a stranger, and gets no answer";

/// UDP socket that drops the packets of strangers.
pub(crate) struct QuietSocket {
    socket: Arc<dyn AsyncUdpSocket>,
    knock: Arc<Knock>,
    refusals: Arc<Refusals>,
    /// Counts what arrives.
    moderation: Arc<Moderation>,
}

impl fmt::Debug for QuietSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QuietSocket({:?})", self.socket)
    }
}

/// Class of a datagram by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Datagram<'a> {
    /// Of an existing connection; without one, QUIC drops it silently.
    Known,
    /// Of a client that begins a connection with this id.
    First(&'a [u8]),
    Foreign,
}

impl<'a> Datagram<'a> {
    /// Reads the form, the version, the type and the first id (RFC 9000, section 17.2).
    fn read(bytes: &'a [u8]) -> Self {
        match bytes {
            [first, ..] if first & 0x80 == 0 => Self::Known,
            [first, a, b, c, d, length, rest @ ..] => {
                match u32::from_be_bytes([*a, *b, *c, *d]) {
                    VERSIONS_OF_A_SERVER => Self::Known,
                    VERSION if first & 0x30 != 0 => Self::Known,
                    // Servers assign ids of this length: for the rest of a handshake, and for
                    // another start after a Retry, whose token has the very first id.
                    VERSION if usize::from(*length) == ID_BYTES => Self::Known,
                    VERSION => match rest.get(..usize::from(*length)) {
                        Some(id) => Self::First(id),
                        None => Self::Foreign,
                    },
                    _ => Self::Foreign,
                }
            }
            _ => Self::Foreign,
        }
    }
}

impl QuietSocket {
    pub fn new(
        socket: Arc<dyn AsyncUdpSocket>,
        knock: Arc<Knock>,
        refusals: Arc<Refusals>,
        moderation: Arc<Moderation>,
    ) -> Self {
        Self { socket, knock, refusals, moderation }
    }

    fn admits(&self, datagram: &[u8], from: SocketAddr) -> bool {
        match Datagram::read(datagram) {
            Datagram::Known => true,
            Datagram::First(id) if self.knock.opens(id) => true,
            Datagram::First(_) => {
                self.refusals.note_stranger(Instant::now(), canonical(from), NO_KNOCK);
                false
            }
            Datagram::Foreign => false,
        }
    }

    /// Keeps the datagrams of a buffer that are admitted, in their order; returns their bytes. All
    /// are `stride` bytes long, but for the last one, which may be shorter.
    fn keep_admitted(&self, buffer: &mut [u8], meta: &RecvMeta) -> usize {
        let mut kept = 0;
        let mut at = 0;
        while at < meta.len {
            let end = at.saturating_add(meta.stride.max(1)).min(meta.len);
            if self.admits(&buffer[at..end], meta.addr) {
                buffer.copy_within(at..end, kept);
                kept += end - at;
            }
            at = end;
        }
        kept
    }
}

impl AsyncUdpSocket for QuietSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.socket.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit) -> io::Result<()> {
        self.socket.try_send(transmit)
    }

    fn poll_recv(
        &self,
        cx: &mut Context,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let received = ready!(self.socket.poll_recv(cx, buffers, meta))?;
        for (buffer, meta) in buffers.iter_mut().zip(meta.iter_mut()).take(received) {
            meta.len = self.keep_admitted(buffer, meta);
            self.moderation.count(meta.len);
        }
        Poll::Ready(Ok(received))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.socket.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.socket.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.socket.may_fragment()
    }
}
