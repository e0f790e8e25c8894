//! Ops of the nodes of a graph. Shapes are in [`super::shapes`], gradients in
//! [`super::passes::gradients`], and each op's kernels in the twin that `kernels::twin` returns.

use std::fmt;

use super::Accumulation;
use super::attention::{AttentionOptions, CacheUpdateOptions, CachedAttentionOptions};
use super::custom::{CustomOp, SharedCustomOp};
use super::elements::{Binary, BinarySide, Unary};
use super::pictures::{Conv2dOptions, Pool2dOptions};
use potluck_core::Site;

/// Ignored target, the only valid one that is not a class: it adds nothing to the loss, its count
/// and the gradient.
pub const IGNORE_INDEX: u32 = u32::MAX;

/// Epilogue step of a fused kernel, applied to each value before the kernel writes it to memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EpilogueOp {
    /// `f(v, operand)`; the operand has as many elements as the value, or fewer, which repeat.
    Binary(Binary),
    /// `f(v)`
    Unary(Unary),
    /// `v f'(operand)`, the gradient of `f` at the operand, which has as many elements as the
    /// value.
    UnaryGrad(Unary),
    /// Stores the current value as a further output.
    Store,
}

impl EpilogueOp {
    /// Returns true if the step takes a further input.
    pub fn has_operand(self) -> bool {
        matches!(self, EpilogueOp::Binary(_) | EpilogueOp::UnaryGrad(_))
    }
}

/// Unit in which a loss op counts: the divisor of its sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossCount {
    /// Elements of the first input.
    Elements,
    /// Targets that are classes.
    Targets,
}

/// Meaning of the integers that an op takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbered {
    /// The first input selects rows of the second, the table.
    Rows,
    /// The targets are classes, or [`IGNORE_INDEX`], which is ignored.
    Classes,
}

/// Cell of a recurrent layer, in PyTorch's form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cell {
    /// Gates i, f, g, o; the state is the hidden values and the cells.
    Lstm,
    /// Gates r, z, n, with the reset gate after the product; the state is the hidden values.
    Gru,
}

impl Cell {
    /// Returns the number of gates. The weights have a block of rows for each.
    pub fn gates(self) -> usize {
        match self {
            Self::Lstm => 4,
            Self::Gru => 3,
        }
    }

    /// Returns the number of tensors of the state.
    pub fn states(self) -> usize {
        match self {
            Self::Lstm => 2,
            Self::Gru => 1,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Lstm => "lstm",
            Self::Gru => "gru",
        }
    }
}

/// Columns of the last dimension in a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnRange {
    /// Number of the first column in the whole graph.
    pub first: usize,
    /// Number of columns in the whole graph.
    pub all: usize,
}

/// Classes of a cross-entropy. The logits of a node begin with the class `first`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossClasses {
    pub first: usize,
    /// Number of all classes, over all ranks of a tensor group.
    pub all: usize,
    /// Part of the probability of each target that is divided evenly among all classes: label
    /// smoothing (Szegedy et al. 2016), as in PyTorch. 0 to 1.
    pub smoothing: f32,
}

impl LossClasses {
    /// Returns the classes of a node with the logits of all of them, without label smoothing.
    pub const fn whole(all: usize) -> Self {
        Self { first: 0, all, smoothing: 0.0 }
    }

    /// Returns the difference between the probabilities of the target and of any other class.
    pub fn kept(self) -> f32 {
        1.0 - self.smoothing
    }

    /// Returns the probability of each class that is not the target.
    pub fn even(self) -> f32 {
        self.smoothing / self.all as f32
    }
}

/// Reductions over the ranks of a tensor group, in the order of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Reduction {
    /// `x -> y`: the sum, elementwise.
    Sum,
    /// `x, words -> y`: the sum of what the words hold, two bfloat16 values each, in place of `x`.
    SumBf16,
    /// `parts (n, 2), lse (n) -> parts, lse` of [`Op::CrossEntropy`] over the classes of a rank,
    /// joined to those over all `classes`.
    CrossEntropy { classes: usize },
}

/// Attributes of [`Op::NormBackward`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormBackward {
    /// True for a layer norm, false for an RMS norm, which subtracts no mean.
    pub centered: bool,
    /// True if the norm has a bias, whose gradient is the third output.
    pub bias: bool,
    /// True if another gradient of `x`, the last input, is added to `dx`.
    pub adds: bool,
}

