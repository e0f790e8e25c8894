//! Placement of a run as far as it is known before its devices are opened: data-parallel pipelines,
//! of one stage each if every device holds the whole model.

use super::data_shape;
use potluck_core::Rank;
use potluck_core::format::{counted, percent};
use potluck_kernels::autotune::TuneOptions;
use potluck_kernels::device::Selection;
use potluck_parallel::pipeline::OVERLAPPED;
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::cut::BlockTimes;
use potluck_parallel::planner::laid_out::LaidOut;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::planner::profile::{DeviceProfile, PlanProfile};
use potluck_parallel::planner::tensor::tensor_part;
use potluck_parallel::schedule::in_flight;
use potluck_parallel::{Coordinates, PipelineSchedule, PipelineShape, Placement};
use potluck_train::run_data::SavedData;
use potluck_train::runtime::RuntimeError;
use potluck_train::runtime::placement::automatic_layout::planned_as_requested;
use potluck_train::runtime::placement::candidates::{candidates, selections};
use potluck_train::runtime::placement::decision::{PlacementDecision, decide, saved_of};
use potluck_train::runtime::placement::device_limits::cut_plans;
use potluck_train::runtime::placement::laid_out::lay_out;
use potluck_train::runtime::placement::names::{display_names, distinct, is_auto, is_named};
use potluck_train::runtime::placement::open_one::RequestedDevices;
use potluck_train::runtime::placement::pipeline::{measure_blocks, names_of_runs};
use potluck_train::runtime::placement::types::PlacementRequest;
use potluck_train::runtime::timing::Probe;
use potluck_train::spec::RunSpec;

/// Note on the shares of a run that measures them at its start.
const CAVEAT: &str = "shares are measured when the run starts; here they are even\n";
/// The same for devices that were selected automatically.
const CAVEAT_OF_AUTO: &str = "shares are measured when the run starts, and devices may be left \
                              out; here they are even\n";
/// Note on the stages of a run that measures them at its start.
const CAVEAT_OF_STAGES: &str = "stages and shares are measured when the run starts, and devices \
                                may change places; here blocks and shares are even (--set \
                                blocks_per_stage=.. shows the cut of a run, and --explain \
                                schedule measures it)\n";

/// The same for tensor groups.
const CAVEAT_OF_TENSORS: &str = "the shares of tensor groups are measured when the run starts; \
                                 here they are even (--set tensor_shares=.. shows those of a \
                                 run)\n";

/// Returns true if the devices are of several kinds.
fn has_unlike(devices: &[Selection]) -> bool {
    let kinds = candidates(devices);
    kinds.iter().any(|kind| *kind != kinds[0])
}

/// Placement of a run as far as it is known without opening a device.
pub struct ExplainedPlacement<'a> {
    pub spec: &'a RunSpec,
    pub request: &'a PlacementRequest<'a>,
    pub selections: Vec<Selection>,
    /// Names of the ranks' devices.
    names: Vec<String>,
    pub planned: Arrangement,
    pub laid_out: LaidOut,
    /// Measured profile of the devices by which the stages were chosen, if they were.
    profile: Option<PlanProfile>,
    /// True if shares or stages are not known before the run measures them at its start.
    is_measured: bool,
    /// Messages for the user about measurements.
    pub notes: Vec<String>,
    /// Message for the user about parameters that are cut.
    pub cut_note: Option<String>,
}

