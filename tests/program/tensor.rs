//! Tensor groups of CPU devices, alone and beside pipelines and data parallelism: they follow the
//! course of one device, their checkpoints go on anywhere, and what cannot be divided is refused.

use std::sync::LazyLock;

use potluck_core::format::size_text;
use serde_json::Value;

use crate::process::{Desk, Ran};
use crate::samples::write_idx;

/// Dropout, clipping and a tied head; micro-batches of 3 samples, replicas compared at each step.
const SMALL: &str = "train tiny.toml --data text.txt --quiet --steps 12 \
     --set model.layers=2 --set model.width=32 --set model.heads=4 --set model.context=16 \
     --set model.dropout=0.1 --set model.tie=true --set train.batch=12 \
     --set train.micro_batch_size=3 --set train.sample_tokens=0 --set train.checkpoint_every=4 \
     --set train.checkpoint_keep=9 --set optim.clip=0.5 --set schedule.decay_steps=12 \
     --set faults.hash_every=1";

static ONE: LazyLock<Desk> = LazyLock::new(|| {
    let desk = Desk::new();
    train(&desk, "one", "--devices cpu").ok();
    desk
});

fn train(desk: &Desk, out: &str, more: &str) -> Ran {
    desk.run(&format!("{SMALL} --out {out} {more}"))
}

fn norms(desk: &Desk, run: &str) -> Vec<f64> {
    let steps = desk.steps(run).into_iter();
    steps.map(|step| step["grad_norm"].as_f64().unwrap()).collect()
}

/// Asserts that a run has the losses and norms of one device but for roundings.
fn assert_course(desk: &Desk, run: &str, what: &str) {
    let pairs =
        [(desk.losses(run), ONE.losses("one"), 1e-5), (norms(desk, run), norms(&ONE, "one"), 1e-4)];
    for (found, expected, most) in pairs {
        assert_eq!(found.len(), 12, "{what}");
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let error = (found - expected).abs() / expected;
            assert!(error <= most, "{what}, step {}: {found} is not {expected}", step + 1);
        }
    }
}

