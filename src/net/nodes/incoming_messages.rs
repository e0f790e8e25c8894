//! Messages of a peer, in the order in which they were sent: whole ones, and long ones whose blobs
//! arrive by themselves, before or after their announcement. Bounds what a peer with a defect can
//! make this process keep.

use std::collections::{HashMap, VecDeque};

use crate::PAYLOAD_MAX;
use crate::transport::BLOBS_MAX;

/// Most bytes that are kept, unless [`IncomingMessages::allow`] allows more.
pub(crate) const BYTES_MAX: usize = PAYLOAD_MAX;
/// Most bytes of blobs whose announcement has not arrived. It is sent before them and first in
/// line, but it can be lost, and the blobs behind it arrive until it has been sent again.
const UNANNOUNCED_MAX: usize = BLOBS_MAX * PAYLOAD_MAX;
/// Largest number of blobs that are kept, and of messages that wait.
const BLOBS_KEPT_MAX: usize = 1024;
pub(super) const WAITING_MAX: usize = 4096;

/// Messages that are incomplete, or wait for earlier ones or for their receiver.
pub(super) struct IncomingMessages {
    waiting: VecDeque<WaitingMessage>,
    blobs: HashMap<u64, IncomingBlob>,
    /// Bytes of all messages and blobs, also of incomplete ones.
    kept: usize,
    /// Bytes of the blobs that are not announced.
    unannounced: usize,
    bytes_max: usize,
}

enum WaitingMessage {
    Whole(Vec<u8>),
    InBlobs { first: u64, count: u64 },
}

struct IncomingBlob {
    bytes: usize,
    is_announced: bool,
    /// `None` until it is complete.
    content: Option<Vec<u8>>,
}

impl Default for IncomingMessages {
    fn default() -> Self {
        Self {
            waiting: VecDeque::new(),
            blobs: HashMap::new(),
            kept: 0,
            unannounced: 0,
            bytes_max: BYTES_MAX,
        }
    }
}

impl IncomingMessages {
    /// Allows at least this many bytes, of all messages that the peer may be sending.
    pub fn allow(&mut self, bytes: usize) {
        self.bytes_max = self.bytes_max.max(bytes);
    }

    /// Takes a whole message.
    ///
    /// # Errors
    /// Returns the fault of a peer that sends more than may wait.
    pub fn add(&mut self, message: Vec<u8>) -> Result<(), String> {
        let bytes = message.len();
        self.require_room("a message", bytes)?;
        self.wait(WaitingMessage::Whole(message))?;
        self.kept += bytes;
        Ok(())
    }

    /// Checks the announcement of a message.
    ///
    /// # Errors
    /// Returns the fault of a message without blobs, or one that is too long.
    pub fn check(&self, first: u64, count: u64) -> Result<(), String> {
        let most = self.bytes_max.div_ceil(PAYLOAD_MAX).min(BLOBS_KEPT_MAX) as u64;
        let is_possible = (1..=most).contains(&count) && first.checked_add(count).is_some();
        if is_possible {
            Ok(())
        } else {
            Err(format!("a message of {count} blobs from {first} on"))
        }
    }

    /// Takes the announcement of a message in `count` blobs, numbered from `first` on.
    ///
    /// # Errors
    /// Returns the fault of [`IncomingMessages::check`], or of one message too many.
    pub fn announce(&mut self, first: u64, count: u64) -> Result<(), String> {
        self.check(first, count)?;
        self.wait(WaitingMessage::InBlobs { first, count })?;
        let announced = first..first + count;
        for (id, blob) in &mut self.blobs {
            if announced.contains(id) && !blob.is_announced {
                blob.is_announced = true;
                self.unannounced -= blob.bytes;
            }
        }
        Ok(())
    }

    fn require_room(&self, what: &str, bytes: usize) -> Result<(), String> {
        let Self { kept, bytes_max, .. } = self;
        if kept + bytes > *bytes_max {
            let why = format!("{what} of {bytes} bytes, beside {kept} of others; {bytes_max} ");
            return Err(why + "may arrive");
        }
        Ok(())
    }

    fn wait(&mut self, message: WaitingMessage) -> Result<(), String> {
        if self.waiting.len() >= WAITING_MAX {
            return Err(format!("more than {WAITING_MAX} messages wait"));
        }
        self.waiting.push_back(message);
        Ok(())
    }

    /// Agrees to a blob, before anything is allocated for it.
    ///
    /// # Errors
    /// Returns the fault of a blob that has begun already, or with which the peer sends more than
    /// it may.
    pub fn begin_blob(&mut self, id: u64, bytes: usize) -> Result<(), String> {
        if self.blobs.len() >= BLOBS_KEPT_MAX || self.blobs.contains_key(&id) {
            return Err(format!("blob {id} of {bytes} bytes is not due"));
        }
        self.require_room(&format!("blob {id}"), bytes)?;
        let is_announced = self.waiting.iter().any(|message| match message {
            WaitingMessage::Whole(_) => false,
            WaitingMessage::InBlobs { first, count } => (*first..first + count).contains(&id),
        });
        if !is_announced {
            if self.unannounced + bytes > UNANNOUNCED_MAX {
                return Err(format!("blob {id} of {bytes} bytes is not announced"));
            }
            self.unannounced += bytes;
        }
        self.kept += bytes;
        self.blobs.insert(id, IncomingBlob { bytes, is_announced, content: None });
        Ok(())
    }

