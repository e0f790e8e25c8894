//! Losses of the default model on the adapter, compared with the CPU device's.

use serde_json::json;

use super::measures::{Findings, Measure};
use super::record::{largest_difference, words};
use super::workshop::{Halt, Workshop};

/// Number of compared steps; fewer in a rehearsal.
const STEPS: usize = 200;
const TOY_STEPS: usize = 10;
/// Largest difference of the losses of a step: 4e-6 on llvmpipe, 8e-7 on an H100.
const DIFFERENCE_MAX: f64 = 1e-4;

pub fn perform(shop: &Workshop) -> Result<Findings, Halt> {
    let steps = shop.sized(TOY_STEPS, STEPS);
    let mut more = words(&format!("--steps {steps} --set schedule.kind=cosine"));
    if shop.is_toy {
        more.extend(shop.gpt2());
        more.extend(words("--set train.tune_s=0"));
    }
    let cpu = shop.train_in("cpu", "cpu", &more)?;
    let card = shop.train_in("card", &shop.selector, &more)?;
    let mut measures = vec![cpu.end("on the CPU", steps), card.end("on the device", steps)];
    let expected = cpu.losses();
    let losses = card.losses();
    if let Some(difference) = largest_difference(&losses, &expected) {
        let name = format!("largest difference of {} losses", losses.len());
        measures.push(Measure::at_most(&name, difference, DIFFERENCE_MAX, "nats"));
    }
    if let Some(last) = losses.last() {
        measures.push(Measure::number("last loss", *last, "nats"));
    }
    for (name, run) in [("CPU", &cpu), ("device", &card)] {
        if let Some(rate) = run.tokens_per_second() {
            measures.push(Measure::number(name, rate, "tokens/s"));
        }
    }
    let details = json!({ "cpu_losses": expected, "losses": losses });
    Ok(Findings { measures, details, skipped: None })
}
