//! Tests of the first node, one peer at a time; `tests/library/cluster` has whole clusters.

use super::*;
use crate::cluster::bounds::{PAIRING_TIMEOUT, REPLY_TIMEOUT};
use crate::cluster::hello::NodeDevice;
use crate::cluster::pending_connections::PENDING_CONNECTIONS_MAX;
use crate::cluster::testing::{address, endpoint, hello, presence};
use potluck_core::Remedy;

const SECOND: Nanos = 1_000_000_000;
const TIMEOUT: Nanos = 6 * SECOND;
const NEXT: Generation = Generation(3);

fn options(nodes: u32) -> FirstNodeOptions {
    FirstNodeOptions {
        run: "run-7".into(),
        nodes,
        hello: Hello { addresses: vec![address(0)], ..hello("alpha") },
        node_timeout: TIMEOUT,
        generation: Generation(2),
        before: Vec::new(),
    }
}

/// Address at which the peer of a connection is seen, as behind a router.
fn seen(connection: u64) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, connection as u8], 40_000))
}

/// Machine with the actions that it has asked for since the last look.
struct Bench {
    first: FirstNode,
    now: Nanos,
}

impl Bench {
    fn new(nodes: u32) -> Self {
        Self { first: FirstNode::new(options(nodes)).unwrap(), now: 1000 }
    }

    fn with_timeout(node_timeout: Nanos) -> Self {
        let options = FirstNodeOptions { node_timeout, ..options(3) };
        Self { first: FirstNode::new(options).unwrap(), now: 1000 }
    }

    /// A run of three, whose other nodes are at connections 1 and 2.
    fn running() -> Self {
        let mut bench = Self::pairing();
        for (from, peer) in [(1, 0), (2, 0), (1, 2)] {
            let peer = NodeRank(peer);
            bench.say(from, ClusterMsg::PairConnected { generation: NEXT, peer }).unwrap();
        }
        bench.actions();
        bench
    }

    fn pairing() -> Self {
        let mut bench = Self::new(3);
        bench.join(1, "beta").unwrap();
        bench.join(2, "gamma").unwrap();
        bench.actions();
        bench
    }

    fn accept(&mut self, connection: u64) -> Result<(), ClusterError> {
        let address = seen(connection);
        let connection = ConnectionId(connection);
        self.first.handle(self.now, Event::Accepted { connection, address })
    }

    fn say(&mut self, connection: u64, message: ClusterMsg) -> Result<(), ClusterError> {
        let connection = ConnectionId(connection);
        self.first.handle(self.now, Event::Received { connection, message })
    }

    fn join(&mut self, connection: u64, host: &str) -> Result<(), ClusterError> {
        self.greet(connection, hello(host))
    }

    fn greet(&mut self, connection: u64, hello: Hello) -> Result<(), ClusterError> {
        self.accept(connection)?;
        self.say(connection, ClusterMsg::Hello(hello))
    }

    fn close(&mut self, connection: u64) {
        self.end_connection(connection, ConnectionEnd::Broken("reset".into()));
    }

    fn end_connection(&mut self, connection: u64, end: ConnectionEnd) {
        let connection = ConnectionId(connection);
        self.first.handle(self.now, Event::Closed { connection, end }).unwrap();
    }

    fn beat(&mut self, connection: u64, sequence: u64) -> Result<(), ClusterError> {
        self.say(connection, ClusterMsg::Heartbeat { generation: NEXT, sequence })
    }

    fn wait_until(&mut self, now: Nanos) {
        self.now = now;
        self.first.handle_timeout(now);
    }

    fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.first.poll_action()).collect()
    }

    /// Messages sent since the last look.
    fn sent(&mut self) -> Vec<(u64, ClusterMsg)> {
        let sent = |action| match action {
            Action::Send { connection, message } => Some((connection.0, message)),
            _ => None,
        };
        self.actions().into_iter().filter_map(sent).collect()
    }

    /// The sentence with which a connection is refused, which also goes to the display and is the
    /// error, and after which it is closed.
    fn refusal(&mut self, connection: u64, refused: Result<(), ClusterError>) -> String {
        let (error, actions) = (refused.unwrap_err(), self.actions());
        let why = error.to_string();
        let connection = ConnectionId(connection);
        let remedy = error.remedy();
        let message = ClusterMsg::Refused { why: why.clone(), remedy };
        assert!(actions.contains(&Action::Send { connection, message }), "{actions:?}");
        assert!(actions.contains(&Action::Close { connection, why: why.clone() }), "{actions:?}");
        let shown = |action: &Action| matches!(action, Action::TurnedAway { .. });
        assert!(actions.iter().any(shown), "{actions:?}");
        why
    }

    fn end(&mut self) -> ClusterEnd {
        match self.actions().pop() {
            Some(Action::Ended(end)) => end,
            other => panic!("{other:?} is no end"),
        }
    }
}

