//! Ends of a run by an error after which it can be continued: adds the last checkpoint and the
//! command that continues the run.

use std::path::PathBuf;

use super::RunOptions;
use crate::checkpoint::{Checkpoint, Store};
use crate::continuation::ResumeCommand;
use crate::error::{LeftOut, TrainError};
use crate::runtime::placement::candidates::adapters_for;
use crate::spec::RunSpec;
use potluck_kernels::device::selector_without;

/// Devices named by the command if all devices of the run are left out.
const ANY_DEVICES: &str = "auto";

/// Adds the last checkpoint and the command that continues the run from it to an error. `failed` is
/// the position of the failed device among the run's: the command leaves it out, and also devices
/// that then fit in no pipeline or tensor group.
pub(super) fn with_command(
    cause: TrainError,
    checkpoint: PathBuf,
    mut command: ResumeCommand,
    spec: &RunSpec,
    failed: Option<usize>,
) -> TrainError {
    let mut left_out = LeftOut::None;
    let mut spare = 0;
    if let Some(position) = failed {
        let selector = &spec.devices;
        let others = selector_without(selector, position, &adapters_for(selector));
        left_out = if others.is_some() { LeftOut::Failed } else { LeftOut::All };
        let others = others.unwrap_or_else(|| ANY_DEVICES.into());
        let left = spec.left_on(others);
        spare = left.spare;
        command = spec.resume_on(left, command);
    }
    let command = Box::new(command);
    TrainError::Stopped { cause: Box::new(cause), checkpoint, command, left_out, spare }
}

/// Error of a start whose devices failed before the run began: with the command, if `resumed`
/// continues the run in its directory.
pub(super) fn at_start(
    cause: TrainError,
    spec: &RunSpec,
    options: &RunOptions,
    resumed: Option<&Checkpoint>,
) -> TrainError {
    let Some(resumed) = resumed else { return cause };
    let store = Store::open_to_read(&options.out);
    let step = resumed.meta.step;
    if !cause.can_go_on() || !store.path(step).is_dir() {
        return cause;
    }
    // Later checkpoints are set aside only by a start that succeeds.
    let is_last = store.steps().is_ok_and(|steps| steps.last() == Some(&step));
    let from = if is_last { options.out.clone() } else { store.path(step) };
    let settings = options.unsaved.clone();
    let command = ResumeCommand { settings, ..ResumeCommand::of_run(&from) };
    let failed = cause.failed_rank().map(|rank| rank.index());
    with_command(cause, store.path(step), command, spec, failed)
}
