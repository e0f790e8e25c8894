//! Benchmark of collectives between the ranks of several nodes. One rank leads: it broadcasts the
//! next measurement, and all others follow.

use std::thread;

use super::host::{GridPoint, PointError, Side, first_cause};
use super::{Kind, MIB, PointOutcome};
use crate::sample::Effort;
use crate::units::number;
use potluck_core::Rank;
use potluck_kernels::device::host::available_memory;
use potluck_parallel::comm::{GroupError, ProcessGroup, ReduceOp};

/// Most bytes of a buffer that a leader may request.
const BYTES_MAX: u64 = 1 << 30;
/// Words of an order: the index of the collective, bytes, and the index of the effort. In the order
/// to end, all bits of the first word are set.
type OrderWords = [u64; 3];
const END: OrderWords = [u64::MAX, 0, 0];

/// Leading rank of a benchmark.
pub(crate) struct Leader<'a> {
    group: &'a mut ProcessGroup,
    /// Ranks of this process.
    here: usize,
}

impl Leader<'_> {
    /// Measures a collective of all ranks. It is skipped if a process has too little memory.
    ///
    /// # Errors
    /// Returns `PointError` if the collective fails, which ends the group, and if its results are
    /// not right to the bit.
    pub fn measure(
        &mut self,
        point: &GridPoint,
        effort: Effort,
    ) -> Result<PointOutcome, PointError> {
        let kind = Kind::ALL.iter().position(|kind| *kind == point.kind).unwrap_or_default();
        let effort_index = Effort::ALL.iter().position(|one| *one == effort).unwrap_or_default();
        let leader = self.group.rank();
        self.group.broadcast(&mut [kind as u64, point.bytes, effort_index as u64], leader)?;
        measure(self.group, self.here, point, effort)
    }
}

/// Leads a benchmark with the first of the ranks of this process; its other ranks follow.
///
/// # Errors
/// Returns the first error of `work` and of the ranks of this process.
pub(crate) fn lead<T>(
    groups: Vec<ProcessGroup>,
    work: impl FnOnce(&mut Leader) -> Result<T, PointError>,
) -> Result<T, PointError> {
    let here = groups.len();
    let leader = match groups.first() {
        Some(group) => group.rank(),
        None => Rank(0),
    };
    with_ranks(groups, leader, |group| {
        let done = work(&mut Leader { group, here })?;
        group.broadcast(&mut END.clone(), leader)?;
        Ok(done)
    })
}

/// Follows a leader in another process with all ranks of this one, until it ends the benchmark.
///
/// # Errors
/// Returns the first error of the ranks of this process.
pub fn follow(
    groups: Vec<ProcessGroup>,
    leader: Rank,
    progress: &mut dyn FnMut(&str),
) -> Result<(), PointError> {
    let here = groups.len();
    with_ranks(groups, leader, |group| follow_on(group, here, leader, progress))
}

/// Runs `work` with the first of the ranks of this process, while the others follow.
fn with_ranks<T>(
    groups: Vec<ProcessGroup>,
    leader: Rank,
    work: impl FnOnce(&mut ProcessGroup) -> Result<T, PointError>,
) -> Result<T, PointError> {
    let here = groups.len();
    thread::scope(|scope| {
        let mut groups = groups.into_iter();
        let first = groups.next();
        let mut others = Vec::new();
        for mut group in groups {
            others.push(scope.spawn(move || follow_on(&mut group, here, leader, &mut |_| {})));
        }
        let mut ended = match first {
            // The handle is dropped here, so that the others end if this rank fails.
            Some(mut group) => work(&mut group),
            None => Err(PointError::Order(leader)),
        };
        for thread in others {
            let other = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            if let Err(error) = other {
                ended = Err(first_cause(ended, error));
            }
        }
        ended
    })
}

