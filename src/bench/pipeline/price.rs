//! Prediction of a step of pipelines from measured times of blocks: the duration by simulation, and
//! the bubble by formula.

use super::PipelineCase;
use potluck_core::DType;
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::cut::BlockTimes;
use potluck_parallel::planner::cut::crossing_elements;
use potluck_parallel::planner::price::{LinkModel, price};
use potluck_parallel::schedule::{StageTimes, ideal_bubble};
use potluck_train::TrainError;
use potluck_train::runtime::RuntimeError;
use potluck_train::runtime::placement::laid_out::lay_out;
use potluck_train::runtime::placement::pipeline::MeasuredBlocks;
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
    let links = links(&positions, measured, &crossing_elements(pipelines.plan()));
    let chunks: Vec<_> = pipelines.stages.iter().map(|of| of.chunks.clone()).collect();
    let mesh = placed.placement.mesh;
    let shares = pipelines.shares.clone();
    let planned = Arrangement::of(mesh, positions, &chunks, shares, pipelines.schedule);
    let laid_out = lay_out(request, &planned)?;
    let found = price(&laid_out.written, &times, &links)
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

/// Links between ranks: an element takes the seconds of both sides of a cut.
fn links(
    positions: &[usize],
    measured: &MeasuredBlocks,
    crossing: &[usize],
) -> Vec<Vec<LinkModel>> {
    let mut element_s = Vec::with_capacity(positions.len());
    for position in positions {
        let mut seconds = 0.0;
        let mut elements = 0;
        for (cut_s, count) in measured.cut_s[*position].iter().zip(crossing) {
            seconds += cut_s;
            elements += count;
        }
        element_s.push(if elements > 0 { seconds / elements as f64 } else { 0.0 });
    }
    let mut links = Vec::with_capacity(positions.len());
    for from_s in &element_s {
        links.push(element_s.iter().map(|to_s| link(from_s + to_s)).collect());
    }
    links
}

fn link(element_s: f64) -> LinkModel {
    if element_s > 0.0 {
        LinkModel { latency_s: 0.0, bytes_per_s: DType::F32.bytes() as f64 / element_s }
    } else {
        LinkModel::INSTANT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_takes_what_both_of_its_ends_take() {
        let measured = MeasuredBlocks {
            rows: 1,
            kinds: vec![0, 1],
            times: Vec::new(),
            cut_s: vec![vec![0.0, 1.0, 2.0], vec![0.0; 3]],
            transfers_s: Vec::new(),
            refusals: Vec::new(),
        };
        let links = links(&[1, 0], &measured, &[0, 10, 20]);
        let rate = |from: usize, to: usize| links[from][to].bytes_per_s;
        assert_eq!(links[0][0], LinkModel::INSTANT);
        // 0.1 s per element on one side, or on both.
        assert!((rate(0, 1) - 40.0).abs() < 1e-9 && (rate(1, 0) - 40.0).abs() < 1e-9);
        assert!((rate(1, 1) - 20.0).abs() < 1e-9);
    }
}
