//! Reverse-mode differentiation as a graph transformation: returns the training graph of a forward
//! graph, which is the same graph followed by its backward nodes. The rule of each op is in
//! `rule`.

use std::cmp::Reverse;

use crate::op::{Binary, Cell, Op, Reduction, Unary};
use crate::shapes::{self, ShapeError};
use crate::{
    AttentionOptions, Builder, CustomNode, Graph, Node, ParameterKind, PassKind, Role,
    SharedCustomOp,
};
use potluck_core::format::listed;
use potluck_core::{DType, NodeId, Shape, TensorId};

/// Appends to a forward graph the nodes that accumulate the gradient of its summed loss into one
/// [`Role::Gradient`] tensor per parameter.
///
/// Gradients of activations are tagged [`PassKind::BackwardInput`], those of parameters
/// [`PassKind::BackwardWeight`]; both carry the block of the forward node they come from. Backward
/// nodes are ordered by block, the last block first, and in each block B before W. A parameter
/// used twice has two nodes that add to its gradient.
///
/// # Errors
/// Returns [`ShapeError`] if the graph has no loss or is differentiated already, or if the loss
/// depends by a parameter on what has no gradient: the cell values of an LSTM, and ops that are
/// gradients themselves.
pub fn differentiate(graph: Graph) -> Result<Graph, ShapeError> {
    let why = if graph.loss.is_none() {
        Some("it has no loss; end it with one of the builder's losses")
    } else if graph.nodes.iter().any(|node| node.phase != PassKind::Forward) {
        Some("it is differentiated already; give the forward graph")
    } else {
        None
    };
    if let Some(why) = why {
        let inputs = format!("a graph of {} nodes", graph.nodes.len());
        return Err(ShapeError { op: "differentiation".into(), inputs, why: why.into() });
    }
    let mut backward = Backward::new(graph);
    let forward = backward.graph.nodes.len();
    for index in (0..forward).rev() {
        let start = backward.graph.nodes.len();
        rule(&mut backward, NodeId(index as u32))?;
        let block = backward.graph.nodes[index].block;
        for node in &mut backward.graph.nodes[start..] {
            node.block = block;
        }
    }
    let mut graph = backward.graph;
    // A stable sort: within a block and phase, the order of emission is a valid order.
    graph.nodes[forward..].sort_by_key(|node| (Reverse(node.block), node.phase));
    check_reductions(&graph)?;
    Ok(graph)
}

/// Checks that what an all-reduce replaces is read under no other name behind it.
fn check_reductions(graph: &Graph) -> Result<(), ShapeError> {
    for (index, node) in graph.nodes.iter().enumerate() {
        if !matches!(node.op, Op::AllReduce(_)) {
            continue;
        }
        let replaced: Vec<TensorId> = node.inputs.iter().map(|x| graph.root(*x)).collect();
        let is_below = |mut id: TensorId| loop {
            if node.outputs.contains(&id) {
                return true;
            }
            match graph.tensor(id).alias_of {
                Some(base) => id = base,
                None => return false,
            }
        };
        let is_stale = |id: &TensorId| replaced.contains(&graph.root(*id)) && !is_below(*id);
        if let Some(reader) =
            graph.nodes[index + 1..].iter().find(|n| n.inputs.iter().any(is_stale))
        {
            let why = format!("{} reads the values before it, which it replaces", reader.op);
            let inputs = listed(node.inputs.iter().map(|x| graph.tensor(*x).shape.to_string()));
            return Err(ShapeError { op: node.op.to_string(), inputs, why });
        }
    }
    Ok(())
}

/// Graph of one op with its gradients.
pub struct OpGradients {
    /// Its inputs are those of the op, named by their numbers, and `dy`; its nodes are the op and
    /// those of its gradients.
    pub graph: Graph,
    pub output: TensorId,
    /// Gradient by each input; `None` by integers, and where the rule gives none.
    pub gradients: Vec<Option<TensorId>>,
}

/// Returns the graph of an op on inputs of these shapes with the gradient, by each input of floats,
/// of the sum of its first output's elements times those of the input `dy`.
///
/// # Errors
/// Returns [`ShapeError`] if the shapes do not fit the op or a node of its gradient.
pub fn op_gradients(op: &Op, inputs: &[Shape]) -> Result<OpGradients, ShapeError> {
    let mut b = Builder::new();
    let dtype = |index| {
        if shapes::fits_arity(op, inputs.len()) {
            shapes::input_type(op, index, inputs.len())
        } else {
            DType::F32
        }
    };
    let add = |(index, shape): (usize, &Shape)| {
        b.add_input(&index.to_string(), shape.clone(), dtype(index))
    };
    let x: Vec<TensorId> = inputs.iter().enumerate().map(add).collect();
    let output = b.apply(op.clone(), &x)?;
    let dy = b.add_input("dy", b.shape(output).clone(), DType::F32);
    let mut backward = Backward::new(b.finish());
    let graph = &backward.graph;
    for tensor in x.iter().filter(|id| graph.tensor(**id).dtype == DType::F32).chain([&output]) {
        backward.requires_grad[tensor.index()] = true;
    }
    backward.adjoint[output.index()] = Some(dy);
    let node = NodeId(backward.graph.nodes.len() as u32 - 1);
    rule(&mut backward, node)?;
    let gradients = x.iter().map(|id| backward.gradient_of(*id)).collect();
    Ok(OpGradients { gradients, graph: backward.graph, output })
}

