//! `potluck launch`: the same line on every node, as launchers start it.

use std::process::Child;

use crate::node_processes::{Host, LINE, desk, later_port, state};
use crate::process::{Desk, Ran, finish, send_signal};

/// Starts a process as Open MPI does.
fn task(desk: &Desk, [rank, world]: [usize; 2], address: &str, line: &str) -> Child {
    let mut command = desk.command(line);
    command.env("OMPI_COMM_WORLD_RANK", rank.to_string());
    command.env("OMPI_COMM_WORLD_SIZE", world.to_string());
    // What every child of a batch script has, whoever started it.
    command.env("SLURM_PROCID", "0").env("SLURM_NTASKS", "4");
    command.env("POTLUCK_ADDRESS", address);
    command.spawn().unwrap()
}

fn line_of(shares: &str) -> String {
    let of_run = LINE.strip_prefix("train").unwrap();
    format!(
        "launch{of_run} --devices cpu --out run --secret-file code --set parallel.shares={shares} \
         --set faults.node_timeout_s=3 --log-every 1"
    )
}

/// The last one starts first, and the first one last.
#[test]
fn launch_same_line_has_bits_of_one() {
    let desk = desk();
    let address = format!("127.0.0.1:{}", later_port());
    let line = format!("{} --congestion bbr", line_of("2,1,1"));
    let mut tasks: Vec<Host> =
        (0..3).rev().map(|rank| Host::started(task(&desk, [rank, 3], &address, &line))).collect();
    let mut first = tasks.pop().unwrap();
    first.wait_for("launch: rank 0 of 3, the first node at 127.0.0.1:");
    first.finish().ok();
    for other in tasks {
        other.finish().ok();
    }
    desk.run(&format!("{LINE} --devices cpu*3 --out one --set parallel.shares=2,1,1")).ok();
    assert!(state(&desk, "run", 6) == state(&desk, "one", 6));
}

/// A launcher starts what was killed again; the other process has stayed.
#[test]
fn launch_first_killed_goes_on_restarted() {
    let desk = desk();
    let address = format!("127.0.0.1:{}", later_port());
    let line = line_of("2,2");
    let mut other = Host::started(task(&desk, [1, 2], &address, &line));
    let mut first = Host::started(task(&desk, [0, 2], &address, &format!("{line} --steps 100000")));
    first.wait_for("step 3/");
    send_signal(first.child.id(), "KILL");
    first.finish();
    other.wait_for("joining the next run");
    let mut again = Host::started(task(&desk, [0, 2], &address, &line));
    again.wait_for("continuing at step 0, from run");
    again.finish().ok();
    other.finish().ok();
    desk.run(&format!("{LINE} --devices cpu*2 --out one --set parallel.shares=2,2")).ok();
    assert!(state(&desk, "run", 6) == state(&desk, "one", 6));
}

/// A signal to a process that stays is one to it, and not the end of a run to be awaited.
#[test]
fn launch_staying_node_ends_by_signal() {
    let desk = desk();
    let address = format!("127.0.0.1:{}", later_port());
    let line = format!("{} --steps 100000", line_of("2,2"));
    let other = Host::started(task(&desk, [1, 2], &address, &line));
    let mut first = Host::started(task(&desk, [0, 2], &address, &line));
    first.wait_for("step 2/");
    send_signal(other.child.id(), "TERM");
    first.finish().ended(75);
    let ran = other.finish().ended(75);
    assert!(ran.err.contains("the run is saved on the first node"), "{}", ran.err);
}

/// A start that was ended before its first checkpoint leaves its directory.
#[test]
fn launch_name_without_checkpoint_begins() {
    let desk = desk();
    std::fs::create_dir_all(desk.path("runs/again/checkpoints")).unwrap();
    let line = "launch tiny.toml --data text.txt --devices cpu --rank 0 --world 1 --name again";
    desk.run(&format!("{line} --steps 2 --quiet")).ok();
    assert_eq!(desk.losses("runs/again").len(), 2);
}

fn refuses(ran: Ran, why: &str) {
    let ran = ran.ended(78);
    assert!(ran.line("error:").contains(why), "{}", ran.err);
}

#[test]
fn launch_wrong_places_are_refused() {
    let desk = desk();
    let line = line_of("2,2");
    let task = task(&desk, [1, 2], "127.0.0.1:1", &format!("{line} --rank 0"));
    let both = "the rank is 0 by a flag or POTLUCK_* and 1 by OMPI_COMM_WORLD_RANK";
    refuses(finish(task, "a task"), both);
    for (line, why) in [
        (&*format!("{line} --rank 0"), "does not tell the number of processes: give it by --world"),
        ("launch tiny.toml --devices cpu", "launch needs --out DIR or --name NAME"),
        (&format!("{line} --resume run"), "resumes from the newest checkpoint in --out"),
        (&format!("{line} --rank 0 --svg x.svg"), "--svg is for `potluck train --explain"),
        (
            "launch tiny.toml --out run --secret-file code --rank 0 --world 64 --local-world 64",
            "are not enough for 64 processes on this host",
        ),
    ] {
        refuses(desk.run(line), why);
    }
}
