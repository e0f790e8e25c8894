//! Activations in 16 bits as a graph transformation: what one block hands to another one, what the
//! backward pass of a block reads of its forward pass, and what the ranks of a tensor group add up,
//! in bfloat16: half of the memory and of the traffic (Micikevicius et al. 2017 use f16).
//!
//! Behind the last node that uses a tensor in the pass and block that compute it, a node packs it.
//! Each other block unpacks it before its first reader, pass F, B and W each for themselves, and
//! the block itself does so in its backward pass. Values between blocks are rounded whether a
//! pipeline is cut there or not, so that every cut has the same bits, and stages send words.
//!
//! The pass runs after fusion and recomputation. Exact stays what a small difference changes
//! altogether: statistics, places, and the arguments of functions that jump. What these are
//! computed from is exact between blocks, and a block packs its own copy for its backward pass.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::gradients::jumps;
use crate::op::{Op, Reduction};
use crate::shapes::{self, Typed};
use crate::{Accumulation, Graph, Node, PassKind, Precision, Role, RunsIn, Tensor};
use potluck_core::{DType, TensorId};

/// Number format of the activations between blocks and between the forward and the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationFormat {
    #[default]
    F32,
    /// bfloat16, rounded to nearest, ties to even: half of the memory, and of what stages of
    /// pipelines and ranks of tensor groups send each other. Statistics of norms and of attention,
    /// gates of recurrent layers, places and parts of the loss stay in f32, as do tensors with an
    /// odd number of elements in a sample, inputs and results of custom ops, what the caller reads,
    /// what the block with the loss computes and reads itself, and, from block to block in the
    /// forward pass, what a max pool or a function that jumps depends on.
    Bf16,
}

impl ActivationFormat {
    /// Returns the name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

/// Pass and block of a node.
type Place = (PassKind, u32);

/// Returns a graph with activations in bfloat16: of a forward graph, those between its blocks.
/// `loss_block` computes the loss on some rank of the tensor group.
pub fn store_activations(mut graph: Graph, loss_block: Option<u32>) -> Graph {
    let packed = PackedRoots::of(&graph, loss_block);
    let readers = readers(&graph, &packed);
    let packs = packs(&graph, &readers);
    let nodes = std::mem::take(&mut graph.nodes);
    let mut storing = Storing { graph, packed, readers, words: HashMap::new() };
    for (index, node) in nodes.into_iter().enumerate() {
        storing.push_node(node);
        for pack in packs.get(&index).into_iter().flatten() {
            storing.pack(pack);
        }
    }
    storing.graph
}

/// Tensors that can be rounded, and the rule that tells who reads them so.
struct PackedRoots {
    /// Root of each tensor of the graph before the pass.
    roots: Vec<TensorId>,
    /// Places at which the roots that can be rounded are computed.
    writers: BTreeMap<TensorId, Place>,
    /// Roots that other blocks read exact in their forward passes.
    exact_between: BTreeSet<TensorId>,
    /// Roots that the forward pass of a block reads.
    read_forward: BTreeSet<(TensorId, u32)>,
    loss_block: Option<u32>,
}

impl PackedRoots {
    fn of(graph: &Graph, loss_block: Option<u32>) -> Self {
        let ids = (0..graph.tensors.len() as u32).map(TensorId);
        let roots = ids.map(|id| graph.root(id)).collect();
        let mut writers = BTreeMap::new();
        for node in &graph.nodes {
            for (output, id) in node.outputs.iter().enumerate() {
                let Tensor { shape, dtype, role, alias_of, .. } = graph.tensor(*id);
                let is_even = shape.is_batched() && shape.per_row().is_multiple_of(2);
                let is_float = *role == Role::Activation && *dtype == DType::F32;
                if is_even && is_float && alias_of.is_none() && node.op.is_roundable(output) {
                    writers.insert(*id, place_of(node));
                }
            }
        }
        for exact in exact(graph) {
            writers.remove(&exact);
        }
        for read in graph.read_by_caller() {
            writers.remove(&graph.root(read));
        }
        // The words of another block would be those before the sum.
        for node in graph.nodes.iter().filter(|node| node.op.reduction().is_some()) {
            for root in node.inputs.iter().map(|input| graph.root(*input)) {
                if writers.get(&root).is_some_and(|writer| *writer != place_of(node)) {
                    writers.remove(&root);
                }
            }
        }
        let mut read_forward = BTreeSet::new();
        for node in graph.nodes.iter().filter(|node| node.phase == PassKind::Forward) {
            read_forward.extend(node.inputs.iter().map(|id| (graph.root(*id), node.block)));
        }
        let exact_between = exact_between(graph);
        Self { roots, writers, exact_between, read_forward, loss_block }
    }

