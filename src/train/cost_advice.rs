//! Advice on the cost of a run: a sentence on the change that would shorten its steps the most.

use potluck_core::Setting;
use potluck_core::format::{milliseconds, percent};
use potluck_core::metrics::{RankCost, RunCost, SoloSpeed};
use potluck_parallel::{Mesh, Placement};

/// Share of a step above which a loss is worth a change.
const TOLD_LOSS: f64 = 0.05;
/// Part of the step that a faster device alone takes at most: timings are noisy, and do not include
/// the update and the verdict.
const FASTER_ALONE: f64 = 0.95;
/// Efficiency below which devices that hardly wait slow each other down.
const CONTENTION: f64 = 0.8;

/// Facts about the layout of a run that decide what may be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CostLayout {
    pub mesh: Mesh,
    /// Samples of the largest micro-batch.
    pub micro_batch_max: u32,
    /// Samples of the smallest share.
    pub share_min: u32,
    pub measures_shares: bool,
    /// True if the shares follow the speed of the devices while a run trains.
    pub follows_speed: bool,
    pub overlaps: bool,
}

impl CostLayout {
    pub fn of(placement: &Placement, follows_speed: bool) -> Self {
        let Placement { mesh, ranks, options, .. } = placement;
        let micro_batches = ranks.iter().flat_map(|rank| &rank.micro_batches);
        Self {
            mesh: *mesh,
            micro_batch_max: micro_batches.copied().max().unwrap_or(0),
            share_min: ranks.iter().map(|rank| rank.share).min().unwrap_or(0),
            measures_shares: options.shares.are_measured(),
            follows_speed,
            overlaps: options.overlap,
        }
    }

