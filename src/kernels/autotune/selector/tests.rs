//! Tests of certification, timing, selection, caching and refusal of kernels.

use std::path::Path;

use super::*;
use crate::ops::matmul::tile::{RegisterTile, TILES};
use crate::testing::for_each_gpu;
use crate::{DeviceClass, Elementwise, OwnedCall, RandomContext};
use potluck_core::faults::KernelFault;
use potluck_core::rng::Key;
use potluck_core::{HostTensorView, Shape, Site};
use potluck_graph::{
    Accumulation, Builder, CachedAttentionOptions, CustomCall, CustomKernel, CustomOp, Init, Op,
    PlanOptions, Unary, differentiate,
};

/// Rows at full capacity: enough for every tile.
const ROWS: usize = 64;

/// Plan of a linear layer in training, whose products have several variants.
fn plan() -> Plan {
    let mut b = Builder::new();
    let x = b.input("x", &[1, 40]);
    let target = b.input("target", &[1, 48]);
    let w = b.parameter("w", &[48, 40], Init::Zeros);
    let y = b.linear(x, w, None).unwrap();
    b.squared_error_loss(y, target).unwrap();
    Plan::new(differentiate(b.finish()).unwrap(), PlanOptions::new(ROWS))
}

/// With a cache, a token of a few texts has other kernels than a prompt.
#[test]
fn kernels_for_a_few_rows_come_before_the_choice_at_full_capacity() {
    let caps = Caps { class: DeviceClass::Hardware, ..Caps::EVERY };
    let op = Op::CachedAttention(CachedAttentionOptions { heads: 12, first: 0 });
    let call = |rows: usize| {
        let inputs = vec![vec![rows, 1, 2304], vec![8, 24, 1024, 64], vec![rows, 1]];
        let random = RandomContext { step_key: Key::new(1), training: false };
        OwnedCall::new(op.clone(), inputs, random).unwrap()
    };
    let full = call(128);
    for (rows, counts) in [(1, false), (5, false), (6, true), (128, true)] {
        let owned = call(rows);
        let few = owned.call();
        let variants = (twin(few.op).unwrap().variants)(&few, &caps);
        assert_eq!(counts_for(&few, &variants, &full.call(), &caps), counts, "{rows} rows");
    }
}

/// Runs `body` on one adapter, because the tested code runs on the host.
fn on_one_gpu(mut body: impl FnMut(&Gpu)) {
    let mut is_first = true;
    for_each_gpu(|gpu, _| {
        if std::mem::take(&mut is_first) {
            body(gpu);
        }
    });
}

fn cache_in(directory: &Path) -> KernelCache {
    KernelCache::open(directory, "a device")
}

fn enough() -> TuneOptions {
    TuneOptions { seconds: 600.0, ..TuneOptions::default() }
}

fn with_fault(fault: KernelFault, names: &[&str]) -> TuneOptions {
    let faulty = |name: &&str| FaultyKernel { name: name.to_string(), fault };
    let faulty_kernels = names.iter().map(faulty).collect();
    TuneOptions { faulty_kernels, ..TuneOptions::default() }
}

fn with_corrupted(names: &[&str]) -> TuneOptions {
    with_fault(KernelFault::Scaled, names)
}

fn prepared(gpu: &Gpu, cache: KernelCache, tuning: &TuneOptions) -> (KernelSelector, Vec<String>) {
    let mut kernels = KernelSelector::new(cache);
    let notes = kernels.prepare(gpu, &plan(), tuning, &mut |_| {}).unwrap();
    (kernels, notes)
}

fn refused(gpu: &Gpu, tuning: &TuneOptions) -> String {
    let mut kernels = KernelSelector::new(KernelCache::in_memory());
    kernels.prepare(gpu, &plan(), tuning, &mut |_| {}).unwrap_err().to_string()
}

/// Number of calls of the plan that have several variants.
fn several() -> usize {
    let several = distinct_calls(&plan(), Caps::EVERY)
        .iter()
        .filter(|planned| planned.variants.len() > 1)
        .count();
    assert!(several >= 2, "at least the two products");
    several
}

fn product(rows: usize) -> OwnedCall {
    let op = Op::MatMul { transpose_a: false, transpose_b: true };
    let random = RandomContext { step_key: Key::new(0), training: true };
    OwnedCall::new(op, vec![vec![rows, 40], vec![48, 40]], random).unwrap()
}

/// Kernel variant that the product with these rows runs.
fn runs(kernels: &mut KernelSelector, gpu: &Gpu, rows: usize) -> String {
    let (call, full) = (product(rows), product(ROWS));
    kernels.variant(gpu, &call.call(), &full.call()).unwrap().name
}

