//! Ops that consist of two parts, which some kernels of the first part compute together: its other
//! kernels are followed by one of the second part.

use super::dispatch_parts::push_new;
use crate::{Caps, DeviceClass, Dispatch, OpCall, Operand, Twin, Variant, twin};

pub(crate) fn twin_of(part: &OpCall) -> &'static Twin {
    twin(part.op).unwrap_or_else(|| panic!("{} has kernels", part.op))
}

/// Returns the static choice of both parts, given the dispatches of the first. `inputs` are the
/// inputs of the whole call that the second part reads.
pub(crate) fn dispatch(
    first: Vec<Dispatch>,
    second: &OpCall,
    inputs: &[usize],
    caps: &Caps,
) -> Vec<Dispatch> {
    if is_whole(&first) {
        return first;
    }
    [first, behind((twin_of(second).dispatch)(second, caps), inputs)].concat()
}

/// Returns the variants of both parts, given the first part's: its baseline is followed by the
/// baseline of the second part, and each variant by the static choices of the second part for the
/// classes of devices that the capabilities stand for. `inputs` are the inputs of the whole call
/// that the second part reads.
pub(crate) fn variants(
    first: Vec<Variant>,
    second: &OpCall,
    inputs: &[usize],
    caps: &Caps,
) -> Vec<Variant> {
    let choices = static_choices(second, caps);
    let mut variants = Vec::new();
    for (index, variant) in first.into_iter().enumerate() {
        if is_whole(&variant.dispatches) {
            variants.push(variant);
            continue;
        }
        let mut parts = choices.clone();
        if index == 0 {
            let baseline = (twin_of(second).variants)(second, caps).swap_remove(0);
            parts.retain(|choice| choice.name != baseline.name);
            parts.insert(0, baseline);
        }
        for part in parts {
            let name = format!("{}_with_{}", variant.name, part.name);
            let dispatches = [variant.dispatches.clone(), behind(part.dispatches, inputs)].concat();
            variants.push(Variant::new(name, dispatches));
        }
    }
    variants
}

/// Returns true if dispatches of the first part compute both parts: if they write to outputs of the
/// second, which follow the only output of the first.
fn is_whole(dispatches: &[Dispatch]) -> bool {
    dispatches.iter().any(|dispatch| {
        let mut operands = dispatch.operands.iter();
        operands.any(|operand| matches!(operand, Operand::Output(output) if *output > 0))
    })
}

/// Returns dispatches of the second part with the operands of the whole call.
pub(crate) fn behind(mut dispatches: Vec<Dispatch>, inputs: &[usize]) -> Vec<Dispatch> {
    for dispatch in &mut dispatches {
        for operand in &mut dispatch.operands {
            match operand {
                Operand::Input(input) => *input = inputs[*input],
                Operand::Output(output) => *output += 1,
                _ => {}
            }
        }
    }
    dispatches
}

/// Returns the distinct static choices of a call on the classes of devices that the capabilities
/// stand for.
fn static_choices(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let classes: &[DeviceClass] = match caps.class {
        DeviceClass::Any => &[DeviceClass::Hardware, DeviceClass::Software],
        DeviceClass::Hardware => &[DeviceClass::Hardware],
        DeviceClass::Software => &[DeviceClass::Software],
    };
    let mut choices: Vec<Variant> = Vec::new();
    for class in classes {
        push_new(&mut choices, twin_of(call).static_choice(call, &Caps { class: *class, ..*caps }));
    }
    choices
}
