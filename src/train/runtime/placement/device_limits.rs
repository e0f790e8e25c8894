//! Limits of the devices of a run: a parameter that is larger than one of them can bind is cut on
//! all, because all have the same buckets.

use super::open_one::RequestedDevices;
use super::plans::Plans;
use crate::runtime::RuntimeError;
use potluck_core::format::gibibytes;
use potluck_kernels::device::Selection;
use potluck_kernels::exec::gpu::tensor_bytes_max;
use potluck_parallel::Placement;

/// Plans of a model with its large parameters cut.
pub struct CutPlans {
    pub plans: Plans,
    /// Message for the user.
    pub note: String,
}

/// Returns the plans of a model whose parameters are cut so that each of the requested devices can
/// bind them; `None` if all can as it is. `saved` is the placement of a run that is resumed on such
/// devices, whose cuts are kept.
///
/// # Errors
/// Returns `RuntimeError` if the graph with the cuts cannot be differentiated.
pub fn cut_plans(
    plans: &Plans,
    devices: RequestedDevices,
    saved: Option<&Placement>,
) -> Result<Option<CutPlans>, RuntimeError> {
    let recorded = saved.and_then(|saved| saved.parameter_bytes_max);
    let limits = devices.selections.iter().map(binding_bytes);
    let limited = limits.zip(devices.names).filter_map(|(bytes, name)| Some((bytes?, name)));
    let Some((smallest, name)) = limited.min_by_key(|(bytes, _)| *bytes) else { return Ok(None) };
    let bytes = smallest.min(recorded.unwrap_or(u64::MAX));
    let largest = plans.model().parameter_bytes();
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    if largest <= bytes {
        return Ok(None);
    }
    let model = plans.model().clone().with_parameter_bytes_max(Some(bytes));
    let model = model.map_err(RuntimeError::unplaceable)?;
    let note = format!(
        "parameters above {} are cut by rows, because {name} binds no more at a time; the largest \
         has {}",
        gibibytes(bytes as u64),
        gibibytes(largest as u64)
    );
    Ok(Some(CutPlans { plans: Plans::new(model), note }))
}

/// Returns the most bytes of a tensor that a device can bind; `None` without a limit.
pub(crate) fn binding_bytes(selection: &Selection) -> Option<u64> {
    match selection {
        Selection::Cpu { .. } => None,
        Selection::Adapter(adapter) => Some(tensor_bytes_max(&adapter.limits())),
        Selection::Offered(device) => device.binding_bytes,
    }
}
