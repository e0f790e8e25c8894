//! Types shared by all modules: typed ids, shapes with a leading batch dimension, values in host
//! memory, rounds, counter-based random numbers, and settings that messages name; and [`files`],
//! [`metrics`] and [`faults`], the only modules here that do IO.

pub mod arithmetic;
mod build_hash;
mod decode;
mod edge_piece;
pub mod faults;
pub mod files;
pub mod format;
mod host_tensor;
pub mod ids;
mod lock;
pub mod metrics;
pub mod raw;
mod remedy;
pub mod rng;
pub mod round;
pub mod setting;
pub mod shape;
mod slice;
mod table;

pub use build_hash::{build_hash, set_build_hash, whole_hash};
pub use decode::{DecodeError, decode};
pub use edge_piece::EdgePiece;
pub use host_tensor::{HostTensor, HostTensorView};
pub use ids::{
    BucketId, ChunkId, EdgeId, Generation, NodeId, NodeRank, ParamId, Position, Rank, ReductionId,
    SegmentId, Site, SlotId, StateId, TensorId,
};
pub use lock::Lock;
pub use remedy::Remedy;
pub use round::{Nanos, Round};
pub use setting::{Setting, Wording};
pub use shape::{DType, Shape};
pub use slice::{RunSeries, SliceError, TensorSlice};
pub use table::Table;