/// Applies the gradient rule of an op: adds the nodes that compute what each input of `node`
/// receives, given the gradient `dy` of its first output.
fn rule(b: &mut Backward, id: NodeId) -> Result<(), ShapeError> {
    let node = b.graph.node(id).clone();
    let x = &node.inputs;
    if let Some(index) = (1..node.outputs.len()).find(|i| b.gradient_of(node.outputs[*i]).is_some())
    {
        let why = format!("the loss depends on its output {index}, which has no gradient");
        return Err(b.refused(&node, why));
    }
    if b.loss_parts == Some(node.outputs[0]) {
        b.root(&node)?;
    }
    let Some(dy) = b.gradient_of(node.outputs[0]) else {
        return Ok(());
    };
    match node.op {
        Op::MatMul { transpose_a: ta, transpose_b: tb } => {
            let matmul = |transpose_a, transpose_b| Op::MatMul { transpose_a, transpose_b };
            if ta {
                b.accumulate_op(x[0], matmul(tb, true), &[x[1], dy])?;
            } else {
                b.accumulate_op(x[0], matmul(false, !tb), &[dy, x[1]])?;
            }
            if tb {
                b.accumulate_op(x[1], matmul(true, ta), &[dy, x[0]])
            } else {
                b.accumulate_op(x[1], matmul(!ta, false), &[x[0], dy])
            }
        }
        Op::Unary(Unary::Scale(factor)) => {
            b.accumulate_op(x[0], Op::Unary(Unary::Scale(factor)), &[dy])
        }
        Op::Unary(function) => b.accumulate_op(x[0], Op::UnaryGrad(function), &[x[0], dy]),
        Op::Binary(Binary::Add) => {
            b.accumulate_tensor(x[0], dy);
            b.accumulate_reduced(x[1], dy)
        }
        Op::Binary(Binary::Mul) => {
            b.accumulate_op(x[0], Op::Binary(Binary::Mul), &[dy, x[1]])?;
            if !b.requires_grad[x[1].index()] {
                return Ok(());
            }
            let phase = b.phase_towards(x[1]);
            let product = b.apply(Op::Binary(Binary::Mul), &[dy, x[0]], phase)?;
            b.accumulate_reduced(x[1], product)
        }
        Op::Binary(function) => b.binary(function, x, node.outputs[0], dy),
        Op::Reshape => {
            let (shape, phase) = (b.graph.tensor(x[0]).shape.clone(), b.phase_towards(x[0]));
            if b.requires_grad[x[0].index()] {
                let dx = b.graph.add_reshape(dy, shape, phase);
                b.requires_grad.push(false);
                b.accumulate_tensor(x[0], dx);
            }
            Ok(())
        }
        Op::Permute { ref axes } => {
            let mut inverse = vec![0; axes.len()];
            for (to, &from) in axes.iter().enumerate() {
                inverse[from] = to;
            }
            b.accumulate_op(x[0], Op::Permute { axes: inverse }, &[dy])
        }
        Op::Slice { axis, start, length } => {
            let whole = b.graph.tensor(x[0]).shape.dims()[axis];
            let pad = Op::Pad { axis, before: start, after: whole - start - length };
            b.accumulate_op(x[0], pad, &[dy])
        }
        Op::Pad { axis, before, .. } => {
            let length = b.graph.tensor(x[0]).shape.dims()[axis];
            b.accumulate_op(x[0], Op::Slice { axis, start: before, length }, &[dy])
        }
        Op::Concat { axis } => {
            let mut start = 0;
            for &part in x {
                let length = b.graph.tensor(part).shape.dims()[axis];
                b.accumulate_op(part, Op::Slice { axis, start, length }, &[dy])?;
                start += length;
            }
            Ok(())
        }
        Op::Sum { first, last } => {
            let shape = &b.graph.tensor(x[0]).shape;
            let dims = shape.dims()[first..=last].to_vec();
            let batched = shape.is_batched() && first == 0;
            b.accumulate_op(x[0], Op::Broadcast { first, dims, batched }, &[dy])
        }
        Op::Broadcast { first, ref dims, .. } if !dims.is_empty() => {
            b.accumulate_op(x[0], Op::Sum { first, last: first + dims.len() - 1 }, &[dy])
        }
        Op::Broadcast { .. } => {
            b.accumulate_tensor(x[0], dy);
            Ok(())
        }
        Op::LayerNorm { .. } => {
            let stats = node.outputs[1];
            b.accumulate_op(x[0], Op::LayerNormGrad, &[x[0], x[1], stats, dy])?;
            b.affine(x[1], x.get(2).copied(), &[x[0], stats, dy])
        }
        Op::RmsNorm { .. } => {
            let stats = node.outputs[1];
            b.accumulate_op(x[0], Op::RmsNormGrad, &[x[0], x[1], stats, dy])?;
            b.accumulate_op(x[1], Op::LayerNormWeightGrad, &[x[0], stats, dy])
        }
        Op::GroupNorm { groups, .. } => {
            let stats = node.outputs[1];
            b.accumulate_op(x[0], Op::GroupNormGrad { groups }, &[x[0], x[1], stats, dy])?;
            b.accumulate_pair([x[1], x[2]], Op::GroupNormAffineGrad { groups }, &[x[0], stats, dy])
        }
        Op::Softmax => b.accumulate_op(x[0], Op::SoftmaxGrad, &[node.outputs[0], dy]),
        Op::BatchNorm { .. } => b.batch_norm(&node, dy),
        Op::Recurrent { cell } => b.recurrent(cell, &node, dy),
        Op::Attention(options) => b.attention(options, &node, dy),
        Op::Embedding { first } => {
            let rows = b.graph.tensor(x[1]).shape.dims()[0];
            b.accumulate_op(x[1], Op::EmbeddingGrad { first, rows }, &[x[0], dy])
        }
        Op::Conv2d(options) => {
            let (size, weight) = (b.picture_size(x[0]), b.graph.tensor(x[1]).shape.dims());
            let kernel = [weight[2], weight[3]];
            b.accumulate_op(x[0], Op::Conv2dInputGrad { options, size }, &[dy, x[1]])?;
            b.accumulate_op(x[1], Op::Conv2dWeightGrad { options, kernel }, &[x[0], dy])
        }
        Op::MaxPool2d(options) => {
            let size = b.picture_size(x[0]);
            let inputs = [node.outputs[1], dy];
            b.accumulate_op(x[0], Op::MaxPool2dGrad { options, size }, &inputs)
        }
        Op::AvgPool2d(options) => {
            let size = b.picture_size(x[0]);
            b.accumulate_op(x[0], Op::AvgPool2dGrad { options, size }, &[dy])
        }
        Op::Dropout { .. } => b.accumulate_op(x[0], node.op.clone(), &[dy, x[1]]),
        Op::CrossEntropy { .. } | Op::SquaredError => b.parts(&node, dy),
        Op::Spread => b.spread(x[0], dy),
        // What each rank adds to a sum has the gradient of the sum.
        Op::AllReduce(Reduction::Sum) => {
            b.accumulate_tensor(x[0], dy);
            Ok(())
        }
        Op::AllReduce(Reduction::CrossEntropy { .. }) => {
            let why = "the loss depends on its parts otherwise than by their sum".into();
            Err(b.refused(&node, why))
        }
        Op::Custom(ref op) => b.custom(op, &node, dy),
        Op::UnaryGrad(_)
        | Op::MaximumGrad
        | Op::LayerNormGrad
        | Op::LayerNormWeightGrad
        | Op::LayerNormAffineGrad
        | Op::RmsNormGrad
        | Op::GroupNormGrad { .. }
        | Op::GroupNormAffineGrad { .. }
        | Op::SoftmaxGrad
        | Op::BatchNormAffineGrad
        | Op::BatchNormGrad
        | Op::RecurrentGrad { .. }
        | Op::AttentionGrad(_)
        | Op::EmbeddingGrad { .. }
        | Op::Conv2dInputGrad { .. }
        | Op::Conv2dWeightGrad { .. }
        | Op::MaxPool2dGrad { .. }
        | Op::AvgPool2dGrad { .. }
        | Op::CrossEntropyGrad { .. }
        | Op::SquaredErrorGrad
        | Op::Fused { .. } => {
            let name = &b.graph.tensor(node.outputs[0]).name;
            let why = format!(
                "node {} ({name}) has no gradient, being one itself, and the loss depends on a \
                 parameter by it; compute the same of the builder's other ops",
                id.index()
            );
            Err(b.refused(&node, why))
        }
    }
}

