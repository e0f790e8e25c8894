//! Price of a step of pipelines from the measured times of blocks.

use super::measure::MeasuredBlocks;
use potluck_parallel::planner::cut::{BlockTimes, crossing_elements};
use potluck_parallel::planner::laid_out::LaidOut;
use potluck_parallel::planner::price::{LinkModel, StepPrice, UnknownTime, price};

/// Returns the price of a step of pipelines, whose ranks are on the requested devices at these
/// positions.
///
/// # Errors
/// Returns the [`UnknownTime`] of a block that could not be measured on its device.
pub fn price_of(
    measured: &MeasuredBlocks,
    positions: &[usize],
    laid_out: &LaidOut,
) -> Result<StepPrice, UnknownTime> {
    let times: Vec<Vec<BlockTimes>> =
        positions.iter().map(|position| measured.times[*position].clone()).collect();
    let links = links(positions, measured, &crossing_elements(laid_out.whole()));
    price(&laid_out.written, &times, &links)
}

/// Links between ranks: an element takes the seconds of both sides of a cut.
fn links(
    positions: &[usize],
    measured: &MeasuredBlocks,
    crossing: &[usize],
) -> Vec<Vec<LinkModel>> {
    let mut element_s = Vec::with_capacity(positions.len());
    for position in positions {
        let mut seconds = 0.0;
        let mut elements = 0;
        for (cut_s, count) in measured.cut_s[*position].iter().zip(crossing) {
            seconds += cut_s;
            elements += count;
        }
        element_s.push(if elements > 0 { seconds / elements as f64 } else { 0.0 });
    }
    let mut links = Vec::with_capacity(positions.len());
    for from_s in &element_s {
        links.push(element_s.iter().map(|to_s| LinkModel::of_element_s(from_s + to_s)).collect());
    }
    links
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_takes_what_both_of_its_ends_take() {
        let measured = MeasuredBlocks {
            rows: 1,
            kinds: vec![0, 1],
            times: Vec::new(),
            cut_s: vec![vec![0.0, 1.0, 2.0], vec![0.0; 3]],
            transfers_s: Vec::new(),
            refusals: Vec::new(),
            may_fit_later: false,
        };
        let links = links(&[1, 0], &measured, &[0, 10, 20]);
        let rate = |from: usize, to: usize| links[from][to].bytes_per_s;
        assert_eq!(links[0][0], LinkModel::INSTANT);
        // 0.1 s per element on one side, or on both.
        assert!((rate(0, 1) - 40.0).abs() < 1e-9 && (rate(1, 0) - 40.0).abs() < 1e-9);
        assert!((rate(1, 1) - 20.0).abs() < 1e-9);
    }
}
