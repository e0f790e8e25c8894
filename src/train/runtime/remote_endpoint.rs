//! Seat of a rank of another node in a worker group.

use super::step::StepInput;
use potluck_core::Round;
use potluck_kernels::device::DeviceError;
use potluck_parallel::Verdict;
use potluck_parallel::coordinator::RankActivity;

/// Rank of another node.
pub trait RemoteEndpoint: Send + Sync {
    /// Begins a step of the rank, whose vote and end are sent to the coordinator's mailbox.
    ///
    /// # Errors
    /// Returns `DeviceError` if the node is lost.
    fn submit(&self, input: &StepInput) -> Result<(), DeviceError>;

    /// Announces the verdict on a round.
    fn decide(&self, round: Round, verdict: &Verdict);

    /// Ends the step of the rank, and with it the group.
    fn abort(&self, why: &str);

    /// Returns the activity of the rank with this number of heartbeats of its device.
    fn activity(&self, heartbeats: u64) -> RankActivity;
}
