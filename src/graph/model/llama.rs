//! Llama (Touvron et al. 2023) and its kin, a decoder-only transformer with rotary positions,
//! root mean square norms before each sublayer, keys and values that heads may share, and a gated
//! MLP. Parameters have the names and shapes of Hugging Face's files. By its options it is Llama 2
//! and 3, Qwen2 and Qwen3, Mistral without a sliding window, SmolLM2 and SmolLM3.

use super::language::{self, CachedRows};
use super::names::FileName;
use crate::builder::{BuildResult, Builder};
use crate::{
    AttentionOptions, Graph, Init, ParameterSplit, RotaryAngles, ShapeError, SplitUnit, StateInit,
};
use potluck_core::TensorId;

/// Linear layers of attention that have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionBias {
    None,
    /// Queries, keys and values.
    Qkv,
    /// The output's projection too.
    All,
}

/// Hyperparameters of a Llama.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    pub vocabulary: usize,
    /// Context length, the largest number of tokens in a sample: t.
    pub context: usize,
    pub layers: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Number of heads of keys and values, a divisor of the number of query heads.
    pub kv_heads: usize,
    /// Columns of a head: d, even.
    pub head_width: usize,
    /// Channels of the residual stream: c.
    pub width: usize,
    /// Hidden columns of the MLP.
    pub mlp_width: usize,
    /// Epsilon of the norms, beside the mean square.
    pub norm_eps: f32,
    pub rotary: RotaryAngles,
    pub attention_bias: AttentionBias,
    /// True to normalize each head of queries and keys before it is rotated.
    pub qk_norm: bool,
    /// Number of a layer, from 1, whose multiples have no rotary positions; 0: all have them.
    pub no_rope_every: usize,
    /// True if the output head shares the token embedding (weight tying).
    pub tie: bool,
}

/// Parameters of a Llama, which have the names of Hugging Face's files.
pub const NAMES: &[FileName] = &[
    ours("model.embed_tokens.weight"),
    ours("model.layers.#.input_layernorm.weight"),
    ours("model.layers.#.self_attn.q_proj.weight"),
    ours("model.layers.#.self_attn.q_proj.bias"),
    ours("model.layers.#.self_attn.k_proj.weight"),
    ours("model.layers.#.self_attn.k_proj.bias"),
    ours("model.layers.#.self_attn.v_proj.weight"),
    ours("model.layers.#.self_attn.v_proj.bias"),
    ours("model.layers.#.self_attn.q_norm.weight"),
    ours("model.layers.#.self_attn.k_norm.weight"),
    ours("model.layers.#.self_attn.o_proj.weight"),
    ours("model.layers.#.self_attn.o_proj.bias"),
    ours("model.layers.#.post_attention_layernorm.weight"),
    ours("model.layers.#.mlp.gate_proj.weight"),
    ours("model.layers.#.mlp.up_proj.weight"),
    ours("model.layers.#.mlp.down_proj.weight"),
    ours("model.norm.weight"),
    ours("lm_head.weight"),
];

const fn ours(name: &'static str) -> FileName {
    FileName::same(name, name)
}

/// Initial values of all linear layers and of the embedding, as in transformers.
const NORMAL: Init = Init::Normal { std: 0.02 };

/// Builds the graph of a Llama with inputs `tokens` and `targets` (both (b, t)), the cross-entropy
/// of the next token as its loss, and outside of training the output `logits` of
/// [`next_token_llama`], of the `position`.
///
/// # Errors
/// Returns a `ShapeError` if `kv_heads` does not divide `heads`, or `head_width` is odd.
pub fn llama(config: &LlamaConfig) -> Result<Graph, ShapeError> {
    let mut b = Builder::new();
    b.block("embed");
    let tokens = b.input_ids("tokens", &[1, config.context]);
    let targets = b.input_ids("targets", &[1, config.context]);
    let (x, table) = layers(&mut b, config, tokens, None)?;
    b.block("head");
    let (x, head) = head(&mut b, config, x, table)?;
    language::end_with_loss(&mut b, x, head, targets)?;
    b.split_parameters(|name| split(config, name));
    Ok(b.finish())
}

