//! Shape rules of losses and of their gradients.

use super::checks::{are_equal, are_numbered, require};
use potluck_core::Shape;

/// Returns the outputs of `logits, targets`.
pub fn cross_entropy(first: usize, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let rows = rows_of_logits(x, "logits are (n, v), targets (n)")?;
    are_numbered(first, x[0].last())?;
    Ok(vec![x[0].with_dims(&[x[0].dims()[0], 2]), rows])
}

/// Returns the output of `logits, targets, lse`.
pub fn cross_entropy_grad(
    first: usize,
    classes: usize,
    x: &[&Shape],
) -> Result<Vec<Shape>, String> {
    rows_of_logits(x, "logits are (n, v), targets and lse (n)")?;
    let end = first.checked_add(x[0].last());
    let fits = end.is_some_and(|end| end <= classes);
    require(fits, "the logits have more classes than there are")?;
    are_numbered(first, classes - first)?;
    Ok(vec![x[0].clone()])
}

/// Returns the shape `(n)` of the rows of logits `x[0] (n, v)`, which all other inputs have.
fn rows_of_logits(x: &[&Shape], wanted: &str) -> Result<Shape, String> {
    if x[0].rank() != 2 {
        return Err(wanted.into());
    }
    let rows = x[0].with_dims(&x[0].dims()[..1]);
    if x[1..].iter().all(|shape| **shape == rows) { Ok(rows) } else { Err(wanted.into()) }
}

/// Returns the output of `x, target`.
pub fn squared_error(x: &[&Shape]) -> Result<Vec<Shape>, String> {
    are_equal(x[0], x[1])?;
    require(x[0].rank() > 0, "scalars have no rows to sum over; reshape them to (1)")?;
    Ok(vec![x[0].with_dims(&[x[0].dims()[0], 2])])
}

/// Returns the output of `x, target`.
pub fn squared_error_grad(x: &[&Shape]) -> Result<Vec<Shape>, String> {
    are_equal(x[0], x[1])?;
    Ok(vec![x[0].clone()])
}
