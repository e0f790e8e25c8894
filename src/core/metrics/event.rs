//! Events of a run, which are also sent to other nodes, and the lines of JSON of recorded events.
//! Numbers that are not finite become `null` there, because JSON has no such numbers.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use crate::Setting;
use crate::format::milliseconds;
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};

use super::run_cost::RunCost;

/// Unit that a run counts in its steps and evaluations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unit {
    #[default]
    Tokens,
    Samples,
}

impl Unit {
    /// Returns the name of several, which is also a key of the record.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Samples => "samples",
        }
    }
}

/// Metrics of one optimizer step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Number of the step, counted from 1.
    pub step: u64,
    /// The mean loss over the global batch, before the update of this step.
    pub loss: f64,
    /// Means of the terms of the loss by name; left out of the line if it has none.
    pub terms: Vec<(Cow<'static, str>, f64)>,
    /// The learning rate of this step.
    pub lr: f64,
    /// The norm of the mean gradient over all parameters, before clipping.
    pub grad_norm: f64,
    /// Loss scale with which the step was computed; `None`, and left out of the line, in f32.
    pub loss_scale: Option<f64>,
    /// Unit of `count`.
    pub unit: Unit,
    /// Tokens (targets that count) or samples in this step's global batch.
    pub count: u64,
    /// Wall time of the step, in milliseconds.
    pub ms: f64,
    /// Tokens or samples per second.
    pub per_s: f64,
    /// Share of the step in which the device was busy, by its own clock: 0 to 1; `None`, and left
    /// out of the line, if the device has no clock.
    pub busy: Option<f64>,
    /// Metrics per rank if there are several; left out of the line for one.
    pub ranks: Vec<RankRecord>,
    /// Reason for which the update was not applied, if so; written as `skipped` and `reason`.
    pub skipped: Option<String>,
}

impl StepRecord {
    /// Returns the bubble of a step of pipelines: the share of the time of all ranks in which their
    /// devices were idle; `None` without pipelines.
    pub fn bubble(&self) -> Option<f64> {
        if self.ranks.iter().all(|rank| rank.stage.is_none()) {
            return None;
        }
        let idle: f64 = self.ranks.iter().map(|rank| rank.time.as_secs_f64() * rank.idle).sum();
        let total: f64 = self.ranks.iter().map(|rank| rank.time.as_secs_f64()).sum();
        Some(idle / total)
    }
}

/// Metrics of one of several ranks in a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankRecord {
    /// Display name of the rank's device; left out of the line.
    pub name: String,
    /// Samples of the step that this rank computed.
    pub share: u64,
    /// Time of the step on this rank.
    pub time: Duration,
    /// Part of `time` for which the rank waited for other ranks.
    pub waited: Duration,
    /// Fraction of the step in which the rank's device was idle: 0 to 1; in the line of a stage.
    pub idle: f64,
    /// Place of the rank in a pipeline, if it is in one.
    pub stage: Option<StageRecord>,
}

/// Place of a rank in the pipelines of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageRecord {
    pub pipeline: u64,
    pub stage: u64,
    /// Place in the tensor group of the stage, if it has one.
    pub tensor: Option<u64>,
}

impl RankRecord {
    /// Returns the samples per second while the rank computed; not finite if it computed nothing.
    pub fn samples_per_s(&self) -> f64 {
        self.share as f64 / (self.time.as_secs_f64() - self.waited.as_secs_f64())
    }

    /// Returns the fraction of the step for which the rank waited: 0 to 1.
    pub fn wait(&self) -> f64 {
        self.waited.as_secs_f64() / self.time.as_secs_f64()
    }
}

/// Returns a share with 4 decimals: finer digits are noise.
fn rounded(share: f64) -> f64 {
    (share * 1e4).round() / 1e4
}

/// Returns milliseconds, rounded to the microsecond: finer digits are noise.
fn rounded_ms(time: Duration) -> f64 {
    (1e3 * time.as_secs_f64() * 1e3).round() / 1e3
}

/// Record as a line of the run's record: its keys of JSON depend on the values, unlike the fields
/// that are sent to other nodes.
pub(super) struct JsonLine<'a, T>(pub &'a T);

/// Written as the share, and the milliseconds of work and of waiting; of a rank with a part of the
/// model also its place and its idle share.
impl Serialize for JsonLine<'_, RankRecord> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(record) = self;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("share", &record.share)?;
        let work = record.time.saturating_sub(record.waited);
        map.serialize_entry("work_ms", &rounded_ms(work))?;
        map.serialize_entry("wait_ms", &rounded_ms(record.waited))?;
        if let Some(StageRecord { pipeline, stage, tensor }) = record.stage {
            map.serialize_entry("pipeline", &pipeline)?;
            map.serialize_entry("stage", &stage)?;
            if let Some(tensor) = tensor {
                map.serialize_entry("tensor", &tensor)?;
            }
            map.serialize_entry("idle", &rounded(record.idle))?;
        }
        map.end()
    }
}