/// Builds the forward graph of the same Llama that generation runs; see
/// [`next_token_gpt`](super::gpt::next_token_gpt).
///
/// # Errors
/// Like [`llama()`].
pub fn next_token_llama(config: &LlamaConfig) -> Result<Graph, ShapeError> {
    let mut b = Builder::new();
    b.block("embed");
    let tokens = b.input_ids("tokens", &[1, config.context]);
    let (x, table) = layers(&mut b, config, tokens, None)?;
    b.block("head");
    let (x, head) = head(&mut b, config, x, table)?;
    language::end_with_logits(&mut b, x, head)?;
    b.split_parameters(|name| split(config, name));
    Ok(b.finish())
}

/// Builds the forward graph of the same Llama for tokens one by one; see
/// [`cached_gpt`](super::gpt::cached_gpt).
///
/// # Errors
/// Like [`llama()`].
pub fn cached_llama(config: &LlamaConfig, sequences: usize) -> Result<Graph, ShapeError> {
    let mut b = Builder::new();
    b.block("embed");
    let rows = CachedRows::new(&mut b, sequences, config.context);
    let (x, table) = layers(&mut b, config, rows.tokens, Some(&rows))?;
    b.block("head");
    let (x, head) = head(&mut b, config, x, table)?;
    language::output_logits(&mut b, x, head)?;
    b.split_parameters(|name| split(config, name));
    Ok(b.finish())
}

/// Tensor parallelism of a Llama: heads of keys and values with the queries that share them,
/// columns of the MLP, and rows of the vocabulary. Norms are whole, including the norms of queries
/// and keys, whose gradients each rank computes in part.
fn split(config: &LlamaConfig, name: &str) -> Option<ParameterSplit> {
    let of_keys = SplitUnit::Heads { columns: config.head_width };
    let group = config.heads.checked_div(config.kv_heads).unwrap_or(0);
    let of_queries = SplitUnit::Heads { columns: config.head_width * group };
    let mut part = name;
    if let Some(of_layer) = name.strip_prefix("model.layers.")
        && let Some((_, rest)) = of_layer.split_once('.')
    {
        part = rest;
    }
    match part {
        "model.embed_tokens.weight" | "lm_head.weight" => {
            Some(ParameterSplit::new(0, SplitUnit::Vocabulary))
        }
        "self_attn.q_proj.weight" | "self_attn.q_proj.bias" => {
            Some(ParameterSplit::new(0, of_queries))
        }
        "self_attn.k_proj.weight"
        | "self_attn.k_proj.bias"
        | "self_attn.v_proj.weight"
        | "self_attn.v_proj.bias" => Some(ParameterSplit::new(0, of_keys)),
        "self_attn.o_proj.weight" => Some(ParameterSplit::new(1, of_queries)),
        "mlp.gate_proj.weight" | "mlp.up_proj.weight" => {
            Some(ParameterSplit::new(0, SplitUnit::Columns))
        }
        "mlp.down_proj.weight" => Some(ParameterSplit::new(1, SplitUnit::Columns)),
        _ => None,
    }
}

/// Adds all layers and returns the residual stream `(b, t, c)` and the token embedding.
fn layers(
    b: &mut Builder,
    config: &LlamaConfig,
    tokens: TensorId,
    rows: Option<&CachedRows>,
) -> Result<(TensorId, TensorId), ShapeError> {
    let table = [config.vocabulary, config.width];
    let table = b.parameter("model.embed_tokens.weight", &table, NORMAL);
    let angles = StateInit::Rotary(config.rotary);
    let angles = b.device_state("rotary angles", &[config.context, config.head_width], angles);
    let angles = match rows {
        Some(rows) => rows.at_positions(b, angles)?,
        None => angles,
    };
    let mut x = b.embedding(tokens, table)?;
    for layer in 0..config.layers {
        b.block(&format!("layers.{layer}"));
        let name = format!("model.layers.{layer}");
        let every = config.no_rope_every;
        let is_rotary = every == 0 || !(layer + 1).is_multiple_of(every);
        let angles = if is_rotary { Some(angles) } else { None };
        x = attention(b, config, &name, x, RowPositions { angles, rows })?;
        x = feed_forward(b, config, &name, x)?;
    }
    Ok((x, table))
}

