//! Messages, payloads and blobs on a link that works.

use potluck_net::{CONTROL_MAX, Payload};

use super::*;

/// Bytes that differ from place to place.
fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|i| (i.wrapping_mul(31) >> 3) as u8 ^ seed).collect()
}

fn controls(all: &[Arrival]) -> Vec<&[u8]> {
    let mut messages = Vec::new();
    for arrival in all {
        if let Arrival::Control(message) = arrival {
            messages.push(&message[..]);
        }
    }
    messages
}

#[test]
fn control_messages_arrive_in_order() {
    let secret = secret();
    let (a, b) = (endpoint(&secret, b""), endpoint(&secret, b""));
    let sides = linked(&a, &b);
    let lengths = [1, 2, 3, 4, 5, 1000, CONTROL_MAX - 1, CONTROL_MAX];
    let sent: Vec<_> = (0..200).map(|i| pattern(lengths[i % 8].min(20_000 + i), i as u8)).collect();
    for (link, _) in &sides {
        for message in &sent {
            link.send_control(message.clone()).unwrap();
        }
    }
    for (_, log) in &sides {
        let all = log.wait(|all| all.len() == sent.len());
        assert_eq!(controls(&all), sent);
    }
}

#[test]
fn payloads_in_order_blobs_beside() {
    let secret = secret();
    let (a, b) = (endpoint(&secret, b""), endpoint(&secret, b""));
    let [(link, _), (_kept, log)] = linked(&a, &b);
    let sizes = [0usize, 1, 44, 45, 46, 65_536, 300_000];
    let payloads: Vec<_> = (0u8..40)
        .map(|i| ([i; TAG_BYTES], pattern(sizes[usize::from(i) % sizes.len()], i)))
        .collect();
    let blobs: Vec<_> = (0..10).map(|id| (id, pattern(100_000 * id as usize, id as u8))).collect();
    let sending = link.clone();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (id, bytes) in &blobs {
                sending.send_blob(*id, Payload::from(bytes.clone())).unwrap();
                sending.send_control(vec![*id as u8]).unwrap();
            }
        });
        for (tag, bytes) in &payloads {
            link.send_data(*tag, Payload::new(bytes.clone())).unwrap();
        }
    });
    let all = log.wait(|all| all.len() == payloads.len() + 3 * blobs.len());
    let data: Vec<_> = all
        .iter()
        .filter_map(|arrival| match arrival {
            Arrival::Data(tag, bytes) => Some((*tag, bytes.clone())),
            _ => None,
        })
        .collect();
    assert!(data == payloads);
    let mut arrived: Vec<_> = all
        .iter()
        .filter_map(|arrival| match arrival {
            Arrival::Blob(id, bytes) => Some((*id, bytes.clone())),
            _ => None,
        })
        .collect();
    arrived.sort();
    assert!(arrived == blobs);
    for (id, bytes) in &blobs {
        let at = |wanted: &Arrival| all.iter().position(|arrival| arrival == wanted).unwrap();
        let begins = at(&Arrival::BlobBegins(*id, bytes.len()));
        assert!(begins < at(&Arrival::Blob(*id, bytes.clone())));
    }
    assert_eq!(controls(&all), (0u8..10).map(|id| vec![id]).collect::<Vec<_>>());
}

/// Sends 48 payloads of 1 MiB and a control message behind them. Returns how many had arrived when
/// it was sent, and how many before it.
fn overtaken() -> (usize, usize) {
    let secret = secret();
    let (a, b) = (endpoint(&secret, b""), endpoint(&secret, b""));
    let [(link, _), (_kept, log)] = linked(&a, &b);
    for i in 0..48u8 {
        link.send_data([i; TAG_BYTES], Payload::from(vec![i; 1 << 20])).unwrap();
    }
    link.send_control(b"urgent".to_vec()).unwrap();
    let sent = log.wait(|_| true).len();
    let all = log.wait(|all| all.len() == 49);
    let urgent = Arrival::Control(b"urgent".to_vec());
    (sent, all.iter().position(|arrival| *arrival == urgent).unwrap())
}

/// What is on its way already comes first, and that is much less than what waits.
#[test]
fn control_messages_overtake_payloads() {
    // On a busy machine nearly all may have arrived before the message is sent, and now and then
    // the thread that sends the message is stopped while that of the payloads goes on.
    let tries: Vec<(usize, usize)> = (0..15).map(|_| overtaken()).collect();
    let telling = tries.iter().filter(|(sent, _)| *sent < 28);
    let mut between: Vec<usize> = telling.map(|(sent, at)| at.saturating_sub(*sent)).collect();
    between.sort_unstable();
    assert!(between.get(between.len() / 2).is_some_and(|median| *median < 19), "{tries:?}");
}

#[test]
fn payload_owner_dropped_when_sent() {
    struct Owner(Arc<Mutex<usize>>, Vec<u8>);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.1
        }
    }
    impl Drop for Owner {
        fn drop(&mut self) {
            *self.0.lock().unwrap() += 1;
        }
    }
    let secret = secret();
    let (a, b) = (endpoint(&secret, b""), endpoint(&secret, b""));
    let [(link, _), (_kept, log)] = linked(&a, &b);
    let dropped = Arc::new(Mutex::new(0));
    for _ in 0..10 {
        let payload = Payload::new(Owner(dropped.clone(), vec![1; 100_000]));
        assert_eq!((payload.len(), payload.is_empty()), (100_000, false));
        link.send_data([0; TAG_BYTES], payload).unwrap();
    }
    log.wait(|all| all.len() == 10);
    let deadline = Instant::now() + PATIENCE;
    while *dropped.lock().unwrap() < 10 {
        assert!(Instant::now() < deadline, "{} dropped", dropped.lock().unwrap());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn link_knows_peer_and_traffic() {
    let secret = secret();
    let (a, b) = (endpoint(&secret, b""), endpoint(&secret, b""));
    let [(link, _), (other, log)] = linked(&a, &b);
    link.send_data([0; TAG_BYTES], Payload::from(vec![0; 500_000])).unwrap();
    log.wait(|all| all.len() == 1);
    assert_eq!((link.address(), other.address()), (b.local_addr(), a.local_addr()));
    let [stats, others] = [link.stats(), other.stats()];
    assert!(stats.bytes_sent > 500_000 && others.bytes_received > 500_000);
    assert!(others.bytes_sent < 400_000, "{}", others.bytes_sent);
    assert!(stats.round_trip > Duration::ZERO && stats.round_trip < Duration::from_secs(1));
    assert!(stats.packets_sent > 50 && stats.packets_lost < stats.packets_sent, "{stats:?}");
    assert!(stats.congestion_window > 10_000 && stats.datagram_bytes >= 1200, "{stats:?}");
}

#[test]
fn endpoint_meets_many_nodes() {
    let secret = secret();
    let first = endpoint(&secret, b"first");
    let others: Vec<_> = (0..8u8).map(|i| endpoint(&secret, &[i])).collect();
    let links: Vec<_> = others.iter().map(|other| linked(other, &first)).collect();
    for (i, [(link, _), _]) in links.iter().enumerate() {
        link.send_control(vec![i as u8; 10]).unwrap();
    }
    for (i, [_, (_, log)]) in links.iter().enumerate() {
        assert_eq!(log.wait(|all| all.len() == 1), [Arrival::Control(vec![i as u8; 10])]);
    }
}
