//! Runs that go on: from which checkpoint, in which directory, on which devices, with which
//! settings; and the commands that the program suggests, which are run as they are printed.

use std::fs;
use std::path::Path;

use potluck_train::checkpoint::{Checkpoint, Store};

use crate::process::{Desk, Ran};

/// Trains for 8 steps in `run`, with checkpoints at 4 and 8, and no evaluation in between.
fn trained() -> Desk {
    let desk = Desk::new();
    desk.train("--out run --quiet --steps 8 --set train.checkpoint_every=4").ok();
    desk
}

fn with_fault(desk: &Desk, fault: &str, line: &str) -> Ran {
    let child = desk.command(line).env("POTLUCK_FAULT", fault).spawn().unwrap();
    crate::process::finish(child, &format!("{fault}: {line}"))
}

/// Starts a command line three times at once and returns how they ended.
fn at_once(desk: &Desk, line: &str) -> Vec<Ran> {
    let lines: Vec<String> = (1..=3).map(|seed| format!("{line} --seed {seed}")).collect();
    let started: Vec<_> = lines.iter().map(|line| desk.command(line).spawn().unwrap()).collect();
    started
        .into_iter()
        .zip(&lines)
        .map(|(child, line)| crate::process::finish(child, line))
        .collect()
}

fn copy_directory(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

// ---- where a run goes on ----

#[test]
fn resume_outside_run_starts_new_run() {
    let desk = trained();
    copy_directory(&desk.path("run/checkpoints/step-00000004"), &desk.path("backup"));
    for number in [1, 2] {
        let ran = desk.resume("backup", "--steps 12").ok();
        let new = format!("runs/000{number}");
        ran.line(&format!("backup is a checkpoint outside a run; starting a new run in {new}"));
        assert_eq!(desk.manifest(&new, 12)["meta"]["step"], 12);
        assert_eq!(desk.steps(&new).len(), 8, "from step 4 to 12");
    }
    let in_backup = desk.files().into_iter().filter(|name| name.starts_with("backup/"));
    assert_eq!(in_backup.count(), 3, "the checkpoint is as it was");
    let evaluated = desk.run("eval backup --devices cpu").ok();
    assert!(evaluated.out.starts_with("step 4 "), "{}", evaluated.out);
    // The same directory with checkpoints of its own would be two things.
    fs::create_dir(desk.path("backup/checkpoints")).unwrap();
    let both = desk.run("eval backup --devices cpu").ended(78);
    assert!(both.line("error:").contains("has checkpoints/ as a run"), "{}", both.err);
}

#[test]
fn resume_new_out_saves_its_start() {
    let desk = trained();
    let line = "train --quiet --devices cpu --resume run --out fork --steps 30";
    assert_ne!(with_fault(&desk, "kill@forward:9", line).code(), Some(0));
    for file in ["parameters.safetensors", "moments.safetensors"] {
        assert!(desk.checkpoint("fork", 8, file) == desk.checkpoint("run", 8, file), "{file}");
    }
    desk.resume("fork", "--quiet").ok();
    assert_eq!(desk.manifest("fork", 30)["meta"]["step"], 30);
}

#[test]
fn latest_skips_run_without_checkpoint() {
    let desk = Desk::new();
    desk.train("--steps 3 --quiet").ok();
    let killed = desk.train_with("kill@checkpoint-manifest:0", "--quiet");
    assert_ne!(killed.code(), Some(0));
    assert!(desk.path("runs/0002").is_dir());
    let text = |run: &str| {
        desk.run(&format!("generate {run} --devices cpu --tokens 8 --prompt the")).ok().out
    };
    assert_eq!(text("latest"), text("runs/0001"));
    for named in ["0001", "latest"] {
        let start = format!("train --init {named} --data text.txt --steps 1 --out from-{named}");
        let ran = desk.run(&format!("{start} --devices cpu")).ok();
        ran.line("starting from runs/0001/checkpoints/");
    }
    let ran = desk.resume("latest", "--quiet --steps 5").ok();
    assert_eq!(ran.line("warning:"), "warning: runs/0002 has no checkpoint to resume from");
    assert_eq!(desk.steps("runs/0001").len(), 5);

    let desk = Desk::new();
    desk.train_with("kill@checkpoint-manifest:0", "--quiet");
    let none = desk.resume("latest", "").ended(78);
    assert!(none.line("error:").contains("there is no run in runs/ to resume"), "{}", none.err);
    let none = desk.run("eval latest --devices cpu").ended(2);
    assert!(none.err.contains("no run in runs/ has a checkpoint"), "{}", none.err);
}

#[test]
fn starts_at_once_have_own_directories() {
    let desk = Desk::new();
    let line = "train tiny.toml --data text.txt --devices cpu --quiet --steps 3";
    for ran in at_once(&desk, line) {
        ran.ok();
    }
    let run = |number: u64| format!("runs/000{number}");
    let mut seeds: Vec<u64> = (1..=3)
        .map(|number| desk.manifest(&run(number), 3)["meta"]["seed"].as_u64().unwrap())
        .collect();
    seeds.sort_unstable();
    assert_eq!(seeds, [1, 2, 3]);

    let ended = at_once(&desk, &format!("{line} --out same"));
    let refused: Vec<&Ran> = ended.iter().filter(|ran| ran.code() != Some(0)).collect();
    assert_eq!((refused.len(), desk.steps("same").len()), (2, 3));
    for ran in refused {
        let error = ran.line("error:");
        // A restart heals only the second.
        let code = if error.contains("holds a run already") { 78 } else { 75 };
        assert!(code == 78 || error.contains("is in use"), "{error}");
        assert_eq!(ran.code(), Some(code), "{error}");
    }
    desk.run("train --quiet --devices nosuchdevice").ended(78);
    assert!(!desk.path("runs/0004").exists(), "a refused start leaves no directory");
    fs::remove_dir_all(desk.path("runs")).unwrap();
    desk.run("train --quiet --devices nosuchdevice").ended(78);
    assert!(!desk.path("runs").exists(), "a refused start leaves no directory");
}

#[test]
fn resumes_at_once_leave_one_course() {
    let desk = trained();
    let ended = at_once(&desk, "train --resume run --quiet --steps 12");
    // One that loads its checkpoint after the end of another finds all steps done.
    let (done, refused): (Vec<Ran>, Vec<Ran>) =
        ended.into_iter().partition(|ran| ran.code() == Some(0));
    assert!(!done.is_empty());
    for ran in refused.into_iter().map(|ran| ran.ended(75)) {
        let error = ran.line("error:");
        assert!(
            error.contains("was trained from step 8") || error.contains("is in use"),
            "{error}"
        );
    }
    assert_eq!(desk.steps("run").len(), 12);
    assert!(desk.files().iter().all(|name| !name.contains("aside")), "{:?}", desk.files());
}

#[test]
fn latest_skips_run_in_use() {
    let desk = Desk::new();
    for name in ["first", "second"] {
        desk.train(&format!("--name {name} --steps 3 --quiet")).ok();
    }
    let hold = |name: &str| {
        let lock = fs::File::open(desk.path(&format!("runs/{name}/lock"))).unwrap();
        lock.lock().unwrap();
        lock
    };
    let second = hold("second");
    let ran = desk.resume("latest", "--quiet --steps 5").ok();
    assert_eq!(ran.line("warning:"), "warning: runs/second is in use by another process");
    assert_eq!(desk.steps("runs/first").len(), 5);
    let first = hold("first");
    let none = desk.resume("latest", "--quiet --steps 7").ended(78);
    assert!(none.line("error:").contains("the run is in use by process"), "{}", none.err);
    drop((first, second));
}

#[test]
fn out_that_is_a_file_is_refused() {
    let desk = Desk::new();
    for out in ["text.txt", "text.txt/run"] {
        let ran = desk.train(&format!("--out {out}")).ended(78);
        let expected = format!("error: {out}: text.txt is no directory; set another --out");
        assert_eq!(ran.line("error:"), expected);
    }
}

#[test]
fn resume_relative_path_finds_run() {
    let desk = trained();
    for (place, from, steps) in [
        ("run", "checkpoints/step-00000008", 10),
        ("run", ".", 12),
        ("run/checkpoints", "step-00000012", 14),
        ("run/checkpoints/step-00000014", ".", 16),
        ("run/checkpoints/step-00000016", "../step-00000016", 18),
    ] {
        let line = format!("train --quiet --devices cpu --resume {from} --steps {steps}");
        let mut command = desk.command(&line);
        command.current_dir(desk.path(place));
        crate::process::finish(command.spawn().unwrap(), &line).ok();
        assert_eq!(desk.steps("run").len(), steps, "{from} in {place}");
    }
    let nested = desk.files().into_iter().filter(|name| name.contains("runs/"));
    assert_eq!(nested.count(), 0);
}

// ---- what is kept ----

#[test]
fn resume_older_step_keeps_later_ones() {
    let desk = trained();
    let from = "run/checkpoints/step-00000004";
    let first = desk.checkpoint("run", 8, "manifest.json");
    for (time, ending) in [".aside", ".aside.1", ".aside.2"].into_iter().enumerate() {
        let ran = desk.resume(from, &format!("--set optim.lr=0.00{}", time + 1)).ok();
        let note = ran.line("set aside: ");
        // Four steps, and the evaluation at the end.
        for part in ["1 later checkpoint as ", ending, "5 lines of metrics.jsonl in "] {
            assert!(note.contains(part), "'{part}' is missing in: {note}");
        }
        assert!(desk.path(&format!("run/checkpoints/step-00000008{ending}")).is_dir());
        assert_eq!(desk.steps("run").len(), 8);
    }
    let kept = desk.path("run/checkpoints/step-00000008.aside/manifest.json");
    assert!(fs::read(kept).unwrap() == first);
    let lines = fs::read_to_string(desk.path("run/metrics.jsonl.aside")).unwrap();
    assert_eq!(lines.lines().count(), 15, "{lines}");
}

#[test]
fn sentences_other_course_set_aside() {
    let desk = Desk::new();
    let line = "train tiny.toml --devices cpu --out run --quiet --steps 8 \
                --set train.checkpoint_every=4";
    desk.run(line).ok();
    let (list, step) = ("run/sentences-00000008.txt", "run/checkpoints/step-00000004");
    let first = fs::read(desk.path(list)).unwrap();
    let ran = desk.resume(step, "--set optim.lr=0.1").ok();
    let note = ran.line("set aside: ");
    assert!(note.ends_with(&format!("; {list}.aside")), "{note}");
    assert!(fs::read(desk.path(&format!("{list}.aside"))).unwrap() == first);
    // The same step, sampled again with another seed.
    let second = fs::read(desk.path(list)).unwrap();
    let ran = desk.resume("run", "--seed 5").ok();
    ran.line(&format!("set aside: {list} as {list}.aside.1"));
    assert!(fs::read(desk.path(&format!("{list}.aside.1"))).unwrap() == second);
    // The same sentences again are the same file.
    desk.resume("run", "--quiet --seed 5").ok();
    assert!(!desk.path(&format!("{list}.aside.2")).exists());
}

#[test]
fn resume_other_data_keeps_old_save() {
    let desk = trained();
    let first = desk.checkpoint("run", 8, "manifest.json");
    let text = fs::read_to_string(desk.path("text.txt")).unwrap();
    desk.write("other.txt", format!("{text}{text}"));
    let ran = desk.resume("run", "--data other.txt").ok();
    let kept = "run/checkpoints/step-00000008.aside";
    ran.line(&format!("set aside: the checkpoint of step 8 as {kept}"));
    assert!(fs::read(desk.path(&format!("{kept}/manifest.json"))).unwrap() == first);
    assert!(desk.checkpoint("run", 8, "manifest.json") != first);
    desk.run(&format!("eval {kept} --devices cpu")).ok();
}

#[test]
fn resume_new_out_knows_the_best() {
    let desk = trained();
    desk.resume("run", "--quiet --out fork --steps 9").ok();
    assert_eq!(desk.manifest("fork", 8)["meta"]["best"], desk.manifest("run", 8)["meta"]["best"]);
    desk.run("eval fork --best --devices cpu").ok();
    let from = "fork/checkpoints/step-00000008";
    let ran = desk.run(&format!("eval {from} --best --devices cpu")).ended(78);
    assert!(ran.line("error:").contains("--best takes the directory of a run"), "{}", ran.err);
}

#[test]
fn record_without_checkpoints_is_kept() {
    let desk = trained();
    let record = fs::read_to_string(desk.path("run/metrics.jsonl")).unwrap();
    for start in ["train tiny.toml --data text.txt", "train --resume run/checkpoints/step-00000004"]
    {
        fs::create_dir(desk.path("other")).unwrap();
        desk.write("other/metrics.jsonl", &record);
        let ran = desk.run(&format!("{start} --devices cpu --out other --steps 6")).ok();
        ran.line("set aside: 9 lines of metrics.jsonl in other/metrics.jsonl.aside");
        let kept = fs::read_to_string(desk.path("other/metrics.jsonl.aside")).unwrap();
        assert_eq!(kept, record);
        let steps: Vec<u64> =
            desk.steps("other").iter().map(|line| line["step"].as_u64().unwrap()).collect();
        assert_eq!(steps.last(), Some(&6));
        assert_eq!(steps.len() as u64, 7 - steps[0], "lines of another run are among {steps:?}");
        fs::remove_dir_all(desk.path("other")).unwrap();
    }
}

#[test]
fn best_mark_damaged_is_a_warning() {
    for garbage in ["", "no step\n"] {
        let desk = trained();
        desk.write("run/checkpoints/best", garbage);
        let ran = desk.resume("run", "--quiet --steps 10").ok();
        let warning = ran.line("warning: run/checkpoints/best: does not name the best");
        assert!(warning.contains("marked again"), "{warning}");
        assert!(!warning.contains("name a checkpoint directory"), "{warning}");
        desk.run("eval run --best --devices cpu").ok();
        // Also from an older checkpoint, to which the best does not belong.
        desk.write("run/checkpoints/best", garbage);
        desk.resume("run/checkpoints/step-00000008", "--quiet --steps 10").ok();
        desk.write("run/checkpoints/best", garbage);
        let refused = desk.run("eval run --best --devices cpu").ended(78);
        assert!(refused.line("error:").contains("name a checkpoint directory"), "{}", refused.err);
    }
}

/// The disk was full at the best evaluation: the one before, which is marked, is the best again,
/// and worse ones do not take its place.
#[test]
fn best_without_save_is_the_marked_one() {
    let desk = Desk::new();
    let settings = "--set train.eval_every=4 --set train.checkpoint_every=100 \
                    --set schedule.kind=constant";
    let fault = "full@checkpoint-begin:8,sigterm@metrics:9";
    desk.train_with(fault, &format!("--out run --quiet --steps 12 {settings}")).ended(75);
    assert_eq!(desk.manifest("run", 9)["meta"]["best"]["step"], 8);
    assert!(!desk.path("run/checkpoints/step-00000008").exists());
    let worse = "--quiet --steps 12 --set optim.lr=100 --set optim.clip=0";
    desk.resume("run", worse).ok();
    assert_eq!(desk.manifest("run", 12)["meta"]["best"], desk.manifest("run", 4)["meta"]["best"]);
    desk.run("eval run --best --devices cpu").ok();
    // It is set aside if later evaluations are not compared with it.
    let from = "run/checkpoints/step-00000009";
    let told = desk.resume(from, "--steps 12 --set train.eval_samples=1").ok();
    let note = told.line("evaluations now take 1 samples");
    assert!(note.contains("the best one so far, of step 4, is now"), "{note}");
    assert!(desk.path("run/checkpoints/step-00000004.aside").is_dir());
}

/// The run ended between the record of the best evaluation and its save, at a step that was saved
/// before.
#[test]
fn best_that_was_recorded_is_saved() {
    let desk = trained();
    let record = fs::read_to_string(desk.path("run/metrics.jsonl")).unwrap();
    let evaluation = record.lines().find(|line| line.contains("val_loss")).unwrap();
    // It was due then, or it was the one at the end of a shorter run.
    for every in [4, 3] {
        let other = format!("other-{every}");
        desk.train(&format!("--out {other} --quiet --steps 8 --eval-every 0")).ok();
        assert!(desk.manifest(&other, 8)["meta"]["best"].is_null());
        let path = format!("{other}/metrics.jsonl");
        let record = fs::read_to_string(desk.path(&path)).unwrap();
        desk.write(&path, format!("{record}{evaluation}\n"));
        let worse = "--steps 9 --set optim.lr=100 --set optim.clip=0 --devices cpu --quiet";
        desk.run(&format!("train --resume {other} --eval-every {every} {worse}")).ok();
        let best = &desk.manifest(&other, 9)["meta"]["best"];
        assert_eq!(*best, desk.manifest("run", 8)["meta"]["best"], "{every}");
        desk.run(&format!("eval {other} --best --devices cpu")).ok();
    }
}

#[test]
fn best_of_other_text_is_forgotten() {
    let desk = trained();
    let reversed: String =
        fs::read_to_string(desk.path("text.txt")).unwrap().chars().rev().collect();
    desk.write("other.txt", &reversed);
    assert_eq!(desk.manifest("run", 8)["meta"]["best"]["step"], 8);
    desk.resume("run", "--quiet --steps 10").ok();
    let slow = "--steps 12 --data other.txt --set optim.lr=1e-6 --set schedule.min_lr=1e-7";
    let ran = desk.resume("run", slow).ok();
    let warning = ran.line("warning: the data are not those");
    assert!(warning.contains("are not compared with later ones"), "{warning}");
    assert!(ran.line("step 12  val_loss").ends_with(", the best since step 10"), "{}", ran.err);
    // The loss on the other text is higher than the best one on the first, and yet the best.
    let losses: Vec<f64> =
        desk.metrics("run").iter().filter_map(|line| line["val_loss"].as_f64()).collect();
    assert!(losses[losses.len() - 1] > losses[losses.len() - 2], "{losses:?}");
    assert_eq!(desk.manifest("run", 12)["meta"]["best"]["step"], 12);
}

#[test]
fn best_of_other_split_is_forgotten() {
    let desk = trained();
    let slow = "--quiet --steps 9 --set optim.lr=1e-6 --set schedule.min_lr=1e-7";
    let ran = desk.resume("run", &format!("{slow} --set data.held_out=0.3")).ok();
    ran.line("warning: the data are not those that the checkpoint was trained on: earlier eval");
    assert_eq!(desk.manifest("run", 9)["meta"]["best"]["step"], 9);
    assert_eq!(desk.resume("run", "--quiet --steps 10").ok().err, "");
}

#[test]
fn best_of_other_text_is_set_aside() {
    let desk = Desk::new();
    let settings = "--set train.eval_every=2 --set train.checkpoint_every=2 \
                    --set train.checkpoint_keep=9 --set schedule.kind=constant";
    desk.train(&format!("--out run --quiet --steps 4 {settings}")).ok();
    // A step that spoils the model leaves the one before as the best.
    let worse = "--quiet --steps 6 --set optim.lr=100 --set optim.clip=0";
    desk.resume("run", worse).ok();
    let best = desk.manifest("run", 6)["meta"]["best"]["step"].as_u64().unwrap();
    assert_eq!(best, 4);
    let text = fs::read_to_string(desk.path("text.txt")).unwrap();
    desk.write("other.txt", format!("{text}{text}"));
    let ran = desk.resume("run", "--quiet --steps 8 --data other.txt --set optim.lr=1e-6").ok();
    let warning = ran.line("warning: the data are not those");
    assert!(warning.contains("run/checkpoints/step-00000004.aside"), "{warning}");
    assert!(desk.path("run/checkpoints/step-00000004.aside").is_dir());
}

#[test]
fn eval_changed_data_is_a_warning() {
    let desk = trained();
    assert_eq!(desk.run("eval run --devices cpu").ok().err, "");
    let text = fs::read_to_string(desk.path("text.txt")).unwrap();
    desk.write("text.txt", format!("{text}{text}"));
    let ran = desk.run("eval run --devices cpu").ok();
    ran.line("warning: the data are not those that the checkpoint was trained on");
    assert_eq!(desk.run("eval run --devices cpu --data text.txt").ok().err, "");
}

#[test]
fn checkpoints_without_interval_are_three() {
    let desk = Desk::new();
    let line = "--out run --quiet --steps 9 --set train.checkpoint_every=0 \
                --set train.checkpoint_keep=9 --set train.eval_every=5";
    desk.train(line).ok();
    let manifests = desk.files().into_iter().filter(|name| name.ends_with("manifest.json"));
    let step = |number: u64| format!("run/checkpoints/step-{number:08}/manifest.json");
    assert!(manifests.eq([step(0), step(5), step(9)]), "start, best, end");
    let help = desk.run("train --explain keys").ok().out;
    assert!(help.contains("0 = only at the start, at the end and at a new best"), "{help}");
}

// ---- settings ----

#[test]
fn resume_devices_are_of_run_or_named() {
    let desk = Desk::new();
    let two = "train tiny.toml --data text.txt --out run --steps 4 --devices cpu*2 \
               --set parallel.shares=3,1";
    desk.run(two).ok();
    let ranks = |run: &str, step: usize| desk.steps(run)[step]["ranks"].as_array().map(Vec::len);
    assert_eq!(ranks("run", 3), Some(2));
    desk.run("train --resume run --steps 6 --quiet").ok();
    assert_eq!(ranks("run", 5), Some(2), "the devices are part of the run");
    // Other devices are placed anew.
    let ran = desk.run("train --resume run --steps 8 --devices cpu*3").ok();
    ran.line("parallel.devices is set: choosing a new placement in place of cpu*2");
    desk.run("train --resume run --steps 9 --quiet --devices cpu").ok();
    assert_eq!(ranks("run", 8), None);
    let toml = fs::read_to_string(desk.path("run/run.toml")).unwrap();
    assert!(toml.contains("devices = \"cpu\"\n"), "{toml}");
    desk.run("train run/run.toml --out again --quiet").ok();
    assert_eq!(ranks("again", 0), None, "a run's file repeats its devices");
    let config = "train --resume run --explain config --devices";
    assert!(desk.run(&format!("{config} 0")).ok().out.contains("devices = \"0\"\n"));
}

#[test]
fn resume_missing_devices_suggests_others() {
    let desk = trained();
    let mut store = Store::open(&desk.path("run")).unwrap();
    let mut checkpoint = Checkpoint::load(&store.path(8)).unwrap();
    checkpoint.meta.placement.devices_asked = "cpu,nosuchdevice,nosuchone*2".into();
    store.save(&checkpoint).unwrap();
    drop(store);
    let ran = desk.run("train --resume run --steps 9").ended(78);
    let error = ran.line("error:");
    let missing = "but nosuchdevice and nosuchone*2 are not here";
    for part in ["cpu,nosuchdevice,nosuchone*2", missing, "--devices auto"] {
        assert!(error.contains(part), "'{part}' is missing in: {error}");
    }
    assert_eq!(desk.steps("run").len(), 8);
    desk.run_suggested(error).ok();
    assert_eq!(desk.steps("run").len(), 9, "the command keeps what was typed");
}

#[test]
fn resume_dropout_and_lr_may_change() {
    let desk = trained();
    desk.resume("run", "--quiet --steps 9 --set model.dropout=0.2").ok();
    // The smallest rate follows the rate, which nobody else set.
    desk.resume("run", "--quiet --steps 10 --set optim.lr=1e-4").ok();
    let toml = fs::read_to_string(desk.path("run/run.toml")).unwrap();
    for line in ["dropout = 0.2", "lr = 0.0001", "# min_lr = 1e-5  # a tenth of optim.lr"] {
        assert!(toml.lines().any(|found| found == line), "'{line}' is missing in: {toml}");
    }
}

#[test]
fn data_is_found_from_any_directory() {
    let desk = trained();
    fs::create_dir(desk.path("elsewhere")).unwrap();
    let elsewhere = |line: &str| {
        let mut command = desk.command(line);
        command.current_dir(desk.path("elsewhere"));
        crate::process::finish(command.spawn().unwrap(), line)
    };
    elsewhere("eval ../run --devices cpu").ok();
    elsewhere("train --resume ../run --quiet --steps 9").ok();
    elsewhere("train ../run/run.toml --quiet --out again").ok();
    // A text that was moved is found beside the run's files, or both places are named.
    fs::rename(desk.path("text.txt"), desk.path("elsewhere/text.txt")).unwrap();
    for line in ["eval run --devices cpu", "train --resume run --steps 10"] {
        let ran = desk.run(line).ended(78);
        let error = ran.line("error:");
        for part in ["/text.txt: the training data", "run/text.txt", "--data PATH"] {
            assert!(error.contains(part), "'{part}' is missing in: {error}");
        }
    }
    fs::rename(desk.path("elsewhere/text.txt"), desk.path("run/text.txt")).unwrap();
    desk.run("eval run --devices cpu").ok();
    desk.run("plan --resume run --steps 10 --devices cpu").ok();
    desk.run("train --resume run --steps 10 --explain kernels").ok();
    desk.run("train --resume run --steps 10 --quiet").ok();
    desk.run("generate run --devices cpu --tokens 3").ok();
    // The path that is saved then is valid from anywhere.
    let toml = fs::read_to_string(desk.path("run/run.toml")).unwrap();
    assert!(toml.contains(desk.path("run/text.txt").to_str().unwrap()), "{toml}");
    elsewhere("train ../run/run.toml --quiet --out third").ok();
}

// ---- suggested commands ----

#[test]
fn signal_prints_command_that_goes_on() {
    let desk = Desk::new();
    let two = "train tiny.toml --data text.txt --devices cpu*2 --set parallel.shares=3,1 --steps 9";
    for (fault, code, starts) in
        [("sigterm@update:5", 75, "terminated"), ("sigint@update:5", 130, "interrupted")]
    {
        let out = format!("run-{starts}");
        let ran = with_fault(&desk, fault, &format!("{two} --out {out}")).ended(code);
        let line = ran.line(starts);
        assert!(line.ends_with(&format!("with: potluck train --resume {out}")), "{line}");
        desk.run_suggested(line).ok();
        assert_eq!(desk.steps(&out).len(), 9);
        assert_eq!(desk.steps(&out)[8]["ranks"].as_array().map(Vec::len), Some(2));
    }
}

#[test]
fn fault_prints_command_that_goes_on() {
    let line = "train tiny.toml --data text.txt --steps 9 --quiet --out my:run \
                --set train.checkpoint_every=4";
    for (devices, fault, command) in [
        ("cpu", "lost@backward:7", "continue it with: potluck train --resume my:run"),
        (
            "cpu*2",
            "lost@backward:7/1",
            "no other device of the run is left, continue on what is found with: \
             potluck train --resume my:run --devices auto",
        ),
        ("cpu*2", "flip@gather:8/1", "potluck train --resume my:run --devices auto"),
        ("cpu*2", "out-of-memory@update:6/0", "potluck train --resume my:run --devices auto"),
    ] {
        let desk = Desk::new();
        let line = format!("{line} --devices {devices} --set parallel.balance=fixed");
        let ran = with_fault(&desk, fault, &line).ended(75);
        let error = ran.line("error:");
        let checkpoint = "the last checkpoint is my:run/checkpoints/step-00000004; ";
        assert!(error.contains(checkpoint) && error.ends_with(command), "{fault}: {error}");
        desk.run_suggested(error).ok();
        assert_eq!(desk.steps("my:run").len(), 9, "{fault}");
    }
}

#[test]
fn fault_command_repeats_unsaved_keys() {
    let desk = trained();
    let line = "train --resume run --quiet --steps 12 --set train.checkpoint_every=100 \
                --set optim.lr=0.002 --devices cpu*2 --set parallel.balance=fixed";
    // At the best evaluation, and twice at the end.
    let full = ["full@checkpoint-begin:12"; 3].join(",");
    let ran = with_fault(&desk, &full, line).ended(75);
    let error = ran.line("error:");
    for part in ["step-00000008; ", "--set train.steps=12", "--set optim.lr=0.002", "cpu*2"] {
        assert!(error.contains(part), "'{part}' is missing in: {error}");
    }
    desk.run_suggested(error).ok();
    let steps = desk.steps("run");
    assert_eq!(steps.len(), 12);
    assert_eq!(steps[11]["ranks"].as_array().map(Vec::len), Some(2));
}

/// The shares of all devices are not those of the devices that are left.
#[test]
fn fault_command_without_device_no_shares() {
    let desk = trained();
    let line = "train --resume run --steps 12 --quiet --devices cpu*2 --set parallel.shares=3,1";
    let ran = with_fault(&desk, "lost@backward:10/1", line).ended(75);
    let error = ran.line("error:");
    let command = "with: potluck train --resume run --devices auto --set train.steps=12";
    assert!(error.ends_with(command), "{error}");
    desk.run_suggested(error).ok();
    assert_eq!(desk.steps("run").len(), 12);
}

#[test]
fn shares_are_one_per_device() {
    let desk = Desk::new();
    let before = desk.files();
    let ran = desk.train("--out run --set parallel.shares=2,2").ended(78);
    let error = ran.line("error:");
    assert!(error.contains("parallel.shares has 2 entries for 1 device;"), "{error}");
    assert_eq!(desk.files(), before);
    desk.train("--out run --quiet --steps 2 --set parallel.shares=4").ok();
}

#[test]
fn fault_while_timing_prints_command() {
    let desk = trained();
    let line = "train --steps 9 --quiet --devices cpu*2 --resume";
    for (from, checkpoint) in
        [("run/checkpoints/step-00000004", "step-00000004"), ("run", "step-00000008")]
    {
        let ran = with_fault(&desk, "lost@timing:0/1", &format!("{line} {from}")).ended(75);
        let error = ran.line("error:");
        let last = format!("the last checkpoint is run/checkpoints/{checkpoint}; ");
        let command = format!("--resume {from} --devices auto --set train.steps=9");
        assert!(error.contains(&last) && error.ends_with(&command), "{error}");
    }
    let ran = with_fault(&desk, "lost@timing:0/1", &format!("{line} run")).ended(75);
    desk.run_suggested(ran.line("error:")).ok();
    assert_eq!(desk.steps("run").len(), 9);
    // A new run has no checkpoint.
    let ran = with_fault(&desk, "lost@timing:0/1", &format!("{line} run --out new")).ended(75);
    assert!(!ran.err.contains("with: "), "{}", ran.err);
}

#[test]
fn fault_before_first_save_no_command() {
    let desk = Desk::new();
    let ran = desk.train_with("full@checkpoint-begin:0", "--out run --quiet").ended(75);
    assert!(!ran.err.contains("--resume"), "{}", ran.err);
}

#[test]
fn manifest_unknown_fields_are_kept() {
    let desk = trained();
    let mut store = Store::open(&desk.path("run")).unwrap();
    let mut checkpoint = Checkpoint::load(&store.path(8)).unwrap();
    checkpoint.meta.unknown.insert("future".into(), 7.into());
    store.save(&checkpoint).unwrap();
    drop(store);
    let ran = desk.resume("run", "--quiet --steps 9").ok();
    assert!(ran.line("warning:").contains("does not know meta.future"), "{}", ran.err);
    assert_eq!(desk.manifest("run", 9)["meta"]["future"], 7);
}
