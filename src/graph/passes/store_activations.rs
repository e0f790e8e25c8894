//! Activations in 16 bits between the passes as a graph transformation: what the backward pass of a
//! block reads of a forward pass is kept in bfloat16, in half of the memory (Micikevicius et al.
//! 2017 keep it in f16).
//!
//! A forward pass computes and reads f32. Behind the last node of a block that reads or computes a
//! tensor, a node packs it for the backward pass of that block; the backward pass unpacks it before
//! its first reader, pass B and pass W each for themselves. Each block packs its own copy, so that
//! a stage of a pipeline needs nothing more of another one.
//!
//! The pass runs after fusion and recomputation, so that the forward pass has the bits of a run in
//! f32, and what is recomputed follows from rounded values. Exact stays what a small difference
//! changes altogether: statistics, places, and the arguments of functions that jump.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::gradients::has_slope;
use crate::op::Op;
use crate::shapes::{self, Typed};
use crate::{Accumulation, Graph, Node, PassKind, Precision, Role, RunsIn, Tensor};
use potluck_core::{DType, TensorId};

/// Number format of the activations that are kept between the forward and the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationFormat {
    #[default]
    F32,
    /// bfloat16, rounded to nearest, ties to even: half of the memory. Statistics of norms and of
    /// attention, gates of recurrent layers, places and parts of the loss stay in f32, as do
    /// tensors with an odd number of elements in a sample, inputs and results of custom ops, what
    /// the caller reads, and all of the block with the loss.
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

/// Tensor, by its root, that the backward pass of a block reads.
type Kept = (TensorId, u32);

/// Returns a differentiated graph with the activations that it keeps in bfloat16. A graph without a
/// backward pass is returned unchanged. `loss_block` computes the loss on some rank of the tensor
/// group.
pub fn store_activations(mut graph: Graph, loss_block: Option<u32>) -> Graph {
    let packs = packs(&graph, loss_block);
    let nodes = std::mem::take(&mut graph.nodes);
    let mut storing = Storing { graph, words: HashMap::new() };
    for (index, node) in nodes.into_iter().enumerate() {
        if node.phase == PassKind::Forward {
            storing.graph.nodes.push(node);
        } else {
            storing.push_reader(node);
        }
        for pack in packs.get(&index).into_iter().flatten() {
            storing.pack(pack);
        }
    }
    storing.graph
}

/// Packing of a tensor behind a node of the forward pass.
struct Packing {
    kept: Kept,
    /// Name of the tensor by which it is read: the tensor itself, or an alias of it.
    tensor: TensorId,
}

/// Returns what is packed behind each node of the forward pass.
fn packs(graph: &Graph, loss_block: Option<u32>) -> BTreeMap<usize, Vec<Packing>> {
    // Between the forward and the backward pass of the last block, which has the loss, no other
    // block runs on the micro-batch: its activations are alive at the peak in any case.
    let roundable = roundable(graph);
    let mut wanted: BTreeSet<Kept> = BTreeSet::new();
    for node in graph.nodes.iter().filter(|node| node.phase != PassKind::Forward) {
        for root in node.inputs.iter().map(|id| graph.root(*id)) {
            if roundable.contains(&root) && loss_block != Some(node.block) {
                wanted.insert((root, node.block));
            }
        }
    }
    // The last node of a block that uses a tensor, and its name there: behind an all-reduce, only
    // the aliases of its results are read.
    let mut last: BTreeMap<Kept, (usize, TensorId)> = BTreeMap::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        if node.phase == PassKind::Forward {
            for id in node.inputs.iter().chain(&node.outputs) {
                let kept = (graph.root(*id), node.block);
                if wanted.contains(&kept) {
                    last.insert(kept, (index, *id));
                }
            }
        }
    }
    let mut packs: BTreeMap<usize, Vec<Packing>> = BTreeMap::new();
    for (kept, (index, tensor)) in last {
        packs.entry(index).or_default().push(Packing { kept, tensor });
    }
    packs
}