#[test]
fn values_beyond_their_bounds_start_nothing() {
    let error = |options| FirstNode::new(options).unwrap_err().to_string();
    let expected = "a run over several machines has 2 to 64 nodes, and 1 are asked for";
    assert_eq!(error(options(1)), expected);
    let expected = "a node may be silent for 0.1 seconds to 3600 seconds, and \
                    0.000000001 seconds is asked for";
    assert_eq!(error(FirstNodeOptions { node_timeout: 1, ..options(2) }), expected);
    let none = Hello { devices: Vec::new(), ..hello("alpha") };
    let expected = "the greeting of this node is refused: it has no device";
    assert_eq!(error(FirstNodeOptions { hello: none, ..options(2) }), expected);
    let expected = "the name of the run is refused: its name is empty";
    assert_eq!(error(FirstNodeOptions { run: String::new(), ..options(2) }), expected);
}

#[test]
fn all_learn_who_is_here_then_the_roster_then_the_start() {
    let mut bench = Bench::new(3);
    assert_eq!(bench.actions(), [Action::Show(presence(3, &["alpha"]))]);
    assert_eq!(bench.first.poll_timeout(), None, "people have time");
    bench.join(1, "beta").unwrap();
    let welcome = Welcome {
        run: "run-7".into(),
        host: "alpha".into(),
        nodes: 3,
        generation: NEXT,
        node_timeout: TIMEOUT,
    };
    let here = presence(3, &["alpha", "beta"]);
    assert_eq!(here.missing(), 1);
    let present = ClusterMsg::Present { generation: NEXT, presence: here };
    assert_eq!(bench.sent(), [(1, ClusterMsg::Welcome(welcome)), (1, present)]);
    bench.join(2, "gamma").unwrap();
    let sent = bench.sent();
    let mut roster = crate::cluster::testing::roster(&["alpha", "beta", "gamma"]);
    for node in &mut roster.nodes[1..] {
        node.addresses.push(seen(u64::from(node.node.0)));
    }
    for (connection, message) in &sent[3..] {
        let you = NodeRank(*connection as u32);
        assert_eq!(*message, ClusterMsg::Roster { you, roster: roster.clone() });
    }
    assert_eq!(sent.len(), 5);
    for (from, peer) in [(2, 0), (1, 2)] {
        let peer = NodeRank(peer);
        bench.say(from, ClusterMsg::PairConnected { generation: NEXT, peer }).unwrap();
        assert_eq!(bench.actions(), []);
    }
    let last = ClusterMsg::PairConnected { generation: NEXT, peer: NodeRank(0) };
    bench.say(1, last).unwrap();
    let start = |connection| Action::Send {
        connection: ConnectionId(connection),
        message: ClusterMsg::Start { generation: NEXT },
    };
    let links = [1, 2].map(|node| (NodeRank(node), ConnectionId(node.into()))).into();
    let started = Action::Started { roster, you: NodeRank(0), links };
    assert_eq!(bench.actions(), [start(1), start(2), started]);
}

#[test]
fn one_too_many_and_one_too_late_are_refused_by_the_names_of_all() {
    let mut bench = Bench::pairing();
    let refused = bench.join(3, "delta");
    assert_eq!(
        bench.refusal(3, refused),
        "this run is of 3 nodes, and all are here: alpha, beta, gamma"
    );
    let mut bench = Bench::running();
    let refused = bench.join(3, "delta");
    assert_eq!(
        bench.refusal(3, refused),
        "delta comes too late: this run has started with its 3 nodes, alpha, beta, gamma"
    );
    assert!(bench.beat(1, 1).is_ok(), "the others go on");
}

