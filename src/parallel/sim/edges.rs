//! Tensors of edges between virtual ranks: read back from a device, sent by its ring thread, and
//! written to another device when the program there receives them.

use super::device::UploadTarget;
use super::memory::TensorOf;
use super::scenario::SeededBug;
use super::timeline::VirtualTrack;
use super::values::tensor_values;
use super::world::{Event, Simulation};
use crate::comm::SharedBuffer;
use crate::{Action, Event as StepEvent, Token};
use potluck_core::{DType, EdgeId, EdgePiece, Nanos, Rank, ReductionId, Round, TensorId};

impl Simulation<'_> {
    // ---- Memory ----

    /// Reads and writes the slots of the device as a load or a run does.
    pub(super) fn use_memory(&mut self, rank: Rank, action: &Action, micro_batch: usize) {
        let batch = self.tensor_of(rank, micro_batch, TensorId(0));
        let device = &mut self.virtual_ranks[rank.index()].device;
        let Some(memory) = &mut device.memory else { return };
        let used = match *action {
            Action::Run { segment, .. } => memory.run(segment, batch),
            _ => {
                memory.load(batch);
                Ok(())
            }
        };
        if let Err(why) = used {
            self.violations.push(format!("{rank}: {why}"));
        }
    }

    /// Returns a tensor of a micro-batch in a rank's current step.
    fn tensor_of(&self, rank: Rank, micro_batch: usize, tensor: TensorId) -> TensorOf {
        let virtual_rank = &self.virtual_ranks[rank.index()];
        let rows = virtual_rank.program.micro_batches[micro_batch].rows as usize;
        let step = virtual_rank.driver.transfers.round().step;
        TensorOf { step, micro_batch, rows, tensor }
    }

    /// Returns the values of a piece of a micro-batch, given the samples that a rank knows: in an
    /// all-reduce the values of the sender's part, and otherwise the values of the whole tensor.
    fn values_of(&self, rank: Rank, piece: &EdgePiece, micro_batch: usize) -> Vec<f32> {
        let Some(seed) = self.scenario.values else { return Vec::new() };
        let virtual_rank = &self.virtual_ranks[rank.index()];
        let step = virtual_rank.driver.transfers.round().step;
        let edge = self.scenario.edges.edge(piece.edge);
        let samples = virtual_rank.program.micro_batches[micro_batch];
        let part_of = edge.reduction.map(|_| edge.from);
        tensor_values(seed, step, edge.tensor, part_of, samples, piece.range.clone())
    }

    // ---- Sending ----

    /// Starts the readbacks of a tensor.
    pub(super) fn send_tensor(&mut self, rank: Rank, edge: EdgeId, micro_batch: usize) {
        let tensor = self.tensor_of(rank, micro_batch, self.scenario.edges.edge(edge).tensor);
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        let pieces = virtual_rank.driver.transfers.send(edge, micro_batch, tensor.rows);
        if let Some(memory) = &virtual_rank.device.memory
            && let Err(why) = memory.require(tensor)
        {
            self.violations.push(format!("{rank} sends {edge}: {why}"));
        }
        let batches = virtual_rank.program.micro_batches.len();
        let read = match self.scenario.seeded_bug {
            Some(SeededBug::SendsNextMicroBatch) => (micro_batch + 1) % batches,
            _ => micro_batch,
        };
        let now = self.queue.now();
        for piece in pieces {
            let values = self.values_of(rank, &piece, read);
            let place = self.scenario.edges.place(&piece);
            self.virtual_ranks[rank.index()].device.start_readback(now, place, values);
        }
        self.forward_readbacks(rank);
    }

    /// Sends a piece from a ring thread to the device threads of the ranks that its edge leads to.
    pub(super) fn send_piece(
        &mut self,
        from: Rank,
        message: &(Round, EdgePiece, SharedBuffer),
        at: Nanos,
    ) {
        let piece = &message.1;
        let edge = self.scenario.edges.edge(piece.edge);
        // The values are shared: they are kept until the last reader has taken them.
        self.in_flight[from.index()] += piece.range.len();
        self.unread.insert(piece.clone(), edge.to.len());
        let bytes = self.in_flight[from.index()] * DType::F32.bytes();
        let known = self.scenario.edges.bytes_from(from);
        if bytes > known {
            let violation = format!("{from} has {bytes} bytes on their way, of {known} at most");
            self.violations.push(violation);
        }
        for to in &edge.to {
            self.send_piece_to(from, *to, message.clone(), at);
        }
    }

    /// Records that one of its readers has taken a piece.
    fn count_reading(&mut self, piece: &EdgePiece) {
        let Some(readers) = self.unread.get_mut(piece) else { return };
        *readers -= 1;
        if *readers == 0 {
            self.unread.remove(piece);
            let from = self.scenario.edges.edge(piece.edge).from;
            self.in_flight[from.index()] -= piece.range.len();
        }
    }

    fn send_piece_to(
        &mut self,
        from: Rank,
        to: Rank,
        message: (Round, EdgePiece, SharedBuffer),
        at: Nanos,
    ) {
        let piece = &message.1;
        let elements = piece.range.len();
        self.pieces += 1;
        if self.scenario.seeded_bug == Some(SeededBug::LosesPiece(self.pieces)) {
            return;
        }
        let there = if to == from {
            at
        } else {
            self.pass_link(from, to, elements, at, || format!("{piece} to {to}"))
        };
        self.queue.push(there, Event::Piece { to, message, sent: (from, at) });
    }

    // ---- Receiving ----

    /// Begins to receive a tensor: writes the pieces that have arrived.
    pub(super) fn receive_tensor(&mut self, rank: Rank, edge: EdgeId, micro_batch: usize) {
        let rows = self.tensor_of(rank, micro_batch, TensorId(0)).rows;
        let token = Token::receive(edge, micro_batch);
        let driver = &mut self.virtual_ranks[rank.index()].driver;
        driver.waits_for = token.to_string();
        let (pieces, event) = match driver.transfers.receive(edge, micro_batch, rows) {
            Ok(received) => received,
            Err(error) => return self.violations.push(format!("{rank}: {error}")),
        };
        for piece in pieces {
            let kept = self.virtual_ranks[rank.index()].driver.kept.remove(&piece);
            match kept {
                Some(values) => self.write_piece(rank, &piece, &values),
                None => self.violations.push(format!("{rank} has not kept {piece}")),
            }
        }
        if self.scenario.seeded_bug == Some(SeededBug::ReceivesWithoutWaiting) {
            return self.report_event(rank, StepEvent::Done(token));
        }
        self.report_received(rank, event);
    }

    /// Begins an all-reduce: reduces the parts if all have arrived.
    pub(super) fn begin_all_reduce(
        &mut self,
        rank: Rank,
        reduction: ReductionId,
        micro_batch: usize,
    ) {
        let rows = self.tensor_of(rank, micro_batch, TensorId(0)).rows;
        let token = Token::all_reduce(reduction, micro_batch);
        let driver = &mut self.virtual_ranks[rank.index()].driver;
        driver.waits_for = token.to_string();
        match driver.transfers.all_reduce(reduction, micro_batch, rows) {
            Ok(true) => self.all_reduce(rank, reduction, micro_batch),
            Ok(false) if self.scenario.seeded_bug == Some(SeededBug::ReducesWithoutWaiting) => {
                self.all_reduce(rank, reduction, micro_batch);
            }
            Ok(false) => {}
            Err(error) => self.violations.push(format!("{rank}: {error}")),
        }
    }

    /// Checks that each part of an all-reduce has the values of its rank, and writes the result.
    pub(super) fn all_reduce(&mut self, rank: Rank, reduction: ReductionId, micro_batch: usize) {
        let token = Token::all_reduce(reduction, micro_batch);
        let parts = self.virtual_ranks[rank.index()].driver.transfers.parts(reduction, micro_batch);
        let mut parts_whole = true;
        for (of_rank, edges) in parts.iter().zip(&self.scenario.edges.reduction(reduction).parts) {
            for (pieces, edge) in of_rank.iter().zip(edges) {
                let edge = self.scenario.edges.edge(*edge);
                let rows = self.tensor_of(rank, micro_batch, edge.tensor).rows;
                let elements: usize = pieces.iter().map(|piece| piece.range.len()).sum();
                parts_whole &= elements == edge.elements(rows);
                for piece in pieces {
                    self.take_part(rank, piece);
                    if edge.from == rank {
                        self.write_reduced(rank, reduction, piece);
                    }
                }
            }
        }
        if !parts_whole {
            self.violations.push(format!("{rank} reduces before all of {token} has arrived"));
        }
        self.report_event(rank, StepEvent::Done(token));
    }

    /// Takes a kept piece of a part of an all-reduce.
    fn take_part(&mut self, rank: Rank, piece: &EdgePiece) {
        let kept = self.virtual_ranks[rank.index()].driver.kept.remove(piece);
        let Some(values) = kept else {
            return self.violations.push(format!("{rank} has not kept {piece}"));
        };
        if *values != self.values_of(rank, piece, piece.micro_batch)[..] {
            self.violations.push(format!("{rank} reduces other values than those of {piece}"));
        }
        self.count_reading(piece);
    }

    /// Writes the elements of a piece after they were reduced.
    fn write_reduced(&mut self, rank: Rank, reduction: ReductionId, piece: &EdgePiece) {
        let now = self.queue.now();
        let kind = self.scenario.edges.reduction(reduction).kind;
        let mut left = kind.expansion() * piece.range.len();
        while left > 0 {
            let elements = left.min(self.scenario.edges.piece_max);
            left -= elements;
            let device = &mut self.virtual_ranks[rank.index()].device;
            let span = device.write(now, UploadTarget::Tensors, elements);
            self.timeline.add(rank, VirtualTrack::Upload, span, || format!("reduced {piece}"));
        }
    }

    /// Reports that a tensor was received whole, if it was.
    pub(super) fn report_received(&mut self, rank: Rank, event: Option<StepEvent>) {
        let was_reported = self.scenario.seeded_bug == Some(SeededBug::ReceivesWithoutWaiting);
        if let Some(event) = event
            && !was_reported
        {
            self.report_event(rank, event);
        }
    }

    /// Writes a piece to the device.
    pub(super) fn write_piece(&mut self, rank: Rank, piece: &EdgePiece, values: &[f32]) {
        let edge = self.scenario.edges.edge(piece.edge);
        if values != self.values_of(rank, piece, piece.micro_batch) {
            self.violations.push(format!("{rank} receives other values than those of {piece}"));
        }
        self.count_reading(piece);
        let tensor = self.tensor_of(rank, piece.micro_batch, edge.tensor);
        let now = self.queue.now();
        let elements = piece.range.len();
        let device = &mut self.virtual_ranks[rank.index()].device;
        if let Some(memory) = &mut device.memory {
            memory.write_piece(tensor, elements);
        }
        let span = device.write(now, UploadTarget::Tensors, elements);
        self.timeline.add(rank, VirtualTrack::Upload, span, || piece.to_string());
    }

    // ---- Bounds ----

    /// Counts a piece in the mailbox of a ring thread.
    pub(super) fn count_piece_to_ring(&mut self, rank: Rank) {
        let pieces = &mut self.virtual_ranks[rank.index()].ring.pieces;
        *pieces += 1;
        let found = *pieces;
        let known = self.scenario.edges.messages_from(rank);
        self.check_pieces(rank, "ring thread", found, known);
    }

    /// Counts a piece in the mailbox of a device thread.
    pub(super) fn count_piece_to_driver(&mut self, rank: Rank) {
        let pieces = &mut self.virtual_ranks[rank.index()].driver.pieces;
        *pieces += 1;
        let found = *pieces;
        let known = self.scenario.edges.messages_to(rank);
        self.check_pieces(rank, "device thread", found, known);
    }

    /// Records a violation if a mailbox holds more pieces than its bound allows for. The bound of
    /// the whole mailbox could hide that, as messages of other kinds may be absent.
    fn check_pieces(&mut self, rank: Rank, thread: &str, found: usize, known: usize) {
        let missing = usize::from(self.scenario.seeded_bug == Some(SeededBug::FewerPieces));
        let known = known.saturating_sub(missing);
        if found > known {
            let violation = format!("the {thread} of {rank}: {found} pieces wait, of {known}");
            self.violations.push(violation);
        }
    }
}
