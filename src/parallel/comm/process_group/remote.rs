//! Groups over several processes: their handles, and the receiver of packets from other processes.
//! Links are the caller's: this module handles bytes only.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::connection::PeerChannels;
use super::limits::CHUNK_BYTES;
use super::packet::Packet;
use super::payload::Payload;
use super::registry::GroupRegistry;
use super::remote_process::RemoteProcess;
use super::wire::{PACKET_HEADER_BYTES, PacketContent, PacketHeader, REASON_BYTES_MAX};
use crate::collective::RankGroup;
use crate::comm::ProcessGroup;

/// Maximum number of ranks over all processes.
const RANKS_MAX: u32 = u16::MAX as u32;

/// Creates the handles of this process on a group of ranks in several processes, in order of
/// ranks, and the receiver of packets from the links. The ranks of this process and of `others`
/// together are `0..world`. No call may be made before the receivers of all processes are in
/// place. `keep` is dropped with the last handle on this group and its subgroups.
///
/// # Panics
///
/// Panics if the ranks have a gap or overlap, if this process has none, or if there are more than
/// 65,535.
pub fn init_over(
    own: Range<u32>,
    others: Vec<RemoteProcess>,
    deadline: Duration,
    keep: Arc<dyn Any + Send + Sync>,
) -> (Vec<ProcessGroup>, PacketReceiver) {
    let mut all: Vec<&Range<u32>> = others.iter().map(|of| &of.ranks).collect();
    all.push(&own);
    all.sort_by_key(|ranks| ranks.start);
    let mut world = 0;
    for ranks in all {
        let is_next = ranks.start == world && !ranks.is_empty();
        assert!(is_next, "ranks {ranks:?} where {world} is next");
        world = ranks.end;
    }
    assert!(world <= RANKS_MAX && !own.is_empty(), "{world} ranks, and {own:?} of them here");
    let registry = Arc::new(GroupRegistry::over(others.into_iter().map(Arc::new).collect()));
    let receiver = PacketReceiver(Arc::downgrade(&registry));
    let members = RankGroup::all(world);
    let handles = PeerChannels::first(&registry, &members, own, deadline, Some(keep));
    let groups = handles.map(|channels| ProcessGroup { channels, layout: None });
    (groups.collect(), receiver)
}

/// Receiver of packets from other processes. It does not keep the group alive.
#[derive(Clone)]
pub struct PacketReceiver(Weak<GroupRegistry>);

impl PacketReceiver {
    /// Returns the place for the values of a packet from a rank in `from`, with `bytes` bytes of
    /// values. The header is checked before anything is allocated, which is at most 256 KiB.
    ///
    /// # Errors
    ///
    /// Returns the fault: bytes that are no header, a sender or a receiver that are not of these
    /// processes, or a number of bytes that is not due for the call of the packet.
    pub fn place(
        &self,
        from: &Range<u32>,
        header: &[u8; PACKET_HEADER_BYTES],
        bytes: usize,
    ) -> Result<ArrivingPacket, String> {
        let header = PacketHeader::decode(header).ok_or("a packet without a header")?;
        let wrong = |what: &str| Err(format!("{what}: {bytes} bytes with {header:?}"));
        let registry = self.0.upgrade();
        if let PacketContent::Abort { rank } = header.content {
            // A process passes on reports about a third one.
            if registry.as_ref().is_some_and(|registry| !registry.is_elsewhere(rank)) {
                return wrong("an abort of a rank that is not elsewhere");
            }
            if bytes > REASON_BYTES_MAX {
                return wrong("an abort with more than the longest reason");
            }
            return Ok(ArrivingPacket {
                header,
                place: ValuesTarget::Bytes(vec![0; bytes]),
                registry,
            });
        }
        let context = registry.as_ref().and_then(|registry| registry.find(header.group));
        let (Some(context), Some(registry)) = (context, registry) else {
            // This process has no more handle on the group: its packets are read and dropped.
            if bytes > CHUNK_BYTES {
                return wrong("a packet that is longer than any");
            }
            let place = ValuesTarget::Bytes(vec![0; bytes]);
            return Ok(ArrivingPacket { header, place, registry: None });
        };
        let size = context.members.size();
        if header.from.0 >= size || !from.contains(&context.members.rank(header.from).0) {
            return wrong("a packet of a rank of another process");
        }
        if header.to.0 >= size || context.mailbox(header.to).is_none() {
            return wrong("a packet for a rank of another process");
        }
        let Some((element, elements)) = header.content.place(size, bytes) else {
            return wrong("a packet whose values are not due");
        };
        let payload = if header.content.holds_values() {
            Payload::place(element, elements, registry.pools())
        } else {
            Some(Payload::Nothing)
        };
        let Some(payload) = payload else { return wrong("a packet of no type") };
        Ok(ArrivingPacket {
            header,
            place: ValuesTarget::Values(payload),
            registry: Some(registry),
        })
    }

    /// Reports to all groups of this process that another process has left in order and sends
    /// nothing more. This also replaces leaves of its ranks that never arrived.
    pub fn process_left(&self, ranks: &Range<u32>) {
        if let Some(registry) = self.0.upgrade() {
            registry.process_left(ranks);
        }
    }

    /// Ends all groups of this process, with the reason.
    pub fn end(&self, why: &str) {
        if let Some(registry) = self.0.upgrade() {
            registry.end(why);
        }
    }

    /// Returns true if a rank has failed, or if all groups were ended.
    pub fn has_failed(&self) -> bool {
        self.0.upgrade().is_some_and(|registry| registry.has_failed())
    }
}

/// Packet whose values arrive.
pub struct ArrivingPacket {
    header: PacketHeader,
    place: ValuesTarget,
    /// `None` if the packet is no longer awaited.
    registry: Option<Arc<GroupRegistry>>,
}

enum ValuesTarget {
    Values(Payload),
    /// Bytes of a reason, or of values that are not awaited.
    Bytes(Vec<u8>),
}

impl ArrivingPacket {
    /// Returns the bytes of the values, which are to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.place {
            ValuesTarget::Values(payload) => payload.place_bytes(),
            ValuesTarget::Bytes(bytes) => bytes,
        }
    }

    /// Hands the packet on to its rank, once its values are complete.
    ///
    /// # Errors
    ///
    /// Returns the fault of the reason of an abort.
    pub fn arrived(self) -> Result<(), String> {
        let Self { header, place, registry } = self;
        let Some(registry) = registry else { return Ok(()) };
        let PacketHeader { group, from, to, content } = header;
        let payload = match place {
            ValuesTarget::Values(payload) => payload,
            ValuesTarget::Bytes(bytes) => return arrive_abort(&registry, content, bytes),
        };
        if let Some(context) = registry.find(group)
            && let Some(mailbox) = context.mailbox(to)
            && let Some(kind) = content.join(payload, from)
        {
            // A closed mailbox drops the packet; a full one is closed by it, which its rank
            // reports.
            let _ = mailbox.send(Packet { from, kind });
        }
        Ok(())
    }
}

fn arrive_abort(
    registry: &GroupRegistry,
    content: PacketContent,
    bytes: Vec<u8>,
) -> Result<(), String> {
    let PacketContent::Abort { rank } = content else { return Ok(()) };
    let why = String::from_utf8(bytes).map_err(|_| "an abort whose reason is no text")?;
    if why.is_empty() || why.contains(char::is_control) {
        return Err("an abort whose reason is not to be shown".into());
    }
    // Passed on: the reporting process may end, and close its links, before the message of the
    // rank's own process arrives everywhere.
    registry.fail_elsewhere(rank, &why);
    Ok(())
}

#[cfg(test)]
mod tests;
