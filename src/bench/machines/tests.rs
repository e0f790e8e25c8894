//! Tests of plans for machines of a file.

use std::fs;
use std::path::PathBuf;

use super::*;
use crate::step::gpt2;
use potluck_graph::ModelGraph;
use potluck_graph::model::gpt;
use potluck_parallel::ParallelOptions;

/// GPT-2 of 124 million parameters, in micro-batches of four samples.
fn planned(path: &Path, batch: u32) -> Result<MachinesPlan, PlanMachinesError> {
    let graph = ModelGraph::training(gpt(&gpt2()).unwrap(), true).unwrap();
    let options = ParallelOptions::default();
    let step = PlannedStep {
        options: &options,
        batch,
        micro_batch: 4,
        fits_micro_batch: true,
        moments: 2,
    };
    plan_model(path, Plans::new(graph), step)
}

fn written(name: &str, text: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("potluck-machines-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn example_is_planned_and_its_attic_left_out() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let plan = planned(&root.join("examples/plan/machines.toml"), 512).unwrap();
    let table = plan.table();
    let json = plan.json();
    let step_ms = json["chosen"]["step_ms"].as_f64().unwrap();
    assert!((500.0..60_000.0).contains(&step_ms), "{table}");
    assert!(table.contains("rates from data sheets, not measured"), "{table}");
    let left_out = json["left_out"].as_array().unwrap();
    assert!(left_out.iter().any(|left| left["nodes"] == "attic"), "{table}");
    let nodes = json["nodes"].as_array().unwrap();
    assert!(nodes.iter().all(|node| node["name"] != "attic"), "{table}");
    let samples: u64 = nodes.iter().map(|node| node["samples"].as_u64().unwrap()).sum();
    assert_eq!(samples, 512);
    for others in json["others"].as_array().unwrap() {
        assert!(others["step_ms"].as_f64().unwrap() >= step_ms, "{table}");
    }
    assert!(json["chosen"]["memory"][0]["needed"].as_u64().unwrap() > 1 << 30, "{json}");
}

/// A single 4090 with GPT-2: the roofline of its kernels, with estimates of what they reach, is
/// near 194 ms for a micro-batch of eight samples.
#[test]
fn step_of_one_card_is_that_of_its_roofline() {
    let text = "[[node]]\nname = \"a\"\ndevices = [\"RTX 4090\"]\nmemory_gib = 64\n";
    let plan = planned(&written("one.toml", text), 8).unwrap();
    // Its matrix units are 1.7 times as fast, and other kernels stay as they are.
    let [advice] = &plan.proposal.advice[..] else { panic!("{:?}", plan.proposal.advice) };
    assert!(advice.text.contains("(train.precision = \"mixed\")"), "{}", advice.text);
    let gain = plan.proposal.chosen.step_s / advice.step_s;
    assert!((1.2..1.7).contains(&gain), "{gain}");
    let json = plan.json();
    assert_eq!(json["chosen"]["layout"], "alone");
    let step_ms = json["chosen"]["step_ms"].as_f64().unwrap();
    assert!((150.0..240.0).contains(&step_ms), "{step_ms}");
}

#[test]
fn model_that_fits_nowhere_is_refused_with_its_need() {
    let text = "[[node]]\nname = \"a\"\ndevices = [\"cpu:1\"]\nmemory_gib = 1\n";
    let error = planned(&written("small.toml", text), 8).err().unwrap().to_string();
    assert!(error.contains("cpu of 1 TFLOP/s has 716.8 MiB"), "{error}");
}

/// Nodes of which no two have the same connection, with devices of all cards.
fn unequal(nodes: usize, gbit_s: f64) -> String {
    let cards = ["RTX 4090", "RTX 3060", "RTX 3090", "RX 7900 XTX", "M2", "Arc A770", "RTX 5080"];
    let mut text = "[network]\nrate_gbit_s = 1\nlatency_ms = 0.3\n".to_string();
    for node in 0..nodes {
        let card = cards[node * 5 % cards.len()];
        let tflops = 0.2 + 0.001 * node as f64;
        let rate = 0.1 + gbit_s * (node * 37 % nodes) as f64 / nodes as f64;
        let devices =
            if node % 3 == 0 { format!("{card:?}, \"cpu:{tflops}\"") } else { format!("{card:?}") };
        text += &format!(
            "[[node]]\nname = \"n{node}\"\ndevices = [{devices}]\nmemory_gib = 32\n\
             rate_gbit_s = {rate}\n"
        );
    }
    text
}

#[test]
fn table_of_many_unequal_nodes_is_short() {
    let plan = planned(&written("many.toml", &unequal(120, 2.4)), 2048).unwrap();
    let table = plan.table();
    assert!(table.lines().count() < 60, "{table}");
    assert!(table.lines().all(|line| line.chars().count() < 200), "{table}");
}

#[test]
fn more_nodes_than_a_run_takes_are_planned_with_a_note() {
    let text = "[[node]]\nname = \"a\"\ncount = 80\ndevices = [\"RTX 3060\"]\nmemory_gib = 16\n\
                [network]\nrate_gbit_s = 100\nlatency_ms = 0.01\n";
    let table = planned(&written("equal.toml", text), 1280).unwrap().table();
    assert!(table.contains("data 80 on 80 nodes"), "{table}");
    assert!(table.contains("note: a run of this version takes at most 64 nodes"), "{table}");
}
