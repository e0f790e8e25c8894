//! What travels between the threads of a run: to the coordinator of a step, to ring threads, to
//! drivers.

use std::sync::mpsc;

use super::step::StepReport;
use crate::base::{ChunkId, Rank};
use crate::collective::{Collective, CollectiveKind};
use crate::comm::{Message, SharedBuffer};
use crate::device::DeviceError;
use crate::exec::Piece;
use crate::parallel::{Verdict, Vote};

/// What a rank says to the coordinator of a step.
pub enum Said {
    Vote(Vote),
    /// Its part in the step is over.
    Ended(Rank, Result<StepReport, DeviceError>),
}

/// What a ring thread is told.
pub enum ToRing {
    /// A step begins. Whoever begins it says so to all rings before any rank runs.
    Restart,
    /// The rank's own values of a chunk are there: as a piece, or on the device only, which then
    /// adds them itself.
    Ready {
        kind: CollectiveKind,
        chunk: ChunkId,
        piece: Option<Piece>,
    },
    Message(Message),
}

/// What a driver is told.
pub enum ToDriver {
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
