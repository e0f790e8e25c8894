//! Runs over several machines, as their users see them; here the machines are processes.

use std::fs;
use std::time::Instant;

use crate::node_processes::{
    END_S, Host, LINE, SILENCE_S, desk, goes_on, host_with, join, later_port, state, tells_silence,
    write_secret,
};
use crate::process::{Desk, Ran, finish, send_signal};

/// Trains on nodes with these devices; returns what the first node printed, and then the others.
fn train(desk: &Desk, line: &str, devices: &[&str]) -> (Ran, Vec<Ran>) {
    let line = format!("{LINE} {line} --devices {}", devices[0]);
    let mut host = host_with(desk, devices.len(), "", &line);
    let mut others = Vec::new();
    for (number, devices) in devices.iter().enumerate().skip(1) {
        host.wait_for(&format!("{number} of "));
        others.push(join(desk, &host, "", &format!("--devices {devices}")));
    }
    let ran = host.finish();
    (ran, others.into_iter().map(|child| finish(child, "a node that joined")).collect())
}

#[test]
fn nodes_any_layout_has_bits_of_one() {
    let desk = desk();
    for (name, more) in [
        ("ring", "--set parallel.shares=1,1,1,1"),
        ("star", "--set parallel.shares=1,1,1,1 --set parallel.collective=star"),
        ("stages", "--pipeline 2 --set parallel.blocks_per_stage=1,2 --set parallel.shares=3,1"),
        ("tensors", "--tensor 2 --set parallel.shares=3,1 --set model.width=16"),
        ("mesh", "--tensor 2 --pipeline 2 --set model.width=16"),
    ] {
        desk.run(&format!("{LINE} {more} --devices cpu*4 --out {name}")).ok();
        let over: [&[&str]; 3] =
            [&["cpu*2", "cpu*2"], &["cpu", "cpu*3"], &["cpu", "cpu", "cpu", "cpu"]];
        // One way is enough besides the ring, which has them all.
        let over = if name == "ring" { &over[..] } else { &over[1..2] };
        for devices in over {
            let out = format!("{name}-{}", devices.len());
            let (first, others) = train(&desk, &format!("{more} --out {out}"), devices);
            first.ok();
            for other in others {
                let other = other.ok();
                assert_eq!(other.lines("done; the model is on the first node").len(), 1);
                assert_eq!(other.lines("step 6/6  loss").len(), 1, "{}", other.err);
            }
            assert!(state(&desk, &out, 6) == state(&desk, name, 6), "{name} on {devices:?}");
            assert_eq!(desk.losses(&out), desk.losses(name), "{name} on {devices:?}");
            fs::remove_dir_all(desk.path(&out)).unwrap();
        }
    }
}

#[test]
fn nodes_devices_are_measured_together() {
    let desk = desk();
    let line = "--out run --set faults.hash_every=2 --set data.held_out=0.2 \
                --set train.eval_every=3";
    let (first, _) = train(&desk, line, &["cpu", "cpu"]);
    let first = first.ok();
    assert!(first.err.contains("measuring 2 devices, alone and together"), "{}", first.err);
    assert_eq!(first.lines("step 6  val_loss").len(), 1, "{}", first.err);
    // The run goes on without the other node.
    desk.run("train --resume run --steps 8 --quiet").ok();
    assert_eq!(desk.losses("run").len(), 8);
}

#[test]
fn resume_alone_is_free_of_nodes_shares() {
    let desk = desk();
    for (name, more) in [("shares", "--set parallel.shares=3,1"), ("stages", "--pipeline 2")] {
        let (first, _) = train(&desk, &format!("{more} --out {name}"), &["cpu", "cpu"]);
        first.ok();
        desk.run(&format!("train --resume {name} --steps 8 --quiet")).ok();
        assert_eq!(desk.losses(name).len(), 8, "{name}");
        let alone = &desk.manifest(name, 8)["meta"]["placement"]["ranks"];
        assert_eq!(alone.as_array().unwrap().len(), 1, "{alone}");
    }
}

