//! Graph builder. Each method adds a node and returns its output, or an error that names the shapes
//! that do not fit. The functions in `model` are examples of its use.

use super::attention::{
    AttentionOptions, AttentionPlace, CacheUpdateOptions, CachedAttentionOptions,
};
use super::broadcasting::runs_from_the_back;
use super::custom::CustomOp;
use super::elements::{Binary, Unary};
use super::nn::BatchNormOptions;
use super::op::{Cell, LossClasses, Op};
use super::pictures::Conv2dOptions;
use super::shapes::{self, CONCAT_INPUTS_MAX, ShapeError, Typed};
use super::{
    Accumulation, Carried, DeviceState, Graph, Init, Node, Parameter, ParameterKind,
    ParameterSplit, PassKind, Precision, Role, RunsIn, StateInit, Tensor, UpdateRates, WholeTensor,
};
use potluck_core::format::listed;
use potluck_core::{DType, ParamId, Shape, Site, StateId, TensorId, TensorSlice};

/// Result of the builder's methods: a tensor, or the reason why the shapes do not fit.
pub type BuildResult = Result<TensorId, ShapeError>;

/// Cache of the keys and values of an attention layer.
#[derive(Clone, Debug)]
pub struct CacheSpec {
    /// Name of the state, unique in the graph.
    pub name: String,
    /// Number of sequences in the cache.
    pub sequences: usize,
    /// Positions of a sequence: t.
    pub context: usize,
    /// Input of integers `(b, n)`: the place of each row, `sequence * t + position`.
    pub places: TensorId,
}

/// Builds a forward graph, node by node.
#[derive(Debug, Default)]
pub struct Builder {
    graph: Graph,
    sites: u32,
    scope: String,
    /// Pass of the nodes added next.
    phase: PassKind,
    /// Passes in which they run.
    when: RunsIn,
}

impl Builder {
    /// Creates a builder of an empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a builder that appends nodes of another pass to a graph.
    pub(super) fn resume(graph: Graph, phase: PassKind, scope: &str) -> Self {
        Self { graph, phase, scope: scope.to_string(), ..Self::default() }
    }

    /// Returns the finished forward graph.
    pub fn finish(self) -> Graph {
        self.graph
    }

    /// Returns the shape of a tensor built so far.
    pub fn shape(&self, x: TensorId) -> &Shape {
        &self.graph.tensor(x).shape
    }

    pub(super) fn dtype(&self, x: TensorId) -> DType {
        self.graph.tensor(x).dtype
    }

    /// Starts a block: a part of the model that a pipeline keeps on one device, and whose
    /// gradients are reduced together. Names of tensors made from now on begin with its name.
    pub fn block(&mut self, name: &str) {
        self.graph.blocks.push(name.to_string());
        self.scope = name.to_string();
    }

    /// Adds a batched float input with `dims[0]` entries of the leading dimension per sample.
    ///
    /// # Panics
    /// If `dims` is empty, or another input has the name.
    pub fn input(&mut self, name: &str, dims: &[usize]) -> TensorId {
        self.add_input(name, batched(name, dims), DType::F32)
    }

    /// Adds a batched integer input: token ids, class targets.
    ///
    /// # Panics
    /// Like [`Builder::input`].
    pub fn input_ids(&mut self, name: &str, dims: &[usize]) -> TensorId {
        self.add_input(name, batched(name, dims), DType::U32)
    }

    /// Adds a float input that all samples of a step share, without a dimension for the batch: a
    /// mask, or, with `dims` empty, a number that changes from step to step. Data sets do not
    /// provide its values. A tensor group refuses one that is combined with columns divided among
    /// its ranks.
    ///
    /// # Panics
    /// If another input has the name.
    pub fn shared_input(&mut self, name: &str, dims: &[usize]) -> TensorId {
        self.add_input(name, Shape::fixed(dims), DType::F32)
    }

    /// Adds an integer input that all samples of a step share: see [`Builder::shared_input`].
    ///
    /// # Panics
    /// Like [`Builder::shared_input`].
    pub fn shared_input_ids(&mut self, name: &str, dims: &[usize]) -> TensorId {
        self.add_input(name, Shape::fixed(dims), DType::U32)
    }

    pub(super) fn add_input(&mut self, name: &str, shape: Shape, dtype: DType) -> TensorId {
        assert!(self.graph.input(name).is_none(), "two inputs are called {name}");
        let id = self.add_tensor(name.to_string(), (shape, dtype), Role::Input);
        self.graph.inputs.push((name.to_string(), id));
        id
    }

    /// Returns the input with the ids of the samples in the batch, `(b)`, by which random numbers
    /// are keyed.
    fn samples(&mut self) -> TensorId {
        match self.graph.input("samples") {
            Some(id) => id,
            None => self.input_ids("samples", &[1]),
        }
    }

    /// Adds a parameter with a unique name; weight decay applies if it has at least two
    /// dimensions.
    ///
    /// # Panics
    /// If another parameter or running average has the name.
    pub fn parameter(&mut self, name: &str, dims: &[usize], init: Init) -> TensorId {
        self.add_parameter(name, dims, init, ParameterKind::Trained)
    }

    /// Adds a running average with a unique name; see [`ParameterKind::State`].
    ///
    /// # Panics
    /// Like [`Builder::parameter`].
    pub fn state(&mut self, name: &str, dims: &[usize], init: Init, momentum: f32) -> TensorId {
        self.add_parameter(name, dims, init, ParameterKind::State { momentum })
    }

