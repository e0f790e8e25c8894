//! `potluck train --explain schedule`: Gantt chart of a step of pipelines.

use std::path::Path;

use crate::data::Tokenizer;
use crate::train::error::TrainError;
use crate::train::spec::RunSpec;

/// Returns the chart as text, and draws it to the file `svg` if there is one; `tokenizer` is that
/// of a checkpoint.
///
/// # Errors
/// Returns `TrainError::Defect` if there is such a file: the chart is not drawn yet.
pub fn explain(
    spec: &RunSpec,
    svg: Option<&Path>,
    _tokenizer: Option<Tokenizer>,
) -> anyhow::Result<String> {
    if svg.is_some() {
        return Err(TrainError::Defect("the chart of a schedule is not drawn yet".into()).into());
    }
    let pipeline = &spec.parallel.pipeline;
    let (stages, chunks, schedule) = (pipeline.stages, pipeline.chunks, pipeline.schedule);
    Ok(format!("{schedule} on {stages} stages with {chunks} model chunks each\n"))
}
