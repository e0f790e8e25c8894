//! Tests of a joining node, one peer at a time; `tests/library/cluster` has whole clusters.

use super::*;
use crate::cluster::testing::{address, endpoint, hello, presence, roster};

const SECOND: Nanos = 1_000_000_000;
const TIMEOUT: Nanos = 6 * SECOND;
const NEXT: Generation = Generation(3);
/// Connection to the first node.
const LINK: u64 = 100;

/// Machine of beta, which is node 2 of 4: it awaits node 1 and dials node 3.
struct Bench {
    node: JoiningNode,
    now: Nanos,
}

impl Bench {
    fn new() -> Self {
        Self::with(hello("beta"))
    }

    fn with(hello: Hello) -> Self {
        let options = JoiningNodeOptions { hello, first: vec![address(0)] };
        Self { node: JoiningNode::new(options, 1000).unwrap(), now: 1000 }
    }

    fn greeting() -> Self {
        let mut bench = Self::new();
        bench.dialed(0, LINK, 0);
        bench.actions();
        bench
    }

    fn waiting() -> Self {
        let mut bench = Self::greeting();
        bench.first(ClusterMsg::Welcome(welcome())).unwrap();
        bench.actions();
        bench
    }

    fn pairing() -> Self {
        let mut bench = Self::waiting();
        bench.first(the_roster()).unwrap();
        bench.actions();
        bench
    }

    fn running() -> Self {
        let mut bench = Self::pairing();
        bench.dialed(1, 103, 3);
        bench.say(103, pair(3, 2)).unwrap();
        bench.accept(101);
        bench.say(101, pair(1, 2)).unwrap();
        bench.first(ClusterMsg::Start { generation: NEXT }).unwrap();
        bench.actions();
        bench
    }

    fn dialed(&mut self, dial: u64, connection: u64, node: u32) {
        let (dial, connection) = (DialId(dial), ConnectionId(connection));
        let event = Event::Dialed { dial, connection, address: address(node) };
        self.node.handle(self.now, event).unwrap();
    }

    fn accept(&mut self, connection: u64) {
        let event = Event::Accepted { connection: ConnectionId(connection), address: address(1) };
        self.node.handle(self.now, event).unwrap();
    }

    fn say(&mut self, connection: u64, message: ClusterMsg) -> Result<(), ClusterError> {
        let connection = ConnectionId(connection);
        self.node.handle(self.now, Event::Received { connection, message })
    }

    fn first(&mut self, message: ClusterMsg) -> Result<(), ClusterError> {
        self.say(LINK, message)
    }

    fn close(&mut self, connection: u64) {
        self.end_connection(connection, ConnectionEnd::Broken("reset".into()));
    }

    fn end_connection(&mut self, connection: u64, end: ConnectionEnd) {
        let connection = ConnectionId(connection);
        self.node.handle(self.now, Event::Closed { connection, end }).unwrap();
    }

    fn wait_until(&mut self, now: Nanos) {
        self.now = now;
        self.node.handle_timeout(now);
    }

    fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.node.poll_action()).collect()
    }

    fn end(&mut self) -> ClusterEnd {
        match self.actions().pop() {
            Some(Action::Ended(end)) => end,
            other => panic!("{other:?} is no end"),
        }
    }
}

fn welcome() -> Welcome {
    let (run, host) = ("run-7".into(), "alpha".into());
    Welcome { run, host, nodes: 4, generation: NEXT, node_timeout: TIMEOUT }
}

fn the_roster() -> ClusterMsg {
    ClusterMsg::Roster { you: NodeRank(2), roster: roster(&["alpha", "gamma", "beta", "delta"]) }
}

fn pair(from: u32, to: u32) -> ClusterMsg {
    pair_of(NEXT, from, to)
}

fn pair_of(generation: Generation, from: u32, to: u32) -> ClusterMsg {
    let (from, to) = (NodeRank(from), NodeRank(to));
    ClusterMsg::Pair { run: "run-7".into(), generation, from, to }
}

fn send(connection: u64, message: ClusterMsg) -> Action {
    Action::Send { connection: ConnectionId(connection), message }
}

fn close(connection: u64, why: &str) -> Action {
    Action::Close { connection: ConnectionId(connection), why: why.into() }
}

