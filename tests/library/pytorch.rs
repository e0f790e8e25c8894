//! PyTorch's samples of its functions on the CPU device; `tests/adapters` and `./x slow` have them
//! on adapters.

mod recurrent;

use potluck_graph::Plan;
use potluck_kernels::exec::{Cpu, Executor};

use crate::pytorch_samples::{KEPT_PASSED, Samples, Survey, kept_samples};

#[test]
fn samples_are_pytorchs() {
    let bytes = kept_samples();
    let samples = Samples::new(&bytes);
    let mut survey = Survey::new(&samples);
    let built = survey.built.clone();
    survey.run("cpu", &built, 1, &mut |plan: Plan| -> Box<dyn Executor> {
        Box::new(Cpu::fast(plan, 0))
    });
    survey.print();
    survey.assert_right();
    assert_eq!(survey.passed(), [KEPT_PASSED]);
}
