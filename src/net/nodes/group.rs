//! Process groups whose ranks are in several processes: [`connect`].

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use super::addresses::{all_addresses, resolve};
use super::connection::{FrameReceiver, NodeConnection, NodeLink, ValueReceiver};
use super::driver::{ClusterEvent, ClusterHandle, ClusterHandleOptions};
use crate::cluster::{
    ClusterEnd, DEVICES_MAX, EndpointId, FirstNodeOptions, Hello, JoiningNodeOptions, Loss,
    NodeDevice, Presence, Roster,
};
use crate::secret::random_bytes;
use crate::{Congestion, ReceiveBuffer, Secret, SecretError, TAG_BYTES};
use potluck_core::faults::Faults;
use potluck_core::format::counted;
use potluck_core::{Generation, Lock, NodeRank, build_hash};
use potluck_parallel::comm::{
    ArrivingPacket, GroupError, Mailbox, PacketReceiver, ProcessGroup, RecvError, RemoteProcess,
    init_over, nanos, process_name,
};

/// The process that the others join.
const FIRST: NodeRank = NodeRank(0);

/// Purpose with which processes of groups greet, so that they and the nodes of training runs refuse
/// each other.
const PURPOSE: &str = "process group";
/// Default of [`ClusterOptions::timeout`].
const TIMEOUT: Duration = Duration::from_secs(10);
/// Default of [`ClusterOptions::deadline`], the same as in [`potluck_parallel::comm::init`].
const DEADLINE: Duration = Duration::from_secs(300);
/// Message of a process that accepts packets.
const READY: &[u8] = b"ready";

/// Meeting point of the processes of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum First {
    /// This process is the first one: it waits at a UDP address until `nodes` processes have
    /// joined, itself included (2 to 64). Port 0 is any free one; [`ConnectEvent::Listening`]
    /// reports it.
    Host { listen: SocketAddr, nodes: u32 },
    /// The first process is at this address, a host and its port as in `alpha:7717`.
    Join { address: String },
}

/// Options of [`connect`].
pub struct ClusterOptions {
    pub first: First,
    /// Secret of the group: it admits peers, and it authenticates the keys that encrypt all
    /// messages.
    pub secret: Secret,
    /// Number of ranks of this process, 1 to 64; 1 by default.
    pub ranks: u32,
    /// Longest silence of a process, after which it is lost: 100 ms to 1 h, 10 s by default. The
    /// value of the first process applies. Also the longest time for which the first process waits
    /// at its end for the ends of the others.
    pub timeout: Duration,
    /// Maximum duration of a call, as in [`ProcessGroup::set_deadline`]; 5 minutes by default.
    pub deadline: Duration,
    /// Congestion control of what this process sends; CUBIC by default.
    pub congestion: Congestion,
    /// Longest wait until all processes have joined; unlimited by default.
    pub connect_timeout: Option<Duration>,
    /// Called with the news until all processes are connected; ignores them by default.
    pub on_news: Box<dyn FnMut(&ConnectEvent) + Send>,
}

impl ClusterOptions {
    /// Returns the options of a process with one rank.
    pub fn new(first: First, secret: Secret) -> Self {
        Self {
            first,
            secret,
            ranks: 1,
            timeout: TIMEOUT,
            deadline: DEADLINE,
            congestion: Congestion::default(),
            connect_timeout: None,
            on_news: Box::new(|_| {}),
        }
    }

    /// Returns the options of the first of `nodes` processes, which listens at a UDP address.
    pub fn host(listen: SocketAddr, nodes: u32, secret: Secret) -> Self {
        Self::new(First::Host { listen, nodes }, secret)
    }

    /// Returns the options of a process that joins the first one, at its host and port.
    pub fn join(address: impl Into<String>, secret: Secret) -> Self {
        Self::new(First::Join { address: address.into() }, secret)
    }
}

impl fmt::Debug for ClusterOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, ranks, timeout, deadline, connect_timeout, .. } = self;
        write!(
            f,
            "ClusterOptions({first:?}, {ranks}, {timeout:?}, {deadline:?}, {connect_timeout:?})"
        )
    }
}

/// News while processes connect; each displays as a sentence for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectEvent {
    /// This process accepts connections at this address. Others join at the first process's
    /// address.
    Listening(SocketAddr),
    /// The hosts of the joined processes, and the expected number of processes.
    Present { hosts: Vec<String>, expected: u32 },
    /// The first process refused a peer.
    TurnedAway { address: SocketAddr, why: String },
    /// A process left before all had joined.
    Departed { host: String, why: String },
}

