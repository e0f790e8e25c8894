//! Lengths of runs: in epochs, by patience, and what a start finds that has nothing left to do or
//! no room to do it in.

use std::fs;
#[cfg(target_os = "linux")]
use std::process::{Command, Stdio};

use crate::process::{Desk, Ran};
#[cfg(target_os = "linux")]
use crate::process::{finish, skip};

/// A desk whose configuration sets no steps.
fn desk() -> Desk {
    let desk = Desk::new();
    let tiny = fs::read_to_string(desk.path("tiny.toml")).unwrap();
    desk.write("tiny.toml", tiny.replace("steps = 30\n", ""));
    desk
}

/// The tokens of an epoch, as a run reports them.
fn epoch_tokens(ran: &Ran) -> u64 {
    let line = ran.line("an epoch is ");
    line.split(' ').nth(3).unwrap().replace(',', "").parse().unwrap()
}

#[test]
fn epochs_have_their_steps() {
    let desk = desk();
    let ran = desk.train("--epochs 2 --batch 64 --out run").ok();
    let steps = desk.steps("run").len() as u64;
    // In samples of 8 tokens.
    assert_eq!(steps, (2 * epoch_tokens(&ran)).div_ceil(64 * 8));
    let end = format!("; ends after 2 epochs, at step {steps}");
    assert!(ran.line("an epoch is ").ends_with(&end), "{}", ran.err);
    // Its schedule is that of a run of so many steps, and so are its bits.
    desk.train(&format!("--steps {steps} --batch 64 --out same --quiet")).ok();
    let parameters = |run: &str, step| desk.checkpoint(run, step, "parameters.safetensors");
    assert!(parameters("run", steps) == parameters("same", steps));
    let explained = desk.train("--epochs 2 --batch 64 --explain config").ok().out;
    assert!(explained.contains(&format!("\n# steps = {steps} ")), "{explained}");
    // Its configuration is that of the same run on other data.
    let written = fs::read_to_string(desk.path("run/run.toml")).unwrap();
    assert!(written.contains("\nepochs = 2\n") && written.contains("\n# steps = "), "{written}");
    assert!(written.contains("\n# decay_steps = "), "{written}");
    desk.run("train run/run.toml --devices cpu --out again --quiet").ok();
    assert!(parameters("run", steps) == parameters("again", steps));
    assert!(desk.run("runs .").ok().out.contains(&format!("{steps}/{steps}")));

    desk.resume("run", "--epochs 3 --quiet").ok();
    let more = desk.steps("run").len() as u64;
    assert_eq!(more, (3 * epoch_tokens(&ran)).div_ceil(64 * 8));
    let fewer = desk.resume("run", "--epochs 1").ended(78);
    assert!(fewer.line("error:").contains("train.epochs = 1 ends before the "), "{}", fewer.err);
    // Steps replace epochs.
    desk.resume("run", &format!("--steps {} --quiet", more + 1)).ok();
    assert_eq!(desk.steps("run").len() as u64, more + 1);
    assert!(desk.run("runs .").ok().out.contains(&format!("{}/{}", more + 1, more + 1)));
}

#[test]
fn epochs_interrupted_end_the_same() {
    let desk = desk();
    desk.train("--epochs 1 --batch 16 --out whole --quiet").ok();
    let steps = desk.steps("whole").len() as u64;
    assert!(steps > 5);
    let line = "--epochs 1 --batch 16 --set train.checkpoint_every=3 --out run --quiet";
    desk.train_with("lost@forward:5/0", line).ended(75);
    desk.resume("run", "--quiet").ok();
    assert_eq!(desk.losses("run"), desk.losses("whole"));
}

#[test]
fn lengths_contradicting_are_refused() {
    let desk = Desk::new();
    let both = desk.train("--epochs 2").ended(78);
    let error = both.line("error:");
    assert!(error.contains("--epochs 2: train.epochs = 2 and train.steps = 30"), "{error}");
    let none = desk.train("--patience 2 --eval-every 0").ended(78);
    let error = none.line("error:");
    assert!(error.contains("train.patience = 2 counts evaluations"), "{error}");
    let nothing = desk.train("--patience 2 --set data.held_out=0").ended(78);
    assert!(nothing.line("error:").contains("data.held_out above 0"), "{}", nothing.err);
}

/// A schedule that stays at its rate until the last steps, as many as are set or a tenth.
#[test]
fn wsd_decays_in_the_last_steps() {
    let desk = Desk::new();
    let line = "--steps 10 --set schedule.kind=wsd --set schedule.warmup=2 --set optim.lr=0.01";
    desk.train(&format!("{line} --set schedule.cooldown_steps=4 --out run --quiet")).ok();
    let rates: Vec<f64> =
        desk.steps("run").iter().map(|step| step["lr"].as_f64().unwrap()).collect();
    assert!(rates[1] < 0.01 && rates[2..6].iter().all(|lr| *lr == 0.01), "{rates:?}");
    assert!(rates[6..].is_sorted_by(|a, b| a > b) && rates[9] > 0.001, "{rates:?}");
    let explained = desk.train(&format!("{line} --steps 500 --explain config")).ok().out;
    assert!(explained.contains("# cooldown_steps = 50 "), "{explained}");
}

