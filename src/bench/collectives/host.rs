//! Benchmark of one collective on slices: each rank is a thread that calls it repeatedly.

use std::hint::black_box;
use std::time::Instant;
use std::{fmt, thread};

use super::Kind;
use crate::sample::{SamplingPlan, repeats};
use crate::units::size;
use potluck_core::{DType, Rank};
use potluck_parallel::comm::{GroupError, ProcessGroup, ReduceOp, init};

/// Measurement: a collective, its number of ranks and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GridPoint {
    pub kind: Kind,
    pub ranks: usize,
    /// Bytes of the longest buffer of a rank.
    pub bytes: u64,
}

impl fmt::Display for GridPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} by {} ranks", self.kind.name(), size(self.bytes), self.ranks)
    }
}

impl GridPoint {
    /// Returns the bytes of memory that the measurement takes in a process with `ranks` of its
    /// ranks: a buffer per rank and its part, which is at most half as long, and the target of a
    /// copy. A tenth is added for the other needs of the process.
    pub fn needs(&self, ranks: usize) -> u64 {
        let parts = match self.kind {
            Kind::AllReduce | Kind::Broadcast => 0,
            Kind::ReduceScatter | Kind::AllGather => 1,
        };
        let buffers = ranks as u64 + parts + 1;
        buffers * self.bytes / 10 * 11
    }
}

/// Samples of the rounds: seconds of a call on the slowest rank, and of a copy.
#[derive(Clone, Debug, Default)]
pub struct TimedCalls {
    pub calls: Vec<f64>,
    pub copies: Vec<f64>,
}

/// Error of a measurement.
#[derive(Debug, thiserror::Error)]
pub enum PointError {
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error("{0} has a wrong result")]
    Wrong(Rank),
    #[error("{0} asks for a measurement that there is not")]
    Order(Rank),
}

/// Runs the ranks of a measurement, each in its own thread.
///
/// # Errors
/// Returns `PointError` if a collective fails, or if its results are not right to the bit.
pub fn measure(point: &GridPoint, sampling_plan: &SamplingPlan) -> Result<TimedCalls, PointError> {
    thread::scope(|scope| {
        let mut ranks = Vec::with_capacity(point.ranks);
        for mut group in init(point.ranks as u32) {
            ranks.push(scope.spawn(move || Side::new(&mut group, point).run(sampling_plan)));
        }
        let mut measured = Ok(TimedCalls::default());
        for (rank, thread) in ranks.into_iter().enumerate() {
            let ended = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            measured = match (measured, ended) {
                (Ok(_), Ok(timed)) if rank == 0 => Ok(timed),
                (measured, Ok(_)) => measured,
                (measured, Err(error)) => Err(first_cause(measured, error)),
            };
        }
        measured
    })
}

/// The first cause among the results of two ranks: an abort by another rank is no cause.
pub(crate) fn first_cause<T>(one: Result<T, PointError>, other: PointError) -> PointError {
    match one {
        Ok(_) | Err(PointError::Group(GroupError::Aborted(_))) => other,
        Err(error) => error,
    }
}

/// Period of the values of a rank: a prime, so that a chunk in a wrong place is detected.
const PERIOD: usize = 1021;
/// Minimum bytes that a sample copies: a single short copy is too fast to time.
const COPIED_MIN: usize = 16 << 20;

/// Returns the input value of a rank at a position: a small whole number, so that every sum is
/// exact.
pub fn value(rank: usize, at: usize) -> f32 {
    ((at % PERIOD * 7 + rank * 13) % 64) as f32
}

/// Sets `values[i] = value(start + i)`, for a value that repeats after 1021 elements.
pub fn fill(values: &mut [f32], start: usize, value: impl Fn(usize) -> f32) {
    let period: Vec<f32> = (start..start + PERIOD).map(value).collect();
    for piece in values.chunks_mut(PERIOD) {
        piece.copy_from_slice(&period[..piece.len()]);
    }
}

/// Returns true if [`fill`] would change nothing.
pub fn is_filled(values: &[f32], start: usize, value: impl Fn(usize) -> f32) -> bool {
    let period: Vec<f32> = (start..start + PERIOD).map(value).collect();
    values.chunks(PERIOD).all(|piece| *piece == period[..piece.len()])
}

