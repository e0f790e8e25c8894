//! State machine of the tensors that one rank sends and receives: which pieces are read back, which
//! have arrived, and which are written. It holds no values.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::{Edge, Event, StepError, Token};
use potluck_core::{DType, EdgeId, EdgePiece, Rank};
use potluck_graph::Place;

/// Edges of a run as its ranks see them.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct EdgeLayout {
    /// All edges of the run; [`EdgeId`] indexes them.
    pub edges: Arc<[Edge]>,
    /// The most elements of a message.
    pub piece_max: usize,
    /// The most rows of a micro-batch.
    pub rows_max: usize,
}

impl EdgeLayout {
    pub fn edge(&self, id: EdgeId) -> &Edge {
        &self.edges[id.index()]
    }

    /// Returns the most messages of edges that are on their way to a rank at a time.
    pub(crate) fn messages_to(&self, rank: Rank) -> usize {
        let incoming = self.edges.iter().filter(|edge| edge.to == rank);
        incoming.map(|edge| edge.messages_max(self.rows_max, self.piece_max)).sum()
    }

    /// Returns the most messages of edges that a rank has read back and not sent at a time.
    pub fn messages_from(&self, rank: Rank) -> usize {
        let outgoing = self.edges.iter().filter(|edge| edge.from == rank);
        outgoing.map(|edge| edge.messages_max(self.rows_max, self.piece_max)).sum()
    }

    /// Returns the most bytes of host memory that the values sent by a rank take at a time, until
    /// they are received.
    pub fn bytes_from(&self, rank: Rank) -> usize {
        let outgoing = self.edges.iter().filter(|edge| edge.from == rank);
        let elements = outgoing.map(|edge| edge.in_flight * edge.elements(self.rows_max));
        elements.sum::<usize>().saturating_mul(DType::F32.bytes())
    }

    /// Returns the place of a piece on a device.
    pub fn place(&self, piece: &EdgePiece) -> Place {
        let (tensor, micro_batch) = (self.edge(piece.edge).tensor, piece.micro_batch);
        Place::Tensor { tensor, micro_batch, range: piece.range.clone() }
    }
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
        let elements = self.layout.edge(edge).elements(rows);
        let incoming = self.incoming.entry((edge, micro_batch)).or_default();
        incoming.awaited = Some(elements);
        let piece =
            |(start, end): (&usize, &usize)| EdgePiece { edge, micro_batch, range: *start..*end };
        let early: Vec<EdgePiece> = incoming.arrived.iter().map(piece).collect();
        if let Some(outside) = early.iter().find(|piece| piece.range.end > elements) {
            return Err(StepError::UnexpectedPiece { piece: outside.clone() });
        }
        Ok((early, self.over(edge, micro_batch)))
    }

    /// Processes a piece that has arrived. Returns true if it is to be written now, and the event
    /// if that is all; a piece that is not to be written is kept until the program receives it.
    ///
    /// # Errors
    /// Returns [`StepError::UnexpectedPiece`] for a piece of an edge that does not lead to this
    /// rank, and for one that overlaps another or ends behind the tensor.
    pub fn arrive(&mut self, piece: &EdgePiece) -> Result<(bool, Option<Event>), StepError> {
        let unexpected = || StepError::UnexpectedPiece { piece: piece.clone() };
        let edge = self.layout.edges.get(piece.edge.index()).filter(|edge| edge.to == self.rank);
        let elements_max = edge.ok_or_else(unexpected)?.elements(self.layout.rows_max);
        let Range { start, end } = piece.range;
        let incoming = self.incoming.entry((piece.edge, piece.micro_batch)).or_default();
        let before = incoming.arrived.range(..end).next_back();
        let overlaps = before.is_some_and(|(_, other_end)| *other_end > start);
        let limit = incoming.awaited.unwrap_or(elements_max);
        if start >= end || end > limit || overlaps {
            return Err(unexpected());
        }
        incoming.arrived.insert(start, end);
        incoming.elements += end - start;
        let is_awaited = incoming.awaited.is_some();
        Ok((is_awaited, self.over(piece.edge, piece.micro_batch)))
    }

    /// Returns the event of a tensor that has been received whole.
    fn over(&self, edge: EdgeId, micro_batch: usize) -> Option<Event> {
        let incoming = &self.incoming[&(edge, micro_batch)];
        let is_over = incoming.awaited == Some(incoming.elements);
        is_over.then(|| Event::Done(Token::receive(edge, micro_batch)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_core::{Shape, TensorId};

    const EDGE: EdgeId = EdgeId(1);

    /// Two edges between two ranks; 3 elements per row, messages of 4 elements, up to 3 rows.
    fn transfers(rank: u32) -> EdgeTransfers {
        let edge = |from, to| Edge {
            tensor: TensorId(7),
            shape: Shape::batched(&[1, 3]),
            from: Rank(from),
            to: Rank(to),
            in_flight: 2,
        };
        let edges = vec![edge(1, 0), edge(0, 1)].into();
        EdgeTransfers::new(Rank(rank), EdgeLayout { edges, piece_max: 4, rows_max: 3 })
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
        assert_eq!(to.arrive(&piece(4..8)), Ok((false, None)));
        assert_eq!(to.receive(EDGE, 5, 3), Ok((vec![piece(4..8)], None)));
        assert_eq!(to.arrive(&piece(8..9)), Ok((true, None)));
        assert_eq!(to.arrive(&piece(0..4)), Ok((true, done())));
        to.restart();
        assert_eq!(to.arrive(&piece(0..3)), Ok((false, None)));
        assert_eq!(to.receive(EDGE, 5, 1), Ok((vec![piece(0..3)], done())));
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
        assert_eq!(to.arrive(&piece(4..8)), Ok((false, None)));
        assert_eq!(to.arrive(&piece(7..9)), refused(piece(7..9)), "twice");
        assert_eq!(to.arrive(&piece(0..5)), refused(piece(0..5)), "twice");
        let error = to.receive(EDGE, 5, 2).unwrap_err();
        assert_eq!(error, StepError::UnexpectedPiece { piece: piece(4..8) }, "of more rows");
    }
}
