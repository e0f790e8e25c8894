//! Impossible requests are refused with exit code 78 and one sentence that names the file, the
//! key or the place, and command lines that do not parse with exit code 2; and nothing is written.

use std::fs;

use crate::process::{Desk, Ran};

/// Asserts exit code 78, nothing on stdout, one error line that has all of `parts`, and no new
/// file.
fn refused(desk: &Desk, before: &[String], ran: Ran, parts: &[&str]) {
    refused_with(78, desk, before, ran, parts);
}

fn refused_with(code: i32, desk: &Desk, before: &[String], ran: Ran, parts: &[&str]) {
    let ran = ran.ended(code);
    let line = ran.line("error:");
    for part in parts {
        assert!(line.contains(part), "'{part}' is missing in: {line}");
    }
    assert_eq!(ran.out, "", "{line}");
    assert!(!ran.err.contains("panicked"), "{}", ran.err);
    assert_eq!(desk.files(), before, "{line}");
    assert!(!desk.path("runs").exists(), "{line}");
}

/// Refuses `potluck LINE` on a desk that has these files besides.
fn refuses(files: &[(&str, &[u8])], line: &str, parts: &[&str]) {
    let desk = Desk::new();
    for (name, bytes) in files {
        desk.write(name, bytes);
    }
    let before = desk.files();
    let ran = desk.run(line);
    refused(&desk, &before, ran, parts);
}

/// Refuses `potluck LINE`, which does not parse.
fn refuses_usage(line: &str, parts: &[&str]) {
    let desk = Desk::new();
    let before = desk.files();
    refused_with(2, &desk, &before, desk.run(line), parts);
}

/// Refuses training on a text.
fn refuses_text(bytes: &[u8], parts: &[&str]) {
    let line = "train tiny.toml --data data.txt --devices cpu";
    refuses(&[("data.txt", bytes)], line, &[&["data.txt: "], parts].concat());
}

/// Refuses training with a configuration.
fn refuses_config(toml: &str, parts: &[&str]) {
    let line = "train typed.toml --data text.txt --devices cpu";
    refuses(&[("typed.toml", toml.as_bytes())], line, parts);
}

#[test]
fn texts_not_utf8_are_refused() {
    let not_utf8 = [&b"first line\nsecond"[..], &[0xFF], &b" line".repeat(20)].concat();
    refuses_text(&not_utf8, &["not UTF-8 at byte 17 (line 2)", "--set data.tokenizer=byte"]);
    let desk = Desk::new();
    desk.write("data.txt", not_utf8);
    let bytes = "--data data.txt --set data.tokenizer=byte --steps 2 --quiet";
    desk.run(&format!("train tiny.toml --devices cpu {bytes}")).ok();
}

#[test]
fn configurations_wrong_are_refused() {
    let place = "typed.toml:3: ";
    refuses_config("[train]\n\nstpes = 5\n", &[place, "train.stpes", "did you mean train.steps?"]);
    refuses(&[], "train missing.toml --devices cpu", &["missing.toml: cannot be read"]);

    let set = "train tiny.toml --devices cpu --set";
    let place = "--set train.stpes=5: ";
    refuses(&[], &format!("{set} train.stpes=5"), &[place, "did you mean train.steps?"]);
}

#[test]
fn arguments_unknown_exit_with_2() {
    refuses_usage("train --bogus", &["--bogus"]);
    let desk = Desk::new();
    assert!(desk.run("").ended(2).err.contains("Usage: potluck <COMMAND>"));
}

#[test]
fn values_of_flags_are_refused() {
    let tiny = "train tiny.toml --data text.txt --devices cpu";
    refuses(&[], &format!("{tiny} --lr 0"), &["--lr 0", "optim.lr expects a number above 0"]);
    refuses(&[], &format!("{tiny} --name a/b"), &["--name a/b: expects the name of a directory"]);
    refuses(&[], "runs nowhere", &["nowhere: cannot be read", "name a directory of runs"]);
}

