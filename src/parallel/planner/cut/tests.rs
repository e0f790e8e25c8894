//! Tests of cuts: against all possible cuts, and of the messages to users.

use std::cell::Cell;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;

/// Request that owns its tables. Times are small multiples of 1/8 s, so sums are exact.
#[derive(Clone, Debug)]
struct Problem {
    times: Vec<Vec<BlockTimes>>,
    cut_s: Vec<Vec<f64>>,
    chunks: usize,
    is_ordered: bool,
    memory: Memory,
}

/// Memory of the devices of a problem.
#[derive(Clone, Debug)]
enum Memory {
    Unlimited,
    /// Capacity by device, and need by block, once and again for each stage that follows.
    Limited(Vec<u32>, Vec<u32>),
    /// Three subjects of four fit, by a hash of the subject and this seed.
    Arbitrary(u64),
}

impl Problem {
    /// A problem with one time per block on each device.
    fn of(times: &[&[f64]]) -> Problem {
        let block = |&s: &f64| BlockTimes {
            forward_s: s / 4.0,
            backward_input_s: s / 2.0,
            backward_weight_s: s / 4.0,
        };
        Problem {
            times: times.iter().map(|row| row.iter().map(block).collect()).collect(),
            cut_s: times.iter().map(|row| vec![0.0; row.len()]).collect(),
            chunks: 1,
            is_ordered: false,
            memory: Memory::Unlimited,
        }
    }

    fn stages(&self) -> usize {
        self.times.len()
    }

    fn blocks(&self) -> u32 {
        self.times[0].len() as u32
    }

    fn fits(&self, subject: CutStage<'_>) -> bool {
        let CutStage { device, stage, blocks } = subject;
        assert!(blocks.len() == self.chunks && blocks.iter().all(|run| !run.is_empty()));
        match &self.memory {
            Memory::Unlimited => true,
            Memory::Limited(capacity, need) => {
                let need: u32 = blocks.iter().cloned().flatten().map(|b| need[b as usize]).sum();
                need * (self.stages() - stage) as u32 <= capacity[device]
            }
            Memory::Arbitrary(seed) => {
                let runs = blocks.iter().flat_map(|run| [run.start, run.end]);
                let words = [device as u64, stage as u64].into_iter().chain(runs.map(u64::from));
                let mix =
                    |h: u64, w: u64| (h ^ w).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
                words.fold(*seed, mix) % 4 != 0
            }
        }
    }

    fn cut(&self) -> Result<Cut, CutError> {
        let fits = |subject: CutStage<'_>| self.fits(subject);
        cut(&self.request(&fits))
    }

