//! Thread that drives a node's machine: it performs the machine's actions on the endpoint, and
//! reports the endpoint's events to it.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::addresses::advertised;
use super::connection::{FrameReceiver, LinkEvent, NodeConnection, NodeLink};
use super::link_status::{LinkBoard, LinkReporter};
use crate::cluster::{
    Action, ClusterEnd, ClusterError, ClusterMsg, ConnectionEnd, ConnectionId, DIAL_TIMEOUT,
    DialId, EndpointId, Event, FirstNode, FirstNodeOptions, Hello, JoiningNode, JoiningNodeOptions,
    MovedNode, NODES_MAX, Presence, Roster,
};
use crate::secret::random_bytes;
use crate::{
    Approach, CloseReason, Congestion, Endpoint, EndpointOptions, NetError, PendingPeer, Secret,
};
use potluck_core::faults::{Faults, Point};
use potluck_core::format::no_thread;
use potluck_core::{Nanos, NodeRank, Remedy};
use potluck_parallel::comm::{Mailbox, RecvError, nanos};

/// Most events that wait for the thread.
const EVENTS_MAX: usize = 1 << 16;
/// Maximum number of links of a node: to all nodes of the largest run, and to peers that have not
/// joined yet.
const LINKS_MAX: usize = NODES_MAX as usize + 16;
/// Most bytes of messages that the first node may be sending: it sends the data of a run.
const FROM_FIRST_MAX: usize = 16 << 30;
/// Most news that wait for the run.
const NEWS_MAX: usize = 1 << 12;
/// Longest wait for an event, after which the endpoint is polled for refusals.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Most events that are handled before the time is looked at.
const EVENTS_IN_A_ROW: usize = 256;

/// Interval of checks for peers with a new address.
const MOVES_INTERVAL: Duration = Duration::from_secs(1);

/// Part of the node timeout after which a pause of this process is reported: others may have given
/// it up, or it may consider them lost.
const PAUSE_REPORTED: f64 = 0.5;

/// News of the cluster, for the run and its user.
pub enum ClusterEvent {
    /// Nodes that have joined, before the start.
    Present(Presence),
    /// A peer was refused.
    TurnedAway { address: SocketAddr, why: String },
    /// A node has another address than before.
    Moved(MovedNode),
    /// This process stood still.
    Paused(PausedProcess),
    /// A node departed before the start.
    Departed { host: String, why: String },
    /// All nodes are connected; the links are those to all others.
    Started { roster: Roster, you: NodeRank, links: Vec<(NodeRank, Arc<NodeLink>)> },
    /// A node left in order after the start.
    Left { node: NodeRank, why: String },
    /// The cluster is over; nothing follows.
    Ended(ClusterEnd),
}

/// Duration of a pause of this process; displayed as a sentence for the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PausedProcess(pub Duration);

impl fmt::Display for PausedProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "this process stood still for {} s: the machine slept or was far too busy, the process \
             was stopped, or the clock was set; nodes that seem lost may not be",
            self.0.as_secs()
        )
    }
}

/// Clocks at one moment. The monotonic one of Linux and macOS stands still while the machine
/// sleeps, and the other one may be set.
#[derive(Clone, Copy)]
struct Moment {
    monotonic: Instant,
    calendar: SystemTime,
}

impl Moment {
    fn now() -> Self {
        Self { monotonic: Instant::now(), calendar: SystemTime::now() }
    }

    /// Time since an earlier moment by the clock that shows the longer one.
    fn since(self, earlier: Self) -> Duration {
        let by_calendar = self.calendar.duration_since(earlier.calendar).unwrap_or_default();
        by_calendar.max(self.monotonic.duration_since(earlier.monotonic))
    }
}

