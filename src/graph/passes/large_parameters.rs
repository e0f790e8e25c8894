//! Parameters that are larger than a device can bind, as a graph transformation: each is cut by its
//! rows into several parameters, which are slices of one tensor. The slices have separate memory
//! and updates, and are one tensor in files.
//!
//! Readers of such a table compute with the rows of each slice separately: embeddings of the
//! slices, which are zero for the ids of other slices, are added up; a product concatenates the
//! columns of all slices; and linear cross-entropies over the classes of each slice are joined.

use std::collections::HashMap;
use std::ops::Range;

use crate::elements::Binary;
use crate::memory_layout::ALIGNMENT_BYTES;
use crate::op::{LossClasses, Op};
use crate::shapes::CONCAT_INPUTS_MAX;
use crate::{Graph, Node, Parameter, Role, Tensor};
use potluck_core::{Shape, TensorId};

/// Largest number of slices of a parameter: one that would need more stays whole, and devices that
/// cannot bind it refuse it.
const SLICES_MAX: usize = 256;

/// The rows of a slice are a multiple of this number where possible, which suits products.
const ROWS_UNIT: usize = 64;

/// Returns a forward graph, or a shard of one, with every parameter of more than `bytes_max` bytes
/// cut by rows into slices of at most that size. If one rank of a tensor group must cut its slice
/// of a tensor, all ranks cut theirs into the same number, so that all have the same nodes and
/// tensors. A parameter stays whole if a single row is larger, if a node does not read it as a
/// table of rows, or if a rank has fewer rows of it than another one needs slices.
pub fn cut_large_parameters(graph: Graph, bytes_max: usize) -> Graph {
    let mut cutter = Cutter { graph, nodes: Vec::new(), slices: HashMap::new() };
    cutter.cut_parameters(bytes_max);
    if cutter.slices.is_empty() {
        return cutter.graph;
    }
    for node in std::mem::take(&mut cutter.graph.nodes) {
        cutter.add(node);
    }
    Graph { nodes: cutter.nodes, ..cutter.graph }
}

/// Rows of a table in a separate tensor.
#[derive(Clone)]
struct RowSlice {
    tensor: TensorId,
    rows: Range<usize>,
}

struct Cutter {
    graph: Graph,
    /// Nodes of the new graph so far.
    nodes: Vec<Node>,
    /// Slices of each cut parameter in ascending order, by its tensor.
    slices: HashMap<TensorId, Vec<RowSlice>>,
}

impl Cutter {
    fn cut_parameters(&mut self, bytes_max: usize) {
        // Smallest and largest number of slices into which each rank can cut its part of a tensor,
        // by the number of the tensor. A rank only reads its own part.
        let mut counts: HashMap<u32, (usize, usize)> = HashMap::new();
        for parameter in &self.graph.parameters {
            let own = match rows_max(&self.graph.tensor(parameter.tensor).shape, bytes_max) {
                Some((rows, most)) if is_table(&self.graph, parameter.tensor) => {
                    (rows.div_ceil(most), rows.min(SLICES_MAX))
                }
                _ => (1, 1),
            };
            let count = counts.entry(parameter.whole.number).or_insert(own);
            *count = (count.0.max(own.0), count.1.min(own.1));
        }
        for parameter in std::mem::take(&mut self.graph.parameters) {
            let (least, most) = counts[&parameter.whole.number];
            let shape = &self.graph.tensor(parameter.tensor).shape;
            match rows_max(shape, bytes_max) {
                Some((rows, of_slice)) if (2..=most).contains(&least) => {
                    self.cut(&parameter, row_ranges(rows, least, of_slice));
                }
                _ => self.graph.add_parameter(parameter),
            }
        }
    }

    fn cut(&mut self, parameter: &Parameter, ranges: Vec<Range<usize>>) {
        let mut slices = Vec::with_capacity(ranges.len());
        for rows in ranges {
            let of_whole = sub_ranges(parameter.slice.ranges(0), &rows);
            let slice = parameter.slice.with_ranges(0, &of_whole);
            // Ranges of rows ascend, are not empty and lie in the parameter.
            let slice = slice.unwrap_or_else(|error| panic!("{}: {error}", parameter.name));
            let name = format!("{}[{}..{}]", parameter.name, rows.start, rows.end);
            let is_first = rows.start == 0;
            let tensor = self.graph.tensor_of_slice(parameter, &name, &slice, is_first);
            self.graph.add_parameter(Parameter { name, tensor, slice, ..parameter.clone() });
            slices.push(RowSlice { tensor, rows });
        }
        self.slices.insert(parameter.tensor, slices);
    }

