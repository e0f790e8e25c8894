//! File of a trace, written by a thread of its own, so that no thread that records events waits for
//! a disk: those of the network record what other nodes send, and keep all links alive.

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use potluck_core::Lock;
use potluck_core::metrics::TraceFile;

/// Largest number of bytes that wait for the disk; pieces beyond it are lost.
const QUEUED_MAX: usize = 64 << 20;
/// Longest wait at the end for a disk that takes nothing.
const DISK_MAX: Duration = Duration::from_secs(10);

/// File that a thread writes.
#[derive(Debug)]
pub(crate) struct QueuedTraceFile {
    pieces: Sender<Vec<u8>>,
    state: Arc<WriterState>,
    /// Disconnected when the thread has ended.
    end: Receiver<()>,
    /// True if pieces were not queued, because too much waited.
    has_lost: bool,
}

#[derive(Debug, Default)]
struct WriterState {
    /// Bytes that are not written yet.
    queued: AtomicUsize,
    /// First error of a write, after which nothing is written.
    failed: Lock<Option<io::Error>>,
}

impl QueuedTraceFile {
    /// Starts the thread.
    ///
    /// # Errors
    /// Returns the error of a system that has no thread left.
    pub fn start(file: File) -> io::Result<Self> {
        let (pieces, queue) = mpsc::channel();
        let (ended, end) = mpsc::channel::<()>();
        let state = Arc::new(WriterState::default());
        let writing = state.clone();
        thread::Builder::new().name("trace".into()).spawn(move || {
            writing.write(file, queue);
            drop(ended);
        })?;
        Ok(Self { pieces, state, end, has_lost: false })
    }

    fn queue(&self, piece: Vec<u8>) -> io::Result<()> {
        self.state.queued.fetch_add(piece.len(), Ordering::Relaxed);
        // A thread that has ended has left the error of its write.
        let _ = self.pieces.send(piece);
        self.state.result()
    }

    /// Bytes that wait for the disk.
    fn queued(&self) -> usize {
        self.state.queued.load(Ordering::Relaxed)
    }
}

/// Nothing but [`TraceFile::finish`] waits, and that not for a disk that has taken nothing for ten
/// seconds. A piece is lost if too much waits for the disk.
impl TraceFile for QueuedTraceFile {
    fn write(&mut self, piece: Vec<u8>) -> io::Result<()> {
        if self.queued() + piece.len() > QUEUED_MAX {
            self.has_lost = true;
            return self.state.result();
        }
        self.queue(piece)
    }

    fn has_lost(&self) -> bool {
        self.has_lost
    }

    fn finish(self: Box<Self>, last: Vec<u8>) -> io::Result<()> {
        self.queue(last)?;
        let Self { pieces, state, end, .. } = *self;
        drop(pieces);
        loop {
            let queued = state.queued.load(Ordering::Relaxed);
            match end.recv_timeout(DISK_MAX) {
                // Nothing is ever sent there.
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return state.result(),
                Err(RecvTimeoutError::Timeout) => {
                    if state.queued.load(Ordering::Relaxed) >= queued {
                        let why = format!("the disk has taken nothing for {DISK_MAX:?}");
                        return Err(io::Error::new(io::ErrorKind::TimedOut, why));
                    }
                }
            }
        }
    }
}

impl WriterState {
    fn write(&self, mut file: File, queue: Receiver<Vec<u8>>) {
        for piece in queue {
            if let Err(error) = file.write_all(&piece) {
                *self.failed.lock() = Some(error);
                return;
            }
            self.queued.fetch_sub(piece.len(), Ordering::Relaxed);
        }
    }

    fn result(&self) -> io::Result<()> {
        match self.failed.lock().take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::OwnedFd;

    /// A file that takes a few pieces of 64 KiB and then nothing until the other end is read, as a
    /// network file system that hangs.
    fn hanging() -> (Box<QueuedTraceFile>, io::PipeReader) {
        let (reader, writer) = io::pipe().unwrap();
        let file = QueuedTraceFile::start(File::from(OwnedFd::from(writer))).unwrap();
        (Box::new(file), reader)
    }

    fn read_all(mut reader: io::PipeReader) -> thread::JoinHandle<Vec<u8>> {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).unwrap();
            bytes
        })
    }

    #[test]
    fn a_disk_that_hangs_delays_nobody_and_gets_all_later() {
        let (mut file, reader) = hanging();
        for piece in 0..100u8 {
            file.write(vec![piece; 64 << 10]).unwrap();
        }
        let reading = read_all(reader);
        file.finish(vec![100]).unwrap();
        let bytes = reading.join().unwrap();
        assert_eq!(bytes.len(), (100 << 16) + 1);
        assert!(bytes.chunks(64 << 10).zip(0..).all(|(piece, n)| piece.iter().all(|b| *b == n)));
    }

    #[test]
    fn what_waits_for_a_disk_is_bounded_and_the_rest_is_lost() {
        let (mut file, reader) = hanging();
        let pieces = (QUEUED_MAX >> 20) + 3;
        for _ in 0..pieces {
            file.write(vec![0; 1 << 20]).unwrap();
        }
        assert_eq!((file.queued(), file.has_lost()), (QUEUED_MAX, true));
        let reading = read_all(reader);
        file.finish(vec![1]).unwrap();
        assert_eq!(reading.join().unwrap().len(), QUEUED_MAX + 1);
    }
}
