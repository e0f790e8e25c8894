//! `potluck train --explain schedule`: Gantt chart of a step of pipelines, before it runs.

use std::path::Path;
use std::sync::Arc;

use super::explain::pipelines::{ExplainedPipelines, with_pipelines};
use super::write_named;
use crate::base::format::counted;
use crate::graph::PassKind;
use crate::parallel::{Coordinates, Placement};
use crate::planner::price::{LinkModel, PricedSpan, UnknownTime, price};
use crate::runtime::RuntimeError;
use crate::runtime::timing::Probe;
use crate::train::run_data::SavedData;
use crate::train::spec::RunSpec;
use crate::ui::gantt::{Chart, RunsOfRow, SegmentRun, chart_of_runs};

/// Width of the chart in a terminal whose width is not known, in characters.
const COLUMNS: usize = 100;

/// Note on the times of the chart.
const NOTE: &str = "by the times of each block, measured alone; transfers, reductions and updates \
                    take none\n";

/// Returns the chart as text, and draws it to the file `svg` if there is one; `saved_data` is that
/// of a checkpoint, and `saved` its placement. The blocks of the model are measured on the devices.
///
/// # Errors
/// Returns the errors of [`with_pipelines`], those of a device that is measured, and
/// `TrainError::Io` if the file cannot be written.
pub fn explain(
    spec: &RunSpec,
    svg: Option<&Path>,
    saved_data: &SavedData,
    saved: Option<&Placement>,
) -> anyhow::Result<String> {
    let draw = |pipelines: &ExplainedPipelines| {
        let laid_out = &pipelines.laid_out;
        let times = pipelines.measured_times()?;
        let links = vec![vec![LinkModel::INSTANT; pipelines.world()]; pipelines.world()];
        let priced = price(&laid_out.written, &laid_out.whole, &times, &links)
            .map_err(|unknown| not_measured(pipelines, unknown))?;
        let mut rows = vec![Vec::new(); pipelines.world()];
        for span in &priced.spans {
            rows[span.rank.index()].push(run(span));
        }
        let notes: String = pipelines.notes.iter().map(|note| format!("{note}\n")).collect();
        Ok((notes + NOTE, chart(pipelines, rows)))
    };
    let probe = probe(spec, saved_data)?;
    let (notes, chart) = with_pipelines(spec, saved_data, saved, Some(probe), draw)?;
    if let Some(path) = svg {
        write_named(path, chart.svg().as_bytes())?;
    }
    Ok(notes + &chart.text(columns()))
}

fn not_measured(pipelines: &ExplainedPipelines, unknown: UnknownTime) -> RuntimeError {
    let UnknownTime { rank, block } = unknown;
    let block = &pipelines.laid_out.whole.graph.blocks[block as usize];
    RuntimeError::InvalidRequest(format!(
        "there is no chart: {} has no memory to measure block {block} alone",
        pipelines.name(rank.index())
    ))
}

/// Returns the inputs with which blocks are measured: those of the run's first step.
fn probe(spec: &RunSpec, saved_data: &SavedData) -> anyhow::Result<Probe> {
    let data = spec.load_data(saved_data)?;
    let (training, _) = spec.training_graph(&data.shape)?;
    let source = spec.batch_source(&training, &data, 0, 0)?;
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

/// Returns the chart of what the ranks of pipelines run in a step.
fn chart(pipelines: &ExplainedPipelines, rows: Vec<Vec<SegmentRun>>) -> Chart {
    let planned = &pipelines.planned;
    let row = |(rank, runs): (usize, Vec<SegmentRun>)| {
        let Coordinates { data, pipeline: stage, .. } = pipelines.coordinates(rank);
        let of = if planned.mesh.data == 1 { String::new() } else { format!("pipeline {data} ") };
        let (name, blocks) = (pipelines.name(rank), pipelines.blocks(rank));
        RunsOfRow { label: format!("{of}stage {stage}: {name}, {blocks}"), runs }
    };
    let rows: Vec<RunsOfRow> = rows.into_iter().enumerate().map(row).collect();
    let (depth, schedule) = (planned.mesh.pipeline, planned.schedule);
    let micro_batches = counted(pipelines.micro_batches(0), "micro-batch", "micro-batches");
    let title = format!("{schedule}, {depth} stages, {micro_batches}");
    chart_of_runs(title, &rows)
}

/// Returns the width of the terminal as the shell tells it, or else a usual one.
fn columns() -> usize {
    let told = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    told.filter(|columns| *columns >= 40).unwrap_or(COLUMNS)
}
