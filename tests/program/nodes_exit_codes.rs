//! The exit codes of `train --nodes` and `join`: every row of the table in docs/nodes.md is run.

use std::collections::BTreeMap;
use std::fs;

use crate::node_processes::{
    Host, LINE, SILENCE_S, desk, endless, host_with, join, later_port, write_secret,
};
use crate::process::{Desk, send_signal};

/// Returns the rows of the table by what they are about, with their codes.
pub fn documented() -> BTreeMap<String, i32> {
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/nodes.md")).unwrap();
    let (_, table) = text.split_once("## Exit codes").expect("docs/nodes.md has the table");
    let mut rows = BTreeMap::new();
    for line in table.lines().skip_while(|line| !line.starts_with("|---")).skip(1) {
        let Some(row) = line.strip_prefix("| ") else { break };
        let (code, about) = row.trim_end_matches(" |").split_once(" | ").unwrap();
        rows.insert(about.to_string(), code.parse().unwrap());
    }
    rows
}

/// Row of a first node that is not there for this one.
const NOBODY: &str = "nobody answers or has this code, or the first node's name is not known yet";

/// Ends of processes, by row, with their codes.
#[derive(Default)]
struct Happened(Vec<(&'static str, Option<i32>)>);

impl Happened {
    fn take(&mut self, about: &'static str, code: Option<i32>) {
        self.0.push((about, code));
    }

    /// Ends a run of two nodes, and takes both codes.
    fn take_both(&mut self, about: &'static str, host: Host, other: Host) {
        self.take(about, host.finish().code());
        self.take(about, other.finish().code());
    }
}

fn first(desk: &Desk, nodes: usize, faults: &str, more: &str) -> Host {
    let line = format!(
        "{LINE} --devices cpu --batch 4 --set parallel.shares=2,2 \
         --set faults.node_timeout_s={SILENCE_S} {more}"
    );
    host_with(desk, nodes, faults, &line)
}

fn join_code(desk: &Desk, address: &str, more: &str) -> Option<i32> {
    desk.run(&format!("join {address} --secret-file code --devices cpu {more}")).code()
}

#[test]
fn exit_codes_are_those_of_the_table() {
    let desk = desk();
    let mut happened = Happened::default();
    let nobody = format!("127.0.0.1:{}", later_port());
    write_secret(&desk, "other", &desk.run("secret").ok().out);

    let about = "the run is done";
    let host = first(&desk, 2, "", "--out done");
    let other = Host::started(join(&desk, &host, "", "--devices cpu"));
    happened.take_both(about, host, other);

    let about = "a command line that does not parse";
    happened.take(about, desk.run("join").code());

    let about = "a defect of potluck";
    let host = first(&desk, 2, "panic@verdict:3", "--out defect");
    let other = Host::started(join(&desk, &host, "", "--devices cpu"));
    happened.take_both(about, host, other);

    let about = NOBODY;
    happened.take(about, join_code(&desk, &nobody, ""));
    happened.take(about, join_code(&desk, "no-such-host.invalid", ""));

    let about = "the others are not here after `--wait`";
    let host = first(&desk, 3, "", "--out few --wait 3");
    let other = Host::started(join(&desk, &host, "", "--devices cpu"));
    happened.take_both(about, host, other);

    let about = "the first node goes before the start";
    let mut host = first(&desk, 3, "", "--out gone");
    let other = Host::started(join(&desk, &host, "", "--devices cpu"));
    host.wait_for("2 of 3 nodes here");
    send_signal(host.child.id(), "KILL");
    host.finish();
    happened.take(about, other.finish().code());

    let about = "the run is full or has started, or another one is there";
    let mut host = first(&desk, 2, "", "--out full --steps 100000 --log-every 1");
    happened.take(about, join_code(&desk, &host.address, "--run another"));
    let other = Host::started(join(&desk, &host, "", "--devices cpu"));
    host.wait_for("step 2/");
    happened.take(about, join_code(&desk, &host.address, ""));

    let line = format!("join {} --secret-file other --devices cpu", host.address);
    happened.take(NOBODY, desk.run(&line).code());
    let about = "a port that is taken";
    let line = format!("train tiny.toml --nodes 2 --listen {}", host.address);
    happened.take(about, desk.run(&format!("{line} --secret-file code")).code());

    let about = "SIGTERM or SIGHUP on any node, saved or not";
    send_signal(other.child.id(), "TERM");
    happened.take_both(about, host, other);

    let about = "SIGUSR1 on any node, if the first one has `--on-usr1 stop`";
    let (host, other) = endless(&desk, "--out warned --on-usr1 stop", "", "");
    send_signal(other.child.id(), "USR1");
    happened.take_both(about, host, other);

    let about = "Ctrl-C on any node";
    let (host, other) = endless(&desk, "--out stopped", "", "");
    send_signal(host.child.id(), "INT");
    happened.take_both(about, host, other);

    let about = "a node or a link is lost in the run";
    let (host, other) = endless(&desk, "--out lost", "", "");
    send_signal(host.child.id(), "KILL");
    host.finish();
    happened.take(about, other.finish().code());

    let about = "an address, a device, a key or a number of a node that cannot be";
    happened.take(about, join_code(&desk, "127.0.0.1:port", ""));
    happened.take(about, desk.run(&format!("join {nobody} --devices warp9")).code());
    happened.take(about, join_code(&desk, &nobody, "--set optim.lr=1"));
    let mut host = first(&desk, 2, "", "--out numbers");
    happened.take(about, join_code(&desk, &host.address, "--node 2"));
    host.wait_for("turned away");
    send_signal(host.child.id(), "KILL");
    host.finish();

    let about = "a secret that cannot be read, or none without a terminal";
    happened.take(about, desk.run(&format!("join {nobody} --secret-file nothing")).code());
    happened.take(about, desk.run(&format!("join {nobody}")).code());
    happened.take(about, desk.run("train tiny.toml --nodes 2 --listen 127.0.0.1:0").code());

    let documented = documented();
    for (about, code) in &happened.0 {
        assert_eq!(documented.get(*about).copied(), *code, "{about}");
    }
    for about in documented.keys() {
        assert!(happened.0.iter().any(|(run, _)| run == about), "not run: {about}");
    }
}
