//! Outcome of a run, which the first node tells the others.

use crate::signals::Interruption;

/// Result of a run that ended without an error.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum RunOutcome {
    /// All steps are done.
    Done {
        /// Last loss on the validation split, if there is one.
        val_loss: Option<f64>,
        /// Sentence for the user about what the task measured, if it did; other nodes get none.
        #[serde(skip)]
        measure: Option<String>,
    },
    /// A signal arrived; the state is saved.
    Interrupted(Interruption),
}