#[test]
fn devices_missing_are_refused() {
    let train = "train tiny.toml --data text.txt --devices";
    refuses(&[], &format!("{train} nosuchdevice"), &["nosuchdevice"]);
    refuses(&[], &format!("{train} 999"), &["999"]);
    for (spaced, answer) in [
        ("cpu cpu", "cpu: is no configuration but a device; cpu is in the list twice"),
        ("cpu auto", "auto: is no configuration but a device; 'auto' is not a device selector"),
    ] {
        refuses(&[], &format!("train --data text.txt --devices {spaced}"), &[answer]);
    }
    let explain = "train tiny.toml --data text.txt --explain memory --devices";
    refuses(&[], &format!("{explain} cpu*"), &["'cpu*' is not", "a whole number from 1 to 64"]);
    // Measured shares may leave devices out; fixed ones may not.
    let fixed = "cpu*5 --set parallel.balance=fixed";
    let none = "train.batch = 4 has no sample for each of 5 devices";
    refuses(&[], &format!("{explain} {fixed}"), &[none]);
    let desk = Desk::new();
    assert!(desk.run(&format!("{explain} cpu*5")).ok().out.starts_with("shares are measured"));
}

#[test]
fn files_unwritable_are_refused() {
    let line = "train tiny.toml --data text.txt --devices cpu*2 --pipeline 2";
    let drawing = format!("{line} --svg nowhere/chart.svg --explain schedule");
    refuses(&[], &drawing, &["nowhere/chart.svg is in no directory that exists", "--svg"]);
    let parts = "parallel.tensor_ranks of 2 or more; give --pipeline K or --tensor K";
    refuses(&[], "train tiny.toml --data text.txt --devices cpu --explain schedule", &[parts]);
    let line = "train tiny.toml --data text.txt --devices cpu --trace";
    refuses(&[], &format!("{line} ."), &[". is a directory; name a file for --trace"]);
    let missing = "nowhere/trace.json is in no directory that exists";
    refuses(&[], &format!("{line} nowhere/trace.json"), &[missing, "--trace"]);
}

#[test]
fn faults_unknown_are_refused() {
    let desk = Desk::new();
    let before = desk.files();
    let ran = desk.train_with("kill@metrics:1/1", "");
    let point = "'metrics' is a point of the process, not of rank 1";
    refused(&desk, &before, ran, &["POTLUCK_FAULT: ", point]);
}

#[test]
fn checkpoints_missing_are_refused() {
    refuses(&[], "train --devices cpu --resume latest", &["there is no run in runs/"]);
    for line in ["train --resume", "eval", "eval --best", "generate"] {
        let line = format!("{line} nowhere --devices cpu");
        refuses(&[], &line, &["nowhere: no run or checkpoint is there"]);
    }
    let desk = Desk::new();
    desk.train("--name first --quiet --steps 4 --set train.checkpoint_every=2").ok();
    let before = desk.files();
    for (line, there) in [
        ("train --resume frist", "; there is runs/first"),
        (
            "eval runs/first/checkpoints/step-00000003",
            "step-00000002, runs/first/checkpoints/step-",
        ),
    ] {
        let ran = desk.run(&format!("{line} --devices cpu")).ended(78);
        assert!(ran.line("error:").contains(there), "{line}: {}", ran.err);
        assert_eq!(desk.files(), before, "{line}");
    }
    // The name of a run is enough.
    desk.run("eval first --devices cpu").ok();
    let ran = desk.run("train --resume first --steps 5 --seed 7 --devices cpu").ok();
    assert!(ran.err.contains("continuing at step 4, from runs/first/"), "{}", ran.err);
    let changed = ran.line("changed since then: ");
    assert!(changed.contains("train.steps = 5, "), "{changed}");
    assert!(changed.contains("train.seed = 7 (draws other samples from here on)"), "{changed}");
    assert!(!changed.contains("batch"), "{changed}");
}