    /// Adds a node, or the nodes that compute its outputs from the slices of its table.
    fn add(&mut self, node: Node) {
        let table = node.inputs.get(1).and_then(|table| self.slices.get(table)).cloned();
        match (&node.op, table) {
            (&Op::Embedding { first }, Some(slices)) => self.add_embedding(&node, first, &slices),
            (Op::MatMul { .. }, Some(slices)) => self.add_product(&node, &slices),
            (&Op::LinearCrossEntropy { rows, classes }, Some(slices)) => {
                self.add_loss(&node, rows, classes, &slices);
            }
            _ => self.nodes.push(node),
        }
    }

    fn add_embedding(&mut self, node: &Node, first: usize, slices: &[RowSlice]) {
        let mut parts = Vec::with_capacity(slices.len());
        for RowSlice { tensor, rows } in slices {
            let part = self.beside(node.outputs[0]);
            let op = Op::Embedding { first: first + rows.start };
            self.push(node, op, vec![node.inputs[0], *tensor], vec![part]);
            parts.push(vec![part]);
        }
        self.push_chain(node, &Op::Binary(Binary::Add), &parts);
    }

    fn add_product(&mut self, node: &Node, slices: &[RowSlice]) {
        let x = node.inputs[0];
        let y = node.outputs[0];
        let mut columns = Vec::with_capacity(slices.len());
        for RowSlice { tensor, rows } in slices {
            let part = self.beside_of_columns(y, rows.len());
            self.push(node, node.op.clone(), vec![x, *tensor], vec![part]);
            columns.push(part);
        }
        let axis = self.graph.tensor(y).shape.rank() - 1;
        while columns.len() > CONCAT_INPUTS_MAX {
            let mut joined = Vec::new();
            for parts in columns.chunks(CONCAT_INPUTS_MAX) {
                let widths = parts.iter().map(|part| self.graph.tensor(*part).shape.last());
                let run = self.beside_of_columns(y, widths.sum());
                self.push(node, Op::Concat { axis }, parts.to_vec(), vec![run]);
                joined.push(run);
            }
            columns = joined;
        }
        self.push(node, Op::Concat { axis }, columns, vec![y]);
    }

    fn add_loss(&mut self, node: &Node, rows: usize, classes: LossClasses, slices: &[RowSlice]) {
        let mut parts = Vec::with_capacity(slices.len());
        for RowSlice { tensor, rows: own } in slices {
            let part: Vec<TensorId> = node.outputs.iter().map(|y| self.beside(*y)).collect();
            let classes = LossClasses { first: classes.first + own.start, ..classes };
            let op = Op::LinearCrossEntropy { rows, classes };
            let inputs = vec![node.inputs[0], *tensor, node.inputs[2]];
            self.push(node, op, inputs, part.clone());
            parts.push(part);
        }
        self.push_chain(node, &Op::JoinCrossEntropy, &parts);
    }

    /// Adds a chain of an op of two sides, the result so far and the next part; the last op has the
    /// outputs of the node.
    fn push_chain(&mut self, node: &Node, op: &Op, parts: &[Vec<TensorId>]) {
        let mut before = parts[0].clone();
        for (index, part) in parts.iter().enumerate().skip(1) {
            let is_last = index + 1 == parts.len();
            let after: Vec<TensorId> = if is_last {
                node.outputs.clone()
            } else {
                node.outputs.iter().map(|y| self.beside(*y)).collect()
            };
            self.push(node, op.clone(), [&before[..], part].concat(), after.clone());
            before = after;
        }
    }

    fn beside(&mut self, tensor: TensorId) -> TensorId {
        let Tensor { name, shape, dtype, .. } = self.graph.tensor(tensor).clone();
        self.graph.add_tensor(name, (shape, dtype), Role::Activation)
    }

    /// Returns a new tensor like another, with another number of columns.
    fn beside_of_columns(&mut self, tensor: TensorId, columns: usize) -> TensorId {
        let part = self.beside(tensor);
        let shape = &mut self.graph.tensors[part.index()].shape;
        *shape = shape.with_last(columns);
        part
    }

    /// Adds a node with the pass and the block of another.
    fn push(&mut self, of: &Node, op: Op, inputs: Vec<TensorId>, outputs: Vec<TensorId>) {
        self.nodes.push(Node { op, inputs, outputs, ..of.clone() });
    }
}

