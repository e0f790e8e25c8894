//! Shape rules of elementwise ops: functions of one tensor and of two, dropout, and gradients.

use super::checks::{are_equal, are_numbered, are_samples, is_probability, require};
use crate::elements::Unary;
use crate::op::ColumnRange;
use potluck_core::Shape;

pub fn unary(function: Unary, x: &Shape) -> Result<Vec<Shape>, String> {
    // A loss scale may overflow; all other constants are in the text of a kernel.
    let is_factor = matches!(function, Unary::Scale(_));
    let is_finite = function.constants().iter().all(|constant| constant.is_finite());
    require(is_factor || is_finite, "the constants must be finite")?;
    Ok(vec![x.clone()])
}

/// Returns the output of `x, dy`.
pub fn unary_grad(x: &[&Shape]) -> Result<Vec<Shape>, String> {
    are_equal(x[0], x[1])?;
    Ok(vec![x[0].clone()])
}

/// Returns the output of `a, b`.
pub fn binary(x: &[&Shape]) -> Result<Vec<Shape>, String> {
    is_suffix(x[1], x[0])?;
    Ok(vec![x[0].clone()])
}

/// Returns the output of `a, b, dy`.
pub fn binary_grad(x: &[&Shape]) -> Result<Vec<Shape>, String> {
    is_suffix(x[1], x[0])?;
    require(x[2] == x[0], "dy has the shape of the first")?;
    Ok(vec![x[0].clone()])
}

fn is_suffix(second: &Shape, first: &Shape) -> Result<(), String> {
    require(second.is_suffix_of(first), "the second must be a suffix of the first")
}

/// Returns the output of `x, samples`.
pub fn dropout(p: f32, columns: Option<ColumnRange>, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    is_probability(p)?;
    if let Some(of) = columns {
        let end = of.first.checked_add(x[0].last());
        require(end.is_some_and(|end| end <= of.all), "the columns are more than there are")?;
        are_numbered(of.first, of.all - of.first)?;
    }
    require(x[0].is_batched(), "only batched tensors have samples")?;
    are_samples(&x[1..])?;
    Ok(vec![x[0].clone()])
}
