//! Shares of the batch that follow the speed of devices while a run trains: from the seconds that
//! each rank computes in a step to other shares, or none.

use std::collections::VecDeque;

use super::balance::{ThroughputModel, apportion, makespan};

/// Number of steps whose median seconds a change is based on.
const WINDOW: usize = 20;

/// Minimum number of steps between two changes.
const STEPS_BETWEEN: u64 = 25;

/// Minimum gain of a change: the fraction by which a step is predicted to become shorter.
const GAIN_MIN: f64 = 0.03;

/// Part of the minimum gain that a change also has by each half of the window, so that neither a
/// few slow steps nor a speed that is just changing decide.
const PART_OF_HALVES: f64 = 0.5;

/// Number of steps without a change after which one reversal fewer counts.
const STEPS_OF_REVERSAL: u64 = 200;

/// Ratio of the seconds per sample from which a device counts as slower or faster than before.
const OTHER_SPEED: f64 = 1.05;

/// Limits of the samples of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareLimits {
    /// The most samples that the device runs at once: at most the rows of its plan.
    pub micro_batch: u32,
    /// The least advisable samples of a micro-batch: 1, or more for batch normalization.
    pub rows_min: u32,
}

/// Seconds of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepSeconds {
    /// Seconds of the whole step, by its slowest rank.
    pub step_s: f64,
    /// By rank: the seconds without waiting for other ranks.
    pub work_s: Vec<f64>,
}

/// Device whose speed has changed most since the shares were decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedSpeed {
    pub rank: usize,
    pub is_slower: bool,
}

/// Other shares that make a step shorter.
#[derive(Clone, Debug, PartialEq)]
pub struct ProposedShares {
    /// Samples of each rank.
    pub shares: Vec<u32>,
    /// Median seconds of a step with the shares so far, and the predicted ones with these.
    pub step_s: f64,
    pub predicted_s: f64,
    /// Device that is the reason; `None` if the speeds are those of the first steps, which the
    /// shares did not fit.
    pub cause: Option<ChangedSpeed>,
}

/// Shares of the batch among ranks with the whole model, and the seconds of the last steps.
#[derive(Clone, Debug)]
pub struct ShareBalancer {
    limits: Vec<ShareLimits>,
    /// Samples of each rank.
    shares: Vec<u32>,
    /// Steps with these shares, the newest last.
    window: VecDeque<StepSeconds>,
    /// Number of steps since the last change, or since the start.
    steps: u64,
    /// Seconds per sample of each rank when the shares were last found good or changed.
    known: Option<Vec<f64>>,
    /// Shares before the last change.
    before: Option<Vec<u32>>,
    /// Number of changes in a row that reversed the one before them.
    reversals: u32,
}

impl ShareBalancer {
    /// Returns the balancer of ranks with these samples and limits, by rank.
    pub fn new(shares: Vec<u32>, limits: Vec<ShareLimits>) -> Self {
        Self {
            limits,
            shares,
            window: VecDeque::with_capacity(WINDOW),
            steps: 0,
            known: None,
            before: None,
            reversals: 0,
        }
    }

    /// Takes note of a step with the current shares.
    pub fn observe(&mut self, step: StepSeconds) {
        if step.work_s.len() != self.shares.len() {
            return;
        }
        if self.window.len() == WINDOW {
            self.window.pop_front();
        }
        self.window.push_back(step);
        self.steps += 1;
        if self.steps.is_multiple_of(STEPS_OF_REVERSAL) {
            self.reversals = self.reversals.saturating_sub(1);
        }
        if self.window.len() == WINDOW && self.known.is_none() {
            self.known = Some(self.seconds_per_sample(0..WINDOW));
        }
    }

    /// Returns other shares if a step is predicted to become clearly shorter with them; `None` if
    /// not, or if the steps since the last change are too few.
    pub fn propose(&self) -> Option<ProposedShares> {
        let has_changed = self.before.is_some();
        if self.window.len() < WINDOW || (has_changed && self.steps < STEPS_BETWEEN) {
            return None;
        }
        let step_s = median(self.window.iter().map(|step| step.step_s));
        let speeds = self.speeds(0..WINDOW);
        let now_s = makespan(&self.shares, &speeds);
        // The fastest imaginable step, of fractions of samples.
        let rate: f64 = speeds.iter().map(|speed| 1.0 / speed.row_s).sum();
        let ideal_s = f64::from(self.batch()) / rate;
        if !step_s.is_finite() || (now_s - ideal_s) < GAIN_MIN * step_s {
            return None;
        }
        let shares = self.fitting(&speeds)?;
        let gain = |speeds: &[ThroughputModel]| {
            (makespan(&self.shares, speeds) - makespan(&shares, speeds)) / step_s
        };
        let least = GAIN_MIN * f64::from(self.factor_of_reversals(&shares));
        let is_lasting = [0..WINDOW / 2, WINDOW / 2..WINDOW]
            .into_iter()
            .all(|half| gain(&self.speeds(half)) >= PART_OF_HALVES * least);
        let whole = gain(&speeds);
        if whole < least || !is_lasting {
            return None;
        }
        let cause = self.cause(&speeds);
        Some(ProposedShares { shares, step_s, predicted_s: step_s * (1.0 - whole), cause })
    }

