//! Plan for machines as text and as JSON.

use std::collections::BTreeSet;
use std::fmt::Write;

use serde_json::{Value, json};

use super::MachinesPlan;
use potluck_core::Table;
use potluck_core::format::{
    counted, counted_large, gibibytes_down, gibibytes_up, percent, thousands,
};
use potluck_net::cluster;
use potluck_parallel::planner::many_nodes::{NodesCandidate, PlannedUnit, duration};

/// Most rows of a table.
const ROWS_MAX: usize = 16;
/// Most names of nodes, or of devices, in a row.
const NAMES_MAX: usize = 3;

/// Units of equal devices.
struct UnitGroup<'a> {
    devices: String,
    units: Vec<&'a PlannedUnit>,
}

impl UnitGroup<'_> {
    fn nodes(&self) -> Vec<u32> {
        let nodes: BTreeSet<u32> = self.units.iter().map(|unit| unit.node).collect();
        nodes.into_iter().collect()
    }

    fn samples(&self) -> u64 {
        self.units.iter().map(|unit| u64::from(unit.samples)).sum()
    }

    /// The unit whose device has the least memory left.
    fn fullest(&self) -> Option<&PlannedUnit> {
        self.units.iter().copied().min_by_key(|unit| unit.memory.left())
    }
}

/// Range of numbers of which the least and the most are written, or one if they are equal.
fn range(values: impl Iterator<Item = u32>) -> String {
    let values: BTreeSet<u32> = values.collect();
    match (values.first(), values.last()) {
        (Some(least), Some(most)) if least < most => format!("{least} to {most}"),
        (Some(one), _) => one.to_string(),
        _ => String::new(),
    }
}

/// Words that say how many times each name is there, the most frequent first.
fn repeated<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for name in names {
        match counts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name, 1)),
        }
    }
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let mut words = Vec::new();
    for (name, count) in counts.iter().take(NAMES_MAX) {
        words.push(if *count == 1 { (*name).to_string() } else { format!("{count} x {name}") });
    }
    let more: usize = counts.iter().skip(NAMES_MAX).map(|(_, count)| count).sum();
    let others = if more == 0 { String::new() } else { format!(" and {more} more") };
    words.join(" + ") + &others
}

