//! Twins of all ops and update rules, one file each, and the tables that map them to their twins.

pub(crate) mod adamw;
mod adamw_bf16;
pub mod attention;
pub(crate) mod batch_norm;
mod bf16;
pub mod binary;
pub(crate) mod cache_update;
pub(crate) mod cached_attention;
pub mod conv;
pub mod copy;
pub(crate) mod cross_entropy;
mod cross_entropy_grad;
pub(crate) mod cross_entropy_subgroups;
pub mod custom;
mod dispatch_parts;
pub mod dropout;
mod elements;
pub(crate) mod embedding;
pub mod embedding_rows;
pub mod epilogue;
pub mod fused;
pub(crate) mod fused_vectors;
pub(crate) mod gather;
pub(crate) mod group_norm;
pub mod hash;
mod head_product;
mod host_product;
pub(crate) mod join_cross_entropy;
mod joint;
pub(crate) mod layer_norm;
mod layer_norm_consts;
pub(crate) mod layer_norm_group;
pub mod layer_norm_rows;
mod linear_cross_entropy;
mod linear_weight_grad;
pub mod matmul;
pub mod norm;
mod norm_backward;
pub(crate) mod passes;
pub mod pool;
pub(crate) mod recurrent;
pub(crate) mod rotary;
pub(crate) mod row_blocks;
pub(crate) mod row_sums;
mod row_terms;
pub(crate) mod sgd;
mod sgd_bf16;
pub(crate) mod softmax;
pub(crate) mod squared_error;
pub mod sum;
pub(crate) mod unary;
pub(crate) mod update;
mod update_bf16;
mod update_parts;
mod update_rules;

use crate::{OpCall, Twin, UpdateTwin};
use potluck_graph::{Op, Update};

/// Returns the bytes that the CPU kernel of a call takes besides its tensors. Only kernels with
/// matrix products take much.
pub(crate) fn host_bytes(call: &OpCall) -> usize {
    attention::host_bytes(call)
        + linear_cross_entropy::host_bytes(call)
        + linear_weight_grad::host_bytes(call)
        + matmul::host_bytes(call)
        + conv::host_bytes(call)
        + fused::host_bytes(call)
}

macro_rules! table {
    ($($ops:pat => $twin:path,)*) => {
        /// All twins, in the order in which their kernels are certified.
        pub static TWINS: &[&Twin] = &[$(&$twin),*];

        /// Returns the twin that computes an op, or `None` for an alias, which moves no data.
        pub fn twin(op: &Op) -> Option<&'static Twin> {
            match op {
                Op::Reshape | Op::Spread | Op::AllReduce(_) => None,
                $($ops => Some(&$twin),)*
            }
        }
    };
}

table! {
    Op::MatMul { .. } => matmul::TWIN,
    Op::LinearWeightGrad => linear_weight_grad::TWIN,
    Op::Unary(_) | Op::UnaryGrad(_) => unary::TWIN,
    Op::Binary(_) | Op::BinaryGrad { .. } => binary::TWIN,
    Op::Dropout { .. } => dropout::TWIN,
    Op::SquaredError | Op::SquaredErrorGrad => squared_error::TWIN,
    Op::Fused { .. } => fused::TWIN,
    Op::Permute { .. } | Op::Slice { .. } | Op::Pad { .. } | Op::Concat { .. } => copy::TWIN,
    Op::Sum { .. } | Op::Broadcast { .. } => sum::TWIN,
    Op::Embedding { .. } | Op::EmbeddingGrad { .. } => embedding::TWIN,
    Op::Gather { .. } | Op::ScatterAdd { .. } => gather::TWIN,
    Op::CacheUpdate(_) => cache_update::TWIN,
    Op::CachedAttention(_) => cached_attention::TWIN,
    Op::LayerNorm { .. } | Op::LayerNormGrad => layer_norm::TWIN,
    Op::LayerNormWeightGrad | Op::LayerNormAffineGrad => layer_norm::TWIN,
    Op::RmsNorm { .. } | Op::RmsNormGrad => layer_norm::TWIN,
    Op::NormBackward(_) => norm_backward::TWIN,
    Op::GroupNorm { .. } | Op::GroupNormGrad { .. } => group_norm::TWIN,
    Op::GroupNormAffineGrad { .. } => group_norm::TWIN,
    Op::Softmax | Op::SoftmaxGrad => softmax::TWIN,
    Op::BatchNorm { .. } | Op::BatchNormAffineGrad | Op::BatchNormGrad => batch_norm::TWIN,
    Op::Recurrent { .. } | Op::RecurrentGrad { .. } => recurrent::TWIN,
    Op::CrossEntropy { .. } | Op::CrossEntropyGrad { .. } => cross_entropy::TWIN,
    Op::LinearCrossEntropy { .. }
    | Op::LinearCrossEntropyGrad { .. }
    | Op::LinearCrossEntropyPass { .. } => linear_cross_entropy::TWIN,
    Op::JoinCrossEntropy => join_cross_entropy::TWIN,
    Op::Conv2d(_) | Op::Conv2dInputGrad { .. } | Op::Conv2dWeightGrad { .. } => conv::TWIN,
    Op::MaxPool2d(_)
    | Op::MaxPool2dGrad { .. }
    | Op::AvgPool2d(_)
    | Op::AvgPool2dGrad { .. } => pool::TWIN,
    Op::Attention(_) | Op::AttentionGrad(_) => attention::TWIN,
    Op::Rotary { .. } => rotary::TWIN,
    Op::PackBf16 | Op::UnpackBf16 { .. } => bf16::TWIN,
    Op::Custom(_) => custom::TWIN,
}

macro_rules! update_table {
    ($($update:pat => $twin:path,)*) => {
        /// Twins of all update rules.
        pub static UPDATE_TWINS: &[&UpdateTwin] = &[$(&$twin),*];

        /// Returns the twin of an update rule.
        pub fn update_twin(update: &Update) -> &'static UpdateTwin {
            match update {
                $($update => &$twin,)*
            }
        }
    };
}

update_table! {
    Update::Sgd { .. } => sgd::TWIN,
    Update::AdamW { .. } => adamw::TWIN,
    Update::Nesterov { .. }
    | Update::Adam { .. }
    | Update::RmsProp { .. }
    | Update::Lion { .. } => update::TWIN,
}
