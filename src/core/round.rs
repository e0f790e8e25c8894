//! Time and rounds of state machines.

use std::fmt;

/// Point in time or duration in nanoseconds; a point is counted from an origin of the caller's
/// choice.
pub type Nanos = u64;

/// One attempt at a step, the same on every rank. Rounds are ordered: a later attempt at the same
/// step has a higher generation.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    serde::Serialize,
    serde::Deserialize,
)]
pub struct Round {
    pub generation: u64,
    /// Step of the run, counted from 1.
    pub step: u64,
    /// True for the settling round after a step, which performs the all-gathers that the step left
    /// to the next one.
    pub settles: bool,
}

impl Round {
    /// Returns the round that follows this one with an attempt at `step`: in the same generation
    /// if the step is a later one, in the next one otherwise.
    pub fn next(self, step: u64) -> Self {
        Self { generation: self.generation + u64::from(step <= self.step), step, settles: false }
    }

    /// Returns the settling round after this step; see [`Round::settles`].
    pub fn settling(self) -> Self {
        Self { settles: true, ..self }
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.settles { "the end of step" } else { "step" };
        write!(f, "{place} {} (generation {})", self.step, self.generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_ordered_whatever_their_steps() {
        let first = Round::default().next(1);
        assert_eq!(first, Round { generation: 0, step: 1, settles: false });
        let (second, again, earlier) = (first.next(2), first.next(1), first.next(2).next(1));
        assert!(first < second && second < again && again <= earlier);
        assert!(first < first.settling() && first.settling() < second);
        assert_eq!(first.settling().next(2), second);
        assert_eq!(earlier, Round { generation: 1, step: 1, settles: false });
        assert_eq!(again.to_string(), "step 1 (generation 1)");
        assert_eq!(first.settling().to_string(), "the end of step 1 (generation 0)");
    }
}