#[test]
fn nodes_that_do_not_match_are_refused_and_take_no_place() {
    let mut bench = Bench::new(2);
    bench.actions();
    let refused = bench.greet(1, Hello { version: "0.2.0".into(), ..hello("beta") });
    assert_eq!(
        bench.refusal(1, refused),
        "beta has potluck 0.2.0 and alpha potluck 0.1.0: install the same version on both"
    );
    let refused = bench.greet(2, Hello { run: Some("run-6".into()), ..hello("beta") });
    assert!(bench.refusal(2, refused).starts_with("beta asks for the run run-6"));
    let refused = bench.greet(3, Hello { port: 0, ..hello("beta") });
    assert_eq!(
        bench.refusal(3, refused),
        "the greeting of 10.0.0.3:40000 is refused: it listens at port 0, which is none"
    );
    bench.join(4, "beta").unwrap();
    assert_eq!(bench.first.presence().missing(), 0);
}

#[test]
fn a_second_hello_is_refused_and_frees_the_place() {
    let mut bench = Bench::new(3);
    bench.join(1, "beta").unwrap();
    bench.actions();
    let refused = bench.say(1, ClusterMsg::Hello(hello("delta")));
    assert_eq!(bench.refusal(1, refused), "delta said hello on this connection before, as beta");
    assert_eq!(bench.first.presence(), presence(3, &["alpha"]));
}

#[test]
fn a_list_of_devices_that_no_message_holds_is_refused() {
    let mut bench = Bench::new(64);
    bench.actions();
    let device = NodeDevice { name: "d".repeat(256), kind: "k".repeat(256) };
    let large = || Hello { devices: vec![device.clone(); 64], ..hello("beta") };
    bench.greet(1, large()).unwrap();
    bench.actions();
    let refused = bench.greet(2, large());
    assert_eq!(
        bench.refusal(2, refused),
        "the list of all devices would have more than 65536 bytes with the 64 devices of beta: \
         bring fewer"
    );
    let most = NodeDevice { name: "d".repeat(240), kind: String::new() };
    for connection in 3.. {
        let hello = Hello { devices: vec![most.clone(); 16], ..hello("gamma") };
        if bench.greet(connection, hello).is_err() {
            assert!(connection > 6, "{connection}");
            break;
        }
        assert!(bench.sent().iter().all(|(_, message)| message.encode().is_ok()));
    }
}

#[test]
fn a_peer_that_says_nothing_or_something_else_is_closed() {
    let mut bench = Bench::new(2);
    bench.actions();
    bench.accept(1).unwrap();
    assert_eq!(bench.first.poll_timeout(), Some(1000 + REPLY_TIMEOUT));
    bench.wait_until(1000 + REPLY_TIMEOUT);
    let why = "no message came within 5 seconds".to_owned();
    assert_eq!(bench.actions(), [Action::Close { connection: ConnectionId(1), why }]);
    bench.accept(2).unwrap();
    let started = bench.say(2, ClusterMsg::Start { generation: NEXT });
    assert_eq!(
        bench.refusal(2, started),
        "10.0.0.2:40000 begins with a start where a hello is expected"
    );
    for guest in 0..PENDING_CONNECTIONS_MAX as u64 + 1 {
        bench.accept(10 + guest).unwrap();
    }
    let why = "64 connections have said nothing yet: try again later".to_owned();
    assert_eq!(bench.actions(), [Action::Close { connection: ConnectionId(74), why }]);
    let error = bench.say(2, ClusterMsg::Leave { why: String::new() }).unwrap_err();
    assert_eq!(error.to_string(), "connection 2 is not open");
    assert_eq!(bench.accept(10).unwrap_err().to_string(), "connection 10 is opened twice");
}

#[test]
fn messages_of_a_generation_that_is_over_are_refused_by_its_name() {
    let mut bench = Bench::running();
    let old = || ClusterMsg::Heartbeat { generation: Generation(2), sequence: 1 };
    bench.accept(9).unwrap();
    let returned = bench.say(9, old());
    assert_eq!(
        bench.refusal(9, returned),
        "10.0.0.9:40000 sends a heartbeat of generation 2, which is over; generation 3 is the \
         present one: join anew"
    );
    assert_eq!(
        bench.say(1, old()).unwrap_err().to_string(),
        "node 1 (beta) sends a heartbeat of generation 2, which is over: the present one is \
         generation 3"
    );
    assert_eq!(bench.actions(), [], "its sender did not know");
    let later = ClusterMsg::PairConnected { generation: Generation(4), peer: NodeRank(0) };
    let expected = "node 2 (gamma) sends the report of a connected pair of generation 4, and the \
                    present one is generation 3";
    assert_eq!(bench.say(2, later).unwrap_err().to_string(), expected);
    let why = format!("node 2 (gamma) is lost: it broke the protocol: {expected}");
    assert_eq!(bench.end().to_string(), why);
}

