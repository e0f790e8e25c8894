//! Report of a plan as text and as JSON.

use std::fmt::Write;

use potluck_core::format::{
    counted, counted_large, gibibytes_down, gibibytes_up, milliseconds, percent, thousands,
};
use potluck_core::{Setting, Table};
use potluck_graph::Graph;
use potluck_parallel::planner::proposal::{Candidate, Proposal, layout_name};
use potluck_train::runtime::expected_step::ExpectedStep;
use potluck_train::runtime::placement::candidate_flags::{SelectableDevices, candidate_flags};
use potluck_train::runtime::placement::names::is_auto;
use potluck_train::runtime::placement::planned::PlannedRun;
use potluck_train::spec::RunSpec;
use serde_json::{Value, json};

/// Most layouts in the table.
const ROWS_MAX: usize = 10;

/// Plan with its basis.
pub struct PlanReport<'a> {
    pub spec: &'a RunSpec,
    pub planned: &'a PlannedRun,
    pub graph: &'a Graph,
    /// Devices of the plan, for the flags that repeat it.
    pub devices: SelectableDevices<'a>,
    /// Number of nodes.
    pub nodes: usize,
}

impl PlanReport<'_> {
    /// Returns the tables and sentences for a terminal.
    pub fn text(&self) -> String {
        let mut text = self.head();
        // Writing to a string cannot fail.
        let _ = write!(text, "\n{}\n", self.device_table());
        let _ = write!(text, "{}\n{}", self.layout_table(), self.chosen_lines());
        for note in self.notes_on_choice() {
            let _ = writeln!(text, "{note}");
        }
        for left in &self.planned.proposal.left_out {
            let _ = writeln!(text, "{}", left.reason);
        }
        for refused in &self.planned.proposal.refused {
            let _ = writeln!(text, "not possible: {}: {}", refused.layouts, refused.reason);
        }
        for (index, advice) in self.planned.proposal.advice.iter().enumerate() {
            let begin = if index == 0 { "would help most" } else { "would help" };
            let _ = writeln!(text, "{begin}: {}", advice.text);
        }
        if let Some(flags) = self.flags(&self.planned.proposal.chosen) {
            let _ = writeln!(text, "to run exactly this: potluck train .. {flags}");
        }
        text
    }

    /// Sentences on layouts and devices that are faster than the chosen layout.
    fn notes_on_choice(&self) -> Vec<String> {
        let Proposal { chosen, others, .. } = &self.planned.proposal;
        let step_s = chosen.prediction.step_s;
        let mut notes = Vec::new();
        let faster = others.iter().filter(|other| other.prediction.step_s < step_s);
        let mut meshes = faster.map(|other| other.arrangement.mesh);
        if !chosen.arrangement.mesh.is_divided() && meshes.any(|mesh| mesh.is_divided()) {
            notes.push(
                "a layout that divides the model is chosen if it is a tenth faster: predictions \
                 are not exact"
                    .into(),
            );
        }
        let names = self.planned.profile.devices.iter().map(|device| device.name.clone());
        let expected = ExpectedStep::of(&self.planned.proposal, &names.collect::<Vec<String>>());
        if let Some(alone) = expected.fastest
            && alone.step_s < step_s
            && !is_auto(&self.spec.devices)
            && !self.spec.parallel.is_divided()
        {
            notes.push(format!(
                "{} alone is faster, with {} ms per step: --devices auto may leave out the others",
                alone.name,
                milliseconds(alone.step_s)
            ));
        }
        notes
    }

    fn head(&self) -> String {
        let Self { spec, graph, .. } = self;
        let proposal = &self.planned.proposal;
        let parameters = counted_large(graph.parameter_count() as u64, "parameter", "parameters");
        let blocks = counted(graph.blocks.len(), "block", "blocks");
        let devices = counted(self.planned.profile.devices.len(), "device", "devices");
        let basis = if self.planned.is_kept {
            format!("{devices} as measured before (--retune measures again)")
        } else {
            format!("measured {devices} in {:.1} s", self.planned.measured_s)
        };
        format!(
            "model: {parameters} in {blocks}; a step has {}\n{basis}; compared {} in {:.1} s\n",
            counted(spec.batch as usize, "sample", "samples"),
            counted(proposal.tried, "layout", "layouts"),
            self.planned.searched_s,
        )
    }

    fn device_table(&self) -> Table {
        let mut table =
            Table::new(&["<device", "samples/s alone", "read MB/s", "write MB/s", "memory"]);
        for (index, device) in self.planned.profile.devices.iter().enumerate() {
            let rows = self.spec.micro_batch.min(self.spec.batch).max(1);
            let seconds = self.planned.profile.whole_model_s(index, rows);
            table.row(vec![
                device.name.clone(),
                rate_text(f64::from(rows) / seconds),
                rate_text(device.read_back.bytes_per_s / 1e6),
                rate_text(device.upload.bytes_per_s / 1e6),
                device.memory.map_or("of the host".into(), gibibytes_down),
            ]);
        }
        table
    }

    fn layout_table(&self) -> Table {
        let mut table = Table::new(&[
            "<",
            "<layout",
            "<devices",
            "micro-batch",
            "step ms",
            "samples/s",
            "messages",
            "idle",
            "most memory",
        ]);
        table.row(self.cells(&self.planned.proposal.chosen, ">"));
        for other in self.planned.proposal.others.iter().take(ROWS_MAX - 1) {
            table.row(self.cells(other, ""));
        }
        table
    }

    fn cells(&self, candidate: &Candidate, mark: &str) -> Vec<String> {
        let prediction = &candidate.prediction;
        let needed = prediction.memory.iter().map(|need| need.needed).max().unwrap_or(0);
        vec![
            mark.into(),
            layout_name(candidate.arrangement.mesh, candidate.arrangement.schedule),
            self.names(candidate),
            candidate.micro_batch().to_string(),
            milliseconds(prediction.step_s),
            rate_text(f64::from(self.spec.batch) / prediction.step_s),
            percent(prediction.communication_s / prediction.step_s, 0),
            percent(prediction.idle, 0),
            gibibytes_up(needed),
        ]
    }

    fn names(&self, candidate: &Candidate) -> String {
        let devices = &self.planned.profile.devices;
        let positions = &candidate.arrangement.positions;
        let names: Vec<&str> = positions.iter().map(|at| &*devices[*at].name).collect();
        names.join(", ")
    }

    /// Samples and blocks of each rank of the chosen layout.
    fn chosen_lines(&self) -> String {
        let arrangement = &self.planned.proposal.chosen.arrangement;
        let mut text = String::new();
        for rank in arrangement.mesh.ranks() {
            let at = arrangement.mesh.coordinates(rank);
            let device = &self.planned.profile.devices[arrangement.positions[rank.index()]];
            let share = &arrangement.shares[at.data];
            let mut parts = vec![counted(share.count as usize, "sample", "samples")];
            if arrangement.mesh.pipeline > 1 {
                let runs = arrangement.pipelines[at.data].chunks_of(at.pipeline);
                let blocks: usize = runs.iter().map(ExactSizeIterator::len).sum();
                parts.push(counted(blocks, "block", "blocks"));
            }
            if let Some(share) = arrangement.tensor_shares.get(at.tensor) {
                let all: u32 = arrangement.tensor_shares.iter().sum();
                let part = f64::from(*share) / f64::from(all);
                parts.push(format!("{} of each tensor", percent(part, 0)));
            }
            let need = self.planned.proposal.chosen.prediction.memory[rank.index()];
            let of = need.has.map_or(String::new(), |has| format!(" of {}", gibibytes_down(has)));
            parts.push(format!("{}{of}", gibibytes_up(need.needed)));
            text.push_str(&format!("{}: {}\n", device.name, parts.join(", ")));
        }
        text
    }

    /// Flags of `potluck train` that run a candidate, if there are any.
    fn flags(&self, candidate: &Candidate) -> Option<String> {
        let flags = candidate_flags(candidate, self.devices)?;
        let devices = &self.planned.profile.devices;
        let is_elsewhere = |position: &usize| devices[*position].node != 0;
        Some(if candidate.arrangement.positions.iter().any(is_elsewhere) {
            format!("{} {flags}", Setting::Nodes.given(self.nodes))
        } else {
            flags
        })
    }

    /// Returns the same as JSON.
    pub fn json(&self) -> String {
        let Proposal { chosen, others, left_out, refused, advice, tried, alone_s } =
            &self.planned.proposal;
        let mut devices = Vec::new();
        for (device, alone_s) in self.planned.profile.devices.iter().zip(alone_s) {
            let alone_ms = alone_s.is_finite().then_some(1e3 * alone_s);
            devices.push(json!({
                "name": device.name, "node": device.node, "memory": device.memory,
                "step_ms_alone": alone_ms,
            }));
        }
        let left: Vec<Value> = left_out
            .iter()
            .map(|left| {
                let name = &self.planned.profile.devices[left.device].name;
                json!({ "device": name, "reason": left.reason })
            })
            .collect();
        let others: Vec<Value> = others.iter().map(|other| self.candidate_json(other)).collect();
        let value = json!({
            "batch": self.spec.batch,
            "parameters": self.graph.parameter_count(),
            "measured_s": self.planned.measured_s,
            "searched_s": self.planned.searched_s,
            "tried": tried,
            "devices": devices,
            "chosen": self.candidate_json(chosen),
            "others": others,
            "left_out": left,
            "refused": refused,
            "advice": advice,
        });
        format!("{value:#}\n")
    }

    fn candidate_json(&self, candidate: &Candidate) -> Value {
        let arrangement = &candidate.arrangement;
        let prediction = &candidate.prediction;
        let shares: Vec<u32> = arrangement.shares.iter().map(|share| share.count).collect();
        let mut names = Vec::with_capacity(arrangement.positions.len());
        for position in &arrangement.positions {
            names.push(&self.planned.profile.devices[*position].name);
        }
        let mut blocks = Vec::new();
        if arrangement.mesh.pipeline > 1 {
            for pipeline in &arrangement.pipelines {
                blocks.push(pipeline.chunks.iter().map(ExactSizeIterator::len).collect::<Vec<_>>());
            }
        }
        json!({
            "layout": layout_name(arrangement.mesh, arrangement.schedule),
            "mesh": arrangement.mesh,
            "devices": names,
            "shares": shares,
            "tensor_shares": arrangement.tensor_shares,
            "blocks_per_stage": blocks,
            "micro_batch": candidate.micro_batch(),
            "flags": self.flags(candidate),
            "step_ms": 1e3 * prediction.step_s,
            "communication_ms": 1e3 * prediction.communication_s,
            "idle": prediction.idle,
            "memory": prediction.memory,
        })
    }
}

/// Rate with three digits at least; free transfers have none.
fn rate_text(rate: f64) -> String {
    if !rate.is_finite() {
        return "-".into();
    }
    if rate >= 100.0 { thousands(rate.round()) } else { format!("{rate:.1}") }
}
