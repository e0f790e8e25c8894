//! Virtual machines and links between them: every link is ordered, delays are drawn.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use potluck_core::{Nanos, NodeRank, Remedy};
use potluck_net::cluster::{
    Action, ClusterEnd, ClusterError, ClusterMsg, ConnectionEnd, ConnectionId, DialId, EndpointId,
    Event, FirstNode, FirstNodeOptions, Hello, JoiningNode, JoiningNodeOptions, NodeDevice,
    Presence, Roster, heartbeat_interval,
};
use potluck_parallel::sim::queue::Random;

pub const MILLISECOND: Nanos = 1_000_000;
pub const SECOND: Nanos = 1_000_000_000;

/// Fault or choice of a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incident {
    /// A joiner is started.
    Arrive,
    /// The process ends without a word; its peers see the links close, or nothing.
    Crash { is_seen: bool },
    /// The process stands still.
    Freeze { nanos: Nanos },
    /// Somebody ends it in order.
    Leave,
    /// The link to another machine is cut, if there is one.
    Cut { other: usize },
}

enum Machine {
    First(FirstNode),
    Joining(JoiningNode),
}

impl Machine {
    fn handle(&mut self, now: Nanos, event: Event) -> Result<(), ClusterError> {
        match self {
            Self::First(machine) => machine.handle(now, event),
            Self::Joining(machine) => machine.handle(now, event),
        }
    }

    fn poll_action(&mut self) -> Option<Action> {
        match self {
            Self::First(machine) => machine.poll_action(),
            Self::Joining(machine) => machine.poll_action(),
        }
    }

    fn poll_timeout(&self) -> Option<Nanos> {
        match self {
            Self::First(machine) => machine.poll_timeout(),
            Self::Joining(machine) => machine.poll_timeout(),
        }
    }

    fn handle_timeout(&mut self, now: Nanos) {
        match self {
            Self::First(machine) => machine.handle_timeout(now),
            Self::Joining(machine) => machine.handle_timeout(now),
        }
    }

    fn leave(&mut self, why: &str) {
        match self {
            Self::First(machine) => machine.leave(why),
            Self::Joining(machine) => machine.leave(why),
        }
    }
}

/// Machine with what it has asked for.
pub struct Host {
    machine: Option<Machine>,
    pub hello: Hello,
    address: SocketAddr,
    pub has_crashed: bool,
    is_frozen: bool,
    /// Number of the present attempt to join.
    attempt: u32,
    backlog: Vec<Delivery>,
    armed: Option<Nanos>,
    pub shown: Option<Presence>,
    pub started: Option<(Nanos, Roster, NodeRank)>,
    /// Links to other nodes at its start.
    pub links: usize,
    pub left: Vec<NodeRank>,
    pub losses: u32,
    pub ended: Option<(Nanos, ClusterEnd)>,
    pub turned_away: Vec<String>,
    /// Links by which heartbeats came after the start.
    pub beating: BTreeSet<usize>,
    pub errors: Vec<ClusterError>,
}

impl Host {
    fn new(index: usize) -> Self {
        Self {
            machine: None,
            hello: hello(index),
            address: address(index),
            has_crashed: false,
            is_frozen: false,
            attempt: 0,
            backlog: Vec::new(),
            armed: None,
            shown: None,
            started: None,
            links: 0,
            left: Vec::new(),
            losses: 0,
            ended: None,
            turned_away: Vec::new(),
            beating: BTreeSet::new(),
            errors: Vec::new(),
        }
    }

    pub fn name(&self) -> String {
        self.hello.host.clone()
    }
}

/// Event on its way, with the side of the link at which it arrives, or else the attempt of its
/// machine.
struct Delivery {
    end: Option<(usize, usize)>,
    attempt: u32,
    event: Event,
}

enum Due {
    Deliver(usize, Box<Delivery>),
    Tick(usize),
    Thaw(usize),
    Incident(usize, Incident),
}

struct SimLink {
    hosts: [usize; 2],
    open: [bool; 2],
    /// Time of the last delivery to each side.
    last: [Nanos; 2],
}

