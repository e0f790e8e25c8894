//! Devices that a plan for many nodes does not use, grouped by their reasons.

use std::collections::{BTreeMap, HashSet};

use super::order::node_costs;
use super::units::Units;
use super::{BestOfLayout, LeftOutGroup, NodesSearch, WithinNode, duration};
use crate::planner::balance::GAIN_MIN;
use potluck_core::format::{gibibytes_down, percent};

/// Returns the devices that the best units of the chosen layout do not have.
pub(super) fn left_out(search: &mut NodesSearch<'_>, chosen: &BestOfLayout) -> Vec<LeftOutGroup> {
    let profile = search.request.profile;
    let units = &chosen.units;
    let taken: HashSet<usize> = chosen.trial.units.iter().copied().collect();
    let costs = node_costs(profile, search.sizes.bytes());
    let cost = |unit: usize| costs[units.all[unit].node as usize];
    let mut dearest: f64 = 0.0;
    for unit in &taken {
        dearest = dearest.max(cost(*unit));
    }
    let speeds = units.speeds(search.request, search.sizes, chosen.trial.units.len() + 1);
    let mut spare: Vec<bool> = vec![true; profile.devices.len()];
    let mut without_memory: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    let mut far = Vec::new();
    let mut slow = Vec::new();
    for (index, unit) in units.all.iter().enumerate() {
        for device in &unit.devices {
            spare[*device] = false;
        }
        if taken.contains(&index) {
            continue;
        }
        if speeds[unit.kind].is_none() {
            let name = profile.devices[unit.devices[0]].name.as_str();
            without_memory.entry(name).or_default().extend(&unit.devices);
        } else if cost(index) > 1.01 * dearest {
            far.push(index);
        } else {
            slow.push(index);
        }
    }
    let mut left_out = Vec::new();
    for (_, devices) in without_memory {
        let has = gibibytes_down(profile.devices[devices[0]].memory.unwrap_or(0));
        let reason = format!("its memory, {has} for a run, does not hold one sample of its part");
        left_out.push(LeftOutGroup { devices, reason });
    }
    let sample_s = |unit: usize| profile.whole_model_s(units.all[unit].devices[0], 1);
    far.sort_by(|a, b| cost(*a).total_cmp(&cost(*b)).then(sample_s(*a).total_cmp(&sample_s(*b))));
    if let Some(nearest) = far.first() {
        let with = with_one(search, chosen, *nearest);
        let reason = format!("the links of their nodes are too slow: {with}");
        left_out.push(group(units, &far, reason));
    }
    left_out.extend(slow_groups(search, chosen, &slow));
    let spare: Vec<usize> = (0..spare.len()).filter(|device| spare[*device]).collect();
    if !spare.is_empty() {
        left_out.push(LeftOutGroup { devices: spare, reason: spare_reason(units.within) });
    }
    left_out
}

/// Units that are near enough: those without a sample, also if all take part, and the others.
fn slow_groups(
    search: &mut NodesSearch<'_>,
    chosen: &BestOfLayout,
    slow: &[usize],
) -> Vec<LeftOutGroup> {
    let units = &chosen.units;
    if slow.is_empty() {
        return Vec::new();
    }
    if let Some(reason) = no_sample(search, chosen) {
        return vec![group(units, slow, reason)];
    }
    let mut all = chosen.trial.units.clone();
    all.extend(slow);
    let all = search.in_order(units, all);
    let trial = search.estimate(units, &all);
    let with_sample: HashSet<usize> =
        trial.map_or_else(HashSet::new, |trial| trial.units.into_iter().collect());
    let (mut useful, idle): (Vec<usize>, Vec<usize>) =
        slow.iter().partition(|unit| with_sample.contains(unit));
    let profile = search.request.profile;
    let sample_s = |unit: usize| profile.whole_model_s(units.all[unit].devices[0], 1);
    useful.sort_by(|a, b| sample_s(*a).total_cmp(&sample_s(*b)));
    let mut groups = Vec::new();
    if let Some(fastest) = useful.first() {
        let reason = with_one(search, chosen, *fastest);
        groups.push(group(units, &useful, reason));
    }
    if !idle.is_empty() {
        let reason = match search.sizes.samples_min {
            1 => "they are too slow for a single sample of the batch".into(),
            least => format!("they are too slow for {least} samples of the batch"),
        };
        groups.push(group(units, &idle, reason));
    }
    groups
}

/// The reason that more units have no samples, if the chosen ones have all.
fn no_sample(search: &NodesSearch<'_>, chosen: &BestOfLayout) -> Option<String> {
    let least = search.sizes.samples_min;
    if chosen.trial.units.len() < (search.request.batch / least) as usize {
        return None;
    }
    Some(match least {
        1 => "the batch has no sample for them".into(),
        _ => format!(
            "the batch has too few samples for them: batch normalization needs {least} for each"
        ),
    })
}

fn group(units: &Units, set: &[usize], reason: String) -> LeftOutGroup {
    let mut devices = Vec::new();
    for unit in set {
        devices.extend(&units.all[*unit].devices);
    }
    LeftOutGroup { devices, reason }
}

fn spare_reason(within: WithinNode) -> String {
    match within {
        WithinNode::Fastest => "a faster device of the same node works alone".into(),
        within => format!("their nodes have too few devices for one more {within}"),
    }
}

/// The step with one unit more, the best of those that are left out, as the end of a sentence.
fn with_one(search: &mut NodesSearch<'_>, chosen: &BestOfLayout, unit: usize) -> String {
    let without_s = chosen.trial.step_s;
    if let Some(why) = no_sample(search, chosen) {
        return why;
    }
    let mut set = chosen.trial.units.clone();
    set.push(unit);
    let set = search.in_order(&chosen.units, set);
    let trial = search.estimate(&chosen.units, &set);
    let Some(trial) = trial.filter(|trial| trial.units.contains(&unit)) else {
        return "the best of them is too slow for a single sample of the batch".into();
    };
    if trial.step_s < without_s {
        let most = percent(GAIN_MIN, 0);
        return format!("all of them together shorten a step by less than {most}");
    }
    let with = duration(search.scale * trial.step_s);
    let without = duration(search.scale * without_s);
    format!("with the best of them a step would take {with}, without it {without}")
}
