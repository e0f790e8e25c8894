//! Opening of devices for forward passes only: for evaluation and generation with a checkpoint.

use std::sync::Arc;

use super::checks::{require_devices, require_model};
use crate::runtime::RuntimeError;
use crate::runtime::open::{OpenOptions, open_named};
use crate::runtime::pipelines::ModelPipelines;
use crate::runtime::placement::device_limits::cut_plans;
use crate::runtime::placement::laid_out::cannot_divide;
use crate::runtime::placement::names::display_names;
use crate::runtime::placement::open_one::RequestedDevices;
use crate::runtime::placement::repeat::{name_of_parts, stage_text};
use crate::runtime::placement::requested_pipelines::RequestedPipelines;
use crate::runtime::workers::{WorkerGroup, WorkerGroupOptions};
use potluck_core::DType;
use potluck_graph::Plan;
use potluck_kernels::device::Selection;
use potluck_parallel::pipeline::{bucket_groups, edge_layout};
use potluck_parallel::planner::arrangement::pipelines_of;
use potluck_parallel::planner::laid_out::{forward_micro_batches_max, layout_of_groups};
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::{EdgeLayout, ParallelOptions, PipelinePrograms, PipelineRequest, Share};

/// Devices opened for forward passes.
pub struct ForwardDevices {
    pub group: WorkerGroup,
    /// Pipelines of the devices, of one stage each if every device has the whole model.
    pub pipelines: ModelPipelines,
    /// By rank: the plan of its device's part of the model.
    pub plans: Vec<Arc<Plan>>,
    /// By rank: the identity of its device.
    pub identities: Vec<String>,
    /// Messages for the user.
    pub notes: Vec<String>,
}

/// Opens devices, in their order, as pipelines of a forward graph for micro-batches of up to `rows`
/// samples. Without given cuts and shares, the model is divided into nearly equal numbers of blocks
/// and equal shares: a measurement is not worthwhile for a few passes. `options` are by device.
///
/// # Errors
/// Returns `RuntimeError` if the number of devices does not fit the pipelines, if the model cannot
/// be cut, or if a device cannot be opened or has too little memory.
pub fn open_forward(
    selections: Vec<Selection>,
    parallel: &ParallelOptions,
    options: &[OpenOptions],
    plans: &Plans,
    rows: u32,
) -> Result<ForwardDevices, RuntimeError> {
    let names = display_names(&selections);
    let devices = RequestedDevices { selections: &selections, names: &names };
    let cut = cut_plans(plans, true, devices, None)?;
    let plans = cut.as_ref().map_or(plans, |cut| &cut.plans);
    let requested = RequestedPipelines::from(parallel);
    require_devices(&requested, selections.len())?;
    require_model(&requested, plans)?;
    let tensor_shares = requested.given_tensor_shares();
    let model = plans.of_group(&tensor_shares, rows).map_err(|error| cannot_divide(&error))?;
    let plan = model.plans[0].clone();
    let chunks = requested.model_chunks(plan.graph.blocks.len() as u32);
    let mesh = requested.mesh(selections.len());
    let stages = pipelines_of(mesh, &vec![chunks; mesh.data]);
    let shares = vec![Share { first: 0, count: rows, micro_batch: rows }; mesh.data];
    let mut parts = vec![plan.clone(); mesh.world_size()];
    let mut edges = EdgeLayout::default();
    if mesh.is_divided() {
        let request = PipelineRequest {
            plans: &model.plans,
            pipelines: &stages,
            shares: &shares,
            schedule: requested.schedule,
            overlap: false,
            piece_max: parallel.chunk_bytes / DType::F32.bytes(),
            in_flight_min: forward_micro_batches_max(requested.stages),
        };
        parts = PipelinePrograms::forward_plans(&request);
        edges = edge_layout(&request);
    }
    let mut drivers = Vec::new();
    let mut identities = Vec::new();
    let mut notes = Vec::from_iter(cut.as_ref().and_then(|cut| cut.note(&plan.graph)));
    for (rank, selection) in selections.into_iter().enumerate() {
        let part = Plan::clone(&parts[rank]);
        let opened = open_named(selection, &names[rank], part, 0, &options[rank])?;
        notes.extend(opened.notes.iter().cloned());
        identities.push(opened.identity.clone());
        drivers.push(opened.driver);
    }
    if mesh.is_divided() {
        let mut named = Vec::new();
        for pipeline in &stages {
            for (stage, group) in pipeline.groups.iter().enumerate() {
                let of_group: Vec<&str> = group.iter().map(|rank| &*names[rank.index()]).collect();
                named.push(stage_text(&plan, &of_group, &pipeline.chunks_of(stage)));
            }
        }
        notes.push(format!("{}: {}", name_of_parts(mesh), named.join(", ")));
    }
    let groups = bucket_groups(&plan, &stages, parts.len() as u32);
    let layout = layout_of_groups(parallel, &plan, &groups, mesh.data);
    let group_options = WorkerGroupOptions { edges: edges.clone(), ..Default::default() };
    let group = WorkerGroup::start(drivers, layout, groups, &group_options)?;
    let pipelines = ModelPipelines::new(model, stages, shares, requested.schedule, edges);
    Ok(ForwardDevices { group, pipelines, plans: parts, identities, notes })
}
