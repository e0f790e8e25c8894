//! Transformers of the kind of GPT-2.

use super::{DataShape, Family, FamilyError, ModelFamily, TrainedOn};
use crate::keys::{Constraint, ConstraintError, FRACTION, Value, Words, refused, section};
use potluck_graph::model::gpt::next_token_gpt;
use potluck_graph::model::{GptConfig, gpt};
use potluck_graph::{Graph, Unary};

pub(super) const FAMILY: Family = Family {
    name: "gpt",
    doc: "a transformer of texts and tokens, GPT-2 (Radford et al. 2019)",
    defaults: "optim.lr is 4e-3 * (64 / model.width)^0.75",
    trained_on: TrainedOn::Tokens,
    new: || Box::new(GptFamily::default()),
};

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
    fn config(&self, data: &DataShape) -> Result<GptConfig, FamilyError> {
        Ok(GptConfig {
            vocabulary: data.vocabulary("a gpt")?,
            context: self.context,
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
        format!(
            "{} layers, {} heads, width {}, context {}",
            self.layers, self.heads, self.width, self.context
        )
    }

    /// Queries, keys, values and projection, and two matrices of 4 widths.
    fn parameters_at_least(&self) -> u64 {
        // Does not wrap: widths are at most 65,536 and layers 1,024.
        12 * self.layers as u64 * (self.width as u64).pow(2)
    }

    fn graph(&self, data: &DataShape) -> Result<Graph, FamilyError> {
        Ok(gpt(&self.config(data)?)?)
    }

    fn next_token_graph(&self, data: &DataShape) -> Result<Option<Graph>, FamilyError> {
        Ok(Some(next_token_gpt(&self.config(data)?)?))
    }

    fn context(&self) -> Option<usize> {
        Some(self.context)
    }

    fn defaults(&self) -> Vec<(&'static str, Value)> {
        vec![("optim.lr", default_lr(self.width).into())]
    }

    fn check(&self) -> Result<(), ConstraintError> {
        let Self { width, heads, .. } = self;
        if !width.is_multiple_of(*heads) {
            let why = format!("expects a number that divides model.width = {width}, got {heads}");
            return refused(&["model.heads", "model.width"], why);
        }
        Ok(())
    }
}

/// Returns the learning rate of a GPT of this width that sets none: 4e-3 at width 64, and less for
/// wider ones, 6.2e-4 at 768, to two digits, so that it is the number that is printed.
fn default_lr(width: usize) -> f64 {
    let lr = 4e-3 * (64.0 / width.max(1) as f64).powf(0.75);
    let exponent = lr.log10().floor() - 1.0;
    let digits = (lr / 10f64.powf(exponent)).round();
    // Through decimal digits, which give the nearest number to what is printed.
    format!("{digits}e{exponent}").parse().unwrap_or(lr)
}
