//! A large product with the checks that wgpu adds to shaders, and without them, as in runs. The
//! checks of the driver (`robustBufferAccess`) are in both.

use serde_json::json;

use super::measures::{Findings, Measure};
use super::peaks::{Benchmarked, benchmark};
use super::workshop::{Halt, Workshop};

pub fn perform(shop: &Workshop) -> Result<Findings, Halt> {
    let Benchmarked { measure, report } = benchmark(shop, "robustness", "robustness-figures.json")?;
    let mut measures = vec![measure];
    let Some(device) = report else { return Ok(Findings { measures, ..Findings::default() }) };
    let rates = ["robustness.checked", "robustness.trusted"].map(|name| device.figure(name));
    if let [Some(checked), Some(trusted)] = rates {
        for (name, figure) in [("with checks", checked), ("without checks", trusted)] {
            measures.push(Measure::number(name, figure.median, &figure.unit).by(figure));
        }
        let gain = trusted.median / checked.median;
        measures.push(if shop.times_count() {
            Measure::at_least("gain", gain, 0.95, "times")
        } else {
            Measure::number("gain", gain, "times")
        });
    }
    Ok(Findings { measures, details: json!(device), skipped: None })
}
