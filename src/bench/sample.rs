//! Sampling of measurements: number of samples and duration of each.

use potluck_core::arithmetic::median;
use std::time::{Duration, Instant};

/// Thoroughness of a benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// A fraction of a second: checks that everything runs. The figures are not meaningful.
    Tiny,
    /// Up to a quarter of a minute on a software device.
    Quick,
    /// Up to a minute on a software device.
    Normal,
}

/// Numbers of samples, time limits and sizes of an [`Effort`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingPlan {
    /// Samples per figure; fewer if they take more than `figure_seconds_max`.
    pub samples: usize,
    pub(crate) figure_seconds_max: f64,
    /// Duration of a sample in seconds, which is filled with repetitions.
    pub(crate) sample_seconds: f64,
    /// Maximum seconds of a matrix product; longer ones are skipped.
    pub(crate) product_seconds_max: f64,
    /// Maximum seconds of all matrix products; the remaining ones are skipped.
    pub(crate) products_seconds_max: f64,
    /// Measured training steps; fewer if they take more than `steps_seconds_max`.
    pub steps: usize,
    pub(crate) steps_seconds_max: f64,
    /// Bytes of each array of the memory figures, on the processor and on hardware GPUs.
    pub memory_bytes: [u64; 2],
    /// Bytes of an upload and of a readback.
    pub(crate) transfer_bytes: u64,
    /// Rounds of the chains of multiply-adds on GPUs; the processor does four times as many.
    pub rounds: usize,
    /// Samples in a batch of the training step.
    pub batch: usize,
}

impl Effort {
    /// All efforts, from the shortest to the longest.
    pub const ALL: [Self; 3] = [Self::Tiny, Self::Quick, Self::Normal];