fn follow_on(
    group: &mut ProcessGroup,
    here: usize,
    leader: Rank,
    progress: &mut dyn FnMut(&str),
) -> Result<(), PointError> {
    loop {
        let mut words = END;
        group.broadcast(&mut words, leader)?;
        if words == END {
            return Ok(());
        }
        let Some((point, effort)) = order(words, group.world_size()) else {
            group.abort("it was asked for a measurement that there is not");
            return Err(PointError::Order(leader));
        };
        progress(&point.to_string());
        measure(group, here, &point, effort)?;
    }
}

/// Measurement of an order; `None` if the order is invalid.
fn order([kind, bytes, effort]: OrderWords, ranks: usize) -> Option<(GridPoint, Effort)> {
    let kind = *Kind::ALL.get(usize::try_from(kind).ok()?)?;
    let effort = *Effort::ALL.get(usize::try_from(effort).ok()?)?;
    if bytes > BYTES_MAX {
        return None;
    }
    Some((GridPoint { kind, ranks, bytes }, effort))
}

/// Measures on one rank, unless a process has too little memory.
fn measure(
    group: &mut ProcessGroup,
    here: usize,
    point: &GridPoint,
    effort: Effort,
) -> Result<PointOutcome, PointError> {
    let needs = point.needs(here);
    let missing = match available_memory() {
        Some(available) => needs.saturating_sub(available),
        None => 0,
    };
    // All ranks check their memory before one of them allocates.
    let mut most = [missing];
    group.all_reduce(&mut most, ReduceOp::Max)?;
    if most[0] > 0 {
        let mib = number(most[0].div_ceil(MIB) as f64);
        return Ok(PointOutcome::Skipped(format!("a node has {mib} MiB of memory too little")));
    }
    Ok(PointOutcome::Timed(Side::new(group, point).run(&effort.sampling_plan())?))
}

impl From<PointError> for potluck_train::TrainError {
    fn from(error: PointError) -> Self {
        match error {
            PointError::Group(GroupError::Defect { .. } | GroupError::Exchange(_))
            | PointError::Wrong(_) => Self::Defect(error.to_string()),
            other => Self::NodesLost { why: other.to_string() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_parallel::comm::init;

    #[test]
    fn followers_measure_what_the_leader_says_until_it_ends() {
        // Ranks 0 and 1 are one process, and rank 2 is another one.
        let mut first = init(3);
        let last = first.split_off(2);
        let point = GridPoint { kind: Kind::AllGather, ranks: 3, bytes: 48 << 10 };
        let mut seen = Vec::new();
        let (led, followed) = thread::scope(|scope| {
            let followed = scope.spawn(|| {
                let mut note = |what: &str| seen.push(what.to_string());
                follow(last, Rank(0), &mut note)
            });
            let led = lead(first, |leader| {
                let outcome = leader.measure(&point, Effort::Tiny)?;
                let PointOutcome::Timed(timed) = outcome else { panic!("no memory") };
                Ok(timed)
            });
            (led, followed.join().unwrap())
        });
        let timed = led.unwrap();
        assert!(followed.is_ok() && timed.calls.len() >= 3, "{timed:?}");
        assert_eq!(seen, ["all_gather of 48 KiB by 3 ranks"]);
    }

    #[test]
    fn an_order_that_there_is_not_ends_all() {
        assert!(order([0, 4096, 0], 2).is_some());
        for wrong in [[4, 4096, 0], [0, 4096, 3], [0, BYTES_MAX + 1, 0], [u64::MAX; 3]] {
            assert!(order(wrong, 2).is_none(), "{wrong:?}");
        }
        let mut groups = init(2);
        let other = vec![groups.remove(1)];
        let (led, followed) = thread::scope(|scope| {
            let followed = scope.spawn(|| follow(other, Rank(0), &mut |_| {}));
            let led = lead(groups, |leader| {
                leader.group.broadcast(&mut [9u64, 9, 9], Rank(0))?;
                Ok(leader.group.barrier()?)
            });
            (led, followed.join().unwrap())
        });
        assert!(matches!(followed, Err(PointError::Order(Rank(0)))), "{followed:?}");
        assert!(led.unwrap_err().to_string().contains("asked for a measurement"));
    }
}