    /// Returns the words that a reader of a tensor at `place` gets; `None` if it reads it exact.
    fn words_for(&self, tensor: TensorId, place: Place) -> Option<WordsOf> {
        let root = *self.roots.get(tensor.index())?;
        let writer = *self.writers.get(&root)?;
        let (pass, block) = place;
        let is_own = block == writer.1 || self.read_forward.contains(&(root, block));
        let is_late = pass != PassKind::Forward && !is_own;
        if block != writer.1 && (is_late || !self.exact_between.contains(&root)) {
            return Some(WordsOf { root, home: writer });
        }
        // Between the forward and the backward pass of the last block, which has the loss, no other
        // block runs on the micro-batch: its activations are alive at the peak in any case.
        let is_kept = writer.0 == PassKind::Forward
            && pass != PassKind::Forward
            && self.loss_block != Some(block);
        (is_kept && is_own).then_some(WordsOf { root, home: (PassKind::Forward, block) })
    }
}

fn place_of(node: &Node) -> Place {
    (node.phase, node.block)
}

/// Words of a tensor: its root, and the place at which it is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct WordsOf {
    root: TensorId,
    home: Place,
}

/// Packing of a tensor behind a node.
struct Packing {
    words: WordsOf,
    /// Name of the tensor by which it is read: the root, or an alias of it.
    tensor: TensorId,
    when: RunsIn,
}

/// Places that read words, and the passes in which nodes there do.
type Readers = BTreeMap<(WordsOf, Place), RunsIn>;

fn readers(graph: &Graph, packed: &PackedRoots) -> Readers {
    let mut readers = Readers::new();
    for node in &graph.nodes {
        for input in &node.inputs {
            if let Some(words) = packed.words_for(*input, place_of(node)) {
                let when = readers.entry((words, place_of(node))).or_insert(node.when);
                *when = when.or(node.when);
            }
        }
    }
    readers
}

/// Returns what is packed behind each node.
fn packs(graph: &Graph, readers: &Readers) -> BTreeMap<usize, Vec<Packing>> {
    let mut wanted: BTreeMap<WordsOf, RunsIn> = BTreeMap::new();
    for (&(words, place), &when) in readers {
        let is_kept = words.home.0 == PassKind::Forward && place.0 != PassKind::Forward;
        let when = if is_kept { RunsIn::Training } else { when };
        let of_all = wanted.entry(words).or_insert(when);
        *of_all = of_all.or(when);
    }
    // The last node at the place that uses a tensor, and its name there: behind an all-reduce, only
    // the aliases of its results are read.
    let mut last: BTreeMap<WordsOf, (usize, TensorId)> = BTreeMap::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        for id in node.inputs.iter().chain(&node.outputs) {
            let words = WordsOf { root: graph.root(*id), home: place_of(node) };
            if wanted.contains_key(&words) {
                last.insert(words, (index, *id));
            }
        }
    }
    let mut packs: BTreeMap<usize, Vec<Packing>> = BTreeMap::new();
    for (words, (index, tensor)) in last {
        packs.entry(index).or_default().push(Packing { words, tensor, when: wanted[&words] });
    }
    packs
}

