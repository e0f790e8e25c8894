//! Reverse-mode differentiation as a graph transformation: returns the training graph of a forward
//! graph, which is the same graph followed by its backward nodes. The rules of the ops are in the
//! modules here, by topic; they add nodes by the methods of `Backward`.

mod attention;
mod backward;
mod custom;
mod elementwise;
mod indexing;
mod layout;
mod losses;
mod norms;
mod pictures;
mod products;
mod recurrent;
mod shards;

use std::cmp::Reverse;
use std::iter::successors;

use crate::op::Op;
use crate::shapes::{self, ShapeError};
use crate::{Builder, Graph, Node, PassKind};
use backward::Backward;
pub(crate) use backward::jumps;
use potluck_core::format::listed;
use potluck_core::{DType, NodeId, Shape, TensorId};

/// Appends to a forward graph the nodes that accumulate the gradient of its summed loss into one
/// [`Role::Gradient`](crate::Role::Gradient) tensor per parameter that is not frozen.
///
/// Gradients of activations are tagged [`PassKind::BackwardInput`], gradients of parameters
/// [`PassKind::BackwardWeight`]; both carry the block of the forward node they come from. Backward
/// nodes are ordered by block, the last block first, and in each block B before W. A parameter used
/// twice has two nodes that add to its gradient.
///
/// # Errors
/// Returns [`ShapeError`] if the graph has no loss or is differentiated already, or if the loss
/// depends on a parameter through an output without a gradient: the cell values of an LSTM, and the
/// ops of gradients.
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
        visit(&mut backward, NodeId(index as u32))?;
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

/// Checks that no node after an all-reduce reads a replaced tensor by another alias.
fn check_reductions(graph: &Graph) -> Result<(), ShapeError> {
    for (index, node) in graph.nodes.iter().enumerate() {
        if !matches!(node.op, Op::AllReduce(_)) {
            continue;
        }
        for reader in &graph.nodes[index + 1..] {
            if reader.inputs.iter().any(|input| is_stale(graph, node, *input)) {
                let why = format!("{} reads the values before it, which it replaces", reader.op);
                let inputs = listed(node.inputs.iter().map(|x| graph.tensor(*x).shape.to_string()));
                return Err(ShapeError { op: node.op.to_string(), inputs, why });
            }
        }
    }
    Ok(())
}

/// Returns true if a tensor has the memory that an all-reduce replaces, but is neither an output of
/// it nor an alias of one.
fn is_stale(graph: &Graph, reduction: &Node, tensor: TensorId) -> bool {
    let root = graph.root(tensor);
    let is_replaced = reduction.inputs.iter().any(|x| graph.root(*x) == root);
    let mut names = successors(Some(tensor), |name| graph.tensor(*name).alias_of);
    is_replaced && !names.any(|name| reduction.outputs.contains(&name))
}

/// Graph of one op with its gradients.
pub struct OpGradients {
    /// Its inputs are the inputs of the op, named by their numbers, and `dy`; its nodes are the op
    /// and its gradients.
    pub graph: Graph,
    pub output: TensorId,
    /// Gradient by each input; `None` for integers and for inputs without a gradient.
    pub gradients: Vec<Option<TensorId>>,
}

/// Returns the graph of an op on inputs of these shapes with the gradient, by each input of floats,
/// of the sum of its first output's elements times the elements of the input `dy`.
///
/// # Errors
/// Returns [`ShapeError`] if the shapes do not fit the op or a node of its gradient.
pub fn op_gradients(op: &Op, inputs: &[Shape]) -> Result<OpGradients, ShapeError> {
    let mut b = Builder::new();
    let is_typed = shapes::fits_arity(op, inputs.len());
    let mut x = Vec::new();
    for (index, shape) in inputs.iter().enumerate() {
        let count = inputs.len();
        let dtype = if is_typed { shapes::input_type(op, index, count) } else { DType::F32 };
        x.push(b.add_input(&index.to_string(), shape.clone(), dtype));
    }
    let output = b.apply(op.clone(), &x)?;
    let dy = b.add_input("dy", b.shape(output).clone(), DType::F32);
    let mut backward = Backward::new(b.finish());
    let graph = &backward.graph;
    for input in &x {
        if graph.tensor(*input).dtype == DType::F32 {
            backward.requires_grad[input.index()] = true;
        }
    }
    backward.requires_grad[output.index()] = true;
    backward.adjoint[output.index()] = Some(dy);
    let node = NodeId(backward.graph.nodes.len() as u32 - 1);
    visit(&mut backward, node)?;
    let gradients = x.iter().map(|id| backward.gradient_of(*id)).collect();
    Ok(OpGradients { gradients, graph: backward.graph, output })
}

