//! Residual networks for small pictures.

use super::{DataShape, Family, FamilyError, ModelFamily, TrainedOn};
use crate::keys::{ConfigEnum, Constraint, Value, config_enum, section};
use potluck_graph::Graph;
use potluck_graph::model::{PictureNorm, ResnetConfig, resnet};
use potluck_graph::plan::STATISTICS_ROWS_MIN;

pub(super) const FAMILY: Family = Family {
    name: "resnet",
    doc: "a residual network of pictures (He et al. 2016)",
    defaults: "train.batch is 64, optim.lr 1e-3",
    trained_on: TrainedOn::Pictures,
    presets: &[],
    new: || Box::new(ResnetFamily::default()),
};

config_enum! {
    PictureNorm { PictureNorm::Batch => "batch", PictureNorm::Group => "group", }
}

section! {
    /// Keys of a residual network.
    model: ResnetFamily {
        /// Blocks per stage; there are three stages.
        layers: usize = 1, Constraint::Whole(1, 1024);
        /// Channels of the first stage; each further one has twice as many.
        width: usize = 16, Constraint::Whole(1, 65_536);
        /// Normalization between the convolutions.
        norm: PictureNorm = PictureNorm::Batch, Constraint::OneOf(PictureNorm::WORDS);
    }
}

impl ModelFamily for ResnetFamily {
    fn family(&self) -> &'static Family {
        &FAMILY
    }

    fn boxed(&self) -> Box<dyn ModelFamily> {
        Box::new(self.clone())
    }

    fn summary(&self) -> String {
        format!(
            "resnet of {} layers, {} channels at first, {} norm",
            6 * self.layers + 2,
            self.width,
            if self.norm == PictureNorm::Batch { "batch" } else { "group" }
        )
    }

    /// Counts the first stage: two convolutions of 3 x 3 per block.
    fn parameters_at_least(&self) -> u64 {
        // Does not overflow: widths are at most 65,536 and layers 1,024.
        18 * self.layers as u64 * (self.width as u64).pow(2)
    }

    fn graph(&self, data: &DataShape) -> Result<Graph, FamilyError> {
        Ok(resnet(&ResnetConfig {
            sizes: data.pictures("a resnet")?,
            blocks: self.layers,
            width: self.width,
            norm: self.norm,
        })?)
    }

    /// Minimum for statistics of a micro-batch.
    fn micro_batch_min(&self) -> usize {
        if self.norm == PictureNorm::Batch { STATISTICS_ROWS_MIN as usize } else { 1 }
    }

    fn defaults(&self) -> Vec<(&'static str, Value)> {
        vec![("train.batch", 64.into()), ("optim.lr", 1e-3.into())]
    }
}
