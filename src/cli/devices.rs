//! `potluck devices`: lists the devices of this machine and the certified kernels of each.

use serde_json::{Value, json};

use super::missing_driver;
use crate::ui::terminal::print_line;
use potluck_core::faults::Faults;
use potluck_core::format::counted;
use potluck_graph::Precision;
use potluck_kernels::autotune::cache::Summary;
use potluck_kernels::autotune::{KernelCache, KernelSelector, cache, catalog};
use potluck_kernels::device::{
    Adapter, AdapterKind, AdapterMemory, CooperativeMatrix, CooperativeSquare, DeviceError,
    Features, Gpu, HostInfo, Limits, MappedReadRates, ReadMethod, Selection, ShaderChecks, host,
    list_adapters, no_adapter, select,
};
use potluck_kernels::harness::Deviation;
use potluck_train::TrainError;

/// Prints the CPU device and every adapter, one entry per physical adapter. With `certify`, first
/// certifies all kernels on the adapter that its selector names, or on every listed adapter.
///
/// # Errors
/// Returns a `TrainError` if the selector names no adapter, or if an adapter cannot be opened or
/// fails.
pub fn run(as_json: bool, certify: Option<Option<&str>>) -> anyhow::Result<()> {
    let adapters = list_adapters();
    let mut failure = None;
    if let Some(selector) = certify {
        let faults = Faults::from_environment().map_err(TrainError::from)?;
        faults.check_kernels(&catalog::names()).map_err(TrainError::from)?;
        for adapter in chosen(&adapters, selector).map_err(TrainError::from)? {
            // A failure does not stop the other adapters; the first one is returned at the end.
            if let Err(error) = certify_all(&adapter, &faults) {
                failure.get_or_insert(error);
            }
        }
    }
    let host = HostInfo::query();
    let threads = host::threads();
    let text = if as_json {
        let entries: Vec<Value> = entries(&adapters).iter().map(DeviceEntry::json).collect();
        let cpu = json!({
            "selector": "cpu",
            "name": host.model,
            "threads": threads,
            "memory_bytes": host.memory,
        });
        serde_json::to_string_pretty(&json!({ "cpu": cpu, "adapters": entries }))? + "\n"
    } else {
        let mut blocks = vec![cpu_block(&host, threads)];
        for entry in entries(&adapters) {
            blocks.push(entry.block());
        }
        if adapters.is_empty() {
            blocks.push(format!("{}\n", no_adapter()));
        }
        let cards = adapters.iter().filter(|adapter| adapter.kind != AdapterKind::Software);
        let vendors: Vec<u32> = cards.map(|adapter| adapter.vendor).collect();
        for sentence in missing_driver::unlisted(&vendors) {
            blocks.push(format!("{sentence}\n"));
        }
        blocks.join("\n")
    };
    super::print(&text);
    match failure {
        Some(error) => Err(TrainError::from(error).into()),
        None => Ok(()),
    }
}

fn chosen(adapters: &[Adapter], selector: Option<&str>) -> Result<Vec<Adapter>, DeviceError> {
    let Some(selector) = selector else {
        let mut listed = Vec::new();
        for adapter in adapters {
            if adapter.merged_into.is_none() && adapter.usable().is_ok() {
                listed.push(adapter.clone());
            }
        }
        return Ok(listed);
    };
    match select(selector, adapters)? {
        Selection::Adapter(adapter) => Ok(vec![*adapter]),
        Selection::Cpu { .. } | Selection::Offered(_) => Err(DeviceError::BadSelector {
            selector: selector.into(),
            why: "the CPU device has no kernels to certify; name an adapter".into(),
        }),
    }
}

fn certify_all(adapter: &Adapter, faults: &Faults) -> Result<(), DeviceError> {
    print_line(&format!("certifying every kernel on {}", adapter.name));
    let mut gpu = Gpu::open(adapter, ShaderChecks::Disabled, Precision::Mixed)?;
    let mut kernels = KernelSelector::new(KernelCache::of(adapter));
    kernels.choose_read_method(&mut gpu)?;
    let certified = kernels.certify_all(&gpu, faults.kernels());
    for note in kernels.take_notes() {
        print_line(&note);
    }
    certified
}