impl NormBackward {
    /// Returns the op that computes `dx`.
    pub fn input_gradient(&self) -> Op {
        let root = if self.centered { Op::LayerNormGrad } else { Op::RmsNormGrad };
        if !self.adds {
            return root;
        }
        Op::Fused { root: Box::new(root), epilogue: vec![EpilogueOp::Binary(Binary::Add)] }
    }

    /// Returns the op that computes the gradients of the parameters.
    pub fn parameter_gradient(&self) -> Op {
        if self.bias { Op::LayerNormAffineGrad } else { Op::LayerNormWeightGrad }
    }

    /// Outputs to whose contents kernels can add: all but `dx`.
    fn accumulates(&self) -> Accumulation {
        Accumulation::each(1..if self.bias { 3 } else { 2 })
    }
}

/// Operation of a node, from inputs to outputs, in this order. `(b*t, c)` and the like are shapes;
/// an op whose name ends in `Grad` computes the gradient of the op of that name.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `a (m, k), b (k, n) -> (m, n)`, or with one equal leading dimension in all three. Each
    /// side may be given transposed. A batched `k` is summed away.
    MatMul { transpose_a: bool, transpose_b: bool },
    /// `dy (k, o), x (k, c) -> dweight (o, c), dbias (o)` of a linear layer `y = x weight^T +
    /// bias`: the product `dy^T x` and the sum of `dy` over its rows, from one reading of `dy`.
    /// Made by the fusion of a differentiated graph ([`super::fuse()`]): it has no gradient.
    LinearWeightGrad,
    /// `x -> y`, elementwise.
    Unary(Unary),
    /// `x, dy -> dx`
    UnaryGrad(Unary),
    /// `a, b -> y`, elementwise; `b` is broadcast over the leading dimensions of `a`.
    Binary(Binary),
    /// `a, b, dy -> da` or `db`, both in the shape of `a`: the sum over the dimensions along which
    /// `b` is broadcast is a separate node.
    BinaryGrad { function: Binary, by: BinarySide },
    /// The same elements in the same order under another shape. Costs nothing: an alias.
    Reshape,
    /// Dimension `i` of the output is dimension `axes[i]` of the input; `axes[0] == 0` if batched.
    Permute { axes: Vec<usize> },
    /// Entries `start .. start + length` along an axis.
    Slice { axis: usize, start: usize, length: usize },
    /// Zero padding before and after along an axis: the gradient of a slice.
    Pad { axis: usize, before: usize, after: usize },
    /// Concatenation of tensors along an axis.
    Concat { axis: usize },
    /// Sum over the axes `first ..= last`, which are removed.
    Sum { first: usize, last: usize },
    /// New axes in front of dimension `first`, over which the values repeat: the gradient of a
    /// sum. `dims` are the new dimensions, batched if `batched` (and then `first` is 0).
    Broadcast { first: usize, dims: Vec<usize>, batched: bool },
    /// `x (.., c), weight (c) [, bias (c)] -> y (.., c), stats (.., 2)`, with mean and rstd
    /// (1/deviation) of each row of `c` in `stats` (Ba, Kiros, Hinton 2016).
    LayerNorm { eps: f32 },
    /// `x, weight, stats, dy -> dx`
    LayerNormGrad,
    /// `x, stats, dy -> dweight (c)`
    LayerNormWeightGrad,
    /// `x, stats, dy -> dweight (c), dbias (c)`, both from one reading of `dy`.
    LayerNormAffineGrad,
    /// `x (.., c), weight (c) -> y (.., c), stats (.., 2)`: each row of `c` divided by its root
    /// mean square (Zhang and Sennrich 2019). `stats` has 0 as the mean, and the reciprocal of the
    /// root, so that the weight's gradient is [`Op::LayerNormWeightGrad`].
    RmsNorm { eps: f32 },
    /// `x, weight, stats, dy -> dx`
    RmsNormGrad,
    /// `x, weight, stats, dy [, sum] -> dx, dweight (c) [, dbias (c)]`: all gradients of a layer or
    /// RMS norm from one reading of `x` and `dy`. Made by the fusion of a differentiated graph
    /// ([`super::fuse()`]): it has no gradient.
    NormBackward(NormBackward),
    /// `x (b, .., c), weight (c), bias (c) -> y (b, .., c), stats (b, groups, 2)`, with mean and
    /// rstd over all positions of a sample and `c / groups` neighbouring channels (Wu and He 2018).
    GroupNorm { groups: usize, eps: f32 },
    /// `x, weight, stats, dy -> dx`
    GroupNormGrad { groups: usize },
    /// `x, stats, dy -> dweight (c), dbias (c)`
    GroupNormAffineGrad { groups: usize },
    /// `x (.., c) -> y`: the exponentials of each row of `c`, divided by their sum.
    Softmax,
    /// `y, dy -> dx`
    SoftmaxGrad,
    /// `x (b, .., c), weight (c), bias (c), mean (c), variance (c) -> y, stats (2, c), mean_sum
    /// (c), variance_sum (c)`: each channel over all rows of a micro-batch, with its mean and rstd
    /// in `stats` (Ioffe and Szegedy 2015). `mean` and `variance` are running averages
    /// ([`super::ParameterKind::State`]), which replace the statistics of the micro-batch outside
    /// of training; the sums are `b` times the mean and the unbiased variance, for their update.
    BatchNorm { eps: f32 },
    /// `x, stats, dy -> dweight (c), dbias (c)`
    BatchNormAffineGrad,
    /// `x, weight, stats, dy, dweight, dbias -> dx`
    BatchNormGrad,
    /// `x (b, t, g h), weight (g h, h), bias (g h) [, h0 (b, h) [, c0 (b, h)]] -> y (b, t, h),
    /// gates (b, t, 4h) [, cells (b, t, h)]`: a recurrent layer over time with `g` gates, given the
    /// product of its inputs; an LSTM has cells too. Without a state it starts from zeros. `gates`
    /// are i, f, g, o, or r, z, n and the product for n; see `kernels::ops::recurrent`.
    Recurrent { cell: Cell },
    /// `gates, weight, cells, dy [, c0] -> dx, dh0, dc0` of an LSTM, and
    /// `gates, weight, y, dy [, h0] -> dx, dproduct (b, t, g h), dh0` of a GRU.
    RecurrentGrad { cell: Cell },
    /// `tensors (b, t, ..) [, samples (b)] -> y (b, t, heads d), lse (b, heads, t)`: attention with
    /// scores scaled by `1/sqrt(d)`, `d` the width of a head, and probabilities dropped with
    /// probability `dropout`. One to three tensors contain queries, keys and values in the columns
    /// that the options name. A query sees the keys up to its own position if `causal`, else all.
    /// `lse` is the logarithm of the sum of exponentials of each row of scores.
    Attention(AttentionOptions),
    /// `tensors, y, lse, dy [, samples] -> dtensors`
    AttentionGrad(AttentionOptions),
    /// `tensors (b, n, ..), places (b, n) of u32 -> cache (sequences, 2 kv_heads, t, d)`: writes
    /// the keys and values of each row to their places in the cache, `sequence * t + position`, and
    /// leaves all other places unchanged. A row whose place is out of range is not written; two
    /// rows with the same place are a defect.
    CacheUpdate(CacheUpdateOptions),
    /// `q (b, n, ..), cache (sequences, 2 kv_heads, t, d), places (b, n) of u32 -> y (b, n, heads
    /// d)`: attention of the query of each row over the keys of its sequence up to its own
    /// position, by [`Op::CacheUpdate`], with scores scaled by `1/sqrt(d)`. Zeros for a row whose
    /// place is out of range.
    CachedAttention(CachedAttentionOptions),
    /// `x (b, t, heads d), table (t, d) -> y`: each head of a row turned by its position, column
    /// `i` with column `i + d/2` (Su et al. 2021, in halves as in Llama). The table has `d/2`
    /// cosines and then `d/2` sines for each position; a table `(b, t, d)` has them for each row.
    /// The gradient is the inverse.
    Rotary { inverse: bool },
    /// `ids (..) of u32, table (v, c) -> (.., c)`: rows of a table whose row 0 has the id `first`;
    /// zeros for ids of rows outside of the table.
    Embedding { first: usize },
    /// `ids, dy -> dtable (rows, c)`: ids of other rows add nothing.
    EmbeddingGrad { first: usize, rows: usize },
    /// `x (.., n, ..), places -> y (.., m, ..)`: the entries along an axis at the places, which are
    /// whole numbers in floats; zeros for places out of range. The places are `(m)`, the same for
    /// all; `(.., m)`, with the axes of `x` before; or one for each element of `y`.
    Gather { axis: usize },
    /// `places, y (.., m, ..) -> x (.., n, ..)`: for each of the `n` places, the sum of its entries
    /// in their order: the gradient of a gather, whose own gradient is a gather.
    ScatterAdd { axis: usize, length: usize },
    /// `x (.., c), samples (b) of u32 -> y`: zero with probability `p`, else divided by `1 - p`. It
    /// is its own gradient. In a shard, `columns` are the columns of the last dimension, whose
    /// numbers in the whole graph key the random numbers.
    Dropout { p: f32, site: Site, columns: Option<ColumnRange> },
    /// `x (b, h, w, c), weight (o, c/groups, kh, kw) -> y (b, oh, ow, o)`: 2D convolution, without
    /// mirroring the kernel.
    Conv2d(Conv2dOptions),
    /// `dy, weight -> dx (b, h, w, c)`, with the `size` `(h, w)` of the pictures: also a transposed
    /// convolution, of pictures `dy`.
    Conv2dInputGrad { options: Conv2dOptions, size: [usize; 2] },
    /// `x, dy -> dweight (o, c/groups, kh, kw)`, with the size `(kh, kw)` of the kernel. The bias
    /// gradient is a [`Op::Sum`].
    Conv2dWeightGrad { options: Conv2dOptions, kernel: [usize; 2] },
    /// `x (b, h, w, c) -> y (b, oh, ow, c), places (b, oh, ow, c)`: the maximum of each window, and
    /// the first place of it in the window, row by row, as a whole number in a float, which holds
    /// those below 2^24 exactly. A NaN is larger than all numbers. Padding is never the maximum.
    MaxPool2d(Pool2dOptions),
    /// `places, dy -> dx (b, h, w, c)`, with the `size` `(h, w)` of the pictures.
    MaxPool2dGrad { options: Pool2dOptions, size: [usize; 2] },
    /// `x (b, h, w, c) -> y (b, oh, ow, c)`: the sum of each window, divided by the number of all
    /// its places, in the picture, in the padding or beyond.
    AvgPool2d(Pool2dOptions),
    /// `dy -> dx (b, h, w, c)`, with the `size` `(h, w)` of the pictures.
    AvgPool2dGrad { options: Pool2dOptions, size: [usize; 2] },
    /// `x (b, ..) -> words (b, n)`: the `2 n` elements of each sample in bfloat16, rounded to
    /// nearest, ties to even, two in a word of 32 bits, the first in its low half. The words are
    /// the bits of floats.
    PackBf16,
    /// `words (b, n) -> x (b, ..)`, whose dimensions are `dims`: the inverse, without rounding.
    UnpackBf16 { dims: Vec<usize> },
    /// `logits (n, v), targets (n) of u32 -> parts (n, 2), lse (n)`: the loss of each row of
    /// logits, and the count of its target, which is 0 if its class is not among the logits. Both
    /// are 0 for a target that is not a class, such as [`IGNORE_INDEX`].
    CrossEntropy(LossClasses),
    /// `logits, targets, lse -> dlogits`, the gradient of the summed loss; the loss and `lse` are
    /// over all classes.
    CrossEntropyGrad(LossClasses),
    /// `x (n, c), weight (v, c), targets (n) of u32 -> parts (n, 2), lse (n)`: the
    /// [`Op::CrossEntropy`] of the logits `x weight^T`, which are computed in chunks of `rows` rows
    /// and never stored as a whole.
    LinearCrossEntropy { rows: usize, classes: LossClasses },
    /// `x, weight, targets, lse -> dx (n, c)` and, `by_weight`, `dweight (v, c)`: the gradient of
    /// the summed loss; the loss and `lse` are over all classes. It recomputes the logits.
    LinearCrossEntropyGrad { rows: usize, classes: LossClasses, by_weight: bool },
    /// `x, weight, targets -> dx, parts, lse` and, `by_weight`, `dweight`: the loss and its
    /// gradient with the logits computed once, which is possible where the gradient of the loss
    /// is 1.
    LinearCrossEntropyPass { rows: usize, classes: LossClasses, by_weight: bool },
    /// `parts (n, 2), lse (n), parts (n, 2), lse (n) -> parts, lse`: joins the [`Op::CrossEntropy`]
    /// over two sets of classes, where a table of classes is cut. The gradient of the loss is
    /// computed for each set, with the joined `lse`.
    JoinCrossEntropy,
    /// `x (b*n, ..), target -> parts (b*n, 2)`: the sum of squared differences over each leading
    /// entry, and the number of its elements.
    SquaredError,
    /// `x, target -> dx`, the gradient of the summed loss.
    SquaredErrorGrad,
    /// `x -> x`: an alias, where a tensor that is replicated on a tensor group enters a computation
    /// that the ranks divide. Its gradient is the sum of the ranks' gradients, an
    /// [`Op::AllReduce`].
    Spread,
    /// Reduction of tensors over the ranks of a tensor group, after which all ranks have the same:
    /// aliases whose elements the host replaces after the segment that ends with this node.
    AllReduce(Reduction),
    /// An op of one output and its epilogue, steps on each of its values, in one kernel. Inputs:
    /// the inputs of `root`, then the operands of the steps. Outputs: the final value, then the
    /// stored ones, each with as many elements as the output of `root`, under any shape. Made by
    /// the fusion of a differentiated graph ([`super::fuse()`]): it has no gradient.
    Fused { root: Box<Op>, epilogue: Vec<EpilogueOp> },
    /// An op that is defined outside the crate, of one output; see [`CustomOp`].
    Custom(SharedCustomOp),
}

