//! Timeline of the busy times of each rank's components, for display.

use std::fmt;

use potluck_core::{Nanos, Rank, SegmentId};

/// Track of the timeline: a component of a rank whose activities do not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum VirtualTrack {
    Device,
    ReadBack,
    Ring,
    Link,
    Upload,
}

/// Period in which a component of a rank was busy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualSpan {
    pub rank: Rank,
    pub track: VirtualTrack,
    pub what: String,
    /// The segment that a device runs, and the micro-batch.
    pub run: Option<(SegmentId, usize)>,
    pub from: Nanos,
    pub to: Nanos,
}

/// Timeline of spans in the order in which they were scheduled. Prints as a table, sorted by
/// start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    pub spans: Vec<VirtualSpan>,
    is_on: bool,
}

impl Timeline {
    /// Creates an empty timeline, which stays empty unless `is_on`.
    pub fn new(is_on: bool) -> Self {
        Self { spans: Vec::new(), is_on }
    }

    /// Records an activity of a rank from `from` to `to`.
    pub fn add(
        &mut self,
        rank: Rank,
        track: VirtualTrack,
        period: (Nanos, Nanos),
        what: impl FnOnce() -> String,
    ) {
        if self.is_on {
            let (from, to) = period;
            self.spans.push(VirtualSpan { rank, track, what: what(), run: None, from, to });
        }
    }

    /// Records that the device of a rank runs a segment on a micro-batch.
    pub(crate) fn add_run(&mut self, rank: Rank, period: (Nanos, Nanos), run: (SegmentId, usize)) {
        if self.is_on {
            let (from, to) = period;
            let what = format!("run {} on {}", run.0, run.1);
            let track = VirtualTrack::Device;
            self.spans.push(VirtualSpan { rank, track, what, run: Some(run), from, to });
        }
    }

    /// Returns the total time for which a component of a rank was busy.
    pub fn busy(&self, rank: Rank, track: VirtualTrack) -> Nanos {
        let spans = self.spans.iter().filter(|span| span.rank == rank && span.track == track);
        spans.map(|span| span.to - span.from).sum()
    }
}

impl fmt::Display for VirtualTrack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Device => "device",
            Self::ReadBack => "read back",
            Self::Ring => "ring",
            Self::Link => "link",
            Self::Upload => "upload",
        })
    }
}

impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut spans: Vec<&VirtualSpan> = self.spans.iter().collect();
        spans.sort_by_key(|span| (span.from, span.rank, span.track));
        writeln!(f, "{:>12} {:>12}  rank  {:9}  what", "from ms", "to ms", "part")?;
        for span in spans {
            let from = span.from as f64 / 1e6;
            let to = span.to as f64 / 1e6;
            let VirtualSpan { rank: Rank(rank), track, what, .. } = span;
            writeln!(f, "{from:12.3} {to:12.3}  {rank:4}  {track:9}  {what}")?;
        }
        Ok(())
    }
}
