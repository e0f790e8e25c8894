//! Multilayer perceptrons.

use super::data_shape::loss_of;
use super::{
    DataShape, Family, FamilyError, ModelFamily, TrainedOn, check_widths, lengths, products,
};
use crate::keys::{ConfigEnum, Constraint, ConstraintError, FRACTION, Value, section};
use potluck_core::format::listed;
use potluck_graph::model::{MlpConfig, mlp};
use potluck_graph::{Graph, Unary};

pub(super) const FAMILY: Family = Family {
    name: "mlp",
    doc: "a multilayer perceptron of samples",
    defaults: "train.batch is 128, optim.lr 1e-3",
    trained_on: TrainedOn::Samples,
    presets: &[],
    new: || Box::new(MlpFamily::default()),
};

section! {
    /// Keys of a multilayer perceptron.
    model: MlpFamily {
        /// Widths of the hidden layers; empty for none, a linear model.
        hidden: Vec<u64> = vec![128], Constraint::IntList;
        /// Dropout probability: share of activations that training sets to zero.
        dropout: f64 = 0.0, FRACTION;
        /// Activation function of the hidden layers.
        activation: Unary = Unary::Relu, Constraint::OneOf(Unary::WORDS);
    }
}

impl ModelFamily for MlpFamily {
    fn family(&self) -> &'static Family {
        &FAMILY
    }

    fn boxed(&self) -> Box<dyn ModelFamily> {
        Box::new(self.clone())
    }

    fn summary(&self) -> String {
        match &self.hidden[..] {
            [] => "linear model".into(),
            [one] => format!("mlp with a hidden layer of {one}"),
            several => format!("mlp with hidden layers of {}", listed(several)),
        }
    }

    fn parameters_at_least(&self) -> u64 {
        products(&self.hidden)
    }

    fn graph(&self, data: &DataShape) -> Result<Graph, FamilyError> {
        let DataShape::Samples { shape, outputs, has_classes } = data else {
            let why = "an mlp is trained on samples; set model.kind = \"gpt\" for texts and tokens";
            return Err(FamilyError::Unfit(why.into()));
        };
        let mut widths = vec![shape.iter().product()];
        widths.extend(lengths(&self.hidden));
        widths.push(*outputs);
        Ok(mlp(&MlpConfig {
            widths,
            activation: self.activation,
            dropout: self.dropout as f32,
            loss: loss_of(*has_classes),
        })?)
    }

    fn defaults(&self) -> Vec<(&'static str, Value)> {
        vec![("train.batch", 128.into()), ("optim.lr", 1e-3.into())]
    }

    fn check(&self) -> Result<(), ConstraintError> {
        check_widths("model.hidden", &self.hidden)
    }
}
