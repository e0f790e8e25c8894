//! Division of devices into pipelines: which devices make a pipeline together, how each pipeline
//! cuts the model, and how many samples it gets, so that a step takes the least time. Pure: from
//! measured times to a decision.

use std::collections::HashMap;
use std::ops::Range;

use super::balance::{GAIN_MIN, ThroughputModel, apportion, give_each_a_sample};
use super::cut::{BlockTimes, Cut, CutError, CutRequest, CutStage, EXACT_DEVICES, by_stage, cut};
use crate::Mesh;
use crate::pipeline::chunks_of_stage;

/// Inputs of a division. All devices take part: a multiple of the stages.
#[derive(Clone, Copy)]
pub struct PartitionRequest<'a> {
    /// Seconds of each block on each device, for one micro-batch: by device, then by block.
    pub times: &'a [Vec<BlockTimes>],
    /// Seconds that a cut before a block costs: by device, then by block.
    pub cut_s: &'a [Vec<f64>],
    /// By device: equal numbers for devices of equal times and equal memory.
    pub kinds: &'a [usize],
    pub stages: usize,
    /// Model chunks per stage.
    pub chunks: usize,
    /// True if each device is the rank of its number in the mesh of the pipelines.
    pub is_ordered: bool,
    pub samples: SampleCounts,
    /// As [`CutRequest::fits`], with the number of the device among all.
    pub fits: &'a dyn Fn(CutStage<'_>) -> bool,
}

/// Samples to be split among pipelines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleCounts {
    pub batch: u32,
    pub micro_batch: u32,
    /// The number of micro-batches of each pipeline is a multiple of this.
    pub round: u32,
}

impl SampleCounts {
    /// Splits the samples among pipelines, given the seconds of each one's slowest stage for a
    /// micro-batch: in whole rounds of micro-batches, where the last micro-batch may have fewer
    /// samples. Each pipeline gets at least one round; if there are too few rounds, samples are
    /// split one by one.
    pub fn split(&self, slowest_s: &[f64]) -> Vec<u32> {
        let pipelines = slowest_s.len() as u32;
        let unit = self.micro_batch.saturating_mul(self.round).max(1);
        let rounds = self.batch.div_ceil(unit).max(pipelines);
        let missing = u64::from(rounds) * u64::from(unit) - u64::from(self.batch);
        let missing_max = self.micro_batch.saturating_sub(1);
        if missing > u64::from(pipelines) * u64::from(missing_max) {
            return in_units(self.batch, slowest_s);
        }
        let mut counts = in_units(rounds, slowest_s);
        for count in &mut counts {
            *count *= unit;
        }
        // Each missing sample is taken from the pipeline that finishes last.
        let mut spare = vec![missing_max; counts.len()];
        for _ in 0..missing {
            let last = (0..counts.len()).filter(|&at| spare[at] > 0).max_by(|&a, &b| {
                let a_s = f64::from(counts[a]) * slowest_s[a];
                let b_s = f64::from(counts[b]) * slowest_s[b];
                a_s.total_cmp(&b_s)
            });
            if let Some(last) = last {
                counts[last] -= 1;
                spare[last] -= 1;
            }
        }
        counts
    }

    /// Returns the seconds until the last pipeline has run its samples. The time to fill and drain
    /// the pipelines is left out: it is the same for all divisions.
    fn step_s(&self, counts: &[u32], slowest_s: &[f64]) -> f64 {
        let micro_batch = f64::from(self.micro_batch.max(1));
        let mut step_s: f64 = 0.0;
        for (&count, slowest_s) in counts.iter().zip(slowest_s) {
            step_s = step_s.max(f64::from(count) / micro_batch * slowest_s);
        }
        step_s
    }
}

/// Splits units among pipelines by their speed; each gets one if there are enough.
fn in_units(units: u32, slowest_s: &[f64]) -> Vec<u32> {
    let mut speeds = Vec::with_capacity(slowest_s.len());
    for slowest_s in slowest_s {
        let row_s = slowest_s.max(f64::MIN_POSITIVE);
        speeds.push(ThroughputModel { fixed_s: 0.0, row_s, micro_batch: 1 });
    }
    let mut counts = apportion(units, &speeds);
    give_each_a_sample(&mut counts);
    counts
}

