//! Tensor parallelism as a graph transformation (Shoeybi et al. 2019): returns what one rank of a
//! tensor group computes of a forward graph.
//!
//! A product with a parameter that is split by its output columns computes these columns, from an
//! input that all ranks have (column parallel); a product with one that is split by its inputs
//! computes a part of each sum, which an all-reduce adds up (row parallel). Between the two, the
//! values stay in columns. Attention has some of the heads, an embedding some rows of its table,
//! and a cross-entropy some of the classes. All ranks have the same nodes and tensors, of other
//! sizes, and all parameters and random numbers have the numbers that they have in the whole graph.

use std::collections::HashMap;
use std::ops::Range;

use crate::Precision;
use crate::op::{ColumnRange, LossClasses, Op, Reduction};
use crate::shapes::{self, Typed};
use crate::split::SplitError;
use crate::{
    Accumulation, AttentionOptions, CacheUpdateOptions, CachedAttentionOptions, Carried, Graph,
    Node, Parameter, ParameterSplit, PassKind, Role, RunsIn, ShapeError,
};
use potluck_core::{Shape, Site, TensorId};

/// Reason why a graph cannot be divided over the ranks of a tensor group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// No parameter has a split: the family of the model has no rule for it.
    #[error("no parameter of the model can be split, so it has no tensor parallelism")]
    NoRule,
    /// The graph is what one rank computes.
    #[error("the graph is that of a rank already; divide the whole graph")]
    Divided,
    /// The parameter of this name has fewer units than there are ranks.
    #[error("{name}: {error}")]
    ParameterSplit { name: String, error: SplitError },
    /// The parameter of this name has a split that its dimensions do not have.
    #[error("{name} of {dims:?} has a split that does not fit: {why}")]
    UnfitSplit { name: String, dims: Vec<usize>, why: String },
    /// A node needs whole what a rank has a part of; `name` is that of its first output.
    #[error("{op} ({name}) cannot be divided over ranks: {why}")]
    Op { op: String, name: String, why: String },
    /// What a rank computes cannot be differentiated.
    #[error(transparent)]
    Gradient(#[from] ShapeError),
    /// The caller reads what a rank has a part of that is not columns: an output of this name, or
    /// the state of an input of this name.
    #[error("{name} is read behind the forward pass, and cannot be divided over ranks: {why}")]
    Read { name: String, why: String },
}

/// What one rank of a tensor group computes of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Shard {
    /// Forward graph of the rank, with the parameters of all ranks.
    pub graph: Graph,
    /// By output of the graph: the ranges of its last dimension that this rank computes.
    pub outputs: Vec<Vec<Range<usize>>>,
}

/// Returns what the rank at `position` of a tensor group computes of a forward graph, if the ranks
/// have these shares of it. With one rank, that is all of it.
///
/// # Errors
/// Returns [`ShardError`] if the graph is a shard itself, if no parameter is split or one has a
/// split that does not fit it, if there is less to divide than ranks, or if an op or the caller
/// reads a part of what it needs whole.
///
/// # Panics
/// If `position` is not less than the number of shares, a share is not positive, or the graph is
/// differentiated already.
pub fn shard(graph: &Graph, shares: &[f64], position: usize) -> Result<Shard, ShardError> {
    assert!(position < shares.len(), "position {position} of {} ranks", shares.len());
    assert!(shares.iter().all(|share| share.is_finite() && *share > 0.0), "shares {shares:?}");
    let is_forward = graph.nodes.iter().all(|node| node.phase == PassKind::Forward);
    assert!(is_forward, "a graph is divided before it is differentiated");
    let is_part = |parameter: &Parameter| parameter.rank.is_some() || !parameter.slice.is_whole();
    if graph.tensor_rank.is_some() || graph.parameters.iter().any(is_part) {
        return Err(ShardError::Divided);
    }
    if shares.len() > 1 && graph.parameters.iter().all(|parameter| parameter.split.is_none()) {
        return Err(ShardError::NoRule);
    }
    let mut sharder = Sharder::new(graph);
    if shares.len() > 1 {
        sharder.graph.tensor_rank = Some(position as u32);
        sharder.cut_parameters(shares, position)?;
    }
    for node in &graph.nodes {
        sharder.add(node.clone())?;
    }
    sharder.finish()
}

