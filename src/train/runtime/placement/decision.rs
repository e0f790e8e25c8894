//! Decision about the ranks of a run: kept from the resumed run, given by the request, or measured.
//! Includes all checks that do not need an open device.

use super::candidates::{candidates, node_of};
use super::names::is_named;
use super::open_one::RequestedDevices;
use super::pipeline::checks::{require_devices, require_micro_batches, require_model};
use super::rank_memory::micro_batch_sizes;
use super::requested_pipelines::{RequestedPipelines, arrangement_of_replicas};
use super::shares::{fixed_counts, moments, require_changes};
use super::types::PlacementRequest;
use crate::runtime::expected_step::ExpectedStep;
use crate::runtime::{RuntimeError, memory, timing};
use potluck_core::Setting;
use potluck_kernels::device::Selection;
use potluck_kernels::device::host::available_memory;
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::cut::chunks_of_counts;
use potluck_parallel::planner::laid_out::layout_of;
use potluck_parallel::{Placement, Shares, contiguous_shares};

/// Arrangement of a run, and the basis of the decision.
#[derive(Clone)]
pub struct PlacementDecision {
    pub arrangement: Arrangement,
    /// Expected step of a planned arrangement.
    pub(crate) expected: Option<ExpectedStep>,
    /// True if the arrangement is the resumed run's.
    pub is_kept: bool,
    /// Messages for the user.
    pub notes: Vec<String>,
}

/// Returns the placement of the resumed run, if it has the same devices, and has pipelines if the
/// request has any.
pub fn saved_of<'a>(
    request: &PlacementRequest<'a>,
    selections: &[Selection],
) -> Option<&'a Placement> {
    let has_stages = request.parallel.is_divided();
    request.saved.filter(|saved| saved.is_of(&candidates(selections), has_stages))
}

/// Decides on the arrangement of a run by its request or its record; `None` if it must be planned.
///
/// # Errors
/// Returns `RuntimeError` if the number of devices does not fit the pipelines, if the model cannot
/// be cut or the batch cannot be divided, or if the record of the resumed run is damaged.
pub fn decide(
    request: &PlacementRequest,
    devices: RequestedDevices,
    saved: Option<&Placement>,
) -> Result<Option<PlacementDecision>, RuntimeError> {
    let requested = RequestedPipelines::of(request);
    let mut count = devices.selections.len();
    require_devices(&requested, count)?;
    require_model(&requested, request.plans)?;
    let mut notes = Vec::new();
    let kept = kept(request, saved, count)?;
    let is_kept = kept.is_some();
    let arrangement = if let Some(kept) = kept {
        kept
    } else {
        if let Some(note) = without_sample(request, devices) {
            count = request.batch as usize;
            notes.push(note);
        }
        match given(request, &devices.selections[..count], saved)? {
            Some(given) => given,
            None => {
                // A single pipeline has all samples for any cut.
                if requested.stages > 1 && requested.mesh(count).data == 1 {
                    let even = in_given_order(request, count, &[request.batch]);
                    require_micro_batches(&requested, &even)?;
                }
                return Ok(None);
            }
        }
    };
    notes.extend(require_micro_batches(&requested, &arrangement)?);
    Ok(Some(PlacementDecision { arrangement, expected: None, is_kept, notes }))
}