/// Pipelines, with the samples of each.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelinePartition {
    /// Cut of each pipeline; its devices are numbered as in the request.
    pub pipelines: Vec<Cut>,
    /// Samples of each pipeline.
    pub counts: Vec<u32>,
    /// Predicted seconds of a step.
    pub step_s: f64,
}

impl PipelinePartition {
    /// Returns the division into these pipelines, with the samples split by their speed.
    pub fn of(pipelines: Vec<Cut>, samples: &SampleCounts) -> Self {
        let slowest_s: Vec<f64> = pipelines.iter().map(|cut| cut.slowest_s).collect();
        let counts = samples.split(&slowest_s);
        let step_s = samples.step_s(&counts, &slowest_s);
        Self { pipelines, counts, step_s }
    }
}

/// Returns the pipelines of the devices in their order with the given model chunks, and samples by
/// the times of their stages. Arguments are as in a [`PartitionRequest`].
pub fn with_given_cut(
    chunks: &[Range<u32>],
    stages: usize,
    times: &[Vec<BlockTimes>],
    cut_s: &[Vec<f64>],
    samples: &SampleCounts,
) -> PipelinePartition {
    let mut pipelines = Vec::new();
    for devices in consecutive(times.len(), stages) {
        let seconds = stage_seconds(times, cut_s, &devices, chunks);
        let slowest_s = seconds.into_iter().fold(0.0, f64::max);
        pipelines.push(Cut { devices, blocks: by_stage(chunks, stages), slowest_s });
    }
    PipelinePartition::of(pipelines, samples)
}

