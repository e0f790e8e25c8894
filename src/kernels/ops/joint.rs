//! Ops that stand for two, of which some kernels compute both: the other kernels are those of the
//! first op, followed by one of the second.

use crate::{Caps, DeviceClass, Dispatch, OpCall, Twin, Variant, twin};

/// Returns the twin of a part of an op.
pub(crate) fn twin_of(part: &OpCall) -> &'static Twin {
    twin(part.op).unwrap_or_else(|| panic!("{} has kernels", part.op))
}

/// Returns the variants of the first part, each followed by the second part's: the baseline by the
/// baseline, and each by the static choices of the classes of devices that the capabilities stand
/// for. Variants for which `is_whole` is true compute both parts. `bound` returns dispatches of
/// the second part with the operands of the whole call.
pub(crate) fn variants(
    first: Vec<Variant>,
    second: &OpCall,
    caps: &Caps,
    is_whole: impl Fn(&Variant) -> bool,
    bound: impl Fn(Vec<Dispatch>) -> Vec<Dispatch>,
) -> Vec<Variant> {
    let choices = static_choices(second, caps);
    let mut variants = Vec::new();
    for (index, variant) in first.into_iter().enumerate() {
        if is_whole(&variant) {
            variants.push(variant);
            continue;
        }
        let baseline = (twin_of(second).variants)(second, caps).swap_remove(0);
        let mut behind = choices.clone();
        if index == 0 {
            behind.retain(|choice| choice.name != baseline.name);
            behind.insert(0, baseline);
        }
        for part in behind {
            let name = format!("{}_with_{}", variant.name, part.name);
            let dispatches = [variant.dispatches.clone(), bound(part.dispatches)].concat();
            variants.push(Variant::new(name, dispatches));
        }
    }
    variants
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
        let caps = Caps { class: *class, ..*caps };
        let chosen = (twin_of(call).dispatch)(call, &caps);
        let variants = (twin_of(call).variants)(call, &caps).into_iter();
        let named = variants.into_iter().find(|variant| variant.dispatches == chosen);
        let choice = named.unwrap_or_else(|| Variant::new(twin_of(call).name, chosen));
        if choices.iter().all(|known| known.name != choice.name) {
            choices.push(choice);
        }
    }
    choices
}
