//! State machine of the tensors that one rank sends and receives: the pieces to read back, the
//! pieces that have arrived, and those to write or to reduce. It holds no values.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::{Edge, Event, GroupReduction, StepError, Token};
use potluck_core::{DType, EdgeId, EdgePiece, Rank, ReductionId};
use potluck_graph::Region;

/// Largest number of elements of an edge in flight, far above those of real models.
const ELEMENTS_MAX: usize = 1 << 40;

/// Edges of a run, shared by all its ranks.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct EdgeLayout {
    /// All edges of the run; [`EdgeId`] indexes them.
    pub edges: Arc<[Edge]>,
    /// All all-reduces of the run; [`ReductionId`] indexes them.
    pub reductions: Arc<[GroupReduction]>,
    /// The most elements of a message.
    pub piece_max: usize,
    /// The most rows of a micro-batch.
    pub rows_max: usize,
}

impl EdgeLayout {
    pub fn edge(&self, id: EdgeId) -> &Edge {
        &self.edges[id.index()]
    }

    /// Returns true if all ranks of the edges are below `world`, their values have sizes that can
    /// be counted, and the edges of all all-reduces refer to them: false only for the layout of a
    /// damaged message.
    pub fn is_sound(&self, world: usize) -> bool {
        for edge in self.edges.iter() {
            let has_reduction = edge.reduction.is_none_or(|id| id.index() < self.reductions.len());
            let has_ranks = !edge.to.is_empty()
                && edge.from.index() < world
                && edge.to.iter().all(|rank| rank.index() < world);
            if !has_reduction || !has_ranks || !self.has_size(edge) {
                return false;
            }
        }
        for (id, reduction) in self.reductions.iter().enumerate() {
            let tensors = reduction.kind.tensors();
            let are_whole = reduction.parts.iter().all(|own| own.len() == tensors)
                && reduction.results.iter().all(|own| own.len() == tensors);
            let ranks = reduction.parts.len();
            if ranks == 0 || reduction.results.len() != ranks || !are_whole {
                return false;
            }
            for edge in reduction.edges() {
                let Some(edge) = self.edges.get(edge.index()) else { return false };
                if edge.reduction != Some(ReductionId(id as u32)) {
                    return false;
                }
            }
        }
        true
    }

    /// Returns true if the values of an edge in flight have at most [`ELEMENTS_MAX`] elements.
    fn has_size(&self, edge: &Edge) -> bool {
        let factors = edge.shape.dims().iter().chain([&self.rows_max, &edge.in_flight]);
        let elements = factors.copied().try_fold(1_usize, usize::checked_mul);
        elements.is_some_and(|elements| elements <= ELEMENTS_MAX)
    }

    pub fn reduction(&self, id: ReductionId) -> &GroupReduction {
        &self.reductions[id.index()]
    }

    /// Maximum number of messages of edges that are in flight to a rank.
    pub(crate) fn messages_to(&self, rank: Rank) -> usize {
        self.in_use(|edge| {
            if edge.leads_to(rank) { edge.messages_max(self.rows_max, self.piece_max) } else { 0 }
        })
    }

    /// Returns the maximum number of messages of edges that a rank has read back and not sent.
    pub fn messages_from(&self, rank: Rank) -> usize {
        self.in_use(|edge| {
            if edge.from == rank { edge.messages_max(self.rows_max, self.piece_max) } else { 0 }
        })
    }

    /// Returns the maximum bytes of host memory that the values sent by a rank take until they are
    /// received.
    pub fn bytes_from(&self, rank: Rank) -> usize {
        let elements = self.in_use(|edge| {
            if edge.from == rank { edge.in_flight * edge.elements(self.rows_max) } else { 0 }
        });
        elements.saturating_mul(DType::F32.bytes())
    }

    /// Returns the sum of a count over the edges that may be in use at the same time: all edges
    /// between stages, and the edges of one all-reduce. Its micro-batches in flight cover the
    /// all-reduces that a rank begins before another rank has ended the previous one.
    fn in_use(&self, count: impl Fn(&Edge) -> usize) -> usize {
        let mut between_stages = 0;
        for edge in self.edges.iter() {
            if edge.reduction.is_none() {
                between_stages += count(edge);
            }
        }
        let mut most = 0;
        for reduction in self.reductions.iter() {
            let sum: usize = reduction.edges().map(|edge| count(self.edge(edge))).sum();
            most = most.max(sum);
        }
        between_stages + most
    }