/// Adds the nodes that compute the gradients by the inputs of a node, if the loss depends on it.
fn visit(b: &mut Backward, id: NodeId) -> Result<(), ShapeError> {
    let node = b.graph.node(id).clone();
    if let Some(index) = (1..node.outputs.len()).find(|i| b.gradient_of(node.outputs[*i]).is_some())
    {
        let why = format!("the loss depends on its output {index}, which has no gradient");
        return Err(b.refused(&node, why));
    }
    if b.loss_parts == Some(node.outputs[0]) {
        let start = b.graph.nodes.len();
        losses::root(b, &node)?;
        for node in &mut b.graph.nodes[start..] {
            node.is_loss_gradient = node.op.is_gradient_of_loss();
        }
    }
    if let Some(dy) = b.gradient_of(node.outputs[0]) {
        rule(b, id, &node, dy)?;
    }
    if matches!(node.op, Op::BatchNorm { .. }) && node.when.includes(true) {
        norms::running_averages(b, &node);
    }
    Ok(())
}

/// Applies the gradient rule of an op: adds the nodes that compute the gradients by the inputs of
/// `node`, given the gradient `dy` by its first output.
fn rule(b: &mut Backward, id: NodeId, node: &Node, dy: TensorId) -> Result<(), ShapeError> {
    let x = &node.inputs;
    match node.op {
        Op::MatMul { transpose_a, transpose_b } => {
            products::matmul(b, transpose_a, transpose_b, x, dy)
        }
        Op::Unary(function) => elementwise::unary(b, function, x[0], dy),
        Op::Binary(function) => elementwise::binary(b, function, node, dy),
        Op::Reshape => layout::reshape(b, x[0], dy),
        Op::Permute { ref axes } => layout::permute(b, axes, x[0], dy),
        Op::Slice { axis, start, .. } => layout::slice(b, axis, start, x[0], dy),
        Op::Pad { axis, before, .. } => layout::pad(b, axis, before, x[0], dy),
        Op::Concat { axis } => layout::concat(b, axis, x, dy),
        Op::Sum { first, last } => layout::sum(b, first, last, x[0], dy),
        Op::Broadcast { first, ref dims, .. } => layout::broadcast(b, first, dims.len(), x[0], dy),
        Op::LayerNorm { .. } => norms::layer_norm(b, node, dy),
        Op::RmsNorm { .. } => norms::rms_norm(b, node, dy),
        Op::GroupNorm { groups, .. } => norms::group_norm(b, groups, node, dy),
        Op::Softmax => norms::softmax(b, node, dy),
        Op::BatchNorm { .. } => norms::batch_norm(b, node, dy),
        Op::Recurrent { cell } => recurrent::recurrent(b, cell, node, dy),
        Op::Attention(options) => attention::attention(b, options, node, dy),
        Op::Rotary { inverse } => attention::rotary(b, inverse, node, dy),
        Op::Embedding { first } => products::embedding(b, first, x, dy),
        Op::Gather { axis } => indexing::gather(b, axis, x, dy),
        Op::ScatterAdd { axis, .. } => indexing::scatter_add(b, axis, x, dy),
        Op::Conv2d(options) => pictures::conv2d(b, options, x, dy),
        Op::Conv2dInputGrad { options, .. } => pictures::conv2d_input_grad(b, options, x, dy),
        Op::MaxPool2d(options) => pictures::max_pool2d(b, options, node, dy),
        Op::AvgPool2d(options) => pictures::avg_pool2d(b, options, x[0], dy),
        Op::Dropout { .. } => elementwise::dropout(b, node, dy),
        Op::CrossEntropy { .. } | Op::SquaredError => losses::parts(b, node, dy),
        Op::LinearCrossEntropy { .. } | Op::JoinCrossEntropy => losses::linear_parts(b, node),
        Op::Spread => shards::spread(b, x[0], dy),
        Op::AllReduce(reduction) => shards::all_reduce(b, reduction, node, dy),
        Op::Custom(ref op) => custom::custom(b, op, node, dy),
        Op::LinearWeightGrad
        | Op::UnaryGrad(_)
        | Op::BinaryGrad { .. }
        | Op::LayerNormGrad
        | Op::LayerNormWeightGrad
        | Op::LayerNormAffineGrad
        | Op::RmsNormGrad
        | Op::NormBackward(_)
        | Op::GroupNormGrad { .. }
        | Op::GroupNormAffineGrad { .. }
        | Op::SoftmaxGrad
        | Op::BatchNormAffineGrad
        | Op::BatchNormGrad
        | Op::RecurrentGrad { .. }
        | Op::AttentionGrad(_)
        | Op::CacheUpdate(_)
        | Op::CachedAttention(_)
        | Op::EmbeddingGrad { .. }
        | Op::Conv2dWeightGrad { .. }
        | Op::MaxPool2dGrad { .. }
        | Op::AvgPool2dGrad { .. }
        | Op::CrossEntropyGrad { .. }
        | Op::LinearCrossEntropyGrad { .. }
        | Op::LinearCrossEntropyPass { .. }
        | Op::SquaredErrorGrad
        | Op::PackBf16
        | Op::UnpackBf16 { .. }
        | Op::Fused { .. } => Err(b.without_gradient(id, node)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elements::Unary;
    use crate::op::{Cell, LossClasses};
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
        assert!(into.iter().all(|n| n.accumulate.any() && n.phase == PassKind::BackwardWeight));
        let blocks: Vec<u32> =
            graph.nodes.iter().filter(|n| n.phase != PassKind::Forward).map(|n| n.block).collect();
        assert!(blocks.is_sorted_by_key(|&block| Reverse(block)), "{blocks:?}");
        let marked: Vec<_> = graph.nodes.iter().filter(|node| node.is_loss_gradient).collect();
        assert!(matches!(marked[..], [Node { op: Op::CrossEntropyGrad(_), .. }]), "{marked:?}");
        // Three tokens per sample.
        assert_eq!(graph.loss_rows(2), 6);
    }

    /// PyTorch's statistics too are those of all values, also where `detach` follows.
    #[test]
    fn running_averages_take_statistics_alone_also_without_a_gradient_of_the_norm() {
        let mut b = Builder::new();
        let (x, target) = (b.input("x", &[1, 3]), b.input("target", &[1, 3]));
        let normed = b.batch_norm("norm", x).unwrap();
        let detached = b.stop_gradient(normed).unwrap();
        let w = b.parameter("w", &[3], Init::Ones);
        let y = b.mul(detached, w).unwrap();
        // Read by an op with a gradient, too.
        let average = b.state("average", &[3], Init::Ones, 0.1);
        let y = b.mul(y, average).unwrap();
        b.squared_error_loss(y, target).unwrap();
        let graph = differentiate(b.finish()).unwrap();
        let into = |name: &str| {
            let parameter = graph.parameters.iter().find(|of| of.name == name).unwrap();
            let gradient = parameter.gradient.unwrap();
            graph.nodes.iter().filter(|node| node.outputs.contains(&gradient)).count()
        };
        let names = ["norm.running_mean", "norm.running_var", "norm.weight", "w", "average"];
        assert_eq!(names.map(into), [1, 1, 0, 1, 0]);
    }

    #[test]
    fn a_table_of_rotations_that_is_trained_is_refused() {
        let differentiated = |is_stopped: bool| {
            let mut b = Builder::new();
            let (x, target) = (b.input("x", &[1, 3, 4]), b.input("target", &[1, 3, 4]));
            let scale = b.parameter("scale", &[4], Init::Ones);
            let mut table = b.parameter("table", &[3, 4], Init::Ones);
            if is_stopped {
                table = b.stop_gradient(table).unwrap();
            }
            let x = b.mul(x, scale).unwrap();
            let y = b.rotary(x, table).unwrap();
            b.squared_error_loss(y, target).unwrap();
            differentiate(b.finish()).map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(differentiated(true), Ok(()));
        let error = differentiated(false).unwrap_err();
        assert!(error.contains("its table of cosines and sines has no gradient"), "{error}");
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

    /// The loss scale would enter twice.
    #[test]
    fn the_gradient_of_a_loss_that_is_not_the_loss_of_the_graph_is_marked_as_none() {
        let mut b = Builder::new();
        let (x, target) = (b.input("x", &[1, 3]), b.input("target", &[1, 2]));
        let w = b.parameter("w", &[5, 3], Init::Zeros);
        let logits = b.linear(x, w, None).unwrap();
        let targets = b.input_ids("targets", &[1]);
        let classes = LossClasses::whole(5);
        let parts = b.apply(Op::CrossEntropy(classes), &[logits, targets]).unwrap();
        b.squared_error_loss(parts, target).unwrap();
        let graph = differentiate(b.finish()).unwrap();
        let marks = |op: &Op| -> Vec<bool> {
            let nodes = graph.nodes.iter().filter(|node| node.op == *op);
            nodes.map(|node| node.is_loss_gradient).collect()
        };
        assert_eq!(marks(&Op::CrossEntropyGrad(classes)), [false]);
        let of_loss = marks(&Op::SquaredErrorGrad);
        assert!(!of_loss.is_empty() && of_loss.iter().all(|is_marked| *is_marked));
        assert_eq!(graph.loss_rows(7), 7);
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
