//! State of runs by `--status`, as a probe, Prometheus and a person ask for it.

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::exposition::values;
use crate::http::{Answer, connect, get, get_with};
use crate::node_processes::{Host, LINE, desk, host_with, join, state, write_secret};
use crate::process::{Desk, finish};

/// Shown in front of the address of a server.
const SHOWN: &str = "the state of the run is at http://";
/// Longest wait for a state.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until a process has shown where its state is.
pub fn address_of(process: &mut Host) -> SocketAddr {
    process.wait_for(SHOWN);
    let text = process.lines.lock().unwrap().clone();
    let (_, rest) = text.split_once(SHOWN).unwrap();
    rest.split_once("/status").unwrap().0.parse().unwrap()
}

/// Asks until the answer is one that is waited for.
fn wait_for(address: SocketAddr, path: &str, is_awaited: impl Fn(&Answer) -> bool) -> Answer {
    let started = Instant::now();
    loop {
        let answer = get(address, path);
        if is_awaited(&answer) {
            return answer;
        }
        assert!(started.elapsed() < PATIENCE, "still {answer:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until so many steps are done.
fn wait_for_step(address: SocketAddr, step: f64) {
    wait_for(address, "/metrics", |answer| values(&answer.body)["potluck_step"] >= step);
}

fn status_of(address: SocketAddr) -> Value {
    let answer = get(address, "/status");
    assert!(answer.head.contains("content-type: application/json"), "{answer:?}");
    serde_json::from_str(&answer.body).unwrap()
}

#[test]
fn status_of_nodes_while_they_train() {
    let desk = desk();
    let line = "train tiny.toml --data text.txt --devices cpu --set parallel.shares=2,2 \
                --set train.sample_tokens=0 --set data.held_out=0 --set train.checkpoint_every=0 \
                --steps 1000000 --out run --status 0";
    let mut first = host_with(&desk, 2, "", line);
    let address = address_of(&mut first);
    let waiting = get(address, "/healthz");
    assert_eq!((waiting.code, &*waiting.body), (200, "waiting for the nodes of the run\n"));
    let mut other =
        Host::started(join(&desk, &first, "", "--devices cpu --status 0 --stay --wait 60"));
    let of_other = address_of(&mut other);
    for address in [address, of_other] {
        wait_for_step(address, 5.0);
        let before = values(&get(address, "/metrics").body)["potluck_step"];
        wait_for_step(address, before + 1.0);
        let health = get(address, "/healthz");
        assert!(health.code == 200 && health.body.contains(" of 1000000"), "{health:?}");
    }
    // The links are looked at twice a second, and their rates measured over five.
    wait_for(address, "/metrics", |answer| {
        let found = values(&answer.body);
        found.get("potluck_link_sent_bytes_per_second 1").is_some_and(|rate| *rate > 0.0)
    });
    let metrics = values(&get(address, "/metrics").body);
    for name in [
        "build_info",
        "loss",
        "learning_rate",
        "tokens_per_second",
        "tokens_total",
        "step_seconds",
        "rank_busy_seconds_total 0",
        "rank_busy_seconds_total 1",
        "link_sent_bytes_total 1",
        "link_received_bytes_total 1",
        "link_round_trip_seconds 1",
        "link_congestion_window_bytes 1",
        "socket_buffer_bytes receive",
    ] {
        let name = format!("potluck_{name}");
        let found = metrics.iter().find(|(of, _)| of.starts_with(&name));
        assert!(found.is_some_and(|(_, value)| *value > 0.0), "{name} is {found:?}");
    }
    for name in ["link_lost_packets_total 1", "link_congestion_events_total 1"] {
        assert!(metrics.contains_key(&format!("potluck_{name}")), "{name}");
    }
    assert!(metrics["potluck_link_heartbeat_age_seconds 1"] < 30.0);
    let status = status_of(address);
    assert_eq!((&status["run"]["name"], &status["phase"]), (&"run".into(), &"training".into()));
    assert!(status["run"]["configuration"].as_str().unwrap().ends_with("tiny.toml"));
    assert_eq!((&status["node"], &status["generation"]), (&0.into(), &1.into()));
    let host = &status["nodes"][0]["host"];
    assert_eq!((status["nodes"].as_array().unwrap().len(), host), (2, &status["nodes"][1]["host"]));
    assert_eq!(status["ranks"].as_array().unwrap().len(), 2);
    assert_eq!(status["links"][0]["node"], 1);
    assert!(status["last_checkpoint"]["step"].is_u64(), "{status}");
    let joined = status_of(of_other);
    assert_eq!((&joined["node"], &joined["steps"]), (&1.into(), &1_000_000.into()));
    assert_eq!(joined["links"][0]["node"], 0);
    assert!(joined["links"][0]["heartbeat_age_s"].as_f64().unwrap() < 30.0, "{joined}");
    crate::process::send_signal(first.child.id(), "TERM");
    first.finish().ended(75);
    // A node that stays is watched between runs too, and counts on.
    wait_for(of_other, "/healthz", |answer| answer.body == waiting.body);
    let between = values(&get(of_other, "/metrics").body);
    assert!(between["potluck_steps_total"] > 5.0, "{between:?}");
    crate::process::send_signal(other.child.id(), "TERM");
    other.finish().ended(75);
}

#[test]
fn status_without_steps_is_unhealthy() {
    let desk = Desk::new();
    let line = "train tiny.toml --data text.txt --devices cpu*2 --set parallel.shares=2,2 \
                --out run --status 0 --set faults.node_timeout_s=0.5 \
                --set faults.device_timeout_s=12";
    let faults = "hang@forward:8/1";
    let child = desk.command(line).env("POTLUCK_FAULT", faults).spawn().unwrap();
    let mut run = Host::started(child);
    let address = address_of(&mut run);
    wait_for(address, "/healthz", |answer| {
        answer.code == 200 && answer.body.starts_with("training: step 7 of 30")
    });
    let late = wait_for(address, "/healthz", |answer| answer.code == 503);
    assert!(late.body.contains(" behind step 7, longer than "), "{late:?}");
    assert!(late.body.contains("0.500 s of silence that a node may have"), "{late:?}");
    assert_eq!(status_of(address)["health"]["healthy"], false);
    run.finish().ended(75);
}

#[test]
fn status_wrong_address_is_refused() {
    let desk = Desk::new();
    write_secret(&desk, "token", "0123456789abcdef");
    write_secret(&desk, "short", "0123");
    desk.write("open", "0123456789abcdef");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap();
    for (flags, why) in [
        ("--status 0.0.0.0:0", "0.0.0.0:0 can be reached from other machines"),
        ("--status :0", "can be reached from other machines"),
        (&format!("--status {taken}"), "cannot listen at 127.0.0.1:"),
        ("--status 0 --status-token-file none", "none: cannot read"),
        ("--status 0 --status-token-file short", "expects a token of 16 to 128"),
        #[cfg(unix)]
        ("--status 0 --status-token-file open", "chmod 600 open"),
    ] {
        let ran = desk.train(&format!("--out run {flags}")).ended(78);
        assert!(ran.line("error: --status").contains(why), "{}", ran.err);
        assert!(!desk.path("run").exists(), "{flags}");
    }
    desk.train("--out run --status-token-file token").ended(2);
    desk.train("--out run --status nowhere").ended(2);
    let line = "--out run --steps 1000000 --status 0.0.0.0:0 --status-token-file token";
    let line = format!("train tiny.toml --data text.txt --devices cpu {line}");
    let mut run = Host::started(desk.command(&line).spawn().unwrap());
    let port = address_of(&mut run).port();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    for lines in ["", "Authorization: Bearer 0123456789abcdeg\r\n"] {
        assert_eq!(get_with(address, "/metrics", lines).code, 401);
    }
    let right = "Authorization: Bearer 0123456789abcdef\r\n";
    assert_eq!(get_with(address, "/metrics", right).code, 200);
    crate::process::send_signal(run.child.id(), "TERM");
    run.finish().ended(75);
}

/// Opens connections that send half a request, slowly or not at all, until told to stop; returns
/// their number.
fn flood(address: SocketAddr, is_over: &AtomicBool) -> usize {
    let mut held: Vec<TcpStream> = Vec::new();
    let mut count = 0;
    while !is_over.load(Ordering::Relaxed) {
        let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_millis(100))
        else {
            continue;
        };
        // What the server has closed in between cannot be written to.
        let _ = stream.write_all([b"", &b"GET /metrics HTTP/1.1\r\nX: "[..]][count % 2]);
        for stream in held.iter_mut().rev().take(8) {
            let _ = stream.write_all(b"x");
        }
        count += 1;
        if held.len() == 500 {
            held.remove(0);
        }
        held.push(stream);
    }
    count
}

#[test]
fn status_flooded_changes_no_bit() {
    let desk = desk();
    let line = LINE.replace("--steps 6", "--steps 1500");
    let line = format!("{line} --set parallel.shares=2,2 --set train.checkpoint_every=500");
    desk.run(&format!("{line} --devices cpu*2 --out alone --quiet")).ok();
    let mut first =
        host_with(&desk, 2, "", &format!("{line} --devices cpu --out watched --status 0"));
    let address = address_of(&mut first);
    let other = join(&desk, &first, "", "--devices cpu");
    let is_over = AtomicBool::new(false);
    let (count, first) = thread::scope(|scope| {
        let flooding = scope.spawn(|| flood(address, &is_over));
        // Who asks in earnest gets an answer meanwhile.
        wait_for_step(address, 20.0);
        drop(connect(address));
        let first = first.finish();
        is_over.store(true, Ordering::Relaxed);
        (flooding.join().unwrap(), first)
    });
    assert!(count > 100, "only {count} connections");
    first.ok();
    finish(other, "the other node").ok();
    assert!(state(&desk, "watched", 1500) == state(&desk, "alone", 1500));
    assert_eq!(desk.losses("watched"), desk.losses("alone"));
}
