//! File of a trace, written by a thread of its own, so that no thread that records events waits for
//! a disk: those of the network record what other nodes send, and keep all links alive.

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use crate::Lock;

/// Largest number of bytes that wait for the disk; beyond it, the trace ends.
const QUEUED_MAX: usize = 64 << 20;

/// File being written.
#[derive(Debug)]
pub(super) struct TraceFile {
    pieces: Sender<Vec<u8>>,
    state: Arc<WriterState>,
    thread: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct WriterState {
    /// Bytes that are not written yet.
    queued: AtomicUsize,
    /// First error of a write, after which nothing is written.
    failed: Lock<Option<io::Error>>,
}

impl TraceFile {
    /// Starts the thread.
    ///
    /// # Errors
    /// Returns the error of a system that has no thread left.
    pub fn start(file: File) -> io::Result<Self> {
        let (pieces, queue) = channel();
        let state = Arc::new(WriterState::default());
        let writing = state.clone();
        let thread = thread::Builder::new()
            .name("trace".into())
            .spawn(move || writing.write(file, queue))?;
        Ok(Self { pieces, state, thread })
    }

    /// Queues a piece, without waiting.
    ///
    /// # Errors
    /// Returns the error of an earlier write, or that too much waits for the disk.
    pub fn write(&self, piece: Vec<u8>) -> io::Result<()> {
        let bytes = piece.len();
        if self.state.queued.fetch_add(bytes, Ordering::Relaxed) + bytes > QUEUED_MAX {
            let why = format!("the disk is too slow: {} MiB wait for it", QUEUED_MAX >> 20);
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        // A thread that has ended has left the error of its write.
        let _ = self.pieces.send(piece);
        self.state.result()
    }

    /// Waits until everything is written.
    ///
    /// # Errors
    /// Returns the error of a write.
    pub fn finish(self) -> io::Result<()> {
        drop(self.pieces);
        // The thread cannot panic: it only writes.
        let _ = self.thread.join();
        self.state.result()
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

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::OwnedFd;

    /// A file that takes a few pieces of 64 KiB and then nothing until the other end is read, as a
    /// network file system that hangs.
    fn hanging() -> (TraceFile, io::PipeReader) {
        let (reader, writer) = io::pipe().unwrap();
        (TraceFile::start(File::from(OwnedFd::from(writer))).unwrap(), reader)
    }

    #[test]
    fn a_disk_that_hangs_delays_nobody_and_gets_all_later() {
        let (file, mut reader) = hanging();
        for piece in 0..100u8 {
            file.write(vec![piece; 64 << 10]).unwrap();
        }
        let reading = thread::spawn(move || {
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).map(|_| bytes)
        });
        file.finish().unwrap();
        let bytes = reading.join().unwrap().unwrap();
        assert_eq!(bytes.len(), 100 << 16);
        assert!(bytes.chunks(64 << 10).zip(0..).all(|(piece, n)| piece.iter().all(|b| *b == n)));
    }

    #[test]
    fn what_waits_for_a_disk_is_bounded() {
        let (file, _reader) = hanging();
        let queued = (0..).find_map(|count| file.write(vec![0; 1 << 20]).err().map(|e| (count, e)));
        let (count, error) = queued.unwrap();
        assert_eq!(count, QUEUED_MAX >> 20);
        assert_eq!(error.to_string(), "the disk is too slow: 64 MiB wait for it");
    }
}
