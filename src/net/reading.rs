//! Tasks that read the streams of a peer. A length is checked before it is allocated; for payloads
//! and blobs, the receiver must also have agreed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use quinn::{ReadError, RecvStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::error::CloseReason;
use super::receiver::Receiver;
use super::shared::{PanicGuard, Shared};
use super::wire::{
    self, BLOB_HEAD_BYTES, BlobHead, CONTROL_HEAD_BYTES, DATA_HEAD_BYTES, DataHead, StreamKind,
};

/// Bytes of a message that are read at a time.
const PART_BYTES: usize = 32 << 10;

/// Reason to stop reading.
#[derive(Debug, PartialEq, Eq)]
pub enum Stop {
    /// The peer sent something that is not due, with the sentence.
    Violation(String),
    /// The connection is over.
    Ended,
}

impl From<ReadError> for Stop {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::ConnectionLost(_) => Self::Ended,
            other => Self::Violation(format!("a stream ended wrongly: {other}")),
        }
    }
}

/// Longest wait for the next bytes of a message.
#[derive(Clone, Copy)]
pub(crate) struct Stall<'a> {
    limit: Duration,
    /// Bytes of blobs so far, for a payload, which blobs overtake: it waits while they arrive.
    blob_bytes: Option<&'a AtomicU64>,
}

impl Stall<'_> {
    fn overtaking_bytes(self) -> u64 {
        self.blob_bytes.map_or(0, |bytes| bytes.load(Ordering::Relaxed))
    }
}

impl From<Duration> for Stall<'_> {
    fn from(limit: Duration) -> Self {
        Self { limit, blob_bytes: None }
    }
}

/// Reads until the buffer is full; with `stall`, its bytes must not pause for longer.
pub(crate) async fn read_full(
    stream: &mut RecvStream,
    buffer: &mut [u8],
    stall: Option<Stall<'_>>,
) -> Result<(), Stop> {
    let mut filled = 0;
    while filled < buffer.len() {
        let read = stream.read(&mut buffer[filled..]);
        let read = match stall {
            None => read.await,
            Some(stall) => {
                let overtaking = stall.overtaking_bytes();
                match timeout(stall.limit, read).await {
                    Ok(read) => read,
                    Err(_) if stall.overtaking_bytes() != overtaking => continue,
                    Err(_) => return Err(stalled(stall.limit)),
                }
            }
        };
        let Some(read) = read? else {
            return Err(Stop::Violation("a stream ended before what it announced".into()));
        };
        filled += read;
    }
    Ok(())
}

fn stalled(limit: Duration) -> Stop {
    let seconds = limit.as_secs_f32();
    Stop::Violation(format!("a stream stopped for {seconds} s before what it announced"))
}

/// Reads a head, which may begin at any time, but must then arrive without a pause. Returns false
/// at the end of the stream.
async fn read_head(
    stream: &mut RecvStream,
    head: &mut [u8],
    stall: Stall<'_>,
) -> Result<bool, Stop> {
    let Some(first) = stream.read(head).await? else { return Ok(false) };
    read_full(stream, &mut head[first..], Some(stall)).await?;
    Ok(true)
}

/// Ends a reader: a violation closes the link.
fn finish(shared: &Shared, result: Result<(), Stop>) {
    if let Err(Stop::Violation(why)) = result {
        shared.stop(CloseReason::Violation(why));
    }
}

/// Reads the control messages of a link.
pub(crate) async fn read_controls(
    shared: Arc<Shared>,
    receiver: Arc<dyn Receiver>,
    stream: RecvStream,
) {
    let _guard = PanicGuard(shared.clone());
    finish(&shared, controls(&shared, &*receiver, stream).await);
}

async fn controls(
    shared: &Shared,
    receiver: &dyn Receiver,
    mut stream: RecvStream,
) -> Result<(), Stop> {
    let mut head = [0; CONTROL_HEAD_BYTES];
    while read_head(&mut stream, &mut head, shared.idle_timeout().into()).await? {
        let mut message = vec![0; wire::control_length(&head).map_err(Stop::Violation)?];
        if message.is_empty() {
            // A probe: its arrival is all that it has to tell. A peer that sends only such must not
            // keep the thread.
            tokio::task::consume_budget().await;
            continue;
        }
        read_full(&mut stream, &mut message, Some(shared.idle_timeout().into())).await?;
        go_on(shared)?;
        receiver.control(message).map_err(Stop::Violation)?;
    }
    Ok(())
}

