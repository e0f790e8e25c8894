//! Classification: accuracy, top-5 accuracy, and the confusion matrix.

use std::borrow::Cow;
use std::cmp::Reverse;

use super::Task;
use potluck_core::format::dims_text;
use potluck_core::metrics::Unit;
use potluck_core::{DType, HostTensor};
use potluck_data::SampleDescription;

/// Number of highest outputs for top-5 accuracy.
const TOP: usize = 5;

/// Largest number of classes with a confusion matrix: 8 MB.
const CONFUSION_MAX: usize = 1000;

/// Widest matrix printed for the user; wider ones are JSON only.
const PRINTED_MAX: usize = 25;

/// Choice of one of several classes.
#[derive(Clone, Debug)]
pub struct Classification {
    features: Vec<usize>,
    classes: Vec<String>,
}

/// Counts of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassificationReport {
    pub samples: u64,
    /// Samples whose class has the highest output, and samples whose class is among the five
    /// highest.
    pub right: u64,
    pub(crate) right_in_top: u64,
    /// Confusion matrix: samples by their class (rows) and by the chosen class; empty for many
    /// classes.
    pub confusion: Vec<Vec<u64>>,
}

impl Classification {
    /// Creates the task of samples with these classes.
    pub fn new(samples: &SampleDescription, classes: &[String]) -> Self {
        Self { features: samples.shape.clone(), classes: classes.to_vec() }
    }

    /// Returns the counts in sums.
    ///
    /// # Panics
    /// If there are not [`Task::sum_count`] of them.
    pub fn report(&self, sums: &[f64]) -> ClassificationReport {
        let mut confusion = Vec::new();
        // Without classes there are no rows, but a row has no width either.
        for row in sums[3..].chunks(self.classes.len().max(1)) {
            confusion.push(row.iter().map(|value| *value as u64).collect());
        }
        ClassificationReport {
            samples: sums[0] as u64,
            right: sums[1] as u64,
            right_in_top: sums[2] as u64,
            confusion,
        }
    }

    fn has_confusion(&self) -> bool {
        self.classes.len() <= CONFUSION_MAX
    }
}

impl Task for Classification {
    fn unit(&self) -> Unit {
        Unit::Samples
    }

    fn summary(&self) -> String {
        format!("{} features, {} classes", dims_text(&self.features), self.classes.len())
    }

    fn scored_output(&self) -> Option<&'static str> {
        Some("outputs")
    }

    fn scored_type(&self) -> (usize, DType) {
        (self.classes.len(), DType::U32)
    }

    fn sum_count(&self) -> usize {
        let classes = self.classes.len();
        3 + if self.has_confusion() { classes * classes } else { 0 }
    }

    fn score(&self, outputs: &[f32], targets: &HostTensor, sums: &mut [f64]) {
        // The classes in a data set are integers.
        let HostTensor::Int(targets) = targets else { return };
        let classes = self.classes.len();
        if classes == 0 {
            return;
        }
        for (row, target) in outputs.chunks_exact(classes).zip(targets) {
            let target = *target as usize;
            let Some(value) = row.get(target) else { continue };
            sums[0] += 1.0;
            // Outputs that include NaN choose no class.
            let is_choice = !row.iter().any(|output| output.is_nan());
            let mut above = 0;
            for (class, other) in row.iter().enumerate() {
                if other > value || (class < target && other == value) {
                    above += 1;
                }
            }
            sums[1] += f64::from(u8::from(is_choice && above == 0));
            sums[2] += f64::from(u8::from(is_choice && above < TOP));
            if self.has_confusion() && is_choice {
                sums[3 + target * classes + chosen(row)] += 1.0;
            }
        }
    }

    fn metrics(&self, sums: &[f64]) -> Vec<(Cow<'static, str>, f64)> {
        if sums.len() != self.sum_count() {
            return Vec::new();
        }
        let report = self.report(sums);
        let samples = report.samples.max(1) as f64;
        let mut metrics = vec![("val_accuracy".into(), report.right as f64 / samples)];
        if self.classes.len() > TOP {
            metrics.push(("val_top5_accuracy".into(), report.right_in_top as f64 / samples));
        }
        metrics
    }

    fn tables(&self, sums: &[f64]) -> String {
        if sums.len() != self.sum_count() {
            return String::new();
        }
        let report = self.report(sums);
        if report.confusion.is_empty() {
            return String::new();
        }
        confusion_text(&self.classes, &report.confusion)
    }

    fn tables_json(&self, sums: &[f64]) -> Vec<(&'static str, serde_json::Value)> {
        if sums.len() != self.sum_count() {
            return Vec::new();
        }
        let confusion = self.report(sums).confusion;
        if confusion.is_empty() {
            return Vec::new();
        }
        vec![("classes", self.classes.clone().into()), ("confusion", confusion.into())]
    }
}

/// Returns the class with the highest output, the first if several are equal; NaN is ignored.
pub fn chosen(outputs: &[f32]) -> usize {
    let mut best = None;
    for (class, value) in outputs.iter().enumerate() {
        let is_better = best.is_none_or(|best: usize| *value > outputs[best]);
        if is_better && !value.is_nan() {
            best = Some(class);
        }
    }
    best.unwrap_or(0)
}

