//! The longest submissions of a step by the device's clock, at two requested lengths, and the cost
//! of the shorter ones.

use serde_json::json;

use super::measures::{Findings, Measure};
use super::record::words;
use super::workshop::{Halt, Workshop};
use potluck_bench::profile::ProfileFigures;

/// Lengths in milliseconds: without a screen on the device, and with one.
const LENGTHS: [u32; 2] = [200, 20];
/// Largest ratio of a submission to the requested length, which is based on estimates.
const TOLERANCE: f64 = 2.0;

pub fn perform(shop: &Workshop) -> Result<Findings, Halt> {
    let mut measures = Vec::new();
    let mut details = serde_json::Map::new();
    for length in LENGTHS {
        let mut more = words(&format!(
            "--explain kernels --batch {} --set train.tune_s=0 --set train.submission_ms={length}",
            shop.batch()
        ));
        more.extend(shop.gpt2());
        let ended = shop.run(&shop.train(&shop.selector, &more))?;
        let profile = ProfileFigures::of_table(&ended.stdout);
        let Some(profile) = profile.filter(|_| ended.is_right()) else {
            let name = format!("step at {length} ms");
            measures.push(Measure::expected(&name, ended.end(), "exit status: 0", false));
            continue;
        };
        let name = format!("longest at {length} ms");
        measures.push(match profile.longest_submission_ms {
            Some(ms) if shop.times_count() => {
                Measure::at_most(&name, ms, TOLERANCE * f64::from(length), "ms")
            }
            Some(ms) => Measure::number(&name, ms, "ms"),
            None => Measure::fact(&name, "unknown: the device has no clock"),
        });
        measures.push(Measure::number(&format!("step at {length} ms"), profile.step_ms, "ms"));
        let row = json!({
            "step_ms": profile.step_ms,
            "longest_submission_ms": profile.longest_submission_ms,
        });
        details.insert(length.to_string(), row);
    }
    Ok(Findings { measures, details: details.into(), skipped: None })
}
