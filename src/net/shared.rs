//! Part of a link that its tasks share: its queues, and its end.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use quinn::Connection;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::closing::close;
use super::endpoint_options::EndpointOptions;
use super::error::CloseReason;
use super::moderation::Moderation;
use super::send_queue::SendQueue;
use super::wire::{BlobHead, CloseCode, DataHead};
use potluck_core::Lock;

/// Part of a link that its tasks share.
pub struct Shared {
    pub connection: Connection,
    pub controls: SendQueue<Bytes>,
    pub payloads: SendQueue<(DataHead, Bytes)>,
    pub blobs: SendQueue<(BlobHead, Bytes)>,
    /// Set once the data stream of the peer is open; there is only one.
    pub(crate) has_data_stream: AtomicBool,
    /// Bytes of blobs that have arrived.
    pub(crate) blob_bytes: AtomicU64,
    /// Set once nothing more may be handed to the receiver.
    pub(super) is_broken: AtomicBool,
    pub(super) reason: Lock<Option<CloseReason>>,
    /// Sentence of a close that still sends the queues.
    pub(super) ending: OnceLock<String>,
    pub(super) options: EndpointOptions,
    pub(super) handle: Handle,
    pub(crate) moderation: Arc<Moderation>,
}

impl Shared {
    /// Closes the connection at once, with the first reason.
    pub fn stop(&self, why: CloseReason) {
        let mut reason = self.reason.lock();
        if reason.is_none() {
            let breaks = matches!(why, CloseReason::Violation(_) | CloseReason::Defect(_));
            self.is_broken.store(breaks, Ordering::SeqCst);
            let (code, text) = why.code();
            close(&self.connection, code, text);
            *reason = Some(why);
        }
    }

    /// Returns the idle timeout of the link: the shorter one of both sides.
    pub fn idle_timeout(&self) -> Duration {
        self.options.idle_timeout
    }

    /// Returns true once nothing more is handed to the receiver.
    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::SeqCst)
    }

    /// Closes the link when all queued messages have arrived, or after the timeout for that.
    pub fn end(&self, why: &str) {
        if self.ending.set(why.to_owned()).is_err() {
            return;
        }
        self.controls.end(why);
        self.payloads.end(why);
        self.blobs.end(why);
        let connection = self.connection.clone();
        let limit = self.options.flush_timeout;
        let why = why.to_owned();
        self.handle.spawn(async move {
            if timeout(limit, connection.closed()).await.is_err() {
                close(&connection, CloseCode::End, &why);
            }
        });
    }

    pub(super) fn close_queues(&self, why: &str) {
        self.controls.close(why);
        self.payloads.close(why);
        self.blobs.close(why);
    }
}

/// Closes the link when its task panics, for example in the code of the receiver.
pub(crate) struct PanicGuard(pub Arc<Shared>);

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop(CloseReason::Defect("a thread of the network panicked".into()));
        }
    }
}
