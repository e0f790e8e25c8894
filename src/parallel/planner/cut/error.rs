//! Reasons for which there is no cut.

use potluck_core::Wording;
use potluck_core::format::counted;

/// Reason, as a sentence for the user, that there is no cut.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CutError {
    /// Fewer blocks than model chunks.
    #[error(
        "the model has {}, too few for {}",
        counted(*blocks, "block", "blocks"), chunks(*parts)
    )]
    Blocks { blocks: usize, parts: usize },
    /// Every cut is at a block where some device cannot be cut, or gives a device a block that it
    /// cannot run.
    #[error("no cut of the model is allowed: each has a block or a cut that is ruled out")]
    Forbidden,
    /// No cut fits in memory. Names the device, the stage, or both, for which not even the shortest
    /// run of blocks fits; neither if each has a run that fits.
    #[error("{}", memory(*device, *stage))]
    Memory { device: Option<usize>, stage: Option<usize> },
    /// Counts that the user gave and that do not cut this model.
    #[error("{0}")]
    Counts(Wording),
}

fn chunks(parts: usize) -> String {
    format!("a pipeline of {} with at least one block each", counted(parts, "part", "parts"))
}

fn memory(device: Option<usize>, stage: Option<usize>) -> String {
    match (device, stage) {
        (Some(device), Some(stage)) => {
            format!(
                "device {device} has no memory for even the shortest run of blocks as stage {stage}"
            )
        }
        (Some(device), None) => {
            format!(
                "device {device} has no memory for even the shortest run of blocks as any stage"
            )
        }
        (None, Some(stage)) => {
            format!("no device has memory for even the shortest run of blocks as stage {stage}")
        }
        (None, None) => "no cut of the model was found that fits in the devices' memory".into(),
    }
}
