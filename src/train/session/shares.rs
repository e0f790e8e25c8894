//! Changes of a session's shares between two steps: by the measured speed of its devices, or as the
//! options give them.

use std::sync::Arc;

use super::{Session, StepsTaken};
use crate::runtime::placement::types::PlacedWorkers;
use crate::runtime::step::StepReport;
use potluck_core::metrics::{PredictedGain, ShareRecord};
use potluck_parallel::planner::laid_out::programs_of_replicas;
use potluck_parallel::planner::rebalance::{
    ProposedShares, ShareBalancer, ShareLimits, StepSeconds,
};
use potluck_parallel::{ShareChange, SpreadPrograms, contiguous_shares};

/// Shares of a session that may change.
#[derive(Debug)]
pub(super) struct SessionShares {
    /// Shares before all changes that the options give.
    first: Vec<u32>,
    /// Follows the speed of the devices, if the shares do.
    balancer: Option<ShareBalancer>,
    /// True if the placement is the resumed run's.
    is_placement_kept: bool,
    /// Steps with which the session has begun; `None` before these are known.
    first_taken: Option<u64>,
    /// True after the first step of the session.
    has_trained: bool,
}

impl SessionShares {
    /// Returns the shares of placed devices; measured ones follow their speed if that is asked for.
    pub fn of(placed: &PlacedWorkers, follows_speed: bool) -> Self {
        let PlacedWorkers { placement, plan, is_kept, .. } = placed;
        let mut limits = Vec::with_capacity(placement.ranks.len());
        for rank in &placement.ranks {
            let micro_batch = rank.micro_batch.min(rank.rows);
            limits.push(ShareLimits { micro_batch, rows_min: plan.rows_min() });
        }
        let first = placement.shares();
        let follows_speed = follows_speed
            && placement.options.shares.are_measured()
            && !placement.mesh.is_divided()
            && placement.ranks.len() > 1;
        let balancer = follows_speed.then(|| ShareBalancer::new(first.clone(), limits));
        Self { first, balancer, is_placement_kept: *is_kept, first_taken: None, has_trained: false }
    }

    /// Returns true if the shares follow the speed of the devices.
    pub fn follow_speed(&self) -> bool {
        self.balancer.is_some()
    }

    /// Takes note of a step on all ranks.
    pub fn observe(&mut self, reports: &[StepReport]) {
        self.has_trained = true;
        let Some(balancer) = &mut self.balancer else { return };
        let mut step = StepSeconds { step_s: 0.0, work_s: Vec::with_capacity(reports.len()) };
        for report in reports {
            step.step_s = step.step_s.max(report.time.as_secs_f64());
            step.work_s.push(report.time.saturating_sub(report.waits.sum()).as_secs_f64());
        }
        balancer.observe(step);
    }

    /// Returns true if the history of the placement leads to this number of completed steps: it is
    /// the resumed run's, or that of a session without any step.
    fn has_history_of(&mut self, steps: u64) -> bool {
        let first = *self.first_taken.get_or_insert(steps);
        !self.has_trained && steps == first && (self.is_placement_kept || steps == 0)
    }
}

impl Session {
    /// Sets the completed steps, and the shares that the options give for the next one; returns the
    /// change, if they are others. The history of measured shares begins with the next step, unless
    /// it is the resumed run's.
    pub(crate) fn continue_after(&mut self, taken: StepsTaken) -> Option<ShareRecord> {
        self.taken = taken;
        if !self.shares.has_history_of(taken.steps)
            && let Some(balancer) = &mut self.shares.balancer
        {
            balancer.forget_steps();
            let shares = self.placement.shares();
            self.placement.share_history = vec![ShareChange { step: taken.steps + 1, shares }];
        }
        self.take_given_shares()
    }

    /// Changes the shares for the next step to those that the options give for it; returns the
    /// change, if they are others.
    pub(crate) fn take_given_shares(&mut self) -> Option<ShareRecord> {
        let step = self.taken.steps;
        let changes = &self.placement.options.share_changes;
        let given = changes.iter().rfind(|change| change.step <= step + 1);
        let given = given.map_or(&self.shares.first, |change| &change.shares);
        let before = self.placement.shares();
        if self.shares.balancer.is_some() || *given == before {
            return None;
        }
        let shares = given.clone();
        self.set_shares(&shares);
        Some(ShareRecord { step, before, shares, predicted: None })
    }

    /// Changes the shares from the next step on, if the speed of the devices has changed; returns
    /// the change.
    pub(crate) fn change_shares_by_speed(&mut self) -> Option<ShareRecord> {
        let step = self.taken.steps;
        let before = self.placement.shares();
        let proposed = self.shares.balancer.as_ref()?.propose()?;
        let ProposedShares { shares, step_s, predicted_s, cause } = proposed;
        let mut changed = None;
        if let Some(cause) = cause {
            changed = Some((self.placement.ranks[cause.rank].name.clone(), cause.is_slower));
        }
        let history = &mut self.placement.share_history;
        if history.is_empty() {
            history.push(ShareChange { step: 1, shares: before.clone() });
        }
        history.push(ShareChange { step: step + 1, shares: shares.clone() });
        if let Some(balancer) = &mut self.shares.balancer {
            balancer.change_to(shares.clone());
        }
        self.set_shares(&shares);
        let predicted =
            PredictedGain { before_ms: 1e3 * step_s, after_ms: 1e3 * predicted_s, changed };
        Some(ShareRecord { step, before, shares, predicted: Some(predicted) })
    }

    /// Gives these samples to the ranks, which have the whole model each.
    fn set_shares(&mut self, samples: &[u32]) {
        let placement = &mut self.placement;
        let micro_batches: Vec<u32> =
            placement.ranks.iter().map(|rank| rank.micro_batch.min(rank.rows)).collect();
        let shares = contiguous_shares(samples, &micro_batches);
        let programs = programs_of_replicas(&placement.options, &self.plan, &shares);
        for ((rank, share), program) in placement.ranks.iter_mut().zip(&shares).zip(&programs) {
            rank.share = share.count;
            rank.micro_batches = program.micro_batches.iter().map(|part| part.rows).collect();
        }
        if let Some(spread) = &mut self.spread {
            *spread = SpreadPrograms::of_ranks(&programs, &self.plan);
        }
        self.programs = programs.into_iter().map(Arc::new).collect();
        Arc::make_mut(&mut self.pipelines).shares = shares;
    }
}
