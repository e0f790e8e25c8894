//! Shape rules of normalizations and of their gradients: over rows of `x (.., c)` (layer norm, RMS
//! norm, softmax), over a batch or groups of channels of `x (b, .., c)`.

use super::checks::{are_equal, require};
use crate::op::NormBackward;
use potluck_core::Shape;

fn is_eps(eps: f32) -> Result<(), String> {
    require(eps >= 0.0 && eps.is_finite(), "eps must be finite and not negative")
}

/// Returns the outputs of `x, weight [, bias]`, of layer norm and RMS norm.
pub fn layer_norm(eps: f32, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    is_eps(eps)?;
    let (channels, stats) = normalized(x[0])?;
    require(x[1..].iter().all(|s| **s == channels), "weight and bias are (c)")?;
    Ok(vec![x[0].clone(), stats])
}

/// Returns the output of `x, weight, stats, dy`, of layer norm and RMS norm.
pub fn layer_norm_grad(x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let (channels, stats) = normalized(x[0])?;
    let fits = *x[1] == channels && *x[2] == stats && x[3] == x[0];
    require(fits, "x and dy are (.., c), weight (c), stats (.., 2)")?;
    Ok(vec![x[0].clone()])
}

/// Returns the outputs of `x, weight, stats, dy [, sum]`.
pub fn norm_backward(options: NormBackward, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let [dx] = &layer_norm_grad(&x[..4])?[..] else { return Err("has one dx".into()) };
    require(x[4..].iter().all(|sum| *sum == dx), "the sum is that of x")?;
    let gradients = vec![x[1].clone(); if options.bias { 2 } else { 1 }];
    Ok([vec![dx.clone()], gradients].concat())
}

/// Returns the output of `x, stats, dy`.
pub fn layer_norm_weight_grad(x: &[&Shape]) -> Result<Vec<Shape>, String> {
    Ok(vec![layer_norm_channels(x)?])
}

/// Returns the outputs of `x, stats, dy`.
pub fn layer_norm_affine_grad(x: &[&Shape]) -> Result<Vec<Shape>, String> {
    Ok(vec![layer_norm_channels(x)?; 2])
}

/// Shape `(c)` of the sums over `x, stats, dy`.
fn layer_norm_channels(x: &[&Shape]) -> Result<Shape, String> {
    let (channels, stats) = normalized(x[0])?;
    require(*x[1] == stats && x[2] == x[0], "x and dy are (.., c), stats (.., 2)")?;
    Ok(channels)
}

pub fn softmax(x: &Shape) -> Result<Vec<Shape>, String> {
    normalized(x)?;
    Ok(vec![x.clone()])
}

/// Returns the output of `y, dy`.
pub fn softmax_grad(x: &[&Shape]) -> Result<Vec<Shape>, String> {
    normalized(x[0])?;
    are_equal(x[0], x[1])?;
    Ok(vec![x[0].clone()])
}

/// Shapes of a weight `(c)` and of the statistics `(.., 2)` of the rows of `x (.., c)`.
fn normalized(x: &Shape) -> Result<(Shape, Shape), String> {
    if x.rank() <= usize::from(x.is_batched()) {
        return Err("needs a dimension to normalize that is not the batch".into());
    }
    let leading = &x.dims()[..x.rank() - 1];
    Ok((Shape::fixed(&[x.last()]), x.with_dims(&[leading, &[2]].concat())))
}

/// Returns the outputs of `x, weight, bias`.
pub fn group_norm(groups: usize, eps: f32, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    is_eps(eps)?;
    let [channels, stats] = grouped(groups, x[0])?;
    if x[1..].iter().any(|shape| **shape != channels) {
        return Err("weight and bias are (c)".into());
    }
    Ok(vec![x[0].clone(), stats])
}

/// Returns the output of `x, weight, stats, dy`.
pub fn group_norm_grad(groups: usize, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let [channels, stats] = grouped(groups, x[0])?;
    if *x[1] != channels || *x[2] != stats || x[3] != x[0] {
        return Err("x and dy are (b, .., c), weight (c), stats (b, groups, 2)".into());
    }
    Ok(vec![x[0].clone()])
}

/// Returns the outputs of `x, stats, dy`.
pub fn group_norm_affine_grad(groups: usize, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let [channels, stats] = grouped(groups, x[0])?;
    if *x[1] != stats || x[2] != x[0] {
        return Err("x and dy are (b, .., c), stats (b, groups, 2)".into());
    }
    Ok(vec![channels; 2])
}

/// Shapes of a weight `(c)` and of the statistics `(b, groups, 2)`.
fn grouped(groups: usize, x: &Shape) -> Result<[Shape; 2], String> {
    if x.rank() < 2 {
        return Err("x is (b, .., c)".into());
    }
    if groups == 0 || !x.last().is_multiple_of(groups) {
        return Err(format!("{groups} groups do not divide {} channels", x.last()));
    }
    Ok([Shape::fixed(&[x.last()]), x.with_dims(&[x.dims()[0], groups, 2])])
}

/// Returns the outputs of `x, weight, bias, mean, variance`.
pub fn batch_norm(eps: f32, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    is_eps(eps)?;
    let (channels, stats) = batch_normalized(x[0])?;
    require(x[1..].iter().all(|s| **s == channels), "all but x are (c)")?;
    Ok(vec![x[0].clone(), stats, channels.clone(), channels])
}

/// Returns the outputs of `x, stats, dy`.
pub fn batch_norm_affine_grad(x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let (channels, stats) = batch_normalized(x[0])?;
    require(*x[1] == stats && x[2] == x[0], "x and dy are (b, .., c), stats (2, c)")?;
    Ok(vec![channels; 2])
}

/// Returns the output of `x, weight, stats, dy, dweight, dbias`.
pub fn batch_norm_grad(x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let (channels, stats) = batch_normalized(x[0])?;
    let fits = *x[2] == stats && x[3] == x[0];
    let fits = fits && [x[1], x[4], x[5]].into_iter().all(|s| *s == channels);
    require(fits, "x and dy are (b, .., c), stats (2, c), all others (c)")?;
    Ok(vec![x[0].clone()])
}

/// Shapes of a weight `(c)` and of the statistics `(2, c)` of `x (b, .., c)`.
fn batch_normalized(x: &Shape) -> Result<(Shape, Shape), String> {
    if x.rank() < 2 || x.is_batched() && x.dims()[0] != 1 {
        return Err("x is (b, .., c)".into());
    }
    Ok((Shape::fixed(&[x.last()]), Shape::fixed(&[2, x.last()])))
}