/// Formats a confusion matrix; with many classes, only the most frequent confusions.
fn confusion_text(classes: &[String], confusion: &[Vec<u64>]) -> String {
    if classes.len() > PRINTED_MAX {
        return most_frequent(classes, confusion);
    }
    let names: Vec<String> = classes.iter().map(|name| short(name)).collect();
    let mut width = 1;
    for name in &names {
        width = width.max(name.chars().count());
    }
    for row in confusion {
        for count in row {
            width = width.max(count.to_string().len());
        }
    }
    let mut text = format!("{:>width$}  chosen\n{:>width$} ", "class", "");
    for name in &names {
        text += &format!(" {name:>width$}");
    }
    text += &format!(" {:>7}\n", "right");
    for (class, row) in confusion.iter().enumerate() {
        text += &format!("{:>width$} ", names[class]);
        for count in row {
            text += &format!(" {count:>width$}");
        }
        let all: u64 = row.iter().sum();
        text += &match all {
            0 => format!(" {:>7}\n", "-"),
            _ => format!(" {:>5.1} %\n", 100.0 * row[class] as f64 / all as f64),
        };
    }
    text
}

fn short(name: &str) -> String {
    name.chars().take(12).collect()
}

fn most_frequent(classes: &[String], confusion: &[Vec<u64>]) -> String {
    let mut wrong: Vec<(u64, usize, usize)> = Vec::new();
    for (class, row) in confusion.iter().enumerate() {
        for (other, count) in row.iter().enumerate() {
            if other != class && *count > 0 {
                wrong.push((*count, class, other));
            }
        }
    }
    wrong.sort_unstable_by_key(|(count, class, other)| (Reverse(*count), *class, *other));
    if wrong.is_empty() {
        return String::new();
    }
    let mut text = String::from("most frequent confusions:\n");
    for (count, class, other) in wrong.iter().take(10) {
        text += &format!("{count:>7}  {} as {}\n", classes[*class], classes[*other]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_data::{Normalization, TargetNames};

    fn task(classes: usize) -> Classification {
        let names: Vec<String> = (0..classes).map(|class| format!("c{class}")).collect();
        let samples = SampleDescription {
            shape: vec![1, 28, 28],
            columns: Vec::new(),
            target_columns: Vec::new(),
            targets: TargetNames::Classes(names.clone()),
            normalization: Normalization::default(),
        };
        Classification::new(&samples, &names)
    }

    fn scored(task: &Classification, rows: &[(&[f32], u32)]) -> Vec<f64> {
        let mut sums = vec![0.0; task.sum_count()];
        for (row, target) in rows {
            task.score(row, &HostTensor::Int(vec![*target]), &mut sums);
        }
        sums
    }

    #[test]
    fn accuracies_and_confusions_are_counted() {
        let task = task(7);
        assert_eq!(task.summary(), "1x28x28 features, 7 classes");
        let row = [0.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0];
        let rows: [(&[f32], u32); 4] = [(&row, 1), (&row, 5), (&row, 6), (&row, 2)];
        let sums = scored(&task, &rows);
        let report = task.report(&sums);
        assert_eq!((report.samples, report.right, report.right_in_top), (4, 1, 3));
        for (target, count) in [(0, 0), (1, 1), (2, 1), (5, 1), (6, 1)] {
            assert_eq!(report.confusion[target][1], count, "{target}");
        }
        let metrics = [("val_accuracy".into(), 0.25), ("val_top5_accuracy".into(), 0.75)];
        assert_eq!(task.metrics(&sums), metrics);
    }

    #[test]
    fn sums_of_another_length_give_no_metrics() {
        let task = task(7);
        for count in [0, 2, 3, task.sum_count() - 1, task.sum_count() + 1] {
            let sums = vec![1.0; count];
            assert!(task.metrics(&sums).is_empty() && task.tables_json(&sums).is_empty());
            assert_eq!(task.tables(&sums), "", "{count}");
        }
    }

    #[test]
    fn a_task_without_classes_counts_nothing() {
        let task = task(0);
        let sums = scored(&task, &[(&[0.5], 0), (&[], 0)]);
        assert_eq!(task.report(&sums).confusion.len(), 0);
        assert_eq!(task.metrics(&sums), [("val_accuracy".into(), 0.0)]);
        assert_eq!(task.tables(&sums), "");
    }

    #[test]
    fn equal_outputs_and_values_that_are_none_are_no_luck() {
        let task = task(3);
        let nan = f32::NAN;
        let right = |row: &[f32], target| task.report(&scored(&task, &[(row, target)])).right;
        assert_eq!([right(&[1.0, 1.0, 0.0], 0), right(&[1.0, 1.0, 0.0], 1)], [1, 0]);
        assert_eq!([right(&[nan; 3], 0), right(&[nan, 1.0, 0.0], 1)], [0, 0]);
        assert_eq!([right(&[-0.0, 0.0, -1.0], 0), right(&[-0.0, 0.0, -1.0], 1)], [1, 0]);
        let sums = scored(&task, &[(&[nan, 1.0, 0.0], 1), (&[0.0, 1.0, 0.0], 1)]);
        assert_eq!(task.report(&sums).confusion.concat().iter().sum::<u64>(), 1);
        assert_eq!([chosen(&[nan, 1.0, 3.0]), chosen(&[nan; 3])], [2, 0]);
        assert_eq!(task.metrics(&scored(&task, &[])).len(), 1, "no top 5 of 3");
    }

    #[test]
    fn the_table_is_readable_and_short_with_many_classes() {
        let task = task(3);
        let sums = scored(&task, &[(&[1.0, 0.0, 0.0], 0), (&[1.0, 0.0, 0.0], 1)]);
        let expected = "class  chosen\n       c0 c1 c2   right\n   c0   1  0  0 100.0 %\n   \
                        c1   1  0  0   0.0 %\n   c2   0  0  0       -\n";
        let squeezed = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(squeezed(&task.tables(&sums)), squeezed(expected));
        let many = super::tests::task(26);
        let row: Vec<f32> = (0..26).map(|class| f32::from(u8::from(class == 3))).collect();
        let table = many.tables(&scored(&many, &[(&row, 7), (&row, 3)]));
        assert_eq!(table, "most frequent confusions:\n      1  c7 as c3\n");
    }
}
