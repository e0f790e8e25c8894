//! The examples do what they say: they are run, on one CPU device and on two, and their output is
//! read.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use crate::process::{Desk, send_signal};

/// Devices that the examples run on.
const DEVICES: [&str; 2] = ["cpu", "cpu*2"];

/// The example's program, which cargo builds next to the program that is tested.
fn program(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_BIN_EXE_potluck")).parent().unwrap().join("examples");
    let path = directory.join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    assert!(path.exists(), "{} is missing: run cargo build --examples first", path.display());
    path
}

/// Output of the example.
fn run(name: &str, args: &[&str]) -> String {
    let mut command = Command::new(program(name));
    let output = command.args(args).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (out, err) = (text(output.stdout), text(output.stderr));
    assert!(output.status.success(), "{name} {args:?}: {}\n{out}{err}", output.status);
    out
}

/// The number after a word, in each line that has it.
fn numbers(out: &str, word: &str) -> Vec<f64> {
    let after =
        |line: &str| line.split_whitespace().skip_while(|w| *w != word).nth(1)?.parse().ok();
    out.lines().filter_map(after).collect()
}

#[test]
fn xor_is_learned() {
    for devices in DEVICES {
        let out = run("xor", &[devices]);
        assert!(out.lines().any(|line| line == "learned"), "{out}");
        assert!(out.contains("training on cpu"), "{out}");
        let losses = numbers(&out, "loss");
        assert!(losses.len() == 6 && losses[5] < losses[0], "{out}");
    }
}

#[test]
fn tensor_has_losses_of_one_device() {
    for (args, shares) in [
        (&["cpu*2"][..], "(50 %)"),
        (&["cpu*3", "2", "1", "1"], "(50 %) + cpu 2 (1 thread) (25 %)"),
    ] {
        let out = run("tensor", args);
        assert!(out.contains("tensor groups: cpu") && out.contains(shares), "{out}");
        assert_eq!(out.matches("down has the shape [1, 512]").count(), 2, "{out}");
        let error = numbers(&out, "by")[0];
        assert!(error < 1e-4, "{out}");
    }
}

#[test]
fn xor_devices_without_sample_left_out() {
    let out = run("xor", &["cpu*5"]);
    assert!(out.contains(" is left out: ") && out.contains("samples per step: "), "{out}");
    assert!(out.ends_with("learned\n") && !out.contains("--"), "{out}");
}

#[test]
fn custom_model_tells_spirals_apart() {
    for devices in DEVICES {
        let out = run("custom_model", &[devices]);
        let accuracy = numbers(&out, "accuracy");
        assert!(accuracy.len() == 1 && accuracy[0] >= 90.0, "{out}");
        let told = out.lines().last().unwrap();
        assert!(told.contains('3') && told.contains('4'), "the shapes are not named: {told}");
    }
}

#[test]
fn convolution_tells_bars_apart() {
    for devices in DEVICES {
        let out = run("convolution", &[devices]);
        let (losses, accuracy) = (numbers(&out, "loss"), numbers(&out, "accuracy"));
        assert!(losses.len() == 3 && losses[2] < losses[0], "{out}");
        assert!(accuracy.len() == 1 && accuracy[0] >= 95.0, "{out}");
    }
}

#[test]
fn custom_op_is_checked_and_trained() {
    for devices in DEVICES {
        let out = run("custom_op", &[devices]);
        assert!(out.contains("the gradient agrees with differences of the reference"), "{out}");
        let losses = numbers(&out, "loss");
        assert!(losses.len() == 3 && losses[2] < 0.01, "{out}");
    }
}

#[test]
fn all_reduce_threads_agree_to_the_bit() {
    for world in ["1", "3"] {
        let out = run("all_reduce", &[world]);
        let count: usize = world.parse().unwrap();
        for (word, expected) in [("slope", 3.0), ("offset", -1.0)] {
            let found = numbers(&out, word);
            assert!(found.len() == count, "{out}");
            assert!(found.iter().all(|value| (value - expected).abs() < 1e-3), "{out}");
        }
        let bits = |line: &str| line.split_once("slope").map(|(_, rest)| rest.to_owned());
        assert!(out.lines().all(|line| bits(line) == bits(out.lines().next().unwrap())), "{out}");
    }
}

