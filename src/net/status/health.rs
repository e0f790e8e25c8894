//! Health of a run, judged by its progress.

use std::time::{Duration, Instant};

use super::run_status::{RunPhase, RunStatus, STEPS_KEPT};

/// Factor of the slowest of the last steps after which a step is late.
const SLOWEST_STEPS: u32 = 10;

/// Health of a run at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// False if the last step is longer ago than a step may take.
    pub is_healthy: bool,
    /// Sentence about the run's activity, or its lack of progress.
    pub sentence: String,
    /// Time since the last sign of progress.
    pub silence: Duration,
    /// Longest such time of a healthy run; `None` in a phase without a limit.
    pub limit: Option<Duration>,
}

impl Health {
    /// Judges a run at the time `now`.
    ///
    /// Each step must end within the longest silence of a node plus ten times the slowest of the
    /// last steps. An evaluation shows its progress within that time too, and a save is done within
    /// the longest silence of a device. Phases before the first step and after the last one have no
    /// limit here: waits for devices end by themselves.
    pub fn of(status: &RunStatus, now: Instant) -> Self {
        let silence = now.saturating_duration_since(status.progressed);
        let slowest = status.step_times.iter().max().copied().unwrap_or_default();
        let of_steps = status.patience.node + SLOWEST_STEPS * slowest;
        let (limit, sentence) = match &status.phase {
            RunPhase::Rendezvous => (None, "waiting for the nodes of the run".into()),
            RunPhase::Opening => (None, "opening devices".into()),
            RunPhase::Tuning { device, done, total } => {
                (None, format!("certifying and timing kernels on {device}: {done} of {total}"))
            }
            RunPhase::Starting => {
                let done = status.done;
                (None, format!("starting behind step {done}: restoring, or compiling kernels"))
            }
            RunPhase::Training => (Some(of_steps), at_step(status, silence)),
            RunPhase::Evaluating { done, total } => {
                let step = status.done;
                (Some(of_steps), format!("evaluating step {step}: {done} of {total} samples"))
            }
            RunPhase::Saving => {
                let limit = of_steps.max(status.patience.device);
                (Some(limit), format!("saving step {}", status.done))
            }
            RunPhase::Finishing => (None, "all steps are done; the run is ending".into()),
            RunPhase::Over => (None, "the run is over".into()),
        };
        match limit {
            Some(limit) if silence > limit => {
                let silence_s = silence.as_secs_f64();
                let limit_s = limit.as_secs_f64();
                let basis = if status.phase == RunPhase::Saving {
                    "a device may be silent for so long".into()
                } else {
                    format!(
                        "{:.3} s of silence that a node may have, and {SLOWEST_STEPS} times the \
                         slowest of the last {STEPS_KEPT} steps, {:.3} s",
                        status.patience.node.as_secs_f64(),
                        slowest.as_secs_f64()
                    )
                };
                let sentence = format!(
                    "no progress for {silence_s:.1} s behind step {}, longer than {limit_s:.1} s \
                     ({basis})",
                    status.done
                );
                Self { is_healthy: false, sentence, silence, limit: Some(limit) }
            }
            limit => Self { is_healthy: true, sentence, silence, limit },
        }
    }
}

fn at_step(status: &RunStatus, silence: Duration) -> String {
    let of = match status.steps {
        Some(steps) => format!(" of {steps}"),
        None => String::new(),
    };
    format!("training: step {}{of}, {:.1} s ago", status.done, silence.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::run_status::tests::{status, step};
    use potluck_core::metrics::Event;

    #[test]
    fn a_run_is_healthy_until_no_step_has_come_for_its_limit() {
        let mut status = status();
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let judged = |status: &RunStatus, seconds| Health::of(status, at(seconds));
        let hours = 7200.0;
        let gathering = judged(&status, hours);
        assert_eq!((gathering.is_healthy, gathering.limit), (true, None));
        let device = String::from("a");
        status.take(&Event::Started { done: 0, steps: 9, device }, at(0.0));
        assert!(judged(&status, hours).is_healthy);
        status.take(&Event::Step(step(1)), at(100.0));
        // The first step is the only one known, though it has compiled kernels.
        assert_eq!(judged(&status, 100.0).limit, Some(Duration::from_secs(1030)));
        status.take(&Event::Step(step(2)), at(102.0));
        let limit = Some(Duration::from_secs(50));
        let healthy = judged(&status, 152.0);
        assert_eq!((healthy.is_healthy, healthy.limit), (true, limit));
        assert_eq!(healthy.sentence, "training: step 2 of 9, 50.0 s ago");
        let late = judged(&status, 152.1);
        assert_eq!((late.is_healthy, late.limit), (false, limit));
        assert_eq!(
            late.sentence,
            "no progress for 50.1 s behind step 2, longer than 50.0 s (30.000 s of silence that a \
             node may have, and 10 times the slowest of the last 64 steps, 2.000 s)"
        );
        // A save takes as long as a device may.
        status.take(&Event::Saving { step: 2 }, at(103.0));
        assert!(judged(&status, 403.0).is_healthy && !judged(&status, 403.1).is_healthy);
        status.take(&Event::Checkpoint { step: 2 }, at(103.0));
        assert!(!judged(&status, 160.0).is_healthy);
        let elapsed = Duration::ZERO;
        status.take(&Event::Evaluating { done: 1, total: 2, elapsed }, at(160.0));
        assert_eq!(judged(&status, 200.0).sentence, "evaluating step 2: 1 of 2 samples");
        assert!(!judged(&status, 211.0).is_healthy);
        status.take(&Event::Step(step(9)), at(161.0));
        assert!(judged(&status, hours).is_healthy);
    }
}
