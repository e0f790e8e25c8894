//! Proposal of a plan: the layout that was chosen for a run, the ones it was compared with, and
//! the reasons.

use potluck_core::format::{milliseconds, percent};
use serde::Serialize;

use super::arrangement::Arrangement;
use crate::{Mesh, PipelineSchedule};

/// Way to spread a run over devices, with its predicted step.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    pub arrangement: Arrangement,
    pub prediction: Prediction,
}

impl Candidate {
    /// Returns the most samples of a micro-batch.
    pub fn micro_batch(&self) -> u32 {
        let shares = self.arrangement.shares.iter();
        shares.map(|share| share.micro_batch).max().unwrap_or(1)
    }
}

/// Predicted step of a candidate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Seconds of a step.
    pub step_s: f64,
    /// Seconds of a step in which all devices wait for messages between them, at least: the
    /// difference to the step with free messages.
    pub communication_s: f64,
    /// Fraction of the time of all devices, besides communication, in which they have nothing to
    /// compute.
    pub idle: f64,
    /// Factor by which a run takes longer than its steps because its state is sent to the first
    /// node, which saves it; 1 with a device of that node.
    pub state_factor: f64,
    /// By rank: bytes of memory that are needed, and that there are, if known.
    pub memory: Vec<MemoryNeed>,
}

impl Prediction {
    /// Returns the seconds of a step with its part of the work between steps, by which layouts are
    /// compared.
    pub fn cost_s(&self) -> f64 {
        self.step_s * self.state_factor
    }
}

/// Memory of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryNeed {
    pub needed: u64,
    /// `None` if unknown.
    pub has: Option<u64>,
}

impl MemoryNeed {
    /// Returns true unless more is needed than there is.
    pub fn fits(self) -> bool {
        self.has.is_none_or(|has| self.needed <= has)
    }

    /// Returns the bytes that are left: all that can be counted if it is unknown what there is.
    pub fn left(self) -> u64 {
        self.has.unwrap_or(u64::MAX).saturating_sub(self.needed)
    }
}

/// Device that the chosen candidate does not use.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UnusedDevice {
    /// Index of the device in the profile.
    pub device: usize,
    /// Reason, as a sentence for the user.
    pub reason: String,
}

/// Kind of layouts none of which is possible.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Refused {
    /// Short name of the layouts, such as "tensor groups of 2".
    pub layouts: String,
    /// Reason, as a sentence for the user.
    pub reason: String,
}

/// Answer of the planner.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    pub chosen: Candidate,
    /// Other candidates, the fastest first.
    pub others: Vec<Candidate>,
    pub left_out: Vec<UnusedDevice>,
    pub refused: Vec<Refused>,
    /// Changes of the machine or the request that would help most, with their gain, the largest
    /// first.
    pub advice: Vec<Advice>,
    /// Candidates whose step was predicted.
    pub tried: usize,
    /// By device: seconds of a step with the whole batch on it alone; infinite if it cannot train
    /// the whole model.
    pub alone_s: Vec<f64>,
}

/// Fraction of a step that a change must save to be told.
const WORTH_TELLING: f64 = 0.03;

/// Change that would make steps shorter.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// Sentence for the user.
    pub text: String,
    /// Predicted seconds of a step after the change.
    pub step_s: f64,
}

impl Advice {
    /// Returns the advice to make a change, by the seconds of a step before and after it; `None` if
    /// it saves too little.
    pub fn of(change: &str, before_s: f64, step_s: f64) -> Option<Self> {
        if step_s > before_s * (1.0 - WORTH_TELLING) {
            return None;
        }
        let (ms, less) = (milliseconds(step_s), percent(1.0 - step_s / before_s, 0));
        Some(Self { text: format!("{change}: {ms} ms per step, {less} less"), step_s })
    }
}

impl Proposal {
    /// Adds further advice.
    pub fn advise(&mut self, advice: Vec<Advice>) {
        self.advice.extend(advice);
        self.advice.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
    }
}

/// Returns a short name of a layout: `data 2`, `pipeline 3 (1f1b)`, `data 2 x tensor 2`, `alone`.
pub fn layout_name(mesh: Mesh, schedule: PipelineSchedule) -> String {
    let stages = format!("pipeline {}", mesh.pipeline);
    mesh_name(mesh).replace(&stages, &format!("{stages} ({schedule})"))
}

/// Returns a short name of the axes of a mesh: `data 2 x pipeline 3`, `alone`.
pub fn mesh_name(mesh: Mesh) -> String {
    let mut parts = Vec::new();
    if mesh.data > 1 {
        parts.push(format!("data {}", mesh.data));
    }
    if mesh.pipeline > 1 {
        parts.push(format!("pipeline {}", mesh.pipeline));
    }
    if mesh.tensor > 1 {
        parts.push(format!("tensor {}", mesh.tensor));
    }
    if parts.is_empty() { "alone".into() } else { parts.join(" x ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_is_named_by_its_axes() {
        let name = |data, pipeline, tensor| {
            layout_name(Mesh { data, pipeline, tensor }, PipelineSchedule::OneFOneB)
        };
        assert_eq!(name(1, 1, 1), "alone");
        assert_eq!(name(2, 1, 1), "data 2");
        let pipeline = format!("pipeline 3 ({})", PipelineSchedule::OneFOneB);
        assert_eq!(name(1, 3, 1), pipeline);
        assert_eq!(name(2, 3, 4), format!("data 2 x {pipeline} x tensor 4"));
    }

    #[test]
    fn unknown_memory_fits() {
        assert!(MemoryNeed { needed: 5, has: None }.fits());
        assert!(MemoryNeed { needed: 5, has: Some(5) }.fits());
        assert!(!MemoryNeed { needed: 6, has: Some(5) }.fits());
    }
}
