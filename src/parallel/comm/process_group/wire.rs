//! Headers of packets to ranks of other processes: fixed in size, followed by the bytes of the
//! values, whose number can be checked against the header.

use super::limits::{CHUNK_BYTES, TREE_BYTES};
use super::packet::{CallKind, CollectiveCall, PacketKind};
use super::payload::{Payload, PayloadForm};
use crate::collective::{CollectiveKind, ring_chunk_length};
use crate::comm::Element;
use potluck_core::{ChunkId, Position, Rank};

/// Bytes of an encoded header.
pub(crate) const PACKET_HEADER_BYTES: usize = 40;
/// Maximum number of bytes of the reason of an abort.
pub(crate) const REASON_BYTES_MAX: usize = 1 << 10;

/// Kinds of packets on the wire.
const COLLECTIVE: u8 = 1;
const CREDITED: u8 = 2;
const DIRECT: u8 = 3;
const CREDIT: u8 = 4;
const DIRECT_CREDIT: u8 = 5;
const WAITING: u8 = 6;
const WAITING_ACK: u8 = 7;
const LEFT: u8 = 8;
const PANICKED: u8 = 9;
const ABORT: u8 = 10;

/// Forms of payloads on the wire.
const NOTHING: u8 = 0;
const OWNED: u8 = 1;
const SHARED: u8 = 2;
const PARTIAL: u8 = 3;
const FINAL: u8 = 4;

/// Names on the wire, by number.
const OPS: [&str; 7] = ["", "sum", "mean", "max", "min", "user", WEIGHTS];
const ELEMENTS: [&str; 7] = ["", f32::NAME, f64::NAME, i32::NAME, u32::NAME, i64::NAME, u64::NAME];
/// Name of the reduction of the weights of a mean.
pub(crate) const WEIGHTS: &str = "weights of a mean";

/// Content of a packet without its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PacketContent {
    Collective {
        number: u64,
        call: CollectiveCall,
        form: PayloadForm,
        is_credited: bool,
    },
    Direct {
        call: CollectiveCall,
        form: PayloadForm,
    },
    Credit {
        is_direct: bool,
    },
    Waiting {
        number: u64,
        call: CollectiveCall,
    },
    WaitingAck,
    Left {
        panicked: bool,
    },
    /// All groups of a rank are over; the values are the bytes of the reason.
    Abort {
        rank: Rank,
    },
}

/// Header of a packet to a rank of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PacketHeader {
    /// Group, and in it the positions of sender and receiver; 0 for an abort, which is for all.
    pub group: u64,
    pub from: Position,
    pub to: Position,
    pub content: PacketContent,
}

impl PacketContent {
    /// Divides a packet into its content and its values.
    pub fn divide(kind: PacketKind) -> (Self, Payload) {
        match kind {
            PacketKind::Collective { number, call, payload, is_credited } => {
                let form = payload.form();
                (Self::Collective { number, call, form, is_credited }, payload)
            }
            PacketKind::Direct { call, payload } => {
                (Self::Direct { call, form: payload.form() }, payload)
            }
            PacketKind::Credit { is_direct } => (Self::Credit { is_direct }, Payload::Nothing),
            PacketKind::Waiting { number, call } => {
                (Self::Waiting { number, call }, Payload::Nothing)
            }
            PacketKind::WaitingAck => (Self::WaitingAck, Payload::Nothing),
            PacketKind::Left { panicked } => (Self::Left { panicked }, Payload::Nothing),
        }
    }

    /// Joins content and values from a position to a packet; `None` for an abort, which is no
    /// packet of a rank.
    pub fn join(self, values: Payload, from: Position) -> Option<PacketKind> {
        Some(match self {
            Self::Collective { number, call, form, is_credited } => {
                let payload = values.into_form(form, from);
                PacketKind::Collective { number, call, payload, is_credited }
            }
            Self::Direct { call, form } => {
                PacketKind::Direct { call, payload: values.into_form(form, from) }
            }
            Self::Credit { is_direct } => PacketKind::Credit { is_direct },
            Self::Waiting { number, call } => PacketKind::Waiting { number, call },
            Self::WaitingAck => PacketKind::WaitingAck,
            Self::Left { panicked } => PacketKind::Left { panicked },
            Self::Abort { .. } => return None,
        })
    }