/// Adds the last norm of the residual stream `x`, and returns it with the matrix of the head.
fn head(
    b: &mut Builder,
    config: &LlamaConfig,
    x: TensorId,
    table: TensorId,
) -> Result<(TensorId, TensorId), ShapeError> {
    let x = norm(b, config, "model.norm", x)?;
    let head = if config.tie {
        table
    } else {
        b.parameter("lm_head.weight", &[config.vocabulary, config.width], NORMAL)
    };
    Ok((x, head))
}

/// Positions of the rows of an attention layer.
#[derive(Clone, Copy)]
struct RowPositions<'a> {
    /// Rotary angles, if the layer has them.
    angles: Option<TensorId>,
    /// Cache of the tokens before the rows; `None` if the rows are whole samples.
    rows: Option<&'a CachedRows>,
}

/// Attention sublayer: `x + o(attention(q(norm(x)), k(..), v(..)))`
fn attention(
    b: &mut Builder,
    config: &LlamaConfig,
    layer: &str,
    x: TensorId,
    positions: RowPositions,
) -> BuildResult {
    let LlamaConfig { heads, kv_heads, head_width, .. } = *config;
    let name = format!("{layer}.self_attn");
    let y = norm(b, config, &format!("{layer}.input_layernorm"), x)?;
    let has_bias = config.attention_bias != AttentionBias::None;
    let columns = [("q", heads), ("k", kv_heads), ("v", kv_heads)];
    let mut places = Vec::new();
    for (part, heads) in columns {
        let proj = format!("{name}.{part}_proj");
        let mut z = linear(b, &proj, y, [config.width, heads * head_width], has_bias)?;
        if part != "v" {
            z = positioned(b, config, &format!("{name}.{part}_norm"), z, positions.angles)?;
        }
        places.push((z, 0));
    }
    let [q, k, v] = places[..] else { unreachable!("there are three") };
    let options = AttentionOptions::separate(heads, kv_heads, head_width);
    let y = match positions.rows {
        Some(rows) => b.cached_attention([q, k, v], options, &rows.cache(layer))?,
        None => b.attention_over([q, k, v], options)?,
    };
    let has_bias = config.attention_bias == AttentionBias::All;
    let y = linear(b, &format!("{name}.o_proj"), y, [heads * head_width, config.width], has_bias)?;
    b.add(x, y)
}

/// Applies the norm of heads, if the model has one, and the rotary positions to queries or keys
/// `z (b, t, heads d)`.
fn positioned(
    b: &mut Builder,
    config: &LlamaConfig,
    norm: &str,
    z: TensorId,
    angles: Option<TensorId>,
) -> BuildResult {
    let mut z = z;
    if config.qk_norm {
        let dims = b.shape(z).dims().to_vec();
        let d = config.head_width;
        let rows = dims[1] * dims[2] / d;
        let weight = b.parameter(&format!("{norm}.weight"), &[d], Init::Ones);
        let heads = b.reshape(z, &[rows, d])?;
        let heads = b.rms_norm(heads, weight, config.norm_eps)?;
        z = b.reshape(heads, &dims)?;
    }
    match angles {
        Some(angles) => b.rotary(z, angles),
        None => Ok(z),
    }
}

/// MLP sublayer: `x + down(silu(gate(norm(x))) * up(norm(x)))` (Shazeer 2020, SwiGLU)
fn feed_forward(b: &mut Builder, config: &LlamaConfig, layer: &str, x: TensorId) -> BuildResult {
    let (c, hidden) = (config.width, config.mlp_width);
    let y = norm(b, config, &format!("{layer}.post_attention_layernorm"), x)?;
    let gate = linear(b, &format!("{layer}.mlp.gate_proj"), y, [c, hidden], false)?;
    let gate = b.silu(gate)?;
    let up = linear(b, &format!("{layer}.mlp.up_proj"), y, [c, hidden], false)?;
    let y = b.mul(gate, up)?;
    let y = linear(b, &format!("{layer}.mlp.down_proj"), y, [hidden, c], false)?;
    b.add(x, y)
}

