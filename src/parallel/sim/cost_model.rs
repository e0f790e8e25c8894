//! Cost model of a program: the duration of a step, from a simulation without values.

use std::sync::Arc;

use super::model_part::ModelPart;
use super::scenario::{Costs, LinkModel, Scenario};
use super::world::run;
use crate::collective::{BucketGroups, ShardLayout};
use crate::{EdgeLayout, Program, ReduceSite};

/// Model of the machine that runs a step: speeds of ranks and links.
#[derive(Clone, Copy, Debug)]
pub struct MachineModel<'a> {
    /// Speeds, per rank.
    pub costs: &'a [Costs],
    /// Links, by sender and then by receiver.
    pub links: &'a [Vec<LinkModel>],
    /// Latency in seconds of a message to or from the coordinator thread.
    pub control_s: f64,
    /// Window as in [`crate::collective::Exchange::new`].
    pub window: usize,
}

/// Returns the scenario of one step without values, randomness or faults.
pub fn one_step(
    programs: &[Program],
    layout: &Arc<ShardLayout>,
    machine: MachineModel,
) -> Scenario {
    let world = programs.len();
    let buckets = layout.buckets();
    let segments = machine.costs.iter().map(|c| c.segments.len()).max().unwrap_or(0);
    Scenario {
        layout: layout.clone(),
        groups: BucketGroups::all(world as u32, buckets),
        edges: EdgeLayout::default(),
        programs: programs.to_vec(),
        spread: None,
        parts: vec![ModelPart::whole(vec![Vec::new(); segments]); world],
        costs: machine.costs.to_vec(),
        reduce_site: vec![ReduceSite::Host; machine.costs.len()],
        links: machine.links.to_vec(),
        control_s: machine.control_s,
        jitter_s: 0.0,
        deadline_s: f64::INFINITY,
        window: machine.window,
        slots_max: None,
        steps: 1,
        seed: 0,
        values: None,
        faults: Vec::new(),
        seeded_bug: None,
        timeline: false,
    }
}

/// Returns the seconds of one step of these programs, one per rank, until the last rank knows
/// that all have ended it.
pub fn step_seconds(programs: &[Program], layout: &Arc<ShardLayout>, machine: MachineModel) -> f64 {
    run(&one_step(programs, layout, machine)).seconds
}