#[test]
fn a_node_greets_waits_connects_to_its_pairs_and_runs() {
    let mut bench = Bench::new();
    let (dial, addresses) = (DialId(0), vec![address(0)]);
    assert_eq!(bench.actions(), [Action::Dial { dial, node: FIRST, endpoint: None, addresses }]);
    bench.dialed(0, LINK, 0);
    assert_eq!(bench.actions(), [send(LINK, ClusterMsg::Hello(hello("beta")))]);
    bench.first(ClusterMsg::Welcome(welcome())).unwrap();
    let here = presence(4, &["alpha", "beta"]);
    bench.first(ClusterMsg::Present { generation: NEXT, presence: here.clone() }).unwrap();
    assert_eq!(bench.actions(), [Action::Show(here)]);
    bench.first(the_roster()).unwrap();
    let (dial, node, endpoint) = (DialId(1), NodeRank(3), Some(endpoint("delta")));
    let dial = Action::Dial { dial, node, endpoint, addresses: vec![address(3)] };
    let connected = |peer: u32| {
        let peer = NodeRank(peer);
        send(LINK, ClusterMsg::PairConnected { generation: NEXT, peer })
    };
    assert_eq!(bench.actions(), [dial, connected(0)]);
    bench.dialed(1, 103, 3);
    assert_eq!(bench.actions(), [send(103, pair(2, 3))]);
    bench.say(103, pair(3, 2)).unwrap();
    assert_eq!(bench.actions(), [connected(3)]);
    bench.accept(101);
    bench.say(101, pair(1, 2)).unwrap();
    assert_eq!(bench.actions(), [send(101, pair(2, 1))], "the lower number reports");
    bench.first(ClusterMsg::Start { generation: NEXT }).unwrap();
    let ClusterMsg::Roster { you, roster } = the_roster() else { unreachable!() };
    let links = [(0, LINK), (1, 101), (3, 103)];
    let links = links.map(|(node, link)| (NodeRank(node), ConnectionId(link))).into();
    assert_eq!(bench.actions(), [Action::Started { roster, you, links }]);
}

#[test]
fn nobody_at_the_address_and_nobody_who_answers_are_errors_that_name_it() {
    let mut bench = Bench::new();
    let (dial, why) = (DialId(0), "nothing answers".into());
    let remedy = Remedy::Person;
    bench.node.handle(1001, Event::DialFailed { dial, why, is_silent: false, remedy }).unwrap();
    let end = bench.end();
    assert_eq!(end.to_string(), "cannot join the first node at 10.0.0.0:7000: nothing answers");
    assert_eq!(end.remedy(), remedy);
    let mut bench = Bench::new();
    assert_eq!(bench.node.poll_timeout(), Some(1000 + REPLY_TIMEOUT));
    bench.wait_until(1000 + REPLY_TIMEOUT);
    let expected = "cannot join the first node at 10.0.0.0:7000: no answer over UDP within 5 \
                    seconds; check the address, that UDP reaches its port, and that the code is \
                    that of the first node (nodes do not answer those who have another one)";
    assert_eq!(bench.end().to_string(), expected);
    let mut bench = Bench::greeting();
    bench.wait_until(1000 + REPLY_TIMEOUT);
    let expected = "the node at 10.0.0.0:7000 does not answer the hello within 5 seconds";
    assert_eq!(bench.end().to_string(), expected);
    let error = |first| {
        let options = JoiningNodeOptions { hello: hello("beta"), first };
        JoiningNode::new(options, 0).unwrap_err().to_string()
    };
    assert_eq!(error(Vec::new()), "no address to join is given");
    let expected =
        "0.0.0.0:7000 is no address to join: name the host and the port of the first node";
    assert_eq!(error(vec![([0, 0, 0, 0], 7000).into()]), expected);
}

#[test]
fn a_refusal_ends_the_node_with_the_sentence_of_the_first_one() {
    for mut bench in [Bench::greeting(), Bench::waiting(), Bench::pairing()] {
        let (why, remedy) = ("all are here".to_owned(), Remedy::Time);
        bench.first(ClusterMsg::Refused { why: why.clone(), remedy }).unwrap();
        let end = Action::Ended(ClusterEnd::Refused { why, remedy });
        assert_eq!(bench.actions(), [close(LINK, "all are here"), end]);
        assert_eq!(bench.node.poll_timeout(), None);
    }
}

#[test]
fn a_node_that_comes_back_to_another_run_ends() {
    let mut bench = Bench::with(Hello { run: Some("run-6".into()), ..hello("beta") });
    bench.dialed(0, LINK, 0);
    let error = bench.first(ClusterMsg::Welcome(welcome())).unwrap_err();
    let expected = "10.0.0.0:7000 runs run-7, and this node belongs to run-6: join the node that \
                    started run-6";
    assert_eq!(error.to_string(), expected);
    assert_eq!(bench.end(), ClusterEnd::Failed(error));
}