    fn add_parameter(
        &mut self,
        name: &str,
        dims: &[usize],
        init: Init,
        kind: ParameterKind,
    ) -> TensorId {
        let taken = self.graph.parameters.iter().any(|p| p.name == name);
        assert!(!taken, "two parameters are called {name}");
        let id = ParamId(self.graph.parameters.len() as u32);
        let typed = (Shape::fixed(dims), DType::F32);
        let tensor = self.add_tensor(name.to_string(), typed, Role::Parameter(id));
        let decay = kind == ParameterKind::Trained && dims.len() >= 2;
        let parameter = Parameter {
            name: name.into(),
            tensor,
            kind,
            init,
            decay,
            rates: UpdateRates::default(),
            gradient: None,
            split: None,
            has_partial_gradient: false,
            whole: WholeTensor { name: name.into(), number: id.0 },
            slice: TensorSlice::whole(dims),
            rank: None,
        };
        self.graph.parameters.push(parameter);
        tensor
    }

    /// Adds a tensor of floats with a unique name that stays on the device from step to step; see
    /// [`DeviceState`].
    ///
    /// # Panics
    /// If another state has the name, or there are not as many values as elements.
    pub fn device_state(&mut self, name: &str, dims: &[usize], init: StateInit) -> TensorId {
        if let StateInit::Values(values) = &init {
            let elements: usize = dims.iter().product();
            assert_eq!(values.len(), elements, "values of the state {name}");
        }
        let taken = self.graph.states.iter().any(|state| state.name == name);
        assert!(!taken, "two states are called {name}");
        let id = StateId(self.graph.states.len() as u32);
        let tensor =
            self.add_tensor(name.into(), (Shape::fixed(dims), DType::F32), Role::State(id));
        self.graph.states.push(DeviceState { name: name.into(), tensor, init });
        tensor
    }

    pub(super) fn state_of(&self, name: &str) -> Option<&DeviceState> {
        self.graph.states.iter().find(|state| state.name == name)
    }

    /// Applies rotary position embedding to each head of `x (b, t, heads d)`, with a table `(t, d)`
    /// of cosines and sines ([`StateInit::Rotary`]); see [`Op::Rotary`].
    ///
    /// # Errors
    /// Returns [`ShapeError`] if `d` is odd or does not divide the columns.
    pub fn rotary(&mut self, x: TensorId, table: TensorId) -> BuildResult {
        self.apply(Op::Rotary { inverse: false }, &[x, table])
    }

    /// Sets how the ranks of a tensor group divide the parameters added so far: `rule` returns it
    /// by name, and `None` for parameters that each rank has whole.
    pub fn split_parameters(&mut self, rule: impl Fn(&str) -> Option<ParameterSplit>) {
        for parameter in &mut self.graph.parameters {
            parameter.split = rule(&parameter.name);
        }
    }

    /// Marks a tensor as read after the forward pass, and names it.
    ///
    /// # Panics
    /// If another output has the name.
    pub fn output(&mut self, name: &str, x: TensorId) {
        assert!(self.graph.output(name).is_none(), "two outputs are called {name}");
        self.graph.outputs.push((name.to_string(), x));
    }

    /// Makes an input the state that each slot of the batch carries from step to step: zeros at
    /// first, then the value of `output` in the previous step, and zeros again in a slot where that
    /// is not finite. Data sets do not provide its values.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the two are not floats of one shape, if the input is carried
    /// already, and if `output` is an input itself.
    pub fn carry(&mut self, input: TensorId, output: TensorId) -> Result<(), ShapeError> {
        let are_floats = self.dtype(input) == DType::F32 && self.dtype(output) == DType::F32;
        let are_alike = are_floats && self.shape(input) == self.shape(output);
        let why = if !self.graph.is_input(input) || !are_alike {
            "a state is an input of floats, and its next value has the same shape"
        } else if self.graph.is_carried(input) {
            "the input is carried already, and has one next value"
        } else if self.graph.is_input(self.graph.root(output)) {
            "the next value of a state is computed, and not an input"
        } else {
            self.graph.carried.push(Carried { input, output });
            return Ok(());
        };
        let inputs = format!("{} and {}", self.shape(input), self.shape(output));
        Err(ShapeError { op: "carry".into(), inputs, why: why.into() })
    }

    /// Computes `a @ b`; see [`Op::MatMul`]. A right side without batch applies to all leading
    /// dimensions of `a`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the inner dimensions differ, and for sums over the batch of a
    /// forward pass, which is divided among devices and micro-batches.
    pub fn matmul(&mut self, a: TensorId, b: TensorId, ta: bool, tb: bool) -> BuildResult {
        let op = Op::MatMul { transpose_a: ta, transpose_b: tb };
        let shape = self.shape(a).clone();
        if ta && shape.rank() == 2 {
            self.refuse_batch("matmul", a)?;
        }
        if self.shape(b).rank() != 2 || shape.rank() < 3 || ta {
            return self.apply(op, &[a, b]);
        }
        let dims = shape.dims();
        let rows: usize = dims[..dims.len() - 1].iter().product();
        let flat = self.reshape(a, &[rows, shape.last()])?;
        let product = self.apply(op, &[flat, b])?;
        let mut wanted = dims.to_vec();
        wanted[dims.len() - 1] = self.shape(product).last();
        self.reshape(product, &wanted)
    }

    /// Computes `x (.., in) @ weight^T + bias`, with `weight (out, in)`, as in PyTorch's `Linear`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if `x` has not as many columns as the weight.
    pub fn linear(&mut self, x: TensorId, weight: TensorId, bias: Option<TensorId>) -> BuildResult {
        let inputs = self.shape(x).last();
        let of_weight = self.shape(weight).dims();
        if of_weight.len() == 2 && of_weight[1] != inputs {
            let is_transposed = of_weight[0] == inputs;
            let hint = if is_transposed { "; this one is transposed" } else { "" };
            let why = format!("wants a weight (out, {inputs}){hint}");
            return Err(self.refused("linear", &[x, weight], why));
        }
        let y = self.matmul(x, weight, false, true)?;
        self.with_bias(y, bias)
    }