/// Returns the arrangement of a request whose cut and shares are given, or even if no measurement
/// is possible; `None` if it must be planned.
///
/// # Errors
/// Returns `RuntimeError::Unplaceable` if the shares do not fit the batch, the devices or the
/// pipelines.
fn given(
    request: &PlacementRequest,
    devices: &[Selection],
    saved: Option<&Placement>,
) -> Result<Option<Arrangement>, RuntimeError> {
    let parallel = request.parallel;
    let requested = RequestedPipelines::of(request);
    let units = requested.mesh(devices.len()).data;
    if requested.tensor > 1 {
        let counts = fixed_counts(parallel, request.batch, units)?;
        let is_measured = requested.tensor_shares.is_empty()
            && request.probe.is_some()
            && has_unlike_groups(&requested, &candidates(devices));
        let even = in_given_order(request, devices.len(), &counts);
        return Ok(if is_measured { None } else { Some(even) });
    }
    let lacks_shares = parallel.shares.are_measured() && units > 1;
    let is_planned = request.probe.is_some() && (parallel.lacks_cut() || lacks_shares);
    if is_planned && parallel.shares.are_measured() {
        return Ok(None);
    }
    // Measured shares exclude devices without a sample.
    let counts = if lacks_shares && !parallel.is_divided() {
        timing::split_evenly(request.batch, units)
    } else {
        fixed_counts(parallel, request.batch, units)?
    };
    if is_planned {
        return Ok(None);
    }
    let mut given = in_given_order(request, devices.len(), &counts);
    if !parallel.is_divided() {
        require_changes(parallel, units)?;
        given = given.with_rows_for(&parallel.share_changes, request.micro_batch);
    }
    Ok(Some(fitted(request, devices, given, saved)))
}

/// Returns true if devices of a tensor group differ, so that equal shares may not be the fastest;
/// `kinds` has each device's, by rank.
fn has_unlike_groups<T: PartialEq>(requested: &RequestedPipelines, kinds: &[T]) -> bool {
    kinds.chunks(requested.tensor.max(1)).any(|group| group.iter().any(|kind| *kind != group[0]))
}

/// Fits the micro-batches of devices with the whole model to their memory, unless the request has a
/// fixed size. Keeps the recorded ones if the devices and their samples are the same.
fn fitted(
    request: &PlacementRequest,
    devices: &[Selection],
    mut arrangement: Arrangement,
    saved: Option<&Placement>,
) -> Arrangement {
    if !request.fits_micro_batch || request.parallel.is_divided() {
        return arrangement;
    }
    let kept = saved.filter(|saved| {
        let positions = saved.ranks.iter().map(|rank| &rank.position);
        let is_kept = !request.retune && saved.micro_batch_max == request.micro_batch;
        let shares = saved.shares();
        let is_given = arrangement.shares.iter().map(|share| share.count).eq(shares.clone())
            || request.parallel.share_changes.iter().any(|change| change.shares == shares);
        is_kept && saved.is_consistent() && positions.eq(&arrangement.positions) && is_given
    });
    if let Some(kept) = kept {
        for (rank, recorded) in kept.ranks.iter().enumerate() {
            arrangement.shares[rank].micro_batch = recorded.micro_batch;
            arrangement.rows[rank] = recorded.micro_batch.min(arrangement.rows[rank]);
        }
        return arrangement;
    }
    let setting = request.opening.device_memory_mib;
    let world = arrangement.positions.len();
    let layout = layout_of(request.parallel, &request.plans.of_rows(1), world);
    let available = available_memory();
    let of_host = |selection: &Selection| memory::host_memory(selection, available);
    let positions = arrangement.positions.clone();
    for (rank, share) in arrangement.shares.iter_mut().enumerate() {
        let selection = &devices[arrangement.positions[rank]];
        let moments = moments(request.optimizer, &layout, rank);
        let is_beside = |at: &&usize| {
            node_of(&devices[**at]) == node_of(selection) && of_host(&devices[**at]).is_some()
        };
        let users = positions.iter().filter(is_beside).count().max(1);
        // Nine tenths of the host's memory, divided among its users.
        let host = of_host(selection).map(|bytes| bytes as usize / 10 * 9 / users);
        let fits = |rows: &u32| {
            let plan = request.plans.of_rows(*rows);
            let bytes = memory::needed(selection, &plan, &moments);
            memory::fits_amply(selection, setting, &plan, bytes)
                && host.is_none_or(|host| memory::device_bytes(&plan, &moments) <= host)
        };
        let most = arrangement.rows[rank];
        let rows = micro_batch_sizes(most).into_iter().find(fits).unwrap_or(1);
        share.micro_batch = share.micro_batch.min(rows);
        arrangement.rows[rank] = rows;
    }
    arrangement
}

