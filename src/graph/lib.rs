//! Graphs of operations as plain data: built by [`Builder`], differentiated by
//! [`differentiate`], reduced by [`fuse()`], ordered and placed in memory by [`Plan`].
//!
//! This crate knows no device, reads no clock and does no IO. Losses are **sums**: a graph's loss
//! is the pair (sum, count) over the rows it saw, and gradients are gradients of the sum, so that
//! micro-batches, masked targets and uneven shares add up exactly.

mod attention;
mod broadcasting;
pub mod builder;
mod convolutions;
mod crossing;
mod custom;
mod dot_attention;
mod elements;
mod ids;
mod indexing;
pub mod init;
mod loss_terms;
mod losses;
pub mod memory_layout;
pub mod model;
mod model_graph;
pub mod nn;
pub mod op;
pub mod optim;
mod part;
pub mod passes;
pub mod pictures;
pub mod plan;
mod planned_part;
mod pools;
mod precision;
pub mod print;
mod rank_reduction;
mod recurrent;
mod region;
mod replay;
mod resizing;
mod rotary;

pub mod shapes;
mod slots;
mod split;
pub mod update;
mod variant_choices;

pub use attention::{AttentionOptions, AttentionPlace, CacheUpdateOptions, CachedAttentionOptions};
pub use builder::Builder;
pub use crossing::{Crossing, crossings};
pub use custom::{CustomCall, CustomInput, CustomKernel, CustomNode, CustomOp, SharedCustomOp};
pub use dot_attention::DotAttentionOptions;
pub use elements::{Binary, BinarySide, Domain, Slope, Unary};
pub use ids::{IdError, IdRange};
pub use passes::fuse::fuse;
pub use passes::gradients::{OpGradients, differentiate, op_gradients};
pub use passes::large_parameters::cut_large_parameters;
pub use passes::recompute::{Recomputation, Recompute};
pub use passes::shard::{Shard, ShardError, reported_once, shard};
pub use passes::store_activations::ActivationFormat;

pub use op::{
    Cell, ColumnRange, EpilogueOp, IGNORE_INDEX, LossClasses, LossCount, NormBackward, Numbered,
    Op, Reduction,
};

pub use model_graph::{ModelGraph, RankGraph};

pub use loss_terms::{LossReduction, LossTerm};
pub use losses::{CrossEntropyOptions, ValueLoss};
pub use memory_layout::{Segment, Slot, SlotKind, TensorLocation};
pub use part::PlanPart;
pub use pictures::{Conv2dOptions, Pool2dOptions, PoolDivisor};
pub use plan::{Bucket, Plan, PlanOptions};
pub use planned_part::PlannedPart;
pub use precision::Precision;
pub use rank_reduction::{ClassLoss, ReducedTensors};
pub use region::Region;
pub use replay::replay;
pub use resizing::Interpolation;
pub use rotary::{RotaryAngles, RotaryScaling};
pub use shapes::ShapeError;
pub use split::{ParameterSplit, SplitError, SplitUnit};
pub use update::{BucketTensor, MomentFormat, MomentRounding, Update, UpdateRange, UpdateRates};
pub use variant_choices::VariantChoices;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use potluck_core::{DType, NodeId, ParamId, Shape, StateId, TensorId, TensorSlice};

/// Role of a tensor in the execution of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Set by the caller for each micro-batch.
    Input,
    /// Trained; the same for all rows.
    Parameter(ParamId),
    /// The accumulated gradient of a parameter: the sum over the rows of all micro-batches.
    Gradient(ParamId),
    /// `(2)`: the accumulated (sum, count) of the loss. In f32 the count is exact below 2^24;
    /// executors report one that is always exact.
    Loss,
    /// Stays on the device from step to step, without a gradient; see [`DeviceState`].
    State(StateId),
    /// Computed by a node and read by later nodes of the same micro-batch.
    Activation,
}

/// Tensor of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Display name, in printed graphs and in the report of a value that is not finite.
    pub name: String,
    pub shape: Shape,
    pub dtype: DType,
    pub role: Role,
    /// Tensor that holds the elements, if this one is an alias under another shape.
    pub alias_of: Option<TensorId>,
    /// Tensor of the forward pass that this one computes again for the backward pass, with the same
    /// values unless these follow from activations in bf16; see [`Recomputation`].
    pub repeats: Option<TensorId>,
}

