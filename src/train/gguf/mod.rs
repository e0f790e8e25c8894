//! Models as GGUF files, for llama.cpp, ollama and LM Studio. Names and keys follow llama.cpp's
//! converter.

mod file;
mod vocabulary;

use std::borrow::Cow;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::Value as Json;

pub use vocabulary::SpecialTokens;

use crate::checkpoint::NamedTensor;
use crate::families::ModelFamily;
use crate::hugging_face::{self, BLOCK, FileType, HuggingFaceError};
use file::{GgufTensor, GgufValue};
use potluck_core::files;
use potluck_graph::model::names::{FileName, their_name};
use potluck_graph::{RotaryAngles, RotaryScaling};

/// Reason why a model cannot be written as a GGUF file.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// Error of the configuration, or of writing.
    #[error(transparent)]
    Files(#[from] HuggingFaceError),
    #[error("the model has no form in a GGUF file: {0}")]
    NoForm(String),
    #[error("the tokenizer has no form in a GGUF file: {0}")]
    Tokenizer(String),
}

/// Model with the data written beside its parameters.
pub struct GgufModel<'a> {
    pub family: &'a dyn ModelFamily,
    pub parameters: &'a [NamedTensor],
    /// Name for the user.
    pub name: &'a str,
    /// Bytes of its `tokenizer.json`.
    pub tokenizer: &'a [u8],
    pub special: SpecialTokens,
    /// Jinja template of conversations.
    pub chat_template: Option<&'a str>,
    /// Type of matrices; vectors and positions are in f32, as llama.cpp requires.
    pub kind: FileType,
}

const GPT_NAMES: &[FileName] = &[
    FileName::same("wte.weight", "token_embd.weight"),
    FileName::same("wpe.weight", POSITIONS),
    FileName::same("h.#.ln_1.weight", "blk.#.attn_norm.weight"),
    FileName::same("h.#.ln_1.bias", "blk.#.attn_norm.bias"),
    FileName::same("h.#.attn.c_attn.weight", "blk.#.attn_qkv.weight"),
    FileName::same("h.#.attn.c_attn.bias", "blk.#.attn_qkv.bias"),
    FileName::same("h.#.attn.c_proj.weight", "blk.#.attn_output.weight"),
    FileName::same("h.#.attn.c_proj.bias", "blk.#.attn_output.bias"),
    FileName::same("h.#.ln_2.weight", "blk.#.ffn_norm.weight"),
    FileName::same("h.#.ln_2.bias", "blk.#.ffn_norm.bias"),
    FileName::same("h.#.mlp.c_fc.weight", "blk.#.ffn_up.weight"),
    FileName::same("h.#.mlp.c_fc.bias", "blk.#.ffn_up.bias"),
    FileName::same("h.#.mlp.c_proj.weight", "blk.#.ffn_down.weight"),
    FileName::same("h.#.mlp.c_proj.bias", "blk.#.ffn_down.bias"),
    FileName::same("ln_f.weight", "output_norm.weight"),
    FileName::same("ln_f.bias", "output_norm.bias"),
    FileName::same("lm_head.weight", "output.weight"),
];

