//! Tests of what samples must be like.

use super::*;
use crate::formats::{KnownSamples, expected::Expected};

fn samples(targets: Targets) -> Samples {
    let (name, features) = ("data".into(), Features::Floats(vec![0.0; 4]));
    Samples {
        name,
        shape: vec![2],
        columns: Vec::new(),
        target_columns: Vec::new(),
        features,
        targets,
        ids: None,
    }
}

fn classes(ids: &[u32], names: &[&str]) -> Targets {
    let names = names.iter().map(ToString::to_string).collect();
    Targets::Classes { ids: ids.into(), names }
}

fn known(classes: &[&str]) -> Expected {
    let classes = classes.iter().map(ToString::to_string).collect();
    Expected::of_model(&KnownSamples { classes, ..KnownSamples::default() })
}

#[test]
fn classes_are_found_by_their_names_or_numbers() {
    let found = |is_numbered| {
        let mut samples = samples(classes(&[1, 0], &["0", "1"]));
        known(&["1", "x", "0"]).conform(&mut samples, is_numbered).unwrap();
        samples.targets
    };
    assert_eq!(found(false), classes(&[0, 2], &["1", "x", "0"]));
    assert_eq!(found(true), classes(&[1, 0], &["1", "x", "0"]));
}

#[test]
fn a_class_that_no_sample_has_does_no_harm() {
    let mut samples = samples(classes(&[0, 0], &["a", "b"]));
    known(&["a"]).conform(&mut samples, false).unwrap();
    assert_eq!(samples.targets, classes(&[0, 0], &["a"]));
}

#[test]
fn targets_of_another_kind_are_refused() {
    let values = |width: usize| {
        let names = (0..width).map(|at| at.to_string()).collect();
        samples(Targets::Values { values: vec![0.0; 2 * width], names })
    };
    let refused = |expected: &Expected, samples: Samples| {
        expected.conform(&mut samples.clone(), true).unwrap_err().to_string()
    };
    assert_eq!(
        refused(&known(&["a"]), values(1)),
        "data: its targets are values, and those of the model are classes"
    );
    assert_eq!(
        refused(&known(&[]), samples(classes(&[0, 0], &["a"]))),
        "data: its targets are classes, and those of the model are values"
    );
    assert_eq!(
        refused(&Expected::of_training(&values(2)), values(1)),
        "data: has 1 values per sample, and the training samples 2"
    );
    assert!(known(&[]).conform(&mut values(3), true).is_ok());
}

#[test]
fn long_lists_of_classes_are_cut() {
    let names: Vec<String> = (10..30).map(|n| n.to_string()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let refused = known(&names).conform(&mut samples(classes(&[0, 0], &["x"])), false);
    assert_eq!(
        refused.unwrap_err().to_string(),
        "data: sample at index 0: its class \"x\" is none of those of the model: \
         10, 11, 12, 13, 14, 15, 16, 17, 18, 19, .. (20 in all)"
    );
}
