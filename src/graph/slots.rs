//! Memory planning: the tensors that a device computes in a micro-batch, assigned to slots by
//! liveness in the order in which the device runs their nodes.

use std::collections::BTreeSet;

use super::memory_layout::{ALIGNMENT_BYTES, Segment, Slot, SlotKind, TensorLocation};
use super::{Graph, PassKind, Role};
use potluck_core::{SegmentId, SlotId, TensorId};

/// Nodes in the order in which a device runs them for one micro-batch.
pub(super) struct NodeOrder {
    /// By position: the index of the node, and that of its segment among the segments that run.
    nodes: Vec<(usize, usize)>,
    /// Position of the first node of each segment that runs, then the number of nodes.
    starts: Vec<usize>,
}

/// Live range of a tensor, from its first write to its last read, in positions of a [`NodeOrder`]
/// and in the segments of these.
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
    /// inputs for which `loads` is true, and of what comes from other devices.
    ///
    /// Inputs are live before the first node, what another device sends is live from the start of
    /// the first segment that reads it, what another device needs to the end of the segment that
    /// computes it, outputs to the end of the last segment of the forward pass, and what is carried
    /// to the next step to the end.
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
        self.keep_outputs(graph, &own, &mut lives);
        self.keep_carried(graph, &own, &mut lives);
        lives
    }

    fn life(&self, position: usize, kind: SlotKind) -> Life {
        let segment = self.nodes.get(position).map_or(0, |(_, segment)| *segment);
        let span = SegmentSpan { first: segment, last: segment };
        Life { first: position, last: position, kind, span }
    }

    fn extend(&self, life: &mut Life, position: usize) {
        life.last = life.last.max(position);
        life.span.last = self.nodes.get(life.last).map_or(0, |(_, segment)| *segment);
        if life.span.first != life.span.last {
            life.kind = SlotKind::Stash;
        }
    }

    /// Extends the lives of what nodes of other devices read: it is sent after the segment that
    /// computes it.
    fn keep_what_is_sent(
        &self,
        graph: &Graph,
        held: &[bool],
        own: &[bool],
        lives: &mut [Option<Life>],
    ) {
        let elsewhere = graph.nodes.iter().filter(|node| !held[node.block as usize]);
        for &tensor in elsewhere.flat_map(|node| &node.inputs) {
            let root = graph.root(tensor);
            let is_sent = own[root.index()] && graph.tensor(root).role == Role::Activation;
            if let Some(life) = lives[root.index()].as_mut().filter(|_| is_sent) {
                self.extend(life, self.starts[life.span.first + 1] - 1);
                life.kind = SlotKind::Stash;
            }
        }
    }

    /// Extends the lives of the graph's outputs, which the caller reads after the last forward
    /// node.
    fn keep_outputs(&self, graph: &Graph, own: &[bool], lives: &mut [Option<Life>]) {
        let is_forward =
            |(index, _): &(usize, usize)| graph.nodes[*index].phase == PassKind::Forward;
        let forward_end = self.nodes.iter().rposition(is_forward).unwrap_or(0);
        for (_, output) in &graph.outputs {
            self.keep(graph.root(*output), forward_end, own, lives);
        }
    }

    /// Extends the lives of what the next step reads: the caller reads it when the micro-batch has
    /// ended, so that the device does not wait between the forward and the backward pass.
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
        if let Some(life) = lives[index].as_mut().filter(|_| own[index]) {
            self.extend(life, end);
            life.kind = SlotKind::Stash;
        }
    }
}

/// Live ranges of a graph's tensors, at a capacity of rows.
pub(super) struct Liveness<'a> {
    pub graph: &'a Graph,
    pub lives: Vec<Option<Life>>,
    pub rows: usize,
}

/// Slots while tensors are assigned to them.
struct Slots<F> {
    slots: Vec<Slot>,
    /// By slot: from the first to the last segment of any tensor in it.
    spans: Vec<SegmentSpan>,
    /// Free ones, by their bytes.
    free: BTreeSet<(usize, usize)>,
    /// Copies that a slot kept over these segments needs.
    copies: F,
}

/// Assigns slots in the order of first writes: the free slot of the right kind that fits best,
/// grown if none is large enough. A node's inputs stay live while its outputs are placed, so that
/// no kernel reads and writes one buffer. `copies` returns the number of copies of a slot that is
/// kept over some segments.
pub(super) fn assign(
    liveness: &Liveness,
    places: &mut [TensorLocation],
    copies: impl FnMut(SegmentSpan) -> usize,
) -> Vec<Slot> {
    let Liveness { graph, lives, rows } = liveness;
    let end = lives.iter().flatten().map(|life| life.last + 1).max().unwrap_or(0);
    let mut starts: Vec<Vec<usize>> = vec![Vec::new(); end];
    let mut ends = starts.clone();
    for (tensor, life) in lives.iter().enumerate() {
        if let Some(life) = life {
            starts[life.first].push(tensor);
            ends[life.last].push(tensor);
        }
    }
    let mut slots = Slots { slots: Vec::new(), spans: Vec::new(), free: BTreeSet::new(), copies };
    for (starts, ends) in starts.iter().zip(&ends) {
        for &tensor in starts {
            let Some(life) = lives[tensor] else { continue };
            let placed = &graph.tensors[tensor];
            let bytes = placed.bytes(*rows).max(placed.dtype.bytes());
            let bytes = bytes.next_multiple_of(ALIGNMENT_BYTES);
            let slot = slots.take(&life, bytes);
            places[tensor] = TensorLocation::Slot(SlotId(slot as u32));
        }
        for &tensor in ends {
            if let TensorLocation::Slot(slot) = places[tensor] {
                slots.free.insert((slots.slots[slot.index()].bytes, slot.index()));
            }
        }
    }
    slots.slots
}

impl<F: FnMut(SegmentSpan) -> usize> Slots<F> {
    /// Returns the free slot that fits a life best, or a new one.
    fn take(&mut self, life: &Life, bytes: usize) -> usize {
        let Self { slots, spans, free, copies: copies_over } = self;
        let mut copies_over = |span| match life.kind {
            SlotKind::Scratch => 1,
            SlotKind::Stash => copies_over(span),
        };
        let copies = copies_over(life.span);
        // A tensor that alone needs `copies` copies shares a slot if that costs no further copy of
        // anything, neither of what is in the slot nor, unless it fits into what is there, of the
        // tensor.
        let mut may_share = |slot: usize| {
            let known = slots[slot];
            known.kind == life.kind
                && (copies == known.copies || (copies < known.copies && bytes <= known.bytes))
                && copies_over(spans[slot].with(life.span)) == known.copies
        };
        // The tightest that fits; else the largest, which grows least.
        let mut by_fit = free.range((bytes, 0)..).chain(free.range(..(bytes, 0)).rev());
        match by_fit.find(|(_, slot)| may_share(*slot)).copied() {
            Some((has, slot)) => {
                free.remove(&(has, slot));
                slots[slot].bytes = has.max(bytes);
                spans[slot] = spans[slot].with(life.span);
                slot
            }
            None => {
                slots.push(Slot { kind: life.kind, bytes, copies });
                spans.push(life.span);
                slots.len() - 1
            }
        }
    }
}

impl SegmentSpan {
    /// Returns the span from the earlier first segment to the later last one.
    fn with(self, other: Self) -> Self {
        Self { first: self.first.min(other.first), last: self.last.max(other.last) }
    }
}