impl Tensor {
    /// Returns the bytes of the elements of some rows.
    pub fn bytes(&self, rows: usize) -> usize {
        self.shape.elements(rows) * self.dtype.bytes()
    }
}

/// Pass that a node belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PassKind {
    /// Forward.
    #[default]
    Forward,
    /// Backward: the gradient of activations, and parameter gradients computed along with it.
    BackwardInput,
    /// Backward: the gradient of parameters, on which no other device waits.
    BackwardWeight,
}

/// Formats the pass as its letter: `F`, `B` or `W`.
impl fmt::Display for PassKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Forward => "F",
            Self::BackwardInput => "B",
            Self::BackwardWeight => "W",
        })
    }
}

/// Outputs of a node to whose contents it adds, instead of replacing them: a flag per output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Accumulation(u8);

impl Accumulation {
    /// All outputs are replaced.
    pub const NONE: Self = Self(0);

    /// Returns the flags of a node that adds to each of its outputs.
    pub fn all(outputs: usize) -> Self {
        Self::each(0..outputs)
    }

    /// Returns the flags of a node that adds to these of its outputs.
    pub fn each(outputs: Range<usize>) -> Self {
        let mut flags = Self::NONE;
        for output in outputs {
            flags.0 |= Self::only(output).0;
        }
        flags
    }

    /// Returns the flags of a node that adds to one of its outputs.
    pub fn only(output: usize) -> Self {
        Self(1 << output)
    }

    /// Returns true if the node adds to an output.
    pub fn has(self, output: usize) -> bool {
        self.0 & Self::only(output).0 != 0
    }

    /// Returns true if the node adds to one of its outputs.
    pub fn any(self) -> bool {
        self != Self::NONE
    }
}

/// Passes in which a node runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RunsIn {
    #[default]
    AllPasses,
    /// Passes outside of training, for nodes that training replaces or does not need.
    Evaluation,
    /// Passes of training, for nodes that keep results for the backward pass.
    Training,
}

impl RunsIn {
    /// Returns the passes in which one of two nodes runs.
    pub fn or(self, other: Self) -> Self {
        if self == other { self } else { Self::AllPasses }
    }

    /// Returns true if the node runs in a pass of training, or outside of it.
    pub fn includes(self, training: bool) -> bool {
        match self {
            Self::AllPasses => true,
            Self::Evaluation => !training,
            Self::Training => training,
        }
    }
}

/// Node of a graph: one application of an op.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub op: Op,
    pub inputs: Vec<TensorId>,
    pub outputs: Vec<TensorId>,
    /// Outputs to whose contents the node adds, instead of replacing them.
    pub accumulate: Accumulation,
    /// Arithmetic of an op that multiplies matrices; f32 of all others.
    pub precision: Precision,
    /// True for a gradient of the graph's loss, from which all other gradients follow: the loss
    /// scale multiplies it, and it alone.
    pub is_loss_gradient: bool,
    /// Passes in which the node runs.
    pub when: RunsIn,
    pub phase: PassKind,
    /// Index into [`Graph::blocks`].
    pub block: u32,
}

/// Initialization of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Zeros,
    Ones,
    /// Normal with mean 0.
    Normal {
        std: f32,
    },
    /// Uniform in `-bound .. bound`.
    Uniform {
        bound: f32,
    },
}

/// Kind of a parameter, by the way it changes from step to step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum ParameterKind {
    /// The optimizer, by the gradient of the loss.
    #[default]
    Trained,
    /// A running average of statistics of the batch: `(1 - momentum) state + momentum s`, with `s`
    /// the mean of what the micro-batches of a step have, weighted by their rows. Its gradient
    /// tensor accumulates `-rows s`. It has no part in the gradient's norm.
    State { momentum: f32 },
    /// Nothing: it has no gradient, no moments and no reduction, and is hashed, saved and restored
    /// like the others.
    Frozen,
}

impl ParameterKind {
    /// Returns true for a running average.
    pub fn is_state(self) -> bool {
        matches!(self, Self::State { .. })
    }
}

