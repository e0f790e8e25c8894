//! Arrangements of a set of devices by the times of a profile: the fastest shares of replicas, and
//! the fastest cuts of pipelines and shares of tensor groups.

use std::cmp::Reverse;

use super::{LaidOutCandidate, SearchRequest, StageQuestion};
use crate::pipeline::used_inputs;
use crate::planner::arrangement::Arrangement;
use crate::planner::balance::{ThroughputModel, apportion, give_at_least, give_each_a_sample};
use crate::planner::cut::{BlockTimes, CutError, CutStage, chunks_of_counts, crossing_elements};
use crate::planner::division::{
    PartitionRequest, PipelinePartition, SampleCounts, divide, with_given_cut,
};
use crate::planner::tensor::tensor_shares_by_speed;
use crate::schedule::require_fit;
use crate::sim::LinkModel;
use crate::{Mesh, PipelineSchedule, PipelineShape, Shares, contiguous_shares};
use potluck_core::DType;
use potluck_graph::Plan;

/// Maximum number of reductions of shares that do not fit their devices.
const SHRINKINGS: usize = 64;

/// Factor of each reduction of a share.
const SHRINKING: f64 = 0.9;

/// Layout of pipelines or tensor groups.
#[derive(Clone, Copy, Debug)]
pub(super) struct DividedLayout {
    pub mesh: Mesh,
    pub schedule: PipelineSchedule,
    /// Model chunks of a stage.
    pub chunks: usize,
    pub micro_batch: u32,
    /// False if the memory of stages is a fast upper bound.
    pub is_exact: bool,
}

/// Arrangement of devices with the whole model, with samples by speed, in micro-batches that fit
/// their memory, and its layout; `None` if a device gets no sample, so that a smaller set is as
/// fast.
pub(super) fn replicas(
    request: &SearchRequest,
    set: &[usize],
) -> Result<Option<LaidOutCandidate>, String> {
    let most = request.micro_batch.min(request.batch).max(1);
    let mut rows = Vec::with_capacity(set.len());
    for device in set {
        let measured = request.profile.devices[*device].micro_batch;
        rows.push(measured.map_or(most, |measured| measured.min(most)));
    }
    loop {
        let Some(counts) = counts_of_replicas(request, set, &rows)? else { return Ok(None) };
        let found = LaidOutCandidate::of(request, of_replicas(request, set, &counts, &rows))?;
        // Of the ranks that lack memory, the one with the most rows.
        let unfit = (0..rows.len()).filter(|rank| !found.memory[*rank].fits());
        let Some(rank) = unfit.max_by_key(|rank| (rows[*rank], Reverse(*rank))) else {
            return Ok(Some(found));
        };
        if !request.fits_micro_batch || rows[rank] == 1 {
            let name = &request.profile.devices[set[rank]].name;
            return Err(format!("{name} has too little memory for the whole model"));
        }
        rows[rank] /= 2;
    }
}

/// Samples of each device.
fn counts_of_replicas(
    request: &SearchRequest,
    set: &[usize],
    rows: &[u32],
) -> Result<Option<Vec<u32>>, String> {
    if let Shares::Fixed(given) = &request.options.shares {
        let counts: Vec<u32> = given.iter().map(|count| *count as u32).collect();
        if counts.len() != set.len() {
            return Err(format!("{} shares are given for {} devices", counts.len(), set.len()));
        }
        return Ok(Some(counts));
    }
    let mut speeds = Vec::with_capacity(set.len());
    for (device, &micro_batch) in set.iter().zip(rows) {
        let slowdown = request.profile.slowdown(*device, set);
        let ThroughputModel { fixed_s, row_s, .. } =
            request.profile.devices[*device].throughput(micro_batch);
        let fixed_s = slowdown * fixed_s;
        let row_s = slowdown * row_s;
        speeds.push(ThroughputModel { fixed_s, row_s, micro_batch });
    }
    if speeds.iter().any(|speed| !speed.row_s.is_finite()) {
        return Err("a device cannot run one of the blocks".into());
    }
    if request.options.shares == Shares::Even {
        let equal = ThroughputModel { fixed_s: 0.0, row_s: 1.0, micro_batch: 1 };
        speeds.fill(equal);
    }
    let mut counts = apportion(request.batch, &speeds);
    if request.uses_all && !give_each_a_sample(&mut counts) {
        return Err("the batch has too few samples".into());
    }
    give_at_least(&mut counts, request.whole.of_rows(1).rows_min());
    Ok(if counts.contains(&0) { None } else { Some(counts) })
}