impl Op {
    /// Creates an op of a definition outside the crate.
    pub fn custom(op: impl CustomOp + 'static) -> Self {
        Self::Custom(SharedCustomOp::new(op))
    }

    /// Returns the op that computes the values: `root` of a fused one, or the op itself.
    pub fn root_op(&self) -> &Op {
        match self {
            Op::Fused { root, .. } => root,
            other => other,
        }
    }

    /// Returns how many of a node's first inputs one of its outputs is computed from, of `inputs`
    /// in all: a value that a fused op stores does not depend on the operands of later steps.
    pub fn inputs_of_output(&self, output: usize, inputs: usize) -> usize {
        let Op::Fused { epilogue, .. } = self else { return inputs };
        if output == 0 {
            return inputs;
        }
        let mut stored = 0;
        let mut later = 0;
        for step in epilogue {
            stored += usize::from(*step == EpilogueOp::Store);
            later += usize::from(stored >= output && step.has_operand());
        }
        inputs - later
    }

    /// Returns the op with site 0, so that two ops that differ only in their random numbers are
    /// equal.
    pub fn without_site(&self) -> Op {
        let mut op = self.clone();
        match &mut op {
            Op::Attention(AttentionOptions { site, .. })
            | Op::AttentionGrad(AttentionOptions { site, .. })
            | Op::Dropout { site, .. } => *site = Site(0),
            Op::Fused { root, .. } => **root = root.without_site(),
            _ => {}
        }
        op
    }

