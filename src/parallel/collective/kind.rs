//! Kinds of collectives.

/// Kind of a collective; the two together are an all-reduce.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub enum CollectiveKind {
    /// Values are summed along the path to the owner of each chunk.
    ReduceScatter,
    /// The owner's final values are sent to every rank.
    AllGather,
}