#[test]
fn a_node_that_goes_while_pairs_connect_ends_the_generation_not_the_run() {
    let mut bench = Bench::pairing();
    bench.close(1);
    let here = presence(3, &["alpha", "gamma"]);
    let departed =
        Action::Departed { host: "beta".into(), why: "its link closed: reset".to_owned() };
    let message = ClusterMsg::Present { generation: Generation(4), presence: here.clone() };
    let told = Action::Send { connection: ConnectionId(2), message };
    assert_eq!(bench.actions(), [departed, told, Action::Show(here)]);
    let late = ClusterMsg::PairConnected { generation: NEXT, peer: NodeRank(0) };
    let error = bench.say(2, late).unwrap_err().to_string();
    assert!(error.starts_with("gamma sends the report of a connected pair of generation 3"));
    bench.join(3, "delta").unwrap();
    let rosters: Vec<_> = bench
        .sent()
        .into_iter()
        .filter_map(|(connection, message)| match message {
            ClusterMsg::Roster { you, roster } => Some((connection, you.0, roster)),
            _ => None,
        })
        .collect();
    assert_eq!(rosters.iter().map(|of| (of.0, of.1)).collect::<Vec<_>>(), [(2, 1), (3, 2)]);
    assert_eq!(rosters[0].2.generation, Generation(4));
    let hosts: Vec<&str> = rosters[0].2.nodes.iter().map(|of| of.host.as_str()).collect();
    assert_eq!(hosts, ["alpha", "gamma", "delta"]);
}

#[test]
fn pairs_that_nobody_reports_end_the_attempt_for_all() {
    let mut bench = Bench::pairing();
    for node in [1, 2] {
        let own = ClusterMsg::PairConnected { generation: NEXT, peer: NodeRank(0) };
        bench.say(node, own).unwrap();
    }
    for second in 1..8 {
        bench.wait_until(second * SECOND);
        bench.beat(1, second).unwrap();
        bench.beat(2, second).unwrap();
    }
    bench.actions();
    bench.wait_until(1000 + PAIRING_TIMEOUT);
    let expected = "node 1 (beta) at 10.0.0.1:7000, 10.0.0.1:40000 cannot reach node 2 (gamma) at \
                    10.0.0.2:7000, 10.0.0.2:40000: not connected within 8 seconds; check that UDP \
                    passes between the two";
    let actions = bench.actions();
    for connection in [1, 2].map(ConnectionId) {
        let message = ClusterMsg::Refused { why: expected.into(), remedy: Remedy::Time };
        assert!(actions.contains(&Action::Send { connection, message }), "{actions:?}");
    }
    let Some(Action::Ended(end)) = actions.last() else { panic!("{actions:?}") };
    assert_eq!(end.to_string(), expected);
}

#[test]
fn a_node_that_is_silent_when_pairs_expire_frees_its_place_and_ends_nothing() {
    let mut bench = Bench::with_timeout(30 * SECOND);
    bench.join(1, "beta").unwrap();
    bench.join(2, "gamma").unwrap();
    for second in 1..8 {
        bench.wait_until(second * SECOND);
        bench.beat(1, second).unwrap();
    }
    // The one that lives reports that it cannot reach the other one.
    let why = "no answer over UDP within 5 seconds".to_owned();
    let tried = Vec::new();
    let failed = ClusterMsg::PairFailed { generation: NEXT, peer: NodeRank(2), tried, why };
    bench.say(1, failed).unwrap();
    bench.actions();
    bench.wait_until(1000 + PAIRING_TIMEOUT);
    let why = "it has been silent for 8 seconds".to_owned();
    let actions = bench.actions();
    let departed = Action::Departed { host: "gamma".into(), why };
    assert!(actions.contains(&departed), "{actions:?}");
    assert_eq!(bench.first.presence(), presence(3, &["alpha", "beta"]));
    assert!(!bench.first.is_over());
    bench.join(3, "gamma").unwrap();
    let rosters = bench.sent().into_iter().filter(|(_, message)| {
        matches!(message, ClusterMsg::Roster { roster, .. } if roster.generation.0 == 4)
    });
    assert_eq!(rosters.count(), 2);
}

