//! Messages between the threads of a run: to the coordinator of a step, to ring threads and to
//! device threads.

use super::step::StepReport;
use potluck_core::Rank;
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::Readback;
use potluck_parallel::Vote;
use potluck_parallel::comm::{PooledBuffer, RingMsg, SharedBuffer};
use potluck_parallel::transfers::DeviceMsg;

/// Message from a rank to the coordinator of a step.
pub enum CoordinatorMsg {
    Vote(Vote),
    /// The rank's step has ended.
    Finished(Rank, Result<StepReport, DeviceError>),
}

/// Message to a ring thread.
pub(crate) type RankRingMsg = RingMsg<Readback>;

/// Message to a device thread during a step.
pub(crate) type DriverMsg = DeviceMsg<SharedBuffer, PooledBuffer>;
