//! `potluck plan`, and runs whose layout is planned because no device holds the whole model.

use serde_json::Value;

use crate::node_processes::{self, host_with, join};
use crate::process::{Desk, Ran, finish};

const SMALL: &str = "tiny.toml --data text.txt --set train.batch=12 \
     --set train.micro_batch_size=3 --set train.sample_tokens=0 --set data.held_out=0 \
     --set model.layers=4 --set model.width=32 --set model.heads=4 --set model.context=16";

/// A model of which each device holds 1 / 1.6.
const LARGE: &str = "train tiny.toml --data text.txt --set train.batch=12 \
     --set train.micro_batch_size=3 --set train.sample_tokens=0 --set data.held_out=0 \
     --set model.layers=4 --set model.width=256 --set model.heads=4 --set model.context=16 \
     --set train.checkpoint_every=2";

fn plan(desk: &Desk, more: &str) -> Ran {
    desk.run(&format!("plan {SMALL} {more}")).ok()
}

fn plan_json(desk: &Desk, more: &str) -> Value {
    serde_json::from_str(&plan(desk, &format!("{more} --json")).out).unwrap()
}

#[test]
fn plan_flags_of_runs_are_refused() {
    let desk = Desk::new();
    for flag in ["--status 127.0.0.1:0", "--explain memory", "--trace t.json", "--svg x.svg"] {
        let refused = desk.run(&format!("plan {SMALL} --devices cpu {flag}")).ended(78);
        let name = flag.split(' ').next().unwrap();
        let why = format!("error: {name} is for `potluck train`");
        assert!(refused.line("error:").starts_with(&why), "{}", refused.err);
    }
    plan(&desk, "--devices cpu --log-file plan.log");
    assert!(desk.path("plan.log").exists());
}

#[test]
fn plan_is_what_its_flags_run() {
    let desk = Desk::new();
    let found = plan_json(&desk, "--devices cpu*2");
    let chosen = &found["chosen"];
    assert!(chosen["step_ms"].as_f64().unwrap() > 0.0, "{found}");
    assert_eq!(chosen["devices"].as_array().unwrap().len(), 2, "named devices take part: {found}");
    assert_eq!(chosen["memory"].as_array().unwrap().len(), 2);
    let meshes: Vec<&Value> =
        found["others"].as_array().unwrap().iter().map(|other| &other["mesh"]).collect();
    for axis in ["data", "pipeline", "tensor"] {
        let is_of_axis = |mesh: &&Value| mesh[axis] == 2;
        let is_tried = is_of_axis(&&chosen["mesh"]) || meshes.iter().any(is_of_axis);
        assert!(is_tried, "{axis} is missing in {found}");
    }
    let flags = chosen["flags"].as_str().unwrap().replace(", ", ",").replace('\'', "");
    let ran = desk.run(&format!("train {SMALL} --steps 2 --out run {flags}")).ok();
    assert!(!ran.err.contains("measuring"), "{flags}: {}", ran.err);
    let placement = &desk.manifest("run", 2)["meta"]["placement"];
    assert_eq!(placement["mesh"], chosen["mesh"], "{flags}");
}

