//! Checks of requested pipelines before a device is opened.

use crate::runtime::RuntimeError;
use crate::runtime::placement::laid_out::cannot_divide;
use crate::runtime::placement::requested_pipelines::RequestedPipelines;
use potluck_core::format::counted;
use potluck_core::{Setting, Wording};
use potluck_graph::Graph;
use potluck_parallel::pipeline::micro_batch_counts;
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::cut::of_counts;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::schedule::{ScheduleError, require_fit};
use potluck_parallel::{PipelineSchedule, PipelineShape};

/// Checks that the number of devices fits the pipelines.
///
/// # Errors
/// Returns `RuntimeError::Unplaceable` with the number of devices.
pub fn require_devices(requested: &RequestedPipelines, devices: usize) -> Result<(), RuntimeError> {
    let RequestedPipelines { stages, tensor, .. } = *requested;
    let multiple = requested.devices_per_pipeline();
    if devices > 0 && devices.is_multiple_of(multiple) {
        return Ok(());
    }
    let asked = match (stages, tensor) {
        (_, 1) => Wording::new(format_args!("{} = {stages} needs", Setting::PipelineStages)),
        (1, _) => Wording::new(format_args!("{} = {tensor} needs", Setting::TensorRanks)),
        _ => Wording::new(format_args!(
            "{} = {stages} with {} = {tensor} need",
            Setting::PipelineStages,
            Setting::TensorRanks
        )),
    };
    Err(RuntimeError::unplaceable(format_args!(
        "{asked} a multiple of {multiple} devices, and there {} {devices}; change it, or the \
         number of {} (NAME*N is N ranks on one device)",
        if devices == 1 { "is" } else { "are" },
        Setting::Devices
    )))
}

/// Checks that a model can be cut and divided as requested.
///
/// # Errors
/// Returns `RuntimeError::Unplaceable` if the model has no blocks or too few, if the sum of the
/// given counts is wrong, or if its tensors cannot be divided.
pub(crate) fn require_model(
    requested: &RequestedPipelines,
    plans: &Plans,
) -> Result<(), RuntimeError> {
    require_blocks(requested, plans.model().whole())?;
    if requested.tensor > 1 {
        let shares = requested.given_tensor_shares();
        plans.of_group(&shares, 1).map_err(|error| cannot_divide(&error))?;
    }
    Ok(())
}

/// Checks that a model can be cut as requested.
fn require_blocks(requested: &RequestedPipelines, graph: &Graph) -> Result<(), RuntimeError> {
    let RequestedPipelines { stages, chunks, blocks, .. } = *requested;
    if stages == 1 {
        return Ok(());
    }
    let count = graph.blocks.len();
    let parts = stages * chunks;
    if count < 2 {
        return Err(RuntimeError::unplaceable(format_args!(
            "this model has no blocks, so it cannot be cut into the stages of a pipeline; leave \
             {} at 1",
            Setting::PipelineStages
        )));
    }
    if count < parts && chunks == 1 {
        return Err(RuntimeError::unplaceable(format_args!(
            "a model of {count} blocks cannot be cut into {stages} stages; lower {}, or give the \
             model more blocks",
            Setting::PipelineStages
        )));
    }
    if count < parts {
        return Err(RuntimeError::unplaceable(format_args!(
            "a model of {count} blocks cannot be cut into {parts} model chunks ({stages} stages x \
             {chunks} chunks); lower {} or {}, or give the model more blocks",
            Setting::PipelineStages,
            Setting::VirtualStages
        )));
    }
    if !blocks.is_empty() {
        of_counts(blocks, count as u32, parts).map_err(RuntimeError::unplaceable)?;
    }
    Ok(())
}

