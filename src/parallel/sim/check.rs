//! Invariants that must hold after every run, whatever faults were injected.

use super::reference::reference;
use super::report::{End, RankReport, SimulationReport};
use super::scenario::Scenario;
use super::values::Buckets;

/// Checks a run against its scenario:
///
/// - no live rank waits for ever, and none changed a parameter in a step before all had voted;
/// - all live ranks ended alike: completed, or failed with the same rank and reason; and only a
///   rank with an injected fault is named;
/// - if they completed, each holds the bits of [`reference()`] after the last step, of the buckets
///   that it holds;
/// - if they failed, every element of each has the bits after the last step that it finished, or
///   after the next one, which all had voted for; or, if all-gathers run in the next step, after
///   the previous one.
///
/// # Errors
/// Returns a description of the first invariant that does not hold.
pub fn check(scenario: &Scenario, report: &SimulationReport) -> Result<(), String> {
    if let Some(violation) = report.violations.first() {
        return Err(violation.clone());
    }
    let mut first = None;
    for rank in &report.ranks {
        if !rank.is_live {
            continue;
        }
        let other = &rank.end;
        let first = *first.get_or_insert(other);
        if first != other {
            return Err(format!("live ranks end unlike: {first:?} and {other:?}"));
        }
    }
    let Some(first) = first else { return Ok(()) };
    let is_completed = match first {
        None => return Err("a live rank has no end".into()),
        Some(End::Completed) => true,
        Some(End::Failed { rank, why }) => {
            if why.is_empty() || !scenario.may_end(*rank) {
                return Err(format!("{rank} is reported as failed ({why}), and did not fail"));
            }
            false
        }
    };
    if scenario.values.is_none() {
        return Ok(());
    }
    let after = reference(scenario);
    let behind = u64::from(scenario.spread.is_some() && !is_completed);
    for (rank, report) in report.ranks.iter().enumerate() {
        if report.is_live {
            has_the_bits(report, is_completed, behind, &after)
                .map_err(|why| format!("rank {rank}: {why}"))?;
        }
    }
    Ok(())
}

/// Compares the parameters of a rank with the reference parameters after each step. Parameters that
/// it does not own may be `behind` steps old.
fn has_the_bits(
    rank: &RankReport,
    is_completed: bool,
    behind: u64,
    after: &[Buckets],
) -> Result<(), String> {
    let finished = rank.finished as usize;
    if is_completed && finished + 1 != after.len() {
        return Err(format!("completed with {finished} of {} steps", after.len() - 1));
    }
    let next = if is_completed { finished } else { (finished + 1).min(after.len() - 1) };
    for (bucket, values) in rank.parameters.iter().enumerate() {
        let first = finished.saturating_sub(behind as usize);
        for (index, value) in values.iter().enumerate() {
            let bits = value.to_bits();
            if !after[first..=next].iter().any(|step| step[bucket][index].to_bits() == bits) {
                let expected = after[next][bucket][index];
                return Err(format!(
                    "element {index} of bucket {bucket} is {value:?}, not {expected:?}, \
                     after {finished} finished steps"
                ));
            }
        }
    }
    Ok(())
}
