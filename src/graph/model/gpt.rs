//! GPT-2 (Radford et al. 2019) as a decoder-only transformer: learned position embeddings, layer
//! norm before each sublayer, causal attention, a two-layer MLP, and a head that may share the
//! token embedding. With nanoGPT's settings it has nanoGPT's shapes, names and parameter count.

use super::language::{self, CachedRows};
use super::names::FileName;
use crate::builder::{BuildResult, Builder};
use crate::{AttentionOptions, Graph, Init, ParameterSplit, ShapeError, SplitUnit, Unary};
use potluck_core::TensorId;

/// Hyperparameters of a GPT.
#[derive(Clone, Debug, PartialEq)]
pub struct GptConfig {
    pub vocabulary: usize,
    /// Context length, the largest number of tokens in a sample: t.
    pub context: usize,
    /// Rows of the table of learned positions; the first `context` are used. There are `context`
    /// rows or more, as in a model that was trained on longer samples.
    pub positions: usize,
    pub layers: usize,
    pub heads: usize,
    /// Channels of the residual stream: c, a multiple of `heads`.
    pub width: usize,
    /// True if linear layers and layer norms have biases.
    pub bias: bool,
    /// Dropout probability in training, of embeddings, attention probabilities and the output of
    /// each sublayer.
    pub dropout: f32,
    /// True if the output head shares the token embedding (weight tying).
    pub tie: bool,
    pub activation: Unary,
}

/// Parameters of a GPT in Hugging Face's files, whose linear layers are `Conv1D`: `(in, out)`.
pub const NAMES: &[FileName] = &[
    FileName::same("wte.weight", "transformer.wte.weight"),
    FileName::same("wpe.weight", "transformer.wpe.weight"),
    FileName::same("h.#.ln_1.weight", "transformer.h.#.ln_1.weight"),
    FileName::same("h.#.ln_1.bias", "transformer.h.#.ln_1.bias"),
    FileName::transposed("h.#.attn.c_attn.weight", "transformer.h.#.attn.c_attn.weight"),
    FileName::same("h.#.attn.c_attn.bias", "transformer.h.#.attn.c_attn.bias"),
    FileName::transposed("h.#.attn.c_proj.weight", "transformer.h.#.attn.c_proj.weight"),
    FileName::same("h.#.attn.c_proj.bias", "transformer.h.#.attn.c_proj.bias"),
    FileName::same("h.#.ln_2.weight", "transformer.h.#.ln_2.weight"),
    FileName::same("h.#.ln_2.bias", "transformer.h.#.ln_2.bias"),
    FileName::transposed("h.#.mlp.c_fc.weight", "transformer.h.#.mlp.c_fc.weight"),
    FileName::same("h.#.mlp.c_fc.bias", "transformer.h.#.mlp.c_fc.bias"),
    FileName::transposed("h.#.mlp.c_proj.weight", "transformer.h.#.mlp.c_proj.weight"),
    FileName::same("h.#.mlp.c_proj.bias", "transformer.h.#.mlp.c_proj.bias"),
    FileName::same("ln_f.weight", "transformer.ln_f.weight"),
    FileName::same("ln_f.bias", "transformer.ln_f.bias"),
    FileName::same("lm_head.weight", "lm_head.weight"),
];

/// Builds the graph of a GPT with inputs `tokens` and `targets` (both (b, t)), the cross-entropy of
/// the next token as its loss, and outside of training the output `logits` of
/// [`next_token_gpt`], of the `position`.
///
/// # Errors
/// Returns a `ShapeError` if `width` is not a multiple of `heads`, or if there are fewer positions
/// than tokens in a sample.
pub fn gpt(config: &GptConfig) -> Result<Graph, ShapeError> {
    let t = config.context;
    let mut b = Builder::new();
    b.block("embed");
    let tokens = b.input_ids("tokens", &[1, t]);
    let targets = b.input_ids("targets", &[1, t]);
    let (x, wte) = transformer(&mut b, config, tokens, None)?;
    b.block("head");
    let (x, head) = head(&mut b, config, x, wte)?;
    language::end_with_loss(&mut b, x, head, targets)?;
    b.split_parameters(|name| split(config, name));
    Ok(b.finish())
}

/// Builds the forward graph of the same GPT that generation runs: `logits` (b, 1, v) of one
/// position per sample, with the inputs `tokens` (b, t) and `position` (b, 1, t), which is 1 at the
/// position and 0 elsewhere.
///
/// # Errors
/// Returns a `ShapeError` if `width` is not a multiple of `heads`, or if there are fewer positions
/// than tokens in a sample.
pub fn next_token_gpt(config: &GptConfig) -> Result<Graph, ShapeError> {
    let t = config.context;
    let mut b = Builder::new();
    b.block("embed");
    let tokens = b.input_ids("tokens", &[1, t]);
    let (x, wte) = transformer(&mut b, config, tokens, None)?;
    b.block("head");
    let (x, head) = head(&mut b, config, x, wte)?;
    language::end_with_logits(&mut b, x, head)?;
    b.split_parameters(|name| split(config, name));
    Ok(b.finish())
}