    /// Returns true if the packet has a payload of values, which may be empty.
    pub(crate) fn holds_values(&self) -> bool {
        match self {
            Self::Collective { form, .. } | Self::Direct { form, .. } => {
                *form != PayloadForm::Nothing
            }
            _ => false,
        }
    }

    /// Returns the element type of the values, by name, and their number, if a packet of this
    /// content can have `bytes` of values in a group of `size` ranks. They fit into 256 KiB.
    pub fn place(&self, size: u32, bytes: usize) -> Option<(&'static str, usize)> {
        let (call, form) = match self {
            Self::Collective { call, form, .. } => {
                if matches!(call.kind, CallKind::Send { .. } | CallKind::Recv { .. }) {
                    return None;
                }
                (call, *form)
            }
            Self::Direct { call, form } => {
                if !matches!(call.kind, CallKind::Send { .. }) {
                    return None;
                }
                (call, *form)
            }
            _ if bytes == 0 => return Some(("", 0)),
            _ => return None,
        };
        let element = call.sent_element();
        if form == PayloadForm::Nothing {
            return if bytes == 0 && call.sends_nothing() { Some((element, 0)) } else { None };
        }
        let each = bytes_of(element)?;
        let elements = bytes / each;
        let fits = bytes.is_multiple_of(each) && call.sends(form, elements, each, size);
        if fits { Some((element, elements)) } else { None }
    }
}

fn bytes_of(element: &str) -> Option<usize> {
    match element {
        "f32" | "i32" | "u32" => Some(4),
        "f64" | "i64" | "u64" => Some(8),
        _ => None,
    }
}

