//! Choice of the place where each device's gradients are added to partial sums.

use super::types::PlacementRequest;
use crate::base::Rank;
use crate::collective::{BucketGroups, Chunk, ShardLayout};
use crate::exec::Executor;
use crate::faults::{Fault, Point};
use crate::parallel::{Placement, ReduceSite};
use crate::runtime::RuntimeError;
use crate::runtime::open::{OpenDevice, no_room};
use crate::runtime::timing::faster_reduce_site;

/// Device, by its rank, that failed, with its error.
pub struct ReduceSiteFailure {
    pub rank: usize,
    pub error: RuntimeError,
}

/// Returns the reduce site of each device, in the order of ranks: that of the request, or else of
/// `saved`, or else the faster one. Devices that add are prepared for it.
///
/// # Errors
/// Returns the first device that fails.
pub fn reduce_sites(
    request: &PlacementRequest,
    members: &[&OpenDevice],
    (layout, groups): (&ShardLayout, &BucketGroups),
    saved: Option<&Placement>,
) -> Result<Vec<ReduceSite>, ReduceSiteFailure> {
    let saved = saved.filter(|_| !request.retune);
    let site = |(rank, one): (usize, &&OpenDevice)| {
        let saved = saved.and_then(|saved| saved.of_position(one.position, members.len()));
        let site = request.parallel.reduce_site.or(saved.map(|saved| saved.reduce_site));
        let chunks = travelling(layout, groups, Rank(rank as u32));
        reduce_site(request, one, chunks, site).map_err(|error| ReduceSiteFailure { rank, error })
    };
    members.iter().enumerate().map(site).collect()
}

/// Returns the chunks of the buckets that a rank holds and others too.
fn travelling(layout: &ShardLayout, groups: &BucketGroups, rank: Rank) -> Vec<Chunk> {
    let positions = groups.positions(rank);
    let travels =
        |chunk: &&Chunk| layout.size_of(chunk.bucket) > 1 && positions.of(chunk.bucket).is_some();
    layout.chunks.iter().filter(travels).cloned().collect()
}

/// Returns the reduce site of a device for the chunks that travel, which is prepared for adding if
/// the site is the device.
fn reduce_site(
    request: &PlacementRequest,
    one: &OpenDevice,
    chunks: Vec<Chunk>,
    given: Option<ReduceSite>,
) -> Result<ReduceSite, RuntimeError> {
    let what = "timing the addition of gradients";
    let mut lengths: Vec<usize> = chunks.iter().map(|chunk| chunk.range.len()).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let bytes = size_of::<f32>() * lengths.last().copied().unwrap_or(0);
    let rank = Rank(one.position as u32);
    if let Some(fault) =
        request.faults.at_rank(Point::ReduceSite, 0, rank).and_then(Fault::of_device)
    {
        let inject = move |device: &mut dyn Executor| device.inject_fault(fault);
        one.driver.run(what, inject).map_err(|error| no_room(error, bytes))?;
    }
    if chunks.is_empty() || one.is_cpu {
        return Ok(ReduceSite::Host);
    }
    match given {
        Some(ReduceSite::Host) => Ok(ReduceSite::Host),
        Some(ReduceSite::Device) => {
            let prepare = move |device: &mut dyn Executor| device.prepare_add(&lengths);
            let prepared = one.driver.run("preparing to add gradients", prepare);
            prepared.map_err(|error| no_room(error, bytes))?;
            Ok(ReduceSite::Device)
        }
        None => {
            let timing = move |device: &mut dyn Executor| {
                device.prepare_add(&lengths)?;
                faster_reduce_site(device, &chunks)
            };
            one.driver.run(what, timing).map_err(|error| no_room(error, bytes))
        }
    }
}
