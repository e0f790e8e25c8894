//! Memory planning: the tensors that a device computes in a micro-batch, assigned to slots by
//! liveness in the order in which the device runs their nodes.

use std::cmp::Reverse;

use super::memory_layout::{ALIGNMENT_BYTES, Segment, Slot, SlotKind, TensorLocation};
use super::{Graph, PassKind, Role};
use potluck_core::{SegmentId, SlotId, TensorId};

/// Nodes in the order in which a device runs them for one micro-batch.
pub(super) struct NodeOrder {
    /// Index of each node, and of its segment among the segments that run.
    nodes: Vec<(usize, usize)>,
    /// Position of the first node of each segment that runs, then the number of nodes.
    starts: Vec<usize>,
}

/// Live range of a tensor, from its first write to its last read, in positions of a [`NodeOrder`]
/// and in their segments.
#[derive(Clone, Copy)]
pub(super) struct Life {
    first: usize,
    last: usize,
    kind: SlotKind,
    span: SegmentSpan,
}

/// First and last segment of a life, as indices into the segments that run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SegmentSpan {
    pub first: usize,
    pub last: usize,
}

impl NodeOrder {
    pub(super) fn new(segments: &[Segment], order: &[SegmentId]) -> Self {
        let mut nodes = Vec::new();
        let mut starts = Vec::new();
        for (index, id) in order.iter().enumerate() {
            starts.push(nodes.len());
            nodes.extend(segments[id.index()].nodes.clone().map(|node| (node, index)));
        }
        starts.push(nodes.len());
        Self { nodes, starts }
    }

    /// Returns the live range of each tensor that a node of the order writes or reads, of the
    /// inputs for which `loads` is true, and of tensors from other devices.
    ///
    /// Inputs are live before the first node, and a tensor from another device from the start of
    /// the first segment that reads it. A tensor for another device is live to the end of the
    /// segment that computes it, an output to the end of the last segment of the forward pass, and
    /// a state for the next step to the end.
    pub(super) fn lifetimes(
        &self,
        graph: &Graph,
        held: &[bool],
        loads: impl Fn(TensorId) -> bool,
    ) -> Vec<Option<Life>> {
        let mut lives: Vec<Option<Life>> = vec![None; graph.tensors.len()];
        let mut own = vec![false; graph.tensors.len()];
        for (_, input) in graph.inputs.iter().filter(|(_, input)| loads(*input)) {
            lives[input.index()] = Some(self.life(0, SlotKind::Stash));
            own[input.index()] = true;
        }
        for (position, &(index, segment)) in self.nodes.iter().enumerate() {
            let node = &graph.nodes[index];
            for &tensor in &node.inputs {
                let root = graph.root(tensor);
                let life = &mut lives[root.index()];
                if life.is_none() && graph.tensor(root).role == Role::Activation {
                    *life = Some(self.life(self.starts[segment], SlotKind::Stash));
                }
                if let Some(life) = life {
                    self.extend(life, position);
                }
            }
            for &tensor in &node.outputs {
                let known = graph.tensor(tensor);
                if known.role == Role::Activation && known.alias_of.is_none() {
                    assert!(
                        lives[tensor.index()].is_none(),
                        "{tensor} is read before node {index}, which computes it"
                    );
                    lives[tensor.index()] = Some(self.life(position, SlotKind::Scratch));
                    own[tensor.index()] = true;
                }
            }
        }
        self.keep_what_is_sent(graph, held, &own, &mut lives);
        self.keep_what_is_reduced(graph, &own, &mut lives);
        self.keep_outputs(graph, &own, &mut lives);
        self.keep_carried(graph, &own, &mut lives);
        lives
    }

    /// Lives of the logits that kernels keep within a node.
    pub(super) fn logits(&self, graph: &Graph, rows: usize) -> LogitsLives {
        let mut logits = LogitsLives { lives: Vec::new(), bytes: usize::MAX };
        for (position, (index, _)) in self.nodes.iter().enumerate() {
            if let Some(bytes) = graph.logits_bytes(&graph.nodes[*index], rows) {
                logits.lives.push(self.life(position, SlotKind::Scratch));
                logits.bytes = logits.bytes.min(bytes);
            }
        }
        logits
    }

