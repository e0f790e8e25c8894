//! Layers as functions: each adds the parameters of a layer of PyTorch's `torch.nn`, under its
//! names (`NAME.weight`, `NAME.bias`) and with its initial values, and computes the layer. They use
//! the methods of [`Builder`], which take parameters as tensors.
//!
//! Weights may be in a file of PyTorch's `state_dict`: the names fit a module whose layer is the
//! attribute `NAME`.

use super::builder::{BuildResult, Builder};
use super::op::Cell;
use super::pictures::Conv2dOptions;
use super::shapes::ShapeError;
use super::{AttentionOptions, Init};
use potluck_core::{Shape, TensorId};

/// Returns the initial values of PyTorch's layers: uniform up to one over the root of the number
/// of inputs of an output (He et al. 2015, with `a = sqrt(5)`).
fn uniform(inputs: usize) -> Init {
    Init::Uniform { bound: (inputs.max(1) as f32).sqrt().recip() }
}

/// Computes a linear layer of the last dimension, `x (.., c) -> (.., outputs)`, with
/// `NAME.weight (outputs, c)` and `NAME.bias (outputs)`: PyTorch's `Linear`.
///
/// # Errors
/// Returns [`ShapeError`] if `x` has no dimension, or `outputs` is 0.
///
/// # Panics
/// If another parameter has one of the names.
pub fn linear(b: &mut Builder, name: &str, x: TensorId, outputs: usize) -> BuildResult {
    let weight = linear_weight(b, name, x, outputs)?;
    let bias = b.parameter(&format!("{name}.bias"), &[outputs], uniform(b.shape(x).last()));
    b.linear(x, weight, Some(bias))
}

/// Computes a linear layer without bias: PyTorch's `Linear(bias=False)`.
///
/// # Errors
/// Returns the errors of [`linear`].
///
/// # Panics
/// Like [`linear`].
pub fn linear_without_bias(
    b: &mut Builder,
    name: &str,
    x: TensorId,
    outputs: usize,
) -> BuildResult {
    let weight = linear_weight(b, name, x, outputs)?;
    b.linear(x, weight, None)
}

fn linear_weight(b: &mut Builder, name: &str, x: TensorId, outputs: usize) -> BuildResult {
    let inputs = columns(b, "linear", name, x)?;
    if outputs == 0 {
        return Err(refused("linear", name, b.shape(x), "wants at least one output".into()));
    }
    Ok(b.parameter(&format!("{name}.weight"), &[outputs, inputs], uniform(inputs)))
}

/// Size of the last dimension, beside the batch.
fn columns(b: &Builder, op: &str, name: &str, x: TensorId) -> Result<usize, ShapeError> {
    let shape = b.shape(x);
    if shape.rank() == 0 || (shape.rank() == 1 && shape.is_batched()) {
        return Err(refused(op, name, shape, "wants x (.., c)".into()));
    }
    Ok(shape.last())
}

/// Looks up the rows of `ids (..)` in the table `NAME.weight (rows, width)`, which begins as
/// standard normal numbers: PyTorch's `Embedding`.
///
/// # Errors
/// Returns [`ShapeError`] if `ids` are no integers.
///
/// # Panics
/// Like [`linear`].
pub fn embedding(
    b: &mut Builder,
    name: &str,
    ids: TensorId,
    [rows, width]: [usize; 2],
) -> BuildResult {
    let table = b.parameter(&format!("{name}.weight"), &[rows, width], Init::Normal { std: 1.0 });
    b.embedding(ids, table)
}

/// Computes layer normalization over the last dimension, with `NAME.weight (c)` and
/// `NAME.bias (c)`: PyTorch's `LayerNorm`, whose `eps` is 1e-5.
///
/// # Errors
/// Returns [`ShapeError`] if `x` has no dimension.
///
/// # Panics
/// Like [`linear`].
pub fn layer_norm(b: &mut Builder, name: &str, x: TensorId, eps: f32) -> BuildResult {
    let [weight, bias] = affine(b, "layer_norm", name, x)?;
    b.layer_norm_eps(x, weight, Some(bias), eps)
}

/// Computes root mean square normalization over the last dimension, with `NAME.weight (c)`:
/// PyTorch's `RMSNorm`, whose `eps` is `f32::EPSILON`.
///
/// # Errors
/// Returns [`ShapeError`] if `x` has no dimension.
///
/// # Panics
/// Like [`linear`].
pub fn rms_norm(b: &mut Builder, name: &str, x: TensorId, eps: f32) -> BuildResult {
    let c = columns(b, "rms_norm", name, x)?;
    let weight = b.parameter(&format!("{name}.weight"), &[c], Init::Ones);
    b.rms_norm(x, weight, eps)
}

