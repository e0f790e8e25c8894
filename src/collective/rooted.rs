//! Rooted collectives, which begin or end at one rank, and the barrier, as a list of steps per
//! rank. Sends never block, a receiving step waits for its message, and messages from one rank to
//! another arrive in order. Then no list can deadlock, because each consists of rounds in which
//! every received message was sent in the same round or before.
//!
//! The cost of each collective is in [`super::cost`].

use crate::base::Rank;

/// Step of one rank on a block of values. A block is named by the rank to which it belongs; a
/// reduction or a broadcast has one block, that of the root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootedStep {
    /// Send the held values of the block to `to`.
    Send { to: Rank, block: Rank },
    /// Receive the block from `from` and hold it.
    Receive { from: Rank, block: Rank },
    /// Receive the block from `from`, add it to the held values and hold the sum.
    Accumulate { from: Rank, block: Rank },
}

/// Returns the number of levels of a tree, `L = ceil(log2(world))`.
pub fn levels(world: u32) -> u32 {
    world.next_power_of_two().ilog2()
}

/// Returns the powers of two below `world`, of which there are `L`.
fn distances(world: u32) -> impl DoubleEndedIterator<Item = u32> {
    (0..levels(world)).map(|level| 1 << level)
}

/// Numbering of ranks relative to a root, which is number 0.
#[derive(Clone, Copy)]
struct RootedNumbering {
    world: u32,
    root: Rank,
}

impl RootedNumbering {
    fn number(self, rank: Rank) -> u32 {
        (rank.0 + self.world - self.root.0) % self.world
    }

    fn rank(self, number: u32) -> Rank {
        Rank((number + self.root.0) % self.world)
    }
}

/// Returns the steps of a rank in a reduction, which sums the values of all ranks on the root
/// along a binomial tree. Numbered from the root as 0, rank `v` adds the sums of `v + 1`, `v +
/// 2`, `v + 4`, .., in this order, for as long as these powers are below the lowest bit of `v`:
/// `(v + (v+1)) + ((v+2) + (v+3))`, whatever the timing.
pub fn reduce(world: u32, root: Rank, rank: Rank) -> Vec<RootedStep> {
    let seen = RootedNumbering { world, root };
    let number = seen.number(rank);
    let mut steps = Vec::new();
    for distance in distances(world) {
        if number & distance != 0 {
            steps.push(RootedStep::Send { to: seen.rank(number - distance), block: root });
            break;
        }
        if number + distance < world {
            steps.push(RootedStep::Accumulate { from: seen.rank(number + distance), block: root });
        }
    }
    steps
}

/// Returns the steps of a rank in a broadcast of the root's values along the same tree, to the
/// largest branch first.
pub fn broadcast(world: u32, root: Rank, rank: Rank) -> Vec<RootedStep> {
    let seen = RootedNumbering { world, root };
    let number = seen.number(rank);
    let mut steps = Vec::new();
    let mut branches = world.next_power_of_two();
    if number > 0 {
        branches = 1 << number.trailing_zeros();
        steps.push(RootedStep::Receive { from: seen.rank(number - branches), block: root });
    }
    for distance in distances(branches).rev().filter(|distance| number + distance < world) {
        steps.push(RootedStep::Send { to: seen.rank(number + distance), block: root });
    }
    steps
}

/// Returns the steps of a rank in an all-reduce of few values: a [`reduce`] to rank 0 and a
/// [`broadcast`] from there.
pub fn all_reduce(world: u32, rank: Rank) -> Vec<RootedStep> {
    [reduce(world, Rank(0), rank), broadcast(world, Rank(0), rank)].concat()
}

/// Returns the steps of a rank in a gather: every rank sends its block to the root, which
/// receives them in the order of ranks.
pub fn gather(world: u32, root: Rank, rank: Rank) -> Vec<RootedStep> {
    if rank != root {
        return vec![RootedStep::Send { to: root, block: rank }];
    }
    let others = (0..world).map(Rank).filter(|other| *other != root);
    others.map(|other| RootedStep::Receive { from: other, block: other }).collect()
}

/// Returns the steps of a rank in a scatter: the root sends each rank its block.
pub fn scatter(world: u32, root: Rank, rank: Rank) -> Vec<RootedStep> {
    if rank != root {
        return vec![RootedStep::Receive { from: root, block: rank }];
    }
    let others = (0..world).map(Rank).filter(|other| *other != root);
    others.map(|other| RootedStep::Send { to: other, block: other }).collect()
}

