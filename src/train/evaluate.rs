//! Evaluation: the loss on the validation split, by forward passes over windows that do not
//! overlap.

use std::sync::Arc;

use super::error::TrainError;
use super::loader::BatchSource;
use crate::data::Split;
use crate::device::DeviceError;
use crate::exec::Executor;
use crate::runtime::step::{Inputs, forward, load};
use crate::runtime::workers::WorkerGroup;

/// The most micro-batches whose losses a device sums in f32; the host sums those sums in f64.
const BATCHES_PER_SUM: usize = 16;

/// Returns the summed loss of `batches`, which are (rows, inputs), and the number of targets it
/// counts.
pub fn evaluate(
    device: &mut dyn Executor,
    batches: impl Iterator<Item = (usize, Inputs)>,
) -> Result<(f64, f64), DeviceError> {
    device.begin_step()?;
    for (rows, inputs) in batches {
        load(device, &inputs, 0)?;
        forward(device, rows)?;
    }
    device.loss()
}

/// Returns the mean loss over the non-overlapping windows of a split, which are divided among the
/// ranks like a batch: `rows` are the most samples that each rank runs at a time, `weights` their
/// shares.
///
/// # Errors
/// Returns `TrainError` if a device fails.
pub fn evaluate_split(
    group: &WorkerGroup,
    source: &BatchSource,
    rows: &[u32],
    weights: &[u32],
    split: Split,
) -> Result<f64, TrainError> {
    let starts = source.data.evaluation_windows(split, source.model.context);
    let parts: Arc<Vec<Vec<u64>>> = Arc::new(share_out(&starts, weights));
    let (source, rows) = (source.clone(), rows.to_vec());
    let sums = group.run_on_all("an evaluation", move |rank, device| {
        let rows = rows[rank.index()].max(1) as usize;
        let (mut sum, mut count) = (0.0, 0.0);
        for job in parts[rank.index()].chunks(rows * BATCHES_PER_SUM) {
            let batches =
                job.chunks(rows).map(|c| (c.len(), source.windows(split, c.iter().copied())));
            let (loss, targets) = evaluate(device, batches)?;
            sum += loss;
            count += targets;
        }
        Ok((sum, count))
    })?;
    let total = sums.iter().fold((0.0, 0.0), |all, of| (all.0 + of.0, all.1 + of.1));
    Ok(total.0 / total.1)
}

/// Cuts the windows into consecutive parts in proportion to weights.
fn share_out(starts: &[u64], weights: &[u32]) -> Vec<Vec<u64>> {
    let total: u64 = weights.iter().map(|weight| u64::from(*weight)).sum();
    let (mut seen, mut from) = (0, 0);
    let part = |weight: &u32| {
        seen += u64::from(*weight);
        let to = (starts.len() as u64 * seen / total.max(1)) as usize;
        let part = starts[from..to].to_vec();
        from = to;
        part
    };
    weights.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_window_is_evaluated_once_by_someone() {
        let starts: Vec<u64> = (0..10).collect();
        let parts = share_out(&starts, &[7, 0, 3]);
        assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), [7, 0, 3]);
        for weights in [vec![1], vec![1, 1, 1], vec![5, 90, 1]] {
            assert_eq!(share_out(&starts, &weights).concat(), starts, "{weights:?}");
        }
    }
}
