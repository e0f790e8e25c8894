//! Peers of a live run, made of the library: one that knows the code and sends any bytes, and a
//! node of the run whose messages and values are changed on their way.
#![allow(dead_code, reason = "each test binary uses a part of this file")]

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use potluck_core::faults::Faults;
use potluck_core::metrics::{Event, MetricsError, Sink};
use potluck_core::{NodeRank, decode};
use potluck_net::cluster::{ClusterMsg, EndpointId, Hello, JoiningNodeOptions, NodeDevice};
use potluck_net::nodes::{
    ClusterEvent, ClusterHandle, ClusterHandleOptions, FrameReceiver, NodeConnection, NodeLink,
};
use potluck_net::{
    CloseReason, Congestion, Endpoint, EndpointOptions, Link, ReceiveBuffer, Receiver, Secret,
    TAG_BYTES,
};
use potluck_parallel::comm::{Carrier, Closed, FrameHeader, FrameValues, Mailbox};
use potluck_train::nodes::JoinedNode;
use potluck_train::runtime::remote::node::{NodeInput, NodeServer};
use potluck_train::runtime::remote::wire::ToFirst;
use potluck_train::spec::RunSpec;

/// Longest wait for something that must happen.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn any_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

pub fn hello(host: &str, port: u16) -> Hello {
    Hello {
        version: env!("CARGO_PKG_VERSION").into(),
        build: env!("POTLUCK_BUILD").into(),
        run: None,
        place: None,
        host: host.into(),
        port,
        addresses: Vec::new(),
        endpoint: EndpointId::default(),
        devices: vec![NodeDevice { name: "CPU".into(), kind: String::new() }],
        identities: Vec::new(),
    }
}

/// Message of the cluster as bytes on a link, whose first byte says so.
pub fn cluster(message: &ClusterMsg) -> Vec<u8> {
    [&[0], &postcard::to_allocvec(message).unwrap()[..]].concat()
}

/// Message for the first node as bytes on a link.
pub fn whole(bytes: &[u8]) -> Vec<u8> {
    [&[1], bytes].concat()
}

/// Endpoint of a peer that knows the secret in a file.
pub fn endpoint(secret: &Path) -> Endpoint {
    let secret = Secret::read_file(secret).unwrap();
    Endpoint::bind(EndpointOptions::new(any_port()), &secret, b"").unwrap()
}

/// Link to a node of the run, with what arrived on it.
pub struct Talk {
    pub link: Link,
    heard: Arc<Heard>,
}

#[derive(Default)]
struct Heard {
    state: Mutex<(Vec<Vec<u8>>, Option<CloseReason>)>,
    changed: Condvar,
}

impl Talk {
    pub fn begin(endpoint: &Endpoint, node: SocketAddr) -> Self {
        let heard = Arc::new(Heard::default());
        let link = endpoint.dial(node, PATIENCE).unwrap().open(heard.clone());
        Self { link, heard }
    }

    pub fn say(&self, message: Vec<u8>) {
        // The node may have closed the link already.
        let _ = self.link.send_control(message);
    }

    /// Waits for the next message of the cluster; none once the link is closed.
    pub fn hear(&self) -> Option<ClusterMsg> {
        let silent = |state: &mut (Vec<_>, Option<_>)| state.0.is_empty() && state.1.is_none();
        let state = self.heard.state.lock().unwrap();
        let (mut state, waited) =
            self.heard.changed.wait_timeout_while(state, PATIENCE, silent).unwrap();
        assert!(!waited.timed_out(), "nothing was heard for {PATIENCE:?}");
        if state.0.is_empty() {
            return None;
        }
        let message = state.0.remove(0);
        Some(ClusterMsg::decode(message.strip_prefix(&[0]).unwrap_or_default()).unwrap())
    }

    /// Waits for the end of the link.
    pub fn closed(&self) -> String {
        let open = |state: &mut (Vec<_>, Option<_>)| state.1.is_none();
        let state = self.heard.state.lock().unwrap();
        let (state, _) = self.heard.changed.wait_timeout_while(state, PATIENCE, open).unwrap();
        state.1.as_ref().expect("the link is closed").to_string()
    }

    /// Joins as a node of a run of two, and goes through all until its start.
    pub fn join(&self, hello: Hello) {
        self.say(cluster(&ClusterMsg::Hello(hello)));
        loop {
            match self.hear().expect("the run starts") {
                ClusterMsg::Roster { roster, .. } => {
                    let (generation, peer) = (roster.generation, NodeRank(0));
                    self.say(cluster(&ClusterMsg::PairConnected { generation, peer }));
                }
                ClusterMsg::Start { .. } => return,
                _ => {}
            }
        }
    }
}

struct Region(Vec<u8>);

impl ReceiveBuffer for Region {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    fn arrived(self: Box<Self>) -> Result<(), String> {
        Ok(())
    }
}

