//! Regression: the root mean squared error, in the units of the targets.

use std::borrow::Cow;

use super::Task;
use potluck_core::format::dims_text;
use potluck_core::metrics::Unit;
use potluck_core::{DType, HostTensor};
use potluck_data::{MeanStd, SampleDescription};

/// Prediction of values.
#[derive(Clone, Debug)]
pub struct Regression {
    features: Vec<usize>,
    names: Vec<String>,
    scales: Vec<MeanStd>,
}

impl Regression {
    /// Creates the task of samples with these targets.
    pub fn new(samples: &SampleDescription, names: &[String]) -> Self {
        let mut scales = samples.normalization.targets.clone();
        scales.resize(names.len(), MeanStd::IDENTITY);
        Self { features: samples.shape.clone(), names: names.to_vec(), scales }
    }
}

impl Task for Regression {
    fn unit(&self) -> Unit {
        Unit::Samples
    }

    fn summary(&self) -> String {
        let names = match &self.names[..] {
            [name] => name.clone(),
            names => format!("{} targets", names.len()),
        };
        format!("{} features, regression of {names}", dims_text(&self.features))
    }

    fn scored_output(&self) -> Option<&'static str> {
        Some("outputs")
    }

    fn scored_type(&self) -> (usize, DType) {
        (self.names.len(), DType::F32)
    }

    fn sum_count(&self) -> usize {
        1 + self.names.len()
    }

    fn score(&self, outputs: &[f32], targets: &HostTensor, sums: &mut [f64]) {
        // The values in a data set are floats.
        let HostTensor::Float(targets) = targets else { return };
        let width = self.names.len();
        if width == 0 {
            return;
        }
        for (row, wanted) in outputs.chunks_exact(width).zip(targets.chunks_exact(width)) {
            sums[0] += 1.0;
            for (column, scale) in self.scales.iter().enumerate() {
                let error = f64::from(row[column] - wanted[column]) * f64::from(scale.std);
                sums[1 + column] += error * error;
            }
        }
    }

    fn metrics(&self, sums: &[f64]) -> Vec<(Cow<'static, str>, f64)> {
        if sums.len() != self.sum_count() {
            return Vec::new();
        }
        let values = sums[0] * self.names.len() as f64;
        vec![("val_rmse".into(), (sums[1..].iter().sum::<f64>() / values).sqrt())]
    }

    fn tables(&self, sums: &[f64]) -> String {
        if self.names.len() == 1 || sums.len() != self.sum_count() {
            return String::new();
        }
        let mut text = String::new();
        for (name, sum) in self.names.iter().zip(&sums[1..]) {
            text += &format!("  rmse of {name}: {:.6}\n", (sum / sums[0]).sqrt());
        }
        text
    }

    fn tables_json(&self, sums: &[f64]) -> Vec<(&'static str, serde_json::Value)> {
        if sums.len() != self.sum_count() {
            return Vec::new();
        }
        let mut each = serde_json::Map::new();
        for (name, sum) in self.names.iter().zip(&sums[1..]) {
            each.insert(name.clone(), (sum / sums[0]).sqrt().into());
        }
        vec![("rmse_by_target", each.into())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_data::{Normalization, TargetNames};

    fn task(names: &[&str]) -> Regression {
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        let scale = |std| MeanStd { mean: 100.0, std };
        let targets = vec![scale(2.0), scale(10.0)];
        let samples = SampleDescription {
            shape: vec![8],
            columns: Vec::new(),
            target_columns: Vec::new(),
            targets: TargetNames::Values(names.clone()),
            normalization: Normalization { features: Vec::new(), targets },
        };
        Regression::new(&samples, &names)
    }

    #[test]
    fn sums_of_another_length_give_no_metrics() {
        let task = task(&["a", "b"]);
        for sums in [&[][..], &[1.0], &[1.0; 2], &[1.0; 4]] {
            assert!(task.metrics(sums).is_empty() && task.tables_json(sums).is_empty());
            assert_eq!(task.tables(sums), "", "{sums:?}");
        }
        let none = super::tests::task(&[]);
        let mut sums = vec![0.0; none.sum_count()];
        none.score(&[1.0], &HostTensor::Float(vec![0.0]), &mut sums);
        assert_eq!(sums, [0.0]);
    }

    #[test]
    fn errors_are_in_the_units_of_the_targets() {
        let task = task(&["a", "b"]);
        assert_eq!(task.summary(), "8 features, regression of 2 targets");
        let mut sums = vec![0.0; task.sum_count()];
        task.score(&[1.0, 0.0, 0.0, 0.5], &HostTensor::Float(vec![0.0; 4]), &mut sums);
        assert_eq!(sums, [2.0, 4.0, 25.0]);
        assert_eq!(task.metrics(&sums), [("val_rmse".into(), (29.0f64 / 4.0).sqrt())]);
        let json = task.tables_json(&sums);
        assert_eq!(json[0].1["a"], 2.0f64.sqrt());
        assert!(task.tables(&sums).contains("rmse of b: 3.535534"));
    }
}