const LLAMA_NAMES: &[FileName] = &[
    FileName::same("model.embed_tokens.weight", "token_embd.weight"),
    FileName::same("model.layers.#.input_layernorm.weight", "blk.#.attn_norm.weight"),
    FileName::same("model.layers.#.self_attn.q_proj.weight", "blk.#.attn_q.weight"),
    FileName::same("model.layers.#.self_attn.q_proj.bias", "blk.#.attn_q.bias"),
    FileName::same("model.layers.#.self_attn.k_proj.weight", "blk.#.attn_k.weight"),
    FileName::same("model.layers.#.self_attn.k_proj.bias", "blk.#.attn_k.bias"),
    FileName::same("model.layers.#.self_attn.v_proj.weight", "blk.#.attn_v.weight"),
    FileName::same("model.layers.#.self_attn.v_proj.bias", "blk.#.attn_v.bias"),
    FileName::same("model.layers.#.self_attn.q_norm.weight", "blk.#.attn_q_norm.weight"),
    FileName::same("model.layers.#.self_attn.k_norm.weight", "blk.#.attn_k_norm.weight"),
    FileName::same("model.layers.#.self_attn.o_proj.weight", "blk.#.attn_output.weight"),
    FileName::same("model.layers.#.self_attn.o_proj.bias", "blk.#.attn_output.bias"),
    FileName::same("model.layers.#.post_attention_layernorm.weight", "blk.#.ffn_norm.weight"),
    FileName::same("model.layers.#.mlp.gate_proj.weight", "blk.#.ffn_gate.weight"),
    FileName::same("model.layers.#.mlp.up_proj.weight", "blk.#.ffn_up.weight"),
    FileName::same("model.layers.#.mlp.down_proj.weight", "blk.#.ffn_down.weight"),
    FileName::same("model.norm.weight", "output_norm.weight"),
    FileName::same("lm_head.weight", "output.weight"),
];

/// Table of learned positions.
const POSITIONS: &str = "position_embd.weight";

/// Writes a model to a new file, atomically.
///
/// # Errors
/// Returns [`GgufError`] if the file exists, if the format does not support the model or its
/// tokenizer, or if the file cannot be written.
pub fn export(out: &Path, model: &GgufModel) -> Result<(), GgufError> {
    hugging_face::require_free(out)?;
    let vocabulary = hugging_face::vocabulary_of(model.family, model.parameters);
    let config = hugging_face::configuration(model.family, vocabulary)?;
    let shape = ModelShape { config: &config };
    let keys = keys(model, &shape, vocabulary)?;
    let tensors = tensors(model, &shape)?;
    hugging_face::create_parent(out)?;
    let written = files::replace_with(out, |file| {
        let mut file = BufWriter::with_capacity(1 << 20, file);
        file::write(&mut file, &keys, &tensors)?;
        file.flush()
    });
    Ok(written.map_err(|why| HuggingFaceError::Write { path: out.into(), why })?)
}

/// Sizes of a model, by the keys of its `config.json`.
struct ModelShape<'a> {
    config: &'a Json,
}

impl ModelShape<'_> {
    fn kind(&self) -> &str {
        self.config["model_type"].as_str().unwrap_or_default()
    }

    fn whole(&self, key: &str) -> u32 {
        self.config[key].as_u64().and_then(|value| u32::try_from(value).ok()).unwrap_or(0)
    }

    fn real(&self, key: &str) -> f32 {
        self.config[key].as_f64().unwrap_or(0.0) as f32
    }

    fn architecture(&self) -> Result<&'static str, GgufError> {
        match self.kind() {
            "gpt2" => Ok("gpt2"),
            "llama" | "mistral" => Ok("llama"),
            "qwen2" => Ok("qwen2"),
            "qwen3" => Ok("qwen3"),
            other => Err(GgufError::NoForm(format!(
                "a model of the type {other} is not written, only gpt2, llama, mistral, qwen2 and \
                 qwen3"
            ))),
        }
    }

    /// Number of heads of a matrix whose rows must be permuted. In the architecture `llama`,
    /// llama.cpp rotates pairs of neighbouring columns, whereas Hugging Face's files rotate pairs
    /// of columns from the two halves.
    fn permuted_heads(&self, name: &str) -> Option<usize> {
        if !matches!(self.kind(), "llama" | "mistral") {
            return None;
        }
        if name.contains(".attn_q.") {
            Some(self.whole("num_attention_heads") as usize)
        } else if name.contains(".attn_k.") {
            Some(self.whole("num_key_value_heads") as usize)
        } else {
            None
        }
    }
}