impl fmt::Display for ConnectEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listening(address) => write!(f, "listening at {address}"),
            Self::Present { hosts, expected } => {
                write!(f, "{} of {expected} processes are here: {}", hosts.len(), hosts.join(", "))
            }
            Self::TurnedAway { address, why } => write!(f, "{address} was turned away: {why}"),
            Self::Departed { host, why } => write!(f, "{host} left: {why}"),
        }
    }
}

/// Connects this process with others to one group, and returns its handles; the facade's `connect`
/// has the documentation.
///
/// # Errors
/// Returns [`GroupError::Connect`] for options beyond their bounds, an address that is taken or not
/// found, a first process that cannot be reached or refuses this one, and if the timeout expires.
pub fn connect(mut options: ClusterOptions) -> Result<Vec<ProcessGroup>, GroupError> {
    if !(1..=DEVICES_MAX as u32).contains(&options.ranks) {
        let ranks = counted(options.ranks as usize, "rank", "ranks");
        return Err(failed(format!("a process has 1 to {DEVICES_MAX} ranks, and not {ranks}")));
    }
    // A duration that no clock reaches is no deadline.
    let until = options
        .connect_timeout
        .and_then(|connect_timeout| Instant::now().checked_add(connect_timeout));
    let timeout = options.timeout;
    let deadline = options.deadline;
    let mut on_news = std::mem::replace(&mut options.on_news, Box::new(|_| {}));
    let hosted = match options.first {
        First::Host { nodes, .. } => Some(nodes),
        First::Join { .. } => None,
    };
    let cluster = meet(options)?;
    on_news(&ConnectEvent::Listening(cluster.address));
    let started = wait_for_all(&cluster, hosted, until, &mut on_news)?;
    GroupSession::open(cluster, started, timeout, deadline, until)
}

/// Creates a process group of the nodes of a started cluster, and returns the handles of this node,
/// in order of ranks; each device of the roster is a rank. All nodes must call this. `timeout` is
/// as in [`ClusterOptions::timeout`], and the same as for the meeting.
///
/// # Errors
/// Returns [`GroupError::Connect`] if a node is lost before all are ready.
pub fn group_over(
    cluster: ClusterHandle,
    started: StartedCluster,
    timeout: Duration,
) -> Result<Vec<ProcessGroup>, GroupError> {
    GroupSession::open(cluster, started, timeout, DEADLINE, None)
}

fn failed(why: impl fmt::Display) -> GroupError {
    GroupError::Connect(why.to_string())
}

// ---- Meeting ----

fn meet(options: ClusterOptions) -> Result<ClusterHandle, GroupError> {
    let ClusterOptions { first, secret, ranks, timeout, congestion, .. } = options;
    let met = match first {
        First::Host { listen, nodes } => {
            let options = meeting_options(listen, secret, timeout, congestion);
            let run = run_name().map_err(failed)?;
            ClusterHandle::host(options, |port| FirstNodeOptions {
                run,
                nodes,
                hello: rank_greeting(port, PURPOSE, ranks),
                node_timeout: nanos(timeout),
                generation: Generation(0),
                before: Vec::new(),
            })
        }
        First::Join { address } => {
            let first = resolve(&address).map_err(|why| {
                failed(format!("{address}: expects the host and port of the first process ({why})"))
            })?;
            let options = meeting_options(any_port_towards(&first), secret, timeout, congestion);
            ClusterHandle::join(options, |port| JoiningNodeOptions {
                hello: rank_greeting(port, PURPOSE, ranks),
                first,
            })
        }
    };
    met.map_err(failed)
}

/// Options with which a process of a group meets the others.
fn meeting_options(
    listen: SocketAddr,
    secret: Secret,
    node_timeout: Duration,
    congestion: Congestion,
) -> ClusterHandleOptions {
    let frames = FrameReceiver::default();
    ClusterHandleOptions {
        listen,
        advertise: Vec::new(),
        secret,
        node_timeout,
        frames,
        congestion,
        faults: Faults::none(),
    }
}

