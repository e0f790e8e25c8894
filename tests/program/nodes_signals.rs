//! Signals to nodes of a run, as launchers and job managers send them: more than once, with SIGCONT
//! between them, and to nodes that cannot answer.

use std::thread;
use std::time::{Duration, Instant};

use crate::node_processes::{desk, endless};
use crate::process::send_signal;

#[test]
fn sigterm_repeated_ends_nodes_once() {
    let desk = desk();
    let (host, other) = endless(&desk, "--out run", "", "");
    // As `srun -K` does, and scancel in the other order.
    for _ in 0..5 {
        for signal in ["TERM", "CONT", "TERM"] {
            for process in [other.child.id(), host.child.id()] {
                // One that has ended is still to be waited for.
                send_signal(process, signal);
            }
        }
    }
    let first = host.finish().ended(75);
    other.finish().ended(75).line("terminated (SIGTERM); the run is saved on the first node");
    assert_eq!(first.lines("terminated (SIGTERM); the run is saved: ").len(), 1, "{}", first.err);
    let saved = desk.steps("run").len() as u64;
    assert_eq!(desk.manifest("run", saved)["meta"]["step"], saved);
}

#[test]
fn sigusr1_saves_and_goes_on() {
    let desk = desk();
    let (mut host, other) = endless(&desk, "--out run", "", "");
    // Job managers send it to all nodes, which is one request.
    for times in 1..=2 {
        send_signal(other.child.id(), "USR1");
        send_signal(host.child.id(), "USR1");
        host.wait_for_times(" on SIGUSR1; training continues\n", times);
        thread::sleep(Duration::from_millis(2200));
    }
    let printed = host.lines.lock().unwrap().clone();
    let (_, asked) = printed.rsplit_once("saved at step ").unwrap();
    let step: u64 = asked.split_once(' ').unwrap().0.parse().unwrap();
    assert_eq!(desk.manifest("run", step)["meta"]["step"], step);
    host.wait_for(&format!("step {}/", step + 3));
    send_signal(other.child.id(), "TERM");
    let ended = host.finish().ended(75);
    assert_eq!(ended.lines("saved at step ").len(), 2, "{}", ended.err);
    other.finish().ended(75);
}

#[test]
fn sigusr1_stop_ends_staying_nodes() {
    let desk = desk();
    let (host, other) = endless(&desk, "--out run --on-usr1 stop", "", "--stay --wait 60");
    send_signal(other.child.id(), "USR1");
    let said = "stopped by the job manager (SIGUSR1); the run is saved";
    host.finish().ended(75).line(said);
    let ended = other.finish().ended(75);
    ended.line(said);
    assert!(!ended.err.contains("joining the next run"), "{}", ended.err);
}

#[test]
fn sigterm_hung_node_ends_in_time() {
    let desk = desk();
    let faults = "sigterm@forward:3/1,hang@backward:3/1";
    let (host, other) = endless(&desk, "--out run", faults, "--term-timeout 1");
    let began = Instant::now();
    let error = other.finish().ended(75).line("error: ").to_string();
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    let said = "terminated (SIGTERM), and the run was not saved within 1 seconds (--term-timeout)";
    assert!(error.contains(said), "{error}");
    let ended = host.finish().ended(75);
    assert!(ended.line("error: ").contains("the last checkpoint is run/checkpoints/step-00000000"));
}