/// State of the traversal from the loss to the parameters.
struct Backward {
    graph: Graph,
    /// Gradient of each tensor so far: the sum of the contributions of its users.
    adjoint: Vec<Option<TensorId>>,
    /// Per tensor: true if it is a parameter or is computed from one.
    requires_grad: Vec<bool>,
    /// Tensor `(n, 2)` that the loss sums.
    loss_parts: Option<TensorId>,
}

impl Backward {
    fn new(mut graph: Graph) -> Self {
        let mut requires_grad = vec![false; graph.tensors.len()];
        for parameter in &graph.parameters {
            requires_grad[parameter.tensor.index()] = true;
        }
        for node in &graph.nodes {
            if node.inputs.iter().any(|input| requires_grad[input.index()]) {
                node.outputs.iter().for_each(|output| requires_grad[output.index()] = true);
            }
        }
        let adjoint = vec![None; graph.tensors.len()];
        for index in 0..graph.parameters.len() {
            let parameter = &graph.parameters[index];
            let Role::Parameter(id) = graph.tensor(parameter.tensor).role else {
                unreachable!("parameters are made with their role");
            };
            let typed = (graph.tensor(parameter.tensor).shape.clone(), DType::F32);
            let name = format!("gradient of {}", parameter.name);
            let gradient = graph.add_tensor(name, typed, Role::Gradient(id));
            graph.parameters[index].gradient = Some(gradient);
            requires_grad.push(false);
        }
        let loss = graph.loss;
        let sum = graph.nodes.iter().find(|node| loss.is_some_and(|id| node.outputs.contains(&id)));
        let loss_parts = sum.map(|node| node.inputs[0]);
        Self { graph, adjoint, requires_grad, loss_parts }
    }

