//! Shape rules of group normalization, over `x (b, .., c)`, and of its gradients.

use potluck_core::Shape;

/// Returns the shapes of a weight `(c)` and of the statistics `(b, groups, 2)`.
fn grouped(groups: usize, x: &Shape) -> Result<[Shape; 2], String> {
    if x.rank() < 2 {
        return Err("x is (b, .., c)".into());
    }
    if groups == 0 || !x.last().is_multiple_of(groups) {
        return Err(format!("{groups} groups do not divide {} channels", x.last()));
    }
    Ok([Shape::fixed(&[x.last()]), x.with_dims(&[x.dims()[0], groups, 2])])
}

/// Returns the outputs of `x, weight, bias`.
pub fn group_norm(groups: usize, eps: f32, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    if !(eps >= 0.0 && eps.is_finite()) {
        return Err("eps must be finite and not negative".into());
    }
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