/// Calls `explain` with the placement of a run. `saved_data` are the data of a checkpoint, and
/// `saved` is its placement, which is kept as by the run. With a `probe`, stages of pipelines and
/// their shares that are not given are measured as by the run.
///
/// # Errors
/// Returns the errors of loading the text, building the graph and choosing devices, and the run's
/// refusals of its shares or its pipelines.
pub fn with_placement<R>(
    spec: &RunSpec,
    saved_data: &SavedData,
    saved: Option<&Placement>,
    probe: Option<Probe>,
    explain: impl FnOnce(&ExplainedPlacement) -> anyhow::Result<R>,
) -> anyhow::Result<R> {
    let training = spec.training_graph(&data_shape(spec, saved_data)?)?;
    let selections = selections(&spec.devices)?;
    let plans = Plans::new(training);
    let tuning = TuneOptions::default();
    // Without a probe, shares and blocks are even if they are not given.
    let options = spec.trainer_options();
    let parallel = options.parallel();
    let request = options.placement_request(&parallel, &plans, &tuning);
    let request = PlacementRequest { probe, saved, ..request };
    let names = display_names(&selections);
    let devices = RequestedDevices { selections: &selections, names: &names };
    let are_all_used = is_named(&spec.devices);
    let saved = saved_of(&request, &selections);
    let cut = cut_plans(&plans, are_all_used, devices, saved)?;
    let plans = cut.as_ref().map_or(&plans, |cut| &cut.plans);
    let request = PlacementRequest { plans, ..request };
    let mut explained = ExplainedPlacement::of(spec, &request, selections)?;
    let graph = &explained.laid_out.whole().graph;
    let note = cut.as_ref().and_then(|cut| cut.note(graph));
    explained.cut_note = note;
    explain(&explained)
}

impl<'a> ExplainedPlacement<'a> {
    fn of(
        spec: &'a RunSpec,
        request: &'a PlacementRequest<'a>,
        selections: Vec<Selection>,
    ) -> anyhow::Result<Self> {
        let all = display_names(&selections);
        let devices = RequestedDevices { selections: &selections, names: &all };
        let saved = saved_of(request, &selections);
        let mut profile = None;
        let decided = if let Some(decided) = decide(request, devices, saved)? {
            decided
        } else {
            let planned = planned_as_requested(request, devices, &mut |_, _| {})?;
            profile = Some(planned.profile);
            planned.decision
        };
        let PlacementDecision { arrangement: planned, is_kept, notes, .. } = decided;
        let has_groups = planned.mesh.tensor > 1;
        let lacks_shares = request.parallel.shares.are_measured() && planned.mesh.data > 1;
        let lacks = if has_groups {
            request.parallel.tensor.shares.is_empty() && has_unlike(&selections)
        } else {
            request.parallel.lacks_cut() || lacks_shares
        };
        let is_measured = request.probe.is_none() && !is_kept && lacks;
        let laid_out = lay_out(request, &planned)?;
        let all = distinct(selections.iter().map(|one| one.name().to_string()).collect());
        let names = planned.positions.iter().map(|position| all[*position].clone()).collect();
        Ok(Self {
            spec,
            request,
            selections,
            names,
            planned,
            laid_out,
            profile,
            is_measured,
            notes,
            cut_note: None,
        })
    }

    /// Returns the times of the blocks of the model on the devices for the largest micro-batch, by
    /// rank, then by block; for a rank of a tensor group, in proportion to its part. They are
    /// measured unless that was done before.
    ///
    /// # Errors
    /// Returns `RuntimeError` if a device fails, or if there is no probe.
    pub fn measured_times(&self) -> Result<Vec<Vec<BlockTimes>>, RuntimeError> {
        let rows = self.planned.rows_max();
        let times: Vec<Vec<BlockTimes>> = match &self.profile {
            Some(profile) => {
                let of_device = |device: &DeviceProfile| {
                    device.blocks.iter().map(|block| block.at(rows)).collect()
                };
                profile.devices.iter().map(of_device).collect()
            }
            None => {
                let names = display_names(&self.selections);
                let devices = RequestedDevices { selections: &self.selections, names: &names };
                measure_blocks(self.request, devices, rows, &mut |_, _| {})?.times
            }
        };
        let mut of_ranks = Vec::new();
        for (rank, position) in self.planned.positions.iter().enumerate() {
            let part = self.tensor_part(rank);
            let of_rank = times[*position].iter().map(|whole| whole.scaled(part)).collect();
            of_ranks.push(of_rank);
        }
        Ok(of_ranks)
    }

    /// The rank's part of the tensors of its stage, from 0 to 1.
    fn tensor_part(&self, rank: usize) -> f64 {
        tensor_part(self.planned.mesh, self.laid_out.whole(), Rank(rank as u32))
    }

