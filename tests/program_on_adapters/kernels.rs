//! Kernels as a user meets them: certified and timed at the first run, remembered, switched off
//! when they are wrong, kept by a run that goes on.

use std::fs;
use std::path::PathBuf;

use crate::process::{Desk, Ran, finish};
use serde_json::Value;

/// A tile that every product of the tiny model has room for.
const TILE: &str = "matmul_tile_4x4";

/// The selector of an adapter that is no GL one, and its name: if there are several, of one that is
/// not SwiftShader, which compiles every kernel again in each process.
fn adapter(desk: &Desk) -> (String, String) {
    let listed: Value = serde_json::from_str(&desk.run("devices --json").ok().out).unwrap();
    let adapters = listed["adapters"].as_array().unwrap();
    let usable = adapters.iter().filter(|a| a["api"] != "gl" && a["usable"] == true);
    let text = |a: &Value, key: &str| a[key].as_str().unwrap().to_string();
    let found = usable.min_by_key(|a| text(a, "name").contains("SwiftShader"));
    let found = found.expect("./x test installs software adapters");
    (text(found, "selector"), text(found, "name"))
}

fn train(desk: &Desk, faults: &str, words: &str) -> Ran {
    let (selector, _) = adapter(desk);
    let line = format!("train tiny.toml --data text.txt --devices {selector} --steps 2 {words}");
    let mut command = desk.command(&line);
    let child = command.env("POTLUCK_FAULT", faults).spawn().unwrap();
    finish(child, &format!("{faults}: {line}"))
}

/// The table `[kernels]` of a run.
fn choices(desk: &Desk, run: &str) -> toml::Table {
    let text = fs::read_to_string(desk.path(run).join("resolved.toml")).unwrap();
    let resolved: toml::Table = toml::from_str(&text).unwrap();
    resolved["kernels"].as_table().unwrap().clone()
}

fn runs(choices: &toml::Table, name: &str) -> bool {
    choices.values().any(|chosen| chosen.as_str() == Some(name))
}

/// The one record in the cache.
fn cache_file(desk: &Desk) -> PathBuf {
    let is_record = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "json");
    let files = fs::read_dir(desk.cache()).unwrap().map(|entry| entry.unwrap().path());
    let records: Vec<PathBuf> = files.filter(is_record).collect();
    assert_eq!(records.len(), 1, "{records:?}");
    records[0].clone()
}

fn timings(desk: &Desk) -> Value {
    let text = fs::read_to_string(cache_file(desk)).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["timings"].clone()
}

#[test]
fn a_wrong_kernel_is_switched_off_and_told_and_what_was_measured_is_kept() {
    let desk = Desk::new();
    let (_, name) = adapter(&desk);
    let none = desk.run("devices").ok().out;
    assert!(none.contains("no kernel yet"), "{none}");

    let time = "--set train.tune_s=120";
    train(&desk, &format!("wrong@kernel:{TILE}"), &format!("--out first {time}")).ok();
    let first = choices(&desk, "first");
    assert!(first.keys().any(|key| key.starts_with("matmul a b^T (32, ")), "{first:?}");
    assert!(!runs(&first, TILE), "{first:?}");
    assert!(!timings(&desk).to_string().contains(TILE), "what is wrong is not timed");
    let listed = desk.run("devices").ok().out;
    let line = format!("{TILE} of matmul a b^T: its results are wrong, NMSE 1.00e-4");
    assert!(listed.contains(" switched off\n") && listed.contains(&line), "{listed}");
    let json: Value = serde_json::from_str(&desk.run("devices --json").ok().out).unwrap();
    let mut adapters = json["adapters"].as_array().unwrap().iter();
    let kernels = &adapters.find(|a| a["name"] == name.as_str()).unwrap()["kernels"];
    let off = kernels["switched_off"].as_array().unwrap();
    assert!(kernels["certified"].as_u64().unwrap() > 20, "{kernels}");
    // Once per pair of transposes, and per steps behind the product.
    let is_tile = |one: &Value| one["kernel"].as_str().unwrap().starts_with(TILE);
    assert!(off.len() >= 3 && off.iter().all(is_tile), "{kernels}");

    // A later run, without the planted error, believes the record, and measures nothing.
    let known = fs::read(cache_file(&desk)).unwrap();
    train(&desk, "", "--out second --set train.tune_s=120").ok();
    assert_eq!((choices(&desk, "second"), fs::read(cache_file(&desk)).unwrap()), (first, known));
    train(&desk, "", "--out third --retune --set train.tune_s=120").ok();
    assert!(!runs(&choices(&desk, "third"), TILE), "certificates are not taken anew");
    let measured = timings(&desk);
    assert!(measured.as_object().is_some_and(|calls| !calls.is_empty()), "{measured}");
    assert!(!measured.to_string().contains(TILE), "what is wrong is not timed: {measured}");
}

