//! `config.json` of a model directory: conversion to keys of this program, and its export. Names
//! and defaults follow transformers 5.23; files of 4.57 are read too, and both versions read
//! exported files.

use std::path::Path;

use serde_json::{Map, Value as Json, json};

use super::HuggingFaceError;
use crate::families::ModelFamily;
use crate::keys::Value;

/// Keys of the model equivalent to a configuration, with their values.
pub type ModelSettings = Vec<(&'static str, Value)>;

/// Converts a configuration to keys of the model.
///
/// # Errors
/// Returns [`HuggingFaceError::Config`] for the first key that is not supported.
pub fn settings(path: &Path, text: &str) -> Result<ModelSettings, HuggingFaceError> {
    let refused = |why: String| HuggingFaceError::Config { path: path.into(), why };
    let json: Json =
        serde_json::from_str(text).map_err(|error| refused(format!("is no JSON: {error}")))?;
    let Json::Object(keys) = json else { return Err(refused("is no JSON object".into())) };
    let keys = Keys(&keys);
    let found = match keys.text("model_type").map_err(&refused)?.as_deref() {
        Some("gpt2") => gpt2(&keys),
        Some(kind) => match LLAMAS.iter().find(|llama| llama.model_type == kind) {
            Some(llama) => llama.settings(&keys),
            None => {
                let known: Vec<&str> = LLAMAS.iter().map(|llama| llama.model_type).collect();
                let known = known.join(", ");
                Err(format!("model_type = \"{kind}\" is none of gpt2, {known}"))
            }
        },
        None => Err("has no model_type".into()),
    };
    found.map_err(refused)
}

/// Keys of a configuration. A key that is `null` counts as absent.
struct Keys<'a>(&'a Map<String, Json>);

impl Keys<'_> {
    fn get(&self, name: &str) -> Option<&Json> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn whole(&self, name: &str) -> Result<Option<usize>, String> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
        let why = || format!("{name} = {value} is no whole number");
        number.map(Some).ok_or_else(why)
    }

    fn needed(&self, name: &str) -> Result<usize, String> {
        self.whole(name)?.ok_or_else(|| format!("has no {name}"))
    }

    fn real(&self, name: &str) -> Result<Option<f64>, String> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| format!("{name} = {value} is no number"))
    }

    fn flag(&self, name: &str, default: bool) -> Result<bool, String> {
        let Some(value) = self.get(name) else { return Ok(default) };
        value.as_bool().ok_or_else(|| format!("{name} = {value} is neither true nor false"))
    }

    fn text(&self, name: &str) -> Result<Option<String>, String> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let text = value.as_str().map(str::to_string);
        text.map(Some).ok_or_else(|| format!("{name} = {value} is no string"))
    }

    /// Refuses any value of a key but this one, which is also its default.
    fn require(&self, name: &str, only: &Json) -> Result<(), String> {
        let Some(value) = self.get(name) else { return Ok(()) };
        // 1 and 1.0 are equal.
        let is_number = value.is_number() && value.as_f64() == only.as_f64();
        if value == only || is_number {
            return Ok(());
        }
        Err(format!("{name} = {value} is not supported, only {only}"))
    }
}

/// Refuses features that no family has.
fn require_plain(keys: &Keys) -> Result<(), String> {
    match keys.get("quantization_config") {
        Some(_) => Err("quantization_config: weights that are quantized are not read".into()),
        None => Ok(()),
    }
}

fn gpt2(keys: &Keys) -> Result<ModelSettings, String> {
    require_plain(keys)?;
    let width = keys.needed("n_embd")?;
    keys.require("n_inner", &json!(width.saturating_mul(4)))?;
    keys.require("scale_attn_weights", &json!(true))?;
    keys.require("scale_attn_by_inverse_layer_idx", &json!(false))?;
    keys.require("add_cross_attention", &json!(false))?;
    require_epsilon(keys)?;
    let activation = keys.text("activation_function")?.unwrap_or_else(|| "gelu_new".into());
    let activation = match activation.as_str() {
        "gelu_new" | "gelu_pytorch_tanh" => "gelu_tanh",
        "gelu" => "gelu",
        "relu" => "relu",
        other => return Err(format!("activation_function = \"{other}\" is not supported")),
    };
    Ok(vec![
        ("model.kind", "gpt".into()),
        ("model.layers", keys.needed("n_layer")?.into()),
        ("model.heads", keys.needed("n_head")?.into()),
        ("model.width", width.into()),
        ("model.positions", keys.needed("n_positions")?.into()),
        ("model.vocabulary", keys.needed("vocab_size")?.into()),
        ("model.bias", true.into()),
        ("model.tie", keys.flag("tie_word_embeddings", true)?.into()),
        ("model.activation", activation.into()),
        ("model.dropout", gpt2_dropout(keys)?.into()),
    ])
}