/// Returns the arrangement of devices in the order of the request, with the given counts of samples
/// by pipeline, and the given cut or an even one.
fn in_given_order(request: &PlacementRequest, devices: usize, counts: &[u32]) -> Arrangement {
    let requested = RequestedPipelines::of(request);
    let blocks = request.plans.of_rows(1).graph.blocks.len() as u32;
    let chunks = requested.model_chunks(blocks);
    let positions = (0..devices).collect();
    requested.in_order(positions, &chunks, counts, request.micro_batch)
}

/// Returns a note on devices without a sample of an evenly divided batch, if they have the whole
/// model. Named devices must all be used.
fn without_sample(request: &PlacementRequest, devices: RequestedDevices) -> Option<String> {
    let samples = request.batch as usize;
    let is_even = request.parallel.shares == Shares::Even;
    let is_short = devices.names.len() > samples;
    if request.parallel.is_divided() || is_named(request.selector) || !is_even || !is_short {
        return None;
    }
    let without = &devices.names[samples..];
    let (are, them) = if without.len() == 1 { ("is", "it") } else { ("are", "them") };
    let without = without.join(", ");
    Some(format!("{without} {are} left out: a batch of {samples} has no sample for {them}"))
}

/// Returns the arrangement of a checkpoint if a run on `devices` devices keeps it; `None` for a new
/// decision.
///
/// # Errors
/// Returns `RuntimeError::Unplaceable` if the record of devices with the whole model has other
/// devices, or impossible sizes.
fn kept(
    request: &PlacementRequest,
    saved: Option<&Placement>,
    devices: usize,
) -> Result<Option<Arrangement>, RuntimeError> {
    let Some(saved) = saved else { return Ok(None) };
    if request.retune || !saved.shares_fit(request.batch, request.micro_batch) {
        return Ok(None);
    }
    if request.parallel.is_divided() {
        let blocks = request.plans.model().whole().blocks.len() as u32;
        let recorded = RequestedPipelines::of(request).recorded(saved, blocks);
        return Ok(recorded.filter(|kept| is_as_given(request, kept)));
    }
    if !request.parallel.shares.are_measured() {
        return Ok(None);
    }
    if !saved.is_consistent() || saved.ranks.iter().any(|rank| rank.position >= devices) {
        return Err(RuntimeError::unplaceable(format_args!(
            "the ranks that the checkpoint recorded are not those of its devices; measure again \
             with {}",
            Setting::Retune
        )));
    }
    let mut positions = Vec::new();
    let mut counts = Vec::new();
    let mut micro_batches = Vec::new();
    let mut rows = Vec::new();
    for rank in &saved.ranks {
        positions.push(rank.position);
        counts.push(rank.share);
        micro_batches.push(rank.micro_batch.min(rank.rows));
        rows.push(rank.rows);
    }
    let shares = contiguous_shares(&counts, &micro_batches);
    Ok(Some(arrangement_of_replicas(request, positions, shares, rows)))
}

/// Returns true if pipelines have the cut and the shares of the request, and the order of devices
/// if it has any.
fn is_as_given(request: &PlacementRequest, planned: &Arrangement) -> bool {
    let has_shares = !request.parallel.shares.are_measured();
    let requested = RequestedPipelines::of(request);
    let has_tensor_shares = !requested.tensor_shares.is_empty();
    if has_tensor_shares && requested.given_tensor_shares() != planned.tensor_shares {
        return false;
    }
    if requested.blocks.is_empty() && !has_shares {
        return true;
    }
    if !requested.blocks.is_empty() {
        let chunks = chunks_of_counts(requested.blocks);
        if planned.pipelines.iter().any(|of| of.chunks != chunks) {
            return false;
        }
    }
    if has_shares {
        let counts = fixed_counts(request.parallel, request.batch, planned.mesh.data);
        let now: Vec<u32> = planned.shares.iter().map(|share| share.count).collect();
        if !matches!(counts, Ok(counts) if counts == now) {
            return false;
        }
    }
    planned.positions.iter().copied().eq(0..planned.positions.len())
}
