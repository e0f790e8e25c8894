//! Groups of some ranks: who is in them and where, the bits of their collectives, and what happens
//! when a rank passes something else, makes another call, leaves or fails.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use potluck_core::{Position, Rank};
use potluck_parallel::comm::{ProcessGroup, ReduceOp, init};
use proptest::prelude::*;

use super::dice::Dice;
use super::group::{
    OPS, all_contain, all_reduced, bits, fails, reduced, ring, run, values, waited_s,
};

/// The members of a rank's group, as numbers in order; empty without a group.
fn members(group: &Option<ProcessGroup>) -> Vec<u32> {
    let Some(group) = group else { return Vec::new() };
    assert_eq!(group.members().rank(group.position()), group.rank());
    group.members().iter().map(|(_, rank)| rank.0).collect()
}

/// The members of each rank's group after a split by these colors and keys, by rank.
fn split(colors: &[Option<u32>], keys: &[i64]) -> Vec<Vec<u32>> {
    run(colors.len() as u32, |mut group| {
        let rank = group.rank().index();
        let mut new = group.split(colors[rank], keys[rank]).unwrap();
        // The old group goes on, and the new one outlives it.
        group.barrier().unwrap();
        drop(group);
        if let Some(new) = &mut new {
            let all = new.all_gather(&[rank as u32]).unwrap().concat();
            assert_eq!(all, new.members().iter().map(|(_, rank)| rank.0).collect::<Vec<_>>());
        }
        members(&new)
    })
}

#[test]
fn split_orders_by_key_then_rank() {
    let (a, b) = (Some(7), Some(0));
    // Descending keys turn the order round; equal keys keep it.
    assert_eq!(split(&[a; 3], &[2, 1, 0]), vec![vec![2, 1, 0]; 3]);
    assert_eq!(split(&[a; 3], &[5; 3]), vec![vec![0, 1, 2]; 3]);
    assert_eq!(split(&[a; 4], &[1, i64::MIN, 1, i64::MAX]), vec![vec![1, 0, 2, 3]; 4]);
    let halves = split(&[a, b, a, b, None], &[0, 9, -1, 3, 0]);
    assert_eq!(halves, [vec![2, 0], vec![3, 1], vec![2, 0], vec![3, 1], vec![]]);
    // A color per rank, and no color at all.
    assert_eq!(split(&[Some(2), Some(0), Some(1)], &[0; 3]), [[0], [1], [2]]);
    assert_eq!(split(&[None; 3], &[0; 3]), vec![vec![]; 3] as Vec<Vec<u32>>);
    // No color is none, also beside color 0.
    assert_eq!(split(&[None, Some(0)], &[0; 2]), [vec![], vec![1]]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn split_of_split_follows_the_rules(
        world in 1..=9u32,
        colors in prop::collection::vec(prop::option::of(0..3u32), 18),
        keys in prop::collection::vec(-2..3i64, 18),
    ) {
        // The reference: who has the same color, in the order of (key, old order).
        let cut = |old: &[u32], color: u32, round: usize| -> Vec<u32> {
            let at = |rank: u32| round * 9 + rank as usize;
            let mut new: Vec<u32> =
                old.iter().copied().filter(|rank| colors[at(*rank)] == Some(color)).collect();
            new.sort_by_key(|rank| keys[at(*rank)]);
            new
        };
        let results = run(world, |mut group| {
            let rank = group.rank().index();
            let mut first = group.split(colors[rank], keys[rank]).unwrap();
            let second = match &mut first {
                Some(first) => first.split(colors[9 + rank], keys[9 + rank]).unwrap(),
                None => None,
            };
            [members(&first), members(&second)]
        });
        for (rank, result) in results.iter().enumerate() {
            let all: Vec<u32> = (0..world).collect();
            let first = colors[rank].map_or(vec![], |color| cut(&all, color, 0));
            let second = colors[9 + rank].filter(|_| colors[rank].is_some());
            let second = second.map_or(vec![], |color| cut(&first, color, 1));
            prop_assert_eq!(result, &[first, second]);
        }
    }
}

#[test]
fn new_group_has_order_of_list() {
    let results = run(6, |mut group| {
        let mut one = group.new_group(&[4, 1, 5].map(Rank)).unwrap();
        // Groups that share a rank, and a group of ranks of a group, named as everywhere.
        let two = group.new_group(&[Rank(5)]).unwrap();
        let three = one.as_mut().and_then(|one| one.new_group(&[5, 4].map(Rank)).unwrap());
        [members(&one), members(&two), members(&three)]
    });
    let (one, three) = (vec![4, 1, 5], vec![5, 4]);
    assert!(results[0].iter().all(Vec::is_empty));
    assert_eq!(results[1], [one.clone(), vec![], vec![]]);
    assert_eq!(results[4], [one.clone(), vec![], three.clone()]);
    assert_eq!(results[5], [one, vec![5], three]);
}

/// The errors of a list that each rank passes, after which the group still works.
fn refused(world: u32, list: impl Fn(u32) -> Vec<u32> + Sync) -> Vec<String> {
    run(world, |mut group| {
        let ranks: Vec<Rank> = list(group.rank().0).into_iter().map(Rank).collect();
        let error = group.new_group(&ranks).err().unwrap().to_string();
        let mut sum = [1u32];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [world]);
        error
    })
}

