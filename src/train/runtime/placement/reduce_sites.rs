//! Choice of the site at which each device's gradients are added to partial sums.

use super::types::PlacementRequest;
use crate::runtime::RuntimeError;
use crate::runtime::open::{OpenDevice, no_room};
use crate::runtime::timing::faster_reduce_site;
use potluck_core::faults::{Fault, Point};
use potluck_core::{DType, Rank};
use potluck_parallel::collective::{BucketGroups, Chunk, ShardLayout};
use potluck_parallel::{Placement, ReduceSite};

/// Error of a device, with its rank.
pub(crate) struct ReduceSiteFailure {
    pub rank: usize,
    pub error: RuntimeError,
}

/// Reduce site of each device, in the order of ranks: from the request, or else from `saved`, or
/// else the faster one. Prepares devices for the addition if they are the site.
///
/// # Errors
/// Returns the first device that fails.
pub(crate) fn reduce_sites(
    request: &PlacementRequest,
    members: &[&OpenDevice],
    layout: &ShardLayout,
    groups: &BucketGroups,
    saved: Option<&Placement>,
) -> Result<Vec<ReduceSite>, ReduceSiteFailure> {
    let mut sites = Vec::new();
    for (rank, one) in members.iter().enumerate() {
        let mut given = request.parallel.reduce_site;
        if let Some(saved) = saved
            && given.is_none()
            && !request.retune
        {
            given = saved.of_position(one.position, members.len()).map(|kept| kept.reduce_site);
        }
        let chunks = travelling(layout, groups, Rank(rank as u32));
        match reduce_site(request, one, chunks, given) {
            Ok(site) => sites.push(site),
            Err(error) => return Err(ReduceSiteFailure { rank, error }),
        }
    }
    Ok(sites)
}

/// Chunks of the buckets that a rank has in common with others.
fn travelling(layout: &ShardLayout, groups: &BucketGroups, rank: Rank) -> Vec<Chunk> {
    let positions = groups.positions(rank);
    let mut chunks = Vec::new();
    for chunk in &layout.chunks {
        if layout.size_of(chunk.bucket) > 1 && positions.of(chunk.bucket).is_some() {
            chunks.push(chunk.clone());
        }
    }
    chunks
}

/// Returns the reduce site of a device for the chunks in transit. Prepares the device for the
/// addition if it is the site.
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
    let bytes = DType::F32.bytes() * lengths.last().copied().unwrap_or(0);
    let rank = Rank(one.position as u32);
    if let Some(fault) =
        request.faults.at_rank(Point::ReduceSite, 0, rank).and_then(Fault::of_device)
    {
        let injected = one.driver.run(what, move |device| device.inject_fault(fault));
        injected.map_err(|error| no_room(error, bytes))?;
    }
    if chunks.is_empty() || one.is_cpu {
        return Ok(ReduceSite::Host);
    }
    match given {
        Some(ReduceSite::Host) => Ok(ReduceSite::Host),
        Some(ReduceSite::Device) => {
            let prepared = one
                .driver
                .run("preparing to add gradients", move |device| device.prepare_add(&lengths));
            prepared.map_err(|error| no_room(error, bytes))?;
            Ok(ReduceSite::Device)
        }
        None => {
            let faster = one.driver.run(what, move |device| {
                device.prepare_add(&lengths)?;
                faster_reduce_site(device, &chunks)
            });
            faster.map_err(|error| no_room(error, bytes))
        }
    }
}