    /// Returns the note that shares and stages are not known before the devices are measured, or an
    /// empty text.
    pub fn caveat(&self) -> &'static str {
        if !self.is_measured {
            ""
        } else if self.planned.mesh.tensor > 1 {
            CAVEAT_OF_TENSORS
        } else if self.is_divided() {
            CAVEAT_OF_STAGES
        } else if is_auto(&self.spec.devices) {
            CAVEAT_OF_AUTO
        } else {
            CAVEAT
        }
    }

    /// Returns the most samples at a time for which the run opens each device, if it measures
    /// their shares.
    pub fn measured_rows(&self) -> Option<u32> {
        let is_measured = self.is_measured && !self.is_divided();
        is_measured.then(|| self.request.micro_batch.min(self.request.batch))
    }

    /// Returns true if the run tries fewer samples at a time on devices that lack memory.
    pub fn tries_fewer(&self) -> bool {
        self.measured_rows().is_some() && self.spec.fits_micro_batch
    }

    pub fn world(&self) -> usize {
        self.names.len()
    }

    /// Returns true if a rank holds a part of the model.
    pub fn is_divided(&self) -> bool {
        self.planned.mesh.is_divided()
    }

    /// Returns the device of a rank.
    pub fn selection(&self, rank: usize) -> &Selection {
        &self.selections[self.planned.positions[rank]]
    }

    /// Returns the name of a rank's device.
    pub fn name(&self, rank: usize) -> &str {
        &self.names[rank]
    }

    pub fn coordinates(&self, rank: usize) -> Coordinates {
        self.planned.mesh.coordinates(Rank(rank as u32))
    }

    /// Returns the name of a rank's device, and its part of the model if it has one: `cpu, stage 1
    /// of pipeline 0, h.2 to head`.
    pub fn title(&self, rank: usize) -> String {
        let name = self.name(rank);
        if !self.is_divided() {
            return name.to_string();
        }
        let Coordinates { data, pipeline, tensor } = self.coordinates(rank);
        let mut text = format!("{name}, ");
        if self.planned.mesh.tensor > 1 {
            let part = percent(self.tensor_part(rank), 0);
            text += &format!("tensor rank {tensor} ({part}) of ");
        }
        text += &format!("stage {pipeline} of pipeline {data}, {}", self.blocks(rank));
        text
    }

    /// Returns the blocks that a rank holds: `h.2 to head`.
    pub fn blocks(&self, rank: usize) -> String {
        let at = self.coordinates(rank);
        let chunks = self.planned.pipelines[at.data].chunks_of(at.pipeline);
        let graph = &self.laid_out.whole().graph;
        names_of_runs(graph, &chunks)
    }

    /// Returns the number of micro-batches of a rank's pipeline.
    pub fn micro_batches(&self, rank: usize) -> usize {
        self.laid_out.written.programs[rank].micro_batches.len()
    }

    /// Returns the sentence on the largest number of stashes that a rank of a pipeline holds at
    /// once.
    pub fn stashes(&self, rank: usize) -> String {
        let at = self.coordinates(rank);
        let stages = self.planned.mesh.pipeline;
        let schedule = self.planned.schedule;
        let chunks = self.planned.pipelines[at.data].chunks.len() / stages;
        let micro_batches = self.micro_batches(rank);
        let shape = PipelineShape { stages, chunks, micro_batches };
        if self.planned.pipelines[at.data].is_paired() {
            let most = micro_batches.min(OVERLAPPED);
            let of = counted(micro_batches, "micro-batch", "micro-batches");
            let why = if most > 1 { ", one computed while another is reduced" } else { "" };
            return format!("stashes in flight: {most} of {of}{why}");
        }
        let most = in_flight(schedule, shape, at.pipeline);
        match schedule {
            PipelineSchedule::Interleaved => format!(
                "stashes in flight: {most} of {}, one per micro-batch and model chunk ({schedule})",
                micro_batches * chunks
            ),
            _ => {
                let of = counted(micro_batches, "micro-batch", "micro-batches");
                format!("stashes in flight: {most} of {of} ({schedule})")
            }
        }
    }
}
