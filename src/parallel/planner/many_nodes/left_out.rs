//! Devices that a plan for many nodes does not use, grouped by their names and reasons.

use std::collections::{BTreeMap, HashSet};

use super::order::node_costs;
use super::{BestOfLayout, GAIN_MIN, LeftOutGroup, Search, WithinNode, duration};
use potluck_core::format::{gibibytes_down, percent};

/// Kind of a reason: devices of one name and kind of reason are one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LeftOutKind {
    /// It is in no unit of the layout.
    Spare,
    Memory,
    /// Its node's links are slower than those of all nodes that take part.
    Link,
    Speed,
}

/// Returns the devices that the best units of the chosen layout do not have.
pub(super) fn left_out(search: &mut Search<'_>, chosen: &BestOfLayout) -> Vec<LeftOutGroup> {
    let profile = search.request.profile;
    let units = &chosen.units;
    let mut unit_of = vec![None; profile.devices.len()];
    for (index, unit) in units.all.iter().enumerate() {
        for device in &unit.devices {
            unit_of[*device] = Some(index);
        }
    }
    let taken: HashSet<usize> = chosen.trial.units.iter().copied().collect();
    let costs = node_costs(profile, search.sizes.bytes());
    let mut dearest: f64 = 0.0;
    for unit in &taken {
        dearest = dearest.max(costs[units.all[*unit].node as usize]);
    }
    let speeds = units.speeds(search.request, search.sizes, chosen.trial.units.len() + 1);
    let mut groups: BTreeMap<(LeftOutKind, &str), Vec<usize>> = BTreeMap::new();
    for (device, unit) in unit_of.iter().enumerate() {
        let kind = match unit {
            None => LeftOutKind::Spare,
            Some(unit) if taken.contains(unit) => continue,
            Some(unit) if speeds[units.all[*unit].kind].is_none() => LeftOutKind::Memory,
            Some(unit) if costs[units.all[*unit].node as usize] > 1.01 * dearest => {
                LeftOutKind::Link
            }
            Some(_) => LeftOutKind::Speed,
        };
        let name = profile.devices[device].name.as_str();
        groups.entry((kind, name)).or_default().push(device);
    }
    let mut left_out: Vec<LeftOutGroup> = Vec::new();
    for ((kind, _), devices) in groups {
        let reason = match kind {
            LeftOutKind::Spare => spare(units.within),
            LeftOutKind::Memory => {
                let has = profile.devices[devices[0]].memory.unwrap_or(0);
                let has = gibibytes_down(has);
                format!("its memory, {has} for a run, does not hold one sample of its part")
            }
            LeftOutKind::Link | LeftOutKind::Speed => {
                with_one(search, chosen, unit_of[devices[0]], kind)
            }
        };
        match left_out.iter_mut().find(|group| group.reason == reason) {
            Some(group) => group.devices.extend(devices),
            None => left_out.push(LeftOutGroup { devices, reason }),
        }
    }
    left_out
}

fn spare(within: WithinNode) -> String {
    match within {
        WithinNode::Fastest => "a faster device of its node does the work alone".into(),
        within => format!("its node has too few devices for one more {within}"),
    }
}

/// The step with one unit more, as the end of a sentence.
fn with_one(
    search: &mut Search<'_>,
    chosen: &BestOfLayout,
    unit: Option<usize>,
    kind: LeftOutKind,
) -> String {
    let without_s = chosen.trial.step_s;
    let Some(unit) = unit else { return String::new() };
    if chosen.trial.units.len() >= search.request.batch as usize {
        return "the batch has no sample for one more device".into();
    }
    let mut set = chosen.trial.units.clone();
    set.push(unit);
    let set = search.in_order(&chosen.units, set);
    let trial = search.estimate(&chosen.units, &set);
    let Some(trial) = trial.filter(|trial| trial.units.contains(&unit)) else {
        return "it is too slow for a single sample of the batch".into();
    };
    if trial.step_s < without_s {
        let most = percent(GAIN_MIN, 0);
        return format!("all devices like it together shorten a step by less than {most}");
    }
    let why = if kind == LeftOutKind::Link { "the links of its node are too slow: " } else { "" };
    let with = duration(trial.step_s);
    let without = duration(without_s);
    format!("{why}with one of them a step would take {with}, without it {without}")
}
