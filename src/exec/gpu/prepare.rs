//! Prepared kernels: the bound dispatches of a node, an update or a norm, with the time that they
//! may take.

use crate::device::{DeviceError, Gpu};
use crate::kernels::{BindGroups, Binding, BoundDispatch, Cost, Dispatch, Operand, Pipelines};

/// Nominal rates, from which the time of the first step is estimated; below those of any device
/// that trains. The measured time of a step replaces the estimate.
const NOMINAL_FLOPS: f64 = 2e9;
const NOMINAL_BYTES: f64 = 2e9;

/// Prepared dispatches of a node, an update or a norm.
pub struct PreparedKernel {
    pub dispatches: Vec<BoundDispatch>,
    /// Display name: the variant of a node, or else the shaders.
    pub variant: String,
    /// Estimated seconds at the nominal rates.
    pub seconds: f64,
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
        let seconds = cost.flops / NOMINAL_FLOPS + cost.bytes / NOMINAL_BYTES;
        let variant = variant(dispatches);
        let dispatches = dispatches.iter().map(bind).collect::<Result<_, DeviceError>>()?;
        Ok(Self { dispatches, variant, seconds })
    }

    /// Replaces the values that may change from step to step: parameters and grids.
    pub fn refresh(&mut self, dispatches: Vec<Dispatch>) {
        for (bound, dispatch) in self.dispatches.iter_mut().zip(dispatches) {
            bound.refresh(dispatch);
        }
    }

    /// Records the dispatches into a pass.
    pub fn record(&self, pass: &mut wgpu::ComputePass) {
        self.dispatches.iter().for_each(|bound| bound.record(pass));
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