/// Requests that a run refuses which is there already, and which must stay as it is.
#[test]
fn requests_unfit_for_run_are_refused() {
    let desk = Desk::new();
    desk.train("--out run --quiet --steps 5").ok();
    desk.write("other.txt", "Other Characters: ÄÖÜ. ".repeat(20));
    desk.write("empty.txt", "");
    let before = desk.files();
    let metrics = || fs::read(desk.path("run/metrics.jsonl")).unwrap();
    let bytes = metrics();
    let refuses = |line: &str, parts: &[&str]| {
        refused(&desk, &before, desk.run(&format!("{line} --devices cpu")), parts);
        assert_eq!(metrics(), bytes, "{line}");
    };
    refuses(
        "train tiny.toml --data text.txt --out run",
        &["run holds a run", "potluck train --resume run;"],
    );
    let layers = "model.layers does not fit the checkpoint: it is 1 there, and 2 here";
    refuses("train --resume run --set model.layers=2", &[layers]);
    let preset = "model.preset does not fit the checkpoint: it is not set there, and \"gpt2\" here";
    refuses("train --resume run --set preset=gpt2", &[preset]);
    let kept = "data.tokenizer does not fit the checkpoint";
    refuses("train --resume run --set data.tokenizer=byte", &[kept]);
    refuses("train --resume run --data other.txt --steps 9", &["other.txt", "'O' at byte 0"]);
    refuses("train --resume run --data empty.txt --steps 9", &["empty.txt: is empty"]);
    refuses("train --resume run --set train.stpes=9", &["did you mean train.steps?"]);
    refuses("eval run --set model.layers=2", &[layers]);
    refuses("generate run --set stpes=2", &["--set stpes=2: ", "did you mean train.steps?"]);
    for command in ["eval", "generate"] {
        let why = ["--set devices=cpu: ", "has no effect without training; give --devices"];
        refuses(&format!("{command} run --set devices=cpu"), &why);
    }
    let alone = "parallel.schedule = \"gpipe\" has no effect without a pipeline";
    refuses("eval run --schedule gpipe", &["--schedule gpipe: ", alone]);
    refuses("generate run --pipeline 65", &["--pipeline 65: ", "from 1 to 64"]);
    refuses(
        "generate run --pipeline 2 --set blocks_per_stage=1",
        &["parallel.blocks_per_stage expects 2 numbers"],
    );
    refuses("eval run --data other.txt", &["other.txt", "'O' at byte 0", "vocabulary"]);
    refuses("eval run --data missing.txt", &["missing.txt: cannot be read"]);
    refuses("generate run --prompt the~cook", &["'~' at byte 3", "vocabulary"]);
    refuses("generate run --prompt=", &["the prompt is empty"]);
    let unknown = desk.run("train --resume run --steps 9 --devices nosuchdevice");
    refused(&desk, &before, unknown, &["nosuchdevice"]);

    // Another run's directory is no place to go on in, and the run itself can still do so.
    desk.train("--out second --quiet --steps 5").ok();
    let taken = desk.run("train --resume run --out second --devices cpu --steps 9").ended(78);
    assert!(
        taken.line("error:").contains(
            "second holds a run already; continue it with: potluck train --resume second;"
        ),
        "{}",
        taken.err
    );
    assert_eq!(desk.steps("second").len(), 5);
    desk.resume("run", "--quiet --steps 9").ok();
    assert_eq!(desk.steps("run").len(), 9);
}

#[test]
fn eval_nothing_held_out_is_refused() {
    let desk = Desk::new();
    desk.train("--out run --quiet --steps 2 --set data.held_out=0").ok();
    let before = desk.files();
    let ran = desk.run("eval run --devices cpu");
    refused(&desk, &before, ran, &["held nothing out", "--split train"]);
    for command in ["eval", "generate"] {
        let ran = desk.run(&format!("{command} run --devices cpu --best"));
        refused(&desk, &before, ran, &["held nothing out", "leave out --best"]);
    }
    desk.run("eval run --devices cpu --split train").ok();
    assert!(desk.metrics("run").iter().all(|line| line.get("val_loss").is_none()));
}

#[test]
#[cfg(unix)]
fn run_in_use_is_refused() {
    let desk = Desk::new();
    desk.train("--out run --quiet --steps 2").ok();
    let lock = fs::File::open(desk.path("run/lock")).unwrap();
    lock.lock().unwrap();
    let ran = desk.resume("run", "--steps 9").ended(75);
    assert!(ran.line("error:").contains("run: the run is in use by process"), "{}", ran.err);
    assert_eq!(desk.steps("run").len(), 2);
    drop(lock);
    desk.resume("run", "--quiet --steps 9").ok();
}
