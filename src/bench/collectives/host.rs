//! One collective on slices: the ranks are threads, and each calls it again and again.

use std::hint::black_box;
use std::time::Instant;
use std::{fmt, thread};

use super::Kind;
use crate::base::Rank;
use crate::base::shape::ELEMENT_BYTES;
use crate::bench::sample::{SamplingPlan, repeats};
use crate::bench::units::size;
use crate::comm::{GroupError, ProcessGroup, ReduceOp, init};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    pub kind: Kind,
    pub ranks: usize,
    /// Bytes of the longest buffer of a rank.
    pub bytes: u64,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} by {} ranks", self.kind.name(), size(self.bytes), self.ranks)
    }
}

impl Point {
    /// Bytes of memory that measuring takes: of each rank its buffer and a part, which is at most
    /// half as long, and a buffer to copy to. A tenth is for what else a process needs.
    pub fn needs(&self) -> u64 {
        let parts = match self.kind {
            Kind::AllReduce | Kind::Broadcast => 0,
            Kind::ReduceScatter | Kind::AllGather => 1,
        };
        let buffers = self.ranks as u64 + parts + 1;
        buffers * self.bytes / 10 * 11
    }
}

/// What was measured, in rounds: seconds of a call on the slowest rank, and of a copy.
#[derive(Clone, Debug, Default)]
pub struct Timed {
    pub calls: Vec<f64>,
    pub copies: Vec<f64>,
}

/// Why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum PointError {
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error("{0} has a wrong result")]
    Wrong(Rank),
}

/// Runs the ranks of a point, each in its own thread.
///
/// # Errors
/// A collective that fails, or whose results are not to the bit what they must be.
pub fn measure(point: &Point, plan_of_samples: &SamplingPlan) -> Result<Timed, PointError> {
    thread::scope(|scope| {
        let start = |group| scope.spawn(move || Side::new(group, point).run(plan_of_samples));
        let ranks: Vec<_> = init(point.ranks as u32).into_iter().map(start).collect();
        let mut measured = Ok(Timed::default());
        for (rank, thread) in ranks.into_iter().enumerate() {
            let ended = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            measured = match (measured, ended) {
                // Whoever was told by another rank is not the first cause.
                (Err(PointError::Group(GroupError::Aborted(_))), Err(error)) => Err(error),
                (Ok(_), Ok(timed)) if rank == 0 => Ok(timed),
                (Ok(_), Err(error)) => Err(error),
                (measured, _) => measured,
            };
        }
        measured
    })
}

/// The values of a rank repeat after so many, a prime: a chunk in a wrong place shows.
const PERIOD: usize = 1021;
/// Bytes that a sample copies at least: a short copy alone is no time to measure.
const COPIED_MIN: usize = 16 << 20;

/// What a rank puts in at a position: whole numbers so small that every sum is exact.
pub fn value(rank: usize, at: usize) -> f32 {
    ((at % PERIOD * 7 + rank * 13) % 64) as f32
}

/// `values[i] = value(start + i)`, of a value that repeats after 1021 elements.
pub fn fill(values: &mut [f32], start: usize, value: impl Fn(usize) -> f32) {
    let period: Vec<f32> = (start..start + PERIOD).map(value).collect();
    for piece in values.chunks_mut(PERIOD) {
        piece.copy_from_slice(&period[..piece.len()]);
    }
}

/// Whether [`fill`] would change nothing.
pub fn is_filled(values: &[f32], start: usize, value: impl Fn(usize) -> f32) -> bool {
    let period: Vec<f32> = (start..start + PERIOD).map(value).collect();
    values.chunks(PERIOD).all(|piece| *piece == period[..piece.len()])
}

/// A rank with its buffers.
struct Side {
    group: ProcessGroup,
    kind: Kind,
    /// As long as the point's bytes, in whole parts.
    values: Vec<f32>,
    /// As long as its part, where each rank has one.
    part: Vec<f32>,
    /// Where the first rank copies its values to.
    copy: Vec<f32>,
}

impl Side {
    fn new(group: ProcessGroup, point: &Point) -> Self {
        let parts = match point.kind {
            Kind::AllReduce | Kind::Broadcast => 1,
            Kind::ReduceScatter | Kind::AllGather => point.ranks,
        };
        let part = point.bytes as usize / ELEMENT_BYTES / parts;
        let part_length = if parts == 1 { 0 } else { part };
        let copy_length = if group.rank() == Rank(0) { part * parts } else { 0 };
        // Ones, not zeros: memory that was never written need not be there.
        let [values, part, copy] =
            [part * parts, part_length, copy_length].map(|length| vec![1.0; length]);
        Self { group, kind: point.kind, values, part, copy }
    }