fn largest_tile(gpu: &Gpu) -> RegisterTile {
    let variants =
        (twin(product(ROWS).call().op).unwrap().variants)(&product(ROWS).call(), &Caps::of(gpu));
    let is_candidate = |tile: &RegisterTile| variants.iter().any(|one| one.name == tile.name);
    TILES.into_iter().find(is_candidate).unwrap()
}

#[test]
fn signatures_name_a_call() {
    assert_eq!(call_key(&product(768).call()), "matmul a b^T (768, 40) (48, 40)");
    let mut sum = product(3);
    sum.accumulate = Accumulation::all(1);
    assert!(call_key(&sum.call()).ends_with(" accumulating"));
    let dropout = Op::Dropout { p: 0.1, site: Site(1), columns: None };
    let random = RandomContext { step_key: Key::new(0), training: true };
    let dropout = OwnedCall::new(dropout, vec![vec![2, 3], vec![2]], random).unwrap();
    assert_eq!(call_key(&dropout.call()), "dropout 0.1 (2, 3) (2) training");
    // The size of the table, which is no input, determines the fastest variant.
    let of_table = |rows| {
        let op = Op::EmbeddingGrad { first: 0, rows };
        call_key(&OwnedCall::new(op, vec![vec![5], vec![5, 4]], random).unwrap().call())
    };
    assert_eq!(of_table(300), "embedding_grad 300 rows (5) (5, 4)");
}

/// An evaluation of batch norm runs other shaders than training, under the same name.
#[test]
fn kernels_of_evaluations_are_certified_as_those_of_training() {
    on_one_gpu(|gpu| {
        let mut kernels = KernelSelector::new(KernelCache::in_memory());
        for training in [true, false] {
            let random = RandomContext { step_key: Key::new(0), training };
            let dims = [vec![vec![ROWS, 8]], vec![vec![8]; 4]].concat();
            let owned = OwnedCall::new(Op::BatchNorm { eps: 1e-5 }, dims, random).unwrap();
            let call = owned.call();
            assert_eq!(call_key(&call).ends_with(" training"), training);
            let variant = kernels.variant(gpu, &call, &call).unwrap();
            let hash = variant_hash(gpu.checks, &call, &variant);
            assert!(kernels.cache().certificate(&hash).is_some(), "training: {training}");
        }
    });
}

#[test]
fn everything_is_timed_once_and_remembered() {
    on_one_gpu(|gpu| {
        let cache = tempfile::tempdir().unwrap();
        let mut shown = Vec::new();
        let mut first = KernelSelector::new(cache_in(cache.path()));
        let mut report = |progress| shown.push(progress);
        let notes = first.prepare(gpu, &plan(), &enough(), &mut report).unwrap();
        assert_eq!(notes, [""; 0]);
        let product = product(ROWS);
        let variants = (twin(&product.op).unwrap().variants)(&product.call(), &Caps::of(gpu));
        let choices: Vec<_> = first.choices().iter().collect();
        assert_eq!(choices.len(), several(), "{choices:?}");
        assert!(first.stats().timed >= 2 * 3 && first.stats().certified > variants.len());
        let last: &TuneProgress = shown.last().unwrap();
        assert_eq!((last.done, last.total), (last.total, shown[0].total));

        // The fastest variant is chosen.
        let candidates = variant_set_hash(gpu, &product.call(), &variants);
        let known = first.cache().timings(&call_key(&product.call()), &candidates).unwrap();
        let timings = known.measured.values();
        let best = timings.min_by(|a, b| a.seconds.total_cmp(&b.seconds)).unwrap();
        assert_eq!(first.choices().get(&call_key(&product.call())), Some(best.variant.as_str()));

        let (second, _) = prepared(gpu, cache_in(cache.path()), &enough());
        assert_eq!(second.stats(), TuneStats::default());
        assert_eq!(second.choices(), first.choices());
        let retune = TuneOptions { retune: true, ..enough() };
        let (third, _) = prepared(gpu, cache_in(cache.path()), &retune);
        let first_again = TuneStats { certified: 0, ..first.stats() };
        assert_eq!(third.stats(), first_again);
    });
}