/// Returns an error once nothing more may be handed to the receiver.
fn go_on(shared: &Shared) -> Result<(), Stop> {
    if shared.is_broken() { Err(Stop::Ended) } else { Ok(()) }
}

/// Reads all other streams of a link. The transport bounds how many there are.
pub(crate) async fn read_streams(shared: Arc<Shared>, receiver: Arc<dyn Receiver>) {
    let mut streams = JoinSet::new();
    while let Ok(stream) = shared.connection.accept_uni().await {
        while streams.try_join_next().is_some() {}
        streams.spawn(read_stream(shared.clone(), receiver.clone(), stream));
    }
    while streams.join_next().await.is_some() {}
}

async fn read_stream(shared: Arc<Shared>, receiver: Arc<dyn Receiver>, mut stream: RecvStream) {
    let _guard = PanicGuard(shared.clone());
    let result = async {
        let mut kind = [0];
        read_full(&mut stream, &mut kind, Some(shared.idle_timeout().into())).await?;
        match StreamKind::decode(kind[0]).map_err(Stop::Violation)? {
            StreamKind::Data => payloads(&shared, &*receiver, &mut stream).await,
            StreamKind::Blob => blob(&shared, &*receiver, &mut stream).await,
        }
    };
    let result = result.await;
    finish(&shared, result);
}

async fn payloads(
    shared: &Shared,
    receiver: &dyn Receiver,
    stream: &mut RecvStream,
) -> Result<(), Stop> {
    if shared.has_data_stream.swap(true, Ordering::SeqCst) {
        return Err(Stop::Violation("a second stream of payloads was opened".into()));
    }
    let stall = Stall { limit: shared.idle_timeout(), blob_bytes: Some(&shared.blob_bytes) };
    let mut head = [0; DATA_HEAD_BYTES];
    while read_head(stream, &mut head, stall).await? {
        let DataHead { tag, bytes } = DataHead::decode(&head).map_err(Stop::Violation)?;
        go_on(shared)?;
        let mut landing = receiver.data(&tag, bytes).map_err(Stop::Violation)?;
        let place = landing.bytes_mut();
        if place.len() != bytes {
            let due = place.len();
            let why = format!("a payload has {bytes} bytes, and {due} are due");
            return Err(Stop::Violation(why));
        }
        let mut arriving = shared.moderation.announce(bytes);
        for part in place.chunks_mut(PART_BYTES) {
            read_full(stream, part, Some(stall)).await?;
            arriving.arrived(part.len());
        }
        go_on(shared)?;
        landing.arrived().map_err(Stop::Violation)?;
    }
    Ok(())
}

async fn blob(
    shared: &Shared,
    receiver: &dyn Receiver,
    stream: &mut RecvStream,
) -> Result<(), Stop> {
    let mut head = [0; BLOB_HEAD_BYTES];
    read_full(stream, &mut head, Some(shared.idle_timeout().into())).await?;
    let BlobHead { id, bytes, hash } = BlobHead::decode(&head).map_err(Stop::Violation)?;
    go_on(shared)?;
    receiver.blob_begins(id, bytes).map_err(Stop::Violation)?;
    let mut blob = vec![0; bytes];
    let mut hasher = blake3::Hasher::new();
    let mut arriving = shared.moderation.announce(bytes);
    // In parts, so that the hash is computed while the rest arrives.
    for part in blob.chunks_mut(PART_BYTES) {
        read_full(stream, part, Some(shared.idle_timeout().into())).await?;
        arriving.arrived(part.len());
        shared.blob_bytes.fetch_add(part.len() as u64, Ordering::Relaxed);
        hasher.update(part);
    }
    if stream.read(&mut [0]).await?.is_some() {
        return Err(Stop::Violation(format!("blob {id} is longer than its {bytes} bytes")));
    }
    if hasher.finalize() != blake3::Hash::from_bytes(hash) {
        return Err(Stop::Violation(format!("blob {id} does not match its hash")));
    }
    go_on(shared)?;
    receiver.blob(id, blob).map_err(Stop::Violation)
}
