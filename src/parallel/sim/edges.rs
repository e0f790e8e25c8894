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
use potluck_core::{DType, EdgeId, EdgePiece, Nanos, Rank, Round, TensorId};

impl Simulation<'_> {
    // ---- Memory ----

    /// Writes what a load writes, or reads and writes what a run does, on the slots of the device.
    pub(super) fn use_memory(&mut self, rank: Rank, action: &Action, micro_batch: usize) {
        let whole = self.tensor_of(rank, micro_batch, TensorId(0));
        let device = &mut self.virtual_ranks[rank.index()].device;
        let Some(memory) = &mut device.memory else { return };
        let of = |tensor: TensorId| TensorOf { tensor, ..whole };
        let used = match *action {
            Action::Run { segment, .. } => memory.run(segment, of),
            _ => {
                memory.load(of);
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

    /// Returns the values of a piece of a micro-batch, as a rank knows its samples.
    fn values_of(&self, rank: Rank, piece: &EdgePiece, micro_batch: usize) -> Vec<f32> {
        let Some(seed) = self.scenario.values else { return Vec::new() };
        let virtual_rank = &self.virtual_ranks[rank.index()];
        let step = virtual_rank.driver.transfers.round().step;
        let tensor = self.scenario.edges.edge(piece.edge).tensor;
        let samples = virtual_rank.program.micro_batches[micro_batch];
        tensor_values(seed, step, tensor, samples, piece.range.clone())
    }

    // ---- Sending ----

    /// Starts the readbacks of a tensor.
    pub(super) fn send_tensor(&mut self, rank: Rank, edge: EdgeId, micro_batch: usize) {
        let tensor = self.tensor_of(rank, micro_batch, self.scenario.edges.edge(edge).tensor);
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        let pieces = virtual_rank.driver.transfers.send(edge, micro_batch, tensor.rows);
        let memory = virtual_rank.device.memory.as_ref();
        if let Some(Err(why)) = memory.map(|memory| memory.require(tensor)) {
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

    /// Sends a piece from a ring thread to the device thread of the rank that its edge leads to.
    pub(super) fn send_piece(
        &mut self,
        from: Rank,
        message: (Round, EdgePiece, SharedBuffer),
        at: Nanos,
    ) {
        let piece = &message.1;
        let (to, elements) = (self.scenario.edges.edge(piece.edge).to, piece.range.len());
        self.pieces += 1;
        if self.scenario.seeded_bug == Some(SeededBug::LosesPiece(self.pieces)) {
            return;
        }
        self.on_their_way[from.index()] += elements;
        let (bytes, known) = (
            self.on_their_way[from.index()] * DType::F32.bytes(),
            self.scenario.edges.bytes_from(from),
        );
        if bytes > known {
            let violation = format!("{from} has {bytes} bytes on their way, of {known} at most");
            self.violations.push(violation);
        }
        let there = self.pass_link((from, to), elements, at, || format!("{piece} to {to}"));
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

    /// Reports that a tensor was received whole, if it was.
    pub(super) fn report_received(&mut self, rank: Rank, event: Option<StepEvent>) {
        let was_reported = self.scenario.seeded_bug == Some(SeededBug::ReceivesWithoutWaiting);
        if let Some(event) = event.filter(|_| !was_reported) {
            self.report_event(rank, event);
        }
    }

    /// Writes a piece to the device.
    pub(super) fn write_piece(&mut self, rank: Rank, piece: &EdgePiece, values: &[f32]) {
        let edge = self.scenario.edges.edge(piece.edge);
        if values != self.values_of(rank, piece, piece.micro_batch) {
            self.violations.push(format!("{rank} receives other values than those of {piece}"));
        }
        self.on_their_way[edge.from.index()] -= piece.range.len();
        let tensor = self.tensor_of(rank, piece.micro_batch, edge.tensor);
        let (now, elements) = (self.queue.now(), piece.range.len());
        let device = &mut self.virtual_ranks[rank.index()].device;
        if let Some(memory) = &mut device.memory {
            memory.write_piece(tensor, elements);
        }
        let span = device.write(now, UploadTarget::Tensors, elements);
        self.timeline.add(rank, VirtualTrack::Upload, span, || piece.to_string());
    }

    // ---- Bounds ----

    /// Counts a piece that comes to the mailbox of a ring thread.
    pub(super) fn count_piece_to_ring(&mut self, rank: Rank) {
        let pieces = &mut self.virtual_ranks[rank.index()].ring.pieces;
        *pieces += 1;
        let (found, known) = (*pieces, self.scenario.edges.messages_from(rank));
        self.check_pieces(rank, "ring thread", found, known);
    }

    /// Counts a piece that comes to the mailbox of a device thread.
    pub(super) fn count_piece_to_driver(&mut self, rank: Rank) {
        let pieces = &mut self.virtual_ranks[rank.index()].driver.pieces;
        *pieces += 1;
        let (found, known) = (*pieces, self.scenario.edges.messages_to(rank));
        self.check_pieces(rank, "device thread", found, known);
    }

    /// Records a violation if a mailbox holds more pieces than it counts on. Its whole bound could
    /// hide that, as messages of other kinds are not there at the same time.
    fn check_pieces(&mut self, rank: Rank, thread: &str, found: usize, known: usize) {
        let missing = usize::from(self.scenario.seeded_bug == Some(SeededBug::FewerPieces));
        let known = known.saturating_sub(missing);
        if found > known {
            let violation = format!("the {thread} of {rank}: {found} pieces wait, of {known}");
            self.violations.push(violation);
        }
    }
}
