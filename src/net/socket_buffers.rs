//! Buffers of the UDP socket, which the system may make smaller than requested.

use socket2::Socket;

/// Requested bytes of each buffer: over 600 of the largest packets, more than a burst of a link
/// has. The system drops packets that do not fit, which congestion control interprets as a
/// congested network.
pub(crate) const SOCKET_BYTES: usize = 4 << 20;

/// Bytes of the buffers of a socket, counted like the requested bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketBuffers {
    pub receive: usize,
    pub send: usize,
}

impl SocketBuffers {
    /// Requests buffers of `bytes`, and returns the actual ones.
    pub(crate) fn ask(socket: &Socket, bytes: usize) -> Self {
        // Smaller buffers only cost speed.
        let _ = socket.set_recv_buffer_size(bytes);
        let _ = socket.set_send_buffer_size(bytes);
        // Linux includes its own management: twice the requested size (socket(7)).
        let per_byte = if cfg!(target_os = "linux") { 2 } else { 1 };
        Self {
            receive: socket.recv_buffer_size().unwrap_or_default() / per_byte,
            send: socket.send_buffer_size().unwrap_or_default() / per_byte,
        }
    }

    /// Returns a sentence for the user if a buffer is smaller than requested, with the command that
    /// makes buffers larger.
    pub fn note(&self) -> Option<String> {
        let Self { receive, send } = *self;
        if receive >= SOCKET_BYTES && send >= SOCKET_BYTES {
            return None;
        }
        let command = if cfg!(any(target_os = "linux", target_os = "android")) {
            format!(
                "; as root: sysctl -w net.core.rmem_max={SOCKET_BYTES} \
                 net.core.wmem_max={SOCKET_BYTES}"
            )
        } else if cfg!(any(target_vendor = "apple", target_os = "freebsd")) {
            format!("; as root: sysctl -w kern.ipc.maxsockbuf={}", 2 * SOCKET_BYTES)
        } else {
            String::new()
        };
        Some(format!(
            "note: the system gives UDP sockets buffers of {} KiB to receive and {} KiB to send, \
             of {} KiB that links ask for: fast networks lose packets then{command}",
            receive >> 10,
            send >> 10,
            SOCKET_BYTES >> 10,
        ))
    }
}

#[cfg(test)]
mod tests {
    use socket2::{Domain, Protocol, Type};

    use super::*;

    #[test]
    fn small_buffers_are_told_with_the_command_that_makes_them_larger() {
        let enough = SocketBuffers { receive: SOCKET_BYTES, send: SOCKET_BYTES };
        assert_eq!(enough.note(), None);
        for small in [
            SocketBuffers { receive: 212_992, ..enough },
            SocketBuffers { send: 212_992, ..enough },
        ] {
            let note = small.note().unwrap();
            assert!(note.contains(" 208 KiB to ") && note.contains(" 4096 KiB "), "{note}");
            if cfg!(target_os = "linux") {
                let command = "sysctl -w net.core.rmem_max=4194304 net.core.wmem_max=4194304";
                assert!(note.ends_with(command), "{note}");
            }
        }
    }

    #[test]
    fn the_buffers_are_those_that_the_system_has_given() {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP)).unwrap();
        let small = SocketBuffers::ask(&socket, 65_536);
        assert_eq!(small, SocketBuffers { receive: 65_536, send: 65_536 });
        assert!(small.note().is_some());
        // No system gives as much as this.
        let most = SocketBuffers::ask(&socket, i32::MAX as usize);
        assert!(most.receive < i32::MAX as usize && most.receive >= 65_536, "{most:?}");
    }
}