    /// Returns the outputs to whose contents the op's kernels can add. Ops that compute the
    /// gradient of a parameter can add to it, so that micro-batches accumulate without a further
    /// pass.
    pub fn accumulates(&self) -> Accumulation {
        match self {
            Op::MatMul { .. }
            | Op::Unary(Unary::Scale(_))
            | Op::Sum { .. }
            | Op::LayerNormWeightGrad
            | Op::EmbeddingGrad { .. }
            | Op::Conv2dWeightGrad { .. } => Accumulation::all(1),
            Op::NormBackward(options) => options.accumulates(),
            Op::LinearWeightGrad | Op::LayerNormAffineGrad | Op::GroupNormAffineGrad { .. } => {
                Accumulation::all(2)
            }
            Op::LinearCrossEntropyGrad { by_weight: true, .. } => Accumulation::only(1),
            Op::LinearCrossEntropyPass { by_weight: true, .. } => Accumulation::only(3),
            _ => Accumulation::NONE,
        }
    }

    /// Returns the outputs that the op's kernels update in part, so that their previous contents
    /// matter.
    pub fn changes_in_place(&self) -> Accumulation {
        match self {
            Op::CacheUpdate(_) => Accumulation::only(0),
            _ => Accumulation::NONE,
        }
    }

    /// Returns the reduction that the host performs between this node, with which a segment ends,
    /// and the next.
    pub fn reduction(&self) -> Option<Reduction> {
        match self {
            Op::AllReduce(reduction) => Some(*reduction),
            _ => None,
        }
    }

