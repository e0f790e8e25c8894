//! Operator fusion: merges adjacent nodes into one [`Op::Fused`], so that the value between them
//! never goes to memory, and gradients that read the same tensors into one node
//! (`merge_gradients`). [`RULES`] lists the pairs of nodes, `Fuser::value` checks the conditions.
//!
//! The fused node takes the position of the second node: all its operands exist there, and the
//! inputs of the first node still have their values. A value that later nodes read (the input of
//! an activation, which the backward pass needs) is stored: written, but not read again by this
//! kernel.
//!
//! Memory does not grow by fusion: no tensor lives longer than before, except a tensor that must
//! last to another segment and is placed apart from those that need not.
//!
//! Dropout is not fused: its random numbers depend on the step, and the epilogue of a fused kernel
//! has only constants. Ops that reduce are not fused either, but for the gradient of layer norm, to
//! which another gradient may be added.

use super::merge_gradients;
use crate::elements::{Binary, BinarySide, Domain, Slope, Unary};
use crate::op::{EpilogueOp, Op};
use crate::{Graph, Node, Role};
use potluck_core::{DType, Shape, TensorId};

/// The most tensors that a kernel binds: the number that every device supports.
const BINDINGS_MAX: usize = 8;

/// The most values after which an operand of a product may repeat, enough for the positions of
/// pictures in patches. The number is in the kernel's text, so the kernel is certified on products
/// that are no smaller.
pub const PERIOD_MAX: usize = 1 << 18;

/// Fusion rule: a condition on the op of the producer and the epilogue step that the consumer
/// becomes.
struct Rule {
    name: &'static str,
    why: &'static str,
    applies: fn(&Pair) -> bool,
}

/// Producer and consumer, the input of a rule.
struct Pair<'a> {
    /// Op that computes the values, without the epilogue steps that were fused before.
    root: &'a Op,
    epilogue: EpilogueOp,
    /// True if the operand of `epilogue` is smaller than the value, and repeats.
    repeats: bool,
    /// True if the operand does not repeat, or after few values, if `root` is a product.
    repeats_soon: bool,
    /// True if nothing was fused with `root` before, and the value is not stored.
    is_bare: bool,
}

impl Pair<'_> {
    /// Returns true for a matrix product or a convolution, which is one too.
    fn is_product(&self) -> bool {
        let product =
            matches!(self.root, Op::MatMul { .. } | Op::Conv2d(_) | Op::Conv2dInputGrad { .. });
        product && self.repeats_soon
    }

    fn is_chain(&self) -> bool {
        matches!(self.root, Op::Unary(_) | Op::UnaryGrad(_) | Op::Binary(_))
    }

    fn adds(&self) -> bool {
        self.epilogue == EpilogueOp::Binary(Binary::Add)
    }

    fn scales(&self) -> bool {
        matches!(self.epilogue, EpilogueOp::Unary(Unary::Scale(_)))
    }
}

