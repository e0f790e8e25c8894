//! Meter of the cost of the steps of a run: sums over steps, and the times of the last ones.

use crate::cost_advice::{CostLayout, advice};
use crate::runtime::expected_step::ExpectedStep;
use crate::runtime::step::StepReport;
use potluck_core::arithmetic::median;
use potluck_core::metrics::{RankCost, RunCost, Unit};
use potluck_parallel::Placement;

/// First steps, which are not measured: they allocate.
const WARM_UP: u64 = 1;
/// Minimum number of measured steps.
const STEPS_MIN: u64 = 5;
/// Maximum number of steps whose times are kept.
const STEPS_KEPT: usize = 1000;

/// Meter of the steps of one placement, with the same shares and counted in one unit: it restarts
/// when these change. Its memory does not grow with the number of steps.
#[derive(Clone, Debug, Default)]
pub(crate) struct CostMeter {
    /// Samples of each rank for which the step was predicted: those at the start.
    predicted_shares: Vec<u32>,
    /// Samples of each rank in the measured steps.
    shares: Vec<u32>,
    /// True if the shares follow the speed of the devices.
    follows_speed: bool,
    /// Steps taken, with those that are not measured.
    taken: u64,
    steps: u64,
    /// Number of the last step.
    last: u64,
    /// Seconds of the last measured steps; the oldest one is overwritten.
    recent_s: Vec<f64>,
    /// Sums over all measured steps.
    wall_s: f64,
    units: f64,
    unit: Unit,
    communicated_s: f64,
    idle_s: f64,
    ranks: Vec<MeteredRank>,
}

/// Step to be measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MeteredStep {
    /// Number of the step.
    pub number: u64,
    /// Seconds of the step, with the wait for its samples.
    pub seconds: f64,
    pub unit: Unit,
    /// Tokens or samples of the step.
    pub count: u64,
}

/// Sums of the seconds of a rank over all measured steps.
#[derive(Clone, Debug, Default)]
struct MeteredRank {
    time_s: f64,
    collectives_s: f64,
    tensors_s: f64,
    verdict_s: f64,
}

impl CostMeter {
    /// Returns the meter of a placement that starts with these samples of each rank, which may
    /// follow the speed of the devices.
    pub fn new(shares: Vec<u32>, follows_speed: bool) -> Self {
        Self { shares: shares.clone(), predicted_shares: shares, follows_speed, ..Self::default() }
    }

    /// Adds a step of the several ranks of a placement; a single rank has no cost.
    pub fn add(&mut self, step: MeteredStep, placement: &Placement, reports: &[StepReport]) {
        if reports.len() < 2 {
            return;
        }
        let MeteredStep { number, seconds, unit, count } = step;
        let shares = placement.shares();
        if shares != self.shares || unit != self.unit {
            self.restart(shares, unit);
        }
        self.taken += 1;
        if self.taken <= WARM_UP {
            return;
        }
        if self.recent_s.len() < STEPS_KEPT {
            self.recent_s.push(seconds);
        } else {
            self.recent_s[self.steps as usize % STEPS_KEPT] = seconds;
        }
        self.steps += 1;
        self.last = number;
        self.wall_s += seconds;
        self.units += count as f64;
        self.ranks.resize_with(reports.len(), MeteredRank::default);
        for (sums, report) in self.ranks.iter_mut().zip(reports) {
            let time_s = report.time.as_secs_f64();
            sums.time_s += time_s;
            self.idle_s += report.idle() * time_s;
            sums.collectives_s += report.waits.collectives.as_secs_f64();
            sums.tensors_s += report.waits.tensors.as_secs_f64();
            sums.verdict_s += report.waits.verdict.as_secs_f64();
            self.communicated_s += report.communicated.as_secs_f64() / reports.len() as f64;
        }
    }

    /// Forgets the measured steps, for steps with other shares or in another unit.
    fn restart(&mut self, shares: Vec<u32>, unit: Unit) {
        let predicted_shares = std::mem::take(&mut self.predicted_shares);
        let follows_speed = self.follows_speed;
        *self = Self { predicted_shares, shares, follows_speed, unit, ..Self::default() };
    }

    /// Returns the cost of the steps; `None` after too few steps with the shares of the placement,
    /// and for a single rank. A prediction for other shares is left out.
    pub fn cost(&self, placement: &Placement, expected: Option<&ExpectedStep>) -> Option<RunCost> {
        if self.steps < STEPS_MIN || self.shares != placement.shares() {
            return None;
        }
        let is_predicted = self.shares == self.predicted_shares;
        let predicted = expected.filter(|_| is_predicted);
        let step_s = median(&self.recent_s);
        let steps = self.steps as f64;
        let time_s: f64 = self.ranks.iter().map(|rank| rank.time_s).sum();
        let mut ranks = Vec::with_capacity(self.ranks.len());
        for (sums, placed) in self.ranks.iter().zip(&placement.ranks) {
            ranks.push(sums.cost(&placed.name, self.wall_s));
        }
        let least = ranks.iter().map(RankCost::collectives).fold(f64::INFINITY, f64::min);
        let exposed_s = least * self.wall_s / steps;
        let communicated_s = self.communicated_s / steps;
        let is_one_node = placement.cluster.is_none();
        let mut cost = RunCost {
            step: self.last,
            steps: self.steps,
            step_s,
            predicted_s: predicted.and_then(|expected| expected.step_s),
            unit: self.unit,
            per_s: self.units / self.wall_s,
            fastest: expected.and_then(|expected| expected.fastest.clone()),
            efficiency: expected.and_then(|expected| expected.efficiency(step_s)),
            exposed_s,
            hidden_s: is_one_node.then_some((communicated_s - exposed_s).max(0.0)),
            bubble: placement.mesh.is_divided().then_some(self.idle_s / time_s),
            ranks,
            advice: "".into(),
        };
        cost.advice = advice(&cost, CostLayout::of(placement, self.follows_speed)).into();
        Some(cost)
    }
}