#[test]
fn recorded_timings_decide_and_those_of_other_candidates_do_not() {
    on_one_gpu(|gpu| {
        let product = product(ROWS);
        let (call, call_key) = (product.call(), call_key(&product.call()));
        let variants = (twin(&product.op).unwrap().variants)(&call, &Caps::of(gpu));
        let slowest = variants[0].name.clone();
        let timing = Timing { variant: slowest.clone(), seconds: 1e-9 };
        let measured: BTreeMap<String, Timing> = [("any".to_string(), timing)].into();
        let chosen = |candidates: String| {
            let mut cache = KernelCache::in_memory();
            cache.insert_timings(
                call_key.clone(),
                Timings { candidates, measured: measured.clone(), is_cut: false },
            );
            let (kernels, _) = prepared(gpu, cache, &TuneOptions::default());
            kernels.choices().get(&call_key).unwrap().to_string()
        };
        assert_eq!(chosen(variant_set_hash(gpu, &call, &variants)), slowest);
        assert_ne!(chosen(variant_set_hash(gpu, &call, &variants[1..])), slowest);
    });
}

/// One wrong element, and operands in half precision: an NMSE of 1e-6 lets both through.
#[test]
fn an_unusual_variant_runs_only_where_no_other_fits() {
    on_one_gpu(|gpu| {
        let (mut kernels, _) = prepared(gpu, KernelCache::in_memory(), &TuneOptions::default());
        let own = runs(&mut kernels, gpu, ROWS);
        for fault in [KernelFault::Element, KernelFault::Half] {
            let prepare =
                |names: &[&str]| prepared(gpu, KernelCache::in_memory(), &with_fault(fault, names));
            let (mut kernels, notes) = prepare(&[&own]);
            assert_ne!(runs(&mut kernels, gpu, ROWS), own, "{fault:?}");
            let known = crate::autotune::cache::summary(kernels.cache());
            assert!(known.off.is_empty() && !known.certified.is_empty(), "{known:?}");
            assert!(known.unusual.iter().all(|(kernel, _)| kernel.starts_with(&own)), "{known:?}");
            let told = |note: &String| note.starts_with(&own) && note.contains("unusually");
            assert!(notes.iter().any(told), "{notes:?}");

            let call = product(ROWS);
            let variants = (twin(call.call().op).unwrap().variants)(&call.call(), &Caps::of(gpu));
            let names: Vec<&str> = variants.iter().map(|variant| &*variant.name).collect();
            let (mut kernels, _) = prepare(&names);
            assert_eq!(runs(&mut kernels, gpu, ROWS), own, "all are unusual: {fault:?}");
        }
    });
}

/// Probes are too small to show it.
#[test]
fn a_variant_that_is_wrong_at_full_size_is_switched_off() {
    on_one_gpu(|gpu| {
        let (mut kernels, notes) = prepared(gpu, KernelCache::in_memory(), &TuneOptions::default());
        let own = runs(&mut kernels, gpu, ROWS);
        assert_eq!(kernels.stats().full_size, 0, "a processor is no graphics card: {notes:?}");

        let cache = tempfile::tempdir().unwrap();
        let faulty = with_fault(KernelFault::Shift, &[&own]);
        let (mut kernels, notes) = prepared(gpu, cache_in(cache.path()), &faulty);
        assert_ne!(runs(&mut kernels, gpu, ROWS), own);
        let told = |note: &String| note.starts_with(&own) && note.contains("at full size");
        assert!(notes.iter().any(told), "{notes:?}");
        let agree = |note: &String| note.contains("were compared with f64 at full size");
        assert!(notes.iter().any(agree), "{notes:?}");
        let checked = kernels.stats().full_size;
        assert!(checked > 1);

        // The results are kept.
        let (mut kernels, _) = prepared(gpu, cache_in(cache.path()), &faulty);
        assert_ne!(runs(&mut kernels, gpu, ROWS), own);
        assert_eq!(kernels.stats().full_size, 0);
    });
}

