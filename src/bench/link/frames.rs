//! Frames of a benchmark on a link: one node asks and measures, the other answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use potluck_core::Lock;
use potluck_core::rng::Key;
use potluck_net::nodes::{NodeLink, ValueReceiver};
use potluck_net::{LinkStats, Payload, ReceiveBuffer, TAG_BYTES};
use potluck_parallel::comm::{Mailbox, RecvError};

/// Longest frame: as long as a chunk of gradients in a training run.
pub(crate) const FRAME_BYTES_MAX: usize = 1 << 20;
/// Most bytes of a transfer.
pub(crate) const TRANSFER_BYTES_MAX: usize = 64 << 20;
/// Bytes of the frames whose round trips are measured.
pub(crate) const PING_BYTES: usize = 64;
/// Most frames that wait: twice the frames of a transfer, and the frames without values.
const WAITING_MAX: usize = 2 * TRANSFER_BYTES_MAX / FRAME_BYTES_MAX + 256;
/// Longest wait for a frame of a node whose keep-alives arrive.
const FRAME_TIMEOUT: Duration = Duration::from_secs(120);
/// Time between two pings until the first answer: the other node drops frames until it is ready.
const READY_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FrameKind {
    /// Asks for a pong.
    Ping,
    /// Answers a ping, the end of a transfer, or the end.
    Pong,
    /// Values of a transfer, before the last frame.
    Part,
    /// Last values of a transfer.
    Last,
    /// Requests a transfer.
    Fetch,
    /// Ends the benchmark.
    End,
}

impl FrameKind {
    const ALL: [Self; 6] = [Self::Ping, Self::Pong, Self::Part, Self::Last, Self::Fetch, Self::End];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FrameTag {
    kind: FrameKind,
    /// Number of the question.
    number: u64,
    /// Bytes of the requested transfer.
    bytes: u64,
}

impl FrameTag {
    /// Returns the bytes of the tag: three little-endian words of eight bytes, the kind, the number
    /// and the bytes, and zeros.
    fn encode(&self) -> [u8; TAG_BYTES] {
        let mut encoded = [0; TAG_BYTES];
        // From 1, so that a ping before the other side is ready reads as a frame of a finished run:
        // it is dropped, and the link stays open.
        encoded[0] = self.kind as u8 + 1;
        encoded[8..16].copy_from_slice(&self.number.to_le_bytes());
        encoded[16..24].copy_from_slice(&self.bytes.to_le_bytes());
        encoded
    }