#[test]
fn a_node_that_is_started_again_takes_the_place_of_its_silent_predecessor() {
    let mut bench = Bench::with_timeout(30 * SECOND);
    let again = |bench: &mut Bench, connection| {
        let address = SocketAddr::from(([10, 0, 0, 1], 40_001));
        let opened = Event::Accepted { connection: ConnectionId(connection), address };
        bench.first.handle(bench.now, opened).unwrap();
        bench.say(connection, ClusterMsg::Hello(hello("beta")))
    };
    bench.join(1, "beta").unwrap();
    bench.wait_until(1000 + ABSENT_AFTER - 1);
    again(&mut bench, 2).unwrap();
    assert_eq!(bench.first.presence().missing(), 0, "it may be another one on that host");
    bench.actions();
    bench.wait_until(1000 + ABSENT_AFTER);
    again(&mut bench, 3).unwrap();
    let why = "it has been silent for 3 seconds, and its successor is here".to_owned();
    let actions = bench.actions();
    let (connection, host) = (ConnectionId(1), "beta".to_owned());
    assert!(actions.contains(&Action::Close { connection, why: why.clone() }), "{actions:?}");
    assert!(actions.contains(&Action::Departed { host, why }), "{actions:?}");
    assert_eq!(bench.first.presence(), presence(3, &["alpha", "beta", "beta"]));
}

#[test]
fn a_node_gets_the_number_that_it_asks_for_and_no_two_get_one() {
    let asking = |host: &str, place| Hello { place: Some(NodeRank(place)), ..hello(host) };
    let mut bench = Bench::with_timeout(30 * SECOND);
    bench.greet(1, asking("beta", 2)).unwrap();
    bench.actions();
    let refused = bench.greet(2, asking("gamma", 2));
    assert_eq!(refused.as_ref().unwrap_err().remedy(), Remedy::Time, "beta may be gone");
    assert_eq!(
        bench.refusal(2, refused),
        "gamma asks to be node 2, which beta at 10.0.0.1:7000 is: give each node another number, \
         or wait until that one is gone"
    );
    let refused = bench.greet(3, asking("gamma", 3));
    assert_eq!(refused.as_ref().unwrap_err().remedy(), Remedy::Person);
    let why = bench.refusal(3, refused);
    assert_eq!(why, "gamma asks to be node 3, and this run has nodes 0 to 2");
    // Its successor on another machine, once it is silent.
    bench.wait_until(1000 + ABSENT_AFTER);
    bench.greet(4, asking("delta", 2)).unwrap();
    bench.join(5, "gamma").unwrap();
    let you = |(connection, message): (u64, ClusterMsg)| match message {
        ClusterMsg::Roster { you, .. } => Some((connection, you.0)),
        _ => None,
    };
    let seated: Vec<_> = bench.sent().into_iter().filter_map(you).collect();
    assert_eq!(seated, [(5, 1), (4, 2)]);
}

#[test]
fn a_failed_pair_is_a_cut_once_both_have_beaten_twice_since() {
    let mut bench = Bench::running();
    bench.beat(1, 1).unwrap();
    let why = || "the link closed: timed out".to_owned();
    let tried = Vec::new();
    let failed = ClusterMsg::PairFailed { generation: NEXT, peer: NodeRank(2), tried, why: why() };
    bench.say(1, failed).unwrap();
    for (connection, sequence) in [(1, 2), (1, 3), (1, 4), (2, 1)] {
        bench.beat(connection, sequence).unwrap();
        assert!(!bench.first.is_over(), "{connection} {sequence}");
    }
    bench.actions();
    bench.beat(2, 2).unwrap();
    let between = (NodeRank(1), NodeRank(2));
    let actions = bench.actions();
    let lost =
        |action: &&Action| matches!(action, Action::Send { message: ClusterMsg::Lost { .. }, .. });
    assert_eq!(actions.iter().filter(lost).count(), 2, "{actions:?}");
    let sentence = "the link between node 1 (beta) and node 2 (gamma) is cut, and both are alive: \
                    the link closed: timed out";
    let loss = Loss::Link { between, why: why() };
    let end = ClusterEnd::Lost { loss, why: sentence.into() };
    assert_eq!(actions.last(), Some(&Action::Ended(end)));
}