/// Builds the forward graph of the same GPT, with at least one layer, for tokens one by one: each
/// row is a token of one of the `sequences`, with the inputs `tokens`, `positions` and `places`
/// (all (b, 1)) and the output `logits` (b, 1, v). Keys and values of previous tokens are in caches
/// on the device; see [`crate::Op::CacheUpdate`].
///
/// # Errors
/// Returns a `ShapeError` if `width` is not a multiple of `heads`.
pub fn cached_gpt(config: &GptConfig, sequences: usize) -> Result<Graph, ShapeError> {
    let config = &GptConfig { dropout: 0.0, ..config.clone() };
    let mut b = Builder::new();
    b.block("embed");
    let rows = CachedRows::new(&mut b, sequences, config.context);
    let (x, wte) = transformer(&mut b, config, rows.tokens, Some(&rows))?;
    b.block("head");
    let (x, head) = head(&mut b, config, x, wte)?;
    language::output_logits(&mut b, x, head)?;
    b.split_parameters(|name| split(config, name));
    Ok(b.finish())
}

/// Tensor parallelism of a GPT (Shoeybi et al. 2019): heads of attention, columns of the MLP, and
/// rows of the vocabulary. Norms, positions and biases of the residual stream are whole.
fn split(config: &GptConfig, name: &str) -> Option<ParameterSplit> {
    // Without heads there is no attention to divide.
    let columns = config.width.checked_div(config.heads).unwrap_or(0);
    let heads = SplitUnit::Heads { columns };
    let mut part = name;
    if let Some((_, of_layer)) = name.split_once('.')
        && let Some((_, rest)) = of_layer.split_once('.')
    {
        part = rest;
    }
    match part {
        "wte.weight" | "lm_head.weight" => Some(ParameterSplit::new(0, SplitUnit::Vocabulary)),
        "attn.c_attn.weight" | "attn.c_attn.bias" => {
            Some(ParameterSplit { dimension: 0, packed: 3, unit: heads })
        }
        "attn.c_proj.weight" => Some(ParameterSplit::new(1, heads)),
        "mlp.c_fc.weight" | "mlp.c_fc.bias" => Some(ParameterSplit::new(0, SplitUnit::Columns)),
        "mlp.c_proj.weight" => Some(ParameterSplit::new(1, SplitUnit::Columns)),
        _ => None,
    }
}

/// Adds all layers and returns the residual stream `(b, t, c)` and the token embedding.
fn transformer(
    b: &mut Builder,
    config: &GptConfig,
    tokens: TensorId,
    rows: Option<&CachedRows>,
) -> Result<(TensorId, TensorId), ShapeError> {
    let t = config.context;
    let c = config.width;
    let normal = Init::Normal { std: 0.02 };
    let wte = b.parameter("wte.weight", &[config.vocabulary, c], normal);
    let wpe = b.parameter("wpe.weight", &[config.positions, c], normal);
    let x = b.embedding(tokens, wte)?;
    let positions = match rows {
        Some(rows) => rows.at_positions(b, wpe)?,
        // A table whose rows are all used needs no node.
        None if config.positions == t => wpe,
        None => b.slice(wpe, 0, 0, t)?,
    };
    let x = b.add(x, positions)?;
    let mut x = b.dropout(x, config.dropout)?;

    for layer in 0..config.layers {
        let name = format!("h.{layer}");
        b.block(&name);
        x = attention(b, config, &name, x, rows)?;
        x = feed_forward(b, config, &name, x)?;
    }
    Ok((x, wte))
}

/// Adds the last layer norm of the residual stream `x`, and returns it with the matrix of the head.
fn head(
    b: &mut Builder,
    config: &GptConfig,
    x: TensorId,
    wte: TensorId,
) -> Result<(TensorId, TensorId), ShapeError> {
    let x = layer_norm(b, config, "ln_f", x)?;
    let shape = [config.vocabulary, config.width];
    let head = if config.tie {
        wte
    } else {
        b.parameter("lm_head.weight", &shape, Init::Normal { std: 0.02 })
    };
    Ok((x, head))
}

