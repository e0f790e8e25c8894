//! Messages between the threads of a run: to the coordinator of a step, to ring threads and to
//! device threads.

use super::step::StepReport;
use crate::base::Rank;
use crate::comm::{PooledBuffer, RingMsg, SharedBuffer};
use crate::device::DeviceError;
use crate::exec::Readback;
use crate::parallel::Vote;
use crate::parallel::transfers::DeviceMsg;

/// Message from a rank to the coordinator of a step.
pub enum CoordinatorMsg {
    Vote(Vote),
    /// The rank's step has ended.
    Finished(Rank, Result<StepReport, DeviceError>),
}

/// Message to a ring thread.
pub type RankRingMsg = RingMsg<Readback>;

/// Message to a device thread during a step.
pub type DriverMsg = DeviceMsg<SharedBuffer, PooledBuffer>;
