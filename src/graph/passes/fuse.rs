//! Operator fusion: merges adjacent nodes into one [`Op::Fused`], so that the value between them
//! is never written to memory, and gradients that read the same tensors into one node
//! (`merge_gradients`). [`RULES`] lists the pairs of nodes, `Fuser::value` checks the conditions.
//!
//! The fused node takes the position of the second node: all its operands exist there, and the
//! inputs of the first node still have their values. A value that later nodes read (the input of
//! an activation, which the backward pass needs) is stored: written, but not read again by this
//! kernel.
//!
//! Fusion does not need more memory: no tensor lives longer than before, except a tensor that must
//! outlive its segment and is placed apart from tensors that need not.
//!
//! Dropout is not fused: its random numbers depend on the step, and the epilogue of a fused kernel
//! has only constants. Reductions are not fused either, except that another gradient may be added
//! to the gradient of a layer norm.

use super::merge_gradients;
use crate::elements::{Binary, BinarySide, Domain, Slope, Unary};
use crate::op::{EpilogueOp, Op};
use crate::{Graph, Node, Role};
use potluck_core::{DType, Shape, TensorId};

/// Largest number of tensors of a kernel: the number of bindings that every device supports.
const BINDINGS_MAX: usize = 8;

/// Longest period of a repeated operand of a product, enough for the positions of pictures in
/// patches. The period is in the kernel's text, so the kernel is certified on products that are no
/// smaller.
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
    /// Op that computes the values, without the epilogue steps fused so far.
    root: &'a Op,
    epilogue: EpilogueOp,
    /// True if the operand of `epilogue` is smaller than the value, and repeats.
    repeats: bool,
    /// True if the operand does not repeat, or if `root` is a product and its period is short.
    repeats_soon: bool,
    /// True if nothing was fused with `root` before, and the value is not stored.
    is_bare: bool,
}

impl Pair<'_> {
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

/// Returns the names and reasons of all rules: for epilogues, and for gradients that read the same
/// tensors.
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
    /// Number of times that the value is no longer written to memory or read from it.
    pub moves: usize,
}

