//! Devices that are left when one has failed, and the pipelines that they can make.

use super::continuation::pipelines_on;
use crate::runtime::placement::candidates::{adapters_for, selections};
use potluck_kernels::device::{selector_of, selector_without};
use potluck_parallel::PipelineOptions;

/// Devices to go on with.
#[derive(Debug, PartialEq)]
pub struct LeftDevices {
    /// Selector of the devices.
    pub devices: String,
    /// Stages of their pipelines, if there were pipelines.
    pub stages: Option<usize>,
    /// Number of devices that are left over.
    pub spare: usize,
    /// True if the selector is that of the run: what was lost is on other nodes.
    pub(crate) are_as_typed: bool,
}

impl LeftDevices {
    /// Returns the devices that a selector chooses without the one at a position, in pipelines if
    /// there were any; `None` if there is no other.
    pub fn without(selector: &str, position: usize, pipelines: &PipelineOptions) -> Option<Self> {
        let left = selector_without(selector, position, &adapters_for(selector))?;
        Some(Self::of(left, pipelines))
    }

    /// Returns those of a selector's devices that continue pipelines.
    pub fn of(devices: String, pipelines: &PipelineOptions) -> Self {
        let count = selections(&devices).map_or(1, |left| left.len());
        let Some((used, stages)) = pipelines_on(count, pipelines) else {
            return Self { devices, stages: None, spare: 0, are_as_typed: false };
        };
        if used == count {
            return Self { devices, stages: Some(stages), spare: 0, are_as_typed: false };
        }
        let positions: Vec<usize> = (0..used).collect();
        match selector_of(&devices, &positions, &adapters_for(&devices)) {
            Some(devices) => {
                Self { devices, stages: Some(stages), spare: count - used, are_as_typed: false }
            }
            // Devices that cannot be named are all used.
            None => Self { devices, stages: Some(1), spare: 0, are_as_typed: false },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_without_a_stage_are_left_out() {
        let run = |stages| PipelineOptions { stages, ..PipelineOptions::default() };
        let left = |devices: &str, stages| {
            let left = LeftDevices::of(devices.into(), &run(stages));
            (left.devices, left.stages, left.spare)
        };
        assert_eq!(left("cpu*3", 2), ("cpu*2".into(), Some(2), 1));
        assert_eq!(left("cpu*4", 2), ("cpu*4".into(), Some(2), 0));
        assert_eq!(left("cpu*3", 3), ("cpu*3".into(), Some(3), 0));
        assert_eq!(left("cpu", 2), ("cpu".into(), Some(1), 0));
        assert_eq!(left("cpu*3", 1), ("cpu*3".into(), None, 0));
    }
}