fn known_of(adapter: &Adapter) -> KernelCache {
    let mut known = KernelCache::of(adapter);
    for note in known.take_notes() {
        print_line(&note);
    }
    known
}

/// Formats the rates of reading mapped memory.
fn mapped_reads_text(rates: MappedReadRates) -> String {
    let [mapped, own] = [rates.mapped, rates.own].map(gigabytes_text);
    let method = match (rates.method(), rates.streaming) {
        (ReadMethod::Streaming, Some(rate)) => {
            format!("; uncached, read by streaming loads at {}", gigabytes_text(rate))
        }
        _ => String::new(),
    };
    format!("{mapped} of mapped memory, {own} of the host's own{method}")
}

fn gigabytes_text(bytes_per_second: f64) -> String {
    format!("{:.1} GB/s", bytes_per_second * 1e-9)
}

/// Formats certification results: one line of counts, and one line for each unusual or switched-off
/// kernel.
fn kernels_lines(kernels: &Summary) -> Vec<(&'static str, String)> {
    let Summary { certified, unusual, off, full_size } = kernels;
    if certified.is_empty() && unusual.is_empty() && off.is_empty() {
        return vec![("certified", "no kernel yet: a run does it, or --certify".into())];
    }
    let mut counts = format!("{} kernels", certified.len());
    if !unusual.is_empty() {
        counts += &format!(", {} unusual", unusual.len());
    }
    counts += &match off.len() {
        0 => ", none is switched off".to_string(),
        count => format!(", {count} switched off"),
    };
    let mut lines = vec![("certified", counts)];
    if let Some(worst) = worst_of(certified) {
        lines.push(("deviation", format!("at most {worst}")));
    }
    if let Some(worst) = worst_of(full_size) {
        let calls = counted(full_size.len(), "call", "calls");
        lines.push(("full size", format!("{calls} checked: at most {worst}")));
    }
    for (kernel, figures) in unusual {
        lines.push(("unusual", format!("{kernel}: {figures}")));
    }
    for (kernel, why) in off {
        // A compiler's message may have more lines than fit.
        let first = why.lines().next().unwrap_or_default();
        lines.push(("off", format!("{kernel}: {first}")));
    }
    lines
}

/// Physical adapter: its preferred entry, and its entries of other APIs and drivers, which can be
/// selected too.
struct DeviceEntry<'a> {
    index: usize,
    adapter: &'a Adapter,
    /// `(index, adapter)` of the same adapter through other APIs and drivers.
    merged: Vec<(usize, &'a Adapter)>,
}

fn entries(all: &[Adapter]) -> Vec<DeviceEntry<'_>> {
    let mut entries = Vec::new();
    for (index, adapter) in all.iter().enumerate() {
        if adapter.merged_into.is_some() {
            continue;
        }
        let mut merged = Vec::new();
        for (other_index, other) in all.iter().enumerate() {
            if other.merged_into == Some(index) {
                merged.push((other_index, other));
            }
        }
        entries.push(DeviceEntry { index, adapter, merged });
    }
    entries
}

