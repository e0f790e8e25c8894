//! Language model in a graph.

use super::error::TrainError;
use potluck_graph::Graph;
use potluck_graph::model::LanguageModel;

/// Finds the tensors of a language model in its graph.
///
/// # Errors
/// Returns `TrainError::Defect` if one is missing.
pub fn language_model(graph: &Graph) -> Result<LanguageModel, TrainError> {
    LanguageModel::of(graph)
        .ok_or_else(|| TrainError::Defect("the model has no tokens or no logits".into()))
}
