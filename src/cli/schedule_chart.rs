//! `potluck train --explain schedule`: Gantt chart of a step of pipelines, before the run.

use std::path::Path;
use std::sync::Arc;

use super::explain::placement::{ExplainedPlacement, with_placement};
use super::{UsageError, write_named};
use potluck::gantt::{Chart, RunsOfRow, SegmentRun, chart_of_runs};
use potluck_core::format::counted;
use potluck_graph::{Graph, PassKind};
use potluck_parallel::planner::price::{LinkModel, PricedSpan, UnknownTime, price};
use potluck_parallel::{Coordinates, Placement};
use potluck_train::run_data::{RunData, SavedData};
use potluck_train::runtime::RuntimeError;
use potluck_train::runtime::timing::Probe;
use potluck_train::spec::RunSpec;

/// Width of the chart in a terminal of unknown width, in characters.
const COLUMNS: usize = 100;

/// Note on the times of the chart.
const NOTE: &str = "by the times of each block, measured alone; transfers, reductions and updates \
                    take none\n";

/// Returns the chart as text, and draws it to the file `svg` if that is given; `saved_data` comes
/// from a checkpoint, and `saved` is its placement. Measures the blocks of the model on the
/// devices.
///
/// # Errors
/// Returns the errors of [`with_placement`] and of the measured devices, and `TrainError::Io` if
/// the file cannot be written.
pub fn explain(
    spec: &RunSpec,
    svg: Option<&Path>,
    saved_data: &SavedData,
    saved: Option<&Placement>,
) -> anyhow::Result<String> {
    let data = spec.load_data(saved_data)?;
    let probe = probe(spec, &data, spec.training_graph(&data.shape)?.whole())?;
    if !spec.parallel.is_divided() {
        let why = "--explain schedule needs parallel.pipeline_stages or parallel.tensor_ranks of \
                   2 or more; give --pipeline K or --tensor K";
        return Err(UsageError(why.into()).into());
    }
    let (notes, chart) = with_placement(spec, saved_data, saved, Some(probe), priced_chart)?;
    if let Some(path) = svg {
        write_named(path, chart.svg().as_bytes())?;
    }
    Ok(notes + &chart.text(columns()))
}

/// Notes on the times of a chart, and the chart.
fn priced_chart(placement: &ExplainedPlacement) -> anyhow::Result<(String, Chart)> {
    let laid_out = &placement.laid_out;
    let times = placement.measured_times()?;
    let links = vec![vec![LinkModel::INSTANT; placement.world()]; placement.world()];
    let priced = price(&laid_out.written, &times, &links)
        .map_err(|unknown| not_measured(placement, unknown))?;
    let mut runs = vec![Vec::new(); placement.world()];
    for span in &priced.spans {
        runs[span.rank.index()].push(run(span));
    }
    let mut notes = String::new();
    for note in &placement.notes {
        notes += &format!("{note}\n");
    }
    Ok((notes + NOTE, chart(placement, runs)))
}

fn not_measured(placement: &ExplainedPlacement, unknown: UnknownTime) -> RuntimeError {
    let UnknownTime { rank, block } = unknown;
    let block = &placement.laid_out.whole().graph.blocks[block as usize];
    RuntimeError::InvalidRequest(format!(
        "there is no chart: {} has no memory to measure block {block} alone",
        placement.name(rank.index())
    ))
}

/// Returns inputs for the measurement of a training graph, from the run's first step.
///
/// # Errors
/// Returns the errors of data that do not fit the graph.
pub fn probe(spec: &RunSpec, data: &RunData, graph: &Graph) -> anyhow::Result<Probe> {
    let source = spec.batch_source(graph, data, 0, 0)?;
    Ok(Arc::new(move |rows| source.probe(1, rows as u32)))
}

/// Returns a priced span as a run of a chart.
fn run(span: &PricedSpan) -> SegmentRun {
    let letter = match span.pass {
        PassKind::Forward => 'F',
        PassKind::BackwardInput => 'B',
        PassKind::BackwardWeight => 'W',
    };
    let segment = (letter, span.block as usize);
    SegmentRun { segment, micro_batch: span.micro_batch, from: span.from_s, to: span.to_s }
}

/// Chart of the runs of segments by rank in a step of pipelines.
fn chart(placement: &ExplainedPlacement, runs: Vec<Vec<SegmentRun>>) -> Chart {
    let planned = &placement.planned;
    let mut rows = Vec::new();
    for (rank, runs) in runs.into_iter().enumerate() {
        let Coordinates { data, pipeline: stage, tensor } = placement.coordinates(rank);
        let of = if planned.mesh.data == 1 { String::new() } else { format!("pipeline {data} ") };
        let name = placement.name(rank);
        let blocks = placement.blocks(rank);
        let member = if planned.mesh.tensor == 1 { String::new() } else { format!(".{tensor}") };
        rows.push(RunsOfRow {
            label: format!("{of}stage {stage}{member}: {name}, {blocks}"),
            runs,
        });
    }
    let batches = counted(placement.micro_batches(0), "micro-batch", "micro-batches");
    let title = if planned.mesh.pipeline == 1 {
        format!("tensor group of {}, {batches}", planned.mesh.tensor)
    } else {
        format!("{}, {} stages, {batches}", planned.schedule, planned.mesh.pipeline)
    };
    chart_of_runs(title, &rows)
}

/// Width of the terminal by the shell's variable, or else a common one.
fn columns() -> usize {
    if let Ok(told) = std::env::var("COLUMNS")
        && let Ok(columns) = told.parse()
        && columns >= 40
    {
        return columns;
    }
    COLUMNS
}