/// Probability of dropout, from three keys; 0 if they differ.
fn gpt2_dropout(keys: &Keys) -> Result<f64, String> {
    let mut all = Vec::new();
    for name in ["resid_pdrop", "embd_pdrop", "attn_pdrop"] {
        all.push(keys.real(name)?.unwrap_or(0.1));
    }
    Ok(if all.iter().all(|one| *one == all[0]) { all[0] } else { 0.0 })
}

/// Checks that the epsilon of the layer norms of a GPT is [`EPSILON`].
fn require_epsilon(keys: &Keys) -> Result<(), String> {
    match keys.real("layer_norm_epsilon")? {
        Some(epsilon) if epsilon != EPSILON => {
            Err(format!("layer_norm_epsilon = {epsilon} is not supported, only {EPSILON}"))
        }
        _ => Ok(()),
    }
}

const EPSILON: f64 = 1e-5;

/// Model type that is a Llama with some keys fixed, or with other defaults.
struct LlamaType {
    model_type: &'static str,
    /// True for biases of queries, keys and values if no key sets them.
    qkv_bias: bool,
    has_attention_bias: bool,
    qk_norm: bool,
    tie: bool,
    /// Window of attention if the key is absent; 0: none.
    window: usize,
    /// True if the window applies only with `use_sliding_window`.
    window_is_optional: bool,
    /// Heads of keys and values if the key is absent; 0: as many as for queries.
    kv_heads: usize,
    /// Every Nth layer has no positions if no key sets this; 0: all have them.
    no_rope_every: usize,
    theta: f64,
}

const LLAMA: LlamaType = LlamaType {
    model_type: "llama",
    qkv_bias: false,
    has_attention_bias: true,
    qk_norm: false,
    tie: false,
    window: 0,
    window_is_optional: true,
    kv_heads: 0,
    no_rope_every: 0,
    theta: 1e4,
};

const LLAMAS: [LlamaType; 5] = [
    LLAMA,
    LlamaType {
        model_type: "mistral",
        has_attention_bias: false,
        window: 4096,
        window_is_optional: false,
        kv_heads: 8,
        ..LLAMA
    },
    LlamaType {
        model_type: "qwen2",
        qkv_bias: true,
        has_attention_bias: false,
        window: 4096,
        kv_heads: 32,
        ..LLAMA
    },
    LlamaType { model_type: "qwen3", qk_norm: true, window: 4096, kv_heads: 32, ..LLAMA },
    LlamaType {
        model_type: "smollm3",
        tie: true,
        kv_heads: 4,
        no_rope_every: 4,
        theta: 2e6,
        ..LLAMA
    },
];

impl LlamaType {
    fn settings(&self, keys: &Keys) -> Result<ModelSettings, String> {
        require_plain(keys)?;
        keys.require("hidden_act", &json!("silu"))?;
        keys.require("mlp_bias", &json!(false))?;
        keys.require("partial_rotary_factor", &json!(1.0))?;
        let width = keys.needed("hidden_size")?;
        let heads = keys.needed("num_attention_heads")?;
        let has_bias = self.has_attention_bias && keys.flag("attention_bias", false)?;
        let bias = match (has_bias, self.qkv_bias) {
            (true, _) => "all",
            (false, true) => "qkv",
            (false, false) => "none",
        };
        let mut settings = vec![
            ("model.kind", "llama".into()),
            ("model.layers", keys.needed("num_hidden_layers")?.into()),
            ("model.heads", heads.into()),
            ("model.kv_heads", self.kv_heads(keys, heads)?.into()),
            ("model.width", width.into()),
            ("model.mlp_width", keys.needed("intermediate_size")?.into()),
            ("model.positions", keys.needed("max_position_embeddings")?.into()),
            ("model.vocabulary", keys.needed("vocab_size")?.into()),
            ("model.norm_eps", keys.real("rms_norm_eps")?.unwrap_or(1e-6).into()),
            ("model.attention_bias", bias.into()),
            ("model.qk_norm", self.qk_norm.into()),
            ("model.tie", keys.flag("tie_word_embeddings", self.tie)?.into()),
            ("model.sliding_window", self.window(keys)?.into()),
            ("model.no_rope_every", self.no_rope_every(keys)?.into()),
        ];
        let head_width = match (keys.whole("head_dim")?, self.qk_norm) {
            (Some(head_width), _) => Some(head_width),
            // Qwen3's own default.
            (None, true) => Some(128),
            (None, false) => None,
        };
        settings.extend(head_width.map(|columns| ("model.head_width", columns.into())));
        settings.extend(self.positions(keys)?);
        Ok(settings)
    }