    fn decode(encoded: &[u8; TAG_BYTES]) -> Option<Self> {
        let kind = usize::try_from(word_at(encoded, 0)).ok()?.checked_sub(1)?;
        let kind = *FrameKind::ALL.get(kind)?;
        Some(Self { kind, number: word_at(encoded, 8), bytes: word_at(encoded, 16) })
    }
}

fn word_at(encoded: &[u8; TAG_BYTES], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&encoded[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Receiver of frames, which land in reused buffers.
struct FrameSink {
    came: Mailbox<FrameTag>,
    free: Arc<Lock<Vec<Vec<u8>>>>,
}

impl ValueReceiver for FrameSink {
    fn landing(
        &self,
        tag: &[u8; TAG_BYTES],
        bytes: usize,
    ) -> Result<Box<dyn ReceiveBuffer>, String> {
        let tag = FrameTag::decode(tag).ok_or("a frame of no kind")?;
        if bytes > FRAME_BYTES_MAX {
            return Err(format!("a frame of {bytes} bytes, over {FRAME_BYTES_MAX}"));
        }
        let free = self.free.lock().pop();
        let buffer = free.unwrap_or_else(|| vec![0; FRAME_BYTES_MAX]);
        Ok(Box::new(BenchFrameBuffer {
            tag,
            bytes,
            buffer,
            came: self.came.clone(),
            free: self.free.clone(),
        }))
    }

    fn closed(&self) {
        self.came.close("the link was closed");
    }
}

/// Place of the values of a frame.
struct BenchFrameBuffer {
    tag: FrameTag,
    bytes: usize,
    buffer: Vec<u8>,
    came: Mailbox<FrameTag>,
    free: Arc<Lock<Vec<Vec<u8>>>>,
}

impl ReceiveBuffer for BenchFrameBuffer {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[..self.bytes]
    }

    fn arrived(self: Box<Self>) -> Result<(), String> {
        let Self { tag, buffer, came, free, .. } = *self;
        free.lock().push(buffer);
        came.send(tag).map_err(|why| why.to_string())
    }
}

/// Sent values: noise, so that no compression on the way makes them shorter.
struct Noise {
    values: Arc<[u8]>,
    bytes: usize,
}

impl AsRef<[u8]> for Noise {
    fn as_ref(&self) -> &[u8] {
        &self.values[..self.bytes]
    }
}

/// End of a link. Errors are the reasons why the link cannot be measured further.
pub(crate) struct LinkEnd {
    link: Arc<NodeLink>,
    came: Mailbox<FrameTag>,
    noise: Arc<[u8]>,
    /// Number of the last question.
    number: u64,
}

impl LinkEnd {
    /// Receives all values from the link from now on.
    pub fn open(link: Arc<NodeLink>) -> Self {
        let came = Mailbox::new(WAITING_MAX);
        let free = Arc::default();
        link.receive_values_with(Arc::new(FrameSink { came: came.clone(), free }));
        let mut noise = Vec::with_capacity(FRAME_BYTES_MAX);
        for at in 0..FRAME_BYTES_MAX as u32 / 8 {
            for word in Key::new(7).words([at, 0]) {
                noise.extend(word.to_le_bytes());
            }
        }
        Self { link, came, noise: noise.into(), number: 0 }
    }

    // ---- The side that asks ----

    /// Waits until the other side answers.
    ///
    /// # Errors
    /// Returns an error if the link is closed or no answer comes.
    pub fn meet(&mut self) -> Result<(), String> {
        let until = Instant::now() + FRAME_TIMEOUT;
        while Instant::now() < until {
            self.ask(FrameKind::Ping, PING_BYTES)?;
            match self.came.recv(Some(Instant::now() + READY_INTERVAL)) {
                Ok(_) => return Ok(()),
                Err(RecvError::TimedOut) => {}
                Err(RecvError::Closed(why)) => return Err(why.to_string()),
            }
        }
        Err(silent())
    }

    /// Returns the seconds until a frame of [`PING_BYTES`] is answered by a frame of the same
    /// length.
    ///
    /// # Errors
    /// Returns an error if the link is closed or no answer comes.
    pub(crate) fn ping(&mut self) -> Result<f64, String> {
        let started = Instant::now();
        self.ask(FrameKind::Ping, PING_BYTES)?;
        self.wait_for(&[FrameKind::Pong])?;
        Ok(started.elapsed().as_secs_f64())
    }

    /// Sends bytes, requests bytes, or both concurrently; returns when all requested bytes have
    /// arrived and the other side has acknowledged all sent ones.
    ///
    /// # Errors
    /// Returns an error if the link is closed or an answer does not come.
    pub fn transfer(&mut self, [sends, receives]: [bool; 2], bytes: usize) -> Result<(), String> {
        self.number += 1;
        let mut awaited = Vec::new();
        if receives {
            self.post(FrameKind::Fetch, self.number, bytes as u64, 0)?;
            awaited.push(FrameKind::Last);
        }
        if sends {
            self.send_bytes(self.number, bytes)?;
            awaited.push(FrameKind::Pong);
        }
        self.wait_for(&awaited)
    }

    /// Returns the counters of QUIC for the link on this side.
    pub fn stats(&self) -> LinkStats {
        self.link.stats()
    }

    /// Ends the benchmark on both sides.
    ///
    /// # Errors
    /// Returns an error if the link is closed or no answer comes.
    pub fn finish(mut self) -> Result<(), String> {
        self.ask(FrameKind::End, 0)?;
        self.wait_for(&[FrameKind::Pong])
    }

    fn ask(&mut self, kind: FrameKind, bytes: usize) -> Result<(), String> {
        self.number += 1;
        self.post(kind, self.number, 0, bytes)
    }

    /// Waits for one frame of each of these kinds that answers the last question. Answers to
    /// earlier questions, and the parts of a transfer, are ignored.
    fn wait_for(&self, kinds: &[FrameKind]) -> Result<(), String> {
        let mut awaited = kinds.to_vec();
        while !awaited.is_empty() {
            let tag = self.take()?;
            awaited.retain(|kind| tag.number != self.number || *kind != tag.kind);
        }
        Ok(())
    }

    // ---- The side that answers ----

    /// Answers until the other side ends the benchmark.
    ///
    /// # Errors
    /// Returns an error if the link is closed, if no question comes for two minutes, or if a
    /// question is invalid.
    pub fn answer(self) -> Result<(), String> {
        loop {
            let FrameTag { kind, number, bytes } = self.take()?;
            match kind {
                FrameKind::Ping => self.post(FrameKind::Pong, number, 0, PING_BYTES)?,
                FrameKind::Part => {}
                FrameKind::Last => self.post(FrameKind::Pong, number, 0, 0)?,
                FrameKind::Fetch if bytes <= TRANSFER_BYTES_MAX as u64 => {
                    self.send_bytes(number, bytes as usize)?;
                }
                FrameKind::End => return self.post(FrameKind::Pong, number, 0, 0),
                FrameKind::Fetch | FrameKind::Pong => {
                    return Err("the other node asks for what there is not".into());
                }
            }
        }
    }

    // ---- Both ----

    fn take(&self) -> Result<FrameTag, String> {
        self.came.recv(Some(Instant::now() + FRAME_TIMEOUT)).map_err(|error| match error {
            RecvError::TimedOut => silent(),
            RecvError::Closed(why) => why.to_string(),
        })
    }

    fn send_bytes(&self, number: u64, bytes: usize) -> Result<(), String> {
        let mut left = bytes;
        while left > FRAME_BYTES_MAX {
            self.post(FrameKind::Part, number, 0, FRAME_BYTES_MAX)?;
            left -= FRAME_BYTES_MAX;
        }
        self.post(FrameKind::Last, number, 0, left)
    }

    fn post(&self, kind: FrameKind, number: u64, asked: u64, bytes: usize) -> Result<(), String> {
        let tag = FrameTag { kind, number, bytes: asked };
        let payload = Payload::new(Noise { values: self.noise.clone(), bytes });
        self.link.send_values(tag.encode(), payload).map_err(|why| why.to_string())
    }
}

fn silent() -> String {
    format!("the other node has sent no frame for {} s", FRAME_TIMEOUT.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_read_as_they_were_written() {
        for kind in FrameKind::ALL {
            let tag = FrameTag { kind, number: 7 << 40, bytes: 64 << 20 };
            assert_eq!(FrameTag::decode(&tag.encode()), Some(tag));
        }
        let mut encoded = FrameTag { kind: FrameKind::Ping, number: 1, bytes: 0 }.encode();
        for kind in [0, 7] {
            encoded[0] = kind;
            assert_eq!(FrameTag::decode(&encoded), None);
        }
        encoded[..2].copy_from_slice(&[0, 1]);
        assert_eq!(FrameTag::decode(&encoded), None);
    }

    #[test]
    fn what_is_asked_for_comes_and_what_there_is_not_ends_the_link() {
        let nodes = crate::link::testing::pair();
        let [first, mut other] = [0, 1].map(|at| nodes[at].open().unwrap());
        let answering = std::thread::spawn(move || first.answer());
        other.meet().unwrap();
        assert!(other.ping().unwrap() > 0.0);
        for ways in [[true, false], [false, true], [true, true]] {
            for bytes in [1, FRAME_BYTES_MAX, 2 * FRAME_BYTES_MAX + 5] {
                other.transfer(ways, bytes).unwrap();
            }
        }
        other.post(FrameKind::Fetch, 99, TRANSFER_BYTES_MAX as u64 + 1, 0).unwrap();
        let why = answering.join().unwrap().unwrap_err();
        assert_eq!(why, "the other node asks for what there is not");
    }

    #[test]
    fn who_asks_before_the_other_side_is_ready_is_answered_later() {
        let nodes = crate::link::testing::pair();
        let mut early = nodes[1].open().unwrap();
        let asking = std::thread::spawn(move || early.meet().map(|()| early));
        std::thread::sleep(10 * READY_INTERVAL);
        let late = nodes[0].open().unwrap();
        let answering = std::thread::spawn(move || late.answer());
        let mut early = asking.join().unwrap().unwrap();
        assert!(early.ping().unwrap() > 0.0);
        early.post(FrameKind::End, 100, 0, 0).unwrap();
        answering.join().unwrap().unwrap();
    }

    #[test]
    fn frames_that_are_too_long_or_too_many_are_refused() {
        let sink = FrameSink { came: Mailbox::new(2), free: Arc::default() };
        let tag = FrameTag { kind: FrameKind::Part, number: 1, bytes: 0 };
        let long = sink.landing(&tag.encode(), FRAME_BYTES_MAX + 1).map(drop);
        assert_eq!(long.unwrap_err(), "a frame of 1048577 bytes, over 1048576");
        let arrive = |bytes: usize| {
            let mut place = sink.landing(&tag.encode(), bytes).unwrap();
            assert_eq!(place.bytes_mut().len(), bytes);
            place.arrived()
        };
        assert_eq!((arrive(0), arrive(FRAME_BYTES_MAX)), (Ok(()), Ok(())));
        assert!(arrive(5).is_err());
    }
}