    /// Returns the number of rows in a chunk of logits, if the op computes logits in chunks.
    pub fn logits_rows(&self) -> Option<usize> {
        match self {
            Op::LinearCrossEntropy { rows, .. }
            | Op::LinearCrossEntropyGrad { rows, .. }
            | Op::LinearCrossEntropyPass { rows, .. } => Some(*rows),
            _ => None,
        }
    }

    /// Returns the unit in which the op counts, if it computes the parts of a loss.
    pub fn loss_count(&self) -> Option<LossCount> {
        match self {
            Op::SquaredError => Some(LossCount::Elements),
            Op::CrossEntropy { .. } | Op::LinearCrossEntropy { .. } => Some(LossCount::Targets),
            _ => None,
        }
    }

    /// Returns true if the op joins losses over sets of classes: its first two inputs, and further
    /// pairs, are the outputs of the ops that compute them.
    pub fn joins_losses(&self) -> bool {
        matches!(self, Op::AllReduce(Reduction::CrossEntropy { .. }) | Op::JoinCrossEntropy)
    }

    /// Returns the input with the targets of a loss of classes, and the number of all classes.
    pub fn targets(&self) -> Option<(usize, usize)> {
        match self {
            Op::CrossEntropy(classes) => Some((1, classes.all)),
            Op::LinearCrossEntropy { classes, .. } => Some((2, classes.all)),
            _ => None,
        }
    }

