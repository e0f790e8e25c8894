//! Runs that are killed, interrupted or out of space, and then resumed, end in the same bits as
//! the run that nothing happened to. Real processes are killed, at named points.

use std::fs;
use std::sync::LazyLock;

use crate::process::{Desk, Ran};
use serde_json::Value;

const STEPS: u64 = 30;
/// Dropout, micro-batches that do not divide the batch, evaluations between the checkpoints (and
/// a checkpoint where the loss is the best so far), and a text of less than one epoch.
const SETTINGS: &str = "--quiet --set model.dropout=0.1 --set train.micro_batch_size=3 \
     --set train.checkpoint_every=6 --set train.eval_every=7";

/// The run that nothing happens to.
static WHOLE: LazyLock<Desk> = LazyLock::new(|| {
    let desk = Desk::new();
    start(&desk, "").ok();
    assert_eq!(desk.steps("run").len() as u64, STEPS);
    desk
});

fn start(desk: &Desk, faults: &str) -> Ran {
    desk.train_with(faults, &format!("--out run {SETTINGS}"))
}

fn resume(desk: &Desk) -> Ran {
    desk.resume("run", "--quiet")
}

/// The record of a run without its times.
fn record(desk: &Desk) -> Vec<Value> {
    let mut lines = desk.metrics("run");
    for line in lines.iter_mut().filter_map(Value::as_object_mut) {
        line.remove("ms");
        line.remove("tokens_per_s");
    }
    lines
}

/// Everything that a run leaves except `lock`, torn or aside files included.
fn left(desk: &Desk) -> Vec<String> {
    desk.files().into_iter().filter(|name| !name.contains(".aside")).collect()
}

/// The metadata of the last checkpoint, as if every desk were at the same place.
fn meta(desk: &Desk) -> String {
    let place = desk.path("").canonicalize().unwrap();
    desk.manifest("run", STEPS)["meta"].to_string().replace(place.to_str().unwrap(), "")
}

/// Asserts that the run has come to the same end as the whole one.
fn assert_same_end(desk: &Desk, what: &str) {
    assert_same_bits(desk, &WHOLE, what);
    assert_eq!(record(desk), record(&WHOLE), "{what}");
    let best = |desk: &Desk| fs::read_to_string(desk.path("run/checkpoints/best")).unwrap();
    assert_eq!(best(desk), best(&WHOLE), "{what}");
    assert_eq!(meta(desk), meta(&WHOLE), "{what}");
}

fn assert_same_bits(desk: &Desk, other: &Desk, what: &str) {
    for file in ["parameters.safetensors", "moments.safetensors"] {
        let same = desk.checkpoint("run", STEPS, file) == other.checkpoint("run", STEPS, file);
        assert!(same, "{what}: {file} differs");
    }
}

/// The step of the checkpoint that the run's directory gives, which must be good.
fn loadable(desk: &Desk) -> u64 {
    let ran = desk.run("eval run --devices cpu --json").ok();
    assert_eq!(ran.lines("warning:"), [""; 0], "{}", ran.err);
    serde_json::from_str::<Value>(&ran.out).unwrap()["step"].as_u64().unwrap()
}

/// Kills a run at a point of a step, and resumes it.
fn killed_and_resumed(point: &str, step: u64, saved: u64) {
    let what = format!("kill@{point}:{step}");
    let desk = Desk::new();
    let ran = start(&desk, &what);
    assert_killed(&ran, &what);
    assert_eq!(loadable(&desk), saved, "{what}");
    let resumed = resume(&desk).ok();
    // A quiet start that trains nothing says so.
    let nothing = "warning: step 30 of 30 is already done: nothing is left to train; to continue, \
                   raise --steps or --epochs\n";
    assert_eq!(resumed.err, if saved == 30 { nothing } else { "" }, "{what}");
    assert_same_end(&desk, &what);
    assert_eq!(left(&desk), left(&WHOLE), "{what}");
}

#[cfg(unix)]
fn assert_killed(ran: &Ran, what: &str) {
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(ran.status.signal(), Some(9), "{what}: {}", ran.err);
}

#[cfg(not(unix))]
fn assert_killed(ran: &Ran, what: &str) {
    assert!(!ran.status.success(), "{what}: {}", ran.err);
}