/// Returns true if every node that reads a tensor reads it as a table, and computes with its rows
/// independently of each other; also without readers.
fn is_table(graph: &Graph, tensor: TensorId) -> bool {
    let has_alias = graph.tensors.iter().any(|other| other.alias_of == Some(tensor));
    if has_alias || graph.read_by_caller().any(|read| read == tensor) {
        return false;
    }
    for node in graph.nodes.iter().filter(|node| node.inputs.contains(&tensor)) {
        let is_row_op = match node.op {
            Op::Embedding { .. } | Op::LinearCrossEntropy { .. } => true,
            Op::MatMul { transpose_a, transpose_b } => {
                !transpose_a && transpose_b && graph.tensor(tensor).shape.rank() == 2
            }
            _ => false,
        };
        if !is_row_op || node.inputs[1] != tensor || node.inputs[0] == tensor {
            return false;
        }
    }
    true
}

/// Returns the number of rows of a table of floats, and the largest number of rows of a slice;
/// `None` if a row has more than `bytes_max` bytes.
fn rows_max(table: &Shape, bytes_max: usize) -> Option<(usize, usize)> {
    let (&rows, row) = table.dims().split_first()?;
    let row_bytes = row.iter().product::<usize>() * size_of::<f32>();
    // A bucket ends at a multiple of the alignment.
    let most = bytes_max / ALIGNMENT_BYTES * ALIGNMENT_BYTES / row_bytes.max(1);
    if most > 0 { Some((rows, most)) } else { None }
}

/// Returns the rows of each of `count` slices, at most `most` each: a multiple of [`ROWS_UNIT`] for
/// all but the last where that fits.
fn row_ranges(rows: usize, count: usize, most: usize) -> Vec<Range<usize>> {
    let even = rows.div_ceil(count);
    let rounded = even.next_multiple_of(ROWS_UNIT);
    let mut sizes = [rounded, even].into_iter();
    let each = sizes.find(|each| *each <= most && each * (count - 1) < rows);
    let mut ranges = Vec::with_capacity(count);
    let mut start = 0;
    for index in 1..=count {
        let end = match each {
            Some(each) => rows.min(index * each),
            // With few rows, some slices have one row less.
            None => index * rows / count,
        };
        ranges.push(start..end);
        start = end;
    }
    ranges
}

/// Returns true for each node that joins the results of the slices of one table to the result of
/// the whole table.
pub fn joins_of_slices(graph: &Graph) -> Vec<bool> {
    // Number of the table from whose slices each tensor was computed.
    let mut tables: Vec<Option<u32>> = vec![None; graph.tensors.len()];
    let mut joins = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        let (table, is_join) = match node.op.root_op() {
            Op::Embedding { .. } | Op::MatMul { .. } => (slice_of(graph, node.inputs[1]), false),
            Op::Concat { .. } | Op::Binary(Binary::Add) => {
                let first = tables[node.inputs[0].index()];
                let are_alike = node.inputs.iter().all(|input| tables[input.index()] == first);
                let table = if are_alike { first } else { None };
                (table, table.is_some())
            }
            _ => (None, false),
        };
        tables[node.outputs[0].index()] = table;
        joins.push(is_join);
    }
    joins
}

/// Number of the tensor that a parameter is a slice of; `None` for other tensors.
fn slice_of(graph: &Graph, tensor: TensorId) -> Option<u32> {
    let Role::Parameter(id) = graph.tensor(tensor).role else { return None };
    let parameter = &graph.parameters[id.index()];
    if parameter.slice.is_whole() { None } else { Some(parameter.whole.number) }
}