#[test]
fn a_wrong_variant_is_refused_and_another_runs() {
    on_one_gpu(|gpu| {
        let (mut kernels, _) = prepared(gpu, KernelCache::in_memory(), &TuneOptions::default());
        let unmeasured = runs(&mut kernels, gpu, ROWS);
        assert_ne!(unmeasured, "matmul_naive", "a tile is chosen without measuring");

        let cache = tempfile::tempdir().unwrap();
        for tuning in [with_corrupted(&[&unmeasured]), enough()] {
            // The second run has no seeded error, but the cache.
            let (mut kernels, _) = prepared(gpu, cache_in(cache.path()), &tuning);
            assert_ne!(runs(&mut kernels, gpu, ROWS), unmeasured);
            // Other calls run another kernel of this name, which is right.
            let chosen = kernels.choices().get(&call_key(&product(ROWS).call()));
            assert!(chosen.is_some_and(|name| name != unmeasured), "{chosen:?}");
            let known = crate::autotune::cache::summary(kernels.cache());
            assert!(!known.certified.is_empty() && !known.off.is_empty(), "{known:?}");
            for (kernel, why) in known.off {
                assert!(kernel.starts_with(&unmeasured) && why.contains("NMSE"), "{kernel}: {why}");
            }
        }
        // The wrong variant does not run even if a saved choice or a timing asks for it.
        let saved = kernels.choices().clone();
        let tuning = TuneOptions { saved, ..TuneOptions::default() };
        let (kernels, notes) = prepared(gpu, cache_in(cache.path()), &tuning);
        assert!(notes.iter().any(|note| note.contains("is switched off here")), "{notes:?}");
        assert!(kernels.choices().iter().all(|(_, name)| name != unmeasured));
    });
}

#[test]
fn without_a_right_plain_variant_nothing_runs() {
    on_one_gpu(|gpu| {
        let error = refused(gpu, &with_corrupted(&["matmul_naive"]));
        for part in [gpu.name.as_str(), "matmul_naive of matmul", "NMSE", "--devices cpu"] {
            assert!(error.contains(part), "{part} is missing in: {error}");
        }
        assert!(refused(gpu, &with_corrupted(&["squared_error"])).contains("squared_error"));

        let (mut kernels, _) =
            prepared(gpu, KernelCache::in_memory(), &with_corrupted(&["adamw", "norm"]));
        let places = NormSlots::new([10]);
        assert!(kernels.norm(gpu, 10, places, 0).unwrap_err().to_string().contains("norm"));
        for (rule, range) in catalog::updates() {
            let is_right = !matches!(rule, Update::AdamW { .. });
            assert_eq!(kernels.update(gpu, &rule, &range).is_ok(), is_right, "{rule:?}");
        }
    });
}

#[test]
fn the_time_for_measuring_is_kept() {
    on_one_gpu(|gpu| {
        let (kernels, notes) = prepared(gpu, KernelCache::in_memory(), &TuneOptions::default());
        assert_eq!((kernels.stats().timed, notes.len()), (0, 0));
        let cache = tempfile::tempdir().unwrap();
        let hurried = TuneOptions { seconds: 1e-9, ..enough() };
        let (first, notes) = prepared(gpu, cache_in(cache.path()), &hurried);
        assert_eq!((first.stats().timed, first.stats().untimed), (0, several()));
        assert_eq!(first.choices(), kernels.choices(), "as without measuring");
        let all = format!("{0} of {0} calls", several());
        assert!(
            notes[0].contains(&all) && notes[0].contains(", and the next one goes on"),
            "{notes:?}"
        );
        // The note is repeated until everything is timed.
        let (_, again) = prepared(gpu, cache_in(cache.path()), &hurried);
        assert_eq!(again, notes);
        let (later, notes) = prepared(gpu, cache_in(cache.path()), &enough());
        assert_eq!((later.stats().untimed, notes.len()), (0, 0));
        assert!(later.stats().timed >= 2 * several(), "{:?}", later.stats());
    });
}

/// Timings that end with the time budget are no comparison of all variants: the next run adds the
/// others.
#[test]
fn timings_that_were_cut_off_are_gone_on_with() {
    on_one_gpu(|gpu| {
        let product = product(ROWS);
        let (call, call_key) = (product.call(), call_key(&product.call()));
        let variants = (twin(&product.op).unwrap().variants)(&call, &Caps::of(gpu));
        let candidates = variant_set_hash(gpu, &call, &variants);
        // Impossibly fast, the plain one most.
        let timing = |index: usize| {
            let (variant, seconds) = (variants[index].name.clone(), 1e-12 * (1 + index) as f64);
            (variant_hash(gpu.checks, &call, &variants[index]), Timing { variant, seconds })
        };
        let after = |known: &[usize], is_cut: bool, tuning: &TuneOptions| {
            let mut cache = KernelCache::in_memory();
            let measured = known.iter().map(|index| timing(*index)).collect();
            let timings = Timings { candidates: candidates.clone(), measured, is_cut };
            cache.insert_timings(call_key.clone(), timings);
            prepared(gpu, cache, tuning).0
        };
        let (none, all) = (TuneOptions::default(), variants.len());
        let chosen = |kernels: &KernelSelector| {
            let is_untimed = kernels.untimed().contains(&call_key);
            (kernels.choices().get(&call_key).unwrap().to_string(), is_untimed)
        };
        // A single timing decides nothing; with two, the faster variant runs.
        let unmeasured = default_variant(&call, &variants, &Caps::of(gpu));
        assert_eq!(chosen(&after(&[0], true, &none)), (variants[unmeasured].name.clone(), true));
        assert_eq!(chosen(&after(&[0, 1], true, &none)), (variants[0].name.clone(), true));
        assert_eq!(chosen(&after(&[0, 1], false, &none)), (variants[0].name.clone(), false));
        let hurried = TuneOptions { seconds: 1e-9, ..enough() };
        let first = after(&[0, 1], true, &hurried);
        let known = first.cache().timings(&call_key, &candidates).unwrap();
        assert_eq!(
            (known.is_cut, known.measured.len(), first.untimed().len()),
            (true, 2, several())
        );
        assert_eq!(first.stats().untimed, several());
        let [cut, whole] = [true, false].map(|is_cut| after(&[0, 1], is_cut, &enough()));
        let known = cut.cache().timings(&call_key, &candidates).unwrap();
        assert_eq!((known.is_cut, known.measured.len()), (false, all));
        assert_eq!(cut.stats().timed, whole.stats().timed + all - 2);
        assert_eq!(chosen(&cut), (variants[0].name.clone(), false));
    });
}