    fn life(&self, position: usize, kind: SlotKind) -> Life {
        let segment = self.segment_at(position);
        let span = SegmentSpan { first: segment, last: segment };
        Life { first: position, last: position, kind, span }
    }

    /// Segment of a position; 0 if no nodes run.
    fn segment_at(&self, position: usize) -> usize {
        match self.nodes.get(position) {
            Some((_, segment)) => *segment,
            None => 0,
        }
    }

    fn extend(&self, life: &mut Life, position: usize) {
        life.last = life.last.max(position);
        life.span.last = self.segment_at(life.last);
        if life.span.first != life.span.last {
            life.kind = SlotKind::Stash;
        }
    }

    /// Extends the lives of tensors that nodes of other devices read, which are sent after the
    /// segment that computes them.
    fn keep_what_is_sent(
        &self,
        graph: &Graph,
        held: &[bool],
        own: &[bool],
        lives: &mut [Option<Life>],
    ) {
        for node in graph.nodes.iter().filter(|node| !held[node.block as usize]) {
            for &tensor in &node.inputs {
                let root = graph.root(tensor);
                let is_sent = own[root.index()] && graph.tensor(root).role == Role::Activation;
                if is_sent && let Some(life) = &mut lives[root.index()] {
                    self.extend(life, self.starts[life.span.first + 1] - 1);
                    life.kind = SlotKind::Stash;
                }
            }
        }
    }

    /// Keeps the tensors of which the host sends the values to the other ranks of a tensor group,
    /// after the segment that computes them and beside what the device runs next.
    fn keep_what_is_reduced(&self, graph: &Graph, own: &[bool], lives: &mut [Option<Life>]) {
        for (position, (index, _)) in self.nodes.iter().enumerate() {
            let node = &graph.nodes[*index];
            let Some(reduction) = node.op.reduction() else { continue };
            for sent in reduction.sent(&node.inputs) {
                self.keep(graph.root(*sent), position, own, lives);
            }
        }
    }

    /// Extends the lives of the graph's outputs, which the caller reads after the last forward
    /// node.
    fn keep_outputs(&self, graph: &Graph, own: &[bool], lives: &mut [Option<Life>]) {
        let mut nodes = self.nodes.iter();
        let last = nodes.rposition(|(index, _)| graph.nodes[*index].phase == PassKind::Forward);
        for (_, output) in &graph.outputs {
            self.keep(graph.root(*output), last.unwrap_or(0), own, lives);
        }
    }

    /// Extends the lives of the states for the next step: the caller reads them at the end of the
    /// micro-batch, so that the device does not wait between the forward and the backward pass.
    fn keep_carried(&self, graph: &Graph, own: &[bool], lives: &mut [Option<Life>]) {
        let end = self.nodes.len().saturating_sub(1);
        for carried in &graph.carried {
            self.keep(graph.root(carried.output), end, own, lives);
        }
    }

    /// Extends the life of a tensor that this device computes, which the caller reads after the
    /// node at a position.
    fn keep(&self, tensor: TensorId, end: usize, own: &[bool], lives: &mut [Option<Life>]) {
        let index = tensor.index();
        if own[index]
            && let Some(life) = &mut lives[index]
        {
            self.extend(life, end);
            life.kind = SlotKind::Stash;
        }
    }
}

/// Live ranges of a graph's tensors, and of the logits of its kernels, at a capacity of rows.
pub(super) struct Liveness<'a> {
    pub graph: &'a Graph,
    pub lives: Vec<Option<Life>>,
    pub logits: LogitsLives,
    pub rows: usize,
}

/// Logits that kernels of a device keep within a node.
pub(super) struct LogitsLives {
    lives: Vec<Life>,
    /// Bytes of memory that the logits of every node have.
    bytes: usize,
}

impl LogitsLives {
    /// Slot that shares the memory of the logits; `None` without logits.
    fn slot(&self) -> Option<SharedSlot> {
        let span = self.lives.iter().map(|life| life.span).reduce(SegmentSpan::with)?;
        let slot = Slot { kind: SlotKind::Logits, bytes: 0, copies: 1 };
        Some(SharedSlot { slot, bytes_max: self.bytes, lives: self.lives.clone(), span })
    }
}