/// Returns a differentiated graph of a rank without what the first rank of its tensor group reports
/// for all: the loss, and the gradients of parameters that all ranks have. What the ranks report is
/// then summed like that of ranks with other samples.
pub fn reported_once(mut graph: Graph) -> Graph {
    if graph.tensor_rank.is_none_or(|rank| rank == 0) {
        return graph;
    }
    let is_of_all = |id: &TensorId| match graph.tensors[id.index()].role {
        Role::Gradient(id) => {
            let parameter = &graph.parameters[id.index()];
            parameter.rank.is_none() && !parameter.has_partial_gradient
        }
        Role::Loss => true,
        Role::Input | Role::Parameter(_) | Role::State(_) | Role::Activation => false,
    };
    graph.nodes.retain(|node| !node.outputs.iter().all(is_of_all));
    graph
}

/// Traversal of the whole graph in the order of its nodes.
struct Sharder<'a> {
    whole: &'a Graph,
    graph: Graph,
    /// Nodes of the rank so far.
    nodes: Vec<Node>,
    /// By tensor: the ranges of its last dimension that the rank has; `None` for all of it.
    columns: Vec<Option<Vec<Range<usize>>>>,
    /// Tensors `(rows, d)` whose rows are heads of which the rank has some.
    heads: HashMap<TensorId, HeadRows>,
    /// Caches of keys and values of which the rank has some heads.
    cached: HashMap<TensorId, CachedHeads>,
    /// By tensor of the whole graph: the alias that later nodes read in its place.
    renamed: HashMap<TensorId, TensorId>,
    /// Aliases that enter what is divided, by the elements and shape of the tensor.
    spread: HashMap<(TensorId, Shape), TensorId>,
}

/// Columns `(.., heads d)` of which each head is a row of a tensor `(rows, d)`.
#[derive(Clone)]
struct HeadRows {
    /// Those that the rank has.
    ranges: Vec<Range<usize>>,
    /// Number in the whole graph.
    columns: usize,
}

/// Heads of keys and values in a cache.
#[derive(Clone)]
struct CachedHeads {
    /// Those that the rank has.
    own: Range<usize>,
    /// Number in the whole graph.
    all: usize,
}

impl<'a> Sharder<'a> {
    fn new(whole: &'a Graph) -> Self {
        Self {
            whole,
            graph: whole.clone(),
            nodes: Vec::new(),
            columns: vec![None; whole.tensors.len()],
            heads: HashMap::new(),
            cached: HashMap::new(),
            renamed: HashMap::new(),
            spread: HashMap::new(),
        }
    }

    fn finish(mut self) -> Result<Shard, ShardError> {
        self.graph.nodes = std::mem::take(&mut self.nodes);
        let mut outputs = Vec::new();
        let mut named = std::mem::take(&mut self.graph.outputs);
        for (name, id) in &mut named {
            *id = self.name_of_all(*id);
            outputs.push(self.columns_read(*id).map_err(|why| unreadable(name, why))?);
        }
        self.graph.outputs = named;
        let mut carried = std::mem::take(&mut self.graph.carried);
        for Carried { input, output } in &mut carried {
            *output = self.name_of_all(*output);
            if self.columns_of(*output).is_some() {
                let name = &self.graph.tensor(*input).name;
                return Err(unreadable(name, "the next step needs all columns of the state"));
            }
        }
        self.graph.carried = carried;
        Ok(Shard { graph: self.graph, outputs })
    }

    /// Returns the tensor that later nodes read in the place of one of the whole graph.
    fn name_of_all(&self, id: TensorId) -> TensorId {
        self.renamed.get(&id).copied().unwrap_or(id)
    }

