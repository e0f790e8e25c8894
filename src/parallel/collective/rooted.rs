//! Rooted collectives, which begin or end at one rank, and the barrier, as a list of steps per
//! rank, known by its position in the group. Sends never block, a receiving step waits for its
//! message, and messages from one rank to another arrive in order. Then no list can deadlock,
//! because each consists of rounds in which every received message was sent in the same round or
//! before.
//!
//! The cost of each collective is in [`super::cost`].

use potluck_core::Position;

/// Step of one rank on a block of values. A block is named by the position of the rank to which it
/// belongs; a reduction or a broadcast has only the block of the root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RootedStep {
    /// Send the held values of the block to `to`.
    Send { to: Position, block: Position },
    /// Receive the block from `from` and hold it.
    Receive { from: Position, block: Position },
    /// Receive the block from `from`, add it to the held values and hold the sum.
    Accumulate { from: Position, block: Position },
}

/// Number of levels of a tree, `L = ceil(log2(size))`.
pub(crate) fn levels(size: u32) -> u32 {
    size.next_power_of_two().ilog2()
}

/// The `L` powers of two below `size`.
fn distances(size: u32) -> impl DoubleEndedIterator<Item = u32> {
    (0..levels(size)).map(|level| 1 << level)
}

/// Numbering of positions relative to a root, which is number 0.
#[derive(Clone, Copy)]
struct RootedNumbering {
    size: u32,
    root: Position,
}

impl RootedNumbering {
    fn number(self, position: Position) -> u32 {
        (position.0 + self.size - self.root.0) % self.size
    }

    fn position(self, number: u32) -> Position {
        Position((number + self.root.0) % self.size)
    }
}

/// Returns the steps of the rank at a position in a reduction, which sums the values of all
/// ranks on the root along a binomial tree. Numbered from the root as 0, rank `v` adds the sums of
/// `v + 1`, `v + 2`, `v + 4`, .., in this order, for as long as these powers are below the lowest
/// bit of `v`: `(v + (v+1)) + ((v+2) + (v+3))`, whatever the timing.
pub fn reduce(size: u32, root: Position, position: Position) -> Vec<RootedStep> {
    let seen = RootedNumbering { size, root };
    let number = seen.number(position);
    let mut steps = Vec::new();
    for distance in distances(size) {
        if number & distance != 0 {
            steps.push(RootedStep::Send { to: seen.position(number - distance), block: root });
            break;
        }
        if number + distance < size {
            steps.push(RootedStep::Accumulate {
                from: seen.position(number + distance),
                block: root,
            });
        }
    }
    steps
}

/// Returns the steps of the rank at a position in a broadcast of the root's values along the
/// same tree, to the largest branch first.
pub fn broadcast(size: u32, root: Position, position: Position) -> Vec<RootedStep> {
    let seen = RootedNumbering { size, root };
    let number = seen.number(position);
    let mut steps = Vec::new();
    let mut branches = size.next_power_of_two();
    if number > 0 {
        branches = 1 << number.trailing_zeros();
        steps.push(RootedStep::Receive { from: seen.position(number - branches), block: root });
    }
    for distance in distances(branches).rev().filter(|distance| number + distance < size) {
        steps.push(RootedStep::Send { to: seen.position(number + distance), block: root });
    }
    steps
}

/// Returns the steps of the rank at a position in a gather: every rank sends its block to the
/// root, which receives them in the order of positions.
pub fn gather(size: u32, root: Position, position: Position) -> Vec<RootedStep> {
    if position != root {
        return vec![RootedStep::Send { to: root, block: position }];
    }
    others(size, root).map(|other| RootedStep::Receive { from: other, block: other }).collect()
}

/// Returns the steps of the rank at a position in a scatter: the root sends each rank its block.
pub fn scatter(size: u32, root: Position, position: Position) -> Vec<RootedStep> {
    if position != root {
        return vec![RootedStep::Receive { from: root, block: position }];
    }
    others(size, root).map(|other| RootedStep::Send { to: other, block: other }).collect()
}

fn others(size: u32, root: Position) -> impl Iterator<Item = Position> {
    (0..size).map(Position).filter(move |other| *other != root)
}

