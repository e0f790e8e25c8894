//! Nodes that end or stop between their greeting and the start of the run. A place that is free
//! again before the start is waited for: the run begins once somebody else has taken it.

use std::process::Child;

use crate::node_processes::{Host, LINE, SILENCE_S, desk, host_with, join, state, tells_silence};
use crate::process::{Desk, finish, send_signal};

/// Starts the first of some nodes, each with one CPU device.
fn first(desk: &Desk, nodes: usize) -> Host {
    let shares = vec!["1"; nodes].join(",");
    let line = format!(
        "{LINE} --devices cpu --out run --set parallel.shares={shares} --batch {nodes} \
         --set faults.node_timeout_s={SILENCE_S}"
    );
    desk.run(&format!("{line} --devices cpu*{nodes} --out one")).ok();
    host_with(desk, nodes, "", &line)
}

fn joiner(desk: &Desk, host: &Host, faults: &str) -> Child {
    join(desk, host, faults, "--devices cpu")
}

/// Lets a node that was stopped go on, and takes its end.
fn end_of(one: Child, fault: &str) {
    if fault.starts_with("kill") {
        assert_eq!(finish(one, "a node that was killed").code(), None);
        return;
    }
    send_signal(one.id(), "CONT");
    let ended = finish(one, "a node that was stopped").ended(75);
    let error = ended.line("error:");
    assert!(
        error.contains("the first node, ") && error.contains("lost before the start"),
        "{error}"
    );
    assert!(tells_silence(error), "{error}");
    ended.line("this process stood still for ");
}

#[test]
fn place_freed_before_start_is_taken() {
    std::thread::scope(|scope| {
        for fault in ["kill@join:0", "stop@join:0", "kill@roster:0", "stop@roster:0"] {
            scope.spawn(move || {
                let desk = desk();
                let mut host = first(&desk, 3);
                let stays = joiner(&desk, &host, "");
                host.wait_for("2 of 3 nodes here");
                let goes = joiner(&desk, &host, fault);
                host.wait_for(" left: ");
                let comes = joiner(&desk, &host, "");
                let ran = host.finish().ok();
                let left = ran.err.lines().find(|line| line.contains(" left: ")).unwrap();
                assert!(tells_silence(left), "{fault}: {left}");
                assert!(left.ends_with("; its place is free again"), "{fault}: {left}");
                for one in [stays, comes] {
                    finish(one, "a node that lives").ok();
                }
                end_of(goes, fault);
                assert!(state(&desk, "run", 6) == state(&desk, "one", 6), "{fault}: other bits");
            });
        }
    });
}

#[test]
fn waiting_nodes_end_with_first_one() {
    for signal in ["KILL", "STOP"] {
        let desk = desk();
        let mut host = first(&desk, 3);
        let waits = joiner(&desk, &host, "");
        host.wait_for("2 of 3 nodes here");
        send_signal(host.child.id(), signal);
        let ended = finish(waits, "a node that waits").ended(75);
        let error = ended.line("error:");
        assert!(error.contains("is lost before the start: "), "{error}");
        assert!(tells_silence(error), "{error}");
        send_signal(host.child.id(), "KILL");
        let _ = host.finish();
    }
}

/// Nothing of a run that has not begun stays, and the others know at once that nobody comes.
#[test]
fn signal_before_start_leaves_nothing() {
    for (signal, code, said) in [("INT", 130, "interrupted"), ("TERM", 75, "terminated (SIGTERM)")]
    {
        let desk = desk();
        let mut host = host_with(&desk, 3, "", &format!("{LINE} --devices cpu"));
        assert!(desk.path("runs/0001").is_dir());
        let goes = joiner(&desk, &host, "");
        host.wait_for("2 of 3 nodes here");
        send_signal(goes.id(), signal);
        let ended = finish(goes, "a node that waits").ended(code);
        ended.line(&format!("{said} before the run began"));
        host.wait_for(&format!(" left: it left: it was {said}; its place is free again"));
        let waits = joiner(&desk, &host, "");
        host.wait_for_times("waiting for 1\n", 2);
        send_signal(host.child.id(), signal);
        let ended = host.finish().ended(code);
        assert_eq!(ended.lines("error:").len(), 0, "{}", ended.err);
        ended.line(&format!("{said} before the run began; nothing was saved"));
        assert!(!desk.path("runs").exists(), "{:?}", desk.files());
        let error = finish(waits, "another node that waits").ended(75);
        let expected =
            format!("error: the first node ended the run before it began: it was {said}");
        assert_eq!(error.line("error:"), expected);
    }
}

#[test]
fn start_failed_leaves_no_directory() {
    let desk = desk();
    let line = format!("{LINE} --devices cpu --nodes 2 --secret-file code --listen");
    // No address of this machine (RFC 5737).
    desk.run(&format!("{line} 192.0.2.1:7717")).ended(78);
    assert!(!desk.path("runs").exists(), "{:?}", desk.files());
}
