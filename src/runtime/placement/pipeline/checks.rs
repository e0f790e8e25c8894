//! Checks of requested pipelines, before any device is opened.

use super::RequestedPipelines;
use crate::graph::Graph;
use crate::parallel::pipeline::micro_batch_counts;
use crate::parallel::schedule::{ScheduleError, require_fit};
use crate::parallel::{PipelineSchedule, PipelineShape, Share};
use crate::planner::cut::of_counts;
use crate::runtime::RuntimeError;
use crate::runtime::placement::arrangement::Arrangement;

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
        "parallel.pipeline_stages = {stages} needs a multiple of {stages} devices, and {are}: \
         {others} with --devices (NAME*N is N ranks on one device), another --pipeline, or \
         --pipeline 1 to run without a pipeline"
    ))
}

/// Checks that a model can be cut as requested; `blocks` is `parallel.blocks_per_stage`.
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
             parallel.pipeline_stages at 1"
                .into(),
        );
    }
    if count < parts {
        return refused(too_many_parts(requested, count));
    }
    if blocks.is_empty() {
        return Ok(());
    }
    let checked = of_counts(blocks, count as u32, parts);
    checked.map(drop).or_else(|error| refused(error.to_string()))
}

/// Advice for every kind of model: what its blocks are.
const MORE_BLOCKS: &str = "or give the model more blocks (a longer model.channels or model.hidden \
                           of a cnn, a longer model.hidden of an mlp, else a larger model.layers)";

/// Returns the error of a model of `count` blocks, which has too few for the requested stages, with
/// the nearest numbers that fit.
fn too_many_parts(requested: &RequestedPipelines, count: usize) -> String {
    let RequestedPipelines { stages, chunks, .. } = *requested;
    let cannot = format!("a model of {count} blocks cannot be cut into {stages} stages");
    if chunks == 1 {
        return format!("{cannot}: lower --pipeline to at most {count}, {MORE_BLOCKS}");
    }
    let cannot = format!("{cannot} of {chunks} model chunks");
    // As many chunks of fewer stages, and fewer chunks of as many stages.
    match (count / chunks, count / stages) {
        (_, fewer @ 2..) => format!("{cannot}: give --set virtual_stages={fewer}, {MORE_BLOCKS}"),
        (fewer @ 2.., _) => {
            format!("{cannot}: lower --pipeline to at most {fewer}, {MORE_BLOCKS}")
        }
        _ => format!("{cannot}: choose another --schedule, {MORE_BLOCKS}"),
    }
}

