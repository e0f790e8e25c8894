//! Runs over nodes in network namespaces of their own, which a test makes where the system lets it:
//! nodes have different addresses, and links go down as cables do.

use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::node_processes::{END_S, Host, LINE, SILENCE_S, desk, goes_on, state, tells_silence};
use crate::process::{Desk, finish, skip};

/// Namespaces of nodes on one bridge, which is in that of the first one. Dropped, they end.
struct Machines(Vec<Child>);

impl Drop for Machines {
    fn drop(&mut self) {
        for holder in &mut self.0 {
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}

/// Returns the command that enters the namespaces of a process.
fn enter(holder: &Child) -> Command {
    let mut command = Command::new("nsenter");
    let id = holder.id().to_string();
    command.args(["-t", &id, "-U", "-n", "--preserve-credentials", "--"]);
    command
}

/// Starts a process that keeps new namespaces, and waits until they are there.
fn keep(mut command: Command, what: &[&str]) -> Result<Child, String> {
    // The word is printed in the new namespace.
    command.args(what).args(["sh", "-c", "echo here; exec sleep 60"]).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::null()).spawn().map_err(|why| why.to_string())?;
    let mut word = [0; 5];
    let printed = child.stdout.take().map(|mut out| std::io::Read::read_exact(&mut out, &mut word));
    match printed {
        Some(Ok(())) => Ok(child),
        _ => {
            let _ = child.wait();
            Err("no network namespaces for users".into())
        }
    }
}

impl Machines {
    /// Creates so many machines; machine `n` is at 10.77.0.(n + 1).
    fn start(count: usize) -> Result<Self, String> {
        let mut machines = Self(vec![keep(Command::new("unshare"), &["-Urn"])?]);
        machines.ip(0, "link set lo up")?;
        machines.ip(0, "link add bridge type bridge")?;
        machines.ip(0, "addr add 10.77.0.1/24 dev bridge")?;
        machines.ip(0, "link set bridge up")?;
        for number in 1..count {
            let holder = keep(enter(&machines.0[0]), &["unshare", "-n"])?;
            let id = holder.id();
            machines.0.push(holder);
            machines.ip(0, &format!("link add to{number} type veth peer name cable netns {id}"))?;
            machines.ip(0, &format!("link set to{number} master bridge"))?;
            machines.ip(0, &format!("link set to{number} up"))?;
            let address = number + 1;
            machines.ip(number, &format!("addr add 10.77.0.{address}/24 dev cable"))?;
            machines.ip(number, "link set cable up")?;
        }
        Ok(machines)
    }

    fn ip(&self, machine: usize, line: &str) -> Result<(), String> {
        self.run(machine, &format!("ip {line}"))
    }

    fn run(&self, machine: usize, line: &str) -> Result<(), String> {
        let output = enter(&self.0[machine]).args(line.split(' ')).output();
        let Output { status, stderr, .. } = output.map_err(|why| format!("{line}: {why}"))?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("{line}: {}", String::from_utf8_lossy(&stderr).trim()))
        }
    }

    /// Limits the rate of the cable of machine 1 in both directions.
    fn limit(&self, rate: &str) -> Result<(), String> {
        let limit = format!("root tbf rate {rate} burst 32kbit latency 400ms");
        self.run(0, &format!("tc qdisc add dev to1 {limit}"))?;
        self.run(1, &format!("tc qdisc add dev cable {limit}"))
    }

    /// Starts the program on a machine.
    fn spawn(&self, machine: usize, desk: &Desk, line: &str) -> Child {
        let program = desk.command(line);
        let mut command = enter(&self.0[machine]);
        command.arg(program.get_program()).args(program.get_args());
        command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.env("POTLUCK_FAULT", "").current_dir(desk.path(""));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    fn host(&self, desk: &Desk, line: &str) -> Host {
        let line = format!("{line} --nodes {} --secret-file code", self.0.len());
        Host::of(self.spawn(0, desk, &line))
    }

    /// Joins with the line that the first node has printed.
    fn join(&self, machine: usize, desk: &Desk, host: &Host) -> Child {
        let line = format!("join {} --secret-file code --devices cpu", host.address);
        self.spawn(machine, desk, &line)
    }
}

#[test]
fn machines_join_by_printed_line() {
    let machines = match Machines::start(3) {
        Ok(machines) => machines,
        Err(why) => return skip(&why),
    };
    let desk = desk();
    let line = format!("{LINE} --set parallel.shares=2,1,1");
    desk.run(&format!("{line} --devices cpu*3 --out one")).ok();
    let mut host = machines.host(&desk, &format!("{line} --devices cpu --out run"));
    assert_eq!(host.address, "10.77.0.1:7717");
    let one = machines.join(1, &desk, &host);
    host.wait_for("2 of 3 nodes here");
    let two = machines.join(2, &desk, &host);
    host.finish().ok();
    for child in [one, two] {
        finish(child, "a node that joined").ok();
    }
    assert!(state(&desk, "run", 6) == state(&desk, "one", 6), "other bits between machines");
}

/// The parameters of a step take a third of a second over this link, activations of a pipeline two
/// round trips of some 30 ms or more, and the samples of a step milliseconds.
#[test]
fn slow_link_is_left_out_with_figures() {
    let machines = match Machines::start(2).and_then(|machines| {
        machines.limit("20mbit")?;
        Ok(machines)
    }) {
        Ok(machines) => machines,
        Err(why) => return skip(&why),
    };
    let desk = desk();
    let line = format!("{LINE} --out run --set model.width=128");
    let host = machines.host(&desk, &line);
    let other = machines.join(1, &desk, &host);
    let ran = host.finish().ok();
    finish(other, "the node that joined").ok();
    let figure = |before: &str, after: &str| -> f64 {
        let (_, rest) = ran.err.split_once(before).unwrap_or_else(|| panic!("{}", ran.err));
        let word = rest.split_once(after).unwrap().0.split(' ').next_back().unwrap();
        word.replace(',', "").parse().unwrap()
    };
    let rate = figure("links, with their round trips: ", " MB/s");
    // A busy machine finds less than there is, and none finds more.
    assert!((0.2..2.6).contains(&rate), "20 Mbit/s are 2.5 MB/s: {rate}");
    let with = figure("is left out: with it a step would take ", " ms, without it ");
    let without = figure(" ms, without it ", " ms");
    assert!(with > 60.0 && without < with / 2.0, "{with} and {without} ms: {}", ran.err);
}

#[test]
fn cable_pulled_ends_both_named() {
    let machines = match Machines::start(2) {
        Ok(machines) => machines,
        Err(why) => return skip(&why),
    };
    let desk = desk();
    let line = format!(
        "{LINE} --out run --steps 100000 --set train.checkpoint_every=2 --devices cpu \
         --set parallel.shares=2,2 --set faults.node_timeout_s={SILENCE_S} --log-every 1"
    );
    let mut host = machines.host(&desk, &line);
    let other = machines.join(1, &desk, &host);
    host.wait_for("step 5/100000");
    let began = Instant::now();
    machines.ip(1, "link set cable down").unwrap();
    let other = thread::spawn(move || finish(other, "the node that joined"));
    let first = host.finish().ended(75);
    let other = other.join().unwrap().ended(75);
    let seconds = began.elapsed();
    for (ran, named) in [(&first, "rank 1: node 1 ("), (&other, "node 0 (")] {
        let error = ran.line("error:");
        assert!(error.contains(named) && tells_silence(error), "{error}");
    }
    assert!(seconds < Duration::from_secs_f64(END_S), "{seconds:?}");
    goes_on(&desk, &first);
}
