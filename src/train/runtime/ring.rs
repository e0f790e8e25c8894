//! Ring thread of a rank: receives the rank's own values and the messages of other ranks, adds
//! them, and sends the results. It waits only on one mailbox, and uses no device except for mapped
//! values.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use super::addresses::RankAddresses;
use super::messages::{DriverMsg, RankRingMsg};
use super::ring_work::RingWork;
use potluck_core::metrics::{Span, Track};
use potluck_core::{ChunkId, EdgePiece, Position, Rank, Round};
use potluck_kernels::device::panics::{PanicText, catch_quietly};
use potluck_kernels::exec::Readback;
use potluck_kernels::ops::norm;
use potluck_parallel::EdgeLayout;
use potluck_parallel::collective::{BucketGroups, Chunk, Collective, SEND_WINDOW, ShardLayout};
use potluck_parallel::comm::{
    BufferPool, Closed, HostWork, Mailbox, Message, PooledBuffer, RecvError, RingMsg, RingOutput,
    RingWorker, SharedBuffer,
};

/// Mailboxes and settings of a ring thread.
pub struct RingChannels {
    pub rank: Rank,
    /// Ranks of each bucket of the layout.
    pub groups: BucketGroups,
    pub layout: Arc<ShardLayout>,
    pub inbox: Mailbox<RankRingMsg>,
    pub driver: Mailbox<DriverMsg>,
    pub addresses: RankAddresses,
    /// Edges of the run to other ranks.
    pub edges: EdgeLayout,
    pub track: Track,
    /// Start of the device's addition in progress.
    pub(crate) adding_since: Option<Instant>,
    /// True if sums are sent to all ranks without an update in between (all-reduce).
    pub all_reduces: bool,
    /// Time in which the thread has handled messages.
    pub(crate) work: RingWork,
}

/// Starts a ring thread, which ends when its mailbox is closed; also returns its buffer pool.
pub fn start(channels: RingChannels) -> std::io::Result<(thread::JoinHandle<()>, BufferPool<f32>)> {
    let layout = channels.layout.clone();
    let positions = channels.groups.positions(channels.rank);
    let worker = RingWorker::new(layout, positions, SEND_WINDOW, channels.all_reduces);
    let pool = worker.pool().clone();
    let name = format!("ring of {}", channels.rank);
    let ending = CloseOnDrop {
        driver: channels.driver.clone(),
        ring: channels.inbox.clone(),
        why: String::new(),
    };
    let thread = thread::Builder::new().name(name).spawn(move || {
        let mut ending = ending;
        ending.why = reason_of_end(|| run(channels, worker));
    })?;
    Ok((thread, pool))
}

/// Guard that closes the mailboxes of the device thread and the ring thread at the end of the ring
/// thread. Without it the device thread could wait forever for a message, or for readback slots in
/// queued messages.
struct CloseOnDrop {
    driver: Mailbox<DriverMsg>,
    ring: Mailbox<RankRingMsg>,
    why: String,
}

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.driver.close(&self.why);
        self.ring.close(&self.why);
    }
}

/// Runs the loop of a ring thread and returns the reason of its end, or the text of its panic.
fn reason_of_end(run: impl FnOnce() -> Closed) -> String {
    let panic = PanicText::default();
    if let Some(why) = catch_quietly(&panic, || run().0) {
        return why;
    }
    let text = panic.get().map(|text| format!(" ({text})")).unwrap_or_default();
    format!("its ring thread panicked{text}, which is a defect of potluck")
}

fn run(mut channels: RingChannels, mut worker: RingWorker<Readback>) -> Closed {
    let inbox = channels.inbox.clone();
    loop {
        let message = match inbox.recv(None) {
            Ok(message) => message,
            Err(RecvError::Closed(closed)) => return closed,
            Err(RecvError::TimedOut) => continue,
        };
        let begun = Instant::now();
        if let RingMsg::Added { chunk, .. } = &message
            && let Some(since) = channels.adding_since.take()
        {
            channels.track.record_since(
                || format!("{} {}", HostWork::Add, channels.layout.chunk(*chunk)),
                since,
            );
        }
        if let Err(closed) = worker.handle(message, &mut channels) {
            return closed;
        }
        channels.work.add(begun.elapsed());
    }
}

impl RingOutput for RingChannels {
    type Error = Closed;
    type Span = Span;

    fn work(&mut self, work: HostWork, chunk: &Chunk) -> Span {
        self.track.span(|| format!("{work} {chunk}"))
    }

    fn send(&mut self, to: Position, message: Message) -> Result<(), Closed> {
        let to = self.groups.of(self.layout.chunk(message.chunk).bucket).rank(to);
        self.addresses[to.index()].send_message(to, message)
    }

    fn reduced(&mut self, round: Round, chunk: ChunkId, sum: SharedBuffer) -> Result<(), Closed> {
        // An all-reduce has no vote that needs these sums.
        let is_voted = !self.all_reduces;
        let (squares, not_finite) = if is_voted { norm::sum_of_squares(&sum) } else { (0.0, 0) };
        Ok(self.driver.send(DriverMsg::Reduced { round, chunk, sum, squares, not_finite })?)
    }

    fn gathered(
        &mut self,
        round: Round,
        chunk: ChunkId,
        values: SharedBuffer,
    ) -> Result<(), Closed> {
        Ok(self.driver.send(DriverMsg::Gathered { round, chunk, values })?)
    }

    fn add_on_device(
        &mut self,
        round: Round,
        chunk: ChunkId,
        partial: PooledBuffer,
    ) -> Result<(), Closed> {
        self.adding_since = Some(Instant::now());
        Ok(self.driver.send(DriverMsg::Add { round, chunk, partial })?)
    }

    fn copy(&mut self, piece: &EdgePiece) -> Span {
        self.track.span(|| format!("send {piece}"))
    }

    fn send_piece(
        &mut self,
        round: Round,
        piece: EdgePiece,
        values: SharedBuffer,
    ) -> Result<(), Closed> {
        for to in &self.edges.edge(piece.edge).to {
            let address = &self.addresses[to.index()];
            address.send_piece(*to, round, piece.clone(), values.clone())?;
        }
        Ok(())
    }

    fn done(&mut self, round: Round, collective: Collective) -> Result<(), Closed> {
        Ok(self.driver.send(DriverMsg::Done { round, collective })?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_thread_that_panics_ends_with_the_text_of_the_panic() {
        assert_eq!(reason_of_end(|| Closed("the run ended".into())), "the run ended");
        let why = reason_of_end(|| panic!("planted {}", 1));
        assert!(why.starts_with("its ring thread panicked (planted 1, at "), "{why}");
        assert!(why.ends_with("), which is a defect of potluck"), "{why}");
    }
}