#[test]
fn without_time_to_measure_recorded_timings_are_kept_and_a_note_says_so() {
    on_one_gpu(|gpu| {
        let cache = tempfile::tempdir().unwrap();
        let (first, _) = prepared(gpu, cache_in(cache.path()), &enough());
        let retune = TuneOptions { retune: true, ..TuneOptions::default() };
        let (again, notes) = prepared(gpu, cache_in(cache.path()), &retune);
        assert_eq!((again.stats().timed, again.choices()), (0, first.choices()));
        assert_eq!(notes, ["train.tune_s is 0: kernels are not timed again"]);
    });
}

#[test]
fn saved_choices_are_kept_without_measuring() {
    on_one_gpu(|gpu| {
        let call_key = call_key(&product(ROWS).call());
        let saved: VariantChoices =
            [(call_key.clone(), "matmul_naive".to_string())].into_iter().collect();
        let with = |saved: &VariantChoices, retune| {
            let tuning = TuneOptions { saved: saved.clone(), retune, ..TuneOptions::default() };
            prepared(gpu, KernelCache::in_memory(), &tuning)
        };
        let (kernels, notes) = with(&saved, false);
        assert_eq!((kernels.choices().get(&call_key), notes.len()), (Some("matmul_naive"), 0));
        let (kernels, _) = with(&saved, true);
        assert_ne!(kernels.choices().get(&call_key), Some("matmul_naive"), "asked to measure");
        let unknown = [(call_key.clone(), "matmul_by_magic".to_string())].into_iter().collect();
        let (kernels, notes) = with(&unknown, false);
        assert!(notes[0].contains("matmul_by_magic") && notes[0].contains("is not known"));
        assert_ne!(kernels.choices().get(&call_key), Some("matmul_by_magic"));
    });
}

#[test]
fn fewer_rows_run_the_chosen_variant_if_it_fits() {
    on_one_gpu(|gpu| {
        let call_key = call_key(&product(ROWS).call());
        let RegisterTile { name, m, .. } = largest_tile(gpu);
        let saved = [(call_key, name.to_string())].into_iter().collect();
        let tuning = TuneOptions { saved, ..TuneOptions::default() };
        let (mut kernels, _) = prepared(gpu, KernelCache::in_memory(), &tuning);
        assert_eq!(runs(&mut kernels, gpu, ROWS), name);
        assert_eq!(runs(&mut kernels, gpu, m), name);
        assert_ne!(runs(&mut kernels, gpu, m - 1), name);
        assert_ne!(runs(&mut kernels, gpu, 1), name);
    });
}

/// The plain variant, which fits all sizes, may be many times slower than a smaller tile.
#[test]
fn rows_too_few_for_the_chosen_variant_run_the_static_choice() {
    on_one_gpu(|gpu| {
        let op = Op::MatMul { transpose_a: false, transpose_b: true };
        let random = RandomContext { step_key: Key::new(0), training: true };
        let product = |rows: usize| {
            OwnedCall::new(op.clone(), vec![vec![rows, 40], vec![512, 40]], random).unwrap()
        };
        let mut kernels = KernelSelector::new(KernelCache::in_memory());
        let full = product(ROWS);
        let RegisterTile { name, m, .. } = largest_tile(gpu);
        kernels.choices.insert(call_key(&full.call()), name.to_string());
        let fits = product(m);
        let variant = kernels.variant(gpu, &fits.call(), &full.call()).unwrap();
        assert_eq!(variant.name, name, "{m} rows");
        let few = product(m - 1);
        let variant = kernels.variant(gpu, &few.call(), &full.call()).unwrap();
        let unmeasured = (twin(&op).unwrap().dispatch)(&few.call(), &Caps::of(gpu));
        assert_eq!(variant.dispatches, unmeasured, "{} rows", m - 1);
        assert_ne!(variant.name, "matmul_naive");
    });
}

