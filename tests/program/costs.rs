//! Cost of runs on several devices: the lines at the end, the line of the record, and the list of
//! runs; and the benchmark of scaling.

use crate::bench::{check_markup, names, texts};
use crate::process::{Desk, Ran};
use serde_json::Value;

/// Line of the record with the cost, which is the last one but for a measure of the model.
fn cost(desk: &Desk, run: &str) -> Option<Value> {
    let lines = desk.metrics(run);
    lines.into_iter().rev().find_map(|line| line.get("cost").cloned())
}

fn train(desk: &Desk, line: &str) -> Ran {
    let tiny = "train tiny.toml --data text.txt --set train.sample_tokens=0";
    desk.run(&format!("{tiny} {line}")).ok()
}

/// Shares of each rank, which add up to the step.
fn check_ranks(cost: &Value) {
    for rank in cost["ranks"].as_array().unwrap() {
        let parts = ["computing", "gradients", "tensors", "others", "between"];
        let sum: f64 = parts.iter().map(|part| rank[*part].as_f64().unwrap()).sum();
        assert!((sum - 1.0).abs() < 0.01, "{rank}");
    }
}

#[test]
fn cost_of_devices_is_told() {
    let desk = Desk::new();
    let ran = train(&desk, "--devices cpu*2 --steps 12 --out run");
    let cost = cost(&desk, "run").unwrap();
    check_ranks(&cost);
    assert_eq!((&cost["steps"], cost["ranks"].as_array().unwrap().len()), (&11.into(), 2));
    for measured in ["ms", "predicted_ms", "tokens_per_s", "speedup", "fastest_ms", "efficiency"] {
        assert!(cost[measured].as_f64().unwrap() > 0.0, "{measured}: {cost}");
    }
    let number = |name: &str| cost[name].as_f64().unwrap();
    let speedup = number("fastest_ms") / number("ms");
    assert!((number("speedup") / speedup - 1.0).abs() < 0.01, "{cost}");
    // Two devices are at least as fast together as either of them.
    assert!(number("efficiency") < number("speedup"), "{cost}");
    assert!(number("exposed_ms") >= 0.0 && number("hidden_ms") >= 0.0, "{cost}");
    assert!(cost.get("bubble").is_none(), "{cost}");

    let step = ran.err.lines().find(|line| line.contains(" predicted), ")).unwrap();
    // The event has more digits, so that their last one may be rounded otherwise.
    let (before, _) = step.split_once(" x cpu").unwrap();
    let told: f64 = before.rsplit(' ').next().unwrap().parse().unwrap();
    assert!((told - number("speedup")).abs() < 0.011, "{step}");
    assert!(step.starts_with("step "), "{step}");
    assert!(step.ends_with(" of the sum of all devices alone"), "{step}");
    assert!(ran.line("communication ").contains(" ms exposed, "), "{}", ran.err);
    assert!(ran.line("rank 1 cpu 2 ").ends_with(" %"), "{}", ran.err);
    let advice = cost["advice"].as_str().unwrap();
    assert_eq!(ran.line("would help: "), format!("would help: {advice}"));

    let listed = desk.run("runs run --json").ok();
    let rows: Value = serde_json::from_str(&listed.out).unwrap();
    assert_eq!(rows[0]["cost"], cost);
}

#[test]
fn cost_has_no_guess_without_timings() {
    let desk = Desk::new();
    let ran = train(&desk, "--devices cpu*2 --set balance=fixed --steps 8 --out run");
    let cost = cost(&desk, "run").unwrap();
    check_ranks(&cost);
    for unknown in ["predicted_ms", "speedup", "fastest", "fastest_ms", "efficiency", "bubble"] {
        assert!(cost.get(unknown).is_none(), "{unknown}: {cost}");
    }
    assert!(!ran.err.contains("alone") && !ran.err.contains("predicted"), "{}", ran.err);
}

#[test]
fn cost_needs_devices_and_steps() {
    let desk = Desk::new();
    let alone = train(&desk, "--devices cpu --steps 12 --out alone");
    let short = train(&desk, "--devices cpu*2 --steps 5 --out short");
    for (ran, run) in [(alone, "alone"), (short, "short")] {
        assert!(!ran.err.contains("would help"), "{}", ran.err);
        assert_eq!(cost(&desk, run), None);
        let listed = desk.run(&format!("runs {run} --json")).ok();
        let rows: Value = serde_json::from_str(&listed.out).unwrap();
        assert_eq!(rows[0]["cost"], Value::Null);
    }
}

