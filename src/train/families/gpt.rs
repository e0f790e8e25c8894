//! Transformers of the GPT-2 kind.

use super::{DataShape, Family, FamilyError, ModelFamily, Preset, TrainedOn, language};
use crate::keys::{ConfigEnum, Constraint, ConstraintError, FRACTION, Value, refused, section};
use potluck_core::format::counted;
use potluck_graph::model::gpt::{cached_gpt, next_token_gpt};
use potluck_graph::model::names::FileName;
use potluck_graph::model::{GPT_NAMES, GptConfig, gpt};
use potluck_graph::{Graph, Unary};

pub(super) const FAMILY: Family = Family {
    name: "gpt",
    doc: "a transformer of texts and tokens, GPT-2 (Radford et al. 2019)",
    defaults: "optim.lr is 4e-3 * (64 / model.width)^0.75",
    trained_on: TrainedOn::Tokens,
    presets: &[
        Preset { name: "gpt2", values: || gpt2(12, 12, 768) },
        Preset { name: "gpt2-medium", values: || gpt2(24, 16, 1024) },
        Preset { name: "gpt2-large", values: || gpt2(36, 20, 1280) },
        Preset { name: "gpt2-xl", values: || gpt2(48, 25, 1600) },
    ],
    new: || Box::new(GptFamily::default()),
};

fn gpt2(layers: usize, heads: usize, width: usize) -> Vec<(&'static str, Value)> {
    vec![
        ("model.layers", layers.into()),
        ("model.heads", heads.into()),
        ("model.width", width.into()),
        ("model.positions", 1024.into()),
        ("model.vocabulary", 50_257.into()),
        ("model.bias", true.into()),
        ("model.tie", true.into()),
        ("model.activation", "gelu_tanh".into()),
    ]
}

section! {
    /// Keys of a GPT.
    model: GptFamily {
        /// Blocks, each of attention and a multilayer perceptron.
        layers: usize = 4, Constraint::Whole(1, 1024);
        /// Number of attention heads; must divide the width.
        heads: usize = 4, Constraint::Whole(1, 1024);
        /// Channels of the residual stream.
        width: usize = 64, Constraint::Whole(1, 65_536);
        /// Context length: tokens of a sample.
        context: usize = 64, Constraint::Whole(1, 65_536);
        /// Rows of the table of learned positions; the first model.context are used.
        positions: Option<usize> = None, Constraint::Whole(1, 65_536), "as model.context";
        /// Tokens that the model knows: those of the data, or more.
        vocabulary: Option<usize> = None, Constraint::Whole(1, 1 << 24), "those of the data";
        /// Biases in linear layers and layer norms.
        bias: bool = false, Constraint::Flag;
        /// Dropout probability: share of activations that training sets to zero.
        dropout: f64 = 0.0, FRACTION;
        /// Weight tying: the output head shares the token embedding.
        tie: bool = true, Constraint::Flag;
        /// Activation function.
        activation: Unary = Unary::Gelu, Constraint::OneOf(Unary::WORDS);
    }
}

impl GptFamily {
    fn table_rows(&self) -> usize {
        self.positions.unwrap_or(self.context)
    }

    fn config(&self, data: &DataShape) -> Result<GptConfig, FamilyError> {
        Ok(GptConfig {
            vocabulary: language::vocabulary("a gpt", self.vocabulary, data)?,
            context: self.context,
            positions: self.table_rows(),
            layers: self.layers,
            heads: self.heads,
            width: self.width,
            bias: self.bias,
            dropout: self.dropout as f32,
            tie: self.tie,
            activation: self.activation,
        })
    }
}

impl ModelFamily for GptFamily {
    fn family(&self) -> &'static Family {
        &FAMILY
    }

    fn boxed(&self) -> Box<dyn ModelFamily> {
        Box::new(self.clone())
    }

    fn summary(&self) -> String {
        let Self { layers, heads, width, context, .. } = self;
        let context = language::context_text(*context, self.table_rows());
        let layers = counted(*layers, "layer", "layers");
        let heads = counted(*heads, "head", "heads");
        format!("{layers}, {heads}, width {width}, {context}")
    }

    /// Counts the tables, and per layer queries, keys, values and projection, and two matrices of 4
    /// widths.
    fn parameters_at_least(&self) -> u64 {
        // Does not overflow: widths are at most 65,536, layers 1,024 and rows 2^24.
        let rows = self.table_rows() as u64 + self.vocabulary.unwrap_or(0) as u64;
        let width = self.width as u64;
        rows * width + 12 * self.layers as u64 * width.pow(2)
    }

    fn graph(&self, data: &DataShape) -> Result<Graph, FamilyError> {
        Ok(gpt(&self.config(data)?)?)
    }

    fn next_token_graph(
        &self,
        data: &DataShape,
        cached_sequences: Option<usize>,
    ) -> Result<Option<Graph>, FamilyError> {
        let config = self.config(data)?;
        // Without layers, a cache would be empty.
        let graph = match cached_sequences.filter(|_| self.layers > 0) {
            Some(sequences) => cached_gpt(&config, sequences)?,
            None => next_token_gpt(&config)?,
        };
        Ok(Some(graph))
    }

    fn names(&self) -> &'static [FileName] {
        GPT_NAMES
    }

    fn context(&self) -> Option<usize> {
        Some(self.context)
    }

    fn defaults(&self) -> Vec<(&'static str, Value)> {
        vec![("optim.lr", language::default_lr(self.width).into())]
    }

    fn check(&self) -> Result<(), ConstraintError> {
        let Self { width, heads, .. } = self;
        if !width.is_multiple_of(*heads) {
            let why = format!("expects a number that divides model.width = {width}, got {heads}");
            return refused(&["model.heads", "model.width"], why);
        }
        language::check_positions(self.table_rows(), self.context)
    }
}
