//! Communication of two nodes beside their computation: the step over a network at which the
//! gradients and parameters take as long as the passes, beside the step over one without a limit.

use std::error::Error;

use potluck_core::arithmetic::median;

use crate::program::Place;
use crate::settings::{Devices, GPT_EQUAL_BLOCKS, GPT2_SHAPE, Model, SecondNode, Setting};

/// Burst of the limit: messages are of a megabyte, and with shorter ones the timer of the limit,
/// which shares a core with a node, loses a part of the rate.
const BURST_US: u64 = 2_000;

/// Counted steps of a run.
const STEPS: usize = 8;

/// Both nodes with the whole model and half of the batch.
const HALVES: &str =
    "--nodes 2 --devices cpu --pipeline 1 --tensor 1 --set parallel.shares=[36,36]";

/// Prints for each model the factor by which communication as long as the computation makes a step
/// longer. The repeats with and without a limit take turns.
pub fn report(repeats: usize) -> Result<(), Box<dyn Error>> {
    for model in [&GPT_EQUAL_BLOCKS, &GPT2_SHAPE] {
        let (free_ms, parameters) = first_step(model)?;
        // Each node sends as many values as there are parameters: half of them are gradients for
        // the other node, half are parameters that it has updated.
        let bits = parameters * 32.0;
        let mbit_per_s = (bits / (free_ms * 1e3)).round() as u32;
        let mut factors = Vec::new();
        for _ in 0..repeats {
            let free = step_ms(model, None)?;
            let limited = step_ms(model, Some(mbit_per_s))?;
            println!(
                "{}: {free:.1} ms without a limit, {limited:.1} ms at {mbit_per_s} Mbit/s, which \
                 takes {:.1} ms",
                model.name,
                bits / (f64::from(mbit_per_s) * 1e3)
            );
            factors.push(limited / free);
        }
        let shown: Vec<f64> = factors.iter().map(|one| (one * 1000.0).round() / 1000.0).collect();
        println!(
            "{}: a step of {:.3} times the computation, median of {shown:?}",
            model.name,
            median(&factors)
        );
    }
    Ok(())
}

/// Milliseconds of a step without a limit, and the number of parameters.
fn first_step(model: &Model) -> Result<(f64, f64), Box<dyn Error>> {
    let ms = step_ms(model, None)?;
    let devices = Devices { name: "one node", selector: "cpu", second: None };
    let setting = Setting { model, devices: &devices, is_aside: false };
    Ok((ms, Place::new(&setting)?.parameters()?))
}

fn step_ms(model: &Model, mbit_per_s: Option<u32>) -> Result<f64, Box<dyn Error>> {
    let second = Some(SecondNode { selector: "cpu", mbit_per_s, burst_us: BURST_US });
    let devices = Devices { name: "two nodes", selector: "cpu", second };
    let setting = Setting { model, devices: &devices, is_aside: false };
    Place::new(&setting)?.step_ms(HALVES, STEPS)
}
