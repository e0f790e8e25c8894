//! Steps that are not finite, and signals: what the program does about them, says, and saves.

use crate::process::Desk;

const SKIPPED: [&str; 9] =
    ["step", "loss", "lr", "grad_norm", "tokens", "ms", "tokens_per_s", "skipped", "reason"];

#[test]
fn step_not_finite_is_skipped_and_told() {
    let desk = Desk::new();
    let ran = desk.train_with("nan@backward:3", "--out run --quiet").ok();
    let warning = ran.line("warning:");
    for part in ["step 3 was skipped", "1 in a row", "not finite", "gradient of "] {
        assert!(warning.contains(part), "'{part}' is missing in: {warning}");
    }
    let named = warning.rsplit("gradient of ").next().unwrap();
    assert!(named.ends_with(".weight"), "no parameter is named: {warning}");

    let lines = desk.steps("run");
    assert_eq!(lines.len(), 30);
    for line in &lines {
        assert_eq!(line.get("skipped").is_some(), line["step"] == 3, "{line}");
    }
    let keys: Vec<&String> = lines[2].as_object().unwrap().keys().collect();
    assert_eq!(keys, SKIPPED);
    assert_eq!(lines[2]["skipped"], true);
    assert_eq!(lines[2]["reason"], "a gradient is not finite");

    let meta = &desk.manifest("run", 30)["meta"];
    assert_eq!((&meta["step"], &meta["optimizer_step"]), (&30.into(), &29.into()));
    assert!(desk.losses("run")[29] < desk.losses("run")[0]);
}

#[test]
fn steps_skipped_in_row_diagnosed_once() {
    let desk = Desk::new();
    let settings = "--out run --set train.skipped_steps_max=3";
    let ran = desk.train_with("nan@forward:3", settings).ended(78);
    assert_eq!(ran.lines("step 3 is not finite: rerunning it").len(), 1, "{}", ran.err);
    let warnings = ran.lines("warning: step ");
    let named: Vec<bool> = warnings.iter().map(|line| line.contains("it began at ")).collect();
    assert_eq!(named, [true, false, false], "{}", ran.err);
    assert!(ran.line("error:").contains("which began at parameter "), "{}", ran.err);

    // A later row is diagnosed again.
    let ran = desk.train_with("nan@backward:3,nan@backward:5", "--out other").ok();
    for step in [3, 5] {
        let line = format!("step {step} is not finite: rerunning it");
        assert_eq!(ran.lines(&line).len(), 1, "{}", ran.err);
    }
}

#[test]
fn step_skipped_changes_nothing() {
    let desk = Desk::new();
    let settings = "--quiet --set train.checkpoint_every=1 --set train.checkpoint_keep=9 --steps 4";
    desk.train_with("nan@backward:3", &format!("{settings} --out run")).ok();
    for file in ["parameters.safetensors", "moments.safetensors"] {
        assert!(desk.checkpoint("run", 3, file) == desk.checkpoint("run", 2, file), "{file}");
        assert!(desk.checkpoint("run", 4, file) != desk.checkpoint("run", 3, file), "{file}");
    }
}

#[test]
fn steps_not_finite_end_the_run() {
    let desk = Desk::new();
    let settings = "--out run --quiet --set train.skipped_steps_max=4 \
                    --set train.checkpoint_every=1 --set train.eval_every=1";
    let ran = desk.train_with("nan@forward:3", settings).ended(78);
    let error = ran.line("error:");
    for part in ["4 steps in a row were not finite", "parameter ", ".weight", "step-00000002"] {
        assert!(error.contains(part), "'{part}' is missing in: {error}");
    }
    for (skipped, step) in (1..=4).zip(3..) {
        let line = format!("warning: step {step} was skipped ({skipped} in a row");
        assert_eq!(ran.lines(&line).len(), 1, "'{line}' is missing in:\n{}", ran.err);
    }
    // What is not finite was told, and neither saved nor taken for the best.
    assert_eq!(ran.lines("warning: step 4 was not saved: the parameter ").len(), 1, "{}", ran.err);
    let checkpoints = desk.files().into_iter().filter(|name| name.ends_with("manifest.json"));
    let step = |number: u64| format!("run/checkpoints/step-{number:08}/manifest.json");
    assert!(checkpoints.eq([step(1), step(2)]));
    for best in ["", "--best"] {
        desk.run(&format!("eval run --devices cpu {best}")).ok();
    }
    desk.resume("run", "--quiet").ok();
    assert_eq!(desk.steps("run").len(), 30);
}

