//! Ends of a run by an error after which it can go on: with the last checkpoint and the command
//! that continues it.

use std::path::PathBuf;

use super::RunOptions;
use crate::checkpoint::{Checkpoint, Store};
use crate::device::selector_without;
use crate::runtime::placement::assemble::{adapters_for, selections};
use crate::train::continuation::{ResumeCommand, stages_on};
use crate::train::error::TrainError;
use crate::train::spec::RunSpec;

/// Devices that the command names if those of the run are all left out.
const ANY_DEVICES: &str = "auto";

/// Returns an error with the last checkpoint and the command that continues the run from it. If
/// `failed` is the position among its devices of the one that failed, the command leaves it out.
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
    let devices = left.map(|left| left.unwrap_or_else(|| ANY_DEVICES.into()));
    let count = |devices: &String| selections(devices).map_or(1, |left| left.len());
    let pipeline =
        devices.as_ref().and_then(|left| stages_on(count(left), &spec.parallel.pipeline));
    let command = Box::new(ResumeCommand { devices, pipeline, ..command });
    TrainError::Stopped { cause: Box::new(cause), checkpoint, command, left_out }
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