    fn refused(&self, node: &Node, why: String) -> ShapeError {
        let shapes = node.inputs.iter().map(|input| self.graph.tensor(*input).shape.to_string());
        ShapeError { op: node.op.to_string(), inputs: listed(shapes), why }
    }

    /// Adds the gradients of the op whose parts are the loss, which is their sum.
    fn root(&mut self, node: &Node) -> Result<(), ShapeError> {
        for (target, op, inputs) in gradients_of_sum(&self.graph, node) {
            self.accumulate_op(target, op, &inputs)?;
        }
        Ok(())
    }

    /// Adds the gradients of an op with the outputs of a loss, of whose parts `(n, 2)` the loss
    /// depends otherwise than by their sum: those of the sum, times the gradient of each part. The
    /// counts are constant.
    fn parts(&mut self, node: &Node, dparts: TensorId) -> Result<(), ShapeError> {
        for (target, op, inputs) in gradients_of_sum(&self.graph, node) {
            if !self.requires_grad[target.index()] {
                continue;
            }
            let phase = self.phase_towards(target);
            let of_sum = self.apply(op, &inputs, phase)?;
            let shape = self.graph.tensor(target).shape.clone();
            let (rows, of_row) = shape.dims().split_at(1);
            let factors = Op::Slice { axis: 1, start: 0, length: 1 };
            let factors = self.apply(factors, &[dparts], phase)?;
            let mut factors = self.alias(factors, shape.with_dims(rows), phase);
            if !of_row.is_empty() {
                let wide = Op::Broadcast { first: 1, dims: of_row.to_vec(), batched: false };
                factors = self.apply(wide, &[factors], phase)?;
            }
            let product = self.apply(Op::Binary(Binary::Mul), &[of_sum, factors], phase)?;
            self.accumulate_tensor(target, product);
        }
        Ok(())
    }

    fn gradient_of(&self, tensor: TensorId) -> Option<TensorId> {
        self.adjoint.get(tensor.index()).copied().flatten()
    }

    /// Returns the pass of a gradient: W for parameters, B for all other tensors.
    fn phase_towards(&self, target: TensorId) -> PassKind {
        match self.graph.tensor(target).role {
            Role::Parameter(_) => PassKind::BackwardWeight,
            _ => PassKind::BackwardInput,
        }
    }

    fn apply(
        &mut self,
        op: Op,
        inputs: &[TensorId],
        phase: PassKind,
    ) -> Result<TensorId, ShapeError> {
        Ok(self.apply_all(op, inputs, phase)?[0])
    }

    /// Adds an op and returns all its outputs.
    fn apply_all(
        &mut self,
        op: Op,
        inputs: &[TensorId],
        phase: PassKind,
    ) -> Result<Vec<TensorId>, ShapeError> {
        let scope = self.graph.tensor(inputs[0]).name.clone();
        let scope = scope.rsplit_once('.').map_or("", |(scope, _)| scope);
        let outputs = self.graph.apply(op, inputs, phase, scope)?;
        self.requires_grad.extend(outputs.iter().map(|_| false));
        Ok(outputs)
    }

    /// Adds the gradients of a batch normalization. The sums for weight and bias come in the pass
    /// of activations, because `dx` needs them. The gradient of a running average accumulates what
    /// [`ParameterKind::State`] defines.
    fn batch_norm(&mut self, node: &Node, dy: TensorId) -> Result<(), ShapeError> {
        let (x, stats) = (&node.inputs, node.outputs[1]);
        let sums = [x[0], stats, dy];
        let sums = self.apply_all(Op::BatchNormAffineGrad, &sums, PassKind::BackwardInput)?;
        let inputs = [x[0], x[1], stats, dy, sums[0], sums[1]];
        self.accumulate_op(x[0], Op::BatchNormGrad, &inputs)?;
        self.accumulate_tensor(x[1], sums[0]);
        self.accumulate_tensor(x[2], sums[1]);
        for (running, sum) in x[3..].iter().zip(&node.outputs[2..]) {
            if self.is_state(*running) {
                self.accumulate_op(*running, Op::Unary(Unary::Scale(-1.0)), &[*sum])?;
            }
        }
        Ok(())
    }