/// Rules of epilogues. If several apply to a node, the first one is used.
///
/// Four layers of each kind of (768, 256) (256, 256)^T, forward, unfused time over fused, lower
/// quartile of 30 alternated passes on two cores of an AMD EPYC under load: a bias 1.3 on
/// SwiftShader, a sum 1.13 on llvmpipe and 1.05 on SwiftShader, a GELU 1.04 and 1.06, chains of
/// four elementwise ops 2.3 on llvmpipe. On the CPU device, 0.98 to 1.
const RULES: &[Rule] = &[
    Rule {
        name: "matmul + bias",
        why: "a bias is added to the sums that a product has in registers",
        applies: |pair| pair.is_product() && pair.adds() && pair.repeats,
    },
    Rule {
        name: "matmul + sum",
        why: "a residual stream, or another gradient of the same tensor, is added to a product",
        applies: |pair| pair.is_product() && pair.adds() && !pair.repeats,
    },
    Rule {
        name: "matmul + factor",
        why: "a gain or a gate multiplies a product",
        applies: |pair| pair.is_product() && pair.epilogue == EpilogueOp::Binary(Binary::Mul),
    },
    Rule {
        name: "matmul + function of two",
        why: "a difference, a quotient or a maximum takes the values of a product",
        applies: |pair| pair.is_product() && matches!(pair.epilogue, EpilogueOp::Binary(_)),
    },
    Rule {
        name: "matmul + scale",
        why: "a constant multiplies a product",
        applies: |pair| pair.is_product() && pair.scales(),
    },
    Rule {
        name: "matmul + activation",
        why: "training still needs what is activated, but writes it once and reads it later",
        applies: |pair| {
            pair.is_product() && matches!(pair.epilogue, EpilogueOp::Unary(_)) && !pair.scales()
        },
    },
    Rule {
        name: "matmul + activation gradient",
        why: "the gradient of an activation is a product that no other node reads",
        applies: |pair| pair.is_product() && matches!(pair.epilogue, EpilogueOp::UnaryGrad(_)),
    },
    Rule {
        name: "layer norm gradient + sum",
        why: "a residual stream has two gradients, one of them that of its normalization",
        applies: |pair| {
            let adds = pair.adds() && !pair.repeats && pair.is_bare;
            matches!(pair.root, Op::LayerNormGrad | Op::RmsNormGrad) && adds
        },
    },
    Rule {
        name: "elementwise chain",
        why: "memory is all that elementwise ops cost",
        applies: |pair| pair.is_chain(),
    },
];

/// Returns the names of all rules, with the reasons for them: those of epilogues, and those of
/// gradients that read the same tensors.
pub fn rules() -> impl Iterator<Item = (&'static str, &'static str)> {
    RULES.iter().map(|rule| (rule.name, rule.why)).chain(merge_gradients::RULES)
}

/// Applied fusion rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Fusion {
    /// Name of the rule.
    pub rule: &'static str,
    /// Shape of a value that the two nodes share.
    pub value: Shape,
    /// Times that so many elements are no longer written to memory or read from it.
    pub moves: usize,
}

impl Fusion {
    /// Returns the bytes that are no longer written to memory or read from it, per micro-batch of
    /// `rows` rows.
    pub(crate) fn bytes_saved(&self, rows: usize) -> usize {
        self.moves * DType::F32.bytes() * self.value.elements(rows)
    }
}

/// Returns the same computation in fewer nodes. The graph is forward only, or differentiated
/// already.
pub fn fuse(graph: Graph) -> Graph {
    fuse_listed(graph).0
}

/// Runs [`fuse`]; returns also the applied fusions, in order of application.
pub fn fuse_listed(mut graph: Graph) -> (Graph, Vec<Fusion>) {
    let mut done = merge_gradients::merge_bias_sums(&mut graph);
    let mut fuser = Fuser::new(graph);
    loop {
        let before = done.len();
        for at in 0..fuser.nodes.len() {
            if let Some(found) = fuser.best(at) {
                done.push(fuser.apply(at, found));
            }
        }
        if done.len() == before {
            break;
        }
    }
    let mut graph = fuser.finish();
    done.extend(merge_gradients::merge_norm_gradients(&mut graph));
    (graph, done)
}

/// Pair of nodes that can be fused.
struct Found {
    /// Index into [`RULES`].
    rule: usize,
    keep: bool,
    /// Index of the consumer's input that is the value.
    input: usize,
    /// Position of the producer.
    from: usize,
    epilogue: EpilogueOp,
    operand: Option<TensorId>,
}

/// Graph during fusion. Positions are those of the nodes at the beginning.
struct Fuser {
    /// Its nodes are in `nodes` and `behind`.
    graph: Graph,
    /// Node at each position now; `None` once it was fused into a later one.
    nodes: Vec<Option<Node>>,
    /// Reshapes that moved behind a node together with the tensor that they reshape.
    behind: Vec<Vec<Node>>,
    /// Per tensor that holds elements: the position of the node that computes it.
    producer: Vec<Option<usize>>,
    /// Per tensor that holds elements: the positions of nodes that read it, aliases included.
    readers: Vec<Vec<usize>>,
    /// Per tensor: the number of nodes that read it under this shape, plus the number of its names
    /// as output.
    uses: Vec<usize>,
}