    pub(super) fn with_bias(&mut self, y: TensorId, bias: Option<TensorId>) -> BuildResult {
        match bias {
            Some(bias) => self.add(y, bias),
            None => Ok(y),
        }
    }

    /// Computes `a + b`, elementwise, broadcast as by [`Builder::binary`].
    pub fn add(&mut self, a: TensorId, b: TensorId) -> BuildResult {
        self.binary(Binary::Add, a, b)
    }

    /// Computes `a - b`, elementwise, broadcast as by [`Builder::binary`].
    pub fn sub(&mut self, a: TensorId, b: TensorId) -> BuildResult {
        self.binary(Binary::Sub, a, b)
    }

    /// Computes `a / b`, elementwise, broadcast as by [`Builder::binary`].
    pub fn div(&mut self, a: TensorId, b: TensorId) -> BuildResult {
        self.binary(Binary::Div, a, b)
    }

    /// Computes the larger of `a` and `b`, elementwise, broadcast as by [`Builder::binary`]. Where
    /// they are equal, each has half of the gradient, as in PyTorch.
    pub fn maximum(&mut self, a: TensorId, b: TensorId) -> BuildResult {
        self.binary(Binary::Maximum, a, b)
    }

    /// Computes `a * b`, elementwise, broadcast as by [`Builder::binary`].
    pub fn mul(&mut self, a: TensorId, b: TensorId) -> BuildResult {
        self.binary(Binary::Mul, a, b)
    }

    /// Computes `factor * x`.
    pub fn scale(&mut self, x: TensorId, factor: f32) -> BuildResult {
        self.unary(x, Unary::Scale(factor))
    }

    /// Computes `max(x, 0)`, elementwise; the gradient at 0 is 0.
    pub fn relu(&mut self, x: TensorId) -> BuildResult {
        self.unary(x, Unary::Relu)
    }

    /// Computes `1 / (1 + exp(-x))`, elementwise.
    pub fn sigmoid(&mut self, x: TensorId) -> BuildResult {
        self.unary(x, Unary::Sigmoid)
    }

    /// Computes the hyperbolic tangent, elementwise.
    pub fn tanh(&mut self, x: TensorId) -> BuildResult {
        self.unary(x, Unary::Tanh)
    }

    /// Computes `x / (1 + exp(-x))`, elementwise.
    pub fn silu(&mut self, x: TensorId) -> BuildResult {
        self.unary(x, Unary::Silu)
    }

    /// Computes the exponential, elementwise.
    pub fn exp(&mut self, x: TensorId) -> BuildResult {
        self.unary(x, Unary::Exp)
    }

    /// Computes the natural logarithm, elementwise.
    pub fn log(&mut self, x: TensorId) -> BuildResult {
        self.unary(x, Unary::Log)
    }

    /// Computes the square root, elementwise.
    pub fn sqrt(&mut self, x: TensorId) -> BuildResult {
        self.unary(x, Unary::Sqrt)
    }

    /// Applies a function of one argument, elementwise.
    pub fn unary(&mut self, x: TensorId, function: Unary) -> BuildResult {
        self.apply(Op::Unary(function), &[x])
    }

    /// Returns the same elements under other dimensions (per row, if `x` is batched).
    pub fn reshape(&mut self, x: TensorId, dims: &[usize]) -> BuildResult {
        let shape = self.shape(x).with_dims(dims);
        if shape.per_row() != self.shape(x).per_row() || (dims.is_empty() && shape.is_batched()) {
            return Err(ShapeError {
                op: Op::Reshape.to_string(),
                inputs: self.shape(x).to_string(),
                why: format!("{shape} has another number of elements"),
            });
        }
        let alias = self.graph.add_reshape(x, shape, self.phase);
        if let Some(node) = self.graph.nodes.last_mut() {
            node.when = self.when;
        }
        Ok(alias)
    }

    /// Reorders axes: axis `i` of the result is axis `axes[i]` of `x`. Axis 0 of a batched tensor,
    /// the batch, stays where it is.
    pub fn permute(&mut self, x: TensorId, axes: &[usize]) -> BuildResult {
        self.apply(Op::Permute { axes: axes.to_vec() }, &[x])
    }

    /// Takes `length` places from `start` on along an axis.
    pub fn slice(&mut self, x: TensorId, axis: usize, start: usize, length: usize) -> BuildResult {
        self.apply(Op::Slice { axis, start, length }, &[x])
    }

    /// Joins tensors along an axis; all other dimensions are equal. More than 7 are joined in
    /// groups.
    pub fn concat(&mut self, parts: &[TensorId], axis: usize) -> BuildResult {
        if parts.len() > CONCAT_INPUTS_MAX {
            return self.concat_all(parts.to_vec(), axis);
        }
        self.apply(Op::Concat { axis }, parts)
    }

    /// Computes the sum over any set of axes, which are removed.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if there is no such axis, and in a forward pass for the batch (axis 0
    /// of a batched tensor): devices and micro-batches have parts of it, so that the sum would
    /// depend on them. A loss sums over it, and so do gradients of parameters.
    pub fn sum(&mut self, x: TensorId, axes: &[usize]) -> BuildResult {
        if axes.contains(&0) {
            self.refuse_batch("sum", x)?;
        }
        let mut x = x;
        for [first, last] in runs_from_the_back(axes) {
            x = self.apply(Op::Sum { first, last }, &[x])?;
        }
        Ok(x)
    }

    /// Refuses a sum over the first axis of `x` if that is the batch of a forward pass.
    fn refuse_batch(&self, op: &str, x: TensorId) -> Result<(), ShapeError> {
        let shape = self.shape(x);
        if self.phase != PassKind::Forward || !shape.is_batched() {
            return Ok(());
        }
        let why = "the batch is divided among devices and micro-batches; a loss sums over it";
        Err(ShapeError { op: op.into(), inputs: shape.to_string(), why: why.into() })
    }