#[test]
fn new_group_differing_list_is_refused() {
    let differ = refused(4, |rank| if rank == 2 { vec![0, 3] } else { vec![0, 1, 2] });
    let text = "rank 0 called new_group([0, 1, 2]), and rank 2 called new_group([0, 3])";
    assert_eq!(differ, vec![text; 4]);
    let order = refused(3, |rank| if rank == 0 { vec![1, 0] } else { vec![0, 1] });
    assert_eq!(
        order,
        vec!["rank 0 called new_group([1, 0]), and rank 1 called new_group([0, 1])"; 3]
    );
    let empty = refused(2, |rank| if rank == 0 { vec![] } else { vec![0] });
    assert_eq!(empty, vec!["rank 0 called new_group([]), and rank 1 called new_group([0])"; 2]);
    assert_eq!(refused(3, |_| vec![]), vec!["new_group: a group needs a rank"; 3]);
    let twice = "new_group: rank 2 is in the group twice, at position 0 and position 2";
    assert_eq!(refused(3, |_| vec![2, 0, 2]), vec![twice; 3]);
    let long = "new_group: rank 1 called it with 4 ranks, of 3 of the group";
    assert_eq!(refused(3, |rank| vec![0; if rank == 1 { 4 } else { 1 }]), vec![long; 3]);
    assert_eq!(refused(3, |_| vec![0, 3]), vec!["new_group: there are 3 ranks"; 3]);
    let errors = run(3, |mut group| {
        let mut pair = group.new_group(&[2, 0].map(Rank)).unwrap();
        let error = pair.as_mut().map(|pair| pair.new_group(&[Rank(1)]).err().unwrap().to_string());
        group.barrier().unwrap();
        error
    });
    let outside = Some("new_group: rank 1 is not in the group {2, 0}".to_string());
    assert_eq!(errors, [outside.clone(), None, outside]);
}

/// Calls every collective, with the values of the rank's position, and compares the results with
/// sequential references.
pub fn call_everything(group: &mut ProcessGroup, length: usize, seed: u32) {
    let (size, position) = (group.world_size(), group.position().index());
    let all = values(size as u32, length, seed);
    let own = &all[position];
    for (op, combine) in OPS {
        let mut sum = own.clone();
        group.all_reduce(&mut sum, op()).unwrap();
        assert_eq!(bits(&sum), bits(&all_reduced(&all, combine)));
    }
    let whole = values(size as u32, size * length, seed);
    let mut part = vec![0.0; length];
    group.reduce_scatter(&whole[position], &mut part, ReduceOp::Sum).unwrap();
    let sum = |i| ring(&whole, position, position * length + i, |a, b| a + b);
    assert_eq!(bits(&part), bits(&(0..length).map(sum).collect::<Vec<_>>()));
    assert_eq!(group.all_gather(own).unwrap(), all);
    let mut mean = [position as f64];
    group.all_reduce(&mut mean, ReduceOp::Mean { weight: 1.0 }).unwrap();
    assert_eq!(mean, [(size as f64 - 1.0) / 2.0]);
    for root in 0..size {
        call_rooted(group, &all, root);
    }
    let (next, previous) = ((position + 1) % size, (position + size - 1) % size);
    if size > 1 {
        let rank = |at: usize| group.members().rank(Position(at as u32));
        let (to, from) = (rank(next), rank(previous));
        let mut came = vec![0.0; length];
        group.send(own, to).unwrap();
        group.recv(&mut came, from).unwrap();
        assert_eq!(came, all[previous]);
    }
    group.barrier().unwrap();
}