    /// Adds the gradients of a recurrent layer. That of the weight is one product over all time
    /// steps, with the hidden values of the step before each.
    fn recurrent(&mut self, cell: Cell, node: &Node, dy: TensorId) -> Result<(), ShapeError> {
        let (x, phase) = (&node.inputs, PassKind::BackwardInput);
        let (hidden, state) = match cell {
            Cell::Lstm => (node.outputs[2], x.get(4)),
            Cell::Gru => (node.outputs[0], x.get(3)),
        };
        let inputs: Vec<TensorId> =
            [node.outputs[1], x[1], hidden, dy].into_iter().chain(state.copied()).collect();
        let gradients = self.apply_all(Op::RecurrentGrad { cell }, &inputs, phase)?;
        let (dproduct, states) = match cell {
            Cell::Lstm => (gradients[0], &gradients[1..]),
            Cell::Gru => (gradients[1], &gradients[2..]),
        };
        self.accumulate_tensor(x[0], gradients[0]);
        x[3..].iter().zip(states).for_each(|(state, d)| self.accumulate_tensor(*state, *d));
        self.accumulate_reduced(x[2], dproduct)?;
        if !self.requires_grad[x[1].index()] {
            return Ok(());
        }
        let phase = self.phase_towards(x[1]);
        let Some(before) = self.hidden_before(node.outputs[0], x.get(3).copied(), phase)? else {
            return Ok(());
        };
        let flat = |b: &mut Self, tensor: TensorId| {
            let shape = b.graph.tensor(tensor).shape.clone();
            let [_, t, width] = *shape.dims() else { return tensor };
            b.alias(tensor, shape.with_dims(&[t, width]), phase)
        };
        let (dproduct, before) = (flat(self, dproduct), flat(self, before));
        let product = Op::MatMul { transpose_a: true, transpose_b: false };
        self.accumulate_op(x[1], product, &[dproduct, before])
    }

    /// Returns the hidden values before each time step of `y (b, t, h)`; `None` if that is a single
    /// one and all are zero.
    fn hidden_before(
        &mut self,
        y: TensorId,
        h0: Option<TensorId>,
        phase: PassKind,
    ) -> Result<Option<TensorId>, ShapeError> {
        let shape = self.graph.tensor(y).shape.clone();
        let [b, t, h] = *shape.dims() else { return Ok(None) };
        let first = h0.map(|h0| self.alias(h0, shape.with_dims(&[b, 1, h]), phase));
        if t == 1 {
            return Ok(first);
        }
        let all_but_last = Op::Slice { axis: 1, start: 0, length: t - 1 };
        let rest = self.apply(all_but_last, &[y], phase)?;
        let before = match first {
            Some(first) => self.apply(Op::Concat { axis: 1 }, &[first, rest], phase)?,
            None => self.apply(Op::Pad { axis: 1, before: 1, after: 0 }, &[rest], phase)?,
        };
        Ok(Some(before))
    }

    /// Adds the gradients by the tensors with queries, keys and values, which one op computes.
    fn attention(
        &mut self,
        options: AttentionOptions,
        node: &Node,
        dy: TensorId,
    ) -> Result<(), ShapeError> {
        let (tensors, samples) = node.inputs.split_at(options.tensors());
        let wanted = tensors.iter().filter(|tensor| self.requires_grad[tensor.index()]);
        let Some(phase) = wanted.map(|tensor| self.phase_towards(*tensor)).min() else {
            return Ok(());
        };
        let inputs = [tensors, &node.outputs, &[dy], samples].concat();
        let gradients = self.apply_all(Op::AttentionGrad(options), &inputs, phase)?;
        for (tensor, gradient) in tensors.iter().zip(gradients) {
            self.accumulate_tensor(*tensor, gradient);
        }
        Ok(())
    }

    fn alias(&mut self, tensor: TensorId, shape: Shape, phase: PassKind) -> TensorId {
        let alias = self.graph.add_reshape(tensor, shape, phase);
        self.requires_grad.push(false);
        alias
    }

    /// Adds to the gradient of `x` the sum over the ranks of the gradients `dy` of what they have
    /// of it.
    fn spread(&mut self, x: TensorId, dy: TensorId) -> Result<(), ShapeError> {
        if !self.requires_grad[x.index()] {
            return Ok(());
        }
        let shape = self.graph.tensor(dy).shape.clone();
        let sum = self.graph.add_alias(dy, shape);
        self.requires_grad.push(false);
        let op = Op::AllReduce(Reduction::Sum);
        self.graph.push_node(op, &[dy], vec![sum], false, self.phase_towards(x));
        self.accumulate_tensor(x, sum);
        Ok(())
    }

    fn is_state(&self, tensor: TensorId) -> bool {
        match self.graph.tensor(tensor).role {
            Role::Parameter(id) => self.graph.parameters[id.index()].kind != ParameterKind::Trained,
            _ => false,
        }
    }