    /// Computes the mean over any set of axes, which are removed.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if there is no such axis, and for the batch, whose size differs from
    /// one micro-batch to another.
    pub fn mean(&mut self, x: TensorId, axes: &[usize]) -> BuildResult {
        let shape = self.shape(x).clone();
        if shape.is_batched() && axes.contains(&0) {
            return Err(ShapeError {
                op: "mean".into(),
                inputs: shape.to_string(),
                why: "the batch has no fixed size".into(),
            });
        }
        let sum = self.sum(x, axes)?;
        let count = shape.per_row() / self.shape(sum).per_row();
        self.scale(sum, 1.0 / count as f32)
    }

    /// Computes layer normalization over the last dimension, with a weight `weight (c)` and an
    /// optional bias `(c)`, and `eps = 1e-5`.
    pub fn layer_norm(
        &mut self,
        x: TensorId,
        weight: TensorId,
        bias: Option<TensorId>,
    ) -> BuildResult {
        self.layer_norm_eps(x, weight, bias, 1e-5)
    }

    /// Computes [`Builder::layer_norm`] with another addend `eps` of the variance.
    pub fn layer_norm_eps(
        &mut self,
        x: TensorId,
        weight: TensorId,
        bias: Option<TensorId>,
        eps: f32,
    ) -> BuildResult {
        let inputs: Vec<TensorId> = [x, weight].into_iter().chain(bias).collect();
        self.apply(Op::LayerNorm { eps }, &inputs)
    }

    /// Computes the root mean square normalization over the last dimension, with a weight
    /// `weight (c)`; the default `eps` of PyTorch's `RMSNorm` is `f32::EPSILON`.
    pub fn rms_norm(&mut self, x: TensorId, weight: TensorId, eps: f32) -> BuildResult {
        self.apply(Op::RmsNorm { eps }, &[x, weight])
    }

    /// Computes group normalization of `x (b, .., c)`, the channels last, with weight and bias
    /// `(c)`: over all positions of a sample and `c / groups` channels, with `eps = 1e-5`, as
    /// PyTorch's `GroupNorm`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if `groups` does not divide the channels, or the shapes do not fit.
    pub fn group_norm(
        &mut self,
        x: TensorId,
        groups: usize,
        weight: TensorId,
        bias: TensorId,
    ) -> BuildResult {
        self.group_norm_eps(x, groups, [weight, bias], 1e-5)
    }

    /// Computes [`Builder::group_norm`] with another addend `eps` of the variance.
    ///
    /// # Errors
    /// Returns the errors of [`Builder::group_norm`].
    pub fn group_norm_eps(
        &mut self,
        x: TensorId,
        groups: usize,
        [weight, bias]: [TensorId; 2],
        eps: f32,
    ) -> BuildResult {
        self.apply(Op::GroupNorm { groups, eps }, &[x, weight, bias])
    }

    /// Computes the softmax over the last dimension.
    pub fn softmax(&mut self, x: TensorId) -> BuildResult {
        self.apply(Op::Softmax, &[x])
    }

    /// Computes batch normalization of `x (b, .., c)` by channel, with PyTorch's parameters of
    /// `BatchNorm2d`: `NAME.weight` and `NAME.bias (c)`, and the running averages
    /// `NAME.running_mean` and `NAME.running_var (c)`. It adds all of them.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if `x` is not batched or has no channels.
    ///
    /// # Panics
    /// If another parameter or running average has one of the names.
    pub fn batch_norm(&mut self, name: &str, x: TensorId) -> BuildResult {
        self.batch_norm_with(name, x, BatchNormOptions::default())
    }

    /// Computes [`Builder::batch_norm`] with other options.
    ///
    /// # Errors
    /// Returns the errors of [`Builder::batch_norm`].
    ///
    /// # Panics
    /// Like [`Builder::batch_norm`].
    pub fn batch_norm_with(
        &mut self,
        name: &str,
        x: TensorId,
        options: BatchNormOptions,
    ) -> BuildResult {
        let BatchNormOptions { eps, momentum } = options;
        let shape = self.shape(x);
        if !shape.is_batched() || shape.dims()[0] != 1 {
            return Err(ShapeError {
                op: format!("batch_norm {name}"),
                inputs: shape.to_string(),
                why: "x is (b, .., c)".into(),
            });
        }
        let c = [self.shape(x).last()];
        let weight = self.parameter(&format!("{name}.weight"), &c, Init::Ones);
        let bias = self.parameter(&format!("{name}.bias"), &c, Init::Zeros);
        let mean = self.state(&format!("{name}.running_mean"), &c, Init::Zeros, momentum);
        let variance = self.state(&format!("{name}.running_var"), &c, Init::Ones, momentum);
        self.apply(Op::BatchNorm { eps }, &[x, weight, bias, mean, variance])
    }

    /// Computes a recurrent layer over `x (b, t, in)`, with the parameters of PyTorch's `LSTM` and
    /// `GRU`: `weight_ih (g h, in)`, `weight_hh (g h, h)`, and the biases `bias_ih` and `bias_hh
    /// (g h)` of `g` gates. `state` is empty, for zeros, or has `h0 (b, h)` and, for an LSTM, `c0
    /// (b, h)`. Returns the hidden values `y (b, t, h)` and, of an LSTM, the cell values of the
    /// same shape, which have no gradient: a loss must not depend on them. The state after the
    /// last time step is the [`Builder::last_step`] of each.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes do not fit.
    pub fn recurrent(
        &mut self,
        cell: Cell,
        x: TensorId,
        [weight_ih, weight_hh, bias_ih, bias_hh]: [TensorId; 4],
        state: &[TensorId],
    ) -> Result<(TensorId, Option<TensorId>), ShapeError> {
        let gates = self.linear(x, weight_ih, Some(bias_ih))?;
        let inputs = [&[gates, weight_hh, bias_hh], state].concat();
        let outputs = self.apply_all(Op::Recurrent { cell }, &inputs)?;
        Ok((outputs[0], outputs.get(2).copied()))
    }