/// Computes group normalization of `x (b, .., c)`, the channels last, with `NAME.weight (c)` and
/// `NAME.bias (c)`: PyTorch's `GroupNorm`, whose `eps` is 1e-5.
///
/// # Errors
/// Returns [`ShapeError`] if `groups` does not divide the channels.
///
/// # Panics
/// Like [`linear`].
pub fn group_norm(
    b: &mut Builder,
    name: &str,
    x: TensorId,
    groups: usize,
    eps: f32,
) -> BuildResult {
    let [weight, bias] = affine(b, "group_norm", name, x)?;
    b.group_norm_eps(x, groups, [weight, bias], eps)
}

/// Adds the weight and the bias of a norm over the last dimension.
fn affine(b: &mut Builder, op: &str, name: &str, x: TensorId) -> Result<[TensorId; 2], ShapeError> {
    let c = [columns(b, op, name, x)?];
    let parts = [("weight", Init::Ones), ("bias", Init::Zeros)];
    Ok(parts.map(|(part, init)| b.parameter(&format!("{name}.{part}"), &c, init)))
}

/// Options of [`batch_norm`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNormOptions {
    /// Addend of the variance.
    pub eps: f32,
    /// Weight of a step's statistics in the running averages.
    pub momentum: f32,
}

/// PyTorch's values: `eps = 1e-5`, `momentum = 0.1`.
impl Default for BatchNormOptions {
    fn default() -> Self {
        Self { eps: 1e-5, momentum: 0.1 }
    }
}

/// Computes batch normalization of `x (b, .., c)` by channel, with `NAME.weight` and
/// `NAME.bias (c)`, and the running averages `NAME.running_mean` and `NAME.running_var (c)`:
/// PyTorch's `BatchNorm1d` and `BatchNorm2d`.
///
/// # Errors
/// Returns [`ShapeError`] if `x` is not batched or has no channels.
///
/// # Panics
/// Like [`linear`].
pub fn batch_norm(
    b: &mut Builder,
    name: &str,
    x: TensorId,
    options: BatchNormOptions,
) -> BuildResult {
    b.batch_norm_with(name, x, options)
}

/// Computes a 2D convolution of pictures `x (b, h, w, c)` with square kernels, with
/// `NAME.weight (outputs, c/groups, kernel, kernel)` and `NAME.bias (outputs)`: PyTorch's `Conv2d`
/// of pictures with channels last. See [`Builder::conv2d`].
///
/// # Errors
/// Returns [`ShapeError`] if `x` has other dimensions, the kernel is larger than the padded
/// picture, or the groups do not divide the channels.
///
/// # Panics
/// Like [`linear`].
pub fn conv2d(
    b: &mut Builder,
    name: &str,
    x: TensorId,
    [outputs, kernel]: [usize; 2],
    options: Conv2dOptions,
) -> BuildResult {
    let channels = b.shape(x).last();
    if options.groups == 0 || !channels.is_multiple_of(options.groups) {
        let why = format!("{} groups do not divide {channels} channels", options.groups);
        return Err(refused("conv2d", name, b.shape(x), why));
    }
    require_pictures(b, "conv2d", name, x, [outputs, kernel])?;
    let dims = [outputs, channels / options.groups, kernel, kernel];
    let [weight, bias] = convolution_parameters(b, name, dims, outputs);
    b.conv2d(x, weight, Some(bias), options)
}

/// Computes a transposed 2D convolution of pictures `x (b, h, w, c)` with square kernels, with
/// `NAME.weight (c, outputs/groups, kernel, kernel)` and `NAME.bias (outputs)`: PyTorch's
/// `ConvTranspose2d` of pictures with channels last, without an output padding. See
/// [`Builder::conv_transpose2d`].
///
/// # Errors
/// Returns [`ShapeError`] if `x` has other dimensions, the padding leaves no pixels, or the groups
/// do not divide the channels and the outputs.
///
/// # Panics
/// Like [`linear`].
pub fn conv_transpose2d(
    b: &mut Builder,
    name: &str,
    x: TensorId,
    [outputs, kernel]: [usize; 2],
    options: Conv2dOptions,
) -> BuildResult {
    let channels = b.shape(x).last();
    let groups = options.groups;
    if groups == 0 || !channels.is_multiple_of(groups) || !outputs.is_multiple_of(groups) {
        let why =
            format!("{groups} groups do not divide {channels} channels and {outputs} outputs");
        return Err(refused("conv_transpose2d", name, b.shape(x), why));
    }
    require_pictures(b, "conv_transpose2d", name, x, [outputs, kernel])?;
    let dims = [channels, outputs / groups, kernel, kernel];
    let [weight, bias] = convolution_parameters(b, name, dims, outputs);
    b.conv_transpose2d(x, weight, Some(bias), options, [0; 2])
}

