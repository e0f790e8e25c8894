//! Command that continues a run, for messages.

use std::fmt;
use std::path::{Path, PathBuf};

use potluck_core::format::shell_word;
use potluck_parallel::{PipelineOptions, PipelineSchedule, TensorOptions};

/// Command line that continues a run, or starts one from a checkpoint. Its display is text for a
/// POSIX shell.
#[derive(Clone, Debug, PartialEq)]
pub struct ResumeCommand {
    /// Directory of the run or of a checkpoint.
    pub from: PathBuf,
    /// Directory of the new run, if it differs.
    pub out: Option<PathBuf>,
    /// Devices to continue on, if they differ from the run's.
    pub devices: Option<String>,
    /// Stages of the pipelines on those devices, if the run has pipelines.
    pub pipeline: Option<usize>,
    /// Ranks of the tensor groups on those devices, if the run has tensor groups.
    pub tensor: Option<usize>,
    /// Number of nodes, if the run has several and all are still available.
    pub nodes: Option<usize>,
    /// Further keys to set, with their values in TOML.
    pub settings: Vec<(&'static str, String)>,
}

impl ResumeCommand {
    /// Returns the command that continues the run in a directory with the settings of its last
    /// checkpoint.
    pub fn of_run(run: &Path) -> Self {
        Self {
            from: run.into(),
            out: None,
            devices: None,
            pipeline: None,
            tensor: None,
            nodes: None,
            settings: Vec::new(),
        }
    }
}

impl fmt::Display for ResumeCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "potluck train --resume {}", shell_word(&argument(&self.from)))?;
        if let Some(out) = &self.out {
            write!(f, " --out {}", shell_word(&argument(out)))?;
        }
        if let Some(devices) = &self.devices {
            write!(f, " --devices {}", shell_word(devices))?;
        }
        if let Some(stages) = self.pipeline {
            write!(f, " --pipeline {stages}")?;
        }
        if let Some(ranks) = self.tensor {
            write!(f, " --tensor {ranks}")?;
        }
        if let Some(nodes) = self.nodes {
            write!(f, " --nodes {nodes}")?;
        }
        for (key, value) in &self.settings {
            write!(f, " --set {}", shell_word(&format!("{key}={value}")))?;
        }
        Ok(())
    }
}