    /// Number of heads of keys and values; `null` means as many as for queries.
    fn kv_heads(&self, keys: &Keys, heads: usize) -> Result<usize, String> {
        match keys.0.get("num_key_value_heads") {
            None if self.kv_heads > 0 => Ok(self.kv_heads),
            None | Some(Json::Null) => Ok(heads),
            Some(_) => keys.needed("num_key_value_heads"),
        }
    }

    /// Number of tokens that a query sees; 0: all. A window of some layers is applied to all, so a
    /// run with a longer context is refused.
    fn window(&self, keys: &Keys) -> Result<usize, String> {
        let is_used = !self.window_is_optional || keys.flag("use_sliding_window", false)?;
        // An absent window means the default, and `null` means none.
        let window = match keys.0.get("sliding_window") {
            None => self.window,
            Some(Json::Null) => 0,
            Some(_) => keys.needed("sliding_window")?,
        };
        let window = if is_used { window } else { 0 };
        let Some(layers) = keys.get("layer_types").and_then(Json::as_array) else {
            // The first ones see all tokens.
            let whole = keys.whole("max_window_layers")?.filter(|_| self.window_is_optional);
            let layers = keys.needed("num_hidden_layers")?;
            let all_are_whole = whole.is_some_and(|whole| whole >= layers);
            return Ok(if all_are_whole { 0 } else { window });
        };
        let mut has_window = false;
        for layer in layers {
            match layer.as_str() {
                Some("full_attention") => {}
                Some("sliding_attention") if window > 0 => has_window = true,
                _ => return Err(format!("layer_types: {layer} is not supported without a window")),
            }
        }
        Ok(if has_window { window } else { 0 })
    }

    /// N such that every Nth layer has no rotary positions; 0: all have them.
    fn no_rope_every(&self, keys: &Keys) -> Result<usize, String> {
        // Other model types have no such keys.
        if self.no_rope_every == 0 {
            return Ok(0);
        }
        let Some(list) = keys.get("no_rope_layers") else {
            return Ok(keys.whole("no_rope_layer_interval")?.unwrap_or(self.no_rope_every));
        };
        let unlike = || format!("no_rope_layers = {list} is no list with a 0 at every Nth layer");
        let list_of = list.as_array().ok_or_else(unlike)?;
        let mut has_positions = Vec::with_capacity(list_of.len());
        for layer in list_of {
            has_positions.push(match layer {
                Json::Bool(has) => *has,
                Json::Number(number) if number.as_u64() == Some(0) => false,
                Json::Number(number) if number.as_u64() == Some(1) => true,
                _ => return Err(unlike()),
            });
        }
        let Some(first) = has_positions.iter().position(|has| !has) else { return Ok(0) };
        let every = first + 1;
        for (layer, has) in (1..).zip(has_positions) {
            if has == usize::is_multiple_of(layer, every) {
                return Err(unlike());
            }
        }
        Ok(every)
    }