    /// Returns the last time step `(b, h)` of `x (b, t, h)`.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if `x` has another number of dimensions, or no time step.
    pub fn last_step(&mut self, x: TensorId) -> BuildResult {
        let [b, t, h] = *self.shape(x).dims() else {
            return Err(ShapeError {
                op: "last_step".into(),
                inputs: self.shape(x).to_string(),
                why: "expects (b, t, h)".into(),
            });
        };
        let step = self.slice(x, 1, t.saturating_sub(1), 1)?;
        self.reshape(step, &[b, h])
    }

    /// Computes causal attention over `qkv (b, t, 3c)`; see [`Op::Attention`].
    pub fn attention(&mut self, qkv: TensorId, heads: usize, dropout: f32) -> BuildResult {
        self.attention_of(qkv, heads, true, dropout)
    }

    /// Computes attention over `qkv (b, t, 3c)` in which every query sees all keys; see
    /// [`Op::Attention`].
    pub fn full_attention(&mut self, qkv: TensorId, heads: usize, dropout: f32) -> BuildResult {
        self.attention_of(qkv, heads, false, dropout)
    }

    fn attention_of(
        &mut self,
        qkv: TensorId,
        heads: usize,
        causal: bool,
        dropout: f32,
    ) -> BuildResult {
        let shape = self.shape(qkv);
        if shape.rank() != 3 {
            return Err(self.refused("attention", &[qkv], "wants (b, t, 3c)".into()));
        }
        let width = shape.last();
        // Without heads, the shape rule of the op reports the error.
        if heads > 0 && !width.is_multiple_of(heads.saturating_mul(3)) {
            let op = Op::Attention(AttentionOptions::packed(heads, 0)).to_string();
            let why = format!("3c = {width} must be a multiple of 3 * {heads} heads");
            return Err(ShapeError { op, inputs: self.shape(qkv).to_string(), why });
        }
        let head_width = (width / 3).checked_div(heads).unwrap_or(0);
        let packed = AttentionOptions::packed(heads, head_width);
        let places = packed.places.map(|place| (qkv, place.first));
        self.attention_over(places, AttentionOptions { causal, dropout, ..packed })
    }

    /// Computes attention over queries, keys and values, each given by the tensor `(b, t, ..)` that
    /// contains it and its first column there; several may be in one tensor. The places and the
    /// site of the options are set by the builder; see [`Op::Attention`].
    ///
    /// # Errors
    /// Returns [`ShapeError`] if a column of a tensor belongs to none or several of the three, or
    /// `kv_heads` does not divide `heads`.
    pub fn attention_over(
        &mut self,
        places: [(TensorId, usize); 3],
        options: AttentionOptions,
    ) -> BuildResult {
        let mut inputs: Vec<TensorId> = Vec::new();
        let places = places.map(|(tensor, first)| attention_place(&mut inputs, tensor, first));
        let site = self.next_site();
        let op = Op::Attention(AttentionOptions { places, site, ..options });
        if op.is_random() {
            inputs.push(self.samples());
        }
        self.apply(op, &inputs)
    }

    /// Computes attention of rows over a new cache of keys and values: each row writes its keys and
    /// values to its place `(b, n)`, and its query sees the entries of its sequence up to its own
    /// position. The columns are given as in [`Builder::attention_over`]; only the heads of the
    /// options are used. See [`Op::CacheUpdate`] and [`Op::CachedAttention`].
    ///
    /// # Errors
    /// Returns [`ShapeError`] if a tensor lacks the columns, or `kv_heads` does not divide
    /// `heads`.
    ///
    /// # Panics
    /// If another state has the cache's name.
    pub fn cached_attention(
        &mut self,
        columns: [(TensorId, usize); 3],
        options: AttentionOptions,
        cache: &CacheSpec,
    ) -> BuildResult {
        let [(queries, first), keys, values] = columns;
        let AttentionOptions { heads, kv_heads, head_width, .. } = options;
        let mut inputs: Vec<TensorId> = Vec::new();
        let places =
            [keys, values].map(|(tensor, first)| attention_place(&mut inputs, tensor, first));
        let update = CacheUpdateOptions {
            places,
            kv_heads,
            head_width,
            sequences: cache.sequences,
            context: cache.context,
        };
        inputs.push(cache.places);
        let state = self.device_state(&cache.name, &update.cache(), StateInit::Zeros);
        let op = Op::CacheUpdate(update);
        self.graph.shapes_of(&op, &inputs)?;
        let changed = op.changes_in_place();
        self.graph.push_node(op, &inputs, vec![state], changed, self.phase);
        let op = Op::CachedAttention(CachedAttentionOptions { heads, first });
        self.apply(op, &[queries, state, cache.places])
    }

    /// Computes a 2D convolution of pictures `x (b, h, w, c)` with `weight (o, c/groups, kh, kw)`
    /// and an optional `bias (o)`: `(b, oh, ow, o)`, with
    /// `oh = (h + 2 padding - dilation (kh - 1) - 1) / stride + 1`, rounded down, and `ow` alike.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the kernel is larger than the padded picture, the groups do not
    /// divide the channels, or a stride is 0.
    pub fn conv2d(
        &mut self,
        x: TensorId,
        weight: TensorId,
        bias: Option<TensorId>,
        options: Conv2dOptions,
    ) -> BuildResult {
        let y = self.apply(Op::Conv2d(options), &[x, weight])?;
        self.with_bias(y, bias)
    }