    pub(super) fn loss_classes_mut(&mut self) -> Option<&mut LossClasses> {
        match self {
            Op::CrossEntropy(classes) | Op::LinearCrossEntropy { classes, .. } => Some(classes),
            _ => None,
        }
    }

    /// Returns the meaning of the integers that the op takes; kernels do not check them.
    pub fn numbered(&self) -> Option<Numbered> {
        match self {
            Op::Embedding { .. } => Some(Numbered::Rows),
            Op::CrossEntropy { .. } | Op::LinearCrossEntropy { .. } => Some(Numbered::Classes),
            _ => None,
        }
    }

    /// Returns true if the op costs much more than reading its inputs and writing its outputs: a
    /// matrix product, a convolution or a recurrent layer, and an embedding, which a tensor group
    /// must sum over its ranks. Selective recomputation keeps their results. Attention is
    /// recomputed, like norms and elementwise functions (Korthikanti et al. 2022). The cost of
    /// custom ops is unknown.
    pub fn is_costly(&self) -> bool {
        matches!(
            self,
            Op::MatMul { .. }
                | Op::Conv2d(_)
                | Op::Conv2dInputGrad { .. }
                | Op::Embedding { .. }
                | Op::Recurrent { .. }
        )
    }

    /// Returns true if the elements of an output may be rounded to 16 bits: values, and no
    /// statistics, places or parts of a loss. Of custom ops, nothing is known.
    pub fn is_roundable(&self, output: usize) -> bool {
        match self {
            Op::LayerNorm { .. }
            | Op::RmsNorm { .. }
            | Op::GroupNorm { .. }
            | Op::BatchNorm { .. }
            | Op::Attention(_)
            | Op::MaxPool2d(_)
            | Op::LinearCrossEntropyPass { .. } => output == 0,
            // Gates near 1, whose gradient is a product with what is left to 1.
            Op::Recurrent { .. } => output != 1,
            Op::CrossEntropy(_)
            | Op::LinearCrossEntropy { .. }
            | Op::JoinCrossEntropy
            | Op::SquaredError
            | Op::Custom(_) => false,
            _ => true,
        }
    }

    /// Returns true if the op only writes the same values in another number format.
    pub fn converts_format(&self) -> bool {
        matches!(self, Op::PackBf16 | Op::UnpackBf16 { .. })
    }

    /// Returns true if the op keeps the places of the values that it chooses, to which alone the
    /// gradient flows.
    pub fn chooses_places(&self) -> bool {
        matches!(self.root_op(), Op::MaxPool2d(_))
    }

    /// Returns true if the op is one that is defined outside the crate.
    pub fn is_custom(&self) -> bool {
        matches!(self, Op::Custom(_))
    }

    /// Returns true if the op normalizes by statistics of the batch.
    pub fn normalizes_over_batch(&self) -> bool {
        matches!(self, Op::BatchNorm { .. })
    }

    /// Returns true if the op draws random numbers, and so takes the sample ids as its last input.
    pub fn is_random(&self) -> bool {
        match self {
            Op::Dropout { .. } => true,
            Op::Attention(options) | Op::AttentionGrad(options) => options.dropout > 0.0,
            _ => false,
        }
    }