/// Network of host 0, the first node, and joiners.
pub struct Network {
    pub hosts: Vec<Host>,
    pub now: Nanos,
    random: Random,
    due: BTreeMap<(Nanos, u64), Due>,
    links: Vec<SimLink>,
    /// Pairs between which no packet passes.
    pub blocked: BTreeSet<(usize, usize)>,
    delay_max: Nanos,
    node_timeout: Nanos,
    /// True if joiners come again, some time after an end that time heals.
    pub is_patient: bool,
    /// Incidents, for the report on a seed that fails.
    pub planned: Vec<(Nanos, usize, Incident)>,
    /// Latest time of an incident.
    pub quiet_from: Nanos,
}

pub fn address(host: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, host as u8 + 1], 7000))
}

pub fn name(host: usize) -> String {
    ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"][host].into()
}

pub fn hello(host: usize) -> Hello {
    let device = |n| NodeDevice { name: format!("GPU {n}"), kind: "Vulkan".into() };
    Hello {
        version: "0.1.0".into(),
        build: "cafe".into(),
        run: None,
        place: None,
        host: name(host),
        port: 7000,
        devices: (0..1 + host % 2).map(device).collect(),
        addresses: Vec::new(),
        endpoint: EndpointId::default(),
        identities: Vec::new(),
    }
}

impl Network {
    /// Creates a run of `nodes`, whose first machine is there, with `joiners` that may arrive.
    pub fn new(seed: u64, nodes: u32, joiners: usize, node_timeout: Nanos) -> Self {
        let options = FirstNodeOptions {
            run: "run-7".into(),
            nodes,
            hello: Hello { addresses: vec![address(0)], ..hello(0) },
            node_timeout,
            generation: potluck_core::Generation(4),
            before: Vec::new(),
        };
        let mut hosts: Vec<Host> = (0..=joiners).map(Host::new).collect();
        hosts[0].machine = Some(Machine::First(FirstNode::new(options).unwrap()));
        let mut network = Self {
            hosts,
            now: 0,
            random: Random::new(seed),
            due: BTreeMap::new(),
            links: Vec::new(),
            blocked: BTreeSet::new(),
            delay_max: heartbeat_interval(node_timeout) / 4,
            node_timeout,
            is_patient: false,
            planned: Vec::new(),
            quiet_from: 0,
        };
        network.pump(0);
        network
    }

    /// Adds a process on the machine of another one, which it is to replace; returns its number.
    pub fn successor_of(&mut self, other: usize) -> usize {
        let mut host = Host::new(other);
        host.hello.port += 1;
        host.address.set_port(host.hello.port);
        self.hosts.push(host);
        self.hosts.len() - 1
    }

    pub fn plan(&mut self, at: Nanos, host: usize, incident: Incident) {
        self.quiet_from = self.quiet_from.max(at);
        self.planned.push((at, host, incident));
        self.push(at, Due::Incident(host, incident));
    }

    fn push(&mut self, at: Nanos, due: Due) {
        let sequence = self.due.last_key_value().map_or(0, |_| self.due.len() as u64);
        let mut key = (at, sequence);
        while self.due.contains_key(&key) {
            key.1 += 1;
        }
        self.due.insert(key, due);
    }

    fn delay(&mut self) -> Nanos {
        let most = if self.random.word().is_multiple_of(4) { self.delay_max } else { MILLISECOND };
        1 + self.random.up_to(most)
    }

    /// Runs until a time, or until every machine is over.
    pub fn run_until(&mut self, end: Nanos) {
        while let Some(entry) = self.due.first_entry() {
            if entry.key().0 > end {
                break;
            }
            let ((at, _), due) = entry.remove_entry();
            assert!(at >= self.now, "time goes back");
            self.now = at;
            match due {
                Due::Deliver(host, delivery) if self.hosts[host].is_frozen => {
                    self.hosts[host].backlog.push(*delivery);
                }
                Due::Deliver(host, delivery) => self.deliver(host, *delivery),
                Due::Tick(host) => self.tick(host),
                Due::Thaw(host) => {
                    self.hosts[host].is_frozen = false;
                    for delivery in std::mem::take(&mut self.hosts[host].backlog) {
                        self.deliver(host, delivery);
                    }
                    self.tick(host);
                }
                Due::Incident(host, incident) => self.incident(host, incident),
            }
        }
        self.now = self.now.max(end);
    }

