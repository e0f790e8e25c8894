//! Results of a part, with their limits.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::parts::HardwarePart;

/// Number or statement in a line of the summary.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measure {
    pub name: String,
    /// Value as the summary shows it.
    pub text: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// Limit as the summary shows it; `None` without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    pub is_right: bool,
}

impl Measure {
    /// Creates a statement without a limit.
    pub fn fact(name: &str, text: impl Into<String>) -> Self {
        Self { name: name.into(), text: text.into(), value: None, limit: None, is_right: true }
    }

    /// Creates a number without a limit.
    pub fn number(name: &str, value: f64, unit: &str) -> Self {
        Self { value: Some(value), ..Self::fact(name, with_unit(value, unit)) }
    }

    /// Creates a number that should not be above its limit.
    pub fn at_most(name: &str, value: f64, limit: f64, unit: &str) -> Self {
        let limit_text = Some(format!("at most {}", with_unit(limit, unit)));
        Self { limit: limit_text, is_right: value <= limit, ..Self::number(name, value, unit) }
    }

    /// Creates a number that should not be below its limit.
    pub fn at_least(name: &str, value: f64, limit: f64, unit: &str) -> Self {
        let limit_text = Some(format!("at least {}", with_unit(limit, unit)));
        Self { limit: limit_text, is_right: value >= limit, ..Self::number(name, value, unit) }
    }

    /// Creates a statement with the expected one.
    pub fn expected(name: &str, text: impl Into<String>, expected: &str, is_right: bool) -> Self {
        Self { limit: Some(expected.into()), is_right, ..Self::fact(name, text) }
    }
}

/// Formats a number with four digits, followed by its unit.
fn with_unit(value: f64, unit: &str) -> String {
    let text = if value == 0.0 || (value.fract() == 0.0 && value.abs() < 1e6) {
        format!("{value}")
    } else if !(1e-3..1e6).contains(&value.abs()) {
        format!("{value:.2e}")
    } else {
        let digits = (3 - value.abs().log10().floor() as i32).clamp(0, 6);
        let text = format!("{value:.*}", digits as usize);
        if digits > 0 { text.trim_end_matches('0').trim_end_matches('.').into() } else { text }
    };
    if unit.is_empty() { text } else { format!("{text} {unit}") }
}

/// Findings of a part.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Findings {
    pub measures: Vec<Measure>,
    /// All results, for the file of the part.
    pub details: Value,
    /// Reason for which the part does not apply here.
    pub skipped: Option<String>,
}

impl Findings {
    /// Creates the findings of a part that does not apply here.
    pub fn skipped(why: &str) -> Self {
        Self { skipped: Some(why.into()), ..Self::default() }
    }
}

/// Report of a completed part: its file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PartReport {
    pub part: HardwarePart,
    pub seconds: f64,
    pub seconds_max: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    pub measures: Vec<Measure>,
    pub details: Value,
}

impl PartReport {
    pub fn has_failed(&self) -> bool {
        self.measures.iter().any(|measure| !measure.is_right)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_have_their_limit() {
        let text = |value| with_unit(value, "");
        let texts = [0.0, 12.0, 0.5, 43.7123, 43_712.3, 8.25e-7, 2.5e9].map(text);
        assert_eq!(texts, ["0", "12", "0.5", "43.71", "43712", "8.25e-7", "2.50e9"]);
        let at_most = Measure::at_most("loss", 2e-4, 1e-4, "nats");
        assert_eq!(at_most.limit.as_deref(), Some("at most 1.00e-4 nats"));
        assert!(!at_most.is_right && Measure::at_least("share", 0.5, 0.5, "").is_right);
        assert!(!Measure::at_most("loss", f64::NAN, 1.0, "").is_right, "NaN passes no limit");
    }
}
