//! Shape rules of matrix products, and of embeddings, which are products with one-hot rows.

use super::checks::{are_numbered, require};
use potluck_core::Shape;

pub fn matmul(a: &Shape, b: &Shape, ta: bool, tb: bool) -> Result<Vec<Shape>, String> {
    let rank = a.rank();
    if rank != b.rank() || !(2..=3).contains(&rank) {
        return Err("both sides must have 2 dimensions, or both 3".into());
    }
    let (ad, bd) = (&a.dims()[rank - 2..], &b.dims()[rank - 2..]);
    let (m, ka) = if ta { (ad[1], ad[0]) } else { (ad[0], ad[1]) };
    let (n, kb) = if tb { (bd[0], bd[1]) } else { (bd[1], bd[0]) };
    if ka != kb {
        return Err(format!("sums over {ka} on the left and {kb} on the right"));
    }
    if rank == 3 {
        if a.dims()[0] != b.dims()[0] || a.is_batched() != b.is_batched() {
            return Err("the leading dimensions must be equal".into());
        }
        return Ok(vec![a.with_dims(&[a.dims()[0], m, n])]);
    }
    match (a.is_batched(), b.is_batched()) {
        (false, false) => Ok(vec![Shape::fixed(&[m, n])]),
        (true, false) if !ta => Ok(vec![Shape::batched(&[m, n])]),
        (true, true) if ta && !tb => Ok(vec![Shape::fixed(&[m, n])]),
        _ => Err("the batch must be the rows of the left side, or summed over".into()),
    }
}

/// Returns the outputs of `dy, x`.
pub fn linear_weight_grad(dy: &Shape, x: &Shape) -> Result<Vec<Shape>, String> {
    require(dy.rank() == 2 && x.rank() == 2, "dy is (k, o), x (k, c)")?;
    let mut outputs = matmul(dy, x, true, false)?;
    outputs.push(Shape::fixed(&[dy.last()]));
    Ok(outputs)
}

/// Returns the output of `ids, table`.
pub fn embedding(first: usize, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    require(x[1].rank() == 2 && !x[1].is_batched(), "the table is (v, c)")?;
    are_numbered(first, x[1].dims()[0])?;
    let mut dims = x[0].dims().to_vec();
    dims.push(x[1].last());
    Ok(vec![x[0].with_dims(&dims)])
}

/// Returns the output of `ids, dy`.
pub fn embedding_grad(first: usize, rows: usize, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    are_numbered(first, rows)?;
    let c = x[1].last();
    let dims = [x[0].dims(), &[c]].concat();
    require(*x[1] == x[0].with_dims(&dims), "ids are (..), dy (.., c)")?;
    Ok(vec![Shape::fixed(&[rows, c])])
}
