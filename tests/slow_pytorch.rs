//! PyTorch's samples of its functions on every device, those that are kept and all, and trained
//! models in PyTorch: `./x slow`, which has all samples made where there is PyTorch.

#[path = "common/mod.rs"]
mod common;
#[path = "common/process.rs"]
mod process;
#[path = "common/pytorch_samples/mod.rs"]
mod pytorch_samples;
#[path = "common/samples.rs"]
mod samples;

use std::process::{Command, Stdio};

use potluck_graph::Plan;
use potluck_kernels::exec::{Cpu, Executor};

use common::{adapters, open, turn};
use process::{Desk, finish};
use pytorch_samples::{KEPT_PASSED, Samples, Survey, kept_samples, read_samples};

/// File of all samples, made by `tests/pytorch/op_samples.py --whole`.
const SAMPLES_ENV: &str = "POTLUCK_OP_SAMPLES";

/// Samples in a graph: they share kernels.
const PER_GRAPH: usize = 1000;

/// A Python with torch, numpy and safetensors, instead of the first one that has them.
const PYTHON_ENV: &str = "POTLUCK_TORCH_PYTHON";

/// The programs of docs/pytorch.md, which end with an error if PyTorch computes something else.
#[test]
fn trained_models_are_the_same_in_pytorch() {
    let Some(python) = python() else {
        process::skip("no Python with torch, numpy and safetensors");
        return;
    };
    let desk = Desk::new();
    samples::write_idx(&desk.path("digits"), "train", 0, 300);
    let cnn = "train --data digits --devices cpu --set model.kind=cnn --steps 40 --out cnn";
    desk.run(cnn).ok();
    let out = loaded(&python, &desk, ["load_cnn.py", "cnn", "digits"]);
    assert!(out.starts_with("probabilities of 300 samples: at most "), "{out}");
    assert!(out.ends_with("\nthey agree\n"), "{out}");

    desk.train("--out tied").ok();
    let others = "--set model.bias=true --set model.tie=false --set model.positions=12 \
                  --set model.activation=gelu_tanh";
    desk.train(&format!("--out untied {others}")).ok();
    for run in ["tied", "untied"] {
        let out = loaded(&python, &desk, ["load_gpt.py", run, "text.txt"]);
        assert!(out.starts_with("loss of ") && out.ends_with("\nthey agree\n"), "{run}: {out}");
    }
}

/// Returns the first Python that has PyTorch, as `./x` looks for it.
fn python() -> Option<String> {
    let found = concat!(env!("CARGO_MANIFEST_DIR"), "/target/oracle/bin/python");
    let candidates = match std::env::var(PYTHON_ENV) {
        Ok(named) => vec![named],
        Err(_) => vec!["python3".into(), found.into()],
    };
    candidates.into_iter().find(|python| {
        let mut has = Command::new(python);
        has.args(["-c", "import torch, numpy, safetensors"]).stderr(Stdio::null());
        has.status().is_ok_and(|status| status.success())
    })
}

/// Runs a program of `examples/pytorch` on a run and data, and returns what it printed.
fn loaded(python: &str, desk: &Desk, [script, run, data]: [&str; 3]) -> String {
    let path = format!("{}/examples/pytorch/{script}", env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(python);
    command.args([&path, run, data, env!("CARGO_BIN_EXE_potluck")]).current_dir(desk.path(""));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.env("POTLUCK_CACHE", desk.cache()).spawn().unwrap();
    finish(child, script).ok().out
}

#[test]
fn kept_samples_are_pytorchs_on_every_device() {
    let passed = passed_on_every_device(&kept_samples());
    assert!(passed.iter().all(|passed| *passed == KEPT_PASSED), "{passed:?}");
}

#[test]
fn all_samples_are_pytorchs_on_every_device() {
    let Some(path) = std::env::var_os(SAMPLES_ENV) else {
        // As `./x` counts skipped tests.
        println!("skipped: {SAMPLES_ENV} names no file of all samples of PyTorch's functions");
        return;
    };
    let passed = passed_on_every_device(&read_samples(&path.to_string_lossy()));
    let [ops, samples] = passed[0];
    assert!(ops >= KEPT_PASSED[0] && samples >= 3 * KEPT_PASSED[1], "{passed:?}");
    assert!(passed.iter().all(|of_device| *of_device == passed[0]), "{passed:?}");
}

/// Returns the ops and the samples that pass on the CPU device and on each adapter.
fn passed_on_every_device(bytes: &[u8]) -> Vec<[usize; 2]> {
    let _turn = turn();
    let samples = Samples::new(bytes);
    let mut survey = Survey::new(&samples);
    let built = survey.built.clone();
    survey.run("cpu", &built, 1, &mut |plan: Plan| -> Box<dyn Executor> {
        Box::new(Cpu::fast(plan, 0))
    });
    for adapter in adapters() {
        let name = format!("{} ({})", adapter.name, adapter.api);
        survey.run(&name, &built, PER_GRAPH, &mut |plan| Box::new(open(&adapter, plan, 0)));
    }
    survey.print();
    survey.assert_right();
    survey.passed()
}
