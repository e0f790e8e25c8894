//! Transformers of the Llama kind: Llama 2 and 3, Qwen2 and Qwen3, Mistral, SmolLM2 and SmolLM3.

use std::ops::Bound::{Excluded, Included};

use super::{DataShape, Family, FamilyError, ModelFamily, Preset, TrainedOn, language};
use crate::keys::{
    ConfigEnum, Constraint, ConstraintError, Section, Value, config_enum, refused, section,
};
use potluck_core::format::counted;
use potluck_graph::model::llama::{cached_llama, next_token_llama};
use potluck_graph::model::names::FileName;
use potluck_graph::model::{AttentionBias, LLAMA_NAMES, LlamaConfig, llama};
use potluck_graph::{Graph, RotaryAngles, RotaryScaling};

pub(super) const FAMILY: Family = Family {
    name: "llama",
    doc: "a transformer with rotary positions: Llama, Qwen, Mistral, SmolLM",
    defaults: "optim.lr is 4e-3 * (64 / model.width)^0.75",
    trained_on: TrainedOn::Tokens,
    presets: &[
        Preset { name: "smollm2-135m", values: || smollm2(30, 9, 576).preset() },
        Preset { name: "smollm2-360m", values: || smollm2(32, 15, 960).preset() },
        Preset { name: "tinyllama-1.1b", values: || tinyllama().preset() },
        Preset { name: "qwen2.5-0.5b", values: || qwen2().preset() },
        Preset { name: "qwen3-0.6b", values: || qwen3().preset() },
        Preset { name: "llama-3.2-1b", values: || llama3_of_1b().preset() },
        Preset { name: "llama-3.1-8b", values: || llama3_of_8b().preset() },
        Preset { name: "mistral-7b", values: || mistral().preset() },
    ],
    new: || Box::new(LlamaFamily::default()),
};

/// Word of `model.rope_scaling`, named like Hugging Face's `rope_type`. The factors of a scaling
/// are keys of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeScaling {
    None,
    Linear,
    Llama3,
}

config_enum! {
    RopeScaling {
        RopeScaling::None => "none",
        RopeScaling::Linear => "linear",
        RopeScaling::Llama3 => "llama3",
    }
    AttentionBias {
        AttentionBias::None => "none",
        AttentionBias::Qkv => "qkv",
        AttentionBias::All => "all",
    }
}

const ROPE_SCALING: &str = "model.rope_scaling";
const SCALED: &[&str] = &["linear", "llama3"];
const LLAMA3: &[&str] = &["llama3"];
/// Largest factor of a scaling, far above real ones.
const FACTOR_MAX: f64 = 1e6;

section! {
    /// Keys of a Llama.
    model: LlamaFamily {
        /// Blocks, each of attention and a gated multilayer perceptron.
        layers: usize = 4, Constraint::Whole(1, 1024);
        /// Heads of queries.
        heads: usize = 4, Constraint::Whole(1, 1024);
        /// Heads of keys and values, which queries share; must divide the heads.
        kv_heads: Option<usize> = None, Constraint::Whole(1, 1024), "as model.heads";
        /// Columns of a head; even.
        head_width: Option<usize> = None, Constraint::Whole(2, 1024),
            "model.width / model.heads";
        /// Channels of the residual stream.
        width: usize = 64, Constraint::Whole(1, 65_536);
        /// Hidden columns of the multilayer perceptron.
        mlp_width: Option<usize> = None, Constraint::Whole(1, 1 << 18),
            "8/3 of model.width, in whole 32s";
        /// Context length: tokens of a sample.
        context: usize = 64, Constraint::Whole(1, 65_536);
        /// Positions that the model is made for, of which a run uses model.context.
        positions: Option<usize> = None, Constraint::Whole(1, 1 << 24), "as model.context";
        /// Tokens that the model knows: those of the data, or more.
        vocabulary: Option<usize> = None, Constraint::Whole(1, 1 << 24), "those of the data";
        /// Epsilon of the norms, beside the mean square (rms_norm_eps).
        norm_eps: f64 = 1e-5, Constraint::Real(Excluded(0.0), Included(1.0));
        /// Base of the wavelengths of rotary positions.
        rope_theta: f64 = 1e4, Constraint::Real(Included(1.0), Included(1e12));
        /// Scaling of the wavelengths, for samples longer than before (rope_type).
        rope_scaling: RopeScaling = RopeScaling::None, Constraint::OneOf(RopeScaling::WORDS);
        /// Factor by which wavelengths grow (factor).
        rope_factor: f64 = 8.0, Constraint::Real(Included(1.0), Included(FACTOR_MAX)),
            if ROPE_SCALING = SCALED;
        /// Wavelengths above rope_context / this grow by all of it (low_freq_factor).
        rope_low_freq: f64 = 1.0, Constraint::Real(Excluded(0.0), Included(FACTOR_MAX)),
            if ROPE_SCALING = LLAMA3;
        /// Wavelengths below rope_context / this stay (high_freq_factor).
        rope_high_freq: f64 = 4.0, Constraint::Real(Excluded(0.0), Included(FACTOR_MAX)),
            if ROPE_SCALING = LLAMA3;
        /// Positions before the scaling (original_max_position_embeddings).
        rope_context: usize = 8192, Constraint::Whole(1, 1 << 24), if ROPE_SCALING = LLAMA3;
        /// Tokens that a query sees; 0: all. At least model.context, so without an effect.
        sliding_window: usize = 0, Constraint::Whole(0, 1 << 24);
        /// Linear layers of attention with biases: queries, keys and values, or all.
        attention_bias: AttentionBias = AttentionBias::None,
            Constraint::OneOf(AttentionBias::WORDS);
        /// Norm of each head of queries and keys, before its positions.
        qk_norm: bool = false, Constraint::Flag;
        /// Every Nth layer has no rotary positions; 0: all have them.
        no_rope_every: usize = 0, Constraint::Whole(0, 1024);
        /// Weight tying: the output head shares the token embedding.
        tie: bool = true, Constraint::Flag;
    }
}

