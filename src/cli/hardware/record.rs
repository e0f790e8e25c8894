//! Runs of `potluck train` in a part: their arguments and their records.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::measures::Measure;
use super::workshop::{Ended, Halt, Workshop};

/// Samples per step of GPT-2 124M, of 1,024 tokens each.
pub const BATCH: usize = 8;
/// Samples per step of the model of a rehearsal.
const TOY_BATCH: usize = 4;

impl Workshop<'_> {
    /// Returns the samples per step of [`Workshop::gpt2`].
    pub fn batch(&self) -> usize {
        if self.is_toy { TOY_BATCH } else { BATCH }
    }

    /// Returns the first size in a rehearsal, else the second.
    pub fn sized<T>(&self, toy: T, full: T) -> T {
        if self.is_toy { toy } else { full }
    }

    /// Returns the arguments that choose GPT-2 124M with random parameters, or in a rehearsal a
    /// very small GPT.
    pub fn gpt2(&self) -> Vec<String> {
        let sets: &[&str] = if self.is_toy {
            &["model.layers=2", "model.heads=2", "model.width=32", "model.context=32"]
        } else {
            &["model.preset=gpt2"]
        };
        let mut words = Vec::new();
        for set in sets {
            words.extend(["--set".to_string(), set.to_string()]);
        }
        words
    }

    /// Returns the arguments of a run that only trains.
    pub fn train(&self, devices: &str, more: &[String]) -> Vec<String> {
        let line = "train --seed 1 --quiet --set train.sample_tokens=0 --set train.eval_every=0 \
                    --set train.checkpoint_every=0 --set schedule.kind=constant --devices";
        let mut words = words(line);
        words.push(devices.into());
        words.extend_from_slice(more);
        words
    }

    /// Trains in a directory of the part, and returns the result.
    ///
    /// # Errors
    /// Returns `Halt` as [`Workshop::run`] does.
    pub fn train_in(&self, run: &str, devices: &str, more: &[String]) -> Result<Trained, Halt> {
        let mut words = self.train(devices, more);
        words.extend(["--out".into(), run.into()]);
        let ended = self.run(&words)?;
        let steps = steps_of(&self.work.join(run));
        Ok(Trained { ended, steps })
    }
}

/// Returns the words of a line whose values contain no spaces.
pub fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(String::from).collect()
}

/// Run that ended.
pub struct Trained {
    pub ended: Ended,
    /// Steps of its record.
    pub steps: Vec<Value>,
}

impl Trained {
    pub fn losses(&self) -> Vec<f64> {
        numbers(&self.steps, "loss")
    }

    /// Returns the measure of the number of steps and of the end of the run.
    pub fn end(&self, name: &str, steps: usize) -> Measure {
        let text = if self.ended.is_right() {
            format!("{} steps", self.steps.len())
        } else {
            format!("{} steps, {}", self.steps.len(), self.ended.end())
        };
        let is_right = self.ended.is_right() && self.steps.len() == steps;
        Measure::expected(name, text, &format!("{steps} steps"), is_right)
    }

    /// Returns the tokens per second of the median step, without the first steps.
    pub fn tokens_per_second(&self) -> Option<f64> {
        median(numbers(&self.steps[self.warm()..], "tokens_per_s"))
    }

    /// Returns the median share of the step in which the device was busy, if it has a clock.
    pub fn busy(&self) -> Option<f64> {
        median(numbers(&self.steps[self.warm()..], "busy"))
    }

    /// Number of first steps that are left out, because they compile.
    fn warm(&self) -> usize {
        (self.steps.len() / 4).min(3)
    }
}

/// Returns the steps of a record; empty without a record.
pub fn steps_of(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    // The last line may be incomplete.
    let mut steps = Vec::new();
    for line in text.lines() {
        if let Ok(step) = serde_json::from_str::<Value>(line)
            && step.get("loss").is_some()
        {
            steps.push(step);
        }
    }
    steps
}

/// Returns the values of a key in the steps that have it.
pub fn numbers(steps: &[Value], key: &str) -> Vec<f64> {
    steps.iter().filter_map(|step| step.get(key)?.as_f64()).collect()
}

/// Returns the middle value; `None` without any.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// Returns the largest difference of losses of the same step; `None` for different numbers of
/// steps.
pub fn largest_difference(one: &[f64], other: &[f64]) -> Option<f64> {
    if one.len() != other.len() || one.is_empty() {
        return None;
    }
    let mut largest: f64 = 0.0;
    for (one, other) in one.iter().zip(other) {
        largest = largest.max((one - other).abs());
    }
    Some(largest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_compared_step_by_step() {
        assert_eq!(largest_difference(&[3.0, 2.0], &[3.25, 2.5]), Some(0.5));
        assert_eq!(largest_difference(&[3.0], &[3.0, 2.0]), None);
        assert_eq!(largest_difference(&[], &[]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(Vec::new()), None);
    }
}
