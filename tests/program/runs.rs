//! The list of runs: what it says of each, and that nothing in a run directory can break it.

use std::fs;
use std::time::{Duration, Instant};

use crate::process::Desk;
use serde_json::Value;

fn listed(desk: &Desk, line: &str) -> Vec<Value> {
    let ran = desk.run(&format!("runs --json {line}")).ok();
    assert_eq!(ran.err, "");
    serde_json::from_str::<Value>(&ran.out).unwrap().as_array().unwrap().clone()
}

fn column(rows: &[Value], name: &str) -> Vec<String> {
    rows.iter().map(|row| row[name].to_string().trim_matches('"').into()).collect()
}

#[test]
fn runs_are_listed_newest_last() {
    let desk = Desk::new();
    assert_eq!(listed(&desk, ""), Vec::<Value>::new());
    assert_eq!(desk.run("runs").ok().err, "there are no runs in runs\n");

    desk.train("--name first --quiet --steps 4 --eval-every 2").ok();
    desk.train_with("sigterm@metrics:3", "--name second --quiet --steps 9").ended(75);
    desk.train_with("kill@checkpoint-manifest:0", "--name third --quiet");
    let two = "train tiny.toml --data text.txt --devices cpu*2 --set balance=fixed --quiet";
    desk.run(&format!("{two} --name fourth --steps 2")).ok();
    fs::write(desk.path("runs/notes.txt"), "not a run").unwrap();
    fs::create_dir(desk.path("runs/empty")).unwrap();

    let rows = listed(&desk, "");
    assert_eq!(column(&rows, "name"), ["first", "second", "third", "fourth"]);
    assert_eq!(column(&rows, "state"), ["done", "interrupted", "no-checkpoint", "done"]);
    assert_eq!(column(&rows, "step"), ["4", "3", "null", "2"]);
    assert_eq!(column(&rows, "saved_step"), ["4", "3", "null", "2"]);
    assert_eq!(column(&rows, "steps"), ["4", "9", "null", "2"]);
    assert_eq!(rows[0]["loss"].as_f64(), desk.losses("runs/first").last().copied());
    let best = desk.manifest("runs/first", 4)["meta"]["best"]["val_loss"].clone();
    assert_eq!(rows[0]["best_val_loss"].as_f64(), best.as_str().unwrap().parse().ok());
    assert_eq!(rows[1]["best_val_loss"], Value::Null);
    assert_eq!(rows[0]["devices"], serde_json::json!(["cpu"]));
    assert_eq!(rows[3]["devices"], serde_json::json!(["cpu", "cpu 2"]));

    let table = desk.run("runs").ok().out;
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 5, "{table}");
    for word in ["name", "step", "saved", "loss", "best val", "devices", "state"] {
        assert!(lines[0].contains(word), "{table}");
    }
    assert!(lines[1].starts_with("first ") && lines[1].ends_with("  done"), "{table}");
    assert!(lines[2].contains("  3/9  ") && lines[2].ends_with("can go on"), "{table}");
    assert!(lines[3].ends_with("no checkpoint"), "{table}");
    // A run's own directory is a list of one.
    assert_eq!(column(&listed(&desk, "runs/first"), "name"), ["first"]);
}

#[test]
fn runs_locked_and_damaged_are_told() {
    let desk = Desk::new();
    for name in ["locked", "toml", "manifest", "metrics", "gone"] {
        desk.train(&format!("--name {name} --quiet --steps 2")).ok();
    }
    let lock = fs::File::open(desk.path("runs/locked/lock")).unwrap();
    lock.lock().unwrap();
    fs::write(desk.path("runs/toml/run.toml"), "steps = [").unwrap();
    for step in [0, 2] {
        let path = format!("runs/manifest/checkpoints/step-{step:08}/manifest.json");
        fs::write(desk.path(&path), "{").unwrap();
    }
    fs::write(desk.path("runs/metrics/metrics.jsonl"), b"\xFF\0\n\n{\"step\":").unwrap();
    fs::remove_dir_all(desk.path("runs/gone/checkpoints")).unwrap();

    let rows = listed(&desk, "runs");
    let row = |name: &str| rows.iter().find(|row| row["name"] == name).unwrap();
    assert_eq!(row("locked")["state"], "running");
    assert_eq!(row("toml")["state"], "damaged");
    assert!(row("toml")["problem"].as_str().unwrap().contains("run.toml:1"), "{}", row("toml"));
    assert_eq!(row("manifest")["state"], "damaged");
    let problem = row("manifest")["problem"].as_str().unwrap();
    assert!(problem.contains("step-00000002"), "{problem}");
    assert_eq!((&row("metrics")["state"], &row("metrics")["loss"]), (&"done".into(), &Value::Null));
    assert_eq!(row("gone")["state"], "no-checkpoint");
    let table = desk.run("runs").ok().out;
    assert!(table.contains("  damaged: "), "{table}");
}