#[test]
fn a_silent_node_is_lost_at_the_timeout_and_is_told_as_well() {
    let mut bench = Bench::running();
    bench.now = 1000 + SECOND;
    bench.beat(1, 1).unwrap();
    bench.wait_until(1000 + TIMEOUT - 1);
    assert!(!bench.first.is_over());
    bench.actions();
    assert_eq!(bench.first.poll_timeout(), Some(1000 + TIMEOUT));
    bench.wait_until(1000 + TIMEOUT);
    let loss = Loss::Node { node: NodeRank(2), why: "it has been silent for 6 seconds".into() };
    let message = ClusterMsg::Lost { generation: NEXT, loss: loss.clone() };
    let told = |connection| Action::Send {
        connection: ConnectionId(connection),
        message: message.clone(),
    };
    let why = "node 2 (gamma) is lost: it has been silent for 6 seconds".to_owned();
    let close =
        |connection| Action::Close { connection: ConnectionId(connection), why: why.clone() };
    let lost = Action::Lost { loss: loss.clone(), why: why.clone() };
    let ended = Action::Ended(ClusterEnd::Lost { loss, why: why.clone() });
    assert_eq!(bench.actions(), [told(1), told(2), lost, close(1), close(2), ended]);
    bench.close(1);
    assert_eq!(bench.beat(1, 2), Ok(()), "it is over");
    assert_eq!((bench.actions(), bench.first.poll_timeout()), (Vec::new(), None));
    // The idle timeout of a link is longer than the silence that heartbeats allow.
    let mut bench = Bench::running();
    bench.end_connection(2, ConnectionEnd::Silent(2 * TIMEOUT));
    assert_eq!(bench.end().to_string(), why);
}

#[test]
fn heartbeats_come_in_order() {
    let mut bench = Bench::running();
    bench.beat(2, 1).unwrap();
    assert_eq!(bench.actions(), []);
    bench.wait_until(1000 + SECOND);
    let beat = ClusterMsg::Heartbeat { generation: NEXT, sequence: 1 };
    assert_eq!(bench.sent(), [(1, beat.clone()), (2, beat)]);
    let error = bench.beat(2, 3).unwrap_err().to_string();
    assert_eq!(error, "node 2 (gamma) sends heartbeat 3 where 2 is expected");
    assert!(bench.first.is_over());
}

#[test]
fn leaves_after_the_start_are_told_to_the_others_and_the_last_one_ends_the_run() {
    let mut bench = Bench::running();
    let why = || "done".to_owned();
    bench.say(2, ClusterMsg::Leave { why: why() }).unwrap();
    let (node, connection) = (NodeRank(2), ConnectionId(1));
    let message = ClusterMsg::Left { generation: NEXT, node, why: why() };
    let left = Action::Left { node, why: why() };
    assert_eq!(bench.actions(), [Action::Send { connection, message }, left]);
    bench.close(2);
    assert_eq!(bench.actions(), []);
    let failed = ClusterMsg::PairFailed {
        generation: NEXT,
        peer: NodeRank(2),
        tried: Vec::new(),
        why: why(),
    };
    assert_eq!(bench.say(1, failed), Ok(()), "its link had to close");
    bench.say(1, ClusterMsg::Leave { why: why() }).unwrap();
    let left = Action::Left { node: NodeRank(1), why: why() };
    assert_eq!(bench.actions(), [left], "what it sent before may still be on its way");
    bench.close(1);
    assert_eq!(bench.end(), ClusterEnd::Left { why: "all other nodes have left".into() });
    // One that leaves and does not close its link is waited for as long as for a silent one.
    let mut bench = Bench::running();
    bench.say(1, ClusterMsg::Leave { why: why() }).unwrap();
    bench.say(2, ClusterMsg::Leave { why: why() }).unwrap();
    bench.close(2);
    bench.actions();
    let silent_at = bench.first.poll_timeout().unwrap();
    bench.wait_until(silent_at - 1);
    assert!(!bench.first.is_over());
    bench.wait_until(silent_at);
    let actions = bench.actions();
    let (connection, why) = (ConnectionId(1), "it has left".to_owned());
    assert_eq!(actions[0], Action::Close { connection, why });
    assert!(bench.first.is_over() && matches!(actions[1], Action::Ended(_)));
}

