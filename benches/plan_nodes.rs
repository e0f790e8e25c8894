//! Time and memory of plans for many unequal nodes: GPT-2 of 124 million parameters on nodes with
//! cards of the table and processors, of which no two have the same connection.
//!
//!     cargo bench --bench plan_nodes -- [--nodes N] [--batch N] [--micro-batch N]
//!
//! Prints the plan, the seconds that it took, and on Linux the peak memory of the process.

use std::fmt::Write;
use std::fs;
use std::process::ExitCode;
use std::time::Instant;

use potluck_bench::machines::{PlannedStep, plan_model};
use potluck_bench::step::gpt2;
use potluck_graph::ModelGraph;
use potluck_graph::model::gpt;
use potluck_parallel::ParallelOptions;
use potluck_parallel::planner::cards::CARDS;
use potluck_parallel::planner::plans::Plans;

fn main() -> ExitCode {
    let mut numbers = [("--nodes", 1_000), ("--batch", 8_192), ("--micro-batch", 8)];
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(argument) = arguments.next() {
        let value = arguments.next().and_then(|value| value.parse().ok());
        match (numbers.iter_mut().find(|(name, _)| *name == argument), value) {
            (Some((_, number)), Some(value)) => *number = value,
            _ => {
                eprintln!("there is no {argument} with a number; see the head of this file");
                return ExitCode::from(2);
            }
        }
    }
    let [nodes, batch, micro_batch] = numbers.map(|(_, number)| number);
    match planned(nodes, batch, micro_batch) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn planned(nodes: u32, batch: u32, micro_batch: u32) -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("machines.toml");
    fs::write(&path, machines(nodes))?;
    let began = Instant::now();
    let plans = Plans::new(ModelGraph::training(gpt(&gpt2())?, true)?);
    let options = ParallelOptions::default();
    let step =
        PlannedStep { options: &options, batch, micro_batch, fits_micro_batch: true, moments: 2 };
    let plan = plan_model(&path, plans, step)?;
    let seconds = began.elapsed().as_secs_f64();
    print!("{}", plan.table());
    println!("\n{} candidates in {seconds:.1} s", plan.proposal.tried);
    if let Ok(status) = fs::read_to_string("/proc/self/status")
        && let Some(peak) = status.lines().find(|line| line.starts_with("VmHWM"))
    {
        println!("{peak}");
    }
    Ok(())
}

/// File of unequal nodes: of each card in turn, some with a processor or a second card, behind
/// connections of 0.1 to 2.5 Gbit/s.
fn machines(nodes: u32) -> String {
    let mut text = "[network]\nrate_gbit_s = 1\nlatency_ms = 0.3\n".to_string();
    for node in 0..nodes {
        let card = CARDS[node as usize * 5 % CARDS.len()].name;
        let second = match node % 4 {
            0 => format!(", \"cpu:{}\"", 0.2 + 0.001 * f64::from(node)),
            1 => format!(", {card:?}"),
            _ => String::new(),
        };
        // 997 is a prime, so that rates come in no order.
        let rate = 0.1 + 2.4 * f64::from(node * 37 % 997) / 997.0;
        let latency_ms = 0.2 + 0.001 * f64::from(node % 211);
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "[[node]]\nname = \"n{node}\"\ndevices = [{card:?}{second}]\nmemory_gib = 32\n\
             rate_gbit_s = {rate}\nlatency_ms = {latency_ms}\n"
        );
    }
    text
}
