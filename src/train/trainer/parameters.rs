//! Parameters of a [`Trainer`], read and written by name between steps.

use super::Trainer;
use crate::checkpoint::NamedTensor;
use crate::error::TrainError;
use crate::given_parameters::{set_parameters, shape_of, unknown_parameter};

impl Trainer {
    /// Returns the parameters by name, in the model's order. After the failure of a step these are
    /// the parameters before it, from the remaining devices.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails, if no remaining device has a parameter, or if the
    /// failed step had begun its update: the devices may then have values of two steps.
    pub fn parameters(&self) -> Result<Vec<NamedTensor>, TrainError> {
        self.session.parameters().map_err(TrainError::of_library)
    }

    /// Returns the parameters of [`Trainer::evaluate`] and [`Trainer::predict`] by name, in the
    /// model's order: with [`TrainerOptions::ema`](super::TrainerOptions::ema), the averages
    /// instead of the trained parameters, after the first update.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails.
    pub fn averaged_parameters(&self) -> Result<Vec<NamedTensor>, TrainError> {
        self.session.evaluated_parameters().map_err(TrainError::of_library)
    }

    /// Returns the parameter of a name.
    ///
    /// # Errors
    /// Returns `TrainError` if no parameter has this name, and the errors of
    /// [`Trainer::parameters`].
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

    /// Sets all or some parameters on all devices to the same bytes, and their averages to the same
    /// values. The optimizer's moments are unchanged. Earlier saves have other parameters, so that
    /// [`Trainer::recover`] needs a later one.
    ///
    /// # Errors
    /// Returns `TrainError` if there is no parameter of a name, or if it has another shape or
    /// number of values, and sets none. Also if a device fails.
    pub fn set_parameters(&mut self, tensors: &[NamedTensor]) -> Result<(), TrainError> {
        let set = self
            .session
            .put_parameters_back()
            .and_then(|()| set_parameters(&self.session.group, self.model.whole(), tensors));
        if set.is_ok() {
            self.forget_kept_states();
        }
        self.noting_failure(set)
    }

    /// Compares the parameters of all devices, and replaces them by the averages until the next
    /// step, if the trainer has them.
    ///
    /// # Errors
    /// Returns `TrainError` if they differ, or if a device fails.
    pub(crate) fn hold_evaluated(&mut self) -> Result<(), TrainError> {
        if !self.session.has_averages() || self.session.holds_averages() {
            return Ok(());
        }
        self.session.put_parameters_back()?;
        self.compare_parameters()?;
        self.session.put_averages_in_place()
    }
}
