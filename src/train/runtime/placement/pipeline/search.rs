//! Search for the cut of a model and the order of devices by the measured times of its blocks.

use super::measure::{MeasuredBlocks, measure_blocks};
use super::shared_memory::overfull;
use super::stage_memory::StageMemory;
use crate::runtime::RuntimeError;
use crate::runtime::placement::open_one::RequestedDevices;
use crate::runtime::placement::requested_pipelines::RequestedPipelines;
use crate::runtime::placement::shares::fixed_counts;
use crate::runtime::placement::types::PlacementRequest;
use potluck_core::format::milliseconds;
use potluck_core::{Setting, Wording};
use potluck_graph::Graph;
use potluck_kernels::autotune;
use potluck_parallel::pipeline::micro_batch_counts;
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::cut::{CutError, CutStage, chunks_of_counts};
use potluck_parallel::planner::division::{
    PartitionRequest, PipelinePartition, SampleCounts, divide, stage_seconds, with_given_cut,
};
use potluck_parallel::{Mesh, PipelineSchedule, contiguous_shares};

/// Measures the blocks of the model on each device, and returns the pipelines predicted to be the
/// fastest, with the measured times and a note on the slowest stage. Keeps the cut or the shares of
/// the request, and with either of them also the order of the devices.
///
/// # Errors
/// Returns `RuntimeError` if a device fails, or if no cut fits the memory of the devices.
pub(crate) fn by_measurement(
    request: &PlacementRequest,
    devices: RequestedDevices,
    notes: &mut Vec<String>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<(Arrangement, MeasuredBlocks), RuntimeError> {
    let requested = RequestedPipelines::of(request);
    let pipelines = requested.mesh(devices.selections.len()).data;
    // Without given shares, memory is planned for even ones.
    let counts = fixed_counts(request.parallel, request.batch, pipelines)?;
    let most = counts.iter().copied().max().unwrap_or(1);
    let rows = request.micro_batch.min(most).max(1);
    let measured = measure_blocks(request, devices, rows, report)?;
    let mut division = if requested.blocks.is_empty() {
        searched(request, devices, &requested, &measured, &counts)
            .map_err(|error| no_cut(&error, request, devices, &measured))?
    } else {
        with_given_cut(
            &chunks_of_counts(requested.blocks),
            requested.stages,
            &measured.times,
            &measured.cut_s,
            &samples(request, &requested),
        )
    };
    let memory = stage_memory(request, devices, &measured, &division.counts);
    if !request.parallel.shares.are_measured() || !holds(request, devices, &division, &memory) {
        division.counts = counts;
    }
    notes.extend(prediction(&division, &measured, devices));
    Ok((planned(request, &requested, &division), measured))
}

/// Searches for the fastest division that fits the devices' memory.
///
/// # Errors
/// Returns `CutError` if no division fits.
fn searched(
    request: &PlacementRequest,
    devices: RequestedDevices,
    requested: &RequestedPipelines,
    measured: &MeasuredBlocks,
    counts: &[u32],
) -> Result<PipelinePartition, CutError> {
    let memory = stage_memory(request, devices, measured, counts);
    let found = |is_exact: bool| {
        let fits = |stage: CutStage<'_>| memory.fits(stage, is_exact);
        divide(&PartitionRequest {
            times: &measured.times,
            cut_s: &measured.cut_s,
            kinds: &measured.kinds,
            stages: requested.stages,
            chunks: requested.chunks,
            is_ordered: !request.parallel.shares.are_measured(),
            samples: samples(request, requested),
            fits: &fits,
        })
    };
    // Bounds of memory suffice for most cuts. If the result does not fit, exact sums are used.
    let division = found(false)?;
    if holds(request, devices, &division, &memory) { Ok(division) } else { found(true) }
}

fn samples(request: &PlacementRequest, requested: &RequestedPipelines) -> SampleCounts {
    let round = match requested.schedule {
        PipelineSchedule::Interleaved => requested.stages as u32,
        _ => 1,
    };
    SampleCounts { batch: request.batch, micro_batch: request.micro_batch, round }
}

/// Memory of the devices as stages of pipelines with these samples.
fn stage_memory<'a>(
    request: &'a PlacementRequest,
    devices: RequestedDevices<'a>,
    measured: &'a MeasuredBlocks,
    counts: &[u32],
) -> StageMemory<'a> {
    let micro_batches: Vec<u32> =
        counts.iter().map(|count| request.micro_batch.min(*count)).collect();
    let shares = contiguous_shares(counts, &micro_batches);
    let most = micro_batch_counts(&shares).into_iter().max().unwrap_or(1).max(1);
    let rows = micro_batches.into_iter().max().unwrap_or(1).max(1);
    StageMemory::of(request, devices.selections, &measured.kinds, most, rows)
}