    /// Looks up rows of `table (v, c)` by `ids`.
    pub fn embedding(&mut self, ids: TensorId, table: TensorId) -> BuildResult {
        self.apply(Op::Embedding { first: 0 }, &[ids, table])
    }

    /// Drops elements of a batched tensor with probability `p` while training: none with 0, all
    /// with 1.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if `p` is not from 0 to 1 or `x` is not batched.
    pub fn dropout(&mut self, x: TensorId, p: f32) -> BuildResult {
        if p == 0.0 {
            return Ok(x);
        }
        let site = self.next_site();
        let samples = self.samples();
        self.apply(Op::Dropout { p, site, columns: None }, &[x, samples])
    }

    /// Makes the cross-entropy of `logits (.., v)` with integer targets the loss of the graph.
    /// Targets equal to [`super::IGNORE_INDEX`] count neither in the sum nor in the count.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the graph has a loss already, or there is not one target per row
    /// of the logits.
    pub fn cross_entropy_loss(&mut self, logits: TensorId, targets: TensorId) -> BuildResult {
        self.smoothed_cross_entropy_loss(logits, targets, 0.0)
    }

    /// Makes the cross-entropy with label smoothing the loss of the graph.
    pub(super) fn smoothed_cross_entropy_loss(
        &mut self,
        logits: TensorId,
        targets: TensorId,
        smoothing: f32,
    ) -> BuildResult {
        let op = "cross_entropy_loss";
        self.require_no_loss(op, [logits, targets])?;
        self.require_targets_of_samples(op, [logits, targets])?;
        let [logits, targets] = self.rows_of_classes(op, logits, targets)?;
        let classes = LossClasses { smoothing, ..LossClasses::whole(self.shape(logits).last()) };
        let parts = self.apply(Op::CrossEntropy(classes), &[logits, targets])?;
        Ok(self.add_loss(parts))
    }

    /// Checks that `x (.., v)` has an axis of classes, or of the channels that give them, besides
    /// the batch.
    fn require_axis_of_classes(
        &self,
        op: &str,
        [x, targets]: [TensorId; 2],
    ) -> Result<(), ShapeError> {
        let shape = self.shape(x);
        if shape.rank() > usize::from(shape.is_batched()) {
            return Ok(());
        }
        let why = "a row needs an axis of its own, besides the batch: (b, v)";
        Err(self.refused(op, &[x, targets], why.into()))
    }

    /// Returns logits as rows `(n, v)`, and their targets `(n)`.
    ///
    /// # Errors
    /// Returns the [`ShapeError`] of `op` if there is not one target per row.
    pub(super) fn rows_of_classes(
        &mut self,
        op: &str,
        logits: TensorId,
        targets: TensorId,
    ) -> Result<[TensorId; 2], ShapeError> {
        let shape = self.shape(logits).clone();
        let wanted = self.shape(targets).clone();
        self.require_axis_of_classes(op, [logits, targets])?;
        let classes = shape.last();
        if let Some(rows) = shape.per_row().checked_div(classes) {
            let rows = shape.with_dims(&[rows]);
            if wanted.with_dims(&[wanted.per_row()]) != rows {
                let why = format!(
                    "the logits have {rows} rows of {classes} classes, and the targets are \
                     {wanted}; give one target per row"
                );
                return Err(self.refused(op, &[logits, targets], why));
            }
        }
        let rows = shape.per_row() / classes.max(1);
        Ok([self.reshape(logits, &[rows, classes])?, self.reshape(targets, &[rows])?])
    }

    /// Makes the squared error, averaged over all elements, the loss of the graph.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the graph has a loss already, or the two have not one shape.
    pub fn squared_error_loss(&mut self, x: TensorId, target: TensorId) -> BuildResult {
        self.require_no_loss("squared_error_loss", [x, target])?;
        let parts = self.apply(Op::SquaredError, &[x, target])?;
        Ok(self.add_loss(parts))
    }

    /// Makes the cross-entropy of the logits `x (.., c) weight (v, c)^T` and the integer targets,
    /// averaged over the targets that are classes, the loss of the graph. Logits are computed in
    /// chunks of `rows` rows, forward and backward at once in training, so that they only take the
    /// memory of one chunk; see [`Op::LinearCrossEntropy`].
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the graph has a loss already, or there is not one target per row.
    pub fn linear_cross_entropy_loss(
        &mut self,
        x: TensorId,
        weight: TensorId,
        targets: TensorId,
        rows: usize,
    ) -> BuildResult {
        self.require_no_loss("linear_cross_entropy_loss", [x, targets])?;
        self.require_targets_of_samples("linear_cross_entropy_loss", [x, targets])?;
        self.require_axis_of_classes("linear_cross_entropy_loss", [x, targets])?;
        let c = self.shape(x).last();
        let flat = self.reshape(x, &[self.shape(x).per_row() / c.max(1), c])?;
        let targets = self.reshape(targets, &[self.shape(targets).per_row()])?;
        let classes = LossClasses::whole(self.shape(weight).dims().first().copied().unwrap_or(0));
        let op = Op::LinearCrossEntropy { rows, classes };
        let parts = self.apply(op, &[flat, weight, targets])?;
        Ok(self.add_loss(parts))
    }

    /// Adds nodes that run outside of training only, such as an output for inspection between two
    /// steps.
    ///
    /// # Errors
    /// Returns the error of `add`.
    pub fn outside_of_training<T>(
        &mut self,
        add: impl FnOnce(&mut Self) -> Result<T, ShapeError>,
    ) -> Result<T, ShapeError> {
        let before = std::mem::replace(&mut self.when, RunsIn::Evaluation);
        let added = add(self);
        self.when = before;
        added
    }