fn of_replicas(
    request: &SearchRequest,
    set: &[usize],
    counts: &[u32],
    rows: &[u32],
) -> Arrangement {
    let mut micro_batches = Vec::with_capacity(rows.len());
    for (rows, count) in rows.iter().zip(counts) {
        micro_batches.push((*rows).min(*count).max(1));
    }
    let shares = contiguous_shares(counts, &micro_batches);
    let mesh = Mesh::of_pipelines(set.len(), 1);
    let blocks = 0..request.blocks() as u32;
    let chunks = vec![vec![blocks]; set.len()];
    let schedule = request.options.pipeline.schedule;
    Arrangement::of(mesh, set.to_vec(), &chunks, shares, schedule)
}

/// Arrangement of pipelines and tensor groups of a set of devices.
pub(super) fn divided(
    request: &SearchRequest,
    set: &[usize],
    layout: DividedLayout,
) -> Result<Arrangement, String> {
    let DividedLayout { mesh, schedule, chunks, micro_batch, .. } = layout;
    let tensor_shares = tensor_shares(request, set, layout);
    let groups: Vec<&[usize]> = set.chunks(mesh.tensor).collect();
    let times = group_times(request, set, &groups, &tensor_shares, micro_batch);
    let (chunks_of_pipelines, order, counts) = if mesh.pipeline == 1 {
        let blocks = std::iter::once(0..request.blocks() as u32).collect();
        let slowest: Vec<f64> =
            times.iter().map(|of| of.iter().map(BlockTimes::sum_s).sum()).collect();
        let samples = SampleCounts { batch: request.batch, micro_batch, round: 1 };
        let counts = counts_of(request, &samples, &slowest)?;
        (vec![blocks; mesh.data], (0..groups.len()).collect(), counts)
    } else {
        let partition = partition(request, &groups, &times, layout)?;
        let mut of_pipelines = Vec::new();
        let mut order = Vec::new();
        for cut in &partition.pipelines {
            of_pipelines.push(cut.chunks_in_order());
            order.extend_from_slice(&cut.devices);
        }
        (of_pipelines, order, partition.counts)
    };
    let mut positions = Vec::with_capacity(set.len());
    for group in order {
        positions.extend_from_slice(groups[group]);
    }
    let micro_batches: Vec<u32> =
        counts.iter().map(|count| micro_batch.min(*count).max(1)).collect();
    for (count, micro_batch) in counts.iter().zip(&micro_batches) {
        let micro_batches = count.div_ceil(*micro_batch) as usize;
        if mesh.pipeline > 1 {
            let shape = PipelineShape { stages: mesh.pipeline, chunks, micro_batches };
            require_fit(schedule, shape).map_err(|error| error.to_string())?;
        }
    }
    let shares = contiguous_shares(&counts, &micro_batches);
    let arrangement = Arrangement::of(mesh, positions, &chunks_of_pipelines, shares, schedule);
    Ok(arrangement.with_tensor_shares(tensor_shares))
}

/// Samples of each pipeline: given, even, or by the seconds of a micro-batch on its slowest stage.
fn counts_of(
    request: &SearchRequest,
    samples: &SampleCounts,
    slowest_s: &[f64],
) -> Result<Vec<u32>, String> {
    if request.batch < slowest_s.len() as u32 {
        return Err("the batch has too few samples".into());
    }
    match &request.options.shares {
        Shares::Measured => Ok(samples.split(slowest_s)),
        Shares::Even => Ok(samples.split(&vec![1.0; slowest_s.len()])),
        Shares::Fixed(given) if given.len() == slowest_s.len() => {
            Ok(given.iter().map(|count| *count as u32).collect())
        }
        Shares::Fixed(given) => {
            Err(format!("{} shares are given for {} pipelines", given.len(), slowest_s.len()))
        }
    }
}