/// One evaluation on the validation split.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalRecord {
    /// Number of steps done before the evaluation; 0 is the initial model.
    pub step: u64,
    /// Mean loss over the evaluated samples of the validation split.
    pub val_loss: f64,
    /// Other metrics by name, such as `val_accuracy`.
    pub metrics: Vec<(Cow<'static, str>, f64)>,
    /// Means of the terms of the loss by name; left out of the line if it has none.
    pub terms: Vec<(Cow<'static, str>, f64)>,
    /// Samples that were evaluated, and the targets in them.
    pub samples: u64,
    pub targets: u64,
    /// True if the loss is finite and below the best earlier one, if there is one; left out of the
    /// line.
    pub is_best: bool,
}

/// Terms of a loss in the order of their names.
fn by_name<'a>(terms: &'a [(Cow<'static, str>, f64)]) -> BTreeMap<&'a str, f64> {
    terms.iter().map(|(name, value)| (&**name, *value)).collect()
}

impl Serialize for JsonLine<'_, EvalRecord> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(record) = self;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("step", &record.step)?;
        map.serialize_entry("val_loss", &record.val_loss)?;
        for (name, value) in &record.metrics {
            map.serialize_entry(name, value)?;
        }
        if !record.terms.is_empty() {
            map.serialize_entry("terms", &by_name(&record.terms))?;
        }
        map.serialize_entry("samples", &record.samples)?;
        map.serialize_entry("targets", &record.targets)?;
        map.end()
    }
}

/// Measure of a model, in the terms of its task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasureRecord {
    /// Name of the measure; left out of the line.
    pub name: Cow<'static, str>,
    /// Number of steps done before the measure.
    pub step: u64,
    /// Values by name, in the order of the line.
    pub values: Vec<(Cow<'static, str>, MeasuredValue)>,
}

/// Value of a measure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum MeasuredValue {
    Count(u64),
    Real(f64),
}

impl MeasureRecord {
    /// Returns the line of the record: the step and the values.
    pub fn json(&self) -> serde_json::Value {
        let mut line = serde_json::Map::new();
        line.insert("step".into(), self.step.into());
        for (name, value) in &self.values {
            let value = match *value {
                MeasuredValue::Count(count) => count.into(),
                MeasuredValue::Real(number) => number.into(),
            };
            line.insert(name.to_string(), value);
        }
        line.into()
    }
}

/// Change of the samples of the ranks between two steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShareRecord {
    /// Number of steps done before the change.
    pub step: u64,
    /// Samples of each rank per step, before and from then on.
    pub before: Vec<u32>,
    pub shares: Vec<u32>,
    /// Measurement on which the change is based; `None` if the configuration gave it.
    pub predicted: Option<PredictedGain>,
}

/// Measurement on which a change of samples is based.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PredictedGain {
    /// Median milliseconds of a step before the change, and the predicted ones after it.
    pub before_ms: f64,
    pub after_ms: f64,
    /// Name of the device whose speed has changed, and whether it is slower than before or faster.
    pub changed: Option<(String, bool)>,
}

impl ShareRecord {
    /// Returns the change as a sentence for the user.
    pub fn sentence(&self) -> String {
        let Self { step, before, shares, predicted } = self;
        let change =
            format!("shares {} -> {} from step {}", ratio(before), ratio(shares), step + 1);
        let Some(PredictedGain { before_ms, after_ms, changed }) = predicted else {
            return format!("{change}, as given by {}", Setting::ShareChanges);
        };
        let cause = match changed {
            Some((name, true)) => format!("{name} is slower than before"),
            Some((name, false)) => format!("{name} is faster than before"),
            None => "the speeds are not those that were measured at the start".into(),
        };
        let before = milliseconds(before_ms / 1e3);
        let after = milliseconds(after_ms / 1e3);
        format!("{change}: {cause}; predicted {before} -> {after} ms per step")
    }
}

/// Formats samples as a ratio: `64 : 32`.
fn ratio(shares: &[u32]) -> String {
    let shares: Vec<String> = shares.iter().map(u32::to_string).collect();
    shares.join(" : ")
}