/// Divides the devices into pipelines so that a step takes the least time. For at most
/// [`EXACT_DEVICES`] devices every way to divide them into groups is tried, otherwise only the
/// groups of consecutive ones; each group is cut by [`cut`]. Devices that are nearly as fast in
/// their order stay in it, because settings can repeat that; otherwise, of equally fast divisions,
/// the one whose groups come first in the order of the devices is taken.
///
/// # Errors
/// Returns the error of the group of consecutive devices that cannot be cut if no division can.
pub fn divide(request: &PartitionRequest<'_>) -> Result<PipelinePartition, CutError> {
    let devices = request.times.len();
    let divisions = if request.is_ordered || devices > EXACT_DEVICES {
        vec![consecutive(devices, request.stages)]
    } else {
        groupings(&(0..devices).collect::<Vec<_>>(), request.stages)
    };
    let mut cuts = HashMap::new();
    let mut best: Option<PipelinePartition> = None;
    let mut failed: Option<CutError> = None;
    for groups in divisions {
        match of_groups(request, &groups, &mut cuts) {
            Ok(found) if best.as_ref().is_none_or(|best| found.step_s < best.step_s) => {
                best = Some(found);
            }
            Ok(_) => {}
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    let Some(best) = best else {
        // There is at least one division: it was found, or it failed.
        return Err(failed.unwrap_or(CutError::Memory { device: None, stage: None }));
    };
    if request.is_ordered {
        return Ok(best);
    }
    let in_order = PartitionRequest { is_ordered: true, ..*request };
    match of_groups(&in_order, &consecutive(devices, request.stages), &mut HashMap::new()) {
        Ok(ordered) if ordered.step_s * (1.0 - GAIN_MIN) <= best.step_s => Ok(ordered),
        _ => Ok(best),
    }
}

/// Cuts by the kinds of a group's devices; devices are numbers within the group.
type KnownCuts = HashMap<Vec<usize>, Result<Cut, CutError>>;

fn of_groups(
    request: &PartitionRequest<'_>,
    groups: &[Vec<usize>],
    cuts: &mut KnownCuts,
) -> Result<PipelinePartition, CutError> {
    let mut pipelines = Vec::new();
    for group in groups {
        let kinds = group.iter().map(|device| request.kinds[*device]).collect();
        let cut = cuts.entry(kinds).or_insert_with(|| cut_of(request, group));
        pipelines.push(of_all(cut.clone(), group)?);
    }
    Ok(PipelinePartition::of(pipelines, &request.samples))
}

fn cut_of(request: &PartitionRequest<'_>, group: &[usize]) -> Result<Cut, CutError> {
    let mut times = Vec::with_capacity(group.len());
    let mut cut_s = Vec::with_capacity(group.len());
    for &device in group {
        times.push(request.times[device].clone());
        cut_s.push(request.cut_s[device].clone());
    }
    cut(&CutRequest {
        times: &times,
        cut_s: &cut_s,
        chunks: request.chunks,
        stages: request.stages,
        is_ordered: request.is_ordered,
        fits: &|stage| (request.fits)(CutStage { device: group[stage.device], ..stage }),
    })
}

/// Cut of a group with the numbers that its devices have among all.
fn of_all(cut: Result<Cut, CutError>, group: &[usize]) -> Result<Cut, CutError> {
    match cut {
        Ok(cut) => {
            let devices = cut.devices.iter().map(|device| group[*device]).collect();
            Ok(Cut { devices, ..cut })
        }
        Err(CutError::Memory { device, stage }) => {
            Err(CutError::Memory { device: device.map(|device| group[device]), stage })
        }
        Err(error) => Err(error),
    }
}

fn consecutive(devices: usize, stages: usize) -> Vec<Vec<usize>> {
    let mut groups = Vec::new();
    for stages in Mesh::of_pipelines(devices / stages, stages).pipelines() {
        groups.push(stages.iter().flatten().map(|rank| rank.index()).collect());
    }
    groups
}

/// Returns all ways to divide devices, given in ascending order, into groups of `size`, which are
/// in the order of their first devices; the groups of consecutive devices come first.
fn groupings(devices: &[usize], size: usize) -> Vec<Vec<Vec<usize>>> {
    let Some((&first, others)) = devices.split_first() else { return vec![Vec::new()] };
    let mut found = Vec::new();
    for chosen in combinations(others, size - 1) {
        let rest: Vec<usize> = others.iter().copied().filter(|d| !chosen.contains(d)).collect();
        let group = [vec![first], chosen].concat();
        for further in groupings(&rest, size) {
            found.push([vec![group.clone()], further].concat());
        }
    }
    found
}

/// Returns all ways to choose `count` of these numbers, in lexicographic order.
fn combinations(of: &[usize], count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let Some((&first, others)) = of.split_first() else { return Vec::new() };
    let mut found = Vec::new();
    for rest in combinations(others, count - 1) {
        found.push([vec![first], rest].concat());
    }
    found.extend(combinations(others, count));
    found
}

/// Returns the seconds of each stage of the given cut, for one micro-batch: chunk c is on stage
/// `c % stages`, and stage s on the s-th of the devices.
pub fn stage_seconds(
    times: &[Vec<BlockTimes>],
    cut_s: &[Vec<f64>],
    devices: &[usize],
    chunks: &[Range<u32>],
) -> Vec<f64> {
    let mut stages_s = Vec::with_capacity(devices.len());
    for (stage, &device) in devices.iter().enumerate() {
        let of_stage = chunks_of_stage(chunks, devices.len(), stage);
        stages_s.push(of_stage.map(|run| chunk_s(&times[device], &cut_s[device], run)).sum());
    }
    stages_s
}

/// Seconds of a chunk on one device, with the cuts beside it.
fn chunk_s(times: &[BlockTimes], cut_s: &[f64], run: &Range<u32>) -> f64 {
    let start = run.start as usize;
    let end = run.end as usize;
    let blocks: f64 = times[start..end].iter().map(BlockTimes::sum_s).sum();
    let before = if start > 0 { cut_s[start] } else { 0.0 };
    blocks + before + cut_s.get(end).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seconds of a block on each device; all blocks of a device take the same.
    struct Devices(Vec<f64>);

    impl Devices {
        fn divided(
            &self,
            stages: usize,
            batch: u32,
            is_ordered: bool,
            fits: &dyn Fn(CutStage<'_>) -> bool,
        ) -> Result<PipelinePartition, CutError> {
            let blocks = 6;
            let row = |&s: &f64| {
                let [forward_s, backward_input_s, backward_weight_s] = [s / 4.0, s / 2.0, s / 4.0];
                vec![BlockTimes { forward_s, backward_input_s, backward_weight_s }; blocks]
            };
            let times: Vec<_> = self.0.iter().map(row).collect();
            let cut_s = vec![vec![0.0; blocks]; times.len()];
            let kind = |s: &f64| self.0.iter().position(|other| other == s).unwrap();
            divide(&PartitionRequest {
                times: &times,
                cut_s: &cut_s,
                kinds: &self.0.iter().map(kind).collect::<Vec<_>>(),
                stages,
                chunks: 1,
                is_ordered,
                samples: SampleCounts { batch, micro_batch: 1, round: 1 },
                fits,
            })
        }
    }

    fn devices_of(division: &PipelinePartition) -> Vec<Vec<usize>> {
        division.pipelines.iter().map(|cut| cut.devices.clone()).collect()
    }

    #[test]
    fn every_grouping_is_listed_once_and_the_typed_one_first() {
        let of = |devices: usize, size| groupings(&(0..devices).collect::<Vec<_>>(), size);
        assert_eq!(of(4, 2)[0], consecutive(4, 2));
        let numbers = [(4, 2, 3), (6, 2, 15), (6, 3, 10), (8, 2, 105), (8, 4, 35), (3, 3, 1)];
        for (devices, size, count) in numbers {
            let mut all = of(devices, size);
            assert_eq!(all.len(), count, "{devices} devices in groups of {size}");
            all.sort();
            all.dedup();
            assert_eq!(all.len(), count);
            let is_whole = |groups: &Vec<Vec<usize>>| {
                let mut devices = groups.concat();
                devices.sort_unstable();
                devices.iter().copied().eq(0..devices.len())
            };
            assert!(all.iter().all(is_whole));
        }
    }

    #[test]
    fn equal_devices_keep_the_typed_order_and_share_evenly() {
        let division = Devices(vec![1.0; 4]).divided(2, 12, false, &|_| true).unwrap();
        assert_eq!(devices_of(&division), [[0, 1], [2, 3]]);
        assert_eq!((division.counts, division.step_s), (vec![6, 6], 6.0 * 3.0));
    }

    #[test]
    fn the_fastest_grouping_is_found_and_an_order_that_is_given_is_kept() {
        // Two fast devices of 1 s per block and two slow ones of 2 s. Together, fast ones take 3 s
        // per micro-batch and slow ones 6 s: 8 and 4 samples in 24 s. Mixed, both pipelines take
        // 4 s (4 blocks and 2 blocks): 6 and 6 samples in 24 s. Typed first wins the tie.
        let devices = Devices(vec![1.0, 2.0, 1.0, 2.0]);
        let division = devices.divided(2, 12, false, &|_| true).unwrap();
        assert_eq!((devices_of(&division), division.step_s), (vec![vec![0, 1], vec![2, 3]], 24.0));
        // With 9 samples: 6 and 3 take 18 s, 5 and 4 of mixed pipelines 20 s.
        let division = devices.divided(2, 9, false, &|_| true).unwrap();
        assert_eq!(devices_of(&division), [[0, 2], [1, 3]]);
        assert_eq!((division.counts, division.step_s), (vec![6, 3], 18.0));
        let division = devices.divided(2, 9, true, &|_| true).unwrap();
        assert_eq!(devices_of(&division), [[0, 1], [2, 3]]);
        assert_eq!((division.counts, division.step_s), (vec![5, 4], 20.0));
    }

    #[test]
    fn memory_decides_where_times_do_not_and_names_a_device_of_all() {
        // Device 3 holds one block at most.
        let small = |stage: CutStage<'_>| stage.device != 3 || stage.blocks[0].len() < 2;
        let division = Devices(vec![1.0, 1.0, 1.0, 1.5]).divided(2, 12, false, &small).unwrap();
        let of_small = division.pipelines.iter().find(|cut| cut.devices.contains(&3)).unwrap();
        let stage = of_small.devices.iter().position(|device| *device == 3).unwrap();
        assert_eq!(of_small.blocks[stage][0].len(), 1);
        let none = |stage: CutStage<'_>| stage.device != 3;
        let error = Devices(vec![1.0, 1.0, 1.0, 1.5]).divided(2, 12, false, &none).unwrap_err();
        assert_eq!(error, CutError::Memory { device: Some(3), stage: None });
    }

    #[test]
    fn samples_are_split_in_whole_rounds_where_that_is_possible() {
        let counts = |batch, round| SampleCounts { batch, micro_batch: 3, round };
        assert_eq!(counts(36, 2).split(&[1.0, 2.0]), [24, 12]);
        assert_eq!(counts(36, 2).split(&[1.0, 100.0]), [30, 6]);
        // The last micro-batch of a round may be short: 10 micro-batches and 4.
        assert_eq!(counts(38, 2).split(&[1.0, 2.0]), [28, 10]);
        assert_eq!(counts(9, 2).split(&[1.0, 2.0]), [5, 4]);
        // Too few for a round each: by samples.
        assert_eq!(counts(7, 2).split(&[1.0, 2.0]), [5, 2]);
        assert_eq!(counts(2, 1).split(&[1.0, 9.0]), [1, 1]);
        assert_eq!(counts(12, 1).split(&[f64::INFINITY]), [12]);
    }

    /// Whatever was measured, no split is refused by a schedule of rounds that takes an even one.
    #[test]
    fn counts_fill_the_rounds_of_the_schedule_wherever_even_ones_do() {
        let speeds = [[1.0, 1.0, 1.0], [1.0, 2.0, 7.0], [5.0, 0.1, 1.0], [1.0, 40.0, 1.5]];
        for (batch, micro_batch, round) in
            (1..80).flat_map(|batch| (1..6).flat_map(move |m| (1..5).map(move |r| (batch, m, r))))
        {
            let fills = |counts: &[u32]| {
                let is_whole = |count: &u32| count.div_ceil(micro_batch).is_multiple_of(round);
                counts.iter().all(|count| *count > 0 && is_whole(count))
            };
            for speeds in &speeds {
                let samples = SampleCounts { batch, micro_batch, round };
                for pipelines in 1..=3 {
                    let counts = samples.split(&speeds[..pipelines]);
                    assert_eq!(counts.iter().sum::<u32>(), batch, "{samples:?}: {counts:?}");
                    let each = |at: usize| {
                        batch / pipelines as u32 + u32::from(at < (batch as usize % pipelines))
                    };
                    let even: Vec<u32> = (0..pipelines).map(each).collect();
                    assert!(fills(&counts) || !fills(&even), "{samples:?}: {counts:?}");
                }
            }
        }
    }

    #[test]
    fn a_given_cut_takes_what_its_stages_take() {
        let block =
            |s: f64| BlockTimes { forward_s: s, backward_input_s: 0.0, backward_weight_s: 0.0 };
        let times = [vec![block(1.0); 4], vec![block(2.0); 4]];
        let cut_s = [vec![0.5; 4], vec![0.25; 4]];
        assert_eq!(stage_seconds(&times, &cut_s, &[0, 1], &[0..3, 3..4]), [3.5, 2.25]);
        assert_eq!(stage_seconds(&times, &cut_s, &[1, 0], &[0..3, 3..4]), [6.25, 1.5]);
        let interleaved = [0..1, 1..2, 2..3, 3..4];
        assert_eq!(stage_seconds(&times, &cut_s, &[0, 1], &interleaved), [3.5, 4.75]);
    }
}
