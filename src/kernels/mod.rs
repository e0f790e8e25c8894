//! The kernels: one *twin* per op, a shader in `shaders/` and a Rust file of the same name here,
//! which holds
//! - `reference`: plain loops, generic over f32 and f64, never optimized: the oracle,
//! - `fast`: the CPU device's version in f32, tested against the reference,
//! - `dispatch`: how a call runs on a GPU, as data,
//! - `cost`: FLOPs and bytes,
//! - its tests, each a line over `testing::check`.
//!
//! [`twin`] is the table from ops to twins.

pub mod call;
pub mod dispatch;
pub mod pipeline;
pub mod simd;
pub mod source;
#[cfg(test)]
pub mod testing;
pub mod trial;

pub mod adamw;
pub mod attention;
pub mod binary;
pub mod copy;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod epilogue;
pub mod fused;
pub mod hash;
pub mod layer_norm;
pub mod layer_norm_group;
pub mod matmul;
pub mod matmul_shared;
pub mod matmul_tile;
pub mod matmul_vector;
pub mod norm;
pub mod peak;
pub mod sgd;
pub mod spin;
pub mod squared_error;
pub mod stand;
pub mod sum;
pub mod unary;
pub mod variant;

pub use call::{Arg, Call, Cost, Random, Real};
pub use dispatch::{Dispatch, Operand, Shader};
pub use pipeline::Pipelines;
pub use variant::Variant;

use crate::graph::Op;

/// A CPU function: inputs, and outputs of the lengths that the call says.
pub type Host<T> = fn(&Call, &[Arg<'_, T>], &mut [&mut [T]]);

/// Everything an op needs to run.
pub struct Twin {
    pub name: &'static str,
    pub reference_f32: Host<f32>,
    pub reference_f64: Host<f64>,
    pub fast: Host<f32>,
    /// How a call runs where nothing was measured.
    pub dispatch: fn(&Call) -> Vec<Dispatch>,
    /// Every way to run it. The first is the plain one, which fits every call.
    pub variants: fn(&Call) -> Vec<Variant>,
    pub cost: fn(&Call) -> Cost,
}

macro_rules! twin {
    ($room:ident) => {
        twin!($room, |call| vec![Variant::new(stringify!($room), $room::dispatch(call))])
    };
    ($room:ident, $variants:expr) => {
        &Twin {
            name: stringify!($room),
            reference_f32: $room::reference::<f32>,
            reference_f64: $room::reference::<f64>,
            fast: $room::fast,
            dispatch: $room::dispatch,
            variants: $variants,
            cost: $room::cost,
        }
    };
}

/// The twin that computes an op, or `None` for a reshape, which moves nothing.
pub fn twin(op: &Op) -> Option<&'static Twin> {
    Some(match op {
        Op::Reshape => return None,
        Op::Unary(_) | Op::UnaryGrad(_) => twin!(unary, unary::variants),
        Op::Binary(_) => twin!(binary),
        Op::MatMul { .. } => twin!(matmul, matmul::variants),
        Op::Permute { .. } | Op::Slice { .. } | Op::Pad { .. } | Op::Concat { .. } => {
            twin!(copy, copy::variants)
        }
        Op::Sum { .. } | Op::Broadcast { .. } => twin!(sum, sum::variants),
        Op::LayerNorm { .. } | Op::LayerNormGrad | Op::LayerNormGainGrad => {
            twin!(layer_norm, layer_norm::variants)
        }
        Op::Attention { .. } | Op::AttentionGrad { .. } => twin!(attention),
        Op::Embedding | Op::EmbeddingGrad { .. } => twin!(embedding, embedding::variants),
        Op::Dropout { .. } => twin!(dropout, dropout::variants),
        Op::CrossEntropy | Op::CrossEntropyGrad => twin!(cross_entropy, cross_entropy::variants),
        Op::SquaredError | Op::SquaredErrorGrad => twin!(squared_error, squared_error::variants),
        Op::Fused { .. } => twin!(fused, fused::variants),
    })
}
