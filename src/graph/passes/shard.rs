//! Tensor parallelism as a graph transformation (Shoeybi et al. 2019): returns the shard of a
//! forward graph that one rank of a tensor group computes.
//!
//! A product with a parameter that is split by its output columns computes these columns, from a
//! replicated input (column parallel); a product with one that is split by its inputs computes a
//! term of each sum, which an all-reduce adds up (row parallel). Between the two, the values stay
//! divided by columns. Attention is divided by heads, an embedding by rows of its table, and a
//! cross-entropy by classes. All ranks have the same nodes and tensors, of different sizes, and all
//! parameters and random numbers keep their numbers in the whole graph.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use crate::Precision;
use crate::op::{ColumnRange, LossClasses, Op, Reduction};
use crate::split::SplitError;
use crate::{
    Accumulation, AttentionOptions, CacheUpdateOptions, CachedAttentionOptions, Carried, Graph,
    Node, Parameter, ParameterKind, ParameterSplit, PassKind, Role, RunsIn, ShapeError,
};
use potluck_core::{Shape, Site, TensorId};

/// Reason why a graph cannot be divided over the ranks of a tensor group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// No parameter has a split: the model family has no rule for tensor parallelism.
    #[error("no parameter of the model can be split, so it has no tensor parallelism")]
    NoRule,
    /// The graph is a shard already.
    #[error("the graph is that of a rank already; divide the whole graph")]
    Divided,
    /// The parameter has fewer units than there are ranks.
    #[error("{name}: {error}")]
    ParameterSplit { name: String, error: SplitError },
    /// The parameter has a split that does not fit its dimensions.
    #[error("{name} of {dims:?} has a split that does not fit: {why}")]
    UnfitSplit { name: String, dims: Vec<usize>, why: String },
    /// A node needs a whole tensor, but a rank has a part of it; `name` is the node's first output.
    #[error("{op} ({name}) cannot be divided over ranks: {why}")]
    Op { op: String, name: String, why: String },
    /// The shard cannot be differentiated.
    #[error(transparent)]
    Gradient(#[from] ShapeError),
    /// The caller reads a tensor that is not divided by columns: the output or the state of the
    /// input of this name.
    #[error("{name} is read behind the forward pass, and cannot be divided over ranks: {why}")]
    Read { name: String, why: String },
}

/// Part of a graph that one rank of a tensor group computes.
#[derive(Clone, Debug, PartialEq)]
pub struct Shard {
    /// Forward graph of the rank, with the parameters of all ranks.
    pub graph: Graph,
    /// The ranges of the last dimension that this rank computes, by output of the graph.
    pub outputs: Vec<Vec<Range<usize>>>,
}