#[test]
fn node_with_copy_reads_own_samples() {
    let desk = desk();
    desk.write("text.txt", "to be or not to be, that is the question\n".repeat(40));
    let line = "--data text.txt --set parallel.shares=2,2";
    desk.run(&format!("{LINE} {line} --devices cpu*2 --out one")).ok();
    let joined = |out: &str, copy: &str| {
        let line = format!("{LINE} {line} --devices cpu --log-every 2 --out {out}");
        let mut host = host_with(&desk, 2, "", &line);
        host.wait_for("1 of ");
        let other = join(&desk, &host, "", &format!("--devices cpu --data {copy}"));
        (host.finish(), finish(other, "the node that joined"))
    };
    fs::create_dir(desk.path("there")).unwrap();
    fs::copy(desk.path("text.txt"), desk.path("there/text.txt")).unwrap();
    let (first, other) = joined("two", "there/text.txt");
    first.ok();
    let note = "samples are read from there/text.txt, the data of the run";
    let other = other.ok();
    assert_eq!(other.lines(note).len(), 1);
    // The interval of its lines is that of the run.
    assert_eq!(other.lines("step 4/6  loss").len(), 1, "{}", other.err);
    assert!(state(&desk, "two", 6) == state(&desk, "one", 6));
    // One letter differs.
    desk.write("there/text.txt", "to be or not to bo, that is the question\n".repeat(40));
    let (first, other) = joined("three", "there/text.txt");
    let why = "there/text.txt is not the data of the run, by the hash of names and contents; give \
               a copy of what the first node has, or leave --data out, and the samples are sent";
    assert_eq!(first.code(), Some(78), "{}", first.err);
    assert!(first.err.contains("cannot take part: ") && first.err.contains(why), "{}", first.err);
    assert!(other.err.contains(why), "{}", other.err);
}

/// States go to the nodes and back with each step, also to one that reads its own samples.
#[test]
fn nodes_carry_states_same_bits() {
    let desk = desk();
    desk.write("text.txt", "to be or not to be, that is the question\n".repeat(40));
    let line = "train --data text.txt --set model.kind=rnn --set model.stateful=true --batch 4 \
                --set model.width=8 --set model.context=8 --set train.sample_tokens=0 --steps 6 \
                --set data.held_out=0 --set parallel.shares=2,2";
    desk.run(&format!("{line} --devices cpu*2 --out one")).ok();
    for (out, more) in [("sent", ""), ("read", "--data text.txt")] {
        let line = format!("{line} --devices cpu --out {out}");
        let mut host = host_with(&desk, 2, "", &line);
        host.wait_for("1 of ");
        let other = join(&desk, &host, "", &format!("--devices cpu {more}"));
        host.finish().ok();
        finish(other, "the node that joined").ok();
        assert!(state(&desk, out, 6) == state(&desk, "one", 6), "{out}");
        let states = |run: &str| desk.checkpoint(run, 6, "carried.safetensors");
        assert_eq!(states(out), states("one"));
    }
}

#[test]
fn nodes_missing_data_named_at_start() {
    let desk = desk();
    let more = "--nodes 2 --listen 127.0.0.1:0 --secret-file code --out run";
    let ran = desk.run(&format!("{LINE} --data nothing {more}")).ended(78);
    assert!(ran.line("error:").contains("nothing: cannot be read"), "{}", ran.err);
    assert!(!ran.err.contains("potluck join"), "{}", ran.err);
    let ran = desk.run("join 127.0.0.1:9 --secret-file code --data nothing").ended(78);
    assert!(ran.line("error:").contains("nothing: cannot be read"), "{}", ran.err);
}

#[test]
fn node_waits_for_later_first_one() {
    let desk = desk();
    let first = format!("127.0.0.1:{}", later_port());
    let line = format!("join {first} --secret-file code --devices cpu --wait 60");
    let mut early = Host::started(desk.command(&line).spawn().unwrap());
    early.wait_for(" more seconds");
    let line = format!("{LINE} --nodes 2 --listen {first} --secret-file code --devices cpu");
    desk.run(&format!("{line} --set parallel.shares=2,2")).ok();
    let ran = early.finish().ok();
    assert_eq!(ran.lines("done; the model is on the first node").len(), 1);
}

#[test]
fn signal_command_names_the_nodes() {
    let desk = desk();
    let line = format!("{LINE} --devices cpu --out run --steps 100000 --log-every 1");
    let mut host = host_with(&desk, 2, "", &format!("{line} --set parallel.shares=2,2"));
    let other = join(&desk, &host, "", "--devices cpu");
    host.wait_for("step 2/100000");
    send_signal(host.child.id(), "INT");
    let ran = host.finish().ended(130);
    let expected = "continue it with: potluck train --resume run --nodes 2";
    assert!(ran.line("interrupted;").ends_with(expected), "{}", ran.err);
    finish(other, "the other node").ended(130);
}

