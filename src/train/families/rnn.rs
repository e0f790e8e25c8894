//! Recurrent language models.

use super::{DataShape, Family, FamilyError, ModelFamily, TrainedOn};
use crate::keys::{ConfigEnum, Constraint, FRACTION, Value, config_enum, section};
use potluck_core::format::counted;
use potluck_graph::model::rnn::next_token_rnn;
use potluck_graph::model::{RnnConfig, rnn};
use potluck_graph::{Cell, Graph};

pub(super) const FAMILY: Family = Family {
    name: "rnn",
    doc: "a recurrent network of texts and tokens",
    defaults: "train.batch is 32, optim.lr 2e-3",
    trained_on: TrainedOn::Tokens,
    presets: &[],
    new: || Box::new(RnnFamily::default()),
};

config_enum! {
    Cell { Cell::Lstm => "lstm", Cell::Gru => "gru", }
}

section! {
    /// Keys of a recurrent network.
    model: RnnFamily {
        /// Recurrent layers.
        layers: usize = 2, Constraint::Whole(1, 1024);
        /// Cell of the recurrent layers.
        cell: Cell = Cell::Lstm, Constraint::OneOf(Cell::WORDS);
        /// Carries states to the next step, whose samples then follow in the text.
        stateful: bool = false, Constraint::Flag;
        /// Values of the embedding of a token, and hidden values of a layer.
        width: usize = 128, Constraint::Whole(1, 65_536);
        /// Context length: tokens of a sample.
        context: usize = 64, Constraint::Whole(1, 65_536);
        /// Dropout probability: share of values between layers that training sets to zero.
        dropout: f64 = 0.0, FRACTION;
    }
}

impl RnnFamily {
    fn config(&self, data: &DataShape) -> Result<RnnConfig, FamilyError> {
        Ok(RnnConfig {
            vocabulary: data.vocabulary("an rnn")?,
            context: self.context,
            layers: self.layers,
            width: self.width,
            cell: self.cell,
            dropout: self.dropout as f32,
            stateful: self.stateful,
        })
    }
}

impl ModelFamily for RnnFamily {
    fn family(&self) -> &'static Family {
        &FAMILY
    }

    fn boxed(&self) -> Box<dyn ModelFamily> {
        Box::new(self.clone())
    }

    fn summary(&self) -> String {
        format!(
            "{} of {}, width {}, context {}{}",
            counted(self.layers, "layer", "layers"),
            if self.cell == Cell::Lstm { "LSTM" } else { "GRU" },
            self.width,
            self.context,
            if self.stateful { ", state carried from step to step" } else { "" }
        )
    }

    /// Counts the matrices of the input and of the state for each gate.
    fn parameters_at_least(&self) -> u64 {
        // Does not overflow: widths are at most 65,536 and layers 1,024.
        2 * self.cell.gates() as u64 * self.layers as u64 * (self.width as u64).pow(2)
    }

    fn graph(&self, data: &DataShape) -> Result<Graph, FamilyError> {
        Ok(rnn(&self.config(data)?)?)
    }

    fn next_token_graph(
        &self,
        data: &DataShape,
        _cached_sequences: Option<usize>,
    ) -> Result<Option<Graph>, FamilyError> {
        Ok(Some(next_token_rnn(&self.config(data)?)?))
    }

    fn context(&self) -> Option<usize> {
        Some(self.context)
    }

    fn defaults(&self) -> Vec<(&'static str, Value)> {
        vec![("train.batch", 32.into()), ("optim.lr", 2e-3.into())]
    }
}
