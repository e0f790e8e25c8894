//! Convolutional networks of the kind of LeNet-5.

use super::{
    DataShape, Family, FamilyError, ModelFamily, TrainedOn, check_widths, lengths, products,
};
use crate::keys::{ConfigEnum, Constraint, ConstraintError, FRACTION, Value, section};
use potluck_core::format::listed;
use potluck_graph::model::{CnnConfig, cnn};
use potluck_graph::{Graph, Unary};

pub(super) const FAMILY: Family = Family {
    name: "cnn",
    doc: "a convolutional network of pictures, LeNet-5 (LeCun et al. 1998)",
    defaults: "train.batch is 64, optim.lr 1e-3",
    trained_on: TrainedOn::Pictures,
    presets: &[],
    new: || Box::new(CnnFamily::default()),
};

section! {
    /// Keys of a convolutional network.
    model: CnnFamily {
        /// Output channels of the convolutions; each is followed by a pooling by 2.
        channels: Vec<u64> = vec![6, 16], Constraint::IntList;
        /// Widths of the hidden linear layers behind the convolutions; empty for none.
        hidden: Vec<u64> = vec![120, 84], Constraint::IntList;
        /// Dropout probability: share of hidden activations that training sets to zero.
        dropout: f64 = 0.0, FRACTION;
        /// Activation function.
        activation: Unary = Unary::Relu, Constraint::OneOf(Unary::WORDS);
    }
}

impl ModelFamily for CnnFamily {
    fn family(&self) -> &'static Family {
        &FAMILY
    }

    fn boxed(&self) -> Box<dyn ModelFamily> {
        Box::new(self.clone())
    }

    fn summary(&self) -> String {
        let convolutions = match self.channels.len() {
            0 => "no convolutions".into(),
            _ => format!("convolutions of {} channels", listed(&self.channels)),
        };
        match &self.hidden[..] {
            [] => format!("cnn with {convolutions} and no hidden layer"),
            [one] => format!("cnn with {convolutions} and a hidden layer of {one}"),
            several => {
                format!("cnn with {convolutions} and hidden layers of {}", listed(several))
            }
        }
    }

    fn parameters_at_least(&self) -> u64 {
        products(&self.hidden)
    }

    fn graph(&self, data: &DataShape) -> Result<Graph, FamilyError> {
        let sizes = data.pictures("a cnn")?;
        let [_, height, width] = sizes.picture;
        let poolings = self.channels.len();
        let halvings = height.min(width).checked_ilog2().unwrap_or(0) as usize;
        if halvings < poolings {
            return Err(FamilyError::Unfit(format!(
                "pictures of {width}x{height} are too small for {poolings} pooling{}; shorten \
                 model.channels, or set data.image_size",
                if poolings == 1 { "" } else { "s" }
            )));
        }
        Ok(cnn(&CnnConfig {
            sizes,
            channels: lengths(&self.channels),
            hidden: lengths(&self.hidden),
            activation: self.activation,
            dropout: self.dropout as f32,
        })?)
    }

    fn defaults(&self) -> Vec<(&'static str, Value)> {
        vec![("train.batch", 64.into()), ("optim.lr", 1e-3.into())]
    }

    fn check(&self) -> Result<(), ConstraintError> {
        check_widths("model.hidden", &self.hidden)?;
        check_widths("model.channels", &self.channels)
    }
}