/// Options of a node that meets others.
pub struct ClusterHandleOptions {
    pub listen: SocketAddr,
    /// Addresses at which other nodes try to reach this node, besides the one at which they see it;
    /// port 0 stands for the listening port. The addresses of its interfaces if empty.
    pub advertise: Vec<SocketAddr>,
    pub secret: Secret,
    /// Longest silence of a node; a joining node uses it for its links until it knows the run's.
    pub node_timeout: Duration,
    /// Receiver of frames from all nodes.
    pub frames: FrameReceiver,
    /// Congestion control of what this node sends.
    pub congestion: Congestion,
    /// Faults to inject into a node that joins, for tests.
    pub faults: Faults,
}

/// Node that meets others, and then stays in touch with them.
pub struct ClusterHandle {
    pub news: Mailbox<ClusterEvent>,
    /// Address at which this node listens, with its port.
    pub address: SocketAddr,
    /// States of the links to the other nodes, twice a second.
    pub links: LinkBoard,
    /// Sentence for the user if the system gives the socket small buffers.
    pub buffers_note: Option<String>,
    events: Mailbox<DriverEvent>,
    thread: Option<thread::JoinHandle<()>>,
}

/// Event for the thread.
enum DriverEvent {
    Accepted(PendingPeer),
    Dialed(DialId, Result<PendingPeer, DialFailure>),
    Link(LinkEvent),
    GiveUp(NodeRank, String),
    Leave(String),
}

/// Reason for which a dial failed.
struct DialFailure {
    why: String,
    /// True if no address answered.
    is_silent: bool,
    remedy: Remedy,
}

/// Machine of either kind.
enum Machine {
    First(Box<FirstNode>),
    Joining(Box<JoiningNode>),
}

/// Error at the start of a meeting.
#[derive(Debug, thiserror::Error)]
pub enum ClusterHandleError {
    #[error(transparent)]
    Net(#[from] NetError),
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("{}", no_thread(.0))]
    NoThread(std::io::Error),
}

impl ClusterHandle {
    /// Begins to wait for the other nodes of a run. `machine` is made with the port at which this
    /// node listens.
    ///
    /// # Errors
    /// Returns `ClusterHandleError` if the address is taken, or for values beyond their bounds.
    pub fn host(
        options: ClusterHandleOptions,
        machine: impl FnOnce(u16) -> FirstNodeOptions,
    ) -> Result<Self, ClusterHandleError> {
        let (endpoint, id) = bind(&options)?;
        let mut machine = machine(endpoint.local_addr().port());
        introduce(&mut machine.hello, &endpoint, id, &options);
        let machine = FirstNode::new(machine)?;
        Self::start(endpoint, options, Machine::First(Box::new(machine)))
    }

    /// Begins to join a run.
    ///
    /// # Errors
    /// Returns the same errors as [`ClusterHandle::host`].
    pub fn join(
        options: ClusterHandleOptions,
        machine: impl FnOnce(u16) -> JoiningNodeOptions,
    ) -> Result<Self, ClusterHandleError> {
        let (endpoint, id) = bind(&options)?;
        let mut machine = machine(endpoint.local_addr().port());
        introduce(&mut machine.hello, &endpoint, id, &options);
        let machine = JoiningNode::new(machine, 0)?;
        Self::start(endpoint, options, Machine::Joining(Box::new(machine)))
    }

    fn start(
        endpoint: Endpoint,
        options: ClusterHandleOptions,
        machine: Machine,
    ) -> Result<Self, ClusterHandleError> {
        let events = Mailbox::new(EVENTS_MAX);
        let news = Mailbox::new(NEWS_MAX);
        let address = endpoint.local_addr();
        let endpoint = Arc::new(endpoint);
        let accepting = events.clone();
        let accepted = endpoint.accepted().clone();
        spawn("peers", move || {
            while let Ok(pending) = accepted.recv(None) {
                let _ = accepting.send(DriverEvent::Accepted(pending));
            }
        })?;
        let buffers_note = endpoint.socket_buffers().note();
        let ClusterHandleOptions { frames, faults, node_timeout, .. } = options;
        let board = LinkBoard::default();
        let driver = ClusterDriver {
            machine,
            endpoint,
            frames,
            faults,
            events: events.clone(),
            news: news.clone(),
            links: HashMap::new(),
            addresses: HashMap::new(),
            next_look: Instant::now(),
            reporter: LinkReporter::new(board.clone(), POLL_INTERVAL),
            node_timeout,
            looked: Moment::now(),
            next: 0,
            started: Instant::now(),
        };
        let thread = Some(spawn("cluster", move || driver.run())?);
        Ok(Self { news, address, links: board, buffers_note, events, thread })
    }