#[test]
fn a_kernel_that_only_other_rows_use_is_certified_when_it_runs() {
    on_one_gpu(|gpu| {
        let mut kernels = KernelSelector::new(KernelCache::in_memory());
        kernels.faulty_kernels = with_corrupted(&["relu"]).faulty_kernels;
        let op = Op::Unary(Unary::Relu);
        let random = RandomContext { step_key: Key::new(0), training: true };
        let relu = OwnedCall::new(op, vec![vec![3, 5]], random).unwrap();
        let error = kernels.variant(gpu, &relu.call(), &relu.call()).unwrap_err();
        assert!(error.to_string().contains("relu of relu"), "{error}");
        assert_eq!(kernels.stats().certified, 1);
        // Reshapes have no kernel.
        let reshape = OwnedCall { op: Op::Reshape, ..relu };
        let none = kernels.variant(gpu, &reshape.call(), &reshape.call()).unwrap();
        assert_eq!(none.dispatches, []);
    });
}

/// Plan of a linear layer followed by a custom op.
fn plan_with(op: Elementwise) -> Plan {
    let mut b = Builder::new();
    let x = b.input("x", &[1, 40]);
    let target = b.input("target", &[1, 48]);
    let w = b.parameter("w", &[48, 40], Init::Zeros);
    let y = b.linear(x, w, None).unwrap();
    let y = b.custom(op, &[y]).unwrap();
    b.squared_error_loss(y, target).unwrap();
    Plan::new(differentiate(b.finish()).unwrap(), PlanOptions::new(ROWS))
}

/// Op `3 x`, whose kernel computes `value` and whose reference has `factor`.
fn triple(value: &str, factor: f64) -> Elementwise {
    let op = Elementwise::new("triple 3", &["x"], value, move |v| factor * v[0]);
    op.with_gradient("3.0 * dy", |v| 3.0 * v[1])
}

#[test]
fn a_custom_kernel_that_is_wrong_or_does_not_compile_is_refused_by_name() {
    on_one_gpu(|gpu| {
        let refused = |value: &str| {
            let mut kernels = KernelSelector::new(KernelCache::in_memory());
            let plan = plan_with(triple(value, 3.0));
            let tuning = TuneOptions::default();
            let prepared = kernels.prepare(gpu, &plan, &tuning, &mut |_| {});
            prepared.map_or_else(|error| error.to_string(), |_| "runs".into())
        };
        assert_eq!(refused("3.0 * x"), "runs");
        let wrong = refused("select(3.0 * x, 2.5, input_0[1] == x)");
        for part in [
            &gpu.name,
            "the kernel of the custom op triple 3 cannot run",
            "its results are wrong, NMSE",
            "; element 1 of output 0 [64, 48] of inputs [[64, 48]] is 2.5, and ",
            "correct the op",
        ] {
            assert!(wrong.contains(part), "{part} in {wrong}");
        }
        let (invalid, unknown) = (refused("3.0 * x +"), refused("3 * no_such_name"));
        assert!(invalid.contains("triple 3") && invalid.contains("expected expr"), "{invalid}");
        assert!(unknown.contains("no definition in scope for identifier"), "{unknown}");
        assert!(refused("f32(3 * i32(x))").contains("its results are wrong"));
        assert!(refused("u32(x)").contains("triple 3 cannot run"));
    });
}

