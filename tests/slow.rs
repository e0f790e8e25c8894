//! Tests that take longer than a change should wait for: `./x slow`.

use std::path::Path;

use potluck_core::rng::Key;
use potluck_train::config::{RunConfig, read};

/// A configuration file with random bytes changed, dropped or doubled is either refused with a
/// message or read as a configuration that prints and reads back the same. It never panics.
#[test]
fn damaged_configurations_are_refused_or_sound() {
    const ROUNDS: u32 = 300_000;
    const BYTES: &[u8] = b"\n\"'=[]{}.,#-_ 0159eE\tnaif";
    let whole = RunConfig::default().to_toml().into_bytes();
    let path = Path::new("run.toml");
    let (mut refused, mut read) = (0, 0);
    for round in 0..ROUNDS {
        let mut bytes = whole.clone();
        for edit in 0..1 + round % 4 {
            let [place, draw] = Key::new(7).words([round, edit]);
            let (kind, byte) = (draw % 3, draw / 3);
            let place = place as usize % bytes.len();
            match kind {
                0 => bytes[place] = BYTES[byte as usize % BYTES.len()],
                1 => drop(bytes.remove(place)),
                _ => bytes.insert(place, bytes[byte as usize % bytes.len()]),
            }
        }
        let text = String::from_utf8_lossy(&bytes);
        match read::read(None, Some((path, &text)), &[]) {
            Err(error) => {
                assert!(error.to_string().starts_with("run.toml:"), "{error}\n{text}");
                refused += 1;
            }
            Ok(resolved) => {
                let printed = resolved.config.to_toml();
                let again = read::read(None, Some((path, &printed)), &[]);
                assert_eq!(again.map(|again| again.config), Ok(resolved.config), "{text}");
                read += 1;
            }
        }
    }
    assert!(refused > ROUNDS / 10 && read > ROUNDS / 100, "{refused} refused, {read} read");
}

/// Two right devices sum in another order and so drift apart slowly: the first 50 losses agree
/// within 1e-4, and the means of windows of 50 steps within 1e-3 (relative).
const EARLY_STEPS: usize = 50;
const EARLY_ERROR_MAX: f64 = 1e-4;
const WINDOW_ERROR_MAX: f64 = 1e-3;

/// The curve of a GPT on every adapter that tests run on against that of the CPU device. With
/// POTLUCK_CURVE_STEPS=500 and POTLUCK_CURVE_ARGS="CONFIG --data TEXT" it is the whole recipe.
#[test]
fn every_device_learns_along_the_same_curve() {
    let steps = std::env::var("POTLUCK_CURVE_STEPS").unwrap_or_else(|_| "100".into());
    let adapters = std::env::var("POTLUCK_TEST_ADAPTERS").unwrap_or_default();
    let expected = curve("cpu", &steps);
    let mut curves = Vec::new();
    for adapter in adapters.split(',').filter(|name| !name.is_empty()) {
        let losses = curve(adapter, &steps);
        let (early, windows) = distance(&losses, &expected);
        eprintln!("{adapter} against cpu: first {EARLY_STEPS} {early:.1e}, windows {windows:.1e}");
        curves.push((adapter.to_string(), losses, early, windows));
    }
    assert!(!curves.is_empty(), "POTLUCK_TEST_ADAPTERS names no adapter; ./x slow sets it");
    for pair in curves.windows(2) {
        let (early, windows) = distance(&pair[0].1, &pair[1].1);
        let (one, other) = (&pair[0].0, &pair[1].0);
        eprintln!("{one} against {other}: first {EARLY_STEPS} {early:.1e}, windows {windows:.1e}");
    }
    for (adapter, _, early, windows) in curves {
        assert!(early <= EARLY_ERROR_MAX, "{adapter}: {early:.1e} in the first steps");
        assert!(windows <= WINDOW_ERROR_MAX, "{adapter}: {windows:.1e} in a window");
    }
}

