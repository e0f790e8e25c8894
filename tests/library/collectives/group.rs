//! Groups of threads against sums in the stated order, and what happens when a rank is missing,
//! late, gone or does something else.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use potluck_core::{BucketId, Position, Rank};
use potluck_parallel::collective::{ShardLayout, Topology};
use potluck_parallel::comm::process_group::TREE_BYTES;
use potluck_parallel::comm::{GroupError, ProcessGroup, ReduceOp, init};
use proptest::prelude::*;

use super::dice::Dice;

/// What each rank's thread returns, by rank.
pub fn run<R: Send>(world: u32, rank: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> =
            init(world).into_iter().map(|group| scope.spawn(|| rank(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Everyone's values, by rank.
pub fn values(world: u32, length: usize, seed: u32) -> Vec<Vec<f32>> {
    let of = |rank| {
        let mut dice = Dice(seed, rank << 24);
        (0..length).map(|_| dice.value()).collect()
    };
    (0..world).map(of).collect()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// `((v[first] + v[first+1]) + ..)`, around the ring.
pub fn ring(all: &[Vec<f32>], owner: usize, i: usize, op: fn(f32, f32) -> f32) -> f32 {
    let world = all.len();
    let value = |k: usize| all[(owner + 1 + k) % world][i];
    (1..world).fold(value(0), |sum, k| op(sum, value(k)))
}

/// The sum of the binomial tree over numbers from `v` on, `span` of them, seen from the root.
fn tree(all: &[Vec<f32>], root: usize, v: usize, span: usize, op: fn(f32, f32) -> f32) -> Vec<f32> {
    let world = all.len();
    let mut sum = all[(root + v) % world].clone();
    let mut distance = 1;
    while distance < span {
        if v + distance < world {
            let other = tree(all, root, v + distance, distance, op);
            sum.iter_mut().zip(other).for_each(|(sum, other)| *sum = op(*sum, other));
        }
        distance *= 2;
    }
    sum
}

pub fn reduced(all: &[Vec<f32>], root: usize, op: fn(f32, f32) -> f32) -> Vec<f32> {
    tree(all, root, 0, all.len().next_power_of_two(), op)
}

/// What [`ProcessGroup::all_reduce`] says that it gives.
pub fn all_reduced(all: &[Vec<f32>], op: fn(f32, f32) -> f32) -> Vec<f32> {
    let length = all[0].len();
    if 4 * length <= TREE_BYTES {
        return reduced(all, 0, op);
    }
    let layout = ShardLayout::new(Topology::Ring, all.len() as u32, &[length], 1, length);
    let owner =
        |i| (0..all.len()).find(|r| layout.shard(BucketId(0), Position(*r as u32)).contains(&i));
    (0..length).map(|i| ring(all, owner(i).unwrap(), i, op)).collect()
}

pub type Combination = (fn() -> ReduceOp<f32>, fn(f32, f32) -> f32);

/// Operations, and the same on two numbers.
pub const OPS: [Combination; 4] = [
    (|| ReduceOp::Sum, |a, b| a + b),
    (|| ReduceOp::Max, f32::max),
    (|| ReduceOp::Min, f32::min),
    (|| ReduceOp::user(|a, b| a * 0.5 + b * 0.5), |a, b| a * 0.5 + b * 0.5),
];

/// Checks an all-reduce of a rank's values; true if every rank got the expected bits.
fn is_right(all: &[Vec<f32>], all_reduce: impl Fn(&mut ProcessGroup, &mut [f32]) + Sync) -> bool {
    let expected = bits(&all_reduced(all, |a, b| a + b));
    let results = run(all.len() as u32, |mut group| {
        let mut own = all[group.rank().index()].clone();
        all_reduce(&mut group, &mut own);
        own
    });
    results.iter().all(|result| bits(result) == expected)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn all_reduce_sums_in_stated_order(
        world in 1..=9u32,
        length in prop_oneof![0..20usize, 1000..1100usize, 0..=100_000usize],
        op in 0..OPS.len(),
        seed: u32,
    ) {
        let all = values(world, length, seed);
        let (op, combine) = OPS[op];
        let expected = bits(&all_reduced(&all, combine));
        let results = run(world, |mut group| {
            // Three in a row, each rank at its own pace: the results must not mix.
            let mut dice = Dice(seed, group.rank().0 << 16);
            (0..3)
                .map(|_| {
                    thread::sleep(Duration::from_micros(dice.below(300) as u64));
                    let mut own = all[group.rank().index()].clone();
                    group.all_reduce(&mut own, op()).unwrap();
                    own
                })
                .collect::<Vec<_>>()
        });
        for result in results.iter().flatten() {
            prop_assert_eq!(&bits(result), &expected);
        }
    }

    #[test]
    fn rooted_give_what_they_say(
        world in 1..=9u32,
        length in prop_oneof![0..20usize, 60_000..140_000usize],
        root in 0..9u32,
        op in 0..OPS.len(),
        seed: u32,
    ) {
        let root = Rank(root % world);
        let all = values(world, length, seed);
        let (op, combine) = OPS[op];
        let results = run(world, |mut group| {
            let rank = group.rank();
            let own = &all[rank.index()];
            let mut sum = own.clone();
            group.reduce(&mut sum, root, op()).unwrap();
            let mut copy = own.clone();
            group.broadcast(&mut copy, root).unwrap();
            let on_root = if rank == root { world as usize * length } else { 0 };
            let mut gathered = vec![0.0; on_root];
            group.gather(own, &mut gathered, root).unwrap();
            let mut part = vec![0.0; length];
            group.scatter(&gathered, &mut part, root).unwrap();
            (sum, copy, gathered, part)
        });
        for (rank, (sum, copy, gathered, part)) in results.iter().enumerate() {
            let own = &all[rank];
            let is_root = rank == root.index();
            let expected = if is_root { reduced(&all, rank, combine) } else { own.clone() };
            prop_assert_eq!(bits(sum), bits(&expected));
            prop_assert_eq!(copy, &all[root.index()]);
            prop_assert_eq!(gathered, &if is_root { all.concat() } else { vec![] });
            prop_assert_eq!(part, own);
        }
    }

    #[test]
    fn scatter_then_gather_is_all_reduce(
        world in 1..=9u32,
        length in prop_oneof![0..20usize, 60_000..140_000usize],
        seed: u32,
    ) {
        let all = values(world, world as usize * length, seed);
        let results = run(world, |mut group| {
            let mut part = vec![0.0; length];
            group.reduce_scatter(&all[group.rank().index()], &mut part, ReduceOp::Sum).unwrap();
            let mut whole = vec![0.0; world as usize * length];
            group.all_gather_into(&part, &mut whole).unwrap();
            assert_eq!(group.all_gather(&part).unwrap().concat(), whole);
            whole
        });
        let owner = |i: usize| i / length;
        let sum = |i| ring(&all, owner(i), i, |a, b| a + b);
        let expected: Vec<f32> = (0..world as usize * length).map(sum).collect();
        for result in results {
            prop_assert_eq!(bits(&result), bits(&expected));
        }
    }
}

/// The counter-test: the same check finds out a sum in the order of arrival.
#[test]
fn sum_in_order_of_arrival_is_found() {
    for length in [500, 5000] {
        let all = values(4, length, 3);
        assert!(is_right(&all, |group, own| group.all_reduce(own, ReduceOp::Sum).unwrap()));
        let (sum, arrived) = (Mutex::new(vec![0.0; length]), AtomicU32::new(0));
        let by_arrival = |group: &mut ProcessGroup, own: &mut [f32]| {
            // The last rank comes first.
            while arrived.load(Ordering::SeqCst) < 3 - group.rank().0 {
                thread::yield_now();
            }
            sum.lock().unwrap().iter_mut().zip(&*own).for_each(|(sum, own)| *sum += own);
            arrived.fetch_add(1, Ordering::SeqCst);
            group.barrier().unwrap();
            own.copy_from_slice(&sum.lock().unwrap());
        };
        assert!(!is_right(&all, by_arrival), "{length}");
    }
}

#[test]
fn sums_of_all_types_integers_wrap() {
    run(3, |mut group| {
        let own = group.rank().0;
        let mut bytes = vec![u32::MAX; 5000];
        group.all_reduce(&mut bytes, ReduceOp::Sum).unwrap();
        assert_eq!(bytes, vec![u32::MAX - 2; 5000]);
        let mut one = [i64::from(own) - 1];
        group.all_reduce(&mut one, ReduceOp::Min).unwrap();
        assert_eq!(one, [-1]);
        let mut halves = [0.5f64, f64::from(own)];
        group.all_reduce(&mut halves, ReduceOp::Max).unwrap();
        assert_eq!(halves, [0.5, 2.0]);
        let mut nans = [if own == 1 { f32::NAN } else { 1.0 }];
        group.all_reduce(&mut nans, ReduceOp::Max).unwrap();
        assert!(nans[0].is_nan());
    });
}

#[test]
fn mean_is_weighted_not_by_ranks() {
    for length in [1, 3000] {
        let results = run(4, |mut group| {
            let rank = f64::from(group.rank().0);
            let mut values = vec![rank as f32 + 1.0; length];
            group.all_reduce(&mut values, ReduceOp::Mean { weight: 2.0 * rank }).unwrap();
            values
        });
        // (0*1 + 2*2 + 4*3 + 6*4) / 12
        assert!(results.iter().all(|result| *result == vec![40.0f32 / 12.0; length]));
    }
    let errors = run(2, |mut group| group.all_reduce(&mut [1i32], ReduceOp::Mean { weight: 1.0 }));
    assert!(errors.iter().all(|error| format!("{error:?}").contains("i32 has no mean")));
    let errors = run(2, |mut group| group.all_reduce(&mut [1f32], ReduceOp::Mean { weight: 0.0 }));
    assert!(errors.iter().all(|error| format!("{error:?}").contains("weights sum to 0")));
}

#[test]
fn barrier_waits_for_all() {
    for world in 1..=9 {
        let come = AtomicU32::new(0);
        run(world, |mut group| {
            for round in 1..=20 {
                if group.rank().0 == round % world {
                    thread::sleep(Duration::from_micros(300));
                }
                come.fetch_add(1, Ordering::SeqCst);
                group.barrier().unwrap();
                assert!(come.load(Ordering::SeqCst) >= round * world);
                group.barrier().unwrap();
            }
        });
    }
}

#[test]
fn sends_arrive_in_order_beyond_credits() {
    run(3, |mut group| {
        let (rank, next) = (group.rank().0, Rank((group.rank().0 + 1) % 3));
        let previous = Rank((rank + 2) % 3);
        group.send(&[rank, 7], next).unwrap();
        group.send::<f64>(&[], next).unwrap();
        let mut sum = [1u32];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [3]);
        let mut got = [0; 2];
        group.recv(&mut got, previous).unwrap();
        group.recv::<f64>(&mut [], previous).unwrap();
        assert_eq!(got, [previous.0, 7]);
        // 12 MiB to one that is late, in more packets than there are credits.
        let mut long = vec![rank; 3 << 20];
        match rank {
            0 => group.send(&long, Rank(2)).unwrap(),
            2 => {
                thread::sleep(Duration::from_millis(50));
                group.recv(&mut long, Rank(0)).unwrap();
                assert!(long.iter().all(|value| *value == 0));
            }
            _ => (),
        }
        for round in 0..200 {
            let mut value = [round + rank];
            group.broadcast(&mut value, Rank(round % 3)).unwrap();
            assert_eq!(value, [round + round % 3]);
        }
    });
}

#[test]
fn sends_untaken_hold_up_nothing() {
    run(2, |mut group| {
        group.set_deadline(Duration::from_secs(10));
        let is_sender = group.rank() == Rank(0);
        for round in 0..3u32 {
            if is_sender {
                (0..16).for_each(|nth| group.send(&[round, nth], Rank(1)).unwrap());
            }
            // More packets than there are credits, so that they go to and fro.
            for length in [1, 3 << 20] {
                let mut values = vec![if is_sender { round } else { 99 }; length];
                group.broadcast(&mut values, Rank(0)).unwrap();
                assert!(values.iter().all(|value| *value == round));
            }
            if !is_sender {
                for nth in 0..16 {
                    let mut got = [0; 2];
                    group.recv(&mut got, Rank(0)).unwrap();
                    assert_eq!(got, [round, nth]);
                }
            }
        }
    });
}

#[test]
fn deadline_beyond_clock_is_none() {
    run(2, |mut group| {
        group.set_deadline(Duration::MAX);
        let mut values = [1.0f32];
        let from = group.rank();
        if from == Rank(1) {
            // Longer than the other rank waits before it sends a notice.
            std::thread::sleep(Duration::from_millis(300));
            group.send(&values, Rank(0)).unwrap();
        }
        group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
        if from == Rank(0) {
            group.recv(&mut [0.0f32], Rank(1)).unwrap();
        }
        assert_eq!(values, [2.0]);
    });
}

#[test]
fn sends_over_limit_wait_for_receiver() {
    let more = |group: &mut ProcessGroup, received: u32| -> Result<(), GroupError> {
        if group.rank() == Rank(0) {
            group.set_deadline(Duration::from_secs(1));
            (0..17u32).try_for_each(|nth| group.send(&[nth], Rank(1)))?;
        }
        let mut got = [0u32];
        if group.rank() == Rank(1) {
            (0..received).try_for_each(|_| group.recv(&mut got, Rank(0)))?;
        }
        group.barrier()
    };
    run(2, |mut group| more(&mut group, 1).unwrap());
    let errors = fails(2, |group| more(group, 0));
    all_contain(&errors, &["send(to rank 1) of 1 u32: waited ", " s for rank 1"]);
    assert!(errors.iter().all(|error| waited_s(error) >= 1.0), "{errors:?}");
}

/// The errors of all ranks of a group in which something goes wrong, and how long it took.
pub fn fails(
    world: u32,
    rank: impl Fn(&mut ProcessGroup) -> Result<(), GroupError> + Sync,
) -> Vec<String> {
    let begin = Instant::now();
    let errors = run(world, |mut group| rank(&mut group).unwrap_err().to_string());
    assert!(begin.elapsed() < Duration::from_secs(20), "late: {errors:?}");
    errors
}

/// Returns for how many seconds a call says that it waited.
pub fn waited_s(error: &str) -> f64 {
    let (_, rest) = error.split_once("waited ").unwrap_or_else(|| panic!("{error}"));
    rest.split_once(" s for ").unwrap_or_else(|| panic!("{error}")).0.parse().unwrap()
}

pub fn all_contain(errors: &[String], parts: &[&str]) {
    for error in errors {
        assert!(parts.iter().all(|part| error.contains(part)), "{parts:?} not in {errors:#?}");
    }
}

#[test]
fn calls_unequal_tell_who_called_what() {
    for length in [10, 10_000] {
        let errors = fails(3, |group| {
            let length = if group.rank() == Rank(1) { length + 1 } else { length };
            group.all_reduce(&mut vec![0f32; length], ReduceOp::Sum)
        });
        all_contain(&errors, &["rank 1 ", &format!("{} f32", length + 1), "all_reduce(sum)"]);
    }
    let errors = fails(2, |group| match group.rank() {
        Rank(0) => group.barrier(),
        _ => group.all_reduce(&mut [1f32], ReduceOp::Sum),
    });
    all_contain(&errors, &["barrier", "all_reduce(sum) of 1 f32"]);
    let errors = fails(2, |group| match group.rank() {
        Rank(0) => group.all_reduce(&mut [1f32], ReduceOp::Max),
        _ => group.all_reduce(&mut [1f32], ReduceOp::Sum),
    });
    all_contain(&errors, &["all_reduce(max)", "all_reduce(sum)"]);
    let errors = fails(2, |group| match group.rank() {
        Rank(0) => group.all_gather(&[1u32]).map(drop),
        _ => group.all_gather(&[1i32]).map(drop),
    });
    all_contain(&errors, &["1 u32", "1 i32"]);
}

#[test]
fn ranks_in_deadlock_are_told() {
    // Nobody sends anything, so only asking around finds it.
    let errors = fails(2, |group| {
        let other = Rank(1 - group.rank().0);
        group.broadcast(&mut [0f32; 4], other)
    });
    all_contain(&errors, &["broadcast(from rank 0)", "broadcast(from rank 1)"]);
}

#[test]
fn call_unjoined_told_by_next_one() {
    let errors = fails(2, |group| {
        let other = Rank(1 - group.rank().0);
        group.reduce(&mut [0f32; 4], other, ReduceOp::Sum)?;
        group.barrier()
    });
    all_contain(&errors, &["reduce(sum, to rank 0)", "reduce(sum, to rank 1)"]);
}

#[test]
fn rank_gone_is_named_promptly() {
    for world in [2, 5] {
        let errors = run(world, |mut group| {
            // Others may still be in the barrier when the first one fails.
            let together = group.barrier();
            if group.rank() == Rank(1) {
                return together.map(|()| "rank 1 left".into()).unwrap();
            }
            let begin = Instant::now();
            let call = |()| group.all_reduce(&mut vec![0f32; 9999], ReduceOp::Sum);
            let error = together.and_then(call).unwrap_err();
            assert!(begin.elapsed() < Duration::from_secs(5));
            error.to_string()
        });
        all_contain(&errors, &["rank 1 left"]);
    }
}

#[test]
fn rank_panicked_is_named_promptly() {
    let panics = |mut group: ProcessGroup| {
        let together = group.barrier();
        assert!(group.rank() != Rank(2), "on purpose");
        together
            .and_then(|()| group.all_reduce(&mut [0f32; 9], ReduceOp::Sum))
            .unwrap_err()
            .to_string()
    };
    thread::scope(|scope| {
        let threads: Vec<_> =
            init(4).into_iter().map(|group| scope.spawn(move || panics(group))).collect();
        let ends: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        assert!(ends[2].is_err());
        let errors: Vec<String> = ends.into_iter().flatten().collect();
        assert_eq!(errors.len(), 3);
        all_contain(&errors, &["rank 2 left the group (its thread panicked)"]);
    });
}

#[test]
fn deadline_names_who_is_missing() {
    let errors = run(4, |mut group| {
        group.set_deadline(Duration::from_secs(1));
        if group.rank() == Rank(2) {
            thread::sleep(Duration::from_secs(3));
        }
        group.all_reduce(&mut vec![0f32; 9999], ReduceOp::Sum).unwrap_err().to_string()
    });
    all_contain(&errors, &["all_reduce(sum) of 9999 f32: waited ", " s for ", "rank 2"]);
    assert!(errors.iter().all(|error| waited_s(error) >= 1.0), "{errors:?}");
}

#[test]
fn results_arrive_after_others_left() {
    for _ in 0..200 {
        let sums = run(3, |mut group| {
            let mut values = vec![1f32; 2000];
            group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
            values[1999]
        });
        assert_eq!(sums, [3.0; 3]);
    }
}

#[test]
fn abort_ends_all_and_later_calls() {
    let errors = fails(3, |group| {
        if group.rank() == Rank(1) {
            group.abort("no more data");
        }
        group.barrier()
    });
    all_contain(&errors, &["rank 1 gave up: no more data"]);
    let errors = fails(3, |group| {
        let length = if group.rank() == Rank(1) { 5 } else { 6 };
        let first = group.all_gather_into(&[1u64, 2], &mut vec![0; length]).unwrap_err();
        assert!(group.barrier().unwrap_err().to_string().contains("into has 5"));
        Err(first)
    });
    all_contain(&errors, &["into has 5 elements, not 6"]);
    let errors = fails(2, |group| group.broadcast(&mut [1f32], Rank(7)));
    all_contain(&errors, &["broadcast(from rank 7)", "there are 2 ranks"]);
}