#[test]
fn patience_ends_run_larger_goes_on() {
    let desk = Desk::new();
    // So high a rate learns nothing after the first steps.
    let line = "--steps 400 --eval-every 5 --lr 3 --set schedule.min_lr=3 --set optim.clip=0 \
                --set train.skipped_steps_max=1000 --out run --patience";
    let ran = desk.train(&format!("{line} 3")).ok();
    let taken = desk.steps("run").len() as u64;
    let note = ran.line("stopping early at step ");
    assert!(note.contains(&format!("step {taken}: no ")), "{note}");
    assert!(note.ends_with(" in 3 evaluations (train.patience)"), "{note}");
    let best = desk.manifest("run", taken)["meta"]["best"]["step"].as_u64();
    assert_eq!((best.unwrap_or(0) / 5 + 3) * 5, taken);
    assert_eq!(desk.manifest("run", taken)["meta"]["evaluations_since_best"], 3);
    let listed = desk.run("runs run").ok().out;
    assert!(listed.contains(&format!("{taken}/400")) && listed.contains("done"), "{listed}");
    // A resume finds that it is lost, and takes no step.
    let again = desk.resume("run", "").ok();
    again.line("stopping early at step ");
    assert_eq!(desk.steps("run").len() as u64, taken);
    desk.resume("run", "--patience 4 --quiet").ok();
    assert!(desk.steps("run").len() as u64 >= taken + 5);
    // Another interval counts no evaluation that was not made.
    desk.resume("run", "--patience 9 --eval-every 1 --quiet").ok();
    assert!(desk.steps("run").len() as u64 > taken + 5);
}

#[test]
fn run_finished_is_not_measured_again() {
    let desk = Desk::new();
    let small = "--set model.layers=1 --set model.heads=2 --set model.width=16 \
                 --set model.context=8 --set train.batch=4 --steps 3";
    desk.run(&format!("train --devices cpu --quiet --out run {small}")).ok();
    let record = fs::read_to_string(desk.path("run/metrics.jsonl")).unwrap();
    assert!(record.contains("\"sampled\""), "{record}");
    let again = desk.resume("run", "--quiet").ok();
    assert_eq!(fs::read_to_string(desk.path("run/metrics.jsonl")).unwrap(), record);
    // Also a script that is quiet learns that nothing was trained.
    again.line("warning: step 3 of 3 is already done");
}

/// Runs the program on a disk of so many KiB.
#[cfg(target_os = "linux")]
fn on_small_disk(desk: &Desk, kib: u32, line: &str) -> Ran {
    fs::create_dir_all(desk.path("disk")).unwrap();
    let program = env!("CARGO_BIN_EXE_potluck");
    let script = format!("mount -t tmpfs -o size={kib}k none disk && exec '{program}' {line}");
    let words = desk.command("");
    let mut command = Command::new("unshare");
    command.args(["-Urm", "sh", "-c", &script]).current_dir(desk.path(""));
    command.envs(words.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(command.spawn().unwrap(), line)
}

#[test]
#[cfg(target_os = "linux")]
fn disk_without_room_refused_at_start() {
    let works = Command::new("unshare").args(["-Urm", "true"]).status();
    if !works.is_ok_and(|status| status.success()) {
        return skip("no mount namespaces for users");
    }
    let desk = Desk::new();
    // 4,096 parameters and more, with two moments each.
    let line = "train tiny.toml --data text.txt --devices cpu --out disk/run --quiet";
    on_small_disk(&desk, 1024, line).ok();
    let full = on_small_disk(&desk, 64, line).ended(75);
    let error = full.line("error:");
    assert!(error.contains("the first checkpoints (2) take"), "{error}");
    assert!(!full.err.contains("step"), "{}", full.err);
}

#[test]
#[cfg(target_os = "linux")]
fn out_never_writable_is_no_full_disk() {
    let desk = Desk::new();
    let line = "train tiny.toml --data text.txt --devices cpu --quiet --out /proc/run";
    let refused = desk.run(line).ended(78);
    assert!(refused.line("error:").contains("/proc/run"), "{}", refused.err);
}

#[test]
fn explain_memory_exit_code_tells_fit() {
    let desk = Desk::new();
    let line = "train tiny.toml --data text.txt --devices cpu --explain memory";
    desk.run(line).ok();
    let limit = "--set model.width=256 --set train.device_memory_mib";
    let small = desk.run(&format!("{line} {limit}=1")).ended(78);
    assert!(small.out.contains("does not fit: "), "{}", small.out);
    // What the run refuses, too.
    let refused = desk.train(&format!("{limit}=1")).ended(78);
    assert!(refused.line("error:").contains("1.0 MiB"), "{}", refused.err);
    assert!(refused.err.contains("as train.device_memory_mib sets it"), "{}", refused.err);
    assert!(!desk.path("runs").exists());
    desk.run(&format!("{line} {limit}=512")).ok();
}
