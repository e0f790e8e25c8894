//! How often something is measured and for how long.

use std::time::{Duration, Instant};

/// How thorough a benchmark is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// A fraction of a second: checks that everything runs. Its figures mean little.
    Tiny,
    /// Up to a quarter of a minute on a software device.
    Quick,
    /// Up to a minute on a software device.
    Normal,
}

/// The numbers behind an [`Effort`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingPlan {
    /// Samples of a figure; fewer if they take more than `figure_seconds_max`.
    pub samples: usize,
    pub figure_seconds_max: f64,
    /// Seconds of work that a sample repeats something for.
    pub sample_seconds: f64,
    /// A matrix product that takes longer is left out, and when all of them together have taken
    /// so long, the rest is.
    pub product_seconds_max: f64,
    pub products_seconds_max: f64,
    /// The training steps that are measured, at most for so many seconds.
    pub steps: usize,
    pub steps_seconds_max: f64,
    /// Bytes of each array of the memory figures, on the processor and on hardware GPUs.
    pub memory_bytes: [u64; 2],
    /// Bytes of an upload and of a readback.
    pub transfer_bytes: u64,
    /// Rounds of the chains of multiply-adds on GPUs; the processor does four times as many.
    pub rounds: usize,
    /// Samples in a batch of the training step.
    pub batch: usize,
}

impl Effort {
    /// As in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Quick => "quick",
            Self::Normal => "normal",
        }
    }

    pub fn plan_of_samples(self) -> SamplingPlan {
        let normal = SamplingPlan {
            samples: 9,
            figure_seconds_max: 1.0,
            sample_seconds: 0.04,
            product_seconds_max: 0.1,
            products_seconds_max: 25.0,
            steps: 20,
            steps_seconds_max: 8.0,
            memory_bytes: [128 << 20, 256 << 20],
            transfer_bytes: 64 << 20,
            rounds: 16,
            batch: 12,
        };
        match self {
            Self::Normal => normal,
            Self::Quick => SamplingPlan {
                samples: 5,
                figure_seconds_max: 0.2,
                sample_seconds: 0.01,
                product_seconds_max: 0.02,
                products_seconds_max: 4.0,
                steps: 5,
                steps_seconds_max: 3.0,
                ..normal
            },
            Self::Tiny => SamplingPlan {
                samples: 3,
                figure_seconds_max: 0.1,
                sample_seconds: 1e-3,
                product_seconds_max: 1e-3,
                products_seconds_max: 60.0,
                steps: 2,
                steps_seconds_max: 0.1,
                memory_bytes: [1 << 20; 2],
                transfer_bytes: 1 << 20,
                rounds: 4,
                batch: 1,
            },
        }
    }
}

/// The fewest samples of a figure, however long they take.
const SAMPLES_MIN: usize = 3;

impl SamplingPlan {
    /// Whether a figure has enough samples, of which the first began at `begun`.
    pub fn is_enough(&self, samples: usize, begun: Instant) -> bool {
        let is_over = begun.elapsed() >= Duration::from_secs_f64(self.figure_seconds_max);
        samples >= self.samples || (samples >= SAMPLES_MIN && is_over)
    }
}

/// The most repetitions in a sample: they are one submission, which has to be recorded.
const REPEATS_MAX: usize = 4096;

/// The repetitions that fill a sample. `run` runs so many and gives their seconds; its first call
/// is slower than others, and counts for nothing.
///
/// # Errors
/// Those of `run`.
pub fn repeats<E>(
    plan_of_samples: &SamplingPlan,
    mut run: impl FnMut(usize) -> Result<f64, E>,
) -> Result<usize, E> {
    run(1)?;
    let mut repeats = 1;
    let mut seconds = run(1)?;
    while seconds < plan_of_samples.sample_seconds && repeats < REPEATS_MAX {
        let factor = (plan_of_samples.sample_seconds / seconds.max(1e-9)).clamp(1.5, 16.0);
        repeats = ((repeats as f64 * factor).ceil() as usize).min(REPEATS_MAX);
        seconds = run(repeats)?;
    }
    Ok(repeats)
}

/// Samples of the seconds that one repetition takes.
///
/// # Errors
/// Those of `run`, which is that of [`repeats`].
pub fn samples<E>(
    plan_of_samples: &SamplingPlan,
    mut run: impl FnMut(usize) -> Result<f64, E>,
) -> Result<Vec<f64>, E> {
    let repeats = repeats(plan_of_samples, &mut run)?;
    let (mut samples, begun) = (Vec::with_capacity(plan_of_samples.samples), Instant::now());
    while !plan_of_samples.is_enough(samples.len(), begun) {
        samples.push(run(repeats)? / repeats as f64);
    }
    Ok(samples)
}