#[test]
fn groups_and_meshes_near_one_device() {
    let desk = Desk::new();
    for (out, line) in [
        ("two", "--devices cpu*2 --tensor 2"),
        ("four", "--devices cpu*4 --tensor 4"),
        ("unlike", "--devices cpu*2 --tensor 2 --set parallel.tensor_shares=3,1"),
        ("mesh", "--devices cpu*8 --tensor 2 --pipeline 2"),
        ("messages", "--devices cpu*2 --tensor 2 --set message_kib=1 --set train.fuse=false"),
    ] {
        assert_eq!(train(&desk, out, line).ok().err, "", "{line}");
        assert_course(&desk, out, line);
    }
    let places: Vec<(Value, Value, Value)> = desk.steps("mesh")[11]["ranks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|rank| (rank["pipeline"].clone(), rank["stage"].clone(), rank["tensor"].clone()))
        .collect();
    assert_eq!(places[6], (1.into(), 1.into(), 0.into()), "{places:?}");
    let placement = &desk.manifest("mesh", 12)["meta"]["placement"];
    assert_eq!(placement["mesh"], serde_json::json!({ "data": 2, "pipeline": 2, "tensor": 2 }));
    assert_eq!(placement["tensor_shares"], serde_json::json!([1, 1]));
    let unlike = &desk.manifest("unlike", 12)["meta"]["placement"];
    assert_eq!(unlike["tensor_shares"], serde_json::json!([3, 1]));
    // A stage of the tied model has the gradients of one end, so that bits of layouts differ.
    let parameters = |run: &str| desk.checkpoint(run, 12, "parameters.safetensors");
    assert_eq!(parameters("two").len(), parameters("mesh").len());
    assert_ne!(parameters("two"), parameters("mesh"));
}

/// Ranks add up rounded terms, and blocks hand on rounded values wherever the cuts are. A step that
/// is not finite is run again through stages and groups, which have other nodes on each rank.
#[test]
fn bf16_groups_in_any_stages_same_bits() {
    let desk = Desk::new();
    let bf16 = "--set model.tie=false --set activations=bf16";
    let parameters = |run: &str| desk.checkpoint(run, 12, "parameters.safetensors");
    train(&desk, "exact", "--set model.tie=false --devices cpu*2 --tensor 2").ok();
    train(&desk, "two", &format!("{bf16} --devices cpu*2 --tensor 2")).ok();
    for (exact, rounded) in desk.losses("exact").iter().zip(desk.losses("two")) {
        assert!(*exact != rounded && (exact - rounded).abs() < 0.005 * exact);
    }
    for (out, line) in [
        ("stages", "--devices cpu*4 --tensor 2 --pipeline 2"),
        ("uneven", "--devices cpu*4 --tensor 2 --pipeline 2 --set parallel.blocks_per_stage=1,3"),
        ("messages", "--devices cpu*2 --tensor 2 --set message_kib=1"),
    ] {
        train(&desk, out, &format!("{bf16} {line}")).ok();
        assert_eq!(desk.losses(out), desk.losses("two"), "{line}");
        assert!(parameters(out) == parameters("two"), "{line}");
    }
    let mesh = "--devices cpu*4 --tensor 2 --pipeline 2 --set recompute=selective";
    let line = format!("{SMALL} --out again {bf16} {mesh} --set fuse=false");
    let ran = desk.run_with("nan@backward:3", &line).ok();
    let warning = ran.line("warning: step 3");
    assert!(warning.contains("it began at the sum of the gradients of h.0"), "{}", ran.err);
}

#[test]
fn resume_mesh_in_any_layout_and_back() {
    let desk = Desk::new();
    train(&desk, "run", "--devices cpu*8 --tensor 2 --pipeline 2 --steps 4").ok();
    for (steps, line) in [
        (6, "--devices cpu --tensor 1 --pipeline 1"),
        (8, "--devices cpu*2 --tensor 2 --pipeline 1"),
        (10, "--devices cpu*3 --tensor 1 --pipeline 3"),
        (11, "--devices cpu*3 --tensor 3 --pipeline 1 --set parallel.tensor_shares=1,2,1"),
        (12, "--devices cpu*8 --tensor 2 --pipeline 2 --set parallel.tensor_shares=[]"),
    ] {
        desk.run(&format!("train --quiet --resume run {line} --steps {steps}")).ok();
    }
    assert_course(&desk, "run", "a run in many layouts");
    // The same layout has the same bits, also with the shares of the placement.
    train(&desk, "whole", "--devices cpu*2 --tensor 2 --set tensor_shares=3,1").ok();
    let half = "whole/checkpoints/step-00000008";
    let ran = desk.run(&format!("train --quiet --resume {half} --steps 12 --out rest")).ok();
    assert_eq!(ran.err, "");
    let parameters = |run: &str| desk.checkpoint(run, 12, "parameters.safetensors");
    assert_eq!(parameters("rest"), parameters("whole"));
    let same = desk.run("train --resume whole --steps 13 --tensor 2 --set tensor_shares=6,2").ok();
    assert!(!same.err.contains("bits may differ"), "{}", same.err);
    let other = desk.run("train --resume whole --steps 14 --tensor 2 --set tensor_shares=1,1").ok();
    assert!(other.err.contains("another division of tensors: bits may"), "{}", other.err);
}

#[test]
fn group_killed_resumes_same_bits() {
    let line = format!(
        "{SMALL} --out run --devices cpu*4 --tensor 2 --pipeline 2 --set train.checkpoint_every=2"
    );
    let whole = Desk::new();
    whole.run(&line).ok();
    // Each kills the run that goes on after the one before it.
    let (desk, resume) = (Desk::new(), "train --resume run --quiet");
    assert_ne!(desk.run_with("kill@forward:3", &line).code(), Some(0));
    for fault in ["kill@recv:6", "kill@reduce:8", "kill@update:11"] {
        assert_ne!(desk.run_with(fault, resume).code(), Some(0), "{fault}");
    }
    desk.run(resume).ok();
    for file in ["parameters.safetensors", "moments.safetensors"] {
        assert!(desk.checkpoint("run", 12, file) == whole.checkpoint("run", 12, file), "{file}");
    }
    assert_eq!(desk.losses("run"), whole.losses("run"));
}

/// A rank that fails takes its group along; the run tells how to go on with what is left.
#[test]
fn rank_lost_prints_command() {
    let desk = Desk::new();
    let line = format!("{SMALL} --out run --devices cpu*4 --tensor 2");
    let ran = desk.run_with("lost@backward:6/1", &line).ended(75);
    let told = ran.line("error:");
    assert!(told.contains("with: potluck train --resume run --devices auto"), "{told}");
    assert!(!told.contains("--tensor"), "{told}");
    desk.run_suggested(told).ok();
    assert_eq!(desk.losses("run").len(), 12);
}

#[test]
fn eval_and_text_of_group_of_one_device() {
    let eval = |line: &str| -> Value {
        let ran = ONE.run(&format!("eval one {line} --json --split train --samples 40")).ok();
        serde_json::from_str(&ran.out).unwrap()
    };
    let generate = |line: &str| {
        ONE.run(&format!("generate one --tokens 30 --temperature 1.2 {line}")).ok().out
    };
    let (loss, text) = (eval("--devices cpu"), generate("--devices cpu"));
    for line in [
        "--devices cpu*2 --tensor 2",
        "--devices cpu*3 --tensor 3 --set tensor_shares=2,1,1",
        "--devices cpu*4 --tensor 2 --pipeline 2",
    ] {
        let evaluated = eval(line);
        let error = (evaluated["loss"].as_f64().unwrap() - loss["loss"].as_f64().unwrap()).abs();
        assert!(error < 1e-5, "{line}: {evaluated} is not {loss}");
        assert_eq!(evaluated["targets"], loss["targets"], "{line}");
        assert_eq!(generate(line), text, "{line}");
    }
    let ran = ONE.run("generate one --tokens 3 --devices cpu*8 --tensor 2 --pipeline 2").ok();
    assert!(ran.err.contains("the first 4 of 8 devices"), "{}", ran.err);
}

#[test]
fn mlp_over_group_near_one_device() {
    let desk = Desk::new();
    write_idx(&desk.path("images"), "train", 0, 300);
    let line = "train --data images --steps 20 --set model.hidden=96,64 --set train.batch=32 \
                --set optim.lr=0.003 --quiet --set model.dropout=0.1";
    desk.run(&format!("{line} --devices cpu --out one")).ok();
    desk.run(&format!("{line} --devices cpu*2 --tensor 2 --out two")).ok();
    for (found, expected) in desk.losses("two").iter().zip(desk.losses("one")) {
        assert!((found - expected).abs() <= 1e-5 * expected, "{found} {expected}");
    }
    let predicted = |devices: &str| {
        desk.run(&format!("predict one --data images --out all.csv {devices}")).ok();
        let text = std::fs::read_to_string(desk.path("all.csv")).unwrap();
        let class = |line: &str| line.split(',').nth(1).unwrap().to_string();
        text.lines().map(class).collect::<Vec<_>>()
    };
    assert_eq!(predicted("--devices cpu*2 --tensor 2"), predicted("--devices cpu"));
}

/// 4 all-reduces per layer, 5 if it is computed again, one behind the embedding and one before the
/// head, of `b t c` values, and 12 bytes per token for the loss.
#[test]
fn explain_group_tells_its_reductions() {
    let explain =
        |kind: &str, more: &str| ONE.run(&format!("{SMALL} --explain {kind} {more}")).ok().out;
    let (layers, rows, context, width) = (2, 3, 16, 32);
    let bytes = (4 * layers + 2) * rows * context * width * 4 + 12 * rows * context;
    let told = explain("communication", "--devices cpu*2 --tensor 2");
    let line = format!(
        "tensor groups of 2 ranks with shares 1 : 1: 11 all-reduces of a micro-batch, of which \
         each rank reads back {} and writes as much\n",
        size_text(bytes)
    );
    assert!(told.contains(&line), "{told}\n{line}");
    let all = size_text(4 * bytes);
    assert_eq!(told.lines().filter(|line| line.contains(&all)).count(), 2, "{told}");
    let program = explain("program", "--devices cpu*2 --tensor 2");
    let sums = program.lines().filter(|line| line.contains(" all-reduce ")).count();
    assert_eq!(sums, 2 * 4 * 11, "{program}");
    assert!(program.contains("all-reduce 1 (h.0 of ranks 0, 1) of micro-batch 0"), "{program}");
    let again = "--devices cpu*2 --tensor 2 --set train.recompute=blocks";
    let told = explain("communication", again);
    let bytes = bytes + layers * rows * context * width * 4;
    let line = format!(
        "13 all-reduces of a micro-batch, of which each rank reads back {} and",
        size_text(bytes)
    );
    assert!(told.contains(&line), "{told}\n{line}");
    assert!(told.contains(" h.1 again ") && told.contains(&size_text(4 * bytes)), "{told}");
    let program = explain("program", again);
    let sums = program.lines().filter(|line| line.contains(" all-reduce ")).count();
    assert_eq!(sums, 2 * 4 * 13, "{program}");
    // The sums and the edges to the embedding and the head, but not the parts of the loss.
    let words = explain("communication", "--devices cpu*2 --tensor 2 --set activations=bf16");
    let of_loss = 12 * rows * context;
    let sums = (4 * layers + 2) * rows * context * width * 4;
    let line = format!(
        "11 all-reduces of a micro-batch, of which each rank reads back {} and writes {}\n",
        size_text(sums / 2 + of_loss),
        size_text(sums + of_loss)
    );
    assert!(words.contains(&line), "{words}\n{line}");
    let selective = again.replace("blocks", "selective");
    assert!(explain("communication", &selective).contains(": 11 all-reduces of a micro-batch"));
    let memory = explain("memory", "--devices cpu*2 --tensor 2 --set tensor_shares=3,1");
    assert!(memory.contains("cpu, tensor rank 0 (74 %) of stage 0 of pipeline 0"), "{memory}");
}

/// Each device has as much memory as 1 / 1.6 of the model needs.
#[test]
fn model_over_memory_trains_over_two() {
    let desk = Desk::new();
    let line = format!("{SMALL} --set model.width=256 --set model.layers=4 --steps 1 --out run");
    let told = desk.run(&format!("{line} --explain memory --devices cpu")).ok().out;
    let peak = told.lines().find(|line| line.trim_start().starts_with("peak")).unwrap();
    let mib: f64 = peak.split_whitespace().nth(1).unwrap().parse().unwrap();
    let line = format!("{line} --set train.device_memory_mib={}", (mib / 1.6) as u64);
    let error = desk.run(&format!("{line} --devices cpu")).ended(78);
    assert!(error.line("error:").contains("of its memory and it has"), "{}", error.err);
    desk.run(&format!("{line} --devices cpu*2 --tensor 2")).ok();
    assert_eq!(desk.losses("run").len(), 1);
}

#[test]
fn trace_has_the_all_reduces() {
    let desk = Desk::new();
    let line = "--devices cpu*2 --tensor 2 --steps 2 --trace trace.json";
    train(&desk, "run", line).ok();
    let trace = std::fs::read_to_string(desk.path("trace.json")).unwrap();
    for name in [
        "reduce all-reduce 0 (embed) of micro-batch 0",
        "wait for all-reduce 1 (h.0) of micro-batch",
        "tensor rank 1 of stage 0",
    ] {
        assert!(trace.contains(name), "'{name}' is missing");
    }
}

#[test]
fn groups_impossible_are_refused() {
    let desk = Desk::new();
    let refused = |more: &str| {
        let ran = train(&desk, "run", more).ended(78);
        ran.line("error:").to_string()
    };
    let error = refused("--devices cpu*3 --tensor 2");
    assert!(error.contains("parallel.tensor_ranks = 2 needs a multiple of 2 devices"), "{error}");
    let error = refused("--devices cpu*4 --tensor 2 --pipeline 3");
    assert!(error.contains("need a multiple of 6 devices, and there are 4"), "{error}");
    let error = refused("--devices cpu*5 --tensor 5");
    let heads = "4 heads cannot be divided over 5 ranks: 2 to 4 are possible; change \
                 parallel.tensor_ranks";
    assert!(error.contains(heads), "{error}");
    let error = refused("--devices cpu*2 --tensor 2 --set tensor_shares=1,2,3");
    assert!(error.contains("parallel.tensor_shares expects 2 shares"), "{error}");
    let error = refused("--devices cpu --set tensor_shares=1,2");
    assert!(error.contains("has no effect without tensor groups"), "{error}");
    let ran = desk.run(
        "train --data text.txt --set model.kind=rnn --devices cpu*2 --tensor 2 --steps 1 --out run",
    );
    let error = ran.ended(78).line("error:").to_string();
    let advice = "so it has no tensor parallelism; leave parallel.tensor_ranks at 1";
    assert!(error.contains(advice), "{error}");
    let line = "train --data text.txt --set model.kind=llama --set kv_heads=1 --devices cpu*2 \
                --tensor 2 --out run";
    let error = desk.run(line).ended(78).line("error:").to_string();
    assert!(error.contains("1 head cannot be divided over 2 ranks"), "{error}");
    assert!(!desk.path("run").exists());
}
