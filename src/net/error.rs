//! Errors of endpoints and dials, and reasons for the end of a link: each a sentence for the user.

use std::net::SocketAddr;
use std::time::Duration;

use quinn::{ConnectError, ConnectionError};

use super::wire::{self, CloseCode};
use potluck_core::Remedy;

/// Failure to bind or to dial. No variant holds a part of a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetError {
    #[error(
        "UDP port {} of {} is taken by another program: choose another one", .0.port(), .0.ip()
    )]
    PortTaken(SocketAddr),
    #[error("cannot listen on {address} over UDP: {why}")]
    Bind { address: SocketAddr, why: String },
    #[error("a greeting has {bytes} bytes, and at most {max} are allowed", max = wire::HELLO_MAX)]
    HelloTooLong { bytes: usize },
    #[error("cannot make the certificate of this node: {0}")]
    Identity(String),
    #[error("cannot start the threads of the network: {0}")]
    Threads(String),
    #[error(
        "nothing answered at {address} over UDP within {} s: is the first node running there, with \
         the same code (it does not answer those who have another one), and may UDP pass through \
         the firewalls in between?", after.as_secs_f32()
    )]
    RpcError { address: SocketAddr, after: Duration },
    #[error(
        "the node at {address} answered and then sent no greeting within {} s",
        after.as_secs_f32()
    )]
    NoHello { address: SocketAddr, after: Duration },
    #[error(
        "the code is not that of the run at {address}: compare it with what its first node shows"
    )]
    WrongCode { address: SocketAddr },
    #[error(
        "the certificates of this node and of {address} are not valid at the same time: set the \
         clocks of both machines, which differ by more than a day"
    )]
    Clocks { address: SocketAddr },
    #[error("{address} does not speak the protocol of this version of potluck: {why}")]
    OtherProtocol { address: SocketAddr, why: String },
    #[error("another node than the one that is looked for is at {address}")]
    OtherNode { address: SocketAddr },
    #[error("{address} refused: {why}")]
    Refused { address: SocketAddr, why: String },
    #[error("the connection to {address} was lost as it began: {why}")]
    Lost { address: SocketAddr, why: String },
    #[error("cannot send to {address}: {why}")]
    Unreachable { address: SocketAddr, why: String },
    #[error("this node has {max} links, which is its limit")]
    LinksFull { max: usize },
    #[error("a dial waits, and a thread of the network must not: this is a defect of potluck")]
    NetThread,
}

impl NetError {
    /// Returns the remedy of the failure.
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::RpcError { .. }
            | Self::NoHello { .. }
            // Machines set their clocks some time after they have started.
            | Self::Clocks { .. }
            | Self::OtherNode { .. }
            | Self::Refused { .. }
            | Self::Lost { .. }
            | Self::LinksFull { .. } => Remedy::Time,
            Self::PortTaken(_)
            | Self::Bind { .. }
            | Self::HelloTooLong { .. }
            | Self::Identity(_)
            | Self::Threads(_)
            | Self::WrongCode { .. }
            | Self::OtherProtocol { .. }
            | Self::Unreachable { .. }
            | Self::NetThread => Remedy::Person,
        }
    }

    /// Returns true for an error of an address without an answer.
    pub(crate) fn is_silence(&self) -> bool {
        matches!(self, Self::RpcError { .. } | Self::Unreachable { .. })
    }

    /// Returns the error as a part of a sentence about several addresses.
    pub(crate) fn in_list(&self) -> String {
        match self {
            Self::RpcError { address, after } => {
                format!("no answer from {address} over UDP within {} s", after.as_secs_f32())
            }
            other => other.to_string(),
        }
    }

    /// Returns the error of a step in making certificates.
    pub(super) fn identity(error: impl std::fmt::Display) -> Self {
        Self::Identity(error.to_string())
    }

    pub(super) fn of_dial(address: SocketAddr, error: &ConnectError) -> Self {
        let why = match error {
            ConnectError::InvalidRemoteAddress(_) => {
                "the addresses of the two nodes are not of one kind (IPv4 and IPv6), or the \
                 address is that of no machine"
                    .into()
            }
            other => other.to_string(),
        };
        Self::Unreachable { address, why }
    }

    /// Returns the error of a connection that ended while it was made, by the side that dialed.
    pub(super) fn of_handshake(
        address: SocketAddr,
        after: Duration,
        end: &ConnectionError,
    ) -> Self {
        match TlsRefusal::of(end) {
            Some(TlsRefusal::Code) => return Self::WrongCode { address },
            Some(TlsRefusal::Clocks) => return Self::Clocks { address },
            Some(TlsRefusal::Protocol) => {
                return Self::OtherProtocol { address, why: sentence(end) };
            }
            None => {}
        }
        match end {
            ConnectionError::TimedOut => Self::RpcError { address, after },
            ConnectionError::ApplicationClosed(_) => Self::Refused { address, why: sentence(end) },
            ConnectionError::VersionMismatch => Self::OtherProtocol { address, why: sentence(end) },
            _ => Self::Lost { address, why: sentence(end) },
        }
    }
}

