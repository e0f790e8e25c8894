//! Opening of one of the requested devices, on this node or another.

use std::sync::Arc;

use super::types::PlacementRequest;
use crate::runtime::RuntimeError;
use crate::runtime::open::{DeviceToOpen, OpenDevice, open_selected, tuning_of};
use crate::runtime::remote::{OpeningOnNode, RemoteOpening};
use potluck_graph::Plan;
use potluck_kernels::autotune;
use potluck_kernels::device::Selection;
use potluck_kernels::exec::Moments;
use potluck_parallel::RankPlacement;

/// Requested devices with their display names.
#[derive(Clone, Copy)]
pub struct RequestedDevices<'a> {
    pub selections: &'a [Selection],
    pub names: &'a [String],
}

pub(crate) struct RankOpening<'a> {
    /// Index of the device among the requested ones.
    pub position: usize,
    pub selection: &'a Selection,
    pub name: &'a str,
    /// Plan of the rank's part of the model.
    pub plan: Arc<Plan>,
    /// Shares of the ranks of its tensor group, if it is in one.
    pub tensor_shares: &'a [u32],
    pub moments: Moments,
}

/// Device whose opening has begun if it is on another node. All of these begin first, so that nodes
/// certify and time kernels at the same time as this process.
pub(crate) enum BegunOpening<'a> {
    Here { rank: RankOpening<'a>, saved: Option<&'a RankPlacement> },
    OnNode { position: usize, opening: Box<OpeningOnNode> },
}

impl<'a> BegunOpening<'a> {
    /// Begins to open a device with a plan. A resumed run keeps the kernel variants of `saved` if
    /// that is the same device.
    ///
    /// # Errors
    /// Returns `RuntimeError` if its node is lost.
    pub fn begin(
        request: &PlacementRequest,
        rank: RankOpening<'a>,
        saved: Option<&'a RankPlacement>,
    ) -> Result<Self, RuntimeError> {
        let Selection::Offered(device) = rank.selection else {
            return Ok(Self::Here { rank, saved });
        };
        let RankOpening { position, name, plan, tensor_shares, moments, .. } = rank;
        let opening = RemoteOpening {
            name,
            tuning: request.tuning,
            kept: saved,
            tensor_shares,
            deadline: request.opening.deadline,
        };
        let plan = Arc::unwrap_or_clone(plan);
        let opening = request.nodes.open(device, plan, moments, opening)?;
        Ok(Self::OnNode { position, opening: Box::new(opening) })
    }

    /// Opens the device, or waits until its node has opened it.
    ///
    /// # Errors
    /// Returns the errors of [`open_selected`].
    pub fn finish(
        self,
        request: &PlacementRequest,
        report: &mut dyn FnMut(&str, autotune::TuneProgress),
    ) -> Result<OpenDevice, RuntimeError> {
        let (rank, saved) = match self {
            Self::Here { rank, saved } => (rank, saved),
            Self::OnNode { position, opening } => {
                return Ok(OpenDevice { position, ..opening.opened(report)? });
            }
        };
        let RankOpening { position, selection, name, plan, moments, .. } = rank;
        let tuning = |identity: &str| {
            tuning_of(request.tuning, saved.filter(|saved| saved.identity == identity))
        };
        let selection = selection.clone();
        let plan = Arc::unwrap_or_clone(plan);
        let options = &request.opening;
        let to_open = DeviceToOpen { selection, name, plan, moments, options };
        Ok(OpenDevice { position, ..open_selected(to_open, tuning, report)? })
    }
}