    /// Takes a blob that has begun.
    pub fn end_blob(&mut self, id: u64, content: Vec<u8>) {
        if let Some(blob) = self.blobs.get_mut(&id) {
            blob.content = Some(content);
        }
    }

    /// Takes out the next message, if it is complete.
    pub fn next(&mut self) -> Option<Vec<u8>> {
        if let Some(WaitingMessage::InBlobs { first, count }) = self.waiting.front() {
            let mut ids = *first..first + count;
            let is_complete = |id| self.blobs.get(&id).is_some_and(|blob| blob.content.is_some());
            if !ids.all(is_complete) {
                return None;
            }
        }
        match self.waiting.pop_front()? {
            WaitingMessage::Whole(message) => {
                self.kept -= message.len();
                Some(message)
            }
            WaitingMessage::InBlobs { first, count } => {
                let mut message = self.take_blob(first);
                for id in first + 1..first + count {
                    message.extend_from_slice(&self.take_blob(id));
                }
                Some(message)
            }
        }
    }

    /// Takes out a complete, announced blob.
    fn take_blob(&mut self, id: u64) -> Vec<u8> {
        let Some(blob) = self.blobs.remove(&id) else { return Vec::new() };
        self.kept -= blob.bytes;
        blob.content.unwrap_or_default()
    }

    /// Returns the number of messages that wait.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send_blob(messages: &mut IncomingMessages, id: u64, content: &[u8]) {
        messages.begin_blob(id, content.len()).unwrap();
        messages.end_blob(id, content.to_vec());
    }

    #[test]
    fn messages_come_in_order_whatever_arrives_first() {
        let mut messages = IncomingMessages::default();
        messages.allow(3 * PAYLOAD_MAX);
        send_blob(&mut messages, 1, b"lo ");
        messages.announce(0, 3).unwrap();
        messages.add(b"whole".to_vec()).unwrap();
        messages.announce(3, 1).unwrap();
        send_blob(&mut messages, 3, b"last");
        send_blob(&mut messages, 2, b"you");
        assert_eq!(messages.next(), None, "its first blob is missing");
        messages.begin_blob(0, 3).unwrap();
        assert_eq!(messages.next(), None, "its first blob is incomplete");
        messages.end_blob(0, b"hel".to_vec());
        let all: Vec<_> = std::iter::from_fn(|| messages.next()).collect();
        assert_eq!(all, [&b"hello you"[..], b"whole", b"last"]);
        assert_eq!((messages.kept, messages.unannounced, messages.blobs.len()), (0, 0, 0));
    }

    #[test]
    fn blobs_without_an_announcement_are_bounded() {
        let mut messages = IncomingMessages::default();
        messages.allow(200 * PAYLOAD_MAX);
        for id in 0..4 {
            messages.begin_blob(id, PAYLOAD_MAX).unwrap();
        }
        assert_eq!(messages.begin_blob(4, 1).unwrap_err(), "blob 4 of 1 bytes is not announced");
        messages.announce(0, 1).unwrap();
        messages.begin_blob(4, PAYLOAD_MAX).unwrap();
        assert!(messages.begin_blob(5, 1).is_err());
        messages.announce(5, 100).unwrap();
        for id in 5..105 {
            messages.begin_blob(id, PAYLOAD_MAX).unwrap();
        }
        assert_eq!(messages.begin_blob(7, 1).unwrap_err(), "blob 7 of 1 bytes is not due");
    }

    #[test]
    fn what_a_peer_sends_at_once_is_limited() {
        let mut messages = IncomingMessages::default();
        assert!(messages.announce(0, 2).is_err());
        messages.allow(3 * PAYLOAD_MAX);
        messages.allow(PAYLOAD_MAX);
        assert_eq!(messages.announce(0, 4).unwrap_err(), "a message of 4 blobs from 0 on");
        messages.announce(0, 2).unwrap();
        messages.announce(2, 2).unwrap();
        for id in 0..3 {
            messages.begin_blob(id, PAYLOAD_MAX).unwrap();
        }
        let error = messages.begin_blob(3, 1).unwrap_err();
        assert_eq!(error, "blob 3 of 1 bytes, beside 201326592 of others; 201326592 may arrive");
        for id in 0..2 {
            messages.end_blob(id, vec![0; PAYLOAD_MAX]);
        }
        assert_eq!(messages.next().unwrap().len(), 2 * PAYLOAD_MAX);
        messages.begin_blob(3, PAYLOAD_MAX).unwrap();
        messages.add(vec![0; PAYLOAD_MAX]).unwrap();
        assert!(messages.add(vec![0]).is_err());
    }
}
