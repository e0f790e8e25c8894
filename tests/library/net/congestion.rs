//! Congestion control of links that lose packets.

use potluck_net::{Congestion, Payload};

use super::*;
use crate::udp_proxy::{UdpProxy, Weather};

/// Seconds of 4 MiB from one endpoint to another, over a network of 20 ms there and back that loses
/// one packet of 100.
fn seconds(congestion: Congestion) -> f64 {
    const PAYLOADS: usize = 4;
    let secret = secret();
    // Everything has arrived when they close, and the network is gone.
    let flush_timeout = Duration::from_millis(50);
    let options = EndpointOptions { congestion, flush_timeout, ..EndpointOptions::new(any_port()) };
    let [a, b] = [(); 2].map(|()| Endpoint::bind(options.clone(), &secret, b"").unwrap());
    let weather =
        Weather { seed: 1, delay: Duration::from_millis(10), lost: 10, ..Weather::default() };
    let proxy = UdpProxy::start(b.local_addr(), weather);
    let dialed = a.dial(proxy.address, PATIENCE).expect("it accepts");
    let accepted = b.accepted().recv(Some(Instant::now() + PATIENCE)).expect("it was dialed");
    let (sent, arrived) = (Arc::new(Log::default()), Arc::new(Log::default()));
    let link = dialed.open(sent);
    let _kept = accepted.open(arrived.clone());
    let payload = Payload::from(vec![1; 1 << 20]);
    let began = Instant::now();
    for _ in 0..PAYLOADS {
        link.send_data([7; TAG_BYTES], payload.clone()).expect("it is open");
    }
    arrived.wait(|all| all.len() == PAYLOADS);
    began.elapsed().as_secs_f64()
}

#[test]
fn bbr_is_faster_where_packets_are_lost() {
    // The faster of two, because other tests run beside this one.
    let fastest = |congestion| seconds(congestion).min(seconds(congestion));
    let [cubic, bbr] = [Congestion::Cubic, Congestion::Bbr].map(fastest);
    // Five to nine times as fast on an idle machine.
    assert!(bbr < 0.6 * cubic, "BBR {bbr} s, CUBIC {cubic} s");
}

#[test]
fn names_are_those_of_the_controllers() {
    let parsed = ["cubic", "bbr", "reno"].map(str::parse::<Congestion>);
    let why = "cubic and bbr are possible".to_string();
    assert_eq!(parsed, [Ok(Congestion::Cubic), Ok(Congestion::Bbr), Err(why)]);
    assert_eq!(Congestion::default(), Congestion::Cubic);
}