fn call_rooted(group: &mut ProcessGroup, all: &[Vec<f32>], root: usize) {
    let (position, length) = (group.position().index(), all[0].len());
    let (own, at_root) = (&all[position], position == root);
    let dst = group.members().rank(Position(root as u32));
    let mut sum = own.clone();
    group.reduce(&mut sum, dst, ReduceOp::Sum).unwrap();
    let expected = if at_root { reduced(all, root, |a, b| a + b) } else { own.clone() };
    assert_eq!(bits(&sum), bits(&expected));
    let mut copy = own.clone();
    group.broadcast(&mut copy, dst).unwrap();
    assert_eq!(copy, all[root]);
    let mut gathered = vec![0.0; if at_root { all.len() * length } else { 0 }];
    group.gather(own, &mut gathered, dst).unwrap();
    assert_eq!(gathered, if at_root { all.concat() } else { vec![] });
    let mut part = vec![0.0; length];
    group.scatter(&gathered, &mut part, dst).unwrap();
    assert_eq!(&part, own);
}

#[test]
fn collectives_have_bits_of_group_size() {
    for world in 1..=6u32 {
        for size in 1..=world {
            // Some ranks, in no order.
            let mut dice = Dice(world, size << 8);
            let mut ranks: Vec<Rank> = (0..world).map(Rank).collect();
            (0..world as usize).for_each(|i| ranks.swap(i, dice.below(world as usize)));
            ranks.truncate(size as usize);
            run(world, |mut group| {
                if let Some(mut some) = group.new_group(&ranks).unwrap() {
                    call_everything(&mut some, 5, 100 + size);
                    call_everything(&mut some, 1500, 200 + size);
                }
                call_everything(&mut group, 7, world);
            });
        }
    }
}

#[test]
fn groups_at_once_keep_own_messages() {
    run(6, |mut group| {
        let rank = group.rank().0;
        let mut half = group.split(Some(rank % 2), 0).unwrap().unwrap();
        let mut pair = group.split(Some(rank / 2), -i64::from(rank)).unwrap().unwrap();
        let mut inner = half.split(Some(rank / 4), 0).unwrap().unwrap();
        let mut dice = Dice(9, rank << 20);
        for round in 0..30 {
            thread::sleep(Duration::from_micros(dice.below(200) as u64));
            // The ranks 0 and 2 send to each other in three groups before anybody receives.
            let other = Rank(2 - rank.min(2));
            let sends = rank == 0 || rank == 2;
            if sends {
                group.send(&[round], other).unwrap();
                half.send(&[1000 + round], other).unwrap();
                inner.send(&[2000 + round], other).unwrap();
            }
            let sum = |group: &mut ProcessGroup, length: usize| {
                let mut sum = vec![rank + round; length];
                group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                let ranks = group.members().iter().map(|(_, rank)| rank.0 + round);
                assert_eq!(sum, vec![ranks.sum::<u32>(); length]);
            };
            sum(&mut half, 2000);
            sum(&mut group, 3);
            sum(&mut pair, 2000);
            sum(&mut inner, 3);
            if sends {
                let mut came = [0u32];
                inner.recv(&mut came, other).unwrap();
                assert_eq!(came, [2000 + round]);
                group.recv(&mut came, other).unwrap();
                assert_eq!(came, [round]);
                half.recv(&mut came, other).unwrap();
                assert_eq!(came, [1000 + round]);
            }
        }
    });
}

#[test]
fn halves_do_not_wait_for_each_other() {
    let is_done = AtomicBool::new(false);
    run(4, |mut group| {
        let rank = group.rank().0;
        let mut half = group.split(Some(rank / 2), 0).unwrap().unwrap();
        half.set_deadline(Duration::from_secs(20));
        // The lower half calls nothing before the other one is through.
        while rank / 2 == 0 && !is_done.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        (0..20).for_each(|_| half.barrier().unwrap());
        is_done.store(true, Ordering::SeqCst);
        group.barrier().unwrap();
    });
}

#[test]
fn calls_beside_split_tell_who_called() {
    let errors = fails(3, |group| match group.rank() {
        Rank(1) => group.all_reduce(&mut [1f32], ReduceOp::Sum),
        _ => group.split(Some(0), 0).map(drop),
    });
    all_contain(&errors, &["split", "rank 1", "all_reduce(sum) of 1 f32"]);
    let errors = fails(2, |group| match group.rank() {
        Rank(0) => group.new_group(&[Rank(0)]).map(drop),
        _ => group.split(None, 0).map(drop),
    });
    all_contain(&errors, &["rank 0", "new_group", "rank 1", "split"]);
    // In a group of some, with positions where they differ from ranks.
    let errors = fails(3, |group| {
        let Some(mut pair) = group.new_group(&[2, 1].map(Rank))? else {
            return group.barrier();
        };
        match pair.rank() {
            Rank(1) => pair.barrier(),
            _ => pair.split(None, 0).map(drop),
        }
    });
    all_contain(&errors, &["rank 2 (position 0)", "split", "barrier"]);
    all_contain(&errors, &["rank 1"]);
}

