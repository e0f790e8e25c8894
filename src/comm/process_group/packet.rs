//! What threads of a group hand to each other: values with the call that they belong to.

use std::fmt;

use crate::base::Rank;
use crate::comm::{Element, Message, Pool, Shared, Values};

/// Free boxes that a rank keeps of each type.
const FREE_MAX: usize = 32;

/// Which collective was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
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
pub struct Call {
    pub kind: Kind,
    /// The operation's name; nothing where nothing is reduced.
    pub op: &'static str,
    /// The type's name.
    pub element: &'static str,
    /// Elements, of what is the same length on all ranks.
    pub length: usize,
}

impl Call {
    pub fn new<T: Element>(kind: Kind, length: usize) -> Self {
        Self { kind, op: "", element: T::NAME, length }
    }

    pub fn barrier() -> Self {
        Self { kind: Kind::Barrier, op: "", element: "", length: 0 }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, op, element, length } = self;
        match kind {
            Kind::AllReduce => write!(f, "all_reduce({op})")?,
            Kind::Reduce { dst } => write!(f, "reduce({op}, to {dst})")?,
            Kind::Broadcast { src } => write!(f, "broadcast(from {src})")?,
            Kind::Gather { dst } => write!(f, "gather(to {dst})")?,
            Kind::Scatter { src } => write!(f, "scatter(from {src})")?,
            Kind::AllGather => write!(f, "all_gather")?,
            Kind::ReduceScatter => write!(f, "reduce_scatter({op})")?,
            Kind::Barrier => return write!(f, "barrier"),
            Kind::Send { dst } => write!(f, "send(to {dst})")?,
            Kind::Recv { src } => write!(f, "recv(from {src})")?,
        }
        write!(f, " of {length} {element}")
    }
}

/// Values of one type.
#[derive(Debug)]
pub enum Load<T: Element> {
    /// Of an exchange.
    Message(Message<T>),
    Values(Values<T>),
    Shared(Shared<T>),
}

/// An element whose values packets carry and pools keep: all of them are.
pub trait Transferable: Element {
    fn wrap(load: Load<Self>) -> Body;

    /// The values, if they are of this type.
    fn unwrap(body: Body) -> Option<Load<Self>>;

    fn pool(pools: &Pools) -> &Pool<Self>;
}

/// What is between the two brackets, for each type.
macro_rules! for_each_type {
    ($($type:ident $variant:ident)*) => {
        /// Values of any type.
        #[derive(Debug)]
        pub enum Body {
            /// A sign without values.
            Nothing,
            $($variant(Load<$type>),)*
        }

        /// A rank's free boxes.
        pub struct Pools {
            $(pub $type: Pool<$type>,)*
        }

        impl Default for Pools {
            fn default() -> Self {
                Self { $($type: Pool::new(FREE_MAX),)* }
            }
        }

        $(
            impl Transferable for $type {
                fn wrap(load: Load<Self>) -> Body {
                    Body::$variant(load)
                }

                fn unwrap(body: Body) -> Option<Load<Self>> {
                    match body {
                        Body::$variant(load) => Some(load),
                        _ => None,
                    }
                }

                fn pool(pools: &Pools) -> &Pool<Self> {
                    &pools.$type
                }
            }
        )*
    };
}

for_each_type!(f32 F32 f64 F64 i32 I32 u32 U32 i64 I64 u64 U64);

/// What is in a packet.
#[derive(Debug)]
pub enum Content {
    /// Values for the collective of this number.
    Collective { number: u64, call: Call, body: Body, is_credited: bool },
    /// Values of a send.
    Direct { call: Call, body: Body },
    /// One more packet, of a send or of a collective, may be sent to whom this comes from.
    Credit { is_direct: bool },
    /// The sender has been waiting in this collective for a while.
    Waiting { number: u64, call: Call },
    /// The last [`Content::Waiting`] was read.
    Read,
    /// The sender's handle is gone.
    Left { panicked: bool },
}

/// What travels from thread to thread.
#[derive(Debug)]
pub struct Packet {
    pub from: Rank,
    pub content: Content,
}