    /// Returns true if the op computes the gradient of a loss.
    pub fn is_gradient_of_loss(&self) -> bool {
        matches!(
            self,
            Op::CrossEntropyGrad(_)
                | Op::LinearCrossEntropyGrad { .. }
                | Op::LinearCrossEntropyPass { .. }
                | Op::SquaredErrorGrad
        )
    }

    /// Returns true if the op computes something else in training than in evaluations.
    pub fn depends_on_training(&self) -> bool {
        self.is_random() || self.normalizes_over_batch()
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::MatMul { transpose_a, transpose_b } => {
                let [a, b] = [transpose_a, transpose_b].map(|is| if *is { "^T" } else { "" });
                write!(f, "matmul a{a} b{b}")
            }
            Op::LinearWeightGrad => write!(f, "linear_weight_grad"),
            Op::Unary(function) => write!(f, "{function}"),
            Op::UnaryGrad(function) => function.write(f, "_grad"),
            Op::Binary(function) => write!(f, "{}", function.name()),
            Op::BinaryGrad { function, by: BinarySide::First } => {
                write!(f, "{}_grad", function.name())
            }
            Op::BinaryGrad { function, by: BinarySide::Second } => {
                write!(f, "{}_grad_by_second", function.name())
            }
            Op::Reshape => write!(f, "reshape"),
            Op::Permute { axes } => write!(f, "permute {axes:?}"),
            Op::Slice { axis, start, length } => {
                write!(f, "slice axis {axis} {start}..{}", start.saturating_add(*length))
            }
            Op::Pad { axis, before, after } => write!(f, "pad axis {axis} {before}+{after}"),
            Op::Concat { axis } => write!(f, "concat axis {axis}"),
            Op::Sum { first, last } => write!(f, "sum axes {first}..={last}"),
            Op::Broadcast { first, dims, .. } => write!(f, "broadcast {dims:?} at {first}"),
            Op::LayerNorm { .. } => write!(f, "layer_norm"),
            Op::LayerNormGrad => write!(f, "layer_norm_grad"),
            Op::LayerNormWeightGrad => write!(f, "layer_norm_weight_grad"),
            Op::LayerNormAffineGrad => write!(f, "layer_norm_affine_grad"),
            Op::RmsNorm { .. } => write!(f, "rms_norm"),
            Op::RmsNormGrad => write!(f, "rms_norm_grad"),
            Op::NormBackward(options) => write!(f, "{options}"),
            Op::GroupNorm { groups, .. } => write!(f, "group_norm {groups} groups"),
            Op::GroupNormGrad { groups } => write!(f, "group_norm_grad {groups} groups"),
            Op::GroupNormAffineGrad { groups } => {
                write!(f, "group_norm_affine_grad {groups} groups")
            }
            Op::Softmax => write!(f, "softmax"),
            Op::SoftmaxGrad => write!(f, "softmax_grad"),
            Op::BatchNorm { .. } => write!(f, "batch_norm"),
            Op::BatchNormAffineGrad => write!(f, "batch_norm_affine_grad"),
            Op::BatchNormGrad => write!(f, "batch_norm_grad"),
            Op::Recurrent { cell } => write!(f, "{}", cell.name()),
            Op::RecurrentGrad { cell } => write!(f, "{}_grad", cell.name()),
            Op::Attention(options) => write!(f, "attention {options}"),
            Op::AttentionGrad(options) => write!(f, "attention_grad {options}"),
            Op::CacheUpdate(options) => write!(f, "cache_update {options}"),
            Op::CachedAttention(options) => write!(f, "cached_attention {options}"),
            Op::Rotary { inverse } => {
                write!(f, "rotary{}", if *inverse { " inverse" } else { "" })
            }
            Op::Embedding { first } => write!(f, "embedding{}", from(*first)),
            Op::EmbeddingGrad { first, rows } => {
                write!(f, "embedding_grad {rows} rows{}", from(*first))
            }
            Op::Gather { axis } => write!(f, "gather axis {axis}"),
            Op::ScatterAdd { axis, length } => write!(f, "scatter_add axis {axis} of {length}"),
            Op::Dropout { p, columns, .. } => {
                write!(f, "dropout {p}{}", from(columns.map_or(0, |columns| columns.first)))
            }
            Op::Conv2d(options) => write!(f, "conv2d{options}"),
            Op::Conv2dInputGrad { options, size: [h, w] } => {
                write!(f, "conv2d_input_grad{options} to {h}x{w}")
            }
            Op::Conv2dWeightGrad { options, kernel: [h, w] } => {
                write!(f, "conv2d_weight_grad{options} to {h}x{w}")
            }
            Op::MaxPool2d(options) => write!(f, "max_pool2d{options}"),
            Op::MaxPool2dGrad { options, size: [h, w] } => {
                write!(f, "max_pool2d_grad{options} to {h}x{w}")
            }
            Op::AvgPool2d(options) => write!(f, "avg_pool2d{options}"),
            Op::AvgPool2dGrad { options, size: [h, w] } => {
                write!(f, "avg_pool2d_grad{options} to {h}x{w}")
            }
            Op::CrossEntropy(classes) => write!(f, "cross_entropy{classes}"),
            Op::CrossEntropyGrad(classes) => write!(f, "cross_entropy_grad{classes}"),
            Op::LinearCrossEntropy { rows, classes } => {
                write!(f, "linear_cross_entropy {rows}{classes}")
            }
            Op::LinearCrossEntropyGrad { rows, classes, by_weight } => {
                let frozen = if *by_weight { "" } else { " frozen" };
                write!(f, "linear_cross_entropy_grad {rows}{classes}{frozen}")
            }
            Op::LinearCrossEntropyPass { rows, classes, by_weight } => {
                let frozen = if *by_weight { "" } else { " frozen" };
                write!(f, "linear_cross_entropy_pass {rows}{classes}{frozen}")
            }
            Op::PackBf16 => write!(f, "pack_bf16"),
            Op::UnpackBf16 { .. } => write!(f, "unpack_bf16"),
            Op::JoinCrossEntropy => write!(f, "join_cross_entropy"),
            Op::SquaredError => write!(f, "squared_error"),
            Op::SquaredErrorGrad => write!(f, "squared_error_grad"),
            Op::Spread => write!(f, "spread"),
            Op::AllReduce(Reduction::Sum) => write!(f, "all_reduce sum"),
            Op::AllReduce(Reduction::SumBf16) => write!(f, "all_reduce sum of bf16"),
            Op::AllReduce(Reduction::CrossEntropy { .. }) => write!(f, "all_reduce cross_entropy"),
            Op::Custom(op) => write!(f, "{}", op.name()),
            Op::Fused { root, epilogue } => {
                write!(f, "{root}")?;
                for step in epilogue {
                    write!(f, " + {step}")?;
                }
                Ok(())
            }
        }
    }
}

