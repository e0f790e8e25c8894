//! Arithmetic of a model: the number format of the operands of its matrix products.

use super::{Graph, Op};

/// Arithmetic of matrix products, convolutions and attention. All sums, all other ops, the softmax
/// of attention and the parameters are in f32.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Operands are not rounded.
    #[default]
    F32,
    /// Operands are rounded to f16 (IEEE 754 binary16: to nearest, ties to even, with subnormals,
    /// infinity from 65520 on) while a kernel reads them.
    Mixed,
}

impl Op {
    /// Returns true if the op multiplies matrices, so that it has operands that mixed precision
    /// rounds.
    pub fn is_product(&self) -> bool {
        matches!(
            self.root_op(),
            Self::MatMul { .. }
                | Self::LinearWeightGrad
                | Self::Conv2d(_)
                | Self::Conv2dInputGrad { .. }
                | Self::Conv2dWeightGrad { .. }
                | Self::LinearCrossEntropy { .. }
                | Self::LinearCrossEntropyGrad { .. }
                | Self::LinearCrossEntropyPass { .. }
                | Self::Attention(_)
                | Self::AttentionGrad(_)
        )
    }

    /// Returns true if all outputs are sums of products of two inputs, so that these may be of any
    /// magnitude.
    pub fn is_bilinear(&self) -> bool {
        matches!(
            self,
            Self::MatMul { .. }
                | Self::LinearWeightGrad
                | Self::Conv2d(_)
                | Self::Conv2dInputGrad { .. }
                | Self::Conv2dWeightGrad { .. }
        )
    }
}

impl Precision {
    /// Returns the name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Mixed => "mixed",
        }
    }
}

impl Graph {
    /// Returns the arithmetic of the ops that multiply matrices.
    pub fn precision(&self) -> Precision {
        let is_mixed = self.nodes.iter().any(|node| node.precision == Precision::Mixed);
        if is_mixed { Precision::Mixed } else { Precision::F32 }
    }

    /// Returns the graph with this arithmetic in all ops that multiply matrices.
    #[must_use]
    pub fn with_precision(mut self, precision: Precision) -> Self {
        for node in &mut self.nodes {
            node.precision = if node.op.is_product() { precision } else { Precision::F32 };
        }
        self
    }
}
