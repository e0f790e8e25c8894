//! Limits of the messages of a group: their sizes, and the lead of one rank over another.

/// Maximum size in bytes of an all-reduce along a tree: `2 ceil(log2(world))` steps instead of
/// the `2 (world - 1)` of a ring.
pub const TREE_BYTES: usize = 4 << 10;
/// Maximum size of a message in bytes: small enough to stay in a core's cache, large enough to
/// amortize waking a thread.
pub(crate) const CHUNK_BYTES: usize = 256 << 10;
/// Credits towards each receiver: the number of packets that a rank may be ahead of it, for
/// rooted collectives and for sends each. The two kinds are counted separately, because a
/// receiver that takes packets of one kind does not wait for the other.
pub(crate) const CREDITS: u32 = 16;
/// Window of an exchange; see [`crate::collective::Exchange::new`].
pub const WINDOW: usize = 2;
