//! Devices left after one has failed, and the pipelines and tensor groups that they can form.

use super::continuation::{PartsOn, parts_on};
use crate::runtime::placement::candidates::{adapters_for, selections};
use potluck_kernels::device::{selector_of, selector_without};
use potluck_parallel::{PipelineOptions, TensorOptions};

/// Devices to continue with.
#[derive(Debug, PartialEq)]
pub struct LeftDevices {
    /// Selector of the devices.
    pub devices: String,
    /// Stages of their pipelines, if the run has pipelines.
    pub stages: Option<usize>,
    /// Ranks of their tensor groups, if the run has tensor groups.
    pub tensor: Option<usize>,
    /// Number of unused devices.
    pub spare: usize,
    /// True if the selector is the run's own, because the lost devices are on other nodes.
    pub(crate) are_as_typed: bool,
}

impl LeftDevices {
    /// Returns the devices of a selector without the one at a position, in pipelines and tensor
    /// groups if the run has them; `None` if no other device is left.
    pub fn without(
        selector: &str,
        position: usize,
        pipelines: &PipelineOptions,
        tensor: &TensorOptions,
    ) -> Option<Self> {
        let left = selector_without(selector, position, &adapters_for(selector))?;
        Some(Self::of(left, pipelines, tensor))
    }

    /// Returns the devices of a selector that can continue the pipelines and tensor groups.
    pub fn of(devices: String, pipelines: &PipelineOptions, tensor: &TensorOptions) -> Self {
        let count = selections(&devices).map_or(1, |left| left.len());
        let all = Self { devices, stages: None, tensor: None, spare: 0, are_as_typed: false };
        let Some(PartsOn { used, stages, tensor }) = parts_on(count, pipelines, tensor) else {
            return all;
        };
        if used == count {
            return Self { stages, tensor, ..all };
        }
        let positions: Vec<usize> = (0..used).collect();
        match selector_of(&all.devices, &positions, &adapters_for(&all.devices)) {
            Some(devices) => Self { devices, stages, tensor, spare: count - used, ..all },
            // Devices that cannot be named are all used.
            None => Self { stages: stages.map(|_| 1), tensor: tensor.map(|_| 1), ..all },
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
            let left = LeftDevices::of(devices.into(), &run(stages), &TensorOptions::default());
            (left.devices, left.stages, left.spare)
        };
        assert_eq!(left("cpu*3", 2), ("cpu*2".into(), Some(2), 1));
        assert_eq!(left("cpu*4", 2), ("cpu*4".into(), Some(2), 0));
        assert_eq!(left("cpu*3", 3), ("cpu*3".into(), Some(3), 0));
        assert_eq!(left("cpu", 2), ("cpu".into(), Some(1), 0));
        assert_eq!(left("cpu*3", 1), ("cpu*3".into(), None, 0));
        let tensor = TensorOptions { ranks: 2, ..TensorOptions::default() };
        let groups = LeftDevices::of("cpu*7".into(), &run(2), &tensor);
        assert_eq!((&*groups.devices, groups.spare), ("cpu*4", 3));
        assert_eq!((groups.stages, groups.tensor), (Some(2), Some(2)));
    }
}