/// Returns a candidate whose tensor groups have smaller shares in the places where a device has too
/// little memory for its part; the same one if all fit, if shares are given, or if no place has
/// memory left.
pub(super) fn within_memory(
    request: &SearchRequest,
    mut found: LaidOutCandidate,
) -> Result<LaidOutCandidate, String> {
    let mesh = found.arrangement.mesh;
    if mesh.tensor == 1 || !request.options.tensor.shares.is_empty() {
        return Ok(found);
    }
    for _ in 0..SHRINKINGS {
        let mut is_overfull = vec![false; mesh.tensor];
        for (rank, need) in mesh.ranks().zip(&found.memory) {
            is_overfull[mesh.coordinates(rank).tensor] |= !need.fits();
        }
        if !is_overfull.contains(&true) || !is_overfull.contains(&false) {
            break;
        }
        let mut shares = found.arrangement.tensor_shares.clone();
        for (share, is_overfull) in shares.iter_mut().zip(is_overfull) {
            if is_overfull {
                *share = (f64::from(*share) * SHRINKING).floor().max(1.0) as u32;
            }
        }
        if shares == found.arrangement.tensor_shares {
            break;
        }
        found = LaidOutCandidate::of(request, found.arrangement.with_tensor_shares(shares))?;
    }
    Ok(found)
}

/// Shares of the places of tensor groups; empty if stages have one rank each.
fn tensor_shares(request: &SearchRequest, set: &[usize], layout: DividedLayout) -> Vec<u32> {
    let DividedLayout { mesh, micro_batch, .. } = layout;
    if mesh.tensor == 1 {
        return Vec::new();
    }
    if !request.options.tensor.shares.is_empty() {
        return request.options.tensor.shares.clone();
    }
    let profile = request.profile;
    let kind = |device: &usize| profile.devices[*device].kind;
    if set.chunks(mesh.tensor).all(|group| group.iter().all(|one| kind(one) == kind(&group[0]))) {
        return vec![1; mesh.tensor];
    }
    let seconds: Vec<f64> = set
        .iter()
        .map(|device| profile.slowdown(*device, set) * profile.whole_model_s(*device, micro_batch))
        .collect();
    tensor_shares_by_speed(mesh, &seconds)
}

/// Times of the blocks on each tensor group, which is as slow as its slowest rank, by group and
/// then by block. Of nodes that wait for inputs, and others that do not, the former take longer for
/// the blocks that read them.
fn group_times(
    request: &SearchRequest,
    set: &[usize],
    groups: &[&[usize]],
    tensor_shares: &[u32],
    micro_batch: u32,
) -> Vec<Vec<BlockTimes>> {
    let all: u32 = tensor_shares.iter().sum();
    let receive = set.iter().filter(|device| request.profile.receives_inputs(**device)).count();
    let mut input_bytes = vec![0.0; request.blocks()];
    if receive > 0 && receive < set.len() {
        input_bytes = input_bytes_by_block(&request.staged.of_rows(micro_batch));
    }
    let mut times = Vec::with_capacity(groups.len());
    for group in groups {
        let mut of_group: Vec<BlockTimes> = Vec::new();
        for (place, device) in group.iter().enumerate() {
            let part = match tensor_shares.get(place) {
                Some(share) => f64::from(*share) / f64::from(all),
                None => 1.0,
            };
            let slowdown = request.profile.slowdown(*device, set);
            for (block, speed) in request.profile.devices[*device].blocks.iter().enumerate() {
                let factor = slowdown * request.profile.part_of_block(block, part);
                let mut own = speed.at(micro_batch).scaled(factor);
                if request.profile.receives_inputs(*device) {
                    let link = request.profile.input_link(*device);
                    own.forward_s += input_bytes[block] / link.bytes_per_s;
                }
                match of_group.get_mut(block) {
                    Some(slowest) if slowest.sum_s() >= own.sum_s() => {}
                    Some(slowest) => *slowest = own,
                    None => of_group.push(own),
                }
            }
        }
        times.push(of_group);
    }
    times
}

/// Bytes of the inputs that each block is the first to read, of a micro-batch of the most rows of
/// the plan.
fn input_bytes_by_block(plan: &Plan) -> Vec<f64> {
    let mut bytes = vec![0.0; plan.graph.blocks.len()];
    for input in used_inputs(plan) {
        let reader = plan.graph.nodes.iter().find(|node| node.inputs.contains(&input));
        if let Some(reader) = reader {
            bytes[reader.block as usize] +=
                plan.graph.tensor(input).bytes(plan.options.rows) as f64;
        }
    }
    bytes
}