impl Fusion {
    /// Memory traffic that the fusion saves in a micro-batch of `rows` rows, in bytes.
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

/// Graph during fusion. Positions are the nodes' before fusion.
struct Fuser {
    /// The graph without its nodes, which are in `nodes` and `behind`.
    graph: Graph,
    /// Current node at each position; `None` after it was fused into a later one.
    nodes: Vec<Option<Node>>,
    /// Reshapes that moved after a node together with the tensor that they reshape.
    behind: Vec<Vec<Node>>,
    /// Position of the node that computes each tensor that is not an alias.
    producer: Vec<Option<usize>>,
    /// Positions of the nodes that read each tensor that is not an alias, directly or by an alias.
    readers: Vec<Vec<usize>>,
    /// Number of nodes that read each tensor under this shape, plus the number of its names as
    /// output.
    uses: Vec<usize>,
}

impl Fuser {
    fn new(mut graph: Graph) -> Self {
        let tensors = graph.tensors.len();
        let nodes = std::mem::take(&mut graph.nodes);
        let mut fuser = Self {
            behind: vec![Vec::new(); nodes.len()],
            producer: vec![None; tensors],
            readers: vec![Vec::new(); tensors],
            uses: vec![0; tensors],
            nodes: Vec::new(),
            graph,
        };
        for (at, node) in nodes.iter().enumerate() {
            for input in &node.inputs {
                fuser.uses[input.index()] += 1;
            }
            if node.op == Op::Reshape {
                continue;
            }
            for output in &node.outputs {
                fuser.producer[output.index()] = Some(at);
            }
            for input in &node.inputs {
                fuser.readers[fuser.graph.root(*input).index()].push(at);
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
        if bindings + more > BINDINGS_MAX {
            return None;
        }
        Some(Found { rule, keep, input, from, epilogue, operand })
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
        let graph = &self.graph;
        let value = graph.root(consumer.inputs[input]);
        let from = self.producer[value.index()]?;
        let producer = self.nodes[from].as_ref()?;
        if producer.outputs[0] != value
            || producer.when != consumer.when
            || producer.accumulate.any()
            || is_wild(&producer.op)
            || graph.read_by_caller().any(|output| graph.root(output) == value)
            || !self.in_one_segment(from, at)
        {
            return None;
        }
        // An operand that the same node computes is not in memory yet.
        if operand.is_some_and(|id| producer.outputs.contains(&graph.root(id))) {
            return None;
        }
        for output in &producer.outputs {
            let is_activation = graph.tensor(*output).role == Role::Activation;
            let is_read_before = self.readers[output.index()].iter().any(|reader| *reader < at);
            if !is_activation || is_read_before {
                return None;
            }
        }
        // Gradients and the loss change from node to node.
        for input in &producer.inputs {
            let role = graph.tensor(graph.root(*input)).role;
            if matches!(role, Role::Gradient(_) | Role::Loss) {
                return None;
            }
        }
        Some((from, producer))
    }

    /// Returns true if a node can run later, fused with its consumer, without extending the
    /// lifetime of any tensor: either nothing is computed in between and the new output replaces
    /// the value in memory, or all inputs are read later anyway.
    fn takes_no_memory(&self, from: usize, to: usize, node: &Node, keep: bool) -> bool {
        let adjacent = self.nodes[from + 1..to].iter().flatten().all(|node| node.op == Op::Reshape);
        if adjacent && !keep {
            return true;
        }
        node.inputs.iter().all(|input| {
            let root = self.graph.root(*input);
            matches!(self.graph.tensor(root).role, Role::Parameter(_))
                || self.readers[root.index()].iter().any(|&reader| reader >= to)
        })
    }

    fn in_one_segment(&self, from: usize, to: usize) -> bool {
        let mut nodes = self.nodes[from..=to].iter().flatten();
        let Some(first) = nodes.next() else { return true };
        nodes.all(|node| (node.phase, node.block) == (first.phase, first.block))
    }

    /// Returns true if an operand repeats with a period of at most [`PERIOD_MAX`] values of a
    /// product, and within each of several products; for a convolution, of one value per channel.
    fn repeats_soon(&self, product: &Node, operand: TensorId) -> bool {
        let length = self.graph.tensor(operand).shape.per_row();
        let (transpose_a, transpose_b) = match *product.op.root_op() {
            Op::MatMul { transpose_a, transpose_b } => (transpose_a, transpose_b),
            Op::Conv2d(_) | Op::Conv2dInputGrad { .. } => {
                return length == self.graph.tensor(product.outputs[0]).shape.last();
            }
            _ => return false,
        };
        let a = self.graph.tensor(product.inputs[0]).shape.dims();
        let b = self.graph.tensor(product.inputs[1]).shape.dims();
        let rows = a[a.len() - if transpose_a { 1 } else { 2 }];
        let columns = b[b.len() - if transpose_b { 2 } else { 1 }];
        length <= PERIOD_MAX && (a.len() == 2 || length <= rows * columns)
    }

    fn same_elements(&self, a: TensorId, b: TensorId) -> bool {
        let a = &self.graph.tensor(a).shape;
        let b = &self.graph.tensor(b).shape;
        a.is_batched() == b.is_batched() && a.per_row() == b.per_row()
    }

    /// Returns true if a tensor, and each tensor that it is an alias of, has exactly one use.
    fn is_read_once(&self, id: TensorId) -> bool {
        let alias = self.graph.tensor(id).alias_of;
        self.uses[id.index()] == 1 && alias.is_none_or(|of| self.is_read_once(of))
    }

    fn take(&mut self, at: usize) -> Node {
        self.nodes[at].take().expect("what was found is there")
    }

    /// Fuses two nodes into one, at the position of the second.
    fn apply(&mut self, at: usize, found: Found) -> Fusion {
        let consumer = self.take(at);
        let producer = self.take(found.from);
        let value = producer.outputs[0];
        let (root, mut epilogue) = match producer.op {
            Op::Fused { root, epilogue } => (root, epilogue),
            op => (Box::new(op), Vec::new()),
        };
        let mut outputs = vec![consumer.outputs[0]];
        outputs.extend_from_slice(&producer.outputs[1..]);
        if found.keep {
            epilogue.push(EpilogueOp::Store);
            outputs.push(value);
        }
        epilogue.push(found.epilogue);
        let mut inputs = producer.inputs.clone();
        inputs.extend(found.operand);

        self.move_reads(&producer.inputs, found.from, at);
        for output in &outputs {
            self.producer[output.index()] = Some(at);
        }
        self.readers[value.index()].retain(|&reader| reader != at);
        let read = consumer.inputs[found.input];
        let op = Op::Fused { root, epilogue };
        self.nodes[at] = Some(Node { op, inputs, outputs, ..consumer });
        self.release(read, found.from, at);
        self.move_reshapes(found.from, at);
        let value = self.graph.tensor(value).shape.clone();
        Fusion { rule: RULES[found.rule].name, value, moves: if found.keep { 1 } else { 2 } }
    }

    fn move_reads(&mut self, inputs: &[TensorId], from: usize, to: usize) {
        for input in inputs {
            let readers = &mut self.readers[self.graph.root(*input).index()];
            for reader in readers {
                if *reader == from {
                    *reader = to;
                }
            }
        }
    }

    /// Removes one use of a tensor. If it was the last use of a reshape between two positions, the
    /// reshape and its use of its input are removed too.
    fn release(&mut self, id: TensorId, from: usize, to: usize) {
        self.uses[id.index()] -= 1;
        if self.uses[id.index()] > 0 {
            return;
        }
        let Some(base) = self.graph.tensor(id).alias_of else { return };
        let makes = |node: &Node| node.op == Op::Reshape && node.outputs == [id];
        for place in from..=to {
            self.behind[place].retain(|node| !makes(node));
            self.nodes[place].take_if(|node| makes(node));
        }
        self.release(base, from, to);
    }

    /// Moves reshapes of tensors that the node at `to` now computes after that node.
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
        let mut nodes = Vec::new();
        for (node, behind) in self.nodes.into_iter().zip(self.behind) {
            nodes.extend(node);
            nodes.extend(behind);
        }
        Graph { nodes, ..self.graph }
    }
}

/// Returns true if the op has a constant that a shader cannot express, or overflows, jumps or is
/// undefined on the values on which a fused kernel is certified, which suit other ops.
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
