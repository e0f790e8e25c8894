//! Prediction of a step of pipelines from measured times of blocks: the duration by simulation, and
//! the bubble by formula.

use super::PipelineCase;
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::cut::BlockTimes;
use potluck_parallel::schedule::{StageTimes, ideal_bubble};
use potluck_train::TrainError;
use potluck_train::runtime::RuntimeError;
use potluck_train::runtime::placement::laid_out::lay_out;
use potluck_train::runtime::placement::pipeline::{MeasuredBlocks, price_of};
use potluck_train::runtime::placement::types::{PlacedWorkers, PlacementRequest};

/// Predicted step of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PredictedStep {
    /// Seconds of the simulated step.
    pub seconds: f64,
    /// Bubble of the simulated step.
    pub bubble: f64,
    /// Bubble by formula.
    pub formula: f64,
}

/// Predicts the step of pipelines that were opened for a request.
pub(super) fn predict(
    request: &PlacementRequest,
    placed: &PlacedWorkers,
    measured: &MeasuredBlocks,
    case: &PipelineCase,
) -> Result<PredictedStep, TrainError> {
    let pipelines = &placed.pipelines;
    let positions: Vec<usize> = placed.placement.ranks.iter().map(|rank| rank.position).collect();
    let times: Vec<Vec<BlockTimes>> =
        positions.iter().map(|position| measured.times[*position].clone()).collect();
    let stage = mean_stage(placed, &times, case.shape.stages);
    let chunks: Vec<_> = pipelines.stages.iter().map(|of| of.chunks.clone()).collect();
    let mesh = placed.placement.mesh;
    let shares = pipelines.shares.clone();
    let planned = Arrangement::of(mesh, positions, &chunks, shares, pipelines.schedule);
    let laid_out = lay_out(request, &planned)?;
    let found = price_of(measured, &planned.positions, &laid_out)
        .map_err(|error| RuntimeError::InvalidRequest(error.to_string()))?;
    let formula = ideal_bubble(case.schedule, case.shape, stage);
    Ok(PredictedStep { seconds: found.seconds, bubble: found.bubble, formula })
}

/// Passes of the mean stage over a micro-batch.
fn mean_stage(placed: &PlacedWorkers, times: &[Vec<BlockTimes>], stages: usize) -> StageTimes {
    let mut forward = 0.0;
    let mut backward_input = 0.0;
    let mut backward_weight = 0.0;
    for (rank, times) in placed.placement.ranks.iter().zip(times) {
        for block in rank.blocks.iter().cloned().flatten() {
            let times = &times[block as usize];
            forward += times.forward_s;
            backward_input += times.backward_input_s;
            backward_weight += times.backward_weight_s;
        }
    }
    StageTimes {
        forward: forward / stages as f64,
        backward_input: backward_input / stages as f64,
        backward_weight: backward_weight / stages as f64,
    }
}
