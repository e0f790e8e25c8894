//! Runs over nodes in network namespaces of their own, which a test makes where the system lets it:
//! nodes have different addresses, and links go down as cables do.

use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::namespaces::Machines;
use crate::node_processes::{END_S, Host, LINE, SILENCE_S, desk, goes_on, state, tells_silence};
use crate::process::{Desk, finish, skip};

/// Machines of a test, which takes less than a minute.
fn machines(count: usize) -> Result<Machines, String> {
    Machines::start(count, Duration::from_secs(60))
}

/// Starts the program on a machine.
fn spawn(machines: &Machines, machine: usize, desk: &Desk, line: &str) -> Child {
    let program = desk.command(line);
    let mut command = machines.enter(machine);
    command.arg(program.get_program()).args(program.get_args());
    command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.env("POTLUCK_FAULT", "").current_dir(desk.path(""));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn host(machines: &Machines, desk: &Desk, line: &str) -> Host {
    let line = format!("{line} --nodes {} --secret-file code", machines.count());
    Host::of(spawn(machines, 0, desk, &line))
}

/// Joins with the line that the first node has printed.
fn join(machines: &Machines, machine: usize, desk: &Desk, host: &Host) -> Child {
    let line = format!("join {} --secret-file code --devices cpu", host.address);
    spawn(machines, machine, desk, &line)
}

#[test]
fn machines_join_by_printed_line() {
    let machines = match machines(3) {
        Ok(machines) => machines,
        Err(why) => return skip(&why),
    };
    let desk = desk();
    let line = format!("{LINE} --set parallel.shares=2,1,1");
    desk.run(&format!("{line} --devices cpu*3 --out one")).ok();
    let mut first = host(&machines, &desk, &format!("{line} --devices cpu --out run"));
    assert_eq!(first.address, "10.77.0.1:7717");
    let one = join(&machines, 1, &desk, &first);
    first.wait_for("2 of 3 nodes here");
    let two = join(&machines, 2, &desk, &first);
    first.finish().ok();
    for child in [one, two] {
        finish(child, "a node that joined").ok();
    }
    assert!(state(&desk, "run", 6) == state(&desk, "one", 6), "other bits between machines");
}

/// The parameters of a step take a third of a second over this link, the activations of a pipeline
/// and their gradients, of 16 KiB each, 13 ms or more, and the samples of a step a millisecond or
/// two.
#[test]
fn slow_link_is_left_out_with_figures() {
    let machines = match machines(2).and_then(|machines| {
        machines.limit(20)?;
        Ok(machines)
    }) {
        Ok(machines) => machines,
        Err(why) => return skip(&why),
    };
    let desk = desk();
    let line = format!("{LINE} --out run --set model.width=128");
    let first = host(&machines, &desk, &line);
    let other = join(&machines, 1, &desk, &first);
    let ran = first.finish().ok();
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
    let least = 2.0 * 16.384 / 2.5;
    assert!(with > least && without < with / 2.0, "{with} and {without} ms: {}", ran.err);
}

#[test]
fn cable_pulled_ends_both_named() {
    let machines = match machines(2) {
        Ok(machines) => machines,
        Err(why) => return skip(&why),
    };
    let desk = desk();
    let line = format!(
        "{LINE} --out run --steps 100000 --set train.checkpoint_every=2 --devices cpu \
         --set parallel.shares=2,2 --set faults.node_timeout_s={SILENCE_S} --log-every 1"
    );
    let mut first = host(&machines, &desk, &line);
    let other = join(&machines, 1, &desk, &first);
    first.wait_for("step 5/100000");
    let began = Instant::now();
    machines.ip(1, "link set cable down").unwrap();
    let other = thread::spawn(move || finish(other, "the node that joined"));
    let first = first.finish().ended(75);
    let other = other.join().unwrap().ended(75);
    let seconds = began.elapsed();
    for (ran, named) in [(&first, "rank 1: node 1 ("), (&other, "node 0 (")] {
        let error = ran.line("error:");
        assert!(error.contains(named) && tells_silence(error), "{error}");
    }
    assert!(seconds < Duration::from_secs_f64(END_S), "{seconds:?}");
    goes_on(&desk, &first);
}