#[test]
fn given_layouts_are_kept_and_each_is_explained() {
    let desk = Desk::new();
    let planned = plan(&desk, "--devices cpu*2 --pipeline 2 --retune");
    for measured in ["different blocks of", "measuring the whole model on 2 devices"] {
        assert!(planned.err.contains(measured), "{}", planned.err);
    }
    let told = planned.out;
    assert!(told.contains(">  pipeline 2 (1f1b)"), "{told}");
    assert!(!told.contains("tensor 2"), "{told}");
    for part in [
        "samples/s alone",
        "step ms",
        "to run exactly this: potluck train",
        "cpu (1 thread): 12 samples",
    ] {
        assert!(told.contains(part), "'{part}' is missing in:\n{told}");
    }
    let whole = plan_json(&desk, "--devices cpu*2 --pipeline 1 --tensor 1");
    for found in whole["others"].as_array().unwrap().iter().chain([&whole["chosen"]]) {
        let mesh = &found["mesh"];
        assert!(mesh["pipeline"] == 1 && mesh["tensor"] == 1, "{whole}");
    }
    let groups = plan_json(&desk, "--devices cpu*2 --pipeline 1");
    let mut others = groups["others"].as_array().unwrap().iter().chain([&groups["chosen"]]);
    assert!(others.clone().all(|found| found["mesh"]["pipeline"] == 1), "{groups}");
    assert!(others.any(|found| found["mesh"]["tensor"] == 2), "{groups}");
    let alone = plan(&desk, "--devices cpu").out;
    assert!(alone.contains("alone"), "{alone}");
    let line = format!("plan {SMALL} --machines machines.toml --nodes 2");
    let error = desk.run(&line).ended(78);
    assert!(error.line("error:").contains("leave out --nodes"), "{}", error.err);
    let line = format!("plan {SMALL} --machines machines.toml --listen 127.0.0.1:0");
    let error = desk.run(&line).ended(78);
    assert!(error.line("error:").contains("need --nodes"), "{}", error.err);
    for (given, told) in [
        ("--pipeline 2 --schedule gpipe", "--schedule"),
        ("--pipeline 2 --tensor 2", "--tensor"),
        ("--set parallel.balance=fixed", "parallel.balance"),
        ("--set parallel.collective=star", "parallel.collective"),
    ] {
        let line = format!("plan {SMALL} --machines machines.toml {given}");
        let error = desk.run(&line).ended(78);
        assert!(error.line("error:").contains(&format!("leave out {told}")), "{}", error.err);
    }
}

#[test]
fn devices_of_other_nodes_are_measured_and_planned() {
    let desk = node_processes::desk();
    let first = host_with(&desk, 2, "", &format!("plan {SMALL} --devices cpu --json"));
    let other = join(&desk, &first, "", "--devices cpu*2");
    let found: Value = serde_json::from_str(&first.finish().ok().out).unwrap();
    let joined = finish(other, "the node that joined").ok();
    assert!(joined.err.contains("the plan is on the first node"), "{}", joined.err);
    let nodes: Vec<&Value> =
        found["devices"].as_array().unwrap().iter().map(|device| &device["node"]).collect();
    assert_eq!(nodes, [0, 1, 1], "{found}");
    let chosen = &found["chosen"];
    assert_eq!(chosen["devices"].as_array().unwrap().len(), 3, "named ones take part: {found}");
    let mut layouts = found["others"].as_array().unwrap().iter().chain([chosen]);
    let layout = layouts.find(|layout| layout["flags"].is_string()).expect("flags of a layout");
    let flags = layout["flags"].as_str().unwrap().replace(", ", ",").replace('\'', "");
    let flags = flags.strip_prefix("--nodes 2 ").expect("the number of nodes");
    let line = format!("train {SMALL} --steps 2 --out run {flags}");
    let first = host_with(&desk, 2, "", &line);
    let other = join(&desk, &first, "", "--devices cpu*2");
    let ran = first.finish().ok();
    finish(other, "the node that joined").ok();
    assert!(!ran.err.contains("measuring"), "{flags}: {}", ran.err);
    assert_eq!(desk.manifest("run", 2)["meta"]["placement"]["mesh"], layout["mesh"], "{flags}");
}

