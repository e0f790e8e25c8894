//! Catalog of calls that cover every shader file and every variant, which `potluck devices
//! --certify` certifies; of elementwise functions some, and the others when a run needs them.

use crate::{Caps, OwnedCall, RandomContext, TWINS, UPDATE_TWINS, twin};
use potluck_core::RunSeries;
use potluck_core::rng::Key;
use potluck_graph::{MomentFormat, MomentRounding, Precision, Update, UpdateRange};

/// Returns the calls that the twins list, in the order of [`TWINS`]: per op, large enough for all
/// variants.
pub fn catalog_calls() -> Vec<OwnedCall> {
    let random = RandomContext { step_key: Key::new(1), training: true };
    let mut calls = Vec::new();
    for twin in TWINS {
        for (op, inputs) in (twin.catalog)() {
            let name = op.to_string();
            let Some(owned_call) = OwnedCall::new(op, inputs, random) else {
                panic!("the catalog's shapes do not fit {name}")
            };
            calls.push(owned_call);
        }
    }
    calls
}

/// Calls among [`catalog_calls`] that multiply matrices, in mixed precision.
pub(crate) fn mixed_calls() -> impl Iterator<Item = OwnedCall> {
    let mut products = catalog_calls();
    products.retain(|owned_call| owned_call.op.is_product());
    products.into_iter().map(|owned_call| OwnedCall { precision: Precision::Mixed, ..owned_call })
}

/// Element counts of buckets: kernels that work on buckets have one version for multiples of four
/// and one for other counts.
pub(crate) const COUNTS: [usize; 2] = [4, 1];

/// Update ranges with the lengths of `COUNTS`, and moments in f32.
const RANGES: [UpdateRange; 2] = [
    UpdateRange { start: 0, length: COUNTS[0], decay_end: 0, gradient_scale: 1.0, rounding: None },
    UpdateRange { start: 0, length: COUNTS[1], decay_end: 0, gradient_scale: 1.0, rounding: None },
];

/// Returns one range per kernel of a rule whose moments are kept in this format.
pub(crate) fn ranges_of_kernels(update: &Update, format: MomentFormat) -> Vec<UpdateRange> {
    if format == MomentFormat::F32 || update.moments() == 0 {
        return RANGES.to_vec();
    }
    let series = RunSeries { start: 0, elements: 1, place: 0, run: 1, distance: 1 };
    let rounding = MomentRounding { key: Key::new(1), series, number: 0 };
    vec![UpdateRange { rounding: Some(rounding), ..RANGES[0] }]
}

/// Returns every rule over the ranges of its kernels.
pub fn updates() -> Vec<(Update, UpdateRange)> {
    let mut updates = Vec::new();
    for twin in UPDATE_TWINS {
        for rule in (twin.catalog)() {
            let mut ranges = ranges_of_kernels(&rule, MomentFormat::F32);
            if rule.moments() > 0 {
                ranges.extend(ranges_of_kernels(&rule, MomentFormat::Bf16));
            }
            for range in ranges {
                updates.push((rule, range));
            }
        }
    }
    updates
}

/// Returns the name of every variant of every kernel, sorted.
pub fn names() -> Vec<String> {
    let mut names = vec!["norm".to_string(), "hash".to_string()];
    for twin in UPDATE_TWINS {
        names.push(twin.name.to_string());
    }
    for owned_call in catalog_calls().into_iter().chain(mixed_calls()) {
        for variant in twin::variants(&owned_call.call(), &Caps::EVERY) {
            names.push(variant.name);
        }
    }
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness;
    use crate::ops::{hash, norm};
    use crate::source::FILES;
    use crate::update_twin;
    use potluck_core::HostTensor;
    use std::collections::BTreeSet;

    /// A shader file, or a kernel in one, that no call uses would never be certified.
    #[test]
    fn every_shader_file_is_used() {
        // Two files are no part of training, and one has no values of a model.
        let mut used: BTreeSet<String> = ["passes", "peak", "spin"].map(String::from).into();
        let on_ranges = updates().into_iter();
        used.extend(
            on_ranges.map(|(rule, range)| {
                (update_twin(&rule).dispatch)(&rule, &range).shader.file.into()
            }),
        );
        let on_buckets = COUNTS
            .into_iter()
            .flat_map(|count| [norm::probe(count, &Caps::EVERY), hash::probe(count)]);
        let dispatches = on_buckets.flat_map(|probe| probe.dispatches);
        used.extend(dispatches.map(|dispatch| dispatch.shader.file.into_owned()));
        for owned_call in catalog_calls().into_iter().chain(mixed_calls()) {
            let call = owned_call.call();
            for variant in (twin(call.op).unwrap().variants)(&call, &Caps::EVERY) {
                used.extend(variant.dispatches.into_iter().map(|one| one.shader.file.into()));
            }
        }
        for (file, _) in FILES {
            assert!(used.contains(*file), "{file} is used by no call of the catalog");
        }
    }

    /// Work is cut into blocks by sizes alone.
    #[test]
    fn the_bits_of_the_host_do_not_depend_on_threads() {
        let pools = [1, 2, 3, 7].map(|threads| {
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads start")
        });
        for owned_call in catalog_calls() {
            let call = owned_call.call();
            let values = owned_call.values();
            let inputs: Vec<&HostTensor<f64>> = values.iter().collect();
            let fast = twin(call.op).expect("the catalog has ops with kernels").fast;
            let [one, others @ ..] = &pools;
            let bits = |pool: &rayon::ThreadPool| -> Vec<Vec<u32>> {
                let outputs = pool.install(|| harness::host(&call, &inputs, 0.0, fast));
                outputs.iter().map(|of| of.iter().map(|x| x.to_bits()).collect()).collect()
            };
            let of_one = bits(one);
            for pool in others {
                let threads = pool.current_num_threads();
                assert!(bits(pool) == of_one, "{} with {threads} threads", call.op);
            }
        }
    }

    #[test]
    fn names_are_those_of_all_variants() {
        let names = names();
        for name in
            ["norm", "adamw", "sgd", "hash", "matmul_naive", "matmul_tile_16x16", "attention"]
        {
            assert!(names.iter().any(|known| known == name), "{name} is not among {names:?}");
        }
    }
}