/// Rank of a measurement, with its buffers.
pub struct Side<'a> {
    group: &'a mut ProcessGroup,
    kind: Kind,
    /// Buffer of the measured size, in whole parts.
    values: Vec<f32>,
    /// Buffer of the rank's part; empty if the collective has no parts.
    part: Vec<f32>,
    /// Destination of the copy on the first rank; empty on other ranks.
    copy: Vec<f32>,
}

impl<'a> Side<'a> {
    /// Creates the rank of a group.
    pub fn new(group: &'a mut ProcessGroup, point: &GridPoint) -> Self {
        let parts = match point.kind {
            Kind::AllReduce | Kind::Broadcast => 1,
            Kind::ReduceScatter | Kind::AllGather => point.ranks,
        };
        let part = point.bytes as usize / DType::F32.bytes() / parts;
        let part_length = if parts == 1 { 0 } else { part };
        let copy_length = if group.rank() == Rank(0) { part * parts } else { 0 };
        // Ones, not zeros: the system may not have allocated memory that was never written.
        let [values, part, copy] =
            [part * parts, part_length, copy_length].map(|length| vec![1.0; length]);
        Self { group, kind: point.kind, values, part, copy }
    }

    /// Checks the result of a call, and then measures; all ranks of the group do so concurrently,
    /// and get the same seconds.
    ///
    /// # Errors
    /// Returns the errors of [`measure`].
    pub fn run(mut self, sampling_plan: &SamplingPlan) -> Result<TimedCalls, PointError> {
        self.put_in();
        self.call()?;
        if !self.is_right() {
            self.group.abort("its result is wrong");
            return Err(PointError::Wrong(self.group.rank()));
        }
        // Sums of zeros are zeros.
        self.values.fill(0.0);
        self.part.fill(0.0);
        // Every rank gets the same seconds, so all make the same decision.
        let repeats =
            repeats(sampling_plan, |repeats| Ok::<_, PointError>(self.round(repeats)?.0))?;
        let mut timed = TimedCalls::default();
        let mut seconds = 0.0;
        while timed.calls.len() < sampling_plan.samples
            && (timed.calls.len() < SAMPLES_MIN || seconds < sampling_plan.figure_seconds_max)
        {
            let (calls, copy) = self.round(repeats)?;
            timed.calls.push(calls / repeats as f64);
            timed.copies.push(copy);
            seconds += calls;
        }
        Ok(timed)
    }

    /// Seconds of `repeats` calls on the slowest rank, and of a copy by the first.
    fn round(&mut self, repeats: usize) -> Result<(f64, f64), PointError> {
        self.group.barrier()?;
        let started = Instant::now();
        for _ in 0..repeats {
            self.call()?;
        }
        let calls = started.elapsed().as_secs_f64();
        // Waits for all ranks, so that the copy does not share the memory bandwidth.
        self.group.barrier()?;
        let mut seconds = [calls, self.copied()];
        self.group.all_reduce(&mut seconds, ReduceOp::Max)?;
        Ok(seconds.into())
    }

    /// Seconds of a copy of all values; 0 except on the first rank.
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

    /// Returns true if the result of the first call is right, to the bit.
    fn is_right(&self) -> bool {
        let rank = self.group.rank().index();
        let world = self.group.world_size();
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

/// Minimum number of rounds, regardless of their duration.
const SAMPLES_MIN: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Effort;

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
        let sampling_plan = Effort::Tiny.sampling_plan();
        for kind in Kind::ALL {
            for ranks in [2, 5] {
                let point = GridPoint { kind, ranks, bytes: 60 << 10 };
                let timed =
                    measure(&point, &sampling_plan).unwrap_or_else(|e| panic!("{point}: {e}"));
                assert_eq!(timed.calls.len(), timed.copies.len());
                assert!(timed.calls.len() >= SAMPLES_MIN);
                assert!(timed.calls.iter().chain(&timed.copies).all(|seconds| *seconds > 0.0));
            }
        }
        let all = GridPoint { kind: Kind::AllReduce, ranks: 8, bytes: 256 << 20 };
        assert_eq!(all.needs(8), 9 * (256 << 20) / 10 * 11);
    }
}
