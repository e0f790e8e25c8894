//! Messages between the threads of a run: to the coordinator of a step, to ring threads and to
//! device threads.

use std::sync::mpsc;

use super::step::StepReport;
use crate::base::{ChunkId, Rank};
use crate::collective::{Collective, CollectiveKind};
use crate::comm::{Message, SharedBuffer};
use crate::device::DeviceError;
use crate::exec::Readback;
use crate::parallel::{Verdict, Vote};

/// Message from a rank to the coordinator of a step.
pub enum CoordinatorMsg {
    Vote(Vote),
    /// The rank's step has ended.
    Finished(Rank, Result<StepReport, DeviceError>),
}

/// Message to a ring thread.
pub enum RingMsg {
    /// A step begins. The coordinator sends this to all ring threads before any rank runs.
    Restart,
    /// The rank's own values of a chunk are available: in `readback`, or without one on the
    /// device only, which then adds them itself.
    Ready {
        kind: CollectiveKind,
        chunk: ChunkId,
        readback: Option<Readback>,
    },
    Message(Message),
}

/// Message to a device thread during a step.
pub enum DriverMsg {
    /// The sum over all ranks of a chunk that this rank owns.
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
    /// Request to add the device's own values of a chunk to a partial sum and send the result to
    /// `reply`.
    Add {
        chunk: ChunkId,
        partial: Vec<f32>,
        reply: mpsc::SyncSender<Vec<f32>>,
    },
    Done(Collective),
    Decided(Verdict),
}