    fn has_stages(self) -> bool {
        self.mesh.pipeline > 1
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
    let (loss, share) = largest_loss(cost, layout);
    let is_told = share >= TOLD_LOSS;
    // A device alone would wait for samples too.
    let waits_for_samples = is_told && loss == StepLoss::BetweenSteps;
    if !waits_for_samples && let Some(fastest) = faster_alone(cost) {
        return format!(
            "{} alone is faster, with {} ms per step; name only it with {}",
            fastest.name,
            milliseconds(fastest.step_s),
            Setting::Devices
        );
    }
    if is_told {
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

/// Returns the fastest device alone if it is faster than all together. It was timed with samples at
/// hand, so that the wait for samples is no part of the comparison.
fn faster_alone(cost: &RunCost) -> Option<&SoloSpeed> {
    let together_s = cost.step_s * (1.0 - mean(cost, |rank| rank.between));
    cost.fastest.as_ref().filter(|fastest| fastest.step_s < FASTER_ALONE * together_s)
}

/// Returns the largest loss with its share of the time of all ranks.
fn largest_loss(cost: &RunCost, layout: CostLayout) -> (StepLoss, f64) {
    let waits = |rank: &RankCost| wait_for_slower(rank, layout);
    let common = cost.ranks.iter().map(waits).fold(f64::INFINITY, f64::min);
    let ends = if layout.has_stages() { mean(cost, |rank| rank.others) } else { 0.0 };
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

/// Returns the share of a rank's wait for collectives, which is the longer the slower other ranks
/// are.
fn wait_for_slower(rank: &RankCost, layout: CostLayout) -> f64 {
    // In a pipeline the first stages to end wait for the last ones: that is a part of the bubble.
    if layout.has_stages() { rank.gradients } else { rank.collectives() }
}

fn mean(cost: &RunCost, share: impl Fn(&RankCost) -> f64) -> f64 {
    cost.ranks.iter().map(share).sum::<f64>() / cost.ranks.len().max(1) as f64
}

fn advice_on(loss: StepLoss, lost: f64, cost: &RunCost, layout: CostLayout) -> String {
    let share = percent(lost, 0);
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
            let slowest = slowest(cost, layout);
            // The slowest rank does not wait: the others lose it all.
            let ranks = cost.ranks.len() as f64;
            let waited = percent(lost * ranks / (ranks - 1.0), 0);
            let remedy = remedy_of_imbalance(layout);
            format!("{slowest} holds the others up, which wait {waited} of the time: {remedy}")
        }
        StepLoss::Tensors if layout.has_stages() => {
            let what = format!(
                "stages wait {share} of the time for each other: more micro-batches in a step \
                 shorten that"
            );
            if layout.micro_batch_max > 1 {
                let (size, batch) = (Setting::MicroBatchSize, Setting::Batch);
                format!("{what}; lower {size}, or raise {batch}")
            } else {
                format!("{what}; raise {}", Setting::Batch)
            }
        }
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

/// Returns the change that lets a rank hold the others up less.
fn remedy_of_imbalance(layout: CostLayout) -> String {
    if layout.mesh.data == 1 {
        remedy_of_one_pipeline(layout.mesh)
    } else if layout.share_min <= 1 || layout.follows_speed {
        format!("a larger {} divides more evenly", Setting::Batch)
    } else if layout.measures_shares {
        format!("time the devices again with {}", Setting::Retune)
    } else {
        let whom = if layout.mesh.is_divided() { "its pipeline" } else { "it" };
        format!("give {whom} fewer samples with {}", Setting::Shares)
    }
}

/// Returns the change for the ranks of a single pipeline, which all compute the same samples.
fn remedy_of_one_pipeline(mesh: Mesh) -> String {
    let blocks = format!("fewer blocks with {}", Setting::BlocksPerStage);
    let tensors = format!("a smaller share of the tensors with {}", Setting::TensorShares);
    if mesh.tensor == 1 {
        format!("the slowest stage decides; give it {blocks}")
    } else if mesh.pipeline == 1 {
        format!("the slowest rank decides; give it {tensors}")
    } else {
        format!("the slowest rank decides; give it {blocks}, or {tensors}")
    }
}

/// Rank that waits the least for the others: `rank 1, cpu (2 threads),`.
fn slowest(cost: &RunCost, layout: CostLayout) -> String {
    let mut slowest = 0;
    let mut least = f64::INFINITY;
    for (rank, of_rank) in cost.ranks.iter().enumerate() {
        let wait = wait_for_slower(of_rank, layout);
        if wait < least {
            slowest = rank;
            least = wait;
        }
    }
    format!("rank {slowest}, {},", cost.ranks[slowest].name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_core::metrics::Unit;

    /// Two devices with the whole model, whose shares follow their speed.
    const DATA: CostLayout = CostLayout {
        mesh: Mesh::of_pipelines(2, 1),
        micro_batch_max: 4,
        share_min: 4,
        measures_shares: true,
        follows_speed: true,
        overlaps: true,
    };
    /// Two stages of one pipeline.
    const STAGES: CostLayout =
        CostLayout { mesh: Mesh::of_pipelines(1, 2), follows_speed: false, ..DATA };
    /// Two ranks of one tensor group.
    const TENSORS: CostLayout =
        CostLayout { mesh: Mesh { data: 1, pipeline: 1, tensor: 2 }, ..STAGES };

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
        let of_stages = || vec![rank("a", 0.0, 0.1, 0.0), rank("b", 0.0, 0.2, 0.1)];
        assert_advice(
            of_stages(),
            STAGES,
            "stages wait 20 % of the time for each other: more micro-batches in a step shorten \
             that; lower train.micro_batch_size, or raise train.batch",
        );
        assert_advice(
            of_stages(),
            CostLayout { micro_batch_max: 1, ..STAGES },
            "stages wait 20 % of the time for each other: more micro-batches in a step shorten \
             that; raise train.batch",
        );
        assert_advice(
            vec![rank("a", 0.0, 0.1, 0.0); 2],
            TENSORS,
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
    fn the_slowest_rank_gets_less_where_it_can() {
        let uneven = || vec![rank("a", 0.39, 0.0, 0.02), rank("b", 0.0, 0.0, 0.01)];
        let held = "rank 1, b, holds the others up, which wait";
        let larger_batch =
            format!("{held} 40 % of the time: a larger train.batch divides more evenly");
        assert_advice(uneven(), DATA, &larger_batch);
        let fixed = CostLayout { measures_shares: false, follows_speed: false, ..DATA };
        let fewer_samples = "give it fewer samples with parallel.shares";
        assert_advice(uneven(), fixed, &format!("{held} 40 % of the time: {fewer_samples}"));
        assert_advice(uneven(), CostLayout { share_min: 1, ..fixed }, &larger_batch);
        // Of four ranks three wait.
        let of_four = || {
            let mut ranks = vec![rank("a", 0.4, 0.0, 0.0); 4];
            ranks[1] = rank("b", 0.0, 0.0, 0.0);
            ranks
        };
        assert_advice(of_four(), DATA, &larger_batch);

        // The measured shares of several pipelines do not follow their speed.
        let pipelines = CostLayout { mesh: Mesh::of_pipelines(2, 2), follows_speed: false, ..DATA };
        let timed = format!("{held} 40 % of the time: time the devices again with --retune");
        assert_advice(of_four(), pipelines, &timed);
        assert_advice(of_four(), CostLayout { share_min: 1, ..pipelines }, &larger_batch);
        let of_pipelines = CostLayout { measures_shares: false, ..pipelines };
        let fewer_samples = "give its pipeline fewer samples with parallel.shares";
        assert_advice(
            of_four(),
            of_pipelines,
            &format!("{held} 40 % of the time: {fewer_samples}"),
        );

        let fewer_blocks = "fewer blocks with parallel.blocks_per_stage";
        let less_of_tensors = "a smaller share of the tensors with parallel.tensor_shares";
        let both = Mesh { data: 1, pipeline: 2, tensor: 2 };
        let cases = [
            (
                STAGES,
                format!("39 % of the time: the slowest stage decides; give it {fewer_blocks}"),
            ),
            (
                TENSORS,
                format!("40 % of the time: the slowest rank decides; give it {less_of_tensors}"),
            ),
            (
                CostLayout { mesh: both, ..DATA },
                format!(
                    "39 % of the time: the slowest rank decides; give it {fewer_blocks}, or \
                     {less_of_tensors}"
                ),
            ),
        ];
        for (layout, expected) in cases {
            assert_advice(uneven(), layout, &format!("{held} {expected}"));
        }
    }

    #[test]
    fn the_slowest_stage_is_found_by_its_wait_for_gradients() {
        // The first stage waits for the ends of the others, which is a part of the bubble.
        let ranks =
            vec![rank("a", 0.0, 0.0, 0.3), rank("b", 0.25, 0.0, 0.0), rank("c", 0.55, 0.0, 0.0)];
        let layout = CostLayout { mesh: Mesh::of_pipelines(1, 3), ..DATA };
        let told = advice(&cost(ranks), layout);
        let expected = "rank 0, a, holds the others up, which wait 40 % of the time: the slowest \
                        stage decides";
        assert!(told.starts_with(expected), "{told}");
    }

    #[test]
    fn a_device_that_is_faster_alone_is_named_first() {
        let solo = |step_s| Some(SoloSpeed { name: "b".into(), step_s });
        let uneven = || vec![rank("a", 0.4, 0.0, 0.0), rank("b", 0.0, 0.0, 0.0)];
        let slower = RunCost { fastest: solo(0.1), ..cost(uneven()) };
        let expected = "b alone is faster, with 100 ms per step; name only it with --devices";
        assert_eq!(advice(&slower, DATA), expected);
        let nearly = RunCost { fastest: solo(0.195), ..slower };
        assert!(advice(&nearly, DATA).starts_with("rank 1, b, holds"));
        // Without the wait for samples the step takes 140 ms.
        let mut waiting = uneven();
        for rank in &mut waiting {
            rank.between = 0.3;
        }
        waiting[0].gradients = 0.7;
        let unfair = RunCost { fastest: solo(0.15), ..cost(waiting) };
        assert!(advice(&unfair, DATA).starts_with("rank 1, b, holds"));
        assert_eq!(advice(&RunCost { fastest: solo(0.1), ..unfair }, DATA), expected);
    }

    #[test]
    fn the_wait_for_samples_comes_before_a_device_that_is_faster_alone() {
        let waiting = RankCost { between: 0.5, ..rank("a", 0.0, 0.0, 0.0) };
        let fastest = Some(SoloSpeed { name: "b".into(), step_s: 0.01 });
        let short = RunCost { fastest, ..cost(vec![waiting; 2]) };
        assert!(advice(&short, DATA).starts_with("50 % of the time pass between steps"));
    }
}
