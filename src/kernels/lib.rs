//! Compute kernels: one *twin* per op, which is a shader in `shaders/` and a Rust file of the
//! same name in `ops` with
//! - `reference`: plain loops, generic over f32 and f64, never optimized: the oracle,
//! - `fast`: the CPU kernel in f32, tested against the reference,
//! - `dispatch`: the GPU dispatches of a call without timings, as data,
//! - `variants`: all ways to run a call, of which autotuning chooses,
//! - `cost`: FLOPs and bytes of a call,
//! - `catalog` and `probes`: the calls on which its kernels are certified,
//! - `TWIN`: all of these as a value, with the kinds of its inputs and the length of its loops,
//! - its tests, which are calls of `testing::check`.
//!
//! [`twin()`] maps an op to its twin.

pub mod autotune;
pub mod bench;
mod bf16_moments;
mod bf16_words;
pub mod bind;
mod bucket_probe;
pub mod call;
mod call_shapes;
pub mod caps;
mod cpu_kernel;
mod custom_elementwise;
pub mod device;
pub mod dispatch;
pub mod exec;
mod gradient_check;
pub mod harness;
mod operands;
pub mod ops;
pub mod owned_call;
mod pace;
pub mod pipeline;
mod simd;
pub mod source;
#[cfg(test)]
mod testing;
pub mod twin;
pub mod variant;

pub use bind::{BindGroups, Binding, BoundDispatch};
pub use bucket_probe::BucketProbe;
pub use call::{Cost, Float, OpCall, RandomContext};
pub use caps::{Caps, DeviceClass};
pub(crate) use cpu_kernel::{CpuKernel, UpdateKernel};
pub use custom_elementwise::Elementwise;
pub use dispatch::{Dispatch, Operand, Shader};
pub use gradient_check::{GradientError, check_gradient};
pub(crate) use operands::{operand_bytes, operand_snippet, operands, round_to_f16};
pub(crate) use ops::{TWINS, UPDATE_TWINS};
pub use ops::{twin, update_twin};
pub use owned_call::OwnedCall;
pub(crate) use pace::PaceTrial;
pub use pipeline::Pipelines;
pub(crate) use twin::{CallShape, Dims};
pub use twin::{InputSpec, Twin, UpdateTwin};
pub use variant::Variant;
