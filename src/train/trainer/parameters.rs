//! Parameters of a [`Trainer`], read and written by name between steps.

use super::Trainer;
use crate::checkpoint::NamedTensor;
use crate::error::TrainError;
use crate::given_parameters::{set_parameters, shape_of, unknown_parameter};
use crate::state;

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
        found.ok_or_else(|| unknown_parameter(self.graph(), name).of_library())
    }

    /// Sets the values of a parameter, as many as it has, in its order.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::set_parameters`].
    pub fn set_parameter(&mut self, name: &str, values: &[f32]) -> Result<(), TrainError> {
        let shape = shape_of(self.graph(), name).map_err(TrainError::of_library)?.to_vec();
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
        let set = set_parameters(&self.session.group, self.graph(), tensors);
        if set.is_ok() {
            self.forget_kept_states();
        }
        self.noting_failure(set)
    }

    pub(super) fn read_parameters(&self) -> Result<Vec<NamedTensor>, TrainError> {
        state::parameters(&self.session.group, &self.session.plan)
    }
}
