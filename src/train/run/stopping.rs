//! Ends of a run by an error after which it can go on: with the last checkpoint and the command
//! that continues it.

use std::path::PathBuf;

use super::RunOptions;
use crate::checkpoint::{Checkpoint, Store};
use crate::device::{selector_of, selector_without};
use crate::runtime::placement::assemble::{adapters_for, selections};
use crate::runtime::placement::types::PipelineOptions;
use crate::train::continuation::{ResumeCommand, pipelines_on};
use crate::train::error::TrainError;
use crate::train::spec::RunSpec;

/// Devices that the command names if those of the run are all left out.
const ANY_DEVICES: &str = "auto";

/// Returns an error with the last checkpoint and the command that continues the run from it. If
/// `failed` is the position among its devices of the one that failed, the command leaves it out,
/// and those for which there is no stage.
pub(super) fn with_command(
    cause: TrainError,
    checkpoint: PathBuf,
    command: ResumeCommand,
    spec: &RunSpec,
    failed: Option<usize>,
) -> TrainError {
    let selector = &spec.devices;
    let left = failed.map(|position| selector_without(selector, position, &adapters_for(selector)));
    let left_out = matches!(left, Some(Some(_)));
    let left = left.map(|left| left.unwrap_or_else(|| ANY_DEVICES.into()));
    let left = left.map(|left| with_pipelines(left, &spec.parallel.pipeline));
    let spare = left.as_ref().map_or(0, |left| left.spare);
    let pipeline = left.as_ref().and_then(|left| left.stages);
    let devices = left.map(|left| left.devices);
    let command = Box::new(ResumeCommand { devices, pipeline, ..command });
    TrainError::Stopped { cause: Box::new(cause), checkpoint, command, left_out, spare }
}

/// Devices that a run goes on with.
#[derive(Debug, PartialEq)]
pub(super) struct LeftDevices {
    /// Selector of the devices.
    pub(super) devices: String,
    /// Stages of their pipelines, if the run has pipelines.
    pub(super) stages: Option<usize>,
    /// Number of devices that are left over.
    spare: usize,
}

/// Returns the devices with which a run goes on without the one at a position; `None` if there is
/// no other.
pub(super) fn devices_without(spec: &RunSpec, position: usize) -> Option<LeftDevices> {
    let selector = &spec.devices;
    let left = selector_without(selector, position, &adapters_for(selector))?;
    Some(with_pipelines(left, &spec.parallel.pipeline))
}

/// Returns those of a selector's devices that continue the pipelines of a run.
fn with_pipelines(devices: String, run: &PipelineOptions) -> LeftDevices {
    let count = selections(&devices).map_or(1, |left| left.len());
    let Some((used, stages)) = pipelines_on(count, run) else {
        return LeftDevices { devices, stages: None, spare: 0 };
    };
    let positions: Vec<usize> = (0..used).collect();
    let fewer = match used < count {
        true => selector_of(&devices, &positions, &adapters_for(&devices)),
        false => None,
    };
    match fewer {
        Some(devices) => LeftDevices { devices, stages: Some(stages), spare: count - used },
        // Devices that cannot be named are all used.
        None if used < count => LeftDevices { devices, stages: Some(1), spare: 0 },
        None => LeftDevices { devices, stages: Some(stages), spare: 0 },
    }
}

/// Returns the error of a start whose devices failed before there was a run: with the command if
/// the run in its directory is one that `resumed` continues.
pub(super) fn at_start(
    cause: TrainError,
    spec: &RunSpec,
    options: &RunOptions,
    resumed: Option<&Checkpoint>,
) -> TrainError {
    let store = Store::open_to_read(&options.out);
    let step = resumed.map(|checkpoint| checkpoint.meta.step);
    let step = step.filter(|step| cause.can_go_on() && store.path(*step).is_dir());
    let Some(step) = step else { return cause };
    let last = store.steps().ok().and_then(|steps| steps.last().copied());
    // Later checkpoints are set aside only by a start that succeeds.
    let from = if last == Some(step) { options.out.clone() } else { store.path(step) };
    let settings = options.unsaved.clone();
    let command = ResumeCommand { settings, ..ResumeCommand::of_run(&from) };
    let failed = cause.failed_rank().map(|rank| rank.index());
    with_command(cause, store.path(step), command, spec, failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_without_a_stage_are_left_out() {
        let run = |stages| PipelineOptions { stages, ..PipelineOptions::default() };
        let left = |devices: &str, stages| {
            let left = with_pipelines(devices.into(), &run(stages));
            (left.devices, left.stages, left.spare)
        };
        assert_eq!(left("cpu*3", 2), ("cpu*2".into(), Some(2), 1));
        assert_eq!(left("cpu*4", 2), ("cpu*4".into(), Some(2), 0));
        assert_eq!(left("cpu*3", 3), ("cpu*3".into(), Some(3), 0));
        assert_eq!(left("cpu", 2), ("cpu".into(), Some(1), 0));
        assert_eq!(left("cpu*3", 1), ("cpu*3".into(), None, 0));
    }
}
