//! PyTorch's samples of its functions on adapters: the first of each op. `./x slow` has all.

use crate::common::{adapters, open, turn};
use crate::pytorch_samples::{KEPT_PASSED, Samples, Survey, kept_samples};

#[test]
fn the_first_sample_of_each_op_is_pytorchs() {
    let _turn = turn();
    let bytes = kept_samples();
    let samples = Samples::new(&bytes);
    let mut survey = Survey::new(&samples);
    let first = survey.first_of_each_op();
    for adapter in adapters() {
        let name = format!("{} ({})", adapter.name, adapter.api);
        survey.run(&name, &first, first.len(), &mut |plan| Box::new(open(&adapter, plan, 0)));
    }
    survey.print();
    survey.assert_right();
    let [ops, _] = KEPT_PASSED;
    assert!(survey.passed().iter().all(|passed| *passed == [ops; 2]), "{:?}", survey.passed());
}