    /// Adds what a custom op gives for each input to the gradient of that input.
    fn custom(&mut self, op: &SharedCustomOp, node: &Node, dy: TensorId) -> Result<(), ShapeError> {
        let scope = self.graph.tensor(node.outputs[0]).name.clone();
        let scope = scope.rsplit_once('.').map_or("", |(scope, _)| scope);
        let custom_node = CustomNode { inputs: &node.inputs, output: node.outputs[0], dy };
        for (index, &target) in node.inputs.iter().enumerate() {
            if !self.requires_grad[target.index()] {
                continue;
            }
            let (first, before) = (self.graph.nodes.len(), fixed_parts(&self.graph));
            let phase = self.phase_towards(target);
            let mut b = Builder::resume(std::mem::take(&mut self.graph), phase, scope);
            let gradient = op.gradient(&mut b, &custom_node, index);
            self.graph = b.finish();
            self.requires_grad.resize(self.graph.tensors.len(), false);
            let gradient = gradient?;
            let is_random = self.graph.nodes[first..].iter().any(|node| node.op.is_random());
            let is_more = fixed_parts(&self.graph) != before || is_random;
            if let Some(why) = self.wrong_gradient(target, gradient, is_more) {
                return Err(self.refused(node, format!("its gradient by input {index} {why}")));
            }
            self.accumulate_tensor(target, gradient);
        }
        Ok(())
    }

    /// Returns the reason why a custom op's gradient by `target` cannot be used, if there is one;
    /// `is_more` is true if the op has added more to the graph than ops without random numbers.
    fn wrong_gradient(&self, target: TensorId, got: TensorId, is_more: bool) -> Option<String> {
        let (got, wanted) = (self.graph.tensor(got), self.graph.tensor(target));
        if is_more {
            return Some(
                "adds an input, a parameter, a block, an output, a loss or random numbers, and \
                 may only add ops"
                    .into(),
            );
        }
        let fits = got.shape == wanted.shape && got.dtype == wanted.dtype;
        (!fits).then(|| format!("is of {}, and the input of {}", got.shape, wanted.shape))
    }

    /// Adds the result of `op` to the gradient of `target`: in place if `target` is a parameter
    /// and the op can accumulate, else as a tensor of its own.
    fn accumulate_op(
        &mut self,
        target: TensorId,
        op: Op,
        inputs: &[TensorId],
    ) -> Result<(), ShapeError> {
        if !self.requires_grad[target.index()] {
            return Ok(());
        }
        let gradient = self.parameter_gradient(target);
        match gradient {
            Some(gradient) if op.accumulates() => {
                self.graph.push_node(op, inputs, vec![gradient], true, PassKind::BackwardWeight);
            }
            _ => {
                let phase = self.phase_towards(target);
                let contribution = self.apply(op, inputs, phase)?;
                self.accumulate_tensor(target, contribution);
            }
        }
        Ok(())
    }

    /// Adds to the gradients of `a, b` of a function whose second side has a gradient that depends
    /// on the first or is negative: `y = a - b`, `a / b` or the maximum.
    fn binary(
        &mut self,
        function: Binary,
        x: &[TensorId],
        y: TensorId,
        dy: TensorId,
    ) -> Result<(), ShapeError> {
        let (a, b) = (x[0], x[1]);
        let (wants_a, wants_b) = (self.requires_grad[a.index()], self.requires_grad[b.index()]);
        let towards_b = self.phase_towards(b);
        match function {
            Binary::Sub => {
                self.accumulate_tensor(a, dy);
                self.accumulate_negated(b, dy)
            }
            Binary::Div => {
                self.accumulate_op(a, Op::Binary(Binary::Div), &[dy, b])?;
                if !wants_b {
                    return Ok(());
                }
                // -(sum of dy y) / b: b is constant over what is summed.
                let product = self.apply(Op::Binary(Binary::Mul), &[dy, y], towards_b)?;
                let sum = self.reduced(b, product, towards_b)?;
                let quotient = self.apply(Op::Binary(Binary::Div), &[sum, b], towards_b)?;
                self.accumulate_op(b, Op::Unary(Unary::Scale(-1.0)), &[quotient])
            }
            Binary::Maximum if wants_a || wants_b => {
                let phases = [(a, wants_a), (b, wants_b)].into_iter().filter(|(_, wants)| *wants);
                let first = phases.map(|(side, _)| self.phase_towards(side)).min();
                let first = first.unwrap_or(PassKind::BackwardInput);
                let da = self.apply(Op::MaximumGrad, &[a, b, dy], first)?;
                self.accumulate_tensor(a, da);
                if !wants_b {
                    return Ok(());
                }
                let db = self.apply(Op::Binary(Binary::Sub), &[dy, da], towards_b)?;
                self.accumulate_reduced(b, db)
            }
            Binary::Maximum => Ok(()),
            Binary::Add | Binary::Mul => unreachable!("they have rules of their own"),
        }
    }