/// Checks that a convolution has pictures, outputs and a kernel.
fn require_pictures(
    b: &Builder,
    op: &str,
    name: &str,
    x: TensorId,
    [outputs, kernel]: [usize; 2],
) -> Result<(), ShapeError> {
    if b.shape(x).rank() == 4 && outputs > 0 && kernel > 0 {
        return Ok(());
    }
    let why = "wants pictures (b, h, w, c), and at least one output and one place".into();
    Err(refused(op, name, b.shape(x), why))
}

/// Adds the weight of a convolution, with these dimensions, and its bias. Like PyTorch, it derives
/// the initial values from the second dimension as the number of input channels, even for a
/// transposed convolution.
fn convolution_parameters(
    b: &mut Builder,
    name: &str,
    dims: [usize; 4],
    outputs: usize,
) -> [TensorId; 2] {
    let init = uniform(dims[1..].iter().product());
    let weight = b.parameter(&format!("{name}.weight"), &dims, init);
    [weight, b.parameter(&format!("{name}.bias"), &[outputs], init)]
}

/// Computes a recurrent layer over `x (b, t, c) -> (b, t, hidden)` from a state of zeros, with
/// `NAME.weight_ih_l0 (g hidden, c)`, `NAME.weight_hh_l0 (g hidden, hidden)`, `NAME.bias_ih_l0` and
/// `NAME.bias_hh_l0 (g hidden)` of `g` gates: PyTorch's `LSTM` and `GRU` with `batch_first=True`.
/// The state after the last time step is the [`Builder::last_step`].
///
/// # Errors
/// Returns [`ShapeError`] if `x` has other dimensions.
///
/// # Panics
/// Like [`linear`].
pub fn recurrent(
    b: &mut Builder,
    name: &str,
    x: TensorId,
    cell: Cell,
    hidden: usize,
) -> BuildResult {
    let init = uniform(hidden);
    let gates = cell.gates() * hidden;
    let inputs = b.shape(x).last();
    let parameters = [
        ("weight_ih_l0", vec![gates, inputs]),
        ("weight_hh_l0", vec![gates, hidden]),
        ("bias_ih_l0", vec![gates]),
        ("bias_hh_l0", vec![gates]),
    ]
    .map(|(part, dims)| b.parameter(&format!("{name}.{part}"), &dims, init));
    Ok(b.recurrent(cell, x, parameters, &[])?.0)
}

/// Computes self-attention of `x (b, t, c) -> (b, t, c)` with `heads` heads, with the parameters of
/// PyTorch's `MultiheadAttention`: `NAME.in_proj_weight (3c, c)` and `NAME.in_proj_bias (3c)` of
/// queries, keys and values, `NAME.out_proj.weight (c, c)` and `NAME.out_proj.bias (c)`. A token
/// attends to the tokens up to itself if `causal`, else to all.
///
/// # Errors
/// Returns [`ShapeError`] if `x` has other dimensions, or the heads do not divide its columns.
///
/// # Panics
/// Like [`linear`].
pub fn self_attention(
    b: &mut Builder,
    name: &str,
    x: TensorId,
    heads: usize,
    causal: bool,
    dropout: f32,
) -> BuildResult {
    let shape = b.shape(x);
    let c = shape.last();
    if shape.rank() != 3 || heads == 0 || !c.is_multiple_of(heads) {
        let why = format!("wants x (b, t, c) with columns that {heads} heads divide");
        return Err(refused("self_attention", name, shape, why));
    }
    // Glorot and Bengio 2010, of the whole matrix.
    let bound = (6.0 / (4 * c) as f32).sqrt();
    let weight =
        b.parameter(&format!("{name}.in_proj_weight"), &[3 * c, c], Init::Uniform { bound });
    let bias = b.parameter(&format!("{name}.in_proj_bias"), &[3 * c], Init::Zeros);
    let qkv = b.linear(x, weight, Some(bias))?;
    let packed = AttentionOptions::packed(heads, c / heads);
    let places = packed.places.map(|place| (qkv, place.first));
    let y = b.attention_over(places, AttentionOptions { causal, dropout, ..packed })?;
    let weight = b.parameter(&format!("{name}.out_proj.weight"), &[c, c], uniform(c));
    let bias = b.parameter(&format!("{name}.out_proj.bias"), &[c], Init::Zeros);
    b.linear(y, weight, Some(bias))
}