/// Cut of the model over pipelines of groups, and the samples of each.
fn partition(
    request: &SearchRequest,
    groups: &[&[usize]],
    times: &[Vec<BlockTimes>],
    layout: DividedLayout,
) -> Result<PipelinePartition, String> {
    let DividedLayout { mesh, schedule, chunks, micro_batch, is_exact } = layout;
    let round = match schedule {
        PipelineSchedule::Interleaved => mesh.pipeline as u32,
        _ => 1,
    };
    let samples = SampleCounts { batch: request.batch, micro_batch, round };
    let cut_s = cut_seconds(request, groups, layout);
    let given = &request.options.pipeline.blocks_per_stage;
    let mut partition = if given.is_empty() {
        // The memory of a stage is known for single devices; groups are checked in the end.
        let firsts: Vec<usize> = groups.iter().map(|group| group[0]).collect();
        let question = StageQuestion {
            devices: &firsts,
            mesh: Mesh { tensor: 1, ..mesh },
            schedule,
            chunks,
            batch: request.batch,
            micro_batch,
            is_exact,
        };
        let kinds: Vec<usize> =
            groups.iter().map(|group| kind_of(request, groups, group)).collect();
        let is_group = mesh.tensor > 1;
        let mut divided = None;
        request.memory.with_stage_memory(question, &mut |stage_fits| {
            divided = Some(divide(&PartitionRequest {
                times,
                cut_s: &cut_s,
                kinds: &kinds,
                stages: mesh.pipeline,
                chunks,
                is_ordered: !request.options.shares.are_measured(),
                samples,
                fits: &|stage: CutStage<'_>| is_group || stage_fits(stage),
            }));
        });
        let divided = divided.unwrap_or(Err(CutError::Memory { device: None, stage: None }));
        divided.map_err(|error| no_cut(request, groups, &error))?
    } else {
        with_given_cut(&chunks_of_counts(given), mesh.pipeline, times, &cut_s, &samples)
    };
    let slowest: Vec<f64> = partition.pipelines.iter().map(|cut| cut.slowest_s).collect();
    partition.counts = counts_of(request, &samples, &slowest)?;
    Ok(partition)
}

/// Number of the kind of a group: the first group of the same kinds of devices.
fn kind_of(request: &SearchRequest, groups: &[&[usize]], group: &[usize]) -> usize {
    let kinds = |group: &[usize]| -> Vec<(usize, u32)> {
        let devices = &request.profile.devices;
        group.iter().map(|device| (devices[*device].kind, devices[*device].node)).collect()
    };
    let own = kinds(group);
    groups.iter().position(|other| kinds(other) == own).unwrap_or(0)
}

/// Seconds of a micro-batch that a cut before each block costs a group on either side: the mean of
/// reading back and uploading what crosses it.
fn cut_seconds(
    request: &SearchRequest,
    groups: &[&[usize]],
    layout: DividedLayout,
) -> Vec<Vec<f64>> {
    let crossing = crossing_elements(&request.staged.of_rows(layout.micro_batch));
    let seconds_of = |link: LinkModel, elements: usize| {
        (elements * DType::F32.bytes()) as f64 / link.bytes_per_s + link.latency_s
    };
    let mut cut_s = Vec::with_capacity(groups.len());
    for group in groups {
        let device = &request.profile.devices[group[0]];
        let mut of_group = Vec::with_capacity(crossing.len());
        for elements in &crossing {
            let read = seconds_of(device.read_back, *elements);
            let write = seconds_of(device.upload, *elements);
            of_group.push(f64::midpoint(read, write));
        }
        cut_s.push(of_group);
    }
    cut_s
}

fn no_cut(request: &SearchRequest, groups: &[&[usize]], error: &CutError) -> String {
    match error {
        CutError::Memory { device: Some(group), .. } => {
            let name = &request.profile.devices[groups[*group][0]].name;
            format!("{name} has no memory for even the shortest run of blocks")
        }
        other => other.to_string(),
    }
}
