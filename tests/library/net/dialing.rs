//! Dials that succeed and fail, and their sentences.

use potluck_net::{HELLO_MAX, NetError};

use super::*;

#[test]
fn greetings_come_before_acceptance() {
    let secret = secret();
    let (a, b) = (endpoint(&secret, &[7; HELLO_MAX]), endpoint(&secret, b""));
    let (dialed, accepted) = meet(&a, &b);
    assert_eq!((dialed.hello(), accepted.hello()), (&b""[..], &[7; HELLO_MAX][..]));
    assert_eq!((dialed.address(), accepted.address()), (b.local_addr(), a.local_addr()));
}

#[test]
fn code_of_other_gets_no_answer() {
    let (a, b) = (endpoint(&secret(), b"a"), endpoint(&secret(), b"b"));
    let (address, after) = (b.local_addr(), Duration::from_millis(200));
    for _ in 0..3 {
        let error = a.dial(address, after).unwrap_err();
        assert_eq!(error, NetError::RpcError { address, after });
        assert!(
            error.to_string().contains("does not answer those who have another one"),
            "{error}"
        );
    }
    let refusals = b.refusals();
    // Strangers count once in a while, however many packets they send.
    assert_eq!((b.refused_count(), refusals.len()), (1, 1), "{refusals:?}");
    assert_eq!(refusals[0].address, a.local_addr());
    let why = "it has another code than this node, or is a stranger, and gets no answer";
    assert_eq!(refusals[0].why, why);
    assert!(b.accepted().try_recv().unwrap().is_none());
}

#[test]
fn silence_names_address_and_udp() {
    let silent = std::net::UdpSocket::bind(any_port()).unwrap();
    let address = silent.local_addr().unwrap();
    let started = Instant::now();
    let after = Duration::from_millis(200);
    let error = endpoint(&secret(), b"").dial(address, after).unwrap_err();
    assert!(started.elapsed() < PATIENCE);
    assert_eq!(error, NetError::RpcError { address, after });
    let text = error.to_string();
    assert!(text.contains(&address.to_string()) && text.contains("UDP"), "{text}");
}

#[test]
fn port_taken_is_named() {
    let secret = secret();
    let holder = endpoint(&secret, b"");
    let listen = holder.local_addr();
    let again = || Endpoint::bind(EndpointOptions { listen, ..options() }, &secret, b"");
    let error = again().err().unwrap();
    assert_eq!(error, NetError::PortTaken(listen));
    assert!(error.to_string().contains(&format!("UDP port {}", listen.port())), "{error}");
    drop(holder);
    again().expect("it is free");
}

#[test]
fn peer_refused_gets_the_sentence() {
    let secret = secret();
    let (a, b) = (endpoint(&secret, b""), endpoint(&secret, b""));
    let (dialed, accepted) = meet(&a, &b);
    let log = Arc::new(Log::default());
    let link = dialed.open(log.clone());
    accepted.refuse("this run is of 3 nodes, and all are here");
    let why = CloseReason::Refused("this run is of 3 nodes, and all are here".into());
    assert_eq!(log.closed(), why);
    assert_eq!(link.send_control(vec![1]).unwrap_err().0, why.to_string());
    // One that is forgotten is refused as well.
    let (dialed, accepted) = meet(&a, &b);
    let log = Arc::new(Log::default());
    let _link = dialed.open(log.clone());
    drop(accepted);
    assert!(matches!(log.closed(), CloseReason::Refused(_)));
}

#[test]
fn links_are_bounded_on_both_sides() {
    let secret = secret();
    let one = EndpointOptions { links_max: 1, ..options() };
    let [a, b] = [(); 2].map(|()| Endpoint::bind(one.clone(), &secret, b"").unwrap());
    let c = endpoint(&secret, b"");
    let [(link, log), (other, _)] = linked(&a, &b);
    assert_eq!(a.dial(c.local_addr(), PATIENCE).unwrap_err(), NetError::LinksFull { max: 1 });
    match c.dial(b.local_addr(), PATIENCE).unwrap_err() {
        NetError::Refused { why, .. } => assert!(why.contains("all 1 links"), "{why}"),
        other => panic!("{other}"),
    }
    other.close("over");
    log.closed();
    drop(link);
    let deadline = Instant::now() + PATIENCE;
    while let Err(error) = c.dial(b.local_addr(), PATIENCE) {
        assert!(Instant::now() < deadline, "{error}");
    }
}

#[test]
fn dial_to_other_address_kind_fails() {
    let a = endpoint(&secret(), b"");
    let address = "[::1]:9".parse().unwrap();
    let error = a.dial(address, PATIENCE).unwrap_err().to_string();
    assert!(error.contains("[::1]:9") && error.contains("IPv4 and IPv6"), "{error}");
}

#[test]
fn hello_too_long_is_refused() {
    let error = Endpoint::bind(options(), &secret(), &[0; HELLO_MAX + 1]).err().unwrap();
    assert_eq!(error, NetError::HelloTooLong { bytes: HELLO_MAX + 1 });
}
