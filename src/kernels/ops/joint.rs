//! Ops that stand for two, of which some kernels compute both: the other kernels are those of the
//! first op, followed by one of the second.

use crate::{Caps, DeviceClass, Dispatch, OpCall, Operand, Twin, Variant, twin};

/// Returns the twin of a part of an op.
pub(crate) fn twin_of(part: &OpCall) -> &'static Twin {
    twin(part.op).unwrap_or_else(|| panic!("{} has kernels", part.op))
}

/// Returns the static choice of the first part, given its dispatches, followed by that of the
/// second part, whose inputs are these of the whole call.
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

/// Returns the variants of the first part, each followed by the second part's, whose inputs are
/// these of the whole call: the baseline by the baseline, and each by the static choices of the
/// classes of devices that the capabilities stand for.
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

/// Returns true if dispatches of the first part compute both: if they write to the outputs of the
/// second, which follow the one of the first.
fn is_whole(dispatches: &[Dispatch]) -> bool {
    let mut operands = dispatches.iter().flat_map(|dispatch| &dispatch.operands);
    operands.any(|operand| matches!(operand, Operand::Output(output) if *output > 0))
}

/// Returns dispatches of the second part with the operands of the whole call.
pub(crate) fn behind(mut dispatches: Vec<Dispatch>, inputs: &[usize]) -> Vec<Dispatch> {
    for operand in dispatches.iter_mut().flat_map(|dispatch| &mut dispatch.operands) {
        match operand {
            Operand::Input(input) => *input = inputs[*input],
            Operand::Output(output) => *output += 1,
            _ => {}
        }
    }
    dispatches
}

/// Returns the static choices of a call, one for each class of devices that differs.
fn static_choices(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let classes: &[DeviceClass] = match caps.class {
        DeviceClass::Any => &[DeviceClass::Hardware, DeviceClass::Software],
        DeviceClass::Hardware => &[DeviceClass::Hardware],
        DeviceClass::Software => &[DeviceClass::Software],
    };
    let mut choices: Vec<Variant> = Vec::new();
    for class in classes {
        let choice = twin_of(call).static_choice(call, &Caps { class: *class, ..*caps });
        if choices.iter().all(|known| known.name != choice.name) {
            choices.push(choice);
        }
    }
    choices
}
