//! The price of a program: how long a step takes, by simulating one without values.

use std::sync::Arc;

use super::scenario::{Costs, LinkModel, Scenario};
use super::world::run;
use crate::collective::ShardLayout;
use crate::parallel::Program;

/// What a step costs besides its programs.
#[derive(Clone, Copy, Debug)]
pub struct MachineModel<'a> {
    /// Per rank.
    pub costs: &'a [Costs],
    /// From a rank, to a rank.
    pub links: &'a [Vec<LinkModel>],
    /// How long a message to or from main takes.
    pub control_s: f64,
    /// As in [`crate::collective::Exchange::new`].
    pub window: usize,
}

/// The scenario of one step without values, chance or faults.
pub fn one_step(
    programs: &[Program],
    layout: &Arc<ShardLayout>,
    machine: MachineModel,
) -> Scenario {
    Scenario {
        layout: layout.clone(),
        programs: programs.to_vec(),
        completes: vec![
            Vec::new();
            machine.costs.iter().map(|c| c.segments.len()).max().unwrap_or(0)
        ],
        costs: machine.costs.to_vec(),
        links: machine.links.to_vec(),
        control_s: machine.control_s,
        jitter_s: 0.0,
        deadline_s: f64::INFINITY,
        window: machine.window,
        places_max: None,
        steps: 1,
        seed: 0,
        values: None,
        faults: Vec::new(),
        seeded_bug: None,
        timeline: false,
    }
}

/// The seconds of one step of these programs, one per rank, until the last rank knows that all
/// have ended it.
pub fn step_seconds(programs: &[Program], layout: &Arc<ShardLayout>, machine: MachineModel) -> f64 {
    run(&one_step(programs, layout, machine)).seconds
}
