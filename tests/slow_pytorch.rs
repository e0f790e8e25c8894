//! PyTorch's samples of its functions on every device, those that are kept and all: `./x slow`,
//! which has all of them made where there is PyTorch.

#[path = "common/mod.rs"]
mod common;
#[path = "common/pytorch_samples/mod.rs"]
mod pytorch_samples;

use potluck_graph::Plan;
use potluck_kernels::exec::{Cpu, Executor};

use common::{adapters, open, turn};
use pytorch_samples::{KEPT_PASSED, Samples, Survey, kept_samples, read_samples};

/// File of all samples, made by `tests/pytorch/op_samples.py --whole`.
const SAMPLES_ENV: &str = "POTLUCK_OP_SAMPLES";

/// Samples in a graph: they share kernels.
const PER_GRAPH: usize = 1000;

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
