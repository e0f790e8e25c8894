//! Several model chunks per stage: a local search of the bounds between chunks.

use std::ops::Range;

use super::contiguous::divide_freely;
use super::prices::{FORBIDDEN, Prices, run_of, seconds};
use super::{Cut, CutError, INTERLEAVED_DEVICES, by_stage, even};

/// Worth of a cut: stages that do not fit in memory, picoseconds of the slowest stage, and the sum
/// of the squares of all stages; the less the better, in this order.
type Worth = (u32, u64, u128);

/// Returns all orders of `0..devices`, in lexicographic order.
fn orders(devices: usize) -> Vec<Vec<usize>> {
    let mut orders = vec![Vec::new()];
    for _ in 0..devices {
        let mut longer = Vec::new();
        for order in &orders {
            for device in 0..devices {
                if !order.contains(&device) {
                    longer.push([&order[..], &[device]].concat());
                }
            }
        }
        orders = longer;
    }
    orders
}

/// Returns the worth of the chunks between these bounds, or `None` if one is ruled out or it is not
/// less than `limit`. Memory is checked only if the times are less.
fn worth(
    prices: &Prices<'_>,
    order: &[usize],
    bounds: &[usize],
    limit: Option<Worth>,
) -> Option<Worth> {
    let mut stage_ps = vec![0u64; order.len()];
    for (chunk, pair) in bounds.windows(2).enumerate() {
        if pair[0] == pair[1] {
            return None;
        }
        let stage = chunk % order.len();
        let ps = prices.run_ps(order[stage], pair[0]..pair[1]);
        if ps == FORBIDDEN {
            return None;
        }
        stage_ps[stage] = stage_ps[stage].saturating_add(ps);
    }
    let slowest_ps = stage_ps.iter().copied().max().unwrap_or(0);
    let mut squares: u128 = 0;
    for &ps in &stage_ps {
        squares = squares.saturating_add(u128::from(ps) * u128::from(ps));
    }
    let is_less = |worth: Worth| limit.is_none_or(|limit| worth < limit);
    if !is_less((0, slowest_ps, squares)) {
        return None;
    }
    let mut misfits = 0;
    for (stage, blocks) in by_stage(&chunks_between(bounds), order.len()).into_iter().enumerate() {
        if !prices.fits(order[stage], stage, blocks) {
            misfits += 1;
        }
    }
    let worth = (misfits, slowest_ps, squares);
    if is_less(worth) { Some(worth) } else { None }
}

fn chunks_between(bounds: &[usize]) -> Vec<Range<u32>> {
    bounds.windows(2).map(|pair| run_of(pair[0]..pair[1])).collect()
}

/// Moves one bound by one block while that helps; returns the worth that is reached, or `None` if
/// the start is ruled out.
fn improve(prices: &Prices<'_>, order: &[usize], bounds: &mut [usize]) -> Option<Worth> {
    let mut best = worth(prices, order, bounds, None)?;
    let mut is_improved = true;
    while is_improved {
        is_improved = false;
        for bound in 1..bounds.len() - 1 {
            let from = bounds[bound];
            for to in [from - 1, from + 1] {
                bounds[bound] = to;
                match worth(prices, order, bounds, Some(best)) {
                    Some(better) => {
                        best = better;
                        is_improved = true;
                        break;
                    }
                    None => bounds[bound] = from,
                }
            }
        }
    }
    Some(best)
}

/// Returns the bounds from which the search of an order starts: the bounds of the chunks whose
/// slowest is shortest, and the even ones.
fn starts(prices: &Prices<'_>, order: &[usize]) -> Vec<Vec<usize>> {
    let parts = prices.request().chunks * order.len();
    let devices: Vec<usize> = order.iter().copied().cycle().take(parts).collect();
    let mut starts = Vec::new();
    if let Some(division) = divide_freely(prices, &devices) {
        let mut bounds = vec![0];
        bounds.extend(division.parts.iter().map(|&(_, end)| end));
        starts.push(bounds);
    }
    let mut bounds = vec![0];
    bounds.extend(even(prices.blocks() as u32, parts).iter().map(|run| run.end as usize));
    starts.push(bounds);
    starts
}

/// Returns the best cut with several chunks per stage that the search finds.
pub fn cut(prices: &Prices<'_>) -> Result<Cut, CutError> {
    let request = prices.request();
    let orders = if request.is_ordered || request.stages > INTERLEAVED_DEVICES {
        vec![(0..request.stages).collect()]
    } else {
        orders(request.stages)
    };
    let mut best: Option<(Worth, Vec<usize>, Vec<usize>)> = None;
    for order in orders {
        for mut bounds in starts(prices, &order) {
            let Some(found) = improve(prices, &order, &mut bounds) else { continue };
            if best.as_ref().is_none_or(|(worth, ..)| found < *worth) {
                best = Some((found, order.clone(), bounds));
            }
        }
    }
    let ((misfits, slowest_ps, _), devices, bounds) = best.ok_or(CutError::Forbidden)?;
    if misfits > 0 {
        return Err(CutError::Memory { device: None, stage: None });
    }
    let blocks = by_stage(&chunks_between(&bounds), devices.len());
    Ok(Cut { devices, blocks, slowest_s: seconds(slowest_ps) })
}
