//! Bytes that no node of this crate sends, from peers that know the secret: each closes its
//! connection with a sentence, and nothing else happens.

use std::sync::Arc;
use std::time::Duration;

use quinn::{Connection, SendStream};

use super::link::Control;
use super::test_peer::{IDLE_TIMEOUT, Peer, Sink, TEST_TIMEOUT, node, node_with, secret, wait};
use super::wire::{BlobHead, DataHead, PROTOCOL, StreamKind, control_head, greeting, greeting_of};
use super::*;

/// Timeout that a test lets pass: longer than a busy machine needs for the preceding steps.
const SHORT: Duration = Duration::from_secs(2);

/// Returns how a link ends on which a peer sends some bytes, for both sides: the sentences of the
/// receiver and of the peer.
fn end_of<F>(send: impl FnOnce(Connection, Control) -> F) -> String
where
    F: Future<Output = ()> + Send + 'static,
{
    end_within(IDLE_TIMEOUT, send)
}

/// The same of a link with this idle timeout.
fn end_within<F>(idle_timeout: Duration, send: impl FnOnce(Connection, Control) -> F) -> String
where
    F: Future<Output = ()> + Send + 'static,
{
    let secret = secret();
    let node = node_with(&secret, |options| options.idle_timeout = idle_timeout);
    let peer = Peer::new();
    let (connection, control, pending) = peer.join(&node, &secret);
    let sink = Arc::new(Sink::default());
    let _link = pending.open(sink.clone());
    peer.runtime.spawn(send(connection.clone(), control));
    let CloseReason::Violation(why) = sink.closed() else { panic!("{}", sink.closed()) };
    assert_eq!(peer.close_of(&connection), why);
    // The endpoint continues.
    assert_eq!(peer.join(&node, &secret).2.hello(), b"peer");
    why
}

/// Sends bytes on a stream and leaves it open for a while, or ends it.
async fn uni(connection: Connection, bytes: Vec<u8>, finish: bool) {
    let mut stream = connection.open_uni().await.unwrap();
    send(&mut stream, bytes, finish).await;
}

async fn send(stream: &mut SendStream, bytes: Vec<u8>, finish: bool) {
    let _ = stream.write_all(&bytes).await;
    if finish {
        let _ = stream.finish();
    }
    tokio::time::sleep(TEST_TIMEOUT).await;
}

fn data(bytes: usize) -> Vec<u8> {
    let head = DataHead { tag: [0; TAG_BYTES], bytes };
    [&[StreamKind::Data as u8][..], &head.encode()].concat()
}

fn blob(bytes: usize, hashed: &[u8]) -> Vec<u8> {
    let head = BlobHead { id: 5, bytes, hash: blake3::hash(hashed).into() };
    [&[StreamKind::Blob as u8][..], &head.encode()].concat()
}

fn assert_says(why: &str, words: &str) {
    assert!(why.contains(words), "{why}");
}

#[test]
fn lengths_beyond_the_limits_close_the_link() {
    let why = end_of(|_, (mut stream, _)| async move {
        send(&mut stream, control_head(CONTROL_MAX + 1).to_vec(), false).await;
    });
    assert_says(&why, "a control message has 65537 bytes, and at most 65536");
    let why = end_of(|connection, _| uni(connection, data(PAYLOAD_MAX + 1), false));
    assert_says(&why, "a payload has 67108865 bytes");
    let why = end_of(|connection, _| uni(connection, blob(u32::MAX as usize, b""), false));
    assert_says(&why, "a blob has 4294967295 bytes");
}

#[test]
fn lengths_that_are_not_due_close_the_link() {
    let why = end_of(|connection, _| uni(connection, data(11), false));
    assert_says(&why, "a payload has 11 bytes, and 10 are due");
    let why = end_of(|connection, _| uni(connection, blob(1001, b""), false));
    assert_says(&why, "a blob of 1001 bytes is not due");
}

#[test]
fn blobs_of_another_length_or_hash_close_the_link() {
    let with =
        |announced, hashed: &[u8], sent: &[u8]| [blob(announced, hashed), sent.to_vec()].concat();
    let wrong = with(4, b"abcd", b"abce");
    assert_says(&end_of(|c, _| uni(c, wrong, true)), "blob 5 does not match its hash");
    let longer = with(4, b"abcd", b"abcde");
    assert_says(&end_of(|c, _| uni(c, longer, true)), "blob 5 is longer than its 4 bytes");
    let shorter = with(4, b"abcd", b"abc");
    assert_says(&end_of(|c, _| uni(c, shorter, true)), "ended before what it announced");
}

#[test]
fn streams_that_are_not_due_close_the_link() {
    assert_says(&end_of(|c, _| uni(c, vec![9], false)), "the unknown kind 9");
    assert_says(&end_of(|c, _| uni(c, vec![], true)), "ended before");
    let mut other = data(10);
    other[1] = 2;
    assert_says(&end_of(|c, _| uni(c, other, false)), "version 2 of the protocol");
    let why = end_of(|connection, _| async move {
        let _first = tokio::spawn(uni(connection.clone(), data(10), false));
        uni(connection, data(10), false).await;
    });
    assert_says(&why, "a second stream of payloads");
    let why = end_of(|connection, _| async move {
        let mut stream = connection.open_uni().await.unwrap();
        stream.write_all(&data(10)).await.unwrap();
        stream.reset(7u32.into()).unwrap();
        tokio::time::sleep(TEST_TIMEOUT).await;
    });
    assert_says(&why, "a stream ended wrongly");
}