/// Returns the greeting of this process with some ranks of a group; see [`greeting`].
pub fn rank_greeting(port: u16, purpose: &str, ranks: u32) -> Hello {
    let device = NodeDevice { name: "rank".into(), kind: String::new() };
    greeting(port, Some(purpose), vec![device; ranks as usize])
}

/// Returns any free port of the addresses from which these can be reached.
pub fn any_port_towards(peers: &[SocketAddr]) -> SocketAddr {
    let is_v4 = peers.iter().all(SocketAddr::is_ipv4);
    if is_v4 { SocketAddr::from(([0; 4], 0)) } else { all_addresses(0) }
}

/// Returns the greeting of this process, which listens at `port`. Nodes with another purpose refuse
/// it; training runs have none.
pub fn greeting(port: u16, purpose: Option<&str>, devices: Vec<NodeDevice>) -> Hello {
    let version = env!("CARGO_PKG_VERSION");
    Hello {
        version: match purpose {
            Some(purpose) => format!("{version} ({purpose})"),
            None => version.into(),
        },
        build: build_hash().into(),
        run: None,
        place: None,
        host: host_name(),
        port,
        addresses: Vec::new(),
        endpoint: EndpointId::default(),
        devices,
        identities: Vec::new(),
    }
}

/// Returns a unique name of a run or group: it separates nodes that share the secret and meet by
/// mistake, at an address that was another's before.
///
/// # Errors
/// Returns an error if the system has no random numbers.
pub fn run_name() -> Result<String, SecretError> {
    let random: [u8; 8] = random_bytes()?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Returns the name of this machine, or `unnamed`.
pub fn host_name() -> String {
    let name = gethostname::gethostname().to_string_lossy().into_owned();
    if name.is_empty() { "unnamed".into() } else { name }
}

/// Started cluster: the news [`ClusterEvent::Started`].
pub struct StartedCluster {
    pub roster: Roster,
    pub you: NodeRank,
    pub links: Vec<(NodeRank, Arc<NodeLink>)>,
}

/// Waits until the cluster has started; `hosted` is the number of processes if this is the first.
fn wait_for_all(
    cluster: &ClusterHandle,
    hosted: Option<u32>,
    until: Option<Instant>,
    on_news: &mut dyn FnMut(&ConnectEvent),
) -> Result<StartedCluster, GroupError> {
    let mut here: Option<Presence> = None;
    loop {
        let news = match cluster.news.recv(until) {
            Ok(news) => news,
            Err(RecvError::TimedOut) => return Err(failed(connect_timed_out(here, hosted))),
            Err(RecvError::Closed(why)) => return Err(failed(why)),
        };
        on_news(&match news {
            ClusterEvent::Present(presence) => {
                let hosts = presence.here.iter().map(|node| node.host.clone()).collect();
                let expected = presence.expected;
                here = Some(presence);
                ConnectEvent::Present { hosts, expected }
            }
            ClusterEvent::TurnedAway { address, why } => ConnectEvent::TurnedAway { address, why },
            ClusterEvent::Departed { host, why } => ConnectEvent::Departed { host, why },
            ClusterEvent::Started { roster, you, links } => {
                return Ok(StartedCluster { roster, you, links });
            }
            ClusterEvent::Moved(_) | ClusterEvent::Paused(_) | ClusterEvent::Left { .. } => {
                continue;
            }
            ClusterEvent::Ended(end) => return Err(failed(end)),
        });
    }
}

fn connect_timed_out(here: Option<Presence>, hosted: Option<u32>) -> String {
    let (hosts, of) = match (here, hosted) {
        (Some(Presence { here, expected }), _) => {
            (here.into_iter().map(|node| node.host).collect(), expected)
        }
        // The first process has not announced itself yet.
        (None, Some(nodes)) => (vec![host_name()], nodes),
        (None, None) => return "the first process did not answer in time".into(),
    };
    format!("only {} of {of} processes came in time: {}", hosts.len(), hosts.join(", "))
}

// ---- A group that has started ----

/// Connections of this process, kept alive by the handles on its groups.
struct GroupSession {
    cluster: Lock<ClusterHandle>,
    /// Set once the handles are made.
    packets: OnceLock<PacketReceiver>,
    is_first: bool,
    timeout: Duration,
    /// Closed once the cluster is over.
    over: Mailbox<()>,
}

impl GroupSession {
    fn open(
        cluster: ClusterHandle,
        started: StartedCluster,
        timeout: Duration,
        deadline: Duration,
        until: Option<Instant>,
    ) -> Result<Vec<ProcessGroup>, GroupError> {
        let StartedCluster { roster, you, links } = started;
        for node in &roster.nodes {
            let node = node.node;
            if node != you && links.iter().all(|(number, _)| *number != node) {
                let name = process_name(&roster.ranks(node), &name_of(&roster, node));
                return Err(failed(format!("{name} is lost: it left while the group started")));
            }
        }
        let mut others = Vec::with_capacity(links.len());
        for (number, link) in &links {
            others.push(RemoteProcess {
                ranks: roster.ranks(*number),
                host: name_of(&roster, *number),
                link: link.packets(),
            });
        }
        let news = cluster.news.clone();
        let over = Mailbox::new(1);
        let session = Arc::new(Self {
            cluster: Lock::new(cluster),
            packets: OnceLock::new(),
            is_first: you == NodeRank(0),
            timeout,
            over: over.clone(),
        });
        let (groups, packets) = init_over(roster.ranks(you), others, deadline, session.clone());
        // Set once, here.
        let _ = session.packets.set(packets.clone());
        // The handles keep it from now on.
        drop(session);
        let ready = Mailbox::new(links.len());
        let departures = LeaveTracker::new(&roster, &packets);
        let watch = Watch {
            news,
            packets: packets.clone(),
            roster: roster.clone(),
            you,
            over,
            ready: ready.clone(),
            departures: departures.clone(),
        };
        let met = match watch.start() {
            Ok(()) => {
                for (number, link) in &links {
                    let number = *number;
                    link.receive_values_with(Arc::new(GroupValues {
                        packets: packets.clone(),
                        ranks: roster.ranks(number),
                        host: name_of(&roster, number),
                        number,
                        departures: departures.clone(),
                    }));
                    // Processes that joined report only to the first one.
                    let is_due = you == FIRST || number == FIRST;
                    let ready = ready.clone();
                    let has_reported = AtomicBool::new(false);
                    link.receive_with(Arc::new(move |message: Vec<u8>| {
                        let is_report = is_due && message == READY;
                        if !is_report || has_reported.swap(true, Ordering::SeqCst) {
                            return Err("a message that no process of a group sends".into());
                        }
                        ready.send(()).map_err(|why| why.to_string())
                    }));
                }
                meet_ready(you, &links, &ready, until)
            }
            Err(error) => Err(error),
        };
        if let Err(error) = met {
            // Without this, the first process would wait for the others to leave.
            packets.end(&error.to_string());
            drop(groups);
            return Err(error);
        }
        Ok(groups)
    }
}

/// Waits until all processes accept packets: each reports to the first one, which then notifies
/// all. So no packet is sent to a process that has not started the group yet.
fn meet_ready(
    you: NodeRank,
    links: &[(NodeRank, Arc<NodeLink>)],
    ready: &Mailbox<()>,
    until: Option<Instant>,
) -> Result<(), GroupError> {
    if you == FIRST {
        for _ in links {
            wait_ready(ready, until)?;
        }
        for (_, link) in links {
            send_ready(link);
        }
        return Ok(());
    }
    for (number, link) in links {
        if *number == FIRST {
            send_ready(link);
        }
    }
    wait_ready(ready, until)
}

/// Waits for the message of one process that it accepts packets.
fn wait_ready(ready: &Mailbox<()>, until: Option<Instant>) -> Result<(), GroupError> {
    match ready.recv(until) {
        Ok(()) => Ok(()),
        // A loss closes the mailbox with its sentence.
        Err(RecvError::Closed(why)) => Err(failed(why)),
        Err(RecvError::TimedOut) => Err(failed("not all processes got ready in time")),
    }
}

/// Reports to another process that this one accepts packets.
fn send_ready(link: &NodeLink) {
    // A link that is closed is a loss, which the cluster names.
    let _ = link.send(READY.to_vec());
}

impl Drop for GroupSession {
    fn drop(&mut self) {
        let has_failed = self.packets.get().is_some_and(PacketReceiver::has_failed);
        if self.is_first && !has_failed && !thread::panicking() {
            // The others cannot continue without the first process.
            let _ = self.over.recv(Instant::now().checked_add(self.timeout));
        }
        let cluster = self.cluster.get_mut();
        cluster.leave("its process ended");
    }
}

fn name_of(roster: &Roster, node: NodeRank) -> String {
    roster.node(node).map(|of| of.host.clone()).unwrap_or_default()
}

/// Receiver of the packets of one process.
struct GroupValues {
    packets: PacketReceiver,
    ranks: Range<u32>,
    host: String,
    number: NodeRank,
    departures: LeaveTracker,
}

impl GroupValues {
    /// Ends the groups of this process because of a message of another one.
    fn refuse(&self, why: String) -> String {
        let process = process_name(&self.ranks, &self.host);
        self.packets.end(&format!("{process} sent {why}"));
        why
    }
}

impl ValueReceiver for GroupValues {
    fn landing(
        &self,
        tag: &[u8; TAG_BYTES],
        bytes: usize,
    ) -> Result<Box<dyn ReceiveBuffer>, String> {
        let place = self.packets.place(&self.ranks, tag, bytes);
        Ok(Box::new(PacketBuffer(place.map_err(|why| self.refuse(why))?)))
    }

    fn closed(&self) {
        self.departures.advance(self.number);
    }
}

/// Orderly ends of other processes, in two steps in any order: the cluster reports that a process
/// has left, and its link is closed, after all its messages. Its ranks have sent their leaves
/// before; if those were lost, because the flush of a closing link has a timeout, calls would wait
/// for them until their deadline.
#[derive(Clone)]
struct LeaveTracker {
    packets: PacketReceiver,
    /// By node: its ranks, and the number of steps so far.
    nodes: Arc<[(Range<u32>, AtomicU32)]>,
}

impl LeaveTracker {
    fn new(roster: &Roster, packets: &PacketReceiver) -> Self {
        let mut nodes = Vec::with_capacity(roster.nodes.len());
        for node in &roster.nodes {
            nodes.push((roster.ranks(node.node), AtomicU32::new(0)));
        }
        Self { packets: packets.clone(), nodes: nodes.into() }
    }

    /// Takes a step of a process; each occurs once.
    fn advance(&self, number: NodeRank) {
        let Some((ranks, steps)) = self.nodes.get(number.0 as usize) else { return };
        if steps.fetch_add(1, Ordering::SeqCst) == 1 {
            self.packets.process_left(ranks);
        }
    }
}

/// Place of the values of a packet.
struct PacketBuffer(ArrivingPacket);

impl ReceiveBuffer for PacketBuffer {
    fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }

    fn arrived(self: Box<Self>) -> Result<(), String> {
        self.0.arrived()
    }
}