/// A driver that crashes when it compiles a kernel: the first start does not know which of many.
#[test]
fn a_kernel_whose_compilation_ends_the_process_is_named_and_then_switched_off() {
    let desk = Desk::new();
    let start = |out: &str| train(&desk, "kill@kernel:embedding4", &format!("--out {out}"));
    let (first, second) = (start("first"), start("second"));
    assert!([&first, &second].iter().all(|ran| ran.status.code().is_none()), "both are killed");
    let told = |ran: &Ran| format!("{}{}", ran.out, ran.err);
    assert!(!told(&first).contains("embedding4"), "{}", told(&first));
    let line = "compiles embedding4 of embedding alone, because a process ended";
    assert!(told(&second).contains(line), "{}", told(&second));
    let third = start("third").ok();
    let off = "embedding4 of embedding is switched off: the process ended";
    assert!(told(&third).contains(off), "{}", told(&third));
    assert!(desk.run("devices").ok().out.contains("embedding4 of embedding: the process ended"));
}

#[test]
fn a_run_that_goes_on_keeps_its_kernels() {
    let desk = Desk::new();
    train(&desk, "", "--out run --set train.tune_s=0").ok();
    let chosen = choices(&desk, "run");
    let saved = desk.manifest("run", 2)["meta"]["placement"]["ranks"][0]["kernels"].clone();
    for (call, name) in &chosen {
        assert_eq!(saved[call].as_str(), name.as_str(), "{saved}");
    }
    assert_eq!(timings(&desk), serde_json::json!({}), "0 seconds measure nothing");

    // What was saved is kept on the same device, though there is time to measure.
    let (selector, _) = adapter(&desk);
    let resume = |words: &str| {
        let line = format!("train --devices {selector} --resume run {words}");
        desk.run(&format!("{line} --set train.tune_s=120")).ok()
    };
    resume("--steps 3");
    assert_eq!(choices(&desk, "run"), chosen);
    assert_eq!(timings(&desk), serde_json::json!({}));
    resume("--steps 4 --retune");
    let timed = timings(&desk);
    assert_eq!(timed.as_object().unwrap().len(), chosen.len(), "{timed}");
    // Where a plain variant is not timed, some calls have one variant to time.
    let count = |call: &serde_json::Value| call["measured"].as_object().unwrap().len();
    assert!(timed.as_object().unwrap().values().any(|call| count(call) > 1), "{timed}");
}

#[test]
fn without_a_right_kernel_nothing_starts() {
    let desk = Desk::new();
    let (_, name) = adapter(&desk);
    for kernel in ["layer_norm_forward", "matmul_naive", "adamw"] {
        let faults = format!("wrong@kernel:{kernel}");
        let ran = train(&desk, &faults, "--set train.tune_s=0").ended(78);
        let line = ran.line("error:");
        for part in [name.as_str(), kernel, "NMSE", "--devices cpu"] {
            assert!(line.contains(part), "{part} is missing in: {line}");
        }
        // The record would refuse it in the next round.
        fs::remove_file(cache_file(&desk)).unwrap();
    }
    assert!(!desk.path("runs").exists());
    let unknown = train(&desk, "wrong@kernel:matmul_by_magic", "").ended(78);
    assert!(unknown.line("error:").contains("there are: adamw, attention"), "{}", unknown.err);
}

#[test]
fn a_record_that_is_damaged_or_cannot_be_written_is_told_and_costs_nothing_else() {
    let desk = Desk::new();
    train(&desk, "", "--out first --set train.tune_s=0").ok();
    let path = cache_file(&desk);
    fs::write(&path, "{\"format\": 1, \"dev").unwrap();
    let ran = train(&desk, "", "--out second --set train.tune_s=0").ok();
    assert!(ran.line(path.to_str().unwrap()).contains("is no record of kernels"), "{}", ran.err);
    let aside = PathBuf::from(format!("{}.damaged", path.display()));
    assert!(aside.exists() && fs::metadata(&path).unwrap().len() > 1000);
    assert_eq!(choices(&desk, "second"), choices(&desk, "first"));

    let (selector, _) = adapter(&desk);
    let line = format!(
        "train tiny.toml --data text.txt --devices {selector} --steps 2 --out third --set \
         train.tune_s=0"
    );
    let below_a_file = desk.path("text.txt").join("cache");
    let mut command = desk.command(&line);
    let ran = finish(command.env("POTLUCK_CACHE", below_a_file).spawn().unwrap(), &line).ok();
    assert!(ran.err.contains("is not kept") && ran.err.contains("POTLUCK_CACHE"), "{}", ran.err);
}

#[test]
fn every_kernel_of_an_adapter_can_be_certified() {
    let desk = Desk::new();
    let (selector, name) = adapter(&desk);
    let line = format!("devices --certify {selector} --json");
    let mut command = desk.command(&line);
    let faults = "wrong@kernel:dropout,wrong@kernel:norm,wrong@kernel:sgd";
    let ran = finish(command.env("POTLUCK_FAULT", faults).spawn().unwrap(), &line).ok();
    let json: Value = serde_json::from_str(&ran.out).unwrap();
    let mut adapters = json["adapters"].as_array().unwrap().iter();
    let kernels = &adapters.find(|a| a["name"] == name.as_str()).unwrap()["kernels"];
    assert!(kernels["certified"].as_u64().unwrap() > 40, "{kernels}");
    let off: Vec<&str> = kernels["switched_off"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["kernel"].as_str().unwrap())
        .collect();
    assert_eq!(off, ["dropout of dropout 0.1", "norm", "sgd"]);

    // Asked for again, all are tried again: nothing is planted now.
    let again = desk.run(&format!("devices --certify {selector}")).ok();
    assert!(again.out.contains("kernels, none is switched off"), "{}", again.out);
    desk.run("devices --certify cpu").ended(78);
}
