//! `potluck train --explain schedule`: Gantt chart of a step of pipelines, before it runs.

mod predict;

use std::path::Path;

use super::explain::pipelines::{ExplainedPipelines, with_pipelines};
use crate::data::Tokenizer;
use crate::files;
use crate::parallel::Placement;
use crate::train::error::TrainError;
use crate::train::spec::RunSpec;
use crate::ui::gantt::{Chart, RunsOfRow, SegmentRun, chart_of_runs};
use predict::{nominal_times, predicted};

/// Width of the chart in a terminal whose width is not known, in characters.
const COLUMNS: usize = 100;

/// Note on the times of the chart.
const NOTE: &str = "times are nominal, of 1 GFLOP/s and 10 GB/s on every device; transfers take \
                    none\n";

/// Returns the chart as text, and draws it to the file `svg` if there is one; `tokenizer` is that
/// of a checkpoint, and `saved` its placement.
///
/// # Errors
/// Returns the errors of [`with_pipelines`], and `TrainError::Io` if the file cannot be written.
pub fn explain(
    spec: &RunSpec,
    svg: Option<&Path>,
    tokenizer: Option<Tokenizer>,
    saved: Option<&Placement>,
) -> anyhow::Result<String> {
    let draw = |pipelines: &ExplainedPipelines| {
        let laid_out = &pipelines.laid_out;
        let times = vec![nominal_times(&laid_out.whole); pipelines.world()];
        let rows = predicted(&laid_out.written, &laid_out.whole, &times);
        let chart = chart(pipelines, rows);
        Ok((pipelines.caveat.to_string() + NOTE, chart))
    };
    let (notes, chart) = with_pipelines(spec, tokenizer, saved, draw)?;
    if let Some(path) = svg {
        let written = files::replace(path, chart.svg().as_bytes());
        written.map_err(|why| TrainError::Io { path: path.into(), why })?;
    }
    Ok(notes + &chart.text(columns()))
}

/// Returns the chart of what the ranks of pipelines run in a step.
fn chart(pipelines: &ExplainedPipelines, rows: Vec<Vec<SegmentRun>>) -> Chart {
    let planned = &pipelines.planned;
    let row = |(rank, runs): (usize, Vec<SegmentRun>)| {
        let (pipeline, stage) = planned.stage_of(rank);
        let of = match planned.stages.len() {
            1 => String::new(),
            _ => format!("pipeline {pipeline} "),
        };
        let (name, blocks) = (pipelines.name(rank), pipelines.blocks(rank));
        RunsOfRow { label: format!("{of}stage {stage}: {name}, {blocks}"), runs }
    };
    let rows: Vec<RunsOfRow> = rows.into_iter().enumerate().map(row).collect();
    let (depth, schedule) = (planned.depth(), planned.schedule);
    let micro_batches = pipelines.micro_batches(0);
    let title = format!("{schedule}, {depth} stages, {micro_batches} micro-batches");
    chart_of_runs(title, &rows)
}

/// Returns the width of the terminal as the shell tells it, or else a usual one.
fn columns() -> usize {
    let told = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    told.filter(|columns| *columns >= 40).unwrap_or(COLUMNS)
}
