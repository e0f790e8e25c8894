//! Parts of dispatches and variants that the kernels of several ops share.

use crate::{OpCall, Operand, Variant};
use potluck_graph::Update;

/// Returns sizes and counts as words of the parameters of a shader.
pub(super) fn as_words(numbers: &[usize]) -> Vec<u32> {
    numbers.iter().map(|number| *number as u32).collect()
}

/// Returns all inputs of a call, followed by all its outputs.
pub(super) fn all_tensors(call: &OpCall) -> Vec<Operand> {
    let mut operands = Vec::new();
    for input in 0..call.inputs.len() {
        operands.push(Operand::Input(input));
    }
    for output in 0..call.outputs.len() {
        operands.push(Operand::Output(output));
    }
    operands
}

/// Tensors of an update of a bucket: the gradients, the parameters and the moments.
pub(super) fn bucket_operands(update: &Update) -> Vec<Operand> {
    let mut operands = vec![Operand::Input(0)];
    for output in 0..=update.moments() {
        operands.push(Operand::Output(output));
    }
    operands
}

/// Returns the number of floats that a kernel takes as one value from rows of `width` floats: 4 if
/// rows are whole vectors, else 1.
pub(super) fn lanes_of(width: usize) -> usize {
    if width.is_multiple_of(4) { 4 } else { 1 }
}

/// Ending of the names of kernels whose values have this many floats.
pub(super) fn suffix(lanes: usize) -> &'static str {
    if lanes == 4 { "4" } else { "" }
}

/// Appends a variant unless the list has one of the same name.
pub(super) fn push_new(variants: &mut Vec<Variant>, variant: Variant) {
    if variants.iter().all(|known| known.name != variant.name) {
        variants.push(variant);
    }
}