    /// Returns the place of a piece on a device.
    pub fn place(&self, piece: &EdgePiece) -> Region {
        Region::Tensor {
            tensor: self.edge(piece.edge).tensor,
            micro_batch: piece.micro_batch,
            range: piece.range.clone(),
        }
    }
}

/// Treatment of a piece that has arrived.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Arrival {
    /// It is kept until the program receives it, or until it is reduced with others.
    Keep,
    /// It is written now, and then the event is reported, if it completes its tensor.
    Write(Option<Event>),
    /// It is the last one of an all-reduce that the program waits for.
    Reduce(ReductionId),
}

/// Progress of one tensor for one micro-batch on its receiver.
#[derive(Clone, Debug, Default)]
struct Incoming {
    /// Pieces that have arrived: the end of each by its start.
    arrived: BTreeMap<usize, usize>,
    /// Number of elements that arrived.
    elements: usize,
    /// Number of elements that the program waits for; `None` before its receive.
    awaited: Option<usize>,
}

impl Incoming {
    /// Pieces that have arrived, in order.
    fn pieces(&self, edge: EdgeId, micro_batch: usize) -> Vec<EdgePiece> {
        self.arrived
            .iter()
            .map(|(start, end)| EdgePiece { edge, micro_batch, range: *start..*end })
            .collect()
    }
}

/// Transfers of edges of one rank in a step.
#[derive(Debug)]
pub(super) struct EdgeTransfers {
    rank: Rank,
    layout: EdgeLayout,
    incoming: BTreeMap<(EdgeId, usize), Incoming>,
}

impl EdgeTransfers {
    /// Creates the transfers of a rank before its first step.
    pub fn new(rank: Rank, layout: EdgeLayout) -> Self {
        Self { rank, layout, incoming: BTreeMap::new() }
    }

    pub fn layout(&self) -> &EdgeLayout {
        &self.layout
    }

    /// Forgets what arrived in an earlier round.
    pub fn restart(&mut self) {
        self.incoming.clear();
    }

    /// Returns the pieces of a tensor that this rank sends.
    pub fn send(&self, edge: EdgeId, micro_batch: usize, rows: usize) -> Vec<EdgePiece> {
        let pieces = self.layout.edge(edge).pieces(rows, self.layout.piece_max);
        pieces.map(|range| EdgePiece { edge, micro_batch, range }).collect()
    }

    /// Begins to receive a tensor. Returns the pieces that have arrived before, which are to be
    /// written now, and the event if that is all.
    ///
    /// # Errors
    /// Returns [`StepError::UnexpectedPiece`] if more has arrived than the tensor has.
    pub fn receive(
        &mut self,
        edge: EdgeId,
        micro_batch: usize,
        rows: usize,
    ) -> Result<(Vec<EdgePiece>, Option<Event>), StepError> {
        let early = self.await_tensor(edge, micro_batch, rows)?.pieces(edge, micro_batch);
        Ok((early, self.over(edge, micro_batch)))
    }

    /// Begins to wait for a tensor of `rows`. Returns its pieces that have already arrived.
    ///
    /// # Errors
    /// Returns [`StepError::UnexpectedPiece`] if more has arrived than the tensor has.
    fn await_tensor(
        &mut self,
        edge: EdgeId,
        micro_batch: usize,
        rows: usize,
    ) -> Result<&Incoming, StepError> {
        let elements = self.layout.edge(edge).elements(rows);
        let incoming = self.incoming.entry((edge, micro_batch)).or_default();
        incoming.awaited = Some(elements);
        if let Some((start, end)) = incoming.arrived.iter().find(|(_, end)| **end > elements) {
            let piece = EdgePiece { edge, micro_batch, range: *start..*end };
            return Err(StepError::UnexpectedPiece { piece });
        }
        Ok(incoming)
    }

