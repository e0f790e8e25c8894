//! Warnings about classes with no sample in a data set, or with a single one, and about values that
//! look like classes.

use std::collections::BTreeSet;

use potluck_core::Setting;
use potluck_core::format::{counted_large, grouped};

/// The most runs of classes that a warning names.
const RUNS_MAX: usize = 4;

/// Classes with a single sample from which a data set looks like one of numbers.
const SINGLE_MIN: usize = 10;

/// Largest value that looks like the number of a class, and the samples that each of them has on
/// average then.
const NUMBER_MAX: f32 = 19.0;
const SAMPLES_PER_NUMBER_MIN: usize = 5;

/// Returns warnings about the classes `names`, given the class of each sample and the name of the
/// column that has it. `may_be_values`: the reader could have read values instead.
pub(crate) fn warnings<'a>(
    names: &[String],
    samples: impl Iterator<Item = &'a u32>,
    column: Option<&String>,
    may_be_values: bool,
) -> Vec<String> {
    let mut counts = vec![0u64; names.len()];
    for class in samples {
        if let Some(count) = counts.get_mut(*class as usize) {
            *count += 1;
        }
    }
    let with = |count: u64| -> Vec<usize> {
        (0..names.len()).filter(|class| counts[*class] == count).collect()
    };
    let all = counted_large(names.len() as u64, "class", "classes");
    let empty = with(0);
    let single = with(1).len();
    let few = empty.len() + single;
    let are_numbers = names.iter().all(|name| name.parse::<i64>().is_ok());
    if may_be_values && are_numbers && single >= SINGLE_MIN && 2 * few > names.len() {
        let column = column.map_or("the target", String::as_str);
        return vec![format!(
            "{} of {all} have {}; if {column} is a number to predict, set {}, or else check the \
             labels",
            grouped(&few.to_string()),
            if empty.is_empty() { "a single sample" } else { "no sample or a single one" },
            Setting::Regression
        )];
    }
    let mut warnings = Vec::new();
    if !empty.is_empty() {
        warnings.push(format!(
            "{} of {all} {} no sample ({}): check the labels",
            grouped(&empty.len().to_string()),
            if empty.len() == 1 { "has" } else { "have" },
            runs(names, &empty)
        ));
    }
    let there = names.len() - empty.len();
    if single >= SINGLE_MIN && 2 * single > there {
        let advice = match column {
            Some(column) => format!("check that {column} is a class"),
            None => "check the labels".to_string(),
        };
        let single = grouped(&single.to_string());
        let there = counted_large(there as u64, "class", "classes");
        warnings.push(format!("{single} of {there} have a single sample; {advice}"));
    }
    warnings
}

/// Returns a note if the target values of a data set look like the numbers of classes: whole, from
/// 0 or 1 to at most 19 without a gap, and each of them often. `column` has them.
pub(crate) fn note_on_values(values: &[f32], column: Option<&String>) -> Option<String> {
    let is_number = |value: &f32| (0.0..=NUMBER_MAX).contains(value) && value.fract() == 0.0;
    if !values.iter().all(is_number) {
        return None;
    }
    let numbers: BTreeSet<u32> = values.iter().map(|value| *value as u32).collect();
    let (first, last) = (*numbers.first()?, *numbers.last()?);
    let has_gap = numbers.len() < (first..=last).count();
    if first > 1 || first == last || has_gap {
        return None;
    }
    if values.len() < SAMPLES_PER_NUMBER_MIN * numbers.len() {
        return None;
    }
    Some(format!(
        "{} is trained as a number, and has only the values {first} to {last}: if these are \
         classes, set {}",
        column.map_or("the target", String::as_str),
        Setting::Classification
    ))
}

