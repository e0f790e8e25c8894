//! Packets between the ranks of a process group: values with the call to which they belong, and
//! control packets.

use std::fmt;

use super::payload::Payload;
use crate::comm::Element;
use potluck_core::{Position, Rank};

/// Kind of a call, with its root or peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallKind {
    AllReduce,
    Reduce {
        dst: Rank,
    },
    Broadcast {
        src: Rank,
    },
    Gather {
        dst: Rank,
    },
    Scatter {
        src: Rank,
    },
    AllGather,
    ReduceScatter,
    Barrier,
    Split,
    NewGroup,
    /// Point-to-point calls, this and `Recv`, are not counted among the collectives.
    Send {
        dst: Rank,
    },
    Recv {
        src: Rank,
    },
}

/// Signature of a call, which must be equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CollectiveCall {
    pub kind: CallKind,
    /// Name of the reduction; empty for calls without one.
    pub op: &'static str,
    /// Name of the element type; empty for a barrier.
    pub element: &'static str,
    /// Number of elements in the buffer that has the same length on all ranks.
    pub length: usize,
}

impl CollectiveCall {
    pub fn new<T: Element>(kind: CallKind, length: usize) -> Self {
        Self { kind, op: "", element: T::NAME, length }
    }

    /// Returns the call that creates groups, which exchanges `length` words.
    pub fn of_groups(kind: CallKind, length: usize) -> Self {
        Self { kind, op: "", element: "", length }
    }

    pub fn barrier() -> Self {
        Self { kind: CallKind::Barrier, op: "", element: "", length: 0 }
    }
}

impl fmt::Display for CollectiveCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, op, element, length } = self;
        match kind {
            CallKind::AllReduce => write!(f, "all_reduce({op})")?,
            CallKind::Reduce { dst } => write!(f, "reduce({op}, to {dst})")?,
            CallKind::Broadcast { src } => write!(f, "broadcast(from {src})")?,
            CallKind::Gather { dst } => write!(f, "gather(to {dst})")?,
            CallKind::Scatter { src } => write!(f, "scatter(from {src})")?,
            CallKind::AllGather => write!(f, "all_gather")?,
            CallKind::ReduceScatter => write!(f, "reduce_scatter({op})")?,
            CallKind::Barrier => return write!(f, "barrier"),
            CallKind::Split => return write!(f, "split"),
            CallKind::NewGroup => return write!(f, "new_group"),
            CallKind::Send { dst } => write!(f, "send(to {dst})")?,
            CallKind::Recv { src } => write!(f, "recv(from {src})")?,
        }
        write!(f, " of {length} {element}")
    }
}

/// Content of a packet.
#[derive(Debug)]
pub(crate) enum PacketKind {
    /// Values for the collective of this number.
    Collective { number: u64, call: CollectiveCall, payload: Payload, is_credited: bool },
    /// Values of a send.
    Direct { call: CollectiveCall, payload: Payload },
    /// Returned credit: the receiver may send one more packet, of a `send` (`is_direct`) or of a
    /// collective, to the sender of this one.
    Credit { is_direct: bool },
    /// Waiting notice: the sender has been waiting in this collective for a while.
    Waiting { number: u64, call: CollectiveCall },
    /// Acknowledgement of the last [`PacketKind::Waiting`].
    WaitingAck,
    /// The sender's handle was dropped.
    Left { panicked: bool },
}

/// Packet from one rank of the group to another.
#[derive(Debug)]
pub(crate) struct Packet {
    /// Position of the sender.
    pub from: Position,
    pub kind: PacketKind,
}