/// Starts both processes of the example, each to add `megabytes` some times; returns them with what
/// the first one prints from then on.
fn two_processes(megabytes: &str, rounds: &str) -> ([Child; 2], BufReader<ChildStdout>) {
    let start = |args: &[&str]| {
        let mut command = Command::new(program("two_processes"));
        command.args(args).args([megabytes, rounds]).stdin(Stdio::piped());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut host = start(&["host", "127.0.0.1:0"]);
    let mut lines = BufReader::new(host.stdout.take().unwrap());
    let mut after = |word: &str| loop {
        let mut line = String::new();
        assert!(lines.read_line(&mut line).unwrap() > 0, "no '{word}'");
        if let Some((_, rest)) = line.split_once(word) {
            return rest.trim().to_string();
        }
    };
    let (address, code) = (after(" join "), after("the code "));
    let mut join = start(&["join", &address]);
    writeln!(join.stdin.take().unwrap(), "{code}").unwrap();
    ([host, join], lines)
}

#[test]
fn two_processes_agree_to_the_bit() {
    let ([host, join], mut lines) = two_processes("1", "3");
    let mut first = String::new();
    lines.read_to_string(&mut first).unwrap();
    let (host, join) = (host.wait_with_output().unwrap(), join.wait_with_output().unwrap());
    let other = String::from_utf8(join.stdout).unwrap();
    assert!(host.status.success() && join.status.success(), "{first}{other}");
    for (rank, out) in [("rank 0", &first), ("rank 1", &other)] {
        let sums = format!("{rank} sum of the first values 1, of the last 1999");
        assert!(out.contains(&sums) && out.contains("2 of 2 processes are here"), "{out}");
        assert!(out.ends_with(&format!("{rank} equal to the bit\n")), "{out}");
        assert!(numbers(out, "ms:")[0] > 0.0, "{out}");
    }
}

/// Kills a process of two while they add; returns what the other one prints as its error.
fn killed(victim: usize) -> String {
    let (processes, mut lines) = two_processes("1", "1000000");
    let mut line = String::new();
    while !line.contains("rank 0 of 2 begins") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0);
    }
    std::thread::sleep(Duration::from_millis(100));
    let killed = Instant::now();
    send_signal(processes[victim].id(), "KILL");
    let ended = processes.map(|process| process.wait_with_output().unwrap());
    assert!(killed.elapsed() < Duration::from_secs(30), "{:?}", killed.elapsed());
    let other = &ended[1 - victim];
    assert_eq!(other.status.code(), Some(1));
    String::from_utf8(other.stderr.clone()).unwrap()
}

#[test]
fn two_processes_killed_names_the_other() {
    std::thread::scope(|scope| {
        for victim in 0..2 {
            scope.spawn(move || {
                let error = killed(victim);
                let name = format!("Error: rank {victim} (");
                assert!(error.starts_with(&name) && error.contains(") is lost: "), "{error}");
            });
        }
    });
}

#[test]
fn pipeline_has_bits_of_one_device() {
    let out = run("pipeline", &["cpu*2", "2"]);
    assert!(out.contains("stages: cpu"), "{out}");
    assert!(out.ends_with("equal to the bit\n"), "{out}");
    let losses = numbers(&out, "loss");
    assert!(losses[3] < 0.1 * losses[0] && losses.len() == 8, "{out}");
    let two = run("pipeline", &["cpu*4", "2"]);
    assert!(two.contains("(16 samples per step); cpu 3"), "{two}");
    assert!(numbers(&two, "loss")[3] < 0.1 * losses[0], "{two}");
}

#[test]
fn text_is_learned_and_continued() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("text.txt");
    let text: String = (0..150).map(|i| format!("{i} plates on the table, and soup\n")).collect();
    fs::write(&path, &text).unwrap();
    for devices in DEVICES {
        let out = run("text", &[path.to_str().unwrap(), devices, "60"]);
        let losses = numbers(&out, "loss");
        assert!(losses.len() == 2 && losses[1] < losses[0] - 0.5, "{out}");
        // The text's beginning, and a continuation that has learned something of it.
        let begin = &text[..32];
        let (_, continued) = out.split_once(begin).unwrap_or_else(|| panic!("no text in:\n{out}"));
        assert_eq!(continued.chars().count(), 32 + 1, "{out}");
    }
}

#[test]
fn text_missing_is_told() {
    let output = Command::new(program("text")).args(["nowhere.txt", "cpu"]).output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(err.starts_with("Error: nowhere.txt: cannot be read (") && !output.status.success());
}

#[test]
fn pipeline_chart_draws_a_trace() {
    let desk = Desk::new();
    desk.train("--steps 2 --micro-batch 1 --trace trace.json").ok();
    let [trace, chart] = ["trace.json", "chart.svg"].map(|name| desk.path(name));
    let args = [trace.to_str().unwrap(), chart.to_str().unwrap(), "Two steps"];
    let out = run("pipeline_chart", &args);
    assert!(out.contains("Two steps") && out.contains("rank 0: cpu"), "{out}");
    let svg = fs::read_to_string(chart).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("Two steps"), "{svg}");
}

#[test]
fn unet_finds_discs() {
    let out = run("unet", &["cpu"]);
    let told = out.lines().find(|line| line.ends_with("pixels are wrong")).unwrap();
    let numbers: Vec<f64> = told.split(' ').filter_map(|word| word.parse().ok()).collect();
    assert!(numbers[0] < 0.03 * numbers[1], "{out}");
}

#[test]
fn examples_fit_a_page() {
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let lines = fs::read_to_string(&path).unwrap().lines().count();
            assert!(lines < 100, "{} has {lines} lines", path.display());
        }
    }
}

#[test]
fn digits_resumed_have_same_bits() {
    let desk = Desk::new();
    let images = desk.path("images");
    crate::samples::write_idx(&images, "train", 0, 500);
    for (index, devices) in DEVICES.iter().enumerate() {
        let saves = desk.path(&format!("saves {index}"));
        let args = [images.to_str().unwrap(), devices, saves.to_str().unwrap()];
        let out = run("digits", &args);
        let accuracy = out.lines().last().unwrap().split(['(', ',', ')']).nth(2).unwrap();
        assert!(accuracy.trim().parse::<f64>().unwrap() > 0.95, "{out}");
        let last =
            fs::read(saves.join("checkpoints/step-00001000/parameters.safetensors")).unwrap();
        // From the middle, to the same bits.
        fs::remove_dir_all(saves.join("checkpoints/step-00001000")).unwrap();
        assert!(run("digits", &args).contains("step 1000: "), "{out}");
        let again =
            fs::read(saves.join("checkpoints/step-00001000/parameters.safetensors")).unwrap();
        assert!(again == last, "other bits on {devices}");
    }
}
