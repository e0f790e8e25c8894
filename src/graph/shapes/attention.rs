//! Shape rules of attention and its gradient.

use super::checks::{are_numbered, are_samples, is_probability, require};
use crate::{AttentionOptions, CacheUpdateOptions, CachedAttentionOptions};
use potluck_core::Shape;

/// Returns the shapes of `y` and `lse`.
pub fn attention(options: &AttentionOptions, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    is_probability(options.dropout)?;
    let (tensors, samples) = x.split_at(options.tensors());
    are_samples(samples)?;
    are_numbered(options.first_head, options.heads)?;
    let AttentionOptions { heads, kv_heads, head_width, .. } = *options;
    if heads == 0 {
        return Err("needs at least 1 head".into());
    }
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(format!("{heads} heads cannot share {kv_heads} heads of keys evenly"));
    }
    if head_width == 0 {
        return Err("needs heads of at least 1 column".into());
    }
    let t = tokens(tensors)?;
    for (input, shape) in tensors.iter().enumerate() {
        are_columns_of(options, input, shape)?;
    }
    let [columns, ..] = options.columns();
    Ok(vec![Shape::batched(&[1, t, columns]), Shape::batched(&[1, heads, t])])
}

/// Returns the shapes of the gradients by the tensors with queries, keys and values.
pub fn attention_grad(options: &AttentionOptions, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let tensors = &x[..options.tensors()];
    let [y, lse, dy] = [0, 1, 2].map(|nth| x[tensors.len() + nth]);
    are_samples(&x[tensors.len() + 3..])?;
    // The forward pass takes the samples too, which are checked already.
    let forward = attention(options, tensors)?;
    if *y != forward[0] || *dy != forward[0] || *lse != forward[1] {
        return Err("y and dy are (b, t, heads d), lse (b, heads, t)".into());
    }
    Ok(tensors.iter().map(|shape| (*shape).clone()).collect())
}

/// Number of tokens of a sample, which all tensors have.
fn tokens(tensors: &[&Shape]) -> Result<usize, String> {
    let mut known = None;
    for shape in tensors {
        let [b, t, _] = *shape.dims() else {
            return Err("queries, keys and values are (b, t, ..)".into());
        };
        if !shape.is_batched() {
            return Err(
                "tensors are (b, t, ..) with the batch b, which inputs have; this has none".into(),
            );
        }
        if b != 1 {
            return Err(format!("tensors are (b, t, ..), one sequence per sample, and has {b}"));
        }
        if *known.get_or_insert(t) != t {
            return Err("queries, keys and values have the same number of tokens".into());
        }
    }
    known.ok_or_else(|| "has no queries, keys and values".into())
}

/// Checks that each column of an input belongs to one place of queries, keys or values.
fn are_columns_of(options: &AttentionOptions, input: usize, shape: &Shape) -> Result<(), String> {
    let mut own: Vec<(usize, usize)> = Vec::new();
    for (place, columns) in options.places.iter().zip(options.columns()) {
        if place.input == input {
            own.push((place.first, columns));
        }
    }
    own.sort_unstable();
    let mut end = 0;
    for (first, columns) in own {
        if first != end {
            let column = first.min(end);
            return Err(format!(
                "column {column} of input {input} must belong to one of queries, keys and values"
            ));
        }
        end = first.saturating_add(columns);
    }
    if end != shape.last() {
        return Err(format!("input {input} has {} columns, and needs {end}", shape.last()));
    }
    Ok(())
}

/// Returns the shape of a cache with the keys and values of some rows.
pub fn cache_update(options: &CacheUpdateOptions, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let (tensors, places) = x.split_at(options.tensors());
    let tokens = tokens(tensors)?;
    are_places(places[0], tokens)?;
    for place in options.places {
        let own = tensors[place.input].last();
        if place.first.saturating_add(options.columns()) > own {
            let from = place.first;
            let wanted = options.columns();
            return Err(format!("input {} has no {wanted} columns from {from} on", place.input));
        }
    }
    let [sequences, _, context, _] = options.cache();
    are_numbered(0, sequences.saturating_mul(context))?;
    Ok(vec![Shape::fixed(&options.cache())])
}

/// Returns the shape of `y`.
pub fn cached_attention(
    options: &CachedAttentionOptions,
    x: &[&Shape],
) -> Result<Vec<Shape>, String> {
    let queries = x[0];
    let cache = x[1];
    let tokens = tokens(&[queries])?;
    are_places(x[2], tokens)?;
    let CachedAttentionOptions { heads, first } = *options;
    let [_, both, _, d] = *cache.dims() else {
        return Err("the cache is (sequences, 2 kv_heads, t, d)".into());
    };
    if cache.is_batched() || !both.is_multiple_of(2) {
        return Err("the cache is (sequences, 2 kv_heads, t, d)".into());
    }
    let kv_heads = both / 2;
    if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(format!("{heads} heads cannot share {kv_heads} heads of keys evenly"));
    }
    let columns = heads.saturating_mul(d);
    if first.saturating_add(columns) > queries.last() {
        return Err(format!("the queries have no {columns} columns from {first} on"));
    }
    Ok(vec![Shape::batched(&[1, tokens, columns])])
}

/// Checks that each row of some tensors has a place in a cache.
fn are_places(places: &Shape, tokens: usize) -> Result<(), String> {
    let is_fit = places.is_batched() && *places.dims() == [1, tokens];
    require(is_fit, "places are (b, n), as many as rows")
}

const ROTARY: &str = "x is (b, t, heads d), the table (t, d) or (b, t, d)";

/// Returns the shape of the rotated heads.
pub fn rotary(x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let heads = x[0];
    let table = x[1];
    let [_, t, columns] = *heads.dims() else {
        return Err(ROTARY.into());
    };
    let [ref rows @ .., tokens, d] = *table.dims() else {
        return Err(ROTARY.into());
    };
    let is_of_rows = table.is_batched() && rows == [1];
    let is_of_positions = !table.is_batched() && rows.is_empty();
    if tokens != t || !(is_of_rows || is_of_positions) {
        return Err(ROTARY.into());
    }
    if !d.is_multiple_of(2) || !columns.is_multiple_of(d) {
        return Err(format!("{columns} columns are not of heads of {d}, in two halves each"));
    }
    Ok(vec![heads.clone()])
}