#[test]
fn cost_of_pipelines_has_bubble() {
    let desk = Desk::new();
    let line = "--devices cpu*2 --pipeline 2 --set train.micro_batch_size=1 --steps 8 --out run";
    let ran = train(&desk, line);
    let cost = cost(&desk, "run").unwrap();
    check_ranks(&cost);
    let number = |name: &str| cost[name].as_f64().unwrap_or_else(|| panic!("{name}: {cost}"));
    assert!((0.0..1.0).contains(&number("bubble")), "{cost}");
    assert!(number("predicted_ms") > 0.0 && number("efficiency") > 0.0, "{cost}");
    let tensors = cost["ranks"][1]["tensors"].as_f64().unwrap();
    assert!(tensors > 0.0, "a stage waits for the one before it: {cost}");
    assert!(ran.line("communication ").contains("; bubble "), "{}", ran.err);
}

#[test]
fn bench_scaling_has_devices_alone_and_together() {
    let desk = Desk::new();
    let line = "bench scaling --tiny --devices cpu*3 --json report.json --svg s.svg";
    let ran = desk.run(line).ok();
    let file = std::fs::read_to_string(desk.path("report.json")).unwrap();
    let report: Value = serde_json::from_str(&file).unwrap();
    let device = &report["devices"][0];
    assert!(device["error"].is_null(), "{device}");
    let expected = [
        "scaling.1_device",
        "scaling.alone_2",
        "scaling.alone_3",
        "scaling.2_devices",
        "scaling.3_devices",
    ];
    assert_eq!(names(device, "figures"), expected);
    let figures = device["figures"].as_array().unwrap();
    let of = |figure: usize| &figures[figure]["kind"]["scaling"];
    let number = |figure: usize, field: &str| {
        of(figure)[field].as_f64().unwrap_or_else(|| panic!("{field}: {}", figures[figure]))
    };
    for (figure, count) in [1, 1, 1, 2, 3].into_iter().enumerate() {
        assert_eq!(of(figure)["devices"].as_array().unwrap().len(), count, "{file}");
        let fastest_s = (0..3).map(|one| number(one, "step_s")).fold(f64::INFINITY, f64::min);
        let speedup = fastest_s / number(figure, "step_s");
        assert!((number(figure, "speedup") - speedup).abs() < 1e-9, "{file}");
        let alone: f64 = (0..count).map(|one| 1.0 / number(one, "step_s")).sum();
        let efficiency = 1.0 / (number(figure, "step_s") * alone);
        assert!(count == 1 || (number(figure, "efficiency") - efficiency).abs() < 1e-9, "{file}");
        // Batches of a sample per device.
        let rate = 3.0 / number(figure, "step_s");
        let [min, max] = ["min", "max"].map(|field| figures[figure][field].as_f64().unwrap());
        assert!(min * 0.999 <= rate && rate <= max * 1.001, "{}", figures[figure]);
    }
    assert!(number(4, "predicted_s") > 0.0 && number(4, "exposed_s") >= 0.0, "{file}");
    assert_eq!(of(4)["ranks"].as_array().unwrap().len(), 3);
    let advice = of(4)["advice"].as_str().unwrap();
    assert!(ran.out.contains(&format!("\nwould help: {advice}")), "{}", ran.out);
    assert!(ran.out.contains("\nrank 2 cpu"), "{}", ran.out);
    let svg = std::fs::read_to_string(desk.path("s.svg")).unwrap();
    check_markup(&svg);
    // One, two and three devices are points of both plots.
    assert_eq!(svg.matches("<circle").count(), 6, "{svg}");
    for text in ["samples/s", "efficiency in %", "sum of the devices alone"] {
        assert!(texts(&svg).contains(&text), "{text} is missing: {svg}");
    }
    let same = desk.run("bench compare report.json report.json").ok();
    assert_eq!(same.out.matches("  same").count(), expected.len(), "{}", same.out);
    let refused = desk.run("bench scaling --tiny --devices cpu*2 --batch 1").ended(78);
    assert!(refused.line("error:").contains("no sample for each of 2 devices"), "{}", refused.err);
}