impl CollectiveCall {
    /// Name of the element type that the packets of the call hold.
    fn sent_element(&self) -> &'static str {
        match self.kind {
            CallKind::Split | CallKind::NewGroup => i64::NAME,
            _ => self.element,
        }
    }

    fn sends_nothing(&self) -> bool {
        let is_ring = matches!(
            self.kind,
            CallKind::ReduceScatter | CallKind::AllGather | CallKind::Split | CallKind::NewGroup
        );
        matches!(self.kind, CallKind::Barrier) || is_ring && self.length == 0
    }

    /// Returns true if a packet of the call may hold `elements`, of `each` bytes, in this form.
    fn sends(&self, form: PayloadForm, elements: usize, each: usize, size: u32) -> bool {
        let chunk_max = CHUNK_BYTES / each;
        let is_tree = self.length.checked_mul(each).is_some_and(|bytes| bytes <= TREE_BYTES);
        let total = match self.kind {
            CallKind::AllReduce => Some(self.length),
            _ => self.length.checked_mul(size as usize),
        };
        let is_chunk = |chunk| match total {
            Some(total) => ring_chunk_length(size, total, chunk_max, chunk) == Some(elements),
            None => false,
        };
        // Parts of a call's values are full except for the last one.
        let is_part = if self.length <= chunk_max {
            elements == self.length
        } else {
            elements == chunk_max || elements > 0 && elements == self.length % chunk_max
        };
        match (self.kind, form) {
            (CallKind::AllReduce, PayloadForm::Owned | PayloadForm::Shared) => {
                is_tree && elements == self.length
            }
            (CallKind::AllReduce, PayloadForm::Chunk(_, chunk)) => !is_tree && is_chunk(chunk),
            (CallKind::ReduceScatter, PayloadForm::Chunk(kind, chunk)) => {
                kind == CollectiveKind::ReduceScatter && is_chunk(chunk)
            }
            (
                CallKind::AllGather | CallKind::Split | CallKind::NewGroup,
                PayloadForm::Chunk(kind, chunk),
            ) => kind == CollectiveKind::AllGather && is_chunk(chunk),
            (CallKind::Broadcast { .. }, PayloadForm::Shared) => is_part,
            (
                CallKind::Reduce { .. }
                | CallKind::Gather { .. }
                | CallKind::Scatter { .. }
                | CallKind::Send { .. },
                PayloadForm::Owned,
            ) => is_part,
            _ => false,
        }
    }

    /// Numbers of kind and of root or peer on the wire.
    fn kind_numbers(&self) -> (u8, Rank) {
        match self.kind {
            CallKind::AllReduce => (1, Rank(0)),
            CallKind::Reduce { dst } => (2, dst),
            CallKind::Broadcast { src } => (3, src),
            CallKind::Gather { dst } => (4, dst),
            CallKind::Scatter { src } => (5, src),
            CallKind::AllGather => (6, Rank(0)),
            CallKind::ReduceScatter => (7, Rank(0)),
            CallKind::Barrier => (8, Rank(0)),
            CallKind::Split => (9, Rank(0)),
            CallKind::NewGroup => (10, Rank(0)),
            CallKind::Send { dst } => (11, dst),
            CallKind::Recv { src } => (12, src),
        }
    }

    fn encode(&self, bytes: &mut [u8; PACKET_HEADER_BYTES]) {
        let (kind, root) = self.kind_numbers();
        bytes[1] = kind;
        bytes[2] = number_of(&OPS, self.op);
        bytes[3] = number_of(&ELEMENTS, self.element);
        bytes[24..32].copy_from_slice(&(self.length as u64).to_le_bytes());
        bytes[34..36].copy_from_slice(&(root.0 as u16).to_le_bytes());
    }

    fn decode(bytes: &[u8; PACKET_HEADER_BYTES]) -> Option<Self> {
        let root = Rank(short(bytes, 34));
        let kind = match bytes[1] {
            1 => CallKind::AllReduce,
            2 => CallKind::Reduce { dst: root },
            3 => CallKind::Broadcast { src: root },
            4 => CallKind::Gather { dst: root },
            5 => CallKind::Scatter { src: root },
            6 => CallKind::AllGather,
            7 => CallKind::ReduceScatter,
            8 => CallKind::Barrier,
            9 => CallKind::Split,
            10 => CallKind::NewGroup,
            11 => CallKind::Send { dst: root },
            12 => CallKind::Recv { src: root },
            _ => return None,
        };
        let op = OPS.get(usize::from(bytes[2]))?;
        let element = ELEMENTS.get(usize::from(bytes[3]))?;
        let length = usize::try_from(long(bytes, 24)).ok()?;
        Some(Self { kind, op, element, length })
    }
}

/// Number of a name on the wire; all names that calls have are in their list.
fn number_of(names: &[&str], name: &str) -> u8 {
    names.iter().position(|known| *known == name).unwrap_or(0) as u8
}

fn short(bytes: &[u8; PACKET_HEADER_BYTES], at: usize) -> u32 {
    u32::from(bytes[at]) | u32::from(bytes[at + 1]) << 8
}

fn word(bytes: &[u8; PACKET_HEADER_BYTES], at: usize) -> u32 {
    short(bytes, at) | short(bytes, at + 2) << 16
}

