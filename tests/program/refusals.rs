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
fn texts_that_cannot_be_trained_on() {
    refuses_text(b"", &["is empty"]);
    refuses_text(b"short", &["training part has 4 tokens", "needs at least 9", "model.context"]);
    let not_utf8 = [&b"first line\nsecond"[..], &[0xFF], &b" line".repeat(20)].concat();
    refuses_text(&not_utf8, &["not UTF-8 at byte 17 (line 2)", "data.tokenizer = \"byte\""]);
    let line = "train tiny.toml --devices cpu --data";
    refuses(&[], &format!("{line} missing.txt"), &["missing.txt: cannot be read", "No such file"]);
    refuses(&[], &format!("{line} ."), &[": is a directory"]);

    let desk = Desk::new();
    desk.write("data.txt", not_utf8);
    let bytes = "--data data.txt --set data.tokenizer=byte --steps 2 --quiet";
    desk.run(&format!("train tiny.toml --devices cpu {bytes}")).ok();
}

#[test]
fn configurations_that_cannot_be_run() {
    let place = "typed.toml:3: ";
    refuses_config("[train]\n\nstpes = 5\n", &[place, "train.stpes", "did you mean train.steps?"]);
    refuses_config("\n\n[trian]\n", &[place, "section [trian]", "did you mean [train]?"]);
    refuses_config("[train]\n\nsteps = \"x\"\n", &[place, "train.steps expects a whole number"]);
    refuses_config("[train]\n\nbatch = 0\n", &[place, "train.batch expects", "from 1", "got 0"]);
    refuses_config("[model]\n\nheads = 3\n", &[place, "model.heads expects", "model.width"]);
    refuses_config("[optim]\n\nkind = \"adamax\"\n", &[place, "optim.kind expects", "adamw"]);
    refuses_config("[train]\n\nsteps = \n", &[place]);
    refuses(&[], "train missing.toml --devices cpu", &["missing.toml: cannot be read"]);

    let set = "train tiny.toml --devices cpu --set";
    let place = "--set train.stpes=5: ";
    refuses(&[], &format!("{set} train.stpes=5"), &[place, "did you mean train.steps?"]);
    refuses(&[], &format!("{set} model.dropout=1"), &["--set model.dropout=1: ", "got 1"]);
    refuses(&[], &format!("{set} model.heads=3"), &["--set model.heads=3: ", "divides"]);
    refuses(&[], &format!("{set} steps"), &["expects key=value"]);
    refuses(
        &[],
        &format!("{set} train.micro_batch_size=5"),
        &["train.micro_batch_size", "train.batch = 4"],
    );
}

#[test]
fn arguments_without_a_meaning() {
    refuses_usage("train --bogus", &["--bogus"]);
    refuses_usage("train --steps x", &["x", "--steps", "a non-negative integer"]);
    refuses_usage("train --lr fast", &["fast", "--lr", "a non-negative number"]);
    refuses_usage("train --explain all", &["all", "--explain"]);
    refuses_usage("train --name a --out b", &["--name", "--out", "cannot be used with"]);
    refuses_usage("generate", &["required arguments"]);
    refuses_usage("generate run --temperature -1", &["-1"]);
    refuses_usage("generate run --temperature=nan", &["nan", "non-negative number"]);
    refuses_usage("eval run --micro-batch 0", &["0", "--micro-batch"]);
    for stages in ["-1", "x", "1.5"] {
        for command in ["train", "eval run", "generate run"] {
            let line = format!("{command} --pipeline {stages}");
            refuses_usage(&line, &[stages, "a whole number from 1 to 64"]);
        }
    }
    refuses_usage("dance", &["dance"]);
    let desk = Desk::new();
    assert!(desk.run("").ended(2).err.contains("Usage: potluck <COMMAND>"));
}

#[test]
fn values_of_flags_and_keys_that_cannot_be() {
    let tiny = "train tiny.toml --data text.txt --devices cpu";
    refuses(&[], &format!("{tiny} --lr 0"), &["--lr 0", "optim.lr expects a number above 0"]);
    refuses(&[], &format!("{tiny} --batch 0"), &["--batch 0: train.batch expects"]);
    refuses(&[], &format!("{tiny} --micro-batch 5"), &["--micro-batch 5: ", "train.batch = 4"]);
    let several = "there are model.kind, data.kind, optim.kind, schedule.kind";
    refuses(&[], &format!("{tiny} --set kind=sgd"), &["--set kind=sgd: ", several]);
    for name in ["latest", "a/b", "..", ".hidden", "a\\b"] {
        refuses(&[], &format!("{tiny} --name {name}"), &["--name ", "the name of a directory"]);
    }
    refuses(&[], &format!("{tiny} --name="), &["--name : expects the name of a directory"]);
    refuses(&[], "runs nowhere", &["nowhere: cannot be read", "name a directory of runs"]);
}

