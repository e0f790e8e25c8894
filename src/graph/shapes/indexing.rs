//! Shape rules of gather and scatter-add.

use super::checks::require;
use super::layout::can_be_cut;
use crate::pictures::PLACES_MAX;
use potluck_core::Shape;

/// Returns the shape of the entries of `x` along an axis at `places`.
pub fn gather(axis: usize, x: &Shape, places: &Shape) -> Result<Vec<Shape>, String> {
    can_be_cut(axis, x)?;
    let dims = x.dims();
    let own = places.dims();
    require(dims[axis] <= PLACES_MAX, "an f32 numbers no more than 2^24 entries")?;
    let is_shared = own.len() == 1;
    let fits = is_shared
        || own.len() == axis + 1 && own[..axis] == dims[..axis]
        || own.len() == dims.len()
            && own[..axis] == dims[..axis]
            && own[axis + 1..] == dims[axis + 1..];
    // A batch may select rows of a table.
    let has_batch = if axis == 0 || is_shared {
        axis == 0 || !places.is_batched()
    } else {
        places.is_batched() == x.is_batched()
    };
    if !fits || !has_batch {
        return Err(format!(
            "places along axis {axis} are (m), {}, or as many as x has along all other axes",
            if axis == 0 { "or (b*m) of a batch" } else { "(.., m) with the axes of x before it" }
        ));
    }
    let mut wanted = dims.to_vec();
    wanted[axis] = if is_shared { own[0] } else { own[axis] };
    let is_batched = x.is_batched() || places.is_batched();
    Ok(vec![if is_batched { Shape::batched(&wanted) } else { Shape::fixed(&wanted) }])
}

/// Shape with `length` entries along an axis; the entries of `y` are added to them.
pub fn scatter_add(
    axis: usize,
    length: usize,
    places: &Shape,
    y: &Shape,
) -> Result<Vec<Shape>, String> {
    require(axis < y.rank(), "has no such axis")?;
    let mut dims = y.dims().to_vec();
    dims[axis] = length;
    let x = if axis == 0 { Shape::fixed(&dims) } else { y.with_dims(&dims) };
    if gather(axis, &x, places)? != [y.clone()] {
        return Err(format!("has not one place per entry along axis {axis}"));
    }
    Ok(vec![x])
}