fn smollm2(layers: usize, heads: usize, width: usize) -> LlamaFamily {
    LlamaFamily {
        layers,
        heads,
        kv_heads: Some(heads / 3),
        width,
        mlp_width: Some(width / 3 * 8),
        positions: Some(8192),
        vocabulary: Some(49_152),
        rope_theta: 1e5,
        ..LlamaFamily::default()
    }
}

fn tinyllama() -> LlamaFamily {
    LlamaFamily {
        layers: 22,
        heads: 32,
        kv_heads: Some(4),
        width: 2048,
        mlp_width: Some(5632),
        positions: Some(2048),
        vocabulary: Some(32_000),
        tie: false,
        ..LlamaFamily::default()
    }
}

fn qwen2() -> LlamaFamily {
    LlamaFamily {
        layers: 24,
        heads: 14,
        kv_heads: Some(2),
        width: 896,
        mlp_width: Some(4864),
        positions: Some(32_768),
        vocabulary: Some(151_936),
        norm_eps: 1e-6,
        rope_theta: 1e6,
        attention_bias: AttentionBias::Qkv,
        ..LlamaFamily::default()
    }
}

fn qwen3() -> LlamaFamily {
    LlamaFamily {
        layers: 28,
        heads: 16,
        kv_heads: Some(8),
        head_width: Some(128),
        width: 1024,
        mlp_width: Some(3072),
        positions: Some(40_960),
        attention_bias: AttentionBias::None,
        qk_norm: true,
        ..qwen2()
    }
}

fn llama3_of_8b() -> LlamaFamily {
    LlamaFamily {
        layers: 32,
        heads: 32,
        kv_heads: Some(8),
        width: 4096,
        mlp_width: Some(14_336),
        positions: Some(131_072),
        vocabulary: Some(128_256),
        rope_theta: 5e5,
        rope_scaling: RopeScaling::Llama3,
        rope_factor: 8.0,
        rope_low_freq: 1.0,
        rope_high_freq: 4.0,
        rope_context: 8192,
        tie: false,
        ..LlamaFamily::default()
    }
}

fn llama3_of_1b() -> LlamaFamily {
    LlamaFamily {
        layers: 16,
        width: 2048,
        mlp_width: Some(8192),
        rope_factor: 32.0,
        tie: true,
        ..llama3_of_8b()
    }
}

/// First version, which has a window.
fn mistral() -> LlamaFamily {
    LlamaFamily {
        layers: 32,
        heads: 32,
        kv_heads: Some(8),
        width: 4096,
        mlp_width: Some(14_336),
        positions: Some(32_768),
        vocabulary: Some(32_000),
        sliding_window: 4096,
        tie: false,
        ..LlamaFamily::default()
    }
}

impl LlamaFamily {
    /// All values of a preset with these keys.
    fn preset(&self) -> Vec<(&'static str, Value)> {
        let mut values = Vec::new();
        for key in self.keys() {
            if key.name != "context"
                && let Some(value) = self.value(key.name)
            {
                values.push((key.full_name, value));
            }
        }
        values
    }

    fn heads_of_keys(&self) -> usize {
        self.kv_heads.unwrap_or(self.heads)
    }

    fn columns_of_head(&self) -> usize {
        self.head_width.unwrap_or(self.width / self.heads)
    }

    fn hidden(&self) -> usize {
        self.mlp_width.unwrap_or((8 * self.width).div_ceil(3).next_multiple_of(32))
    }

    fn positions(&self) -> usize {
        self.positions.unwrap_or(self.context)
    }

    fn angles(&self) -> RotaryAngles {
        RotaryAngles { theta: self.rope_theta, scaling: self.scaling() }
    }

    fn scaling(&self) -> RotaryScaling {
        let factor = self.rope_factor;
        match self.rope_scaling {
            RopeScaling::None => RotaryScaling::None,
            RopeScaling::Linear => RotaryScaling::Linear { factor },
            RopeScaling::Llama3 => RotaryScaling::Llama3 {
                factor,
                low: self.rope_low_freq,
                high: self.rope_high_freq,
                context: self.rope_context as f64,
            },
        }
    }