    /// Subtracts from the gradient of a tensor that was broadcast over leading axes the sum of `dy`
    /// over these axes.
    fn accumulate_negated(&mut self, target: TensorId, dy: TensorId) -> Result<(), ShapeError> {
        if !self.requires_grad[target.index()] {
            return Ok(());
        }
        let sum = self.reduced(target, dy, self.phase_towards(target))?;
        self.accumulate_op(target, Op::Unary(Unary::Scale(-1.0)), &[sum])
    }

    /// Returns the sum of `dy` over the leading axes over which `target` was broadcast.
    fn reduced(
        &mut self,
        target: TensorId,
        dy: TensorId,
        phase: PassKind,
    ) -> Result<TensorId, ShapeError> {
        let (whole, part) = (self.rank(dy), self.rank(target));
        if whole == part {
            return Ok(dy);
        }
        self.apply(Op::Sum { first: 0, last: whole - part - 1 }, &[dy], phase)
    }

    /// Adds to the gradients of weight and bias of a normalization, given its `x, stats, dy`: from
    /// one reading of `dy` if both are parameters, so that the kernel adds to both in place.
    fn affine(
        &mut self,
        weight: TensorId,
        bias: Option<TensorId>,
        inputs: &[TensorId; 3],
    ) -> Result<(), ShapeError> {
        if let Some(bias) = bias.filter(|bias| self.both_gradients([weight, *bias]).is_some()) {
            return self.accumulate_pair([weight, bias], Op::LayerNormAffineGrad, inputs);
        }
        self.accumulate_op(weight, Op::LayerNormWeightGrad, inputs)?;
        bias.map_or(Ok(()), |bias| self.accumulate_reduced(bias, inputs[2]))
    }

    /// Returns the gradients of two parameters; `None` if one is none, or both are one.
    fn both_gradients(&self, targets: [TensorId; 2]) -> Option<[TensorId; 2]> {
        let [first, second] = targets.map(|target| self.parameter_gradient(target));
        Some([first?, second?]).filter(|_| targets[0] != targets[1])
    }

    /// Adds the two results of an op to the gradients of two tensors: in place if both are
    /// parameters, else as tensors of their own.
    fn accumulate_pair(
        &mut self,
        targets: [TensorId; 2],
        op: Op,
        inputs: &[TensorId],
    ) -> Result<(), ShapeError> {
        if let Some(gradients) = self.both_gradients(targets) {
            self.graph.push_node(op, inputs, gradients.to_vec(), true, PassKind::BackwardWeight);
            return Ok(());
        }
        let wanted = targets.into_iter().filter(|target| self.requires_grad[target.index()]);
        let Some(phase) = wanted.map(|target| self.phase_towards(target)).min() else {
            return Ok(());
        };
        let contributions = self.apply_all(op, inputs, phase)?;
        for (target, contribution) in targets.into_iter().zip(contributions) {
            self.accumulate_tensor(target, contribution);
        }
        Ok(())
    }

    /// Adds to the gradient of a tensor that was broadcast over leading axes the sum of `dy` over
    /// these axes.
    fn accumulate_reduced(&mut self, target: TensorId, dy: TensorId) -> Result<(), ShapeError> {
        let (whole, part) = (self.rank(dy), self.rank(target));
        if whole == part {
            self.accumulate_tensor(target, dy);
            return Ok(());
        }
        self.accumulate_op(target, Op::Sum { first: 0, last: whole - part - 1 }, &[dy])
    }

    /// Returns the height and the width of pictures `(b, h, w, c)`.
    fn picture_size(&self, tensor: TensorId) -> [usize; 2] {
        let dims = self.graph.tensor(tensor).shape.dims();
        [dims[1], dims[2]]
    }

    fn rank(&self, tensor: TensorId) -> usize {
        self.graph.tensor(tensor).shape.rank()
    }

    /// Adds an existing tensor to the gradient of `target`.
    fn accumulate_tensor(&mut self, target: TensorId, contribution: TensorId) {
        if !self.requires_grad[target.index()] {
            return;
        }
        if let Some(gradient) = self.parameter_gradient(target) {
            let copy = Op::Unary(Unary::Scale(1.0));
            self.graph.push_node(
                copy,
                &[contribution],
                vec![gradient],
                true,
                PassKind::BackwardWeight,
            );
            return;
        }
        let sum = match self.adjoint[target.index()] {
            None => contribution,
            Some(so_far) => {
                let add = Op::Binary(Binary::Add);
                let sum = self.apply(add, &[so_far, contribution], PassKind::BackwardInput);
                // Both have the shape of `target`.
                sum.unwrap_or_else(|error| panic!("contributions differ in shape: {error}"))
            }
        };
        self.adjoint[target.index()] = Some(sum);
    }

    fn parameter_gradient(&self, target: TensorId) -> Option<TensorId> {
        match self.graph.tensor(target).role {
            Role::Parameter(id) => self.graph.parameters[id.index()].gradient,
            _ => None,
        }
    }
}

