//! Shape rule of an op with its epilogue in one kernel.

use super::rule;
use crate::elements::Binary;
use crate::op::{EpilogueOp, Op};
use potluck_core::Shape;

/// Returns the output shape of `root` once for the final value, and once per stored value. An
/// operand of any shape is read in the order of its elements: it has as many as the value, or
/// fewer, which repeat. The gradient of layer norm is fused with one sum of whole tensors only.
pub fn fused(root: &Op, epilogue: &[EpilogueOp], x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let operands = epilogue.iter().filter(|step| step.has_operand()).count();
    let (own, operands) = x.split_at(x.len().saturating_sub(operands));
    let outputs = rule(root, own)?;
    let [y] = outputs.as_slice() else {
        return Err(format!("{root} has {} outputs", outputs.len()));
    };
    let is_summed = matches!(root, Op::LayerNormGrad | Op::RmsNormGrad);
    if is_summed && *epilogue != [EpilogueOp::Binary(Binary::Add)] {
        return Err(format!("only a sum is fused with {root}"));
    }
    for (step, operand) in epilogue.iter().filter(|step| step.has_operand()).zip(operands) {
        let elements = operand.per_row();
        let whole = y.per_row();
        let equal = operand.is_batched() == y.is_batched() && elements == whole;
        let repeats = !operand.is_batched() && elements > 0 && whole % elements == 0;
        let fits = equal || (repeats && !is_summed && matches!(step, EpilogueOp::Binary(_)));
        if !fits {
            return Err(format!("an operand {operand} does not fit values {y} in {step}"));
        }
    }
    let kept = epilogue.iter().filter(|step| **step == EpilogueOp::Store).count();
    Ok(vec![y.clone(); 1 + kept])
}
