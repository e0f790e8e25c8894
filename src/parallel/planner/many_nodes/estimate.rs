//! Estimate of a step of a ring of units.

use std::rc::Rc;

use super::ManyNodesRequest;
use super::sharing::share_out;
use super::units::{ModelSizes, UnitSpeed, Units};
use crate::planner::balance::{ThroughputModel, give_at_least};
use crate::planner::ring_time::RingRank;
use crate::sim::LinkModel;
use potluck_core::DType;

/// Rounds in which units without a sample are left out.
const ROUNDS: usize = 8;

/// Estimate of steps of units of a layout.
#[derive(Clone, Copy)]
pub(super) struct RingEstimate<'a> {
    pub request: &'a ManyNodesRequest<'a>,
    pub sizes: &'a ModelSizes,
    pub units: &'a Units,
}

/// Units that take part in a step, and its estimated time.
#[derive(Clone, Debug)]
pub(super) struct RingTrial {
    /// Indices of the units, in the order of the ring.
    pub units: Vec<usize>,
    /// Samples and speed of each of them.
    pub counts: Vec<u32>,
    pub speeds: Vec<Rc<UnitSpeed>>,
    pub step_s: f64,
    /// Seconds of the slowest unit's passes.
    pub computing_s: f64,
}

impl RingEstimate<'_> {
    /// Shares the batch out to the units of a set, and estimates the step. Units without the memory
    /// or without a sample are left out; `None` if none is left.
    pub(super) fn trial(&self, set: &[usize]) -> Option<RingTrial> {
        let mut units = set.to_vec();
        for _ in 0..ROUNDS {
            let by_kind = self.units.speeds(self.request, self.sizes, units.len());
            let mut able = Vec::with_capacity(units.len());
            let mut speeds = Vec::with_capacity(units.len());
            for unit in units.iter().copied() {
                if let Some(speed) = &by_kind[self.units.all[unit].kind] {
                    able.push(unit);
                    speeds.push(speed.clone());
                }
            }
            let throughputs: Vec<ThroughputModel> =
                speeds.iter().map(|speed| speed.throughput).collect();
            let mut counts = share_out(self.request.batch, &throughputs);
            give_at_least(&mut counts, self.sizes.samples_min);
            let mut kept = Vec::with_capacity(able.len());
            for (unit, count) in able.iter().zip(&counts) {
                if *count > 0 {
                    kept.push(*unit);
                }
            }
            if kept.is_empty() {
                return None;
            }
            if kept.len() == units.len() {
                let computing_s = slowest(&speeds, &counts);
                let step_s = self.step_s(&units, &speeds, &counts);
                return Some(RingTrial { units, counts, speeds, step_s, computing_s });
            }
            units = kept;
        }
        None
    }

    /// Ranks of the ring of these units.
    pub(super) fn ring(&self, units: &[usize], speeds: &[Rc<UnitSpeed>]) -> Vec<RingRank> {
        let mut ranks = Vec::with_capacity(units.len());
        for (at, (unit, speed)) in units.iter().zip(speeds).enumerate() {
            let next = units[(at + 1) % units.len()];
            ranks.push(RingRank {
                link: self.link(*unit, next),
                read_back: speed.read_back,
                upload: speed.upload,
                host: speed.host,
                update_element_s: speed.update_element_s,
            });
        }
        ranks
    }

    fn link(&self, from: usize, to: usize) -> LinkModel {
        let device = |unit: usize| self.units.all[unit].devices[0];
        self.request.profile.link(device(from), device(to))
    }

    /// Seconds of a message between the first node and the farthest of these units.
    pub(super) fn control_s(&self, units: &[usize]) -> f64 {
        let nodes = units.iter().map(|unit| self.units.all[*unit].node);
        self.request.profile.control_s(nodes)
    }

    /// Seconds of a step: each bucket passes the slowest link of the ring once it is complete on
    /// all units and the bucket before it has passed; the last value passes all links.
    fn step_s(&self, units: &[usize], speeds: &[Rc<UnitSpeed>], counts: &[u32]) -> f64 {
        let world = units.len() as f64;
        let computing_s = slowest(speeds, counts);
        let control_s = self.control_s(units);
        let mut update_s: f64 = 0.0;
        for speed in speeds {
            let elements = self.sizes.elements as f64 / world;
            update_s = update_s.max(elements * speed.update_element_s);
        }
        if units.len() == 1 {
            return computing_s + update_s;
        }
        let mut summed_at = f64::INFINITY;
        let mut copied_at = f64::INFINITY;
        let mut path_s = 0.0;
        for rank in self.ring(units, speeds) {
            let link = rank.link.bytes_per_s;
            summed_at = summed_at.min(link).min(rank.read_back.bytes_per_s);
            summed_at = summed_at.min(rank.host.bytes_per_s);
            copied_at = copied_at.min(link).min(rank.upload.bytes_per_s);
            path_s += rank.link.latency_s;
        }
        path_s *= (world - 1.0) / world;
        path_s += speeds[0].read_back.latency_s + speeds[0].upload.latency_s;
        let moved = (world - 1.0) / world * DType::F32.bytes() as f64;
        let mut complete = vec![0.0f64; self.sizes.order.len()];
        for (speed, samples) in speeds.iter().zip(counts) {
            let of_unit = speed.complete_s(*samples, self.request.options.overlap);
            for (latest, of_unit) in complete.iter_mut().zip(of_unit) {
                *latest = latest.max(of_unit);
            }
        }
        let mut passed_s: f64 = 0.0;
        for (length, complete) in self.sizes.lengths.iter().zip(complete) {
            passed_s = passed_s.max(complete) + *length as f64 * moved / summed_at;
        }
        let summed_s = computing_s.max(passed_s + path_s);
        let copied_s = self.sizes.elements as f64 * moved / copied_at + path_s;
        summed_s + update_s + copied_s + 4.0 * control_s
    }
}

fn slowest(speeds: &[Rc<UnitSpeed>], counts: &[u32]) -> f64 {
    let mut slowest_s: f64 = 0.0;
    for (speed, samples) in speeds.iter().zip(counts) {
        slowest_s = slowest_s.max(speed.seconds(*samples));
    }
    slowest_s
}
