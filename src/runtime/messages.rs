//! What travels between the threads of a run: to the coordinator of a step, to ring threads, to
//! drivers.

use std::sync::mpsc;

use super::step::StepReport;
use crate::base::{ChunkId, Rank};
use crate::collective::{Collective, CollectiveKind};
use crate::comm::{Message, SharedBuffer};
use crate::device::DeviceError;
use crate::exec::Readback;
use crate::parallel::{Verdict, Vote};

/// What a rank says to the coordinator of a step.
pub enum CoordinatorMsg {
    Vote(Vote),
    /// Its part in the step is over.
    Finished(Rank, Result<StepReport, DeviceError>),
}

/// What a ring thread is told.
pub enum RingMsg {
    /// A step begins. Whoever begins it says so to all rings before any rank runs.
    Restart,
    /// The rank's own values of a chunk are there: as a piece, or on the device only, which then
    /// adds them itself.
    Ready {
        kind: CollectiveKind,
        chunk: ChunkId,
        readback: Option<Readback>,
    },
    Message(Message),
}

/// What a driver is told.
pub enum DriverMsg {
    /// A chunk that the rank owns is summed over all ranks.
    Reduced {
        chunk: ChunkId,
        sum: SharedBuffer,
        squares: f64,
        not_finite: u64,
    },
    /// The final values of a chunk that another rank owns.
    Gathered {
        chunk: ChunkId,
        values: SharedBuffer,
    },
    /// The device is to add its own values of a chunk to a partial sum.
    Add {
        chunk: ChunkId,
        partial: Vec<f32>,
        reply: mpsc::SyncSender<Vec<f32>>,
    },
    Done(Collective),
    Announced(Verdict),
}
