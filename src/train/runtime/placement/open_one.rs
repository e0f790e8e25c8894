//! Opening of one of the requested devices.

use std::sync::Arc;

use super::types::PlacementRequest;
use crate::runtime::RuntimeError;
use crate::runtime::open::{DeviceToOpen, OpenDevice, open_selected, tuning_of};
use crate::runtime::remote::RemoteOpening;
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

/// Device that is to be opened as a rank.
pub(crate) struct RankOpening<'a> {
    /// Index of the device among the requested ones.
    pub position: usize,
    pub selection: &'a Selection,
    pub name: &'a str,
    /// Plan of what the rank holds.
    pub plan: Arc<Plan>,
    /// Shares of the ranks of its tensor group, if it is in one.
    pub tensor_shares: &'a [u32],
    pub moments: Moments,
}

/// Opens one device with a plan. A resumed run keeps the kernel variants of
/// `saved` if it is the same device.
///
/// # Errors
/// Returns the errors of [`open_selected`].
pub(crate) fn open_one(
    request: &PlacementRequest,
    rank: RankOpening,
    saved: Option<&RankPlacement>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<OpenDevice, RuntimeError> {
    let RankOpening { position, selection, name, plan, tensor_shares, moments } = rank;
    let plan = Arc::unwrap_or_clone(plan);
    let opened = if let Selection::Offered(device) = selection {
        let tuning = request.tuning;
        let opening = RemoteOpening { name, tuning, kept: saved, tensor_shares, report };
        let deadline = request.opening.deadline;
        request.nodes.open(device, plan, moments, opening, deadline)?
    } else {
        let tuning = |identity: &str| {
            tuning_of(request.tuning, saved.filter(|saved| saved.identity == identity))
        };
        let options = &request.opening;
        let selection = selection.clone();
        let to_open = DeviceToOpen { selection, name, plan, moments, options };
        open_selected(to_open, tuning, report)?
    };
    Ok(OpenDevice { position, ..opened })
}
