//! What came of a run.

use std::fmt;

use super::timeline::Timeline;
use super::values::{Buckets, hash};
use crate::base::Rank;

/// How a run ended for a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// All steps are made.
    Completed,
    /// A rank failed, and this rank was told so.
    Failed { rank: Rank, why: String },
}

/// A rank after the run.
#[derive(Clone, Debug)]
pub struct RankReport {
    /// `None`: it died, hung for too long, or waits for ever.
    pub end: Option<End>,
    /// It neither died nor hung for too long.
    pub is_live: bool,
    /// Steps that it finished, updated or skipped.
    pub finished: u64,
    pub parameters: Buckets,
}

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Report {
    pub ranks: Vec<RankReport>,
    /// Virtual seconds until the last live rank had ended.
    pub seconds: f64,
    /// Events that were handled.
    pub events: u64,
    pub timeline: Timeline,
    /// What must never happen and did.
    pub violations: Vec<String>,
}

impl RankReport {
    /// The hash of its parameters' bits.
    pub fn bits(&self) -> u64 {
        hash(&self.parameters)
    }
}

impl fmt::Display for RankReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.end {
            Some(End::Completed) => f.write_str("completed")?,
            Some(End::Failed { rank, why }) => write!(f, "ended because {rank} failed: {why}")?,
            None if self.is_live => f.write_str("waits for ever")?,
            None => f.write_str("died or hung")?,
        }
        write!(f, "; {} steps finished, parameters {:016x}", self.finished, self.bits())
    }
}

/// A line per rank, and one per violation.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} events in {} virtual seconds", self.events, self.seconds)?;
        for (rank, report) in self.ranks.iter().enumerate() {
            writeln!(f, "rank {rank} {report}")?;
        }
        self.violations.iter().try_for_each(|violation| writeln!(f, "violation: {violation}"))
    }
}
