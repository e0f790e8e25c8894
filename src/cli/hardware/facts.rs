//! Facts about the adapter and the machine from the driver and the vendor's tools.

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::measures::{Findings, Measure};
use super::workshop::{Halt, Workshop};
use potluck_bench::System;

/// Vendors' tools with their arguments, which are run if they are installed.
const TOOLS: [(&str, &[&str]); 4] = [
    (
        "nvidia-smi",
        &[
            "--query-gpu=name,driver_version,pci.bus_id,clocks.sm,clocks.max.sm,clocks.mem,\
              power.limit,temperature.gpu,memory.total,memory.used,pcie.link.gen.current,\
              pcie.link.width.current",
            "--format=csv",
        ],
    ),
    ("rocm-smi", &["--showproductname", "--showclocks", "--showmaxpower"]),
    ("vulkaninfo", &["--summary"]),
    ("system_profiler", &["SPDisplaysDataType"]),
];
/// Time limit of a tool.
const TOOL_TIME: Duration = Duration::from_secs(20);

pub fn perform(shop: &Workshop) -> Result<Findings, Halt> {
    let ended = shop.run(&["devices", "--json"])?;
    let entry = entry(&ended.stdout, &shop.selector);
    let Some(entry) = entry.filter(|_| ended.is_right()) else {
        let measure = Measure::expected("list of devices", ended.end(), "exit code 0", false);
        return Ok(Findings { measures: vec![measure], ..Findings::default() });
    };
    let mut measures = vec![
        Measure::fact("driver", entry["driver"].as_str().unwrap_or_default()),
        Measure::expected(
            "can run kernels",
            entry["why_not"].as_str().unwrap_or("yes"),
            "yes",
            entry["usable"] == true,
        ),
    ];
    for (name, key) in [("memory", "memory_bytes"), ("memory that is free", "memory_free_bytes")] {
        if let Some(bytes) = entry[key].as_f64() {
            measures.push(Measure::number(name, bytes / f64::from(1 << 30), "GiB"));
        }
    }
    let [least, most] = [0, 1].map(|end| &entry["features"]["subgroups"][end]);
    if !least.is_null() {
        measures.push(Measure::fact("subgroup sizes", format!("{least} to {most}")));
    }
    measures.push(Measure::fact("cooperative matrices", listed(&entry["cooperative_matrices"])));
    let tools = tools(shop)?;
    let details = json!({ "adapter": entry, "system": System::here(), "tools": tools });
    Ok(Findings { measures, details, skipped: None })
}

/// Returns the entry of an adapter in the output of `devices --json`.
pub fn entry(listed: &str, selector: &str) -> Option<Value> {
    let listed: Value = serde_json::from_str(listed).ok()?;
    let adapters = listed["adapters"].as_array()?;
    adapters.iter().find(|entry| entry["selector"] == selector).cloned()
}

fn listed(names: &Value) -> String {
    let mut texts = Vec::new();
    for name in names.as_array().into_iter().flatten() {
        texts.extend(name.as_str());
    }
    if texts.is_empty() { "none".into() } else { texts.join(", ") }
}

/// Runs the vendors' tools; missing ones are left out.
fn tools(shop: &Workshop) -> Result<Value, Halt> {
    let mut answers = serde_json::Map::new();
    for (tool, words) in TOOLS {
        let mut command = Command::new(tool);
        command.args(words);
        let deadline = shop.deadline.min(Instant::now() + TOOL_TIME);
        match shop.run_command(command, deadline, |_| Ok(())) {
            Ok(ended) => answers.insert(tool.into(), ended.stdout.into()),
            Err(halt) if halt.is_of_missing_program() => continue,
            Err(halt) => return Err(halt),
        };
    }
    Ok(answers.into())
}
