//! Nodes that come before there is anything to join, in another order than before, or to another
//! run; and a first node for which nobody comes.

use std::process::Child;
use std::time::{Duration, Instant};

use crate::node_processes::{Host, LINE, desk, host_with, join, later_port, state};
use crate::process::{Desk, finish, send_signal, skip};

fn host_at(desk: &Desk, address: &str, nodes: u32, more: &str) -> Host {
    let line = format!(
        "{LINE} --nodes {nodes} --listen {address} --secret-file code --devices cpu \
         --set faults.node_timeout_s=3 {more}"
    );
    Host::of(desk.command(&line).spawn().unwrap())
}

fn patient(desk: &Desk, address: &str) -> Host {
    let line = format!("join {address} --secret-file code --devices cpu --wait 120");
    Host::started(desk.command(&line).spawn().unwrap())
}

#[test]
fn join_unresolved_name_is_awaited() {
    let desk = desk();
    let began = Instant::now();
    let ran = desk.run("join no-such-host.invalid:7717 --secret-file code --devices cpu --wait 3");
    let ran = ran.ended(75);
    assert!(began.elapsed() >= Duration::from_secs(3), "{:?}", began.elapsed());
    let shown = ran.line("the first node is not found at no-such-host.invalid:7717: ");
    assert!(shown.ends_with("; trying for 3 more seconds"), "{shown}");
}

/// It is too late for the run that is there, is not there when that one ends, and takes part in
/// the next one.
#[test]
fn join_too_late_takes_next_run() {
    let desk = desk();
    let address = format!("127.0.0.1:{}", later_port());
    let shares = "--set parallel.shares=2,2";
    let long = format!("--steps 100000 --log-every 1 --out before {shares}");
    let mut before = host_at(&desk, &address, 2, &long);
    let other = join(&desk, &before, "", "--devices cpu");
    before.wait_for("step 2/");
    let mut late = patient(&desk, &address);
    late.wait_for("comes too late");
    for process in [before.child.id(), other.id()] {
        send_signal(process, "KILL");
    }
    before.finish();
    finish(other, "the other node");
    let after = host_at(&desk, &address, 2, &format!("--out after {shares}"));
    after.finish().ok();
    late.finish().ok();
}

#[test]
fn join_first_lost_takes_successor() {
    let desk = desk();
    let address = format!("127.0.0.1:{}", later_port());
    let mut first = host_at(&desk, &address, 3, "--out first");
    let mut waits = patient(&desk, &address);
    // Also there, so that the first node is not lost on the way to its first word.
    for node in [&mut first, &mut waits] {
        node.wait_for("2 of 3 nodes here");
    }
    send_signal(first.child.id(), "KILL");
    first.finish();
    waits.wait_for("is lost before the start");
    let second = host_at(&desk, &address, 2, "--out second --set parallel.shares=2,2");
    second.finish().ok();
    waits.finish().ok();
}

#[test]
fn first_node_wait_over_names_who_came() {
    let desk = desk();
    let host = host_with(&desk, 3, "", &format!("{LINE} --devices cpu --wait 3 --out run"));
    let other = join(&desk, &host, "", "--devices cpu");
    let ran = host.finish().ended(75);
    let error = ran.line("error:");
    assert!(error.contains("only 2 of 3 nodes were here after 3 seconds: "), "{error}");
    assert_eq!(error.matches("cpu (").count(), 2, "{error}");
    let told = finish(other, "the node that came").ended(75);
    assert!(told.line("error:").contains("only 2 of 3 nodes were here"), "{}", told.err);
    assert!(!desk.path("run").exists(), "{:?}", desk.files());
}

/// Returns the numbers of the nodes of the ranks in the table that a node has printed.
fn nodes_of_ranks(printed: &str) -> Vec<u32> {
    let table = printed.lines().skip_while(|line| !line.starts_with("rank  node")).skip(1);
    let rows = table.map(|line| line.split_whitespace().take(2).collect::<Vec<_>>());
    let numbers = rows.map_while(|row| {
        row.first()?.parse::<u32>().ok()?;
        row.get(1)?.parse().ok()
    });
    numbers.collect()
}

/// Joins with these devices, after `count` others.
fn join_next(desk: &Desk, host: &mut Host, count: u32, more: &str) -> Child {
    host.wait_for(&format!("{count} of 3 nodes here"));
    join(desk, host, "", more)
}

#[test]
fn ranks_reordered_nodes_are_kept() {
    let desk = desk();
    let line = format!("{LINE} --set parallel.shares=1,1,1,1");
    desk.run(&format!("{line} --devices cpu*4 --steps 12 --out one")).ok();
    let mut host = host_with(&desk, 3, "", &format!("{line} --devices cpu --out run"));
    let single = join_next(&desk, &mut host, 1, "--devices cpu");
    let double = join_next(&desk, &mut host, 2, "--devices cpu*2");
    let ran = host.finish().ok();
    assert_eq!(nodes_of_ranks(&ran.err), [0, 1, 2, 2]);
    for node in [single, double] {
        finish(node, "a node").ok();
    }
    let line = "train --resume run --steps 12";
    let mut host = host_with(&desk, 3, "", line);
    let invitation = host.lines.lock().unwrap().clone();
    let run = invitation.split_once(" --run ").unwrap().1.split_whitespace().next().unwrap();
    let wrong = format!("join {} --secret-file code --devices cpu --run another", host.address);
    let refused = desk.run(&wrong).ended(75);
    assert!(refused.line("error:").contains("asks for the run another"), "{}", refused.err);
    let double = join_next(&desk, &mut host, 1, &format!("--devices cpu*2 --run {run}"));
    let single = join_next(&desk, &mut host, 2, "--devices cpu");
    let ran = host.finish().ok();
    assert_eq!(nodes_of_ranks(&ran.err), [0, 1, 2, 2], "{}", ran.err);
    assert!(!ran.err.contains("measured again"), "{}", ran.err);
    for node in [single, double] {
        finish(node, "a node").ok();
    }
    assert!(state(&desk, "run", 12) == state(&desk, "one", 12), "other bits");
}

