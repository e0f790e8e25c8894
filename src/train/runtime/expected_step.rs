//! Expectation of a step from timings of the devices before the run.

use potluck_core::metrics::SoloSpeed;
use potluck_parallel::planner::proposal::Proposal;

/// Expected step of the ranks of a run, and of their devices alone.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpectedStep {
    /// Seconds of a step on all ranks; `None` if it was not predicted.
    pub step_s: Option<f64>,
    /// By rank: seconds of a step with the whole batch on its device alone; infinite if the device
    /// cannot hold the whole model.
    pub solo_s: Vec<f64>,
    /// Fastest device alone, which may have been left out of the run; `None` if no device holds
    /// the whole model.
    pub fastest: Option<SoloSpeed>,
}

impl ExpectedStep {
    /// Returns the expectation of a proposal for devices of these names.
    pub fn of(proposal: &Proposal, names: &[String]) -> Self {
        let positions = &proposal.chosen.arrangement.positions;
        let alone_s = &proposal.alone_s;
        Self {
            step_s: Some(proposal.chosen.prediction.step_s),
            solo_s: positions.iter().map(|position| alone_s[*position]).collect(),
            fastest: fastest_alone(names, alone_s),
        }
    }

    /// Returns the throughput of a step relative to the sum of the throughputs of all devices
    /// alone; `None` if one of them has none.
    pub fn efficiency(&self, step_s: f64) -> Option<f64> {
        let mut steps_per_s = 0.0;
        for solo_s in &self.solo_s {
            if !solo_s.is_finite() {
                return None;
            }
            steps_per_s += 1.0 / solo_s;
        }
        let efficiency = 1.0 / (step_s * steps_per_s);
        if efficiency.is_finite() { Some(efficiency) } else { None }
    }
}

/// Returns the fastest of the devices with these seconds of a step; `None` if no time is finite.
fn fastest_alone(names: &[String], solo_s: &[f64]) -> Option<SoloSpeed> {
    let mut fastest: Option<SoloSpeed> = None;
    for (name, &step_s) in names.iter().zip(solo_s) {
        if step_s.is_finite() && fastest.as_ref().is_none_or(|found| step_s < found.step_s) {
            fastest = Some(SoloSpeed { name: name.clone(), step_s });
        }
    }
    fastest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn efficiency_is_relative_to_the_sum_of_devices_alone() {
        let solo_s = vec![1.0, 0.5];
        let expected = ExpectedStep { step_s: None, solo_s, fastest: None };
        // Alone they take 1 and 2 batches per second.
        assert_eq!(expected.efficiency(1.0 / 3.0), Some(1.0));
        assert_eq!(expected.efficiency(0.5), Some(2.0 / 3.0));
        assert_eq!(expected.efficiency(0.0), None);
        let solo_s = vec![1.0, f64::INFINITY];
        assert_eq!(ExpectedStep { solo_s, ..expected }.efficiency(0.5), None);
    }

    #[test]
    fn the_fastest_device_alone_holds_the_model() {
        let fastest = |solo_s: &[f64]| fastest_alone(&["a", "b", "c"].map(String::from), solo_s);
        let found = fastest(&[2.0, 1.0, 1.0]).unwrap();
        assert_eq!((found.name.as_str(), found.step_s), ("b", 1.0));
        assert_eq!(fastest(&[f64::INFINITY; 3]), None);
    }
}
