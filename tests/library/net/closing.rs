//! Ends of links: who learns what.

use std::sync::atomic::{AtomicUsize, Ordering};

use potluck_net::{CONTROL_MAX, PAYLOAD_MAX, Payload};

use super::*;

#[test]
fn close_sends_queue_then_sentence() {
    let secret = secret();
    let (a, b) = (endpoint(&secret, b""), endpoint(&secret, b""));
    let [(link, here), (_other, there)] = linked(&a, &b);
    for i in 0..20u8 {
        link.send_data([i; TAG_BYTES], Payload::from(vec![i; 100_000])).unwrap();
        link.send_control(vec![i]).unwrap();
    }
    link.send_blob(1, Payload::from(vec![5; 1_000_000])).unwrap();
    link.close("the run has ended");
    link.close("a second reason");
    assert_eq!(link.send_control(vec![1]).unwrap_err().0, "the run has ended");
    assert_eq!(there.closed(), CloseReason::Peer("the run has ended".into()));
    let all = there.all();
    assert_eq!(all.len(), 20 + 20 + 2 + 1);
    assert!(all.contains(&Arrival::Data([19; TAG_BYTES], vec![19; 100_000])));
    assert_eq!(here.closed(), CloseReason::Here("the run has ended".into()));
}

#[test]
fn close_by_both_at_once_is_fine() {
    let secret = secret();
    let (a, b) = (endpoint(&secret, b""), endpoint(&secret, b""));
    let [(link, here), (other, there)] = linked(&a, &b);
    link.close("one");
    other.close("two");
    let expected =
        |own: &str, peer: &str| [CloseReason::Here(own.into()), CloseReason::Peer(peer.into())];
    assert!(expected("one", "two").contains(&here.closed()));
    assert!(expected("two", "one").contains(&there.closed()));
}

#[test]
fn drop_of_link_or_endpoint_closes() {
    let secret = secret();
    let (a, b) = (endpoint(&secret, b""), endpoint(&secret, b""));
    let [(link, _), (_kept, there)] = linked(&a, &b);
    drop(link.clone());
    link.send_control(b"still open".to_vec()).unwrap();
    drop(link);
    assert_eq!(there.closed(), CloseReason::Peer("the node gave the link up".into()));
    assert_eq!(there.all()[0], Arrival::Control(b"still open".to_vec()));
    let [(link, here), (_kept, there)] = linked(&a, &b);
    link.send_control(b"the last words".to_vec()).unwrap();
    drop(a);
    assert_eq!(there.closed(), CloseReason::Peer("the program ended its links".into()));
    assert_eq!(there.all()[0], Arrival::Control(b"the last words".to_vec()));
    here.closed();
    assert!(link.send_control(vec![1]).is_err());
}

#[test]
fn endpoint_closed_dials_no_more() {
    let secret = secret();
    let (a, b) = (endpoint(&secret, b""), endpoint(&secret, b""));
    let [(_link, _), (_kept, there)] = linked(&a, &b);
    a.close("the run was stopped");
    assert_eq!(there.closed(), CloseReason::Peer("the run was stopped".into()));
    assert!(a.dial(b.local_addr(), PATIENCE).is_err());
    assert_eq!(a.accepted().try_recv().unwrap_err().0, "the run was stopped");
}

/// Receiver that takes nothing, for one reason, and panics at blobs.
struct Reluctant(Log);

impl Receiver for Reluctant {
    fn control(&self, _: Vec<u8>) -> Result<(), String> {
        Err("a message of an older generation".into())
    }

    fn blob_begins(&self, id: u64, bytes: usize) -> Result<(), String> {
        match bytes {
            0 => panic!("on purpose, in a test"),
            _ => Err(format!("blob {id} was not asked for")),
        }
    }

    fn blob(&self, _: u64, _: Vec<u8>) -> Result<(), String> {
        unreachable!("none begins")
    }

    fn data(&self, tag: &[u8; TAG_BYTES], _: usize) -> Result<Box<dyn ReceiveBuffer>, String> {
        self.0.data(tag, 10)
    }

    fn closed(&self, why: &CloseReason) {
        self.0.closed_with(why);
    }
}

impl Log {
    fn closed_with(&self, why: &CloseReason) {
        Receiver::closed(self, why);
    }
}

/// Returns how a link ends on the sending side and on a reluctant one.
fn ends(send: impl FnOnce(&Link)) -> [CloseReason; 2] {
    let secret = secret();
    let (a, b) = (endpoint(&secret, b""), endpoint(&secret, b""));
    let (dialed, accepted) = meet(&a, &b);
    let (here, there) = (Arc::new(Log::default()), Arc::new(Reluctant(Log::default())));
    let (link, _kept) = (dialed.open(here.clone()), accepted.open(there.clone()));
    send(&link);
    [here.closed(), there.0.closed()]
}

