//! Advice on the cost of a run: a sentence on the change that would shorten its steps the most.

use potluck_core::Setting;
use potluck_core::format::{milliseconds, percent};
use potluck_core::metrics::{RankCost, RunCost};
use potluck_parallel::Placement;

/// Share of a step above which a loss is worth a change.
const TOLD_LOSS: f64 = 0.05;
/// Speed-up below which a device alone is faster, also by the noise of timings.
const SLOWDOWN: f64 = 0.95;
/// Efficiency below which devices that hardly wait slow each other down.
const CONTENTION: f64 = 0.8;

/// Facts about the layout of a run that decide what may be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CostLayout {
    pub has_stages: bool,
    pub has_tensor_groups: bool,
    pub measures_shares: bool,
    pub overlaps: bool,
}

impl CostLayout {
    pub fn of(placement: &Placement) -> Self {
        Self {
            has_stages: placement.mesh.pipeline > 1,
            has_tensor_groups: placement.mesh.tensor > 1,
            measures_shares: placement.options.shares.are_measured(),
            overlaps: placement.options.overlap,
        }
    }
}

/// Reason for which ranks do not compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepLoss {
    /// Collectives, which all ranks wait for.
    Communication,
    /// Slower ranks.
    Imbalance,
    /// Tensors of other ranks.
    Tensors,
    BetweenSteps,
}

/// Returns the sentence, without a point at its end. Settings are named for the reader of the
/// moment.
pub(crate) fn advice(cost: &RunCost, layout: CostLayout) -> String {
    if let Some(fastest) = &cost.fastest
        && cost.speedup().is_some_and(|speedup| speedup < SLOWDOWN)
    {
        return format!(
            "{} alone is faster, with {} ms per step; name only it with {}",
            fastest.name,
            milliseconds(fastest.step_s),
            Setting::Devices
        );
    }
    let (loss, share) = largest_loss(cost, layout);
    if share >= TOLD_LOSS {
        return advice_on(loss, share, cost, layout);
    }
    let computing = percent(mean(cost, |rank| rank.computing), 0);
    match cost.efficiency {
        Some(efficiency) if efficiency < CONTENTION => format!(
            "the devices hardly wait, but slow each other down: together they reach {} of their \
             speeds alone, because they share a processor or memory; try fewer with {}",
            percent(efficiency, 0),
            Setting::Devices
        ),
        _ => format!("little: the devices compute {computing} of the time"),
    }
}

/// Returns the largest loss with its share of the time of all ranks.
fn largest_loss(cost: &RunCost, layout: CostLayout) -> (StepLoss, f64) {
    // In a pipeline the first stages to end wait for the last ones: that is a part of the bubble.
    let waits = |rank: &RankCost| {
        if layout.has_stages { rank.gradients } else { rank.collectives() }
    };
    let common = cost.ranks.iter().map(waits).fold(f64::INFINITY, f64::min);
    let ends = if layout.has_stages { mean(cost, |rank| rank.others) } else { 0.0 };
    let losses = [
        (StepLoss::Communication, common),
        (StepLoss::Imbalance, mean(cost, waits) - common),
        (StepLoss::Tensors, mean(cost, |rank| rank.tensors) + ends),
        (StepLoss::BetweenSteps, mean(cost, |rank| rank.between)),
    ];
    let mut largest = losses[0];
    for loss in losses {
        if loss.1 > largest.1 {
            largest = loss;
        }
    }
    largest
}

fn mean(cost: &RunCost, share: impl Fn(&RankCost) -> f64) -> f64 {
    cost.ranks.iter().map(share).sum::<f64>() / cost.ranks.len().max(1) as f64
}

fn advice_on(loss: StepLoss, share: f64, cost: &RunCost, layout: CostLayout) -> String {
    let share = percent(share, 0);
    match loss {
        StepLoss::Communication => {
            let what = format!("every device waits {share} of the time for sums of gradients");
            if layout.overlaps {
                format!("{what}: with a larger {} there are fewer per sample", Setting::Batch)
            } else {
                format!("{what}, which nothing hides: set {} to true", Setting::Overlap)
            }
        }
        StepLoss::Imbalance => {
            let slowest = slowest(cost);
            let what = format!("{slowest} holds the others up, which wait {share} of the time");
            if layout.measures_shares {
                format!("{what}: time the devices again with {}", Setting::Retune)
            } else {
                format!("{what}: give it fewer samples with {}", Setting::Shares)
            }
        }
        StepLoss::Tensors if layout.has_stages => format!(
            "stages wait {share} of the time for each other: more micro-batches in a step shorten \
             that; lower {}, or raise {}",
            Setting::MicroBatchSize,
            Setting::Batch
        ),
        StepLoss::Tensors => format!(
            "the ranks of tensor groups wait {share} of the time for each other's sums: lower {}",
            Setting::TensorRanks
        ),
        StepLoss::BetweenSteps => format!(
            "{share} of the time pass between steps: samples arrive too slowly, or steps are too \
             short; raise {}",
            Setting::Batch
        ),
    }
}