    fn request<'a>(&'a self, fits: &'a dyn Fn(CutStage<'_>) -> bool) -> CutRequest<'a> {
        let Problem { times, cut_s, chunks, is_ordered, .. } = self;
        let (stages, chunks, is_ordered) = (self.stages(), *chunks, *is_ordered);
        CutRequest { times, cut_s, chunks, stages, is_ordered, fits }
    }

    /// Slowest stage and sum of squares, by the definition; `None` if it does not fit.
    fn price(&self, devices: &[usize], blocks: &[Vec<Range<u32>>]) -> Option<(f64, f64)> {
        let stages = devices.iter().zip(blocks).enumerate();
        let (mut slowest, mut squares) = (0.0f64, 0.0);
        for (stage, (&device, runs)) in stages {
            let mut sum = 0.0;
            for run in runs {
                let blocks = run.start as usize..run.end as usize;
                let cuts = [run.start, run.end].into_iter();
                let cuts = cuts.filter(|&b| b != 0 && b != self.blocks());
                sum += cuts.map(|b| self.cut_s[device][b as usize]).sum::<f64>();
                sum += self.times[device][blocks].iter().map(BlockTimes::sum_s).sum::<f64>();
            }
            if sum.is_infinite() || !self.fits(CutStage { device, stage, blocks: runs }) {
                return None;
            }
            slowest = slowest.max(sum);
            squares += sum * sum;
        }
        Some((slowest, squares))
    }

    /// The best price of all cuts in all orders.
    fn best(&self) -> Option<(f64, f64)> {
        let (stages, parts) = (self.stages(), self.stages() * self.chunks);
        let mut best: Option<(f64, f64)> = None;
        for counts in compositions(self.blocks(), parts) {
            let blocks = by_stage(&chunks_of_counts(&counts), stages);
            for devices in orders(stages, self.is_ordered) {
                if let Some(price) = self.price(&devices, &blocks) {
                    best = Some(best.map_or(price, |b| if price < b { price } else { b }));
                }
            }
        }
        best
    }

    /// Reasons for which this is no valid answer, and else its price, if it is a cut.
    fn check(&self, found: &Result<Cut, CutError>) -> Result<Option<(f64, f64)>, String> {
        let Ok(cut) = found else { return Ok(None) };
        let mut chunks: Vec<_> = cut.blocks.iter().flatten().cloned().collect();
        chunks.sort_by_key(|run| run.start);
        let counts: Vec<u32> = chunks.iter().map(|run| run.end - run.start).collect();
        let parts = self.stages() * self.chunks;
        if of_counts(&counts, self.blocks(), parts).as_ref() != Ok(&chunks) {
            return Err(format!("{chunks:?} do not cover the blocks"));
        }
        if by_stage(&chunks, self.stages()) != cut.blocks {
            return Err(format!("{:?} are not in turn", cut.blocks));
        }
        if !orders(self.stages(), self.is_ordered).contains(&cut.devices) {
            return Err(format!("{:?} is no order of the devices", cut.devices));
        }
        match self.price(&cut.devices, &cut.blocks) {
            Some(price) if price.0 == cut.slowest_s => Ok(Some(price)),
            price => Err(format!("{cut:?} does not fit or has another price: {price:?}")),
        }
    }

    /// The difference between an answer and the best one there is.
    fn difference(&self, found: &Result<Cut, CutError>) -> Option<String> {
        match (self.check(found), self.best()) {
            (Err(reason), _) => Some(reason),
            (Ok(price), best) if price != best => Some(format!("{price:?}, not {best:?}")),
            _ => None,
        }
    }
}

/// Blocks of each chunk, for one chunk per stage.
fn lengths(cut: &Cut) -> Vec<usize> {
    cut.blocks.iter().flatten().map(|run| run.len()).collect()
}

/// All ways to write `sum` as `parts` numbers of at least 1.
fn compositions(sum: u32, parts: usize) -> Vec<Vec<u32>> {
    if parts == 1 {
        return if sum > 0 { vec![vec![sum]] } else { Vec::new() };
    }
    let longer = |first| {
        let rest = compositions(sum - first, parts - 1).into_iter();
        rest.map(move |rest| [&[first], &rest[..]].concat())
    };
    (1..sum).flat_map(longer).collect()
}

/// All orders of the devices, or only the given one.
fn orders(devices: usize, is_ordered: bool) -> Vec<Vec<usize>> {
    if is_ordered || devices == 0 {
        return vec![(0..devices).collect()];
    }
    let with_last = |mut order: Vec<usize>| {
        (0..devices).map(move |at| {
            order.retain(|&device| device + 1 != devices);
            order.insert(at, devices - 1);
            order.clone()
        })
    };
    orders(devices - 1, false).into_iter().flat_map(with_last).collect()
}

fn memory(devices: usize, blocks: usize) -> impl Strategy<Value = Memory> {
    let capacity = proptest::collection::vec(1u32..40, devices);
    let need = proptest::collection::vec(0u32..5, blocks);
    prop_oneof![
        Just(Memory::Unlimited),
        (capacity, need).prop_map(|(capacity, need)| Memory::Limited(capacity, need)),
        any::<u64>().prop_map(Memory::Arbitrary),
    ]
}