#[test]
fn a_roster_that_is_wrong_ends_the_node() {
    let mut bench = Bench::waiting();
    let short = roster(&["alpha", "gamma", "beta"]);
    let error = bench.first(ClusterMsg::Roster { you: NodeRank(2), roster: short }).unwrap_err();
    let expected =
        "alpha (10.0.0.0:7000): the roster has 3 nodes, and the run was announced with 4";
    assert_eq!(error.to_string(), expected);
    assert_eq!(bench.end(), ClusterEnd::Failed(error));
}

#[test]
fn messages_that_are_not_due_end_the_node_and_name_the_phase() {
    let start = || ClusterMsg::Start { generation: NEXT };
    let cases = [
        (
            Bench::greeting(),
            start(),
            "10.0.0.0:7000 sends a start where a welcome or a refusal is expected",
        ),
        (Bench::waiting(), start(), "alpha (10.0.0.0:7000) sends a start while others are awaited"),
        (Bench::pairing(), start(), "node 0 (alpha) sends a start before all pairs are connected"),
        (Bench::pairing(), the_roster(), "node 0 (alpha) sends a roster while pairs connect"),
        (Bench::running(), start(), "node 0 (alpha) sends a start after the start"),
    ];
    for (mut bench, message, expected) in cases {
        let error = bench.first(message).unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert_eq!(bench.end(), ClusterEnd::Failed(error));
    }
}

#[test]
fn a_later_generation_while_pairs_connect_begins_anew() {
    let mut bench = Bench::pairing();
    bench.accept(101);
    bench.say(101, pair(1, 2)).unwrap();
    bench.accept(104);
    bench.say(104, pair_of(Generation(4), 1, 2)).unwrap();
    bench.actions();
    let here = presence(4, &["alpha", "gamma", "beta"]);
    let generation = Generation(4);
    bench.first(ClusterMsg::Present { generation, presence: here.clone() }).unwrap();
    let closed = close(101, "generation 3 is over, and generation 4 is next");
    assert_eq!(bench.actions(), [closed, Action::Show(here)]);
    bench.dialed(1, 103, 3);
    assert_eq!(bench.actions(), [close(103, "the dial is no longer needed")]);
    bench.accept(105);
    let error = bench.say(105, pair(1, 2)).unwrap_err().to_string();
    let expected = "10.0.0.1:7000 sends the opening of a pair of generation 3, which is over: the \
                    present one is generation 4";
    assert_eq!(error, expected);
    assert_eq!(bench.actions(), [close(105, expected)]);
    let ClusterMsg::Roster { you, mut roster } = the_roster() else { unreachable!() };
    roster.generation = generation;
    bench.first(ClusterMsg::Roster { you, roster }).unwrap();
    let answer = send(104, pair_of(generation, 2, 1));
    assert!(bench.actions().contains(&answer), "the pair that came early is answered");
}

#[test]
fn messages_of_another_generation_are_refused_by_its_name() {
    let mut bench = Bench::running();
    let old = ClusterMsg::Present { generation: Generation(2), presence: presence(4, &["alpha"]) };
    let expected = "node 0 (alpha) sends a list of who is here of generation 2, which is over: the \
                    present one is generation 3";
    assert_eq!(bench.first(old).unwrap_err().to_string(), expected);
    assert_eq!(bench.actions(), []);
    bench.accept(105);
    let error = bench.say(105, pair_of(Generation(4), 1, 2)).unwrap_err().to_string();
    let expected = "10.0.0.1:7000 sends the opening of a pair of generation 4, and the present one \
                    is generation 3";
    assert_eq!(error, expected);
    assert_eq!(bench.actions(), [close(105, expected)]);
    let later = ClusterMsg::Heartbeat { generation: Generation(4), sequence: 1 };
    let error = bench.first(later).unwrap_err();
    let expected =
        "node 0 (alpha) sends a heartbeat of generation 4, and the present one is generation 3";
    assert_eq!(error.to_string(), expected);
    assert_eq!(bench.end(), ClusterEnd::Failed(error));
}

