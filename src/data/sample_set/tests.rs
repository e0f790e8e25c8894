//! Tests of sets of samples.

use super::*;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::{LazyFeatures, MeanStd};

fn samples(count: usize) -> Samples {
    Samples {
        name: "test".into(),
        shape: vec![1],
        columns: Vec::new(),
        target_columns: Vec::new(),
        features: Features::Floats((0..count).map(|i| i as f32).collect()),
        targets: Targets::Values {
            values: (0..count).map(|i| 10.0 * i as f32).collect(),
            names: vec!["y".into()],
        },
        ids: None,
    }
}

fn options(held_out: f64, normalize: bool) -> SampleOptions {
    SampleOptions { held_out, normalize, saved: None }
}

fn set(count: usize, validation: Option<usize>, options: &SampleOptions) -> SampleSet {
    let validation = validation.map(samples);
    let loaded = LoadedSamples { train: samples(count), validation, files: Vec::new() };
    SampleSet::new(loaded, options).unwrap()
}

fn features(set: &SampleSet, split: Split) -> Vec<f32> {
    let all = set.evaluation_samples(split);
    match &set.rows(split, &all).unwrap()[0].1 {
        HostTensor::Float(values) => values.clone(),
        HostTensor::Int(_) => panic!("features are floats"),
    }
}

#[test]
fn held_out_samples_are_spread_over_all_and_never_trained_on() {
    let set = set(100, None, &options(0.2, false));
    let (train, held_out) = (features(&set, Split::Train), features(&set, Split::Validation));
    assert_eq!((train.len(), held_out.len()), (80, 20));
    let mut all: Vec<f32> = [train, held_out.clone()].concat();
    all.sort_by(f32::total_cmp);
    assert!(all.into_iter().eq((0..100).map(|i| i as f32)));
    let low = held_out.iter().filter(|value| **value < 50.0).count();
    assert!((5..=15).contains(&low), "{held_out:?}");
}

#[test]
fn files_of_their_own_hold_out_and_nothing_else() {
    let set = set(10, Some(3), &options(0.5, false));
    assert_eq!(features(&set, Split::Train).len(), 10);
    assert_eq!(features(&set, Split::Validation), [0.0, 1.0, 2.0]);
}

#[test]
fn the_training_split_alone_is_normalized_to_mean_0_and_deviation_1() {
    let set = set(100, None, &options(0.3, true));
    let values = features(&set, Split::Train);
    let mean = values.iter().sum::<f32>() / 70.0;
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / 70.0;
    assert!(mean.abs() < 1e-5 && (variance - 1.0).abs() < 1e-5, "{mean} {variance}");
    let saved = set.description.normalization.clone();
    assert!((saved.targets[0].mean / saved.features[0].mean - 10.0).abs() < 1e-4);
    let other = SampleOptions { saved: Some(saved.clone()), ..options(0.3, false) };
    let again = super::tests::set(50, None, &other);
    assert_eq!(again.description.normalization, saved);
    assert_ne!(saved.features[0], MeanStd::IDENTITY);
}

#[test]
fn samples_that_do_not_fit_are_refused() {
    let refused = |train: Samples, validation: Option<Samples>, held_out: f64| {
        let loaded = LoadedSamples { train, validation, files: Vec::new() };
        SampleSet::new(loaded, &options(held_out, false)).err().unwrap().to_string()
    };
    let few = refused(samples(3), None, 0.1);
    assert!(few.contains("held-out part has no sample"), "{few}");
    let absent = refused(Samples { targets: Targets::Absent, ..samples(3) }, None, 0.0);
    assert!(absent.contains("no targets"), "{absent}");
    let wide = Samples { features: Features::Bytes(vec![0; 8]), shape: vec![2], ..samples(4) };
    let other = refused(samples(3), Some(wide), 0.0);
    assert!(other.contains("its samples are 2, and those of the training"), "{other}");
    let bare = Samples { targets: Targets::Absent, ..samples(4) };
    let absent = refused(samples(3), Some(bare), 0.0);
    assert!(absent.contains("no targets"), "{absent}");
    let classes = |names: &[&str]| Samples {
        targets: Targets::Classes {
            ids: (0..4).map(|index| index % names.len() as u32).collect(),
            names: names.iter().map(|name| name.to_string()).collect(),
        },
        ..samples(4)
    };
    let class = refused(classes(&["a", "b"]), Some(classes(&["a", "c"])), 0.0);
    assert!(class.contains("class \"c\" is none of those"), "{class}");
    let only = refused(classes(&["a"]), None, 0.0);
    assert!(only.contains("all samples have the class \"a\""), "{only}");
    let kind = refused(classes(&["a", "b"]), Some(samples(4)), 0.0);
    assert!(kind.contains("its targets are values"), "{kind}");
    let train = classes(&["a", "b"]);
    let loaded = LoadedSamples { train, validation: Some(classes(&["b", "a"])), files: Vec::new() };
    let set = SampleSet::new(loaded, &options(0.0, false)).unwrap();
    let rows = set.rows(Split::Validation, &[0, 1]).unwrap();
    assert_eq!(rows[1].1, HostTensor::Int(vec![1, 0]), "classes are found by their names");
}

