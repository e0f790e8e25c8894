//! Bounds of a cluster: of the messages of its nodes, and of their timeouts.

use potluck_core::Nanos;

/// Most nodes of a run.
pub const NODES_MAX: u32 = 64;
/// Longest host name (RFC 1035, section 2.3.4), in bytes.
pub(crate) const HOST_BYTES_MAX: usize = 255;
/// Most devices of a node.
pub(crate) const DEVICES_MAX: usize = 64;
/// Longest name and kind of a device, in bytes each.
pub const DEVICE_BYTES_MAX: usize = 256;
/// Longest text about a build, in bytes: its hash and the hashes of its crates.
pub(crate) const BUILD_BYTES_MAX: usize = 4 << 10;
/// Longest version and name of a run, in bytes each.
pub(crate) const VERSION_BYTES_MAX: usize = 128;
/// Most addresses of a node.
pub(crate) const ADDRESSES_MAX: usize = 8;
/// Longest message, in bytes.
pub(crate) const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Bounds of the longest silence of a node.
pub(crate) const NODE_TIMEOUT_MIN: Nanos = 100_000_000;
pub const NODE_TIMEOUT_MAX: Nanos = 3_600_000_000_000;
/// Longest time until a machine answers: a dial, a hello, the opening of a pair.
pub(crate) const REPLY_TIMEOUT: Nanos = 5_000_000_000;
/// Longest time for a dial: it ends before its machine gives it up, and can report the reason.
pub(crate) const DIAL_TIMEOUT: Nanos = 4_500_000_000;
/// Longest time from the roster to the start: the dials of all pairs, and their reports.
pub(crate) const PAIRING_TIMEOUT: Nanos = 8_000_000_000;
/// Silence after which a node counts as gone before the start: as long as three heartbeats at the
/// longest interval. After the start, the run's longest silence of a node applies.
pub(crate) const ABSENT_AFTER: Nanos = 3_000_000_000;
/// Longest time for which a joining node waits for the start: the first node, which knows more,
/// reports first.
pub(crate) const START_TIMEOUT: Nanos = 12_000_000_000;