    /// Keys of rotary positions, from the older `rope_scaling` if it exists, as in transformers,
    /// otherwise from `rope_parameters`.
    fn positions(&self, keys: &Keys) -> Result<ModelSettings, String> {
        let mut table = Map::new();
        for name in ["rope_parameters", "rope_scaling"] {
            match keys.get(name) {
                None => {}
                Some(Json::Object(found)) if found.is_empty() => {}
                Some(Json::Object(found)) => table = found.clone(),
                Some(other) => return Err(format!("{name} = {other} is no object")),
            }
        }
        let rope = Keys(&table);
        rope.require("partial_rotary_factor", &json!(1.0))?;
        let theta = match rope.real("rope_theta")? {
            Some(theta) => Some(theta),
            None => keys.real("rope_theta")?,
        };
        let mut settings: ModelSettings =
            vec![("model.rope_theta", theta.unwrap_or(self.theta).into())];
        let kind = match rope.text("rope_type")? {
            Some(kind) => Some(kind),
            None => rope.text("type")?,
        };
        let factor =
            || rope.real("factor")?.ok_or_else(|| "rope scaling has no factor".to_string());
        let of_kind: &[&str] = match kind.as_deref() {
            None | Some("default") => &[],
            Some("linear") => {
                settings.push(("model.rope_scaling", "linear".into()));
                settings.push(("model.rope_factor", factor()?.into()));
                &["factor"]
            }
            Some("llama3") => {
                let real = |name| rope.real(name)?.ok_or_else(|| format!("llama3 has no {name}"));
                settings.push(("model.rope_scaling", "llama3".into()));
                settings.push(("model.rope_factor", factor()?.into()));
                settings.push(("model.rope_low_freq", real("low_freq_factor")?.into()));
                settings.push(("model.rope_high_freq", real("high_freq_factor")?.into()));
                let before = rope.needed("original_max_position_embeddings")?;
                settings.push(("model.rope_context", before.into()));
                &[
                    "factor",
                    "low_freq_factor",
                    "high_freq_factor",
                    "original_max_position_embeddings",
                ]
            }
            Some(other) => {
                return Err(format!(
                    "rope_type = \"{other}\" is not supported, only default, linear and llama3"
                ));
            }
        };
        let of_all = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];
        for key in table.keys().map(String::as_str) {
            if !of_all.contains(&key) && !of_kind.contains(&key) {
                return Err(format!("{key} of rotary positions is not supported"));
            }
        }
        Ok(settings)
    }
}

/// Like [`exported`], with an error for an unsupported model.
///
/// # Errors
/// Returns [`HuggingFaceError::NoForm`] if these files do not support the model.
pub fn configuration(
    family: &dyn ModelFamily,
    vocabulary: usize,
) -> Result<Json, HuggingFaceError> {
    exported(family, vocabulary).map_err(HuggingFaceError::NoForm)
}

/// Returns the configuration of a model with `vocabulary` tokens. It has the keys of transformers 5
/// and also of 4.57, which reads rotary positions elsewhere.
///
/// # Errors
/// Returns the property that no model type in these files supports.
pub fn exported(family: &dyn ModelFamily, vocabulary: usize) -> Result<Json, String> {
    let keys = ModelKeys(family);
    match family.family().name {
        "gpt" => keys.gpt2(vocabulary),
        "llama" => keys.llama(vocabulary),
        other => Err(format!(
            "model.kind = \"{other}\" is neither gpt nor llama; --format safetensors writes the \
             parameters of any model"
        )),
    }
}

/// Keys of a model by name, as JSON.
struct ModelKeys<'a>(&'a dyn ModelFamily);