fn linear(
    b: &mut Builder,
    name: &str,
    x: TensorId,
    [from, to]: [usize; 2],
    has_bias: bool,
) -> BuildResult {
    let weight = b.parameter(&format!("{name}.weight"), &[to, from], NORMAL);
    let mut bias = None;
    if has_bias {
        bias = Some(b.parameter(&format!("{name}.bias"), &[to], Init::Zeros));
    }
    b.linear(x, weight, bias)
}

fn norm(b: &mut Builder, config: &LlamaConfig, name: &str, x: TensorId) -> BuildResult {
    let weight = b.parameter(&format!("{name}.weight"), &[config.width], Init::Ones);
    b.rms_norm(x, weight, config.norm_eps)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::RotaryScaling;

    fn smollm2() -> LlamaConfig {
        LlamaConfig {
            vocabulary: 49_152,
            context: 64,
            layers: 30,
            heads: 9,
            kv_heads: 3,
            head_width: 64,
            width: 576,
            mlp_width: 1536,
            norm_eps: 1e-5,
            rotary: RotaryAngles { theta: 1e5, scaling: RotaryScaling::None },
            attention_bias: AttentionBias::None,
            qk_norm: false,
            no_rope_every: 0,
            tie: true,
        }
    }

    pub fn with_all_parameters() -> Graph {
        let attention_bias = AttentionBias::All;
        let config =
            LlamaConfig { layers: 2, attention_bias, qk_norm: true, tie: false, ..smollm2() };
        llama(&config).unwrap()
    }

    /// Counts that transformers gives for the published configurations.
    #[test]
    fn parameter_counts_are_the_known_ones() {
        let count = |config: &LlamaConfig| llama(config).unwrap().parameter_count();
        assert_eq!(count(&smollm2()), 134_515_008);
        let qwen3 = LlamaConfig {
            vocabulary: 151_936,
            layers: 28,
            heads: 16,
            kv_heads: 8,
            head_width: 128,
            width: 1024,
            mlp_width: 3072,
            qk_norm: true,
            ..smollm2()
        };
        assert_eq!(count(&qwen3), 596_049_920);
        let qwen2 = LlamaConfig {
            layers: 24,
            heads: 14,
            kv_heads: 2,
            head_width: 64,
            width: 896,
            mlp_width: 4864,
            attention_bias: AttentionBias::Qkv,
            qk_norm: false,
            ..qwen3
        };
        assert_eq!(count(&qwen2), 494_032_768);
        let tinyllama = LlamaConfig {
            vocabulary: 32_000,
            layers: 22,
            heads: 32,
            kv_heads: 4,
            head_width: 64,
            width: 2048,
            mlp_width: 5632,
            tie: false,
            ..smollm2()
        };
        assert_eq!(count(&tinyllama), 1_100_048_384);
    }

    #[test]
    fn every_fourth_layer_has_no_positions_if_so_configured() {
        let config = LlamaConfig { layers: 9, no_rope_every: 4, ..smollm2() };
        let graph = llama(&config).unwrap();
        let mut rotated = Vec::new();
        for node in &graph.nodes {
            if matches!(node.op, crate::Op::Rotary { .. }) {
                rotated.push(graph.blocks[node.block as usize].clone());
            }
        }
        rotated.dedup();
        let expected: Vec<String> =
            [0, 1, 2, 4, 5, 6, 8].map(|layer| format!("layers.{layer}")).to_vec();
        assert_eq!(rotated, expected);
    }

    #[test]
    fn heads_that_cannot_share_keys_and_odd_heads_are_refused() {
        let error = llama(&LlamaConfig { kv_heads: 2, ..smollm2() }).unwrap_err().to_string();
        assert!(error.contains("9 heads cannot share 2 heads of keys evenly"), "{error}");
        let error = llama(&LlamaConfig { head_width: 63, ..smollm2() }).unwrap_err().to_string();
        assert!(error.contains("in two halves each"), "{error}");
    }
}
