//! Peak rates, and matrix products with every tile, from `potluck bench`.

use std::fs;

use serde_json::json;

use super::measures::{Findings, Measure};
use super::workshop::{Halt, Workshop};
use potluck_bench::{DeviceReport, Figure, FigureKind, Report};

/// Figures of the summary.
const FIGURES: [&str; 9] = [
    "peak.flops",
    "memory.triad",
    "transfer.upload",
    "transfer.readback",
    "dispatch.in_pass",
    "matmul.square_2048",
    "matmul.gpt2_mlp_up",
    "matmul.gpt2_mlp_up_dw",
    "matmul.gpt2_head_dx",
];
/// Parts of the benchmark suite.
const PARTS: &str = "peaks,matmul,precision";
/// Smallest share of the peak that the best product of a hardware GPU should reach.
const OF_PEAK: f64 = 0.4;

pub fn perform(shop: &Workshop) -> Result<Findings, Halt> {
    let Benchmarked { measure, report } = benchmark(shop, PARTS, "peaks-figures.json")?;
    let mut measures = vec![measure];
    let Some(device) = report else { return Ok(Findings { measures, ..Findings::default() }) };
    for figure in FIGURES.iter().filter_map(|name| device.figure(name)) {
        let measure = Measure::number(&figure.name, figure.median, &figure.unit);
        measures.push(measure.by(figure));
    }
    let mut products: Vec<&Figure> = device.figures.iter().collect();
    products.retain(|figure| figure.kind == FigureKind::Matmul);
    measures.push(Measure::at_least("products measured", products.len() as f64, 1.0, ""));
    let best = products.iter().max_by(|one, other| one.median.total_cmp(&other.median));
    if let Some(best) = best {
        let name = format!("best product, {}", best.on.as_deref().unwrap_or_default());
        measures.push(Measure::number(&name, best.median, &best.unit).by(best));
        if shop.times_count()
            && let Some(share) = best.of_peak
        {
            measures.push(Measure::at_least("the same, of the peak", share, OF_PEAK, ""));
        }
    }
    if let [Some(f32), Some(mixed)] =
        ["precision.f32", "precision.mixed"].map(|name| device.figure(name))
    {
        for figure in [f32, mixed] {
            measures.push(Measure::number(&figure.name, figure.median, &figure.unit).by(figure));
        }
        measures.push(Measure::number("gain of mixed", mixed.median / f32.median, "times"));
    }
    Ok(Findings { measures, details: json!(device), skipped: None })
}

impl Measure {
    /// Adds the name of the alternative of a figure.
    pub fn by(mut self, figure: &Figure) -> Self {
        if let Some(by) = &figure.by {
            self.text += &format!(" by {by}");
        }
        self
    }
}

/// Result of the benchmark suite on the adapter.
pub struct Benchmarked {
    /// Exit of the benchmark.
    pub measure: Measure,
    pub report: Option<DeviceReport>,
}

/// Runs parts of the benchmark suite on the adapter.
///
/// # Errors
/// Returns `Halt` as [`Workshop::run`] does.
pub fn benchmark(shop: &Workshop, parts: &str, file: &str) -> Result<Benchmarked, Halt> {
    let mut words = vec!["bench", "--only", parts, "--devices", &shop.selector, "--json", file];
    if shop.is_toy {
        words.push("--tiny");
    }
    let ended = shop.run(&words)?;
    let text = fs::read_to_string(shop.work.join(file)).unwrap_or_default();
    let report = Report::from_json(&text).ok().and_then(|mut report| report.devices.pop());
    let is_right = ended.is_right() && report.is_some();
    let measure = Measure::expected("benchmark", ended.end(), "exit status: 0", is_right);
    Ok(Benchmarked { measure, report })
}

/// Returns the peak rates in GFLOP/s and GB/s, if the part is complete.
pub fn known(shop: &Workshop) -> Option<(f64, f64)> {
    let report = super::report::read(shop.place, super::parts::HardwarePart::Peaks)?;
    let device: DeviceReport = serde_json::from_value(report.details).ok()?;
    Some((device.figure("peak.flops")?.median, device.figure("memory.triad")?.median))
}