/// Tensors that the forward pass computes and that can be rounded.
fn roundable(graph: &Graph) -> BTreeSet<TensorId> {
    let mut roundable = BTreeSet::new();
    for node in graph.nodes.iter().filter(|node| node.phase == PassKind::Forward) {
        for (output, id) in node.outputs.iter().enumerate() {
            let Tensor { shape, dtype, role, alias_of, .. } = graph.tensor(*id);
            let is_even = shape.is_batched() && shape.per_row().is_multiple_of(2);
            let is_float = *role == Role::Activation && *dtype == DType::F32;
            if is_even && is_float && alias_of.is_none() && node.op.is_roundable(output) {
                roundable.insert(*id);
            }
        }
    }
    for exact in exact(graph) {
        roundable.remove(&exact);
    }
    for read in graph.read_by_caller() {
        roundable.remove(&graph.root(read));
    }
    roundable
}

/// Roots of tensors of which a small difference changes what is computed of them: places, arguments
/// of functions that jump, inputs of custom ops, of which nothing is known, and what the backward
/// pass recomputes these from.
fn exact(graph: &Graph) -> BTreeSet<TensorId> {
    let mut exact = BTreeSet::new();
    for node in graph.nodes.iter().rev() {
        let is_repeated = node.outputs.iter().any(|id| graph.tensor(*id).repeats.is_some());
        let is_exact =
            is_repeated && node.outputs.iter().any(|id| exact.contains(&graph.root(*id)));
        for (at, input) in node.inputs.iter().enumerate() {
            if is_exact || node.op.is_custom() || !has_slope(&node.op, at) {
                exact.insert(graph.root(*input));
            }
        }
    }
    exact
}

/// Graph that is built node by node.
struct Storing {
    graph: Graph,
    /// Words of each kept tensor, and what a pass of its block reads in place of it.
    words: HashMap<Kept, PackedTensor>,
}

struct PackedTensor {
    words: TensorId,
    /// By pass: the unpacked tensor, and aliases of it by the alias of the original.
    unpacked: HashMap<PassKind, TensorId>,
    aliases: HashMap<(PassKind, TensorId), TensorId>,
}

impl Storing {
    fn pack(&mut self, pack: &Packing) {
        let block = pack.kept.1;
        let name = format!("{} in bf16", self.graph.tensor(pack.tensor).name);
        let place = (PassKind::Forward, block);
        let words = self.compute(Op::PackBf16, pack.tensor, name, place);
        let packed = PackedTensor { words, unpacked: HashMap::new(), aliases: HashMap::new() };
        self.words.insert(pack.kept, packed);
    }

    /// Adds a node of the backward pass that reads unpacked tensors in place of packed ones.
    fn push_reader(&mut self, mut node: Node) {
        let place = (node.phase, node.block);
        for input in &mut node.inputs {
            *input = self.unpacked(*input, place);
        }
        for output in &node.outputs {
            if let Some(base) = self.graph.tensor(*output).alias_of {
                let base = self.unpacked(base, place);
                self.graph.tensors[output.index()].alias_of = Some(base);
            }
        }
        self.graph.nodes.push(node);
    }

    /// Returns the tensor that a pass of a block reads in place of another one: that one, if it is
    /// not packed for the block.
    fn unpacked(&mut self, tensor: TensorId, place: (PassKind, u32)) -> TensorId {
        let (phase, block) = place;
        let root = self.graph.root(tensor);
        let kept = (root, block);
        let Some(packed) = self.words.get(&kept) else { return tensor };
        let words = packed.words;
        let known = packed.unpacked.get(&phase).copied();
        let alias = packed.aliases.get(&(phase, tensor)).copied();
        let whole = known.unwrap_or_else(|| {
            let Tensor { name, shape, .. } = self.graph.tensor(root);
            let (name, dims) = (format!("{name} from bf16"), shape.dims().to_vec());
            self.compute(Op::UnpackBf16 { dims }, words, name, place)
        });
        let read = match alias {
            _ if tensor == root => whole,
            Some(alias) => alias,
            None => self.alias(whole, tensor, place),
        };
        if let Some(packed) = self.words.get_mut(&kept) {
            packed.unpacked.insert(phase, whole);
            if tensor != root {
                packed.aliases.insert((phase, tensor), read);
            }
        }
        read
    }

    /// Adds the alias of an unpacked tensor under the shape of another one.
    fn alias(&mut self, whole: TensorId, like: TensorId, place: (PassKind, u32)) -> TensorId {
        let Tensor { name, shape, dtype, .. } = self.graph.tensor(like).clone();
        let alias = self.graph.add_tensor(name, (shape, dtype), Role::Activation);
        self.graph.tensors[alias.index()].alias_of = Some(whole);
        self.push(Op::Reshape, whole, alias, place);
        alias
    }