/// Returns the entries number `own.start` to `own.end` of the concatenation of ranges of a
/// dimension.
fn sub_ranges(ranges: &[Range<usize>], own: &Range<usize>) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut before = 0;
    for range in ranges {
        let end = before + range.len();
        let first = own.start.max(before);
        let last = own.end.min(end);
        if first < last {
            found.push(range.start + first - before..range.start + last - before);
        }
        before = end;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, Init, ParameterSplit, SplitUnit, differentiate, shard};

    /// A table of 300 rows of 8, for ids and for classes, 9,600 bytes, and one that is sliced.
    fn tied() -> Graph {
        let mut b = Builder::new();
        let table = b.parameter("table", &[300, 8], Init::Zeros);
        let positions = b.parameter("positions", &[300, 8], Init::Zeros);
        let ids = b.input_ids("ids", &[1, 3]);
        let targets = b.input_ids("targets", &[1, 3]);
        let x = b.embedding(ids, table).unwrap();
        let own = b.slice(positions, 0, 0, 3).unwrap();
        let x = b.add(x, own).unwrap();
        let logits = b.linear(x, table, None).unwrap();
        b.output("logits", logits);
        b.linear_cross_entropy_loss(x, table, targets, 64).unwrap();
        b.split_parameters(|name| {
            (name == "table").then(|| ParameterSplit::new(0, SplitUnit::Columns))
        });
        b.finish()
    }

    fn names(graph: &Graph) -> Vec<&str> {
        graph.parameters.iter().map(|parameter| &*parameter.name).collect()
    }

    #[test]
    fn a_table_is_cut_and_what_is_read_otherwise_stays_whole() {
        let graph = cut_large_parameters(tied(), 4096);
        let cut = ["table[0..128]", "table[128..256]", "table[256..300]", "positions"];
        assert_eq!(names(&graph), cut);
        let ops: Vec<String> = graph.nodes.iter().map(|node| node.op.to_string()).collect();
        let count = |name: &str| ops.iter().filter(|op| op.starts_with(name)).count();
        let counts = ["embedding", "matmul", "concat", "linear_cross", "join"].map(count);
        assert_eq!(counts, [3, 3, 1, 3, 2]);
        assert!(ops.contains(&"embedding from 128".to_string()), "{ops:?}");
        for parameter in &graph.parameters {
            let shape = &graph.tensor(parameter.tensor).shape;
            assert_eq!(shape.dims(), parameter.slice.dims());
        }
        differentiate(graph).unwrap();
        assert_eq!(cut_large_parameters(tied(), 9728), tied());
    }

    #[test]
    fn slices_of_a_rank_are_cut_again_and_alike_on_all_ranks() {
        let of_rank = |rank| {
            let part = shard(&tied(), &[3.0, 1.0], rank).unwrap().graph;
            cut_large_parameters(part, 4096)
        };
        let ranks = [0, 1].map(of_rank);
        assert_eq!(ranks[0].parameters, ranks[1].parameters);
        let of_first = ["table/0[0..128]", "table/0[128..224]"];
        let of_second = ["table/1[0..64]", "table/1[64..76]"];
        assert_eq!(names(&ranks[0]), [&of_first[..], &of_second, &["positions"]].concat());
        assert_eq!(ranks[0].parameters[1].slice.ranges(0)[0], 128..224);
        assert_eq!(ranks[0].parameters[3].slice.ranges(0)[0], 288..300);
        let sizes = ranks.each_ref().map(|rank| (rank.nodes.len(), rank.tensors.len()));
        assert_eq!(sizes[0], sizes[1], "ranks number nodes and tensors alike");
        for rank in &ranks {
            let joins = joins_of_slices(rank).iter().filter(|is_join| **is_join).count();
            assert_eq!(joins, 2, "a sum of embeddings, and columns of logits");
        }
        for rank in ranks {
            differentiate(rank).unwrap();
        }
    }

    #[test]
    fn a_table_stays_whole_if_a_rank_has_fewer_rows_than_another_needs_slices() {
        // Ranks of 32 and 268 rows of 32 bytes: the second needs 17 slices, or 34.
        let of_rank = |bytes_max| {
            let part = shard(&tied(), &[1.0, 8.0], 0).unwrap().graph;
            cut_large_parameters(part, bytes_max)
        };
        assert_eq!(names(&of_rank(512)).len(), 17 + 17 + 1);
        assert_eq!(names(&of_rank(256)), ["table/0", "table/1", "positions"]);
    }

    #[test]
    fn rows_fill_slices_evenly_and_fit() {
        let most = |rows, columns, bytes| rows_max(&Shape::fixed(&[rows, columns]), bytes);
        assert_eq!(most(50_257, 768, 128 << 20), Some((50_257, 43_690)));
        assert_eq!(row_ranges(50_257, 2, 43_690), [0..25_152, 25_152..50_257]);
        assert_eq!(most(10, 8, 128), None, "an alignment has no room");
        assert_eq!(most(10, 8, 511), Some((10, 8)), "a bucket of all has 512 bytes");
        assert_eq!(most(10, 100, 256), None, "a row is larger");
        for (rows, count, most) in [(10, 2, 8), (10, 4, 3), (9, 5, 2), (7, 7, 1), (130, 3, 64)] {
            let ranges = row_ranges(rows, count, most);
            assert_eq!(ranges.len(), count);
            assert!(ranges.iter().all(|range| (1..=most).contains(&range.len())), "{ranges:?}");
            assert!(ranges[0].start == 0 && ranges[count - 1].end == rows, "{ranges:?}");
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranges:?}");
        }
    }

    #[test]
    fn slices_of_packed_tensors_have_parts_of_their_ranges() {
        let parts = [0..1, 1..4, 4..5].map(|own| sub_ranges(&[2..4, 10..13], &own));
        assert_eq!(format!("{parts:?}"), "[[2..3], [3..4, 10..12], [12..13]]");
    }
}
