//! Convolutions, poolings and resizing, which PyTorch has with channels first.

use potluck_core::TensorId;
use potluck_graph::{Conv2dOptions, Interpolation, Pool2dOptions, PoolDivisor};
use serde_json::Value;

use super::calls::Arguments;
use super::{Built, Refusal};

/// Returns pictures or sequences with the channels last, of a batch of one if they have none.
fn channels_last(a: &mut Arguments, x: TensorId, axes: usize) -> Result<TensorId, Refusal> {
    let mut x = x;
    if a.rank(x) == axes + 1 {
        x = a.b.unsqueeze(x, &[0])?;
    }
    if a.rank(x) != axes + 2 {
        return Err(Refusal::Unknown);
    }
    let order: Vec<usize> = [0].into_iter().chain(2..axes + 2).chain([1]).collect();
    Ok(a.b.permute(x, &order)?)
}

/// Returns a result with the channels first, and without a batch if the argument has none.
fn channels_first(a: &mut Arguments, y: TensorId, axes: usize) -> Built {
    let order: Vec<usize> = [0, axes + 1].into_iter().chain(1..axes + 1).collect();
    let y = a.b.permute(y, &order)?;
    if a.rank(a.tensor(0)?) == axes + 2 {
        return Ok(vec![y]);
    }
    let dims = a.dims(y);
    Ok(vec![a.b.reshape(y, &dims[1..])?])
}

/// Returns a number per axis: one for all, or a list of them.
fn pair(a: &Arguments, value: &Value, default: usize) -> Result<[usize; 2], Refusal> {
    if value.is_null() || value.as_array().is_some_and(Vec::is_empty) {
        return Ok([default; 2]);
    }
    let list = a.lengths(value)?;
    Ok([list[0] as usize, list[list.len() - 1] as usize])
}

pub(super) fn convolution(a: &mut Arguments, op: &str) -> Built {
    let axes = if op.ends_with("1d") { 1 } else { 2 };
    let [x, weight] = [a.tensor(0)?, a.tensor(1)?];
    let bias = a.tensor(2).ok();
    let padding = a.argument(9, "padding").clone();
    let options = Conv2dOptions {
        stride: pair(a, a.argument(9, "stride"), 1)?,
        padding: if padding.is_string() { [0; 2] } else { pair(a, &padding, 0)? },
        dilation: pair(a, a.argument(9, "dilation"), 1)?,
        groups: a.argument(9, "groups").as_u64().unwrap_or(1) as usize,
    };
    let more = pair(a, a.argument(9, "output_padding"), 0)?;
    let x = channels_last(a, x, axes)?;
    let y = match op {
        "conv1d" if padding == "same" => a.b.conv1d_same(x, weight, bias, options),
        "conv2d" if padding == "same" => a.b.conv2d_same(x, weight, bias, options),
        "conv1d" => a.b.conv1d(x, weight, bias, options),
        "conv2d" => a.b.conv2d(x, weight, bias, options),
        "conv_transpose1d" => a.b.conv_transpose1d(x, weight, bias, options, more[0]),
        _ => a.b.conv_transpose2d(x, weight, bias, options, more),
    }?;
    channels_first(a, y, axes)
}

pub(super) fn pooling(a: &mut Arguments, op: &str) -> Built {
    let axes = if op.ends_with("1d") { 1 } else { 2 };
    if a.is(9, "return_indices") {
        return Err(Refusal::Unknown);
    }
    let kernel = pair(a, a.argument(1, "kernel_size"), 1)?;
    let strides = pair(a, a.argument(2, "stride"), 0)?;
    let options = Pool2dOptions {
        kernel,
        stride: if strides == [0; 2] { kernel } else { strides },
        padding: pair(a, a.argument(3, "padding"), 0)?,
        dilation: pair(a, a.argument(9, "dilation"), 1)?,
        ceil_mode: a.is(4, "ceil_mode"),
    };
    let divisor = match a.argument(6, "divisor_override").as_f64() {
        Some(number) => PoolDivisor::Number(number as f32),
        None if a.argument(5, "count_include_pad") == false => PoolDivisor::Inside,
        None => PoolDivisor::Padded,
    };
    let x = a.tensor(0)?;
    let x = channels_last(a, x, axes)?;
    let y = match op {
        "max_pool1d" => a.b.max_pool1d(x, options),
        "max_pool2d" => a.b.max_pool2d(x, options),
        "avg_pool1d" => a.b.avg_pool1d(x, options, divisor),
        _ => a.b.avg_pool2d_over(x, options, divisor),
    }?;
    channels_first(a, y, axes)
}

pub(super) fn adaptive_pooling(a: &mut Arguments) -> Built {
    let x = a.tensor(0)?;
    let x = channels_last(a, x, 2)?;
    let dims = a.dims(x);
    let given = a.argument(1, "output_size").clone();
    let size = [0, 1].map(|axis| {
        let one = if given.is_array() { &given[axis] } else { &given };
        one.as_u64().map_or(dims[1 + axis], |size| size as usize)
    });
    let y = a.b.adaptive_avg_pool2d(x, size)?;
    channels_first(a, y, 2)
}

/// Resizes to a size, or by a factor where the places are those of the size that it makes.
pub(super) fn interpolation(a: &mut Arguments, op: &str) -> Built {
    let x = a.tensor(0)?;
    let axes = a.rank(x) - 2;
    let align_corners = a.is(9, "align_corners");
    let by = match a.argument(9, "mode").as_str() {
        None if op == "upsample_nearest" => Interpolation::Nearest,
        Some("nearest") => Interpolation::Nearest,
        Some("nearest-exact") => Interpolation::NearestExact,
        Some("linear" | "bilinear" | "trilinear") => Interpolation::Linear { align_corners },
        Some("bicubic") => Interpolation::Cubic { align_corners },
        Some("area") => Interpolation::Area,
        _ => return Err(Refusal::Unknown),
    };
    let x = channels_last(a, x, axes)?;
    let known = a.dims(x);
    let size = a.argument(1, "size");
    let lengths: Vec<usize> = if !size.is_null() {
        let list = a.lengths(size)?;
        (0..axes).map(|axis| list[axis.min(list.len() - 1)] as usize).collect()
    } else {
        // With another factor than that of the sizes, places differ unless they are aligned.
        let is_exact = a.is(9, "recompute_scale_factor") || align_corners;
        let factor = a.argument(9, "scale_factor").as_f64().ok_or(Refusal::Unknown)?;
        if !is_exact && by != Interpolation::Area {
            return Err(Refusal::Unknown);
        }
        (0..axes).map(|axis| (known[1 + axis] as f64 * factor) as usize).collect()
    };
    let y = a.b.interpolate(x, &(1..=axes).collect::<Vec<_>>(), &lengths, by)?;
    channels_first(a, y, axes)
}