fn refused(op: &str, name: &str, x: &Shape, why: String) -> ShapeError {
    ShapeError { op: format!("{op} {name}"), inputs: x.to_string(), why }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names and shapes of PyTorch's modules of the same sizes.
    #[test]
    fn parameters_are_those_of_pytorch() {
        let mut b = Builder::new();
        let ids = b.input_ids("ids", &[1, 5]);
        let x = embedding(&mut b, "wte", ids, [11, 8]).unwrap();
        let x = layer_norm(&mut b, "ln", x, 1e-5).unwrap();
        let x = self_attention(&mut b, "attn", x, 2, false, 0.0).unwrap();
        let x = recurrent(&mut b, "rnn", x, Cell::Lstm, 6).unwrap();
        let x = rms_norm(&mut b, "norm", x, f32::EPSILON).unwrap();
        linear(&mut b, "fc", x, 3).unwrap();
        let picture = b.input("picture", &[1, 9, 9, 4]);
        let options = Conv2dOptions::default().with_groups(2);
        let picture = conv2d(&mut b, "conv", picture, [6, 3], options).unwrap();
        let picture = batch_norm(&mut b, "bn", picture, BatchNormOptions::default()).unwrap();
        let picture = group_norm(&mut b, "gn", picture, 3, 1e-5).unwrap();
        let grown = conv_transpose2d(&mut b, "up", picture, [4, 2], options.with_stride(2));
        assert_eq!(b.shape(grown.unwrap()).dims(), [1, 14, 14, 4]);
        let graph = b.finish();
        let mut found = Vec::new();
        for parameter in &graph.parameters {
            let dims = graph.tensor(parameter.tensor).shape.dims().to_vec();
            found.push(format!("{} {dims:?}", parameter.name));
        }
        let expected = [
            "wte.weight [11, 8]",
            "ln.weight [8]",
            "ln.bias [8]",
            "attn.in_proj_weight [24, 8]",
            "attn.in_proj_bias [24]",
            "attn.out_proj.weight [8, 8]",
            "attn.out_proj.bias [8]",
            "rnn.weight_ih_l0 [24, 8]",
            "rnn.weight_hh_l0 [24, 6]",
            "rnn.bias_ih_l0 [24]",
            "rnn.bias_hh_l0 [24]",
            "norm.weight [6]",
            "fc.weight [3, 6]",
            "fc.bias [3]",
            "conv.weight [6, 2, 3, 3]",
            "conv.bias [6]",
            "bn.weight [6]",
            "bn.bias [6]",
            "bn.running_mean [6]",
            "bn.running_var [6]",
            "gn.weight [6]",
            "gn.bias [6]",
            "up.weight [6, 2, 2, 2]",
            "up.bias [4]",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn errors_name_the_layer_and_what_it_wants() {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 7]);
        let error = self_attention(&mut b, "attn", x, 2, true, 0.0).unwrap_err().to_string();
        assert_eq!(
            error,
            "self_attention attn of (b, 7): wants x (b, t, c) with columns that 2 heads divide"
        );
        let error = linear(&mut b, "fc", x, 0).unwrap_err().to_string();
        assert!(error.starts_with("linear fc of (b, 7): wants at least one output"), "{error}");
        let picture = b.input("picture", &[1, 4, 4, 6]);
        let options = Conv2dOptions::default().with_groups(4);
        let grown = conv_transpose2d(&mut b, "up", picture, [4, 2], options);
        let error = grown.unwrap_err().to_string();
        assert!(error.ends_with("4 groups do not divide 6 channels and 4 outputs"), "{error}");
        let sample = b.input("sample", &[1]);
        let error = layer_norm(&mut b, "ln", sample, 1e-5).unwrap_err().to_string();
        assert_eq!(error, "layer_norm ln of (b): wants x (.., c)");
    }
}