#[test]
fn numbers_of_features_targets_and_names_that_differ_are_refused() {
    let classes = |ids: &[u32]| {
        let names = vec!["a".to_string(), "b".to_string()];
        Targets::Classes { ids: ids.to_vec(), names }
    };
    let values = |count: usize, names: &[&str]| Targets::Values {
        values: vec![0.0; count],
        names: names.iter().map(|name| name.to_string()).collect(),
    };
    let lazy = Features::Lazy(Arc::new(Fixed(1.0)));
    let cases = [
        (Samples { shape: vec![2], ..samples(5) }, "5 values of features", "samples of 2"),
        (
            Samples { features: Features::Bytes(vec![0; 7]), shape: vec![2, 2], ..samples(1) },
            "7 values of features",
            "4 values each",
        ),
        (Samples { shape: vec![0], ..samples(3) }, "3 values of features", "samples of 0"),
        (Samples { targets: values(3, &["y"]), ..samples(4) }, "3 targets", "4 samples have 4"),
        (
            Samples { targets: values(4, &["y", "z"]), ..samples(4) },
            "4 targets",
            "4 samples have 8",
        ),
        (Samples { targets: classes(&[0, 1, 0, 1, 0]), ..samples(4) }, "5 targets", "4 samples"),
        (
            Samples { targets: classes(&[0, 1, 2, 1]), ..samples(4) },
            "sample at index 2: has class 2",
            "2 classes have names",
        ),
        (Samples { ids: Some(vec!["id".into(); 3]), ..samples(4) }, "names of 3 samples", "of 4"),
        (Samples { features: lazy, ..samples(4) }, "4 targets", "3 samples have 3"),
    ];
    for (wrong, one, other) in cases {
        for (train, validation) in [(wrong.clone(), None), (samples(4), Some(wrong))] {
            let loaded = LoadedSamples { train, validation, files: Vec::new() };
            let error = SampleSet::new(loaded, &options(0.0, false)).err().unwrap();
            assert!(matches!(error, DataError::Invalid { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains(one) && text.contains(other), "{text}");
        }
    }
}

#[test]
fn a_fingerprint_tells_samples_roles_targets_and_normalization_apart() {
    let fingerprint = |edit: fn(&mut LoadedSamples, &mut SampleOptions)| {
        let validation = Some(Samples { ids: Some(vec!["id".into(); 3]), ..samples(3) });
        let mut loaded = LoadedSamples { train: samples(3), validation, files: Vec::new() };
        let mut options = options(0.0, true);
        edit(&mut loaded, &mut options);
        SampleSet::new(loaded, &options).unwrap().fingerprint()
    };
    let lazy = |value: f32| Features::Lazy(Arc::new(Fixed(value)));
    assert_eq!(fingerprint(|_, _| ()), fingerprint(|_, _| ()));
    let edits: [fn(&mut LoadedSamples, &mut SampleOptions); 9] = [
        |_, _| (),
        |_, options| options.normalize = false,
        |loaded, _| std::mem::swap(&mut loaded.train, loaded.validation.as_mut().unwrap()),
        |loaded, _| loaded.validation = None,
        |loaded, _| loaded.train.features = Features::Floats(vec![0.0, 1.0, 5.0]),
        |loaded, _| loaded.train.target_columns = vec!["y".into()],
        |loaded, _| loaded.validation.as_mut().unwrap().features = Features::Bytes(vec![1; 3]),
        |loaded, _| loaded.train.features = Features::Lazy(Arc::new(Fixed(1.0))),
        |loaded, _| {
            let values = vec![1.0, 2.0, 4.0];
            loaded.train.targets = Targets::Values { values, names: vec!["y".into()] };
        },
    ];
    let mut all: Vec<String> = edits.into_iter().map(fingerprint).collect();
    // Lazy features differ in nothing else.
    for value in [2.0, 3.0] {
        let train = Samples { features: lazy(value), ..samples(3) };
        let loaded = LoadedSamples { train, validation: None, files: Vec::new() };
        all.push(SampleSet::new(loaded, &options(0.0, false)).unwrap().fingerprint());
    }
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 11);
}

/// Three samples of one value.
struct Fixed(f32);

impl LazyFeatures for Fixed {
    fn len(&self) -> usize {
        3
    }

    fn read(&self, _: usize, into: &mut [f32]) -> Result<(), DataError> {
        into.fill(self.0);
        Ok(())
    }
}

/// Samples that are read two at a time; samples from `bad` on cannot be read.
struct Pairs {
    bad: usize,
    readers: (Mutex<usize>, Condvar),
}

impl LazyFeatures for Pairs {
    fn len(&self) -> usize {
        8
    }

    fn read(&self, index: usize, into: &mut [f32]) -> Result<(), DataError> {
        let (count, more) = &self.readers;
        let mut count = count.lock().unwrap();
        *count += 1;
        more.notify_all();
        let limit = Duration::from_secs(5);
        let waited = more.wait_timeout_while(count, limit, |count| *count < 2).unwrap().1;
        into.fill(index as f32);
        if index >= self.bad || waited.timed_out() {
            Err(DataError::Empty { name: format!("sample {index}") })
        } else {
            Ok(())
        }
    }
}

#[test]
fn rows_from_files_are_read_by_several_threads_in_their_order() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let read = |bad: usize| {
        let lazy = Pairs { bad, readers: Default::default() };
        let train = Samples { features: Features::Lazy(Arc::new(lazy)), ..samples(8) };
        let loaded = LoadedSamples { train, validation: None, files: Vec::new() };
        let set = SampleSet::new(loaded, &options(0.0, false)).unwrap();
        pool.install(|| set.rows(Split::Train, &[7, 0, 3, 5, 1, 2, 6, 4]))
    };
    let rows = read(8).unwrap();
    let expected = [7.0, 0.0, 3.0, 5.0, 1.0, 2.0, 6.0, 4.0];
    assert_eq!(rows[0].1, HostTensor::Float(expected.to_vec()));
    for _ in 0..20 {
        assert!(read(3).unwrap_err().to_string().starts_with("sample 7"));
    }
}
