//! Runs of `potluck train` in a part: their words, and what their records tell.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::measures::Measure;
use super::workshop::{Ended, Halt, Workshop};

/// Samples per step of GPT-2 124M, of 1,024 tokens each; and of the model of a rehearsal.
pub const BATCH: usize = 8;
const TOY_BATCH: usize = 4;

impl Workshop<'_> {
    /// Returns the samples per step of [`Workshop::gpt2`].
    pub fn batch(&self) -> usize {
        if self.is_toy { TOY_BATCH } else { BATCH }
    }

    /// Returns one of two sizes: that of a rehearsal, or else the other one.
    pub fn sized<T>(&self, toy: T, full: T) -> T {
        if self.is_toy { toy } else { full }
    }

    /// Returns the words that choose GPT-2 124M with random parameters, or in a rehearsal a GPT
    /// that is as small as can be.
    pub fn gpt2(&self) -> Vec<String> {
        let sets: &[&str] = if self.is_toy {
            &["model.layers=2", "model.heads=2", "model.width=32", "model.context=32"]
        } else {
            &["model.preset=gpt2"]
        };
        sets.iter().flat_map(|set| ["--set".to_string(), (*set).to_string()]).collect()
    }

    /// Returns the words of a run that only trains.
    pub fn train(&self, devices: &str, more: &[String]) -> Vec<String> {
        let line = "train --seed 1 --quiet --set train.sample_tokens=0 --set train.eval_every=0 \
                    --set train.checkpoint_every=0 --set schedule.kind=constant --devices";
        let mut words = line.split_whitespace().map(String::from).collect::<Vec<_>>();
        words.push(devices.into());
        words.extend_from_slice(more);
        words
    }

    /// Trains in a directory of the part, and returns what came of it.
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

/// Words of a line, with values that contain no spaces.
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

    /// Returns the measure of whether all steps were taken, and how the run ended.
    pub fn end(&self, name: &str, steps: usize) -> Measure {
        let text = if self.ended.is_right() {
            format!("{} steps", self.steps.len())
        } else {
            format!("{} steps, {}", self.steps.len(), self.ended.end())
        };
        let is_right = self.ended.is_right() && self.steps.len() == steps;
        Measure::expected(name, text, &format!("{steps} steps"), is_right)
    }

    /// Returns the tokens per second of the median step, the first ones left out.
    pub fn tokens_per_second(&self) -> Option<f64> {
        median(numbers(&self.steps[self.warm()..], "tokens_per_s"))
    }

    /// Returns the median share of the step in which the device was busy, if it has a clock.
    pub fn busy(&self) -> Option<f64> {
        median(numbers(&self.steps[self.warm()..], "busy"))
    }

    /// Returns the steps that are not counted, because they compile.
    fn warm(&self) -> usize {
        (self.steps.len() / 4).min(3)
    }
}

/// Returns the lines of a record that are steps; none if there is no record.
pub fn steps_of(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    // The last line may be half written.
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line.get("loss").is_some()).collect()
}

/// Returns the values of a key, of the steps that have it.
pub fn numbers(steps: &[Value], key: &str) -> Vec<f64> {
    steps.iter().filter_map(|step| step.get(key)?.as_f64()).collect()
}

/// Returns the middle value; `None` without any.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// Returns the largest difference of losses of the same step; `None` if there are not as many.
pub fn largest_difference(one: &[f64], other: &[f64]) -> Option<f64> {
    if one.len() != other.len() || one.is_empty() {
        return None;
    }
    let differences = one.iter().zip(other).map(|(one, other)| (one - other).abs());
    Some(differences.fold(0.0, f64::max))
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
