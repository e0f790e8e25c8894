//! Sets of devices to try, and the choice among priced candidates.

use super::{DEVICES_MAX, SUBSETS_MAX};
use crate::planner::arrangement::Arrangement;
use crate::planner::balance::GAIN_MIN;
use crate::planner::laid_out::LaidOut;
use crate::planner::profile::PlanProfile;
use crate::planner::proposal::Candidate;
use potluck_core::{DType, Rank};

/// Minimum gain of a layout that divides a model which devices can hold, as a part of a step and in
/// seconds: more than the usual error of a prediction.
const DIVISION_GAIN_MIN: f64 = 0.1;
const DIVISION_GAIN_S_MIN: f64 = 1e-3;

/// Seconds between two transfers of a run's state to the first node: the default of
/// `train.checkpoint_minutes` with several nodes.
const STATE_INTERVAL_S: f64 = 120.0;

/// Factor by which devices of only other nodes must be faster than one of the first node, which
/// saves the state and reads the batches: more than the noise of timings.
const AWAY: f64 = 1.05;

/// Arrays of a shard of the state: parameters, and the two moments of AdamW.
const STATE_ARRAYS: usize = 3;

/// Returns the sets of devices to try, each ascending, the ones with most speed first. Of devices
/// of one kind on one node, the first ones are taken.
pub(super) fn device_sets(profile: &PlanProfile, rows: u32, uses_all: bool) -> Vec<Vec<usize>> {
    let count = profile.devices.len();
    let all: Vec<usize> = (0..count).collect();
    if uses_all {
        return vec![all];
    }
    let mut sets = if count <= SUBSETS_MAX { subsets(count) } else { prefixes(profile, rows) };
    sets.retain(|set| is_first_of_kinds(profile, set));
    let speed = |set: &Vec<usize>| -> f64 {
        set.iter().map(|device| 1.0 / profile.whole_model_s(*device, rows)).sum()
    };
    sets.sort_by(|a, b| speed(b).total_cmp(&speed(a)));
    sets
}

fn subsets(count: usize) -> Vec<Vec<usize>> {
    let mut sets = Vec::new();
    for bits in 1..1usize << count {
        sets.push((0..count).filter(|device| bits >> device & 1 == 1).collect());
    }
    sets
}

/// The fastest 1, 2, 3, .. devices, and those of each node.
fn prefixes(profile: &PlanProfile, rows: u32) -> Vec<Vec<usize>> {
    let mut sets = Vec::new();
    let mut add_prefixes = |mut devices: Vec<usize>| {
        devices.sort_by(|a, b| {
            profile.whole_model_s(*a, rows).total_cmp(&profile.whole_model_s(*b, rows))
        });
        for count in prefix_lengths(devices.len()) {
            let mut set = devices[..count].to_vec();
            set.sort_unstable();
            if !sets.contains(&set) {
                sets.push(set);
            }
        }
    };
    add_prefixes((0..profile.devices.len()).collect());
    let nodes = profile.devices.iter().map(|device| device.node).max().unwrap_or(0);
    for node in 0..=nodes {
        let all = 0..profile.devices.len();
        add_prefixes(all.filter(|device| profile.devices[*device].node == node).collect());
    }
    sets
}

/// Numbers of devices to try: all up to [`DEVICES_MAX`], then every fourth of their number more.
fn prefix_lengths(devices: usize) -> Vec<usize> {
    let mut lengths: Vec<usize> = (1..=devices.min(DEVICES_MAX)).collect();
    let mut length = DEVICES_MAX;
    while length < devices {
        length = (length + length / 4).min(devices);
        lengths.push(length);
    }
    lengths
}

/// Returns false if a device is missing while a later one of its kind and node is there.
fn is_first_of_kinds(profile: &PlanProfile, set: &[usize]) -> bool {
    for device in set {
        let own = &profile.devices[*device];
        for (earlier, other) in profile.devices[..*device].iter().enumerate() {
            let is_equal = other.kind == own.kind && other.node == own.node;
            if is_equal && !set.contains(&earlier) {
                return false;
            }
        }
    }
    true
}

/// Returns the candidate with the fewest devices among those nearly as fast as the fastest, and
/// then the one that divides the model the least, in the largest micro-batches.
pub(super) fn simplest_of_fastest(candidates: &[Candidate]) -> Option<usize> {
    let most_s = most_of_divided(candidates);
    let is_eligible =
        |one: &Candidate| !one.arrangement.mesh.is_divided() || one.prediction.cost_s() <= most_s;
    let eligible: Vec<usize> =
        (0..candidates.len()).filter(|index| is_eligible(&candidates[*index])).collect();
    let cost = |index: usize| candidates[index].prediction.cost_s();
    let fastest = eligible.iter().map(|index| cost(*index)).fold(f64::INFINITY, f64::min);
    let near = eligible.into_iter().filter(|index| cost(*index) * (1.0 - GAIN_MIN) <= fastest);
    near.min_by(|a, b| {
        let key = |index: usize| {
            let one = &candidates[index];
            let mesh = one.arrangement.mesh;
            let has_stages = mesh.pipeline > 1;
            (mesh.world_size(), mesh.tensor, has_stages, std::cmp::Reverse(one.micro_batch()))
        };
        key(*a).cmp(&key(*b)).then_with(|| cost(*a).total_cmp(&cost(*b)))
    })
}

/// Returns the most seconds of a step with which a layout that divides the model is chosen: it must
/// be clearly faster than the fastest candidate of devices with the whole model.
pub(super) fn most_of_divided(candidates: &[Candidate]) -> f64 {
    let whole = candidates.iter().filter(|one| !one.arrangement.mesh.is_divided());
    let fastest = whole.map(|one| one.prediction.cost_s()).fold(f64::INFINITY, f64::min);
    // Exact for an infinite time, too, without such a candidate.
    (fastest * (1.0 - DIVISION_GAIN_MIN)).min(fastest - DIVISION_GAIN_S_MIN)
}

/// Returns the factor by which a run takes longer than its steps because its state is sent to the
/// first node; 1 if a rank is there.
pub(super) fn state_factor(
    profile: &PlanProfile,
    arrangement: &Arrangement,
    laid_out: &LaidOut,
) -> f64 {
    let node = |position: &usize| profile.devices[*position].node as usize;
    if arrangement.positions.iter().any(|position| node(position) == 0) {
        return 1.0;
    }
    let mut sent_s = 0.0;
    for (rank, position) in arrangement.positions.iter().enumerate() {
        let owned = laid_out.owned(Rank(rank as u32));
        let elements: usize = owned.iter().map(ExactSizeIterator::len).sum();
        let bytes = (STATE_ARRAYS * elements * DType::F32.bytes()) as f64;
        let link = profile.links[node(position)][0];
        sent_s += link.latency_s + bytes / link.bytes_per_s;
    }
    AWAY * (1.0 + sent_s / STATE_INTERVAL_S)
}