    /// Begins to wait for the parts of an all-reduce. Returns true if all have arrived.
    ///
    /// # Errors
    /// Returns [`StepError::UnexpectedPiece`] if more has arrived than a part has.
    pub fn all_reduce(
        &mut self,
        reduction: ReductionId,
        micro_batch: usize,
        rows: usize,
    ) -> Result<bool, StepError> {
        let edges: Vec<EdgeId> = self.layout.reduction(reduction).edges().collect();
        for edge in edges {
            self.await_tensor(edge, micro_batch, rows)?;
        }
        Ok(self.is_whole(reduction, micro_batch))
    }

    /// Returns true if all parts of an all-reduce that the program waits for have arrived.
    fn is_whole(&self, reduction: ReductionId, micro_batch: usize) -> bool {
        let mut edges = self.layout.reduction(reduction).edges();
        edges.all(|edge| {
            let incoming = self.incoming.get(&(edge, micro_batch));
            incoming.is_some_and(|incoming| incoming.awaited == Some(incoming.elements))
        })
    }

    /// Returns the pieces of the parts of an all-reduce, by rank of the group, then by tensor, each
    /// in order.
    pub fn parts(&self, reduction: ReductionId, micro_batch: usize) -> Vec<Vec<Vec<EdgePiece>>> {
        let mut parts = Vec::new();
        for edges in &self.layout.reduction(reduction).parts {
            let mut of_rank = Vec::with_capacity(edges.len());
            for &edge in edges {
                of_rank.push(match self.incoming.get(&(edge, micro_batch)) {
                    Some(incoming) => incoming.pieces(edge, micro_batch),
                    None => Vec::new(),
                });
            }
            parts.push(of_rank);
        }
        parts
    }

    /// Returns the place of this rank among those whose parts an all-reduce has; 0 if it has none.
    pub fn own_part(&self, reduction: ReductionId) -> usize {
        for (place, edges) in self.layout.reduction(reduction).parts.iter().enumerate() {
            if let Some(edge) = edges.first()
                && self.layout.edge(*edge).from == self.rank
            {
                return place;
            }
        }
        0
    }

    /// Processes a piece that has arrived, and returns its treatment.
    ///
    /// # Errors
    /// Returns [`StepError::UnexpectedPiece`] for a piece of an edge that does not lead to
    /// this rank, and for one that overlaps another or ends beyond the tensor.
    pub fn arrive(&mut self, piece: &EdgePiece) -> Result<Arrival, StepError> {
        let edge = match self.layout.edges.get(piece.edge.index()) {
            Some(edge) if edge.leads_to(self.rank) => edge,
            _ => return Err(StepError::UnexpectedPiece { piece: piece.clone() }),
        };
        let elements_max = edge.elements(self.layout.rows_max);
        let Range { start, end } = piece.range;
        let incoming = self.incoming.entry((piece.edge, piece.micro_batch)).or_default();
        let before = incoming.arrived.range(..end).next_back();
        let overlaps = before.is_some_and(|(_, other_end)| *other_end > start);
        let limit = incoming.awaited.unwrap_or(elements_max);
        if start >= end || end > limit || overlaps {
            return Err(StepError::UnexpectedPiece { piece: piece.clone() });
        }
        incoming.arrived.insert(start, end);
        incoming.elements += end - start;
        Ok(match edge.reduction {
            _ if incoming.awaited.is_none() => Arrival::Keep,
            None => Arrival::Write(self.over(piece.edge, piece.micro_batch)),
            Some(id) if self.is_whole(id, piece.micro_batch) => Arrival::Reduce(id),
            Some(_) => Arrival::Keep,
        })
    }