#[test]
fn devices_that_are_not_there() {
    let train = "train tiny.toml --data text.txt --devices";
    refuses(&[], &format!("{train} nosuchdevice"), &["nosuchdevice"]);
    refuses(&[], &format!("{train} 999"), &["999"]);
    refuses(&[], &format!("{train} nosuch,device"), &["nosuch"]);
    refuses(&[], &format!("{train} cpu,cpu"), &["cpu"]);
}

#[test]
fn lists_of_devices_that_are_wrong_in_a_part() {
    let train = "train tiny.toml --data text.txt --explain memory --devices";
    let refuses = |list: &str, parts: &[&str]| refuses(&[], &format!("{train} {list}"), parts);
    refuses("cpu,nosuchdevice", &["'nosuchdevice'"]);
    refuses("cpu,cpu", &["error: cpu is in the list twice; write cpu*2 once"]);
    refuses("cpu,cpu*3", &["error: cpu is in the list twice; write cpu*4 once"]);
    refuses("cpu,", &["'' is not a device selector", "empty"]);
    refuses("cpu,all", &["'all' is not a device selector", "cannot be part of a list"]);
    for count in ["cpu*0", "cpu*65", "cpu*x", "cpu*"] {
        refuses(count, &[&format!("'{count}' is not"), "a whole number from 1 to 64"]);
    }
    let shares = "cpu*3 --set parallel.shares=2,2";
    refuses(shares, &["parallel.shares has 2 entries for 3 devices"]);
    // Measured shares may leave devices out; fixed ones may not.
    let fixed = "cpu*5 --set parallel.balance=fixed";
    refuses(fixed, &["train.batch = 4 has no sample for each of 5 devices"]);
    let desk = Desk::new();
    assert!(desk.run(&format!("{train} cpu*5")).ok().out.starts_with("shares are measured"));
}

#[test]
fn shares_that_do_not_fit() {
    let place = "typed.toml:3: parallel.shares ";
    let list = "expects a list of whole numbers from 1 on";
    refuses_config("[parallel]\n\nshares = [2, 0, 2]\n", &[place, list, "got [2, 0, 2]"]);
    refuses_config("[parallel]\n\nshares = 'even'\n", &[place, list, "got 'even'"]);
    let sum = "the sum train.batch = 12, got [2, 3], whose sum is 5";
    refuses_config("[parallel]\n\nshares = [2, 3]\n", &[place, sum]);
    let both = "shares = [12]\nbalance = 'measured'\n";
    refuses_config(&format!("[parallel]\n{both}"), &["parallel.shares conflicts with"]);
    let set = "train tiny.toml --devices cpu --set parallel.shares";
    refuses(&[], &format!("{set}=2,1"), &["--set parallel.shares=2,1: ", "whose sum is 3"]);
    refuses(&[], &format!("{set}=4,"), &["--set parallel.shares=4,: ", list, "got 4,"]);
}

#[test]
fn pipelines_that_do_not_fit() {
    let place = "typed.toml:4: parallel.blocks_per_stage ";
    let cut =
        |stages: &str| format!("[parallel]\npipeline_stages = 2\n\nblocks_per_stage = {stages}\n");
    let count = "expects 2 numbers of blocks, one for each stage of parallel.pipeline_stages = 2";
    refuses_config(&cut("[1, 1, 1]"), &[place, count, "got [1, 1, 1]"]);
    let list = "expects a list of whole numbers from 1 on";
    refuses_config(&cut("[3, 0]"), &[place, list, "got [3, 0]"]);

    let train = "train tiny.toml --data text.txt --devices cpu*2";
    let refuses = |line: &str, parts: &[&str]| refuses(&[], &format!("{train} {line}"), parts);
    let each = "expects 4 numbers of blocks, one for each model chunk of \
                parallel.pipeline_stages = 2 and parallel.virtual_stages = 2, got [1, 2]";
    let interleaved = "--pipeline 2 --schedule interleaved";
    refuses(
        &format!("{interleaved} --set virtual_stages=2 --set blocks_per_stage=1,2"),
        &["blocks_per_stage=1,2: ", each],
    );
    let chunks = "parallel.virtual_stages expects 1 with parallel.schedule = \"1f1b\", got 2";
    refuses(
        "--pipeline 2 --set virtual_stages=2",
        &["--set virtual_stages=2: ", chunks, "\"interleaved\""],
    );
    let several =
        ["--set virtual_stages=1: ", "set parallel.virtual_stages to 2 or more, or leave it out"];
    refuses(&format!("{interleaved} --set virtual_stages=1"), &several);
    let words = "expects \"1f1b\", \"gpipe\", \"interleaved\" or \"zero-bubble\", got pipedream";
    refuses("--pipeline 2 --schedule pipedream", &["--schedule pipedream: ", words]);
    let range = "parallel.pipeline_stages expects a whole number from 1 to 64, got";
    refuses("--pipeline 0", &["--pipeline 0: ", range]);
    refuses("--pipeline 65", &["--pipeline 65: ", range]);
    let alone = "has no effect without a pipeline; set parallel.pipeline_stages to 2 or more";
    refuses("--schedule gpipe", &["--schedule gpipe: parallel.schedule = \"gpipe\" ", alone]);
    refuses(
        "--set virtual_stages=2",
        &["--set virtual_stages=2: parallel.virtual_stages = 2 ", alone],
    );
    refuses(
        "--set blocks_per_stage=3",
        &["--set blocks_per_stage=3: parallel.blocks_per_stage = [3] ", alone],
    );
    refuses(
        "--explain schedule",
        &["parallel.tensor_ranks of 2 or more; give --pipeline K or --tensor K"],
    );
}

