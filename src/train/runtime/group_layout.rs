//! Options of a worker group, and the layout that all of its ranks share.

use std::sync::Arc;

use super::trace_labels::TraceLabels;
use potluck_core::metrics::Trace;
use potluck_parallel::collective::{BucketGroups, ShardLayout};
use potluck_parallel::{EdgeLayout, ReduceSite};

/// Options of a worker group.
#[derive(Clone, Debug, Default)]
pub struct WorkerGroupOptions {
    /// Reduce site per rank; the host for ranks that are not listed.
    pub reduce_site: Vec<ReduceSite>,
    /// True if the group only all-reduces gradients: for
    /// [`potluck_parallel::gradient_all_reduce`].
    pub is_chained: bool,
    /// Tensors that ranks send each other.
    pub edges: EdgeLayout,
    pub trace: Option<Trace>,
    /// Names of stages and edges in the trace.
    pub labels: TraceLabels,
}

/// Layout of a group, the same for all of its ranks, wherever they are.
#[derive(Clone)]
pub struct GroupLayout {
    pub shards: Arc<ShardLayout>,
    /// Ranks that hold each bucket.
    pub groups: BucketGroups,
    pub options: WorkerGroupOptions,
    /// Generation of the first round; those of another group over the same nodes are lower or
    /// higher throughout.
    pub generation: u64,
}