    /// Event of a tensor that has been received whole.
    fn over(&self, edge: EdgeId, micro_batch: usize) -> Option<Event> {
        let incoming = &self.incoming[&(edge, micro_batch)];
        if incoming.awaited != Some(incoming.elements) {
            return None;
        }
        Some(Event::Done(Token::receive(edge, micro_batch)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_core::{Shape, TensorId};
    use potluck_graph::Reduction;

    const EDGE: EdgeId = EdgeId(1);

    /// Two edges between two ranks; 3 elements per row, messages of 4 elements, up to 3 rows.
    fn transfers(rank: u32) -> EdgeTransfers {
        let edge = |from, to| Edge {
            tensor: TensorId(7),
            shape: Shape::batched(&[1, 3]),
            from: Rank(from),
            to: vec![Rank(to)],
            in_flight: 2,
            reduction: None,
        };
        let edges = vec![edge(1, 0), edge(0, 1)].into();
        let layout = EdgeLayout { edges, piece_max: 4, rows_max: 3, ..EdgeLayout::default() };
        EdgeTransfers::new(Rank(rank), layout)
    }

    /// Two all-reduces of the ranks 0 and 1, the second one of two tensors: 3 elements per row,
    /// messages of 4 elements, up to 3 rows.
    fn reducing(rank: u32) -> EdgeTransfers {
        let edge = |from, reduction| Edge {
            tensor: TensorId(7),
            shape: Shape::batched(&[1, 3]),
            from: Rank(from),
            to: vec![Rank(0), Rank(1)],
            in_flight: 2,
            reduction: Some(ReductionId(reduction)),
        };
        let edges = [(0, 0), (1, 0), (0, 1), (0, 1), (1, 1), (1, 1)];
        let edges = edges.map(|(from, reduction)| edge(from, reduction));
        let reductions = [
            GroupReduction {
                kind: Reduction::Sum,
                parts: vec![vec![EdgeId(0)], vec![EdgeId(1)]],
                results: vec![vec![TensorId(7)]; 2],
            },
            GroupReduction {
                kind: Reduction::CrossEntropy { classes: 4 },
                parts: vec![vec![EdgeId(2), EdgeId(3)], vec![EdgeId(4), EdgeId(5)]],
                results: vec![vec![TensorId(7); 2]; 2],
            },
        ];
        let (edges, reductions) = (Arc::from(edges), Arc::from(reductions));
        EdgeTransfers::new(Rank(rank), EdgeLayout { edges, reductions, piece_max: 4, rows_max: 3 })
    }

    fn piece(range: Range<usize>) -> EdgePiece {
        EdgePiece { edge: EDGE, micro_batch: 5, range }
    }

    fn done() -> Option<Event> {
        Some(Event::Done(Token::receive(EDGE, 5)))
    }

    #[test]
    fn a_tensor_is_cut_into_messages_of_the_rows_that_there_are() {
        let sent = transfers(0).send(EDGE, 5, 3);
        assert_eq!(sent, [piece(0..4), piece(4..8), piece(8..9)]);
        assert_eq!(transfers(0).send(EDGE, 5, 1), [piece(0..3)]);
        let layout = transfers(0).layout.clone();
        assert_eq!((layout.messages_to(Rank(1)), layout.messages_from(Rank(1))), (6, 6));
        assert_eq!(layout.bytes_from(Rank(0)), 2 * 9 * 4);
    }

    #[test]
    fn what_arrives_early_is_kept_until_the_program_receives_it() {
        let mut to = transfers(1);
        assert_eq!(to.arrive(&piece(4..8)), Ok(Arrival::Keep));
        assert_eq!(to.receive(EDGE, 5, 3), Ok((vec![piece(4..8)], None)));
        assert_eq!(to.arrive(&piece(8..9)), Ok(Arrival::Write(None)));
        assert_eq!(to.arrive(&piece(0..4)), Ok(Arrival::Write(done())));
        to.restart();
        assert_eq!(to.arrive(&piece(0..3)), Ok(Arrival::Keep));
        assert_eq!(to.receive(EDGE, 5, 1), Ok((vec![piece(0..3)], done())));
    }

    /// Both parts are kept, also while the program waits; the last piece of all ends the wait.
    #[test]
    fn parts_of_an_all_reduce_are_kept_until_all_have_arrived() {
        let of = |edge: u32, range| EdgePiece { edge: EdgeId(edge), micro_batch: 2, range };
        let mut transfers = reducing(1);
        assert_eq!(transfers.arrive(&of(0, 0..4)), Ok(Arrival::Keep));
        assert_eq!(transfers.all_reduce(ReductionId(0), 2, 2), Ok(false));
        assert_eq!(transfers.arrive(&of(1, 4..6)), Ok(Arrival::Keep));
        assert_eq!(transfers.arrive(&of(1, 0..4)), Ok(Arrival::Keep));
        assert_eq!(transfers.arrive(&of(0, 4..6)), Ok(Arrival::Reduce(ReductionId(0))));
        let parts = [0, 1].map(|edge| vec![vec![of(edge, 0..4), of(edge, 4..6)]]);
        assert_eq!(transfers.parts(ReductionId(0), 2), parts);
        assert_eq!(
            (transfers.own_part(ReductionId(0)), reducing(0).own_part(ReductionId(1))),
            (1, 0)
        );

        for edge in 2..6 {
            assert_eq!(transfers.arrive(&of(edge, 0..3)), Ok(Arrival::Keep));
        }
        assert_eq!(transfers.all_reduce(ReductionId(1), 2, 1), Ok(true));
        let longer = transfers.arrive(&of(5, 3..4)).unwrap_err();
        assert_eq!(longer, StepError::UnexpectedPiece { piece: of(5, 3..4) });
        let mut early = reducing(0);
        assert_eq!(early.arrive(&of(1, 4..8)), Ok(Arrival::Keep));
        let error = early.all_reduce(ReductionId(0), 2, 2).unwrap_err();
        assert_eq!(error, StepError::UnexpectedPiece { piece: of(1, 4..8) });
    }

    /// Of the larger of the two all-reduces: 3 messages for each tensor of a micro-batch, of two
    /// micro-batches, from each of two ranks.
    #[test]
    fn one_all_reduce_at_a_time_is_on_its_way() {
        let layout = reducing(0).layout.clone();
        assert_eq!((layout.messages_to(Rank(1)), layout.messages_from(Rank(1))), (24, 12));
        assert_eq!(layout.bytes_from(Rank(0)), 2 * 2 * 9 * 4);
        assert_eq!((layout.messages_to(Rank(2)), layout.bytes_from(Rank(2))), (0, 0));
    }

    #[test]
    fn damaged_layouts_are_not_sound() {
        type Edit = fn(&mut Vec<Edge>, &mut Vec<GroupReduction>);
        let sound = reducing(0).layout.clone();
        assert!(sound.is_sound(2) && !sound.is_sound(1));
        let edits: [Edit; 8] = [
            |edges, _| edges[0].reduction = Some(ReductionId(2)),
            |edges, _| edges[0].reduction = None,
            |edges, _| edges[0].to.clear(),
            |_, reductions| reductions[1].parts[0][0] = EdgeId(6),
            |_, reductions| reductions[0].parts.clear(),
            |_, reductions| reductions[1].parts[1].truncate(1),
            |edges, _| edges[0].in_flight = usize::MAX,
            |edges, _| edges[0].shape = Shape::batched(&[1 << 40, 1 << 40]),
        ];
        for (index, edit) in edits.into_iter().enumerate() {
            let (mut edges, mut reductions) = (sound.edges.to_vec(), sound.reductions.to_vec());
            edit(&mut edges, &mut reductions);
            let (edges, reductions) = (edges.into(), reductions.into());
            assert!(!EdgeLayout { edges, reductions, ..sound }.is_sound(2), "edit {index}");
        }
    }

    #[test]
    fn pieces_that_are_not_due_are_refused() {
        let refused = |piece| Err(StepError::UnexpectedPiece { piece });
        assert_eq!(transfers(0).arrive(&piece(0..4)), refused(piece(0..4)), "another rank's");
        let mut to = transfers(1);
        let unknown = EdgePiece { edge: EdgeId(2), ..piece(0..1) };
        assert_eq!(to.arrive(&unknown), refused(unknown.clone()));
        assert_eq!(to.arrive(&piece(8..12)), refused(piece(8..12)), "longer than the tensor");
        assert_eq!(to.arrive(&piece(4..4)), refused(piece(4..4)), "empty");
        assert_eq!(to.arrive(&piece(4..8)), Ok(Arrival::Keep));
        assert_eq!(to.arrive(&piece(7..9)), refused(piece(7..9)), "twice");
        assert_eq!(to.arrive(&piece(0..5)), refused(piece(0..5)), "twice");
        let error = to.receive(EDGE, 5, 2).unwrap_err();
        assert_eq!(error, StepError::UnexpectedPiece { piece: piece(4..8) }, "of more rows");
    }
}
