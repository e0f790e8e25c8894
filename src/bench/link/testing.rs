//! Clusters of two nodes for tests.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use super::LinkedNodes;
use potluck_core::Generation;
use potluck_core::faults::Faults;
use potluck_net::cluster::{FirstNodeOptions, JoiningNodeOptions};
use potluck_net::nodes::{
    ClusterEvent, ClusterHandle, ClusterHandleOptions, FrameReceiver, StartedCluster, rank_greeting,
};
use potluck_net::{Congestion, Secret};

const TIMEOUT: Duration = Duration::from_secs(5);

/// Returns both sides of a cluster that has started, the first node's side first.
pub fn pair() -> [LinkedNodes; 2] {
    let code = Secret::generate().unwrap().code().unwrap();
    let options = || ClusterHandleOptions {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        advertise: Vec::new(),
        congestion: Congestion::default(),
        secret: Secret::parse(&code).unwrap(),
        node_timeout: TIMEOUT,
        faults: Faults::none(),
        frames: FrameReceiver::default(),
    };
    let first = ClusterHandle::host(options(), |port| FirstNodeOptions {
        run: "a link".into(),
        nodes: 2,
        hello: rank_greeting(port, "test", 1),
        node_timeout: TIMEOUT.as_nanos() as u64,
        generation: Generation(0),
        before: Vec::new(),
    });
    let first = first.unwrap();
    let joins =
        JoiningNodeOptions { hello: rank_greeting(0, "test", 1), first: vec![first.address] };
    let other = ClusterHandle::join(options(), |port| JoiningNodeOptions {
        hello: rank_greeting(port, "test", 1),
        ..joins
    });
    thread::scope(|scope| {
        let waiting = [first, other.unwrap()].map(|cluster| scope.spawn(|| started(cluster)));
        waiting.map(|thread| thread.join().unwrap())
    })
}

fn started(cluster: ClusterHandle) -> LinkedNodes {
    loop {
        match cluster.news.recv(None).unwrap() {
            ClusterEvent::Started { roster, you, links } => {
                let started = StartedCluster { roster, you, links };
                return LinkedNodes { cluster, started, timeout: TIMEOUT };
            }
            ClusterEvent::Ended(end) => panic!("{end}"),
            _ => {}
        }
    }
}
