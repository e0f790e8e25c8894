//! Tables that describe a run of pipelines: programs, memory, and what the schedule chart shows.

use super::instructions::InstructionNames;
use super::{batches_bytes, data_shape, edges, limit_line};
use crate::autotune::TuneOptions;
use crate::base::Rank;
use crate::base::format::counted;
use crate::cli::UsageError;
use crate::comm::ring_pool_bytes_max;
use crate::device::Selection;
use crate::device::host::available_memory;
use crate::graph::print::{RankMemoryUsage, memory_tables};
use crate::parallel::schedule::in_flight;
use crate::parallel::{Coordinates, PipelineSchedule, PipelineShape, Placement};
use crate::planner::cut::BlockTimes;
use crate::runtime::RuntimeError;
use crate::runtime::memory::{comparison, workspace};
use crate::runtime::placement::arrangement::Arrangement;
use crate::runtime::placement::assemble::{candidates, selections};
use crate::runtime::placement::host_memory;
use crate::runtime::placement::laid_out::LaidOut;
use crate::runtime::placement::names::display_names;
use crate::runtime::placement::names::distinct;
use crate::runtime::placement::open_ranks::RequestedDevices;
use crate::runtime::placement::pipeline::{
    MeasuredBlocks, RequestedPipelines, by_measurement, given, host_bytes, kept, measure_blocks,
    names_of_runs, require_devices, require_micro_batches, require_model,
};
use crate::runtime::placement::plans::Plans;
use crate::runtime::placement::shares::owned_elements;
use crate::runtime::placement::types::PlacementRequest;
use crate::runtime::timing::Probe;
use crate::train::run_data::SavedData;
use crate::train::spec::RunSpec;

/// Note on the stages of a run that measures them at its start.
const CAVEAT: &str = "stages and shares are measured when the run starts, and devices may change \
                      places; here blocks and shares are even (--set blocks_per_stage=.. shows \
                      the cut of a run, and --explain schedule measures it)\n";

/// Pipelines of a run as far as they are known without opening a device.
pub struct ExplainedPipelines<'a> {
    pub spec: &'a RunSpec,
    request: &'a PlacementRequest<'a>,
    selections: Vec<Selection>,
    /// Names of the ranks' devices.
    names: Vec<String>,
    pub planned: Arrangement,
    pub laid_out: LaidOut,
    /// Times of blocks by which the stages were chosen, if they were.
    measured: Option<MeasuredBlocks>,
    /// Note that the stages are not known before the devices are measured, or an empty text.
    pub caveat: &'static str,
    /// Messages for the user about what was measured.
    pub notes: Vec<String>,
}

/// Table of pipelines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PipelineTable {
    Program,
    Memory,
    Communication,
}

impl PipelineTable {
    /// Returns the text of the table.
    pub fn text(self, pipelines: &ExplainedPipelines) -> String {
        let table = match self {
            Self::Program => program(pipelines),
            Self::Memory => memory(pipelines),
            Self::Communication => edges::communication(pipelines),
        };
        pipelines.caveat.to_string() + &table
    }
}

/// Calls `explain` with the pipelines of a run. `saved_data` is that of a checkpoint, and `saved`
/// its placement, whose stages are kept as by the run. With a `probe`, stages and shares that are
/// not given are measured as by the run.
///
/// # Errors
/// Returns `UsageError` for a run without pipelines, the errors of loading the text, building the
/// graph and choosing devices, and those with which the run refuses its pipelines.
pub fn with_pipelines<R>(
    spec: &RunSpec,
    saved_data: &SavedData,
    saved: Option<&Placement>,
    probe: Option<Probe>,
    explain: impl FnOnce(&ExplainedPipelines) -> anyhow::Result<R>,
) -> anyhow::Result<R> {
    if spec.parallel.pipeline.stages < 2 {
        let why = "--explain schedule needs parallel.pipeline of 2 or more; give --pipeline K";
        return Err(UsageError(why.into()).into());
    }
    let (training, _) = spec.training_graph(&data_shape(spec, saved_data)?)?;
    let (plans, tuning) = (Plans::new(training), TuneOptions::default());
    // Without a probe, shares and blocks are even if they are not given.
    let options = spec.trainer_options();
    let parallel = options.parallel();
    let request = options.placement_request(&parallel, &plans, &tuning);
    let request = PlacementRequest { probe, saved, ..request };
    explain(&ExplainedPipelines::of(spec, &request)?)
}

impl<'a> ExplainedPipelines<'a> {
    fn of(spec: &'a RunSpec, request: &'a PlacementRequest<'a>) -> anyhow::Result<Self> {
        let chosen = selections(&spec.devices)?;
        let requested = RequestedPipelines::of(request);
        let options = &spec.parallel.pipeline;
        require_devices(&requested, chosen.len())?;
        require_model(&requested, &request.plans.of_rows(1).graph, &options.blocks_per_stage)?;
        let candidates = candidates(&chosen);
        let saved = request.saved.filter(|saved| saved.is_of(&candidates, true));
        let recorded = kept(request, saved);
        let pipelines = requested.mesh(chosen.len()).data;
        let is_measured = request.probe.is_none()
            && spec.parallel.shares.is_none()
            && (options.blocks_per_stage.is_empty() || pipelines > 1);
        let caveat = if is_measured && recorded.is_none() { CAVEAT } else { "" };
        let mut notes = Vec::new();
        let known = match recorded {
            Some(recorded) => Some(recorded),
            None => given(request, chosen.len())?,
        };
        let (planned, measured) = match known {
            Some(known) => (known, None),
            None => {
                let names = display_names(&chosen);
                let devices = RequestedDevices { selections: &chosen, names: &names };
                let (planned, measured) =
                    by_measurement(request, devices, &mut notes, &mut |_, _| {})?;
                (planned, Some(measured))
            }
        };
        notes.extend(require_micro_batches(&requested, &planned)?);
        let laid_out = LaidOut::of(request, &planned);
        let all = distinct(chosen.iter().map(|one| one.name().to_string()).collect());
        let names = planned.positions.iter().map(|position| all[*position].clone()).collect();
        let selections = chosen;
        Ok(Self { spec, request, selections, names, planned, laid_out, measured, caveat, notes })
    }