impl fmt::Display for NormBackward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.centered { "layer_norm_backward" } else { "rms_norm_backward" })?;
        f.write_str(if self.bias { " with bias" } else { "" })?;
        f.write_str(if self.adds { " + add" } else { "" })
    }
}

/// Formats the first row, class or head of a shard; nothing for 0.
pub(super) fn from(first: usize) -> String {
    if first == 0 { String::new() } else { format!(" from {first}") }
}

impl fmt::Display for LossClasses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&from(self.first))?;
        if self.smoothing > 0.0 { write!(f, " smoothing {}", self.smoothing) } else { Ok(()) }
    }
}

impl fmt::Display for EpilogueOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EpilogueOp::Binary(binary) => write!(f, "{}", Op::Binary(*binary)),
            EpilogueOp::Unary(unary) => write!(f, "{}", Op::Unary(*unary)),
            EpilogueOp::UnaryGrad(unary) => write!(f, "{}", Op::UnaryGrad(*unary)),
            EpilogueOp::Store => write!(f, "store"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_value_depends_on_no_operand_of_a_later_step() {
        let root = Box::new(Op::MatMul { transpose_a: false, transpose_b: true });
        let epilogue = vec![
            EpilogueOp::Binary(Binary::Add),
            EpilogueOp::Store,
            EpilogueOp::Binary(Binary::Sub),
            EpilogueOp::Unary(Unary::Relu),
            EpilogueOp::Store,
            EpilogueOp::UnaryGrad(Unary::Relu),
        ];
        let fused = Op::Fused { root, epilogue };
        assert_eq!([0, 1, 2].map(|output| fused.inputs_of_output(output, 5)), [5, 3, 4]);
        assert_eq!(Op::Reshape.inputs_of_output(0, 1), 1);
    }
}