/// Checks that the micro-batches of each pipeline of several stages fit its schedule; returns a
/// note if stages are idle most of the time because there are few.
///
/// # Errors
/// Returns `RuntimeError::Unplaceable` with the number of micro-batches.
pub(crate) fn require_micro_batches(
    requested: &RequestedPipelines,
    planned: &Arrangement,
) -> Result<Option<String>, RuntimeError> {
    let RequestedPipelines { stages, chunks, schedule, .. } = *requested;
    if stages == 1 {
        return Ok(None);
    }
    let counts = micro_batch_counts(&planned.shares);
    for (&micro_batches, share) in counts.iter().zip(&planned.shares) {
        match require_fit(schedule, PipelineShape { stages, chunks, micro_batches }) {
            Ok(()) => {}
            Err(ScheduleError::PartialRound { .. }) => {
                return Err(RuntimeError::unplaceable(format_args!(
                    "{} in micro-batches of {} make {}, and interleaved needs a multiple of the \
                     {stages} stages; change {} or {}",
                    counted(share.count as usize, "sample", "samples"),
                    share.micro_batch,
                    counted(micro_batches, "micro-batch", "micro-batches"),
                    Setting::MicroBatchSize,
                    Setting::Batch
                )));
            }
            Err(error) => return Err(RuntimeError::unplaceable(error)),
        }
    }
    let fewest = counts.into_iter().min().unwrap_or(0);
    if fewest >= stages || schedule == PipelineSchedule::Interleaved {
        return Ok(None);
    }
    Ok(Some(format!(
        "{} keep{} {stages} stages idle most of the time; lower {} so that there are more",
        counted(fewest, "micro-batch", "micro-batches"),
        if fewest == 1 { "s" } else { "" },
        Setting::MicroBatchSize
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_core::setting::as_fields;
    use potluck_graph::{Builder, Init};
    use potluck_parallel::{Mesh, contiguous_shares};

    fn requested(stages: usize, chunks: usize) -> RequestedPipelines<'static> {
        let schedule = match chunks {
            1 => PipelineSchedule::OneFOneB,
            _ => PipelineSchedule::Interleaved,
        };
        let (tensor, tensor_shares) = (1, &[][..]);
        RequestedPipelines { stages, chunks, schedule, blocks: &[], tensor, tensor_shares }
    }

    fn graph(blocks: usize) -> Graph {
        let mut b = Builder::new();
        for block in 0..blocks {
            b.block(&block.to_string());
            b.parameter(&format!("w{block}"), &[1], Init::Zeros);
        }
        b.finish()
    }

    #[test]
    fn devices_make_whole_pipelines() {
        assert!(require_devices(&requested(2, 1), 4).is_ok());
        let error = |stages, devices| {
            require_devices(&requested(stages, 1), devices).unwrap_err().to_string()
        };
        let expected = "parallel.pipeline_stages = 3 needs a multiple of 3 devices, and there are \
                        4; change it, or the number of --devices (NAME*N is N ranks on one device)";
        assert_eq!(error(3, 4), expected);
        assert!(error(2, 1).contains("and there is 1; "), "{}", error(2, 1));
        let groups = RequestedPipelines { tensor: 2, ..requested(2, 1) };
        let both = require_devices(&groups, 6).unwrap_err().to_string();
        let expected = "parallel.pipeline_stages = 2 with parallel.tensor_ranks = 2 need a \
                        multiple of 4 devices, and there are 6; change it, or the number of ";
        assert!(both.starts_with(expected), "{both}");
        assert!(require_devices(&groups, 8).is_ok());
        let fields = as_fields(|| error(3, 4));
        assert!(fields.starts_with("PipelineOptions::stages = 3 needs "), "{fields}");
        assert!(fields.contains("number of TrainerOptions::devices ("), "{fields}");
    }

    #[test]
    fn models_have_enough_blocks_and_stages_add_up() {
        let cut = |requested: RequestedPipelines, model: usize, blocks: &[u32]| {
            require_blocks(&RequestedPipelines { blocks, ..requested }, &graph(model))
        };
        assert!(cut(requested(2, 2), 4, &[]).is_ok());
        assert!(cut(requested(2, 1), 6, &[4, 2]).is_ok());
        assert!(cut(requested(1, 1), 0, &[]).is_ok(), "it is not cut");
        let error = |requested: RequestedPipelines, model: usize, blocks: &[u32]| {
            cut(requested, model, blocks).unwrap_err().to_string()
        };
        assert!(error(requested(2, 1), 1, &[]).contains("no blocks"));
        let few = error(requested(7, 1), 6, &[]);
        let expected = "a model of 6 blocks cannot be cut into 7 stages; lower \
                        parallel.pipeline_stages, or give the model more blocks";
        assert_eq!(few, expected);
        let few = error(requested(2, 4), 6, &[]);
        let expected = "a model of 6 blocks cannot be cut into 8 model chunks (2 stages x 4 \
                        chunks); lower parallel.pipeline_stages or parallel.virtual_stages, or";
        assert!(few.starts_with(expected), "{few}");
        let sum = error(requested(2, 1), 6, &[3, 2]);
        assert!(sum.starts_with("parallel.blocks_per_stage = [3, 2] has 5 blocks"), "{sum}");
        assert!(sum.contains("add up to 6"), "{sum}");
        let large = error(requested(2, 1), 4, &[1, 65_536]);
        let expected = "parallel.blocks_per_stage = [1, 65536] has 65537 blocks and the model has \
                        4; give 2 ";
        assert!(large.starts_with(expected), "{large}");
        let chunks = error(requested(2, 2), 4, &[1, 1, 1, 2]);
        assert!(chunks.contains("give 4 numbers, each at least 1"), "{chunks}");
    }

    #[test]
    fn interleaved_pipelines_have_whole_rounds_and_few_micro_batches_are_noted() {
        let planned = |samples: u32, rows: u32| {
            let (mesh, chunks) = (Mesh::of_pipelines(1, 2), [vec![0..1, 1..2]]);
            let shares = contiguous_shares(&[samples], &[rows]);
            Arrangement::of(mesh, vec![0, 1], &chunks, shares, PipelineSchedule::OneFOneB)
        };
        let error = |stages, samples: u32, rows: u32| {
            let refused = require_micro_batches(&requested(stages, 2), &planned(samples, rows));
            refused.unwrap_err().to_string()
        };
        let expected = "12 samples in micro-batches of 4 make 3 micro-batches, and interleaved \
                        needs a multiple of the 2 stages; change train.micro_batch_size or \
                        train.batch";
        assert_eq!(error(2, 12, 4), expected);
        let one = error(2, 2, 2);
        assert!(one.contains("of 2 make 1 micro-batch, and"), "{one}");
        assert_eq!(require_micro_batches(&requested(2, 1), &planned(9, 3)).unwrap(), None);
        let note = require_micro_batches(&requested(2, 1), &planned(9, 9)).unwrap().unwrap();
        assert!(note.contains("1 micro-batch keeps 2 stages idle"), "{note}");
    }
}
