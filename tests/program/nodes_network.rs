//! Runs over nodes whose network is bad, or is cut: the same bits, or an end that names who is
//! missing.

use std::net::UdpSocket;
use std::thread;
use std::time::{Duration, Instant};

use crate::node_processes::{
    END_S, Host, LINE, SILENCE_S, desk, goes_on, host_with, join_at, later_port, state,
    tells_silence,
};
use crate::process::{Desk, Ran, finish};
use crate::udp_proxy::{UdpProxy, Way, Weather};

/// Line of a run that is long enough to be disturbed.
fn long_line() -> String {
    format!(
        "{LINE} --out run --steps 100000 --set train.checkpoint_every=2 \
         --set faults.node_timeout_s={SILENCE_S} --log-every 1"
    )
}

fn before(host: &Host, weather: Weather) -> UdpProxy {
    UdpProxy::start(host.address.parse().unwrap(), weather)
}

#[test]
fn bad_network_changes_no_bit() {
    let desk = desk();
    let line = format!("{LINE} --steps 10 --set parallel.shares=2,2");
    desk.run(&format!("{line} --devices cpu*2 --out one")).ok();
    let host = host_with(&desk, 2, "", &format!("{line} --devices cpu --out run"));
    let weather = Weather {
        seed: 7,
        delay: Duration::from_millis(8),
        jitter: Duration::from_millis(4),
        lost: 10,
        doubled: 20,
        bytes_per_s: 2 << 20,
    };
    let proxy = before(&host, weather);
    let other = join_at(&desk, &proxy.address.to_string(), "", "--devices cpu");
    host.finish().ok();
    finish(other, "the other node").ok();
    assert!(state(&desk, "run", 10) == state(&desk, "one", 10), "other bits by a bad network");
    assert_eq!(desk.losses("run"), desk.losses("one"));
    let counts = proxy.counts();
    assert!(counts.sent > 100 && counts.lost > 0, "{counts:?}");
    assert!(counts.doubled > 0 && counts.overtaking > 0, "{counts:?}");
}

/// Cuts directions in the middle of a run of two nodes; returns how both ended, and the seconds
/// until then.
fn cut(desk: &Desk, ways: &[Way]) -> ([Ran; 2], f64) {
    let line = format!("{} --devices cpu --set parallel.shares=2,2", long_line());
    let mut host = host_with(desk, 2, "", &line);
    // So slow that the cut comes before the step at which the bits are compared.
    let weather = Weather { delay: Duration::from_millis(10), ..Weather::default() };
    let proxy = before(&host, weather);
    let other = join_at(desk, &proxy.address.to_string(), "", "--devices cpu");
    host.wait_for("step 5/100000");
    let started = Instant::now();
    proxy.cut(ways, true);
    let first = thread::spawn(move || host.finish());
    let other = finish(other, "the other node");
    let ended = [first.join().unwrap(), other];
    (ended, started.elapsed().as_secs_f64())
}

#[test]
fn cut_any_direction_ends_both_named() {
    let cuts = [(&[Way::There, Way::Back][..]), &[Way::There], &[Way::Back]];
    thread::scope(|scope| {
        for ways in cuts {
            scope.spawn(move || {
                let desk = desk();
                let ([first, other], seconds) = cut(&desk, ways);
                let first = first.ended(75);
                let error = first.line("error:");
                assert!(error.contains("rank 1: node 1 ("), "{ways:?}: {error}");
                let other = other.ended(75);
                let error = other.line("error:");
                // Where the first node still reaches the other one, it tells it of its loss.
                let named = if ways == [Way::There] { "node 1 (" } else { "node 0 (" };
                assert!(error.contains(named), "{ways:?}: {error}");
                assert!(tells_silence(error), "{ways:?}: {error}");
                let is_told = error.contains("works in one direction only: check that UDP passes");
                assert_eq!(is_told, ways == [Way::There], "{ways:?}: {error}");
                assert!(seconds < END_S, "{ways:?}: {seconds:.1} s");
                goes_on(&desk, &first);
            });
        }
    });
}

/// A network that comes back before the longest silence has passed disturbs nothing.
#[test]
fn cut_short_is_survived() {
    let desk = desk();
    let line = format!("{LINE} --set parallel.shares=2,2 --steps 12 --log-every 1");
    desk.run(&format!("{line} --devices cpu*2 --out one")).ok();
    let timeout = "--set faults.node_timeout_s=5";
    let mut host = host_with(&desk, 2, "", &format!("{line} --devices cpu --out run {timeout}"));
    let weather = Weather { delay: Duration::from_millis(5), ..Weather::default() };
    let proxy = before(&host, weather);
    let other = join_at(&desk, &proxy.address.to_string(), "", "--devices cpu");
    host.wait_for("step 2/12");
    proxy.cut(&[Way::There, Way::Back], true);
    thread::sleep(Duration::from_millis(700));
    proxy.cut(&[Way::There, Way::Back], false);
    host.finish().ok();
    finish(other, "the other node").ok();
    assert!(state(&desk, "run", 12) == state(&desk, "one", 12), "other bits after a short cut");
}

/// The second of the nodes that join is seen at an address of its own, where a proxy is: what is
/// cut there is its link to the other one that joined, and not the one to the first node.
#[cfg(target_os = "linux")]
#[test]
fn cut_between_joined_names_the_link() {
    let desk = desk();
    let line = format!("{} --devices cpu --set parallel.shares=2,1,1", long_line());
    let mut host = host_with(&desk, 3, "", &line);
    let one = join_at(&desk, &host.address, "", "--devices cpu");
    host.wait_for("2 of 3 nodes here");
    let port = later_port();
    let front = UdpSocket::bind(("127.0.0.3", port)).unwrap();
    let at = format!("127.0.0.2:{port}");
    let between = UdpProxy::between(front, "127.0.0.3", at.parse().unwrap(), Weather::default());
    let to_first = UdpSocket::bind("127.0.0.1:0").unwrap();
    let first = host.address.parse().unwrap();
    // The other node dials it before the first one's welcome arrives.
    let slow = Weather { delay: Duration::from_millis(25), ..Weather::default() };
    let to_first = UdpProxy::between(to_first, "127.0.0.3", first, slow);
    let line = format!("--devices cpu --listen {at}");
    let two = join_at(&desk, &to_first.address.to_string(), "", &line);
    host.wait_for("step 5/100000");
    assert!(between.counts().sent > 20, "the link is not between the proxies");
    let started = Instant::now();
    between.cut(&[Way::There, Way::Back], true);
    let first = host.finish().ended(75);
    let seconds = started.elapsed().as_secs_f64();
    for error in [&first, &finish(one, "node 1").ended(75), &finish(two, "node 2").ended(75)] {
        let error = error.line("error:");
        for part in ["the link between node ", "node 1 (", "node 2 ("] {
            assert!(error.contains(part), "no '{part}': {error}");
        }
        assert!(tells_silence(error), "{error}");
        assert!(error.contains("is cut, and both are alive"), "{error}");
    }
    assert!(seconds < END_S, "{seconds:.1} s");
}
