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

    /// Does the same as [`PreparedKernel::new`] with the bind groups in `made`, which must have the
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
        let mut bound = Vec::with_capacity(dispatches.len());
        for dispatch in dispatches {
            bound.push(BoundDispatch::sharing(gpu, pipelines, made, dispatch, binding)?);
        }
        Ok(Self {
            dispatches: bound,
            variant: variant(dispatches),
            seconds: nominal_seconds(cost),
            paces: vec![Cell::new(None); dispatches.len()],
        })
    }

    /// Replaces the values that may change from step to step: parameters and grids.
    pub(crate) fn refresh(&mut self, dispatches: Vec<Dispatch>) {
        for (bound, dispatch) in self.dispatches.iter_mut().zip(dispatches) {
            bound.refresh(dispatch);
        }
    }
}

/// Shader files in order, each with its entry point if that has another name.
fn variant(dispatches: &[Dispatch]) -> String {
    let mut names = Vec::with_capacity(dispatches.len());
    for dispatch in dispatches {
        let file = &dispatch.shader.file;
        let entry = dispatch.shader.entry;
        names.push(if file == entry { file.to_string() } else { format!("{file}.{entry}") });
    }
    names.dedup();
    names.join(" ")
}