/// The losses of a run of a small GPT, or of what POTLUCK_CURVE_ARGS says.
fn curve(device: &str, steps: &str) -> Vec<f64> {
    let dir = tempfile::tempdir().unwrap();
    let more = std::env::var("POTLUCK_CURVE_ARGS").unwrap_or_default();
    let status = std::process::Command::new(env!("CARGO_BIN_EXE_potluck"))
        .args(["train", "--quiet", "--steps", steps, "--devices", device, "--out"])
        .arg(dir.path())
        .args(["--set", "optim.lr=1e-3", "--set", "model.width=128"])
        .args(["--set", "train.eval_every=0", "--set", "data.held_out=0"])
        .args(["--set", "train.sample_tokens=0", "--set", "train.checkpoint_every=0"])
        .args(more.split_whitespace())
        .status()
        .unwrap();
    assert!(status.success(), "{device}: {status}");
    let lines = std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
    let loss =
        |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64();
    lines.lines().filter_map(loss).collect()
}

/// The largest relative distance in the first steps, and of the means of windows.
fn distance(losses: &[f64], expected: &[f64]) -> (f64, f64) {
    assert_eq!(losses.len(), expected.len());
    let relative = |a: f64, b: f64| (a / b - 1.0).abs();
    let mean = |window: &[f64]| window.iter().sum::<f64>() / window.len() as f64;
    let early = losses.iter().zip(expected).take(EARLY_STEPS);
    let early = early.map(|(a, b)| relative(*a, *b)).fold(0.0, f64::max);
    let windows = losses.chunks(EARLY_STEPS).zip(expected.chunks(EARLY_STEPS));
    let windows = windows.map(|(a, b)| relative(mean(a), mean(b))).fold(0.0, f64::max);
    (early, windows)
}

/// The default run, which has a minute on two cores, writes sentences of which 80 in 100 are right,
/// for three seeds. Its time depends on what else the machine does, so it is printed only.
#[test]
fn the_default_run_learns_the_builtin_corpus() {
    for seed in ["1337", "1", "2"] {
        let dir = tempfile::tempdir().unwrap();
        let started = std::time::Instant::now();
        let status = std::process::Command::new(env!("CARGO_BIN_EXE_potluck"))
            .args(["train", "--quiet", "--devices", "cpu", "--seed", seed, "--out"])
            .arg(dir.path())
            .status()
            .unwrap();
        assert!(status.success(), "{status}");
        let seconds = started.elapsed().as_secs_f64();
        let lines = std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
        let measure: serde_json::Value =
            serde_json::from_str(lines.lines().last().unwrap()).unwrap();
        eprintln!("seed {seed}: {seconds:.1} s, {measure}");
        let count = |key: &str| measure[key].as_u64().unwrap();
        assert!(100 * count("right") >= 80 * count("distinct"), "seed {seed}: {measure}");
    }
}

/// The whole report on hardware at toy sizes, on two software adapters: every part is done, and
/// right. Whether python3 has PyTorch is up to the machine.
#[test]
fn the_report_on_hardware_is_rehearsed() {
    const PARTS: usize = 12;
    let named = std::env::var("POTLUCK_TEST_ADAPTERS").unwrap_or_default();
    let adapters: Vec<&str> =
        named.split(',').filter(|name| !name.is_empty() && !name.starts_with("gl:")).collect();
    assert!(!adapters.is_empty(), "POTLUCK_TEST_ADAPTERS names no adapter; ./x slow sets it");
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("report");
    let status = std::process::Command::new(env!("CARGO_BIN_EXE_potluck"))
        .args(["hardware", "--toy", "--out"])
        .arg(&out)
        .args(&adapters)
        .status()
        .unwrap();
    let summary = std::fs::read_to_string(out.join("SUMMARY.md")).unwrap();
    eprintln!("{summary}");
    assert!(status.success(), "{status}");
    let done = format!("{PARTS} of {PARTS} parts are done; none has failed.");
    assert_eq!(summary.matches(&done).count(), adapters.len());
    let bytes = std::fs::metadata(dir.path().join("report.tar.gz")).unwrap().len();
    assert!(bytes < 5_000_000, "{bytes} bytes");
}