#[test]
fn join_node_number_is_as_asked() {
    let desk = desk();
    let line = format!("{LINE} --devices cpu --set parallel.shares=1,1,1,1 --out run");
    let mut host = host_with(&desk, 3, "", &line);
    let second = join_next(&desk, &mut host, 1, "--devices cpu*2 --node 2");
    host.wait_for("2 of 3 nodes here");
    let same = format!("join {} --secret-file code --devices cpu --node 2", host.address);
    let refused = desk.run(&same).ended(75);
    let error = refused.line("error:");
    assert!(error.contains("asks to be node 2, which ") && error.contains(" is: give"), "{error}");
    let first = join_next(&desk, &mut host, 2, "--devices cpu --node 1");
    let ran = host.finish().ok();
    assert_eq!(nodes_of_ranks(&ran.err), [0, 1, 2, 2], "{}", ran.err);
    for node in [first, second] {
        finish(node, "a node").ok();
    }
}

/// The first node names the addresses that it is told, and so does a joined one, of which one is
/// that of nobody.
#[test]
fn advertise_addresses_are_told() {
    let desk = desk();
    let line = format!(
        "{LINE} --devices cpu --set parallel.shares=1,1,2 --out run \
         --advertise 127.0.0.1,10.99.0.1:9"
    );
    let mut host = host_with(&desk, 3, "", &line);
    host.wait_for("potluck join 10.99.0.1:9 ");
    let port = host.address.strip_prefix("127.0.0.1:").unwrap();
    assert_eq!(host.lines.lock().unwrap().matches(&format!(":{port}")).count(), 1);
    let second = join_next(&desk, &mut host, 1, "--devices cpu");
    let third = join_next(&desk, &mut host, 2, "--devices cpu --advertise [::1]:9,127.0.0.1");
    host.finish().ok();
    for node in [second, third] {
        finish(node, "a node").ok();
    }
    let join = "join 127.0.0.1:9 --secret-file code --devices cpu";
    let many = ["127.0.0.1"; 9].join(",");
    let ran = desk.run(&format!("{join} --advertise {many}")).ended(78);
    assert!(ran.line("error:").contains("it has 9 addresses, of at most 8"), "{}", ran.err);
    desk.run(&format!("{join} --advertise 0.0.0.0")).ended(2);
    let ran = desk.run(&format!("{LINE} --devices cpu --out one --advertise 127.0.0.1")).ended(78);
    assert!(ran.line("error:").contains("--nodes N"), "{}", ran.err);
}

#[test]
fn congestion_is_chosen_by_each_node() {
    let desk = desk();
    let shares = "--set parallel.shares=2,2";
    let line = format!("{LINE} --devices cpu --out run {shares} --congestion bbr");
    let host = host_with(&desk, 2, "", &line);
    let other = join(&desk, &host, "", "--devices cpu --congestion cubic");
    host.finish().ok();
    finish(other, "the other node").ok();
    desk.run(&format!("{LINE} --devices cpu*2 --out one {shares}")).ok();
    assert!(state(&desk, "run", 6) == state(&desk, "one", 6), "other bits");
    let ran = desk.run(&format!("{LINE} --devices cpu --out alone --congestion bbr")).ended(78);
    assert!(ran.line("error:").contains("--congestion, --wait"), "{}", ran.err);
    let ran = desk.run("join 127.0.0.1:9 --secret-file code --congestion reno").ended(2);
    assert!(ran.err.contains("cubic and bbr are possible"), "{}", ran.err);
    let ran = desk.run("bench collectives --tiny --congestion bbr").ended(78);
    assert!(ran.line("error:").contains("need --nodes N"), "{}", ran.err);
}

#[test]
fn nodes_meet_over_ipv6() {
    if std::net::UdpSocket::bind("[::1]:0").is_err() {
        return skip("this machine has no IPv6");
    }
    let desk = desk();
    let shares = "--set parallel.shares=2,2";
    let host = host_at(&desk, "[::1]:0", 2, &format!("--out run {shares}"));
    assert!(host.address.starts_with("[::1]:"), "{}", host.address);
    let other = join(&desk, &host, "", "--devices cpu");
    host.finish().ok();
    finish(other, "the other node").ok();
    desk.run(&format!("{LINE} --devices cpu*2 --out one {shares}")).ok();
    assert!(state(&desk, "run", 6) == state(&desk, "one", 6), "other bits");
}
