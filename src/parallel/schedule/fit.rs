//! Shapes of pipelines that a schedule can run.

use super::{PipelineSchedule, PipelineShape};

/// Shape of a pipeline that a schedule cannot run, with the nearest that it can.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    #[error("a pipeline of 0 stages runs nothing; give at least 1")]
    NoStages,
    #[error("a stage of 0 model chunks runs nothing; give at least 1")]
    NoChunks,
    #[error("a pipeline without micro-batches runs nothing; give at least 1")]
    NoMicroBatches,
    #[error("interleaved needs at least 2 model chunks per stage and there is 1; give 2")]
    TooFewChunks,
    #[error(
        "{schedule} runs 1 model chunk per stage and there are {chunks}; give 1, or the schedule \
         interleaved"
    )]
    TooManyChunks { schedule: PipelineSchedule, chunks: usize },
    #[error(
        "interleaved needs a multiple of {stages} micro-batches and there {}; give {}",
        count(*.micro_batches),
        nearest_multiples(*.stages, *.micro_batches)
    )]
    PartialRound { stages: usize, micro_batches: usize },
}

/// Refuses shapes that the schedule cannot run.
///
/// # Errors
///
/// A part of the shape is zero, only one of the schedule and the shape has several model chunks
/// per stage, or the micro-batches do not fill the rounds of the interleaved schedule.
pub fn require_fit(schedule: PipelineSchedule, shape: PipelineShape) -> Result<(), ScheduleError> {
    let PipelineShape { stages, chunks, micro_batches } = shape;
    if stages == 0 {
        return Err(ScheduleError::NoStages);
    }
    if chunks == 0 {
        return Err(ScheduleError::NoChunks);
    }
    if micro_batches == 0 {
        return Err(ScheduleError::NoMicroBatches);
    }
    match schedule {
        PipelineSchedule::Interleaved if chunks == 1 => Err(ScheduleError::TooFewChunks),
        PipelineSchedule::Interleaved if !micro_batches.is_multiple_of(stages) => {
            Err(ScheduleError::PartialRound { stages, micro_batches })
        }
        PipelineSchedule::GPipe | PipelineSchedule::OneFOneB | PipelineSchedule::ZeroBubble
            if chunks > 1 =>
        {
            Err(ScheduleError::TooManyChunks { schedule, chunks })
        }
        _ => Ok(()),
    }
}

/// Count with its verb.
fn count(micro_batches: usize) -> String {
    let verb = if micro_batches == 1 { "is" } else { "are" };
    format!("{verb} {micro_batches}")
}

/// Nearest multiples of `stages` below and above; only the one above if 0 is below.
fn nearest_multiples(stages: usize, micro_batches: usize) -> String {
    let below = micro_batches / stages * stages;
    let above = below.saturating_add(stages);
    if below == 0 { format!("{above}") } else { format!("{below} or {above}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The refusal of a shape, or an empty text.
    fn refusal(
        schedule: PipelineSchedule,
        stages: usize,
        chunks: usize,
        micro_batches: usize,
    ) -> String {
        let shape = PipelineShape { stages, chunks, micro_batches };
        require_fit(schedule, shape).err().map(|e| e.to_string()).unwrap_or_default()
    }

    #[test]
    fn shapes_that_fit_pass() {
        for schedule in
            [PipelineSchedule::GPipe, PipelineSchedule::OneFOneB, PipelineSchedule::ZeroBubble]
        {
            for (stages, micro_batches) in [(1, 1), (3, 1), (3, 4), (4, 16)] {
                assert_eq!(refusal(schedule, stages, 1, micro_batches), "");
            }
        }
        for (stages, chunks, micro_batches) in [(1, 2, 5), (3, 2, 3), (4, 4, 16)] {
            assert_eq!(refusal(PipelineSchedule::Interleaved, stages, chunks, micro_batches), "");
        }
    }

    #[test]
    fn refusals_say_the_nearest_values_that_fit() {
        let interleaved =
            |stages, chunks, count| refusal(PipelineSchedule::Interleaved, stages, chunks, count);
        let rounds = "interleaved needs a multiple of 3 micro-batches and there";
        assert_eq!(interleaved(3, 2, 1), format!("{rounds} is 1; give 3"));
        assert_eq!(interleaved(3, 2, 2), format!("{rounds} are 2; give 3"));
        assert_eq!(interleaved(3, 2, 4), format!("{rounds} are 4; give 3 or 6"));
        assert_eq!(interleaved(3, 2, 8), format!("{rounds} are 8; give 6 or 9"));
        let one = "interleaved needs at least 2 model chunks per stage and there is 1; give 2";
        assert_eq!(interleaved(3, 1, 3), one);
        for schedule in
            [PipelineSchedule::GPipe, PipelineSchedule::OneFOneB, PipelineSchedule::ZeroBubble]
        {
            let many = format!(
                "{schedule} runs 1 model chunk per stage and there are 2; give 1, or the schedule \
                 interleaved"
            );
            assert_eq!(refusal(schedule, 3, 2, 6), many);
        }
    }

    #[test]
    fn nothing_to_run_is_refused() {
        for schedule in PipelineSchedule::ALL {
            let zero = |stages, chunks, count| refusal(schedule, stages, chunks, count);
            assert_eq!(zero(0, 1, 1), "a pipeline of 0 stages runs nothing; give at least 1");
            assert_eq!(zero(1, 0, 1), "a stage of 0 model chunks runs nothing; give at least 1");
            let none = "a pipeline without micro-batches runs nothing; give at least 1";
            assert_eq!(zero(2, 2, 0), none);
        }
    }
}