    /// Adds a batched float input by which the caller selects the contents of an output, outside of
    /// training; data sets do not provide its values. See [`Builder::input`].
    pub fn selector(&mut self, name: &str, dims: &[usize]) -> TensorId {
        let input = self.input(name, dims);
        self.graph.selectors.push(input);
        input
    }

    pub(super) fn require_no_loss(
        &self,
        op: &str,
        inputs: [TensorId; 2],
    ) -> Result<(), ShapeError> {
        if self.graph.loss.is_none() {
            return Ok(());
        }
        let why = "the graph has a loss already, and can have one; make other values outputs";
        Err(self.refused(op, &inputs, why.into()))
    }

    /// Checks that the inputs of a loss are batched: it counts the targets of samples.
    pub(super) fn require_targets_of_samples(
        &self,
        op: &str,
        inputs: [TensorId; 2],
    ) -> Result<(), ShapeError> {
        if inputs.iter().all(|input| self.shape(*input).is_batched()) {
            return Ok(());
        }
        let why = "wants logits and targets of each sample, and not some that samples share";
        Err(self.refused(op, &inputs, why.into()))
    }

    pub(super) fn refused(&self, op: &str, inputs: &[TensorId], why: String) -> ShapeError {
        let inputs = listed(inputs.iter().map(|input| self.shape(*input).to_string()));
        ShapeError { op: op.into(), inputs, why }
    }

    /// Names the terms of the loss that is added next.
    pub(super) fn name_loss_terms(&mut self, names: Vec<String>) {
        self.graph.loss_terms = names;
    }

    /// Sums `parts (n, 2 + terms)` into the accumulator of the loss.
    pub(super) fn add_loss(&mut self, parts: TensorId) -> TensorId {
        let typed = (Shape::fixed(&[self.graph.loss_length()]), DType::F32);
        let loss = self.add_tensor("loss".into(), typed, Role::Loss);
        let op = Op::Sum { first: 0, last: 0 };
        self.graph.push_node(op, &[parts], vec![loss], Accumulation::all(1), PassKind::Forward);
        self.graph.loss = Some(loss);
        loss
    }

    /// Adds an op that is defined outside the crate.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the inputs are not those that the op lists, if it takes none or
    /// more than 7, or if its shape rule refuses them.
    pub fn custom(&mut self, op: impl CustomOp + 'static, inputs: &[TensorId]) -> BuildResult {
        self.apply(Op::custom(op), inputs)
    }

    fn next_site(&mut self) -> Site {
        self.sites += 1;
        Site(self.sites)
    }

    /// Adds any op and returns its first output.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes of the inputs do not fit, if a tensor would have no
    /// elements, and for ops that only other functions make: [`Builder::reshape`] an
    /// [`Op::Reshape`], [`super::fuse()`] an [`Op::Fused`],
    /// [`with_activations`](super::ModelGraph::with_activations) an [`Op::PackBf16`] and an
    /// [`Op::UnpackBf16`], [`super::shard()`] an [`Op::Spread`], an [`Op::AllReduce`], and an
    /// [`Op::Embedding`] or [`Op::CrossEntropy`] whose `first` is not 0.
    pub fn apply(&mut self, op: Op, inputs: &[TensorId]) -> BuildResult {
        Ok(self.apply_all(op, inputs)?[0])
    }

    /// Adds any op and returns all its outputs; see [`Builder::apply`].
    pub fn apply_all(&mut self, op: Op, inputs: &[TensorId]) -> Result<Vec<TensorId>, ShapeError> {
        let why = match op {
            Op::Reshape => Some("is made by Builder::reshape"),
            Op::Spread | Op::AllReduce(_) => Some("is made by shard"),
            // In a whole graph, ranges of ids and counts of targets begin at 0.
            Op::Embedding { first: 1.. } | Op::CrossEntropy(LossClasses { first: 1.., .. }) => {
                Some("is made by shard, and of a whole graph begins with row or class 0")
            }
            Op::Fused { .. } => Some("is made by the fusion of a differentiated graph"),
            Op::PackBf16 | Op::UnpackBf16 { .. } => {
                Some("is made of a whole graph, by ModelGraph::with_activations")
            }
            _ => None,
        };
        if let Some(why) = why {
            let inputs: Vec<String> = inputs.iter().map(|x| self.shape(*x).to_string()).collect();
            return Err(ShapeError {
                op: op.to_string(),
                inputs: inputs.join(", "),
                why: why.into(),
            });
        }
        let scope = std::mem::take(&mut self.scope);
        let first = self.graph.nodes.len();
        let outputs = self.graph.apply(op, inputs, self.phase, &scope);
        for node in &mut self.graph.nodes[first..] {
            node.when = self.when;
        }
        self.scope = scope;
        outputs
    }

    fn add_tensor(&mut self, name: String, typed: Typed, role: Role) -> TensorId {
        self.graph.add_tensor(name, typed, role)
    }
}

/// Returns the place of columns that begin at `first` of a tensor, which becomes an input of the op
/// unless it is one already.
fn attention_place(inputs: &mut Vec<TensorId>, tensor: TensorId, first: usize) -> AttentionPlace {
    if let Some(input) = inputs.iter().position(|input| *input == tensor) {
        return AttentionPlace { input, first };
    }
    inputs.push(tensor);
    AttentionPlace { input: inputs.len() - 1, first }
}

fn batched(name: &str, dims: &[usize]) -> Shape {
    assert!(
        !dims.is_empty(),
        "the input '{name}' has no dimension for the batch; one value per sample is &[1]"
    );
    Shape::batched(dims)
}