/// Reason of TLS to end a handshake, found by this side or reported by the other one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TlsRefusal {
    /// A certificate of another authority, or none.
    Code,
    Clocks,
    Protocol,
}

impl TlsRefusal {
    /// Returns the reason in the alert (RFC 8446, section 6; in QUIC, RFC 9001, section 4.8).
    pub fn of(end: &ConnectionError) -> Option<Self> {
        let code = match end {
            ConnectionError::TransportError(error) => u64::from(error.code),
            ConnectionError::ConnectionClosed(close) => u64::from(close.error_code),
            _ => return None,
        };
        match code.checked_sub(0x100)? {
            // bad_certificate, unsupported_certificate, certificate_unknown, unknown_ca,
            // access_denied, decrypt_error, certificate_required
            42 | 43 | 46 | 48 | 49 | 51 | 116 => Some(Self::Code),
            45 => Some(Self::Clocks),
            // protocol_version, no_application_protocol
            70 | 120 => Some(Self::Protocol),
            _ => None,
        }
    }
}

/// Reason of the end of a link.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CloseReason {
    /// This side closed it, with a sentence.
    #[error("closed here: {0}")]
    Here(String),
    /// The peer closed it, with a sentence.
    #[error("closed by the peer: {0}")]
    Peer(String),
    /// The peer did not accept this node, with its reason.
    #[error("refused by the peer: {0}")]
    Refused(String),
    #[error("the peer was silent for {} s", .0.as_secs_f32())]
    TimedOut(Duration),
    /// The peer sent something that is not due; this side closed the link.
    #[error("the peer broke the protocol: {0}")]
    Violation(String),
    /// The peer closed the link because of something that this side sent.
    #[error("the peer found the protocol broken: {0}")]
    Accused(String),
    /// A panic or a full queue on this side.
    #[error("a defect of potluck: {0}")]
    Defect(String),
    #[error("the connection was lost: {0}")]
    Lost(String),
}

impl CloseReason {
    /// Reason in the end of a connection that this side did not close.
    pub(super) fn of(end: &ConnectionError, idle_timeout: Duration) -> Self {
        let text = sentence(end);
        match end {
            ConnectionError::TimedOut => Self::TimedOut(idle_timeout),
            ConnectionError::ApplicationClosed(close) => {
                match CloseCode::of(close.error_code.into_inner()) {
                    Some(CloseCode::End) => Self::Peer(text),
                    Some(CloseCode::Refused) => Self::Refused(text),
                    Some(CloseCode::Violation) => Self::Accused(text),
                    Some(CloseCode::Defect) | None => Self::Lost(text),
                }
            }
            _ => Self::Lost(text),
        }
    }

    /// Code and text for the peer if this side closes the connection.
    pub(super) fn code(&self) -> (CloseCode, &str) {
        match self {
            Self::Refused(why) => (CloseCode::Refused, why),
            Self::Violation(why) => (CloseCode::Violation, why),
            Self::Defect(_) => (CloseCode::Defect, "it met a defect of its own"),
            Self::Here(why) | Self::Peer(why) | Self::Accused(why) | Self::Lost(why) => {
                (CloseCode::End, why)
            }
            Self::TimedOut(_) => (CloseCode::End, "it timed out"),
        }
    }
}

/// Returns the end of a connection as text: the peer's reason, sanitized, or quinn's wording.
pub fn sentence(end: &ConnectionError) -> String {
    match end {
        ConnectionError::ApplicationClosed(close) => wire::reason_text(&close.reason),
        ConnectionError::ConnectionClosed(close) if !close.reason.is_empty() => {
            wire::reason_text(&close.reason)
        }
        other => wire::reason_text(other.to_string().as_bytes()),
    }
}
