//! Two ranks: the adapter twice, and the adapter with the CPU device. Checks equal parameters, the
//! losses against one device's, and the share of a step in which ranks wait for each other.

use serde_json::{Value, json};

use super::measures::{Findings, Measure};
use super::record::{largest_difference, median, words};
use super::workshop::{Halt, Workshop};

const STEPS: usize = 50;
const TOY_STEPS: usize = 6;

pub fn perform(shop: &Workshop) -> Result<Findings, Halt> {
    let steps = shop.sized(TOY_STEPS, STEPS);
    // Hashes of the parameters of all ranks are compared, and a difference ends the run.
    let mut more = words(&format!(
        "--steps {steps} --set train.tune_s=0 --set faults.hash_every=2 \
         --set faults.on_mismatch=stop"
    ));
    if shop.is_toy {
        more.extend(shop.gpt2());
    }
    let alone = shop.train_in("alone", &shop.selector, &more)?;
    let mut measures = vec![alone.end("alone", steps)];
    let mut details = serde_json::Map::new();
    let card = &shop.selector;
    for (name, devices) in [("twice", format!("{card}*2")), ("with the CPU", format!("{card},cpu"))]
    {
        let run = shop.train_in(&name.replace(' ', "-"), &devices, &more)?;
        let end = run.end(&format!("{name}: steps with equal hashes"), steps);
        measures.push(end);
        if let Some(difference) = largest_difference(&run.losses(), &alone.losses()) {
            let what = format!("{name}: difference of a loss from one device's");
            measures.push(Measure::at_most(&what, difference, 1e-3, "nats"));
        }
        if let Some(share) = median(run.steps.iter().filter_map(waiting).collect()) {
            measures.push(Measure::number(&format!("{name}: waiting"), share, "of a step"));
        }
        details.insert(name.into(), json!({ "losses": run.losses(), "last": run.steps.last() }));
    }
    Ok(Findings { measures, details: details.into(), skipped: None })
}

/// Share of a step, over all ranks, in which they wait.
fn waiting(step: &Value) -> Option<f64> {
    let mut waited = 0.0;
    let mut time = 0.0;
    for rank in step["ranks"].as_array()? {
        let work = rank["work_ms"].as_f64()?;
        let wait = rank["wait_ms"].as_f64()?;
        waited += wait;
        time += work + wait;
    }
    if time > 0.0 { Some(waited / time) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_wait_for_a_share_of_their_time() {
        let rank = |work: f64, wait: f64| json!({ "work_ms": work, "wait_ms": wait });
        assert_eq!(waiting(&json!({ "ranks": [rank(6.0, 2.0), rank(2.0, 6.0)] })), Some(0.5));
        assert_eq!(waiting(&json!({ "loss": 1.0 })), None);
    }
}