#[test]
fn dials_that_nobody_answers_are_reported_with_their_addresses() {
    let mut bench = Bench::pairing();
    assert_eq!(bench.node.poll_timeout(), Some(1000 + SECOND), "the heartbeat");
    for second in 1..5 {
        bench.now = second * SECOND;
        let sequence = second;
        let beat = ClusterMsg::Heartbeat { generation: NEXT, sequence };
        bench.first(beat).unwrap();
    }
    bench.wait_until(1000 + REPLY_TIMEOUT);
    let why = "no answer over UDP within 5 seconds".to_owned();
    let (peer, tried) = (NodeRank(3), vec![address(3)]);
    let failed = ClusterMsg::PairFailed { generation: NEXT, peer, tried, why };
    assert_eq!(bench.actions()[0], send(LINK, failed));
    bench.dialed(1, 103, 3);
    assert_eq!(bench.actions(), [close(103, "the dial is no longer needed")]);
    bench.first(ClusterMsg::Heartbeat { generation: NEXT, sequence: 5 }).unwrap();
    bench.now = 10 * SECOND;
    bench.first(ClusterMsg::Heartbeat { generation: NEXT, sequence: 6 }).unwrap();
    bench.wait_until(1000 + START_TIMEOUT);
    let expected = "node 0 (alpha) has neither started the run nor given it up within 12 seconds \
                    of its roster";
    assert_eq!(bench.end().to_string(), expected);
}

#[test]
fn strangers_are_refused_whatever_they_take_this_node_for() {
    let mut bench = Bench::pairing();
    bench.accept(105);
    let error = bench.say(105, ClusterMsg::Hello(hello("delta"))).unwrap_err().to_string();
    let expected =
        "beta is not the first node of its run, which is at 10.0.0.0:7000: join that address";
    assert_eq!(error, expected);
    let remedy = Remedy::Person;
    let refused = send(105, ClusterMsg::Refused { why: expected.into(), remedy });
    assert_eq!(bench.actions(), [refused, close(105, expected)]);
    bench.accept(106);
    let leave = ClusterMsg::Start { generation: NEXT };
    let expected = "10.0.0.1:7000 sends a start where the opening of a pair is expected";
    assert_eq!(bench.say(106, leave).unwrap_err().to_string(), expected);
    assert_eq!(bench.actions(), [close(106, expected)]);
    let other = ClusterMsg::Pair {
        run: "run-6".into(),
        generation: NEXT,
        from: NodeRank(1),
        to: NodeRank(2),
    };
    for (connection, message) in [(107, other), (108, pair(3, 2)), (109, pair(1, 3))] {
        bench.accept(connection);
        let error = bench.say(connection, message).unwrap_err().to_string();
        assert!(error.ends_with("which is not the one expected"), "{error}");
        assert_eq!(bench.actions(), [close(connection, &error)]);
    }
    bench.accept(110);
    bench.wait_until(1000 + REPLY_TIMEOUT);
    assert!(bench.actions().contains(&close(110, "no message came within 5 seconds")));
}

#[test]
fn early_pairs_are_bounded_in_number_and_time() {
    let mut bench = Bench::waiting();
    for guest in 0..65 {
        bench.accept(200 + guest);
        bench.say(200 + guest, pair(1, 2)).unwrap();
    }
    let why = "too many pairs are opened before their roster";
    assert_eq!(bench.actions(), [close(264, why)]);
    bench.now = 1000 + REPLY_TIMEOUT;
    bench.first(ClusterMsg::Heartbeat { generation: NEXT, sequence: 1 }).unwrap();
    bench.wait_until(1000 + REPLY_TIMEOUT);
    let late = close(200, "the roster of generation 3 did not come within 5 seconds");
    assert!(bench.actions().contains(&late));
}

#[test]
fn a_first_node_that_is_silent_or_gone_ends_the_node_by_its_name() {
    let mut bench = Bench::running();
    bench.wait_until(1000 + TIMEOUT - 1);
    assert!(!bench.node.is_over());
    bench.wait_until(1000 + TIMEOUT);
    let why = "it has been silent for 6 seconds";
    let loss = Loss::Node { node: FIRST, why: why.into() };
    let sentence = format!("node 0 (alpha) is lost: {why}");
    assert_eq!(bench.end(), ClusterEnd::Lost { loss, why: sentence });
    let mut bench = Bench::waiting();
    bench.close(LINK);
    let expected = "the first node, alpha (10.0.0.0:7000), is lost before the start: its link \
                    closed: reset";
    assert_eq!(bench.end().to_string(), expected);
    // The idle timeout of a link is longer than the silence that heartbeats allow.
    for mut bench in [Bench::running(), Bench::waiting()] {
        bench.end_connection(LINK, ConnectionEnd::Silent(2 * TIMEOUT));
        let end = bench.end();
        assert!(end.remedy() == Remedy::Time && end.to_string().ends_with(why), "{end}");
    }
}

