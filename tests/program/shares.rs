//! Shares that follow the speed of devices while a run trains: their record, its repetition and its
//! continuation in the same bits, and runs whose shares stay.

use std::fs;

use crate::node_processes;
use crate::process::{Desk, Ran, finish};
use serde_json::Value;

/// A second change comes 25 steps after the first at the earliest, which comes after step 20.
const STEPS: u64 = 45;

/// The second device takes four times as long from the first step on, but not when it is timed.
const SLOW: &str = "slow@run:1/1,slow@run:1/1";

fn line(out: &str) -> String {
    // In micro-batches of one sample, which no measurement halves, and without the pipelines that
    // a plan takes where the measurement on a busy machine prefers them.
    format!(
        "train tiny.toml --data text.txt --devices cpu*2 --out {out} --steps {STEPS} \
         --pipeline 1 --tensor 1 --set train.batch=24 --set train.micro_batch_size=1 \
         --set model.width=32 \
         --set model.dropout=0.1 --set train.sample_tokens=0 --set train.eval_every=9 \
         --set train.checkpoint_every=5 --set train.checkpoint_keep=20 --set train.log_every=1000"
    )
}

/// The changes in the record of a run.
fn changes(desk: &Desk, run: &str) -> Vec<Value> {
    let lines = desk.metrics(run).into_iter();
    lines.filter(|line| line.get("event").is_some()).collect()
}