#[test]
fn model_over_memory_is_planned_without_a_flag() {
    let desk = Desk::new();
    let told = desk.run(&format!("{LARGE} --out run --explain memory --devices cpu")).ok().out;
    let peak = told.lines().find(|line| line.trim_start().starts_with("peak")).unwrap();
    let mib: f64 = peak.split_whitespace().nth(1).unwrap().parse().unwrap();
    let limit = format!("--set train.device_memory_mib={}", (mib / 1.6) as u64);
    let line = format!("{LARGE} {limit} --devices cpu*2");
    let told = desk.run(&format!("{line} --out run --explain memory")).ended(78).out;
    assert!(told.contains("a run divides it among them if that fits"), "{told}");
    let ran = desk.run(&format!("{line} --steps 4 --out run")).ok();
    assert!(ran.err.contains("planning a layout, because not every device holds"), "{}", ran.err);
    assert!(ran.err.contains("ms per step are predicted"), "{}", ran.err);
    let placement = desk.manifest("run", 4)["meta"]["placement"].clone();
    let mesh = &placement["mesh"];
    assert!(mesh["pipeline"] == 2 || mesh["tensor"] == 2, "{mesh}");
    // A resumed run keeps the layout, and ends in the same bits.
    let half = "run/checkpoints/step-00000002";
    let resumed = desk.run(&format!("train --resume {half} {limit} --steps 4 --out rest")).ok();
    assert!(!resumed.err.contains("planning"), "{}", resumed.err);
    let parameters = |run: &str| desk.checkpoint(run, 4, "parameters.safetensors");
    assert!(parameters("run") == parameters("rest"), "a resumed run ends in other bits");
    assert_eq!(desk.manifest("rest", 4)["meta"]["placement"]["mesh"], *mesh);
}

/// Activations are most of the memory: kept in bf16 they fit, and recomputed ones fit in less.
#[test]
fn model_changes_are_priced_where_memory_is_short() {
    let desk = Desk::new();
    let model = "tiny.toml --data text.txt --set train.batch=16 --set train.micro_batch_size=8 \
                 --set train.sample_tokens=0 --set data.held_out=0 --set model.layers=6 \
                 --set model.width=64 --set model.heads=2 --set model.context=64 --devices cpu";
    let peak_mib = |more: &str| {
        let told = desk.run(&format!("train {model} --explain memory {more}")).ok().out;
        let peak = told.lines().find(|line| line.trim_start().starts_with("peak")).unwrap();
        peak.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap()
    };
    let bf16 = "--set train.activations=bf16";
    let both = format!("{bf16} --set train.recompute=blocks");
    for (given, change, setting) in
        [("", bf16, "train.activations to bf16"), (bf16, &both, "train.recompute to blocks")]
    {
        let (without, with) = (peak_mib(given), peak_mib(change));
        let limit = ((without + with) / 2.0) as u64;
        assert!(with < limit as f64 && (limit as f64) < without, "{with} {limit} {without}");
        let line = format!("plan {model} --set train.device_memory_mib={limit}");
        let refused = desk.run(&format!("{line} {given}")).ended(78);
        let why = refused.line("error:");
        assert!(why.contains(&format!("with {setting}, alone fits")), "{why}");
        let told = desk.run(&format!("{line} {change}")).ok().out;
        assert!(told.contains(">  alone"), "{told}");
    }
}

/// Cards by name, and links by rate: nothing is opened or measured.
#[test]
fn machines_of_a_file_are_planned_without_devices() {
    let desk = Desk::new();
    let file = "\
        [[node]]\n\
        name = \"desk\"\n\
        devices = [\"RTX 4090\", \"RTX 3060\"]\n\
        memory_gib = 64\n\
        [[node]]\n\
        name = \"attic\"\n\
        count = 3\n\
        devices = [\"rx7600\"]\n\
        memory_gib = 16\n\
        [network]\n\
        rate_gbit_s = 1\n\
        latency_ms = 0.2\n";
    std::fs::write(desk.path("machines.toml"), file).unwrap();
    let told = plan(&desk, "--machines machines.toml").out;
    for part in ["RTX 4090", "attic", "step"] {
        assert!(told.contains(part), "'{part}' is missing in:\n{told}");
    }
    let found = plan_json(&desk, "--machines machines.toml");
    assert!(found["chosen"]["step_ms"].as_f64().unwrap() > 0.0, "{found}");
    std::fs::write(desk.path("machines.toml"), file.replace("RTX 3060", "RTX 3061")).unwrap();
    let line = format!("plan {SMALL} --machines machines.toml");
    let error = desk.run(&line).ended(78);
    let error = error.line("error:");
    assert!(error.contains("RTX 3061") && error.contains("RTX 3060"), "{error}");
}