impl Fuser {
    fn new(mut graph: Graph) -> Self {
        let (tensors, nodes) = (graph.tensors.len(), std::mem::take(&mut graph.nodes));
        let mut fuser = Self {
            behind: vec![Vec::new(); nodes.len()],
            producer: vec![None; tensors],
            readers: vec![Vec::new(); tensors],
            uses: vec![0; tensors],
            nodes: Vec::new(),
            graph,
        };
        for (at, node) in nodes.iter().enumerate() {
            node.inputs.iter().for_each(|input| fuser.uses[input.index()] += 1);
            if node.op != Op::Reshape {
                node.outputs.iter().for_each(|id| fuser.producer[id.index()] = Some(at));
                for input in &node.inputs {
                    fuser.readers[fuser.graph.root(*input).index()].push(at);
                }
            }
        }
        for output in fuser.graph.read_by_caller() {
            fuser.uses[output.index()] += 1;
        }
        fuser.nodes = nodes.into_iter().map(Some).collect();
        fuser
    }

    /// Returns the best fusion of the node at a position: by the first rule, then preferably
    /// without storing the value, then preferably through the first input.
    fn best(&self, at: usize) -> Option<Found> {
        let consumer = self.nodes[at].as_ref()?;
        let found = (0..consumer.inputs.len()).filter_map(|input| self.found(at, consumer, input));
        found.min_by_key(|found| (found.rule, found.keep, found.input))
    }

    fn found(&self, at: usize, consumer: &Node, input: usize) -> Option<Found> {
        let (epilogue, operand) = self.step(consumer, input)?;
        let value = consumer.inputs[input];
        let keep = !self.is_read_once(value);
        let (from, producer) = self.value(at, consumer, input, operand)?;
        if !self.takes_no_memory(from, at, producer, keep) {
            return None;
        }
        let root = producer.op.root_op();
        let repeats = operand.is_some_and(|operand| !self.same_elements(operand, value));
        let is_bare = *root == producer.op && !keep;
        let repeats_soon = !repeats || operand.is_some_and(|id| self.repeats_soon(producer, id));
        let pair = Pair { root, epilogue, repeats, repeats_soon, is_bare };
        let rule = RULES.iter().position(|rule| (rule.applies)(&pair))?;
        let bindings = producer.inputs.len() + producer.outputs.len();
        let more = usize::from(operand.is_some()) + usize::from(keep);
        let fits = bindings + more <= BINDINGS_MAX;
        fits.then_some(Found { rule, keep, input, from, epilogue, operand })
    }

    /// Returns the consumer as an epilogue step on its input number `input`, with its other input
    /// as operand.
    fn step(&self, consumer: &Node, input: usize) -> Option<(EpilogueOp, Option<TensorId>)> {
        let x = &consumer.inputs;
        match (&consumer.op, input) {
            _ if consumer.accumulate.any() || is_wild(&consumer.op) => None,
            (Op::Unary(function), 0) => Some((EpilogueOp::Unary(*function), None)),
            (Op::UnaryGrad(function), 1) => Some((EpilogueOp::UnaryGrad(*function), Some(x[0]))),
            (Op::Binary(function), 0) => Some((EpilogueOp::Binary(*function), Some(x[1]))),
            // A smaller second input repeats, and cannot be the value.
            (Op::Binary(function), 1) if function.commutes() && self.same_elements(x[0], x[1]) => {
                Some((EpilogueOp::Binary(*function), Some(x[0])))
            }
            _ => None,
        }
    }

