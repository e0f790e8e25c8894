//! The kernels: one *twin* per op, a shader in `shaders/` and a Rust file of the same name in
//! `ops`, which holds
//! - `reference`: plain loops, generic over f32 and f64, never optimized: the oracle,
//! - `fast`: the CPU device's version in f32, tested against the reference,
//! - `dispatch`: how a call runs on a GPU, as data,
//! - `cost`: FLOPs and bytes,
//! - its tests, each a line over `testing::check`.
//!
//! [`twin()`] is the table from ops to twins.

pub mod bench;
pub mod call;
pub mod dispatch;
pub mod harness;
pub mod ops;
pub mod pipeline;
pub mod simd;
pub mod source;
#[cfg(test)]
pub mod testing;
pub mod twin;
pub mod variant;

pub use call::{Arg, Cost, Float, OpCall, RandomContext};
pub use dispatch::{Dispatch, Operand, Shader};
pub use ops::twin;
pub use pipeline::Pipelines;
pub use twin::{CpuKernel, Twin};
pub use variant::Variant;
