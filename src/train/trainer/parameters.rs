//! Parameters of a [`Trainer`], read and written by name between steps.

use std::borrow::Cow;
use std::sync::Arc;

use super::Trainer;
use crate::checkpoint::NamedTensor;
use crate::error::TrainError;
use crate::state;
use potluck_core::BucketId;
use potluck_graph::{Parameter, Plan};
use potluck_kernels::exec::{BucketTensor, Executor};

impl Trainer {
    /// Returns the parameters by name, in the model's order. After the failure of a step these are
    /// the parameters before it, from the devices that are left.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails, if none that is left holds a parameter, or if the
    /// failed step had begun to update: the devices may then hold values of two steps.
    pub fn parameters(&self) -> Result<Vec<NamedTensor>, TrainError> {
        self.read_parameters().map_err(TrainError::of_library)
    }

    /// Returns the parameter of a name.
    ///
    /// # Errors
    /// Returns `TrainError` if there is none, and the errors of [`Trainer::parameters`].
    pub fn parameter(&self, name: &str) -> Result<NamedTensor, TrainError> {
        let found = self.parameters()?.into_iter().find(|tensor| tensor.name == name);
        found.ok_or_else(|| self.unknown_parameter(name).of_library())
    }

    /// Sets the values of a parameter, as many as it has, in its order.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::set_parameters`].
    pub fn set_parameter(&mut self, name: &str, values: &[f32]) -> Result<(), TrainError> {
        let shape = self.shape_of(name).map_err(TrainError::of_library)?;
        self.set_parameters(&[NamedTensor {
            name: name.to_string(),
            shape,
            values: values.to_vec(),
        }])
    }

    /// Sets parameters, all or some, on all devices to the same bytes. What the optimizer has
    /// averaged over the steps so far stays. Earlier saves hold other parameters, so that
    /// [`Trainer::recover`] needs a later one.
    ///
    /// # Errors
    /// Returns `TrainError` if there is no parameter of a name, or if it has another shape or
    /// number of values; then none is set. Also if a device fails.
    pub fn set_parameters(&mut self, tensors: &[NamedTensor]) -> Result<(), TrainError> {
        let set = self.write_parameters(tensors);
        if set.is_ok() {
            self.forget_kept_states();
        }
        self.noting_failure(set)
    }

    pub(super) fn read_parameters(&self) -> Result<Vec<NamedTensor>, TrainError> {
        state::parameters(&self.session.group, &self.session.plan)
    }

    fn write_parameters(&self, tensors: &[NamedTensor]) -> Result<(), TrainError> {
        for tensor in tensors {
            let wanted = self.shape_of(&tensor.name)?;
            let fits = tensor.values.len() == wanted.iter().product::<usize>();
            if tensor.shape != wanted || !fits {
                let NamedTensor { name, shape, values } = tensor;
                return Err(TrainError::InvalidRequest(format!(
                    "the parameter '{name}' has the shape {wanted:?}, and {} values of the shape \
                     {shape:?} are given",
                    values.len()
                )));
            }
        }
        let tensors = Arc::new(tensors.to_vec());
        self.session.group.run_on_all("setting parameters", move |_, device| {
            for bucket in 0..device.plan().buckets.len() as u32 {
                write_into(device, BucketId(bucket), &tensors)?;
            }
            Ok(())
        })?;
        Ok(())
    }

    fn shape_of(&self, name: &str) -> Result<Vec<usize>, TrainError> {
        let parameter = self.graph().parameters.iter().find(|parameter| parameter.name == name);
        let parameter = parameter.ok_or_else(|| self.unknown_parameter(name))?;
        Ok(self.graph().tensor(parameter.tensor).shape.dims().to_vec())
    }

    fn unknown_parameter(&self, name: &str) -> TrainError {
        let names: Vec<&str> =
            self.graph().parameters.iter().map(|parameter| &*parameter.name).collect();
        let known = names.join(", ");
        TrainError::InvalidRequest(format!(
            "the model has no parameter '{name}'; its parameters are {known}"
        ))
    }
}

/// Writes those of the tensors that are in a bucket, if the device holds it.
fn write_into(
    device: &mut dyn Executor,
    bucket: BucketId,
    tensors: &[NamedTensor],
) -> Result<(), potluck_kernels::device::DeviceError> {
    let plan = device.plan();
    let given = given_in(plan, bucket, tensors);
    if given.is_empty() || !plan.holds(bucket) {
        return Ok(());
    }
    let mut values = device.read_bank(BucketTensor::Parameters, bucket)?;
    for (start, own) in given {
        values[start..start + own.len()].copy_from_slice(&own);
    }
    device.write_bank(BucketTensor::Parameters, bucket, &values)
}

/// Returns the values of the tensors that are in a bucket, of slices their parts, each with its
/// start.
fn given_in<'t>(
    plan: &Plan,
    bucket: BucketId,
    tensors: &'t [NamedTensor],
) -> Vec<(usize, Cow<'t, [f32]>)> {
    let mut given = Vec::new();
    for &(id, start) in &plan.buckets[bucket.index()].parameters {
        let Parameter { whole, slice, .. } = &plan.graph.parameters[id.index()];
        // The last of several of one name counts.
        if let Some(tensor) = tensors.iter().rfind(|tensor| tensor.name == whole.name) {
            let own = if slice.is_whole() {
                Cow::Borrowed(&tensor.values[..])
            } else {
                Cow::Owned(slice.cut(&tensor.values))
            };
            given.push((start, own));
        }
    }
    given
}