/// A panic that is caught is an error with its place, and nothing else on stderr.
#[test]
fn device_thread_panic_is_an_error() {
    for (fault, devices) in [("panic@verdict:3", "cpu"), ("panic@backward:3/1", "cpu*2")] {
        let desk = Desk::new();
        let line = format!(
            "train tiny.toml --data text.txt --out run --quiet --devices {devices} --set \
             parallel.balance=fixed"
        );
        let child = desk.command(&line).env("POTLUCK_FAULT", fault).spawn().unwrap();
        let ran = crate::process::finish(child, fault).ended(70);
        let error = ran.line("error: ");
        for part in [
            "did not end: its thread panicked (injected, at src",
            "please report it; the last checkpoint is run/checkpoints/step-00000000; ",
            "with: potluck train --resume run",
        ] {
            assert!(error.contains(part), "'{part}' is missing in: {error}");
        }
        assert!(!error.contains("refused"), "{error}");
        assert_eq!(ran.err.lines().count(), 1, "{}", ran.err);
        assert!(!ran.err.contains("panicked at"), "{}", ran.err);
    }
}

#[test]
fn interrupt_second_ends_at_once() {
    let desk = Desk::new();
    desk.train_with("sigint@forward:5,sigint@update:5", "--out run --quiet").ended(130);
    assert_eq!(desk.steps("run").len(), 4);
    desk.resume("run", "--quiet").ok();
    assert_eq!(desk.steps("run").len(), 30);
}

/// A shell's `trap ''` and `nohup` start a program with an ignored signal, which it must not catch.
#[test]
#[cfg(target_os = "linux")]
fn signals_ignored_at_start_stay_so() {
    use std::process::{Command, Stdio};
    use std::thread;
    use std::time::{Duration, Instant};
    for signal in ["HUP", "INT"] {
        let desk = Desk::new();
        let line = "train tiny.toml --data text.txt --devices cpu --out run --quiet \
                    --steps 1000000000";
        let program = env!("CARGO_BIN_EXE_potluck");
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("trap '' {signal}; exec '{program}' {line}")]);
        let words = desk.command("");
        shell.envs(words.get_envs().filter_map(|(name, value)| Some((name, value?))));
        shell.env_remove("POTLUCK_FAULT").current_dir(desk.path(""));
        shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = shell.spawn().unwrap();
        let id = child.id();
        let record = desk.path("run/metrics.jsonl");
        let written = || std::fs::metadata(&record).map_or(0, |file| file.len());
        let mut grow = |than: u64| {
            let deadline = Instant::now() + Duration::from_secs(60);
            while written() <= than {
                let ended = child.try_wait().unwrap();
                assert!(ended.is_none(), "ended after SIG{signal}: {ended:?}");
                assert!(Instant::now() < deadline, "no step in a minute");
                thread::sleep(Duration::from_millis(5));
            }
        };
        grow(0);
        crate::process::send_signal(id, signal);
        grow(written() + 20_000);
        crate::process::send_signal(id, "TERM");
        let ran = crate::process::finish(child, signal).ended(75);
        ran.line("terminated (SIGTERM); the run is saved: ");
    }
}

/// Signals from outside, to a run that would take days.
#[test]
#[cfg(unix)]
fn signal_from_outside_saves_and_ends() {
    use std::io::{BufRead, BufReader};
    for (signal, code, says) in [
        ("INT", 130, "interrupted; the run is saved: "),
        ("TERM", 75, "terminated (SIGTERM); the run is saved: "),
        ("HUP", 75, "hung up (SIGHUP); the run is saved: "),
        ("USR1", 75, "stopped by the job manager (SIGUSR1); the run is saved: "),
    ] {
        let desk = Desk::new();
        let line = "train tiny.toml --data text.txt --devices cpu --out run --on-usr1 stop \
                    --log-every 1000000 --steps 1000000000";
        let mut child = desk.command(line).spawn().unwrap();
        let mut seen = String::new();
        let mut err = BufReader::new(child.stderr.take().unwrap());
        while !seen.contains("\nstep 1/") {
            let read = err.read_line(&mut seen).unwrap();
            assert!(read > 0, "ended before its first step:\n{seen}");
        }
        crate::process::send_signal(child.id(), signal);
        let mut rest = String::new();
        let reader = std::thread::spawn(move || {
            std::io::Read::read_to_string(&mut err, &mut rest).map(|_| rest)
        });
        crate::process::finish(child, &format!("SIG{signal}")).ended(code);
        let rest = reader.join().unwrap().unwrap();
        assert!(rest.contains(says), "{rest}");

        let done = desk.steps("run").len();
        let steps = done + 2;
        desk.resume("run", &format!("--quiet --steps {steps}")).ok();
        assert_eq!(desk.steps("run").len(), steps, "SIG{signal} after {done} steps");
    }
}

