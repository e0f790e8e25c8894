//! A large product with the checks of shaders, and as runs have it, without them.

use serde_json::json;

use super::measures::{Findings, Measure};
use super::peaks::{Benchmarked, benchmark};
use super::workshop::{Halt, Workshop};

pub fn perform(shop: &Workshop) -> Result<Findings, Halt> {
    let Benchmarked { measure, report } = benchmark(shop, "robustness", "robustness-figures.json")?;
    let mut measures = vec![measure];
    let Some(device) = report else { return Ok(Findings { measures, ..Findings::default() }) };
    let rate = |name: &str| device.figure(name).map(|figure| figure.median);
    if let (Some(checked), Some(trusted)) = (rate("robustness.checked"), rate("robustness.trusted"))
    {
        measures.push(Measure::number("with checks", checked, "GFLOP/s"));
        measures.push(Measure::number("without checks", trusted, "GFLOP/s"));
        measures.push(Measure::at_least("gain", trusted / checked, 0.95, "times"));
    }
    Ok(Findings { measures, details: json!(device), skipped: None })
}