/// Returns, for each input of floats of an op with the outputs of a loss, the op and the inputs
/// that give the gradient of the sum of the op's parts by it.
fn gradients_of_sum(graph: &Graph, node: &Node) -> Vec<(TensorId, Op, Vec<TensorId>)> {
    let x = &node.inputs;
    match node.op {
        Op::CrossEntropy { first } => {
            let classes = first + graph.tensor(x[0]).shape.last();
            let op = Op::CrossEntropyGrad { first, classes };
            vec![(x[0], op, vec![x[0], x[1], node.outputs[1]])]
        }
        Op::AllReduce(Reduction::CrossEntropy { classes }) => {
            let of_rank = graph.nodes.iter().find(|of_rank| of_rank.outputs == *x);
            let gradient = |of_rank: &Node| match of_rank.op {
                Op::CrossEntropy { first } => {
                    let (logits, targets) = (of_rank.inputs[0], of_rank.inputs[1]);
                    let op = Op::CrossEntropyGrad { first, classes };
                    Some((logits, op, vec![logits, targets, node.outputs[1]]))
                }
                _ => None,
            };
            of_rank.and_then(gradient).into_iter().collect()
        }
        Op::SquaredError => vec![
            (x[0], Op::SquaredErrorGrad, vec![x[0], x[1]]),
            (x[1], Op::SquaredErrorGrad, vec![x[1], x[0]]),
        ],
        _ => Vec::new(),
    }
}

/// Returns the sizes of the parts of a graph to which a gradient must not add.
fn fixed_parts(graph: &Graph) -> [usize; 5] {
    let loss = usize::from(graph.loss.is_some());
    [graph.inputs.len(), graph.parameters.len(), graph.blocks.len(), graph.outputs.len(), loss]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, Init};

    #[test]
    fn a_tied_parameter_gets_two_accumulating_nodes_and_blocks_run_backwards() {
        let mut b = Builder::new();
        let table = b.parameter("table", &[11, 4], Init::Zeros);
        b.block("first");
        let ids = b.input_ids("tokens", &[1, 3]);
        let x = b.embedding(ids, table).unwrap();
        b.block("last");
        let logits = b.linear(x, table, None).unwrap();
        let targets = b.input_ids("targets", &[1, 3]);
        b.cross_entropy_loss(logits, targets).unwrap();
        let graph = differentiate(b.finish()).unwrap();

        let gradient = graph.parameters[0].gradient.unwrap();
        let into: Vec<_> = graph.nodes.iter().filter(|n| n.outputs == [gradient]).collect();
        assert_eq!(into.len(), 2);
        assert!(into.iter().all(|n| n.accumulate && n.phase == PassKind::BackwardWeight));
        let blocks: Vec<u32> =
            graph.nodes.iter().filter(|n| n.phase != PassKind::Forward).map(|n| n.block).collect();
        assert!(blocks.is_sorted_by_key(|&block| Reverse(block)), "{blocks:?}");
    }

    /// A loss on the last cell state of an LSTM would have gradients of zeros.
    #[test]
    fn a_loss_on_what_has_no_gradient_is_refused() {
        let differentiated = |of_cells: bool| {
            let mut b = Builder::new();
            let (x, target) = (b.input("x", &[1, 3, 2]), b.input("target", &[1, 4]));
            let mut add = |name: &str, dims: &[usize]| b.parameter(name, dims, Init::Zeros);
            let (ih, hh) = (add("ih", &[16, 2]), add("hh", &[16, 4]));
            let parameters = [ih, hh, add("bias_ih", &[16]), add("bias_hh", &[16])];
            let (y, cells) = b.recurrent(Cell::Lstm, x, parameters, &[]).unwrap();
            let last = b.last_step(if of_cells { cells.unwrap() } else { y }).unwrap();
            b.squared_error_loss(last, target).unwrap();
            differentiate(b.finish()).map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(differentiated(false), Ok(()));
        let error = differentiated(true).unwrap_err();
        assert!(error.contains("its output 2, which has no gradient"), "{error}");
    }

    #[test]
    fn statistics_of_a_batch_need_a_batch() {
        let mut b = Builder::new();
        let fixed = b.parameter("fixed", &[5, 4], Init::Zeros);
        assert!(b.batch_norm("norm", fixed).is_err());
    }

    #[test]
    fn nothing_is_computed_for_tensors_without_parameters_behind_them() {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 4]);
        let y = b.unary(x, Unary::Relu).unwrap();
        let w = b.parameter("w", &[2, 4], Init::Zeros);
        let out = b.linear(y, w, None).unwrap();
        let target = b.input("target", &[1, 2]);
        b.squared_error_loss(out, target).unwrap();
        let graph = differentiate(b.finish()).unwrap();
        assert!(graph.nodes.iter().all(|n| !matches!(n.op, Op::UnaryGrad(_))));
    }
}