fn keys(
    model: &GgufModel,
    shape: &ModelShape,
    vocabulary: usize,
) -> Result<Vec<(String, GgufValue)>, GgufError> {
    let architecture = shape.architecture()?;
    let file_type = match model.kind {
        FileType::F32 => 0,
        FileType::F16 => 1,
        FileType::Q8_0 => 7,
        FileType::Bf16 => 32,
    };
    let mut keys = vec![
        ("general.architecture".to_string(), GgufValue::Text(architecture.into())),
        ("general.type".into(), GgufValue::Text("model".into())),
        ("general.name".into(), GgufValue::Text(model.name.into())),
        ("general.file_type".into(), GgufValue::Whole(file_type)),
        ("general.quantization_version".into(), GgufValue::Whole(2)),
    ];
    let own = if shape.kind() == "gpt2" { gpt_keys(shape)? } else { llama_keys(shape)? };
    for (name, value) in own {
        keys.push((format!("{architecture}.{name}"), value));
    }
    let whole = GgufValue::Whole;
    keys.push((format!("{architecture}.vocab_size"), whole(vocabulary as u32)));
    let tokenizer = vocabulary::keys(model.tokenizer, vocabulary, model.special);
    keys.extend(tokenizer.map_err(GgufError::Tokenizer)?);
    let template = model.chat_template.map(|text| GgufValue::Text(text.into()));
    keys.extend(template.map(|text| ("tokenizer.chat_template".to_string(), text)));
    Ok(keys)
}

fn gpt_keys(shape: &ModelShape) -> Result<Vec<(&'static str, GgufValue)>, GgufError> {
    if shape.config["activation_function"] != "gelu_new" {
        let why = "llama.cpp computes GPT-2 with model.activation = \"gelu_tanh\" only";
        return Err(GgufError::NoForm(why.into()));
    }
    let whole = |key: &str| GgufValue::Whole(shape.whole(key));
    Ok(vec![
        ("context_length", whole("n_positions")),
        ("embedding_length", whole("n_embd")),
        ("feed_forward_length", GgufValue::Whole(4 * shape.whole("n_embd"))),
        ("block_count", whole("n_layer")),
        ("attention.head_count", whole("n_head")),
        ("attention.layer_norm_epsilon", GgufValue::Real(shape.real("layer_norm_epsilon"))),
    ])
}

fn llama_keys(shape: &ModelShape) -> Result<Vec<(&'static str, GgufValue)>, GgufError> {
    if shape.kind() == "qwen3" && shape.config["attention_bias"] == true {
        let why = "llama.cpp has no biases of attention in Qwen3";
        return Err(GgufError::NoForm(why.into()));
    }
    let whole = |key: &str| GgufValue::Whole(shape.whole(key));
    let mut context = shape.whole("max_position_embeddings");
    // llama.cpp attends to the whole context, so the context is limited to the window.
    let window = shape.whole("sliding_window");
    if window > 0 {
        context = context.min(window);
    }
    let mut keys = vec![
        ("context_length", GgufValue::Whole(context)),
        ("embedding_length", whole("hidden_size")),
        ("feed_forward_length", whole("intermediate_size")),
        ("block_count", whole("num_hidden_layers")),
        ("attention.head_count", whole("num_attention_heads")),
        ("attention.head_count_kv", whole("num_key_value_heads")),
        ("attention.key_length", whole("head_dim")),
        ("attention.value_length", whole("head_dim")),
        ("attention.layer_norm_rms_epsilon", GgufValue::Real(shape.real("rms_norm_eps"))),
        ("rope.freq_base", GgufValue::Real(shape.real("rope_theta"))),
        ("rope.dimension_count", whole("head_dim")),
    ];
    let scaling = &shape.config["rope_scaling"];
    match scaling["rope_type"].as_str() {
        Some("linear") => {
            let factor = scaling["factor"].as_f64().unwrap_or(1.0) as f32;
            keys.push(("rope.scaling.type", GgufValue::Text("linear".into())));
            keys.push(("rope.scaling.factor", GgufValue::Real(factor)));
        }
        // The factors of this scaling are a tensor, which only this architecture has.
        Some("llama3") if shape.architecture()? == "llama" => {}
        None => {}
        Some(other) => {
            return Err(GgufError::NoForm(format!("it has positions scaled by {other}")));
        }
    }
    Ok(keys)
}