impl MeteredRank {
    /// Returns the shares of `wall_s`, the seconds of all steps.
    fn cost(&self, name: &str, wall_s: f64) -> RankCost {
        let Self { time_s, collectives_s, tensors_s, verdict_s } = *self;
        let waited_s = collectives_s + tensors_s + verdict_s;
        // Times of another node's clock may be slightly longer than the step.
        RankCost {
            name: name.into(),
            computing: ((time_s - waited_s) / wall_s).clamp(0.0, 1.0),
            gradients: collectives_s / wall_s,
            tensors: tensors_s / wall_s,
            others: verdict_s / wall_s,
            between: ((wall_s - time_s) / wall_s).max(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::runtime::step::StepWaits;
    use potluck_core::metrics::SoloSpeed;
    use potluck_kernels::exec::LossSums;
    use potluck_parallel::verdict::Totals;
    use potluck_parallel::{Mesh, Outcome, ParallelOptions, RankPlacement, ReduceSite, Verdict};

    fn placement(ranks: usize) -> Placement {
        let rank = |position| RankPlacement {
            name: format!("device {position}"),
            identity: String::new(),
            position,
            share: 4,
            micro_batch: 4,
            rows: 4,
            micro_batches: vec![4],
            blocks: Vec::new(),
            reduce_site: ReduceSite::Host,
            kernels: Default::default(),
            untimed: Vec::new(),
        };
        Placement {
            devices_asked: "all".into(),
            options: ParallelOptions::default(),
            candidates: Vec::new(),
            micro_batch_max: 4,
            parameter_bytes_max: None,
            mesh: Mesh { data: ranks, pipeline: 1, tensor: 1 },
            tensor_shares: Vec::new(),
            ranks: (0..ranks).map(rank).collect(),
            share_history: Vec::new(),
            cluster: None,
        }
    }

    /// Step of 100 ms on a rank that waits for collectives and the verdict.
    fn report(collectives_ms: u64, verdict_ms: u64) -> StepReport {
        let totals = Totals { loss: 1.0, count: 1.0, terms: Vec::new(), gradient_norm: 1.0 };
        StepReport {
            verdict: Verdict::Commit(totals),
            outcome: Outcome::Updated,
            loss: LossSums { loss: 1.0, count: 1.0, terms: Vec::new() },
            busy: None,
            time: Duration::from_millis(90),
            waits: StepWaits {
                collectives: Duration::from_millis(collectives_ms),
                tensors: Duration::ZERO,
                verdict: Duration::from_millis(verdict_ms),
            },
            communicated: Duration::from_millis(8),
            states: Vec::new(),
        }
    }

    fn step(number: u64, seconds: f64) -> MeteredStep {
        MeteredStep { number, seconds, unit: Unit::Samples, count: 8 }
    }

    fn metered(steps: u64, reports: &[StepReport]) -> CostMeter {
        let placement = placement(reports.len());
        let mut meter = CostMeter::new(placement.shares(), true);
        // The first step takes long.
        meter.add(step(1, 1.0), &placement, reports);
        for number in 2..2 + steps {
            meter.add(step(number, 0.1), &placement, reports);
        }
        meter
    }

    #[test]
    fn shares_of_ranks_are_those_of_their_steps_without_the_first() {
        let reports = [report(5, 1), report(45, 0)];
        let meter = metered(6, &reports);
        let cost = meter.cost(&placement(2), None).unwrap();
        assert_eq!((cost.step, cost.steps), (7, 6));
        assert!((cost.step_s - 0.1).abs() < 1e-9 && (cost.per_s - 80.0).abs() < 1e-6);
        let shares = cost.ranks.iter().map(|rank| {
            let RankCost { computing, gradients, tensors, others, between, .. } = rank;
            [computing, gradients, tensors, others, between].map(|share| (100.0 * share).round())
        });
        assert!(shares.eq([[84.0, 5.0, 0.0, 1.0, 10.0], [45.0, 45.0, 0.0, 0.0, 10.0]]));
        // Both wait 6 ms; the ring threads work 8 ms.
        assert!((cost.exposed_s - 0.006).abs() < 1e-9, "{}", cost.exposed_s);
        assert!((cost.hidden_s.unwrap() - 0.002).abs() < 1e-9);
        assert_eq!((cost.predicted_s, cost.fastest, cost.efficiency), (None, None, None));
        assert!(cost.advice.starts_with("rank 0, device 0, holds"), "{}", cost.advice);
        // A rank without a clock of its device is idle while it waits: 6 and 45 of 90 ms.
        let mesh = Mesh { data: 1, pipeline: 2, tensor: 1 };
        let of_stages = Placement { mesh, ..placement(2) };
        let bubble = meter.cost(&of_stages, None).unwrap().bubble.unwrap();
        assert!(cost.bubble.is_none() && (bubble - 51.0 / 180.0).abs() < 1e-9, "{bubble}");
    }

    #[test]
    fn expectations_are_compared_with_the_median_step() {
        let reports = [report(0, 0), report(0, 0)];
        let mut meter = metered(6, &reports);
        meter.add(step(8, 0.9), &placement(2), &reports);
        let fastest = SoloSpeed { name: "device 1".into(), step_s: 0.15 };
        let expected = ExpectedStep {
            step_s: Some(0.09),
            solo_s: vec![0.3, 0.15],
            fastest: Some(fastest.clone()),
        };
        let cost = meter.cost(&placement(2), Some(&expected)).unwrap();
        assert!((cost.speedup().unwrap() - 1.5).abs() < 1e-9);
        assert!((cost.efficiency.unwrap() - 1.0).abs() < 1e-9);
        assert_eq!((cost.predicted_s, cost.fastest), (Some(0.09), Some(fastest)));
    }

    #[test]
    fn few_steps_and_single_ranks_have_no_cost() {
        let reports = [report(0, 0), report(0, 0)];
        assert_eq!(metered(4, &reports).cost(&placement(2), None), None);
        assert!(metered(5, &reports).cost(&placement(2), None).is_some());
        assert_eq!(metered(9, &reports[..1]).cost(&placement(1), None), None);
    }

    #[test]
    fn times_of_old_steps_are_forgotten() {
        let reports = [report(0, 0), report(0, 0)];
        let mut meter = metered(STEPS_KEPT as u64, &reports);
        let placement = placement(2);
        for number in 0..STEPS_KEPT as u64 {
            meter.add(step(2000 + number, 0.05), &placement, &reports);
        }
        assert_eq!(meter.recent_s, vec![0.05; STEPS_KEPT]);
    }

    #[test]
    fn other_shares_are_measured_anew_without_the_prediction() {
        let reports = [report(0, 0), report(0, 0)];
        let mut meter = metered(9, &reports);
        let fastest = Some(SoloSpeed { name: "device 1".into(), step_s: 0.15 });
        let expected = ExpectedStep { step_s: Some(0.09), solo_s: vec![0.3, 0.15], fastest };
        let cost = meter.cost(&placement(2), Some(&expected)).unwrap();
        assert_eq!((cost.steps, cost.predicted_s), (9, Some(0.09)));

        let mut changed = placement(2);
        changed.ranks[0].share = 3;
        changed.ranks[1].share = 5;
        assert_eq!(meter.cost(&changed, Some(&expected)), None, "no step has these shares");
        // Again the first step takes long.
        meter.add(step(11, 1.0), &changed, &reports);
        for number in 12..17 {
            assert_eq!(meter.cost(&changed, Some(&expected)), None, "step {number}");
            meter.add(step(number, 0.2), &changed, &reports);
        }
        let cost = meter.cost(&changed, Some(&expected)).unwrap();
        assert_eq!((cost.step, cost.steps, cost.predicted_s), (16, 5, None));
        assert!((cost.step_s - 0.2).abs() < 1e-9 && (cost.per_s - 40.0).abs() < 1e-6);
        // The devices alone have no shares.
        assert_eq!(cost.fastest, expected.fastest);
        assert!(cost.efficiency.is_some());
    }

    #[test]
    fn counts_of_other_units_are_not_added() {
        let reports = [report(0, 0), report(0, 0)];
        let placement = placement(2);
        let mut meter = metered(9, &reports);
        for number in 11..17 {
            let of_tokens = MeteredStep { unit: Unit::Tokens, count: 800, ..step(number, 0.1) };
            meter.add(of_tokens, &placement, &reports);
        }
        let cost = meter.cost(&placement, None).unwrap();
        assert_eq!((cost.steps, cost.unit), (5, Unit::Tokens));
        assert!((cost.per_s - 8000.0).abs() < 1e-6, "{}", cost.per_s);
    }

    #[test]
    fn advice_knows_the_largest_micro_batch_and_the_smallest_share() {
        let mut placement = placement(2);
        placement.ranks[0].share = 5;
        placement.ranks[0].micro_batches = vec![2, 3];
        placement.ranks[1].share = 1;
        placement.ranks[1].micro_batches = vec![1];
        let layout = CostLayout::of(&placement, true);
        assert_eq!((layout.micro_batch_max, layout.share_min), (3, 1));
        assert!(layout.measures_shares && layout.overlaps, "by the default options");
    }
}
