//! Limits of the devices of a run: a parameter that one of them cannot bind is cut on all, because
//! all have the same buckets.

use std::collections::BTreeMap;

use super::open_one::RequestedDevices;
use crate::runtime::RuntimeError;
use potluck_core::format::{gibibytes, listed};
use potluck_graph::Graph;
use potluck_kernels::device::{Limits, Selection};
use potluck_kernels::exec::gpu::tensor_bytes_max;
use potluck_parallel::Placement;
use potluck_parallel::planner::plans::Plans;

/// Plans of a model with its large parameters cut.
pub struct CutPlans {
    pub plans: Plans,
    /// Smallest limit of a device in bytes, and the device's name.
    limit: (u64, String),
}

/// Returns the plans of a model with parameters cut such that each requested device can bind them.
/// Returns `None` if no cut is needed: all devices can bind them, or one can and the others may be
/// excluded. `saved` is the placement of the resumed run, whose cuts are kept.
///
/// # Errors
/// Returns `RuntimeError` if the graph with the cuts cannot be differentiated.
pub fn cut_plans(
    plans: &Plans,
    are_all_used: bool,
    devices: RequestedDevices,
    saved: Option<&Placement>,
) -> Result<Option<CutPlans>, RuntimeError> {
    let largest = plans.model().parameter_bytes() as u64;
    let limits = devices.selections.iter().map(|one| binding_bytes(one).unwrap_or(u64::MAX));
    let has_room = limits.clone().any(|bytes| bytes >= largest);
    let Some((smallest, name)) = limits.zip(devices.names).min_by_key(|(bytes, _)| *bytes) else {
        return Ok(None);
    };
    let recorded = saved.and_then(|saved| saved.parameter_bytes_max).unwrap_or(u64::MAX);
    let own = if has_room && !are_all_used { u64::MAX } else { smallest };
    let bytes = own.min(recorded);
    if largest <= bytes {
        return Ok(None);
    }
    let of_model = usize::try_from(bytes).ok();
    let model = plans.model().clone().with_parameter_bytes_max(of_model);
    let plans = Plans::new(model.map_err(RuntimeError::unplaceable)?);
    Ok(Some(CutPlans { plans, limit: (bytes, name.clone()) }))
}

impl CutPlans {
    /// Returns a message for the user on the cut parameters of a graph, if there are any.
    pub fn note(&self, graph: &Graph) -> Option<String> {
        let mut slices: BTreeMap<&str, usize> = BTreeMap::new();
        let of_rank = graph.tensor_rank.unwrap_or(0);
        for parameter in &graph.parameters {
            if parameter.rank.is_none_or(|rank| rank == of_rank) {
                *slices.entry(&parameter.whole.name).or_default() += 1;
            }
        }
        slices.retain(|_, count| *count > 1);
        if slices.is_empty() {
            return None;
        }
        let (bytes, name) = &self.limit;
        let cut = slices.iter().map(|(name, count)| format!("{name} in {count}"));
        Some(format!(
            "cut by rows, because {name} binds {} at a time: {}",
            gibibytes(*bytes),
            listed(cut)
        ))
    }
}

/// Returns the maximum size of a tensor that a device can bind, in bytes; `None` without a limit.
pub fn binding_bytes(selection: &Selection) -> Option<u64> {
    match selection {
        Selection::Cpu { .. } => None,
        Selection::Adapter(adapter) => Some(tensor_bytes_max(&adapter.limits())),
        // Clamped, because a usable device has at least this limit.
        Selection::Offered(device) => {
            device.binding_bytes.map(|bytes| bytes.max(Limits::portable().binding_bytes))
        }
    }
}
