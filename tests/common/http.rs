//! Requests to a server of the state of a run, over bare sockets.
#![allow(dead_code, reason = "each test binary uses a part of this file")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Answer to a request.
#[derive(Debug)]
pub struct Answer {
    pub code: u16,
    /// Lines of the head, in small letters.
    pub head: String,
    pub body: String,
}

/// Opens a connection whose waits have an end.
pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&address, PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sends bytes and returns the answer, if there is one before the server closes the connection.
pub fn send(address: SocketAddr, request: &[u8]) -> Option<Answer> {
    let mut stream = connect(address);
    // A server may answer, and close, before it has read everything.
    let _ = stream.write_all(request);
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n")?;
    let code = head.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    Some(Answer { code, head: head.to_lowercase(), body: body.into() })
}

/// Gets a path, with further lines of the head.
pub fn get_with(address: SocketAddr, path: &str, lines: &str) -> Answer {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n{lines}\r\n");
    send(address, request.as_bytes()).unwrap_or_else(|| panic!("no answer to {path}"))
}

pub fn get(address: SocketAddr, path: &str) -> Answer {
    get_with(address, path, "")
}
