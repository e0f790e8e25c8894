//! Order of the nodes of a ring, and the cost of a node's links.

use crate::planner::profile::PlanProfile;
use crate::sim::LinkModel;

fn cost(link: LinkModel, bytes: f64) -> f64 {
    link.latency_s + bytes / link.bytes_per_s
}

/// Returns the place of each node in a ring in which each node follows its nearest neighbour, from
/// the first node on: for links that cost `bytes`, the lowest of equally near nodes first.
pub(super) fn ring_order(profile: &PlanProfile, bytes: f64) -> Vec<usize> {
    let nodes = profile.links.len();
    let mut places = vec![0; nodes];
    let mut left: Vec<usize> = (1..nodes).collect();
    let mut from = 0;
    for place in 1..nodes {
        let mut nearest = 0;
        for index in 1..left.len() {
            let to = |index: usize| cost(profile.links[from][left[index]], bytes);
            if to(index) < to(nearest) {
                nearest = index;
            }
        }
        // Not `swap_remove`: the lowest of equal nodes is to be found first.
        from = left.remove(nearest);
        places[from] = place;
    }
    places
}

/// Returns the seconds that `bytes` take at least to and from a node, by node: over the better of
/// its links to others, in the slower direction. 0 for a single node.
pub(super) fn node_costs(profile: &PlanProfile, bytes: f64) -> Vec<f64> {
    let nodes = profile.links.len();
    if nodes < 2 {
        return vec![0.0; nodes];
    }
    let mut costs = Vec::with_capacity(nodes);
    for node in 0..nodes {
        let mut out = f64::INFINITY;
        let mut into = f64::INFINITY;
        for other in (0..nodes).filter(|other| *other != node) {
            out = out.min(cost(profile.links[node][other], bytes));
            into = into.min(cost(profile.links[other][node], bytes));
        }
        costs.push(out.max(into));
    }
    costs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(rates: &[&[f64]]) -> PlanProfile {
        let link = |rate: &f64| LinkModel { latency_s: 0.0, bytes_per_s: *rate };
        let links = rates.iter().map(|row| row.iter().map(link).collect()).collect();
        PlanProfile {
            devices: Vec::new(),
            links,
            network_s_per_byte: Vec::new(),
            receives_inputs: Vec::new(),
            thread_message_s: 0.0,
            half_parts: Vec::new(),
        }
    }

    #[test]
    fn neighbours_of_a_ring_are_near() {
        // Two sites, with nodes 0, 2 and 1, 3.
        let sites = profile(&[
            &[9.0, 1.0, 9.0, 1.0],
            &[1.0, 9.0, 1.0, 9.0],
            &[9.0, 1.0, 9.0, 1.0],
            &[1.0, 9.0, 1.0, 9.0],
        ]);
        assert_eq!(ring_order(&sites, 1.0), [0, 2, 1, 3]);
        let equal = profile(&[&[5.0; 3], &[5.0; 3], &[5.0; 3]]);
        assert_eq!(ring_order(&equal, 1.0), [0, 1, 2]);
    }

    #[test]
    fn node_costs_its_better_link_in_the_slower_direction() {
        let one_way = profile(&[&[1.0, 4.0, 2.0], &[1.0, 1.0, 1.0], &[2.0, 1.0, 1.0]]);
        assert_eq!(node_costs(&one_way, 4.0), [2.0, 4.0, 2.0]);
        assert_eq!(node_costs(&profile(&[&[1.0]]), 4.0), [0.0]);
    }
}
