//! Links between endpoints over loopback, as a program uses them.

mod closing;
mod congestion;
mod dialing;
mod links;
mod locked;
#[cfg(feature = "cli")]
mod status;

use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use potluck_net::{
    CloseReason, Endpoint, EndpointOptions, Link, PendingPeer, ReceiveBuffer, Receiver, Secret,
    TAG_BYTES,
};

/// Longest wait for something that must happen.
const PATIENCE: Duration = Duration::from_secs(10);

fn any_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

fn options() -> EndpointOptions {
    EndpointOptions { flush_timeout: PATIENCE, ..EndpointOptions::new(any_port()) }
}

fn endpoint(secret: &Secret, hello: &[u8]) -> Endpoint {
    Endpoint::bind(options(), secret, hello).expect("loopback has a port")
}

fn secret() -> Secret {
    Secret::generate().expect("there are random numbers")
}

/// Returns both sides of a new connection: that of the dialing node, and that of the other one.
fn meet(dialing: &Endpoint, accepting: &Endpoint) -> (PendingPeer, PendingPeer) {
    let dialed = dialing.dial(accepting.local_addr(), PATIENCE).expect("it accepts");
    let deadline = Some(Instant::now() + PATIENCE);
    (dialed, accepting.accepted().recv(deadline).expect("it was dialed"))
}

/// Returns a link between two endpoints with the receivers of its sides.
fn linked(a: &Endpoint, b: &Endpoint) -> [(Link, Arc<Log>); 2] {
    let (a, b) = meet(a, b);
    [a, b].map(|side| {
        let log = Arc::new(Log::default());
        (side.open(log.clone()), log)
    })
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Arrival {
    Control(Vec<u8>),
    BlobBegins(u64, usize),
    Blob(u64, Vec<u8>),
    Data([u8; TAG_BYTES], Vec<u8>),
    Closed(CloseReason),
}

/// Receiver that keeps everything in the order of its arrival.
#[derive(Default)]
struct Log(Arc<Entries>);

#[derive(Default)]
struct Entries {
    arrivals: Mutex<Vec<Arrival>>,
    changed: Condvar,
}

impl Entries {
    fn add(&self, arrival: Arrival) -> Result<(), String> {
        self.arrivals.lock().unwrap().push(arrival);
        self.changed.notify_all();
        Ok(())
    }
}

impl Log {
    fn all(&self) -> Vec<Arrival> {
        self.0.arrivals.lock().unwrap().clone()
    }

    /// Waits until the arrivals are as they should be.
    fn wait(&self, mut done: impl FnMut(&[Arrival]) -> bool) -> Vec<Arrival> {
        let arrivals = self.0.arrivals.lock().unwrap();
        let (arrivals, waited) =
            self.0.changed.wait_timeout_while(arrivals, PATIENCE, |all| !done(all)).unwrap();
        assert!(!waited.timed_out(), "after {PATIENCE:?}: {} arrivals", arrivals.len());
        arrivals.clone()
    }

    fn closed(&self) -> CloseReason {
        let is_end = |all: &[Arrival]| matches!(all.last(), Some(Arrival::Closed(_)));
        match self.wait(is_end).pop() {
            Some(Arrival::Closed(why)) => why,
            other => panic!("{other:?}"),
        }
    }
}

struct Region(Arc<Entries>, [u8; TAG_BYTES], Vec<u8>);

impl ReceiveBuffer for Region {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.2
    }

    fn arrived(self: Box<Self>) -> Result<(), String> {
        self.0.add(Arrival::Data(self.1, self.2))
    }
}

impl Receiver for Log {
    fn control(&self, message: Vec<u8>) -> Result<(), String> {
        self.0.add(Arrival::Control(message))
    }

    fn blob_begins(&self, id: u64, bytes: usize) -> Result<(), String> {
        self.0.add(Arrival::BlobBegins(id, bytes))
    }

    fn blob(&self, id: u64, bytes: Vec<u8>) -> Result<(), String> {
        self.0.add(Arrival::Blob(id, bytes))
    }

    fn data(&self, tag: &[u8; TAG_BYTES], bytes: usize) -> Result<Box<dyn ReceiveBuffer>, String> {
        Ok(Box::new(Region(self.0.clone(), *tag, vec![0; bytes])))
    }

    fn closed(&self, why: &CloseReason) {
        self.0.add(Arrival::Closed(why.clone())).unwrap();
    }
}
