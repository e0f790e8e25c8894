//! Parts of the report on an adapter: their order, their shares of the time, and the functions that
//! perform them.

use std::time::Duration;

use super::measures::Findings;
use super::workshop::{Halt, Workshop};
use super::{
    certification, endurance, facts, gpt2, gradients, memory, peaks, peer, ranks, robustness,
    submissions, training,
};

/// Part of the report.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum HardwarePart {
    /// Driver, limits, features, memory, configurations of cooperative matrices
    Facts,
    /// Every kernel against its reference, with the time that compiling takes
    Certification,
    /// The losses of 200 steps of the default model beside those of the CPU device
    Training,
    /// Peak rates, and matrix products with every tile
    Peaks,
    /// Steps of GPT-2 124M, kernels not timed and timed, and each kernel beside the roofline
    Gpt2,
    /// The gradients of GPT-2 124M, tensor by tensor, against those of the CPU device
    Gradients,
    /// The largest batch that trains, and the refusal of the next one
    Memory,
    /// Two ranks: the device twice, and the device with the CPU
    Ranks,
    /// The longest submissions, by the clock of the device
    Submissions,
    /// A large product with the checks of shaders and without them
    Robustness,
    /// Steps of the same model in PyTorch, if python3 has it
    Peer,
    /// Steps until the time is up, with an interruption by Ctrl-C and a resumption
    Endurance,
}

/// A part with its minutes of an hour, and the function that performs it.
pub struct PartPlan {
    pub part: HardwarePart,
    pub minutes: f64,
    pub perform: fn(&Workshop) -> Result<Findings, Halt>,
}

/// Minutes of the whole report, an upper bound of the sum over its parts.
pub const MINUTES: f64 = 60.0;

/// All parts in their order: those on which the others depend come first.
pub const PLANS: [PartPlan; 12] = [
    PartPlan { part: HardwarePart::Facts, minutes: 1.0, perform: facts::perform },
    PartPlan { part: HardwarePart::Certification, minutes: 5.0, perform: certification::perform },
    PartPlan { part: HardwarePart::Training, minutes: 3.0, perform: training::perform },
    PartPlan { part: HardwarePart::Peaks, minutes: 4.0, perform: peaks::perform },
    PartPlan { part: HardwarePart::Gpt2, minutes: 7.0, perform: gpt2::perform },
    PartPlan { part: HardwarePart::Gradients, minutes: 4.0, perform: gradients::perform },
    PartPlan { part: HardwarePart::Memory, minutes: 4.0, perform: memory::perform },
    PartPlan { part: HardwarePart::Ranks, minutes: 4.0, perform: ranks::perform },
    PartPlan { part: HardwarePart::Submissions, minutes: 4.0, perform: submissions::perform },
    PartPlan { part: HardwarePart::Robustness, minutes: 2.0, perform: robustness::perform },
    PartPlan { part: HardwarePart::Peer, minutes: 5.0, perform: peer::perform },
    PartPlan { part: HardwarePart::Endurance, minutes: 12.0, perform: endurance::perform },
];

impl PartPlan {
    /// Returns the time limit of the part, given the minutes for an adapter.
    pub fn time(&self, minutes: u32) -> Duration {
        Duration::from_secs_f64(60.0 * f64::from(minutes) * self.minutes / MINUTES)
    }
}

impl HardwarePart {
    /// Returns the name of the part for `--only` and for its files.
    pub fn name(self) -> String {
        let value = clap::ValueEnum::to_possible_value(&self);
        value.expect("no part is hidden").get_name().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_have_an_hour_together_and_each_its_share() {
        let sum: f64 = PLANS.iter().map(|plan| plan.minutes).sum();
        assert!(sum <= MINUTES, "{sum} minutes");
        assert_eq!(PLANS[1].time(60), Duration::from_secs(300));
        assert_eq!(PLANS[1].time(12), Duration::from_secs(60));
        let listed = <HardwarePart as clap::ValueEnum>::value_variants();
        assert!(PLANS.iter().map(|plan| &plan.part).eq(listed), "one plan for each part, in order");
        assert_eq!(HardwarePart::Gpt2.name(), "gpt2");
    }
}