    /// Returns the columns of an output that the rank has, or why what it has is not columns.
    fn columns_read(&self, output: TensorId) -> Result<Vec<Range<usize>>, &'static str> {
        if !self.is_cut_by_columns(output) {
            return Err("a rank has rows of it, and not columns");
        }
        match self.columns_of(output) {
            Some(ranges) if ranges.is_empty() => Err("a rank has a part that is not columns"),
            Some(ranges) => Ok(ranges),
            None => Ok(std::iter::once(0..self.graph.tensor(output).shape.last()).collect()),
        }
    }

    /// Cuts the parameters that have a split: each becomes as many as there are ranks, so that all
    /// ranks number parameters and buckets alike.
    fn cut_parameters(&mut self, shares: &[f64], position: usize) -> Result<(), ShardError> {
        for parameter in std::mem::take(&mut self.graph.parameters) {
            let Some(split) = parameter.split else {
                self.graph.add_parameter(parameter);
                continue;
            };
            let ParameterSplit { dimension, packed, unit } = split;
            let dims = parameter.slice.whole_dims();
            let name = || parameter.name.clone();
            let unfit = |why| ShardError::UnfitSplit { name: name(), dims: dims.to_vec(), why };
            let size = split.size_of_packed(dims).map_err(unfit)?;
            let refused = |error| ShardError::ParameterSplit { name: name(), error };
            for (rank, own) in unit.divide(size, shares).map_err(refused)?.into_iter().enumerate() {
                let of_tensor = |nth: usize| nth * size + own.start..nth * size + own.end;
                let ranges: Vec<Range<usize>> = (0..packed).map(of_tensor).collect();
                let slice = parameter.slice.with_ranges(dimension, &ranges);
                // Ranges of a division are not empty, ascend and end with the dimension.
                let slice = slice.unwrap_or_else(|error| panic!("{}: {error}", parameter.name));
                let name = format!("{}/{rank}", parameter.name);
                let tensor = self.graph.tensor_of_slice(&parameter, &name, &slice, rank == 0);
                self.columns.resize(self.graph.tensors.len(), None);
                if rank == position {
                    self.renamed.insert(parameter.tensor, tensor);
                }
                let rank = Some(rank as u32);
                let of_rank = Parameter { name, tensor, slice, rank, ..parameter.clone() };
                self.graph.add_parameter(of_rank);
            }
        }
        Ok(())
    }

    /// Adds what the rank computes of a node of the whole graph.
    fn add(&mut self, mut node: Node) -> Result<(), ShardError> {
        for input in &mut node.inputs {
            *input = self.name_of_all(*input);
        }
        let split = node.inputs.iter().map(|id| self.split_of(*id)).collect::<Vec<_>>();
        let is_whole = |index: usize| self.columns[node.inputs[index].index()].is_none();
        match (&node.op, &split[..]) {
            (Op::MatMul { transpose_a: false, transpose_b: true }, [None, Some(weight)]) => {
                match weight.dimension {
                    0 => self.column_parallel(node),
                    1 => self.row_parallel(node),
                    _ => Err(self.refused(&node, "it has several products")),
                }
            }
            (Op::Embedding { first: 0 }, [None, Some(table)]) if table.dimension == 0 => {
                self.embedding(node)
            }
            (&Op::CrossEntropy(classes @ LossClasses { first: 0, .. }), _) if !is_whole(0) => {
                self.cross_entropy(node, classes)
            }
            (
                &Op::LinearCrossEntropy { rows, classes: classes @ LossClasses { first: 0, .. } },
                [None, Some(weight), None],
            ) if weight.dimension == 0 => self.linear_cross_entropy(node, rows, classes),
            // One node computes the gradients of `x`, which all ranks need, and of the weight,
            // which only one may report.
            (Op::LinearCrossEntropy { .. }, _) if self.graph.tensor_rank.is_some() => {
                Err(self.refused(&node, "its weight is not divided by rows"))
            }
            (Op::Attention(options), _) if !is_whole(0) => {
                let options = *options;
                self.attention(node, options)
            }
            (Op::CacheUpdate(options), _) if !is_whole(0) => {
                let options = *options;
                self.cache_update(node, options)
            }
            (Op::CachedAttention(options), _) if !is_whole(0) => {
                let options = *options;
                self.cached_attention(node, options)
            }
            (Op::Rotary { .. }, [None, None]) if !is_whole(0) => self.rotary(node),
            (Op::RmsNorm { .. }, [None, None]) if !is_whole(0) => self.norm_of_heads(node),
            (Op::Unary(_) | Op::Binary(_), _) => self.elementwise(node),
            (Op::Reshape, [None]) => self.reshape(node),
            (&Op::Dropout { p, site, columns: None }, [None, None]) if !is_whole(0) => {
                self.dropout(node, p, site)
            }
            _ => {
                let are_whole = (0..node.inputs.len()).all(is_whole);
                if !are_whole || split.iter().any(Option::is_some) {
                    return Err(self.refused(&node, "it reads what a rank has a part of"));
                }
                self.push(node, None)
            }
        }
    }

    /// Returns the split of a tensor that is a parameter which the ranks divide.
    fn split_of(&self, tensor: TensorId) -> Option<ParameterSplit> {
        let known = self.graph.parameters.iter().find(|parameter| parameter.tensor == tensor);
        known.filter(|parameter| !parameter.slice.is_whole())?.split
    }

    /// Returns the ranges that a rank has of a dimension of a parameter.
    fn ranges_of(&self, tensor: TensorId, dimension: usize) -> Vec<Range<usize>> {
        let known = self.graph.parameters.iter().find(|parameter| parameter.tensor == tensor);
        known.map_or_else(Vec::new, |parameter| parameter.slice.ranges(dimension).to_vec())
    }

    /// `x (.., k), weight (n of N, k)`: columns of the product.
    fn column_parallel(&mut self, mut node: Node) -> Result<(), ShardError> {
        if self.columns[node.inputs[0].index()].is_some() {
            return Err(self.refused(&node, "of its input a rank has some columns"));
        }
        node.inputs[0] = self.spread(node.inputs[0], &node);
        let ranges = self.ranges_of(node.inputs[1], 0);
        self.push(node, Some(ranges))
    }

    /// `x (.., k of K), weight (n, k of K)`: a term of the product.
    fn row_parallel(&mut self, node: Node) -> Result<(), ShardError> {
        let ranges = self.ranges_of(node.inputs[1], 1);
        if self.columns[node.inputs[0].index()].as_ref() != Some(&ranges) {
            return Err(self.refused(&node, "a rank has other columns of its input"));
        }
        self.push_reduced(node, Reduction::Sum)
    }

    /// `ids, table (v of V, c)`: the rows that the rank has, which are zeros on all others.
    fn embedding(&mut self, mut node: Node) -> Result<(), ShardError> {
        let ranges = self.ranges_of(node.inputs[1], 0);
        let [own] = &ranges[..] else {
            return Err(self.refused(&node, "rows are divided as one range"));
        };
        node.op = Op::Embedding { first: own.start };
        self.push_reduced(node, Reduction::Sum)
    }

    /// `logits (n, v of V), targets`: the loss over the classes that the rank has.
    fn cross_entropy(&mut self, mut node: Node, classes: LossClasses) -> Result<(), ShardError> {
        let ranges = self.columns[node.inputs[0].index()].clone().unwrap_or_default();
        let [own] = &ranges[..] else {
            return Err(self.refused(&node, "classes are divided as one range"));
        };
        node.op = Op::CrossEntropy(LossClasses { first: own.start, ..classes });
        self.push_reduced(node, Reduction::CrossEntropy { classes: classes.all })
    }

    /// `x (n, c), weight (v of V, c), targets`: the loss over the classes that the rank has.
    fn linear_cross_entropy(
        &mut self,
        mut node: Node,
        rows: usize,
        classes: LossClasses,
    ) -> Result<(), ShardError> {
        if self.columns[node.inputs[0].index()].is_some() {
            return Err(self.refused(&node, "of its input a rank has some columns"));
        }
        node.inputs[0] = self.spread(node.inputs[0], &node);
        let ranges = self.ranges_of(node.inputs[1], 0);
        let [own] = &ranges[..] else {
            return Err(self.refused(&node, "classes are divided as one range"));
        };
        let own = LossClasses { first: own.start, ..classes };
        node.op = Op::LinearCrossEntropy { rows, classes: own };
        self.push_reduced(node, Reduction::CrossEntropy { classes: classes.all })
    }

    /// `tensors (b, t, ..)` by heads of keys and values, each with its heads of queries.
    fn attention(&mut self, mut node: Node, options: AttentionOptions) -> Result<(), ShardError> {
        let group = options.group();
        let mut places = options.places;
        let mut heads = [const { 0..0 }; 3];
        for (nth, place) in places.iter_mut().enumerate() {
            let unit = if nth == 0 { group * options.head_width } else { options.head_width };
            let whole = place.first..place.first + options.columns()[nth];
            let Some((first, own)) = self.own_heads(node.inputs[place.input], whole, unit) else {
                return Err(self.refused(&node, "a rank has parts of heads"));
            };
            (place.first, heads[nth]) = (first, own);
        }
        let [kv_heads, k, v] = heads;
        if kv_heads != k || k != v {
            return Err(self.refused(&node, "a rank has not the same heads of each"));
        }
        let queries = kv_heads.start * group..kv_heads.end * group;
        node.op = Op::Attention(AttentionOptions {
            heads: queries.len(),
            kv_heads: kv_heads.len(),
            places,
            first_head: options.first_head + queries.start,
            ..options
        });
        let columns = queries.start * options.head_width..queries.end * options.head_width;
        self.push(node, Some(vec![columns]))
    }

    /// `tensors (b, n, ..), places`: the heads of keys and values that the rank has.
    fn cache_update(
        &mut self,
        mut node: Node,
        options: CacheUpdateOptions,
    ) -> Result<(), ShardError> {
        let mut places = options.places;
        let mut heads = [const { 0..0 }; 2];
        for (place, heads) in places.iter_mut().zip(&mut heads) {
            let columns = place.first..place.first + options.columns();
            let own = self.own_heads(node.inputs[place.input], columns, options.head_width);
            let Some((first, own)) = own else {
                return Err(self.refused(&node, "a rank has parts of heads"));
            };
            (place.first, *heads) = (first, own);
        }
        let [keys, values] = heads;
        if keys != values {
            return Err(self.refused(&node, "a rank has not the same heads of each"));
        }
        node.op = Op::CacheUpdate(CacheUpdateOptions { places, kv_heads: keys.len(), ..options });
        let cache = node.outputs[0];
        self.push(node, Some(Vec::new()))?;
        self.cached.insert(cache, CachedHeads { own: keys, all: options.kv_heads });
        Ok(())
    }

    /// `q (b, n, ..), cache, places`: the queries of the heads that the rank has in the cache.
    fn cached_attention(
        &mut self,
        mut node: Node,
        options: CachedAttentionOptions,
    ) -> Result<(), ShardError> {
        let Some(cached) = self.cached.get(&node.inputs[1]).cloned() else {
            return Err(self.refused(&node, "queries, keys and values are divided otherwise"));
        };
        let d = self.graph.tensor(node.inputs[1]).shape.last();
        let group = options.heads / cached.all;
        let columns = options.first..options.first + options.heads * d;
        let own = self.own_heads(node.inputs[0], columns, d);
        let queries = cached.own.start * group..cached.own.end * group;
        let Some((first, _)) = own.filter(|(_, heads)| *heads == queries) else {
            return Err(self.refused(&node, "a rank has not the same heads of each"));
        };
        node.op = Op::CachedAttention(CachedAttentionOptions { heads: queries.len(), first });
        let columns = queries.start * d..queries.end * d;
        self.push(node, Some(vec![columns]))
    }

    /// Returns the heads of `d` columns that the rank has of some columns of a tensor, if they are
    /// whole and one range, and before them their first column in the tensor of the rank.
    fn own_heads(
        &self,
        tensor: TensorId,
        columns: Range<usize>,
        d: usize,
    ) -> Option<(usize, Range<usize>)> {
        let (first, own) = self.own_columns(tensor, &columns)?;
        let start = own.start - columns.start;
        let are_whole = start.is_multiple_of(d) && own.len().is_multiple_of(d);
        are_whole.then(|| (first, start / d..(start + own.len()) / d))
    }

    /// Returns the columns that the rank has of some columns of a tensor, if they are one range,
    /// and before it the first column of that in the tensor of the rank.
    fn own_columns(&self, tensor: TensorId, whole: &Range<usize>) -> Option<(usize, Range<usize>)> {
        let ranges = self.columns[tensor.index()].as_ref()?;
        let is_in = |range: &Range<usize>| whole.start <= range.start && range.end <= whole.end;
        let at = ranges.iter().position(is_in)?;
        let first = ranges[..at].iter().map(Range::len).sum();
        let is_one = !ranges[at + 1..].iter().any(is_in);
        is_one.then(|| (first, ranges[at].clone()))
    }

    /// Ops that compute each column of the last dimension from the same columns of their inputs.
    fn elementwise(&mut self, node: Node) -> Result<(), ShardError> {
        if !node.inputs.iter().all(|id| self.is_cut_by_columns(*id)) {
            return Err(self.refused(&node, "a rank has rows of its input, and not columns"));
        }
        let columns = self.columns_of(node.inputs[0]);
        if node.inputs[1..].iter().any(|other| self.columns_of(*other) != columns) {
            return Err(self.refused(&node, "a rank has other columns of its inputs"));
        }
        self.push(node, columns)
    }

    /// `x (.., c of C), samples`: the columns of the mask of all.
    fn dropout(&mut self, mut node: Node, p: f32, site: Site) -> Result<(), ShardError> {
        let ranges = self.columns[node.inputs[0].index()].clone().unwrap_or_default();
        let [own] = &ranges[..] else {
            return Err(self.refused(&node, "columns are divided as one range"));
        };
        let columns = ColumnRange { first: own.start, all: self.width_of(node.inputs[0]) };
        node.op = Op::Dropout { p, site, columns: Some(columns) };
        self.push(node, Some(ranges))
    }

    /// `x (b, t, heads d), table (t, d)`: each head from its own columns.
    fn rotary(&mut self, node: Node) -> Result<(), ShardError> {
        let ranges = self.columns[node.inputs[0].index()].clone().unwrap_or_default();
        let d = self.graph.tensor(node.inputs[1]).shape.last();
        if ranges.is_empty() || !are_multiples(&ranges, d) {
            return Err(self.refused(&node, "a rank has parts of heads"));
        }
        self.push(node, Some(ranges))
    }

    /// `x (rows, d), weight (d)`, whose rows are heads of which the rank has some: so it has a part
    /// of the gradient of the weight.
    fn norm_of_heads(&mut self, node: Node) -> Result<(), ShardError> {
        let Some(rows) = self.heads.get(&node.inputs[0]).cloned() else {
            return Err(self.refused(&node, "a rank has some columns of its input"));
        };
        let (weight, output) = (node.inputs[1], node.outputs[0]);
        if let Role::Parameter(id) = self.graph.tensor(weight).role {
            self.graph.parameters[id.index()].has_partial_gradient = true;
        }
        self.push(node, Some(Vec::new()))?;
        self.heads.insert(output, rows);
        Ok(())
    }

    fn reshape(&mut self, node: Node) -> Result<(), ShardError> {
        let (input, output) = (node.inputs[0], node.outputs[0]);
        let shape = self.graph.tensor(output).shape.clone();
        if let Some(HeadRows { ranges, columns }) = self.heads.get(&input).cloned() {
            if shape.last() != columns {
                return Err(self.refused(&node, "it joins or divides heads"));
            }
            self.set_columns(output, ranges);
        } else if let Some(ranges) = self.columns_of(input) {
            let (d, columns) = (shape.last(), self.width_of(input));
            if d == columns {
                self.set_columns(output, ranges);
            } else if shape.rank() == 2 && !ranges.is_empty() && are_multiples(&ranges, d) {
                let rows = self.graph.tensor(input).shape.per_row() / d;
                self.graph.tensors[output.index()].shape = shape.with_dims(&[rows, d]);
                self.columns[output.index()] = Some(Vec::new());
                self.heads.insert(output, HeadRows { ranges, columns });
            } else {
                return Err(self.refused(&node, "it joins or divides columns"));
            }
        }
        // The input may be an alias of the one that the whole graph has.
        self.graph.tensors[output.index()].alias_of = Some(input);
        self.nodes.push(node);
        Ok(())
    }

    /// Gives a tensor the columns that the rank has of it.
    fn set_columns(&mut self, tensor: TensorId, ranges: Vec<Range<usize>>) {
        let known = &mut self.graph.tensors[tensor.index()];
        known.shape = known.shape.with_last(ranges.iter().map(Range::len).sum());
        self.columns[tensor.index()] = Some(ranges);
    }

    /// Returns true for all but a parameter of which the ranks divide another than the last
    /// dimension.
    fn is_cut_by_columns(&self, tensor: TensorId) -> bool {
        let rank = self.graph.tensor(tensor).shape.rank();
        self.split_of(tensor).is_none_or(|split| split.dimension + 1 == rank)
    }

    /// Returns the ranges of the last dimension that a rank has of a tensor; `None` for all of it.
    fn columns_of(&self, tensor: TensorId) -> Option<Vec<Range<usize>>> {
        match self.split_of(tensor) {
            Some(ParameterSplit { dimension, .. }) => Some(self.ranges_of(tensor, dimension)),
            None => self.columns[tensor.index()].clone(),
        }
    }

    /// Returns the last dimension of a tensor in the whole graph.
    fn width_of(&self, tensor: TensorId) -> usize {
        let of = if tensor.index() < self.whole.tensors.len() { self.whole } else { &self.graph };
        of.tensor(tensor).shape.last()
    }

    /// Adds a node; `columns` are those of its first output that the rank computes.
    fn push(&mut self, node: Node, columns: Option<Vec<Range<usize>>>) -> Result<(), ShardError> {
        let typed = |id: &TensorId| {
            let tensor = self.graph.tensor(*id);
            (tensor.shape.clone(), tensor.dtype)
        };
        let inputs: Vec<Typed> = node.inputs.iter().map(typed).collect();
        let outputs = shapes::outputs(&node.op, &inputs);
        let outputs = outputs.map_err(|ShapeError { why, .. }| self.refused(&node, &why))?;
        for (nth, (id, (shape, _))) in node.outputs.iter().zip(outputs).enumerate() {
            self.graph.tensors[id.index()].shape = shape;
            // Further outputs, such as statistics, have no columns that another op could read.
            let of_output =
                columns.clone().map(|ranges| if nth == 0 { ranges } else { Vec::new() });
            self.columns[id.index()] = of_output;
        }
        self.nodes.push(node);
        Ok(())
    }

    /// Returns the alias of a tensor that nodes read which compute a part.
    fn spread(&mut self, tensor: TensorId, reader: &Node) -> TensorId {
        let shape = self.graph.tensor(tensor).shape.clone();
        let key = (self.graph.root(tensor), shape.clone());
        if let Some(known) = self.spread.get(&key) {
            return *known;
        }
        let alias = self.add_alias(tensor);
        self.nodes.push(Node {
            op: Op::Spread,
            inputs: vec![tensor],
            outputs: vec![alias],
            accumulate: Accumulation::NONE,
            precision: Precision::F32,
            is_loss_gradient: false,
            when: RunsIn::AllPasses,
            phase: PassKind::Forward,
            block: reader.block,
        });
        self.spread.insert(key, alias);
        alias
    }

    /// Adds a node and the reduction of what the ranks compute with it, which later nodes read in
    /// the place of the results of this rank.
    fn push_reduced(&mut self, node: Node, reduction: Reduction) -> Result<(), ShardError> {
        let results = node.outputs.clone();
        let block = node.block;
        self.push(node, None)?;
        let aliases: Vec<TensorId> = results.iter().map(|id| self.add_alias(*id)).collect();
        self.nodes.push(Node {
            op: Op::AllReduce(reduction),
            inputs: results.clone(),
            outputs: aliases.clone(),
            accumulate: Accumulation::NONE,
            precision: Precision::F32,
            is_loss_gradient: false,
            when: RunsIn::AllPasses,
            phase: PassKind::Forward,
            block,
        });
        self.renamed.extend(results.into_iter().zip(aliases));
        Ok(())
    }

    fn add_alias(&mut self, tensor: TensorId) -> TensorId {
        let shape = self.graph.tensor(tensor).shape.clone();
        self.columns.push(None);
        self.graph.add_alias(tensor, shape)
    }

    fn refused(&self, node: &Node, why: &str) -> ShardError {
        let name = self.graph.tensor(node.outputs[0]).name.clone();
        ShardError::Op { op: node.op.to_string(), name, why: why.into() }
    }
}