impl Serialize for JsonLine<'_, ShareRecord> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(ShareRecord { step, before, shares, predicted }) = self;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("event", "shares")?;
        map.serialize_entry("step", step)?;
        map.serialize_entry("from_step", &(step + 1))?;
        map.serialize_entry("before", before)?;
        map.serialize_entry("shares", shares)?;
        if let Some(PredictedGain { before_ms, after_ms, .. }) = predicted {
            map.serialize_entry("before_ms", before_ms)?;
            map.serialize_entry("predicted_ms", after_ms)?;
        }
        map.end()
    }
}

/// Event of a run; a [`Sink`](super::Sink) gets the events in the order in which they happen. Notes
/// and warnings may occur at any time, [`Opening`](Event::Opening) and [`Tuning`](Event::Tuning)
/// before [`Started`](Event::Started), and all others after it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// Message for the user.
    Note(String),
    /// Message about a problem that does not end the run.
    Warning(String),
    /// Progress of certifying and timing the kernels of a device, before the first step.
    Tuning {
        device: String,
        done: usize,
        total: usize,
        elapsed: Duration,
    },
    /// The devices are open and the run's directory is in use: of `steps`, `done` are done, which
    /// may be all of them. Preparations of the first step, such as restoring a checkpoint, follow
    /// and may still fail. `device` is the name of the first rank's device.
    Started {
        done: u64,
        steps: u64,
        device: String,
    },
    Step(StepRecord),
    /// Progress of an evaluation, in samples; sent every fraction of a second.
    Evaluating {
        done: u64,
        total: u64,
        elapsed: Duration,
    },
    Evaluation(EvalRecord),
    /// Measure of the model by its task, after the last step.
    Measure(MeasureRecord),
    /// The state of a step is being saved, which may take long; [`Checkpoint`](Event::Checkpoint)
    /// follows, or a warning.
    Saving {
        step: u64,
    },
    /// The checkpoint of a step was written.
    Checkpoint {
        step: u64,
    },
    /// The training loop is over: the last step is done, a signal interrupted it, or it failed. A
    /// run that fails before the loop has no such event.
    Ended,
    /// The samples of the ranks change, from the next step on.
    Shares(ShareRecord),
    /// Cost of the steps on several ranks, after enough of them; before [`Ended`](Event::Ended).
    Cost(RunCost),
    /// The devices of a run are opened again, after the loss of one; on a node that has joined a
    /// run, also at its beginning. [`Started`](Event::Started) follows.
    Opening,
    /// The model is measured by its task, after the last step, which may take long;
    /// [`Measure`](Event::Measure) follows, or a signal.
    Measuring,
}