fn long(bytes: &[u8; PACKET_HEADER_BYTES], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

impl PayloadForm {
    fn encode(self, bytes: &mut [u8; PACKET_HEADER_BYTES]) {
        let (form, chunk) = match self {
            Self::Nothing => (NOTHING, ChunkId(0)),
            Self::Owned => (OWNED, ChunkId(0)),
            Self::Shared => (SHARED, ChunkId(0)),
            Self::Chunk(CollectiveKind::ReduceScatter, chunk) => (PARTIAL, chunk),
            Self::Chunk(CollectiveKind::AllGather, chunk) => (FINAL, chunk),
        };
        bytes[32] = form;
        bytes[36..40].copy_from_slice(&chunk.0.to_le_bytes());
    }

    fn decode(bytes: &[u8; PACKET_HEADER_BYTES]) -> Option<Self> {
        let chunk = ChunkId(word(bytes, 36));
        Some(match bytes[32] {
            NOTHING => Self::Nothing,
            OWNED => Self::Owned,
            SHARED => Self::Shared,
            PARTIAL => Self::Chunk(CollectiveKind::ReduceScatter, chunk),
            FINAL => Self::Chunk(CollectiveKind::AllGather, chunk),
            _ => return None,
        })
    }
}

impl PacketHeader {
    /// Returns the header as bytes: kinds of the packet and of its call, reduction, element type
    /// (one byte each), positions of sender and receiver (u16), group, number of the collective,
    /// length of the call (u64), form of the values (one byte), a zero, the call's root or peer or
    /// the rank that aborts (u16), and the chunk (u32); little-endian, with zeros for fields that a
    /// kind does not have.
    pub fn encode(&self) -> [u8; PACKET_HEADER_BYTES] {
        let mut bytes = [0; PACKET_HEADER_BYTES];
        // Ranks over processes are fewer than 2^16, as `init_over` checks.
        bytes[4..6].copy_from_slice(&(self.from.0 as u16).to_le_bytes());
        bytes[6..8].copy_from_slice(&(self.to.0 as u16).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.group.to_le_bytes());
        bytes[0] = match &self.content {
            PacketContent::Collective { number, call, form, is_credited } => {
                bytes[16..24].copy_from_slice(&number.to_le_bytes());
                call.encode(&mut bytes);
                form.encode(&mut bytes);
                if *is_credited { CREDITED } else { COLLECTIVE }
            }
            PacketContent::Direct { call, form } => {
                call.encode(&mut bytes);
                form.encode(&mut bytes);
                DIRECT
            }
            PacketContent::Credit { is_direct: false } => CREDIT,
            PacketContent::Credit { is_direct: true } => DIRECT_CREDIT,
            PacketContent::Waiting { number, call } => {
                bytes[16..24].copy_from_slice(&number.to_le_bytes());
                call.encode(&mut bytes);
                WAITING
            }
            PacketContent::WaitingAck => WAITING_ACK,
            PacketContent::Left { panicked: false } => LEFT,
            PacketContent::Left { panicked: true } => PANICKED,
            PacketContent::Abort { rank } => {
                bytes[34..36].copy_from_slice(&(rank.0 as u16).to_le_bytes());
                ABORT
            }
        };
        bytes
    }

    /// Returns the header that these bytes encode; `None` if they are no header.
    pub fn decode(bytes: &[u8; PACKET_HEADER_BYTES]) -> Option<Self> {
        let number = long(bytes, 16);
        let content = match bytes[0] {
            COLLECTIVE | CREDITED => PacketContent::Collective {
                number,
                call: CollectiveCall::decode(bytes)?,
                form: PayloadForm::decode(bytes)?,
                is_credited: bytes[0] == CREDITED,
            },
            DIRECT => PacketContent::Direct {
                call: CollectiveCall::decode(bytes)?,
                form: PayloadForm::decode(bytes)?,
            },
            CREDIT | DIRECT_CREDIT => {
                PacketContent::Credit { is_direct: bytes[0] == DIRECT_CREDIT }
            }
            WAITING => PacketContent::Waiting { number, call: CollectiveCall::decode(bytes)? },
            WAITING_ACK => PacketContent::WaitingAck,
            LEFT | PANICKED => PacketContent::Left { panicked: bytes[0] == PANICKED },
            ABORT => PacketContent::Abort { rank: Rank(short(bytes, 34)) },
            _ => return None,
        };
        let header = Self {
            group: long(bytes, 8),
            from: Position(short(bytes, 4)),
            to: Position(short(bytes, 6)),
            content,
        };
        // Unused fields must be zero: each header has one encoding.
        if header.encode() == *bytes { Some(header) } else { None }
    }
}
