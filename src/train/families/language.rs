//! Rules common to families of language models.

use super::{DataShape, FamilyError};
use crate::keys::{ConstraintError, refused};

/// Number of tokens that a model knows: the vocabulary of the data, or more if `model.vocabulary`
/// says so. `model` names it for messages: "a gpt".
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

/// Context of a model for its summary, with the number of positions if it is larger.
pub(super) fn context_text(context: usize, positions: usize) -> String {
    let spare = positions > context;
    let of = if spare { format!(" of {positions} positions") } else { String::new() };
    format!("context {context}{of}")
}

/// Default learning rate of a transformer of this width: 4e-3 at width 64, less for wider ones, and
/// 6.2e-4 at 768. Rounded to two digits, so that the printed number is exact.
pub(super) fn default_lr(width: usize) -> f64 {
    let lr = 4e-3 * (64.0 / width.max(1) as f64).powf(0.75);
    let exponent = lr.log10().floor() - 1.0;
    let digits = (lr / 10f64.powf(exponent)).round();
    // Through decimal digits, which give the float nearest to the printed number.
    format!("{digits}e{exponent}").parse().unwrap_or(lr)
}
