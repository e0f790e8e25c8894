//! Outcome of a run, which the first node sends to the others.

use crate::signals::Interruption;

/// Result of a run that ended without an error.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum RunOutcome {
    /// All steps are done.
    Done {
        /// Last loss on the validation split, if any.
        val_loss: Option<f64>,
        /// Sentence for the user about the task's measure, if any; not sent to other nodes.
        #[serde(skip)]
        measure: Option<String>,
    },
    /// A signal arrived; the state is saved.
    Interrupted(Interruption),
}
