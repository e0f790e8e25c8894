//! `potluck devices`: what is here.

use serde_json::json;

use crate::device::{Adapter, Limits, driver_hint, list_adapters};

/// Prints the CPU device and every adapter, one line per physical one.
pub fn run(as_json: bool) -> anyhow::Result<()> {
    let adapters = list_adapters();
    let threads = rayon::current_num_threads();
    if as_json {
        let list: Vec<_> = adapters.iter().enumerate().map(describe).collect();
        let cpu = json!({ "selector": "cpu", "threads": threads });
        let text = serde_json::to_string_pretty(&json!({ "cpu": cpu, "adapters": list }))?;
        super::print(&(text + "\n"));
        return Ok(());
    }
    let mut text = format!("  cpu  the built-in CPU device, {threads} threads\n");
    for (index, adapter) in adapters.iter().enumerate() {
        if adapter.merged_into.is_none() {
            text += &lines_of(index, adapter, &adapters);
        }
    }
    if adapters.is_empty() {
        text += &format!("no GPU adapter was found: {}\n", driver_hint());
    }
    super::print(&text);
    Ok(())
}

fn lines_of(index: usize, adapter: &Adapter, all: &[Adapter]) -> String {
    let merged = all.iter().filter(|other| other.merged_into == Some(index));
    let also: Vec<&str> = merged.map(|other| other.api).collect();
    let also = if also.is_empty() { String::new() } else { format!(" (also {})", also.join(", ")) };
    let (name, api, kind) = (&adapter.name, adapter.api, adapter.kind);
    let mut lines = format!("{index:5}  {name} on {api}{also}, {kind}\n");
    if !adapter.driver.is_empty() {
        lines += &format!("       driver {}\n", adapter.driver);
    }
    let Limits { binding_bytes, buffer_bytes, workgroups, storage_buffers } = adapter.limits();
    lines += &format!(
        "       tensors up to {} MiB, buffers up to {} MiB, {workgroups} workgroups, \
         {storage_buffers} storage buffers per kernel\n",
        binding_bytes >> 20,
        buffer_bytes >> 20,
    );
    if let Err(why) = adapter.usable() {
        lines += &format!("       not usable: {why}\n");
    }
    lines
}

fn describe((index, adapter): (usize, &Adapter)) -> serde_json::Value {
    let limits = adapter.limits();
    json!({
        "selector": index.to_string(),
        "name": adapter.name,
        "api": adapter.api,
        "kind": adapter.kind.to_string(),
        "driver": adapter.driver,
        "merged_into": adapter.merged_into,
        "usable": adapter.usable().is_ok(),
        "why_not": adapter.usable().err(),
        "limits": {
            "binding_bytes": limits.binding_bytes,
            "buffer_bytes": limits.buffer_bytes,
            "workgroups": limits.workgroups,
            "storage_buffers": limits.storage_buffers,
        },
    })
}
