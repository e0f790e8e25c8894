//! Cost of the steps of a run on several ranks: time, predictions, and the shares of a step that
//! each rank computes and waits.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::event::Unit;

/// Cost of the measured steps of a run on several ranks. A value that was not measured is `None`,
/// and left out of the line of the record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunCost {
    /// Number of steps done; left out of the cost, as the line of the record has it.
    pub step: u64,
    /// Measured steps: all since the devices were opened, or since their shares or the unit last
    /// changed, without the first one.
    pub steps: u64,
    /// Median seconds of the last measured steps.
    pub step_s: f64,
    /// Seconds of a step as predicted from the timings of the devices before the run; `None` while
    /// the shares are others than at its start.
    pub predicted_s: Option<f64>,
    pub unit: Unit,
    /// Tokens or samples per second.
    pub per_s: f64,
    /// Device that takes the whole batch the fastest, alone; by the timings before the run.
    pub fastest: Option<SoloSpeed>,
    /// Throughput relative to the sum of the throughputs of all devices of the run alone.
    pub efficiency: Option<f64>,
    /// Seconds of a step that every rank waits for collectives. What a rank waits longer than the
    /// others is the wait for slower ranks.
    pub exposed_s: f64,
    /// Seconds of a step in which collectives and tensors were sent and added while the ranks
    /// computed; `None` if ranks are on several nodes.
    pub hidden_s: Option<f64>,
    /// Idle share of pipelines, as in [`StepRecord::bubble`](super::StepRecord::bubble).
    pub bubble: Option<f64>,
    /// Cost by rank.
    pub ranks: Vec<RankCost>,
    /// Sentence on the change that would help the most.
    pub advice: Cow<'static, str>,
}

/// Speed of a device that computes the whole batch alone, without the update of the parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SoloSpeed {
    /// Display name of the device.
    pub name: String,
    /// Seconds of a step.
    pub step_s: f64,
}

/// Shares of the steps of a rank; they add up to 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankCost {
    /// Display name of the rank's device.
    pub name: String,
    /// Computing, which includes the work of the device's thread.
    pub computing: f64,
    /// Waiting for sums of gradients and for parameters.
    pub gradients: f64,
    /// Waiting for activations and gradients of other stages, and for partial sums of the tensor
    /// group.
    pub tensors: f64,
    /// Waiting for other ranks to end their passes.
    pub others: f64,
    /// Rest, between the steps: mostly waiting for samples.
    pub between: f64,
}

impl RankCost {
    /// Returns the share of waiting for collectives, which begin when all ranks have computed.
    pub fn collectives(&self) -> f64 {
        self.gradients + self.others
    }
}

impl RunCost {
    /// Returns the throughput relative to the fastest device alone.
    pub fn speedup(&self) -> Option<f64> {
        self.fastest.as_ref().map(|fastest| fastest.step_s / self.step_s)
    }

    /// Returns the line of the record: the step and the cost.
    pub fn json(&self) -> Value {
        let ms = |seconds: f64| rounded(1e3 * seconds, 1e3);
        let mut cost = Map::new();
        cost.insert("steps".into(), self.steps.into());
        cost.insert("ms".into(), ms(self.step_s));
        let per_s = format!("{}_per_s", self.unit.name());
        let fastest = self.fastest.as_ref();
        let known = [
            ("predicted_ms", self.predicted_s.map(ms)),
            (&*per_s, Some(rounded(self.per_s, 1e3))),
            ("speedup", self.speedup().map(|times| rounded(times, 1e4))),
            ("fastest", fastest.map(|fastest| json!(fastest.name))),
            ("fastest_ms", fastest.map(|fastest| ms(fastest.step_s))),
            ("efficiency", self.efficiency.map(|share| rounded(share, 1e4))),
            ("exposed_ms", Some(ms(self.exposed_s))),
            ("hidden_ms", self.hidden_s.map(ms)),
            ("bubble", self.bubble.map(|share| rounded(share, 1e4))),
        ];
        for (name, value) in known {
            if let Some(value) = value {
                cost.insert(name.into(), value);
            }
        }
        let ranks: Vec<Value> = self.ranks.iter().map(RankCost::json).collect();
        cost.insert("ranks".into(), ranks.into());
        cost.insert("advice".into(), json!(self.advice));
        json!({ "step": self.step, "cost": cost })
    }
}

impl RankCost {
    fn json(&self) -> Value {
        let share = |share: f64| rounded(share, 1e4);
        json!({
            "name": self.name, "computing": share(self.computing),
            "gradients": share(self.gradients), "tensors": share(self.tensors),
            "others": share(self.others), "between": share(self.between),
        })
    }
}

/// Returns a value as a whole number of parts of 1: finer digits are noise.
fn rounded(value: f64, parts: f64) -> Value {
    ((value * parts).round() / parts).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost() -> RunCost {
        let rank = |name: &str, computing, gradients| RankCost {
            name: name.into(),
            computing,
            gradients,
            tensors: 0.0,
            others: 0.01,
            between: 0.03,
        };
        RunCost {
            step: 40,
            steps: 39,
            step_s: 0.312_345_678,
            predicted_s: None,
            unit: Unit::Tokens,
            per_s: 2036.0,
            fastest: None,
            efficiency: None,
            exposed_s: 0.0125,
            hidden_s: None,
            bubble: None,
            ranks: vec![rank("cpu", 0.9, 0.06), rank("gpu", 0.8, 0.16)],
            advice: "nothing".into(),
        }
    }

    #[test]
    fn a_cost_is_a_line_without_what_is_unknown() {
        let ranks = concat!(
            r#"[{"name":"cpu","computing":0.9,"gradients":0.06,"tensors":0.0,"others":0.01,"#,
            r#""between":0.03},{"name":"gpu","computing":0.8,"gradients":0.16,"tensors":0.0,"#,
            r#""others":0.01,"between":0.03}]"#,
        );
        let expected = |head: &str| -> Value {
            let cost = format!(r#"{{{head},"ranks":{ranks},"advice":"nothing"}}"#);
            serde_json::from_str(&format!(r#"{{"step":40,"cost":{cost}}}"#)).unwrap()
        };
        let head = r#""steps":39,"ms":312.346,"tokens_per_s":2036.0,"exposed_ms":12.5"#;
        assert_eq!(cost().json(), expected(head));
        let known = RunCost {
            predicted_s: Some(0.298),
            fastest: Some(SoloSpeed { name: "gpu".into(), step_s: 2.0 * cost().step_s }),
            efficiency: Some(0.87),
            hidden_s: Some(0.008),
            bubble: Some(0.125),
            ..cost()
        };
        let head = concat!(
            r#""steps":39,"ms":312.346,"predicted_ms":298.0,"tokens_per_s":2036.0,"speedup":2.0,"#,
            r#""fastest":"gpu","fastest_ms":624.691,"efficiency":0.87,"exposed_ms":12.5,"#,
            r#""hidden_ms":8.0,"bubble":0.125"#,
        );
        assert_eq!(known.json(), expected(head));
    }
}
