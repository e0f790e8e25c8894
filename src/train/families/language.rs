//! Rules that families of language models have in common.

use super::{DataShape, FamilyError};
use crate::keys::{ConstraintError, refused};

/// Returns the tokens that a model knows, which `model` names: "a gpt". They are those of the data,
/// or more if `model.vocabulary` says so.
pub(super) fn vocabulary(
    model: &str,
    typed: Option<usize>,
    data: &DataShape,
) -> Result<usize, FamilyError> {
    let of_data = data.vocabulary(model)?;
    match typed {
        None => Ok(of_data),
        Some(vocabulary) if vocabulary < of_data => Err(FamilyError::Unfit(format!(
            "model.vocabulary expects at least the {of_data} tokens of the data, got {vocabulary}; \
             leave it out for as many as the data have"
        ))),
        Some(vocabulary) => Ok(vocabulary),
    }
}

/// Checks that a model has a position for every token of a sample.
pub(super) fn check_positions(positions: usize, context: usize) -> Result<(), ConstraintError> {
    if positions < context {
        let why = format!("expects at least model.context = {context}, got {positions}");
        return refused(&["model.positions", "model.context"], why);
    }
    Ok(())
}

/// Formats the context of a model for its summary, with its positions if they are more.
pub(super) fn context_text(context: usize, positions: usize) -> String {
    let spare = positions > context;
    let of = if spare { format!(" of {positions} positions") } else { String::new() };
    format!("context {context}{of}")
}

/// Returns the learning rate of a transformer of this width that sets none: 4e-3 at width 64, and
/// less for wider ones, 6.2e-4 at 768, to two digits, so that it is the number that is printed.
pub(super) fn default_lr(width: usize) -> f64 {
    let lr = 4e-3 * (64.0 / width.max(1) as f64).powf(0.75);
    let exponent = lr.log10().floor() - 1.0;
    let digits = (lr / 10f64.powf(exponent)).round();
    // Through decimal digits, which give the nearest number to what is printed.
    format!("{digits}e{exponent}").parse().unwrap_or(lr)
}