#[test]
fn reports_of_pairs_that_are_not_ones_own_break_the_protocol() {
    let report = |peer: u32| ClusterMsg::PairConnected { generation: NEXT, peer: NodeRank(peer) };
    for (from, peer) in [(2, 1), (1, 1), (1, 3)] {
        let mut bench = Bench::pairing();
        let error = bench.say(from, report(peer)).unwrap_err().to_string();
        let end = format!("reports the pair with node {peer}, which is not its to report");
        assert!(error.ends_with(&end), "{error}");
        assert_eq!(bench.first.presence().missing(), 1, "it is out");
    }
    let mut bench = Bench::running();
    let unknown = ClusterMsg::PairFailed {
        generation: NEXT,
        peer: NodeRank(7),
        tried: Vec::new(),
        why: String::new(),
    };
    let error = bench.say(1, unknown).unwrap_err().to_string();
    assert_eq!(error, "node 1 (beta) names node 7, which is none of the others in the roster");
    let mut bench = Bench::running();
    let error = bench.say(1, report(2)).unwrap_err().to_string();
    let expected =
        "node 1 (beta) sends the report of a connected pair to the first node of a running cluster";
    assert_eq!(error, expected);
}

#[test]
fn a_node_that_the_layer_above_gives_up_is_lost_to_all() {
    let mut bench = Bench::running();
    for node in [0, 3] {
        let error = bench.first.give_up_node(NodeRank(node), "it hangs").unwrap_err().to_string();
        assert_eq!(
            error,
            format!("the first node names node {node}, which is none of the others in the roster")
        );
    }
    bench.first.give_up_node(NodeRank(2), "its device hangs").unwrap();
    let loss = Loss::Node { node: NodeRank(2), why: "its device hangs".into() };
    let message = ClusterMsg::Lost { generation: NEXT, loss };
    let actions = bench.actions();
    for connection in [1, 2].map(ConnectionId) {
        assert!(actions.contains(&Action::Send { connection, message: message.clone() }));
    }
    assert!(bench.first.is_over());
}

#[test]
fn a_node_that_moves_before_the_roster_is_in_it_at_its_new_address() {
    let mut bench = Bench::new(3);
    bench.join(1, "beta").unwrap();
    bench.actions();
    let from = seen(1);
    let to = SocketAddr::from(([10, 0, 0, 9], 50_000));
    let moved = Event::Moved { connection: ConnectionId(1), address: to };
    bench.first.handle(bench.now, moved).unwrap();
    let who = "beta".to_string();
    assert_eq!(bench.actions(), [Action::Moved(MovedNode { who, from, to })]);
    bench.join(2, "gamma").unwrap();
    let expected = vec![SocketAddr::from(([10, 0, 0, 9], 7000)), to];
    assert_eq!(bench.first.roster.as_ref().unwrap().nodes[1].addresses, expected);
}

#[test]
fn a_roster_has_the_addresses_of_a_node_as_it_is_seen_and_its_own() {
    let mut bench = Bench::new(2);
    let connection = ConnectionId(1);
    let address_seen = seen(1);
    let accepted = Event::Accepted { connection, address: address_seen };
    bench.first.handle(bench.now, accepted).unwrap();
    let own = [([192, 168, 1, 5], 7000), ([10, 0, 0, 1], 7000), ([127, 0, 0, 1], 7000)];
    let own = own.map(SocketAddr::from).to_vec();
    let more = (10..20).map(|host| SocketAddr::from(([192, 168, 2, host], 7000)));
    let addresses = own.iter().copied().chain(more).take(ADDRESSES_MAX).collect();
    bench.say(1, ClusterMsg::Hello(Hello { addresses, ..hello("beta") })).unwrap();
    let node = &bench.first.roster.as_ref().unwrap().nodes[1];
    assert_eq!(node.addresses[..3], [address(1), address_seen, own[0]]);
    // Neither one twice nor one that means another machine to others.
    assert_eq!((node.addresses[3].ip(), node.addresses.len()), ([192, 168, 2, 10].into(), 8));
    assert_eq!(node.endpoint, endpoint("beta"));
}
