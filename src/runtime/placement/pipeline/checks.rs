//! Checks of requested pipelines, before any device is opened.

use super::{PlannedPipelines, RequestedPipelines};
use crate::graph::Graph;
use crate::parallel::pipeline::micro_batch_counts;
use crate::parallel::schedule::require_fit;
use crate::parallel::{PipelineSchedule, PipelineShape};
use crate::planner::cut::of_counts;
use crate::runtime::RuntimeError;

fn refused<T>(why: String) -> Result<T, RuntimeError> {
    Err(RuntimeError::InvalidRequest(why))
}

/// Checks that the devices make whole pipelines.
///
/// # Errors
/// Returns `RuntimeError::InvalidRequest` with the numbers of devices that would.
pub fn require_devices(requested: &RequestedPipelines, devices: usize) -> Result<(), RuntimeError> {
    let stages = requested.stages;
    if devices > 0 && devices.is_multiple_of(stages) {
        return Ok(());
    }
    let (fewer, more) = (devices / stages * stages, devices.div_ceil(stages).max(1) * stages);
    let others = match fewer {
        0 => format!("choose {more}"),
        _ => format!("choose {fewer} or {more}"),
    };
    let are =
        if devices == 1 { "there is 1 device" } else { &format!("there are {devices} devices") };
    refused(format!(
        "parallel.pipeline = {stages} needs a multiple of {stages} devices, and {are}: {others} \
         with --devices (NAME*K is K ranks on one device), or another --pipeline"
    ))
}

/// Checks that a model can be cut as requested; `blocks` is `parallel.stages`.
///
/// # Errors
/// Returns `RuntimeError::InvalidRequest` if the model has no blocks or too few, or if `blocks` do
/// not add up.
pub fn require_model(
    requested: &RequestedPipelines,
    graph: &Graph,
    blocks: &[u32],
) -> Result<(), RuntimeError> {
    let count = graph.blocks.len();
    let parts = requested.stages * requested.chunks;
    if count < 2 {
        return refused(
            "this model has no blocks, so it cannot be cut into the stages of a pipeline; leave \
             parallel.pipeline at 1"
                .into(),
        );
    }
    if count < parts {
        let pieces = match requested.chunks {
            1 => format!("{parts} stages"),
            chunks => format!("{} stages of {chunks} model chunks", requested.stages),
        };
        return refused(format!(
            "a model of {count} blocks cannot be cut into {pieces}: lower --pipeline or \
             parallel.chunks to at most {count} parts, or raise model.layers"
        ));
    }
    if blocks.is_empty() {
        return Ok(());
    }
    let checked = of_counts(blocks, count as u32, parts);
    checked.map(drop).or_else(|error| refused(error.to_string()))
}

/// Checks that the micro-batches of each pipeline fit its schedule; returns a note if they are so
/// few that stages stay idle most of the time.
///
/// # Errors
/// Returns `RuntimeError::InvalidRequest` with the nearest numbers that fit.
pub fn require_micro_batches(
    requested: &RequestedPipelines,
    planned: &PlannedPipelines,
) -> Result<Option<String>, RuntimeError> {
    let counts = micro_batch_counts(&planned.shares);
    for (count, share) in counts.iter().zip(&planned.shares) {
        let shape = PipelineShape {
            stages: requested.stages,
            chunks: requested.chunks,
            micro_batches: *count,
        };
        if let Err(error) = require_fit(requested.schedule, shape) {
            let (samples, rows) = (share.count, share.micro_batch);
            return refused(format!(
                "{error} ({samples} samples in micro-batches of {rows}: set train.batch or \
                 train.micro_batch)"
            ));
        }
    }
    let fewest = counts.iter().copied().min().unwrap_or(0);
    let is_few = fewest < requested.stages && requested.schedule != PipelineSchedule::Interleaved;
    Ok(is_few.then(|| {
        format!(
            "{fewest} micro-batch{} keep{} {} stages idle most of the time; lower --micro-batch \
             so that there are more",
            if fewest == 1 { "" } else { "es" },
            if fewest == 1 { "s" } else { "" },
            requested.stages
        )
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Builder, Init};
    use crate::parallel::contiguous_shares;
    use crate::runtime::placement::pipeline::pipelines_of;

    fn requested(stages: usize, chunks: usize) -> RequestedPipelines {
        let schedule = match chunks {
            1 => PipelineSchedule::OneFOneB,
            _ => PipelineSchedule::Interleaved,
        };
        RequestedPipelines { stages, chunks, schedule }
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
        assert!(
            error(3, 4).contains("a multiple of 3 devices, and there are 4 devices: choose 3 or 6")
        );
        assert!(error(2, 1).contains("there is 1 device: choose 2 with"), "{}", error(2, 1));
    }

    #[test]
    fn models_have_enough_blocks_and_stages_add_up() {
        assert!(require_model(&requested(2, 2), &graph(4), &[]).is_ok());
        assert!(require_model(&requested(2, 1), &graph(6), &[4, 2]).is_ok());
        let error = |requested: RequestedPipelines, blocks: usize, counts: &[u32]| {
            require_model(&requested, &graph(blocks), counts).unwrap_err().to_string()
        };
        assert!(error(requested(2, 1), 1, &[]).contains("no blocks"));
        assert!(error(requested(7, 1), 6, &[]).contains("6 blocks cannot be cut into 7 stages"));
        assert!(error(requested(2, 4), 6, &[]).contains("2 stages of 4 model chunks"));
        assert!(error(requested(2, 1), 6, &[3, 2]).contains("add up to 6"));
    }

    #[test]
    fn interleaved_pipelines_have_whole_rounds_and_few_micro_batches_are_noted() {
        let planned = |samples: u32, rows: u32| PlannedPipelines {
            positions: vec![0, 1],
            stages: pipelines_of(&[vec![0..1, 1..2]], 2),
            shares: contiguous_shares(&[samples], &[rows]),
            schedule: PipelineSchedule::OneFOneB,
        };
        let error = require_micro_batches(&requested(2, 2), &planned(9, 3)).unwrap_err();
        assert!(error.to_string().contains("give 2 or 4"), "{error}");
        assert_eq!(require_micro_batches(&requested(2, 1), &planned(9, 3)).unwrap(), None);
        let note = require_micro_batches(&requested(2, 1), &planned(9, 9)).unwrap().unwrap();
        assert!(note.contains("1 micro-batch keeps 2 stages idle"), "{note}");
    }
}