#[test]
fn receiver_error_closes_with_sentence() {
    let both = |why: &str| [CloseReason::Accused(why.into()), CloseReason::Violation(why.into())];
    let control = ends(|link| link.send_control(vec![1]).unwrap());
    assert_eq!(control, both("a message of an older generation"));
    let blob = ends(|link| link.send_blob(9, Payload::from(vec![1])).unwrap());
    assert_eq!(blob, both("blob 9 was not asked for"));
    let data = ends(|link| link.send_data([0; TAG_BYTES], Payload::from(vec![1; 11])).unwrap());
    assert_eq!(data, both("a payload has 11 bytes, and 10 are due"));
}

#[test]
fn receiver_panic_closes_link_only() {
    let [here, there] = ends(|link| link.send_blob(1, Payload::from(vec![])).unwrap());
    assert!(matches!(here, CloseReason::Lost(_)), "{here}");
    assert!(matches!(there, CloseReason::Defect(_)), "{there}");
}

/// On the wire it would be a probe, which the peer's receiver is not handed.
#[test]
fn empty_control_message_is_own_defect() {
    let secret = secret();
    let (a, b) = (endpoint(&secret, b""), endpoint(&secret, b""));
    let [(link, here), _kept] = linked(&a, &b);
    let error = link.send_control(Vec::new()).unwrap_err();
    assert!(error.0.contains("0 bytes, not of 1 to 65536"), "{error}");
    assert!(matches!(here.closed(), CloseReason::Defect(_)));
}

#[test]
fn message_too_long_is_own_defect() {
    let secret = secret();
    let (a, b) = (endpoint(&secret, b""), endpoint(&secret, b""));
    let [(link, here), (_other, there)] = linked(&a, &b);
    let error = link.send_control(vec![0; CONTROL_MAX + 1]).unwrap_err();
    assert!(error.0.contains("65537 bytes"), "{error}");
    assert!(matches!(here.closed(), CloseReason::Defect(_)));
    assert!(matches!(there.closed(), CloseReason::Lost(_)));
    let [(link, _), _kept] = linked(&a, &b);
    let huge = Payload::from(vec![0; PAYLOAD_MAX + 1]);
    assert!(link.send_data([0; TAG_BYTES], huge.clone()).is_err());
    let [(link, _), _kept] = linked(&a, &b);
    assert!(link.send_blob(0, huge).is_err());
}

#[test]
fn sender_waiting_wakes_at_the_end() {
    /// Receiver whose payloads wait until a sender is gone.
    struct Slow(Log, Mutex<Option<std::sync::mpsc::Receiver<()>>>);
    impl Receiver for Slow {
        fn control(&self, _: Vec<u8>) -> Result<(), String> {
            Ok(())
        }
        fn blob_begins(&self, _: u64, _: usize) -> Result<(), String> {
            Ok(())
        }
        fn blob(&self, _: u64, _: Vec<u8>) -> Result<(), String> {
            Ok(())
        }
        fn data(
            &self,
            tag: &[u8; TAG_BYTES],
            bytes: usize,
        ) -> Result<Box<dyn ReceiveBuffer>, String> {
            if let Some(wait) = self.1.lock().unwrap().take() {
                let _ = wait.recv_timeout(PATIENCE);
            }
            self.0.data(tag, bytes)
        }
        fn closed(&self, why: &CloseReason) {
            self.0.closed_with(why);
        }
    }
    let secret = secret();
    let small = EndpointOptions { queue_bytes: 1 << 20, window_bytes: 1 << 20, ..options() };
    let [a, b] = [(); 2].map(|()| Endpoint::bind(small.clone(), &secret, b"").unwrap());
    let (dialed, accepted) = meet(&a, &b);
    let (release, wait) = std::sync::mpsc::channel();
    let slow = Arc::new(Slow(Log::default(), Mutex::new(Some(wait))));
    let (link, _kept) = (dialed.open(Arc::new(Log::default())), accepted.open(slow.clone()));
    let payload = || Payload::from(vec![0; 256 << 10]);
    let (sending, sent) = (link.clone(), Arc::new(AtomicUsize::new(0)));
    let counted = sent.clone();
    let sender = std::thread::spawn(move || {
        while counted.load(Ordering::SeqCst) < 200
            && sending.send_data([0; TAG_BYTES], payload()).is_ok()
        {
            counted.fetch_add(1, Ordering::SeqCst);
        }
    });
    let deadline = Instant::now() + PATIENCE;
    while sent.load(Ordering::SeqCst) < 4 {
        assert!(Instant::now() < deadline, "the queue does not fill");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(100));
    assert!(!sender.is_finished(), "nothing bounds what is queued");
    link.close("enough");
    sender.join().unwrap();
    let sent = sent.load(Ordering::SeqCst);
    release.send(()).unwrap();
    // The queue, the window, and what is about to be written.
    assert!((4..=16).contains(&sent), "{sent}");
    assert_eq!(slow.0.closed(), CloseReason::Peer("enough".into()));
    assert_eq!(slow.0.all().len(), sent + 1);
}