impl DeviceEntry<'_> {
    fn block(&self) -> String {
        let adapter = self.adapter;
        let mut lines = vec![("kind", adapter.kind.to_string())];
        if !adapter.driver.is_empty() {
            lines.push(("driver", adapter.driver.clone()));
        }
        lines.push(("memory", memory_text(adapter.memory)));
        lines.extend(limits_text(&adapter.limits()));
        lines.push(("features", features_text(&adapter.features())));
        let matrices = matrices(&adapter.cooperative_matrices());
        if !matrices.is_empty() {
            lines.push(("matrices", matrices.join(", ")));
        }
        lines.push(("mixed", mixed_text(adapter.cooperative_square())));
        for (index, other) in &self.merged {
            let name = if other.name == adapter.name { "" } else { other.name.as_str() };
            lines.push(("also", format!("{}, as {index} {name}", other.api).trim().into()));
        }
        match adapter.usable() {
            Ok(()) => {
                let known = known_of(adapter);
                if let Some(rates) = known.mapped_reads() {
                    lines.push(("readbacks", mapped_reads_text(rates)));
                }
                lines.extend(kernels_lines(&cache::summary(&known)));
            }
            Err(why) => lines.push(("not usable", why)),
        }
        block(&self.index.to_string(), &format!("{} on {}", adapter.name, adapter.api), &lines)
    }

    fn json(&self) -> Value {
        let adapter = self.adapter;
        let mut merged = Vec::new();
        for (index, other) in &self.merged {
            let entry =
                json!({ "selector": index.to_string(), "api": other.api, "name": other.name });
            merged.push(entry);
        }
        let known = known_of(adapter);
        let Summary { certified, unusual, off, full_size } = cache::summary(&known);
        let mut refused = Vec::new();
        for (kernel, why) in &off {
            refused.push(json!({ "kernel": kernel, "why": why }));
        }
        json!({
            "selector": self.index.to_string(),
            "name": adapter.name,
            "api": adapter.api,
            "kind": adapter.kind.to_string(),
            "driver": adapter.driver,
            "merged": merged,
            "usable": adapter.usable().is_ok(),
            "why_not": adapter.usable().err(),
            "memory_bytes": adapter.memory.bytes,
            "memory_free_bytes": adapter.memory.free,
            "memory_of_host": adapter.memory.of_host,
            "limits": limits_json(&adapter.limits()),
            "features": features_json(&adapter.features()),
            "cooperative_matrices": matrices(&adapter.cooperative_matrices()),
            "mixed_matrix_size": adapter.cooperative_square().map(|square| square.size),
            "mapped_reads": known.mapped_reads().map(|rates| json!({
                "mapped_bytes_per_s": rates.mapped,
                "own_bytes_per_s": rates.own,
                "streaming_bytes_per_s": rates.streaming,
                "method": rates.method(),
            })),
            "kernels": {
                "certified": certified.len(),
                "deviations": deviations_json(&certified),
                "unusual": deviations_json(&unusual),
                "switched_off": refused,
                "full_size": deviations_json(&full_size),
            },
        })
    }
}

fn worst_of(kernels: &[(String, Deviation)]) -> Option<Deviation> {
    kernels.iter().map(|(_, deviation)| *deviation).reduce(Deviation::worst)
}

fn deviations_json(kernels: &[(String, Deviation)]) -> Vec<Value> {
    let mut listed = Vec::new();
    for (kernel, Deviation { nmse, element }) in kernels {
        listed.push(json!({ "kernel": kernel, "nmse": nmse, "element": element }));
    }
    listed
}

fn cpu_block(host: &HostInfo, threads: usize) -> String {
    let mut lines = vec![("kind", format!("the built-in CPU device, {threads} threads"))];
    let memory = match host.memory {
        Some(bytes) => binary(bytes),
        None => "unknown".into(),
    };
    lines.push(("memory", format!("{memory}, the host's")));
    block("cpu", host.model.as_deref().unwrap_or("processor"), &lines)
}

/// Formats a selector and a name, and below them one labelled line per value.
fn block(selector: &str, name: &str, lines: &[(&str, String)]) -> String {
    let mut text = format!("{selector:>3}  {name}\n");
    for (label, value) in lines {
        text += &format!("     {label:<10} {value}\n");
    }
    text
}

fn memory_text(memory: AdapterMemory) -> String {
    let free = match (memory.bytes, memory.free) {
        (Some(bytes), Some(free)) if free < bytes => format!(", {} of it free", binary(free)),
        _ => String::new(),
    };
    match (memory.bytes, memory.of_host) {
        (Some(bytes), false) => binary(bytes) + &free,
        (Some(bytes), true) => format!("up to {} of the host's{free}", binary(bytes)),
        (None, true) => "the host's; how much of it is unknown".into(),
        (None, false) => "unknown; train.device_memory_mib sets it".into(),
    }
}

/// Describes the matrix products of a device in mixed precision.
fn mixed_text(square: Option<CooperativeSquare>) -> String {
    match square {
        Some(CooperativeSquare { size, .. }) => format!("matrix units, {size}x{size}x{size}"),
        None => "rounded operands without matrix units, no faster than f32".into(),
    }
}

