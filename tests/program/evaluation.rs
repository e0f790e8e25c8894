//! Evaluations of a run: how much of the held-out part they take, what they record, and that a
//! signal ends them.

use std::fs;

use crate::process::{Desk, finish, send_signal};
use serde_json::Value;

const HALF: &str = "--quiet --set data.held_out=0.5 --set train.eval_every=10";

fn evaluations(desk: &Desk, run: &str) -> Vec<Value> {
    let lines = desk.metrics(run).into_iter();
    lines.filter(|line| line.get("val_loss").is_some()).collect()
}

fn field(lines: &[Value], name: &str) -> Vec<u64> {
    lines.iter().map(|line| line[name].as_u64().unwrap()).collect()
}

#[test]
fn eval_samples_are_the_same_each_time() {
    let desk = Desk::new();
    desk.train(&format!("--out some {HALF} --set train.eval_samples=5")).ok();
    desk.train(&format!("--out same {HALF} --set train.eval_samples=5")).ok();
    desk.train(&format!("--out all {HALF} --set train.eval_samples=0")).ok();
    desk.train(&format!("--out default {HALF}")).ok();
    let (some, all) = (evaluations(&desk, "some"), evaluations(&desk, "all"));
    assert_eq!(field(&some, "samples"), [5, 5, 5]);
    assert_eq!(field(&some, "targets"), [40, 40, 40]);
    assert_eq!(some, evaluations(&desk, "same"));
    // The default is more than this text has.
    assert_eq!(all, evaluations(&desk, "default"));
    assert!(field(&all, "samples")[0] > 100, "{all:?}");
    assert_ne!(some[2]["val_loss"], all[2]["val_loss"]);
    let best = &desk.manifest("some", 30)["meta"]["best"];
    assert_eq!(best["samples"].as_u64(), Some(5), "{best}");
}

#[test]
fn eval_fixed_shares_same_bits() {
    let desk = Desk::new();
    let line = format!("{HALF} --devices cpu*2 --set parallel.shares=3,1 --steps 10");
    for out in ["one", "same"] {
        desk.run(&format!("train tiny.toml --data text.txt --out {out} {line}")).ok();
    }
    assert_eq!(evaluations(&desk, "one"), evaluations(&desk, "same"));
}

#[test]
fn eval_same_devices_takes_run_shares() {
    let desk = Desk::new();
    let line = "train tiny.toml --data text.txt --out run --steps 4 --quiet --devices cpu*2 \
                --set parallel.shares=3,1";
    desk.run(line).ok();
    let of_run = desk.run("eval run --devices cpu*2").ok();
    of_run.line("on 2 devices with the shares of the run: ");
    desk.run("eval run --devices cpu*3").ok().line("on 3 devices with equal shares: ");
    // The same split of samples has the same bits as the run's own evaluation.
    let shown = evaluations(&desk, "run")[0]["val_loss"].as_f64().unwrap();
    let ran = desk.run("eval run --devices cpu*2 --samples 1024 --json").ok();
    let evaluated: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(evaluated["loss"].as_f64(), Some(shown));
}

#[test]
fn eval_other_samples_not_compared() {
    let desk = Desk::new();
    desk.train(&format!("--out run {HALF} --set train.eval_samples=5")).ok();
    let resume = |line: &str| {
        desk.run(&format!("train --resume run --devices cpu --set train.sample_tokens=0 {line}"))
    };
    let worse = "--set optim.lr=1 --set schedule.min_lr=1 --steps 40";
    let ran = resume(&format!("{worse} --set train.eval_samples=7")).ok();
    assert!(ran.line("evaluations now take 7 samples instead of 5").contains("eval_samples"));
    // The evaluation of step 30 is repeated with the new setting, and is the first of its kind.
    let repeated = ran.line("step 30  val_loss");
    assert!(repeated.ends_with(" on 7 samples, the best since step 30"), "{repeated}");
    let best = desk.manifest("run", 40)["meta"]["best"].clone();
    assert_eq!(best["samples"].as_u64(), Some(7), "{best}");
    // The same setting goes on comparing.
    let ran = resume("--steps 41").ok();
    assert!(ran.lines("evaluations now take").is_empty(), "{}", ran.err);
    assert_eq!(desk.manifest("run", 41)["meta"]["best"]["samples"].as_u64(), Some(7));
    // Another loss is compared with none of before.
    let ran = resume("--steps 42 --set optim.label_smoothing=0.5").ok();
    ran.line("the loss is not the one that the checkpoint was evaluated by");
    assert_eq!(desk.manifest("run", 42)["meta"]["best"]["step"].as_u64(), Some(42));
}

/// The fork evaluates the best step again, which is no evaluation without improvement.
#[test]
fn fork_at_best_step_has_its_patience() {
    let desk = Desk::new();
    desk.train("--out run --quiet --steps 20 --set train.eval_every=10").ok();
    let best = desk.manifest("run", 20)["meta"]["best"]["step"].as_u64().unwrap();
    let from = format!("run/checkpoints/step-{best:08}");
    let words = "--out fork --steps 40 --set train.patience=1 --set train.eval_every=10";
    let ran = desk.run(&format!("train --resume {from} --devices cpu {words}")).ok();
    assert!(desk.losses("fork").len() as u64 >= 10, "{}", ran.err);
}