impl Receiver for Heard {
    fn control(&self, message: Vec<u8>) -> Result<(), String> {
        // Only messages of the cluster are of interest.
        if message.first() == Some(&0) {
            self.state.lock().unwrap().0.push(message);
            self.changed.notify_all();
        }
        Ok(())
    }

    fn blob_begins(&self, _: u64, _: usize) -> Result<(), String> {
        Ok(())
    }

    fn blob(&self, _: u64, _: Vec<u8>) -> Result<(), String> {
        Ok(())
    }

    fn data(&self, _: &[u8; TAG_BYTES], bytes: usize) -> Result<Box<dyn ReceiveBuffer>, String> {
        Ok(Box::new(Region(vec![0; bytes])))
    }

    fn closed(&self, why: &CloseReason) {
        self.state.lock().unwrap().1 = Some(why.clone());
        self.changed.notify_all();
    }
}

/// Changes what a node sends: each message, and each frame.
pub trait Treason: Send + Sync + 'static {
    /// Returns the messages to send instead of this one.
    fn message(&self, message: ToFirst) -> Vec<Vec<u8>> {
        vec![postcard::to_allocvec(&message).unwrap()]
    }

    fn frame(&self, header: FrameHeader, values: FrameValues) -> (FrameHeader, FrameValues) {
        (header, values)
    }

    /// Takes note of a message of the first node.
    fn hears(&self, _: &[u8]) {}
}

/// Connection to the first node on which a traitor speaks.
struct TreasonLink<T>(Arc<NodeLink>, Arc<T>);

impl<T: Treason> NodeConnection for TreasonLink<T> {
    fn send(&self, message: Vec<u8>) -> Result<(), Closed> {
        let messages = self.1.message(decode(&message).unwrap());
        messages.into_iter().try_for_each(|message| self.0.send(message))
    }

    fn carrier(&self) -> Arc<dyn Carrier> {
        Arc::new(TreasonCarrier(self.0.carrier(), self.1.clone()))
    }

    fn arrived(&self) -> u64 {
        self.0.arrived()
    }
}

struct TreasonCarrier<T>(Arc<dyn Carrier>, Arc<T>);

impl<T: Treason> Carrier for TreasonCarrier<T> {
    fn send(&self, header: FrameHeader, values: FrameValues) -> Result<(), Closed> {
        let (header, values) = self.1.frame(header, values);
        self.0.send(header, values)
    }
}

struct Silence;

impl Sink for Silence {
    fn event(&mut self, _: &Event) -> Result<(), MetricsError> {
        Ok(())
    }
}

/// Takes part in a run of two nodes with a CPU device, until it is over.
pub fn betray(secret: &Path, first: &str, treason: impl Treason) {
    let frames = FrameReceiver::default();
    let options = ClusterHandleOptions {
        listen: any_port(),
        advertise: Vec::new(),
        secret: Secret::read_file(secret).unwrap(),
        node_timeout: PATIENCE,
        frames: frames.clone(),
        congestion: Congestion::default(),
        faults: Faults::default(),
    };
    let first = vec![first.parse().unwrap()];
    let hello = |port| JoiningNodeOptions { hello: hello("traitor", port), first };
    let mut cluster = ClusterHandle::join(options, hello).unwrap();
    let deadline = Some(Instant::now() + PATIENCE);
    let (you, link) = loop {
        if let ClusterEvent::Started { you, mut links, .. } = cluster.news.recv(deadline).unwrap() {
            break (you, links.remove(0).1);
        }
    };
    let inbox = Mailbox::new(1 << 16);
    let (delivering, treason) = (inbox.clone(), Arc::new(treason));
    let hearing = treason.clone();
    let deliver = move |message: Vec<u8>| {
        hearing.hears(&message);
        delivering.send(NodeInput::Message(message)).map_err(|why| why.to_string())
    };
    link.receive_with(Arc::new(deliver));
    let (news, ending) = (cluster.news.clone(), inbox.clone());
    let watching = thread::spawn(move || {
        while !matches!(news.recv(None), Ok(ClusterEvent::Ended(_)) | Err(_)) {}
        let _ = ending.send(NodeInput::Ended("the cluster is over".into()));
    });
    let link: Arc<dyn NodeConnection> = Arc::new(TreasonLink(link, treason));
    let configure = |config: &str| RunSpec::of_node(config, &[]).map_err(|why| why.to_string());
    let mut node = JoinedNode {
        show: |_| {},
        show_error: |_| {},
        data: None,
        devices: "cpu".into(),
        configure: Box::new(configure),
        faults: Faults::default(),
        signals: Default::default(),
        term_timeout: Duration::ZERO,
        sink: Box::new(Silence),
    };
    let connections = vec![link.clone(), link];
    let _ = NodeServer::new(you.0, &mut node, connections, frames).run(&inbox);
    cluster.leave("the node has ended");
    watching.join().unwrap();
}
