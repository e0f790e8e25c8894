//! Packets between the ranks of a process group: values with the call to which they belong, and
//! control packets.

use std::fmt;

use super::wire::PayloadForm;
use crate::collective::CollectiveKind;
use crate::comm::exchange_driver::MessageValues;
use crate::comm::{BufferPool, Element, Message, PooledBuffer, SharedBuffer};
use potluck_core::{Position, Rank, Round};

/// Maximum number of free buffers that a rank keeps per element type.
const FREE_MAX: usize = 32;

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

/// Payload of one element type.
#[derive(Debug)]
pub enum TypedPayload<T: Element> {
    /// Message of an exchange.
    Message(Message<T>),
    Owned(PooledBuffer<T>),
    Shared(SharedBuffer<T>),
}

impl<T: Element> TypedPayload<T> {
    fn values(&self) -> &[T] {
        match self {
            Self::Message(message) => match &message.payload {
                MessageValues::Partial(values) => values,
                MessageValues::Final(values) => values,
            },
            Self::Owned(values) => values,
            Self::Shared(values) => values,
        }
    }

    fn form(&self) -> PayloadForm {
        match self {
            Self::Message(message) => PayloadForm::Chunk(message.kind, message.chunk),
            Self::Owned(_) => PayloadForm::Owned,
            Self::Shared(_) => PayloadForm::Shared,
        }
    }

    /// Turns values that arrived from a position into what was sent.
    fn into_form(self, form: PayloadForm, from: Position) -> Self {
        let Self::Owned(values) = self else { return self };
        match form {
            PayloadForm::Nothing | PayloadForm::Owned => Self::Owned(values),
            PayloadForm::Shared => Self::Shared(values.share()),
            PayloadForm::Chunk(kind, chunk) => {
                let payload = match kind {
                    CollectiveKind::ReduceScatter => MessageValues::Partial(values),
                    CollectiveKind::AllGather => MessageValues::Final(values.share()),
                };
                Self::Message(Message { kind, chunk, from, round: Round::default(), payload })
            }
        }
    }
}

/// Element type that packets carry and pools keep; every element type is one.
pub trait Transferable: Element {
    fn wrap(payload: TypedPayload<Self>) -> Payload;

    /// Returns the values, if they are of this type.
    fn unwrap(payload: Payload) -> Option<TypedPayload<Self>>;

    fn pool(pools: &Pools) -> &BufferPool<Self>;
}

/// Defines `Payload`, `Pools` and the `Transferable` implementations for a list of types.
macro_rules! for_each_type {
    ($($type:ident $variant:ident)*) => {
        /// Payload of any element type.
        #[derive(Debug)]
        pub enum Payload {
            /// No values, as in a barrier.
            Nothing,
            $($variant(TypedPayload<$type>),)*
        }

        /// Buffer pools of a rank, one per element type.
        pub struct Pools {
            $(pub $type: BufferPool<$type>,)*
        }

        impl Default for Pools {
            fn default() -> Self {
                Self { $($type: BufferPool::new(FREE_MAX),)* }
            }
        }

        impl Payload {
            /// Returns how the values are held, which says what they are for.
            pub fn form(&self) -> PayloadForm {
                match self {
                    Self::Nothing => PayloadForm::Nothing,
                    $(Self::$variant(values) => values.form(),)*
                }
            }

            /// Returns a place for as many elements of the type of this name; `None` if no type
            /// has it.
            pub fn place(element: &str, elements: usize, pools: &Pools) -> Option<Self> {
                match element {
                    $(<$type>::NAME => {
                        Some(Self::$variant(TypedPayload::Owned(pools.$type.take(elements))))
                    })*
                    _ => None,
                }
            }

            /// Returns the bytes of a place.
            pub fn place_bytes(&mut self) -> &mut [u8] {
                match self {
                    $(Self::$variant(TypedPayload::Owned(values)) => {
                        bytemuck::cast_slice_mut(values)
                    })*
                    _ => &mut [],
                }
            }

            /// Turns a place that was filled with what a position sent into that.
            pub fn into_form(self, form: PayloadForm, from: Position) -> Self {
                match self {
                    Self::Nothing => Self::Nothing,
                    $(Self::$variant(values) => Self::$variant(values.into_form(form, from)),)*
                }
            }
        }

        /// Bytes of the values as they are sent: little-endian.
        impl AsRef<[u8]> for Payload {
            fn as_ref(&self) -> &[u8] {
                match self {
                    Self::Nothing => &[],
                    $(Self::$variant(values) => bytemuck::cast_slice(values.values()),)*
                }
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
