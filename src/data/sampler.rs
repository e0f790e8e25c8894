//! Sampler: the sample of a batch slot is a pure function of (seed, step, slot). There is no
//! state to save, so a resumed run, a run on more devices and a repeated step draw the same
//! samples as the first run.
//!
//! Each epoch is a permutation of all samples, computed without memory by cycle walking: a
//! Feistel network over the smallest even number of bits that holds the population, walked along
//! its cycle until it falls inside. Black and Rogaway, "Ciphers with arbitrary finite domains",
//! CT-RSA 2002.
//!
//! Models that carry their state from step to step get *streams* instead: the data are cut into as
//! many parts of equal length as a batch has slots, and each slot reads its part in order.

use potluck_core::Site;
use potluck_core::rng::Key;

/// Site of the sampler's random numbers, different from all sites of models.
const SITE: Site = Site(u32::MAX);

/// Rounds of the Feistel network: Luby and Rackoff need 4 for large halves; small halves need
/// more to mix.
const ROUNDS: u32 = 8;

/// Draws `batch` samples per step out of a population, without replacement in each epoch, or
/// through streams in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampler {
    seed: u64,
    population: u64,
    batch: u32,
    /// Steps done and samples consumed when this batch size took effect.
    origin: (u64, u64),
    streams: Option<Streams>,
}

/// Parts of the population that the slots read in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Streams {
    /// Distance from a sample to the next sample of the stream.
    distance: u64,
    /// Samples of a stream.
    length: u64,
}

/// Sample drawn for a batch slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SampleIndex {
    /// Epoch, from 0: number of complete passes over the population before.
    pub epoch: u64,
    /// Index of the sample, in `0..population`.
    pub index: u64,
}

impl Sampler {
    /// Creates a sampler; `population` is the number of samples to draw from, `batch` the global
    /// batch.
    pub fn new(seed: u64, population: u64, batch: u32) -> Self {
        assert!(population > 0, "there is a sample to draw");
        assert!(batch > 0, "a step draws samples");
        Self { seed, population, batch, origin: (0, 0), streams: None }
    }

    /// Returns the sampler whose slots read streams, in which samples follow each other at a
    /// distance; `None` if the population is too small for a sample in each. The remainder of a
    /// stream, less than a sample, is not drawn.
    pub fn of_streams(self, distance: u64) -> Option<Self> {
        let length = self.population / u64::from(self.batch) / distance.max(1);
        if length == 0 {
            return None;
        }
        Some(Self { streams: Some(Streams { distance, length }), ..self })
    }

    /// Returns the samples of a batch.
    pub fn batch(&self) -> u32 {
        self.batch
    }

    /// Returns the samples of an epoch.
    pub fn epoch_samples(&self) -> u64 {
        match self.streams {
            Some(streams) => streams.length * u64::from(self.batch),
            None => self.population,
        }
    }

    /// Returns true if each slot reads a stream.
    pub fn is_of_streams(&self) -> bool {
        self.streams.is_some()
    }

    /// Returns true if streams begin in a step, so that no state is carried from the previous step.
    pub fn begins_streams(&self, step: u64) -> bool {
        self.streams.is_some_and(|streams| self.turn(step).is_multiple_of(streams.length))
    }

    /// Returns the number of batches consumed before a step, in batches of the current size,
    /// rounded down.
    fn turn(&self, step: u64) -> u64 {
        self.consumed(step - 1) / u64::from(self.batch)
    }

    /// Returns the sampler for a run that resumes after `steps` steps which consumed `samples`
    /// samples, possibly with another batch size: no sample is skipped or drawn twice, except with
    /// streams, which another batch size cuts at other places.
    pub fn after(self, steps: u64, samples: u64) -> Self {
        Self { origin: (steps, samples), ..self }
    }

    /// Number of samples consumed when `step` steps are done.
    pub(crate) fn consumed(&self, step: u64) -> u64 {
        let (steps, samples) = self.origin;
        samples + (step - steps) * u64::from(self.batch)
    }

    /// Returns the sample in slot `slot` (`0..batch`) of the global batch of a step; steps count
    /// from 1.
    pub fn sample(&self, step: u64, slot: u32) -> SampleIndex {
        assert!(step > self.origin.0, "steps count from 1, or from the resumed step");
        assert!(slot < self.batch, "slot {slot} is outside the batch of {}", self.batch);
        if let Some(Streams { distance, length }) = self.streams {
            let turn = self.turn(step);
            let part = self.population / u64::from(self.batch);
            let index = u64::from(slot) * part + turn % length * distance;
            return SampleIndex { epoch: turn / length, index };
        }
        let counter = self.consumed(step - 1) + u64::from(slot);
        let epoch = counter / self.population;
        let key = Key::new(self.seed).site(SITE).step(epoch);
        SampleIndex { epoch, index: permuted(key, self.population, counter % self.population) }
    }
}

/// Maps `position` by the permutation of `0..population` that the key selects.
pub(super) fn permuted(key: Key, population: u64, position: u64) -> u64 {
    let bits = u64::BITS - (population - 1).leading_zeros();
    let half = bits.div_ceil(2);
    let mut position = position;
    // The network permutes fewer than 4 * population numbers, so that a walk takes fewer than 4
    // steps on average; it ends inside because the cycle began there.
    loop {
        position = feistel(key, half, position);
        if position < population {
            return position;
        }
    }
}