#[test]
fn trace_of_nodes_has_one_time() {
    let desk = desk();
    let (first, _) = train(
        &desk,
        "--out run --trace trace.json --pipeline 2 --set blocks_per_stage=1,2 --micro-batch 1",
        &["cpu", "cpu"],
    );
    first.ok();
    let text = fs::read_to_string(desk.path("trace.json")).unwrap();
    let events: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let label = events.iter().find(|event| event["name"] == "process_labels").unwrap();
    let label = label["args"]["labels"].as_str().unwrap();
    let within = label.strip_prefix("clock of node 1 within ").expect(label);
    // And what the rounding of both times to microseconds may add.
    let within = within.strip_suffix(" us").unwrap().parse::<f64>().unwrap() + 1.0;
    let spans = |rank: u64, begins: &str| -> Vec<f64> {
        let of = events.iter().filter(|event| event["pid"] == rank && event["ph"] == "X");
        let named = of.filter(|event| event["name"].as_str().unwrap().starts_with(begins));
        named.map(|event| event["ts"].as_f64().unwrap()).collect()
    };
    // What is written on one node was read on the other one before, in both directions.
    for (edge, from, to) in [(0, 0, 1), (1, 1, 0)] {
        for micro_batch in 0..4 {
            let piece = format!("edge {edge} of micro-batch {micro_batch},");
            let read = spans(from, &format!("read {piece}"));
            let written = spans(to, &format!("write {piece}"));
            assert_eq!((read.len(), written.len()), (6, 6), "{piece}");
            let mut pairs = read.iter().zip(&written);
            assert!(
                pairs.all(|(read, written)| *written + within >= *read),
                "{read:?} {written:?}"
            );
        }
    }
}

/// Runs two nodes of one device each, does something to them in the middle of the run, and returns
/// how both end, with the seconds until then.
fn disturbed(desk: &Desk, faults: [&str; 2], act: impl Fn(u32, u32)) -> ([Ran; 2], f64) {
    let line = format!(
        "{LINE} --devices cpu --out run --steps 100000 --set train.checkpoint_every=2 \
         --set parallel.shares=2,2 --set faults.node_timeout_s={SILENCE_S} --log-every 1"
    );
    let mut host = host_with(desk, 2, faults[0], &line);
    let other = join(desk, &host, faults[1], "--devices cpu");
    if faults == ["", ""] {
        host.wait_for("step 5/100000");
    }
    let started = Instant::now();
    act(host.child.id(), other.id());
    let first = host.finish();
    let ended = started.elapsed();
    // One that was stopped ends once it goes on.
    let _ = std::process::Command::new("kill").args(["-CONT", &other.id().to_string()]).output();
    let other = finish(other, "the other node");
    ([first, other], ended.as_secs_f64())
}

#[test]
fn node_killed_or_stopped_is_named() {
    for signal in ["KILL", "STOP"] {
        let desk = desk();
        let ([first, other], seconds) =
            disturbed(&desk, ["", ""], |_, other| send_signal(other, signal));
        let first = first.ended(75);
        let error = first.line("error:");
        assert!(error.contains("rank 1: node 1 ("), "{error}");
        assert!(error.contains(") is lost: it") && tells_silence(error), "{error}");
        assert!(seconds < END_S, "{signal}: {seconds} s");
        assert_ne!(other.code(), Some(0));
        assert_eq!(other.err.contains("this process stood still for "), signal == "STOP");
    }
}

#[test]
fn first_node_killed_ends_others() {
    let desk = desk();
    let ([_, other], _) = disturbed(&desk, ["", ""], |first, _| send_signal(first, "KILL"));
    let error = other.ended(75);
    let error = error.line("error:");
    assert!(error.contains("node 0 (") && tells_silence(error), "{error}");
}

#[test]
fn signal_on_any_node_saves_and_ends() {
    for on_first in [true, false] {
        let desk = desk();
        let act = |first, other| send_signal(if on_first { first } else { other }, "INT");
        let ([first, other], _) = disturbed(&desk, ["", ""], act);
        let first = first.ended(130);
        assert!(first.err.contains("interrupted; the run is saved: "), "{}", first.err);
        let other = other.ended(130);
        other.line("interrupted; the run is saved on the first node");
        desk.run("train --resume run --steps 3 --quiet --devices cpu").ended(78);
    }
}