impl ModelKeys<'_> {
    /// Value of a key; `null` if it is unset.
    fn get(&self, name: &str) -> Json {
        match self.0.value(name) {
            Some(Value::Whole(number)) => json!(number as i64),
            Some(Value::Real(number)) => json!(number),
            Some(Value::Flag(flag)) => json!(flag),
            Some(Value::Text(text)) => json!(text),
            Some(Value::IntList(list)) => json!(list),
            Some(Value::RealList(list)) => json!(list),
            Some(Value::TextList(list)) => json!(list),
            None => Json::Null,
        }
    }

    fn or(&self, name: &str, default: Json) -> Json {
        let value = self.get(name);
        if value.is_null() { default } else { value }
    }

    fn gpt2(&self, vocabulary: usize) -> Result<Json, String> {
        let activation = match self.get("activation").as_str() {
            Some("gelu_tanh") => "gelu_new",
            Some("gelu") => "gelu",
            Some("relu") => "relu",
            other => {
                return Err(format!(
                    "model.activation = {other:?} is none of GPT-2's; write --format safetensors"
                ));
            }
        };
        let dropout = self.get("dropout");
        let positions = self.or("positions", self.get("context"));
        Ok(json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": vocabulary,
            "n_positions": positions,
            "n_ctx": positions,
            "n_embd": self.get("width"),
            "n_layer": self.get("layers"),
            "n_head": self.get("heads"),
            "n_inner": null,
            "activation_function": activation,
            "resid_pdrop": dropout,
            "embd_pdrop": dropout,
            "attn_pdrop": dropout,
            "layer_norm_epsilon": EPSILON,
            "tie_word_embeddings": self.get("tie"),
            "bos_token_id": null,
            "eos_token_id": null,
        }))
    }

    fn llama(&self, vocabulary: usize) -> Result<Json, String> {
        let bias = self.get("attention_bias");
        let bias = bias.as_str().unwrap_or_default();
        let qk_norm = self.get("qk_norm") == json!(true);
        let no_rope_every = self.get("no_rope_every").as_u64().unwrap_or(0);
        let window = self.get("sliding_window").as_u64().unwrap_or(0);
        let (model_type, architecture) = match (qk_norm, no_rope_every > 0, bias, window > 0) {
            (true, false, "none" | "all", _) => ("qwen3", "Qwen3ForCausalLM"),
            (false, false, "qkv", _) => ("qwen2", "Qwen2ForCausalLM"),
            (false, true, "none" | "all", _) => ("smollm3", "SmolLM3ForCausalLM"),
            (false, false, "none", true) => ("mistral", "MistralForCausalLM"),
            (false, false, "none" | "all", false) => ("llama", "LlamaForCausalLM"),
            _ => {
                return Err(format!(
                    "no model there has model.attention_bias = \"{bias}\" with model.qk_norm = \
                     {qk_norm}, model.no_rope_every = {no_rope_every} and model.sliding_window = \
                     {window}; write --format safetensors"
                ));
            }
        };
        let whole = |name: &str| self.get(name).as_u64().unwrap_or(0);
        let (heads, width, layers) = (whole("heads"), whole("width"), whole("layers"));
        let theta = self.get("rope_theta");
        let mut rope = json!({ "rope_type": "default" });
        let mut scaling = Json::Null;
        if let Some(kind @ ("linear" | "llama3")) = self.get("rope_scaling").as_str() {
            rope = json!({ "rope_type": kind, "factor": self.get("rope_factor") });
            if kind == "llama3" {
                rope["low_freq_factor"] = self.get("rope_low_freq");
                rope["high_freq_factor"] = self.get("rope_high_freq");
                rope["original_max_position_embeddings"] = self.get("rope_context");
            }
            scaling = rope.clone();
        }
        rope["rope_theta"] = theta.clone();
        let mlp_width = (8 * width).div_ceil(3).next_multiple_of(32);
        let mut json = json!({
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": self.or("mlp_width", json!(mlp_width)),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.or("kv_heads", json!(heads)),
            "head_dim": self.or("head_width", json!(width / heads.max(1))),
            "hidden_act": "silu",
            "max_position_embeddings": self.or("positions", self.get("context")),
            "rms_norm_eps": self.get("norm_eps"),
            "tie_word_embeddings": self.get("tie"),
            "attention_bias": bias == "all",
            "attention_dropout": 0.0,
            "mlp_bias": false,
            "sliding_window": if window > 0 { json!(window) } else { Json::Null },
            "use_sliding_window": window > 0 && model_type != "mistral",
            "rope_theta": theta,
            "rope_scaling": scaling,
            "rope_parameters": rope,
            "bos_token_id": null,
            "eos_token_id": null,
            "pad_token_id": null,
        });
        if window > 0 && model_type != "mistral" {
            let list = vec!["sliding_attention"; usize::try_from(layers).unwrap_or(0)];
            json["layer_types"] = json!(list);
            json["max_window_layers"] = json!(0);
        }
        if model_type == "smollm3" {
            let has_positions = (1..=layers).map(|layer| !layer.is_multiple_of(no_rope_every));
            let list: Vec<u8> = has_positions.map(u8::from).collect();
            json["no_rope_layers"] = json!(list);
            json["no_rope_layer_interval"] = json!(no_rope_every);
        }
        Ok(json)
    }
}
