//! Sets of devices to try, and the choice among priced candidates.

use super::SUBSETS_MAX;
use crate::planner::balance::GAIN_MIN;
use crate::planner::profile::PlanProfile;
use crate::planner::proposal::Candidate;

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
        for count in 1..=devices.len() {
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
    let steps = candidates.iter().map(|one| one.prediction.step_s);
    let fastest = steps.fold(f64::INFINITY, f64::min);
    let near = (0..candidates.len())
        .filter(|index| candidates[*index].prediction.step_s * (1.0 - GAIN_MIN) <= fastest);
    near.min_by(|a, b| {
        let key = |index: usize| {
            let one = &candidates[index];
            let mesh = one.arrangement.mesh;
            let has_stages = mesh.pipeline > 1;
            (mesh.world_size(), mesh.tensor, has_stages, std::cmp::Reverse(one.micro_batch()))
        };
        key(*a).cmp(&key(*b)).then_with(|| {
            let step = |index: usize| candidates[index].prediction.step_s;
            step(*a).total_cmp(&step(*b))
        })
    })
}
