//! Check of micro-batches for the statistics of batch normalization.

use crate::runtime::RuntimeError;
use potluck_core::format::counted;
use potluck_core::{Setting, Wording};
use potluck_graph::Plan;
use potluck_parallel::Program;

/// Checks that the micro-batches of a model with batch normalization are large enough for
/// statistics. Returns a note if some have fewer samples than [`Plan::rows_min`].
///
/// # Errors
/// Returns `RuntimeError::Unplaceable` if a micro-batch has only one value per channel, with
/// variance 0, as in PyTorch.
pub(crate) fn require_statistics<'p>(
    plan: &Plan,
    programs: impl Iterator<Item = &'p Program>,
) -> Result<Option<String>, RuntimeError> {
    let Some(values) = plan.graph.normalized_values_min() else { return Ok(None) };
    let mut all_rows = Vec::new();
    for program in programs {
        all_rows.extend(program.micro_batches.iter().map(|micro_batch| micro_batch.rows));
    }
    let Some(&rows) = all_rows.iter().min() else { return Ok(None) };
    let advice = Wording::new(format_args!(
        "raise {} or {}, take fewer devices, or {}",
        Setting::MicroBatchSize,
        Setting::Batch,
        Setting::GroupNorm
    ));
    if rows == 1 && values == 1 {
        return Err(RuntimeError::unplaceable(format_args!(
            "batch normalization of a micro-batch of 1 sample would have one value per channel, \
             whose variance is zero; {advice}"
        )));
    }
    let least = plan.rows_min();
    if rows >= least {
        return Ok(None);
    }
    Ok(Some(format!(
        "batch normalization takes its statistics from micro-batches of as few as {}, and those \
         of fewer than {least} are noisy; {advice}",
        counted(rows as usize, "sample", "samples")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_graph::{Builder, PlanOptions};
    use potluck_parallel::{Share, data_parallel};

    fn required(places: usize, counts: &[u32], micro_batch: u32) -> Result<Option<String>, String> {
        let mut b = Builder::new();
        let x = b.input("x", &[1, places, 3]);
        let y = b.batch_norm("norm", x).unwrap();
        b.output("y", y);
        let plan = Plan::new(b.finish(), PlanOptions::new(8));
        let share = |count: &u32| Share { first: 0, count: *count, micro_batch };
        let programs = counts.iter().map(|count| data_parallel(&plan, share(count), true));
        let programs: Vec<_> = programs.collect();
        require_statistics(&plan, programs.iter()).map_err(|error| error.to_string())
    }

    #[test]
    fn one_value_is_refused_and_few_are_noted() {
        assert_eq!(required(4, &[8, 16], 8), Ok(None));
        let note = required(4, &[8, 2], 8).unwrap().unwrap();
        assert!(note.contains("as few as 2 samples"), "{note}");
        assert!(required(1, &[8, 2], 8).unwrap().is_some());
        assert!(required(2, &[9], 1).unwrap().is_some());
        let error = required(1, &[9], 1).unwrap_err();
        assert!(error.contains("one value per channel"), "{error}");
    }
}