fn tensors<'a>(
    model: &GgufModel<'a>,
    shape: &ModelShape,
) -> Result<Vec<GgufTensor<'a>>, GgufError> {
    let names = if shape.kind() == "gpt2" { GPT_NAMES } else { LLAMA_NAMES };
    let mut tensors = Vec::with_capacity(model.parameters.len() + 1);
    if let Some(factors) =
        model.family.rotary().and_then(|angles| frequency_factors(&angles, shape))
    {
        tensors.push(GgufTensor {
            name: "rope_freqs.weight".into(),
            shape: vec![factors.len()],
            kind: FileType::F32,
            values: Box::new(move || Cow::Owned(factors.clone())),
        });
    }
    for tensor in model.parameters {
        let Some((name, _)) = their_name(names, &tensor.name) else {
            return Err(GgufError::NoForm(format!("it has the parameter '{}'", tensor.name)));
        };
        let kind = if tensor.shape.len() < 2 || name == POSITIONS {
            FileType::F32
        } else if model.kind == FileType::Q8_0 && !tensor.shape[1].is_multiple_of(BLOCK) {
            FileType::F16
        } else {
            model.kind
        };
        if let Some(value) = tensor.values.iter().find(|value| !kind.holds(**value)) {
            return Err(GgufError::NoForm(format!("'{name}' {}", kind.why_not(*value))));
        }
        let permuted = shape.permuted_heads(&name);
        let columns = tensor.values.len() / tensor.shape[0].max(1);
        let values = &tensor.values[..];
        tensors.push(GgufTensor {
            name,
            shape: tensor.shape.clone(),
            kind,
            values: Box::new(move || match permuted {
                Some(heads) => Cow::Owned(permute(values, heads, columns)),
                None => Cow::Borrowed(values),
            }),
        });
    }
    Ok(tensors)
}

/// Rows of a matrix (or values of a bias) with the halves of each head interleaved: row `i` of the
/// first half, then row `i` of the second.
fn permute(values: &[f32], heads: usize, columns: usize) -> Vec<f32> {
    let of_head = values.len() / heads;
    let half = of_head / columns / 2;
    let mut permuted = Vec::with_capacity(values.len());
    for head in values.chunks_exact(of_head) {
        for row in 0..half {
            for row in [row, half + row] {
                permuted.extend_from_slice(&head[row * columns..][..columns]);
            }
        }
    }
    permuted
}

/// Factors that divide the angles of `llama3`, one per pair of a head's columns; `None` for other
/// scalings.
fn frequency_factors(angles: &RotaryAngles, shape: &ModelShape) -> Option<Vec<f32>> {
    if shape.config["rope_scaling"]["rope_type"].as_str() != Some("llama3") {
        return None;
    }
    let d = shape.whole("head_dim") as usize;
    let plain = RotaryAngles { scaling: RotaryScaling::None, ..*angles };
    let (plain, scaled) = (plain.frequencies(d), angles.frequencies(d));
    Some(plain.iter().zip(scaled).map(|(plain, scaled)| (plain / scaled) as f32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_of_heads_become_pairs() {
        let rows: Vec<f32> = (0..16).map(|i| i as f32).collect();
        // Two heads of four rows of two columns.
        let expected = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15].map(|i| i as f32);
        assert_eq!(permute(&rows, 2, 2), expected);
        assert_eq!(permute(&rows[..4], 1, 1), [0.0, 2.0, 1.0, 3.0]);
    }
}