/// Names of classes; of consecutive classes only the first and the last name.
fn runs(names: &[String], classes: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for class in classes {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *class => *last = *class,
            _ => runs.push((*class, *class)),
        }
    }
    let mut texts = Vec::new();
    for (first, last) in runs.iter().take(RUNS_MAX) {
        texts.push(match last - first {
            0 => names[*first].clone(),
            1 => format!("{}, {}", names[*first], names[*last]),
            _ => format!("{} to {}", names[*first], names[*last]),
        });
    }
    if runs.len() > RUNS_MAX {
        texts.push("..".into());
    }
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(count: usize) -> Vec<String> {
        (0..count).map(|class| class.to_string()).collect()
    }

    #[test]
    fn classes_without_samples_are_named() {
        let labels: Vec<u32> = (0..100).map(|sample| sample % 10).chain([77]).collect();
        let of = |classes: usize| warnings(&numbered(classes), labels.iter(), None, false);
        assert_eq!(of(78), ["67 of 78 classes have no sample (10 to 76): check the labels"]);
        let few = |samples: &[u32]| warnings(&numbered(9), samples.iter(), None, false).concat();
        assert!(few(&[0, 1, 2, 3, 4, 5, 6, 7]).starts_with("1 of 9 classes has no sample (8):"));
        assert!(few(&[1, 4, 7]).contains("(0, 2, 3, 5, 6, 8)"), "{}", few(&[1, 4, 7]));
        assert_eq!(few(&[0, 1, 2, 3, 4, 5, 6, 7, 8]), "");
        let every_other: Vec<u32> = (0..10).map(|class| 2 * class + 1).collect();
        let named = warnings(&numbered(20), every_other.iter(), None, false).concat();
        assert!(named.starts_with("10 of 20 classes have no sample (0, 2, 4, 6, ..)"), "{named}");
    }

    #[test]
    fn numbers_that_are_taken_for_classes_are_told() {
        let labels: Vec<u32> = (0..2000).chain(0..200).collect();
        let column = "y".to_string();
        assert_eq!(
            warnings(&numbered(2000), labels.iter(), Some(&column), true),
            ["1,800 of 2,000 classes have a single sample; if y is a number to predict, set \
              data.task=regression, or else check the labels"]
        );
        // Years of an array, most of which are of no sample.
        let years: Vec<u32> = (1900..2020).chain(1950..1960).collect();
        assert_eq!(
            warnings(&numbered(2020), years.iter(), None, true),
            ["2,010 of 2,020 classes have no sample or a single one; if the target is a number \
              to predict, set data.task=regression, or else check the labels"]
        );
        assert!(warnings(&numbered(3), [0, 1, 2].iter(), None, true).is_empty());
        let odd: Vec<u32> = (0..10).flat_map(|class| [class; 20]).chain([255]).collect();
        assert_eq!(
            warnings(&numbered(256), odd.iter(), None, true),
            ["245 of 256 classes have no sample (10 to 254): check the labels"]
        );
    }

    #[test]
    fn labels_that_cannot_be_values_are_to_be_checked() {
        let labels: Vec<u32> = (0..2000).chain(0..200).collect();
        let told = warnings(&numbered(2000), labels.iter(), None, false).concat();
        assert_eq!(told, "1,800 of 2,000 classes have a single sample; check the labels");
        let words: Vec<String> = (0..2000).map(|class| format!("class {class}")).collect();
        let told = warnings(&words, labels.iter(), Some(&"y".to_string()), true).concat();
        assert_eq!(told, "1,800 of 2,000 classes have a single sample; check that y is a class");
        // Of those that have samples, most have a single one.
        let last: Vec<u32> = (1980..2000).collect();
        let told = warnings(&words, last.iter(), None, false);
        assert_eq!(told[1], "20 of 20 classes have a single sample; check the labels");
    }

    #[test]
    fn whole_values_from_zero_or_one_may_be_classes() {
        let column = String::from("kind");
        let of = |values: &[f32]| note_on_values(&values.repeat(5), Some(&column));
        assert_eq!(
            of(&[2.0, 0.0, 1.0]).unwrap(),
            "kind is trained as a number, and has only the values 0 to 2: if these are classes, \
             set data.task to classification"
        );
        let unnamed = note_on_values(&[1.0, 2.0].repeat(5), None).unwrap();
        assert!(unnamed.starts_with("the target is trained as a number"), "{unnamed}");
        for numbers in [
            &[0.0, 1.5, 2.0][..],
            &[-1.0, 0.0, 1.0],
            &[0.0, 2.0],
            &[2.0, 3.0],
            &[1.0],
            &[0.0, f32::NAN],
            &[],
        ] {
            assert_eq!(of(numbers), None, "{numbers:?}");
        }
        let all: Vec<f32> = (0u8..=20).map(f32::from).collect();
        assert!(of(&all[..20]).is_some());
        assert_eq!(of(&all), None);
        assert_eq!(note_on_values(&[0.0, 1.0, 0.0, 1.0], None), None, "too few");
    }
}