impl Graph {
    pub(super) fn add_tensor(&mut self, name: String, typed: Typed, role: Role) -> TensorId {
        let (shape, dtype) = typed;
        self.tensors.push(Tensor { name, shape, dtype, role, alias_of: None, repeats: None });
        TensorId(self.tensors.len() as u32 - 1)
    }

    fn is_input(&self, id: TensorId) -> bool {
        self.inputs.iter().any(|(_, input)| *input == id)
    }

    /// Adds a parameter whose tensor exists already.
    pub(super) fn add_parameter(&mut self, parameter: Parameter) {
        let id = ParamId(self.parameters.len() as u32);
        self.tensors[parameter.tensor.index()].role = Role::Parameter(id);
        self.parameters.push(parameter);
    }

    /// Returns the tensor of a slice of a parameter. The first slice reuses the tensor of the
    /// parameter, so that none is left unused.
    pub(super) fn tensor_of_slice(
        &mut self,
        of: &Parameter,
        name: &str,
        slice: &TensorSlice,
        is_first: bool,
    ) -> TensorId {
        let tensor = Tensor {
            name: name.into(),
            shape: Shape::fixed(&slice.dims()),
            ..self.tensor(of.tensor).clone()
        };
        if is_first {
            self.tensors[of.tensor.index()] = tensor;
            return of.tensor;
        }
        self.tensors.push(tensor);
        TensorId(self.tensors.len() as u32 - 1)
    }

    /// Adds an alias of a tensor under another shape, and its node.
    pub(super) fn add_reshape(&mut self, x: TensorId, shape: Shape, phase: PassKind) -> TensorId {
        let id = self.add_alias(x, shape);
        self.push_node(Op::Reshape, &[x], vec![id], Accumulation::NONE, phase);
        id
    }

    /// Adds an alias of a tensor; the caller must add a node that outputs it.
    pub(super) fn add_alias(&mut self, x: TensorId, shape: Shape) -> TensorId {
        let base = self.tensor(x).clone();
        let role = Role::Activation;
        self.tensors.push(Tensor { shape, alias_of: Some(x), role, ..base });
        TensorId(self.tensors.len() as u32 - 1)
    }

    /// Shapes and types of the outputs of an op on some tensors.
    pub(super) fn shapes_of(&self, op: &Op, inputs: &[TensorId]) -> Result<Vec<Typed>, ShapeError> {
        let mut types: Vec<Typed> = Vec::with_capacity(inputs.len());
        for input in inputs {
            let tensor = self.tensor(*input);
            types.push((tensor.shape.clone(), tensor.dtype));
        }
        shapes::outputs(op, &types)
    }

    /// Adds a node with new activations as outputs.
    pub(super) fn apply(
        &mut self,
        op: Op,
        inputs: &[TensorId],
        phase: PassKind,
        scope: &str,
    ) -> Result<Vec<TensorId>, ShapeError> {
        let shapes = self.shapes_of(&op, inputs)?;
        let label = op.to_string();
        let word = label.split(' ').next().unwrap_or_default();
        let name = if scope.is_empty() { word.to_string() } else { format!("{scope}.{word}") };
        let mut outputs = Vec::with_capacity(shapes.len());
        for typed in shapes {
            outputs.push(self.add_tensor(name.clone(), typed, Role::Activation));
        }
        self.push_node(op, inputs, outputs.clone(), Accumulation::NONE, phase);
        Ok(outputs)
    }

    pub(super) fn push_node(
        &mut self,
        op: Op,
        inputs: &[TensorId],
        outputs: Vec<TensorId>,
        accumulate: Accumulation,
        phase: PassKind,
    ) {
        if self.blocks.is_empty() {
            self.blocks.push("model".into());
        }
        let block = self.blocks.len() as u32 - 1;
        let inputs = inputs.to_vec();
        let when = RunsIn::AllPasses;
        self.nodes.push(Node {
            op,
            inputs,
            outputs,
            accumulate,
            precision: Precision::F32,
            is_loss_gradient: false,
            when,
            phase,
            block,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_of_tensors_is_joined() {
        let mut b = Builder::new();
        let parts: Vec<TensorId> = (0..8).map(|part| b.input(&part.to_string(), &[1, 3])).collect();
        let joined = b.concat(&parts, 1).unwrap();
        assert_eq!(b.shape(joined).dims(), [1, 24]);
        assert!(b.concat(&[], 1).is_err());
    }

    #[test]
    #[should_panic(expected = "two outputs are called y")]
    fn an_output_of_a_name_that_another_has_panics() {
        let mut b = Builder::new();
        let [first, second] = ["first", "second"].map(|name| b.input(name, &[1, 3]));
        b.output("y", first);
        b.output("z", first);
        b.output("y", second);
    }

    #[test]
    #[should_panic(expected = "two parameters are called norm.weight")]
    fn a_parameter_of_a_name_that_another_has_panics() {
        let mut b = Builder::new();
        b.state("norm.weight", &[3], Init::Ones, 0.1);
        b.parameter("norm.weight", &[3], Init::Ones);
    }

    #[test]
    fn rows_and_classes_of_a_rank_are_refused_in_a_whole_graph() {
        let mut b = Builder::new();
        let table = b.parameter("table", &[5, 4], Init::Zeros);
        let (ids, logits) = (b.input_ids("ids", &[1]), b.input("logits", &[1, 4]));
        for first in [0, 3] {
            let ops = [
                (Op::Embedding { first }, [ids, table]),
                (Op::CrossEntropy(LossClasses { first, ..LossClasses::whole(7) }), [logits, ids]),
            ];
            for (op, inputs) in ops {
                let why = b.apply(op.clone(), &inputs).map_err(|error| error.why);
                let is_refused = why.is_err_and(|why| why.starts_with("is made by shard"));
                assert_eq!(is_refused, first > 0, "{op}");
            }
        }
    }
}