    /// Returns the times of the blocks of the model on the devices for the most rows of a
    /// micro-batch, by rank, then by block. They are measured if that was not done before.
    ///
    /// # Errors
    /// Returns `RuntimeError` if a device fails, or if there is no probe.
    pub fn measured_times(&self) -> Result<Vec<Vec<BlockTimes>>, RuntimeError> {
        let rows = self.planned.rows_max();
        let measured = match self.measured.as_ref().filter(|measured| measured.rows == rows) {
            Some(measured) => &measured.times,
            None => {
                let names = display_names(&self.selections);
                let devices = RequestedDevices { selections: &self.selections, names: &names };
                &measure_blocks(self.request, devices, rows, &mut |_, _| {})?.times
            }
        };
        let of_rank = |position: &usize| measured[*position].clone();
        Ok(self.planned.positions.iter().map(of_rank).collect())
    }

    /// Returns the number of ranks.
    pub fn world(&self) -> usize {
        self.names.len()
    }

    /// Returns the name of a rank's device.
    pub fn name(&self, rank: usize) -> &str {
        &self.names[rank]
    }

    /// Returns the coordinates of a rank.
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        self.planned.mesh.coordinates(Rank(rank as u32))
    }

    /// Returns the place of a rank: `stage 1 of pipeline 0`.
    pub fn place(&self, rank: usize) -> String {
        let Coordinates { data, pipeline, .. } = self.coordinates(rank);
        format!("stage {pipeline} of pipeline {data}")
    }

    /// Returns the blocks that a rank holds: `h.2 to head`.
    pub fn blocks(&self, rank: usize) -> String {
        let at = self.coordinates(rank);
        let chunks = self.planned.pipelines[at.data].chunks_of(at.pipeline);
        let graph = &self.laid_out.whole.graph;
        names_of_runs(graph, &chunks)
    }

    /// Returns the number of micro-batches of a rank's pipeline.
    pub fn micro_batches(&self, rank: usize) -> usize {
        self.laid_out.written.programs[rank].micro_batches.len()
    }

    /// Returns the sentence on the stashes that the schedule lets a rank hold at a time.
    fn stashes(&self, rank: usize) -> String {
        let at = self.coordinates(rank);
        let stages = self.planned.mesh.pipeline;
        let schedule = self.planned.schedule;
        let chunks = self.planned.pipelines[at.data].chunks.len() / stages;
        let micro_batches = self.micro_batches(rank);
        let shape = PipelineShape { stages, chunks, micro_batches };
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

fn program(pipelines: &ExplainedPipelines) -> String {
    let LaidOut { written, whole, .. } = &pipelines.laid_out;
    let names = InstructionNames { plan: whole, edges: &written.edges.edges };
    let of_rank = |rank: usize| {
        let (name, place) = (pipelines.name(rank), pipelines.place(rank));
        let blocks = pipelines.blocks(rank);
        let samples = pipelines.planned.shares[pipelines.coordinates(rank).data].count;
        let program = names.program(&written.programs[rank]);
        format!("rank {rank}: {name}, {place}, {blocks}, {samples} samples\n{program}")
    };
    (0..pipelines.world()).map(of_rank).collect::<Vec<_>>().join("\n")
}

fn memory(pipelines: &ExplainedPipelines) -> String {
    let ExplainedPipelines { spec, request, selections, planned, laid_out, .. } = pipelines;
    let (world, written) = (pipelines.world(), &laid_out.written);
    let ranks = || (0..world).map(|rank| (rank, &selections[planned.positions[rank]]));
    let title =
        |rank| [pipelines.name(rank), &pipelines.place(rank), &pipelines.blocks(rank)].join(", ");
    let titles: Vec<String> = (0..world).map(title).collect();
    let limit = |(rank, selection): (usize, &Selection)| {
        limit_line(spec, selection, &written.plans[rank], &laid_out.moments(request, rank))
    };
    let limits: Vec<String> = ranks().map(limit).collect();
    let stashes: Vec<String> = (0..world).map(|rank| pipelines.stashes(rank)).collect();
    let usage = |(rank, selection): (usize, &Selection)| {
        let (plan, positions) = (&written.plans[rank], written.groups.positions(Rank(rank as u32)));
        RankMemoryUsage {
            name: &titles[rank],
            plan,
            owned: owned_elements(&laid_out.moments(request, rank)),
            workspace: workspace(selection, plan, &laid_out.moments(request, rank)),
            staging: Some(host_memory::staging(selection, plan, world)),
            pool: Some(ring_pool_bytes_max(&laid_out.layout, positions)),
            edges: Some(written.edges.bytes_from(Rank(rank as u32))),
            stashes: Some(&stashes[rank]),
            limit: &limits[rank],
        }
    };
    let usages: Vec<RankMemoryUsage> = ranks().map(usage).collect();
    let needed = host_bytes(request, selections, planned, laid_out)
        .saturating_add(batches_bytes(&laid_out.whole.graph, spec.batch as usize));
    let available = available_memory().map(|bytes| (bytes, "which are available"));
    let host = format!("memory of the host: {}\n", comparison(needed, available));
    memory_tables(&usages, request.optimizer.moments()) + &host
}