#[test]
fn node_fault_told_by_all_resumes_same() {
    for (faults, named) in [
        (["", "lost@reduce:5/1"], "rank 1: "),
        (["lost@update:5/0", ""], "rank 0: "),
        (["", "kill@verdict:5/1"], "rank 1: node 1 ("),
        (["", "kill@gather:5/1"], "rank 1: node 1 ("),
    ] {
        let desk = desk();
        let ([first, other], _) = disturbed(&desk, faults, |_, _| {});
        let first = first.ended(75);
        assert!(first.line("error:").contains(named), "{}", first.err);
        if !faults[1].starts_with("kill") {
            let other = other.ended(75);
            assert!(other.line("error:").contains(named), "{}", other.err);
        }
        goes_on(&desk, &first);
    }
}

#[test]
fn node_lost_run_goes_on_by_itself() {
    for (fault, named, shares) in [
        ("lost@reduce:4/2", "rank 2: ", "parallel.shares=2,1,1"),
        ("kill@verdict:4/2", "node 2 (", "parallel.balance=fixed"),
    ] {
        let desk = desk();
        let line = format!(
            "{LINE} --devices cpu --out run --set faults.on_loss=continue \
             --set train.checkpoint_every=2 --set faults.node_timeout_s={SILENCE_S} \
             --set {shares}"
        );
        let mut host = host_with(&desk, 3, "", &line);
        let mut others = Vec::new();
        for (number, fault) in [(1, ""), (2, fault)] {
            host.wait_for(&format!("{number} of 3"));
            others.push(join(&desk, &host, fault, "--devices cpu"));
        }
        let first = host.finish().ok();
        let goes_on = first.line("warning: continuing from step 2");
        assert!(goes_on.contains(named), "{goes_on}");
        assert_eq!(desk.losses("run").len(), 6, "{}", first.err);
        let ended: Vec<_> = others.into_iter().map(|one| finish(one, "a node").code()).collect();
        // After the loss of a node the cluster is over, and the run goes on alone.
        let expected = if fault.starts_with("lost") { Some(0) } else { Some(75) };
        assert_eq!(ended[0], expected, "{fault}");
    }
}

#[test]
fn join_refused_leaves_run_unharmed() {
    let desk = desk();
    let other = desk.run("secret").ok().out;
    write_secret(&desk, "other", &other);
    let mut host = host_with(&desk, 2, "", &format!("{LINE} --devices cpu --out run"));
    let address = host.address.clone();
    let ended = |line: &str, code: i32, part: &str| {
        let ran = desk.run(line).ended(code);
        assert!(ran.line("error:").contains(part), "'{part}' is missing in: {}", ran.err);
    };
    let refused = |line: &str, part: &str| ended(line, 78, part);
    let line = format!("join {address} --secret-file other --devices cpu --wait 1");
    ended(&line, 75, "the code is that of the first node");
    host.wait_for("was turned away: it has another code than this node, or is a stranger");
    refused(&format!("train tiny.toml --nodes 2 --listen {address} --secret-file code"), "taken");
    let key = "--set optim.lr=1: the first node sets the keys of the run";
    refused(&format!("join {address} --secret-file code --set optim.lr=1"), key);
    ended("join 127.0.0.1:9 --secret-file code --devices cpu", 75, "UDP");
    refused(&format!("join {address} --secret-file nothing"), "nothing");
    refused(&format!("join {address}"), "--secret-file");
    write_secret(&desk, "typo", &other.replacen('0', "1", 1).replacen('A', "B", 1));
    refused("train tiny.toml --listen 127.0.0.1:0", "--nodes");
    let joined = join(&desk, &host, "", "--devices cpu");
    host.wait_for("2 of 2 nodes here");
    let late = desk.run(&format!("join {address} --secret-file code --devices cpu"));
    // It may also come when the run is over.
    assert_eq!(late.code(), Some(75), "{}", late.err);
    host.finish().ok();
    finish(joined, "the node that may").ok();
}

#[cfg(unix)]
#[test]
fn secret_readable_by_all_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let desk = desk();
    fs::set_permissions(desk.path("code"), fs::Permissions::from_mode(0o644)).unwrap();
    let ran = desk.run("join 127.0.0.1:9 --secret-file code").ended(78);
    assert!(ran.line("error:").contains("chmod 600"), "{}", ran.err);
    let code = fs::read_to_string(desk.path("code")).unwrap();
    assert!(!ran.err.contains(code.trim()), "{}", ran.err);
}