/// Returns true if the devices of a division have enough memory for their stages, also those with
/// several stages.
fn holds(
    request: &PlacementRequest,
    devices: RequestedDevices,
    division: &PipelinePartition,
    memory: &StageMemory,
) -> bool {
    let mut needed = Vec::new();
    for cut in &division.pipelines {
        for (stage, (&device, blocks)) in cut.devices.iter().zip(&cut.blocks).enumerate() {
            let stage = CutStage { device, stage, blocks };
            if !memory.fits(stage, true) {
                return false;
            }
            needed.push((device, memory.needed(stage)));
        }
    }
    overfull(request, devices, &needed).is_none()
}

/// Pipelines of a division.
fn planned(
    request: &PlacementRequest,
    requested: &RequestedPipelines,
    division: &PipelinePartition,
) -> Arrangement {
    let mut chunks = Vec::new();
    let mut positions = Vec::new();
    for cut in &division.pipelines {
        chunks.push(cut.chunks_in_order());
        positions.extend_from_slice(&cut.devices);
    }
    let micro_batches: Vec<u32> =
        division.counts.iter().map(|count| request.micro_batch.min(*count)).collect();
    let mesh = Mesh::of_pipelines(chunks.len(), requested.stages);
    let shares = contiguous_shares(&division.counts, &micro_batches);
    Arrangement::of(mesh, positions, &chunks, shares, requested.schedule)
}

/// Returns a note on the slowest stage of all.
fn prediction(
    division: &PipelinePartition,
    measured: &MeasuredBlocks,
    devices: RequestedDevices,
) -> Option<String> {
    let mut slowest_s: f64 = 0.0;
    let mut slowest_device = 0;
    for cut in &division.pipelines {
        let seconds =
            stage_seconds(&measured.times, &measured.cut_s, &cut.devices, &cut.chunks_in_order());
        for (device, seconds) in cut.devices.iter().zip(seconds) {
            if seconds > slowest_s {
                slowest_s = seconds;
                slowest_device = *device;
            }
        }
    }
    if !slowest_s.is_finite() {
        return None;
    }
    Some(format!(
        "predicted {} ms per micro-batch on the slowest stage, {}",
        milliseconds(slowest_s),
        devices.names[slowest_device]
    ))
}

/// Returns the error that there is no cut, with advice.
fn no_cut(
    error: &CutError,
    request: &PlacementRequest,
    devices: RequestedDevices,
    measured: &MeasuredBlocks,
) -> RuntimeError {
    let why = match *error {
        CutError::Memory { device: Some(device), stage } => {
            let name = &devices.names[device];
            let stage = match stage {
                Some(stage) => format!("stage {stage}"),
                None => "any stage".into(),
            };
            format!("{name} has no memory for even the shortest run of blocks as {stage}").into()
        }
        CutError::Forbidden => match forbidden(measured, &request.plans.of_rows(1).graph) {
            Ok(why) => why,
            Err(error) => return error,
        },
        _ => Wording::new(error),
    };
    RuntimeError::unplaceable(format_args!(
        "{why}; {}, lower {} or {}, or choose other devices",
        Setting::MoreStages,
        Setting::MicroBatchSize,
        Setting::ModelSize
    ))
}

/// Returns the reason that each cut has a block on a device that cannot run it.
///
/// # Errors
/// Returns `RuntimeError::Unplaceable` with a block that no device can run, for which more stages
/// do not help.
fn forbidden(measured: &MeasuredBlocks, graph: &Graph) -> Result<Wording, RuntimeError> {
    let mut refused = None;
    for (block, name) in graph.blocks.iter().enumerate() {
        let mut reasons = measured.refusals.iter().filter_map(|of| of[block].as_ref());
        let Some(why) = reasons.next() else { continue };
        if 1 + reasons.count() == measured.refusals.len() {
            return Err(RuntimeError::unplaceable(format_args!(
                "no device can run block {name}, not even alone ({why}); lower {} or {}, or \
                 choose other devices",
                Setting::MicroBatchSize,
                Setting::ModelSize
            )));
        }
        refused.get_or_insert((name, why));
    }
    Ok(match refused {
        Some((name, why)) => Wording::new(format_args!(
            "each cut has a block on a device that cannot run it: {name} ({why})"
        )),
        None => "no cut of the model fits in the devices' memory".into(),
    })
}