#[test]
fn what_begins_and_stops_is_given_up() {
    let stopped = "stopped for 2 s";
    let endings: Vec<_> = std::thread::scope(|scope| {
        let cases: [Vec<u8>; 4] = [vec![], data(10)[..9].to_vec(), data(10), blob(10, b"")];
        // The peer would learn only that an empty stream exists, so the first case sends a byte of
        // control.
        let begin = |bytes: Vec<u8>| {
            move || {
                if bytes.is_empty() {
                    end_within(SHORT, |_, (mut stream, _)| async move {
                        send(&mut stream, vec![0], false).await;
                    })
                } else {
                    end_within(SHORT, |connection, _| uni(connection, bytes, false))
                }
            }
        };
        let running = cases.map(|bytes| scope.spawn(begin(bytes)));
        running.into_iter().map(|case| case.join().unwrap()).collect()
    });
    for why in &endings {
        assert_says(why, stopped);
    }
}

#[test]
fn streams_are_bounded_by_the_transport() {
    let secret = secret();
    let (node, peer) = (node(&secret), Peer::new());
    let (connection, _control, pending) = peer.join(&node, &secret);
    let _link = pending.open(Arc::new(Sink::default()));
    peer.runtime.block_on(async {
        let short = Duration::from_millis(50);
        let mut open = Vec::new();
        while let Ok(stream) = tokio::time::timeout(short, connection.open_uni()).await {
            open.push(stream.unwrap());
        }
        assert_eq!(open.len(), 5);
        let second = tokio::time::timeout(short, connection.open_bi()).await;
        assert!(second.is_err(), "a second stream of two directions");
    });
}

#[test]
fn a_peer_without_a_greeting_or_with_a_wrong_one_is_refused() {
    let secret = secret();
    let peer = Peer::new();
    let (patient, impatient) =
        (node(&secret), node_with(&secret, |options| options.handshake_timeout = SHORT));
    let refusals = |node: &Endpoint, send: Option<Vec<u8>>| {
        let connection = peer.connect_as_node(node, &secret);
        let streams = peer.runtime.block_on(async {
            let (mut stream, receive) = connection.open_bi().await.unwrap();
            if let Some(bytes) = send {
                stream.write_all(&bytes).await.unwrap();
            }
            (stream, receive)
        });
        let why = peer.close_of(&connection);
        drop(streams);
        why
    };
    let half = || Some(greeting(b"hello", IDLE_TIMEOUT)[..16].to_vec());
    std::thread::scope(|scope| {
        let silent = scope.spawn(|| refusals(&impatient, None));
        assert_says(&refusals(&impatient, half()), "it sent no greeting within 2 s");
        assert_says(&silent.join().unwrap(), "it sent no greeting within 2 s");
    });
    assert_says(&refusals(&patient, Some(b"GET / HTTP".to_vec())), "does not begin as one");
    let later = refusals(&patient, Some(greeting_of(PROTOCOL + 1, "9.8.7", b"?")));
    assert_says(
        &later,
        &format!("the node that dials has potluck 9.8.7 (protocol {}), and", PROTOCOL + 1),
    );
    let long = [&greeting(b"", IDLE_TIMEOUT)[..4], &[255; 2]].concat();
    assert_says(&refusals(&patient, Some(long)), "65535 bytes");
    for (node, refused) in [(patient, 3), (impatient, 2)] {
        wait("refusals", || node.refused_count() == refused);
        assert!(node.accepted().try_recv().unwrap().is_none());
    }
}

#[test]
fn a_peer_that_dies_without_a_word_is_found_within_the_idle_timeout() {
    let found = |theirs, ours| {
        let secret = secret();
        let node = node_with(&secret, |options| options.idle_timeout = ours);
        let peer = Peer { idle_timeout: theirs, ..Peer::new() };
        let (connection, control, pending) = peer.join(&node, &secret);
        let sink = Arc::new(Sink::default());
        let link = pending.open(sink.clone());
        // It lives for longer than the timeout: each side keeps the link alive.
        std::thread::sleep(SHORT + SHORT / 4);
        link.send_control(vec![1]).unwrap();
        assert_eq!(sink.count(), 0);
        // The process is gone: its threads end without a packet.
        peer.runtime.shutdown_background();
        assert_eq!(sink.closed(), CloseReason::TimedOut(SHORT));
        drop((connection, control));
    };
    std::thread::scope(|scope| {
        scope.spawn(|| found(IDLE_TIMEOUT, SHORT));
        // This side keeps the link alive often enough for both.
        scope.spawn(|| found(SHORT, 2 * SHORT));
    });
}

#[test]
fn a_peer_that_closes_in_its_own_words_is_made_harmless() {
    let secret = secret();
    let (node, peer) = (node(&secret), Peer::new());
    let (connection, _control, pending) = peer.join(&node, &secret);
    let sink = Arc::new(Sink::default());
    let _link = pending.open(sink.clone());
    connection.close(0u32.into(), b"\x1b[2Jall is well\r\n");
    assert_eq!(sink.closed(), CloseReason::Peer("\u{FFFD}[2Jall is well\u{FFFD}\u{FFFD}".into()));
}