/// Returns the steps of the rank at a position in a barrier: no rank completes it before every
/// rank has begun. In `L` rounds each rank hears, directly or not, from twice as many ranks as
/// before (dissemination; Hensgen, Finkel and Manber 1988). Its blocks are empty.
pub fn barrier(size: u32, position: Position) -> Vec<RootedStep> {
    let mut steps = Vec::new();
    for distance in distances(size) {
        let to = Position((position.0 + distance) % size);
        let from = Position((position.0 + size - distance) % size);
        steps.push(RootedStep::Send { to, block: position });
        steps.push(RootedStep::Receive { from, block: from });
    }
    steps
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, VecDeque};

    use super::*;

    /// Performs lists of steps on symbolic sums, which show the order of additions: returns the
    /// final blocks of each rank, given its initial ones.
    fn run(
        size: u32,
        list: impl Fn(Position) -> Vec<RootedStep>,
        held: impl Fn(u32) -> Vec<(u32, String)>,
    ) -> Vec<BTreeMap<u32, String>> {
        let mut lists: Vec<VecDeque<RootedStep>> =
            (0..size).map(|r| list(Position(r)).into()).collect();
        let mut held: Vec<BTreeMap<u32, String>> =
            (0..size).map(|position| held(position).into_iter().collect()).collect();
        let mut sent: BTreeMap<(u32, u32), VecDeque<String>> = BTreeMap::new();
        loop {
            let mut moved = false;
            for position in 0..size {
                let Some(step) = lists[position as usize].front() else { continue };
                let held = &mut held[position as usize];
                match *step {
                    RootedStep::Send { to, block } => {
                        sent.entry((position, to.0)).or_default().push_back(held[&block.0].clone());
                    }
                    RootedStep::Receive { from, block }
                    | RootedStep::Accumulate { from, block } => {
                        let queue = sent.entry((from.0, position)).or_default();
                        let Some(came) = queue.pop_front() else { continue };
                        let sum = match step {
                            RootedStep::Accumulate { .. } => format!("({}+{came})", held[&block.0]),
                            _ => came,
                        };
                        held.insert(block.0, sum);
                    }
                }
                lists[position as usize].pop_front();
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

    /// Calls `test` with every group size up to 9 and every root in it.
    fn for_each_root(test: impl Fn(u32, Position)) {
        (1..=9).for_each(|size| (0..size).for_each(|root| test(size, Position(root))));
    }

    #[test]
    fn a_reduction_sums_everyone_in_the_order_of_the_tree() {
        let of_root = |size, root: Position| {
            let held = |position: u32| vec![(root.0, position.to_string())];
            run(size, |position| reduce(size, root, position), held)[root.index()][&root.0].clone()
        };
        assert_eq!(of_root(1, Position(0)), "0");
        assert_eq!(of_root(4, Position(0)), "((0+1)+(2+3))");
        assert_eq!(of_root(5, Position(3)), "(((3+4)+(0+1))+2)");
        for_each_root(|size, root| {
            let sum = of_root(size, root);
            let terms: String = sum.chars().filter(char::is_ascii_digit).collect();
            let expected: String = (0..size).map(|k| ((root.0 + k) % size).to_string()).collect();
            assert_eq!(terms, expected, "{sum}");
        });
    }

    #[test]
    fn a_broadcast_reaches_everyone() {
        for_each_root(|size, root| {
            let held =
                |position| if position == root.0 { vec![(position, "it".into())] } else { vec![] };
            let end = run(size, |position| broadcast(size, root, position), held);
            assert!(end.iter().all(|held| held[&root.0] == "it"), "{end:?}");
        });
    }

    #[test]
    fn blocks_are_gathered_and_scattered() {
        for_each_root(|size, root| {
            let own = |position: u32| vec![(position, position.to_string())];
            let end = run(size, |position| gather(size, root, position), own);
            assert!((0..size).all(|r| end[root.index()][&r] == r.to_string()), "{end:?}");
            let all = |position: u32| {
                let blocks = (0..size).map(|block| (block, block.to_string()));
                if position == root.0 { blocks.collect() } else { vec![] }
            };
            let end = run(size, |position| scatter(size, root, position), all);
            assert!((0..size).all(|r| end[r as usize][&r] == r.to_string()), "{end:?}");
        });
    }

    #[test]
    fn a_barrier_waits_for_everyone() {
        for size in 1..=9 {
            // Ranks that a rank has heard from, directly or not, as bits: all of them at the end.
            let mut knows: Vec<u64> = (0..size).map(|position| 1 << position).collect();
            let rounds = barrier(size, Position(0)).len() / 2;
            for round in 0..rounds {
                let before = knows.clone();
                for position in 0..size {
                    let steps = barrier(size, Position(position));
                    let RootedStep::Receive { from, .. } = steps[2 * round + 1] else { panic!() };
                    knows[position as usize] |= before[from.index()];
                }
            }
            assert!(knows.iter().all(|known| *known == (1 << size) - 1), "{knows:?}");
            let empty = |position: u32| vec![(position, String::new())];
            run(size, |position| barrier(size, position), empty);
        }
    }
}
