//! Certification of every kernel, the time of compilation, and the contents of the caches.

use std::fs;

use serde_json::{Value, json};

use super::facts;
use super::measures::{Findings, Measure};
use super::workshop::{Halt, Workshop};

/// Number of kernels with the largest deviations in the file of the part.
const WORST: usize = 10;

pub fn perform(shop: &Workshop) -> Result<Findings, Halt> {
    let certified = shop.run(&["devices", "--certify", &shop.selector])?;
    let listed = shop.run(&["devices", "--json"])?;
    let end = certified.end();
    let mut measures =
        vec![Measure::expected("certification", end, "exit status: 0", certified.is_right())];
    let Some(entry) = facts::entry(&listed.stdout, &shop.selector) else {
        return Ok(Findings { measures, ..Findings::default() });
    };
    let kernels = &entry["kernels"];
    let count = kernels["certified"].as_f64().unwrap_or(0.0);
    let off = kernels["switched_off"].as_array().map_or(0, Vec::len);
    measures.push(Measure::at_least("kernels certified", count, 1.0, ""));
    measures.push(Measure::at_most("kernels switched off", off as f64, 0.0, ""));
    let worst = worst(&kernels["deviations"]);
    if let Some(first) = worst.first() {
        let nmse = first["nmse"].as_f64().unwrap_or(f64::NAN);
        measures.push(Measure::number("largest NMSE", nmse, ""));
    }
    measures.push(Measure::number("compiling and certifying", certified.seconds, "s"));
    let per_kernel = certified.seconds / count.max(1.0);
    measures.push(Measure::at_most("the same per kernel", per_kernel, 5.0, "s"));
    measures.extend(readbacks(&entry["mapped_reads"]));
    let details = json!({
        "switched_off": kernels["switched_off"],
        "unusual": kernels["unusual"],
        "worst": worst,
        "mapped_reads": entry["mapped_reads"],
        "cache_bytes": cache_sizes(shop)?,
    });
    Ok(Findings { measures, details, skipped: None })
}

/// Rates of reading mapped memory, and the gain of streaming loads where they are used.
fn readbacks(rates: &Value) -> Vec<Measure> {
    let Some(mapped) = rates["mapped_bytes_per_s"].as_f64() else { return Vec::new() };
    let Some(own) = rates["own_bytes_per_s"].as_f64() else { return Vec::new() };
    let mut measures = vec![
        Measure::number("reading mapped memory", mapped * 1e-9, "GB/s"),
        Measure::number("reading the host's own memory", own * 1e-9, "GB/s"),
    ];
    if rates["method"] == "streaming"
        && let Some(streaming) = rates["streaming_bytes_per_s"].as_f64()
    {
        measures.push(Measure::number("gain of streaming loads", streaming / mapped, "times"));
    }
    measures
}

/// Entries with the largest NMSE, the largest first.
pub(super) fn worst(deviations: &Value) -> Vec<Value> {
    let mut sorted = deviations.as_array().cloned().unwrap_or_default();
    let nmse = |entry: &Value| entry["nmse"].as_f64().unwrap_or(f64::INFINITY);
    sorted.sort_by(|one, other| nmse(other).total_cmp(&nmse(one)));
    sorted.truncate(WORST);
    sorted
}

/// Sizes of the files of the cache: records of kernels and compiled pipelines.
fn cache_sizes(shop: &Workshop) -> Result<Value, Halt> {
    let mut sizes = serde_json::Map::new();
    for entry in fs::read_dir(shop.cache)? {
        let entry = entry?;
        sizes.insert(entry.file_name().to_string_lossy().into(), entry.metadata()?.len().into());
    }
    Ok(sizes.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streaming_loads_are_told_where_they_are_used() {
        let mut rates = json!({
            "mapped_bytes_per_s": 1e8,
            "own_bytes_per_s": 1e10,
            "streaming_bytes_per_s": 2e9,
            "method": "streaming",
        });
        let gain = readbacks(&rates).pop().expect("the rates are known");
        assert_eq!((gain.name.as_str(), gain.value), ("gain of streaming loads", Some(20.0)));
        rates["method"] = "in_place".into();
        assert_eq!(readbacks(&rates).len(), 2);
        assert!(readbacks(&Value::Null).is_empty());
    }

    #[test]
    fn the_largest_deviations_come_first() {
        let deviations = json!([
            { "kernel": "a", "nmse": 1e-14 },
            { "kernel": "b", "nmse": 1e-11 },
            { "kernel": "c", "nmse": 0.0 },
        ]);
        let names: Vec<Value> =
            worst(&deviations).iter().map(|entry| entry["kernel"].clone()).collect();
        assert_eq!(names, ["b", "a", "c"]);
        assert!(worst(&Value::Null).is_empty());
    }
}