    /// Adds a node of one input, and of one output of this name.
    fn compute(
        &mut self,
        op: Op,
        input: TensorId,
        name: String,
        place: (PassKind, u32),
    ) -> TensorId {
        let Tensor { shape, dtype, .. } = self.graph.tensor(input);
        let typed: Typed = (shape.clone(), *dtype);
        let mut outputs =
            shapes::outputs(&op, &[typed]).expect("roundable tensors have even shapes");
        let output = self.graph.add_tensor(name, outputs.remove(0), Role::Activation);
        self.push(op, input, output, place);
        output
    }

    fn push(&mut self, op: Op, input: TensorId, output: TensorId, place: (PassKind, u32)) {
        let (phase, block) = place;
        self.graph.nodes.push(Node {
            op,
            inputs: vec![input],
            outputs: vec![output],
            accumulate: Accumulation::NONE,
            precision: Precision::F32,
            is_loss_gradient: false,
            when: if phase == PassKind::Forward { RunsIn::Training } else { RunsIn::AllPasses },
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
    fn what_backward_passes_read_is_packed_in_their_block() {
        let [apart, merged] = stored(chain(), Recompute::None);
        let told = conversions(apart.whole());
        let in_pass = |pass: &str| told.iter().filter(|line| line.starts_with(pass)).count();
        // The value in front of the GELU; the input of the norm, its output, and that of the ReLU.
        assert_eq!([in_pass("F0"), in_pass("F1"), in_pass("F2")], [1, 3, 0], "{told:#?}");
        assert!(in_pass("W1") > 0 && in_pass("B1") > 0 && in_pass("B2") == 0, "{told:#?}");
        let told = conversions(merged.whole());
        assert!(!told.iter().any(|line| line.starts_with('W')), "{told:#?}");
        for model in [&apart, &merged] {
            assert_planned(model.whole());
            let exact = model.clone().with_activations(ActivationFormat::F32);
            assert_eq!(conversions(exact.whole()), [""; 0]);
            // The same forward pass.
            let forward = |graph: &Graph| -> Vec<Node> {
                let nodes = graph.nodes.iter().filter(|node| node.phase == PassKind::Forward);
                nodes.filter(|node| node.op != Op::PackBf16).cloned().collect()
            };
            assert_eq!(forward(model.whole()), forward(exact.whole()));
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
                .filter(|node| node.op == Op::PackBf16)
                .map(|node| graph.tensor(node.inputs[0]).shape.per_row())
                .collect();
            assert_eq!(packed, [24], "values of 5 are odd, and an output is exact");
            let unpacked = graph.nodes.iter().find(|n| matches!(n.op, Op::UnpackBf16 { .. }));
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

    /// Only the first rank reports the loss, and all of them keep the block with it exact.
    #[test]
    fn ranks_of_a_group_pack_the_same() {
        let mut b = Builder::new();
        b.block("one");
        let x = b.input("x", &[1, 64]);
        let [up, down] = ["up", "down"].map(|name| b.parameter(name, &[64, 64], Init::Zeros));
        let y = b.linear(x, up, None).unwrap();
        let y = b.unary(y, Unary::Gelu).unwrap();
        let y = b.linear(y, down, None).unwrap();
        let y = b.unary(y, Unary::Gelu).unwrap();
        b.block("last");
        let last = b.parameter("last", &[8, 64], Init::Zeros);
        let y = b.linear(y, last, None).unwrap();
        let y = b.unary(y, Unary::Gelu).unwrap();
        let target = b.input("target", &[1, 8]);
        b.squared_error_loss(y, target).unwrap();
        b.split_parameters(|name| match name {
            "up" => Some(ParameterSplit::new(0, SplitUnit::Columns)),
            "down" => Some(ParameterSplit::new(1, SplitUnit::Columns)),
            _ => None,
        });
        let [model, _] = stored(b.finish(), Recompute::None);
        let ranks = [0, 1].map(|rank| model.of_rank(&[1, 1], rank).unwrap().graph);
        for graph in &ranks {
            assert_planned(graph);
            assert!(conversions(graph).iter().all(|line| !line.contains("F1 ")));
        }
        let [first, second] = ranks.each_ref().map(conversions);
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