impl Serialize for JsonLine<'_, StepRecord> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(record) = self;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("step", &record.step)?;
        map.serialize_entry("loss", &record.loss)?;
        if !record.terms.is_empty() {
            map.serialize_entry("terms", &by_name(&record.terms))?;
        }
        map.serialize_entry("lr", &record.lr)?;
        map.serialize_entry("grad_norm", &record.grad_norm)?;
        if let Some(loss_scale) = &record.loss_scale {
            map.serialize_entry("loss_scale", loss_scale)?;
        }
        let unit = record.unit.name();
        map.serialize_entry(unit, &record.count)?;
        map.serialize_entry("ms", &record.ms)?;
        map.serialize_entry(&format!("{unit}_per_s"), &record.per_s)?;
        if let Some(busy) = &record.busy {
            map.serialize_entry("busy", busy)?;
        }
        if let Some(bubble) = record.bubble() {
            map.serialize_entry("bubble", &rounded(bubble))?;
        }
        if !record.ranks.is_empty() {
            let ranks: Vec<_> = record.ranks.iter().map(JsonLine).collect();
            map.serialize_entry("ranks", &ranks)?;
        }
        if let Some(reason) = &record.skipped {
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
            terms: Vec::new(),
            lr: 1e-3,
            grad_norm: 0.5,
            loss_scale: None,
            unit: Unit::Tokens,
            count: 768,
            ms: 38.5,
            per_s: 20_000.0,
            busy: None,
            ranks: Vec::new(),
            skipped: None,
        }
    }

    fn json<T>(record: T) -> String
    where
        for<'a> JsonLine<'a, T>: Serialize,
    {
        serde_json::to_string(&JsonLine(&record)).unwrap()
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
        let scaled = json(StepRecord { loss_scale: Some(0.25), ..step(7) });
        assert!(scaled.contains(r#""grad_norm":0.5,"loss_scale":0.25,"tokens":768"#), "{scaled}");
        let terms = vec![("kl".into(), 1.5), ("errors".into(), f64::NAN)];
        let with_terms = json(StepRecord { terms, ..step(7) });
        let expected = r#""loss":4.25,"terms":{"errors":null,"kl":1.5},"lr""#;
        assert!(with_terms.contains(expected), "{with_terms}");
        let evaluation = EvalRecord {
            step: 7,
            val_loss: 1.5,
            metrics: Vec::new(),
            terms: Vec::new(),
            samples: 3,
            targets: 24,
            is_best: true,
        };
        assert_eq!(
            json(evaluation.clone()),
            r#"{"step":7,"val_loss":1.5,"samples":3,"targets":24}"#
        );
        let metrics = vec![("val_accuracy".into(), 0.75)];
        assert_eq!(
            json(EvalRecord { metrics, ..evaluation }),
            r#"{"step":7,"val_loss":1.5,"val_accuracy":0.75,"samples":3,"targets":24}"#
        );
        let samples = json(StepRecord { unit: Unit::Samples, count: 12, per_s: 48.0, ..step(7) });
        assert!(samples.ends_with(r#""samples":12,"ms":38.5,"samples_per_s":48.0}"#), "{samples}");
    }

    #[test]
    fn changes_of_shares_are_lines_and_sentences() {
        let changed = Some(("cpu 2".to_string(), true));
        let predicted = Some(PredictedGain { before_ms: 312.0, after_ms: 281.0, changed });
        let (before, shares) = (vec![48, 48], vec![64, 32]);
        let record = ShareRecord { step: 50, before, shares, predicted };
        assert_eq!(
            json(record.clone()),
            concat!(
                r#"{"event":"shares","step":50,"from_step":51,"before":[48,48],"#,
                r#""shares":[64,32],"before_ms":312.0,"predicted_ms":281.0}"#
            )
        );
        let sentence = "shares 48 : 48 -> 64 : 32 from step 51: cpu 2 is slower than before; \
                        predicted 312 -> 281 ms per step";
        assert_eq!(record.sentence(), sentence);
        let given = ShareRecord { predicted: None, ..record };
        assert!(json(given.clone()).ends_with(r#""shares":[64,32]}"#));
        let sentence = "shares 48 : 48 -> 64 : 32 from step 51, as given by \
                        parallel.share_changes";
        assert_eq!(given.sentence(), sentence);
    }

    #[test]
    fn several_devices_are_told_with_their_share_and_their_times() {
        let rank = |share, waited_ns| RankRecord {
            name: "a device".into(),
            share,
            time: Duration::from_nanos(1_234_567_890 + waited_ns),
            waited: Duration::from_nanos(waited_ns),
            idle: 0.0,
            stage: None,
        };
        let line = json(StepRecord { ranks: vec![rank(4, 0), rank(8, 1)], ..step(7) });
        let expected = concat!(
            r#""tokens_per_s":20000.0,"#,
            r#""ranks":[{"share":4,"work_ms":1234.568,"wait_ms":0.0},"#,
            r#"{"share":8,"work_ms":1234.568,"wait_ms":0.0}]}"#
        );
        assert!(line.ends_with(expected), "{line}");
    }

    #[test]
    fn stages_are_told_with_their_idle_shares_and_the_bubble_of_all() {
        let rank = |stage, waited, idle| RankRecord {
            name: "a device".into(),
            share: 12,
            time: Duration::from_millis(300),
            waited: Duration::from_millis(waited),
            idle,
            stage: Some(StageRecord { pipeline: 1, stage, tensor: None }),
        };
        let record =
            StepRecord { ranks: vec![rank(0, 30, 0.05), rank(1, 100, 1.0 / 3.0)], ..step(7) };
        assert!((record.bubble().unwrap() - 115.0 / 600.0).abs() < 1e-12);
        let expected = concat!(
            r#""bubble":0.1917,"ranks":[{"share":12,"work_ms":270.0,"wait_ms":30.0,"#,
            r#""pipeline":1,"stage":0,"idle":0.05},{"share":12,"work_ms":200.0,"wait_ms":100.0,"#,
            r#""pipeline":1,"stage":1,"idle":0.3333}]}"#
        );
        let line = json(record);
        assert!(line.ends_with(expected), "{line}");
        assert_eq!(step(7).bubble(), None);
    }

    #[test]
    fn a_rank_has_a_speed_while_it_computes_and_a_fraction_that_it_waits() {
        let (time, waited) = (Duration::from_secs(4), Duration::from_secs(3));
        let rank =
            RankRecord { name: "a device".into(), share: 8, time, waited, idle: 0.5, stage: None };
        assert_eq!((rank.samples_per_s(), rank.wait()), (8.0, 0.75));
        let idle = RankRecord { share: 0, waited: time, ..rank };
        assert!(idle.samples_per_s().is_nan() && idle.wait() == 1.0);
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