impl MachinesPlan {
    /// Groups of the units of a candidate by their devices, those with the most samples first.
    fn groups<'a>(&self, candidate: &'a NodesCandidate) -> Vec<UnitGroup<'a>> {
        let mut groups: Vec<UnitGroup<'a>> = Vec::new();
        for unit in &candidate.units {
            let devices = self.names_of(&unit.devices);
            match groups.iter_mut().find(|group| group.devices == devices) {
                Some(group) => group.units.push(unit),
                None => groups.push(UnitGroup { devices, units: vec![unit] }),
            }
        }
        groups.sort_by_key(|group| std::cmp::Reverse(group.samples()));
        groups
    }

    fn names_of(&self, devices: &[usize]) -> String {
        let profile = &self.machines.profile;
        repeated(devices.iter().map(|device| profile.devices[*device].name.as_str()))
    }

    /// Names of nodes: a few, and the number of the others.
    fn node_names(&self, nodes: &[u32]) -> String {
        let mut names: Vec<&str> = Vec::new();
        for node in nodes {
            let name = self.machines.names[*node as usize].as_str();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let more = names.len().saturating_sub(NAMES_MAX);
        names.truncate(NAMES_MAX);
        let shown = names.join(", ");
        if more == 0 { shown } else { format!("{shown} and {more} more") }
    }

    /// Returns the plan as text for a terminal.
    pub fn table(&self) -> String {
        let chosen = &self.proposal.chosen;
        let mut text = self.head();
        let rate = thousands(f64::from(self.batch) / chosen.step_s);
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "\n{} on {}: a step takes {}, {rate} samples/s\n\
             {} of it computing, {} waiting for messages and updates; devices idle {}\n",
            chosen.layout(),
            counted_large(chosen.nodes() as u64, "node", "nodes"),
            duration(chosen.step_s),
            duration(chosen.computing_s),
            duration(chosen.communication_s()),
            percent(chosen.idle, 0),
        );
        text += &self.units_table(chosen);
        text += &self.others_table();
        text += &self.left_out_text();
        for refused in &self.proposal.refused {
            let _ = writeln!(text, "not possible: {}: {}", refused.layouts, refused.reason);
        }
        for advice in &self.proposal.advice {
            let step = duration(advice.step_s);
            let _ = writeln!(text, "would help: {}: a step of {step}", advice.text);
        }
        if chosen.nodes() > cluster::NODES_MAX as usize {
            let most = cluster::NODES_MAX;
            let _ = writeln!(text, "note: a run of this version takes at most {most} nodes");
        }
        text
    }

    fn head(&self) -> String {
        let machines = &self.machines;
        let devices = machines.profile.devices.len();
        let nodes = counted_large(machines.names.len() as u64, "node", "nodes");
        let count = counted_large(devices as u64, "device", "devices");
        let rates = match machines.measured {
            0 => "rates from data sheets, not measured".to_string(),
            measured if measured == devices => "rates measured by potluck bench".to_string(),
            measured => format!("rates of {measured} measured, of the others from data sheets"),
        };
        let graph = machines.plans.model().whole();
        let parameters = graph.parameter_count() as f64 / 1e6;
        let batch = counted_large(u64::from(self.batch), "sample", "samples");
        format!(
            "{nodes} with {count}; {rates}\n\
             a model of {parameters:.1} million parameters, {batch} a step\n"
        )
    }

    fn units_table(&self, chosen: &NodesCandidate) -> String {
        let head = [
            "nodes",
            "replicas",
            "<devices of each",
            "<nodes",
            "samples of each",
            "micro-batch",
            "computing",
            "<memory",
        ];
        let mut table = Table::new(&head);
        let groups = self.groups(chosen);
        for group in groups.iter().take(ROWS_MAX) {
            let nodes = group.nodes();
            let slowest_s = group.units.iter().map(|unit| unit.computing_s).fold(0.0, f64::max);
            let memory = group.fullest().map_or_else(String::new, |unit| {
                let needed = gibibytes_up(unit.memory.needed);
                match unit.memory.has {
                    Some(has) => format!("{needed} of {}", gibibytes_down(has)),
                    None => format!("{needed} of an unknown size"),
                }
            });
            table.row(vec![
                nodes.len().to_string(),
                group.units.len().to_string(),
                group.devices.clone(),
                self.node_names(&nodes),
                range(group.units.iter().map(|unit| unit.samples)),
                range(group.units.iter().map(|unit| unit.micro_batch)),
                duration(slowest_s),
                memory,
            ]);
        }
        let mut text = table.to_string();
        let more = groups.len().saturating_sub(ROWS_MAX);
        if more > 0 {
            let _ = writeln!(text, "and {}", counted(more, "other kind", "other kinds"));
        }
        text
    }

    fn others_table(&self) -> String {
        if self.proposal.others.is_empty() {
            return String::new();
        }
        let mut table = Table::new(&["<other layouts", "nodes", "step", "<"]);
        for other in &self.proposal.others {
            table.row(vec![
                other.layout(),
                other.nodes().to_string(),
                duration(other.step_s),
                if other.is_timed { String::new() } else { "estimated".into() },
            ]);
        }
        format!("\n{table}")
    }

    fn left_out_text(&self) -> String {
        if self.proposal.left_out.is_empty() {
            return String::new();
        }
        let mut text = "\nleft out\n".to_string();
        for group in self.proposal.left_out.iter().take(ROWS_MAX) {
            let names = self.node_names(&self.nodes_of(&group.devices));
            let devices = self.names_of(&group.devices);
            let _ = writeln!(text, "  {devices} ({names}): {}", group.reason);
        }
        let more = self.proposal.left_out.len().saturating_sub(ROWS_MAX);
        if more > 0 {
            let _ = writeln!(text, "  and {}", counted(more, "other kind", "other kinds"));
        }
        text + "\n"
    }

    fn nodes_of(&self, devices: &[usize]) -> Vec<u32> {
        let profile = &self.machines.profile;
        let nodes: BTreeSet<u32> =
            devices.iter().map(|device| profile.devices[*device].node).collect();
        nodes.into_iter().collect()
    }

    /// Returns the plan as JSON: `chosen`, `others`, `left_out`, `refused`, `advice`, and `nodes`
    /// in the order of the ring, with the samples of each.
    pub fn json(&self) -> Value {
        let proposal = &self.proposal;
        let mut left_out = Vec::new();
        for group in &proposal.left_out {
            left_out.push(json!({
                "devices": self.names_of(&group.devices),
                "count": group.devices.len(),
                "nodes": self.node_names(&self.nodes_of(&group.devices)),
                "reason": group.reason,
            }));
        }
        let mut advice = Vec::new();
        for one in &proposal.advice {
            advice.push(json!({ "text": one.text, "step_ms": 1e3 * one.step_s }));
        }
        let others: Vec<Value> =
            proposal.others.iter().map(|other| self.candidate_json(other)).collect();
        let mut nodes = Vec::new();
        for unit in &proposal.chosen.units {
            nodes.push(json!({
                "node": unit.node,
                "name": self.machines.names[unit.node as usize],
                "devices": self.names_of(&unit.devices),
                "samples": unit.samples,
                "micro_batch": unit.micro_batch,
                "computing_ms": 1e3 * unit.computing_s,
            }));
        }
        json!({
            "chosen": self.candidate_json(&proposal.chosen),
            "others": others,
            "left_out": left_out,
            "refused": proposal.refused,
            "advice": advice,
            "nodes": nodes,
            "measured_devices": self.machines.measured,
            "tried": proposal.tried,
        })
    }

    fn candidate_json(&self, candidate: &NodesCandidate) -> Value {
        let mut memory = Vec::new();
        for group in self.groups(candidate) {
            let Some(unit) = group.fullest() else { continue };
            memory.push(json!({
                "devices": group.devices,
                "needed": unit.memory.needed,
                "has": unit.memory.has,
            }));
        }
        json!({
            "layout": candidate.layout(),
            "nodes": candidate.nodes(),
            "step_ms": 1e3 * candidate.step_s,
            "computing_ms": 1e3 * candidate.computing_s,
            "communication_ms": 1e3 * candidate.communication_s(),
            "samples_per_s": f64::from(self.batch) / candidate.step_s,
            "idle": candidate.idle,
            "is_estimated": !candidate.is_timed && candidate.units.len() > 1,
            "memory": memory,
        })
    }
}
