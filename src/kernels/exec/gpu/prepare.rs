//! Prepared kernels: the bound dispatches of a node, an update or a norm, with the time that they
//! may take.

use std::cell::Cell;

use crate::device::{DeviceError, Gpu};
use crate::pace::nominal_seconds;
use crate::{BindGroups, Binding, BoundDispatch, Cost, Dispatch, Operand, Pipelines};

/// Prepared dispatches of a node, an update or a norm.
pub(crate) struct PreparedKernel {
    pub dispatches: Vec<BoundDispatch>,
    /// Display name: the variant of a node, or else the shaders.
    pub variant: String,
    /// Estimated seconds at the nominal rates.
    pub seconds: f64,
    /// Measured seconds per workgroup of each dispatch that is long at the nominal rates; `None`
    /// until it has run.
    pub(crate) paces: Vec<Cell<Option<f64>>>,
}

impl PreparedKernel {
    /// Prepares dispatches, with each operand bound to the range that `binding` returns for it.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device refuses a shader.
    pub fn new(
        gpu: &Gpu,
        pipelines: &mut Pipelines,
        dispatches: &[Dispatch],
        binding: &dyn Fn(Operand) -> Binding,
        cost: Cost,
    ) -> Result<Self, DeviceError> {
        Self::sharing(gpu, pipelines, &mut BindGroups::default(), dispatches, binding, cost)
    }

    /// Does the same as [`PreparedKernel::new`] with bind groups of `made`, all of which have the
    /// same `binding`.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device refuses a shader.
    pub fn sharing(
        gpu: &Gpu,
        pipelines: &mut Pipelines,
        made: &mut BindGroups,
        dispatches: &[Dispatch],
        binding: &dyn Fn(Operand) -> Binding,
        cost: Cost,
    ) -> Result<Self, DeviceError> {
        let bind = |dispatch| BoundDispatch::sharing(gpu, pipelines, made, dispatch, binding);
        let (seconds, paces) = (nominal_seconds(cost), vec![Cell::new(None); dispatches.len()]);
        let variant = variant(dispatches);
        let dispatches = dispatches.iter().map(bind).collect::<Result<_, DeviceError>>()?;
        Ok(Self { dispatches, variant, seconds, paces })
    }

    /// Replaces the values that may change from step to step: parameters and grids.
    pub(crate) fn refresh(&mut self, dispatches: Vec<Dispatch>) {
        for (bound, dispatch) in self.dispatches.iter_mut().zip(dispatches) {
            bound.refresh(dispatch);
        }
    }
}

/// Returns the shader files in order, each with its entry point if that has another name.
fn variant(dispatches: &[Dispatch]) -> String {
    let name = |dispatch: &Dispatch| {
        let (file, entry) = (&dispatch.shader.file, dispatch.shader.entry);
        if file == entry { file.to_string() } else { format!("{file}.{entry}") }
    };
    let mut names: Vec<String> = dispatches.iter().map(name).collect();
    names.dedup();
    names.join(" ")
}