/// The signal is there before the evaluation, which the resumed run makes up for.
#[test]
fn eval_interrupted_is_repeated() {
    let desk = Desk::new();
    let line = "--out run --quiet --set train.eval_every=10";
    desk.train_with("sigterm@metrics:10", line).ended(75);
    assert!(evaluations(&desk, "run").is_empty());
    desk.resume("run", "--quiet").ok();
    desk.train("--out whole --quiet --set train.eval_every=10").ok();
    assert_eq!(evaluations(&desk, "run"), evaluations(&desk, "whole"));
}

/// A step whose save comes before its evaluation counts for the patience, also if the run is killed
/// soon after.
#[test]
fn eval_behind_its_save_counts_for_patience() {
    let desk = Desk::new();
    let line = "--out run --quiet --steps 2 --set schedule.kind=constant --set train.patience=9 \
                --set train.eval_every=2 --set train.checkpoint_every=100";
    desk.train(line).ok();
    let resume = |fault: &str| {
        let worse = "--set optim.lr=100 --set optim.clip=0 --quiet --steps 6 --devices cpu";
        desk.run_with(fault, &format!("train --resume run {worse}"))
    };
    resume("sigterm@metrics:4").ended(75);
    let counted = || desk.manifest("run", 4)["meta"]["evaluations_since_best"].clone();
    assert_eq!(counted(), 0);
    assert_ne!(resume("kill@metrics:5").code(), Some(0));
    assert_eq!(desk.manifest("run", 4)["meta"]["best"]["step"], 2);
    assert_eq!(counted(), 1);
}

/// An evaluation that takes at least 15 s without a signal, on one device and on two. The limit
/// leaves room for a machine that is busy with other things.
#[test]
#[cfg(unix)]
fn eval_interrupted_ends_at_once() {
    use std::io::{BufRead, BufReader};
    use std::time::Instant;
    for devices in ["cpu", "cpu*2"] {
        let desk = Desk::new();
        desk.write("long.txt", "All the words that an evaluation reads. ".repeat(50_000));
        let line = format!(
            "train tiny.toml --data long.txt --devices {devices} --out run --steps 1 --set \
             data.held_out=0.5 --set train.eval_samples=0 --set model.context=256 --set \
             model.layers=24 --set model.width=64 --set parallel.balance=fixed"
        );
        let mut child = desk.command(&line).spawn().unwrap();
        let mut err = BufReader::new(child.stderr.take().unwrap()).lines();
        let progress = err.find(|line| line.as_ref().unwrap().starts_with("evaluating "));
        let progress = progress.unwrap().unwrap();
        assert!(progress.contains(" of 3,906 samples, "), "{progress}");
        let (id, sent) = (child.id(), Instant::now());
        send_signal(id, "TERM");
        let rest = std::thread::spawn(move || err.map(|line| line.unwrap() + "\n").collect());
        finish(child, &line).ended(75);
        let took = sent.elapsed();
        let rest: String = rest.join().unwrap();
        assert!(rest.contains("terminated (SIGTERM); the run is saved"), "{rest}");
        assert!(took.as_secs() < 10, "{devices}: {took:?}");
        assert!(evaluations(&desk, "run").is_empty());
        assert_eq!(desk.manifest("run", 1)["meta"]["step"], 1);
    }
}

#[test]
fn eval_damaged_save_is_refused() {
    let desk = Desk::new();
    desk.train(
        "--out run --quiet --steps 4 --set train.checkpoint_every=2 --set train.checkpoint_keep=9",
    )
    .ok();
    let newest = desk.path("run/checkpoints/step-00000004");
    let before = desk.run("eval run --devices cpu --json").ok().out;
    fs::remove_file(newest.join("moments.safetensors")).unwrap();
    assert_eq!(desk.run("eval run --devices cpu --json").ok().out, before);
    desk.run("generate run --devices cpu --tokens 3").ok();

    fs::write(newest.join("parameters.safetensors"), "").unwrap();
    for line in ["eval run --devices cpu", "generate run --devices cpu --tokens 3"] {
        let refused = desk.run(line).ended(78);
        assert!(refused.line("error:").contains("step-00000004"), "{}", refused.err);
    }
    // A resume takes the one before and says so; it goes back no further.
    let resumed = desk.run("train --resume run --out other --steps 5").ok();
    assert!(resumed.lines("warning:")[0].contains("step-00000004"), "{}", resumed.err);
    assert!(resumed.err.contains("continuing at step 2, from run/checkpoints/step-00000002"));
    fs::write(desk.path("run/checkpoints/step-00000002/parameters.safetensors"), "").unwrap();
    let refused = desk.run("train --resume run --out third --steps 5").ended(78);
    let advice = "to go back further, name an older one, such as run/checkpoints/step-00000000";
    assert!(refused.err.contains(advice), "{}", refused.err);
}

#[test]
fn eval_every_zero_has_no_evaluation() {
    let desk = Desk::new();
    desk.train("--out run --quiet --steps 4 --eval-every 0").ok();
    assert!(desk.metrics("run").iter().all(|line| line["val_loss"].is_null()));
}