    /// Returns the name of the effort in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Quick => "quick",
            Self::Normal => "normal",
        }
    }

    /// Returns the number, duration and size of the measurements.
    pub fn sampling_plan(self) -> SamplingPlan {
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

/// Minimum number of samples of a figure, regardless of their duration.
const SAMPLES_MIN: usize = 3;

impl SamplingPlan {
    /// Returns true if a figure has enough samples; the first began at `begun`.
    pub fn is_enough(&self, samples: usize, begun: Instant) -> bool {
        let is_over = begun.elapsed() >= Duration::from_secs_f64(self.figure_seconds_max);
        samples >= self.samples || (samples >= SAMPLES_MIN && is_over)
    }
}

/// Maximum number of repetitions in a sample: they are recorded as one submission.
const REPEATS_MAX: usize = 4096;

/// Returns the number of repetitions that fill a sample. `run` performs the given number of
/// repetitions and returns their seconds; its first call is a warm-up and is not counted.
///
/// # Errors
/// Returns the error of `run` if it fails.
pub fn repeats<E>(
    sampling_plan: &SamplingPlan,
    mut run: impl FnMut(usize) -> Result<f64, E>,
) -> Result<usize, E> {
    run(1)?;
    let mut repeats = 1;
    let mut seconds = run(1)?;
    while seconds < sampling_plan.sample_seconds && repeats < REPEATS_MAX {
        let factor = (sampling_plan.sample_seconds / seconds.max(1e-9)).clamp(1.5, 16.0);
        repeats = ((repeats as f64 * factor).ceil() as usize).min(REPEATS_MAX);
        seconds = run(repeats)?;
    }
    Ok(repeats)
}

/// Returns samples of the seconds that one repetition takes.
///
/// # Errors
/// Returns the error of `run`, a callback as in [`repeats`], if it fails.
pub fn samples<E>(
    sampling_plan: &SamplingPlan,
    mut run: impl FnMut(usize) -> Result<f64, E>,
) -> Result<Vec<f64>, E> {
    let repeats = repeats(sampling_plan, &mut run)?;
    let mut samples = Vec::with_capacity(sampling_plan.samples);
    let begun = Instant::now();
    while !sampling_plan.is_enough(samples.len(), begun) {
        samples.push(run(repeats)? / repeats as f64);
    }
    Ok(samples)
}

/// Alternative that is measured after its trial.
struct Alternative {
    /// Index among all alternatives.
    way: usize,
    /// Repetitions in a sample.
    repeats: usize,
    samples: Vec<f64>,
}

/// Returns the index of the fastest of several equivalent alternatives, and samples of its
/// seconds. `run` repeats the alternative of an index the given number of times and returns the
/// seconds.
///
/// Every alternative has a trial; the two best are then measured in turns, so that a device that
/// slows down or speeds up affects both alike.
///
/// # Errors
/// Returns the error of `run` if it fails.
///
/// # Panics
/// Panics if there is no alternative.
pub fn fastest<E>(
    sampling_plan: &SamplingPlan,
    ways: usize,
    mut run: impl FnMut(usize, usize) -> Result<f64, E>,
) -> Result<(usize, Vec<f64>), E> {
    assert!(ways > 0, "nothing to measure");
    let trial =
        SamplingPlan { sample_seconds: sampling_plan.sample_seconds / 4.0, ..*sampling_plan };
    let mut order = Vec::with_capacity(ways);
    let mut best = f64::INFINITY;
    for way in 0..ways {
        // An alternative that is far behind in its first, slower run is not run again.
        let first = run(way, 1)?;
        let seconds = if first > sampling_plan.sample_seconds && first > 4.0 * best {
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
    let mut measured = Vec::new();
    for (seconds, way) in order {
        let repeats = (sampling_plan.sample_seconds / seconds.max(1e-9)).ceil().max(1.0) as usize;
        let repeats = repeats.min(REPEATS_MAX);
        measured.push(Alternative { way, repeats, samples: Vec::new() });
    }
    let begun = Instant::now();
    while !sampling_plan.is_enough(measured[0].samples.len(), begun) {
        for Alternative { way, repeats, samples } in &mut measured {
            samples.push(run(*way, *repeats)? / *repeats as f64);
        }
    }
    measured.sort_by(|a, b| median(&a.samples).total_cmp(&median(&b.samples)));
    let fastest = measured.swap_remove(0);
    Ok((fastest.way, fastest.samples))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    #[test]
    fn slow_figures_have_fewer_samples() {
        let sampling_plan =
            SamplingPlan { figure_seconds_max: 0.0, ..Effort::Normal.sampling_plan() };
        let seconds = samples(&sampling_plan, |_| Ok::<_, Infallible>(1.0)).unwrap();
        assert_eq!(seconds, [1.0; SAMPLES_MIN]);
        let sampling_plan = SamplingPlan { figure_seconds_max: 1e3, ..sampling_plan };
        assert_eq!(
            samples(&sampling_plan, |_| Ok::<_, Infallible>(1.0)).unwrap().len(),
            sampling_plan.samples
        );
    }

    #[test]
    fn samples_are_filled_with_repetitions() {
        let sampling_plan = Effort::Normal.sampling_plan();
        let mut counts = Vec::new();
        let run = |repeats: usize| -> Result<f64, Infallible> {
            counts.push(repeats);
            Ok(1e-4 * repeats as f64)
        };
        let samples = samples(&sampling_plan, run).unwrap();
        assert_eq!(samples.len(), sampling_plan.samples);
        assert!(samples.iter().all(|seconds| (seconds - 1e-4).abs() < 1e-9));
        assert!(counts.last().is_some_and(|last| (400..=600).contains(last)), "{counts:?}");
        assert_eq!(repeats(&sampling_plan, |_| Ok::<_, Infallible>(1e-9)).unwrap(), REPEATS_MAX);
        assert_eq!(repeats(&sampling_plan, |_| Ok::<_, Infallible>(1.0)).unwrap(), 1);
    }

    #[test]
    fn the_fastest_way_is_found_and_hopeless_ones_run_once() {
        let sampling_plan = Effort::Normal.sampling_plan();
        let each = [0.002, 0.001, 0.0011, 3.0];
        let mut runs = [0; 4];
        let run = |way: usize, repeats: usize| -> Result<f64, Infallible> {
            runs[way] += 1;
            Ok(each[way] * repeats as f64)
        };
        let (way, samples) = fastest(&sampling_plan, each.len(), run).unwrap();
        assert_eq!((way, samples.len()), (1, sampling_plan.samples));
        assert_eq!(runs[3], 1);
        assert!(runs[2] > sampling_plan.samples && runs[0] < sampling_plan.samples, "{runs:?}");
    }
}
