//! Shape rules of ops that alias, move, cut, join, sum or repeat elements.

use super::checks::require;
use potluck_core::Shape;

/// Returns the outputs of an op that are aliases of its inputs. The wanted shape of a reshape is an
/// argument of the builder, which checks it.
pub fn aliases(x: &[&Shape]) -> Result<Vec<Shape>, String> {
    Ok(x.iter().map(|shape| (*shape).clone()).collect())
}

pub fn permute(axes: &[usize], x: &Shape) -> Result<Vec<Shape>, String> {
    let mut sorted = axes.to_vec();
    sorted.sort_unstable();
    if !sorted.iter().copied().eq(0..x.rank()) || x.rank() > 5 {
        return Err("axes must name each of at most 5 dimensions once".into());
    }
    if x.is_batched() && axes[0] != 0 {
        return Err("the batch axis stays in front".into());
    }
    let dims: Vec<usize> = axes.iter().map(|&axis| x.dims()[axis]).collect();
    Ok(vec![x.with_dims(&dims)])
}

pub fn slice(axis: usize, start: usize, length: usize, x: &Shape) -> Result<Vec<Shape>, String> {
    can_be_cut(axis, x)?;
    let end = start.checked_add(length);
    require(end.is_some_and(|end| end <= x.dims()[axis]), "out of range")?;
    Ok(vec![with_length(axis, length, x)])
}

pub fn pad(axis: usize, before: usize, after: usize, x: &Shape) -> Result<Vec<Shape>, String> {
    can_be_cut(axis, x)?;
    let length = x.dims()[axis].saturating_add(before).saturating_add(after);
    Ok(vec![with_length(axis, length, x)])
}

pub fn concat(axis: usize, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    can_be_cut(axis, x[0])?;
    let total: usize = x.iter().map(|s| s.dims().get(axis).copied().unwrap_or(0)).sum();
    let fits = x.iter().all(|s| differ_at_most_along(axis, s, x[0]));
    require(fits, "shapes may differ along the axis only")?;
    Ok(vec![with_length(axis, total, x[0])])
}

fn differ_at_most_along(axis: usize, a: &Shape, b: &Shape) -> bool {
    a.rank() == b.rank() && with_length(axis, a.dims()[axis], b) == *a
}

/// Checks that a tensor has this axis and may have another length along it.
pub fn can_be_cut(axis: usize, x: &Shape) -> Result<(), String> {
    require(axis < x.rank(), "has no such axis")?;
    require(axis > 0 || !x.is_batched(), "the batch axis cannot be cut or joined")
}

/// Shape of `x` with another length along an axis.
fn with_length(axis: usize, length: usize, x: &Shape) -> Shape {
    let mut dims = x.dims().to_vec();
    dims[axis] = length;
    x.with_dims(&dims)
}

pub fn sum(first: usize, last: usize, x: &Shape) -> Result<Vec<Shape>, String> {
    require(first <= last && last < x.rank(), "has no such axes")?;
    let mut dims = x.dims().to_vec();
    dims.drain(first..=last);
    Ok(vec![shape_of(&dims, x.is_batched() && first > 0)])
}

pub fn broadcast(
    first: usize,
    new: &[usize],
    batched: bool,
    x: &Shape,
) -> Result<Vec<Shape>, String> {
    require(first <= x.rank(), "has no such place")?;
    require(!new.is_empty(), "needs a new dimension")?;
    require(!batched || (first == 0 && !x.is_batched()), "the batch comes first")?;
    require(first > 0 || !x.is_batched(), "the batch comes first")?;
    let mut dims = x.dims().to_vec();
    dims.splice(first..first, new.iter().copied());
    Ok(vec![shape_of(&dims, batched || x.is_batched())])
}

/// Shape of the words of the elements of `x`, two in each.
pub fn packed(x: &Shape) -> Result<Vec<Shape>, String> {
    require(x.is_batched(), "must have a batch")?;
    require(x.per_row().is_multiple_of(2), "has an odd number of elements in a sample")?;
    Ok(vec![Shape::batched(&[1, x.per_row() / 2])])
}

pub fn unpacked(dims: &[usize], words: &Shape) -> Result<Vec<Shape>, String> {
    require(words.is_batched() && !dims.is_empty(), "must have a batch")?;
    let shape = Shape::batched(dims);
    let fits = shape.per_row() == 2 * words.per_row();
    require(fits, "has another number of words in a sample")?;
    Ok(vec![shape])
}

/// Shape of a sum over ranks, given the shapes of a rank's term and of its words.
pub fn sum_of_words(x: &[&Shape]) -> Result<Vec<Shape>, String> {
    require(packed(x[0])? == [x[1].clone()], "has other words than its own")?;
    Ok(vec![x[0].clone()])
}

fn shape_of(dims: &[usize], batched: bool) -> Shape {
    if batched { Shape::batched(dims) } else { Shape::fixed(dims) }
}