    fn deliver(&mut self, host: usize, delivery: Delivery) {
        let Delivery { end, attempt, event } = delivery;
        let is_beat =
            matches!(event, Event::Received { message: ClusterMsg::Heartbeat { .. }, .. });
        if let Some((link, _)) = end.filter(|_| is_beat && self.hosts[host].started.is_some()) {
            self.hosts[host].beating.insert(link);
        }
        if attempt != self.hosts[host].attempt {
            return;
        }
        let Some(machine) = &mut self.hosts[host].machine else { return };
        if let Some((link, side)) = end {
            if !self.links[link].open[side] {
                return;
            }
            if matches!(event, Event::Closed { .. }) {
                self.links[link].open[side] = false;
            }
        }
        let handled = machine.handle(self.now, event);
        self.hosts[host].errors.extend(handled.err());
        self.pump(host);
    }

    fn tick(&mut self, host: usize) {
        self.hosts[host].armed = None;
        if self.hosts[host].is_frozen {
            return;
        }
        let Some(machine) = &mut self.hosts[host].machine else { return };
        if machine.poll_timeout().is_some_and(|at| at <= self.now) {
            machine.handle_timeout(self.now);
            let next = machine.poll_timeout();
            assert!(next.is_none_or(|next| next > self.now), "a deadline of {host} stays due");
        }
        self.pump(host);
    }

    fn incident(&mut self, host: usize, incident: Incident) {
        match incident {
            Incident::Arrive if self.hosts[host].has_crashed => {}
            Incident::Arrive => {
                let hello = self.hosts[host].hello.clone();
                let options = JoiningNodeOptions { hello, first: vec![address(0)] };
                let machine = JoiningNode::new(options, self.now).unwrap();
                self.hosts[host].machine = Some(Machine::Joining(machine));
                self.hosts[host].attempt += 1;
                self.hosts[host].ended = None;
                self.pump(host);
            }
            Incident::Crash { is_seen } => {
                self.hosts[host].has_crashed = true;
                self.hosts[host].machine = None;
                for link in 0..self.links.len() {
                    for side in 0..2 {
                        if self.links[link].hosts[side] == host && self.links[link].open[side] {
                            self.links[link].open[side] = false;
                            let idle = self.idle_timeout(link);
                            let (end, after) = if is_seen {
                                (ConnectionEnd::Broken("reset".into()), 0)
                            } else {
                                (ConnectionEnd::Silent(idle), idle)
                            };
                            self.close_other(link, side, end, after);
                        }
                    }
                }
            }
            Incident::Freeze { nanos } if self.hosts[host].machine.is_some() => {
                self.hosts[host].is_frozen = true;
                self.push(self.now + nanos, Due::Thaw(host));
            }
            Incident::Leave => {
                if let Some(machine) = &mut self.hosts[host].machine {
                    machine.leave("somebody pressed Ctrl+C");
                    self.pump(host);
                }
            }
            Incident::Cut { other } => {
                for link in 0..self.links.len() {
                    let hosts = self.links[link].hosts;
                    if hosts == [host, other] || hosts == [other, host] {
                        let end = ConnectionEnd::Silent(self.node_timeout);
                        self.close_other(link, 0, end.clone(), 0);
                        self.close_other(link, 1, end, 0);
                    }
                }
            }
            Incident::Freeze { .. } => {}
        }
    }

    /// Returns the silence after which a link closes: heartbeats watch those of the first node.
    fn idle_timeout(&self, link: usize) -> Nanos {
        let is_watched = self.links[link].hosts.contains(&0);
        if is_watched { 2 * self.node_timeout } else { self.node_timeout }
    }

    /// Tells the other side of a link that it closed.
    fn close_other(&mut self, link: usize, side: usize, end: ConnectionEnd, idle: Nanos) {
        let connection = connection(link, 1 - side);
        let event = Event::Closed { connection, end };
        self.transmit(link, 1 - side, event, idle);
    }

    /// Brings an event to a side of a link, behind all others.
    fn transmit(&mut self, link: usize, side: usize, event: Event, more: Nanos) {
        let at = (self.now + more + self.delay()).max(self.links[link].last[side] + 1);
        self.links[link].last[side] = at;
        let host = self.links[link].hosts[side];
        let attempt = self.hosts[host].attempt;
        let delivery = Box::new(Delivery { end: Some((link, side)), attempt, event });
        self.push(at, Due::Deliver(host, delivery));
    }

