//! Payloads of packets: values of any element type, and the pools of their buffers.

use crate::collective::CollectiveKind;
use crate::comm::exchange_driver::MessageValues;
use crate::comm::{BufferPool, Element, Message, PooledBuffer, SharedBuffer};
use potluck_core::{ChunkId, Position, Round};

/// Maximum number of free buffers that a rank keeps per element type.
const FREE_MAX: usize = 32;

/// Form in which a packet holds its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadForm {
    Nothing,
    Owned,
    Shared,
    /// Partial sum or final values of a chunk of an exchange.
    Chunk(CollectiveKind, ChunkId),
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

    /// Converts values that arrived from a position into the form in which they were sent.
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
    /// Returns values of this type as the payload of a packet.
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
            /// Returns the form of the values, which identifies their use.
            pub fn form(&self) -> PayloadForm {
                match self {
                    Self::Nothing => PayloadForm::Nothing,
                    $(Self::$variant(values) => values.form(),)*
                }
            }

            /// Returns a place for `elements` of the type of this name; `None` for an unknown name.
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

            /// Converts a place, filled with the values from a position, into the sent form.
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
