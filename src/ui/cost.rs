//! Cost of a run on several devices as lines of text.

use super::ranks::short_name;
use potluck_core::Table;
use potluck_core::format::{milliseconds, percent, thousands};
use potluck_core::metrics::RunCost;

/// Maximum number of ranks with a line of their own.
const RANKS_TOLD: usize = 16;

/// Returns the lines about a cost: of the step, of the communication, of each rank, and the advice.
pub fn cost_lines(cost: &RunCost) -> Vec<String> {
    let mut lines = vec![step_line(cost), communication_line(cost)];
    lines.extend(rank_table(cost).to_string().lines().map(String::from));
    if cost.ranks.len() > RANKS_TOLD {
        lines.push(format!("and {} more in metrics.jsonl", cost.ranks.len() - RANKS_TOLD));
    }
    lines.push(format!("would help: {}", cost.advice));
    lines
}

/// Formats the step: `step 312 ms (298 predicted), 2,036 tokens/s; 1.74 x cpu alone, 0.87 of the
/// sum of all alone`.
fn step_line(cost: &RunCost) -> String {
    let mut line = format!("step {} ms", milliseconds(cost.step_s));
    if let Some(predicted_s) = cost.predicted_s {
        line += &format!(" ({} predicted)", milliseconds(predicted_s));
    }
    line += &format!(", {} {}/s", thousands(cost.per_s), cost.unit.name());
    let mut relative = Vec::new();
    if let (Some(speedup), Some(fastest)) = (cost.speedup(), &cost.fastest) {
        relative.push(format!("{speedup:.2} x {} alone", short_name(&fastest.name)));
    }
    if let Some(efficiency) = cost.efficiency {
        relative.push(format!("{efficiency:.2} of the sum of all devices alone"));
    }
    if !relative.is_empty() {
        line += &format!("; {}", relative.join(", "));
    }
    line
}

fn communication_line(cost: &RunCost) -> String {
    let mut line = format!("communication {} ms exposed", milliseconds(cost.exposed_s));
    if let Some(hidden_s) = cost.hidden_s {
        line += &format!(", {} ms hidden", milliseconds(hidden_s));
    }
    if let Some(bubble) = cost.bubble {
        line += &format!("; bubble {}", percent(bubble, 0));
    }
    line
}

fn rank_table(cost: &RunCost) -> Table {
    let head =
        ["<", "computes", "waits for gradients", "for tensors", "for other ranks", "between steps"];
    let mut table = Table::new(&head);
    for (rank, of_rank) in cost.ranks.iter().enumerate().take(RANKS_TOLD) {
        let mut row = vec![format!("rank {rank} {}", short_name(&of_rank.name))];
        let shares = [
            of_rank.computing,
            of_rank.gradients,
            of_rank.tensors,
            of_rank.others,
            of_rank.between,
        ];
        row.extend(shares.map(|share| percent(share, 0)));
        table.row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_core::metrics::{RankCost, SoloSpeed, Unit};

    fn rank(name: &str, shares: [f64; 5]) -> RankCost {
        let [computing, gradients, tensors, others, between] = shares;
        RankCost { name: name.into(), computing, gradients, tensors, others, between }
    }

    fn cost() -> RunCost {
        RunCost {
            step: 40,
            steps: 39,
            step_s: 0.3121,
            predicted_s: None,
            unit: Unit::Tokens,
            per_s: 2036.4,
            fastest: None,
            efficiency: None,
            exposed_s: 0.012,
            hidden_s: None,
            bubble: None,
            ranks: vec![
                rank("cpu (AMD EPYC, 2 threads)", [0.91, 0.06, 0.0, 0.0, 0.03]),
                rank("NVIDIA GeForce RTX 3060", [0.8, 0.15, 0.0, 0.02, 0.03]),
            ],
            advice: "nothing".into(),
        }
    }

    #[test]
    fn a_cost_reads_as_lines() {
        let lines = cost_lines(&cost()).join("\n");
        let expected = "\
step 312 ms, 2,036 tokens/s
communication 12.0 ms exposed
                 computes  waits for gradients  for tensors  for other ranks  between steps
rank 0 cpu           91 %                  6 %          0 %              0 %            3 %
rank 1 RTX 3060      80 %                 15 %          0 %              2 %            3 %
would help: nothing";
        assert_eq!(lines, expected);
    }

    #[test]
    fn what_was_measured_alone_and_predicted_is_told() {
        let fastest = SoloSpeed { name: "cpu (AMD EPYC, 2 threads)".into(), step_s: 0.543_054 };
        let known = RunCost {
            predicted_s: Some(0.298),
            fastest: Some(fastest),
            efficiency: Some(0.87),
            hidden_s: Some(0.02),
            bubble: Some(0.125),
            ..cost()
        };
        let lines = cost_lines(&known);
        let expected = "step 312 ms (298 predicted), 2,036 tokens/s; 1.74 x cpu alone, 0.87 of the \
                        sum of all devices alone";
        assert_eq!(lines[0], expected);
        assert_eq!(lines[1], "communication 12.0 ms exposed, 20.0 ms hidden; bubble 12 %");
    }

    #[test]
    fn many_ranks_are_cut_short() {
        let ranks = vec![rank("cpu", [1.0, 0.0, 0.0, 0.0, 0.0]); RANKS_TOLD + 3];
        let lines = cost_lines(&RunCost { ranks, ..cost() });
        assert_eq!(lines.len(), 3 + RANKS_TOLD + 2);
        assert_eq!(lines[3 + RANKS_TOLD], "and 3 more in metrics.jsonl");
    }
}