fn problem(chunks: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Problem> {
    use proptest::collection::vec;
    let sizes = (1usize..=4, 1usize..=7, chunks, any::<bool>());
    sizes.prop_flat_map(|(devices, blocks, chunks, is_ordered)| {
        // One time in 20 is infinite: a block that the device cannot run, a cut that is forbidden.
        let eighths = |most: u32| {
            (0..most, 0u32..20).prop_map(|(eighths, die)| match die {
                0 => f64::INFINITY,
                _ => f64::from(eighths) / 8.0,
            })
        };
        let finite = || (0u32..16).prop_map(|eighths| f64::from(eighths) / 8.0);
        let block = (eighths(16), finite(), finite()).prop_map(|(f, b, w)| BlockTimes {
            forward_s: f,
            backward_input_s: b,
            backward_weight_s: w,
        });
        let times = vec(vec(block, blocks), devices);
        let cut_s = vec(vec(eighths(24), blocks), devices);
        (times, cut_s, memory(devices, blocks)).prop_map(move |(times, cut_s, memory)| Problem {
            times,
            cut_s,
            chunks,
            is_ordered,
            memory,
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_other_cut_is_better(problem in problem(1..=1)) {
        let found = problem.cut();
        prop_assert_eq!(problem.difference(&found), None, "{:?}", found);
        prop_assert_eq!(problem.cut(), found, "the same again");
    }

    #[test]
    fn interleaved_cuts_are_valid_and_as_good_as_the_even_one(problem in problem(2..=3)) {
        let found = problem.cut();
        let price = problem.check(&found);
        prop_assert!(price.is_ok(), "{:?}", price);
        let (price, best) = (price.unwrap(), problem.best());
        match (&price, best) {
            (Some(price), Some(best)) => prop_assert!(*price >= best),
            (Some(_), None) => prop_assert!(false, "a cut where there is none"),
            (None, _) => {}
        }
        let parts = problem.stages() * problem.chunks;
        let even = by_stage(&even(problem.blocks(), parts), problem.stages());
        for devices in orders(problem.stages(), problem.is_ordered) {
            if problem.blocks() as usize >= parts
                && let Some(even) = problem.price(&devices, &even)
            {
                prop_assert!(price.is_some_and(|price| price <= even), "{:?}, {:?}", price, even);
            }
        }
    }
}

/// Numbers in 0..1 from a seed.
fn random(seed: u64) -> impl FnMut() -> f64 {
    let mut state = seed;
    move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1u64 << 24) as f64
    }
}

/// A problem of devices that are unlike: speeds, and blocks that differ.
fn unlike(devices: usize, blocks: usize, seed: u64) -> Problem {
    let mut random = random(seed);
    let rows: Vec<Vec<f64>> = (0..devices)
        .map(|_| {
            let speed = 1.0 + 3.0 * random();
            (0..blocks).map(|_| (8.0 * speed * (0.5 + random())).round() / 8.0).collect()
        })
        .collect();
    Problem::of(&rows.iter().map(|row| &row[..]).collect::<Vec<_>>())
}

#[test]
fn the_comparison_finds_a_planted_cut() {
    let problem = Problem::of(&[&[1.0; 6], &[2.0; 6]]);
    let best = problem.cut().unwrap();
    assert_eq!(problem.difference(&Ok(best.clone())), None);
    let plant = |counts: &[u32], slowest_s| {
        let blocks = by_stage(&chunks_of_counts(counts), 2);
        problem.difference(&Ok(Cut { blocks, slowest_s, ..best.clone() }))
    };
    assert!(plant(&[3, 3], 6.0).is_some_and(|reason| reason.contains("not Some")));
    assert!(plant(&[3, 3], best.slowest_s).is_some_and(|reason| reason.contains("price")));
    assert!(plant(&[4, 1], best.slowest_s).is_some_and(|reason| reason.contains("cover")));
    let twice = Cut { devices: vec![0, 0], ..best };
    assert!(problem.difference(&Ok(twice)).is_some_and(|reason| reason.contains("order")));
    assert!(problem.difference(&Err(CutError::Forbidden)).is_some());
}

#[test]
fn a_fast_device_takes_more_blocks() {
    let problem = Problem::of(&[&[1.0; 6], &[2.0; 6]]);
    let cut = problem.cut().unwrap();
    assert_eq!((lengths(&cut), cut.devices), (vec![4, 2], vec![0, 1]));
    assert_eq!(cut.slowest_s, 4.0);
}

#[test]
fn memory_and_costs_of_cuts_move_the_cut_and_the_devices() {
    // The stash of the first stage is the larger one, and only device 1 holds two blocks of it.
    let mut problem = Problem::of(&[&[1.0; 4], &[1.0; 4]]);
    problem.memory = Memory::Limited(vec![3, 4], vec![1; 4]);
    let cut = problem.cut().unwrap();
    assert_eq!((lengths(&cut), cut.devices), (vec![2, 2], vec![1, 0]));
    problem.is_ordered = true;
    assert_eq!(lengths(&problem.cut().unwrap()), [1, 3]);
    // A cut in the middle costs more than a block.
    let mut problem = Problem::of(&[&[1.0; 4], &[1.0; 4]]);
    problem.cut_s = vec![vec![0.0, 0.0, 1.5, 0.0]; 2];
    let cut = problem.cut().unwrap();
    assert_eq!((lengths(&cut), cut.slowest_s), (vec![1, 3], 3.0));
}

#[test]
fn ties_go_to_balanced_stages_then_lower_devices_and_earlier_ends() {
    // Not representable in binary: as floating-point numbers the sums of equal runs differ.
    let row = [0.1; 7];
    let cut = Problem::of(&[&row, &row]).cut().unwrap();
    assert_eq!((lengths(&cut), cut.devices), (vec![3, 4], vec![0, 1]));
    let cut = Problem::of(&[&row, &row, &row]).cut().unwrap();
    assert_eq!(lengths(&cut), [2, 2, 3]);
    // The last block is the slowest stage anyway; the others are still balanced.
    let row = [0.1, 0.1, 0.1, 0.1, 9.0];
    let mut problem = Problem::of(&[&row, &row, &row]);
    assert_eq!(lengths(&problem.cut().unwrap()), [2, 2, 1]);
    problem.is_ordered = true;
    assert_eq!(problem.cut().unwrap().devices, [0, 1, 2]);
}

#[test]
fn sixty_four_blocks_on_eight_devices_take_little_time() {
    let mut problem = unlike(8, 64, 3);
    problem.memory = Memory::Limited((0..8).map(|device| 40 + 10 * device).collect(), vec![1; 64]);
    let (asked, started) = (Cell::new(0), Instant::now());
    let fits = |subject: CutStage<'_>| {
        asked.set(asked.get() + 1);
        problem.fits(subject)
    };
    let found = cut(&problem.request(&fits));
    let elapsed = started.elapsed();
    assert!(problem.check(&found).unwrap().is_some());
    assert!(elapsed < Duration::from_secs(4), "{elapsed:?}");
    // Each subject once: devices x stages x runs.
    assert!(asked.get() <= 8 * 8 * (64 * 65 / 2), "{}", asked.get());
}

#[test]
fn more_devices_than_are_searched_exactly_are_exchanged() {
    // Stage 0 must hold two blocks, which only device 9 can; the order given does not fit.
    let mut problem = Problem::of(&[&[1.0; 11][..]; 10]);
    problem.cut_s = vec![vec![0.0; 11]; 10];
    problem.cut_s.iter_mut().for_each(|row| row[1] = f64::INFINITY);
    let mut capacity = vec![10; 10];
    capacity[9] = 20;
    problem.memory = Memory::Limited(capacity, vec![1; 11]);
    let cut = problem.cut().unwrap();
    assert_eq!((cut.devices[0], lengths(&cut)[0], cut.slowest_s), (9, 2, 2.0));
    assert!(problem.price(&cut.devices, &cut.blocks).is_some());
    // The device that is four times as fast takes the slow block.
    let rows: Vec<Vec<f64>> = (0..9)
        .map(|device| {
            (0..9)
                .map(|b| if b == 5 { 4.0 } else { 1.0 } / if device == 8 { 4.0 } else { 1.0 })
                .collect()
        })
        .collect();
    let mut problem = Problem::of(&rows.iter().map(|row| &row[..]).collect::<Vec<_>>());
    let cut = problem.cut().unwrap();
    assert_eq!((cut.devices[5], cut.slowest_s), (8, 1.0));
    problem.is_ordered = true;
    assert_eq!(problem.cut().unwrap().slowest_s, 4.0);
}

#[test]
fn interleaved_cuts_are_near_the_best() {
    let mut sum = 0.0;
    for seed in 0..40 {
        let mut problem = unlike(3, 12, seed);
        problem.chunks = 2;
        let found = problem.cut();
        let price = problem.check(&found).unwrap().unwrap();
        sum += price.0 / problem.best().unwrap().0;
    }
    let mean = sum / 40.0;
    assert!((1.0..1.1).contains(&mean), "{mean} times the best on average");
}

#[test]
fn interleaved_chunks_take_turns() {
    let mut problem = Problem::of(&[&[1.0; 8], &[3.0; 8]]);
    problem.chunks = 2;
    let cut = problem.cut().unwrap();
    assert_eq!(cut.slowest_s, 6.0);
    assert_eq!(cut.blocks.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
    let mut problem = unlike(6, 64, 1);
    problem.chunks = 4;
    let started = Instant::now();
    let found = problem.cut();
    let elapsed = started.elapsed();
    assert!(problem.check(&found).unwrap().is_some());
    assert!(elapsed < Duration::from_secs(20), "{elapsed:?}");
}

#[test]
fn the_reason_for_no_cut_is_a_sentence() {
    let sentence = |problem: &Problem| problem.cut().unwrap_err().to_string();
    let mut problem = Problem::of(&[&[1.0; 3], &[1.0; 3]]);
    problem.chunks = 2;
    let few = "the model has 3 blocks, too few for a pipeline of 4 parts with at least one block \
               each";
    assert_eq!(sentence(&problem), few);
    problem.chunks = 1;
    problem.memory = Memory::Limited(vec![9, 1], vec![2; 3]);
    let device = "device 1 has no memory for even the shortest run of blocks as any stage";
    assert_eq!(sentence(&problem), device);
    problem.memory = Memory::Limited(vec![3, 3], vec![2; 3]);
    let stage = "no device has memory for even the shortest run of blocks as stage 0";
    assert_eq!(sentence(&problem), stage);
    problem.is_ordered = true;
    let both = "device 0 has no memory for even the shortest run of blocks as stage 0";
    assert_eq!(sentence(&problem), both);
    problem.memory = Memory::Limited(vec![4, 2], vec![2; 3]);
    let neither = "no cut of the model was found that fits in the devices' memory";
    assert_eq!(sentence(&problem), neither);
    problem.cut_s = vec![vec![f64::NAN; 3]; 2];
    assert_eq!(problem.cut(), Err(CutError::Forbidden));
    problem.chunks = 1;
    problem.times[0][0].forward_s = f64::INFINITY;
    assert_eq!(problem.cut(), Err(CutError::Forbidden));
}

#[test]
fn even_runs_are_longer_first() {
    assert_eq!(even(10, 4), [0..3, 3..6, 6..8, 8..10]);
    assert_eq!(even(6, 3), [0..2, 2..4, 4..6]);
    assert_eq!(even(1, 2), [0..1, 1..1]);
    assert_eq!(chunks_of_counts(&[2, 1, 3]), [0..2, 2..3, 3..6]);
    assert_eq!(by_stage(&even(5, 4), 2), [[0..2, 3..4], [2..3, 4..5]]);
}

#[test]
fn counts_of_the_user_cut_the_model_or_a_sentence_tells_why_not() {
    assert_eq!(of_counts(&[2, 4], 6, 2), Ok(vec![0..2, 2..6]));
    let sentence =
        |counts: &[u32], blocks, parts| of_counts(counts, blocks, parts).unwrap_err().to_string();
    let advice = "give 2 numbers, each at least 1, that add up to 6";
    let of = |wrong: &str| format!("parallel.blocks_per_stage = {wrong}; {advice}");
    assert_eq!(sentence(&[3, 2], 6, 2), of("[3, 2] has 5 blocks and the model has 6"));
    assert_eq!(sentence(&[6], 6, 2), of("[6] has 1 number"));
    assert_eq!(sentence(&[6, 0], 6, 2), of("[6, 0] has a part without blocks"));
    let most = u32::MAX;
    assert!(sentence(&[most, most], 6, 2).contains("has 8589934590 blocks"));
    assert_eq!(
        sentence(&[2], 6, 1),
        "parallel.blocks_per_stage = [2] has 2 blocks and the model has 6; give the one number 6"
    );
    assert!(sentence(&[1, 1], 1, 2).starts_with("the model has 1 block, too few"));
}
