//! `potluck train --explain`: tables that describe a run, without running it.

mod communication;
mod instructions;
mod memory;
pub mod placement;

use std::path::Path;

use super::args::Explain;
use super::schedule_chart;
use communication::communication;
use instructions::program;
use memory::memory;
use placement::{ExplainedPlacement, with_placement};
use potluck_bench::profile::Profile;
use potluck_graph::print::{fusion_table, graph_dot, graph_table};
use potluck_parallel::Placement;
use potluck_parallel::planner::plans::Plans;
use potluck_train::error::TrainError;
use potluck_train::families::DataShape;
use potluck_train::run_data::SavedData;
use potluck_train::runtime::placement::candidates::selections;
use potluck_train::spec::RunSpec;

/// Parts of a checkpoint that determine the run that resumes from it.
#[derive(Default)]
pub struct ResumedParts {
    pub data: SavedData,
    pub placement: Option<Placement>,
    /// Completed steps and samples.
    pub done: (u64, u64),
}

/// Answer of `--explain`.
pub struct Explanation {
    pub text: String,
    /// False for an explanation of the memory of a run that does not fit.
    pub fits: bool,
}

impl From<String> for Explanation {
    fn from(text: String) -> Self {
        Self { text, fits: true }
    }
}

/// Returns the output of `--explain`; `resumed` is of the checkpoint from which the run starts, and
/// `svg` the file of the drawing of a schedule.
///
/// # Errors
/// Returns the errors of loading the text, building the graph, choosing devices and timing kernels,
/// the errors of refused pipelines, `UsageError` for the schedule of a run without a pipeline, and
/// `TrainError::Defect` for the keys, which need no run.
pub fn explanation(
    explain: Explain,
    spec: &RunSpec,
    resumed: ResumedParts,
    svg: Option<&Path>,
) -> anyhow::Result<Explanation> {
    let text = match explain {
        Explain::Graph => {
            let plans = planned(spec, &resumed.data)?;
            let graph = &plans.of_rows(spec.micro_batch).graph;
            let fused = plans.model().fusions();
            graph_table(graph) + &fusion_table(fused, spec.micro_batch as usize)
        }
        Explain::Dot => {
            let plans = planned(spec, &resumed.data)?;
            graph_dot(&plans.of_rows(spec.micro_batch).graph)
        }
        Explain::Memory => return table(spec, &resumed, memory),
        Explain::Program => return table(spec, &resumed, |placement| program(placement).into()),
        Explain::Communication => {
            return table(spec, &resumed, |placement| communication(placement).into());
        }
        Explain::Schedule => {
            schedule_chart::explain(spec, svg, &resumed.data, resumed.placement.as_ref())?
        }
        Explain::Kernels => kernels(spec, &resumed.data)?,
        Explain::Config => spec.clone().on_data(&resumed.data, resumed.done)?.run_toml,
        Explain::Keys => {
            let why = "the keys are the same for every run";
            return Err(TrainError::Defect(why.into()).into());
        }
    };
    Ok(text.into())
}

fn planned(spec: &RunSpec, saved_data: &SavedData) -> anyhow::Result<Plans> {
    Ok(Plans::new(spec.training_graph(&data_shape(spec, saved_data)?)?))
}

/// Returns a table that describes the placement of a run, below a note on its unknown parts.
fn table(
    spec: &RunSpec,
    resumed: &ResumedParts,
    explain: fn(&ExplainedPlacement) -> Explanation,
) -> anyhow::Result<Explanation> {
    with_placement(spec, &resumed.data, resumed.placement.as_ref(), None, |placement| {
        let Explanation { text, fits } = explain(placement);
        let mut above = placement.caveat().to_string();
        if let Some(note) = &placement.cut_note {
            above += &format!("{note}\n");
        }
        Ok(Explanation { text: above + &text, fits })
    })
}

/// Returns a table for each device, with whole batches on that device alone.
fn kernels(spec: &RunSpec, saved_data: &SavedData) -> anyhow::Result<String> {
    let mut tables = Vec::new();
    for selection in selections(&spec.devices)? {
        tables.push(Profile::measure(spec, selection, saved_data)?.table());
    }
    Ok(tables.join("\n"))
}

/// Returns the sizes of the data of the run's model: from a checkpoint if there is one, or else
/// from the run's data.
///
/// # Errors
/// Returns the errors of loading the data.
pub fn data_shape(spec: &RunSpec, saved: &SavedData) -> anyhow::Result<DataShape> {
    Ok(match saved.shape() {
        Some(shape) => shape,
        None => spec.load_data(saved)?.shape,
    })
}
