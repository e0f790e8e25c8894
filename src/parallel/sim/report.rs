//! Report of a simulated run.

use std::fmt;

use super::timeline::Timeline;
use super::values::{Buckets, hash};
use potluck_core::Rank;

/// Outcome of a run for one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// All steps are complete.
    Completed,
    /// A rank failed, and this rank received the failure message.
    Failed { rank: Rank, why: String },
}

/// State of a rank after the run.
#[derive(Clone, Debug)]
pub struct RankReport {
    /// Outcome; `None` if the rank died, hung for the deadline, or deadlocked.
    pub end: Option<End>,
    /// True if the rank neither died nor hung for the deadline.
    pub is_live: bool,
    /// Number of steps that the rank finished, updated or skipped.
    pub finished: u64,
    pub parameters: Buckets,
}

/// Report of a simulated run: its ranks, duration and violations.
#[derive(Clone, Debug)]
pub struct SimulationReport {
    pub ranks: Vec<RankReport>,
    /// Virtual seconds until the last live rank had ended.
    pub seconds: f64,
    /// Number of events that were handled.
    pub events: u64,
    /// Number of pieces of tensors that were sent, once for each rank that reads them.
    pub pieces: u64,
    /// Number of elements that were sent, by sender and receiver.
    pub elements_sent: Vec<Vec<u64>>,
    pub timeline: Timeline,
    /// Violations of invariants during the run.
    pub violations: Vec<String>,
}

impl RankReport {
    /// Returns the hash of the bits of the rank's parameters.
    pub fn bits(&self) -> u64 {
        hash(&self.parameters)
    }
}

impl fmt::Display for RankReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.end {
            Some(End::Completed) => f.write_str("completed")?,
            Some(End::Failed { rank, why }) => write!(f, "ended because {rank} failed: {why}")?,
            None if self.is_live => f.write_str("deadlocked")?,
            None => f.write_str("died or hung")?,
        }
        write!(f, "; {} steps finished, parameters {:016x}", self.finished, self.bits())
    }
}

/// Prints a line per rank, and one per violation.
impl fmt::Display for SimulationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} events in {} virtual seconds", self.events, self.seconds)?;
        for (rank, report) in self.ranks.iter().enumerate() {
            writeln!(f, "rank {rank} {report}")?;
        }
        self.violations.iter().try_for_each(|violation| writeln!(f, "violation: {violation}"))
    }
}