/// Returns the steps of a rank in a barrier: no rank completes it before every rank has begun. In
/// `L` rounds each rank hears, directly or not, from twice as many ranks as before
/// (dissemination; Hensgen, Finkel and Manber 1988). Its blocks are empty.
pub fn barrier(world: u32, rank: Rank) -> Vec<RootedStep> {
    let step = |distance| {
        let to = Rank((rank.0 + distance) % world);
        let from = Rank((rank.0 + world - distance) % world);
        [RootedStep::Send { to, block: rank }, RootedStep::Receive { from, block: from }]
    };
    distances(world).flat_map(step).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, VecDeque};

    use super::*;

    /// Performs lists of steps on symbolic sums, which show the order of additions: returns the
    /// blocks that each rank holds at the end, given those that it holds at first.
    fn run(
        world: u32,
        list: impl Fn(Rank) -> Vec<RootedStep>,
        held: impl Fn(u32) -> Vec<(u32, String)>,
    ) -> Vec<BTreeMap<u32, String>> {
        let mut lists: Vec<VecDeque<RootedStep>> =
            (0..world).map(|r| list(Rank(r)).into()).collect();
        let mut held: Vec<BTreeMap<u32, String>> =
            (0..world).map(|rank| held(rank).into_iter().collect()).collect();
        let mut sent: BTreeMap<(u32, u32), VecDeque<String>> = BTreeMap::new();
        loop {
            let mut moved = false;
            for rank in 0..world {
                let Some(step) = lists[rank as usize].front() else { continue };
                let held = &mut held[rank as usize];
                match *step {
                    RootedStep::Send { to, block } => {
                        sent.entry((rank, to.0)).or_default().push_back(held[&block.0].clone());
                    }
                    RootedStep::Receive { from, block }
                    | RootedStep::Accumulate { from, block } => {
                        let queue = sent.entry((from.0, rank)).or_default();
                        let Some(came) = queue.pop_front() else { continue };
                        let sum = match step {
                            RootedStep::Accumulate { .. } => format!("({}+{came})", held[&block.0]),
                            _ => came,
                        };
                        held.insert(block.0, sum);
                    }
                }
                lists[rank as usize].pop_front();
                moved = true;
            }
            if !moved {
                break;
            }
        }
        assert!(lists.iter().all(VecDeque::is_empty), "stuck: {lists:?}");
        assert!(sent.values().all(VecDeque::is_empty), "left over: {sent:?}");
        held
    }

    /// Calls `test` with every world size up to 9 and every root in it.
    fn for_each_root(test: impl Fn(u32, Rank)) {
        (1..=9).for_each(|world| (0..world).for_each(|root| test(world, Rank(root))));
    }

    #[test]
    fn a_reduction_sums_everyone_in_the_order_of_the_tree() {
        let of_root = |world, root: Rank| {
            let held = |rank: u32| vec![(root.0, rank.to_string())];
            run(world, |rank| reduce(world, root, rank), held)[root.index()][&root.0].clone()
        };
        assert_eq!(of_root(1, Rank(0)), "0");
        assert_eq!(of_root(4, Rank(0)), "((0+1)+(2+3))");
        assert_eq!(of_root(5, Rank(3)), "(((3+4)+(0+1))+2)");
        for_each_root(|world, root| {
            let sum = of_root(world, root);
            let terms: String = sum.chars().filter(char::is_ascii_digit).collect();
            let expected: String = (0..world).map(|k| ((root.0 + k) % world).to_string()).collect();
            assert_eq!(terms, expected, "{sum}");
        });
    }

    #[test]
    fn a_broadcast_reaches_everyone() {
        for_each_root(|world, root| {
            let held = |rank| if rank == root.0 { vec![(rank, "it".into())] } else { vec![] };
            let end = run(world, |rank| broadcast(world, root, rank), held);
            assert!(end.iter().all(|held| held[&root.0] == "it"), "{end:?}");
        });
    }

    #[test]
    fn blocks_are_gathered_and_scattered() {
        for_each_root(|world, root| {
            let own = |rank: u32| vec![(rank, rank.to_string())];
            let end = run(world, |rank| gather(world, root, rank), own);
            assert!((0..world).all(|r| end[root.index()][&r] == r.to_string()), "{end:?}");
            let all = |rank: u32| {
                let blocks = (0..world).map(|block| (block, block.to_string()));
                if rank == root.0 { blocks.collect() } else { vec![] }
            };
            let end = run(world, |rank| scatter(world, root, rank), all);
            assert!((0..world).all(|r| end[r as usize][&r] == r.to_string()), "{end:?}");
        });
    }

    #[test]
    fn a_barrier_waits_for_everyone() {
        for world in 1..=9 {
            // Ranks that a rank has heard from, directly or not, as bits: all of them at the end.
            let mut knows: Vec<u64> = (0..world).map(|rank| 1 << rank).collect();
            let rounds = barrier(world, Rank(0)).len() / 2;
            for round in 0..rounds {
                let before = knows.clone();
                for rank in 0..world {
                    let steps = barrier(world, Rank(rank));
                    let RootedStep::Receive { from, .. } = steps[2 * round + 1] else { panic!() };
                    knows[rank as usize] |= before[from.index()];
                }
            }
            assert!(knows.iter().all(|known| *known == (1 << world) - 1), "{knows:?}");
            let empty = |rank: u32| vec![(rank, String::new())];
            run(world, |rank| barrier(world, rank), empty);
        }
    }
}
