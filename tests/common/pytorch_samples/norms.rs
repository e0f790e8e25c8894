//! Normalizations, of which PyTorch has the channels second and the builder last, and attention,
//! whose heads the builder has side by side in the columns.

use potluck_core::TensorId;
use potluck_graph::builder::BuildResult;
use potluck_graph::{DotAttentionOptions, Op};

use super::calls::Arguments;
use super::{Built, Refusal};

/// Returns `x (n, c, ..)` as `(n, .., c)`.
fn with_channels_last(a: &mut Arguments, x: TensorId) -> BuildResult {
    let axes: Vec<usize> = [0].into_iter().chain(2..a.rank(x)).chain([1]).collect();
    a.b.permute(x, &axes)
}

/// Returns `x (n, .., c)` as `(n, c, ..)`, behind the axis of the batch if it has one.
fn with_channels_second(a: &mut Arguments, x: TensorId) -> BuildResult {
    let (rank, first) = (a.rank(x), usize::from(a.b.shape(x).is_batched()));
    let mut axes: Vec<usize> = (0..=first).collect();
    axes.push(rank - 1);
    axes.extend(first + 1..rank - 1);
    a.b.permute(x, &axes)
}

/// Returns the same tensor as the only row of a batch.
fn in_a_batch(a: &mut Arguments, x: TensorId) -> BuildResult {
    a.b.apply(Op::Broadcast { first: 0, dims: vec![1], batched: true }, &[x])
}

fn eps(a: &Arguments, at: usize, default: f64) -> Result<f32, Refusal> {
    let eps = a.number(at, "eps", default)?;
    if eps < 0.0 { Err(Refusal::Because("eps is 0 or more")) } else { Ok(eps) }
}

/// Returns a weight or bias of `c` values, or a constant in its place.
fn affine(
    a: &mut Arguments,
    at: usize,
    name: &str,
    c: usize,
    default: f32,
) -> Result<TensorId, Refusal> {
    if let Ok(given) = a.named_tensor(at, name) {
        return Ok(a.b.reshape(given, &[c])?);
    }
    Ok(a.constant(name, &[c], vec![default; c])?)
}

/// Layer and root mean square normalization over the last axes.
pub(super) fn over_last_axes(a: &mut Arguments, op: &str) -> Built {
    let x = a.tensor(0)?;
    let dims = a.dims(x);
    let axes = a.argument(1, "normalized_shape").as_array().ok_or(Refusal::Unknown)?.len();
    let c: usize = dims[dims.len() - axes..].iter().product();
    let rows = a.b.reshape(x, &[dims.iter().product::<usize>() / c, c])?;
    let weight = affine(a, 2, "weight", c, 1.0)?;
    let y = if op == "layer_norm" {
        let bias = affine(a, 3, "bias", c, 0.0)?;
        let eps = eps(a, 4, 1e-5)?;
        a.b.layer_norm_eps(rows, weight, Some(bias), eps)?
    } else {
        let eps = eps(a, 3, f64::from(f32::EPSILON))?;
        a.b.rms_norm(rows, weight, eps)?
    };
    Ok(vec![a.b.reshape(y, &dims)?])
}

/// Group normalization, and that of each channel of a sample.
pub(super) fn by_groups(a: &mut Arguments, op: &str) -> Built {
    let x = a.tensor(0)?;
    let c = a.dims(x)[1];
    let groups = if op == "group_norm" { a.number(1, "num_groups", 1.0)? as usize } else { c };
    let (weight, bias) = (affine(a, 9, "weight", c, 1.0)?, affine(a, 9, "bias", c, 0.0)?);
    let eps = eps(a, 9, 1e-5)?;
    let last = with_channels_last(a, x)?;
    let y = a.b.group_norm_eps(last, groups, [weight, bias], eps)?;
    Ok(vec![with_channels_second(a, y)?])
}

/// Batch normalization: of a batch whose row has all samples, or by running averages.
pub(super) fn over_batch(a: &mut Arguments) -> Built {
    let x = a.tensor(0)?;
    let c = a.dims(x)[1];
    let (mean, variance) =
        (affine(a, 1, "running_mean", c, 0.0)?, affine(a, 2, "running_var", c, 1.0)?);
    let (weight, bias) = (affine(a, 3, "weight", c, 1.0)?, affine(a, 4, "bias", c, 0.0)?);
    let eps = eps(a, 9, 1e-5)?;
    let last = with_channels_last(a, x)?;
    if a.is(9, "training") {
        let rows = in_a_batch(a, last)?;
        let all = [rows, weight, bias, mean, variance];
        let y = a.b.apply_all(Op::BatchNorm { eps }, &all)?[0];
        return Ok(vec![with_channels_second(a, y)?]);
    }
    let apart = a.b.sub(last, mean)?;
    let above = a.b.offset(variance, eps)?;
    let deviation = a.b.sqrt(above)?;
    let normal = a.b.div(apart, deviation)?;
    let scaled = a.b.mul(normal, weight)?;
    let y = a.b.add(scaled, bias)?;
    Ok(vec![with_channels_second(a, y)?])
}

/// Attention of `(.., t, e)`, each of whose leading entries is a head of its own.
pub(super) fn attention(a: &mut Arguments) -> Built {
    let known = ["is_causal", "dropout_p", "enable_gqa", "attn_mask", "scale"];
    let has_dropout = a.number(9, "dropout_p", 0.0)? != 0.0;
    if a.has_keywords_but(&known) || has_dropout || a.count() > 3 {
        return Err(Refusal::Unknown);
    }
    let mut columns = Vec::new();
    let mut heads = Vec::new();
    for at in 0..3 {
        let x = a.tensor(at)?;
        let dims = a.dims(x);
        let [lead @ .., t, e] = &dims[..] else { return Err(Refusal::Unknown) };
        let all: usize = lead.iter().product();
        heads.push(all);
        let rows = a.b.reshape(x, &[all, *t, *e])?;
        let rows = a.b.permute(rows, &[1, 0, 2])?;
        let rows = a.b.reshape(rows, &[*t, all * e])?;
        columns.push(in_a_batch(a, rows)?);
    }
    if heads[1] != heads[2] || !heads[0].is_multiple_of(heads[1]) {
        return Err(Refusal::Unknown);
    }
    let mut options = DotAttentionOptions::new(heads[0]);
    options.kv_heads = heads[1];
    options.causal = a.is(9, "is_causal");
    if !a.argument(9, "scale").is_null() {
        options.scale = Some(a.number(9, "scale", 1.0)?);
    }
    if let Ok(mask) = a.named_tensor(9, "attn_mask") {
        let dims = a.dims(mask);
        let [lead @ .., t, s] = &dims[..] else { return Err(Refusal::Unknown) };
        let all: usize = lead.iter().product();
        if all != 1 && all != heads[0] {
            return Err(Refusal::Unknown);
        }
        options.mask = Some(a.b.reshape(mask, &[all, *t, *s])?);
    }
    let y = a.b.scaled_dot_product_attention([columns[0], columns[1], columns[2]], &options)?;
    let (of_query, of_value) = (a.dims(a.tensor(0)?), a.dims(a.tensor(2)?));
    let [lead @ .., t, _] = &of_query[..] else { return Err(Refusal::Unknown) };
    let e = of_value[of_value.len() - 1];
    let rows = a.b.reshape(y, &[1, *t, heads[0], e])?;
    let rows = a.b.permute(rows, &[0, 2, 1, 3])?;
    Ok(vec![a.b.reshape(rows, &[&[1], lead, &[*t, e]].concat())?])
}
