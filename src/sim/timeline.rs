//! What a rank's parts were busy with, for people.

use std::fmt;

use super::queue::Nanos;
use crate::base::Rank;

/// A part of a rank that does one thing at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    Driver,
    ReadBack,
    Ring,
    Link,
    Upload,
}

/// Something that took time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    pub rank: Rank,
    pub lane: Lane,
    pub what: String,
    pub from: Nanos,
    pub to: Nanos,
}

/// Spans in the order in which they were planned. Prints as a table, by their beginnings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    pub spans: Vec<Span>,
    is_on: bool,
}

impl Timeline {
    /// Empty; it stays so unless `is_on`.
    pub fn new(is_on: bool) -> Self {
        Self { spans: Vec::new(), is_on }
    }

    /// Something that a rank does from `from` to `to`.
    pub fn add(
        &mut self,
        rank: Rank,
        lane: Lane,
        (from, to): (Nanos, Nanos),
        what: impl FnOnce() -> String,
    ) {
        if self.is_on {
            self.spans.push(Span { rank, lane, what: what(), from, to });
        }
    }

    /// How long a rank's part was busy.
    pub fn busy(&self, rank: Rank, lane: Lane) -> Nanos {
        let spans = self.spans.iter().filter(|span| span.rank == rank && span.lane == lane);
        spans.map(|span| span.to - span.from).sum()
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Driver => "driver",
            Self::ReadBack => "read back",
            Self::Ring => "ring",
            Self::Link => "link",
            Self::Upload => "upload",
        })
    }
}

impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut spans: Vec<&Span> = self.spans.iter().collect();
        spans.sort_by_key(|span| (span.from, span.rank, span.lane));
        writeln!(f, "{:>12} {:>12}  rank  {:9}  what", "from ms", "to ms", "part")?;
        for span in spans {
            let [from, to] = [span.from, span.to].map(|at| at as f64 / 1e6);
            let (rank, lane) = (span.rank.0, span.lane);
            writeln!(f, "{from:12.3} {to:12.3}  {rank:4}  {lane:9}  {}", span.what)?;
        }
        Ok(())
    }
}
