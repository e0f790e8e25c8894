//! Events of a run and their form as lines of JSON. Numbers that are not finite become `null`,
//! because JSON has no such numbers.

use serde::ser::{Serialize, SerializeMap, Serializer};

/// Metrics of one optimizer step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepRecord {
    /// Number of the step, counted from 1.
    pub step: u64,
    /// The mean loss over the global batch, before the update of this step.
    pub loss: f64,
    /// The learning rate of this step.
    pub lr: f64,
    /// The norm of the mean gradient over all parameters, before clipping.
    pub grad_norm: f64,
    /// Tokens (targets that count) in this step's global batch.
    pub tokens: u64,
    /// Wall time of the step, in milliseconds.
    pub ms: f64,
    pub tokens_per_s: f64,
    /// Share of the step in which the device was busy, by its own clock: 0 to 1; `None`, and left
    /// out of the line, if the device has no clock.
    pub busy: Option<f64>,
    /// Metrics per rank if there are several; left out of the line for one.
    pub ranks: Vec<RankRecord>,
    /// Reason for which the update was not applied, if so; written as `skipped` and `reason`.
    pub skipped: Option<String>,
}

/// Metrics of one of several ranks in a step.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct RankRecord {
    /// Samples of the step that this rank computed.
    pub share: u64,
    /// Time from the start of the step until the rank's gradients were computed, in milliseconds.
    /// Written with 3 decimals, as `wait_ms` is.
    #[serde(serialize_with = "microseconds")]
    pub work_ms: f64,
    /// Time for which the rank waited for other ranks, in milliseconds.
    #[serde(serialize_with = "microseconds")]
    pub wait_ms: f64,
}

/// Serializes milliseconds rounded to the microsecond: finer digits are noise.
fn microseconds<S: Serializer>(ms: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64((ms * 1e3).round() / 1e3)
}

/// One evaluation on the validation split.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct EvalRecord {
    /// Number of steps done before the evaluation; 0 is the initial model.
    pub step: u64,
    /// Mean loss over the validation split.
    pub val_loss: f64,
}

/// Event of a run: one line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[serde(untagged)]
pub enum Event {
    Step(StepRecord),
    Eval(EvalRecord),
}

impl From<StepRecord> for Event {
    fn from(record: StepRecord) -> Self {
        Self::Step(record)
    }
}

impl From<EvalRecord> for Event {
    fn from(record: EvalRecord) -> Self {
        Self::Eval(record)
    }
}

impl Serialize for StepRecord {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("step", &self.step)?;
        map.serialize_entry("loss", &self.loss)?;
        map.serialize_entry("lr", &self.lr)?;
        map.serialize_entry("grad_norm", &self.grad_norm)?;
        map.serialize_entry("tokens", &self.tokens)?;
        map.serialize_entry("ms", &self.ms)?;
        map.serialize_entry("tokens_per_s", &self.tokens_per_s)?;
        if let Some(busy) = &self.busy {
            map.serialize_entry("busy", busy)?;
        }
        if !self.ranks.is_empty() {
            map.serialize_entry("ranks", &self.ranks)?;
        }
        if let Some(reason) = &self.skipped {
            map.serialize_entry("skipped", &true)?;
            map.serialize_entry("reason", reason)?;
        }
        map.end()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn step(step: u64) -> StepRecord {
        StepRecord {
            step,
            loss: 4.25,
            lr: 1e-3,
            grad_norm: 0.5,
            tokens: 768,
            ms: 38.5,
            tokens_per_s: 20_000.0,
            busy: None,
            ranks: Vec::new(),
            skipped: None,
        }
    }

    fn json(record: impl Into<Event>) -> String {
        serde_json::to_string(&record.into()).unwrap()
    }

    #[test]
    fn steps_and_evaluations_have_the_documented_keys() {
        assert_eq!(
            json(step(7)),
            concat!(
                r#"{"step":7,"loss":4.25,"lr":0.001,"grad_norm":0.5,"tokens":768,"ms":38.5,"#,
                r#""tokens_per_s":20000.0}"#
            )
        );
        let busy = json(StepRecord { busy: Some(0.75), ..step(7) });
        assert!(busy.ends_with(r#""tokens_per_s":20000.0,"busy":0.75}"#), "{busy}");
        assert_eq!(json(EvalRecord { step: 7, val_loss: 1.5 }), r#"{"step":7,"val_loss":1.5}"#);
    }

    #[test]
    fn several_devices_are_told_with_their_share_and_their_times() {
        let rank = |share, wait_ms| RankRecord { share, work_ms: 1_234.567_89, wait_ms };
        let line = json(StepRecord { ranks: vec![rank(4, 0.0), rank(8, 1e-9)], ..step(7) });
        let expected = concat!(
            r#""tokens_per_s":20000.0,"#,
            r#""ranks":[{"share":4,"work_ms":1234.568,"wait_ms":0.0},"#,
            r#"{"share":8,"work_ms":1234.568,"wait_ms":0.0}]}"#
        );
        assert!(line.ends_with(expected), "{line}");
        let ranks = vec![rank(1, f64::NAN)];
        assert!(json(StepRecord { ranks, ..step(7) }).contains(r#""wait_ms":null"#));
    }

    #[test]
    fn what_is_not_finite_is_null() {
        let mut record = step(7);
        record.loss = f64::NAN;
        record.grad_norm = f64::INFINITY;
        record.skipped = Some("the gradient of wte is not finite".into());
        let line = json(record);
        assert!(line.contains(r#""loss":null"#), "{line}");
        assert!(line.contains(r#""grad_norm":null"#), "{line}");
        let ending = r#""skipped":true,"reason":"the gradient of wte is not finite"}"#;
        assert!(line.ends_with(ending), "{line}");
    }
}
