//! Entries by their places, orders, and paddings, which are entries by their places.

use potluck_core::TensorId;
use serde_json::Value;

use super::calls::Arguments;
use super::{Built, Refusal};

/// Returns a tensor with at least one axis.
fn with_axis(a: &mut Arguments, x: TensorId) -> Result<TensorId, Refusal> {
    if a.rank(x) > 0 { Ok(x) } else { Ok(a.b.unsqueeze(x, &[0])?) }
}

pub(super) fn gather(a: &mut Arguments, op: &str) -> Built {
    let x = a.tensor(0)?;
    let [first, second] = if op == "take_along_dim" { [2, 1] } else { [1, 2] };
    let index = a.tensor(second)?;
    let scalar = a.rank(x) == 0 && (op == "index_select" || a.rank(index) == 0);
    let mut x = with_axis(a, x)?;
    let mut index = with_axis(a, index)?;
    if op == "take_along_dim" && a.argument(first, "dim").is_null() {
        let count = a.dims(x).iter().product();
        let flat = a.b.reshape(x, &[count])?;
        let count = a.dims(index).iter().product();
        let index = a.b.reshape(index, &[count])?;
        return Ok(vec![a.b.gather(flat, 0, index)?]);
    }
    let axis = a.axis(a.argument(first, "dim"), a.rank(x))?;
    if op == "take_along_dim" {
        let (mut wide, mut places) = (a.dims(x), a.dims(index));
        for other in (0..wide.len()).filter(|other| *other != axis) {
            let most = wide[other].max(places[other]);
            (wide[other], places[other]) = (most, most);
        }
        x = a.b.broadcast_to(x, &wide)?;
        index = a.b.broadcast_to(index, &places)?;
        // Negative places count from the end.
        let zero = a.constant("zero", &[], vec![0.0])?;
        let is_negative = a.b.less(index, zero)?;
        index = a.plus(index, wide[axis] as f32, is_negative)?;
    }
    let mut y = a.b.gather(x, axis, index)?;
    if scalar {
        y = a.b.reshape(y, &[])?;
    }
    Ok(vec![y])
}

/// Looks up rows of a table; other arguments than the two are for the gradient.
pub(super) fn embedding(a: &mut Arguments) -> Built {
    let [table, index] = [a.tensor(0)?, a.tensor(1)?];
    if a.has_keywords_but(&[]) {
        return Err(Refusal::Unknown);
    }
    let (places, width) = (a.dims(index), a.dims(table)[1]);
    let flat = a.b.reshape(index, &[places.iter().product()])?;
    let rows = a.b.gather(table, 0, flat)?;
    Ok(vec![a.b.reshape(rows, &[&places[..], &[width]].concat())?])
}

pub(super) fn flip(a: &mut Arguments) -> Built {
    let x = a.tensor(0)?;
    let rank = a.rank(x);
    let axes: Result<Vec<usize>, Refusal> =
        a.argument(1, "dims").as_array().unwrap().iter().map(|axis| a.axis(axis, rank)).collect();
    Ok(vec![a.b.flip(x, &axes?)?])
}

/// Returns the largest values along an axis and their places, or the smallest.
pub(super) fn largest(a: &mut Arguments, op: &str) -> Built {
    let given = a.tensor(0)?;
    let x = with_axis(a, given)?;
    let rank = a.rank(x);
    let last = Value::from(-1);
    let of_axis = a.argument(if op == "topk" { 2 } else { 1 }, "dim");
    let axis = a.axis(if of_axis.is_null() { &last } else { of_axis }, rank)?;
    let is_descending = match op {
        "topk" => a.argument(3, "largest") != false,
        _ => a.is(2, "descending"),
    };
    let k = match op {
        "topk" => a.argument(1, "k").as_u64().ok_or(Refusal::Unknown)? as usize,
        _ => a.dims(x)[axis],
    };
    let mut order: Vec<usize> = (0..rank).collect();
    order.swap(axis, rank - 1);
    let moved = a.b.permute(x, &order)?;
    let sign = if is_descending { 1.0 } else { -1.0 };
    let signed = a.b.scale(moved, sign)?;
    let [values, places] = a.b.top_k(signed, k)?;
    let values = a.b.scale(values, sign)?;
    let mut found = Vec::new();
    for tensor in [values, places] {
        let back = a.b.permute(tensor, &order)?;
        found.push(if a.rank(given) == 0 { a.b.reshape(back, &[])? } else { back });
    }
    Ok(found)
}

pub(super) fn one_hot(a: &mut Arguments) -> Built {
    let x = a.tensor(0)?;
    let classes = a.argument(1, "num_classes").as_u64().ok_or(Refusal::Unknown)?;
    Ok(vec![a.b.one_hot(x, classes as usize)?])
}

/// Pads the last axes, or cuts them where a width is negative.
pub(super) fn pad(a: &mut Arguments, variant: &str) -> Built {
    let mut y = a.tensor(0)?;
    let value = a.number(3, "value", 0.0)?;
    let widths = a.lengths(a.argument(1, "pad"))?;
    let rank = a.rank(y);
    for (number, width) in widths.chunks(2).enumerate() {
        let axis = rank - 1 - number;
        let [mut before, mut after] = [width[0], width[1]];
        if variant == "constant" || variant == "circular" {
            let length = a.dims(y)[axis] as i64 + before.min(0) + after.min(0);
            y = a.b.slice(y, axis, -before.min(0) as usize, length as usize)?;
            [before, after] = [before, after].map(|width| width.max(0));
        }
        if variant == "constant" {
            let padding = [before, after].map(|width| width as usize);
            y = a.b.pad(y, axis, padding, value)?;
            continue;
        }
        let length = a.dims(y)[axis] as i64;
        let place = |at: i64| match variant {
            "circular" => at.rem_euclid(length),
            "reflect" if at < 0 => -at,
            "reflect" if at >= length => 2 * (length - 1) - at,
            _ => at.clamp(0, length - 1),
        };
        let places: Vec<usize> = (-before..length + after).map(|at| place(at) as usize).collect();
        y = a.b.take(y, axis, &places)?;
    }
    Ok(vec![y])
}
