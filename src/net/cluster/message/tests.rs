//! Tests of messages: refused ones, and mutated bytes.

use std::time::{Duration, Instant};

use super::*;
use crate::cluster::testing::{address, hello, presence, roster};
use potluck_core::rng::Key;

const GENERATION: Generation = Generation(3);

fn welcome() -> Welcome {
    let (run, host) = ("run-7".into(), "alpha".into());
    Welcome { run, host, nodes: 3, generation: GENERATION, node_timeout: 6_000_000_000 }
}

fn one_of_each() -> Vec<ClusterMsg> {
    let (generation, node, peer) = (GENERATION, NodeRank(1), NodeRank(2));
    let why = || "because".to_owned();
    vec![
        ClusterMsg::Hello(Hello { run: Some("run-7".into()), ..hello("beta") }),
        ClusterMsg::Refused { why: why(), remedy: Remedy::Time },
        ClusterMsg::Welcome(welcome()),
        ClusterMsg::Present { generation, presence: presence(3, &["alpha", "beta"]) },
        ClusterMsg::Roster { you: node, roster: roster(&["alpha", "beta", "gamma"]) },
        ClusterMsg::Pair { run: "run-7".into(), generation, from: node, to: peer },
        ClusterMsg::PairConnected { generation, peer },
        ClusterMsg::PairFailed { generation, peer, tried: vec![address(2)], why: why() },
        ClusterMsg::Start { generation },
        ClusterMsg::Heartbeat { generation, sequence: 300 },
        ClusterMsg::Leave { why: why() },
        ClusterMsg::Left { generation, node, why: why() },
        ClusterMsg::Lost { generation, loss: Loss::Node { node, why: why() } },
        ClusterMsg::Lost { generation, loss: Loss::Link { between: (node, peer), why: why() } },
    ]
}

fn refusal(bytes: &[u8]) -> String {
    ClusterMsg::decode(bytes).unwrap_err().to_string()
}

/// Bytes of a message that `encode` would refuse.
fn unchecked(message: &ClusterMsg) -> Vec<u8> {
    postcard::to_allocvec(message).unwrap()
}

#[test]
fn every_message_comes_back_and_none_with_bytes_missing_or_behind_it() {
    for message in one_of_each() {
        let mut bytes = message.encode().unwrap();
        assert_eq!(ClusterMsg::decode(&bytes), Ok(message.clone()));
        for length in 0..bytes.len() {
            assert!(ClusterMsg::decode(&bytes[..length]).is_err(), "{message:?} at {length}");
        }
        bytes.push(0);
        assert_eq!(refusal(&bytes), format!("1 bytes follow behind {}", message.name()));
    }
}

#[test]
fn values_beyond_their_bounds_are_refused_on_both_sides() {
    let long = || "w".repeat(1025);
    let mut many = roster(&["alpha", "beta"]);
    many.nodes[1].devices.clear();
    let mut crowd = presence(2, &["a", "b", "c"]);
    let generation = GENERATION;
    let cases = [
        (ClusterMsg::Leave { why: long() }, "its reason has 1025 bytes, of at most 1024"),
        (
            ClusterMsg::Refused { why: "\u{1b}".into(), remedy: Remedy::Person },
            "a character that is not shown, \\u{1b}",
        ),
        (
            ClusterMsg::Lost { generation, loss: Loss::Node { node: NodeRank(0), why: long() } },
            "the notice of a loss is refused: its reason has 1025 bytes, of at most 1024",
        ),
        (
            ClusterMsg::PairFailed {
                generation,
                peer: NodeRank(1),
                tried: vec![address(1); 9],
                why: String::new(),
            },
            "the report of a failed pair has 9 addresses, of at most 8",
        ),
        (
            ClusterMsg::Welcome(Welcome { nodes: 65, ..welcome() }),
            "a welcome has 65 nodes, of 2 to 64",
        ),
        (
            ClusterMsg::Welcome(Welcome { node_timeout: 1, ..welcome() }),
            "a welcome has 1 ns as the longest silence of a node, of 100000000 to 3600000000000",
        ),
        (ClusterMsg::Welcome(Welcome { run: String::new(), ..welcome() }), "its run is empty"),
        (
            ClusterMsg::Present { generation, presence: crowd.clone() },
            "a list of who is here has 3 nodes that are here, of at most 2",
        ),
        (
            ClusterMsg::Roster { you: NodeRank(1), roster: many },
            "a roster is refused: the roster's node 1 is refused: it has no device",
        ),
        (
            ClusterMsg::Hello(Hello { port: 0, ..hello("beta") }),
            "a hello is refused: it listens at port 0, which is none",
        ),
    ];
    for (message, expected) in cases {
        let error = refusal(&unchecked(&message));
        assert!(error.ends_with(expected), "{error}");
        assert_eq!(message.encode().unwrap_err().to_string(), error);
    }
    crowd.expected = 1;
    let present = ClusterMsg::Present { generation, presence: crowd };
    assert_eq!(refusal(&unchecked(&present)), "a list of who is here has 1 nodes, of 2 to 64");
}

#[test]
fn messages_of_more_than_64_kib_are_neither_read_nor_written() {
    let expected = "a message has 65537 bytes, of at most 65536";
    assert_eq!(refusal(&[9; MESSAGE_BYTES_MAX + 1]), expected);
    let mut long = roster(&["alpha"; 2]);
    let mut device = long.nodes[0].devices[0].clone();
    device.name = "d".repeat(256);
    long.nodes = vec![long.nodes[1].clone(); 64];
    for (index, node) in long.nodes.iter_mut().enumerate() {
        (node.node, node.devices) = (NodeRank(index as u32), vec![device.clone(); 64]);
    }
    let error = ClusterMsg::Roster { you: NodeRank(1), roster: long }.encode().unwrap_err();
    assert!(matches!(error, MessageError::TooLong { bytes } if bytes > 1 << 20), "{error}");
}

#[test]
fn a_length_that_the_bytes_claim_allocates_nothing() {
    // A roster of 2^32 nodes, a reason of 2^32 bytes.
    for head in [&[4, 1, 3][..], &[1]] {
        let bytes = [head, &[0xff, 0xff, 0xff, 0xff, 0x0f]].concat();
        assert!(refusal(&bytes).starts_with("bytes that are no message of a node"));
    }
}

#[test]
fn mutated_bytes_are_refused_or_mean_what_they_say() {
    let messages: Vec<Vec<u8>> = one_of_each().iter().map(|of| of.encode().unwrap()).collect();
    let (key, began, mut taken) = (Key::new(7), Instant::now(), 0);
    for round in 0..100_000u32 {
        let word = |counter: u32| key.words([round, counter])[0] as usize;
        let mut bytes = messages[round as usize % messages.len()].clone();
        for change in 0..=word(0) as u32 % 4 {
            let (at, value) = (word(10 + change) % bytes.len(), word(20 + change) as u8);
            match word(30 + change) % 5 {
                0 => bytes[at] = value,
                1 => bytes[at] ^= 1 << (value % 8),
                2 => bytes.insert(at, value),
                3 => bytes.truncate(at.max(1)),
                _ => bytes[at] = 0xff,
            }
        }
        if let Ok(message) = ClusterMsg::decode(&bytes) {
            let again = message.encode().unwrap();
            assert_eq!(ClusterMsg::decode(&again), Ok(message), "round {round}");
            taken += 1;
        }
    }
    assert!(taken > 1000, "only {taken} of the mutations are messages");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}