    /// Returns the node that computes the value which the node at `at` reads as `input`, if it can
    /// be computed at `at` instead.
    fn value(
        &self,
        at: usize,
        consumer: &Node,
        input: usize,
        operand: Option<TensorId>,
    ) -> Option<(usize, &Node)> {
        let root = |id: TensorId| self.graph.root(id);
        let value = root(consumer.inputs[input]);
        let from = self.producer[value.index()]?;
        let producer = self.nodes[from].as_ref()?;
        let is_last = producer.outputs[0] == value;
        let overwrites = producer.accumulate.any() || is_wild(&producer.op);
        let is_activation = |id: &TensorId| self.graph.tensor(*id).role == Role::Activation;
        let named = self.graph.read_by_caller().any(|output| root(output) == value);
        // An operand that the same node computes is not in memory yet.
        let is_own = operand.is_some_and(|id| producer.outputs.contains(&root(id)));
        let only_later = |id: &TensorId| self.readers[id.index()].iter().all(|&r| r >= at);
        // Gradients and the loss change from node to node.
        let is_stable = |id: &TensorId| {
            !matches!(self.graph.tensor(root(*id)).role, Role::Gradient(_) | Role::Loss)
        };
        let fits = is_last
            && producer.when == consumer.when
            && !overwrites
            && !named
            && !is_own
            && producer.outputs.iter().all(is_activation)
            && producer.outputs.iter().all(only_later)
            && producer.inputs.iter().all(is_stable)
            && self.in_one_segment(from, at);
        fits.then_some((from, producer))
    }

    /// Returns true if a node can run later, fused with its consumer, without extending the
    /// lifetime of any tensor: either nothing is computed in between and the new output takes the
    /// place of the value, or all inputs are read later anyway.
    fn takes_no_memory(&self, from: usize, to: usize, node: &Node, keep: bool) -> bool {
        let computes = |node: &Node| node.op != Op::Reshape;
        let adjacent = !self.nodes[from + 1..to].iter().flatten().any(computes);
        let outlives = |id: &TensorId| {
            let root = self.graph.root(*id);
            matches!(self.graph.tensor(root).role, Role::Parameter(_))
                || self.readers[root.index()].iter().any(|&reader| reader >= to)
        };
        (adjacent && !keep) || node.inputs.iter().all(outlives)
    }

    fn in_one_segment(&self, from: usize, to: usize) -> bool {
        let mut places =
            self.nodes[from..=to].iter().flatten().map(|node| (node.phase, node.block));
        let first = places.next();
        places.all(|place| Some(place) == first)
    }

    /// Returns true if an operand repeats after no more than [`PERIOD_MAX`] values, and of several
    /// products within each, of what a node computes; of a convolution after one value per channel.
    fn repeats_soon(&self, product: &Node, operand: TensorId) -> bool {
        let dims = |input: usize| self.graph.tensor(product.inputs[input]).shape.dims();
        let length = self.graph.tensor(operand).shape.per_row();
        let (transpose_a, transpose_b) = match *product.op.root_op() {
            Op::MatMul { transpose_a, transpose_b } => (transpose_a, transpose_b),
            Op::Conv2d(_) | Op::Conv2dInputGrad { .. } => {
                return length == self.graph.tensor(product.outputs[0]).shape.last();
            }
            _ => return false,
        };
        let (a, b) = (dims(0), dims(1));
        let rows = a[a.len() - if transpose_a { 1 } else { 2 }];
        let columns = b[b.len() - if transpose_b { 2 } else { 1 }];
        length <= PERIOD_MAX && (a.len() == 2 || length <= rows * columns)
    }

    fn same_elements(&self, a: TensorId, b: TensorId) -> bool {
        let (a, b) = (&self.graph.tensor(a).shape, &self.graph.tensor(b).shape);
        a.is_batched() == b.is_batched() && a.per_row() == b.per_row()
    }

    /// Returns true if a tensor, and every one that it is an alias of, has no other use than this
    /// one.
    fn is_read_once(&self, id: TensorId) -> bool {
        let alias = self.graph.tensor(id).alias_of;
        self.uses[id.index()] == 1 && alias.is_none_or(|of| self.is_read_once(of))
    }