fn limits_text(limits: &Limits) -> [(&'static str, String); 2] {
    let sizes = format!(
        "tensors of {}, buffers of {}",
        binary(limits.binding_bytes),
        binary(limits.buffer_bytes)
    );
    let kernels = format!(
        "{} storage buffers, {} invocations, {} shared, {} workgroups",
        limits.storage_buffers,
        limits.invocations,
        binary(limits.workgroup_bytes.into()),
        limits.workgroups
    );
    [("at most", sizes), ("kernels", kernels)]
}

fn limits_json(limits: &Limits) -> Value {
    json!({
        "binding_bytes": limits.binding_bytes,
        "buffer_bytes": limits.buffer_bytes,
        "workgroups": limits.workgroups,
        "storage_buffers": limits.storage_buffers,
        "workgroup_bytes": limits.workgroup_bytes,
        "invocations": limits.invocations,
        "immediate_bytes": limits.immediate_bytes,
    })
}

fn features_text(features: &Features) -> String {
    let mut all = Vec::new();
    match features.subgroups {
        Some((min, max)) if min == max => all.push(format!("subgroups of {min}")),
        Some((min, max)) => all.push(format!("subgroups of {min} to {max}")),
        None => {}
    }
    let named = [
        (features.f16, "f16"),
        (features.timestamps, "timestamps"),
        (features.cooperative_matrix, "cooperative matrix"),
        (features.mappable, "mappable storage"),
    ];
    for (has, name) in named {
        if has {
            all.push(name.to_string());
        }
    }
    if all.is_empty() { "none beyond the portable core".into() } else { all.join(", ") }
}

/// Returns the names of configurations of cooperative matrices without repetitions: drivers list
/// configurations that differ only in properties that kernels do not use.
fn matrices(configurations: &[CooperativeMatrix]) -> Vec<String> {
    let mut names: Vec<String> = configurations.iter().map(ToString::to_string).collect();
    names.sort();
    names.dedup();
    names
}

fn features_json(features: &Features) -> Value {
    json!({
        "f16": features.f16,
        "subgroups": features.subgroups.map(|(min, max)| [min, max]),
        "timestamps": features.timestamps,
        "cooperative_matrix": features.cooperative_matrix,
        "mappable": features.mappable,
    })
}

/// Formats a byte count in the largest binary unit that is not larger.
fn binary(bytes: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let unit = (1..units.len()).rev().find(|unit| bytes >> (10 * unit) > 0).unwrap_or(0);
    let value = bytes as f64 / (1u64 << (10 * unit)) as f64;
    let digits = usize::from(unit > 0 && value.fract() >= 0.05 && value.fract() < 0.95);
    format!("{value:.digits$} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_configuration_of_matrices_is_named_once() {
        let half = CooperativeMatrix { m: 16, n: 8, k: 16, operands: "f16", sums: "f32" };
        let single = CooperativeMatrix { k: 8, operands: "f32", ..half };
        let named = matrices(&[half, single, half]);
        assert_eq!(named, ["16x8x16 f16 to f32", "16x8x8 f32 to f32"]);
        assert!(matrices(&[]).is_empty());
    }

    #[test]
    fn sizes_are_short() {
        assert_eq!(binary(0), "0 bytes");
        assert_eq!(binary(16 << 10), "16 KiB");
        assert_eq!(binary((1 << 31) - 1), "2 GiB");
        assert_eq!(binary(3 << 29), "1.5 GiB");
        assert_eq!(binary(139 << 30), "139 GiB");
    }

    #[test]
    fn memory_says_whose_it_is() {
        let text = |bytes, of_host| memory_text(AdapterMemory { bytes, free: None, of_host });
        assert_eq!(text(Some(8 << 30), false), "8 GiB");
        assert_eq!(text(Some(8 << 30), true), "up to 8 GiB of the host's");
        assert!(text(None, false).contains("train.device_memory_mib"));
        assert!(text(None, true).contains("unknown"));
        let used = AdapterMemory { bytes: Some(8 << 30), free: Some(7 << 30), of_host: false };
        assert_eq!(memory_text(used), "8 GiB, 7 GiB of it free");
    }
}