    /// Does what a machine asks for, and wakes it at its next deadline.
    fn pump(&mut self, host: usize) {
        while let Some(action) =
            self.hosts[host].machine.as_mut().and_then(|machine| machine.poll_action())
        {
            self.perform(host, action);
        }
        let Host { machine: Some(machine), armed, shown, ended, .. } = &self.hosts[host] else {
            return;
        };
        let next = machine.poll_timeout();
        let awaits_people =
            host == 0 && shown.as_ref().is_some_and(|presence| presence.here.len() == 1);
        let is_bounded = next.is_some() || awaits_people || ended.is_some();
        assert!(is_bounded, "{} waits for ever", name(host));
        assert!(ended.is_none() || next.is_none(), "{} is over and has a deadline", name(host));
        if let Some(at) = next.filter(|&at| armed.is_none_or(|armed| at < armed)) {
            self.hosts[host].armed = Some(at);
            self.push(at.max(self.now), Due::Tick(host));
        }
    }

    fn perform(&mut self, host: usize, action: Action) {
        let now = self.now;
        let of = &mut self.hosts[host];
        assert!(of.ended.is_none(), "{action:?} behind the end of {}", name(host));
        match action {
            Action::Send { connection, message } => {
                let (link, side) = end_of(connection);
                assert!(self.links[link].open[side], "{} sends on a closed link", name(host));
                let message = ClusterMsg::decode(&message.encode().unwrap()).unwrap();
                let connection = self::connection(link, 1 - side);
                self.transmit(link, 1 - side, Event::Received { connection, message }, 0);
            }
            Action::Close { connection, why } => {
                let (link, side) = end_of(connection);
                let was_open = std::mem::replace(&mut self.links[link].open[side], false);
                assert!(was_open, "{} closes a closed link", name(host));
                self.close_other(link, side, ConnectionEnd::Peer(why), 0);
            }
            Action::Dial { dial, addresses, .. } => self.dial(host, dial, &addresses),
            Action::Show(presence) => of.shown = Some(presence),
            Action::TurnedAway { why, .. } => of.turned_away.push(why),
            Action::Moved(_) | Action::Departed { .. } => {}
            Action::Started { roster, you, links } => {
                assert!(of.started.is_none(), "{} starts twice", name(host));
                self.hosts[host].links = links.len();
                for (node, connection) in links {
                    let (link, side) = end_of(connection);
                    let there = self.links[link].hosts[1 - side];
                    let addresses = &roster.node(node).unwrap().addresses;
                    let is_there = addresses.contains(&self.hosts[there].address);
                    assert!(is_there, "a link leads elsewhere");
                }
                self.hosts[host].started = Some((now, roster, you));
            }
            Action::Left { node, .. } => of.left.push(node),
            Action::Lost { .. } => of.losses += 1,
            Action::Ended(end) => {
                if self.is_patient && host > 0 && end.remedy() == Remedy::Time {
                    let pause = SECOND / 2 + self.random.up_to(9 * SECOND / 2);
                    self.push(now + pause, Due::Incident(host, Incident::Arrive));
                }
                self.hosts[host].ended = Some((now, end));
            }
        }
    }

    fn dial(&mut self, from: usize, dial: DialId, addresses: &[SocketAddr]) {
        let is_there = |host: &usize| addresses.contains(&self.hosts[*host].address);
        let to = (0..self.hosts.len()).find(is_there).unwrap();
        let pair = (from.min(to), from.max(to));
        if self.hosts[to].machine.is_none() || self.blocked.contains(&pair) {
            if self.random.word().is_multiple_of(2) {
                let event = Event::DialFailed {
                    dial,
                    why: "nothing answers".into(),
                    is_silent: true,
                    remedy: Remedy::Time,
                };
                let at = self.now + 3 * SECOND;
                let attempt = self.hosts[from].attempt;
                let delivery = Box::new(Delivery { end: None, attempt, event });
                self.push(at, Due::Deliver(from, delivery));
            }
            return;
        }
        let link = self.links.len();
        self.links.push(SimLink { hosts: [from, to], open: [true; 2], last: [0; 2] });
        let [here, there] = [from, to].map(|host| self.hosts[host].address);
        let accepted = Event::Accepted { connection: connection(link, 1), address: here };
        self.transmit(link, 1, accepted, 0);
        let connection = connection(link, 0);
        let dialed = Event::Dialed { dial, connection, address: there };
        let there_and_back = self.delay();
        self.transmit(link, 0, dialed, there_and_back);
    }
}

fn connection(link: usize, side: usize) -> ConnectionId {
    ConnectionId((2 * link + side) as u64)
}

fn end_of(connection: ConnectionId) -> (usize, usize) {
    (connection.0 as usize / 2, connection.0 as usize % 2)
}
