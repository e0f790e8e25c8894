//! Steps of GPT-2 124M with untuned and with tuned kernels, and the time of each kernel compared
//! with the roofline.

use serde_json::{Value, json};

use super::certification::worst;
use super::facts;
use super::measures::{Findings, Measure};
use super::parts::HardwarePart;
use super::peaks;
use super::record::{Trained, words};
use super::report;
use super::workshop::{Halt, Workshop};
use potluck_bench::profile::{KernelFigures, ProfileFigures};

/// Name of the run with timed kernels.
const TUNED: &str = "tuned";
const STEPS: usize = 20;
const TOY_STEPS: usize = 4;
/// Smallest share of a step in which a hardware GPU should be busy.
const BUSY: f64 = 0.9;
/// Largest relative deviation of the loss in mixed precision.
const MIXED_LOSS: f64 = 0.005;
/// Number of kernels in the summary: those that lose the most time.
const SLOW: usize = 3;

pub fn perform(shop: &Workshop) -> Result<Findings, Halt> {
    let steps = shop.sized(TOY_STEPS, STEPS);
    let seconds = shop.sized(1, 60);
    let mut sizes = words(&format!("--steps {steps} --batch {}", shop.batch()));
    sizes.extend(shop.gpt2());
    let with_tuning = |tune_s: usize| {
        let mut more = sizes.clone();
        more.extend(words(&format!("--set train.tune_s={tune_s}")));
        more
    };
    let untuned = shop.train_in("untuned", &shop.selector, &with_tuning(0))?;
    let tuned = shop.train_in("tuned", &shop.selector, &with_tuning(seconds))?;
    let mut measures = Vec::new();
    for (name, run) in [("untuned", &untuned), (TUNED, &tuned)] {
        measures.push(run.end(name, steps));
        if let Some(rate) = run.tokens_per_second() {
            measures.push(Measure::number(&format!("{name} rate"), rate, "tokens/s"));
        }
    }
    measures.extend(in_mixed_precision(shop, &with_tuning(seconds), &tuned)?);
    if let Some(busy) = tuned.busy() {
        measures.push(if shop.times_count() {
            Measure::at_least("device busy", busy, BUSY, "of a step")
        } else {
            Measure::number("device busy", busy, "of a step")
        });
    }
    measures.extend(full_size(shop)?);
    let mut explain = shop.train(&shop.selector, &with_tuning(0));
    explain.extend(words("--explain kernels"));
    let ended = shop.run(&explain)?;
    let profile = ProfileFigures::of_table(&ended.stdout);
    let Some(profile) = profile.filter(|_| ended.is_right()) else {
        measures.push(Measure::expected("times of kernels", ended.end(), "a table", false));
        return Ok(Findings { measures, ..Findings::default() });
    };
    let kernels_ms: f64 = profile.kernels.iter().map(|kernel| kernel.ms).sum();
    measures.push(Measure::number("kernels of a step", kernels_ms, "ms"));
    let details = match peaks::known(shop) {
        Some(peak) => beside_roofline(&profile.kernels, peak, &mut measures),
        None => {
            measures.push(Measure::fact("roofline", "unknown: the part peaks is not done"));
            json!(profile.kernels)
        }
    };
    let details =
        json!({ "losses": tuned.losses(), "step_ms": profile.step_ms, "kernels": details });
    Ok(Findings { measures, details, skipped: None })
}

/// Measures of the same run in mixed precision.
fn in_mixed_precision(
    shop: &Workshop,
    options: &[String],
    tuned: &Trained,
) -> Result<Vec<Measure>, Halt> {
    let options = [options, &words("--precision mixed")].concat();
    let run = shop.train_in("mixed", &shop.selector, &options)?;
    let steps = shop.sized(TOY_STEPS, STEPS);
    let mut measures = vec![run.end("mixed", steps)];
    if let Some(rate) = run.tokens_per_second() {
        measures.push(Measure::number("mixed rate", rate, "tokens/s"));
        if let Some(exact) = tuned.tokens_per_second() {
            measures.push(Measure::number("gain of mixed", rate / exact, "times"));
        }
    }
    if let (Some(loss), Some(exact)) = (run.losses().last(), tuned.losses().last()) {
        let difference = (loss - exact).abs() / exact;
        measures.push(Measure::at_most("difference of its last loss", difference, MIXED_LOSS, ""));
    }
    Ok(measures)
}

/// Returns the measures of the kernels that the runs have checked at full size; runs on a software
/// adapter check none.
fn full_size(shop: &Workshop) -> Result<Vec<Measure>, Halt> {
    let listed = shop.run(&["devices", "--json"])?;
    let entry = facts::entry(&listed.stdout, &shop.selector).unwrap_or_default();
    let checks = &entry["kernels"]["full_size"];
    let Some(nmse) = worst(checks).first().and_then(|first| first["nmse"].as_f64()) else {
        return Ok(Vec::new());
    };
    let count = checks.as_array().map_or(0, Vec::len);
    Ok(vec![
        Measure::number("calls compared with f64 at full size", count as f64, ""),
        Measure::number("largest NMSE at full size", nmse, ""),
    ])
}

/// Returns the tokens per second of the tuned run, if the part is done.
pub fn known_rate(shop: &Workshop) -> Option<f64> {
    let report = report::read(shop.place, HardwarePart::Gpt2)?;
    let name = format!("{TUNED} rate");
    report.measures.iter().find(|measure| measure.name == name)?.value
}

/// Adds measures of all kernels and of the kernels that lose the most time; returns a row per
/// kernel.
fn beside_roofline(
    kernels: &[KernelFigures],
    peak: (f64, f64),
    measures: &mut Vec<Measure>,
) -> Value {
    let (flops, bytes) = peak;
    let mut rows = Vec::with_capacity(kernels.len());
    for kernel in kernels {
        rows.push((kernel, kernel.roofline_ms(flops, bytes)));
    }
    let sum: f64 = kernels.iter().map(|kernel| kernel.ms).sum();
    let bound: f64 = rows.iter().map(|(_, ms)| ms).sum();
    measures.push(Measure::number("the same by the roofline", bound, "ms"));
    measures.push(Measure::number("of the roofline", bound / sum, ""));
    rows.sort_by(|one, other| {
        let lost = |(kernel, ms): &(&KernelFigures, f64)| kernel.ms - ms;
        lost(other).total_cmp(&lost(one))
    });
    for (kernel, ms) in rows.iter().take(SLOW) {
        let text = format!("{:.3} ms, {ms:.3} by the roofline: {}", kernel.ms, kernel.kernel);
        measures.push(Measure::fact("loses time", text));
    }
    let mut listed = Vec::new();
    for (kernel, ms) in rows {
        listed.push(json!({ "figures": kernel, "roofline_ms": ms }));
    }
    listed.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_that_loses_the_most_time_comes_first() {
        let kernel = |name: &str, ms: f64, gflops: f64| KernelFigures {
            kernel: name.into(),
            count: 1,
            ms,
            gflops,
            gbs: 0.0,
        };
        let kernels = [kernel("long", 10.0, 900.0), kernel("slow", 5.0, 100.0)];
        let mut measures = Vec::new();
        let rows = beside_roofline(&kernels, (1000.0, 100.0), &mut measures);
        assert_eq!(rows[0]["figures"]["kernel"], "slow");
        assert_eq!(rows[0]["roofline_ms"], 0.5);
        assert_eq!(measures[0].value, Some(9.5));
        assert!(measures[2].text.ends_with("slow"), "{measures:?}");
    }
}