/// Roots of tensors of which a small difference changes what is computed of them: places, arguments
/// of functions that jump, inputs of custom ops, of which nothing is known, and what the backward
/// pass recomputes these from. What repeats an exact tensor repeats its bits, so that the original
/// is exact too.
fn exact(graph: &Graph) -> BTreeSet<TensorId> {
    let mut exact = BTreeSet::new();
    for node in graph.nodes.iter().rev() {
        let is_repeated = node.outputs.iter().any(|id| graph.tensor(*id).repeats.is_some());
        let is_exact =
            is_repeated && node.outputs.iter().any(|id| exact.contains(&graph.root(*id)));
        for (at, input) in node.inputs.iter().enumerate() {
            if is_exact || node.op.is_custom() || jumps(node, at) {
                let root = graph.root(*input);
                exact.insert(root);
                // Originals come before what repeats them, so this walk still meets them.
                for id in [*input, root] {
                    if let Some(original) = graph.tensor(id).repeats {
                        exact.insert(graph.root(original));
                    }
                }
            }
        }
    }
    exact
}

/// Roots of tensors from which the forward pass computes places, by a max pool, or what functions
/// without a slope jump by, in whatever block: two values that nearly tie are another place, and
/// the gradient goes elsewhere.
fn exact_between(graph: &Graph) -> BTreeSet<TensorId> {
    let mut exact = BTreeSet::new();
    for node in graph.nodes.iter().rev() {
        if node.phase != PassKind::Forward || node.when == RunsIn::Evaluation {
            continue;
        }
        let is_pool = node.op.chooses_places();
        let is_before = node.outputs.iter().any(|id| exact.contains(&graph.root(*id)));
        for (at, input) in node.inputs.iter().enumerate() {
            if is_pool || is_before || jumps(node, at) {
                exact.insert(graph.root(*input));
            }
        }
    }
    exact
}

/// Graph that is built node by node.
struct Storing {
    graph: Graph,
    packed: PackedRoots,
    readers: Readers,
    words: HashMap<WordsOf, PackedTensor>,
}

/// Words of a tensor, and what is read in place of it.
struct PackedTensor {
    words: TensorId,
    /// By place: the unpacked tensor, and aliases of it by the alias of the original.
    unpacked: HashMap<Place, TensorId>,
    aliases: HashMap<(Place, TensorId), TensorId>,
}

impl Storing {
    fn pack(&mut self, pack: &Packing) {
        let name = format!("{} in bf16", self.graph.tensor(pack.tensor).name);
        let runs = (pack.words.home, pack.when);
        let words = self.compute(Op::PackBf16, pack.tensor, name, runs);
        let packed = PackedTensor { words, unpacked: HashMap::new(), aliases: HashMap::new() };
        self.words.insert(pack.words, packed);
    }

    /// Adds a node that reads unpacked tensors in place of packed ones.
    fn push_node(&mut self, mut node: Node) {
        let place = place_of(&node);
        for input in &mut node.inputs {
            *input = self.unpacked(*input, place);
        }
        for output in &node.outputs {
            if let Some(base) = self.graph.tensor(*output).alias_of {
                let base = self.unpacked(base, place);
                self.graph.tensors[output.index()].alias_of = Some(base);
            }
        }
        if node.op == Op::AllReduce(Reduction::Sum) {
            self.send_words(&mut node);
        }
        self.graph.nodes.push(node);
    }

    /// Makes the ranks of a tensor group send the words of their terms of a sum.
    fn send_words(&mut self, node: &mut Node) {
        let term = node.inputs[0];
        let root = self.packed.roots.get(node.outputs[0].index());
        if root.is_some_and(|root| self.packed.writers.contains_key(root)) {
            let name = format!("term of {} in bf16", self.graph.tensor(term).name);
            let words = self.compute(Op::PackBf16, term, name, (place_of(node), node.when));
            node.op = Op::AllReduce(Reduction::SumBf16);
            node.inputs.push(words);
        }
    }

