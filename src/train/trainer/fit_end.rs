//! Reasons for the end of [`Trainer::fit`](crate::Trainer::fit).

/// Reason for the end of [`Trainer::fit`](crate::Trainer::fit).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FitEnd {
    /// All steps are done.
    Done,
    /// The callback requested it.
    Stopped,
    /// None of the last `FitOptions::patience` evaluations was better than an earlier one.
    NoImprovement,
}