/// Returns the part of a forward graph that the rank at `position` of a tensor group computes, if
/// the ranks have these shares. With one rank, it is the whole graph.
///
/// # Errors
/// Returns [`ShardError`] if the graph is a shard itself, if no parameter is split or one has a
/// split that does not fit it, if a dimension has fewer units than there are ranks, or if an op or
/// the caller needs a whole tensor that a rank has only in part.
///
/// # Panics
/// If `position` is not less than the number of shares, a share is not positive, or the graph is
/// differentiated already.
pub fn shard(graph: &Graph, shares: &[f64], position: usize) -> Result<Shard, ShardError> {
    assert!(position < shares.len(), "position {position} of {} ranks", shares.len());
    assert!(shares.iter().all(|share| share.is_finite() && *share > 0.0), "shares {shares:?}");
    let is_forward = graph.nodes.iter().all(|node| node.phase == PassKind::Forward);
    assert!(is_forward, "a graph is divided before it is differentiated");
    let mut parameters = graph.parameters.iter();
    let is_divided =
        parameters.any(|parameter| parameter.rank.is_some() || !parameter.slice.is_whole());
    if graph.tensor_rank.is_some() || is_divided {
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

/// Returns a differentiated graph of a rank without the results that the first rank of its tensor
/// group reports for all: the loss, and the gradients of replicated parameters. The reports of the
/// ranks are then summed like reports of ranks with other samples.
pub fn reported_once(mut graph: Graph) -> Graph {
    if graph.tensor_rank.is_none_or(|rank| rank == 0) {
        return graph;
    }
    let mut nodes = std::mem::take(&mut graph.nodes);
    nodes.retain(|node| !node.outputs.iter().all(|output| is_reported_once(&graph, *output)));
    graph.nodes = nodes;
    graph
}

/// Returns true for the loss and the gradient of a replicated parameter, which all ranks compute.
fn is_reported_once(graph: &Graph, tensor: TensorId) -> bool {
    match graph.tensor(tensor).role {
        Role::Gradient(id) => {
            let parameter = &graph.parameters[id.index()];
            parameter.rank.is_none() && !parameter.has_partial_gradient
        }
        Role::Loss => true,
        Role::Input | Role::Parameter(_) | Role::State(_) | Role::Activation => false,
    }
}

/// Traversal of the whole graph in the order of its nodes.
struct Sharder<'a> {
    whole: &'a Graph,
    graph: Graph,
    /// Nodes of the rank so far.
    nodes: Vec<Node>,
    /// The ranges of the last dimension of each tensor that the rank has; `None` for all of it.
    columns: Vec<Option<Vec<Range<usize>>>>,
    /// Tensors `(rows, d)` divided by rows, which are heads.
    heads: HashMap<TensorId, HeadRows>,
    /// Weights of norms over heads, and how many of these read each in training.
    norms_of_heads: BTreeMap<TensorId, usize>,
    /// Caches of keys and values divided by heads.
    cached: HashMap<TensorId, CachedHeads>,
    /// The alias that later nodes read instead of a tensor of the whole graph.
    renamed: HashMap<TensorId, TensorId>,
    /// Aliases of replicated tensors that divided nodes read, by the root and shape of the tensor.
    spread: HashMap<(TensorId, Shape), TensorId>,
}

/// Columns `(.., heads d)` whose heads are the rows of a tensor `(rows, d)`.
#[derive(Clone)]
struct HeadRows {
    /// Columns of the rank.
    ranges: Vec<Range<usize>>,
    /// Number of columns in the whole graph.
    columns: usize,
}

/// Heads of keys and values in a cache.
#[derive(Clone)]
struct CachedHeads {
    /// Heads of the rank.
    own: Range<usize>,
    /// Number of heads in the whole graph.
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
            norms_of_heads: BTreeMap::new(),
            cached: HashMap::new(),
            renamed: HashMap::new(),
            spread: HashMap::new(),
        }
    }

    fn finish(mut self) -> Result<Shard, ShardError> {
        self.check_partial_gradients()?;
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

    /// Checks that norms over heads alone read their weights in training: what another node adds to
    /// the gradient is whole on each rank, and would be counted once for each of them.
    fn check_partial_gradients(&self) -> Result<(), ShardError> {
        for (weight, of_heads) in &self.norms_of_heads {
            let mut reads = 0;
            for node in &self.whole.nodes {
                if node.when.includes(true) {
                    reads += node.inputs.iter().filter(|input| *input == weight).count();
                }
            }
            if reads > *of_heads {
                return Err(ShardError::Op {
                    op: "a norm over heads".into(),
                    name: self.graph.tensor(*weight).name.clone(),
                    why: "its weight is read elsewhere too, which gives a whole gradient".into(),
                });
            }
        }
        Ok(())
    }

    /// Tensor that later nodes read instead of one of the whole graph.
    fn name_of_all(&self, id: TensorId) -> TensorId {
        self.renamed.get(&id).copied().unwrap_or(id)
    }

    /// Columns of an output that the rank has, or why it is not divided by columns.
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

    /// Cuts the parameters that have a split into one slice per rank, so that all ranks number
    /// parameters and buckets alike.
    fn cut_parameters(&mut self, shares: &[f64], position: usize) -> Result<(), ShardError> {
        for parameter in std::mem::take(&mut self.graph.parameters) {
            let Some(split) = parameter.split else {
                self.graph.add_parameter(parameter);
                continue;
            };
            let ParameterSplit { dimension, packed, unit } = split;
            let dims = parameter.slice.whole_dims();
            let size = split.size_of_packed(dims).map_err(|why| ShardError::UnfitSplit {
                name: parameter.name.clone(),
                dims: dims.to_vec(),
                why,
            })?;
            let divided = unit.divide(size, shares).map_err(|error| {
                ShardError::ParameterSplit { name: parameter.name.clone(), error }
            })?;
            for (rank, own) in divided.into_iter().enumerate() {
                let ranges: Vec<Range<usize>> =
                    (0..packed).map(|nth| nth * size + own.start..nth * size + own.end).collect();
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

    /// Adds the rank's part of a node of the whole graph.
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
            // One node computes the gradient of `x`, which all ranks need, and the weight's
            // gradient, which only one rank may report.
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

    fn parameter_of(&self, tensor: TensorId) -> Option<&Parameter> {
        self.graph.parameters.iter().find(|parameter| parameter.tensor == tensor)
    }

    fn split_of(&self, tensor: TensorId) -> Option<ParameterSplit> {
        let parameter = self.parameter_of(tensor)?;
        if parameter.slice.is_whole() { None } else { parameter.split }
    }

    fn ranges_of(&self, tensor: TensorId, dimension: usize) -> Vec<Range<usize>> {
        match self.parameter_of(tensor) {
            Some(parameter) => parameter.slice.ranges(dimension).to_vec(),
            None => Vec::new(),
        }
    }

    /// Adds a product `x (.., k), weight (n of N, k)`, divided by its columns.
    fn column_parallel(&mut self, mut node: Node) -> Result<(), ShardError> {
        if self.columns[node.inputs[0].index()].is_some() {
            return Err(self.refused(&node, "of its input a rank has some columns"));
        }
        node.inputs[0] = self.spread(node.inputs[0], &node);
        let ranges = self.ranges_of(node.inputs[1], 0);
        self.push(node, Some(ranges))
    }

    /// Adds a product `x (.., k of K), weight (n, k of K)`, divided into terms.
    fn row_parallel(&mut self, node: Node) -> Result<(), ShardError> {
        let ranges = self.ranges_of(node.inputs[1], 1);
        if self.columns[node.inputs[0].index()].as_ref() != Some(&ranges) {
            return Err(self.refused(&node, "a rank has other columns of its input"));
        }
        self.push_reduced(node, Reduction::Sum)
    }

    /// Adds an embedding `ids, table (v of V, c)`: zeros for the rows of other ranks.
    fn embedding(&mut self, mut node: Node) -> Result<(), ShardError> {
        let ranges = self.ranges_of(node.inputs[1], 0);
        let [own] = &ranges[..] else {
            return Err(self.refused(&node, "rows are divided as one range"));
        };
        node.op = Op::Embedding { first: own.start };
        self.push_reduced(node, Reduction::Sum)
    }

    /// Adds a loss of `logits (n, v of V), targets` over the classes of the rank.
    fn cross_entropy(&mut self, mut node: Node, classes: LossClasses) -> Result<(), ShardError> {
        let ranges = self.columns[node.inputs[0].index()].clone().unwrap_or_default();
        let [own] = &ranges[..] else {
            return Err(self.refused(&node, "classes are divided as one range"));
        };
        node.op = Op::CrossEntropy(LossClasses { first: own.start, ..classes });
        self.push_reduced(node, Reduction::CrossEntropy { classes: classes.all })
    }

    /// Adds a loss of `x (n, c), weight (v of V, c), targets` over the classes of the rank.
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

    /// Adds attention of `tensors (b, t, ..)`, divided by heads of keys and values with their
    /// queries.
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
            place.first = first;
            heads[nth] = own;
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

    /// Adds a cache update of `tensors (b, n, ..), places`, divided by heads of keys and values.
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
            place.first = first;
            *heads = own;
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

    /// Adds attention of `q (b, n, ..), cache, places`: the queries of the rank's heads in the
    /// cache.
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
        let queries = cached.own.start * group..cached.own.end * group;
        let first = match self.own_heads(node.inputs[0], columns, d) {
            Some((first, heads)) if heads == queries => first,
            _ => return Err(self.refused(&node, "a rank has not the same heads of each")),
        };
        node.op = Op::CachedAttention(CachedAttentionOptions { heads: queries.len(), first });
        let columns = queries.start * d..queries.end * d;
        self.push(node, Some(vec![columns]))
    }

    /// Returns the rank's heads of `d` columns among some columns of a tensor, if they are whole
    /// and one range, preceded by their first column in the tensor of the rank.
    fn own_heads(
        &self,
        tensor: TensorId,
        columns: Range<usize>,
        d: usize,
    ) -> Option<(usize, Range<usize>)> {
        let (first, own) = self.own_columns(tensor, &columns)?;
        let start = own.start - columns.start;
        if !start.is_multiple_of(d) || !own.len().is_multiple_of(d) {
            return None;
        }
        Some((first, start / d..(start + own.len()) / d))
    }

    /// Returns the rank's columns among some columns of a tensor, if they are one range, preceded
    /// by their first column in the tensor of the rank.
    fn own_columns(&self, tensor: TensorId, whole: &Range<usize>) -> Option<(usize, Range<usize>)> {
        let mut found = None;
        let mut first = 0;
        for range in self.columns[tensor.index()].as_ref()? {
            if whole.start <= range.start && range.end <= whole.end {
                if found.is_some() {
                    return None;
                }
                found = Some((first, range.clone()));
            }
            first += range.len();
        }
        found
    }

    /// Adds an op that computes each column of the last dimension from the same columns of its
    /// inputs.
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

    /// Adds a dropout of `x (.., c of C), samples`, with the same mask as in the whole graph.
    fn dropout(&mut self, mut node: Node, p: f32, site: Site) -> Result<(), ShardError> {
        let ranges = self.columns[node.inputs[0].index()].clone().unwrap_or_default();
        let [own] = &ranges[..] else {
            return Err(self.refused(&node, "columns are divided as one range"));
        };
        let columns = ColumnRange { first: own.start, all: self.width_of(node.inputs[0]) };
        node.op = Op::Dropout { p, site, columns: Some(columns) };
        self.push(node, Some(ranges))
    }

    /// Adds rotations of `x (b, t, heads d), table (t, d)`, which must be whole heads.
    fn rotary(&mut self, node: Node) -> Result<(), ShardError> {
        let ranges = self.columns[node.inputs[0].index()].clone().unwrap_or_default();
        let d = self.graph.tensor(node.inputs[1]).shape.last();
        if ranges.is_empty() || !are_multiples(&ranges, d) {
            return Err(self.refused(&node, "a rank has parts of heads"));
        }
        self.push(node, Some(ranges))
    }

    /// Adds a norm of `x (rows, d), weight (d)`, divided by rows, which are heads: the rank
    /// computes a part of the gradient of the weight. If the weight is computed, the parts are
    /// added up where it is read.
    fn norm_of_heads(&mut self, mut node: Node) -> Result<(), ShardError> {
        let Some(rows) = self.heads.get(&node.inputs[0]).cloned() else {
            return Err(self.refused(&node, "a rank has some columns of its input"));
        };
        let output = node.outputs[0];
        let weight = node.inputs[1];
        if let Role::Parameter(id) = self.graph.tensor(weight).role {
            let parameter = &mut self.graph.parameters[id.index()];
            parameter.has_partial_gradient = parameter.kind == ParameterKind::Trained;
            if parameter.has_partial_gradient && node.when.includes(true) {
                *self.norms_of_heads.entry(weight).or_default() += 1;
            }
        } else {
            node.inputs[1] = self.spread(weight, &node);
        }
        self.push(node, Some(Vec::new()))?;
        self.heads.insert(output, rows);
        Ok(())
    }

    fn reshape(&mut self, node: Node) -> Result<(), ShardError> {
        let input = node.inputs[0];
        let output = node.outputs[0];
        let shape = self.graph.tensor(output).shape.clone();
        if let Some(HeadRows { ranges, columns }) = self.heads.get(&input).cloned() {
            if shape.last() != columns {
                return Err(self.refused(&node, "it joins or divides heads"));
            }
            self.set_columns(output, ranges);
        } else if let Some(ranges) = self.columns_of(input) {
            let d = shape.last();
            let columns = self.width_of(input);
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
        // The input may be an alias of the input in the whole graph.
        self.graph.tensors[output.index()].alias_of = Some(input);
        self.nodes.push(node);
        Ok(())
    }

    /// Sets the rank's columns of a tensor.
    fn set_columns(&mut self, tensor: TensorId, ranges: Vec<Range<usize>>) {
        let known = &mut self.graph.tensors[tensor.index()];
        known.shape = known.shape.with_last(ranges.iter().map(Range::len).sum());
        self.columns[tensor.index()] = Some(ranges);
    }

    /// Returns true unless the tensor is a parameter divided along another dimension than the last.
    fn is_cut_by_columns(&self, tensor: TensorId) -> bool {
        let rank = self.graph.tensor(tensor).shape.rank();
        self.split_of(tensor).is_none_or(|split| split.dimension + 1 == rank)
    }

    /// The rank's ranges of the last dimension of a tensor; `None` for all of it.
    fn columns_of(&self, tensor: TensorId) -> Option<Vec<Range<usize>>> {
        match self.split_of(tensor) {
            Some(ParameterSplit { dimension, .. }) => Some(self.ranges_of(tensor, dimension)),
            None => self.columns[tensor.index()].clone(),
        }
    }

    /// The last dimension of a tensor in the whole graph.
    fn width_of(&self, tensor: TensorId) -> usize {
        let of = if tensor.index() < self.whole.tensors.len() { self.whole } else { &self.graph };
        of.tensor(tensor).shape.last()
    }

    /// Adds a node; `columns` are the rank's columns of its first output.
    fn push(&mut self, node: Node, columns: Option<Vec<Range<usize>>>) -> Result<(), ShardError> {
        let outputs = self
            .graph
            .shapes_of(&node.op, &node.inputs)
            .map_err(|ShapeError { why, .. }| self.refused(&node, &why))?;
        // Further outputs, such as statistics, have no columns that another op could read.
        let further: Option<Vec<Range<usize>>> = columns.as_ref().map(|_| Vec::new());
        for (id, (shape, _)) in node.outputs.iter().zip(outputs) {
            self.graph.tensors[id.index()].shape = shape;
            self.columns[id.index()] = further.clone();
        }
        self.columns[node.outputs[0].index()] = columns;
        self.nodes.push(node);
        Ok(())
    }

    /// Alias of a replicated tensor for divided nodes.
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

    /// Adds a node and the reduction of its results over the ranks, which later nodes read instead
    /// of the results of this rank.
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
    fn weights_of_norms_over_heads_get_each_part_once() {
        /// What reads the weight of a norm over heads besides it.
        enum Other {
            None,
            Function,
            Norm,
            NormOfHeads,
        }
        let sharded = |other: Other| {
            let mut b = Builder::new();
            let (x, up) = (b.input("x", &[1, 64]), b.parameter("up", &[64, 64], Init::Zeros));
            let mut weight = b.parameter("weight", &[32], Init::Ones);
            let y = b.linear(x, up, None).unwrap();
            let heads = b.reshape(y, &[2, 32]).unwrap();
            match other {
                Other::None => {}
                Other::NormOfHeads => {
                    b.rms_norm(heads, weight, 1e-6).unwrap();
                }
                Other::Function => weight = b.offset(weight, 1.0).unwrap(),
                Other::Norm => {
                    let rows = b.reshape(x, &[2, 32]).unwrap();
                    b.rms_norm(rows, weight, 1e-5).unwrap();
                }
            }
            b.rms_norm(heads, weight, 1e-5).unwrap();
            b.split_parameters(|name| {
                let heads = SplitUnit::Heads { columns: 32 };
                (name == "up").then(|| ParameterSplit::new(0, heads))
            });
            let shard = shard(&b.finish(), &[1.0, 1.0], 0)?;
            let graph = shard.graph;
            let norm = graph.nodes.last().unwrap();
            let is_spread =
                |node: &Node| node.op == Op::Spread && node.outputs[0] == norm.inputs[1];
            let partial = graph.parameters.iter().filter(|of| of.has_partial_gradient).count();
            Ok((graph.nodes.iter().any(is_spread), partial))
        };
        assert_eq!(sharded(Other::None), Ok((false, 1)));
        assert_eq!(sharded(Other::NormOfHeads), Ok((false, 1)));
        assert_eq!(sharded(Other::Function), Ok((true, 0)));
        let error: ShardError = sharded(Other::Norm).unwrap_err();
        assert!(error.to_string().contains("its weight is read elsewhere too"), "{error}");
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