#[test]
fn group_dropped_leaves_others_alone() {
    run(4, |mut group| {
        let rank = group.rank().0;
        let one = group.split(Some(rank / 2), 0).unwrap().unwrap();
        let mut two = group.split(Some(rank % 2), 0).unwrap().unwrap();
        if rank == 3 {
            drop(one);
        } else {
            // One rank keeps it for longer than the others.
            thread::sleep(Duration::from_millis(u64::from(rank)));
            one.destroy();
        }
        for _ in 0..20 {
            group.barrier().unwrap();
            two.barrier().unwrap();
        }
        drop(group);
        let mut last = two.split(Some(0), -i64::from(rank)).unwrap().unwrap();
        last.barrier().unwrap();
    });
}

#[test]
fn member_gone_named_with_position() {
    let errors = fails(4, |group| {
        let some = group.new_group(&[3, 0, 2].map(Rank))?;
        match some.filter(|some| some.rank() != Rank(3)) {
            Some(mut some) => some.barrier(),
            None => group.barrier(),
        }
    });
    all_contain(&errors, &["rank 3 (position 0) left the group"]);
}

#[test]
fn rank_panicked_wakes_all_its_groups() {
    // A slower rank may still be creating its group when the panic ends everything.
    let panics = |mut group: ProcessGroup| {
        let mut pair = group.new_group(&[2, 1].map(Rank))?;
        let mut other = group.new_group(&[3, 2].map(Rank))?;
        assert!(group.rank() != Rank(2), "on purpose");
        pair.as_mut().or(other.as_mut()).unwrap_or(&mut group).barrier()
    };
    let begin = Instant::now();
    let errors: Vec<String> = thread::scope(|scope| {
        let threads: Vec<_> =
            init(4).into_iter().map(|group| scope.spawn(move || panics(group))).collect();
        let ends = threads.into_iter().filter_map(|thread| thread.join().ok());
        ends.map(|end| end.unwrap_err().to_string()).collect()
    });
    assert!(begin.elapsed() < Duration::from_secs(20));
    assert_eq!(errors.len(), 3);
    all_contain(&errors, &["rank 2", "left the group (its thread panicked)"]);
}

#[test]
fn rank_failed_ends_all_its_groups() {
    // Often, because ranks learn of it in one order or another.
    (0..200).for_each(|_| fail_in_one_group());
}

fn fail_in_one_group() {
    let errors = fails(4, |group| {
        let mut one = group.new_group(&[1, 0].map(Rank))?;
        let mut two = group.new_group(&[2, 0].map(Rank))?;
        match group.rank() {
            // Rank 2 waits in a group with rank 0, and rank 3 in that of all.
            Rank(0) => one.as_mut().map_or(Ok(()), |one| one.broadcast(&mut [0u32], Rank(7))),
            Rank(1) => one.as_mut().map_or(Ok(()), |one| one.broadcast(&mut [0u32], Rank(0))),
            Rank(2) => two.as_mut().map_or(Ok(()), ProcessGroup::barrier),
            _ => group.barrier(),
        }
    });
    all_contain(&errors, &["broadcast(from rank 7)"]);
    assert!(
        errors[0].contains("rank 7 is not in the group {1, 0}") || errors[0].contains("rank 1")
    );
}

#[test]
fn group_has_deadline_of_parent() {
    let errors = fails(3, |group| {
        group.set_deadline(Duration::from_secs(1));
        let mut new = group.split(Some(0), -i64::from(group.rank().0))?;
        if group.rank() == Rank(0) {
            thread::sleep(Duration::from_secs(3));
        }
        new.as_mut().map_or(Ok(()), |new| new.all_reduce(&mut [1f32], ReduceOp::Sum))
    });
    all_contain(&errors, &["all_reduce(sum) of 1 f32: waited ", "rank 0 (position 2)"]);
    assert!(errors.iter().all(|error| waited_s(error) >= 1.0), "{errors:?}");
}