    /// Fuses two nodes into one, at the position of the second.
    fn apply(&mut self, at: usize, found: Found) -> Fusion {
        let take = |node: &mut Option<Node>| node.take().expect("what was found is there");
        let consumer = take(&mut self.nodes[at]);
        let producer = take(&mut self.nodes[found.from]);
        let value = producer.outputs[0];
        let (root, mut epilogue) = match producer.op {
            Op::Fused { root, epilogue } => (root, epilogue),
            op => (Box::new(op), Vec::new()),
        };
        epilogue.extend(found.keep.then_some(EpilogueOp::Store));
        epilogue.push(found.epilogue);
        let kept = producer.outputs[1..].iter().copied().chain(found.keep.then_some(value));
        let node = Node {
            op: Op::Fused { root, epilogue },
            inputs: producer.inputs.iter().copied().chain(found.operand).collect(),
            outputs: [consumer.outputs[0]].into_iter().chain(kept).collect(),
            ..consumer
        };
        self.move_reads(&producer.inputs, found.from, at);
        node.outputs.iter().for_each(|id| self.producer[id.index()] = Some(at));
        self.readers[value.index()].retain(|&reader| reader != at);
        self.nodes[at] = Some(node);
        self.release(consumer.inputs[found.input], found.from, at);
        self.move_reshapes(found.from, at);
        let value = self.graph.tensor(value).shape.clone();
        Fusion { rule: RULES[found.rule].name, value, moves: if found.keep { 1 } else { 2 } }
    }

    fn move_reads(&mut self, inputs: &[TensorId], from: usize, to: usize) {
        for input in inputs {
            let readers = &mut self.readers[self.graph.root(*input).index()];
            readers.iter_mut().filter(|reader| **reader == from).for_each(|reader| *reader = to);
        }
    }

    /// Removes one use of a tensor. A reshape between two positions that has no use any more is
    /// removed, and so is its use of its own input.
    fn release(&mut self, id: TensorId, from: usize, to: usize) {
        self.uses[id.index()] -= 1;
        let (0, Some(base)) = (self.uses[id.index()], self.graph.tensor(id).alias_of) else {
            return;
        };
        let makes = |node: &Node| node.op == Op::Reshape && node.outputs == [id];
        for place in from..=to {
            self.behind[place].retain(|node| !makes(node));
            self.nodes[place].take_if(|node| makes(node));
        }
        self.release(base, from, to);
    }

    /// Moves the reshapes of tensors that the node at `to` computes now behind that node.
    fn move_reshapes(&mut self, from: usize, to: usize) {
        let mut moved = Vec::new();
        for place in from..to {
            let is_of = |node: &Node| {
                let base = self.graph.root(node.inputs[0]);
                node.op == Op::Reshape && self.producer[base.index()] == Some(to)
            };
            moved.extend(self.nodes[place].take_if(|node| is_of(node)));
            moved.extend(self.behind[place].extract_if(.., |node| is_of(node)));
        }
        moved.append(&mut self.behind[to]);
        self.behind[to] = moved;
    }

    fn finish(self) -> Graph {
        let places = self.nodes.into_iter().zip(self.behind);
        let nodes = places.flat_map(|(node, behind)| node.into_iter().chain(behind)).collect();
        Graph { nodes, ..self.graph }
    }
}

/// Returns true if the op has a constant that no shader can write, or overflows, jumps or is not
/// defined on values that suit other ops, on which a fused kernel would be certified.
fn is_wild(op: &Op) -> bool {
    match op {
        Op::Unary(function) | Op::UnaryGrad(function) => {
            let is_smooth = function.domain() == Domain::All && function.slope() == Slope::Sloped;
            !is_smooth || function.constants().iter().any(|constant| !constant.is_finite())
        }
        Op::Binary(function) => {
            let jumps = function.slope(BinarySide::First) == Slope::Flat;
            function.domain() != Domain::All || jumps
        }
        _ => false,
    }
}