/// A tensor that lasts from step to step: trained, a running average, or frozen.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Unique: the name of the tensor, and of a slice of it with the rank or the rows behind.
    pub name: String,
    pub tensor: TensorId,
    pub kind: ParameterKind,
    pub init: Init,
    /// True if weight decay applies: by default to matrices, not to norm weights and biases.
    pub decay: bool,
    /// Rates of the optimizer, if it is trained.
    pub rates: UpdateRates,
    /// Tensor that accumulates its gradient, once the graph is differentiated; `None` if it is
    /// frozen.
    pub gradient: Option<TensorId>,
    /// Split over the ranks of a tensor group; `None` if each has all of it.
    pub split: Option<ParameterSplit>,
    /// True if each rank of a tensor group computes a part of its gradient, though all have the
    /// parameter.
    pub has_partial_gradient: bool,
    /// Tensor that it is a slice of, or the whole: in a [`shard()`] of a graph, and where a device
    /// cannot bind it whole ([`cut_large_parameters`]).
    pub whole: WholeTensor,
    /// Its part of that tensor.
    pub slice: TensorSlice,
    /// Rank of the tensor group that has this slice; `None` if every rank has it.
    pub rank: Option<u32>,
}

/// Tensor of floats that stays on the device from step to step: it has initial values, no gradient,
/// and no place in checkpoints. Every device whose nodes use it has all of it.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceState {
    /// Unique among the states.
    pub name: String,
    pub tensor: TensorId,
    pub init: StateInit,
}

/// Initial values of a [`DeviceState`].
#[derive(Clone, Debug, PartialEq)]
pub enum StateInit {
    Zeros,
    /// These values, row by row, as many as the state has elements.
    Values(Arc<[f32]>),
    /// Cosines and sines of positions, for [`Op::Rotary`].
    Rotary(RotaryAngles),
}

impl StateInit {
    /// Returns the values of a state of these dimensions, computed in f64.
    pub fn values(&self, dims: &[usize]) -> Vec<f64> {
        match self {
            Self::Zeros => vec![0.0; dims.iter().product()],
            Self::Values(values) => values.iter().map(|value| f64::from(*value)).collect(),
            Self::Rotary(angles) => angles.table(dims),
        }
    }
}

/// Tensor of a model whose slices are parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WholeTensor {
    /// Name in checkpoints.
    pub name: String,
    /// Number among the parameters of the whole graph, by which initial values are drawn.
    pub number: u32,
}

/// State that each slot of the batch carries from one step to the next: the hidden state of a
/// recurrent layer whose sequences are longer than a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// Input of floats: zeros where a sequence begins, and then what `output` was in the slot one
    /// step before.
    pub input: TensorId,
    /// Tensor of the forward pass, of the same shape.
    pub output: TensorId,
}

/// Graph in execution order: every node comes after the nodes that compute its inputs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    pub tensors: Vec<Tensor>,
    pub nodes: Vec<Node>,
    pub parameters: Vec<Parameter>,
    /// The inputs by name, in the order in which the builder made them.
    pub inputs: Vec<(String, TensorId)>,
    /// Tensors that the caller reads after the forward pass (logits, for example), by name.
    pub outputs: Vec<(String, TensorId)>,
    /// Inputs by which the caller selects the contents of an output, outside of training only.
    pub selectors: Vec<TensorId>,
    /// Tensors that stay on the device from step to step.
    pub states: Vec<DeviceState>,
    /// State that is carried from step to step. No gradient passes from one step to another.
    pub carried: Vec<Carried>,
    /// Names of the blocks, in forward order; a pipeline may be split between blocks.
    pub blocks: Vec<String>,
    /// The accumulator of the sum of the loss, its count, and the sums of its terms, if the graph
    /// has a loss.
    pub loss: Option<TensorId>,
    /// Names of the terms that are reported beside the loss.
    pub loss_terms: Vec<String>,
    /// Rank of a tensor group that runs the graph, if that is a [`shard()`].
    pub tensor_rank: Option<u32>,
}