#[test]
fn drawings_of_schedules_that_cannot_be() {
    let line = "train tiny.toml --data text.txt --devices cpu*2 --pipeline 2 --svg";
    let schedule = "'--svg <FILE>' goes with '--explain schedule'";
    refuses_usage(&format!("{line} chart.svg"), &[schedule]);
    refuses_usage(&format!("{line} chart.svg --explain memory"), &[schedule]);
    let line = format!("{line} nowhere/chart.svg --explain schedule");
    refuses(&[], &line, &["nowhere/chart.svg is in no directory that exists", "--svg"]);
}

#[test]
fn traces_that_cannot_be_written() {
    let line = "train tiny.toml --data text.txt --devices cpu --trace";
    refuses(&[], &format!("{line} ."), &[". is a directory; name a file for --trace"]);
    let missing = "nowhere/trace.json is in no directory that exists";
    refuses(&[], &format!("{line} nowhere/trace.json"), &[missing, "--trace"]);
    refuses_usage(&format!("{line} trace.json --explain memory"), &["--trace", "--explain"]);
}

#[test]
fn faults_for_tests_that_do_not_exist() {
    for (fault, part) in [
        ("garbage", "'garbage' is not FAULT@POINT:STEP"),
        ("kill@lunch:1", "'lunch' is not a point"),
        ("nan@metrics:1", "'nan' cannot happen at 'metrics'"),
        ("flip@forward:1/1", "'flip' cannot happen at 'forward'; use gather"),
        ("lost@reduce:1/x", "'x' is not a rank"),
        ("kill@metrics:1/1", "'metrics' is a point of the process, not of rank 1"),
    ] {
        let desk = Desk::new();
        let before = desk.files();
        refused(&desk, &before, desk.train_with(fault, ""), &["POTLUCK_FAULT: ", part]);
    }
}

#[test]
fn checkpoints_that_are_not_there() {
    refuses(&[], "train --devices cpu --resume latest", &["there is no run in runs/"]);
    for line in ["train --resume", "eval", "eval --best", "generate"] {
        let line = format!("{line} nowhere --devices cpu");
        refuses(&[], &line, &["nowhere/checkpoints", "there is no checkpoint"]);
    }
}

/// Requests that a run refuses which is there already, and which must stay as it is.
#[test]
fn what_does_not_fit_a_run() {
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
    let kind = "model.kind does not fit the checkpoint: it is \"gpt\" there, and \"rnn\" here";
    refuses("train --resume run --set model.kind=rnn", &[kind]);
    let preset = "model.preset does not fit the checkpoint: it is not set there, and \"gpt2\" here";
    refuses("train --resume run --set preset=gpt2", &[preset]);
    let kept = "data.tokenizer does not fit the checkpoint";
    refuses("train --resume run --set data.tokenizer=byte", &[kept]);
    refuses("train --resume run --set optim.kind=sgd", &["optim.kind does not fit"]);
    refuses("train --resume run --data other.txt --steps 9", &["other.txt", "'O' at byte 0"]);
    refuses("train --resume run --data empty.txt --steps 9", &["empty.txt: is empty"]);
    refuses("train --resume run --set train.stpes=9", &["did you mean train.steps?"]);
    refuses("eval run --set model.layers=2", &[layers]);
    refuses("generate run --set stpes=2", &["--set stpes=2: ", "did you mean train.steps?"]);
    for (set, instead) in [
        ("parallel.devices=cpu*2", "give --devices instead"),
        ("devices=cpu", "give --devices instead"),
        ("train.eval_samples=3", "give --samples of eval instead"),
        ("train.micro_batch_size=64", "give --micro-batch instead"),
        ("train.steps=3", "leave it out"),
        ("optim.lr=0.1", "leave it out"),
    ] {
        for command in ["eval", "generate"] {
            let line = format!("{command} run --set {set}");
            refuses(
                &line,
                &[&format!("--set {set}: "), "has no effect on eval and generate; ", instead],
            );
        }
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
fn evaluating_what_was_not_held_out() {
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
fn a_run_has_one_writer_at_a_time() {
    let desk = Desk::new();
    desk.train("--out run --quiet --steps 2").ok();
    let lock = fs::File::open(desk.path("run/lock")).unwrap();
    lock.lock().unwrap();
    let ran = desk.resume("run", "--steps 9").ended(78);
    assert!(ran.line("error:").contains("run: the run is in use by process"), "{}", ran.err);
    assert_eq!(desk.steps("run").len(), 2);
    drop(lock);
    desk.resume("run", "--quiet --steps 9").ok();
}
