//! What threads of a group hand to each other: values with the call that they belong to.

use std::fmt;

use crate::base::Rank;
use crate::comm::{BufferPool, Element, Message, PooledBuffer, SharedBuffer};

/// Free boxes that a rank keeps of each type.
const FREE_MAX: usize = 32;

/// Which collective was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallKind {
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
    /// Point to point: these are not counted among the collectives.
    Send {
        dst: Rank,
    },
    Recv {
        src: Rank,
    },
}

/// A call as all ranks must make it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectiveCall {
    pub kind: CallKind,
    /// The operation's name; nothing where nothing is reduced.
    pub op: &'static str,
    /// The type's name.
    pub element: &'static str,
    /// Elements, of what is the same length on all ranks.
    pub length: usize,
}

impl CollectiveCall {
    pub fn new<T: Element>(kind: CallKind, length: usize) -> Self {
        Self { kind, op: "", element: T::NAME, length }
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
            CallKind::Send { dst } => write!(f, "send(to {dst})")?,
            CallKind::Recv { src } => write!(f, "recv(from {src})")?,
        }
        write!(f, " of {length} {element}")
    }
}

/// Values of one type.
#[derive(Debug)]
pub enum TypedPayload<T: Element> {
    /// Of an exchange.
    Message(Message<T>),
    Owned(PooledBuffer<T>),
    Shared(SharedBuffer<T>),
}

/// An element whose values packets carry and pools keep: all of them are.
pub trait Transferable: Element {
    fn wrap(payload: TypedPayload<Self>) -> Payload;

    /// The values, if they are of this type.
    fn unwrap(payload: Payload) -> Option<TypedPayload<Self>>;

    fn pool(pools: &Pools) -> &BufferPool<Self>;
}

/// What is between the two brackets, for each type.
macro_rules! for_each_type {
    ($($type:ident $variant:ident)*) => {
        /// Values of any type.
        #[derive(Debug)]
        pub enum Payload {
            /// A sign without values.
            Nothing,
            $($variant(TypedPayload<$type>),)*
        }

        /// A rank's free boxes.
        pub struct Pools {
            $(pub $type: BufferPool<$type>,)*
        }

        impl Default for Pools {
            fn default() -> Self {
                Self { $($type: BufferPool::new(FREE_MAX),)* }
            }
        }

        $(
            impl Transferable for $type {
                fn wrap(payload: TypedPayload<Self>) -> Payload {
                    Payload::$variant(payload)
                }

                fn unwrap(payload: Payload) -> Option<TypedPayload<Self>> {
                    match payload {
                        Payload::$variant(payload) => Some(payload),
                        _ => None,
                    }
                }

                fn pool(pools: &Pools) -> &BufferPool<Self> {
                    &pools.$type
                }
            }
        )*
    };
}

for_each_type!(f32 F32 f64 F64 i32 I32 u32 U32 i64 I64 u64 U64);

/// What is in a packet.
#[derive(Debug)]
pub enum PacketKind {
    /// Values for the collective of this number.
    Collective { number: u64, call: CollectiveCall, payload: Payload, is_credited: bool },
    /// Values of a send.
    Direct { call: CollectiveCall, payload: Payload },
    /// One more packet, of a send or of a collective, may be sent to whom this comes from.
    Credit { is_direct: bool },
    /// The sender has been waiting in this collective for a while.
    Waiting { number: u64, call: CollectiveCall },
    /// The last [`PacketKind::Waiting`] was read.
    WaitingAck,
    /// The sender's handle is gone.
    Left { panicked: bool },
}

/// What travels from thread to thread.
#[derive(Debug)]
pub struct Packet {
    pub from: Rank,
    pub kind: PacketKind,
}