    /// Continues with other shares.
    pub fn change_to(&mut self, shares: Vec<u32>) {
        if self.window.len() == WINDOW {
            self.known = Some(self.seconds_per_sample(0..WINDOW));
        }
        self.reversals = if self.is_reversal(&shares) { (self.reversals + 1).min(4) } else { 0 };
        self.before = Some(std::mem::replace(&mut self.shares, shares));
        self.window.clear();
        self.steps = 0;
    }

    /// Discards the seconds of earlier steps, which do not precede the next one.
    pub fn forget_steps(&mut self) {
        self.window.clear();
    }

    fn batch(&self) -> u32 {
        self.shares.iter().sum()
    }

    /// Median seconds per sample of each rank in a part of the window.
    fn seconds_per_sample(&self, part: std::ops::Range<usize>) -> Vec<f64> {
        let mut seconds = Vec::with_capacity(self.shares.len());
        for (rank, share) in self.shares.iter().enumerate() {
            let work_s = median(self.window.range(part.clone()).map(|step| step.work_s[rank]));
            seconds.push(work_s / f64::from((*share).max(1)));
        }
        seconds
    }

    fn speeds(&self, part: std::ops::Range<usize>) -> Vec<ThroughputModel> {
        let mut speeds = Vec::with_capacity(self.shares.len());
        for (row_s, limits) in self.seconds_per_sample(part).into_iter().zip(&self.limits) {
            let micro_batch = limits.micro_batch;
            speeds.push(ThroughputModel { fixed_s: 0.0, row_s, micro_batch });
        }
        speeds
    }

    /// Returns the fastest shares that leave each rank its least samples; `None` if these are the
    /// present ones, or if the statistics of batch normalization would become noisier.
    fn fitting(&self, speeds: &[ThroughputModel]) -> Option<Vec<u32>> {
        let mut shares = apportion(self.batch(), speeds);
        let mut least = Vec::with_capacity(shares.len());
        for (share, limits) in self.shares.iter().zip(&self.limits) {
            least.push(limits.rows_min.clamp(1, (*share).max(1)));
        }
        while let Some(few) = (0..shares.len()).find(|rank| shares[*rank] < least[*rank]) {
            let spare = |rank: &usize| shares[*rank].saturating_sub(least[*rank]);
            let most = (0..shares.len()).max_by_key(spare)?;
            let moved = (least[few] - shares[few]).min(spare(&most));
            if moved == 0 {
                return None;
            }
            shares[most] -= moved;
            shares[few] += moved;
        }
        let are_noisier =
            shares.iter().zip(&self.shares).zip(&self.limits).any(|((share, before), limits)| {
                let rows = smallest_micro_batch(*share, limits.micro_batch);
                rows < limits.rows_min && rows < smallest_micro_batch(*before, limits.micro_batch)
            });
        (shares != self.shares && !are_noisier).then_some(shares)
    }

    /// Returns true if these shares take samples back that the last change has moved.
    fn is_reversal(&self, shares: &[u32]) -> bool {
        let Some(before) = &self.before else { return false };
        let moved = |rank: &usize| i64::from(self.shares[*rank]) - i64::from(before[*rank]);
        let Some(most) = (0..self.shares.len()).max_by_key(|rank| moved(rank).abs()) else {
            return false;
        };
        let now = i64::from(shares[most]) - i64::from(self.shares[most]);
        now.signum() == -moved(&most).signum()
    }

    /// Factor of the minimum gain, so that shares do not change back and forth: it doubles with
    /// each reversal in a row.
    fn factor_of_reversals(&self, shares: &[u32]) -> u32 {
        if self.is_reversal(shares) { 2 << self.reversals } else { 1 }
    }

    fn cause(&self, speeds: &[ThroughputModel]) -> Option<ChangedSpeed> {
        let known = self.known.as_ref()?;
        let ratio = |rank: &usize| (speeds[*rank].row_s / known[*rank]).ln();
        let rank = (0..speeds.len()).max_by(|a, b| ratio(a).abs().total_cmp(&ratio(b).abs()))?;
        let changed = ratio(&rank);
        let is_other = changed.abs() > OTHER_SPEED.ln();
        is_other.then_some(ChangedSpeed { rank, is_slower: changed > 0.0 })
    }
}

/// Samples of the smallest micro-batch of a share, whose micro-batches are nearly equal.
fn smallest_micro_batch(share: u32, micro_batch: u32) -> u32 {
    share / share.div_ceil(micro_batch.max(1)).max(1)
}

/// Returns the lower median; NaN of no values.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests;
