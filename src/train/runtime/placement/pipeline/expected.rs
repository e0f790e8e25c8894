//! Expected step of pipelines and tensor groups from the measured times of blocks.

use super::measure::MeasuredBlocks;
use crate::runtime::expected_step::{ExpectedStep, fastest_alone};
use crate::runtime::memory;
use crate::runtime::placement::open_one::RequestedDevices;
use crate::runtime::placement::types::PlacementRequest;
use potluck_kernels::device::Selection;
use potluck_kernels::exec::Moments;
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::cut::{BlockTimes, crossing_elements};
use potluck_parallel::planner::laid_out::LaidOut;
use potluck_parallel::planner::price::{LinkModel, StepPrice, UnknownTime, price};

/// Returns the expected step of an arrangement of the requested devices. Steps of tensor groups are
/// not predicted.
pub(crate) fn expected_step(
    request: &PlacementRequest,
    devices: RequestedDevices,
    measured: &MeasuredBlocks,
    arrangement: &Arrangement,
    laid_out: &LaidOut,
) -> ExpectedStep {
    let micro_batches = f64::from(request.batch) / f64::from(measured.rows.max(1));
    let mut alone_s = Vec::with_capacity(measured.times.len());
    for (times, selection) in measured.times.iter().zip(devices.selections) {
        let blocks_s: f64 = times.iter().map(BlockTimes::sum_s).sum();
        let fits = holds_all(request, selection, measured.rows);
        alone_s.push(if fits { micro_batches * blocks_s } else { f64::INFINITY });
    }
    let is_priced = arrangement.mesh.tensor == 1 && measured.rows == arrangement.rows_max();
    let mut step_s = None;
    if is_priced && let Ok(price) = price_of(measured, &arrangement.positions, laid_out) {
        step_s = Some(price.seconds);
    }
    ExpectedStep {
        step_s,
        solo_s: arrangement.positions.iter().map(|position| alone_s[*position]).collect(),
        fastest: fastest_alone(devices.names.iter().map(String::as_str), &alone_s),
    }
}

/// Returns true if a device has memory for the whole model with all moments.
fn holds_all(request: &PlacementRequest, selection: &Selection, rows: u32) -> bool {
    let moments = Moments { count: request.optimizer.moments(), owned: None };
    let needed = memory::needed(selection, &request.plans.of_rows(rows), &moments);
    let limit = memory::limit(selection, request.opening.device_memory_mib);
    limit.is_none_or(|(has, _)| needed as u64 <= has)
}

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
        };
        let links = links(&[1, 0], &measured, &[0, 10, 20]);
        let rate = |from: usize, to: usize| links[from][to].bytes_per_s;
        assert_eq!(links[0][0], LinkModel::INSTANT);
        // 0.1 s per element on one side, or on both.
        assert!((rate(0, 1) - 40.0).abs() < 1e-9 && (rate(1, 0) - 40.0).abs() < 1e-9);
        assert!((rate(1, 1) - 20.0).abs() < 1e-9);
    }
}
