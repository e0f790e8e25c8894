//! Cross-entropy of long rows by subgroup operations. Twin of
//! `shaders/cross_entropy_subgroups.wgsl`, and a variant of [`super::cross_entropy`], which has the
//! reference and the tests against it.

use crate::{Caps, Dispatch, Shader};

/// Returns the dispatch `group` of the kernel with one workgroup per row, with subgroup operations
/// instead; `None` if the device has none.
pub fn way(group: Dispatch, caps: &Caps) -> Option<Dispatch> {
    if !caps.subgroups || !caps.wants_gpu_variants() {
        return None;
    }
    let shader = Shader::new("cross_entropy_subgroups", "cross_entropy_subgroups");
    Some(Dispatch { shader, ..group })
}

#[cfg(test)]
mod tests {
    use crate::harness::run_call;
    use crate::testing::{adapters, for_each_gpu};
    use crate::{Caps, DeviceClass, OwnedCall, RandomContext, Variant, twin};
    use potluck_core::rng::Key;
    use potluck_graph::{LossClasses, Op};

    const NAME: &str = "cross_entropy_subgroups";

    fn losses(n: usize, v: usize) -> OwnedCall {
        let random = RandomContext { step_key: Key::new(1), training: true };
        let op = Op::CrossEntropy(LossClasses::whole(v));
        OwnedCall::new(op, vec![vec![n, v], vec![n]], random).unwrap()
    }

    fn variant(of: &OwnedCall, caps: &Caps) -> Option<Variant> {
        let call = of.call();
        let all = (twin(call.op).unwrap().variants)(&call, caps);
        all.into_iter().find(|one| one.name == NAME)
    }

    #[test]
    fn subgroups_need_the_feature_a_gpu_and_long_rows() {
        let has = |v: usize, caps: &Caps| variant(&losses(3, v), caps).is_some();
        let gpu = Caps { class: DeviceClass::Hardware, ..Caps::EVERY };
        let software = Caps { class: DeviceClass::Software, ..Caps::EVERY };
        for v in [256, 1000, 50_257] {
            assert!(has(v, &gpu) && has(v, &Caps::EVERY), "{v}");
            assert!(!has(v, &Caps { subgroups: false, ..gpu }), "{v}");
            assert!(!has(v, &software), "{v}");
        }
        assert!(!has(255, &gpu));
    }

    /// Without this, the kernel might be tested nowhere.
    #[test]
    fn devices_of_kernel_tests_have_the_subgroups_of_their_adapters() {
        let adapters = adapters();
        for_each_gpu(|gpu, _| {
            let mut same = adapters.iter().filter(|one| one.name == gpu.name && one.api == gpu.api);
            let adapter = same.next().unwrap();
            assert_eq!(gpu.features.subgroups, adapter.features().subgroups, "{}", gpu.name);
            assert_eq!(Caps::of(gpu).subgroups, Caps::of_adapter(adapter).subgroups);
        });
    }

    /// The hardware chooses the order within a subgroup, once for all.
    #[test]
    fn losses_have_the_same_bits_every_time() {
        let losses = losses(5, 1001);
        let call = losses.call();
        let inputs = losses.values();
        let inputs: Vec<_> = inputs.iter().collect();
        for_each_gpu(|gpu, pipelines| {
            let caps = Caps::of(gpu).with_all_that_run();
            let Some(Variant { dispatches, .. }) = variant(&losses, &caps) else { return };
            let mut bits = || {
                let outputs = run_call(gpu, pipelines, &call, &dispatches, &inputs, f32::NAN);
                let bits = |out: Vec<f32>| out.into_iter().map(f32::to_bits).collect();
                outputs.unwrap().into_iter().map(bits).collect::<Vec<Vec<u32>>>()
            };
            let first = bits();
            for _ in 0..4 {
                assert_eq!(bits(), first, "{}", gpu.name);
            }
        });
    }
}