/// Slot while tensors are assigned to it.
struct SharedSlot {
    slot: Slot,
    /// Bytes of the first and largest tensor, or of the logits.
    bytes_max: usize,
    /// Lives of its tensors, which do not overlap.
    lives: Vec<Life>,
    /// From the first to the last segment of any of them.
    span: SegmentSpan,
}

/// Assigns slots, the largest tensors first and of equal ones the earliest: the smallest slot that
/// is free for the life of the tensor, or a new one, so that no slot is larger than its first
/// tensor (greedy by size for shared objects, Pisarchyk and Lee 2020). A node's inputs stay live
/// while its outputs are placed, so that no kernel reads and writes the same buffer. `copies`
/// returns the number of copies of a slot whose contents live over a span of segments.
pub(super) fn assign(
    liveness: &Liveness,
    places: &mut [TensorLocation],
    mut copies: impl FnMut(SegmentSpan) -> usize,
) -> Vec<Slot> {
    let Liveness { graph, lives, logits, rows } = liveness;
    let mut tensors = Vec::new();
    for (tensor, life) in lives.iter().enumerate() {
        if let Some(life) = life {
            let placed = &graph.tensors[tensor];
            let bytes = placed.bytes(*rows).max(placed.dtype.bytes());
            tensors.push((Reverse(bytes.next_multiple_of(ALIGNMENT_BYTES)), life.first, tensor));
        }
    }
    tensors.sort_unstable();
    let mut slots: Vec<SharedSlot> = logits.slot().into_iter().collect();
    for (Reverse(bytes), _, tensor) in tensors {
        let Some(life) = lives[tensor] else { continue };
        let copies_of_tensor = if life.kind == SlotKind::Stash { copies(life.span) } else { 1 };
        // The last slots are the smallest.
        let shared = slots.iter().rposition(|slot| {
            bytes <= slot.bytes_max
                && slot.is_free(&life)
                && slot.has_copies(&life, copies_of_tensor, &mut copies)
        });
        let index = shared.unwrap_or(slots.len());
        if index == slots.len() {
            let slot = Slot { kind: life.kind, bytes: 0, copies: copies_of_tensor };
            slots.push(SharedSlot { slot, bytes_max: bytes, lives: Vec::new(), span: life.span });
        }
        slots[index].add(life, bytes);
        places[tensor] = TensorLocation::Slot(SlotId(index as u32));
    }
    slots.into_iter().map(|shared| shared.slot).collect()
}

impl SharedSlot {
    /// Returns true if no tensor of the slot is live together with this one.
    fn is_free(&self, life: &Life) -> bool {
        self.lives.iter().all(|other| life.last < other.first || other.last < life.first)
    }

    /// Returns true if the slot can take a tensor that alone needs `copies`, and the span of all
    /// its tensors then still needs as many copies as the slot has.
    fn has_copies(
        &self,
        life: &Life,
        copies: usize,
        copies_over: &mut impl FnMut(SegmentSpan) -> usize,
    ) -> bool {
        let Slot { kind, copies: own, .. } = self.slot;
        match (kind, life.kind) {
            (SlotKind::Scratch | SlotKind::Logits, SlotKind::Scratch) => true,
            (SlotKind::Logits, _) => false,
            // Within a segment one copy is enough.
            (SlotKind::Stash, SlotKind::Scratch) if own > 1 => false,
            _ => copies <= own && copies_over(self.span.with(life.span)) == own,
        }
    }

    fn add(&mut self, life: Life, bytes: usize) {
        self.slot.bytes = self.slot.bytes.max(bytes);
        if life.kind == SlotKind::Stash {
            self.slot.kind = SlotKind::Stash;
        }
        self.span = self.span.with(life.span);
        self.lives.push(life);
    }
}

impl SegmentSpan {
    /// Span from the earlier first segment to the later last one.
    fn with(self, other: Self) -> Self {
        Self { first: self.first.min(other.first), last: self.last.max(other.last) }
    }
}