    /// Returns the tensor that a node reads in place of another one: that one, if the node reads it
    /// exact.
    fn unpacked(&mut self, tensor: TensorId, place: Place) -> TensorId {
        let Some(of) = self.packed.words_for(tensor, place) else { return tensor };
        let Some(packed) = self.words.get(&of) else {
            debug_assert!(false, "{tensor} is read before it is packed");
            return tensor;
        };
        let (root, words) = (of.root, packed.words);
        let known = packed.unpacked.get(&place).copied();
        let alias = packed.aliases.get(&(place, tensor)).copied();
        let whole = known.unwrap_or_else(|| {
            let Tensor { name, shape, .. } = self.graph.tensor(root);
            let (name, dims) = (format!("{name} from bf16"), shape.dims().to_vec());
            let when = self.readers.get(&(of, place)).copied().unwrap_or_default();
            self.compute(Op::UnpackBf16 { dims }, words, name, (place, when))
        });
        let read = match alias {
            _ if tensor == root => whole,
            // An alias that was made at this place.
            _ if self.graph.root(tensor) == whole => tensor,
            Some(alias) => alias,
            None => self.alias(whole, tensor, place),
        };
        if let Some(packed) = self.words.get_mut(&of) {
            packed.unpacked.insert(place, whole);
            if tensor != root {
                packed.aliases.insert((place, tensor), read);
            }
        }
        read
    }

    /// Adds the alias of an unpacked tensor under the shape of another one.
    fn alias(&mut self, whole: TensorId, like: TensorId, place: Place) -> TensorId {
        let Tensor { name, shape, dtype, .. } = self.graph.tensor(like).clone();
        let alias = self.graph.add_tensor(name, (shape, dtype), Role::Activation);
        self.graph.tensors[alias.index()].alias_of = Some(whole);
        self.push(Op::Reshape, whole, alias, (place, RunsIn::AllPasses));
        alias
    }

    /// Adds a node of one input, and of one output of this name.
    fn compute(
        &mut self,
        op: Op,
        input: TensorId,
        name: String,
        runs: (Place, RunsIn),
    ) -> TensorId {
        let Tensor { shape, dtype, .. } = self.graph.tensor(input);
        let typed: Typed = (shape.clone(), *dtype);
        let mut outputs =
            shapes::outputs(&op, &[typed]).expect("roundable tensors have even shapes");
        let output = self.graph.add_tensor(name, outputs.remove(0), Role::Activation);
        self.push(op, input, output, runs);
        output
    }

