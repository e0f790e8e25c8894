//! Pipelines of a request: the blocks of each device, as given, recorded or measured.

pub(crate) mod checks;
mod forward;
mod measure;
mod measured_price;
mod shared_memory;
mod stage_memory;
#[cfg(test)]
mod tests;

pub use forward::{ForwardDevices, open_forward};
pub use measure::{MeasuredBlocks, measure_blocks};
pub(crate) use measure::{TIMING_MIN, part_of};
pub use measured_price::price_of;
pub(crate) use shared_memory::require_shared_memory;
pub(crate) use stage_memory::StageMemory;

use std::ops::Range;

use potluck_graph::Graph;

/// Returns the names of the first and the last block of each run: `embed to h.1 and h.3`.
pub fn names_of_runs(graph: &Graph, runs: &[Range<u32>]) -> String {
    let mut names = Vec::new();
    for run in runs {
        let first = &graph.blocks[run.start as usize];
        names.push(if run.len() == 1 {
            first.clone()
        } else {
            format!("{first} to {}", graph.blocks[run.end as usize - 1])
        });
    }
    names.join(" and ")
}
