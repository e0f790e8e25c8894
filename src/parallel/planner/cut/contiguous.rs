//! One run of blocks per stage: dynamic programming over the blocks already assigned and the
//! devices already used.

use super::prices::{FORBIDDEN, Prices, run_of, seconds};
use super::{Cut, CutError, EXACT_DEVICES};

/// Ways to assign devices to parts: a graph whose paths from the first state to the last are the
/// assignments. A state is reached only from lower ones.
struct Assignments {
    /// By state: the devices that may take the next part, ascending, and the states that follow.
    next: Vec<Vec<(usize, usize)>>,
    /// By state: number of assigned parts.
    done: Vec<usize>,
}

impl Assignments {
    /// Creates the one assignment of part p to device `order[p]`.
    fn of_order(order: &[usize]) -> Assignments {
        let mut next = Vec::with_capacity(order.len() + 1);
        for (part, &device) in order.iter().enumerate() {
            next.push(vec![(device, part + 1)]);
        }
        next.push(Vec::new());
        Assignments { next, done: (0..=order.len()).collect() }
    }

    /// Creates all assignments of each device to one part; the state is the set of used devices.
    fn of_all(devices: usize) -> Assignments {
        let mut next = Vec::new();
        let mut done = Vec::new();
        for set in 0..1usize << devices {
            let unused = (0..devices).filter(|&device| set >> device & 1 == 0);
            next.push(unused.map(|device| (device, set | 1 << device)).collect());
            done.push(set.count_ones() as usize);
        }
        Assignments { next, done }
    }
}

/// Best completion from a state and a block on: its worth, the first part's device, and its end.
#[derive(Clone, Copy)]
struct Completion<W> {
    worth: W,
    device: usize,
    end: usize,
    state: usize,
}

/// Parts that a model is divided into, from the first on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Division {
    /// Parts that do not fit in memory, then picoseconds of the slowest part, then the sum of the
    /// squares of all parts: the less the better, in this order.
    pub worth: (u32, u64, u128),
    /// Device and end of each part.
    pub parts: Vec<(usize, usize)>,
}

/// Search for a division. `fits` receives a device, a stage, and the start and end of a part, and
/// returns true if the device has memory for it.
struct Search<'a, F> {
    prices: &'a Prices<'a>,
    assignments: Assignments,
    fits: F,
}

impl<F: Fn(usize, usize, usize, usize) -> bool> Search<'_, F> {
    /// Returns the best completion of each state and block, at `state * (blocks + 1) + block`.
    ///
    /// `join` puts a part before a completion: it receives the part's picoseconds, 1 if it does not
    /// fit in memory and 0 otherwise, and the worth of the completion; `None` rules the part out.
    /// It must be monotone in all of them for the result to be exact.
    fn completions<W: Copy + Ord + Default>(
        &self,
        join: impl Fn(u64, u32, W) -> Option<W>,
    ) -> Vec<Option<Completion<W>>> {
        let blocks = self.prices.blocks();
        let last = self.assignments.next.len() - 1;
        let parts = self.assignments.done[last];
        let mut best: Vec<Option<Completion<W>>> = vec![None; (last + 1) * (blocks + 1)];
        best[last * (blocks + 1) + blocks] =
            Some(Completion { worth: W::default(), device: 0, end: blocks, state: last });
        for state in (0..last).rev() {
            let part = self.assignments.done[state];
            let after = parts - part - 1;
            let starts = if part == 0 { 0..1 } else { part..blocks - after };
            for start in starts {
                let mut least = None;
                for &(device, next) in &self.assignments.next[state] {
                    let first = if after == 0 { blocks } else { start + 1 };
                    for end in first..=blocks - after {
                        let Some(rest) = best[next * (blocks + 1) + end] else { continue };
                        let is_less = |worth| least.is_none_or(|l: Completion<W>| worth < l.worth);
                        let ps = self.prices.run_ps(device, start..end);
                        if ps == FORBIDDEN {
                            continue;
                        }
                        // Memory is checked only if the part would be better than the best one.
                        if !join(ps, 0, rest.worth).is_some_and(is_less) {
                            continue;
                        }
                        let misfits = u32::from(!(self.fits)(device, part, start, end));
                        if let Some(worth) = join(ps, misfits, rest.worth)
                            && is_less(worth)
                        {
                            least = Some(Completion { worth, device, end, state: next });
                        }
                    }
                }
                best[state * (blocks + 1) + start] = least;
            }
        }
        best
    }

    /// Returns the best division, or `None` if each is ruled out.
    ///
    /// 1. The fewest parts without memory, and the shortest slowest part among those divisions.
    /// 2. Among divisions with no part slower than that, the smallest sum of squares. (In one pass,
    ///    the squares would be minimal only among completions whose own slowest part is.)
    fn best(&self) -> Option<Division> {
        let slowest = self
            .completions(|ps, misfits, rest: (u32, u64)| Some((rest.0 + misfits, rest.1.max(ps))));
        let (_, slowest_ps) = slowest[0]?.worth;
        let squares = self.completions(|ps, misfits, rest: (u32, u128)| {
            if ps > slowest_ps {
                return None;
            }
            let square = u128::from(ps) * u128::from(ps);
            Some((rest.0 + misfits, rest.1.saturating_add(square)))
        });
        let (misfits, sum) = squares[0]?.worth;
        let mut state = 0;
        let mut block = 0;
        let mut parts = Vec::new();
        while state + 1 < self.assignments.next.len() {
            let part = squares[state * (self.prices.blocks() + 1) + block]?;
            parts.push((part.device, part.end));
            state = part.state;
            block = part.end;
        }
        Some(Division { worth: (misfits, slowest_ps, sum), parts })
    }
}