/// Returns true if all ranges begin and end at multiples of `unit`.
fn are_multiples(ranges: &[Range<usize>], unit: usize) -> bool {
    ranges.iter().all(|own| own.start.is_multiple_of(unit) && own.end.is_multiple_of(unit))
}

fn unreadable(name: &str, why: &str) -> ShardError {
    ShardError::Read { name: name.into(), why: why.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, Init, SplitUnit};

    const COLUMNS: SplitUnit = SplitUnit::Columns;

    #[test]
    fn splits_that_do_not_fit_are_refused() {
        let told = |dimension, packed, unit| {
            let mut b = Builder::new();
            let (x, w) = (b.input("x", &[1, 8]), b.parameter("w", &[64, 8], Init::Zeros));
            b.linear(x, w, None).unwrap();
            b.split_parameters(|_| Some(ParameterSplit { dimension, packed, unit }));
            shard(&b.finish(), &[1.0, 1.0], 0).map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(told(0, 1, COLUMNS), Ok(()));
        let unfit = |why: &str| Err(format!("w of [64, 8] has a split that does not fit: {why}"));
        assert_eq!(told(2, 1, COLUMNS), unfit("it has no dimension 2"));
        assert_eq!(
            told(usize::MAX, 1, COLUMNS),
            unfit(&format!("it has no dimension {}", usize::MAX))
        );
        assert_eq!(told(0, 0, COLUMNS), unfit("0 tensors are packed in dimension 0"));
        assert_eq!(told(0, 3, COLUMNS), unfit("64 is not divisible by 3 packed tensors"));
        let heads = SplitUnit::Heads { columns: 0 };
        assert_eq!(told(0, 1, heads), unfit("a head has no columns"));
    }

    #[test]
    fn rows_of_a_table_in_several_ranges_are_refused() {
        let mut b = Builder::new();
        let (ids, table) = (b.input_ids("ids", &[1]), b.parameter("table", &[128, 8], Init::Zeros));
        b.embedding(ids, table).unwrap();
        b.split_parameters(|_| Some(ParameterSplit { dimension: 0, packed: 2, unit: COLUMNS }));
        let error = shard(&b.finish(), &[1.0, 1.0], 1).unwrap_err().to_string();
        assert!(error.ends_with("rows are divided as one range"), "{error}");
    }

    #[test]
    fn a_state_is_carried_whole_or_refused() {
        let shards = |is_reduced: bool| {
            let mut b = Builder::new();
            let (h, up) = (b.input("h", &[1, 64]), b.parameter("up", &[64, 64], Init::Zeros));
            let mut y = b.linear(h, up, None).unwrap();
            if is_reduced {
                let down = b.parameter("down", &[64, 64], Init::Zeros);
                y = b.linear(y, down, None).unwrap();
            }
            b.carry(h, y).unwrap();
            b.split_parameters(|name| {
                Some(ParameterSplit::new(usize::from(name == "down"), COLUMNS))
            });
            shard(&b.finish(), &[1.0, 1.0], 0)
        };
        let part = shards(true).unwrap().graph;
        let reduction = part.nodes.last().unwrap();
        assert_eq!(reduction.op, Op::AllReduce(Reduction::Sum));
        assert_eq!(part.carried[0].output, reduction.outputs[0]);
        let error = shards(false).unwrap_err();
        let why = "the next step needs all columns of the state".into();
        assert_eq!(error, ShardError::Read { name: "h".into(), why });
    }
}
