//! Options for the division of a step's work among devices, which affect the bits of results.

use super::{PipelineSchedule, ReduceSite};
use crate::collective::Topology;
use std::fmt;
use std::str::FromStr;

/// Options for sharing the work of a step among devices.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct ParallelOptions {
    pub shares: Shares,
    /// Later shares, in the order of their steps; only if `shares` are not measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub share_changes: Vec<ShareChange>,
    pub topology: Topology,
    /// True if reductions start while the backward pass still runs. It decides no bit, so a
    /// placement does not record it.
    #[serde(skip, default = "overlaps_by_default")]
    pub overlap: bool,
    /// `None`: the faster site of each device, by measurement.
    pub reduce_site: Option<ReduceSite>,
    /// The most bytes of one message.
    pub chunk_bytes: usize,
    pub pipeline: PipelineOptions,
    /// Absent in records of versions without tensor parallelism.
    #[serde(default)]
    pub tensor: TensorOptions,
    /// Divisions that a plan must not add. They decide no bit, so a placement does not record them.
    #[serde(skip)]
    pub excluded: ExcludedDivisions,
}

/// Divisions of the model that a plan must not add, because a run was given a single stage or rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExcludedDivisions {
    pub pipelines: bool,
    pub tensor_groups: bool,
}

impl ExcludedDivisions {
    /// Returns true if each device must hold the whole model.
    pub const fn are_all(self) -> bool {
        self.pipelines && self.tensor_groups
    }
}

impl Default for ParallelOptions {
    fn default() -> Self {
        Self {
            shares: Shares::default(),
            share_changes: Vec::new(),
            topology: Topology::Ring,
            overlap: overlaps_by_default(),
            reduce_site: None,
            chunk_bytes: 1 << 20,
            pipeline: PipelineOptions::default(),
            tensor: TensorOptions::default(),
            excluded: ExcludedDivisions::default(),
        }
    }
}

impl ParallelOptions {
    /// Returns true if pipelines have several stages, or stages several ranks, so that a rank holds
    /// a part of the model.
    pub const fn is_divided(&self) -> bool {
        self.pipeline.has_stages() || self.tensor.has_groups()
    }

    /// Returns the number of stages of each pipeline; 1 if each device holds the whole model.
    pub const fn stages(&self) -> usize {
        self.pipeline.stages as usize
    }

    /// Returns the number of devices over which each pipeline divides the model.
    pub const fn devices_per_pipeline(&self) -> usize {
        self.stages() * self.tensor.ranks as usize
    }

    /// Returns true if the cut of the model into stages is left to measurements.
    pub fn lacks_cut(&self) -> bool {
        self.pipeline.has_stages() && self.pipeline.blocks_per_stage.is_empty()
    }
}

/// Samples of each device per step, or of each pipeline, if there are several.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shares {
    /// By measured speed, which the shares of whole models also follow while they are trained on a
    /// data set; with the devices `auto`, devices that would make a step longer are left out. For
    /// pipelines of a trainer of the library: evenly.
    #[default]
    Measured,
    /// As equal as they can be.
    Even,
    /// Given numbers, each at least 1, in the order of the devices.
    Fixed(Vec<usize>),
}

impl Shares {
    /// Returns true if the samples are divided by measured speed.
    pub const fn are_measured(&self) -> bool {
        matches!(self, Self::Measured)
    }
}

/// Shares of the batch from a step on, in place of earlier ones. As text: `51: 64 32`.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ShareChange {
    /// First step with these shares.
    pub step: u64,
    /// Samples of each device, in the order of the devices.
    pub shares: Vec<u32>,
}

/// Text that is not a change of shares.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not a change of shares: give its first step and the samples of each device, such as \
     '51: 64 32'"
)]
pub struct ShareChangeError(String);

impl FromStr for ShareChange {
    type Err = ShareChangeError;

    fn from_str(text: &str) -> Result<Self, ShareChangeError> {
        let error = || ShareChangeError(text.into());
        let (step, samples) = text.split_once(':').ok_or_else(error)?;
        let step = step.trim().parse().map_err(|_| error())?;
        let mut shares = Vec::new();
        for share in samples.split_whitespace() {
            shares.push(share.parse().map_err(|_| error())?);
        }
        if shares.is_empty() { Err(error()) } else { Ok(Self { step, shares }) }
    }
}

impl fmt::Display for ShareChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shares: Vec<String> = self.shares.iter().map(u32::to_string).collect();
        write!(f, "{}: {}", self.step, shares.join(" "))
    }
}

/// Options for cutting a model into the stages of pipelines.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PipelineOptions {
    /// Stages of each pipeline; 1: none.
    pub stages: u32,
    pub schedule: PipelineSchedule,
    /// Model chunks per stage: 2 or more if the schedule is interleaved, otherwise 1.
    pub virtual_stages: u32,
    /// Blocks of each model chunk, in forward order; empty: cut by measured times.
    pub blocks_per_stage: Vec<u32>,
}

impl Default for PipelineOptions {
    fn default() -> Self {
        Self {
            stages: 1,
            schedule: PipelineSchedule::OneFOneB,
            virtual_stages: 1,
            blocks_per_stage: Vec::new(),
        }
    }
}

impl PipelineOptions {
    /// Returns true if pipelines have several stages.
    pub const fn has_stages(&self) -> bool {
        self.stages > 1
    }
}

/// Largest share of a rank of a tensor group.
pub const TENSOR_SHARE_MAX: u32 = 1_000_000;

/// Options for dividing the tensors of a model among the ranks of a tensor group.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct TensorOptions {
    /// Ranks of a tensor group; 1: none.
    pub ranks: u32,
    /// Shares of the heads, columns and vocabulary by rank of the group, each at least 1; empty: by
    /// measured speed.
    pub shares: Vec<u32>,
}

impl Default for TensorOptions {
    fn default() -> Self {
        Self { ranks: 1, shares: Vec::new() }
    }
}

impl TensorOptions {
    /// Returns true if tensor groups have several ranks.
    pub const fn has_groups(&self) -> bool {
        self.ranks > 1
    }
}

/// Default of [`ParallelOptions::overlap`].
const fn overlaps_by_default() -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_shares_have_one_text() {
        let change = ShareChange { step: 51, shares: vec![64, 32] };
        assert_eq!(change.to_string(), "51: 64 32");
        assert_eq!("51: 64 32".parse(), Ok(change.clone()));
        assert_eq!(" 51 :64  32 ".parse(), Ok(change));
        for wrong in ["", "51", "51:", "51 64 32", "x: 64 32", "51: 64 -32", "51: 64.5 32"] {
            let error = wrong.parse::<ShareChange>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("'{wrong}' is not a change of shares")), "{error}");
        }
    }
}