/// Waits until a file of a run is there.
#[cfg(unix)]
fn wait_for_file(desk: &Desk, path: &str) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !desk.path(path).exists() {
        assert!(std::time::Instant::now() < deadline, "no {path} in a minute");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Devices are opened and timed before the first step, in which there is nothing to save.
#[test]
#[cfg(unix)]
fn sigterm_before_first_step_exits_75() {
    let desk = Desk::new();
    let line = "train tiny.toml --data text.txt --devices cpu --steps 1000000000 --quiet";
    let child = desk.command(line).spawn().unwrap();
    wait_for_file(&desk, "runs/0001");
    crate::process::send_signal(child.id(), "TERM");
    crate::process::finish(child, "a run that begins").ended(75).line("terminated (SIGTERM)");
}

/// Also while a file is read that does not come.
#[test]
#[cfg(target_os = "linux")]
fn sigterm_ends_start_awaiting_file() {
    let desk = Desk::new();
    let made = std::process::Command::new("mkfifo").arg(desk.path("pipe.toml")).status();
    assert!(made.unwrap().success());
    let child = desk.command("train pipe.toml --devices cpu").spawn().unwrap();
    // Until signals are caught, they end a process as they always do.
    let status = format!("/proc/{}/status", child.id());
    let catches = |text: String| {
        let mask = text.lines().find_map(|line| line.strip_prefix("SigCgt:").map(str::trim));
        mask.is_some_and(|mask| u64::from_str_radix(mask, 16).unwrap() >> 14 & 1 == 1)
    };
    while !std::fs::read_to_string(&status).is_ok_and(catches) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    crate::process::send_signal(child.id(), "TERM");
    crate::process::finish(child, "a start").ended(75).line("terminated (SIGTERM)");
}

/// A device that hangs keeps a run from its checkpoint.
#[test]
#[cfg(unix)]
fn sigterm_unsaved_in_time_ends() {
    let desk = Desk::new();
    let line = "train tiny.toml --data text.txt --devices cpu --out run --quiet \
                --set train.checkpoint_every=2 --term-timeout 0.5";
    let faults = "sigterm@forward:4,hang@backward:4";
    let child = desk.command(line).env("POTLUCK_FAULT", faults).spawn().unwrap();
    let ran = crate::process::finish(child, "a device that hangs").ended(75);
    let said = "terminated (SIGTERM), and the run was not saved within 0.5 seconds";
    assert!(ran.line("error: ").contains(said), "{}", ran.err);
    desk.resume("run", "--quiet").ok();
    assert_eq!(desk.steps("run").len(), 30);
}

/// Checkpoints by the clock, of a run that has none by steps.
#[test]
#[cfg(unix)]
fn checkpoints_are_made_by_time() {
    let desk = Desk::new();
    let line = "train tiny.toml --data text.txt --devices cpu --out run --quiet \
                --set train.checkpoint_every=0 --set train.eval_every=0 --steps 1000000000 --set \
                train.checkpoint_minutes=0.001";
    let child = desk.command(line).spawn().unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    // The run makes and removes them meanwhile; one that is complete has a name of digits.
    let newest = || {
        let Ok(entries) = std::fs::read_dir(desk.path("run/checkpoints")) else {
            return String::new();
        };
        let mut newest = String::new();
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let step = name.strip_prefix("step-").unwrap_or("none");
            if step.bytes().all(|byte| byte.is_ascii_digit()) {
                newest = newest.max(name);
            }
        }
        newest
    };
    let mut seen = vec![newest()];
    while seen.len() < 5 {
        assert!(std::time::Instant::now() < deadline, "only {seen:?} in a minute");
        let now = newest();
        if seen.last() != Some(&now) {
            seen.push(now);
        }
    }
    crate::process::send_signal(child.id(), "TERM");
    crate::process::finish(child, "a run without an end").ended(75);
}