/// Checks that the micro-batches of each pipeline fit its schedule; returns a note if they are so
/// few that stages stay idle most of the time.
///
/// # Errors
/// Returns `RuntimeError::InvalidRequest` with the nearest numbers that fit.
pub fn require_micro_batches(
    requested: &RequestedPipelines,
    planned: &Arrangement,
) -> Result<Option<String>, RuntimeError> {
    let counts = micro_batch_counts(&planned.shares);
    for (count, share) in counts.iter().zip(&planned.shares) {
        let shape = PipelineShape {
            stages: requested.stages,
            chunks: requested.chunks,
            micro_batches: *count,
        };
        match require_fit(requested.schedule, shape) {
            Ok(()) => {}
            Err(ScheduleError::PartialRound { .. }) => {
                return refused(partial_round(requested.stages, share, &planned.shares));
            }
            Err(error) => return refused(error.to_string()),
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

/// Returns the error of a pipeline whose micro-batches do not fill the rounds of the interleaved
/// schedule, with the nearest `--micro-batch` below and above with which those of all pipelines do.
fn partial_round(stages: usize, share: &Share, shares: &[Share]) -> String {
    let Share { count: samples, micro_batch: rows, .. } = *share;
    let count_in = |share: &Share, rows: u32| share.count.div_ceil(rows.max(1));
    let needs = format!(
        "{} in micro-batches of {rows} make {}, and interleaved needs a multiple of the {stages} \
         stages",
        noun(samples, "sample", "samples"),
        noun(count_in(share, rows), "micro-batch", "micro-batches"),
    );
    let fits = |rows: &u32| {
        shares.iter().all(|share| (count_in(share, *rows) as usize).is_multiple_of(stages))
    };
    let most = shares.iter().map(|share| share.count).max().unwrap_or(0);
    let nearest = [(1..rows).rev().find(fits), (rows + 1..=most).find(fits)];
    // The smallest with the same number of micro-batches, which are nearly equal.
    let smallest = |rows: u32| {
        let smallest = samples.div_ceil(count_in(share, rows).max(1));
        if fits(&smallest) { smallest } else { rows }
    };
    let found = nearest.into_iter().flatten().map(smallest);
    let gives = |rows: u32| format!("--micro-batch {rows} gives {}", count_in(share, rows));
    let found: Vec<String> = found.map(gives).collect();
    match found.is_empty() {
        true => format!("{needs}, which no --micro-batch gives: set another --batch"),
        false => format!("{needs}: {}", found.join(", ")),
    }
}

/// Returns a count with its noun.
fn noun(count: u32, one: &str, several: &str) -> String {
    if count == 1 { format!("1 {one}") } else { format!("{count} {several}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Builder, Init};
    use crate::parallel::{Mesh, contiguous_shares};

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
        let one = error(2, 1);
        assert!(one.contains("there is 1 device: choose 2 with --devices (NAME*N is"), "{one}");
        assert!(one.ends_with("or --pipeline 1 to run without a pipeline"), "{one}");
    }

    #[test]
    fn models_have_enough_blocks_and_stages_add_up() {
        assert!(require_model(&requested(2, 2), &graph(4), &[]).is_ok());
        assert!(require_model(&requested(2, 1), &graph(6), &[4, 2]).is_ok());
        let error = |requested: RequestedPipelines, blocks: usize, counts: &[u32]| {
            require_model(&requested, &graph(blocks), counts).unwrap_err().to_string()
        };
        assert!(error(requested(2, 1), 1, &[]).contains("no blocks"));
        for (stages, chunks, blocks, advice) in [
            (
                7,
                1,
                6,
                "7 stages: lower --pipeline to at most 6, or give the model more blocks (a longer",
            ),
            (2, 4, 6, "2 stages of 4 model chunks: give --set virtual_stages=3, or give the model"),
            (4, 2, 6, "4 stages of 2 model chunks: lower --pipeline to at most 3, or give"),
            (2, 2, 3, "2 stages of 2 model chunks: choose another --schedule, or give"),
        ] {
            let error = error(requested(stages, chunks), blocks, &[]);
            let expected = format!("a model of {blocks} blocks cannot be cut into {advice}");
            assert!(error.contains(&expected), "{error}");
        }
        assert!(error(requested(2, 1), 6, &[3, 2]).contains("add up to 6"));
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
                        needs a multiple of the 2 stages: --micro-batch 3 gives 4, --micro-batch 6 \
                        gives 2";
        assert!(error(2, 12, 4).ends_with(expected), "{}", error(2, 12, 4));
        let one = error(2, 2, 2);
        assert!(one.contains("of 2 make 1 micro-batch, and"), "{one}");
        assert!(one.ends_with("a multiple of the 2 stages: --micro-batch 1 gives 2"), "{one}");
        // 5 samples are 5, 3, 3 (in micro-batches of 2), 2, 2 or 1.
        let none = error(4, 5, 2);
        assert!(none.ends_with("which no --micro-batch gives: set another --batch"), "{none}");
        assert_eq!(require_micro_batches(&requested(2, 1), &planned(9, 3)).unwrap(), None);
        let note = require_micro_batches(&requested(2, 1), &planned(9, 9)).unwrap().unwrap();
        assert!(note.contains("1 micro-batch keeps 2 stages idle"), "{note}");
    }
}