/// Which of several ways to do the same is the fastest, and samples of its seconds. `run` runs
/// the way of an index so many times and gives the seconds.
///
/// Every way has a trial; the two best are then measured in turns, so that a device that slows
/// down or speeds up treats both alike.
///
/// # Errors
/// Those of `run`.
///
/// # Panics
/// If there is no way.
pub fn fastest<E>(
    plan_of_samples: &SamplingPlan,
    ways: usize,
    mut run: impl FnMut(usize, usize) -> Result<f64, E>,
) -> Result<(usize, Vec<f64>), E> {
    assert!(ways > 0, "nothing to measure");
    let trial =
        SamplingPlan { sample_seconds: plan_of_samples.sample_seconds / 4.0, ..*plan_of_samples };
    let mut order = Vec::with_capacity(ways);
    let mut best = f64::INFINITY;
    for way in 0..ways {
        // What is far behind already in its first, slower run is not run again.
        let first = run(way, 1)?;
        let seconds = if first > plan_of_samples.sample_seconds && first > 4.0 * best {
            first
        } else {
            let repeats = repeats(&trial, |repeats| run(way, repeats))?;
            run(way, repeats)? / repeats as f64
        };
        best = best.min(seconds);
        order.push((seconds, way));
    }
    order.sort_by(|a, b| a.0.total_cmp(&b.0));
    order.truncate(2);
    let mut measured: Vec<(usize, usize, Vec<f64>)> = Vec::new();
    for (seconds, way) in order {
        let repeats = (plan_of_samples.sample_seconds / seconds.max(1e-9)).ceil().max(1.0) as usize;
        measured.push((way, repeats.min(REPEATS_MAX), Vec::new()));
    }
    let begun = Instant::now();
    while !plan_of_samples.is_enough(measured[0].2.len(), begun) {
        for (way, repeats, samples) in &mut measured {
            samples.push(run(*way, *repeats)? / *repeats as f64);
        }
    }
    measured.sort_by(|a, b| median(&a.2).total_cmp(&median(&b.2)));
    let (way, _, samples) = measured.swap_remove(0);
    Ok((way, samples))
}

/// The middle value, or the mean of the two in the middle.
///
/// # Panics
/// If there is none.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    #[test]
    fn medians_of_even_and_odd_numbers() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[7.0]), 7.0);
    }

    #[test]
    fn slow_figures_have_fewer_samples() {
        let plan_of_samples =
            SamplingPlan { figure_seconds_max: 0.0, ..Effort::Normal.plan_of_samples() };
        let seconds = samples(&plan_of_samples, |_| Ok::<_, Infallible>(1.0)).unwrap();
        assert_eq!(seconds, [1.0; SAMPLES_MIN]);
        let plan_of_samples = SamplingPlan { figure_seconds_max: 1e3, ..plan_of_samples };
        assert_eq!(
            samples(&plan_of_samples, |_| Ok::<_, Infallible>(1.0)).unwrap().len(),
            plan_of_samples.samples
        );
    }

    #[test]
    fn samples_are_filled_with_repetitions() {
        let plan_of_samples = Effort::Normal.plan_of_samples();
        let mut counts = Vec::new();
        let run = |repeats: usize| -> Result<f64, Infallible> {
            counts.push(repeats);
            Ok(1e-4 * repeats as f64)
        };
        let samples = samples(&plan_of_samples, run).unwrap();
        assert_eq!(samples.len(), plan_of_samples.samples);
        assert!(samples.iter().all(|seconds| (seconds - 1e-4).abs() < 1e-9));
        assert!(counts.last().is_some_and(|last| (400..=600).contains(last)), "{counts:?}");
        assert_eq!(repeats(&plan_of_samples, |_| Ok::<_, Infallible>(1e-9)).unwrap(), REPEATS_MAX);
        assert_eq!(repeats(&plan_of_samples, |_| Ok::<_, Infallible>(1.0)).unwrap(), 1);
    }

    #[test]
    fn the_fastest_way_is_found_and_hopeless_ones_run_once() {
        let plan_of_samples = Effort::Normal.plan_of_samples();
        let each = [0.002, 0.001, 0.0011, 3.0];
        let mut runs = [0; 4];
        let run = |way: usize, repeats: usize| -> Result<f64, Infallible> {
            runs[way] += 1;
            Ok(each[way] * repeats as f64)
        };
        let (way, samples) = fastest(&plan_of_samples, each.len(), run).unwrap();
        assert_eq!((way, samples.len()), (1, plan_of_samples.samples));
        assert_eq!(runs[3], 1);
        assert!(runs[2] > plan_of_samples.samples && runs[0] < plan_of_samples.samples, "{runs:?}");
    }
}