    fn run(mut self, plan_of_samples: &SamplingPlan) -> Result<Timed, PointError> {
        self.put_in();
        self.call()?;
        if !self.is_right() {
            self.group.abort("its result is wrong");
            return Err(PointError::Wrong(self.group.rank()));
        }
        // They stay so, however often they are summed.
        self.values.fill(0.0);
        self.part.fill(0.0);
        // Every rank hears the same seconds, so all decide alike.
        let repeats =
            repeats(plan_of_samples, |repeats| Ok::<_, PointError>(self.round(repeats)?.0))?;
        let mut timed = Timed::default();
        let mut seconds = 0.0;
        while timed.calls.len() < plan_of_samples.samples
            && (timed.calls.len() < SAMPLES_MIN || seconds < plan_of_samples.figure_seconds_max)
        {
            let (calls, copy) = self.round(repeats)?;
            timed.calls.push(calls / repeats as f64);
            timed.copies.push(copy);
            seconds += calls;
        }
        Ok(timed)
    }

    /// Seconds of so many calls on the slowest rank, and of a copy by the first.
    fn round(&mut self, repeats: usize) -> Result<(f64, f64), PointError> {
        self.group.barrier()?;
        let started = Instant::now();
        for _ in 0..repeats {
            self.call()?;
        }
        let calls = started.elapsed().as_secs_f64();
        // Until all are done, so that the copy has the memory for itself.
        self.group.barrier()?;
        let mut seconds = [calls, self.copied()];
        self.group.all_reduce(&mut seconds, ReduceOp::Max)?;
        Ok(seconds.into())
    }

    /// Seconds of a copy of all values; nothing but on the first rank.
    fn copied(&mut self) -> f64 {
        if self.copy.is_empty() {
            return 0.0;
        }
        let repeats = (COPIED_MIN / size_of_val(&self.copy[..])).max(1);
        let started = Instant::now();
        for _ in 0..repeats {
            black_box(&mut self.copy).copy_from_slice(black_box(&self.values));
        }
        started.elapsed().as_secs_f64() / repeats as f64
    }

    fn call(&mut self) -> Result<(), GroupError> {
        match self.kind {
            Kind::AllReduce => self.group.all_reduce(&mut self.values, ReduceOp::Sum),
            Kind::ReduceScatter => {
                self.group.reduce_scatter(&self.values, &mut self.part, ReduceOp::Sum)
            }
            Kind::AllGather => self.group.all_gather_into(&self.part, &mut self.values),
            Kind::Broadcast => self.group.broadcast(&mut self.values, Rank(0)),
        }
    }

    fn put_in(&mut self) {
        let rank = self.group.rank().index();
        let own = if self.kind == Kind::AllGather { &mut self.part } else { &mut self.values };
        fill(own, 0, |at| value(rank, at));
    }

    /// Whether the result of the first call is right, to the bit.
    fn is_right(&self) -> bool {
        let (rank, world) = (self.group.rank().index(), self.group.world_size());
        let sum = |at: usize| (0..world).map(|rank| value(rank, at)).sum::<f32>();
        match self.kind {
            Kind::AllReduce => is_filled(&self.values, 0, sum),
            Kind::ReduceScatter => is_filled(&self.part, rank * self.part.len(), sum),
            Kind::AllGather => {
                let mut parts = self.values.chunks(self.part.len().max(1)).enumerate();
                parts.all(|(rank, part)| is_filled(part, 0, |at| value(rank, at)))
            }
            Kind::Broadcast => is_filled(&self.values, 0, |at| value(0, at)),
        }
    }
}

/// The fewest rounds, however long they take.
const SAMPLES_MIN: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Effort;

    #[test]
    fn what_is_in_a_wrong_place_shows() {
        let mut values = vec![0.0; 5000];
        fill(&mut values, 7, |at| value(1, at));
        assert!((0..5000).all(|at| values[at] == value(1, at + 7)));
        assert!(is_filled(&values, 7, |at| value(1, at)));
        assert!(!is_filled(&values, 8, |at| value(1, at)));
        assert!(!is_filled(&values, 7, |at| value(2, at)));
        values.swap(1024, 2048);
        assert!(!is_filled(&values, 7, |at| value(1, at)));
    }

    #[test]
    fn every_collective_gives_its_rounds() {
        let plan_of_samples = Effort::Tiny.plan_of_samples();
        for kind in Kind::ALL {
            for ranks in [2, 5] {
                let point = Point { kind, ranks, bytes: 60 << 10 };
                let timed =
                    measure(&point, &plan_of_samples).unwrap_or_else(|e| panic!("{point}: {e}"));
                assert_eq!(timed.calls.len(), timed.copies.len());
                assert!(timed.calls.len() >= SAMPLES_MIN);
                assert!(timed.calls.iter().chain(&timed.copies).all(|seconds| *seconds > 0.0));
            }
        }
        let all = Point { kind: Kind::AllReduce, ranks: 8, bytes: 256 << 20 };
        assert_eq!(all.needs(), 9 * (256 << 20) / 10 * 11);
    }
}
