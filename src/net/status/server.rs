//! HTTP server that shows the state of a run.
//!
//! It has its own thread and reads snapshots, so requests take nothing from a step but processor
//! time, which is bounded by the pace of connections. The number of connections is bounded too:
//! each serves one request within some seconds, and beyond the bound the oldest one is closed, so
//! that a new connection is always answered.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ALLOW, AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, HOST, WWW_AUTHENTICATE};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::board::StatusBoard;
use super::exposition;
use super::health::Health;
use super::json;
use super::token::StatusToken;
use potluck_core::format::no_thread;

/// Maximum number of open connections.
const CONNECTIONS_MAX: usize = 64;
/// Minimum time between two accepted connections: others wait in the system's queue.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(5);
/// Pause after a failure to accept a connection, such as a lack of file descriptors.
const FAILURE_INTERVAL: Duration = Duration::from_millis(100);
/// Time for the head of a request, and for all of a connection.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// Most bytes and most headers of the head of a request.
const HEAD_BYTES_MAX: usize = 8 << 10;
const HEADERS_MAX: usize = 64;

const PLAIN_TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
const PATHS: &str = "there are /healthz, /metrics and /status here\n";

/// Error at the start of a server.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    #[error(
        "{0} can be reached from other machines, and whoever asks there must have a token: name a \
         file with one, or an address of this machine alone, such as 127.0.0.1:{port}",
        port = .0.port()
    )]
    NoToken(SocketAddr),
    #[error("cannot listen at {address} for whoever asks for the state of the run: {why}")]
    Listen { address: SocketAddr, why: io::Error },
    #[error("{}", no_thread(.0))]
    NoThread(io::Error),
}

/// Server of the state of a run; it ends when it is dropped.
pub struct StatusServer {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl StatusServer {
    /// Begins to listen.
    ///
    /// # Errors
    /// Returns `StatusError` for an address reachable from other machines without a token,
    /// for an unusable address, and if no thread can be started.
    pub fn start(
        address: SocketAddr,
        token: Option<StatusToken>,
        board: Arc<StatusBoard>,
    ) -> Result<Self, StatusError> {
        if token.is_none() && !address.ip().to_canonical().is_loopback() {
            return Err(StatusError::NoToken(address));
        }
        let failed = |why| StatusError::Listen { address, why };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_io().enable_time().build().map_err(StatusError::NoThread)?;
        let (stop, stopped) = oneshot::channel();
        let served = Arc::new(Served { board, token });
        let thread = thread::Builder::new().name("status".into()).spawn(move || {
            runtime.block_on(async move {
                tokio::spawn(accept(listener, served));
                // The sender is dropped with the server.
                let _ = stopped.await;
            });
            runtime.shutdown_background();
        });
        let thread = Some(thread.map_err(StatusError::NoThread)?);
        Ok(Self { address, stop: Some(stop), thread })
    }

    /// Returns the address at which it listens, with its port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for StatusServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// State for the answers to requests.
struct Served {
    board: Arc<StatusBoard>,
    token: Option<StatusToken>,
}

/// Takes connections until the runtime ends.
async fn accept(listener: TcpListener, served: Arc<Served>) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let mut tasks = JoinSet::new();
    let mut open: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            sleep(FAILURE_INTERVAL).await;
            continue;
        };
        while tasks.try_join_next().is_some() {}
        open.retain(|task| !task.is_finished());
        if open.len() == CONNECTIONS_MAX
            && let Some(oldest) = open.pop_front()
        {
            oldest.abort();
        }
        open.push_back(tasks.spawn(serve(stream, served.clone())));
        sleep(ACCEPT_INTERVAL).await;
    }
}

/// Answers one request.
async fn serve(stream: TcpStream, served: Arc<Served>) {
    let service = service_fn(move |request: Request<Incoming>| {
        let response = served.answer(request.method(), request.uri().path(), request.headers());
        async move { Ok::<_, Infallible>(response) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .keep_alive(false)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX);
    // Errors of a connection are not reported.
    let _ = timeout(CONNECTION_TIMEOUT, http.serve_connection(TokioIo::new(stream), service)).await;
}

impl Served {
    fn answer(&self, method: &Method, path: &str, headers: &HeaderMap) -> Response<Full<Bytes>> {
        if let Some(refusal) = self.refusal(headers) {
            return refusal;
        }
        if method != Method::GET && method != Method::HEAD {
            let why = "only GET and HEAD are answered\n";
            return with(refused(StatusCode::METHOD_NOT_ALLOWED, why), ALLOW, "GET, HEAD");
        }
        let view = self.board.view();
        match path {
            "/healthz" => {
                let Health { is_healthy, sentence, .. } = Health::of(&view.run, view.now);
                let code =
                    if is_healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
                response(code, PLAIN_TEXT, sentence + "\n")
            }
            "/metrics" => {
                response(StatusCode::OK, exposition::MEDIA_TYPE, exposition::metrics(&view))
            }
            "/status" => response(StatusCode::OK, JSON, format!("{:#}\n", json::status(&view))),
            _ => refused(StatusCode::NOT_FOUND, PATHS),
        }
    }

    /// Answer to a request that is not allowed: without the token or, on a server without tokens,
    /// with a host name that is not this machine's, as from a web page whose name resolves to this
    /// machine (DNS rebinding).
    fn refusal(&self, headers: &HeaderMap) -> Option<Response<Full<Bytes>>> {
        let Some(token) = &self.token else {
            let host = headers.get(HOST).map(HeaderValue::as_bytes);
            if host.is_none_or(is_of_this_machine) {
                return None;
            }
            let why = "without a token, only an IP address or localhost is answered as Host\n";
            return Some(refused(StatusCode::FORBIDDEN, why));
        };
        if token.admits(headers.get(AUTHORIZATION).map(HeaderValue::as_bytes)) {
            return None;
        }
        let why = "a token is needed, as in: Authorization: Bearer TOKEN\n";
        Some(with(refused(StatusCode::UNAUTHORIZED, why), WWW_AUTHENTICATE, "Bearer"))
    }
}

/// Returns true for the value of a Host header that is an IP address or `localhost`, with or
/// without a port.
fn is_of_this_machine(host: &[u8]) -> bool {
    let Ok(host) = std::str::from_utf8(host) else { return false };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) => name,
        _ => host,
    };
    let ip = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || ip.parse::<IpAddr>().is_ok()
}

fn response(code: StatusCode, media_type: &'static str, text: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = code;
    let response = with(response, CONTENT_TYPE, media_type);
    with(response, CACHE_CONTROL, "no-store")
}

fn refused(code: StatusCode, why: &str) -> Response<Full<Bytes>> {
    response(code, PLAIN_TEXT, why.into())
}

fn with(
    mut response: Response<Full<Bytes>>,
    name: HeaderName,
    value: &'static str,
) -> Response<Full<Bytes>> {
    response.headers_mut().insert(name, HeaderValue::from_static(value));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_answered_without_a_token() {
        for own in ["localhost", "LOCALHOST:9464", "127.0.0.1:1", "[::1]:9464", "[::1]", "10.0.0.1"]
        {
            assert!(is_of_this_machine(own.as_bytes()), "{own}");
        }
        for other in ["example.com", "example.com:9464", "localhost.example.com", "", ":9464"] {
            assert!(!is_of_this_machine(other.as_bytes()), "{other}");
        }
        assert!(!is_of_this_machine(&[0xff]));
    }
}
