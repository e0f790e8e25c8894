//! Options of a worker group, and the common layout of its ranks.

use std::sync::Arc;

use super::trace_labels::TraceLabels;
use potluck_core::metrics::Trace;
use potluck_parallel::collective::{BucketGroups, ShardLayout};
use potluck_parallel::{EdgeLayout, ReduceSite};

/// Options of a worker group.
#[derive(Clone, Debug, Default)]
pub struct WorkerGroupOptions {
    /// Reduce site per rank; the host for other ranks.
    pub reduce_site: Vec<ReduceSite>,
    /// True if the group only all-reduces gradients: for
    /// [`potluck_parallel::gradient_all_reduce`].
    pub all_reduces: bool,
    /// Tensors sent between ranks.
    pub edges: EdgeLayout,
    pub trace: Option<Trace>,
    /// Names of stages and edges in the trace.
    pub labels: TraceLabels,
}

/// Layout of a group, the same for all of its ranks on all nodes.
#[derive(Clone)]
pub struct GroupLayout {
    pub shards: Arc<ShardLayout>,
    /// Ranks that hold each bucket.
    pub groups: BucketGroups,
    pub options: WorkerGroupOptions,
    /// Generation of the first round. All rounds of another group over the same nodes have lower
    /// or higher ones.
    pub generation: u64,
}