#[test]
fn certificates_of_custom_kernels_are_not_kept_and_their_sizes_are_certified_apart() {
    on_one_gpu(|gpu| {
        let cache = tempfile::tempdir().unwrap();
        let prepare = |factor: f64| {
            let mut kernels = KernelSelector::new(cache_in(cache.path()));
            let (plan, tuning) = (plan_with(triple("3.0 * x", factor)), TuneOptions::default());
            let prepared = kernels.prepare(gpu, &plan, &tuning, &mut |_| {});
            prepared.map(|_| kernels)
        };
        let mut kernels = prepare(3.0).unwrap();
        let names: Vec<String> =
            kernels.cache().certificates().map(|known| known.kernel.clone()).collect();
        assert!(
            !names.is_empty() && !names.iter().any(|name| name.contains("triple")),
            "{names:?}"
        );
        // The same text, and another reference.
        assert!(matches!(prepare(2.0), Err(DeviceError::CustomKernel { .. })));
        let before = kernels.stats().certified;
        let random = RandomContext { step_key: Key::new(0), training: true };
        let op = Op::custom(triple("3.0 * x", 3.0));
        let with = |rows| OwnedCall::new(op.clone(), vec![vec![rows, 48]], random).unwrap();
        let full = with(ROWS);
        for (rows, certified) in [(ROWS, 0), (5, 1), (5, 1), (7, 2)] {
            kernels.variant(gpu, &with(rows).call(), &full.call()).unwrap();
            assert_eq!(kernels.stats().certified - before, certified, "{rows} rows");
        }
    });
}

/// Custom op with any grid and parameters, which copies its input.
#[derive(Clone)]
struct Copied {
    groups: [u32; 3],
    words: usize,
    probes: Vec<Vec<Vec<usize>>>,
}

impl CustomOp for Copied {
    fn name(&self) -> String {
        "copied".into()
    }

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape, String> {
        Ok(inputs[0].clone())
    }