/// The best division among some assignments, with the request's memory.
fn divide(prices: &Prices<'_>, assignments: Assignments) -> Option<Division> {
    Search {
        prices,
        assignments,
        fits: |device, stage, start, end| prices.fits(device, stage, vec![run_of(start..end)]),
    }
    .best()
}

/// Returns the division with the shortest slowest part for devices that take parts in this order,
/// as if memory were unlimited; `None` if each is ruled out.
pub(crate) fn divide_freely(prices: &Prices<'_>, order: &[usize]) -> Option<Division> {
    Search { prices, assignments: Assignments::of_order(order), fits: |_, _, _, _| true }.best()
}

/// The given order's best division, improved by exchanges of two devices while one helps.
fn exchange(prices: &Prices<'_>, devices: usize) -> Option<Division> {
    let mut order: Vec<usize> = (0..devices).collect();
    let mut best = divide(prices, Assignments::of_order(&order));
    let mut is_improved = true;
    while is_improved {
        is_improved = false;
        for a in 0..devices {
            for b in a + 1..devices {
                order.swap(a, b);
                let other = divide(prices, Assignments::of_order(&order));
                let is_better = match (&other, &best) {
                    (Some(new), Some(old)) => new.worth < old.worth,
                    (new, old) => new.is_some() && old.is_none(),
                };
                if is_better {
                    best = other;
                    is_improved = true;
                } else {
                    order.swap(a, b);
                }
            }
        }
    }
    best
}

/// Returns the cut with one run of blocks per stage.
pub fn cut(prices: &Prices<'_>) -> Result<Cut, CutError> {
    let request = prices.request();
    let order: Vec<usize> = (0..request.stages).collect();
    let best = if request.is_ordered {
        divide(prices, Assignments::of_order(&order))
    } else if request.stages <= EXACT_DEVICES {
        divide(prices, Assignments::of_all(request.stages))
    } else {
        exchange(prices, request.stages)
    };
    let Division { worth: (misfits, slowest_ps, _), parts } = best.ok_or(CutError::Forbidden)?;
    if misfits > 0 {
        return Err(prices.memory_error());
    }
    let mut devices = Vec::with_capacity(parts.len());
    let mut blocks = Vec::with_capacity(parts.len());
    let mut start = 0;
    for (device, end) in parts {
        devices.push(device);
        blocks.push(vec![run_of(start..end)]);
        start = end;
    }
    Ok(Cut { devices, blocks, slowest_s: seconds(slowest_ps) })
}
