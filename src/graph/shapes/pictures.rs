//! Shape rules of convolutions and poolings over pictures `(.., h, w, c)` with one leading
//! dimension.

use crate::pictures::{Conv2dOptions, Pool2dOptions, by};
use potluck_core::Shape;

/// Leading dimension, size and channels of pictures.
fn picture(x: &Shape) -> Result<(usize, [usize; 2], usize), String> {
    match *x.dims() {
        [b, h, w, c] => Ok((b, [h, w], c)),
        _ => Err("pictures are (b, h, w, c)".into()),
    }
}

/// Output channels, input channels of a group, and size of the kernel.
fn filters(weight: &Shape, groups: usize) -> Result<(usize, usize, [usize; 2]), String> {
    let [o, per_group, kh, kw] = *weight.dims() else {
        return Err("the weight is (o, c/groups, kh, kw)".into());
    };
    if weight.is_batched() {
        return Err("the weight has no batch".into());
    }
    divides(groups, o, "output")?;
    Ok((o, per_group, [kh, kw]))
}

fn divides(groups: usize, channels: usize, what: &str) -> Result<(), String> {
    if groups > 0 && channels.is_multiple_of(groups) {
        return Ok(());
    }
    Err(format!("{groups} groups do not divide {channels} {what} channels"))
}

/// Returns the output of `x, weight`.
pub fn conv2d(options: &Conv2dOptions, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    Ok(vec![convolved(options, x[0], x[1])?])
}

/// Output `(b, oh, ow, o)` of `x (b, h, w, c)` and `weight (o, c/groups, kh, kw)`.
fn convolved(options: &Conv2dOptions, x: &Shape, weight: &Shape) -> Result<Shape, String> {
    let (b, size, c) = picture(x)?;
    let (o, per_group, kernel) = filters(weight, options.groups)?;
    divides(options.groups, c, "input")?;
    if per_group * options.groups != c {
        return Err(format!(
            "the weight takes {per_group} channels per group, and the pictures have {}",
            c / options.groups
        ));
    }
    let [oh, ow] = options.output_size(size, kernel)?;
    Ok(x.with_dims(&[b, oh, ow, o]))
}

/// Returns the shape of the pictures `(b, h, w, c)` of `size`, from `dy, weight`.
pub fn conv2d_input_grad(
    options: &Conv2dOptions,
    size: [usize; 2],
    x: &[&Shape],
) -> Result<Vec<Shape>, String> {
    let dy = x[0];
    let weight = x[1];
    let (b, ..) = picture(dy)?;
    let (_, per_group, _) = filters(weight, options.groups)?;
    let channels = per_group.checked_mul(options.groups).ok_or("too many channels")?;
    let x = dy.with_dims(&[b, size[0], size[1], channels]);
    if convolved(options, &x, weight)? != *dy {
        return Err(format!("dy is not the output for pictures {x}"));
    }
    Ok(vec![x])
}

/// Returns the shape of the weight with this kernel, from `x, dy`.
pub fn conv2d_weight_grad(
    options: &Conv2dOptions,
    kernel: [usize; 2],
    x: &[&Shape],
) -> Result<Vec<Shape>, String> {
    let [x, dy] = [x[0], x[1]];
    let (_, _, c) = picture(x)?;
    let (_, _, o) = picture(dy)?;
    divides(options.groups, c, "input")?;
    let weight = Shape::fixed(&[o, c / options.groups, kernel[0], kernel[1]]);
    if convolved(options, x, &weight)? != *dy {
        return Err(format!("dy is not the output for a weight {weight}"));
    }
    Ok(vec![weight])
}

/// Returns the outputs `y, places`.
pub fn max_pool2d(options: &Pool2dOptions, x: &Shape) -> Result<Vec<Shape>, String> {
    Ok(vec![pooled(options, x)?; 2])
}

pub fn avg_pool2d(options: &Pool2dOptions, x: &Shape) -> Result<Vec<Shape>, String> {
    Ok(vec![pooled(options, x)?])
}

/// Output `(b, oh, ow, c)` of `x (b, h, w, c)`.
fn pooled(options: &Pool2dOptions, x: &Shape) -> Result<Shape, String> {
    let (b, size, c) = picture(x)?;
    let [oh, ow] = options.output_size(size)?;
    Ok(x.with_dims(&[b, oh, ow, c]))
}

/// Returns the shape of the pictures, from inputs that all have the shape of a pooling's output:
/// `places, dy` or `dy`.
pub fn pool2d_grad(
    options: &Pool2dOptions,
    size: [usize; 2],
    outputs: &[&Shape],
) -> Result<Vec<Shape>, String> {
    let (b, _, c) = picture(outputs[0])?;
    let x = outputs[0].with_dims(&[b, size[0], size[1], c]);
    let y = pooled(options, &x)?;
    if outputs.iter().any(|output| **output != y) {
        return Err(format!("{y} is the output for pictures of {}", by(size)));
    }
    Ok(vec![x])
}