/// Pipelines that continue a run whose own do not fit this number of devices: how many devices they
/// use, and the stages of each. The number of stages is the largest up to the run's that divides
/// the devices. If only 1 does, it is the largest that the devices allow, and surplus devices are
/// unused, because the model may fit on no single device. With the interleaved schedule the stages
/// divide the run's, so that the micro-batches still fill rounds. If no such pipeline exists, it is
/// 1 stage on all devices. `None` if the run has no pipelines.
pub(crate) fn pipelines_on(devices: usize, run: &PipelineOptions) -> Option<(usize, usize)> {
    let stages = run.stages as usize;
    if stages <= 1 {
        return None;
    }
    let is_any = run.schedule != PipelineSchedule::Interleaved;
    let mut largest = None;
    let mut dividing = None;
    for count in (2..=stages.min(devices)).rev() {
        if is_any || stages.is_multiple_of(count) {
            largest = largest.or(Some(count));
            if devices.is_multiple_of(count) {
                dividing = dividing.or(Some(count));
            }
        }
    }
    let chosen = dividing.or(largest).unwrap_or(1);
    Some((devices / chosen * chosen, chosen))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartsOn {
    /// Number of devices used.
    pub used: usize,
    pub stages: Option<usize>,
    /// Ranks of tensor groups, if the run has tensor groups.
    pub tensor: Option<usize>,
}

/// Pipelines and tensor groups that continue a run whose own do not fit this number of devices.
/// Tensor groups have the largest size up to the run's that divides the devices, or else the
/// largest that the devices allow; they take the place of devices in [`pipelines_on`]. `None` if
/// the run has neither.
pub(crate) fn parts_on(
    devices: usize,
    pipelines: &PipelineOptions,
    tensor: &TensorOptions,
) -> Option<PartsOn> {
    let most = (tensor.ranks as usize).min(devices).max(1);
    let dividing = (2..=most).rev().find(|ranks| devices.is_multiple_of(*ranks));
    let ranks = dividing.unwrap_or(most);
    let groups = devices / ranks;
    let of_tensor = tensor.has_groups().then_some(ranks);
    match pipelines_on(groups, pipelines) {
        Some((used, stages)) => {
            Some(PartsOn { used: used * ranks, stages: Some(stages), tensor: of_tensor })
        }
        None if of_tensor.is_some() => {
            Some(PartsOn { used: groups * ranks, stages: None, tensor: of_tensor })
        }
        None => None,
    }
}

/// Path as an argument that is neither a flag nor the word `latest`.
fn argument(path: &Path) -> String {
    let text = path.display().to_string();
    let is_ambiguous = text.starts_with('-') || text == "latest";
    if is_ambiguous { format!("./{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(run: &str) -> ResumeCommand {
        ResumeCommand::of_run(Path::new(run))
    }

    #[test]
    fn words_are_quoted_where_a_shell_would_change_them() {
        let resume = |run: &str| of(run).to_string();
        assert_eq!(resume("runs/0001"), "potluck train --resume runs/0001");
        assert_eq!(resume("my run"), "potluck train --resume 'my run'");
        assert_eq!(resume("a'b$c"), r"potluck train --resume 'a'\''b$c'");
        assert_eq!(resume("latest"), "potluck train --resume ./latest");
        assert_eq!(resume("--x"), "potluck train --resume ./--x");
    }

    #[test]
    fn settings_follow_the_devices() {
        let settings = vec![
            ("train.steps", "9".to_string()),
            ("parallel.blocks_per_stage", "[2, 4]".to_string()),
        ];
        let command = ResumeCommand { settings, ..of("run") };
        let expected = "potluck train --resume run --set train.steps=9 --set \
                        'parallel.blocks_per_stage=[2, 4]'";
        assert_eq!(command.to_string(), expected);
        let devices = Some("cpu*3".to_string());
        let out = Some("new".into());
        let command = ResumeCommand { devices, out, pipeline: Some(2), ..command };
        let expected = "potluck train --resume run --out new --devices 'cpu*3' --pipeline 2 --set \
                        train.steps=9 --set 'parallel.blocks_per_stage=[2, 4]'";
        assert_eq!(command.to_string(), expected);
    }

    #[test]
    fn pipelines_fit_the_devices_that_are_left() {
        let run = |stages, schedule| PipelineOptions { stages, schedule, ..Default::default() };
        let on = |devices, stages| pipelines_on(devices, &run(stages, PipelineSchedule::GPipe));
        assert_eq!((on(1, 1), on(3, 1)), (None, None));
        assert_eq!((on(1, 2), on(2, 3)), (Some((1, 1)), Some((2, 2))));
        assert_eq!((on(3, 4), on(4, 2)), (Some((3, 3)), Some((4, 2))));
        // Surplus devices are left out; the whole model is not put on each.
        assert_eq!((on(3, 2), on(5, 4), on(7, 3)), (Some((2, 2)), Some((4, 4)), Some((6, 3))));
        let parts = |devices, stages, ranks| {
            let tensor = TensorOptions { ranks, ..TensorOptions::default() };
            let found = parts_on(devices, &run(stages, PipelineSchedule::GPipe), &tensor);
            found.map(|PartsOn { used, stages, tensor }| (used, stages, tensor))
        };
        assert_eq!((parts(3, 1, 1), parts(3, 2, 1)), (None, Some((2, Some(2), None))));
        assert_eq!(parts(7, 2, 2), Some((4, Some(2), Some(2))));
        assert_eq!(parts(7, 1, 2), Some((6, None, Some(2))));
        assert_eq!(parts(3, 2, 2), Some((2, Some(1), Some(2))));
        assert_eq!(parts(3, 1, 4), Some((3, None, Some(3))));
        assert_eq!(parts(5, 1, 3), Some((3, None, Some(3))));
        assert_eq!(parts(4, 1, 3), Some((4, None, Some(2))));
        assert_eq!(parts(1, 1, 4), Some((1, None, Some(1))));
        let rounds =
            |devices, stages| pipelines_on(devices, &run(stages, PipelineSchedule::Interleaved));
        assert_eq!((rounds(2, 3), rounds(2, 4)), (Some((2, 1)), Some((2, 2))));
        assert_eq!((rounds(3, 4), rounds(7, 6)), (Some((2, 2)), Some((6, 6))));
    }
}