/// Rank that waits the least for the others: `rank 1, cpu (2 threads),`.
fn slowest(cost: &RunCost) -> String {
    let mut slowest = 0;
    for (rank, of_rank) in cost.ranks.iter().enumerate() {
        if of_rank.collectives() < cost.ranks[slowest].collectives() {
            slowest = rank;
        }
    }
    format!("rank {slowest}, {},", cost.ranks[slowest].name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_core::metrics::{SoloSpeed, Unit};

    const DATA: CostLayout = CostLayout {
        has_stages: false,
        has_tensor_groups: false,
        measures_shares: true,
        overlaps: true,
    };

    /// Rank that waits for gradients, tensors and the ends of others.
    fn rank(name: &str, gradients: f64, tensors: f64, others: f64) -> RankCost {
        RankCost {
            name: name.into(),
            computing: 0.99 - gradients - tensors - others,
            gradients,
            tensors,
            others,
            between: 0.01,
        }
    }

    fn cost(ranks: Vec<RankCost>) -> RunCost {
        RunCost {
            step: 9,
            steps: 8,
            step_s: 0.2,
            predicted_s: None,
            unit: Unit::Samples,
            per_s: 1.0,
            fastest: None,
            efficiency: None,
            exposed_s: 0.0,
            hidden_s: None,
            bubble: None,
            ranks,
            advice: "".into(),
        }
    }

    #[track_caller]
    fn assert_advice(ranks: Vec<RankCost>, layout: CostLayout, expected: &str) {
        assert_eq!(advice(&cost(ranks), layout), expected);
    }

    #[test]
    fn advice_is_on_the_largest_loss() {
        let even = || vec![rank("a", 0.2, 0.0, 0.02), rank("b", 0.18, 0.0, 0.02)];
        assert_advice(
            even(),
            DATA,
            "every device waits 20 % of the time for sums of gradients: with a larger train.batch \
             there are fewer per sample",
        );
        assert_advice(
            even(),
            CostLayout { overlaps: false, ..DATA },
            "every device waits 20 % of the time for sums of gradients, which nothing hides: set \
             parallel.overlap to true",
        );
        let uneven = || vec![rank("a", 0.39, 0.0, 0.02), rank("b", 0.0, 0.0, 0.01)];
        assert_advice(
            uneven(),
            DATA,
            "rank 1, b, holds the others up, which wait 20 % of the time: time the devices again \
             with --retune",
        );
        assert_advice(
            uneven(),
            CostLayout { measures_shares: false, ..DATA },
            "rank 1, b, holds the others up, which wait 20 % of the time: give it fewer samples \
             with parallel.shares",
        );
        let of_stages = vec![rank("a", 0.0, 0.1, 0.0), rank("b", 0.0, 0.2, 0.1)];
        assert_advice(
            of_stages,
            CostLayout { has_stages: true, ..DATA },
            "stages wait 20 % of the time for each other: more micro-batches in a step shorten \
             that; lower train.micro_batch_size, or raise train.batch",
        );
        assert_advice(
            vec![rank("a", 0.0, 0.1, 0.0); 2],
            CostLayout { has_tensor_groups: true, ..DATA },
            "the ranks of tensor groups wait 10 % of the time for each other's sums: lower \
             parallel.tensor_ranks",
        );
        let waiting = RankCost { between: 0.5, ..rank("a", 0.0, 0.0, 0.0) };
        assert_advice(
            vec![waiting; 2],
            DATA,
            "50 % of the time pass between steps: samples arrive too slowly, or steps are too \
             short; raise train.batch",
        );
        let quiet = || vec![rank("a", 0.03, 0.0, 0.0); 2];
        assert_advice(quiet(), DATA, "little: the devices compute 96 % of the time");
        let slowed = RunCost { efficiency: Some(0.55), ..cost(quiet()) };
        let expected = "the devices hardly wait, but slow each other down: together they reach 55 \
                        % of their speeds alone, because they share a processor or memory; try \
                        fewer with --devices";
        assert_eq!(advice(&slowed, DATA), expected);
    }

    #[test]
    fn a_device_that_is_faster_alone_is_named_first() {
        let solo = |step_s| Some(SoloSpeed { name: "b".into(), step_s });
        let uneven = vec![rank("a", 0.4, 0.0, 0.0), rank("b", 0.0, 0.0, 0.0)];
        let slower = RunCost { fastest: solo(0.1), ..cost(uneven) };
        let expected = "b alone is faster, with 100 ms per step; name only it with --devices";
        assert_eq!(advice(&slower, DATA), expected);
        let nearly = RunCost { fastest: solo(0.195), ..slower };
        assert!(advice(&nearly, DATA).starts_with("rank 1, b, holds"));
    }
}
