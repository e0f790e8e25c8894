//! Cost of devices that a run uses only because they were requested.

use potluck_core::format::milliseconds;

/// Ratio of the times of a step from which a note says that devices make it longer.
const TOLD_COST: f64 = 1.02;

/// Devices that a run uses although a step would be shorter without them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CostOfDevices {
    /// Indices of the devices.
    pub devices: Vec<usize>,
    /// Seconds of a step with them and without them.
    pub with_s: f64,
    pub without_s: f64,
}

impl CostOfDevices {
    /// Returns the cost of devices with these names as a sentence for the user.
    pub fn sentence(&self, names: &[&str]) -> String {
        let (slow, them, are) =
            if names.len() == 1 { ("slows", "it", "is") } else { ("slow", "them", "are") };
        format!(
            "{} {slow} training down ({} ms per step with {them}, {} ms without), but {are} used \
             as requested",
            names.join(", "),
            milliseconds(self.with_s),
            milliseconds(self.without_s)
        )
    }

    /// Returns true if a step is longer by more than two measurements of the same differ.
    pub fn is_worth_telling(&self) -> bool {
        self.with_s >= TOLD_COST * self.without_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_of_devices_is_a_sentence() {
        let cost = CostOfDevices { devices: vec![1], with_s: 0.412, without_s: 0.38 };
        let expected = "cpu slows training down (412 ms per step with it, 380 ms without), but is \
                        used as requested";
        assert_eq!(cost.sentence(&["cpu"]), expected);
        let both = cost.sentence(&["cpu", "Intel UHD 620"]);
        assert!(both.starts_with("cpu, Intel UHD 620 slow training down (412 ms"), "{both}");
        assert!(cost.is_worth_telling());
        assert!(!CostOfDevices { with_s: 0.2464, without_s: 0.2460, ..cost }.is_worth_telling());
    }
}