#[test]
fn killed_in_step_resumes_same_bits() {
    for point in ["forward", "backward", "verdict", "update", "metrics"] {
        killed_and_resumed(point, 17, 14);
    }
    // Right after a checkpoint, in the last step, and in the first one.
    killed_and_resumed("update", 19, 18);
    killed_and_resumed("metrics", STEPS, 28);
    killed_and_resumed("forward", 1, 0);
}

#[test]
fn killed_in_save_resumes_same_bits() {
    // Step 18 is saved because it is time, 21 because it is the best, 30 because it is the last.
    // What each point of a save leaves on disk, tests of the store say.
    for (step, before, point) in [(18, 14, "manifest"), (21, 18, "rename"), (STEPS, 28, "tensors")]
    {
        killed_and_resumed(&format!("checkpoint-{point}"), step, before);
        killed_and_resumed("checkpoint-prune", step, step);
    }
}

#[test]
fn killed_before_first_save_restarts() {
    let desk = Desk::new();
    assert_killed(&start(&desk, "kill@checkpoint-manifest:0"), "kill@checkpoint-manifest:0");
    let refused = resume(&desk).ended(78);
    assert!(refused.line("error:").contains("there is no checkpoint"), "{}", refused.err);
    start(&desk, "").ok();
    assert_same_end(&desk, "started again");
}

#[test]
fn killed_repeatedly_resumes_same_bits() {
    let desk = Desk::new();
    assert_killed(&start(&desk, "kill@backward:9"), "first");
    for (fault, saved) in [("kill@update:16", 14), ("kill@checkpoint-rename:24", 21)] {
        let line = "train --devices cpu --quiet --resume run";
        let child = desk.command(line).env("POTLUCK_FAULT", fault).spawn().unwrap();
        assert_killed(&crate::process::finish(child, fault), fault);
        assert_eq!(loadable(&desk), saved);
    }
    resume(&desk).ok();
    assert_same_end(&desk, "killed three times");
    // And once more, when there is nothing left to do.
    resume(&desk).ok();
    assert_same_end(&desk, "resumed after its end");
}

#[test]
fn interrupted_resumes_same_bits() {
    for (fault, code) in [("sigint@update:16", 130), ("sigterm@forward:16", 75)] {
        let desk = Desk::new();
        let ran = start(&desk, fault).ended(code);
        assert!(ran.err.contains("potluck train --resume run"), "{}", ran.err);
        assert_eq!(ran.out, "", "{fault}");
        assert_eq!(loadable(&desk), 16);
        resume(&desk).ok();
        assert_same_bits(&desk, &WHOLE, fault);
        assert_eq!(record(&desk), record(&WHOLE), "{fault}");
    }
}

#[test]
fn resume_longer_has_same_bits() {
    let settings = format!("--out run {SETTINGS} --set schedule.kind=constant");
    let whole = Desk::new();
    whole.train(&settings).ok();
    let desk = Desk::new();
    desk.train(&format!("{settings} --steps 17")).ok();
    desk.resume("run", "--quiet --set train.steps=30").ok();
    assert_same_bits(&desk, &whole, "17 steps and then 13");
    // The first part ended with an evaluation of its own.
    let numbers = |desk: &Desk| desk.losses("run");
    assert_eq!(numbers(&desk), numbers(&whole));
}

/// The newest checkpoint of a run that was killed has one bit that flipped.
#[test]
fn checkpoint_damaged_falls_back_one() {
    let (desk, file) = (Desk::new(), "moments.safetensors");
    assert_killed(&start(&desk, "kill@forward:20"), file);
    let path = desk.path("run/checkpoints/step-00000018").join(file);
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).unwrap();

    let resumed = resume(&desk).ok();
    let warnings = resumed.lines("warning:");
    assert!(warnings[0].contains("step-00000018") && warnings[0].contains(file), "{warnings:?}");
    assert!(warnings[1].contains("step-00000014, the checkpoint before, is taken"), "{warnings:?}");
    assert_same_end(&desk, file);
    // What was damaged is kept for whoever wants to look at it.
    assert!(desk.path("run/checkpoints/step-00000018.aside").is_dir());
}

