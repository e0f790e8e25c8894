//! Gantt chart of a step of a run: reads the trace that `potluck train --trace` wrote, prints the
//! chart of its last complete step, and draws it to an SVG file if one is named.
//!
//! `cargo run --release --example pipeline_chart -- TRACE.json [CHART.svg] [TITLE]`

use std::error::Error;
use std::fs;

use potluck::gantt::chart_of_trace;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let trace = words.first().ok_or("name the file of a trace")?;
    let json = fs::read_to_string(trace).map_err(|why| format!("{trace}: {why}"))?;
    let mut chart = chart_of_trace(&json)?;
    if let Some(title) = words.get(2) {
        chart.title.clone_from(title);
    }
    print!("{}", chart.text(100));
    if let Some(path) = words.get(1) {
        fs::write(path, chart.svg()).map_err(|why| format!("{path}: {why}"))?;
    }
    Ok(())
}