/// Attention sublayer: `x + proj(attention(qkv(norm(x))))`
fn attention(
    b: &mut Builder,
    config: &GptConfig,
    block: &str,
    x: TensorId,
    rows: Option<&CachedRows>,
) -> BuildResult {
    let c = config.width;
    let y = layer_norm(b, config, &format!("{block}.ln_1"), x)?;
    let qkv = linear(b, config, &format!("{block}.attn.c_attn"), y, [c, 3 * c], 0.02)?;
    let y = match rows {
        Some(rows) => {
            let d = c.checked_div(config.heads).unwrap_or(0);
            let options = AttentionOptions::separate(config.heads, config.heads, d);
            b.cached_attention([0, c, 2 * c].map(|at| (qkv, at)), options, &rows.cache(block))?
        }
        None => b.attention(qkv, config.heads, config.dropout)?,
    };
    residual(b, config, &format!("{block}.attn.c_proj"), x, y, c)
}

/// MLP sublayer: `x + proj(activation(fc(norm(x))))`
fn feed_forward(b: &mut Builder, config: &GptConfig, block: &str, x: TensorId) -> BuildResult {
    let c = config.width;
    let y = layer_norm(b, config, &format!("{block}.ln_2"), x)?;
    let y = linear(b, config, &format!("{block}.mlp.c_fc"), y, [c, 4 * c], 0.02)?;
    let y = b.unary(y, config.activation)?;
    residual(b, config, &format!("{block}.mlp.c_proj"), x, y, 4 * c)
}

/// Adds a projection of `y` to the residual stream `x`. Its initial weights are smaller in a
/// deeper model, so that the variance of the stream does not grow with the number of layers.
fn residual(
    b: &mut Builder,
    config: &GptConfig,
    name: &str,
    x: TensorId,
    y: TensorId,
    from: usize,
) -> BuildResult {
    let std = 0.02 / (2.0 * config.layers as f32).sqrt();
    let y = linear(b, config, name, y, [from, config.width], std)?;
    let y = b.dropout(y, config.dropout)?;
    b.add(x, y)
}

fn linear(
    b: &mut Builder,
    config: &GptConfig,
    name: &str,
    x: TensorId,
    [from, to]: [usize; 2],
    std: f32,
) -> BuildResult {
    let weight = b.parameter(&format!("{name}.weight"), &[to, from], Init::Normal { std });
    let bias = bias(b, config, name, to);
    b.linear(x, weight, bias)
}

fn bias(b: &mut Builder, config: &GptConfig, name: &str, columns: usize) -> Option<TensorId> {
    if !config.bias {
        return None;
    }
    Some(b.parameter(&format!("{name}.bias"), &[columns], Init::Zeros))
}

fn layer_norm(b: &mut Builder, config: &GptConfig, name: &str, x: TensorId) -> BuildResult {
    let c = config.width;
    let weight = b.parameter(&format!("{name}.weight"), &[c], Init::Ones);
    let bias = bias(b, config, name, c);
    b.layer_norm(x, weight, bias)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn with_all_parameters() -> Graph {
        let config = GptConfig {
            vocabulary: 7,
            context: 4,
            positions: 6,
            layers: 2,
            heads: 2,
            width: 8,
            bias: true,
            dropout: 0.0,
            tie: false,
            activation: Unary::Gelu,
        };
        gpt(&config).unwrap()
    }

    /// Counts of nanoGPT's CPU recipe and of GPT-2's smallest model, which are published (nanoGPT
    /// prints the first without position embeddings, as 0.80M).
    #[test]
    fn parameter_counts_are_the_known_ones() {
        let small = GptConfig {
            vocabulary: 65,
            context: 64,
            positions: 64,
            layers: 4,
            heads: 4,
            width: 128,
            bias: false,
            dropout: 0.0,
            tie: true,
            activation: Unary::Gelu,
        };
        assert_eq!(gpt(&small).unwrap().parameter_count(), 804_096);
        let gpt2 = GptConfig {
            vocabulary: 50257,
            context: 1024,
            positions: 1024,
            layers: 12,
            heads: 12,
            width: 768,
            bias: true,
            ..small
        };
        assert_eq!(gpt(&gpt2).unwrap().parameter_count(), 124_439_808);
        let short = GptConfig { context: 64, ..gpt2 };
        assert_eq!(gpt(&short).unwrap().parameter_count(), 124_439_808);
        assert_eq!(next_token_gpt(&short).unwrap().parameter_count(), 124_439_808);
        assert!(gpt(&GptConfig { positions: 63, ..short }).is_err());
    }

    #[test]
    fn a_gpt_without_layers_needs_no_heads_and_one_with_layers_does() {
        let bare = GptConfig {
            vocabulary: 65,
            context: 8,
            positions: 8,
            layers: 0,
            heads: 0,
            width: 16,
            bias: false,
            dropout: 0.0,
            tie: true,
            activation: Unary::Gelu,
        };
        assert_eq!(gpt(&bare).unwrap().parameter_count(), 65 * 16 + 8 * 16 + 16);
        assert!(next_token_gpt(&bare).is_ok());
        let error = gpt(&GptConfig { layers: 1, ..bare }).unwrap_err().to_string();
        assert!(error.contains("needs at least 1 head"), "{error}");
    }
}