    /// Returns a function that ends the cluster, at its first node, by the loss of a node that the
    /// layer above gives up.
    pub fn giving_up(&self) -> impl Fn(NodeRank, &str) + Send + Sync + 'static {
        let events = self.events.clone();
        move |node, why| {
            // The thread has ended if the mailbox is closed.
            let _ = events.send(DriverEvent::GiveUp(node, why.into()));
        }
    }

    /// Leaves the cluster in order, and waits until that is done.
    pub fn leave(&mut self, why: &str) {
        let _ = self.events.send(DriverEvent::Leave(why.into()));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for ClusterHandle {
    fn drop(&mut self) {
        self.leave("the node ended");
    }
}

/// Opens the socket, with a random number.
fn bind(options: &ClusterHandleOptions) -> Result<(Endpoint, EndpointId), ClusterHandleError> {
    ClusterError::check_timeout(nanos(options.node_timeout))?;
    let id = EndpointId(u64::from_be_bytes(random_bytes().map_err(NetError::identity)?));
    // Heartbeats watch the links of the first node: a node that is silent on its link for the node
    // timeout is lost, and is notified over the link, which must not end before that.
    let idle_timeout = 2 * options.node_timeout;
    let endpoint = EndpointOptions {
        idle_timeout,
        links_max: LINKS_MAX,
        congestion: options.congestion,
        ..EndpointOptions::new(options.listen)
    };
    Ok((Endpoint::bind(endpoint, &options.secret, &greeting_of(id))?, id))
}

/// Greeting that identifies a socket on its links.
fn greeting_of(id: EndpointId) -> Vec<u8> {
    id.0.to_be_bytes().to_vec()
}

/// Puts the addresses of this node, and the number of its socket, into its hello.
fn introduce(
    hello: &mut Hello,
    endpoint: &Endpoint,
    id: EndpointId,
    options: &ClusterHandleOptions,
) {
    let listening = endpoint.local_addr();
    hello.endpoint = id;
    hello.addresses = advertised(listening, &options.advertise);
}

impl From<CloseReason> for ConnectionEnd {
    fn from(reason: CloseReason) -> Self {
        match reason {
            CloseReason::Peer(why) | CloseReason::Refused(why) => Self::Peer(why),
            CloseReason::TimedOut(silence) => Self::Silent(nanos(silence)),
            other => Self::Broken(other.to_string()),
        }
    }
}

fn spawn(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> Result<thread::JoinHandle<()>, ClusterHandleError> {
    thread::Builder::new().name(name.into()).spawn(work).map_err(ClusterHandleError::NoThread)
}

struct ClusterDriver {
    machine: Machine,
    endpoint: Arc<Endpoint>,
    frames: FrameReceiver,
    faults: Faults,
    events: Mailbox<DriverEvent>,
    news: Mailbox<ClusterEvent>,
    links: HashMap<ConnectionId, Arc<NodeLink>>,
    /// Addresses of the peers at the last look.
    addresses: HashMap<ConnectionId, SocketAddr>,
    next_look: Instant,
    reporter: LinkReporter,
    /// Longest silence of a node, until the run's is known.
    node_timeout: Duration,
    /// Time of the last look for pauses.
    looked: Moment,
    next: u64,
    started: Instant,
}

impl ClusterDriver {
    fn now(&self) -> Nanos {
        nanos(self.started.elapsed())
    }

    fn run(mut self) {
        let mut in_a_row = 0;
        while !self.perform_all() {
            // Silence is judged once all that has arrived is handled: after a pause of this process
            // that may be much.
            if in_a_row < EVENTS_IN_A_ROW
                && let Ok(Some(event)) = self.events.try_recv()
            {
                in_a_row += 1;
                self.look_for_pauses();
                self.handle(event);
                continue;
            }
            in_a_row = 0;
            self.look_for_pauses();
            self.handle_timeout();
            if self.perform_all() {
                break;
            }
            let due = match &self.machine {
                Machine::First(machine) => machine.poll_timeout(),
                Machine::Joining(machine) => machine.poll_timeout(),
            };
            let due = due.map(|at| self.started + Duration::from_nanos(at));
            let poll = Instant::now() + POLL_INTERVAL;
            match self.events.recv(Some(due.map_or(poll, |due| due.min(poll)))) {
                Ok(event) => {
                    self.look_for_pauses();
                    self.handle(event);
                }
                Err(RecvError::Closed(_)) => break,
                Err(RecvError::TimedOut) => {}
            }
        }
        for link in self.links.values() {
            link.close("the cluster is over");
        }
        self.events.close("the cluster is over");
        self.reporter.end(self.endpoint.refused_count());
        // Sends what the links have queued.
        self.endpoint.close("the cluster is over");
    }

    /// Does what is due by the time.
    fn handle_timeout(&mut self) {
        let now = self.now();
        match &mut self.machine {
            Machine::First(machine) => machine.handle_timeout(now),
            Machine::Joining(machine) => machine.handle_timeout(now),
        }
        for refusal in self.endpoint.refusals() {
            let _ = self
                .news
                .send(ClusterEvent::TurnedAway { address: refusal.address, why: refusal.why });
        }
        self.look_for_moves();
        self.report_links();
    }

    /// Reports a pause of this process, before the machine handles the messages of others, which
    /// may have given it up meanwhile.
    fn look_for_pauses(&mut self) {
        let now = Moment::now();
        let paused = now.since(self.looked);
        self.looked = now;
        let timeout = self.silence().unwrap_or(self.node_timeout);
        if paused >= POLL_INTERVAL + timeout.mul_f64(PAUSE_REPORTED) {
            let _ = self.news.send(ClusterEvent::Paused(PausedProcess(paused)));
        }
    }

    /// Reports peers with new addresses to the machine, at intervals.
    fn look_for_moves(&mut self) {
        let now = Instant::now();
        if now < self.next_look {
            return;
        }
        self.next_look = now + MOVES_INTERVAL;
        let mut moves = Vec::new();
        for (connection, link) in &self.links {
            let address = link.address();
            let known = self.addresses.entry(*connection).or_insert(address);
            if *known != address {
                *known = address;
                moves.push(Event::Moved { connection: *connection, address });
            }
        }
        self.addresses.retain(|connection, _| self.links.contains_key(connection));
        for event in moves {
            self.tell(event);
        }
    }

    /// Reports the states of the links if it is time for it.
    fn report_links(&mut self) {
        let now = Instant::now();
        if !self.reporter.is_due(now) {
            return;
        }
        let heard_at = match &self.machine {
            Machine::First(machine) => machine.heard_at(),
            Machine::Joining(machine) => machine.heard_at(),
        };
        let mut heard = Vec::with_capacity(heard_at.len());
        for (connection, at) in heard_at {
            heard.push((connection, self.started + Duration::from_nanos(at)));
        }
        let refused = self.endpoint.refused_count();
        let buffers = self.endpoint.socket_buffers();
        self.reporter.report(now, &self.links, &heard, refused, buffers);
    }

    fn handle(&mut self, event: DriverEvent) {
        let event = match event {
            DriverEvent::Accepted(pending) => {
                let address = pending.address();
                Event::Accepted { connection: self.open(pending), address }
            }
            DriverEvent::Dialed(dial, Ok(pending)) => {
                let address = pending.address();
                let connection = self.open(pending);
                // The first node may send messages of the run before this thread has read its
                // start, and the data of the run.
                self.admit(connection);
                if self.silence().is_none()
                    && let Some(first) = self.links.get(&connection)
                {
                    first.allow_messages(FROM_FIRST_MAX);
                }
                Event::Dialed { dial, connection, address }
            }
            DriverEvent::Dialed(dial, Err(DialFailure { why, is_silent, remedy })) => {
                Event::DialFailed { dial, why, is_silent, remedy }
            }
            DriverEvent::Link(LinkEvent::Message(connection, message, _place)) => {
                self.inject(&message);
                Event::Received { connection, message }
            }
            DriverEvent::Link(LinkEvent::Closed(connection, why)) => {
                self.links.remove(&connection);
                Event::Closed { connection, end: why.into() }
            }
            DriverEvent::GiveUp(node, why) => {
                if let Machine::First(machine) = &mut self.machine {
                    // A cluster that is over has named another loss.
                    let _ = machine.give_up_node(node, &why);
                }
                return;
            }
            DriverEvent::Leave(why) => {
                match &mut self.machine {
                    Machine::First(machine) => machine.leave(&why),
                    Machine::Joining(machine) => machine.leave(&why),
                }
                return;
            }
        };
        self.tell(event);
    }

    /// Hands an event to the machine.
    fn tell(&mut self, event: Event) {
        let now = self.now();
        // An error that a peer caused has closed its connection; other errors are of late events.
        let _ = match &mut self.machine {
            Machine::First(machine) => machine.handle(now, event),
            Machine::Joining(machine) => machine.handle(now, event),
        };
    }

    /// Injects the fault that is planned for the time before this message is handled.
    fn inject(&self, message: &ClusterMsg) {
        let point = match message {
            ClusterMsg::Welcome(_) => Point::Join,
            ClusterMsg::Roster { .. } => Point::Roster,
            _ => return,
        };
        // These points have only faults of the process, which are over when this returns.
        let _ = self.faults.at(point, 0);
    }

    fn open(&mut self, pending: PendingPeer) -> ConnectionId {
        let connection = ConnectionId(self.next);
        let events = self.events.clone();
        self.next += 1;
        let report = Box::new(move |event| {
            // The thread has ended if the mailbox is closed.
            let _ = events.send(DriverEvent::Link(event));
        });
        let link = NodeLink::open(pending, connection, self.frames.clone(), report);
        self.addresses.insert(connection, link.address());
        self.links.insert(connection, Arc::new(link));
        connection
    }

    /// Returns the idle timeout of a link that a joined node dials, `None` for that to the first
    /// node. No heartbeats watch the links
    /// between joined nodes: their idle timeout is the longest silence of a node of the run.
    fn silence(&self) -> Option<Duration> {
        match &self.machine {
            Machine::First(_) => None,
            Machine::Joining(machine) => machine.node_timeout().map(Duration::from_nanos),
        }
    }

    /// Accepts messages and values of the run on a link, whose peer is one of its nodes.
    fn admit(&self, connection: ConnectionId) {
        if let Some(link) = self.links.get(&connection) {
            link.admit();
        }
    }

    /// Performs all actions that are due; returns true if the machine is over.
    fn perform_all(&mut self) -> bool {
        loop {
            let action = match &mut self.machine {
                Machine::First(machine) => machine.poll_action(),
                Machine::Joining(machine) => machine.poll_action(),
            };
            let Some(action) = action else { return false };
            if self.perform(action) {
                return true;
            }
        }
    }

    fn perform(&mut self, action: Action) -> bool {
        let news = match action {
            Action::Send { connection, message } => {
                if let ClusterMsg::Start { .. } = message {
                    self.admit(connection);
                }
                if let Some(link) = self.links.get(&connection) {
                    // A closed link is reported as an event.
                    let _ = link.send_cluster(&message);
                }
                return false;
            }
            Action::Close { connection, why } => {
                if let Some(link) = self.links.remove(&connection) {
                    link.close(&why);
                }
                return false;
            }
            Action::Dial { dial, endpoint, addresses, .. } => {
                self.dial(dial, endpoint, addresses);
                return false;
            }
            Action::Show(presence) => ClusterEvent::Present(presence),
            Action::TurnedAway { address, why } => ClusterEvent::TurnedAway { address, why },
            Action::Moved(moved) => ClusterEvent::Moved(moved),
            Action::Departed { host, why } => ClusterEvent::Departed { host, why },
            Action::Started { roster, you, links } => {
                for (_, connection) in &links {
                    self.admit(*connection);
                }
                self.reporter.start(&roster, &links);
                let mut open = Vec::with_capacity(links.len());
                for (node, connection) in links {
                    if let Some(link) = self.links.get(&connection) {
                        open.push((node, link.clone()));
                    }
                }
                ClusterEvent::Started { roster, you, links: open }
            }
            Action::Left { node, why } => ClusterEvent::Left { node, why },
            // `Ended` follows with the same sentence.
            Action::Lost { .. } => return false,
            Action::Ended(end) => ClusterEvent::Ended(end),
        };
        let is_over = matches!(news, ClusterEvent::Ended(_));
        let _ = self.news.send(news);
        is_over
    }

    /// Dials the addresses of a node, in a separate thread.
    fn dial(&self, dial: DialId, id: Option<EndpointId>, addresses: Vec<SocketAddr>) {
        let endpoint = Arc::clone(&self.endpoint);
        let events = self.events.clone();
        let approach = Approach {
            addresses,
            limit: Duration::from_nanos(DIAL_TIMEOUT),
            idle_timeout: self.silence(),
            hello: id.map(greeting_of),
        };
        let spawned = spawn("dial", move || {
            let ended = endpoint.approach(approach).map_err(|errors| DialFailure::of(&errors));
            let _ = events.send(DriverEvent::Dialed(dial, ended));
        });
        if let Err(error) = spawned {
            let why = error.to_string();
            let failure = DialFailure { why, is_silent: false, remedy: Remedy::Person };
            let _ = self.events.send(DriverEvent::Dialed(dial, Err(failure)));
        }
    }
}

impl DialFailure {
    /// Failure of all addresses of a node. The first address that answered, if any, decides the
    /// remedy.
    fn of(errors: &[NetError]) -> Self {
        let why: Vec<String> = errors.iter().map(NetError::in_list).collect();
        let answered = errors.iter().find(|error| !error.is_silence());
        let has_silent = errors.iter().any(|error| matches!(error, NetError::RpcError { .. }));
        Self {
            why: if why.is_empty() { "there is no address".into() } else { why.join("; ") },
            is_silent: has_silent && answered.is_none(),
            remedy: match answered {
                Some(error) => error.remedy(),
                None if has_silent => Remedy::Time,
                None => Remedy::Person,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::testing::hello;
    use crate::moving_relay::MovingRelay;
    use crate::test_peer::{TEST_TIMEOUT, any_port, secret};
    use potluck_core::Generation;

    fn options(secret: &Secret) -> ClusterHandleOptions {
        ClusterHandleOptions {
            listen: any_port(),
            advertise: Vec::new(),
            congestion: Congestion::default(),
            secret: secret.clone(),
            node_timeout: TEST_TIMEOUT,
            frames: FrameReceiver::default(),
            faults: Faults::none(),
        }
    }

    fn host(secret: &Secret, nodes: u32) -> ClusterHandle {
        let machine = |port| FirstNodeOptions {
            run: "run".into(),
            nodes,
            hello: Hello { port, ..hello("alpha") },
            node_timeout: nanos(TEST_TIMEOUT),
            generation: Generation(0),
            before: Vec::new(),
        };
        ClusterHandle::host(options(secret), machine).unwrap()
    }

    fn join(secret: &Secret, first: SocketAddr) -> ClusterHandle {
        let machine = |port| JoiningNodeOptions {
            hello: Hello { port, ..hello("beta") },
            first: vec![first],
        };
        ClusterHandle::join(options(secret), machine).unwrap()
    }

    /// Waits for news of one kind.
    fn next<T>(cluster: &ClusterHandle, mut find: impl FnMut(ClusterEvent) -> Option<T>) -> T {
        let until = Some(Instant::now() + TEST_TIMEOUT);
        loop {
            let news = cluster.news.recv(until).expect("the news comes");
            if let Some(found) = find(news) {
                return found;
            }
        }
    }

    fn links(news: ClusterEvent) -> Option<Vec<(NodeRank, Arc<NodeLink>)>> {
        match news {
            ClusterEvent::Started { links, .. } => Some(links),
            ClusterEvent::Ended(end) => panic!("{end}"),
            _ => None,
        }
    }

    #[test]
    fn a_node_that_gets_another_address_in_a_run_is_named_with_it_and_stays() {
        let secret = secret();
        let first = host(&secret, 2);
        let relay = MovingRelay::start(first.address);
        let joined = join(&secret, relay.address);
        let (at_first, at_joined) = (next(&first, links), next(&joined, links));
        let before = relay.seen();
        assert_eq!(at_first[0].1.address(), before);
        let now = relay.move_client();
        let moved = next(&first, |news| match news {
            ClusterEvent::Moved(moved) => Some(moved),
            ClusterEvent::Ended(end) => panic!("{end}"),
            _ => None,
        });
        assert_eq!(moved, MovedNode { who: "node 1 (beta)".into(), from: before, to: now });
        assert!(moved.to_string().starts_with("node 1 (beta) has another address: 127.0.0.1:"));
        crate::test_peer::wait("the state of the link", || {
            let board = first.links.load();
            board.links.iter().any(|link| link.address == now)
        });
        assert_eq!(at_joined[0].1.address(), relay.address);
    }

    /// A node behind a router: the first node sees it at an address at which others do not reach
    /// it, and it names one more such address before the right one.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_node_is_reached_at_the_one_of_its_addresses_that_answers() {
        let secret = secret();
        let first = host(&secret, 3);
        let nearer = join(&secret, first.address);
        next(&first, |news| match news {
            ClusterEvent::Present(presence) => (presence.here.len() == 2).then_some(()),
            _ => None,
        });
        let relay = MovingRelay::seen_at([127, 0, 0, 9], first.address);
        let dead = std::net::UdpSocket::bind(any_port()).unwrap();
        let advertise = vec![dead.local_addr().unwrap(), any_port()];
        let options = ClusterHandleOptions { advertise, ..options(&secret) };
        let machine = |port| JoiningNodeOptions {
            hello: Hello { port, ..hello("gamma") },
            first: vec![relay.address],
        };
        let started = Instant::now();
        let farther = ClusterHandle::join(options, machine).unwrap();
        let address = farther.address;
        let links = next(&nearer, links);
        let link = &links.iter().find(|(node, _)| *node == NodeRank(2)).unwrap().1;
        assert_eq!(link.address(), address);
        // Three dead ones before it, 200 ms each.
        let elapsed = started.elapsed();
        assert!(elapsed < Duration::from_secs(3), "{elapsed:?}");
        println!("all have met after {elapsed:?}");
    }

    #[test]
    fn failures_of_several_addresses_are_all_told_and_an_answer_says_what_heals_them() {
        let address: SocketAddr = "10.0.0.1:7".parse().unwrap();
        let silence = NetError::RpcError { address, after: Duration::from_secs(4) };
        let unreachable = NetError::Unreachable { address, why: "no route".into() };
        let other = NetError::OtherProtocol { address, why: "it is older".into() };
        let of = |errors: &[&NetError]| {
            let errors: Vec<NetError> = errors.iter().map(|error| (*error).clone()).collect();
            let DialFailure { why, is_silent, remedy } = DialFailure::of(&errors);
            assert!(errors.iter().all(|error| why.contains(&error.in_list())), "{why}");
            (is_silent, remedy)
        };
        assert_eq!(of(&[&silence, &silence]), (true, Remedy::Time));
        assert_eq!(of(&[&unreachable, &silence]), (true, Remedy::Time));
        assert_eq!(of(&[&unreachable]), (false, Remedy::Person));
        assert_eq!(of(&[&silence, &other]), (false, Remedy::Person));
        assert_eq!(DialFailure::of(&[]).why, "there is no address");
    }
}