    fn reference(&self, _: &CustomCall, x: &[HostTensorView<'_, f64>], y: &mut [f64]) {
        y.copy_from_slice(x[0].floats());
    }

    fn kernel(&self, _: &CustomCall) -> CustomKernel {
        let copied = "
            @group(0) @binding(0) var<storage, read> x: array<f32>;
            @group(0) @binding(1) var<storage, read_write> y: array<f32>;
            @compute @workgroup_size(16)
            fn main(@builtin(global_invocation_id) id: vec3u) { y[id.x] = x[id.x]; }
        ";
        CustomKernel { wgsl: copied.into(), params: vec![0; self.words], workgroups: self.groups }
    }

    fn probes(&self) -> Vec<Vec<Vec<usize>>> {
        self.probes.clone()
    }
}

#[test]
fn a_custom_kernel_beyond_the_limits_is_refused_and_one_with_probes_is_certified_on_them() {
    on_one_gpu(|gpu| {
        let random = RandomContext { step_key: Key::new(0), training: true };
        let outcome = |op: &Copied, elements: usize| {
            let mut kernels = KernelSelector::new(KernelCache::in_memory());
            let owned = OwnedCall::new(Op::custom(op.clone()), vec![vec![elements]], random);
            let owned = owned.unwrap();
            let found = kernels.variant(gpu, &owned.call(), &owned.call());
            found.map_or_else(|error| error.to_string(), |_| "runs".into())
        };
        let op = Copied { groups: [4, 1, 1], words: 0, probes: Vec::new() };
        assert_eq!(outcome(&op, 64), "runs");
        // Four workgroups of 16 leave elements out, and write behind fewer.
        assert!(outcome(&op, 65).contains("element 64 of output 0 [65] of inputs [[65]] is NaN"));
        assert!(outcome(&op, 63).contains("output 0 was written out of bounds"));
        let beyond = outcome(&Copied { groups: [4, 70_000, 1], ..op.clone() }, 64);
        assert!(beyond.contains("grid [4, 70000, 1] is not of 1 to 65535 workgroups"), "{beyond}");
        assert!(
            outcome(&Copied { groups: [0, 1, 1], ..op.clone() }, 64).contains("grid [0, 1, 1]")
        );
        let many = outcome(&Copied { words: 33, ..op.clone() }, 64);
        assert!(many.contains("33 words of parameters, and may have 32"), "{many}");
        // Certified where it is right, although it is wrong elsewhere.
        let probed = Copied { probes: vec![vec![vec![64]]], ..op };
        assert_eq!(outcome(&probed, 65), "runs");
    });
}

/// Returns the number of reports until the first variant was timed: two per call for certification
/// and one more.
fn reports_until_timing(gpu: &Gpu) -> usize {
    2 * distinct_calls(&plan(), Caps::of(gpu)).len() + 1
}

/// A device that was lost fails the run; every other fault costs a candidate.
#[test]
fn a_fault_while_timing_drops_a_candidate_with_a_note() {
    let fault = |adapter: &str| DeviceError::OutOfMemory {
        adapter: adapter.into(),
        what: "a submission".into(),
    };
    on_one_gpu(|gpu| {
        let mut kernels = KernelSelector::new(KernelCache::in_memory());
        let mut reports = 0;
        let prepared = kernels.prepare(gpu, &plan(), &enough(), &mut |_| {
            reports += 1;
            if reports == reports_until_timing(gpu) {
                gpu.report_fault(fault(&gpu.name));
            }
        });
        let notes = prepared.unwrap();
        let told = |note: &&String| note.contains(" is not timed: ") && note.contains("memory");
        assert_eq!(notes.iter().filter(told).count(), 1, "{notes:?}");
        assert!(kernels.stats().timed > several(), "{:?}", kernels.stats());
    });
}

/// More time would not help a call whose buffers do not fit.
#[test]
fn a_call_that_cannot_be_timed_is_not_said_to_lack_time() {
    on_one_gpu(|gpu| {
        let mut kernels = KernelSelector::new(KernelCache::in_memory());
        let mut reports = 0;
        let prepared = kernels.prepare(gpu, &plan(), &enough(), &mut |_| {
            reports += 1;
            if reports + 1 == reports_until_timing(gpu) {
                let (adapter, what) = (gpu.name.clone(), "a buffer".to_string());
                gpu.report_fault(DeviceError::OutOfMemory { adapter, what });
            }
        });
        let notes = prepared.unwrap();
        assert!(notes.len() == 1 && notes[0].contains(" are not timed: "), "{notes:?}");
        assert_eq!((kernels.stats().untimed, kernels.untimed().len()), (0, 1));
    });
}

/// A grid belongs to one call; all calls share the text.
#[test]
fn a_call_beyond_the_limits_leaves_the_kernel_to_others() {
    on_one_gpu(|gpu| {
        let random = RandomContext { step_key: Key::new(0), training: true };
        let relu = OwnedCall::new(Op::Unary(Unary::Relu), vec![vec![3, 5]], random).unwrap();
        let call = relu.call();
        let right = (twin(call.op).unwrap().variants)(&call, &Caps::EVERY).swap_remove(0);
        let mut beyond = right.clone();
        beyond.dispatches[0].groups[1] = gpu.limits.workgroups + 1;
        let mut kernels = KernelSelector::new(KernelCache::in_memory());
        assert_eq!(kernels.standing(gpu, &call, &beyond).unwrap(), KernelStatus::Refused);
        let error = kernels.uncertified(gpu, &call, &beyond).to_string();
        assert!(error.contains("is not of 1 to"), "{error}");
        assert_eq!(kernels.standing(gpu, &call, &right).unwrap(), KernelStatus::Certified);
    });
}

/// Returns the notes of the next run, and the kernels that are switched off in it, after a kernel
/// that ends the work of a device.
fn after_failure(
    fail: impl Fn(&Gpu) -> Result<(), DeviceError>,
) -> (Vec<String>, Vec<(String, String)>) {
    let adapter = crate::testing::adapters().into_iter().next().unwrap();
    let gpu = Gpu::open_portable(&adapter, crate::device::ShaderChecks::Disabled).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let mut kernels = KernelSelector::new(cache_in(directory.path()));
    // As on a graphics card.
    kernels.cache.open_attempts();
    let (hash, kernel) = ("a hash".to_string(), "matmul_tile of matmul".to_string());
    let failed = kernels.trying(&gpu, Some((hash, kernel)), |_| fail(&gpu));
    assert!(failed.is_err());
    if gpu.is_lost() {
        // Kernels after the loss are not its cause.
        let error = kernels.prepare(&gpu, &plan(), &enough(), &mut |_| {});
        assert!(matches!(error, Err(DeviceError::Lost { .. })), "{error:?}");
    }
    drop(kernels);
    let mut cache = cache_in(directory.path());
    cache.open_attempts();
    (cache.take_notes(), crate::autotune::cache::summary(&cache).off)
}

#[test]
fn a_kernel_that_loses_the_device_or_keeps_it_from_answering_is_not_tried_again() {
    let lost = |gpu: &Gpu| {
        gpu.destroy();
        gpu.check()
    };
    let hung = |gpu: &Gpu| Err(gpu.timeout("a product"));
    for (notes, off) in [after_failure(lost), after_failure(hung)] {
        assert!(
            notes.len() == 1 && notes[0].contains(" is switched off: the process ended"),
            "{notes:?}"
        );
        assert!(off.len() == 1 && off[0].0.starts_with("matmul"), "{off:?}");
    }
    let refused = |gpu: &Gpu| Err(gpu.refused("a product", "for a test".into()));
    assert_eq!(after_failure(refused), (Vec::new(), Vec::new()));
}