    fn push(&mut self, op: Op, input: TensorId, output: TensorId, runs: (Place, RunsIn)) {
        let ((phase, block), when) = runs;
        self.graph.nodes.push(Node {
            op,
            inputs: vec![input],
            outputs: vec![output],
            accumulate: Accumulation::NONE,
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
    use crate::passes::recompute::tests::assert_planned;
    use crate::{
        Builder, Init, ModelGraph, ParameterSplit, Plan, PlanOptions, Recompute, SplitUnit, Unary,
        crossings,
    };

    /// Three blocks, of which the last has the loss.
    fn chain() -> Graph {
        let mut b = Builder::new();
        b.block("one");
        let x = b.input("x", &[1, 8]);
        let w = b.parameter("w", &[8, 8], Init::Zeros);
        let y = b.linear(x, w, None).unwrap();
        let y = b.unary(y, Unary::Gelu).unwrap();
        b.block("two");
        let norm = b.parameter("norm", &[8], Init::Ones);
        let normed = b.rms_norm(y, norm, 1e-5).unwrap();
        let u = b.parameter("u", &[8, 8], Init::Zeros);
        let z = b.linear(normed, u, None).unwrap();
        let z = b.unary(z, Unary::Relu).unwrap();
        let y = b.add(y, z).unwrap();
        b.block("last");
        let last = b.parameter("last", &[8, 8], Init::Zeros);
        let y = b.linear(y, last, None).unwrap();
        let y = b.unary(y, Unary::Gelu).unwrap();
        let target = b.input("target", &[1, 8]);
        b.squared_error_loss(y, target).unwrap();
        b.finish()
    }

    /// Two layers of 64 columns, whose sum the ranks of a tensor group add up.
    fn divided_layers(b: &mut Builder, x: TensorId) -> TensorId {
        let [up, down] = ["up", "down"].map(|name| b.parameter(name, &[64, 64], Init::Zeros));
        let y = b.linear(x, up, None).unwrap();
        let y = b.unary(y, Unary::Gelu).unwrap();
        b.linear(y, down, None).unwrap()
    }

    fn split_divided_layers(b: &mut Builder) {
        b.split_parameters(|name| match name {
            "up" => Some(ParameterSplit::new(0, SplitUnit::Columns)),
            "down" => Some(ParameterSplit::new(1, SplitUnit::Columns)),
            _ => None,
        });
    }

    fn stored(forward: Graph, recompute: Recompute) -> [ModelGraph; 2] {
        let model = ModelGraph::training(forward, true).unwrap().with_recompute(recompute);
        [false, true].map(|is_merged| {
            let model = model.clone().with_activations(ActivationFormat::Bf16);
            if is_merged { model.with_merged_backward() } else { model }
        })
    }

    /// Ops of the nodes that pack and unpack, with their passes and blocks.
    fn conversions(graph: &Graph) -> Vec<String> {
        let mut told = Vec::new();
        for node in &graph.nodes {
            if matches!(node.op, Op::PackBf16 | Op::UnpackBf16 { .. }) {
                let source = &graph.tensor(node.inputs[0]).name;
                told.push(format!("{}{} {} {source}", node.phase, node.block, node.op));
            }
        }
        told
    }

    #[test]
    fn blocks_hand_on_words_and_keep_words() {
        let [apart, merged] = stored(chain(), Recompute::None);
        assert_planned(apart.whole());
        // The value in front of the GELU; the input of the norm, its output, and that of the ReLU.
        // The block with the loss keeps its own in f32.
        let expected = [
            "F0 pack_bf16 one.matmul",
            "F0 pack_bf16 one.gelu",
            "F1 unpack_bf16 one.gelu in bf16",
            "F1 pack_bf16 two.rms_norm",
            "F1 pack_bf16 two.matmul",
            "F1 pack_bf16 two.add",
            "F2 unpack_bf16 two.add in bf16",
            "B2 pack_bf16 last.matmul",
            "W2 unpack_bf16 two.add in bf16",
            "B1 unpack_bf16 two.matmul in bf16",
            "B1 unpack_bf16 last.matmul in bf16",
            "B1 unpack_bf16 one.gelu in bf16",
            "B1 pack_bf16 last.add",
            "W1 unpack_bf16 two.rms_norm in bf16",
            "B0 unpack_bf16 one.matmul in bf16",
            "B0 unpack_bf16 last.add in bf16",
        ];
        assert_eq!(conversions(apart.whole()), expected);
        assert_planned(merged.whole());
        let told = conversions(merged.whole());
        assert!(!told.iter().any(|line| line.starts_with('W')), "{told:#?}");
        let exact = apart.clone().with_activations(ActivationFormat::F32);
        assert_eq!(conversions(exact.whole()), [""; 0]);
    }

    /// What stages send each other, wherever the cuts are.
    #[test]
    fn all_that_crosses_a_cut_is_words() {
        for recompute in [Recompute::None, Recompute::Blocks, Recompute::Selective] {
            for model in stored(chain(), recompute) {
                let graph = model.whole();
                for stages in [[0, 1, 2], [0, 0, 1], [0, 1, 1], [0, 1, 0]] {
                    let found = crossings(graph, &stages);
                    assert!(found.len() >= 2);
                    for crossing in found {
                        let mut nodes = graph.nodes.iter();
                        let writer = nodes.find(|node| node.outputs.contains(&crossing.tensor));
                        assert_eq!(writer.unwrap().op, Op::PackBf16);
                    }
                }
            }
        }
    }

    /// A condition is exact also where the function that it controls is fused.
    #[test]
    fn conditions_of_fused_functions_are_exact() {
        let mut b = Builder::new();
        b.block("one");
        let x = b.input("x", &[1, 8]);
        let w = b.parameter("w", &[8, 8], Init::Zeros);
        let condition = b.linear(x, w, None).unwrap();
        b.block("two");
        let v = b.parameter("v", &[8, 8], Init::Zeros);
        let y = b.linear(x, v, None).unwrap();
        let y = b.select(condition, y, x).unwrap();
        let y = b.unary(y, Unary::Gelu).unwrap();
        b.block("last");
        let target = b.input("target", &[1, 8]);
        b.squared_error_loss(y, target).unwrap();
        let forward = b.finish();
        for is_fused in [false, true] {
            let model = ModelGraph::training(forward.clone(), is_fused).unwrap();
            let model = model.with_activations(ActivationFormat::Bf16);
            assert_planned(model.whole());
            let told = conversions(model.whole());
            assert!(!told.iter().any(|line| line.contains("one.matmul")), "{told:#?}");
        }
    }

    /// An evaluation rounds as training does, and packs nothing for a backward pass.
    #[test]
    fn forward_graphs_round_between_blocks() {
        let models =
            [ModelGraph::training(chain(), false).unwrap(), ModelGraph::forward(chain(), false)];
        let [training, forward] =
            models.map(|model| model.with_activations(ActivationFormat::Bf16));
        let ops = |graph: &Graph, training: bool| -> Vec<(Op, u32)> {
            let of_pass = |node: &&Node| {
                node.phase == PassKind::Forward && (training || node.when != RunsIn::Training)
            };
            graph.nodes.iter().filter(of_pass).map(|node| (node.op.clone(), node.block)).collect()
        };
        assert_eq!(ops(forward.whole(), true), ops(training.whole(), false));
        assert_eq!(conversions(forward.whole()).len(), 4);
    }

    /// One alias is made in the first block and one in the second, and the third reads both.
    #[test]
    fn aliases_are_read_in_other_blocks() {
        let mut b = Builder::new();
        b.block("one");
        let x = b.input("x", &[1, 24]);
        let w = b.parameter("w", &[24, 24], Init::Zeros);
        let y = b.linear(x, w, None).unwrap();
        let first = b.reshape(y, &[1, 4, 6]).unwrap();
        b.block("two");
        let second = b.reshape(y, &[1, 2, 12]).unwrap();
        let z = b.unary(second, Unary::Gelu).unwrap();
        b.block("three");
        let sum = b.add(z, second).unwrap();
        let sum = b.reshape(sum, &[1, 4, 6]).unwrap();
        let sum = b.add(sum, first).unwrap();
        let sum = b.unary(sum, Unary::Gelu).unwrap();
        b.block("last");
        let target = b.input("target", &[1, 4, 6]);
        b.squared_error_loss(sum, target).unwrap();
        for model in stored(b.finish(), Recompute::None) {
            let graph = model.whole();
            assert_planned(graph);
            let told = conversions(graph);
            let of_first: Vec<&String> =
                told.iter().filter(|line| line.contains("one.matmul")).collect();
            let words = "one.matmul in bf16";
            let expected = [
                "F0 pack_bf16 one.matmul".into(),
                format!("F1 unpack_bf16 {words}"),
                format!("F2 unpack_bf16 {words}"),
                format!("B1 unpack_bf16 {words}"),
            ];
            assert_eq!(of_first, expected.iter().collect::<Vec<_>>(), "{told:#?}");
        }
    }

    /// Only words and statistics live from a forward pass to a backward pass of another segment.
    #[test]
    fn no_activation_in_f32_is_kept_between_passes() {
        for recompute in [Recompute::None, Recompute::Blocks, Recompute::Selective] {
            for model in stored(chain(), recompute) {
                let graph = model.whole();
                assert_planned(graph);
                let of_forward = |id: TensorId| {
                    let mut nodes = graph.nodes.iter();
                    let writer = nodes.find(|node| node.outputs.contains(&id));
                    writer.filter(|node| node.phase == PassKind::Forward)
                };
                let backward = graph.nodes.iter().filter(|n| n.phase != PassKind::Forward);
                for node in backward.filter(|node| node.block != 2) {
                    for root in node.inputs.iter().map(|id| graph.root(*id)) {
                        let Some(writer) = of_forward(root) else { continue };
                        let output = writer.outputs.iter().position(|id| *id == root).unwrap();
                        let is_exact = !writer.op.is_roundable(output);
                        assert!(writer.op == Op::PackBf16 || is_exact, "{}", node.op);
                    }
                }
            }
        }
    }

    /// A product, a reshape and an odd width, an output, places, and a custom state.
    #[test]
    fn aliases_are_read_of_the_unpacked_tensor_and_the_rest_is_exact() {
        let mut b = Builder::new();
        b.block("one");
        let x = b.input("x", &[1, 4, 6]);
        let w = b.parameter("w", &[6, 6], Init::Zeros);
        let y = b.linear(x, w, None).unwrap();
        let flat = b.reshape(y, &[1, 24]).unwrap();
        let odd = b.parameter("odd", &[5, 24], Init::Zeros);
        let y = b.linear(flat, odd, None).unwrap();
        let y = b.unary(y, Unary::Gelu).unwrap();
        let even = b.parameter("even", &[8, 5], Init::Zeros);
        let y = b.linear(y, even, None).unwrap();
        b.output("features", y);
        let y = b.unary(y, Unary::Gelu).unwrap();
        b.block("last");
        let target = b.input("target", &[1, 8]);
        b.squared_error_loss(y, target).unwrap();
        for model in stored(b.finish(), Recompute::None) {
            let graph = model.whole();
            assert_planned(graph);
            let packed: Vec<usize> = graph
                .nodes
                .iter()
                .filter(|node| node.op == Op::PackBf16 && node.phase == PassKind::Forward)
                .map(|node| graph.tensor(node.inputs[0]).shape.per_row())
                .collect();
            let why = "values of 5 are odd, and an output is exact; the last block reads 8";
            assert_eq!(packed, [24, 8], "{why}");
            let unpacked = graph.nodes.iter().find(|node| match &node.op {
                Op::UnpackBf16 { dims } => dims.iter().product::<usize>() == 24,
                _ => false,
            });
            let whole = unpacked.unwrap().outputs[0];
            let reads = |node: &&Node| node.inputs.iter().any(|id| graph.root(*id) == whole);
            assert!(graph.nodes.iter().filter(reads).count() >= 2, "the alias, and its reader");
        }
    }

    /// Ids become places by an embedding, which selective recomputation keeps: rounded, those above
    /// 256 would be others.
    #[test]
    fn what_places_are_recomputed_from_is_exact() {
        let mut b = Builder::new();
        b.block("one");
        let x = b.input("x", &[1, 600]);
        let w = b.parameter("w", &[600, 600], Init::Zeros);
        let y = b.linear(x, w, None).unwrap();
        let ids = b.input_ids("ids", &[1, 4]);
        let y = b.gather(y, 1, ids).unwrap();
        let y = b.unary(y, Unary::Gelu).unwrap();
        b.block("last");
        let target = b.input("target", &[1, 4]);
        b.squared_error_loss(y, target).unwrap();
        let forward = b.finish();
        for recompute in [Recompute::None, Recompute::Blocks, Recompute::Selective] {
            for model in stored(forward.clone(), recompute) {
                let graph = model.whole();
                assert_planned(graph);
                for node in graph.nodes.iter().filter(|node| node.op == Op::PackBf16) {
                    let root = graph.root(node.inputs[0]);
                    let mut writers = graph.nodes.iter();
                    let writer = writers.find(|node| node.outputs.contains(&root)).unwrap();
                    let is_of_places = matches!(writer.op.root_op(), Op::Embedding { .. });
                    assert!(!is_of_places, "{recompute:?} rounds {}", graph.tensor(root).name);
                }
            }
        }
    }

    /// A sum over ranks that is recomputed sends what the forward pass has sent: `y` is an argument
    /// of a condition by another tensor, which is recomputed.
    #[test]
    fn recomputed_sums_of_a_group_have_the_format_of_the_first_ones() {
        let mut b = Builder::new();
        b.block("one");
        let x = b.input("x", &[1, 64]);
        let y = divided_layers(&mut b, x);
        let sum = b.add(x, y).unwrap();
        let bound = b.parameter("bound", &[64], Init::Zeros);
        let mask = b.less(sum, bound).unwrap();
        let halved = b.unary(y, Unary::Gelu).unwrap();
        let y = b.select(mask, sum, halved).unwrap();
        b.block("last");
        let target = b.input("target", &[1, 64]);
        b.squared_error_loss(y, target).unwrap();
        split_divided_layers(&mut b);
        for model in stored(b.finish(), Recompute::Blocks) {
            let graph = model.of_rank(&[1, 1], 0).unwrap().graph;
            let kinds: Vec<_> = graph.nodes.iter().filter_map(|node| node.op.reduction()).collect();
            assert_eq!(kinds, [Reduction::Sum; 2]);
        }
    }

    /// Only the first rank reports the loss, and all of them keep the block with it exact.
    #[test]
    fn ranks_of_a_group_pack_the_same() {
        let mut b = Builder::new();
        b.block("one");
        let x = b.input("x", &[1, 64]);
        let y = divided_layers(&mut b, x);
        let y = b.unary(y, Unary::Gelu).unwrap();
        b.block("last");
        let last = b.parameter("last", &[8, 64], Init::Zeros);
        let y = b.linear(y, last, None).unwrap();
        let y = b.unary(y, Unary::Gelu).unwrap();
        let target = b.input("target", &[1, 8]);
        b.squared_error_loss(y, target).unwrap();
        split_divided_layers(&mut b);
        let [model, _] = stored(b.finish(), Recompute::None);
        let ranks = [0, 1].map(|rank| model.of_rank(&[1, 1], rank).unwrap().graph);
        for graph in &ranks {
            assert_planned(graph);
            assert!(conversions(graph).iter().all(|line| !line.contains("F1 pack")));
            let sums = graph.nodes.iter().filter(|node| node.op.reduction().is_some());
            let kinds: Vec<_> = sums.map(|node| (node.phase, node.op.reduction())).collect();
            // The last block, which no rank divides, has no sum.
            let of_words = Some(Reduction::SumBf16);
            assert_eq!(kinds, [(PassKind::Forward, of_words)]);
        }
        // Only the first rank has the gradients of parameters that all ranks have.
        let [first, second] = ranks.each_ref().map(|graph| {
            let mut told = conversions(graph);
            told.retain(|line| !line.starts_with("W1"));
            told
        });
        assert!(first.iter().filter(|line| line.starts_with("F0 ")).count() >= 2, "{first:#?}");
        assert_eq!(first, second);
    }

    #[test]
    fn a_plan_keeps_half_of_the_bytes() {
        let mut b = Builder::new();
        let mut y = b.input("x", &[64, 32]);
        for layer in 0..6 {
            b.block(&format!("layer {layer}"));
            let w = b.parameter(&format!("w{layer}"), &[32, 32], Init::Zeros);
            y = b.linear(y, w, None).unwrap();
            y = b.unary(y, Unary::Gelu).unwrap();
        }
        b.block("loss");
        let target = b.input("target", &[64, 32]);
        b.squared_error_loss(y, target).unwrap();
        let model = ModelGraph::training(b.finish(), true).unwrap().with_merged_backward();
        let bytes = |format| {
            let graph = model.clone().with_activations(format).whole().clone();
            let plan = Plan::new(graph, PlanOptions::new(16));
            plan.slots.iter().map(|slot| slot.bytes).sum::<usize>() as f64
        };
        let ratio = bytes(ActivationFormat::Bf16) / bytes(ActivationFormat::F32);
        assert!(ratio < 0.75, "{ratio}");
    }
}
