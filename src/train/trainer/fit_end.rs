//! Reasons for which [`Trainer::fit`](crate::Trainer::fit) ends.

/// Reason for which [`Trainer::fit`](crate::Trainer::fit) ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FitEnd {
    /// All steps are done.
    Done,
    /// The callback asked for it.
    Stopped,
    /// No evaluation was better for `FitOptions::patience` of them.
    NoImprovement,
}
