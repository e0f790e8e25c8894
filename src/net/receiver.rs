//! Receivers of the messages of a link.

use super::error::CloseReason;
use super::wire::TAG_BYTES;

/// Receiver of the messages of a link. Called on the threads of the network, which must not wait:
/// other links, and the packets that keep this one alive, wait with them. An error closes the link
/// with its sentence, which the peer gets.
pub trait Receiver: Send + Sync {
    /// Takes a control message; they arrive in the order in which they were sent.
    fn control(&self, message: Vec<u8>) -> Result<(), String>;

    /// Agrees to a blob, before anything is allocated for it.
    fn blob_begins(&self, id: u64, bytes: usize) -> Result<(), String>;

    /// Takes a blob whose hash was checked. Blobs overtake each other.
    fn blob(&self, id: u64, bytes: Vec<u8>) -> Result<(), String>;

    /// Returns the place for a payload, which must have exactly this length; payloads arrive in the
    /// order in which they were sent.
    fn data(&self, tag: &[u8; TAG_BYTES], bytes: usize) -> Result<Box<dyn ReceiveBuffer>, String>;

    /// Takes the end of the link: called once, after everything else.
    fn closed(&self, why: &CloseReason);
}

/// Place for a payload. It is dropped if the link ends before the payload is complete.
pub trait ReceiveBuffer: Send {
    fn bytes_mut(&mut self) -> &mut [u8];

    /// Takes the complete payload.
    fn arrived(self: Box<Self>) -> Result<(), String>;
}