/// Feistel network: a permutation of the numbers of `2 * half` bits; `half` is at most 32.
fn feistel(key: Key, half: u32, number: u64) -> u64 {
    let mask = (1u64 << half) - 1;
    let (mut left, mut right) = (number >> half, number & mask);
    for round in 0..ROUNDS {
        let [word, _] = key.words([right as u32, round]);
        (left, right) = (right, left ^ (u64::from(word) & mask));
    }
    left << half | right
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn epoch(seed: u64, population: u64, epoch: u64) -> Vec<u64> {
        let sampler = Sampler::new(seed, population, 1);
        let first = epoch * population + 1;
        let drawn: Vec<SampleIndex> =
            (first..first + population).map(|s| sampler.sample(s, 0)).collect();
        assert!(drawn.iter().all(|d| d.epoch == epoch));
        drawn.into_iter().map(|d| d.index).collect()
    }

    #[test]
    fn another_batch_size_goes_on_where_the_first_one_ended() {
        let small = Sampler::new(3, 50, 4);
        let all: Vec<SampleIndex> =
            (1..=9).flat_map(|s| (0..4).map(move |i| small.sample(s, i))).collect();
        let large = Sampler::new(3, 50, 6).after(3, small.consumed(3));
        let rest: Vec<SampleIndex> =
            (4..=7).flat_map(|s| (0..6).map(move |i| large.sample(s, i))).collect();
        assert_eq!(rest, all[12..]);
        assert_eq!(large.consumed(7), 36);
    }

    #[test]
    fn streams_go_through_their_parts_in_order() {
        // Two parts of 10 and a rest of 1: in each, three samples of 3 and a rest of 1.
        let streams = Sampler::new(3, 21, 2).of_streams(3).unwrap();
        let drawn = |step| [0, 1].map(|slot| streams.sample(step, slot).index);
        assert_eq!((1..=4).map(drawn).collect::<Vec<_>>(), [[0, 10], [3, 13], [6, 16], [0, 10]]);
        let begins: Vec<bool> = (1..=7).map(|step| streams.begins_streams(step)).collect();
        assert_eq!(begins, [true, false, false, true, false, false, true]);
        assert_eq!((streams.epoch_samples(), streams.sample(4, 0).epoch), (6, 1));
        // A resumed run continues where it stopped.
        let resumed = streams.after(2, streams.consumed(2));
        assert_eq!(resumed.sample(3, 1), streams.sample(3, 1));
        assert!(!resumed.begins_streams(3) && resumed.begins_streams(4));
        let random = Sampler::new(3, 21, 2);
        assert!(!random.begins_streams(1) && random.epoch_samples() == 21);
        assert_eq!(random.of_streams(11), None);
        assert!(random.of_streams(10).is_some());
    }

    #[test]
    fn each_epoch_visits_each_sample_once() {
        for population in [1, 2, 3, 4, 5, 7, 16, 17, 101, 1000, 1024, 7919] {
            for number in [0, 1, 5] {
                let mut indices = epoch(1337, population, number);
                indices.sort_unstable();
                assert!(indices.into_iter().eq(0..population), "{population}, epoch {number}");
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ() {
        let orders = [(1, 0), (1, 1), (1, 2), (2, 0), (1 << 32, 0)];
        let distinct: HashSet<Vec<u64>> =
            orders.iter().map(|(seed, number)| epoch(*seed, 1000, *number)).collect();
        assert_eq!(distinct.len(), orders.len());
        assert_ne!(epoch(1, 1000, 0), (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn the_order_of_asking_does_not_matter() {
        let sampler = Sampler::new(3, 50, 12);
        let places: Vec<(u64, u32)> =
            (1..=20).flat_map(|step| (0..12).map(move |slot| (step, slot))).collect();
        let ahead: Vec<SampleIndex> = places.iter().map(|(s, t)| sampler.sample(*s, *t)).collect();
        let mut back: Vec<SampleIndex> =
            places.iter().rev().map(|(s, t)| sampler.sample(*s, *t)).collect();
        back.reverse();
        assert_eq!(ahead, back);
    }

    #[test]
    fn the_batch_only_cuts_the_sequence() {
        let (one, many) = (Sampler::new(3, 50, 1), Sampler::new(3, 50, 12));
        for counter in 0..120u64 {
            let (step, slot) = (counter / 12 + 1, (counter % 12) as u32);
            assert_eq!(many.sample(step, slot), one.sample(counter + 1, 0));
        }
    }

    /// Chi-squared test: over many epochs, every sample comes at every position about equally
    /// often, so the sum of (observed - expected)^2 / expected over all cells is about the
    /// degrees of freedom.
    #[test]
    fn orders_are_roughly_uniform() {
        for population in [2u64, 3, 5, 10] {
            let epochs = 4000;
            let cells = (population * population) as usize;
            let mut counts = vec![0u32; cells];
            for number in 0..epochs {
                for (place, index) in epoch(9, population, number).into_iter().enumerate() {
                    counts[place * population as usize + index as usize] += 1;
                }
            }
            let expected = epochs as f64 / population as f64;
            let distance: f64 =
                counts.iter().map(|c| (f64::from(*c) - expected).powi(2) / expected).sum();
            let freedom = ((population - 1) * (population - 1)) as f64;
            // Five standard deviations of the chi-squared distribution.
            assert!(distance < freedom + 5.0 * (2.0 * freedom).sqrt(), "{population}: {distance}");
        }
    }

    #[test]
    fn neighbours_in_a_batch_are_not_neighbours_in_the_text() {
        let indices = epoch(1337, 1_000_000, 0);
        let near = indices.windows(2).filter(|w| w[0].abs_diff(w[1]) < 1000).count();
        // Two random places are this near with probability 0.002.
        assert!((1700..2300).contains(&near), "{near}");
    }

    #[test]
    fn the_largest_population_works() {
        let sampler = Sampler::new(1, u64::MAX, 1);
        assert_ne!(sampler.sample(1, 0), sampler.sample(2, 0));
    }
}