/// Thread that ends all groups of this process when the cluster loses another one.
struct Watch {
    news: Mailbox<ClusterEvent>,
    packets: PacketReceiver,
    roster: Roster,
    you: NodeRank,
    over: Mailbox<()>,
    ready: Mailbox<()>,
    departures: LeaveTracker,
}

impl Watch {
    fn start(self) -> Result<(), GroupError> {
        let thread = thread::Builder::new().name("news of processes".into());
        thread.spawn(move || self.run()).map(drop).map_err(failed)
    }

    fn run(self) {
        let end = loop {
            match self.news.recv(None) {
                Ok(ClusterEvent::Ended(end)) => break Some(end),
                Ok(ClusterEvent::Left { node, .. }) => self.departures.advance(node),
                Ok(_) => {}
                Err(_) => break None,
            }
        };
        let is_first = self.you == NodeRank(0);
        let why = match &end {
            Some(ClusterEnd::Lost { loss, .. }) => Some(self.loss(loss)),
            Some(ClusterEnd::Left { .. }) if is_first => None,
            Some(ClusterEnd::Left { why }) => {
                Some(format!("{} left all groups: {why}", self.name(FIRST)))
            }
            Some(other) => Some(other.to_string()),
            None => None,
        };
        if let Some(why) = &why {
            self.packets.end(why);
        }
        self.ready.close(why.as_deref().unwrap_or("the group is over"));
        self.over.close("the group is over");
    }

