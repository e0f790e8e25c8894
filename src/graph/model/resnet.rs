//! A small residual network for pictures of about 32 x 32 (He et al. 2016, section 4.2): a
//! convolution, three stages of residual blocks, where the last two halve height and width and
//! double the channels, and the mean over all places.

use super::pictures::{PictureSizes, finish, input};
use crate::builder::{BuildResult, Builder};
use crate::nn::linear;
use crate::{Conv2dOptions, Graph, Init, ShapeError, Unary};
use potluck_core::TensorId;

/// Normalization between the convolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PictureNorm {
    /// By channel over the rows of a micro-batch.
    Batch,
    /// By picture and group of channels.
    Group,
}

/// Hyperparameters of a residual network.
#[derive(Clone, Debug, PartialEq)]
pub struct ResnetConfig {
    pub sizes: PictureSizes,
    /// Residual blocks of each stage.
    pub blocks: usize,
    /// Channels of the first stage.
    pub width: usize,
    pub norm: PictureNorm,
}

/// Groups of a group norm: the largest of 8, 4, 2 and 1 that divides the channels.
fn groups(channels: usize) -> usize {
    [8, 4, 2].into_iter().find(|groups| channels.is_multiple_of(*groups)).unwrap_or(1)
}

/// Builds the graph of a residual network with inputs `inputs` (b, c, h, w) and `targets`, and the
/// output `outputs` (b, o). Names and initial values as in torchvision's `ResNet`: `conv1`, `bn1`,
/// `layerS.N.conv1`, `.bn1`, `.conv2`, `.bn2`, `.downsample.0` and `.1`, and `fc`, with
/// convolutions from a normal distribution of variance 2 over the outputs that an input reaches.
/// Each residual block is a block, at which pipelines are cut.
///
/// # Errors
/// Returns a `ShapeError` if a picture has no places.
pub fn resnet(config: &ResnetConfig) -> Result<Graph, ShapeError> {
    let mut b = Builder::new();
    b.block("stem");
    let x = input(&mut b, &config.sizes)?;
    let x = conv(&mut b, "conv1", x, [config.width, 3], 1)?;
    let x = norm(&mut b, config, "bn1", x)?;
    let mut x = b.unary(x, Unary::Relu)?;
    for stage in 0..3 {
        for block in 0..config.blocks {
            let name = format!("layer{}.{block}", stage + 1);
            b.block(&name);
            let stride = if stage > 0 && block == 0 { 2 } else { 1 };
            x = residual(&mut b, config, &name, x, config.width << stage, stride)?;
        }
    }
    b.block("fc");
    x = b.global_avg_pool(x)?;
    x = linear(&mut b, "fc", x, config.sizes.outputs)?;
    finish(&mut b, &config.sizes, x)?;
    Ok(b.finish())
}

/// Residual block: `relu(x + norm(conv(relu(norm(conv(x))))))`, with a convolution of 1 x 1 on `x`
/// where sizes differ.
fn residual(
    b: &mut Builder,
    config: &ResnetConfig,
    name: &str,
    x: TensorId,
    channels: usize,
    stride: usize,
) -> BuildResult {
    let y = conv(b, &format!("{name}.conv1"), x, [channels, 3], stride)?;
    let y = norm(b, config, &format!("{name}.bn1"), y)?;
    let y = b.unary(y, Unary::Relu)?;
    let y = conv(b, &format!("{name}.conv2"), y, [channels, 3], 1)?;
    let y = norm(b, config, &format!("{name}.bn2"), y)?;
    let shortcut = if stride > 1 || b.shape(x).last() != channels {
        let x = conv(b, &format!("{name}.downsample.0"), x, [channels, 1], stride)?;
        norm(b, config, &format!("{name}.downsample.1"), x)?
    } else {
        x
    };
    let sum = b.add(y, shortcut)?;
    b.unary(sum, Unary::Relu)
}

/// Convolution without bias, `NAME.weight` (o, c, k, k), which keeps the size or divides it by the
/// stride.
fn conv(
    b: &mut Builder,
    name: &str,
    x: TensorId,
    [outputs, kernel]: [usize; 2],
    stride: usize,
) -> BuildResult {
    let dims = [outputs, b.shape(x).last(), kernel, kernel];
    let std = (2.0 / (outputs * kernel * kernel) as f32).sqrt();
    let weight = b.parameter(&format!("{name}.weight"), &dims, Init::Normal { std });
    let options = Conv2dOptions::default().with_padding(kernel / 2).with_stride(stride);
    b.conv2d(x, weight, None, options)
}

fn norm(b: &mut Builder, config: &ResnetConfig, name: &str, x: TensorId) -> BuildResult {
    match config.norm {
        PictureNorm::Batch => b.batch_norm(name, x),
        PictureNorm::Group => {
            let c = b.shape(x).last();
            let weight = b.parameter(&format!("{name}.weight"), &[c], Init::Ones);
            let bias = b.parameter(&format!("{name}.bias"), &[c], Init::Zeros);
            b.group_norm(x, groups(c), weight, bias)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::MlpLoss;
    use crate::{Parameter, ParameterKind};

    /// The network of He et al. with n = 3 has 0.27 million parameters; here with shortcuts of
    /// 1 x 1 convolutions.
    #[test]
    fn twenty_layers_have_as_many_parameters_as_in_the_paper() {
        let sizes = PictureSizes { picture: [3, 32, 32], outputs: 10, loss: MlpLoss::CrossEntropy };
        for norm in [PictureNorm::Batch, PictureNorm::Group] {
            let config = ResnetConfig { sizes: sizes.clone(), blocks: 3, width: 16, norm };
            let graph = resnet(&config).unwrap();
            let shortcuts = 16 * 32 + 32 * 64 + 2 * (32 + 64);
            assert_eq!(graph.parameter_count(), 269_722 + shortcuts, "{norm:?}");
            // Two running averages of each batch norm: 19 of layers and 2 of shortcuts.
            let is_state = |p: &&Parameter| p.kind != ParameterKind::Trained;
            let states = graph.parameters.iter().filter(is_state).count();
            assert_eq!(states, if norm == PictureNorm::Batch { 2 * 21 } else { 0 }, "{norm:?}");
        }
    }
}
