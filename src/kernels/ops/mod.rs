//! Twins of all ops, one file each, and the table that maps ops to twins.

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
pub mod norm;
pub mod sgd;
pub mod squared_error;
pub mod sum;
pub mod unary;

use crate::graph::Op;
use crate::kernels::{Twin, Variant};

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

/// Returns the twin that computes an op, or `None` for a reshape, which moves no data.
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
        Op::LayerNorm { .. } | Op::LayerNormGrad | Op::LayerNormWeightGrad => {
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
