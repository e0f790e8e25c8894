//! Tracks of a rank in a trace.

use super::group_layout::WorkerGroupOptions;
use super::trace_labels::TraceLabels;
use potluck_core::Rank;
use potluck_core::metrics::Track;

/// Tracks of one rank in a trace.
#[derive(Clone, Debug, Default)]
pub struct TraceTracks {
    pub driver: Track,
    pub device: Track,
    pub staging: Track,
    pub ring: Track,
    /// Names of sent and received tensors.
    pub labels: TraceLabels,
}

impl TraceTracks {
    /// Creates the tracks of a rank's device thread and device, and `with_others` also of its
    /// transfers and its ring thread.
    pub fn of(options: &WorkerGroupOptions, rank: Rank, device: &str, with_others: bool) -> Self {
        let WorkerGroupOptions { trace: Some(trace), labels, .. } = options else {
            return Self::default();
        };
        let device = labels.device(rank, device);
        let track = |name: &str| trace.track(rank.0, &device, name);
        let driver = track("driver");
        let of_device = track("device");
        if !with_others {
            return Self { driver, device: of_device, ..Self::default() };
        }
        Self {
            driver,
            device: of_device,
            staging: track("staging"),
            ring: track("ring"),
            labels: labels.clone(),
        }
    }
}