#[test]
fn disk_full_once_costs_a_checkpoint() {
    let desk = Desk::new();
    let ran = start(&desk, "full@checkpoint-tensors:18").ok();
    let warning = ran.line("warning:");
    assert!(warning.contains("step 18 was not saved"), "{warning}");
    assert!(warning.contains("step-00000018"), "{warning}");
    assert_same_end(&desk, "a full disk");
    assert_eq!(left(&desk), left(&WHOLE));
}

#[test]
fn disk_full_at_end_is_resumable_error() {
    // The last step is saved as the best, because it is time, and at the end.
    for (point, times) in [("checkpoint-tensors:30", 3), ("checkpoint-begin:0", 1)] {
        let desk = Desk::new();
        let ran = start(&desk, &vec![format!("full@{point}"); times].join(",")).ended(75);
        assert!(ran.line("error:").contains("free space"), "{}", ran.err);
        let again = if point.ends_with(":0") { start(&desk, "") } else { resume(&desk) };
        again.ok();
        assert_same_end(&desk, point);
    }
    // If only the first attempt fails, the second one saves it, and as the best.
    let desk = Desk::new();
    start(&desk, "full@checkpoint-manifest:30").ok().line("warning:");
    assert_same_end(&desk, "the second attempt");
}

/// The record misses no line of a disk that was full for a step.
#[test]
fn record_line_unwritable_is_kept() {
    let desk = Desk::new();
    let ran = desk.train_with("full@metrics:7", "--out run --steps 9").ok();
    assert_eq!(
        ran.lines("warning: run/metrics.jsonl: cannot be written (").len(),
        1,
        "{}",
        ran.err
    );
    ran.line("run/metrics.jsonl: written again; 1 line had waited");
    let steps: Vec<u64> =
        desk.steps("run").iter().map(|step| step["step"].as_u64().unwrap()).collect();
    assert!(steps.iter().copied().eq(1..=9), "{steps:?}");
}

/// A file system of its own, with room for the first checkpoints but not for all.
#[test]
#[cfg(target_os = "linux")]
fn disk_really_full_resumes_elsewhere() {
    use std::process::{Command, Stdio};
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["-Urm", "sh", "-c", script]).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let desk = Desk::new();
    fs::create_dir(desk.path("disk")).unwrap();
    let mount = "mount -t tmpfs -o size=96k none disk";
    let permitted = unshare(mount).current_dir(desk.path("")).status();
    if !permitted.is_ok_and(|status| status.success()) {
        return crate::process::skip("this system permits no mounts of a user (unshare -Urm)");
    }
    let program = env!("CARGO_BIN_EXE_potluck");
    let script = format!(
        "{mount} && {program} train tiny.toml --data text.txt --devices cpu --out disk/run \
         {SETTINGS}; code=$?; df -k disk; cp -r disk/run run; exit $code"
    );
    let child = unshare(&script).current_dir(desk.path("")).spawn().unwrap();
    let ran = crate::process::finish(child, &script).ended(75);
    assert!(ran.line("error:").contains("No space left"), "{}", ran.err);
    let saved = loadable(&desk);
    assert!(saved < STEPS, "all of it fitted: {saved}");
    let unfinished: Vec<String> =
        desk.files().into_iter().filter(|name| name.contains(".tmp")).collect();
    assert_eq!(unfinished, [""; 0]);
    resume(&desk).ok();
    assert_same_end(&desk, "on a larger disk");
}

/// Samples are counted, not steps: a run that goes on with another batch size neither repeats
/// nor leaves out a sample.
#[test]
fn resume_other_batch_takes_next_sample() {
    let desk = Desk::new();
    desk.train("--out run --quiet --steps 5").ok();
    assert_eq!(desk.manifest("run", 5)["meta"]["samples"], 20);
    desk.resume("run", "--quiet --steps 8 --set train.batch=6 --set train.micro_batch_size=6").ok();
    assert_eq!(desk.manifest("run", 8)["meta"]["samples"], 38);
    desk.resume("run", "--quiet --steps 10").ok();
    assert_eq!(desk.manifest("run", 10)["meta"]["samples"], 50);
}