fn shares_of_step(desk: &Desk, run: &str, step: u64) -> Vec<u64> {
    let steps = desk.steps(run);
    let found = steps.iter().find(|line| line["step"] == step).unwrap();
    found["ranks"].as_array().unwrap().iter().map(|rank| rank["share"].as_u64().unwrap()).collect()
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

/// The flags at the end of a run's note on the changes.
fn flags_of(ran: &Ran) -> &str {
    let note = ran.err.lines().find(|line| line.starts_with("the shares have changed"));
    let note = note.unwrap_or_else(|| panic!("no change: {}", ran.err));
    let (_, flags) = note.split_once("; to repeat this run on these devices, add ").unwrap();
    flags
}

/// Repeats a run by the flags of its note on the changes, behind those of a command line.
fn repeat(desk: &Desk, line: &str, ran: &Ran) -> Ran {
    let flags = flags_of(ran);
    assert!(!flags.contains("in other bits"), "{flags}");
    let mut command = desk.command(line);
    // A value has spaces, and the quotes around it are for a shell.
    for setting in flags.replace('\'', "").split("--set ").skip(1) {
        command.args(["--set", setting.trim()]);
    }
    finish(command.spawn().unwrap(), flags).ok()
}

fn assert_same_bits(desk: &Desk, run: &str, other: &str) {
    for file in ["parameters.safetensors", "moments.safetensors"] {
        let same = desk.checkpoint(run, STEPS, file) == desk.checkpoint(other, STEPS, file);
        assert!(same, "{file} of {run} and {other}");
    }
}

#[test]
fn shares_follow_a_device_and_repeat() {
    let desk = Desk::new();
    let measured = desk.run_with(SLOW, &line("a")).ok();
    let of_a = changes(&desk, "a");
    let [change] = &of_a[..] else { panic!("{of_a:?}: {}", measured.err) };
    let first = change["from_step"].as_u64().unwrap();
    let (before, after) = (numbers(&change["before"]), numbers(&change["shares"]));
    assert!((21..STEPS).contains(&first) && change["step"] == first - 1, "{change}");
    assert!(after[1] < before[1] && after.iter().sum::<u64>() == 24, "{change}");
    assert!(change["predicted_ms"].as_f64() < change["before_ms"].as_f64(), "{change}");
    assert_eq!(shares_of_step(&desk, "a", first - 1), before);
    assert_eq!(shares_of_step(&desk, "a", first), after);
    let told = format!(
        "shares {} : {} -> {} : {} from step {first}: ",
        before[0], before[1], after[0], after[1]
    );
    assert!(measured.err.contains(&told), "{told}: {}", measured.err);
    let resolved = fs::read_to_string(desk.path("a/resolved.toml")).unwrap();
    let history = format!(
        "share_history = \"1: {} {}, {first}: {} {}\"",
        before[0], before[1], after[0], after[1]
    );
    assert!(resolved.contains(&history), "{history}: {resolved}");

    // The flags of the note repeat the run on devices that are both fast.
    let repeated = repeat(&desk, &line("b"), &measured);
    assert_eq!(desk.losses("b"), desk.losses("a"));
    assert_same_bits(&desk, "b", "a");
    let of_b = changes(&desk, "b");
    assert_eq!((of_b.len(), &of_b[0]["shares"]), (1, &change["shares"]));
    assert!(repeated.err.contains(", as given by parallel.share_changes"), "{}", repeated.err);

    // Runs that are continued after the change have its shares.
    let saved = first.div_ceil(5).max(5) * 5;
    for run in ["a", "b"] {
        let from = format!("{run}/checkpoints/step-{saved:08}");
        let out = format!("{run}-continued");
        let resumed = desk.run_with(SLOW, &format!("train --resume {from} --out {out}")).ok();
        assert!(!resumed.err.contains("bits will differ"), "{}", resumed.err);
        // Given shares begin with those of step 1, and the note on them is followed by the change.
        let told = format!(" from step {}, as given by parallel.share_changes", saved + 1);
        assert_eq!(resumed.err.contains(&told), run == "b", "{}", resumed.err);
        assert_same_bits(&desk, &out, "a");
        assert_eq!(shares_of_step(&desk, &out, saved + 1), after);
    }
    // And before it, those of that step.
    desk.run("train --resume b/checkpoints/step-00000015 --out b-early --quiet").ok();
    assert_same_bits(&desk, "b-early", "a");
    assert_eq!(shares_of_step(&desk, "b-early", 16), before);
}

/// Each device computes its samples at once, and the fast one has more of them after the change.
#[test]
fn shares_repeat_in_whole_micro_batches() {
    let desk = Desk::new();
    let whole = |out: &str| format!("{} --set train.micro_batch_size=24", line(out));
    // Micro-batches are halved where that measures clearly faster, as on a busy machine.
    for attempt in 0..5 {
        let [a, b] = ["a", "b"].map(|run| format!("{run}{attempt}"));
        let measured = desk.run_with(SLOW, &whole(&a)).ok();
        let flags = flags_of(&measured);
        if flags.contains("micro_batch_size") || flags.contains("in other bits") {
            continue;
        }
        let of_a = changes(&desk, &a);
        let change = &of_a[0];
        let [before, after] = ["before", "shares"].map(|shares| numbers(&change[shares]));
        assert!(after[0] > before[0], "{change}");
        repeat(&desk, &whole(&b), &measured);
        assert_eq!(desk.losses(&b), desk.losses(&a));
        assert_same_bits(&desk, &b, &a);
        return;
    }
    panic!("micro-batches were halved in every measurement");
}

/// The device of a joined node becomes slow; the node has its samples sent, or reads them itself.
#[test]
fn shares_follow_a_node_and_repeat() {
    for (out, more) in [("sent", ""), ("read", " --data text.txt")] {
        let desk = node_processes::desk();
        let of_first = line(out).replace("cpu*2", "cpu");
        let mut host = node_processes::host_with(&desk, 2, "", &of_first);
        host.wait_for("1 of 2");
        let other = node_processes::join(&desk, &host, SLOW, &format!("--devices cpu{more}"));
        let first = host.finish().ok();
        let other = finish(other, "the other node").ok();
        let of_run = changes(&desk, out);
        let [change] = &of_run[..] else { panic!("{of_run:?}: {}", first.err) };
        let (before, after) = (numbers(&change["before"]), numbers(&change["shares"]));
        assert!(after[1] < before[1], "{change}");
        assert_eq!(shares_of_step(&desk, out, STEPS), after);
        let told = format!("from step {}: ", change["from_step"]);
        assert!(other.err.contains(&told), "{}", other.err);
        repeat(&desk, &line("one"), &first);
        assert_same_bits(&desk, out, "one");
    }
}

#[test]
fn shares_fixed_stay() {
    let desk = Desk::new();
    let fixed = format!("{} --set parallel.balance=fixed --quiet", line("fixed"));
    desk.run_with(SLOW, &fixed).ok();
    assert_eq!(changes(&desk, "fixed"), [Value::Null; 0]);
    assert_eq!(shares_of_step(&desk, "fixed", STEPS), [12, 12]);
}

#[test]
fn changes_given_wrong_are_refused() {
    let desk = Desk::new();
    let set = |change: &str| {
        let mut command = desk.command(&format!("{} --set balance=fixed", line("run")));
        command.args(["--set", &format!("parallel.share_changes=[\"{change}\"]")]);
        finish(command.spawn().unwrap(), change).ended(78)
    };
    for (change, why) in [
        ("9: 8 8 8", "parallel.share_changes has '9: 8 8 8' for 2 devices"),
        ("9: 8 8", "with the sum train.batch = 24, got '9: 8 8'"),
        ("9 12 12", "'9 12 12' is not a change of shares"),
    ] {
        let refused = set(change);
        assert!(refused.line("error:").contains(why), "{change}: {}", refused.err);
    }
}