#[test]
fn a_first_node_that_closes_before_its_welcome_does_not_take_this_node_in() {
    let closed = || ConnectionEnd::Peer("the cluster is over".into());
    let mut bench = Bench::greeting();
    bench.end_connection(LINK, closed());
    let (why, remedy) = ("the cluster is over".into(), Remedy::Time);
    assert_eq!(bench.end(), ClusterEnd::Refused { why, remedy });
    let mut bench = Bench::waiting();
    bench.end_connection(LINK, closed());
    let end = bench.end();
    let expected = "is lost before the start: the peer closed its link: the cluster is over";
    assert!(end.remedy() == Remedy::Time && end.to_string().ends_with(expected), "{end}");
    let mut bench = Bench::greeting();
    bench.end_connection(LINK, ConnectionEnd::Silent(3600 * SECOND));
    assert!(bench.end().to_string().ends_with("it has been silent for 3600 seconds"));
}

#[test]
fn losses_and_leaves_after_the_start_are_handed_on() {
    let mut bench = Bench::running();
    let why = || "done".to_owned();
    let node = NodeRank(1);
    for _ in 0..2 {
        bench.first(ClusterMsg::Left { generation: NEXT, node, why: why() }).unwrap();
    }
    let left = Action::Left { node, why: why() };
    assert_eq!(bench.actions(), [left], "once, and the node that leaves closes the link");
    bench.close(101);
    assert_eq!(bench.actions(), []);
    bench.close(103);
    let (peer, tried) = (NodeRank(3), vec![address(3)]);
    let cut = "the link closed: reset".to_owned();
    let failed = ClusterMsg::PairFailed { generation: NEXT, peer, tried, why: cut };
    assert_eq!(bench.actions(), [send(LINK, failed)]);
    let loss = Loss::Node { node: NodeRank(3), why: "it is gone".into() };
    bench.first(ClusterMsg::Lost { generation: NEXT, loss: loss.clone() }).unwrap();
    let sentence = "node 3 (delta) is lost: it is gone";
    let lost = Action::Lost { loss: loss.clone(), why: sentence.into() };
    let ended = Action::Ended(ClusterEnd::Lost { loss, why: sentence.into() });
    assert_eq!(bench.actions(), [lost, close(LINK, sentence), ended]);
    let mut bench = Bench::running();
    let loss = Loss::Link { between: (NodeRank(1), NodeRank(9)), why: why() };
    let error = bench.first(ClusterMsg::Lost { generation: NEXT, loss }).unwrap_err().to_string();
    assert_eq!(error, "node 0 (alpha) names node 9, which is none of the others in the roster");
}

/// A report to a node about its own loss has arrived, so the network has not failed as a whole.
#[test]
fn a_node_that_the_first_one_gives_up_hears_why_and_what_to_check() {
    let own = |why: &str| {
        let mut bench = Bench::running();
        let loss = Loss::Node { node: NodeRank(2), why: why.into() };
        bench.first(ClusterMsg::Lost { generation: NEXT, loss }).unwrap();
        bench.end().to_string()
    };
    let silent = own("it has been silent for 6 seconds");
    let beginning = "the first node, node 0 (alpha), no longer hears this one, node 2 (beta): it \
                     has been silent for 6 seconds; what it sends arrives here";
    assert!(silent.starts_with(beginning), "{silent}");
    assert!(silent.contains("in one direction only: check that UDP passes in both"), "{silent}");
    let expected = "the first node, node 0 (alpha), has given this one up, node 2 (beta): it hangs";
    assert_eq!(own("it hangs"), expected);
}

#[test]
fn a_node_leaves_in_order_and_ends_with_the_first_one() {
    let mut bench = Bench::running();
    bench.node.leave("Ctrl+C\u{7}");
    let actions = bench.actions();
    assert_eq!(actions[0], send(LINK, ClusterMsg::Leave { why: "Ctrl+C ".into() }));
    let end = Action::Ended(ClusterEnd::Left { why: "Ctrl+C ".into() });
    assert_eq!(actions.last(), Some(&end));
    let mut bench = Bench::running();
    bench.first(ClusterMsg::Leave { why: "the run is complete".into() }).unwrap();
    assert_eq!(bench.actions(), [], "what the first node sent before may still be on its way");
    bench.close(LINK);
    assert_eq!(bench.end(), ClusterEnd::Left { why: "the run is complete".into() });
}

#[test]
fn a_message_on_the_link_of_a_pair_closes_it_and_is_reported() {
    let mut bench = Bench::running();
    let why = "node 1 (gamma) sends the opening of a pair on the link of a pair";
    assert_eq!(bench.say(101, pair(1, 2)).unwrap_err().to_string(), why);
    let failed = ClusterMsg::PairFailed {
        generation: NEXT,
        peer: NodeRank(1),
        tried: Vec::new(),
        why: why.into(),
    };
    assert_eq!(bench.actions(), [close(101, why), send(LINK, failed)]);
}
