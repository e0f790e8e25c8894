//! Tasks that write the queues of a link to its streams. Each ends when its queue has ended and the
//! peer has acknowledged all of it, or when the connection is over.

use std::sync::Arc;

use bytes::Bytes;
use quinn::{SendStream, WriteError};
use tokio::task::JoinSet;

use super::error::CloseReason;
use super::shared::{PanicGuard, Shared};
use super::transport::{BLOB_PRIORITY, BLOBS_MAX};
use super::wire::{self, BlobHead, StreamKind};

/// Writes chunks without copying them.
async fn write(stream: &mut SendStream, head: Bytes, body: Bytes) -> Result<(), WriteError> {
    // An empty chunk would count as a full stream.
    let chunks = &mut [head, body];
    let count = if chunks[1].is_empty() { 1 } else { 2 };
    stream.write_all_chunks(&mut chunks[..count]).await
}

/// Ends a stream; returns when the peer has all of it.
async fn finish(stream: &mut SendStream) {
    if stream.finish().is_ok() {
        // An error is the end of the connection, which has its own reason.
        let _ = stream.stopped().await;
    }
}

/// Ends a writer: all errors but the end of the connection are a violation by the peer.
fn end(shared: &Shared, result: Result<(), WriteError>) {
    match result {
        Ok(()) | Err(WriteError::ConnectionLost(_)) => {}
        Err(other) => shared.stop(CloseReason::Violation(format!("it takes no stream: {other}"))),
    }
}

/// Writes the control messages.
pub(crate) async fn write_controls(shared: Arc<Shared>, mut stream: SendStream) {
    let _guard = PanicGuard(shared.clone());
    let result = async {
        while let Some(message) = shared.controls.take().await {
            let head = Bytes::copy_from_slice(&wire::control_head(message.len()));
            write(&mut stream, head, message).await?;
        }
        finish(&mut stream).await;
        Ok(())
    };
    let result = result.await;
    end(&shared, result);
}

pub(crate) async fn write_payloads(shared: Arc<Shared>) {
    let _guard = PanicGuard(shared.clone());
    let result = async {
        // Opened before any blob, so that blobs cannot take its place.
        let mut stream = shared.connection.open_uni().await?;
        stream.write_all(&[StreamKind::Data as u8]).await?;
        while let Some((head, payload)) = shared.payloads.take().await {
            write(&mut stream, Bytes::copy_from_slice(&head.encode()), payload).await?;
        }
        finish(&mut stream).await;
        Ok(())
    };
    let result = result.await;
    end(&shared, result);
}

/// Writes the blobs, at most [`BLOBS_MAX`] concurrently.
pub(crate) async fn write_blobs(shared: Arc<Shared>) {
    let mut open = JoinSet::new();
    while let Some((head, blob)) = shared.blobs.take().await {
        while open.len() >= BLOBS_MAX {
            open.join_next().await;
        }
        open.spawn(write_blob(shared.clone(), head, blob));
    }
    while open.join_next().await.is_some() {}
}

async fn write_blob(shared: Arc<Shared>, head: BlobHead, blob: Bytes) {
    let _guard = PanicGuard(shared.clone());
    let result = async {
        let mut stream = shared.connection.open_uni().await?;
        // It fails only for a stream that has ended.
        let _ = stream.set_priority(BLOB_PRIORITY);
        let head = [&[StreamKind::Blob as u8][..], &head.encode()].concat();
        write(&mut stream, Bytes::from(head), blob).await?;
        finish(&mut stream).await;
        Ok(())
    };
    let result = result.await;
    end(&shared, result);
}