impl Graph {
    /// Returns a tensor of this graph.
    ///
    /// # Panics
    /// Panics if the id belongs to another graph and is out of range; so does [`Self::node`].
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.index()]
    }

    /// Returns a node of this graph.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// Returns the rows of the loss for a number of samples: tokens, or samples of other data; 0
    /// without a loss.
    pub fn loss_rows(&self, samples: usize) -> usize {
        let Some(node) = self.loss_parts() else { return 0 };
        let parts = self.tensor(self.nodes[node].outputs[0]);
        parts.shape.elements(samples) / self.loss_length()
    }

    /// Returns the tensor that holds the elements of `id`: itself, or the one that it is an alias
    /// of.
    pub fn root(&self, id: TensorId) -> TensorId {
        let mut id = id;
        while let Some(base) = self.tensor(id).alias_of {
            id = base;
        }
        id
    }

    /// Returns the block of the node that computes a tensor; `None` for inputs and parameters.
    pub fn block_of(&self, tensor: TensorId) -> Option<u32> {
        let root = self.root(tensor);
        let writer = self.nodes.iter().find(|node| node.outputs.contains(&root))?;
        Some(writer.block)
    }

    /// Returns the bytes of the logits that the kernels of a node pass to each other, at a capacity
    /// of rows; `None` if they compute none.
    pub fn logits_bytes(&self, node: &Node, rows: usize) -> Option<usize> {
        let chunk = node.op.logits_rows()?;
        let [x, weight] = [0, 1].map(|input| &self.tensor(node.inputs[input]).shape);
        let all_rows = x.elements(rows) / x.last().max(1);
        let classes = weight.elements(rows) / weight.last().max(1);
        Some(chunk.min(all_rows).saturating_mul(classes).saturating_mul(DType::F32.bytes()))
    }

    /// Returns, for each parameter, the blocks that use it in the forward pass. A block that uses
    /// one slice of a tensor counts for all slices: the other ranks use theirs.
    pub fn users_of_parameters(&self) -> Vec<Vec<u32>> {
        let mut used: Vec<Vec<u32>> = vec![Vec::new(); self.parameters.len()];
        for node in self.nodes.iter().filter(|node| node.phase == PassKind::Forward) {
            for &input in &node.inputs {
                let Role::Parameter(id) = self.tensor(self.root(input)).role else { continue };
                for slice in self.slices_beside(id) {
                    used[slice.index()].push(node.block);
                }
            }
        }
        used
    }

    /// Parameters that are slices of the same tensor, the given one included.
    pub(crate) fn slices_beside(&self, id: ParamId) -> impl Iterator<Item = ParamId> + '_ {
        let number = self.parameters[id.index()].whole.number;
        let ids = (0..self.parameters.len() as u32).map(ParamId);
        ids.filter(move |other| self.parameters[other.index()].whole.number == number)
    }

    /// Returns true if several blocks use the same parameter, such as a tied embedding.
    pub fn has_tied_parameters(&self) -> bool {
        let users = self.users_of_parameters();
        users.iter().any(|blocks| blocks.iter().any(|block| *block != blocks[0]))
    }

    /// Returns the graph with the logits of its linear cross-entropy computed in chunks of `count`
    /// rows.
    #[must_use]
    pub fn with_loss_rows(mut self, count: usize) -> Self {
        for node in &mut self.nodes {
            if let Op::LinearCrossEntropy { rows, .. }
            | Op::LinearCrossEntropyGrad { rows, .. }
            | Op::LinearCrossEntropyPass { rows, .. } = &mut node.op
            {
                *rows = count;
            }
        }
        self
    }

    /// Returns the forward graph with label smoothing in its loss: `smoothing` (0 to 1) is the part
    /// of a target's probability that is divided among all classes. `None` if its loss is not a
    /// cross-entropy.
    pub fn with_label_smoothing(mut self, smoothing: f32) -> Option<Self> {
        let mut is_cross_entropy = false;
        for node in &mut self.nodes {
            if let Some(classes) = node.op.loss_classes_mut() {
                classes.smoothing = smoothing;
                is_cross_entropy = true;
            }
        }
        if is_cross_entropy { Some(self) } else { None }
    }

    /// Returns the input of this name.
    pub fn input(&self, name: &str) -> Option<TensorId> {
        find(&self.inputs, name)
    }

    /// Returns the output of this name.
    pub fn output(&self, name: &str) -> Option<TensorId> {
        find(&self.outputs, name)
    }

    /// Returns true if an input is carried from step to step.
    pub fn is_carried(&self, input: TensorId) -> bool {
        self.carried.iter().any(|carried| carried.input == input)
    }

    /// Returns true if an input selects the contents of an output, outside of training.
    pub fn is_selector(&self, input: TensorId) -> bool {
        self.selectors.contains(&input)
    }

    /// Returns the inputs on which a tensor of the forward pass depends outside of training, by
    /// name.
    pub fn inputs_of(&self, tensor: TensorId) -> Vec<&(String, TensorId)> {
        let mut needed = vec![false; self.tensors.len()];
        needed[self.root(tensor).index()] = true;
        for node in self.nodes.iter().rev() {
            if node.when == RunsIn::Training {
                continue;
            }
            for (number, output) in node.outputs.iter().enumerate() {
                if !needed[self.root(*output).index()] {
                    continue;
                }
                for input in &node.inputs[..node.op.inputs_of_output(number, node.inputs.len())] {
                    needed[self.root(*input).index()] = true;
                }
            }
        }
        self.inputs.iter().filter(|(_, id)| needed[id.index()]).collect()
    }

    /// Returns the tensors that the caller reads: the outputs, and the state for the next step.
    pub fn read_by_caller(&self) -> impl Iterator<Item = TensorId> + '_ {
        let outputs = self.outputs.iter().map(|(_, output)| *output);
        outputs.chain(self.carried.iter().map(|carried| carried.output))
    }

    /// Returns the inputs whose values data sets provide, by name: all but carried states and
    /// selectors.
    pub fn inputs_of_samples(&self) -> impl Iterator<Item = &(String, TensorId)> {
        let inputs = self.inputs.iter();
        inputs.filter(|(_, id)| !self.is_carried(*id) && !self.is_selector(*id))
    }

    /// Returns the inputs that are carried, with the number of their values per sample.
    pub fn carried_sizes(&self) -> impl Iterator<Item = (TensorId, usize)> + '_ {
        self.carried.iter().map(|of| (of.input, self.tensor(of.input).shape.per_row()))
    }

    /// Returns the smallest number of values that a sample contributes to a channel of a
    /// normalization over the batch; `None` without such a normalization.
    pub fn normalized_values_min(&self) -> Option<usize> {
        let mut smallest: Option<usize> = None;
        for node in self.nodes.iter().filter(|node| node.op.normalizes_over_batch()) {
            let shape = &self.tensor(node.inputs[0]).shape;
            let values = shape.per_row() / shape.last().max(1);
            smallest = Some(smallest.unwrap_or(values).min(values));
        }
        smallest
    }

    /// Returns the nodes of the forward pass of a training step, without nodes that only make an
    /// alias, convert formats or keep a result for the backward pass.
    pub fn forward_nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| {
            node.phase == PassKind::Forward
                && node.when == RunsIn::AllPasses
                && self.tensor(node.outputs[0]).alias_of.is_none()
                && !node.op.converts_format()
        })
    }

    /// Returns true if no node is of pass W: [`ModelGraph::with_merged_backward`] has moved them to
    /// pass B, or there is no backward pass.
    pub fn has_merged_backward(&self) -> bool {
        self.nodes.iter().all(|node| node.phase != PassKind::BackwardWeight)
    }

    /// Returns the nodes that recompute activations for the backward pass; see [`Recomputation`].
    pub fn repeated_nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| {
            let first = self.tensor(node.outputs[0]);
            first.repeats.is_some() && first.alias_of.is_none()
        })
    }

    /// Returns true if the graph was differentiated, so that its parameters have gradients.
    pub fn is_trained(&self) -> bool {
        self.parameters.iter().any(|parameter| parameter.gradient.is_some())
    }

    /// Returns the number of values of parameters, without running averages.
    pub fn parameter_count(&self) -> usize {
        self.count_of(|kind| !kind.is_state())
    }

    /// Returns the number of values of frozen parameters.
    pub fn frozen_count(&self) -> usize {
        self.count_of(|kind| kind == ParameterKind::Frozen)
    }

    fn count_of(&self, is_counted: impl Fn(ParameterKind) -> bool) -> usize {
        let mut count = 0;
        for parameter in &self.parameters {
            if is_counted(parameter.kind) {
                count += self.tensor(parameter.tensor).shape.per_row();
            }
        }
        count
    }
}

fn find(list: &[(String, TensorId)], name: &str) -> Option<TensorId> {
    let (_, id) = list.iter().find(|(known, _)| known == name)?;
    Some(*id)
}