    /// Returns a process with its ranks.
    fn name(&self, node: NodeRank) -> String {
        process_name(&self.roster.ranks(node), &name_of(&self.roster, node))
    }

    /// Sentence of a loss, with the ranks.
    fn loss(&self, loss: &Loss) -> String {
        match loss {
            Loss::Node { node, why } => {
                let verb = if self.roster.ranks(*node).len() == 1 { "is" } else { "are" };
                format!("{} {verb} lost: {why}", self.name(*node))
            }
            Loss::Link { between: (one, other), why } => {
                let (one, other) = (self.name(*one), self.name(*other));
                format!("{one} and {other} cannot reach each other: {why}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::nodes::connection::UnusedValues;
    use crate::{Endpoint, EndpointOptions};
    use potluck_core::{ChunkId, Position, Rank, Round};
    use potluck_parallel::collective::CollectiveKind;
    use potluck_parallel::comm::{FrameContent, FrameHeader, FrameValues};

    fn any_port() -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 0))
    }

    /// Receiver that takes all values and keeps none.
    struct KeepsNothing;

    impl ValueReceiver for KeepsNothing {
        fn landing(
            &self,
            _: &[u8; TAG_BYTES],
            bytes: usize,
        ) -> Result<Box<dyn ReceiveBuffer>, String> {
            Ok(Box::new(UnusedValues(vec![0; bytes])))
        }

        fn closed(&self) {}
    }

    /// Connects some honest processes with one that greets like them, then performs `act` on its
    /// links, and leaves in order; returns the results of a barrier of the honest ones.
    fn beside(others: u32, act: impl Fn(NodeRank, &NodeLink)) -> Vec<Result<(), GroupError>> {
        beside_leaving(others, act, |threads, mut cluster| {
            let ended = ended(threads);
            cluster.leave("it is over");
            ended
        })
    }

    type Barrier = thread::JoinHandle<Result<(), GroupError>>;

    fn ended(threads: Vec<Barrier>) -> Vec<Result<(), GroupError>> {
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }

    /// [`beside`] with a process that leaves when it likes.
    fn beside_leaving<R>(
        others: u32,
        act: impl Fn(NodeRank, &NodeLink),
        leave: impl FnOnce(Vec<Barrier>, ClusterHandle) -> R,
    ) -> R {
        let code = Secret::generate().unwrap().code().unwrap();
        let secret = || Secret::parse(&code).unwrap();
        let (tell, told) = mpsc::channel();
        let mut options = ClusterOptions::host(any_port(), others + 1, secret());
        options.on_news = Box::new(move |news| match news {
            ConnectEvent::Listening(address) => tell.send(address.to_string()).unwrap(),
            ConnectEvent::Present { hosts, .. } => tell.send(hosts.len().to_string()).unwrap(),
            other => panic!("{other}"),
        });
        let barrier = |options| thread::spawn(move || connect(options)?.remove(0).barrier());
        let mut threads = vec![barrier(options)];
        let address = told.recv().unwrap();
        let joins = || ClusterOptions::join(&*address, secret());
        threads.extend((1..others).map(|_| barrier(joins())));
        // The last one to come has the last rank.
        while told.recv().unwrap() != others.to_string() {}
        let cluster = meet(joins()).unwrap();
        let started = wait_for_all(&cluster, None, None, &mut |_| {}).unwrap();
        for (number, link) in &started.links {
            // The others do not send the values of a training run.
            link.receive_values_with(Arc::new(KeepsNothing));
            act(*number, link);
        }
        leave(threads, cluster)
    }

    /// Returns the error of the only other process.
    fn beside_one(act: impl Fn(&NodeLink)) -> GroupError {
        beside(1, |_, link| act(link)).remove(0).unwrap_err()
    }

    #[test]
    fn a_process_that_is_lost_is_named_in_all_others() {
        let ended = beside(2, |number, link| {
            if number == FIRST {
                link.send(READY.to_vec()).unwrap();
            }
            link.close("gone");
        });
        for end in ended {
            let error = end.unwrap_err().to_string();
            // A call may find the link closed before the cluster has named the loss.
            let is_named = error.contains("rank 2 (") || error.contains("node 2 (");
            let is_lost = error.contains(") is lost: ") || error.contains(") cannot be reached: ");
            assert!(is_named && is_lost, "{error}");
        }
    }

    /// So it is if the last packets of a link are lost because it takes too long to flush it.
    #[test]
    fn the_ranks_of_a_process_that_leaves_have_left_even_if_they_never_said_so() {
        let (begin, begun) = mpsc::channel();
        let act = |number: NodeRank, link: &NodeLink| {
            if number == FIRST {
                let begin = begin.clone();
                link.receive_with(Arc::new(move |_| begin.send(()).map_err(|why| why.to_string())));
                link.send(READY.to_vec()).unwrap();
            }
        };
        let ends = beside_leaving(2, act, |threads, mut cluster| {
            begun.recv().unwrap();
            let began = Instant::now();
            cluster.leave("it is over");
            let ends = ended(threads);
            assert!(began.elapsed() < TIMEOUT, "{:?}", began.elapsed());
            ends
        });
        for end in ends {
            let error = end.unwrap_err().to_string();
            // A call may find the link closed before it waits.
            let has_left = error.contains("rank 2 left the group");
            assert!(
                has_left || error.contains("rank 2 (") && error.contains(") cannot be reached")
            );
        }
    }

    #[test]
    fn a_process_that_sends_what_is_no_packet_is_named_and_ends_the_group() {
        let error = beside_one(|link| {
            link.send(READY.to_vec()).unwrap();
            let (kind, chunk, from) = (CollectiveKind::AllGather, ChunkId(1), Position(1));
            let content = FrameContent::Chunk { kind, chunk, from };
            let header = FrameHeader { to: Rank(0), round: Round::default(), content };
            // Values that come before the other process takes any are dropped.
            for _ in 0..100 {
                let values = FrameValues::Shared(vec![1.0; 10].into());
                if link.carrier().send(header.clone(), values).is_err() {
                    break;
                }
                thread::sleep(Duration::from_millis(5));
            }
        });
        let error = error.to_string();
        assert!(error.contains("1 (") && error.ends_with("a packet without a header"), "{error}");
    }

    #[test]
    fn a_process_that_gets_ready_never_or_in_another_way_does_not_let_a_group_begin() {
        let error = beside_one(|link| link.send(b"redy".to_vec()).unwrap()).to_string();
        assert!(error.contains("a message that no process of a group sends"), "{error}");
        let error = beside_one(|link| link.close("no more"));
        assert!(matches!(&error, GroupError::Connect(why) if why.contains("rank 1 (")), "{error}");
    }

    #[test]
    fn every_group_has_a_name_of_its_own() {
        let code = Secret::generate().unwrap().code().unwrap();
        let name = || {
            let secret = || Secret::parse(&code).unwrap();
            let host = meet(ClusterOptions::host(any_port(), 2, secret())).unwrap();
            let port = host.address.port();
            // A process of another group learns this group's name.
            let first = vec![SocketAddr::from(([127, 0, 0, 1], port))];
            let options = meeting_options(any_port(), secret(), TIMEOUT, Congestion::default());
            let hello = |port| JoiningNodeOptions {
                hello: Hello { run: Some("other".into()), ..rank_greeting(port, PURPOSE, 1) },
                first,
            };
            let other = ClusterHandle::join(options, hello).unwrap();
            wait_for_all(&other, None, None, &mut |_| {}).map(drop).unwrap_err().to_string()
        };
        let (one, two) = (name(), name());
        assert!(one.contains("asks for the run other, and the run of"), "{one}");
        assert_ne!(one, two);
    }

    /// As many silent guests as a run may have nodes leave room for the nodes of the largest run.
    #[test]
    fn guests_do_not_take_the_links_of_the_largest_run() {
        let code = Secret::generate().unwrap().code().unwrap();
        let secret = || Secret::parse(&code).unwrap();
        let host = meet(ClusterOptions::host(any_port(), 64, secret())).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], host.address.port()));
        let options = EndpointOptions { links_max: 100, ..EndpointOptions::new(any_port()) };
        let pending_connections = Endpoint::bind(options, &secret(), b"").unwrap();
        let mut silent = Vec::new();
        for guest in 0..70 {
            match pending_connections.dial(address, TIMEOUT) {
                Ok(pending) => silent.push(pending),
                Err(error) => panic!("guest {guest}: {error}"),
            }
        }
    }

    #[test]
    fn processes_of_groups_and_nodes_of_runs_refuse_each_other() {
        let (group, mut run) = (rank_greeting(7, PURPOSE, 2), rank_greeting(8, PURPOSE, 1));
        run.version = env!("CARGO_PKG_VERSION").into();
        assert_eq!((group.check(), group.devices.len()), (Ok(()), 2));
        for (one, other) in [(&group, &run), (&run, &group)] {
            let refusal = one.accept("any", other).unwrap_err().to_string();
            assert!(refusal.contains("(process group)"), "{refusal}");
        }
    }
}