    fn config(&self, data: &DataShape) -> Result<LlamaConfig, FamilyError> {
        Ok(LlamaConfig {
            vocabulary: language::vocabulary("a llama", self.vocabulary, data)?,
            context: self.context,
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.heads_of_keys(),
            head_width: self.columns_of_head(),
            width: self.width,
            mlp_width: self.hidden(),
            norm_eps: self.norm_eps as f32,
            rotary: self.angles(),
            attention_bias: self.attention_bias,
            qk_norm: self.qk_norm,
            no_rope_every: self.no_rope_every,
            tie: self.tie,
        })
    }

    /// Checks that queries can share the heads of keys, and that a head has two halves.
    fn check_heads(&self) -> Result<(), ConstraintError> {
        let Self { heads, width, .. } = self;
        let kv_heads = self.heads_of_keys();
        if !heads.is_multiple_of(kv_heads) {
            let why =
                format!("expects a number that divides model.heads = {heads}, got {kv_heads}");
            return refused(&["model.kv_heads", "model.heads"], why);
        }
        if let Some(columns) = self.head_width {
            if !columns.is_multiple_of(2) {
                let why = format!("expects an even number of columns, got {columns}");
                return refused(&["model.head_width"], why);
            }
            return Ok(());
        }
        if !width.is_multiple_of(2 * heads) {
            let why = format!(
                "expects a number by which model.width = {width} is divided into even widths, got \
                 {heads}; or set model.head_width"
            );
            return refused(&["model.heads", "model.width"], why);
        }
        Ok(())
    }

    fn check_rotary(&self) -> Result<(), ConstraintError> {
        let (low, high) = (self.rope_low_freq, self.rope_high_freq);
        if self.rope_scaling == RopeScaling::Llama3 && high <= low {
            let why = format!("expects a number above model.rope_low_freq = {low:?}, got {high:?}");
            return refused(&["model.rope_high_freq", "model.rope_low_freq"], why);
        }
        Ok(())
    }

    fn check_window(&self) -> Result<(), ConstraintError> {
        let (window, context) = (self.sliding_window, self.context);
        if (1..context).contains(&window) {
            let why = format!(
                "= {window} is shorter than model.context = {context}, and attention over a window \
                 is not supported; set model.context to at most {window}, or the window to 0"
            );
            return refused(&["model.sliding_window", "model.context"], why);
        }
        Ok(())
    }
}

impl ModelFamily for LlamaFamily {
    fn family(&self) -> &'static Family {
        &FAMILY
    }

    fn boxed(&self) -> Box<dyn ModelFamily> {
        Box::new(self.clone())
    }

    fn summary(&self) -> String {
        let Self { layers, heads, width, .. } = self;
        let kv_heads = self.heads_of_keys();
        let shared = if kv_heads < *heads {
            format!(" that share {kv_heads} of keys")
        } else {
            String::new()
        };
        let context = language::context_text(self.context, self.positions());
        let layers = counted(*layers, "layer", "layers");
        let heads = counted(*heads, "head", "heads");
        format!("{layers}, {heads}{shared}, width {width}, {context}")
    }

    /// Counts the tables, and per layer queries, keys, values and projection, and the three
    /// matrices of the perceptron.
    fn parameters_at_least(&self) -> u64 {
        // Does not overflow: columns of heads are below 2^20, of the perceptron at most 2^18.
        let tables = if self.tie { 1 } else { 2 };
        let rows = (tables * self.vocabulary.unwrap_or(0)) as u64;
        let heads = 2 * (self.heads + self.heads_of_keys()) as u64;
        let columns = heads * self.columns_of_head() as u64 + 3 * self.hidden() as u64;
        (rows + self.layers as u64 * columns) * self.width as u64
    }

    fn graph(&self, data: &DataShape) -> Result<Graph, FamilyError> {
        Ok(llama(&self.config(data)?)?)
    }

    fn next_token_graph(
        &self,
        data: &DataShape,
        cached_sequences: Option<usize>,
    ) -> Result<Option<Graph>, FamilyError> {
        let config = self.config(data)?;
        // Without layers, a cache would be empty.
        let graph = match cached_sequences.filter(|_| self.layers > 0) {
            Some(sequences) => cached_llama(&config, sequences)?,
            None => next_token_llama(&config)?,
        };
        Ok(Some(graph))
    }

    fn names(&self) -> &'static [FileName] {
        LLAMA_NAMES
    }

    fn rotary(&self) -> Option<RotaryAngles> {
        Some(self.angles())
    }

    fn context(&self) -> Option<usize> {
        Some(self.context)
    }

    fn defaults(&self) -> Vec<(&'static str, Value)> {
        vec![("optim.lr", language::default_lr(self.width).into())]
    }

    fn check(&self) -> Result<(), ConstraintError> {
        self.check_heads()?;
        language::check_positions(self.positions(), self.context)?;
        self.check_rotary()?;
        self.check_window()
    }
}
