//! Shape rules of losses and of their gradients.

use super::checks::{are_equal, are_numbered, require};
use crate::LossClasses;
use potluck_core::Shape;

/// Returns the outputs of `logits, targets`.
pub fn cross_entropy(classes: LossClasses, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let rows = rows_of_logits(x, "logits are (n, v), targets (n)")?;
    are_classes(classes, x[0])?;
    Ok(vec![x[0].with_dims(&[x[0].dims()[0], 2]), rows])
}

/// Returns the output of `logits, targets, lse`.
pub fn cross_entropy_grad(classes: LossClasses, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    rows_of_logits(x, "logits are (n, v), targets and lse (n)")?;
    are_classes(classes, x[0])?;
    Ok(vec![x[0].clone()])
}

/// Checks that the logits are some of the classes.
fn are_classes(classes: LossClasses, logits: &Shape) -> Result<(), String> {
    let LossClasses { first, all, smoothing } = classes;
    let end = first.checked_add(logits.last());
    require(end.is_some_and(|end| end <= all), "the logits have more classes than there are")?;
    require((0.0..=1.0).contains(&smoothing), "label smoothing is 0 to 1")?;
    are_numbered(first, all - first)
}

/// Shape `(n)` of the rows of logits `x[0] (n, v)`, which all other inputs have.
fn rows_of_logits(x: &[&Shape], wanted: &str) -> Result<Shape, String> {
    if x[0].rank() != 2 {
        return Err(wanted.into());
    }
    let rows = x[0].with_dims(&x[0].dims()[..1]);
    if x[1..].iter().all(|shape| **shape == rows) { Ok(rows) } else { Err(wanted.into()) }
}

/// Returns the outputs of `x, weight, targets`.
pub fn linear_cross_entropy(
    rows: usize,
    classes: LossClasses,
    x: &[&Shape],
) -> Result<Vec<Shape>, String> {
    cross_entropy(classes, &[&logits(rows, x)?, x[2]])
}

/// Returns the outputs of `x, weight, targets, lse`.
pub fn linear_cross_entropy_grad(
    rows: usize,
    classes: LossClasses,
    by_weight: bool,
    x: &[&Shape],
) -> Result<Vec<Shape>, String> {
    cross_entropy_grad(classes, &[&logits(rows, x)?, x[2], x[3]])?;
    let inputs = if by_weight { 2 } else { 1 };
    Ok(x[..inputs].iter().map(|&shape| shape.clone()).collect())
}

/// Returns the outputs of `x, weight, targets`.
pub fn linear_cross_entropy_pass(
    rows: usize,
    classes: LossClasses,
    by_weight: bool,
    x: &[&Shape],
) -> Result<Vec<Shape>, String> {
    let mut outputs = vec![x[0].clone()];
    outputs.extend(linear_cross_entropy(rows, classes, x)?);
    if by_weight {
        outputs.push(x[1].clone());
    }
    Ok(outputs)
}

/// Shape of the logits of `x (n, c), weight (v, c)`.
fn logits(rows: usize, x: &[&Shape]) -> Result<Shape, String> {
    require(rows > 0, "logits are computed for at least 1 row at a time")?;
    let input = x[0];
    let weight = x[1];
    let fits = input.rank() == 2 && weight.rank() == 2 && !weight.is_batched();
    require(fits && input.last() == weight.last(), "x is (n, c), weight (v, c)")?;
    Ok(input.with_dims(&[input.dims()[0], weight.dims()[0]]))
}

/// Returns the outputs of `parts, lse, parts, lse`.
pub fn join_cross_entropy(x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let wanted = "parts are (n, 2), lse (n)";
    let rows = rows_of_logits(&[x[0], x[1]], wanted)?;
    require(x[0].last() == 2, wanted)?;
    are_equal(x[0], x[2])?;
    are_equal(x[1], x[3])?;
    Ok(vec![x[0].clone(), rows])
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