/// A manifest with the hash of its content.
fn rehashed(manifest: &str) -> String {
    let is_hash = |line: &&str| line.starts_with("  \"blake3\": \"");
    let others: Vec<&str> = manifest.split_inclusive('\n').filter(|line| !is_hash(line)).collect();
    let hash = blake3::hash(others.concat().as_bytes()).to_hex();
    let old = manifest.split_inclusive('\n').find(is_hash).unwrap();
    manifest.replacen(old, &format!("  \"blake3\": \"{hash}\"\n"), 1)
}

#[test]
fn runs_of_other_version_not_damaged() {
    let desk = Desk::new();
    for name in ["whole", "moved", "old", "new"] {
        desk.train(&format!("--name {name} --quiet --steps 2")).ok();
    }
    desk.train_with("sigterm@metrics:3", "--name stopped --quiet --steps 9").ended(75);
    for name in ["moved", "stopped"] {
        fs::remove_file(desk.path(&format!("runs/{name}/run.toml"))).unwrap();
    }
    for step in [0, 2] {
        let path = desk.path(&format!("runs/old/checkpoints/step-{step:08}/manifest.json"));
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("\"format\": 5"), "{text}");
        fs::write(&path, text.replacen("\"format\": 5", "\"format\": 2", 1)).unwrap();
        let path = desk.path(&format!("runs/new/checkpoints/step-{step:08}/manifest.json"));
        let text = fs::read_to_string(&path).unwrap();
        let text = text.replacen("\"needs\": []", "\"needs\": [\"float8\"]", 1);
        fs::write(&path, rehashed(&text)).unwrap();
    }
    let rows = listed(&desk, "runs");
    let row = |name: &str| rows.iter().find(|row| row["name"] == name).unwrap();
    for (name, state) in [
        ("moved", "done"),
        ("stopped", "interrupted"),
        ("old", "other-version"),
        ("new", "other-version"),
    ] {
        assert_eq!(row(name)["state"], state, "{}", row(name));
    }
    assert!(row("new")["problem"].as_str().unwrap().contains("needs float8"), "{}", row("new"));
    assert_eq!((&row("stopped")["step"], &row("stopped")["steps"]), (&3.into(), &9.into()));
    assert!(row("old")["problem"].as_str().unwrap().contains("format 2"), "{}", row("old"));
    let table = desk.run("runs").ok().out;
    assert!(table.contains("  of another version: "), "{table}");
    desk.resume("runs/stopped", "--quiet").ok();
}

#[test]
fn runs_500_with_long_records_are_quick() {
    let desk = Desk::new();
    desk.train("--name one --quiet --steps 2").ok();
    let files = ["run.toml", "metrics.jsonl", "checkpoints/step-00000002/manifest.json"];
    for number in 0..500 {
        let run = desk.path(&format!("runs/copy{number}"));
        fs::create_dir_all(run.join("checkpoints/step-00000002")).unwrap();
        for file in files {
            fs::copy(desk.path("runs/one").join(file), run.join(file)).unwrap();
        }
        // A record of 1 GB, of which all but the end is a hole.
        let end = fs::read(run.join("metrics.jsonl")).unwrap();
        let file = fs::File::create(run.join("metrics.jsonl")).unwrap();
        file.set_len(1 << 30).unwrap();
        drop(file);
        let mut file = fs::OpenOptions::new().append(true).open(run.join("metrics.jsonl")).unwrap();
        std::io::Write::write_all(&mut file, &[b"\n", &end[..]].concat()).unwrap();
    }
    let started = Instant::now();
    let rows = listed(&desk, "");
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    assert_eq!(rows.len(), 501);
    assert!(rows.iter().all(|row| row["state"] == "done" && row["loss"].is_number()), "{rows:?}");
}
