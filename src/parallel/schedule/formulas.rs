//! Memory and idle time of a schedule, by formulas. The tests of the schedules compare both with
//! the schedules' own lists, run by a simulator.

use super::{PipelineSchedule, PipelineShape};

/// Durations of one micro-batch's passes through a whole stage, all its chunks together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageTimes {
    pub forward: f64,
    pub backward_input: f64,
    pub backward_weight: f64,
}

/// Returns the most stashes that a stage holds at a time, each of one micro-batch in one model
/// chunk, from its forward pass to its last backward pass. The shape fits the schedule and has the
/// stage.
///
/// GPipe: section 2.3 of Huang et al. 2019 without recomputation; 1F1B: section 3.2 of Narayanan
/// et al. (PipeDream-flush) 2021; interleaved: its warm-up and one more (Megatron-LM, 2021);
/// ZB-H1: section 2.1 of Qi et al. 2023.
pub fn in_flight(schedule: PipelineSchedule, shape: PipelineShape, stage: usize) -> usize {
    let PipelineShape { stages, chunks, micro_batches } = shape;
    match schedule {
        PipelineSchedule::GPipe => micro_batches,
        PipelineSchedule::OneFOneB => micro_batches.min(stages - stage),
        PipelineSchedule::Interleaved => {
            let warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages;
            (chunks * micro_batches).min(warm_up + 1)
        }
        PipelineSchedule::ZeroBubble => micro_batches.min(stages),
    }
}

/// Returns the share of the step in which a stage is idle, if all stages take the same time and
/// transfers take none. The shape fits the schedule.
///
/// With `K` stages, `v` chunks, `M` micro-batches and the times `f`, `b` and `w`:
///
/// - GPipe and 1F1B: `(K-1) / (M+K-1)` (Huang et al. 2019; Narayanan et al. 2021);
/// - interleaved: `(K-1) / (vM+K-1)` (Narayanan et al., SC 2021);
/// - ZB-H1: `(K-1)(f+b-w) / (M(f+b+w) + (K-1)(f+b-w))` (Qi et al. 2023) for `M >= K`, `w <= f` and
///   `w <= b`. Otherwise the passes of gradients of parameters fill less: every stage is idle for
///   `(K-1)(f+b) - (min(M, K)-1) min(f, b, w)`, which is the same within those bounds.
pub fn ideal_bubble(schedule: PipelineSchedule, shape: PipelineShape, times: StageTimes) -> f64 {
    let PipelineShape { stages, chunks, micro_batches } = shape;
    let StageTimes { forward, backward_input, backward_weight } = times;
    let ramp = (stages - 1) as f64;
    let batches = micro_batches as f64;
    match schedule {
        PipelineSchedule::GPipe | PipelineSchedule::OneFOneB => ramp / (batches + ramp),
        PipelineSchedule::Interleaved => ramp / (chunks as f64 * batches + ramp),
        PipelineSchedule::ZeroBubble => {
            let filled = (micro_batches.min(stages) - 1) as f64;
            let filler = backward_weight.min(forward).min(backward_input);
            let idle = ramp * (forward + backward_input) - filled * filler;
            let busy = batches * (forward + backward_input + backward_weight);
            // Times of zero have no idle share: 0 rather than 0/0.
            if idle > 0.0 { idle / (busy + idle) } else { 0.0 }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: StageTimes =
        StageTimes { forward: 2.0, backward_input: 3.0, backward_weight: 1.0 };

    fn bubble(
        schedule: PipelineSchedule,
        stages: usize,
        chunks: usize,
        micro_batches: usize,
    ) -> f64 {
        ideal_bubble(schedule, PipelineShape { stages, chunks, micro_batches }, TIMES)
    }

    #[test]
    fn the_idle_shares_are_those_of_the_papers() {
        for schedule in [PipelineSchedule::GPipe, PipelineSchedule::OneFOneB] {
            assert_eq!(bubble(schedule, 4, 1, 8), 3.0 / 11.0);
            assert_eq!(bubble(schedule, 4, 1, 2), 3.0 / 5.0);
        }
        assert_eq!(bubble(PipelineSchedule::Interleaved, 4, 2, 8), 3.0 / 19.0);
        // 3 (2 + 3 - 1) = 12 idle beside 8 (2 + 3 + 1) = 48.
        assert_eq!(bubble(PipelineSchedule::ZeroBubble, 4, 1, 8), 12.0 / 60.0);
        // Two micro-batches fill once: 3 (2 + 3) - 1 = 14 idle beside 2 (2 + 3 + 1) = 12.
        assert_eq!(bubble(PipelineSchedule::ZeroBubble, 4, 1, 2), 14.0 / 26.0);
    }

    #[test]
    fn one_stage_is_never_idle() {
        for schedule in PipelineSchedule::ALL {
            let chunks = if schedule == PipelineSchedule::Interleaved { 2 } else { 1 };
            assert_eq!(bubble(schedule, 1, chunks, 4), 0.0);
        }
        let shape = PipelineShape { stages: 3, chunks: 1, micro_batches: 4 };
        let none = StageTimes { forward: 0.0, backward_input: 0.0, backward_weight: 0.0 };
        assert_eq!(ideal_bubble(PipelineSchedule::ZeroBubble, shape, none), 0.0);
    }

    #[test]
    fn stashes_in_flight_by_stage() {
        let of = |schedule, chunks| {
            let shape = PipelineShape { stages: 4, chunks, micro_batches: 8 };
            [0, 1, 2, 3].map(|stage| in_flight(schedule, shape, stage))
        };
        assert_eq!(of(PipelineSchedule::GPipe, 1), [8, 8, 8, 8]);
        assert_eq!(of(PipelineSchedule::OneFOneB, 1), [4, 3, 2, 1]);
        assert_eq!(of(PipelineSchedule::Interleaved, 2), [11, 9, 7, 5]);
        assert_eq!(of(PipelineSchedule::ZeroBubble, 1), [4, 4, 4, 4]);
    }
}
